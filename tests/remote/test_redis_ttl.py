"""How long chunks stay in a real Redis, and in which order it evicts them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from pagoda.codec import HEADER_BYTES
from pagoda.config.remote_urls import parse
from pagoda.slab import aligned
from pagoda.tiers.base import Chunk
from pagoda.tiers.remote import redis as redis_module
from pagoda.tiers.remote import remote_tier
from pagoda.tiers.remote.redis import RedisClient, RedisConnection
from pagoda.tiers.remote.redis_cluster import RedisClusterClient
from pagoda.tiers.remote.redis_nodes import RedisNodesClient
from pagoda.tiers.remote.redis_pool import RedisPoolClient
from pagoda.tiers.remote.redis_ttl import LIFE_SECONDS, ChunkLives, ReuseAges
from pagoda.tiers.remote.remote_tier import RemoteTier
from pagoda.tiers.remote.store_client import GetRequest, PutRequest, PutResult
from pagoda_tools.cli.remote_stores import pinged
from testbed.patience import wait_until
from testbed.programs import need
from testbed.servers import Server, redis_cluster, redis_server
from tests.remote.chunks import (
    LARGE,
    PATIENT_SECONDS,
    ROOT,
    SMALL,
    chunks_of,
    ends,
    keys_of,
    name_of,
    tier_on,
)
from tests.remote.evil import LyingRedis, bulk
from tests.remote.redis_kit import redis_client

need("redis-server")
redis = pytest.importorskip("redis")

PAGE = np.arange(HEADER_BYTES, dtype=np.uint64).astype(np.uint8)
LIFE_MS = int(LIFE_SECONDS * 1000)
SECOND_MS = 1000
SIZES = (100, 3 << 20)
Client = "redis.Redis[bytes]"


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """Two servers: one evicts by life, the other by recency."""
    with (
        redis_server(
            "--maxmemory", "1gb", "--maxmemory-policy", "volatile-ttl"
        ) as by_life,
        redis_server(
            "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"
        ) as by_use,
    ):
        yield by_life, by_use


@pytest.fixture
def by_life(servers: tuple[Server, Server]) -> Server:
    servers[0].call("FLUSHALL")
    return servers[0]


@pytest.fixture
def by_use(servers: tuple[Server, Server]) -> Server:
    servers[1].call("FLUSHALL")
    return servers[1]


def soon() -> float:
    return time.monotonic() + 60.0


def opened(url: str, **options: object) -> contextlib.closing[RedisConnection]:
    return contextlib.closing(
        RedisClient(url, **options).connection().open(soon())
    )  # type: ignore[arg-type]


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def name(number: int) -> str:
    return f"pagoda:1:{ROOT.hex()}:{{{key(number).hex()}}}"


def put(
    connection: RedisConnection, number: int, rank: int = 0, size: int = 100
) -> PutResult:
    stored = np.full(size, number, np.uint8)
    return connection.put(
        PutRequest(ROOT, key(number), PAGE, stored, lambda: True, rank), soon()
    )


def get(
    connection: RedisConnection, number: int, rank: int = 0, size: int = 100
) -> bool:
    page = np.zeros(HEADER_BYTES, np.uint8)
    room = np.zeros(size, np.uint8)
    return (
        connection.get(
            GetRequest(ROOT, key(number), page, lambda: room, rank), soon()
        )
        == size
    )


def lives(client: Client, *numbers: int) -> list[int]:
    """Return how much of its whole life each chunk has lost, in milliseconds."""
    return [LIFE_MS - client.pttl(name(number)) for number in numbers]


@pytest.mark.parametrize("size", SIZES)
def test_a_position_costs_its_rank(by_life: Server, size: int) -> None:
    with (
        opened(by_life.url) as connection,
        redis_client(by_life) as client,
    ):
        for number, rank in enumerate((0, 60_000, 120_000)):
            assert put(connection, number, rank, size) is PutResult.STORED
        for lost, rank in zip(
            lives(client, 0, 1, 2), (0, 60_000, 120_000), strict=True
        ):
            assert rank <= lost < rank + 30 * SECOND_MS


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("gt", [True, False], ids=["GT", "no GT"])
def test_a_use_extends_and_never_shortens(
    by_life: Server, size: int, gt: bool
) -> None:
    with without_gt(by_life) as old, redis_client(by_life) as client:
        url = by_life.url if gt else f"redis://127.0.0.1:{old.port}"
        with opened(url) as connection, opened(url, ttl_seconds=100.0) as other:
            put(connection, 1, 0, size)
            uses: tuple[Callable[..., object], ...] = get, put
            for use in uses:
                for its_rank, lasting in (
                    (0, connection),
                    (9_000_000, connection),
                    (0, other),
                ):
                    client.pexpire(name(1), 200_000)
                    use(lasting, 1, its_rank, size)
                    expected = 200_000 if lasting is other else LIFE_MS - its_rank
                    assert expected - 30_000 < client.pttl(name(1)) <= expected
                    use(other, 1, 0, size)
                    assert expected - 30_000 < client.pttl(name(1)), (
                        "another machine shortened it"
                    )
            client.pexpire(name(1), 200_000)
            assert connection.touch(
                ROOT, [key(1), key(2)], soon(), [9_000_000, 0]
            ) == [True, False]
            assert other.touch(ROOT, [key(1)], soon(), [0]) == [True]
            assert 9_000_000 <= lives(client, 1)[0] < 9_030_000


@contextlib.contextmanager
def without_gt(server: Server) -> Iterator[LyingRedis]:
    """A server of version 6, as far as it matters here: PEXPIRE takes two arguments."""
    with contextlib.closing(LyingRedis(server.port)) as old:
        old.lies[b"PEXPIRE"] = lambda said: (
            [b"-ERR wrong number of arguments for 'pexpire' command\r\n"]
            if len(said) > 3
            else None
        )
        yield old


@pytest.mark.parametrize("gt", [True, False], ids=["GT", "no GT"])
@pytest.mark.parametrize("policy", ["volatile-ttl", "allkeys-lru"])
def test_a_chunk_without_a_life_gets_one(
    by_life: Server, by_use: Server, gt: bool, policy: str
) -> None:
    server = by_life if policy == "volatile-ttl" else by_use
    with (
        without_gt(server) as old,
        redis_client(server) as client,
        opened(
            server.url if gt else f"redis://127.0.0.1:{old.port}"
        ) as connection,
    ):
        put(connection, 1)
        uses: Sequence[Callable[[], object]] = (
            lambda: get(connection, 1),
            lambda: connection.touch(ROOT, [key(1)], soon()),
            lambda: put(connection, 1),
        )
        for use in uses:
            client.persist(name(1))
            use()
            assert 0 <= lives(client, 1)[0] < 30_000


def test_where_lives_rank_nothing_uses_write_nothing(by_use: Server) -> None:
    """Except now and then: what is used stays."""
    with (
        opened(by_use.url) as connection,
        redis_client(by_use) as client,
    ):
        put(connection, 1, rank=9_000_000)
        assert lives(client, 1)[0] < 30_000
        changed = client.info("persistence")["rdb_changes_since_last_save"]
        assert get(connection, 1)
        assert connection.touch(ROOT, [key(1)], soon()) == [True]
        assert (
            client.info("persistence")["rdb_changes_since_last_save"] == changed
        )
        for use in (
            lambda: get(connection, 1),
            lambda: connection.touch(ROOT, [key(1)], soon()),
        ):
            client.pexpire(name(1), LIFE_MS // 2)
            use()
            assert lives(client, 1)[0] < 30_000
    with (
        opened(by_use.url, ranks=True) as connection,
        redis_client(by_use) as client,
    ):
        put(connection, 2, rank=9_000_000)
        assert lives(client, 2)[0] >= 9_000_000, (
            "the URL says that it evicts by life"
        )


@pytest.mark.parametrize("change", ["policy", "failover", "rights"])
def test_what_changes_while_connected_is_noticed(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Connections in use live for days. As when somebody runs the command of our warning, or a
    replica takes over.
    """
    monkeypatch.setattr(redis_module, "_RULES_SECONDS", 0.0)
    uses: Sequence[Callable[[RedisConnection], object]] = (
        lambda connection: get(connection, 1),
        lambda connection: connection.touch(ROOT, [key(1)], soon()),
        lambda connection: put(connection, 1),
    )
    with (
        redis_server("--maxmemory", "1gb") as server,
        redis_client(server) as client,
    ):
        for use in uses:
            client.config_set(
                "maxmemory-policy",
                "allkeys-lru" if change == "policy" else "volatile-ttl",
            )
            client.execute_command(
                f"ACL SETUSER less on >x ~* +@all {'-pexpire' if change == 'rights' else ''}"
            )
            with opened(server.url) as writer:
                put(writer, 1)
            if change == "failover":
                client.replicaof("127.0.0.1", "1")
            with opened(f"redis://less:x@127.0.0.1:{server.port}") as connection:
                client.replicaof("NO", "ONE")
                client.execute_command("ACL SETUSER less +pexpire")
                client.config_set("maxmemory-policy", "volatile-ttl")
                client.pexpire(name(1), LIFE_MS - MINUTE_MS)
                use(connection)
                assert lives(client, 1)[0] < 30_000
        client.config_set("maxmemory-policy", "allkeys-lru")
        with opened(server.url) as connection:
            client.config_set("maxmemory-policy", "volatile-ttl")
            put(connection, 2, rank=9_000_000)
            assert lives(client, 2)[0] >= 9_000_000


