"""A Redis Cluster as a remote store: slots that move, masters that die, what a plain URL says."""

from __future__ import annotations

import random
import time
from binascii import crc_hqx
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis as client

from pagoda.base.metrics import Reason
from pagoda.config.remote_urls import parse
from pagoda.layout import KVLayout
from pagoda.slab import aligned
from pagoda.tiers.remote.redis import RedisClient
from pagoda.tiers.remote.redis_cluster import RedisClusterClient, SlotRange
from pagoda.tiers.remote.redis_pool import RedisPoolClient
from pagoda.tiers.remote.store_client import GetRequest, PutRequest, RefusedError
from testbed.patience import Patience, wait_until
from testbed.servers import Server, free_port, redis_cluster, redis_server
from tests.remote.chunks import (
    LARGE,
    PATIENT_SECONDS,
    ROOT,
    SMALL,
    fresh_prefix,
    keys_of,
    load,
    name_of,
    payload_of,
    save,
    saved,
    stores,
    tier_on,
    under_load,
    walk,
)
from tests.remote.evil import LyingRedis
from tests.remote.redis_kit import redis_client

FULL_COVERAGE = ("--cluster-require-full-coverage", "no")


@pytest.fixture(scope="module")
def shared() -> Iterator[list[Server]]:
    """Three masters for tests that leave them as they were, but for the places of slots."""
    with redis_cluster() as servers:
        yield servers


def on(*servers: Server, prefix: str, **options: object) -> RedisClusterClient:
    """The engine over the cluster of these nodes; it waits long for each unless told otherwise."""
    places = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    wanted: dict[str, object] = {"look_seconds": PATIENT_SECONDS}
    wanted |= options
    return RedisClusterClient(
        f"redis+cluster://{places}", prefix=prefix, **wanted
    )  # type: ignore[arg-type]


def slot_of(key: bytes) -> int:
    return crc_hqx(key.hex().encode(), 0) % 16384


def begin_move(slot: int, source: Server, target: Server) -> None:
    target.call(
        "CLUSTER",
        "SETSLOT",
        str(slot),
        "IMPORTING",
        source.call("CLUSTER", "MYID").split()[-1],
    )
    source.call(
        "CLUSTER",
        "SETSLOT",
        str(slot),
        "MIGRATING",
        target.call("CLUSTER", "MYID").split()[-1],
    )


def finish_move(slot: int, source: Server, target: Server) -> None:
    with redis_client(source) as sending:
        while names := sending.execute_command(
            "CLUSTER", "GETKEYSINSLOT", slot, 10
        ):
            sending.execute_command(
                "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *names
            )
    for server in (target, source):
        server.call(
            "CLUSTER",
            "SETSLOT",
            str(slot),
            "NODE",
            target.call("CLUSTER", "MYID").split()[-1],
        )


def owner(servers: Sequence[Server], slot: int) -> Server:
    """Return the server that says that the slot is its own."""
    for server in servers:
        for line in server.call("CLUSTER", "NODES").splitlines():
            if "myself" in line:
                for part in line.split()[8:]:
                    first, _, last = part.partition("-")
                    if first.isdigit() and int(first) <= slot <= int(
                        last or first
                    ):
                        return server
    raise LookupError(slot)


def test_a_key_is_where_the_cluster_has_it(shared: list[Server]) -> None:
    prefix = fresh_prefix()
    keys = keys_of(40)
    remote = on(shared[1], prefix=prefix)
    saved(remote, keys)
    for key in keys:
        with client.Redis(port=owner(shared, slot_of(key)).port) as truth:
            assert truth.exists(name_of(prefix, key)) == 1
            assert truth.execute_command(
                "CLUSTER", "KEYSLOT", name_of(prefix, key)
            ) == slot_of(key)
    connection = remote.connection().open(time.monotonic() + PATIENT_SECONDS)
    try:
        until = time.monotonic() + PATIENT_SECONDS
        connection.ping(until)
        assert connection.find(ROOT, keys, until) == 40
        assert connection.touch(ROOT, [*keys[:2], bytes(32)], until) == [
            True,
            True,
            False,
        ]
        assert connection.count_by_namespace(walk(5)) == {ROOT: 40}
        assert connection.usage(until).used_bytes
        assert connection.remove(ROOT, keys[:3], until) == 3
        assert connection.find(ROOT, keys, until) == 0
        assert connection.clear(None, walk(5)) == 37
        assert connection.count_by_namespace(walk(5)) == {}
    finally:
        connection.close()


