"""A remote tier whose name leads to another server than before, whose connections were forgotten;
one far away.
"""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from pagoda.base.metrics import Reason
from pagoda.layout import KVLayout
from pagoda.testing import FakeClock
from pagoda.tiers.base import Done
from pagoda.tiers.remote import remote_tier, resp
from pagoda.tiers.remote.redis import RedisClient
from pagoda.tiers.remote.remote_tier import WorkerConnection
from testbed.patience import wait_until
from testbed.programs import need
from testbed.servers import Server, redis_server
from tests.remote.chunks import (
    LARGE,
    PATIENT_SECONDS,
    ROOT,
    SMALL,
    chunks_of,
    ends,
    fresh_prefix,
    hasty_tier,
    keys_of,
    load,
    save,
    saved,
    soon,
    stores,
    tier_on,
)
from tests.remote.evil import LyingRedis, endless, growth
from tests.remote.proxy import STALLED, Fault, Proxy, proxy_to, through

redis = pytest.importorskip("redis")
need("redis-server")

MEDIUM = KVLayout.opaque(
    4, 300_000, "a chunk that is asked for before it is sent, in one transaction"
)


def replicates(first: Server, second: Server) -> None:
    """Make the second a replica of the first, and wait until it has all that this has."""
    with (
        redis.Redis.from_url(first.url) as master,
        redis.Redis.from_url(second.url) as replica,
    ):
        replica.replicaof("127.0.0.1", first.port)
        wait_until(
            lambda: replica.info("replication")["master_link_status"] == "up"
        )
        wait_until(lambda: replica.dbsize() == master.dbsize())


def test_after_a_failover_writes_and_look_ups_go_to_the_new_master() -> None:
    """The name moves, the old master becomes a replica, and no connection is cut: READONLY is all
    that shows it.
    """
    options = ("--repl-diskless-sync-delay", "0")
    # nothing rests only for a while: it never gets later
    prefix = fresh_prefix()
    clock = FakeClock()
    keys = keys_of(40)
    with (
        redis_server(*options) as first,
        redis_server(*options) as second,
        proxy_to(first.port) as name,
    ):
        remote = through(name, prefix)
        with tier_on(remote, clock=clock) as tier:
            assert all(
                end.ok for end in ends(tier.store(chunks_of(keys[:4]), ROOT))
            )
            # stored chunks are no longer remembered, so they are queried
            clock.advance(10.0)
            assert tier.match_prefix(keys[:4], namespace=ROOT) == 4
            replicates(first, second)
            with redis.Redis.from_url(second.url) as client:
                client.replicaof("NO", "ONE")
            with redis.Redis.from_url(
                first.url
            ) as client:  # its master has another's name for the same chunks
                client.replicaof("127.0.0.1", second.port)
            name.target = ("127.0.0.1", second.port)
            for key in keys[4:24]:
                (end,) = ends(tier.store(chunks_of([key]), ROOT))
                assert end.ok, end.reason
            with redis.Redis.from_url(second.url) as client:
                assert client.dbsize() == 24
                first.stop()  # a call that still asked it would wait
                try:
                    clock.advance(10.0)
                    assert tier.match_prefix(keys[:24], namespace=ROOT) == 24
                finally:
                    first.cont()
            assert tier.stats()["drop_io_error"] == 0


def test_a_replica_serves_and_is_asked_for_writes_now_and_then() -> None:
    with (
        redis_server("--repl-diskless-sync-delay", "0") as first,
        redis_server() as second,
    ):
        prefix = fresh_prefix()
        keys = keys_of(30)
        saved(RedisClient(first.url, prefix=prefix), keys[:4])
        replicates(first, second)
        with tier_on(
            RedisClient(second.url, prefix=prefix),
        ) as tier:
            for key in keys[4:20]:
                assert save(tier, [key])[0].reason is Reason.IO_ERROR
            assert load(tier, keys[:4]) == [None] * 4
            assert tier.match_prefix(keys[:4], namespace=ROOT) == 4
            assert not tier.resting
            with redis.Redis.from_url(second.url) as client:
                client.replicaof("NO", "ONE")
            stores(tier, keys[4:])


@pytest.mark.parametrize(
    "said", ["LOADING x", "MASTERDOWN x", "CLUSTERDOWN x", "BUSY x"]
)
def test_a_server_that_is_not_ready_is_left_and_the_next_one_is_used(
    server: Server, said: str
) -> None:
    liar = LyingRedis(server.port)
    prefix = fresh_prefix()
    keys = keys_of(3)
    saved(RedisClient(server.url, prefix=prefix), keys)
    try:
        with (
            proxy_to(liar.port) as name,
            tier_on(through(name, prefix), clock=FakeClock()) as tier,
        ):
            assert load(tier, keys) == [None] * 3
            assert tier.match_prefix(keys, namespace=ROOT) == 3
            for command in (b"HGET", b"EXISTS"):
                liar.lies[command] = lambda _: [f"-{said}\r\n".encode()]
            name.target = ("127.0.0.1", server.port)
            assert load(tier, keys) == [None] * 3
            assert tier.stats()["miss_io_error"] == 0
    finally:
        liar.close()