def test_what_a_server_says_of_itself_is_asked_once_a_minute(
    by_life: Server,
) -> None:
    with (
        redis_client(by_life) as client,
        opened(by_life.url) as connection,
    ):
        put(connection, 1)
        client.config_resetstat()
        for _ in range(3):
            assert get(connection, 1)
            assert connection.touch(ROOT, [key(1)], soon())
        assert "cmdstat_info" not in client.info("commandstats")


def test_ranks_take_half_of_a_life_at_most(by_life: Server) -> None:
    with (
        opened(by_life.url, ttl_seconds=100.0) as connection,
        redis_client(by_life) as client,
    ):
        put(connection, 1, rank=10**12)
        assert 20_000 < client.pttl(name(1)) <= 50_000


MINUTE_MS = 60_000


def use_at_ages(
    url: str, client: Client, connection: RedisConnection, lives_ms: Sequence[int]
) -> None:
    """Use 16 chunks again and again: before each use they have, in turn, these lives left."""
    with opened(url) as writer:
        for number in range(100, 116):
            put(writer, number)
    keys = [key(number) for number in range(100, 116)]
    for step in range(200):
        with client.pipeline(transaction=False) as pipeline:
            for number in range(100, 116):
                pipeline.pexpire(
                    name(number), lives_ms[(step + number) % len(lives_ms)]
                )
            pipeline.execute()
        assert all(connection.touch(ROOT, keys, soon()))


