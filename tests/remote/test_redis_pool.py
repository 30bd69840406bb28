"""Several independent Redis as one store: where chunks are, and that a lost node costs its own
chunks only.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import redis as client

from pagoda.base.errors import StoreError
from pagoda.base.metrics import Reason
from pagoda.base.signal_safe_threads import wait
from pagoda.config.remote_urls import parse
from pagoda.slab import aligned
from pagoda.tiers.remote import redis_nodes
from pagoda.tiers.remote.redis_nodes import RedisNode
from pagoda.tiers.remote.redis_pool import RedisPoolClient
from pagoda.tiers.remote.remote_tier import RemoteTier
from pagoda.tiers.remote.store_client import RefusedError
from pagoda_tools.cli.remote_stores import pinged
from testbed.patience import wait_until
from testbed.servers import Server, redis_server
from tests.children import in_child
from tests.remote.chunks import (
    LARGE,
    LATE_SECONDS,
    OTHER,
    PATIENT_SECONDS,
    ROOT,
    SMALL,
    TROUBLE,
    begun_since,
    chunks_of,
    ends,
    fresh_prefix,
    keys_of,
    load,
    name_of,
    save,
    saved,
    short_look,
    soon,
    stores,
    tier_on,
    walk,
)
from tests.remote.proxy import STALLED, Fault, proxy_to
from tests.thread_limits import no_threads


@contextlib.contextmanager
def three() -> Iterator[list[Server]]:
    """Three nodes that had values before: each chunk is stored at its own place (see
    `test_redis_pool_runs`).
    """
    with (
        redis_server() as first,
        redis_server() as second,
        redis_server() as third,
    ):
        servers = [first, second, third]
        for server in servers:
            server.call("SET", "another:program", "1")
        yield servers


@pytest.fixture(scope="module")
def shared() -> Iterator[list[Server]]:
    """Servers for tests that leave them as they were."""
    with three() as servers:
        yield servers


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """Servers to be maltreated."""
    with three() as servers:
        yield servers


def on(
    servers: Sequence[Server], prefix: str = "p", **options: object
) -> RedisPoolClient:
    """The engine over these servers; it waits long for each unless told otherwise."""
    places = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    wanted: dict[str, object] = {"look_seconds": PATIENT_SECONDS}
    wanted |= options
    return RedisPoolClient(f"redis+pool://{places}", prefix=prefix, **wanted)  # type: ignore[arg-type]


def of(
    servers: Sequence[Server], keys: Sequence[bytes], prefix: str = "p"
) -> dict[Server, list[bytes]]:
    """Return which of the keys each server has."""
    here = {}
    for server in servers:
        with client.Redis(port=server.port) as truth:
            here[server] = [
                key for key in keys if truth.exists(name_of(prefix, key))
            ]
    return here


def shares(
    pool: RedisPoolClient, keys: Sequence[bytes]
) -> dict[RedisNode, set[bytes]]:
    return {
        node: {keys[at] for at in share}
        for node, share in pool.shares(keys).items()
    }


# ---- where chunks are


def test_where_a_chunk_is_never_changes() -> None:
    """Other versions of this program, and the other machines, look for it there."""
    pool = RedisPoolClient("redis+pool://a:6379,b:6379,c")
    keys = [n.to_bytes(1, "big") * 32 for n in range(12)]
    assert (
        "".join(pool.node_of(key).client.address[8] for key in keys)
        == "ccbbcaccccbc"
    )


def test_the_order_of_nodes_and_the_other_nodes_move_no_key() -> None:
    keys = [os.urandom(32) for _ in range(6000)]
    three = shares(RedisPoolClient("redis+pool://a,b,c"), keys)
    again = shares(RedisPoolClient("redis+pool://C:6379,a,b/2"), keys)
    by_name = {node.client.address[8]: share for node, share in three.items()}
    assert {
        node.client.address[8].lower(): share for node, share in again.items()
    } == by_name
    for share in by_name.values():
        assert 1800 < len(share) < 2200
    dotted = shares(RedisPoolClient("redis+pool://b.,a:6379,c"), keys)
    assert {
        node.client.address[8]: share for node, share in dotted.items()
    } == by_name
    two = shares(RedisPoolClient("redis+pool://a,c"), keys)
    for node, share in two.items():
        assert share > by_name[node.client.address[8]], (
            "a key of a present node moved"
        )
        assert 2800 < len(share) < 3200


def test_without_a_node_its_keys_are_on_the_others_and_no_other_key_moves() -> (
    None
):
    keys = [os.urandom(32) for _ in range(600)]
    pool = RedisPoolClient("redis+pool://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3")
    before = shares(pool, keys)
    lost = pool.nodes[1]
    for _ in range(2):
        lost.failed(OSError("away"))
    after = shares(pool, keys)
    assert lost not in after
    for node in after:
        assert after[node] > before[node]


def test_it_shows_no_password() -> None:
    pool = RedisPoolClient("redis+pool://user:hunter2@a:1,b/3")
    assert pool.address == "redis+pool://a:1,b:6379/3"
    assert "hunter2" not in pool.address + repr(pool)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("localhost:1", "127.0.0.1:1"),
        ("[::1]:1", "[0:0::0:1]:1"),
        ("[FE80::A%25eth0]", "[fe80::a%25eth0]"),
    ],
)
def test_two_spellings_of_a_host_are_one_node(one: str, other: str) -> None:
    keys = [os.urandom(32) for _ in range(100)]
    pools = [
        RedisPoolClient(f"redis+pool://{host},b:2,c:3") for host in (one, other)
    ]
    assert pools[0].address == pools[1].address
    first, second = (
        {node.place: share for node, share in shares(pool, keys).items()}
        for pool in pools
    )
    assert first == second


# ---- with all nodes


def test_chunks_are_on_all_nodes_and_all_calls_reach_them(
    shared: list[Server],
) -> None:
    prefix = fresh_prefix()
    keys = keys_of(60)
    pool = on(shared, prefix)
    saved(pool, keys)
    assert sorted(
        key for here in of(shared, keys, prefix).values() for key in here
    ) == sorted(keys)
    for here in of(shared, keys, prefix).values():
        assert len(here) > 5
    connection = pool.connection().open(time.monotonic() + PATIENT_SECONDS)
    until = time.monotonic() + PATIENT_SECONDS
    try:
        connection.ping(until)
        assert connection.find(ROOT, keys, until) == 60
        assert (
            connection.find(
                ROOT, keys[:30] + keys_of(1, chain=1) + keys[30:], until
            )
            == 30
        )
        assert connection.find(ROOT, [], until) == 0
        assert connection.touch(ROOT, [keys[0], b"\0" * 32, keys[1]], until) == [
            True,
            False,
            True,
        ]
        assert connection.count_by_namespace(walk(5)) == {ROOT: 60}
        used = connection.usage(until)
        assert used.used_bytes is not None
        assert used.used_bytes > 1_500_000
        assert used.limit_bytes is None
        for limits, together in (
            (("1gb", "0", "1gb"), None),
            (("1gb", "2gb", "1gb"), 4 << 30),
            (("0",) * 3, None),
        ):
            for server, limit in zip(shared, limits, strict=True):
                server.call("CONFIG", "SET", "maxmemory", limit)
            assert connection.usage(until).limit_bytes == together
        assert connection.remove(ROOT, keys[:3], until) == 3
        assert connection.find(ROOT, keys, until) == 0
        assert connection.clear(OTHER.root, walk(5)) == 0
        assert connection.clear(ROOT, walk(5)) == 57
        assert connection.count_by_namespace(walk(5)) == {}
    finally:
        connection.close()


@pytest.mark.slow
def test_random_operations_never_return_wrong_bytes(shared: list[Server]) -> None:
    """Two machines; a third one that reads all of it at the end."""
    rng = random.Random(5)
    prefix = fresh_prefix()
    keys = keys_of(40)
    stored: set[bytes] = set()
    with (
        tier_on(
            on(shared, prefix),
        ) as one,
        tier_on(
            on(shared[::-1], prefix),
        ) as two,
    ):
        for _ in range(150):
            tier = rng.choice((one, two))
            some = rng.sample(chunks_of(keys), rng.randint(1, 6))
            match rng.randrange(4):
                case 0 | 1:
                    for end in ends(tier.store(some, ROOT)):
                        assert end.ok
                    stored.update(chunk.key for chunk in some)
                case 2:
                    there = load(tier, keys, seconds=PATIENT_SECONDS)
                    assert {
                        key
                        for key, reason in zip(keys, there, strict=True)
                        if reason is None
                    } <= stored
                case 3:
                    tier.remove(some[0].key, ROOT)
                    stored.discard(some[0].key)
                    # else it would be believed to be there for two seconds
                    for each in (one, two):
                        each._store.presence.clear()
    with tier_on(
        on(shared, prefix),
    ) as third:
        here = load(third, keys, seconds=PATIENT_SECONDS)
        assert {
            key for key, reason in zip(keys, here, strict=True) if reason is None
        } == stored


# ---- a node that fails


def reasons(
    tier: RemoteTier, keys: Sequence[bytes], some: Sequence[bytes]
) -> set[Reason | None]:
    """Load a chain; return the reasons of some of its chunks; None: served."""
    return {
        reason
        for key, reason in zip(keys, load(tier, keys), strict=True)
        if key in some
    }


def healthy(
    tier: RemoteTier, keys: Sequence[bytes], some: Sequence[bytes] | None = None
) -> None:
    """Check that a chain, or some chunks of it, are found and served; a busy machine may be late at
    first.
    """
    some = keys if some is None else some
    wait_until(
        lambda: (
            tier.match_prefix(some, namespace=ROOT) == len(some)
            and reasons(tier, keys, some) == {None}
        )
    )


@pytest.mark.slow
def test_a_killed_node_costs_its_own_chunks_and_is_used_again(
    servers: list[Server], caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(60)
    saved(on(servers), keys)
    lost, *_ = servers
    here = of(servers, keys)
    others = [key for key in keys if key not in here[lost]]
    stop = threading.Event()
    wrong = list[str]()
    rounds = 0
    pool = on(servers)
    with tier_on(pool, look_seconds=0.05) as tier:
        healthy(tier, keys)

        def engine() -> None:
            nonlocal rounds
            while not stop.is_set():
                rounds += 1
                for key, reason in zip(keys, load(tier, keys), strict=True):
                    # a busy machine may be late
                    if reason not in (None, Reason.DEADLINE) and key in others:
                        wrong.append(f"{reason}")

        thread = threading.Thread(target=engine)
        thread.start()
        try:
            wait_until(lambda: rounds > 3)
            lost.kill()
            wait_until(lambda: len(shares(pool, keys)) == 2)
            healthy(tier, keys, others)
            assert not tier.resting
            # what was lost is stored again, elsewhere, once it is not believed to be where it was
            # any more
            wait_until(
                lambda: (
                    all(end.ok for end in save(tier, keys))
                    and set(load(tier, keys)) == {None}
                )
            )
            healthy(tier, keys)
        finally:
            stop.set()
            thread.join()
        assert not wrong, "a chunk of another node was not served"
        assert "the other nodes are used as before" in caplog.text
        lost.restart()  # empty
        wait_until(lambda: len(shares(pool, keys)) == 3)
        healthy(tier, keys, others)
        wait_until(
            lambda: (
                save(tier, keys)[-1].ok
                and sorted(of(servers, keys)[lost]) == sorted(here[lost])
            )
        )
        assert not tier.resting
        assert tier.stats()["failed_checks"] == 0


def test_a_node_that_refuses_to_be_read_is_left_out(
    servers: list[Server],
) -> None:
    """As after a mistake in the rights of a user, while all are connected."""
    keys = keys_of(60)
    pool = on(servers)
    saved(pool, keys)
    here = of(servers, keys)
    odd = servers[0]
    others = [key for key in keys if key not in here[odd]]
    with tier_on(pool) as tier:
        healthy(tier, keys)
        odd.call("ACL", "SETUSER", "default", "-exists", "-hget")
        for key in here[odd][:4]:
            tier._store.presence.clear()
            tier.match_prefix([key], namespace=ROOT)
            assert not tier.resting
        wait_until(lambda: len(shares(pool, keys)) == 2)
        tier._store.presence.clear()
        healthy(tier, keys, others)
        wait_until(
            lambda: (
                all(end.ok for end in save(tier, keys))
                and set(load(tier, keys)) == {None}
            )
        )
        for server in servers:
            server.call("ACL", "SETUSER", "default", "-exists", "-hget")
        connection = pool.connection()
        with pytest.raises((RefusedError, OSError)):
            connection.find(ROOT, keys, time.monotonic() + PATIENT_SECONDS)
        connection.close()
        odd.call("ACL", "SETUSER", "default", "+exists", "+hget")
        wait_until(
            lambda: (
                f"127.0.0.1:{odd.port}"
                in {node.place for node in shares(pool, keys)}
            )
        )


def test_a_node_that_refuses_loads_alone_is_left_out(
    servers: list[Server],
) -> None:
    """It still says which chunks it has; so only the loads can find out, and the other nodes are
    used as before.
    """
    keys = keys_of(60)
    pool = on(servers)
    saved(pool, keys)
    here = of(servers, keys)
    odd = servers[0]
    with tier_on(pool) as tier:
        healthy(tier, keys)
        odd.call("ACL", "SETUSER", "default", "-hget")
        refused = iter(here[odd] * 10)

        def is_left_out() -> bool:
            # on a busy machine a look-up before the load may be late
            assert load(tier, [next(refused)]) != [None]
            assert not tier.resting
            return len(shares(pool, keys)) == 2

        wait_until(is_left_out)
        healthy(tier, keys, [key for key in keys if key not in here[odd]])


def test_a_node_that_refuses_touches_keeps_none_from_the_others(
    servers: list[Server], caplog: pytest.LogCaptureFixture
) -> None:
    """Else what is used on them would be evicted first."""
    keys = keys_of(60)
    for server in servers:
        server.call("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
        server.call("ACL", "SETUSER", "less", "on", ">x", "~*", "+@all")
    places = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    pool = RedisPoolClient(
        f"redis+pool://less:x@{places}", prefix="p", look_seconds=PATIENT_SECONDS
    )
    saved(pool, keys)
    here = of(servers, keys)
    odd = servers[0]
    odd.call("ACL", "SETUSER", "less", "-hlen")
    with tier_on(pool) as tier:
        for _ in range(2):
            for server in servers:
                for key in here[server]:
                    server.call("PEXPIRE", name_of("p", key), "100000")
            assert tier.touch(keys, namespace=ROOT) == [True] * len(keys)
            for server in servers[1:]:
                for key in here[server]:
                    assert (
                        int(server.call("PTTL", name_of("p", key))[1:]) > 100_000
                    )
            assert tier.touch(here[odd][:1], namespace=ROOT) == [True], (
                "asked for instead"
            )
        assert f"{odd.port}/0: RefusedError: NOPERM" in caplog.text


def test_a_node_is_used_again_though_no_thread_could_ask_it_at_first(
    servers: list[Server],
) -> None:
    keys = keys_of(60)
    pool = on(servers)
    for _ in range(2):
        pool.nodes[0].failed(ConnectionError("refused"))
    with no_threads():
        wait_until(lambda: not pool.nodes[0].breaker.resting)
        assert len(shares(pool, keys)) == 2
    wait_until(lambda: len(shares(pool, keys)) == 3)


@pytest.mark.slow
def test_a_node_that_stands_still_delays_no_look_up_for_long(
    servers: list[Server],
) -> None:
    keys = keys_of(60)
    saved(on(servers), keys)
    lost = servers[1]
    others = [key for key in keys if key not in of(servers, keys)[lost]]
    pool = on(servers, look_seconds=0.3)
    with tier_on(pool, look_seconds=0.3) as tier:
        healthy(tier, keys)
        lost.stop()
        try:
            wait_until(lambda: tier._store.presence.get(ROOT, keys[0]) is None)
            for _ in range(10):
                with soon(0.3 + 0.5):
                    tier.match_prefix(keys, namespace=ROOT)
            wait_until(
                lambda: (
                    tier.match_prefix(keys, namespace=ROOT) >= 0
                    and len(pool.shares(keys)) == 2
                )
            )
            for _ in range(3):
                healthy(tier, keys, others)
            assert not tier.resting
            connection = pool.connection().open(time.monotonic() + 5)
            with soon(0.25):  # nothing waits for it while it is left out
                assert connection.find(ROOT, others, time.monotonic() + 5) == len(
                    others
                )
            connection.close()
        finally:
            lost.cont()
        wait_until(lambda: len(pool.shares(keys)) == 3)
        healthy(tier, keys)


def test_a_look_up_goes_on_without_a_node_that_stands_still(
    servers: list[Server],
) -> None:
    keys = keys_of(60)
    pool = on(servers, look_seconds=short_look())
    saved(pool, keys)
    here = of(servers, keys)
    lost = next(server for server in servers if keys[0] not in here[server])
    connection = pool.connection().open(time.monotonic() + 5)
    try:
        assert (
            connection.find(ROOT, keys, time.monotonic() + PATIENT_SECONDS) == 60
        )
        lost.stop()
        with soon():  # the first time too
            found = connection.find(
                ROOT, keys, time.monotonic() + PATIENT_SECONDS
            )
        assert found == keys.index(here[lost][0]) > 0
    finally:
        lost.cont()
        connection.close()


def test_loads_from_a_node_that_stands_still_end_when_a_look_up_has_found_out(
    servers: list[Server],
) -> None:
    """They would keep all threads of the tier from the other nodes."""
    keys = keys_of(60)
    lost = servers[0]
    look_seconds = short_look()
    pool = on(servers, look_seconds=look_seconds)
    saved(pool, keys)
    here = of(servers, keys)
    with tier_on(pool, deadline_seconds=60.0, look_seconds=look_seconds) as tier:
        healthy(tier, keys)
        lost.stop()
        try:
            loads = [
                tier.load(
                    [key],
                    [aligned(SMALL.slot_bytes)],
                    namespace=ROOT,
                    start=keys.index(key),
                )[0]
                for key in here[lost][:4]
            ]
            wait_until(
                lambda: (
                    tier.match_prefix(keys_of(20, chain=1), namespace=ROOT) >= 0
                    and len(shares(pool, keys)) == 2
                )
            )
            for end in ends(loads, LATE_SECONDS):
                assert not end.ok
            others = [key for key in keys if key not in here[lost]]
            assert reasons(tier, keys, others) == {None}
        finally:
            lost.cont()


def test_a_refusal_leaves_no_call_under_way_at_a_slow_node(
    servers: list[Server],
) -> None:
    pool = on(servers, look_seconds=short_look())
    keys = keys_of(60)
    saved(pool, keys)
    connection = pool.connection().open(time.monotonic() + LATE_SECONDS)
    assert connection.find(ROOT, keys, time.monotonic() + LATE_SECONDS) == 60
    servers[0].call("ACL", "SETUSER", "default", "-exists")
    servers[1].stop()
    try:
        # the first chunk may be on either
        with contextlib.suppress(RefusedError):
            connection.find(ROOT, keys, time.monotonic() + LATE_SECONDS)
        assert pool.nodes[1] not in connection._lines, (
            "the next call would share it with a thread"
        )
    finally:
        servers[1].cont()
        connection.close()


def test_a_name_with_something_else_costs_its_own_chunk_only(
    shared: list[Server],
) -> None:
    """It is not there; the touches of all other chunks, on this node and the others, go on."""
    prefix = fresh_prefix()
    keys = keys_of(20)
    with tier_on(
        on(shared, prefix),
    ) as tier:
        stores(tier, keys)
        for server, here in of(shared, keys, prefix).items():
            if keys[3] in here:
                with client.Redis(port=server.port) as truth:
                    truth.delete(name_of(prefix, keys[3]))
                    truth.set(name_of(prefix, keys[3]), "no hash")
        there = tier.touch(keys, namespace=ROOT)
        assert there == [key != keys[3] for key in keys]
        assert not tier._store.touch_breaker.resting
        # a load removes it, and then the chunk can be stored again
        wait_until(
            lambda: save(tier, keys)[-1].ok and load(tier, keys) == [None] * 20
        )


def test_a_distant_pool_is_waited_for(shared: list[Server]) -> None:
    """Where no node answers in the time that is usual, the first answer says how long the others
    may take.
    """
    prefix = fresh_prefix()
    keys = keys_of(12)
    with (
        proxy_to(shared[0].port) as a,
        proxy_to(shared[1].port) as b,
        proxy_to(shared[2].port) as c,
    ):
        places = ",".join(f"127.0.0.1:{proxy.port}" for proxy in (a, b, c))
        pool = RedisPoolClient(
            f"redis+pool://{places}", prefix=prefix, look_seconds=0.02
        )
        saved(pool, keys)
        for proxy in (a, b, c):
            proxy.both(Fault(delay_seconds=0.05))
        connection = pool.connection().open(time.monotonic() + 5)
        assert (
            connection.find(ROOT, keys, time.monotonic() + PATIENT_SECONDS) == 12
        )
        assert (
            connection.find(ROOT, keys, time.monotonic() + PATIENT_SECONDS) == 12
        )
        connection.close()


def test_a_writer_waits_for_a_slow_node(
    shared: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No look-up waits for it: a node that takes longer than that to answer a writer has not
    failed.

    The node answers when it is waited for up to the deadline, and not before, however slow this
    machine is.
    """
    keys = keys_of(24)
    prefix = fresh_prefix()
    with proxy_to(shared[0].port) as proxy:
        places = f"127.0.0.1:{shared[1].port},127.0.0.1:{proxy.port}"
        pool = RedisPoolClient(
            f"redis+pool://{places}", prefix=prefix, look_seconds=0.01
        )
        _, slow = pool.nodes

        deadline_seconds = 4 * PATIENT_SECONDS

        def answering(
            futures: Collection[Future[object]], seconds: float
        ) -> None:
            if len(futures) == 2 and seconds > deadline_seconds / 2:
                proxy.heal()
            wait(futures, seconds)

        with tier_on(
            pool, deadline_seconds=deadline_seconds, look_seconds=0.01
        ) as tier:
            assert all(
                end.ok for end in ends(tier.store(chunks_of(keys_of(2)), ROOT))
            )  # it knows the mark now
            monkeypatch.setattr(redis_nodes, "wait", answering)
            proxy.both(STALLED)
            saving = tier.store(chunks_of(keys), ROOT)
            wait_until(
                lambda: slow.trusted_since or all(end.done() for end in saving),
                deadline_seconds,
            )
            assert slow.trusted_since == 0.0, "it did not count as failed"
            assert all(end.ok for end in ends(saving))
    here = of(shared[:2], keys, prefix)
    assert all(here.values())
    assert sum(map(len, here.values())) == len(keys)


