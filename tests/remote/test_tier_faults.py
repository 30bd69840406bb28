"""A remote tier whose server dies, stops, forgets, is full, refuses: misses and drops, then it
recovers by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from pagoda.base.clock import Clock
from pagoda.base.metrics import Reason
from pagoda.slab import aligned
from pagoda.tiers import Done
from pagoda.tiers.remote.redis import RedisClient
from testbed.patience import wait_until
from testbed.servers import Server, redis_server
from tests.remote.chunks import (
    DEADLINE_SECONDS,
    LARGE,
    LATE_SECONDS,
    OTHER,
    PATIENT_SECONDS,
    ROOT,
    TROUBLE,
    begun_since,
    chunks_of,
    ends,
    fresh_prefix,
    hasty_tier,
    keys_of,
    load,
    name_of,
    recovers,
    save,
    saved,
    soon,
    stores,
    tier_on,
)
from tests.remote.proxy import Fault, Proxy
from tests.remote.redis_kit import redis_client

SLOW = Fault(bytes_per_second=4_000_000)  # a large chunk takes most of a second
BIG_ENOUGH = "64mb"


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """A server for tests that leave it as it was."""
    with redis_server() as running:
        yield running


@pytest.fixture
def server() -> Iterator[Server]:
    """A server to be maltreated."""
    with redis_server() as running:
        yield running


def on(
    server: Server | Proxy, prefix: str = "p", **options: object
) -> RedisClient:
    """The engine at a server's port."""
    return RedisClient(
        f"redis://127.0.0.1:{server.port}", prefix=prefix, **options
    )  # type: ignore[arg-type]


def moving(futures: list[Future[Done]], proxy: Proxy) -> list[Future[Done]]:
    """Wait until bytes of a transfer have passed."""
    before = proxy.up_bytes + proxy.down_bytes
    wait_until(lambda: proxy.up_bytes + proxy.down_bytes > before + 300_000)
    return futures


# ---- the server's life


@pytest.mark.slow
@pytest.mark.parametrize("deed", ["save", "load"])
def test_the_server_is_killed_in_the_middle_of_a_transfer(
    server: Server, proxy: Proxy, deed: str
) -> None:
    warm = keys_of(1, chain=1)
    keys = keys_of(2)
    with tier_on(on(proxy), LARGE, connections=1) as tier:
        stores(tier, warm, LARGE)
        if deed == "load":
            stores(tier, keys, LARGE)
        proxy.both(SLOW)
        if deed == "load":
            begun = tier.load(
                keys, [aligned(LARGE.slot_bytes) for _ in keys], namespace=ROOT
            )
        else:
            begun = tier.store(chunks_of(keys, LARGE), ROOT)
        moving(begun, proxy)
        server.kill()
        done = ends(begun, LATE_SECONDS)
        assert not done[-1].ok
        for end in done:
            assert end.ok or end.reason in TROUBLE
        proxy.heal()
        assert set(load(tier, keys, LARGE)) <= TROUBLE
        server.restart()  # empty now
        stores(tier, keys, LARGE)
        recovers(tier, keys, LARGE)


@pytest.mark.slow
@pytest.mark.parametrize("deed", ["save", "load"])
def test_the_server_stands_still_in_the_middle_of_a_transfer(
    server: Server, proxy: Proxy, deed: str
) -> None:
    warm = keys_of(1, chain=1)
    keys = keys_of(2)
    with hasty_tier(on(proxy), LARGE, connections=1) as tier:
        stores(tier, warm, LARGE)
        if deed == "load":
            stores(tier, keys, LARGE)
        proxy.both(SLOW)
        if deed == "load":
            begun = tier.load(
                keys, [aligned(LARGE.slot_bytes) for _ in keys], namespace=ROOT
            )
        else:
            begun = tier.store(chunks_of(keys, LARGE), ROOT)
        moving(begun, proxy)
        server.stop()
        proxy.heal()
        try:
            done = ends(begun, LATE_SECONDS)
            for end in done:
                assert end.ok or end.reason in TROUBLE
            for _ in range(3):
                reasons = load(tier, keys_of(2, chain=1), LARGE)
                assert set(reasons) <= {
                    Reason.DEADLINE,
                    Reason.IO_ERROR,
                    Reason.TIER_SKIPPED,
                }
        finally:
            server.cont()
        stores(tier, keys, LARGE)
        recovers(tier, keys, LARGE)


