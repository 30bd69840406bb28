"""A connection to a real Redis: what it stores, finds, serves and removes, and that nothing else is
ever touched.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from pagoda.base.errors import ConfigError
from pagoda.base.metrics import Reason
from pagoda.codec import HEADER_BYTES
from pagoda.tiers.base import Bytes
from pagoda.tiers.remote.redis import PIECE_BYTES, RedisClient, RedisConnection
from pagoda.tiers.remote.redis_ttl import LIFE_SECONDS
from pagoda.tiers.remote.resp import Reply, ReplyShape
from pagoda.tiers.remote.store_client import (
    GetRequest,
    PutRequest,
    PutResult,
    RefusedError,
)
from testbed.patience import wait_until
from testbed.programs import need
from testbed.servers import Server
from tests.remote.chunks import walk

need("redis-server")
redis = pytest.importorskip("redis")

MIB = 1 << 20
ROOT = b"\x01" * 32
OTHER = b"\x02" * 32
SIZES = [
    0,
    1,
    4096,
    PIECE_BYTES,
    PIECE_BYTES + 1,
    MIB - 1,
    4 * PIECE_BYTES,
    6 * PIECE_BYTES,
    MIB,
    MIB + 1,
    3 * MIB + 5,
    5 * MIB,
    8 * MIB,
    32 * MIB - 3,
    70 * MIB + 1,
]
Client = "redis.Redis[bytes]"


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(seed: int, size: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 255, size, np.uint8)


def name_of(number: int) -> str:
    return f"pagoda:1:{ROOT.hex()}:{{{key(number).hex()}}}"


def always() -> bool:
    return True


PAGE = content(0, HEADER_BYTES)


def put(
    connection: RedisConnection,
    number: int,
    stored: Bytes,
    usable: Callable[[], bool] = always,
    root: bytes = ROOT,
    seconds: float = 10.0,
) -> PutResult:
    (claim,) = connection.claim(root, [key(number)], soon(seconds))
    return claim or connection.put(
        PutRequest(root, key(number), PAGE, stored, usable), soon(seconds)
    )


def get(
    connection: RedisConnection, number: int, size: int, root: bytes = ROOT
) -> Bytes | None:
    page = np.zeros(HEADER_BYTES, np.uint8)
    room = np.zeros(size, np.uint8)
    got = connection.get(
        GetRequest(root, key(number), page, lambda: room), soon()
    )
    if got is None:
        return None
    assert got == size
    assert np.array_equal(page, PAGE)
    return room


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with redis.Redis.from_url(server.url) as connected:
        connected.flushall()
        connected.config_set("maxmemory", 0)
        yield connected


@pytest.fixture
def connection(server: Server, client: Client) -> Iterator[RedisConnection]:
    made = RedisClient(server.url).connection().open(soon())
    yield made
    made.close()


@pytest.fixture
def second(server: Server, client: Client) -> Iterator[RedisConnection]:
    made = RedisClient(server.url).connection().open(soon())
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_what_was_put_is_got(
    connection: RedisConnection, client: Client, size: int
) -> None:
    stored = content(1, size)
    assert put(connection, 1, stored) is PutResult.STORED
    assert connection.find(ROOT, [key(1), key(2)], soon()) == 1
    came = get(connection, 1, size)
    assert came is not None
    assert np.array_equal(came, stored)
    (name,) = client.keys("*")
    assert name == b"pagoda:1:%b:{%b}" % (
        ROOT.hex().encode(),
        key(1).hex().encode(),
    )
    pieces = -(-size // PIECE_BYTES)
    assert set(client.hkeys(name)) == {b"h", *(b"%d" % i for i in range(pieces))}
    assert 0 < client.ttl(name) <= LIFE_SECONDS
    assert connection.remove(ROOT, [key(1), key(2)], soon()) == 1
    assert get(connection, 1, size) is None
    assert client.dbsize() == 0


def test_find_is_the_leading_run(connection: RedisConnection) -> None:
    for number in (0, 1, 2, 4):
        put(connection, number, content(number, 100))
    assert connection.find(ROOT, [key(i) for i in range(6)], soon()) == 3
    assert connection.find(ROOT, [key(9)], soon()) == 0
    assert connection.find(ROOT, [], soon()) == 0
    assert connection.find(OTHER, [key(0)], soon()) == 0


def test_thousands_of_keys_are_found_in_order(
    connection: RedisConnection, client: Client
) -> None:
    with client.pipeline(transaction=False) as pipeline:
        for number in range(9000):
            pipeline.hset(name_of(number), "h", b"")
        pipeline.execute()
    assert connection.find(ROOT, [key(i) for i in range(9000)], soon(30)) == 9000
    assert (
        connection.find(ROOT, [key(i) for i in range(8990, 9100)], soon()) == 10
    )
    assert (
        connection.remove(ROOT, [key(i) for i in range(10000)], soon(30)) == 9000
    )


@pytest.mark.slow
def test_a_ttl_begins_when_the_chunk_is_whole(
    server: Server, client: Client
) -> None:
    connection = (
        RedisClient(server.url, ttl_seconds=0.4).connection().open(soon())
    )
    for number, size in enumerate((100, 2 * MIB)):
        assert put(connection, number, content(1, size)) is PutResult.STORED
        # -1 has no end; -2 has ended already, on a busy machine
        for name in client.keys("*"):
            assert client.pttl(name) in (-2, *range(401))
        wait_until(lambda: client.dbsize() == 0)
        assert get(connection, number, size) is None
    connection.close()


@pytest.mark.parametrize("size", [100, 3 * MIB])
def test_what_is_not_usable_leaves_nothing(
    connection: RedisConnection, client: Client, size: int
) -> None:
    asked: list[int] = []

    def usable() -> bool:
        asked.append(client.exists(name_of(1)))
        return False

    assert put(connection, 1, content(1, size), usable) is PutResult.STALE
    assert asked == [0], "asked once, before the value appears"
    assert client.dbsize() == 0
    assert put(connection, 1, content(1, size)) is PutResult.STORED


@pytest.mark.parametrize("size", [100, 3 * MIB])
def test_what_is_there_stays(
    connection: RedisConnection, client: Client, size: int
) -> None:
    first = content(1, size)
    assert put(connection, 1, first) is PutResult.STORED
    assert put(connection, 1, content(2, size)) is PutResult.PRESENT
    assert np.array_equal(get(connection, 1, size), first)
    assert client.dbsize() == 1


@pytest.mark.parametrize("size", [500, 3 * MIB])
def test_of_two_writers_one_writes(
    connection: RedisConnection,
    second: RedisConnection,
    client: Client,
    size: int,
) -> None:
    answers: list[PutResult] = []

    def usable() -> bool:
        answers.append(put(second, 1, content(2, size)))
        return True

    assert put(connection, 1, content(1, size), usable) is PutResult.STORED
    assert answers == [PutResult.BUSY]
    assert put(second, 1, content(2, size)) is PutResult.PRESENT
    assert client.dbsize() == 1


@pytest.mark.parametrize("size", [500, 3 * MIB])
def test_of_two_writers_with_a_claim_that_has_expired_the_first_to_end_wins(
    connection: RedisConnection,
    second: RedisConnection,
    client: Client,
    size: int,
) -> None:
    answers: list[PutResult] = []

    def usable() -> bool:
        client.delete(name_of(1) + ":w")
        answers.append(put(second, 1, content(2, size)))
        return True

    assert put(connection, 1, content(1, size), usable) is PutResult.PRESENT
    assert answers == [PutResult.STORED]
    assert client.dbsize() == 1
    assert np.array_equal(get(connection, 1, size), content(2, size))


def test_a_chunk_that_comes_between_question_and_claim_is_not_sent(
    connection: RedisConnection,
    second: RedisConnection,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = connection._replies

    def then_another_stores(
        commands: Sequence[bytes], until: float, shape: ReplyShape
    ) -> list[Reply]:
        replies = asked(commands, until, shape)
        monkeypatch.undo()
        put(second, 1, content(1, 500))
        return replies

    monkeypatch.setattr(connection, "_replies", then_another_stores)
    assert connection.claim(ROOT, [key(1), key(2)], soon()) == [
        PutResult.PRESENT,
        None,
    ]
    assert client.keys("*:w") == [(name_of(2) + ":w").encode()]


def test_a_batch_is_claimed_together(
    connection: RedisConnection, second: RedisConnection, client: Client
) -> None:
    put(connection, 1, content(1, 500))
    asked = [key(number) for number in range(4)]
    assert connection.claim(ROOT, asked[:2], soon(0.2)) == [
        None,
        PutResult.PRESENT,
    ]
    busy = PutResult.BUSY
    present = PutResult.PRESENT
    assert second.claim(ROOT, asked, soon()) == [busy, present, None, None]
    for name in client.keys("*:w"):
        assert client.pttl(name) > 0
    assert len(client.keys("*:w")) == 3
    assert 0 < client.pttl(name_of(0) + ":w") <= 2200, (
        "it dies soon after its owner"
    )
    assert connection.clear(ROOT, walk(10)) == 1
    assert client.dbsize() == 0


def test_a_full_server_refuses_a_claim_and_says_what_is_there(
    server: Server, connection: RedisConnection, client: Client
) -> None:
    put(connection, 1, content(1, 500))
    client.config_set("maxmemory", 1)
    assert connection.claim(ROOT, [key(1)], soon()) == [PutResult.PRESENT]
    with pytest.raises(RefusedError, match="OOM") as refused:
        connection.claim(ROOT, [key(1), key(2)], soon())
    assert refused.value.reason is Reason.FULL


def test_many_writers_of_the_same_keys(server: Server, client: Client) -> None:
    stored = [content(i, 2 * MIB + i) for i in range(6)]
    ends: list[PutResult] = []

    def write(seed: int) -> None:
        connection = RedisClient(server.url).connection().open(soon())
        for number in np.random.default_rng(seed).permutation(6):
            ends.append(put(connection, int(number), stored[number], seconds=30))
        connection.close()

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ends) == 24
    assert ends.count(PutResult.STORED) == 6
    reader = RedisClient(server.url).connection().open(soon())
    for number, bytes_ in enumerate(stored):
        assert np.array_equal(get(reader, number, bytes_.nbytes), bytes_)
    reader.close()
    assert client.dbsize() == 6


@pytest.mark.slow
def test_a_dead_writer_leaves_nothing_for_long(
    server: Server, second: RedisConnection, client: Client
) -> None:
    doomed = RedisClient(server.url).connection().open(soon())

    def die() -> bool:
        doomed.abort()
        return True

    with pytest.raises(OSError):
        put(doomed, 1, content(1, 3 * MIB), die, seconds=0.5)
    doomed.close()
    assert client.dbsize() == 2, "its draft and its claim"
    for name in client.keys("*"):
        assert 0 < client.pttl(name) <= 2500
    assert put(second, 1, content(2, 3 * MIB)) is PutResult.BUSY
    end = soon()
    while client.dbsize() and time.monotonic() < end:
        time.sleep(0.05)
    assert client.dbsize() == 0
    assert put(second, 1, content(2, 3 * MIB)) is PutResult.STORED
    assert client.dbsize() == 1


@pytest.mark.parametrize("size", [100, 3 * MIB])
def test_a_writer_that_is_cut_off_anywhere_leaves_nothing_for_long(
    server: Server, client: Client, size: int
) -> None:
    for after in (0.0, 0.001, 0.002, 0.004):
        doomed = RedisClient(server.url).connection().open(soon())
        timer = threading.Timer(after, doomed.abort)
        timer.start()
        with contextlib.suppress(OSError):
            put(doomed, 1, content(1, size), seconds=0.1)
        timer.join()
        doomed.close()
    names = [name for name in client.keys("*") if not name.endswith(b"}")]
    for name in names:
        assert client.pttl(name) > 0


def test_a_draft_that_went_is_not_published(
    connection: RedisConnection, client: Client
) -> None:
    def lose() -> bool:
        client.delete(*client.keys("*:w:*"))
        return True

    with pytest.raises(RefusedError) as refused:
        put(connection, 1, content(1, 3 * MIB), lose)
    assert refused.value.reason is Reason.FULL
    assert client.dbsize() == 0
    assert get(connection, 1, 3 * MIB) is None


@pytest.mark.slow
def test_a_draft_that_lost_pieces_is_not_published(
    connection: RedisConnection, client: Client
) -> None:
    """As when Redis evicts or expires a draft, and the next piece starts it again."""
    begun = threading.Event()
    stop = threading.Event()

    def lose() -> None:
        with redis.Redis.from_url(
            f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}"
        ) as other:
            while not stop.is_set():
                for name in other.scan_iter("*:w:*"):
                    other.delete(name)
                begun.set()

    thread = threading.Thread(target=lose)
    thread.start()
    assert begun.wait(30)
    try:
        with pytest.raises(RefusedError) as refused:
            put(connection, 1, content(1, 64 * MIB), seconds=30)
    finally:
        stop.set()
        thread.join(60)
    assert refused.value.reason is Reason.FULL
    assert connection.find(ROOT, [key(1)], soon()) == 0
    assert client.dbsize() == 0


def test_clear_census_and_neighbours(
    connection: RedisConnection, server: Server, client: Client
) -> None:
    other = RedisClient(server.url, prefix="pago").connection().open(soon())
    name = name_of(1)
    foreign = [
        "pagoda",
        "pagoda:",
        "pagoda:1:",
        "pagoda:2" + name[8:],
        "xpagoda" + name[6:],
        name[:-1],
        name + "x",
        name + ":w:",
        name + ":w:xyz",
        name + ":w:" + "0" * 33,
        name.replace("01", "0G"),
        name.upper(),
        name + "\n",
        name.replace("{", "").replace("}", ""),
        name + "x" * 100_000,
        "user:1",
    ]
    for text in foreign:
        client.set(text, "mine")
    for number in range(3):
        put(connection, number, content(number, 100))
        put(connection, number, content(number, 100), root=OTHER)
    put(other, 1, content(1, 100))
    client.set(name + ":w", "nonce")
    client.hset(name + ":w:" + "0" * 32, "h", "x")
    assert connection.count_by_namespace(walk(5)) == {ROOT: 3, OTHER: 3}
    assert other.count_by_namespace(walk(5)) == {ROOT: 1}
    assert connection.clear(ROOT, walk(5)) == 3
    assert connection.count_by_namespace(walk(5)) == {OTHER: 3}
    assert client.exists(name + ":w", name + ":w:" + "0" * 32) == 0
    assert connection.clear(ROOT, walk(5)) == 0
    assert connection.clear(None, walk(5)) == 3
    assert connection.count_by_namespace(walk(5)) == {}
    assert {text.encode() for text in foreign} < set(client.keys("*"))
    assert client.dbsize() == len(foreign) + 1
    other.close()


def test_a_prefix_is_no_pattern(server: Server, client: Client) -> None:
    wild, plain = (
        RedisClient(server.url, prefix=prefix).connection().open(soon())
        for prefix in ("a*[b]?\\", "aXb?\\")
    )
    for connection in (wild, plain):
        put(connection, 1, content(1, 100))
    assert (
        wild.count_by_namespace(walk(5))
        == plain.count_by_namespace(walk(5))
        == {ROOT: 1}
    )
    assert wild.clear(None, walk(5)) == 1
    assert get(plain, 1, 100) is not None
    wild.close()
    plain.close()


def test_a_clear_removes_thousands_and_nothing_else(
    connection: RedisConnection, client: Client
) -> None:
    with client.pipeline(transaction=False) as pipeline:
        for number in range(5000):
            pipeline.hset(name_of(number), "h", b"")
            pipeline.set(f"else:{number}", b"")
        pipeline.execute()
    assert connection.clear(ROOT, walk(5)) == 5000
    assert client.dbsize() == 5000


def test_usage_is_that_of_the_server(
    connection: RedisConnection, client: Client
) -> None:
    used, limit = connection.usage(soon())[:2]
    assert used is not None
    assert used > 100_000
    assert limit is None
    client.config_set("maxmemory", 500 * MIB)
    assert connection.usage(soon()).limit_bytes == 500 * MIB
    put(connection, 1, content(1, 20 * MIB))
    assert connection.usage(soon()).used_bytes >= 20 * MIB


@pytest.mark.parametrize("size", [MIB, 8 * MIB, 32 * MIB])
def test_a_chunk_takes_little_more_than_its_bytes(
    connection: RedisConnection, size: int
) -> None:
    before = connection.usage(soon()).used_bytes
    for number in range(64 * MIB // size):
        put(connection, number, content(1, size))
    after = connection.usage(soon()).used_bytes
    assert before is not None
    assert after is not None
    assert after - before < 64 * MIB * 1.03 + 3 * MIB, (
        "and the connection's buffer"
    )


def test_a_ping_asks_for_our_names(connection: RedisConnection) -> None:
    connection.ping(soon())


@pytest.mark.parametrize("size", [100, 8 * MIB])
def test_a_full_server_refuses_and_nothing_is_left(
    connection: RedisConnection, client: Client, size: int
) -> None:
    put(connection, 1, content(1, 2 * MIB))
    # less than the chunk takes: what a server uses besides falls when it likes to
    client.config_set("maxmemory", 2 * MIB)
    for number in (2, 3):
        with pytest.raises(RefusedError) as refused:
            put(connection, number, content(2, size))
        assert refused.value.reason is Reason.FULL
        assert "OOM" in str(refused.value)
    assert get(connection, 1, 2 * MIB) is not None, "the connection continues"
    assert client.dbsize() == 1


def test_a_server_that_fills_up_under_a_put(
    connection: RedisConnection, client: Client
) -> None:
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 4 * MIB)
    with pytest.raises(RefusedError) as refused:
        put(connection, 1, content(1, 32 * MIB))
    assert refused.value.reason is Reason.FULL
    assert client.dbsize() == 0
    assert put(connection, 2, content(2, MIB)) is PutResult.STORED


def test_eviction_takes_whole_chunks(
    client: Client, connection: RedisConnection
) -> None:
    client.config_set(
        "maxmemory", client.info("memory")["used_memory"] + 20 * MIB
    )
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        ends = []
        for number in range(20):
            try:  # so small a store evicts drafts, too
                ends.append(put(connection, number, content(number, 3 * MIB + 1)))
            except RefusedError as refused:
                assert refused.reason is Reason.FULL
        assert set(ends) == {PutResult.STORED}
        here = [
            number
            for number in range(20)
            if get(connection, number, 3 * MIB + 1) is not None
        ]
        assert len(ends) > 10
        assert 1 < len(here) < 8
        assert client.dbsize() == len(here)
    finally:
        client.config_set("maxmemory-policy", "noeviction")


def test_what_is_not_a_chunk_is_refused(
    connection: RedisConnection, client: Client
) -> None:
    name = name_of(1)
    page = np.zeros(HEADER_BYTES, np.uint8)
    room = np.zeros(3 * PIECE_BYTES, np.uint8)
    piece = b"x" * PIECE_BYTES
    head = bytes(HEADER_BYTES)
    whole: dict[str, bytes] = {"h": head, "0": piece, "1": piece, "2": piece}
    wrong: list[object] = [
        "a string",
        {"x": "no page"},
        {**whole, "h": head[1:]},
        {**whole, "h": head + b"x"},
        {**whole, "1": b""},
        {**whole, "2": piece[1:]},
        {**whole, "0": b"short"},
        {**whole, "3": b"more"},
        {"h": head, "0": piece},
    ]
    for value in wrong:
        client.delete(name)
        client.set(name, value) if isinstance(value, str) else client.hset(
            name, mapping=value
        )
        with pytest.raises(RefusedError) as refused:
            connection.get(GetRequest(ROOT, key(1), page, lambda: room), soon())
        assert refused.value.reason is Reason.FAILED_CHECK
        connection.ping(soon())
    with pytest.raises(RefusedError) as refused:
        connection.get(GetRequest(ROOT, key(1), page, lambda: None), soon())
    assert refused.value.reason is Reason.FAILED_CHECK
    client.delete(name)
    client.hset(name, mapping=whole)
    assert (
        connection.get(GetRequest(ROOT, key(1), page, lambda: room), soon())
        == 3 * PIECE_BYTES
    )
    assert connection.remove(ROOT, [key(1)], soon()) == 1


def test_a_chunk_that_goes_while_it_is_read_is_not_there(
    connection: RedisConnection, client: Client
) -> None:
    put(connection, 1, content(1, 16 * MIB))

    def lose() -> Bytes:
        client.flushall()
        return room

    room = np.zeros(16 * MIB, np.uint8)
    assert (
        connection.get(
            GetRequest(ROOT, key(1), np.zeros(HEADER_BYTES, np.uint8), lose),
            soon(),
        )
        is None
    )
    connection.ping(soon())


def test_a_bad_url_is_refused() -> None:
    for url in (
        "http://host",
        "redis://",
        "redis://host/x",
        "redis://:12/34@host:6379",
        "redis://:p#w@host",
        "unix://",
    ):
        with pytest.raises(ConfigError) as wrong:
            RedisClient(url)
        assert "34" not in str(wrong.value)
        assert "#w" not in str(wrong.value)
    with pytest.raises(ConfigError, match="protocol"):
        RedisClient("redis://host?protocol=3")
    with pytest.raises(ConfigError):
        RedisClient("redis://:geheim/x@host:y")
    for prefix in ("", "a{b", "a b", "ä", "x" * 101):
        with pytest.raises(ConfigError, match="prefix"):
            RedisClient("redis://host", prefix=prefix)


def test_names_have_whole_keys(connection: RedisConnection) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        connection.find(ROOT, [b"short"], soon())