def test_the_documented_user_may_do_all_we_do(shared: list[Server]) -> None:
    """The rule of docs/how-to/redis.md, with what a cluster needs more."""
    page = (
        Path(__file__).parents[2] / "docs" / "how-to" / "redis.md"
    ).read_text()
    (rule,) = [
        line.strip()
        for line in page.splitlines()
        if line.strip().startswith("ACL SETUSER pagoda")
    ]
    for server in shared:
        server.call(*rule.split(), "+cluster|slots", "+asking")
    url = f"redis+cluster://pagoda:PASSWORD@127.0.0.1:{shared[0].port}"
    with tier_on(
        RedisClusterClient(url, look_seconds=PATIENT_SECONDS),
        LARGE,
        look_seconds=5.0,
    ) as tier:
        keys = keys_of(12)
        stores(tier, keys, LARGE)
        tier._store.presence.clear()
        wait_until(lambda: tier.match_prefix(keys, namespace=ROOT) == 12)
        wait_until(lambda: load(tier, keys, LARGE) == [None] * 12)
        assert tier.remove(keys[0], ROOT)
        assert tier.clear(ROOT) == 11


def test_a_plain_url_that_meets_a_cluster_says_what_to_write(
    shared: list[Server],
) -> None:
    for server in shared:
        connection = RedisClient(server.url).connection()
        try:
            with pytest.raises(
                RefusedError,
                match=r"write redis\+cluster://127.0.0.1:\d+ \(MOVED",
            ):
                connection.open(time.monotonic() + 10)
                connection.find(ROOT, keys_of(40), time.monotonic() + 10)
        finally:
            connection.close()


def test_a_pool_that_meets_a_cluster_says_what_to_write(
    shared: list[Server], caplog: pytest.LogCaptureFixture
) -> None:
    places = ",".join(f"127.0.0.1:{server.port}" for server in shared)
    with tier_on(RedisPoolClient(f"redis+pool://{places}")) as tier:
        wait_until(
            lambda: (
                bool(load(tier, keys_of(3)))
                and "write redis+cluster://127.0.0.1" in caplog.text
            )
        )


def test_a_cluster_that_is_none_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with redis_server() as server, tier_on(on(server, prefix="p")) as tier:
        wait_until(lambda: bool(load(tier, keys_of(3))) and tier.resting)
        assert "cluster support disabled" in caplog.text