@pytest.mark.slow
def test_a_full_node_refuses_its_own_chunks_only(servers: list[Server]) -> None:
    keys = keys_of(48)
    with tier_on(on(servers), LARGE, queue_chunks=100) as tier:
        with client.Redis(port=servers[0].port) as truth:
            truth.config_set("maxmemory", "1mb")
        pool = tier._store.client
        place = f":{servers[0].port}/"
        node = next(each for each in pool.nodes if place in each.client.address)  # type: ignore[attr-defined]
        own = [
            chunk
            for chunk in chunks_of(keys, LARGE)
            if pool.node_of(chunk.key) is node
        ]  # type: ignore[attr-defined]
        # one after the other: nothing else is stored between them
        for chunk in own:
            assert ends(tier.store([chunk], ROOT))[0].reason is Reason.FULL
        assert len(own) > 4
        assert not tier._store.write_breaker.is_open
        done = ends(tier.store(chunks_of(keys, LARGE), ROOT))
        here = of(servers, keys)
        assert not here[servers[0]]
        refused = [key for key, end in zip(keys, done, strict=True) if not end.ok]
        assert {end.reason for end in done if not end.ok} == {Reason.FULL}
        assert 0 < len(refused) < 30
        assert len(here[servers[1]]) + len(here[servers[2]]) + len(refused) == 48
        assert not tier.resting


