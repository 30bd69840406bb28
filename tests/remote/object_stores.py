"""Shared by the tests of object stores: stores of each kind, destinations of reads, malicious
stores.
"""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pytest

from pagoda.codec import HEADER_BYTES
from pagoda.tiers.remote.object_store import (
    ObjectStoreClient,
    ObjectStoreConnection,
)
from pagoda.tiers.remote.store_client import (
    GetRequest,
    PutRequest,
    PutResult,
    RefusedError,
)
from testbed.patience import Patience
from testbed.servers import BUCKET, Server
from tests.remote.evil import Lie, LyingHttp

Array = npt.NDArray[np.uint8]
ENOUGH_SECONDS = 60.0  # for calls that must work, on a busy machine
SHORT_SECONDS = 0.5  # for calls that must fail
SLACK_SECONDS = 4.0  # of a busy machine
MIB = 1 << 20
# the most that a malicious server may make this process allocate beyond its need
MALICE_BYTES = 48 * MIB
NAMESPACE = bytes(range(32))


def until(seconds: float = ENOUGH_SECONDS) -> float:
    return time.monotonic() + seconds


def keys(count: int, salt: int = 0) -> list[bytes]:
    return [
        bytes([nth % 256, nth // 256, salt]) + bytes(29) for nth in range(count)
    ]


def noise(nbytes: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


PAGE = noise(HEADER_BYTES, 99)


BY_OBSTORE = {"allow_invalid_certificates": "false"}


class Room:
    """The destination of a get: a page, and `nbytes` with a guard after them."""

    def __init__(self, nbytes: int, wanted: bool = True) -> None:
        self.page: Array = np.zeros(HEADER_BYTES, np.uint8)
        self.memory: Array = np.full(nbytes + 64, 7, np.uint8)
        self.nbytes = nbytes
        self.wanted = wanted
        self.seen: Array | None = None

    def place(self) -> Array | None:
        self.seen = self.page.copy()
        return self.memory[: self.nbytes] if self.wanted else None

    @property
    def wall_stands(self) -> bool:
        return bool((self.memory[self.nbytes :] == 7).all())


def put(
    connection: ObjectStoreConnection,
    key: bytes,
    stored: Array,
    usable: bool = True,
    seconds: float = ENOUGH_SECONDS,
) -> PutResult:
    (claim,) = connection.claim(NAMESPACE, [key], until(seconds))
    return claim or connection.put(
        PutRequest(NAMESPACE, key, PAGE, stored, lambda: usable), until(seconds)
    )


def get(
    connection: ObjectStoreConnection,
    key: bytes,
    room: Room,
    seconds: float = ENOUGH_SECONDS,
) -> int | None:
    return connection.get(
        GetRequest(NAMESPACE, key, room.page, room.place), until(seconds)
    )


def s3_options(url: str) -> dict[str, str]:
    return {
        "endpoint": url,
        "region": "us-east-1",
        "access_key_id": "AKIA",
        "secret_access_key": "HUSHHUSH",
    }


# of servers, and their options; "by obstore" has one with which chunks do not go over a connection
# of our own
KINDS: dict[str, dict[str, str]] = {
    "s3": {},
    "s3 by obstore": {"request_payer": "false"},
    "dav": {},
    "dav by obstore": BY_OBSTORE,
}


class Store:
    """One kind of store: a server and its address, also through another port."""

    def __init__(self, kind: str, server: Server) -> None:
        self.kind = kind.split()[0]
        self.server = server
        self._options = KINDS[kind]

    def remote(
        self, port: int | None = None, prefix: str = "pagoda"
    ) -> ObjectStoreClient:
        at = f"http://127.0.0.1:{port or self.server.port}"
        if self.kind == "s3":
            options = s3_options(at) | self._options
            return ObjectStoreClient(
                f"s3://{BUCKET}/deep/er", prefix=prefix, options=options
            )
        return ObjectStoreClient(
            f"{at}/deep/er/", prefix=prefix, options=self._options
        )

    def plain(self, method: str, path: str, body: bytes = b"") -> int:
        """Send a plain request below the path of the URL."""
        client = http.client.HTTPConnection(
            "127.0.0.1", self.server.port, timeout=20
        )
        bucket = f"/{BUCKET}" if self.kind == "s3" else ""
        with contextlib.closing(client):
            client.request(
                method, f"{bucket}/deep/er/{path}", body=body, headers=_AUTHORIZED
            )
            return client.getresponse().status


_AUTHORIZED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=any/20200101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, "
    "Signature=0"
}


class Timed:
    """Measure the time of a block; it must be within its deadline on an idle machine."""

    def __enter__(self) -> Timed:
        self.patience = Patience(SHORT_SECONDS + SLACK_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = self.patience.waited
        assert not self.patience.ended, self.patience.said()


@contextlib.contextmanager
def liar(
    lies: dict[str, bytes | Callable[[str], Lie | None]],
    options: Mapping[str, str] = {},
) -> Iterator[tuple[LyingHttp, ObjectStoreClient]]:
    """A malicious object store, and the remote that treats it as WebDAV."""
    server = LyingHttp()
    for method, lie in lies.items():
        server.lies[method] = (
            lie if callable(lie) else (lambda _, answer=lie: [answer])
        )
    try:
        yield (
            server,
            ObjectStoreClient(
                f"http://127.0.0.1:{server.port}/", options=options
            ),
        )
    finally:
        server.close()


def trouble(work: Callable[[], object]) -> Exception:
    """Return the error of a call that must fail: in time, in one short line."""
    with Timed(), pytest.raises((OSError, RefusedError)) as raised:
        work()
    said = str(raised.value)
    assert "\n" not in said
    assert len(said) < 300
    assert "HUSHHUSH" not in said
    return raised.value


def eventually(happens: Callable[[], bool], seconds: float = 10.0) -> bool:
    patience = Patience(seconds)
    while not happens() and not patience.ended:
        time.sleep(0.02)
    return happens()
