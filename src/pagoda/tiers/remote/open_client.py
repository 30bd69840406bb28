"""Make the client for the URL of a remote tier. The libraries of the stores are imported here, when
needed.

To add a store: write a client with the methods of `store_client.StoreClient`, make it here, name
its scheme in `config.remote_urls` and its options in `store_urls`, and run the conformance suite of
`pagoda.testing` on it.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Mapping

from pagoda.base.errors import ConfigError, MissingLibraryError
from pagoda.base.urls import RemoteUrl
from pagoda.tiers.remote.store_client import StoreClient
from pagoda.tiers.remote.store_urls import password_in

_SETTLE_SECONDS = 0.05


def open_client(
    kind: str,
    url: str,
    *,
    name: str,
    prefix: str,
    ttl_seconds: float,
    options: Mapping[str, str],
    password_file: str,
    second_sight: bool = False,
    ranks: bool = False,
    look_seconds: float = 0.05,
) -> StoreClient:
    """Return the client of a store; reads `password_file` (empty: none), connects to nothing.

    Args:
        kind: "redis", "objects", "pagoda" or "mooncake".
        url: the URL without the parameters that are for PagodaKV.
        ttl_seconds, ranks: see RedisClient.
        options: for obstore, the client of object stores; for a Mooncake pool "segment" (bytes) and
            "protocol"; for a pagoda serve "proof", if it gets the token itself.
        second_sight: see RedisClient; only for Redis.
        look_seconds: how long a caller waits for a lookup; a single slow node is not waited for
            that long.

    Raises:
        ConfigError: the password cannot be read, or the URL is invalid.
        MissingLibraryError: the library of the store is not installed; says how to install it.
    """
    try:
        if kind == "redis":
            from pagoda.tiers.remote.redis import RedisClient, RedisOptions

            settings = RedisOptions(
                prefix=prefix,
                ttl_seconds=ttl_seconds,
                ranks=ranks,
                second_sight=second_sight,
                name=name,
                password_file=password_file,
            )
            layout = RemoteUrl.of(url).layout
            if layout == "pool":
                from pagoda.tiers.remote.redis_pool import RedisPoolClient

                return RedisPoolClient(url, look_seconds=look_seconds, **settings)
            if layout == "cluster":
                from pagoda.tiers.remote.redis_cluster import RedisClusterClient

                return RedisClusterClient(
                    url, look_seconds=look_seconds, **settings
                )
            return RedisClient(url, **settings)
        url = url_with_password(url, password_file)
        if kind == "pagoda":
            from pagoda.tiers.remote.pagoda_server import PagodaServerClient

            return PagodaServerClient(
                url, name=name, sends_token="proof" in options
            )
        if kind == "mooncake":
            from pagoda.tiers.remote.mooncake import MooncakeClient

            size = int(options.get("segment", "0"))
            protocol = options.get("protocol", "tcp")
            return MooncakeClient(
                url,
                prefix=prefix,
                name=name,
                segment_bytes=size,
                protocol=protocol,
            )
        from pagoda.tiers.remote.object_store import ObjectStoreClient

        return ObjectStoreClient(url, prefix=prefix, name=name, options=options)
    except ModuleNotFoundError as missing:
        raise MissingLibraryError(str(missing)) from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


def url_with_password(url: str, password_file: str) -> str:
    """Return `url` with the password from a file (empty: none) after its user name. ConfigError:
    unreadable file.
    """
    if not password_file:
        return url
    return RemoteUrl.of(url).with_password(password_in(password_file))


def _settle() -> None:
    """Give obstore's threads time to release Python's interpreter lock after their last request.

    A process that exits while one of them waits for the lock is aborted; this happened to 4 of 40
    processes.
    """
    if "obstore" in sys.modules:
        time.sleep(_SETTLE_SECONDS)


atexit.register(_settle)