def test_without_any_node_the_tier_rests_and_comes_back() -> None:
    with three() as servers:
        pool = on(servers, look_seconds=0.1)
        keys = keys_of(9)
        with tier_on(pool) as tier:
            stores(tier, keys)
            for server in servers:
                server.kill()
            wait_until(lambda: bool(load(tier, keys)) and tier.resting)
            with soon():
                assert set(load(tier, keys)) <= TROUBLE
            for server in servers[1:]:  # two of three are enough
                server.restart()
            wait_until(
                lambda: (
                    save(tier, keys)[-1].ok
                    and reasons(tier, keys, keys) == {None}
                )
            )


def test_what_cannot_be_removed_everywhere_is_said(servers: list[Server]) -> None:
    with tier_on(on(servers, look_seconds=0.2)) as tier:
        keys = keys_of(6)
        stores(tier, keys)
        lost = servers[2]
        lost.kill()
        with pytest.raises(StoreError, match="try again"):
            for key in keys:
                tier.remove(key, ROOT)
        with pytest.raises(StoreError, match=str(lost.port)):
            tier.clear(ROOT)
        assert not any(of(servers[:2], keys).values()), "the others were cleared"
        assert not tier.resting


@pytest.mark.slow
def test_a_pool_works_over_tls(tmp_path: Path) -> None:
    with redis_server(tls=True) as first, redis_server(tls=True) as second:
        authorities = tmp_path / "ca.crt"
        authorities.write_text(first.ca.read_text() + second.ca.read_text())
        places = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
        spec = parse(
            f"rediss+pool://{places}?ssl_ca_certs={authorities}&look=30s"
        )
        keys = keys_of(20)
        saved(spec.engine(), keys)
        with tier_on(spec.engine()) as tier:
            healthy(tier, keys)
        untrusting = parse(f"rediss+pool://{places}").engine().connection()
        with pytest.raises(OSError, match="no node answers"):
            untrusting.ping(time.monotonic() + 10)
        untrusting.close()


