"""Makes the engine that a remote tier's configuration names. Libraries of engines are imported here, when needed."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from pagoda.errors import ConfigError, StoreError
from pagoda.tiers.remote.store_client import Remote

__all__ = ["remote_of"]

_LONGEST_PASSWORD_BYTES = 4096
_SETTLE_SECONDS = 0.05


def remote_of(
    kind: str,
    url: str,
    *,
    name: str,
    prefix: str,
    ttl_seconds: float | None,
    options: Mapping[str, str],
    password_file: str,
) -> Remote:
    """Return the engine behind a URL; reads `password_file` (empty: none), connects to nothing.

    Args:
        kind: "redis" or "objects".
        url: without the parameters that are ours.
        options: for the client of an object store.

    Raises:
        ConfigError: the password cannot be read, or the URL cannot stand.
        StoreError: the engine's library is not installed; says how to install it.
    """
    if password_file:
        url = _with_password(url, _password_in(password_file))
    try:
        if kind == "redis":
            from pagoda.tiers.remote.redis import RedisRemote

            return RedisRemote(url, prefix=prefix, ttl_seconds=ttl_seconds, name=name)
        from pagoda.tiers.remote.objects import ObjectsRemote

        return ObjectsRemote(url, prefix=prefix, name=name, options=options)
    except ModuleNotFoundError as missing:
        raise StoreError(str(missing)) from None
    except ConfigError:
        raise
    except ValueError as trouble:
        raise ConfigError(str(trouble)) from None


def _password_in(file: str) -> str:
    """Return what stands in a file, without the end of its line."""
    try:
        with Path(file).open("rb") as stream:
            text = stream.read(_LONGEST_PASSWORD_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as trouble:
        why = trouble.strerror if isinstance(trouble, OSError) else "is not UTF-8 text"
        raise ConfigError(f"password_file = {file}: cannot be read: {why}") from None
    password = text.rstrip("\r\n")
    if not password or len(text) > _LONGEST_PASSWORD_BYTES:
        raise ConfigError(f"password_file = {file}: {'is too long' if password else 'is empty'}")
    return password


def _with_password(url: str, password: str) -> str:
    """Return `url` with a password beside its user's name, if it has one."""
    parts = urlsplit(url)
    user, _, place = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{place}"))


def _settle() -> None:
    """Give obstore's threads the time to let go of Python's lock after their last request.

    A process that ends while one of them waits for it is aborted by the system: 4 of 40 that asked once and ended.
    """
    if "obstore" in sys.modules:
        time.sleep(_SETTLE_SECONDS)


atexit.register(_settle)