def test_close_ends_in_time_while_the_server_stands_still(server: Server) -> None:
    keys = keys_of(12)
    before = threading.enumerate()
    saved(on(server), keys[:4])
    server.stop()
    with tier_on(on(server), deadline_seconds=60.0) as tier:
        saves = tier.store(chunks_of(keys[4:]), ROOT)
        loads = tier.load(
            keys[:4], [aligned(65536) for _ in range(4)], namespace=ROOT
        )
        with soon(2.0 + 2.0):
            tier.close(2.0)
        assert set(ends(saves, LATE_SECONDS)) <= {
            Done(False, reason) for reason in (Reason.CLOSED, *TROUBLE)
        }
        assert set(ends(loads, LATE_SECONDS)) <= {
            Done(False, reason) for reason in (Reason.CLOSED, *TROUBLE)
        }
    server.cont()
    wait_until(lambda: not begun_since(before, "pagoda-redis"))


def test_the_server_forgets_everything(server: Server) -> None:
    keys = keys_of(4)
    truth = redis_client(server)
    with tier_on(on(server)) as tier:
        stores(tier, keys)
        recovers(tier, keys)
        truth.flushall()
        assert load(tier, keys) == [Reason.ABSENT] * 4
        # what the tier remembers is corrected
        wait_until(lambda: tier.match_prefix(keys) == 0)
        stores(tier, keys)
        recovers(tier, keys)


def test_the_server_forgets_in_the_middle_of_a_save(
    server: Server, proxy: Proxy
) -> None:
    warm = keys_of(1, chain=1)
    keys = keys_of(1)
    truth = redis_client(server)
    with tier_on(on(proxy), LARGE, connections=1) as tier:
        stores(tier, warm, LARGE)
        proxy.both(SLOW)
        begun = moving(tier.store(chunks_of(keys, LARGE), ROOT), proxy)
        truth.flushall()
        proxy.heal()
        (end,) = ends(begun, LATE_SECONDS)
        # a value of which a part is missing is never served
        reasons = load(tier, keys, LARGE)
        assert reasons == [None] if end.ok else reasons[0] is not None
        wait_until(
            lambda: (
                save(tier, keys, LARGE)[0].ok
                and load(tier, keys, LARGE) == [None]
            )
        )


# ---- a server that refuses


def test_a_full_server_refuses_and_what_it_has_is_served(server: Server) -> None:
    truth = redis_client(server)
    keys = keys_of(2)
    more = keys_of(4, chain=1)
    with tier_on(on(server), LARGE) as tier:
        stores(tier, keys, LARGE)
        truth.config_set("maxmemory", "1mb")
        done = save(tier, more, LARGE)
        assert {end.reason for end in done} <= {Reason.FULL, Reason.TIER_SKIPPED}
        for e in done:
            assert not e.ok
        assert done[0].reason is Reason.FULL
        assert tier.stats()["drop_full"] >= 1
        recovers(tier, keys, LARGE)  # a no is not a failure
        truth.config_set("maxmemory", "0")
        stores(tier, more, LARGE)


def test_a_server_that_refuses_chunks_and_grants_claims_is_left_alone(
    server: Server,
) -> None:
    """As one that is so full that a claim fits and a chunk does not."""
    truth = redis_client(server)
    keys = keys_of(12)
    truth.execute_command("ACL SETUSER claims on >x ~* +@all -hset")
    with tier_on(
        RedisClient(f"redis://claims:x@127.0.0.1:{server.port}"), clock=Clock()
    ) as tier:
        for each in keys:
            save(tier, [each])
    assert truth.info("commandstats")["cmdstat_hset"]["rejected_calls"] < len(
        keys
    )


def test_a_server_that_evicts_whole_chunks(server: Server) -> None:
    truth = redis_client(server)
    truth.config_set("maxmemory-policy", "allkeys-lru")
    truth.config_set("maxmemory", "16mb")
    keys = keys_of(12)
    with tier_on(on(server), LARGE) as tier:
        tier.put_many(chunks_of(keys, LARGE), namespace=ROOT)
        reasons = load(tier, keys, LARGE, PATIENT_SECONDS)
        assert set(reasons) == {None, Reason.ABSENT}
        assert truth.info("stats")["evicted_keys"] > 0