def test_a_node_that_forgot_the_password_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        redis_server(password="geheim") as first,
        redis_server(password="other") as second,
    ):
        places = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
        pool = RedisPoolClient(
            f"redis+pool://:geheim@{places}", look_seconds=PATIENT_SECONDS
        )
        with tier_on(pool) as tier:
            keys = keys_of(20)
            stores(tier, keys)
            healthy(tier, keys)
        assert "WRONGPASS" in caplog.text
        assert "geheim" not in caplog.text


def test_a_host_that_does_not_exist_is_left_out_and_named(
    shared: list[Server],
) -> None:
    with socket.socket() as held:  # nobody else listens there meanwhile
        held.bind(("127.0.0.1", 0))
        gone = f"127.0.0.1:{held.getsockname()[1]}"
        url = f"redis+pool://127.0.0.1:{shared[0].port},{gone},127.0.0.1:{shared[1].port}"
        pool = RedisPoolClient(
            url, prefix=fresh_prefix(), look_seconds=PATIENT_SECONDS
        )
        with tier_on(pool) as tier:
            keys = keys_of(20)
            stores(tier, keys)
            healthy(tier, keys)
        (checked,) = pinged([parse(url)])
    assert f"{gone}: no answer; the other nodes do" in checked.trouble
    (well,) = pinged([parse(on(shared).address)])
    assert not well.trouble