def test_a_slot_that_has_moved_is_followed(shared: list[Server]) -> None:
    prefix = fresh_prefix()
    keys = keys_of(20)
    with tier_on(
        on(shared[0], prefix=prefix),
        look_seconds=5.0,
    ) as tier:
        stores(tier, keys)
        for key in keys[:3]:
            source = owner(shared, slot_of(key))
            target = next(server for server in shared if server is not source)
            begin_move(slot_of(key), source, target)
            finish_move(slot_of(key), source, target)
        wait_until(lambda: load(tier, keys) == [None] * 20)
        tier._store.presence.clear()
        wait_until(lambda: tier.match_prefix(keys, namespace=ROOT) == 20)
        for key in keys[:3]:
            assert tier.remove(key, ROOT)
        wait_until(lambda: [end.ok for end in save(tier, keys)] == [True] * 20)
        wait_until(lambda: load(tier, keys) == [None] * 20)
        assert not tier.resting
        assert tier.stats()["failed_checks"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_a_slot_that_is_being_moved_is_read_where_its_chunks_are(
    shared: list[Server], layout: KVLayout
) -> None:
    """Some of its chunks are on the node that receives it, which serves nothing of it without
    ASKING.
    """
    prefix = fresh_prefix()
    keys = keys_of(12)
    remote = on(shared[0], prefix=prefix)
    with tier_on(remote, layout, look_seconds=5.0) as tier:
        stores(tier, keys[:10], layout)
        moves = []
        for key in (keys[0], keys[4], keys[11]):  # the last is not stored
            source = owner(shared, slot_of(key))
            target = next(server for server in shared if server is not source)
            moves.append((slot_of(key), source, target))
            begin_move(*moves[-1])
            with redis_client(source) as sending:
                sending.execute_command(
                    "MIGRATE",
                    "127.0.0.1",
                    target.port,
                    name_of(prefix, key),
                    0,
                    5000,
                )
        connection = remote.connection().open(time.monotonic() + PATIENT_SECONDS)
        try:
            until = time.monotonic() + PATIENT_SECONDS
            assert connection.find(ROOT, keys, until) == 10
            wait_until(lambda: load(tier, keys[:10], layout) == [None] * 10)
            assert (
                connection.touch(ROOT, keys, until) == [True] * 10 + [False] * 2
            )
            assert connection.remove(ROOT, [keys[4]], until) == 1
            assert connection.find(ROOT, keys, until) == 4
        finally:
            connection.close()
        assert [
            (end.ok, end.reason) for end in save(tier, keys[11:], layout)
        ] == [(False, Reason.BUSY)]
        assert not tier.resting
        for move in moves:
            finish_move(*move)
        wait_until(
            lambda: (
                save(tier, keys, layout)[-1].ok
                and load(tier, keys, layout) == [None] * 12
            )
        )
        assert tier.stats()["failed_checks"] == 0


def test_a_draft_that_is_moved_is_dropped(shared: list[Server]) -> None:
    """The slot begins to move when all of the chunk was sent: it is not published in parts, and
    nothing is left.
    """
    prefix = fresh_prefix()
    (key,) = keys_of(1, chain=7)
    source = owner(shared, slot_of(key))
    target = next(server for server in shared if server is not source)
    connection = (
        on(shared[0], prefix=prefix)
        .connection()
        .open(time.monotonic() + PATIENT_SECONDS)
    )

    def move() -> bool:
        begin_move(slot_of(key), source, target)
        with redis_client(source) as sending:
            names = sending.keys(f"{prefix}:*")
            assert len(names) == 2  # the draft and the claim
            sending.execute_command(
                "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *names
            )
        return True

    try:
        page = aligned(4096)
        payload = payload_of(key, LARGE)
        assert connection.claim(
            ROOT, [key], time.monotonic() + PATIENT_SECONDS
        ) == [None]
        with pytest.raises(RefusedError) as refused:
            connection.put(
                PutRequest(ROOT, key, page, payload, move),
                time.monotonic() + PATIENT_SECONDS,
            )
        assert refused.value.reason is Reason.BUSY
        assert refused.value.contained
        for server in shared:
            with redis_client(server) as truth:
                assert not truth.keys(f"{prefix}:*")
    finally:
        connection.close()
        finish_move(slot_of(key), source, target)


def test_where_a_slot_is_moved_to_is_checked(shared: list[Server]) -> None:
    """A node that lies costs a miss."""
    with redis_server() as server:
        liar = LyingRedis(server.port)
        gone = free_port()
        slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$0\r\n\r\n:%d\r\n" % liar.port
        liar.lies[b"CLUSTER"] = lambda _: [slots]
        remote = RedisClusterClient(
            f"redis+cluster://127.0.0.1:{liar.port}", look_seconds=PATIENT_SECONDS
        )
        try:
            saved(remote, keys_of(3))
            for place in (
                b":0",
                b"a@b:1",
                b"127.0.0.1:%d" % gone,
                b"127.0.0.1:99999999",
                b"x",
                b":%d" % liar.port,
            ):
                lie = b"-ASK 1 %b\r\n" % place
                liar.lies[b"HGET"] = liar.lies[b"EXISTS"] = lambda _, lie=lie: [
                    lie
                ]
                connection = remote.connection().open(time.monotonic() + 10)
                with pytest.raises(RefusedError) as refused:
                    connection.get(
                        GetRequest(
                            ROOT, keys_of(1)[0], aligned(4096), lambda: None
                        ),
                        time.monotonic() + 10,
                    )
                assert refused.value.contained
                with pytest.raises(RefusedError) as refused:
                    connection.find(ROOT, keys_of(3), time.monotonic() + 10)
                assert refused.value.contained
                connection.close()
        finally:
            liar.close()


def reshard(servers: Sequence[Server], keys: Sequence[bytes]) -> None:
    """Move the slot of each key to another of these masters."""
    for key in keys:
        source = owner(servers, slot_of(key))
        target = random.Random(key).choice(
            [server for server in servers if server is not source]
        )
        begin_move(slot_of(key), source, target)
        finish_move(slot_of(key), source, target)


@pytest.mark.slow
def test_loads_go_on_while_the_cluster_is_resharded(shared: list[Server]) -> None:
    prefix = fresh_prefix()
    keys = keys_of(30)
    remote = on(*shared, prefix=prefix)
    # a busy machine is no node that fails
    with tier_on(remote) as tier:
        stores(tier, keys)

        outcomes = under_load(tier, keys, lambda: reshard(shared, keys))
        assert outcomes[None] > 0.9 * outcomes.total(), outcomes
        wait_until(lambda: load(tier, keys) == [None] * 30)
        assert not tier.resting
        assert tier.stats()["failed_checks"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [FULL_COVERAGE, ()], ids=["partial", "full-coverage"]
)
def test_after_a_reshard_a_killed_master_is_replaced_by_its_replica(
    options: tuple[str, ...],
) -> None:
    with redis_cluster(3, *options, replicas=1) as servers:
        prefix = fresh_prefix()
        keys = keys_of(60)
        saved(on(*servers[:2], prefix=prefix), keys)
        with tier_on(on(*servers, prefix=prefix), look_seconds=1.0) as tier:
            wait_until(lambda: load(tier, keys) == [None] * 60)
            outcomes = under_load(
                tier, keys, lambda: reshard(servers[:3], keys[:10])
            )
            assert outcomes[None] > 0.9 * outcomes.total(), outcomes
            wait_until(lambda: load(tier, keys) == [None] * 60)
            here = [
                key
                for key in keys
                if owner(servers[:3], slot_of(key)) is servers[0]
            ]
            for server in servers[:3]:
                server.call("WAIT", "1", "5000")

            def kill() -> None:
                servers[0].kill()
                patience = Patience(25)
                while set(load(tier, keys)) != {None}:
                    assert not patience.ended, patience.said()
                print(f"misses ended after {patience.waited:.1f} s")

            under_load(tier, keys, kill)
            assert 0 < len(here) < 60
            assert tier.stats()["failed_checks"] == 0
            servers[0].restart()  # it becomes a replica
            wait_until(lambda: "slave" in servers[0].call("ROLE"))
            wait_until(lambda: load(tier, keys) == [None] * 60)
            wait_until(
                lambda: (
                    {end.ok for end in save(tier, keys_of(20, chain=100))}
                    == {True}
                )
            )


@pytest.mark.slow
def test_a_cluster_works_over_tls() -> None:
    with redis_cluster(2, tls=True) as servers:
        place = f"127.0.0.1:{servers[0].port}"
        spec = parse(
            f"rediss+cluster://{place}?ssl_ca_certs={servers[0].ca}&look=30s"
        )
        keys = keys_of(20)
        saved(spec.engine(), keys)
        with tier_on(spec.engine()) as tier:
            wait_until(lambda: load(tier, keys) == [None] * 20)
            source, target = (
                servers
                if owner(servers, slot_of(keys[0])) is servers[0]
                else servers[::-1]
            )
            begin_move(slot_of(keys[0]), source, target)
            name = name_of(spec.prefix, keys[0])
            source.call(
                "MIGRATE", "127.0.0.1", str(target.port), name, "0", "5000"
            )
            wait_until(lambda: load(tier, keys) == [None] * 20)
        for server in servers:
            assert int(server.call("DBSIZE")[1:]) > 0
        untrusting = parse(f"rediss+cluster://{place}").engine().connection()
        with pytest.raises(OSError, match="certificate verify failed"):
            untrusting.open(time.monotonic() + 10)


@pytest.mark.slow
def test_hosts_without_the_names_that_are_preferred_are_reached_by_address() -> (
    None
):
    with redis_cluster(
        2, "--cluster-preferred-endpoint-type", "hostname"
    ) as servers:
        remote = on(servers[0], prefix="p")
        saved(remote, keys_of(20), SMALL)
        assert {node.place for node in remote.nodes} == {
            f"127.0.0.1:{server.port}" for server in servers
        }


@pytest.mark.slow
def test_a_node_with_an_ipv6_address_stays_the_same_node() -> None:
    options = (
        "--cluster-enabled",
        "yes",
        "--bind",
        "127.0.0.1",
        "::1",
        "--cluster-announce-ip",
        "::1",
    )
    with redis_server(*options) as server:
        server.call("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        wait_until(lambda: "cluster_state:ok" in server.call("CLUSTER", "INFO"))
        remote = RedisClusterClient(f"redis+cluster://[::1]:{server.port}")
        for _ in range(2):
            remote.refresh(time.monotonic() + 5)
            assert remote.nodes == remote._seeds


def test_what_a_lying_node_says_of_slots_is_checked() -> None:
    with redis_server() as server:
        liar = LyingRedis(server.port)
        try:
            for lie in (
                b"*0",
                b":1",
                b"*1\r\n:5",
                b"*1\r\n*3\r\n:0\r\n:99999\r\n*2\r\n$1\r\na\r\n:1",
                b"*9999999",
                b"*1\r\n*3\r\n:5\r\n:1\r\n*2\r\n$1\r\na\r\n:1",
                b"*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n$3\r\na@b\r\n:1",
                b"*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n$1\r\na\r\n:0",
                b"*1\r\n*2\r\n:0\r\n:1",
                b"*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n$3\r\na:b\r\n:1",
            ):
                liar.lies[b"CLUSTER"] = lambda _, lie=lie: [lie + b"\r\n"]
                remote = RedisClusterClient(
                    f"redis+cluster://127.0.0.1:{liar.port}"
                )
                with pytest.raises(OSError):
                    remote.connection().open(time.monotonic() + 5)
            slots = (
                b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$0\r\n\r\n:%d\r\n"
                % server.port
            )
            liar.lies[b"CLUSTER"] = lambda _: [slots]
            remote = RedisClusterClient(
                f"redis+cluster://127.0.0.1:{liar.port}",
                look_seconds=PATIENT_SECONDS,
            )
            # without a host it is the one that was asked
            saved(remote, keys_of(3), SMALL)
            assert server.call("DBSIZE") == ":3\r\n"
            saved(remote, keys_of(3, chain=1), LARGE)
        finally:
            liar.close()


def test_a_node_is_reached_by_the_name_that_the_cluster_gives_it() -> None:
    """A certificate may be for that name alone; which node it is does not depend on the
    spelling.
    """
    cluster = RedisClusterClient("redis+cluster://127.0.0.1:7001")
    seed = cluster.nodes[0]
    cluster._learn(
        [
            SlotRange(0, 9, "localhost", 7000),
            SlotRange(10, 16383, "localhost", 7001),
        ],
        seed,
    )
    other, same = cluster.nodes
    assert other.client.address == "redis://localhost:7000/0"
    assert other.place == "127.0.0.1:7000"
    assert same is seed