@pytest.mark.slow
@pytest.mark.parametrize("gt", [True, False], ids=["GT", "no GT"])
def test_a_new_chunk_stays_as_long_as_most_reuse_takes(
    by_life: Server, gt: bool
) -> None:
    """And one that is used again stays to the end of the queue, which is ten minutes long here."""
    with without_gt(by_life) as old, redis_client(by_life) as client:
        client_of = RedisClient(
            by_life.url if gt else f"redis://127.0.0.1:{old.port}"
        )
        with contextlib.closing(
            client_of.connection().open(soon())
        ) as connection:
            put(connection, 1)
            assert lives(client, 1)[0] < MINUTE_MS, "nothing is known yet"
            use_at_ages(
                by_life.url,
                client,
                connection,
                [LIFE_MS - n * MINUTE_MS for n in range(11)],
            )
        with contextlib.closing(client_of.connection().open(soon())) as another:
            put(another, 2, rank=MINUTE_MS)
            mean = 5
            end = 10
            assert (
                (end - mean - 2) * MINUTE_MS
                < lives(client, 2)[0] - MINUTE_MS
                < (end - 2) * MINUTE_MS
            )
            assert get(another, 2)
            assert lives(client, 2)[0] < MINUTE_MS


def test_the_lives_of_machines_with_another_ttl_teach_nothing(
    by_life: Server,
) -> None:
    with (
        redis_client(by_life) as client,
        opened(by_life.url) as connection,
    ):
        use_at_ages(by_life.url, client, connection, [LIFE_MS // 10, 2 * LIFE_MS])
        put(connection, 1)
        assert lives(client, 1)[0] < MINUTE_MS
    mixed = ChunkLives(
        LIFE_MS, ReuseAges(), ranks=True
    )  # machines with this `ttl`, and as many with a tenth of it
    for _ in range(10_000):
        mixed.learn([LIFE_MS], 0)
        mixed.learn([LIFE_MS // 10], 0)
    assert mixed.ages.rank_of_new() < MINUTE_MS


def test_what_slow_traffic_taught_is_forgotten() -> None:
    """Else new chunks would be the first to be evicted once the traffic is faster."""
    ages = ReuseAges()
    for longest_ms, least, most in ((60 * MINUTE_MS, 10, 60), (MINUTE_MS, 0, 1)):
        for number in range(60_000):
            ages.record(longest_ms * (number % 10) / 10)
        assert least * MINUTE_MS <= ages.rank_of_new() < most * MINUTE_MS


@pytest.mark.parametrize("forbidden", ["info", "pttl", "pexpire"])
def test_a_user_without_a_right_reads_and_writes(
    by_life: Server, forbidden: str
) -> None:
    with redis_client(by_life) as client:
        client.execute_command(f"ACL SETUSER less on >x ~* +@all -{forbidden}")
        with opened(f"redis://less:x@127.0.0.1:{by_life.port}") as connection:
            stored = (
                put(connection, 1) if forbidden != "pexpire" else PutResult.STORED
            )
            assert stored is PutResult.STORED
            with opened(by_life.url) as whole:
                put(whole, 1)
            assert get(connection, 1)
            assert connection.touch(ROOT, [key(1), key(2)], soon()) == [
                True,
                False,
            ]
            with contextlib.suppress(Exception):
                assert any(
                    "+pttl +pexpire" in text
                    for text in connection.usage(soon()).warnings
                )


# of life between two chunks: a busy machine may pause for seconds
STEP_MS = 200_000


@pytest.fixture
def far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_tier, "_RANK_MS", STEP_MS)


def test_a_chunk_that_was_received_is_served_whatever_becomes_of_its_life(
    by_life: Server,
) -> None:
    with without_gt(by_life) as old, opened(by_life.url) as writer:
        put(writer, 1)
        with opened(f"redis://127.0.0.1:{old.port}", ranks=True) as connection:
            old.lies[b"PEXPIRE"] = lambda said: [b"no answer of a Redis\r\n"]
            assert get(connection, 1)
            with pytest.raises(OSError):
                get(connection, 1)


def placed(keys: Sequence[bytes]) -> list[Chunk]:
    return [
        chunk._replace(position=far(n)) for n, chunk in enumerate(chunks_of(keys))
    ]


def far(step: int) -> int:
    """Return a position so far down a chain that its chunk has so many times `STEP_MS` less life
    than the head.
    """
    return 2**step - 1


def check_order(
    tier: RemoteTier, clients: Sequence[Client], prefix: str = "pagoda"
) -> None:
    """Check that a chain that is stored, read or touched is evicted from its tail, whatever the
    order of the calls.
    """
    keys = keys_of(9)

    def lasts() -> list[float]:
        """Return for each chunk by how many steps it is evicted before the head."""
        found = {
            each: client.pexpiretime(each)
            for client in clients
            for each in client.keys("*")
        }
        ends = [found[name_of(prefix, each).encode()] for each in keys]
        return [(ends[0] - end) / STEP_MS for end in ends]

    def stepwise() -> bool:
        return all(abs(lost - n) < 0.5 for n, lost in enumerate(lasts()))

    backwards = list(reversed(list(enumerate(keys))))
    for end in ends(tier.store(list(reversed(placed(keys))), ROOT)):
        assert end.ok
    assert stepwise()
    for client in clients:
        for each in client.keys("*"):
            client.persist(each)
    for n, each in backwards:
        room = [aligned(SMALL.slot_bytes)]
        assert ends(tier.load([each], room, start=far(n), namespace=ROOT))[0].ok
    assert stepwise()
    for client in clients:
        for each in client.keys("*"):
            client.pexpire(each, 1000_000)
    for n, each in backwards:
        assert tier.touch([each], namespace=ROOT, start=far(n)) == [True]
    assert stepwise()
    late = time.monotonic_ns() - 3600 * 10**9
    assert tier.touch(keys[:1], namespace=ROOT, start=0, stamp=late) == [True]
    assert stepwise(), "a request that was made an hour ago counts as that old"


@pytest.mark.usefixtures("far_apart")
def test_a_tail_is_evicted_before_its_head(by_life: Server) -> None:
    with (
        tier_on(RedisClient(by_life.url)) as tier,
        redis_client(by_life) as client,
    ):
        check_order(tier, [client])


def test_a_draft_is_not_the_first_to_be_evicted(by_life: Server) -> None:
    """A draft with a life of seconds would go before every chunk, while it is written."""
    seen: list[int] = []
    with (
        opened(by_life.url) as connection,
        redis_client(by_life) as client,
    ):

        def is_valid() -> bool:
            seen.extend(client.pttl(each) for each in client.keys("*:w:*"))
            return True

        connection.put(
            PutRequest(ROOT, key(1), PAGE, np.zeros(3 << 20, np.uint8), is_valid),
            soon(),
        )
    assert len(seen) == 1
    assert seen[0] > LIFE_MS - 60_000


def test_a_mark_of_a_first_request_is_not_the_first_to_be_evicted(
    by_life: Server,
) -> None:
    """A mark with a life of an hour would go before every chunk, and nothing would ever be sent."""
    with (
        opened(by_life.url, second_sight=True) as connection,
        redis_client(by_life) as client,
    ):
        assert connection.claim(ROOT, [key(1)], soon()) == [PutResult.UNSEEN]
        assert client.pttl(name(1) + ":g") > LIFE_MS - 60_000


@pytest.mark.usefixtures("far_apart")
def test_a_writer_whose_draft_is_evicted_asks_again_how_the_server_evicts() -> (
    None
):
    with (
        redis_server(
            "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"
        ) as server,
        tier_on(RedisClient(server.url), LARGE, connections=1) as tier,
        redis_client(server) as client,
    ):
        keys = keys_of(2)
        assert tier.put_many(chunks_of(keys[:1], LARGE), namespace=ROOT) == 1
        client.config_set("maxmemory-policy", "volatile-ttl")
        taken = threading.Event()

        def still_valid() -> bool:
            for draft in client.keys("*:w:*"):
                if not taken.is_set() and client.pttl(draft) < LIFE_MS / 2:
                    taken.set()
                    client.delete(draft)
            return True

        (chunk,) = chunks_of(keys[1:], LARGE)
        (end,) = ends(
            tier.store(
                [chunk._replace(position=far(1), still_valid=still_valid)], ROOT
            )
        )
        assert taken.is_set()
        assert end.ok
        assert client.pttl(name_of("pagoda", keys[1])) <= LIFE_MS - STEP_MS, (
            "now its life ranks it"
        )


@pytest.mark.slow
@pytest.mark.usefixtures("far_apart")
@pytest.mark.parametrize("kind", ["pool", "cluster"])
def test_the_policy_of_every_node_counts(kind: str) -> None:
    options = ("--maxmemory", "1gb", "--maxmemory-policy", "volatile-ttl")
    with contextlib.ExitStack() as stack:
        if kind == "pool":
            nodes = [
                stack.enter_context(redis_server(*options)) for _ in range(3)
            ]
        else:
            nodes = stack.enter_context(redis_cluster(3, *options))
        made: type[RedisNodesClient] = (
            RedisPoolClient if kind == "pool" else RedisClusterClient
        )
        url = f"redis+{kind}://" + ",".join(
            f"127.0.0.1:{node.port}" for node in nodes
        )
        remote = made(url, look_seconds=PATIENT_SECONDS)
        tier = stack.enter_context(tier_on(remote))
        check_order(
            tier,
            [stack.enter_context(redis_client(node)) for node in nodes],
        )


MENDS = {
    "maxmemory is 0": ("CONFIG SET maxmemory ", ("maxmemory", "0")),
    "maxmemory-policy is noeviction": (
        "volatile-ttl",
        ("maxmemory-policy", "noeviction"),
    ),
    "maxmemory-policy is allkeys-lru": (
        "volatile-ttl",
        ("maxmemory-policy", "allkeys-lru"),
    ),
    "forks": ("CONFIG SET save ''", ("save", "3600 1")),
    "appendonly is yes": ("CONFIG SET appendonly no", ("appendonly", "yes")),
}


@pytest.mark.parametrize("sign", MENDS)
def test_what_is_wrong_with_a_server_is_said_with_its_mend(sign: str) -> None:
    mend, (option, value) = MENDS[sign]
    with (
        redis_server(
            "--maxmemory", "1gb", "--maxmemory-policy", "volatile-ttl"
        ) as server,
        redis_client(server) as client,
        opened(server.url, ranks=True) as connection,
    ):
        put(connection, 1)
        assert list(connection.usage(soon()).warnings) == []
        client.config_set(option, value)
        (warning,) = connection.usage(soon()).warnings
        assert sign in warning
        assert mend in warning
        (asked,) = pinged([parse(f"{server.url}?evict=ttl")])
        assert not asked.trouble
        assert warning in asked.warnings[0]
        client.execute_command("ACL SETUSER less on >x ~* +@all -config")
        with opened(
            f"redis://less:x@127.0.0.1:{server.port}", ranks=True
        ) as less:
            assert list(less.usage(soon()).warnings) == (
                [] if option == "save" else [warning]
            )


@pytest.mark.parametrize("prefix", ["pagoda", "team:kv"])
@pytest.mark.parametrize("db", [0, 1])
def test_keys_of_others_are_seen(by_life: Server, db: int, prefix: str) -> None:
    with (
        opened(by_life.url, prefix=prefix) as connection,
        redis.Redis(port=by_life.port, db=db) as client,
    ):
        put(connection, 1)
        assert list(connection.usage(soon()).warnings) == []
        client.set("session:1", "theirs", ex=1800)
        (warning,) = connection.usage(soon()).warnings
        assert f"database {db}" in warning
        assert "redis-server --port" in warning


def test_a_scan_may_give_more_names_than_it_was_asked_for(
    by_life: Server,
) -> None:
    """As while the server saves: its table of names does not grow then."""
    names = b"*2\r\n$1\r\n0\r\n*200\r\n" + bulk(b"session:1") * 200
    with contextlib.closing(LyingRedis(by_life.port)) as proxy:
        proxy.lies[b"SCAN"] = lambda said: [names]
        with opened(f"redis://127.0.0.1:{proxy.port}") as connection:
            (warning,) = connection.usage(soon()).warnings
    assert "keys of others" in warning


def test_the_log_says_once_what_is_wrong(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with redis_server() as server, tier_on(RedisClient(server.url)) as tier:
        for _ in range(3):
            assert tier.match_prefix(keys_of(1), namespace=ROOT) == 0
            tier.stats()
        wait_until(lambda: bool(caplog.records), 10.0)
        (line,) = [
            one.getMessage()
            for one in caplog.records
            if "maxmemory" in one.getMessage()
        ]
        assert "CONFIG SET maxmemory " in line
        assert "noeviction" in line
