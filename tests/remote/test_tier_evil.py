"""A store under an attacker's control: never wrong bytes, never late, never much memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pagoda.base.errors import StoreError
from pagoda.tiers.remote.redis import PIECE_BYTES, RedisClient
from testbed.servers import Server
from tests.remote.chunks import (
    LARGE,
    LATE_SECONDS,
    fresh_prefix,
    hasty_tier,
    keys_of,
    load,
    name_of,
    recovers,
    save,
    saved,
    soon,
    tier_on,
)
from tests.remote.evil import (
    BLOCK,
    SILENCE,
    Babble,
    Lie,
    LyingRedis,
    bulk,
    dripping,
    endless,
    growth,
)

# what a tier may take for anything: its buffers, threads and what libraries keep
ROOM_BYTES = 64 << 20
PIECE = bulk(BLOCK[:PIECE_BYTES])
NOISE = np.random.default_rng(0).bytes(PIECE_BYTES)  # as long as an inner piece
SIZE = b"%d" % PIECE_BYTES

ANSWERS: dict[str, Callable[[], Lie]] = {
    "other bytes": lambda: [bulk(NOISE)],
    "nothing, for ever": lambda: SILENCE,
    "a byte at a time": lambda: dripping(PIECE),
    "more than it says": lambda: [bulk(NOISE) + NOISE],
    "less than it says, then other answers": lambda: [
        b"$" + SIZE + b"\r\n" + NOISE[:1000] + 2000 * b"+OK\r\n"
    ],
    "no end of the piece": lambda: [b"$" + SIZE + b"\r\n" + NOISE + b"XX"],
    "one byte too many": lambda: [bulk(NOISE + b"x")],
    "an empty piece": lambda: [bulk(b"")],
    "huge": lambda: endless(b"$1099511627776\r\n"),
    "a number without end": lambda: endless(b"$", b"1" * (1 << 20)),
    "a large number": lambda: [b"$" + b"9" * 4000 + b"\r\n"],
    "a negative number": lambda: [b"$-7\r\n"],
    "no number": lambda: [b"$\r\n"],
    "a number for Python only": lambda: [
        b"$" + SIZE[:1] + b"_" + SIZE[1:] + b"\r\n" + NOISE + b"\r\n"
    ],
    "a number with a sign": lambda: [b"$+" + SIZE + b"\r\n" + NOISE + b"\r\n"],
    "a word for a number": lambda: [b"$many\r\n"],
    "a text": lambda: [b"+OK\r\n"],
    "a text without end": lambda: endless(b"+"),
    "an error without end": lambda: endless(b"-ERR "),
    "an integer": lambda: [b":" + SIZE + b"\r\n"],
    "a list": lambda: [b"*2\r\n" + bulk(b"a") + bulk(b"b")],
    "a list without end": lambda: endless(
        b"*1000000000\r\n", b":1\r\n" * 100_000
    ),
    "lists in lists": lambda: endless(b"", b"*1\r\n" * 100_000),
    "a map": lambda: [b"%1\r\n+a\r\n+b\r\n"],
    "a null of another kind": lambda: [b"_\r\n"],
    "a null list": lambda: [b"*-1\r\n"],
    "a push": lambda: [b">2\r\n+invalidate\r\n*0\r\n"],
    "a stream of pushes": lambda: endless(b"", b">1\r\n+x\r\n" * 100_000),
    "an attribute": lambda: endless(b"", b"|1\r\n+a\r\n+b\r\n" * 10_000),
    "another protocol": lambda: [
        b"HTTP/1.1 200 OK\r\nContent-Length: " + SIZE + b"\r\n\r\n" + NOISE
    ],
    "line ends only": lambda: endless(b"", b"\r\n" * 500_000),
    "zeros": lambda: endless(),
    "an error": lambda: [b"-ERR no\r\n"],
    "a wrong kind": lambda: [
        b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"
    ],
    "still loading": lambda: [
        b"-LOADING Redis is loading the dataset in memory\r\n"
    ],
    "go elsewhere": lambda: [b"-MOVED 1 127.0.0.1:1\r\n"],
    "master down": lambda: [
        b"-MASTERDOWN StoreConnection with MASTER is down\r\n"
    ],
    "log in first": lambda: [b"-NOAUTH Authentication required.\r\n"],
    "no memory": lambda: [
        b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
    ],
    "not utf-8": lambda: [b"-\xff\xfe\x00\r\n"],
}


@pytest.fixture
def liar(server: Server) -> Iterator[LyingRedis]:
    running = LyingRedis(server.port)
    yield running
    running.close()


def on(port: int, prefix: str) -> RedisClient:
    return RedisClient(f"redis://127.0.0.1:{port}", prefix=prefix)


@pytest.mark.slow
@pytest.mark.parametrize("lie", ANSWERS.values(), ids=ANSWERS)
def test_a_server_that_answers_a_get_with(
    server: Server, liar: LyingRedis, lie: Callable[[], Lie]
) -> None:
    prefix = fresh_prefix()
    keys = keys_of(2)
    saved(on(server.port, prefix), keys, LARGE)
    client = on(liar.port, prefix)
    with tier_on(client, LARGE) as tier:
        assert load(tier, keys, LARGE) == [None, None]
    with hasty_tier(on(liar.port, prefix), LARGE, connections=1) as tier:
        # the header; an inner piece
        place = {keys[0].hex().encode(): b"h", keys[1].hex().encode(): b"1"}
        liar.lies[b"HGET"] = lambda a: (
            lie() if a[2] == place[a[1][-65:-1]] else None
        )
        with growth() as memory:
            assert None not in load(tier, keys, LARGE)
        assert memory.peak_bytes < ROOM_BYTES
        liar.lies.clear()
        # chunks that failed their check may be removed
        saved(on(server.port, prefix), keys, LARGE)
        recovers(tier, keys, LARGE)


@pytest.mark.slow
@pytest.mark.parametrize("lie", ANSWERS.values(), ids=ANSWERS)
def test_a_server_that_answers_everything_with(
    server: Server, liar: LyingRedis, lie: Callable[[], Lie]
) -> None:
    """From the first greeting on: nothing is found, stored or served, and a walk over all names
    ends.
    """
    prefix = fresh_prefix()
    keys = keys_of(2)
    always = _Always(lie)
    liar.lies = always
    with growth() as memory:
        with (
            soon(3 * LATE_SECONDS),
            tier_on(on(liar.port, prefix), deadline_seconds=0.5) as tier,
        ):
            load(tier, keys)
            tier.match_prefix(keys)
            save(tier, keys)
            for walk in (tier.clear, tier.stats):
                try:
                    walk()
                except StoreError:
                    continue
        assert memory.peak_bytes < ROOM_BYTES


class _Always(dict[bytes, Callable[[list[bytes]], Lie | None]]):
    """The same lie for every command."""

    def __init__(self, lie: Callable[[], Lie]) -> None:
        self._lie = lie

    def get(
        self, key: bytes, default: object = None
    ) -> Callable[[list[bytes]], Lie | None]:  # type: ignore[override]
        return lambda _: self._lie()


GREETINGS: dict[str, Callable[[], Lie]] = {
    "nothing": lambda: SILENCE,
    "zeros": lambda: endless(),
    "a text without end": lambda: endless(b"+"),
    "a huge value": lambda: endless(b"$1099511627776\r\n"),
    "yes to all": lambda: [b"+OK\r\n" * 1000],
    "one to all": lambda: [b":1\r\n" * 1000],
    "null to all": lambda: [b"$-1\r\n" * 1000],
}


@pytest.mark.parametrize("words", GREETINGS.values(), ids=GREETINGS)
def test_a_server_that_says_without_being_asked(words: Callable[[], Lie]) -> None:
    babble = Babble(words)
    keys = keys_of(2)
    try:
        with growth() as memory:
            with soon(3 * LATE_SECONDS), hasty_tier(on(babble.port, "p")) as tier:
                assert None not in load(tier, keys)
                save(tier, keys)
                assert None not in load(tier, keys)
            assert memory.peak_bytes < ROOM_BYTES
    finally:
        babble.close()


# ---- names


def test_names_that_a_server_makes_up_are_not_deleted(
    server: Server, liar: LyingRedis
) -> None:
    prefix = fresh_prefix()
    saved(on(server.port, prefix), keys_of(2))
    theirs = [
        b"somebody-elses",
        b"*",
        f"{prefix}:2:x".encode(),
        f"{prefix}:1:".encode() + b"\xff" * 32,
        b"",
    ]
    ours = name_of(prefix, bytes(32)).encode()
    theirs += [
        b"a" + ours,
        ours + b"x",
        ours + b":w:",
        ours[:-2] + b"}",
        ours.replace(b"00", b"0G", 1),
    ]
    liar.lies[b"SCAN"] = lambda _: [
        b"*2\r\n"
        + bulk(b"0")
        + b"*%d\r\n" % len(theirs)
        + b"".join(map(bulk, theirs))
    ]
    with tier_on(on(liar.port, prefix)) as tier, contextlib.suppress(StoreError):
        tier.clear()
    deleted = {
        a
        for command in liar.requests
        if command[0].upper() in {b"DEL", b"UNLINK"}
        for a in command[1:]
    }
    assert not deleted & set(theirs)


@pytest.mark.slow
def test_a_walk_that_never_ends(server: Server, liar: LyingRedis) -> None:
    """It takes no memory, and a `close` ends it."""
    prefix = fresh_prefix()
    numbers = iter(range(1 << 60))

    def page(_: list[bytes]) -> Lie:
        names = [
            name_of(prefix, bytes(32), next(numbers).to_bytes(32)).encode()
            for _ in range(1000)
        ]
        return [
            b"*2\r\n" + bulk(b"7") + b"*1000\r\n" + b"".join(map(bulk, names))
        ]

    liar.lies[b"SCAN"] = page
    with growth() as memory, tier_on(on(liar.port, prefix)) as tier:
        walking = threading.Thread(target=suppressed(tier.clear), daemon=True)
        walking.start()
        walking.join(1.5)
        tier.close(1.0)
        walking.join(LATE_SECONDS)
        assert not walking.is_alive()
    assert memory.peak_bytes < ROOM_BYTES


def suppressed(call: Callable[[], object]) -> Callable[[], None]:
    """`call`, which may fail."""

    def called() -> None:
        with contextlib.suppress(StoreError):
            call()

    return called


@pytest.mark.parametrize(
    "count",
    [
        b":99999999999999999999\r\n",
        b":-5\r\n",
        b":1_0\r\n",
        b":" + b"9" * 400 + b"\r\n",
    ],
)
def test_a_server_that_finds_more_than_was_asked(
    server: Server, liar: LyingRedis, count: bytes
) -> None:
    keys = keys_of(3)
    liar.lies[b"EXISTS"] = lambda _: [count]
    with tier_on(on(liar.port, fresh_prefix())) as tier:
        assert 0 <= tier.match_prefix(keys) <= 3
        assert None not in load(tier, keys)
