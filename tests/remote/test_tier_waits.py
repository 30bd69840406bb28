"""What a remote tier waits for, and what it does not."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from urllib.parse import SplitResult

import numpy as np
import pytest

from pagoda.base.metrics import Reason
from pagoda.config.remote_urls import parse
from pagoda.layout import KVLayout
from pagoda.slab import aligned
from pagoda.testing import FakeClock
from pagoda.tiers.remote.http import HttpConnection
from pagoda.tiers.remote.object_store import ObjectStoreClient
from pagoda.tiers.remote.redis import RedisClient, RedisConnection
from pagoda.tiers.remote.store_client import StoreClient
from testbed.patience import Patience, wait_until
from testbed.servers import Server, free_port
from tests.remote.chunks import (
    DEADLINE_SECONDS,
    PATIENT_SECONDS,
    ROOT,
    SMALL,
    chunks_of,
    ends,
    fresh_prefix,
    keys_of,
    load,
    saved,
    tier_on,
)
from tests.remote.proxy import STALLED, Proxy, through


def test_a_connection_that_was_cut_while_nothing_moved_costs_no_miss(
    server: Server, proxy: Proxy
) -> None:
    prefix = fresh_prefix()
    keys = keys_of(3)
    saved(RedisClient(server.url, prefix=prefix), keys)
    with tier_on(through(proxy, prefix), connections=1) as tier:
        for reset in (False, True):
            assert load(tier, keys, seconds=PATIENT_SECONDS) == [None] * 3
            proxy.cut(reset=reset)
            wait_until(lambda: proxy.open_connections == 0)
        assert load(tier, keys, seconds=PATIENT_SECONDS) == [None] * 3
        for reason in Reason:
            assert not tier.stats()[f"miss_{reason}"]


def test_a_lookup_waits_no_longer_than_its_deadline_and_a_late_answer_serves_the_next(
    server: Server, proxy: Proxy
) -> None:
    prefix = fresh_prefix()
    keys = keys_of(3)
    saved(RedisClient(server.url, prefix=prefix), keys)
    with tier_on(
        through(proxy, prefix), look_seconds=0.05, deadline_seconds=20.0
    ) as tier:
        wait_until(lambda: tier.match_prefix(keys, namespace=ROOT) == 3)
        others = keys_of(3, chain=1)
        saved(RedisClient(server.url, prefix=prefix), others)
        proxy.both(STALLED)
        patience = Patience(10.0)
        assert tier.match_prefix(others, namespace=ROOT) == 0
        # half of the deadline of the question itself
        assert not patience.ended, patience.said()
        assert tier.stats()["miss_deadline"] >= 1
        proxy.heal()
        wait_until(lambda: tier.match_prefix(others, namespace=ROOT) == 3)
        assert tier.stats()["miss_io_error"] == 0
        assert not tier.resting


def test_what_is_not_there_is_asked_once_in_a_while(proxy: Proxy) -> None:
    clock = FakeClock()
    absent = keys_of(4)
    with tier_on(through(proxy, fresh_prefix()), clock=clock) as tier:
        assert tier.match_prefix(absent, namespace=ROOT) == 0
        asked = proxy.traffic
        for _ in range(20):
            assert not tier.match_prefix(absent, namespace=ROOT)
        assert proxy.traffic == asked
        clock.advance(0.15)  # what is stored meanwhile is found soon
        assert tier.match_prefix(absent, namespace=ROOT) == 0
        assert proxy.traffic > asked


def test_an_answer_that_is_older_than_a_store_does_not_hide_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = keys_of(1)
    ask = RedisConnection.find
    overtaken = threading.Event()
    with tier_on(RedisClient(server.url, prefix=fresh_prefix())) as tier:

        def stored_meanwhile(
            self: RedisConnection,
            namespace: bytes,
            keys: Sequence[bytes],
            deadline: float,
        ) -> int:
            found = ask(self, namespace, keys, deadline)
            if not overtaken.is_set():
                overtaken.set()
                assert all(
                    end.ok for end in ends(tier.store(chunks_of([key]), ROOT))
                )
            return found

        monkeypatch.setattr(RedisConnection, "find", stored_meanwhile)
        tier.match_prefix([key], namespace=ROOT)
        assert overtaken.is_set()
        assert tier.match_prefix([key], namespace=ROOT) == 1


def test_a_machine_without_the_codec_takes_nothing_away_from_those_who_have_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RedisClient(server.url, prefix=fresh_prefix())
    keys = keys_of(2)
    zeros = KVLayout.opaque(4, 8192, "chunks that become smaller")
    with tier_on(remote, zeros, codec="zstd") as tier:
        for key in keys:
            assert tier.put(key, np.zeros(8192, np.uint8), namespace=ROOT)
    with tier_on(remote, zeros) as tier:
        with monkeypatch.context() as elsewhere:
            elsewhere.setitem(sys.modules, "zstandard", None)
            assert tier.get(keys[0], namespace=ROOT) is None
        assert tier.stats()["miss_failed_check"] == 1
    with tier_on(remote, zeros) as tier:
        assert tier.get(keys[0], namespace=ROOT) is not None


def bucket(at: str) -> ObjectStoreClient:
    options = {
        "endpoint": f"http://{at}",
        "access_key_id": "a",
        "secret_access_key": "b",
    }
    return ObjectStoreClient("s3://bucket", options=options)


ENGINES: dict[str, Callable[[str], StoreClient]] = {
    "redis": lambda at: RedisClient(f"redis://{at}"),
    "http": lambda at: ObjectStoreClient(f"http://{at}/"),
    "https": lambda at: ObjectStoreClient(f"https://{at}/"),
    "s3": bucket,
}


@pytest.mark.parametrize("engine", ENGINES)
def test_close_ends_connections_that_are_being_made(engine: str) -> None:
    keys = keys_of(4)
    # the kernel accepts for it, and it never answers
    with socket.create_server(("127.0.0.1", 0)) as silent:
        remote = ENGINES[engine](f"127.0.0.1:{silent.getsockname()[1]}")
        with tier_on(remote, deadline_seconds=60.0) as tier:
            saves = tier.store(chunks_of(keys[:2]), ROOT)
            loads = tier.load(
                keys[2:], [aligned(65536) for _ in keys[2:]], namespace=ROOT
            )
            time.sleep(0.3)  # all of them wait for the first answer
            for future in (*saves[:1], *loads[:1]):
                assert not future.done()
            patience = Patience(5.0)
            tier.close(10.0)
            assert not patience.ended, patience.said()
            for done in ends([*saves, *loads], 0.1):
                assert not done.ok


@pytest.mark.parametrize("engine", ["http", "https"])
def test_close_ends_connections_that_are_not_yet_begun(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    making = threading.Event()
    closed = threading.Event()
    init = HttpConnection.__init__

    def slowly(connection: HttpConnection, origin: SplitResult) -> None:
        making.set()
        assert closed.wait(30)
        init(connection, origin)

    monkeypatch.setattr(HttpConnection, "__init__", slowly)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        remote = ENGINES[engine](f"127.0.0.1:{silent.getsockname()[1]}")
        with tier_on(remote, deadline_seconds=60.0) as tier:
            (load,) = tier.load(keys_of(1), [aligned(65536)], namespace=ROOT)
            assert making.wait(30)
            tier.close(0.5)
            closed.set()
            (done,) = ends([load], 10.0)
            assert not done.ok


class Startled(RedisClient):
    """A Redis whose first probes fail in a way that nobody expects."""

    startled = 0

    def connection(self) -> RedisConnection:
        connection = super().connection()
        ping = connection.ping

        def startling(until: float) -> None:
            if self.startled < 2:
                self.startled += 1
                raise RuntimeError("a bug")
            ping(until)

        connection.ping = startling  # type: ignore[method-assign]
        return connection


def test_a_probe_that_fails_unexpectedly_is_not_the_last(server: Server) -> None:
    remote = Startled(server.url, prefix=fresh_prefix())
    with tier_on(remote) as tier:
        tier._store.breaker.record_failure()
        tier._store.breaker.record_failure()
        assert tier.resting
        tier._pool.start()
        wait_until(lambda: not tier.resting)
        assert remote.startled == 2
        assert load(tier, keys_of(1), seconds=PATIENT_SECONDS) == [Reason.ABSENT]


@pytest.mark.parametrize(
    "scheme", ["redis", "redis+pool", "redis+cluster", "redis+sentinel"]
)
def test_a_line_of_the_log_names_the_store_once(
    scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = f"{scheme}://127.0.0.1:{free_port()}/{'kv' if scheme == 'redis+sentinel' else ''}"
    with tier_on(parse(place).engine()) as tier:
        assert tier.match_prefix(keys_of(1), namespace=ROOT) == 0
        wait_until(lambda: bool(caplog.records))
        lines = [record.getMessage() for record in caplog.records]
        assert all(line.count(tier.address) <= 1 for line in lines), lines


def test_what_close_ends_is_no_failure(
    server: Server, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = fresh_prefix()
    keys = keys_of(3)
    saved(RedisClient(server.url, prefix=prefix), keys)
    with tier_on(through(proxy, prefix), look_seconds=DEADLINE_SECONDS) as tier:
        assert tier.match_prefix(keys, namespace=ROOT) == 3
        proxy.both(STALLED)
        loads = tier.load(
            keys, [aligned(SMALL.slot_bytes) for _ in keys], namespace=ROOT
        )
        assert tier.match_prefix(keys_of(3, chain=1), namespace=ROOT) == 0
        caplog.clear()
        tier.close(5.0)
        assert [end.reason for end in ends(loads)] == [Reason.CLOSED] * 3
    assert not caplog.records