def test_two_machines_can_compare_the_nodes_they_name(
    shared: list[Server],
) -> None:
    ports = [server.port for server in shared]
    first = ",".join(f"127.0.0.1:{port}" for port in ports)
    again = ",".join(f"127.0.0.1:{port}" for port in reversed(ports))
    other = ",".join(f"127.0.0.2:{port}" for port in ports)
    urls = (first, again, other, f"{first}/1", f"{first}?prefix=x")
    said = [
        checked.nodes
        for checked in pinged([parse(f"redis+pool://{url}") for url in urls])
    ]
    assert said[0] == said[1]
    assert len(set(said)) == 4
    assert ",".join(sorted(first.split(","))) in said[0]
    assert not pinged([parse(shared[0].url)])[0].nodes


def test_a_call_that_waits_ends_when_the_tier_is_closed(
    servers: list[Server],
) -> None:
    before = threading.enumerate()
    pool = on(servers, look_seconds=60.0)
    keys = keys_of(12)
    saved(pool, keys)
    for server in servers:
        server.stop()
    try:
        with tier_on(pool, deadline_seconds=60.0, look_seconds=0.05) as tier:
            assert tier.match_prefix(keys, namespace=ROOT) == 0
            loads = tier.load(
                keys, [aligned(SMALL.slot_bytes) for _ in keys], namespace=ROOT
            )
            with soon(4.0):
                tier.close(2.0)
            for end in ends(loads, LATE_SECONDS):
                assert not end.ok
    finally:
        for server in servers:
            server.cont()
    wait_until(
        lambda: (
            not begun_since(before, "pagoda-redis-nodes", "pagoda-redis-connect")
        )
    )


def test_a_forked_child_uses_the_pool(shared: list[Server]) -> None:
    prefix = fresh_prefix()
    keys = keys_of(12)
    pool = on(shared, prefix)
    with tier_on(pool) as tier:
        stores(tier, keys)
        healthy(tier, keys)

        def work() -> None:
            assert load(tier, keys, seconds=PATIENT_SECONDS) == [None] * len(keys)

        in_child(work)
        healthy(tier, keys)