def test_a_replica_serves_and_takes_nothing(server: Server) -> None:
    keys = keys_of(2)
    more = keys_of(2, chain=1)
    saved(on(server), keys)
    redis_client(server).config_set("repl-diskless-sync-delay", "0")
    with redis_server("--replicaof", "127.0.0.1", str(server.port)) as replica:
        truth = redis_client(replica)
        wait_until(
            lambda: truth.info("replication").get("master_link_status") == "up"
        )
        wait_until(lambda: truth.dbsize() >= 2)
        with tier_on(on(replica)) as tier:
            recovers(tier, keys)
            done = save(tier, more)
            for end in done:
                assert not end.ok
            for end in done:
                assert end.reason
            recovers(tier, keys)
            truth.replicaof("NO", "ONE")
            stores(tier, more)


@pytest.mark.slow
def test_a_server_that_is_slow_for_a_while(server: Server) -> None:
    keys = keys_of(2)
    saved(on(server), keys)
    truth = redis_client(server)
    with hasty_tier(on(server)) as tier:
        truth.execute_command("CLIENT", "PAUSE", "2500", "ALL")
        assert set(load(tier, keys)) <= {
            Reason.DEADLINE,
            Reason.IO_ERROR,
            Reason.TIER_SKIPPED,
        }
        recovers(tier, keys)


def test_a_server_with_another_password(prefix: str = "p") -> None:
    with redis_server(password="right") as server:
        good = RedisClient(
            f"redis://:right@127.0.0.1:{server.port}", prefix=prefix
        )
        saved(good, keys_of(2))
        for wrong in (
            f"redis://:wrong@127.0.0.1:{server.port}",
            f"redis://127.0.0.1:{server.port}",
        ):
            with tier_on(RedisClient(wrong, prefix=prefix)) as tier:
                reasons = load(tier, keys_of(2))
                assert None not in reasons
                assert Reason.ABSENT not in reasons
                for end in save(tier, keys_of(2, chain=1)):
                    assert not end.ok
                assert "wrong" not in tier.address
        with tier_on(good) as tier:
            recovers(tier, keys_of(2))


def test_a_user_who_may_not(shared: Server) -> None:
    truth = redis_client(shared)
    prefix = fresh_prefix()
    saved(on(shared, prefix), keys_of(2))
    truth.execute_command(
        "ACL",
        "SETUSER",
        "reader",
        "on",
        ">pw",
        f"~{prefix}:*",
        "+@read",
        "+ping",
        "+@connection",
    )
    remote = RedisClient(
        f"redis://reader:pw@127.0.0.1:{shared.port}", prefix=prefix
    )
    with tier_on(remote) as tier:
        recovers(tier, keys_of(2))
        for end in save(tier, keys_of(2, chain=1)):
            assert not end.ok
        recovers(tier, keys_of(2))


@pytest.mark.slow
def test_encryption_by_the_wrong_authority(tmp_path: object) -> None:
    with redis_server(tls=True) as server, redis_server(tls=True) as another:
        url = f"rediss://127.0.0.1:{server.port}"
        good = RedisClient(f"{url}?ssl_ca_certs={server.ca}", prefix="p")
        saved(good, keys_of(2))
        for wrong in (
            url,  # the machine's own authorities
            f"{url}?ssl_ca_certs={another.ca}",
            f"redis://127.0.0.1:{server.port}",  # not encrypted
        ):
            with (
                soon(2 * LATE_SECONDS),
                tier_on(RedisClient(wrong, prefix="p")) as tier,
            ):
                reasons = load(tier, keys_of(2))
                assert set(reasons) <= TROUBLE
        with tier_on(good) as tier:
            recovers(tier, keys_of(2))


def test_a_server_that_does_not_encrypt(shared: Server) -> None:
    with hasty_tier(
        RedisClient(f"rediss://127.0.0.1:{shared.port}", prefix="p")
    ) as tier:
        assert set(load(tier, keys_of(2))) <= TROUBLE


# ---- keys


def test_another_namespace_finds_and_gets_nothing(shared: Server) -> None:
    keys = keys_of(2)
    prefix = fresh_prefix()
    saved(on(shared, prefix), keys)
    with tier_on(on(shared, prefix)) as tier:
        tier.register(OTHER)
        assert tier.match_prefix(keys, namespace=OTHER.root) == 0
        (done, _) = ends(
            tier.load(
                keys, [aligned(65536), aligned(65536)], namespace=OTHER.root
            ),
            LATE_SECONDS,
        )
        assert done == Done(False, Reason.ABSENT)
        assert tier.clear(OTHER.root) == 0
        recovers(tier, keys)