# ---- connections that were forgotten


def test_an_idle_connection_that_was_forgotten_costs_nothing(
    server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = fresh_prefix()
    keys = keys_of(3)
    saved(RedisClient(server.url, prefix=prefix), keys)
    monkeypatch.setattr(resp, "IDLE_SECONDS", 0.5)
    with (
        tier_on(through(proxy, prefix)) as tier,
        soon(PATIENT_SECONDS),
    ):
        assert load(tier, keys, seconds=PATIENT_SECONDS) == [None] * 3
        time.sleep(0.6)
        proxy.forget()
        assert load(tier, keys, seconds=PATIENT_SECONDS) == [None] * 3
        for reason in Reason:
            assert not tier.stats()[f"miss_{reason}"]


def test_connections_that_were_forgotten_in_use_cost_one_deadline_and_no_rest(
    proxy: Proxy,
) -> None:
    """With a clock that does not advance, a skipped tier would be skipped forever."""
    with hasty_tier(through(proxy, fresh_prefix()), clock=FakeClock()) as tier:
        store = tier._store
        connections = [WorkerConnection(store) for _ in range(3)]

        def pinged(connection: WorkerConnection) -> object:
            return connection.call(
                lambda connection: connection.ping(store.deadline()), "a ping"
            )

        assert [pinged(connection) for connection in connections] == [None] * 3
        proxy.forget()
        threads = [
            threading.Thread(target=pinged, args=(connection,))
            for connection in connections[:2]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENT_SECONDS)
        assert store.breaker.is_open
        assert not store.breaker.resting
        assert pinged(connections[2]) is None, "it is as old, so it was replaced"
        assert not store.breaker.is_open
        for connection in connections:
            connection.close()


def test_the_connection_for_look_ups_is_kept_open(
    server: Server, proxy: Proxy
) -> None:
    remote = through(proxy, fresh_prefix())
    keys = keys_of(1)
    remote.keepalive_seconds = 0.05
    with tier_on(remote) as tier:
        tier._pool.start()
        time.sleep(0.2)
        assert proxy.connections == 0, "nobody asked for one"
        tier.match_prefix(keys, namespace=ROOT)
        asked = proxy.traffic
        wait_until(lambda: proxy.traffic != asked)
        assert proxy.connections == 1
        assert not tier.resting


# ---- writers


@pytest.mark.parametrize(
    "layout", [SMALL, MEDIUM, LARGE], ids=["small", "medium", "large"]
)
def test_machines_that_compute_the_same_send_it_once(
    server: Server, proxy: Proxy, layout: KVLayout
) -> None:
    """Each chunk crosses the network once, whichever machine begins first; all know in the end that
    it is stored.
    """
    prefix = fresh_prefix()
    keys = keys_of(12)
    chunks = chunks_of(keys, layout)
    before = proxy.up_bytes
    with contextlib.ExitStack() as stack:
        options = {"deadline_seconds": PATIENT_SECONDS}
        tiers = [
            stack.enter_context(
                tier_on(through(proxy, prefix), layout, **options)
            )
            for _ in range(4)
        ]
        futures = [
            future for tier in tiers for future in tier.store(chunks, ROOT)
        ]
        for end in ends(futures):
            assert end.ok
        assert sum(tier.stats()["stored_chunks"] for tier in tiers) == 12
    asked = 60_000  # claims and answers
    assert (
        proxy.up_bytes - before < 1.05 * 12 * (layout.chunk_bytes + 4096) + asked
    )


@pytest.mark.slow
def test_a_chunk_whose_writer_died_is_sent_by_another(
    server: Server, proxy: Proxy
) -> None:
    """The claim of a machine that is no more expires, and no chunk is lost by it."""
    prefix = fresh_prefix()
    keys = keys_of(3)
    dead = (
        through(proxy, prefix)
        .connection()
        .open(time.monotonic() + PATIENT_SECONDS)
    )
    assert dead.claim(ROOT, keys[:2], time.monotonic() + 0.5) == [None, None]
    dead.close()
    with tier_on(through(proxy, prefix)) as tier:
        futures = tier.store(chunks_of(keys), ROOT)
        assert ends(futures[2:]) == [Done(True)]
        assert load(tier, keys) == [None] * 3, (
            "read from what is still to be sent"
        )
        for end in ends(futures):
            assert end.ok
        assert tier.stats()["stored_chunks"] == 3
    with tier_on(through(proxy, prefix)) as reader:
        assert load(reader, keys) == [None] * 3


def test_what_waits_for_another_writer_ends_when_it_is_removed_or_the_tier_is_closed(
    server: Server, proxy: Proxy
) -> None:
    prefix = fresh_prefix()
    keys = keys_of(2)
    other = (
        through(proxy, prefix)
        .connection()
        .open(time.monotonic() + PATIENT_SECONDS)
    )
    other.claim(ROOT, keys, time.monotonic() + PATIENT_SECONDS)
    with tier_on(through(proxy, prefix)) as tier:
        first, second = tier.store(chunks_of(keys), ROOT)
        before = proxy.up_bytes
        # it asks again and again
        wait_until(lambda: proxy.up_bytes - before > 2000)
        assert tier.remove(keys[0], ROOT)
        assert ends([first]) == [Done(False, Reason.REMOVED)]
        assert not second.done()
        with soon():
            tier.close()
        assert ends([second]) == [Done(False, Reason.CLOSED)]
    other.close()


def test_a_save_that_close_breaks_off_is_no_failure_of_the_store(
    server: Server, proxy: Proxy
) -> None:
    with tier_on(through(proxy, fresh_prefix())) as tier:
        proxy.down = STALLED
        begun = tier.store(chunks_of(keys_of(1)), ROOT)
        wait_until(lambda: proxy.up_bytes > 0)  # it waits for an answer
        with soon():
            tier.close()
        assert ends(begun) == [Done(False, Reason.CLOSED)]
        assert not tier.resting


@pytest.mark.slow
def test_a_writer_that_never_ends_is_not_waited_for_forever(
    server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the wait is twice the deadline and this
    monkeypatch.setattr(remote_tier, "_BUSY_SECONDS", 0.5 - 2 * 10.0)
    prefix = fresh_prefix()
    keys = keys_of(1)
    other = (
        through(proxy, prefix)
        .connection()
        .open(time.monotonic() + PATIENT_SECONDS)
    )
    other.claim(ROOT, keys, time.monotonic() + PATIENT_SECONDS)
    with tier_on(through(proxy, prefix), deadline_seconds=10.0) as tier:
        assert ends(tier.store(chunks_of(keys), ROOT)) == [
            Done(False, Reason.BUSY)
        ]
        assert tier.stats()["drop_busy"] == 1
    other.close()


def test_a_writer_far_away_sends_nothing_that_is_there(
    server: Server, proxy: Proxy
) -> None:
    """The look-up was given up long before the answer arrives; the writer has a separate, longer
    patience.
    """
    prefix = fresh_prefix()
    keys = keys_of(6)
    saved(RedisClient(server.url, prefix=prefix), keys, MEDIUM)
    proxy.both(Fault(delay_seconds=0.1))
    options = {"look_seconds": 0.01, "deadline_seconds": PATIENT_SECONDS}
    with tier_on(through(proxy, prefix), MEDIUM, **options) as tier:
        assert tier.match_prefix(keys, namespace=ROOT) == 0, "not known in time"
        for end in ends(tier.store(chunks_of(keys, MEDIUM), ROOT)):
            assert end.ok
        assert proxy.up_bytes < MEDIUM.chunk_bytes / 4
        assert tier.stats()["stored_chunks"] == 0


# ---- answers that are none


@pytest.mark.slow
def test_answers_to_a_look_up_take_no_memory_whatever_they_are(
    server: Server,
) -> None:
    liar = LyingRedis(server.port)
    strings = b"*16000\r\n" + (b"+" + b"x" * 510 + b"\r\n") * 16000
    liar.lies[b"EXISTS"] = lambda said: (
        None if said[1].endswith(b"probe") else endless(b"", strings, 40)
    )
    address = RedisClient(f"redis://127.0.0.1:{liar.port}", prefix=fresh_prefix())
    try:
        with tier_on(address, deadline_seconds=5.0) as tier, growth() as memory:
            assert tier.match_prefix(keys_of(1024), namespace=ROOT) == 0
            wait_until(lambda: tier.stats()["miss_io_error"] > 0)
            time.sleep(1.0)
        assert memory.peak_bytes < 48 << 20
    finally:
        liar.close()


def test_a_walk_of_the_tier_has_one_deadline(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagoda.base.errors import StoreError

    liar = LyingRedis(server.port)
    liar.lies[b"SCAN"] = lambda _: [b"*2\r\n$1\r\n7\r\n*0\r\n"]
    monkeypatch.setattr(remote_tier, "_LISTING_SECONDS", 0.5)
    try:
        client = RedisClient(f"redis://127.0.0.1:{liar.port}")
        with (
            tier_on(client) as tier,
            soon(PATIENT_SECONDS),
            pytest.raises(StoreError, match="had not ended"),
        ):
            tier.clear()
    finally:
        liar.close()
