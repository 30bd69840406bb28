"""Race chunks to and from object stores (S3, WebDAV): our link and the whole tier against obstore
and a socket.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import numpy as np
import obstore
from ground import Plan
from harness import MIB, Figure, say
from limits import Bytes
from obstore.store import HTTPStore, ObjectStore, S3Store
from remote_ground import (
    Made,
    Side,
    Turns,
    both_ways,
    link_side,
    socket_side,
    tier_side,
)

from pagoda.tiers.remote.object_store import ObjectStoreClient
from testbed.programs import DAV_MODULE, lacking
from testbed.servers import (
    BUCKET,
    Server,
    moto_s3,
    nginx_dav,
)


@dataclass(frozen=True)
class Engine:
    """An object store: how to start it, how the two sides connect to it, how to empty it."""

    name: str
    needs: tuple[str, ...]  # programs and modules
    serve: Callable[[], AbstractContextManager[Server]]
    remote: Callable[[Server, str], ObjectStoreClient]  # of a prefix
    plain: Callable[[Server], ObjectStore]
    clear: Callable[[Server, ObjectStore], None]
    turn_bytes: int
    # None: as obstore decides (above 5 MiB); otherwise what the server supports
    multipart: bool | None


_ANYBODY = {
    "access_key_id": "any",
    "secret_access_key": "any",
    "region": "us-east-1",
}


def _s3_remote(server: Server, prefix: str) -> ObjectStoreClient:
    options = {"endpoint": server.url, "allow_http": "true"}
    return ObjectStoreClient(
        f"s3://{BUCKET}", prefix=prefix, name="s3", options=options | _ANYBODY
    )


def _s3_plain(server: Server) -> ObjectStore:
    return S3Store(
        BUCKET,
        endpoint=server.url,
        client_options={"allow_http": True},
        **_ANYBODY,
    )


def _s3_clear(_: Server, store: ObjectStore) -> None:
    for listed in obstore.list(store):
        obstore.delete(store, [each["path"] for each in listed])


def _dav_remote(server: Server, prefix: str) -> ObjectStoreClient:
    return ObjectStoreClient(f"{server.url}/", prefix=prefix, name="webdav")


def _dav_plain(server: Server) -> ObjectStore:
    return HTTPStore.from_url(server.url, client_options={"allow_http": True})


def _dav_clear(server: Server, _: ObjectStore) -> None:
    for each in (server.root / "files").iterdir():
        shutil.rmtree(each)


S3 = Engine(
    "s3",
    ("moto",),
    moto_s3,
    _s3_remote,
    _s3_plain,
    _s3_clear,
    32 * MIB,
    None,
)
WEBDAV = Engine(
    "webdav",
    ("nginx", DAV_MODULE.name),
    nginx_dav,
    _dav_remote,
    _dav_plain,
    _dav_clear,
    128 * MIB,
    False,
)


class PlainObjects:
    """obstore in plain use: a chunk is an object of `bytes`."""

    def __init__(self, store: ObjectStore, multipart: bool | None) -> None:
        self.store = store
        self.multipart = multipart
        self.how = f"obstore {obstore.__version__}, 1 call"

    def put(self, _: int, key: bytes, source: Bytes) -> None:
        """Put a copy as `bytes`."""
        obstore.put(
            self.store,
            f"plain/{key.hex()}",
            source.tobytes(),
            use_multipart=self.multipart,
        )

    def get(self, _: int, key: bytes, slot: Bytes) -> None:
        """Get, and copy to the destination."""
        slot[:] = np.frombuffer(
            obstore.get(self.store, f"plain/{key.hex()}").bytes(), np.uint8
        )


def object_figures(plan: Plan, engine: Engine, nbytes: int) -> list[Figure]:
    """Race puts and gets of chunks of `nbytes`."""
    if missing := lacking(*engine.needs):
        say(f"{missing}; the figures of {engine.name} are skipped")
        return []
    turns = Turns(
        plan,
        nbytes,
        min(engine.turn_bytes, 32 * MIB) if plan.quick else engine.turn_bytes,
    )
    with engine.serve() as server:
        store = engine.plain(server)
        plain = PlainObjects(store, engine.multipart)

        def sides(stack: ExitStack) -> Mapping[str, Side]:
            return {
                "link": link_side(
                    stack, turns, engine.remote(server, "link"), server.pid
                ),
                "tier": tier_side(
                    stack, turns, engine.remote(server, "tier"), server.pid
                ),
                "socket": socket_side(stack, turns),
                "obstore": Side(
                    turns.putting(plain.put),
                    turns.getting(plain.get),
                    server.pid,
                    plain.how,
                ),
            }

        def clear() -> None:
            engine.clear(server, store)

        def figures(verb: str, made: Made) -> list[Figure]:
            size = f"{verb}_{nbytes // MIB}mib"
            return [
                made(f"{engine.name}_{size}_vs_obstore", "link", "obstore", 1.5),
                made(f"{engine.name}_{size}_vs_socket", "link", "socket", None),
                made(
                    f"{engine.name}_tier_{size}_vs_obstore",
                    "tier",
                    "obstore",
                    1.5,
                ),
            ]

        return both_ways(turns, sides, clear, clear, figures)