def test_another_prefix_shares_nothing(shared: Server) -> None:
    keys = keys_of(2)
    one = fresh_prefix()
    two = fresh_prefix()
    saved(on(shared, one), keys)
    with tier_on(on(shared, two)) as tier:
        assert tier.match_prefix(keys, namespace=ROOT) == 0
        assert tier.clear() == 0
    with tier_on(on(shared, one)) as tier:
        recovers(tier, keys)


def test_clear_leaves_what_is_not_ours(shared: Server) -> None:
    prefix = fresh_prefix()
    truth = redis_client(shared)
    near = [
        f"{prefix}",
        f"{prefix}:",
        f"{prefix}:1",
        f"{prefix}:1:",
        f"{prefix}x:1:a",
        f"{prefix}:2:{ROOT.hex()}:a",
    ]
    near += [
        f"{prefix}:1:{ROOT.hex()}",
        f"{prefix}:1:{'g' * 64}:{{{'0' * 64}}}",
        f"a{prefix}:1:{ROOT.hex()}:{{b}}",
    ]
    ours = name_of(prefix, bytes(32))
    near += [
        f"{ours}x",
        f"{ours}:wx",
        f"{ours}:w:{'g' * 32}",
        f"{ours}\n",
        ours.upper(),
        f" {ours}",
    ]
    for name in near:
        truth.set(name, "somebody's")
    saved(on(shared, prefix), keys_of(3))
    with tier_on(on(shared, prefix)) as tier:
        assert tier.clear() == 3
    for name in near:
        assert truth.exists(name)


@pytest.mark.parametrize("connections", [1, 4])
def test_two_writers_of_one_key(shared: Server, connections: int) -> None:
    keys = keys_of(8)
    prefix = fresh_prefix()
    with (
        tier_on(
            on(shared, prefix),
            LARGE,
            connections=connections,
        ) as one,
        tier_on(
            on(shared, prefix),
            LARGE,
            connections=connections,
        ) as two,
    ):
        chunks = chunks_of(keys, LARGE)
        begun = [tier.store(chunks, ROOT) for tier in (one, two)]
        for of_one, of_two in zip(*map(ends, begun), strict=True):
            assert of_one.ok or of_two.ok
            assert {of_one.reason, of_two.reason} <= {None, Reason.BUSY}
        for tier in (one, two):
            assert load(tier, keys, LARGE, PATIENT_SECONDS) == [None] * 8
    truth = redis_client(shared)
    assert len(list(truth.scan_iter(f"{prefix}:*"))) == 8  # and nothing else


def test_a_time_to_live(shared: Server) -> None:
    keys = keys_of(1)
    prefix = fresh_prefix()
    saved(on(shared, prefix, ttl_seconds=100.0), keys)
    assert 0 < redis_client(shared).pttl(name_of(prefix, keys[0])) <= 100_000


# ---- the queue


def test_a_full_queue_drops_the_newest(server: Server) -> None:
    keys = keys_of(10)
    # the statistics ask the server that stands still
    short = {"look_seconds": DEADLINE_SECONDS}
    with tier_on(on(server), queue_chunks=4, **short) as tier:
        save(tier, keys_of(1, chain=1))
        server.stop()
        try:
            with soon(DEADLINE_SECONDS):
                begun = tier.store(chunks_of(keys), ROOT)
            full = [future.result(0) for future in begun[4:]]
            assert full == [Done(False, Reason.QUEUE_FULL)] * 6
            for future in begun[:4]:
                assert not future.done()
            assert tier.stats()["drop_queue_full"] == 6
        finally:
            server.cont()
        assert [end.ok for end in ends(begun[:4])] == [True] * 4
        recovers(tier, keys[:4])


def test_a_find_of_what_is_queued_but_gone_ends_in_time(server: Server) -> None:
    """Its host slot was given to another chunk while it waited, and the store cannot be asked."""
    keys = keys_of(3)
    valid = [True]
    with tier_on(on(server), look_seconds=0.05) as tier:
        stores(tier, keys_of(1, chain=1))
        server.stop()
        try:
            begun = tier.store(
                chunks_of(keys, still_valid=lambda: valid[0]), ROOT
            )
            assert tier.match_prefix(keys) == 3
            valid[0] = False
            with soon():
                assert tier.match_prefix(keys) == 0
            assert tier.stats()["miss_deadline"] <= 3
        finally:
            server.cont()
        for end in ends(begun[1:]):
            assert not end.ok
