"""An object store under an attacker's control: never wrong bytes, never late, never much memory."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.errors import StoreError
from pagoda.base.metrics import Reason
from pagoda.codec import HEADER_BYTES
from pagoda.tiers.remote import remote_tier
from pagoda.tiers.remote.object_store import ObjectStoreClient
from tests.cache.kit import SPAWN, run_all
from tests.remote.chunks import (
    LARGE,
    LATE_SECONDS,
    fresh_prefix,
    hasty_tier,
    keys_of,
    load,
    recovers,
    save,
    saved,
    soon,
    tier_on,
)
from tests.remote.evil import (
    SILENCE,
    Babble,
    Lie,
    LyingHttp,
    dripping,
    endless,
    growth,
    http,
)

# what a tier may take for anything: its buffers, threads and what libraries keep
ROOM_BYTES = 96 << 20
WHOLE_BYTES = HEADER_BYTES + LARGE.chunk_bytes
NOISE = np.random.default_rng(0).bytes(WHOLE_BYTES)
HEAD = b"HTTP/1.1 200 OK\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n"

ANSWERS: dict[str, Callable[[], Lie]] = {
    "other bytes": lambda: [http(200, NOISE)],
    "zeros": lambda: [http(200, bytes(WHOLE_BYTES))],
    "too few": lambda: [http(200, NOISE[:100_000])],
    "not even a header": lambda: [http(200, NOISE[:100])],
    "nothing": lambda: [http(200)],
    "no content": lambda: [http(204)],
    "too many": lambda: [http(200, NOISE + NOISE)],
    "more than it says": lambda: [http(200, NOISE + NOISE, WHOLE_BYTES)],
    "less than it says, and silence": lambda: [
        http(200, NOISE[:100_000], WHOLE_BYTES)
    ],
    "huge": lambda: endless(http(200, b"", 1 << 40)),
    "huge, and nothing of it": lambda: [http(200, b"", 1 << 40)],
    "a negative length": lambda: [http(200, NOISE, -5)],
    "a length that is no number": lambda: [
        HEAD + b"Content-Length: many\r\n\r\n" + NOISE
    ],
    "two lengths": lambda: [
        HEAD + b"Content-Length: 5\r\nContent-Length: 2000000\r\n\r\n" + NOISE
    ],
    "no length and no end": lambda: endless(HEAD + b"\r\n"),
    "chunks without end": lambda: endless(
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
        b"100000\r\n" + bytes(1 << 20) + b"\r\n",
    ),
    "a chunk as large as can be": lambda: endless(
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"
    ),
    "headers without end": lambda: endless(
        HEAD, b"X-More: " + b"a" * 1000 + b"\r\n"
    ),
    "a header without end": lambda: endless(HEAD + b"X-More: ", b"a" * (1 << 20)),
    "a byte at a time": lambda: dripping(http(200, NOISE)),
    "silence": lambda: SILENCE,
    "garbage": lambda: [NOISE],
    "line ends": lambda: endless(b"", b"\r\n" * 500_000),
    "another protocol": lambda: [b"+OK\r\n"],
    "a part that was not asked for": lambda: [
        http(
            206, NOISE[:100], None, {"Content-Range": "bytes 5-104/100000000000"}
        )
    ],
    "not modified": lambda: [http(304)],
    "go elsewhere": lambda: [http(301, more={"Location": "http://127.0.0.1:1/"})],
    "go round in circles": lambda: [http(302, more={"Location": "/p/1/again"})],
    "packed": lambda: [http(200, NOISE, None, {"Content-Encoding": "gzip"})],
    "continue, for ever": lambda: endless(
        b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000, 50
    ),
    "not for you": lambda: [http(401)],
    "forbidden": lambda: [http(403)],
    "gone": lambda: [http(410)],
    "too many requests": lambda: [http(429, more={"Retry-After": "3600"})],
    "trouble": lambda: [http(500)],
    "later": lambda: [http(503, more={"Retry-After": "3600"})],
    "trouble without end": lambda: endless(
        b"HTTP/1.1 500 No\r\nContent-Length: 1099511627776\r\n\r\n"
    ),
}


@pytest.fixture
def liar() -> Iterator[LyingHttp]:
    running = LyingHttp()
    yield running
    running.close()


def on(port: int, prefix: str = "p") -> ObjectStoreClient:
    return ObjectStoreClient(f"http://127.0.0.1:{port}/", prefix=prefix)


@pytest.mark.slow
@pytest.mark.parametrize("lie", ANSWERS.values(), ids=ANSWERS)
def test_a_server_that_answers_a_get_with(
    liar: LyingHttp, lie: Callable[[], Lie]
) -> None:
    keys = keys_of(2)
    saved(on(liar.port), keys, LARGE)
    with tier_on(on(liar.port), LARGE) as tier:
        assert load(tier, keys[:1], LARGE) == [None]
    with tier_on(
        on(liar.port), LARGE, connections=1, deadline_seconds=0.5
    ) as tier:
        liar.lies["GET"] = lambda _: lie()
        with growth() as memory:
            assert None not in load(tier, keys, LARGE)
        assert memory.peak_bytes < ROOM_BYTES
        liar.lies.clear()
        # chunks that failed their check may be removed
        saved(on(liar.port), keys, LARGE)
        recovers(tier, keys, LARGE)


@pytest.mark.parametrize("lie", ANSWERS.values(), ids=ANSWERS)
def test_a_server_that_answers_everything_with(
    liar: LyingHttp, lie: Callable[[], Lie]
) -> None:
    keys = keys_of(2)
    for method in ("GET", "PUT", "HEAD", "DELETE", "PROPFIND"):
        liar.lies[method] = lambda _: lie()
    with growth() as memory:
        with (
            soon(3 * LATE_SECONDS),
            tier_on(on(liar.port), deadline_seconds=0.5) as tier,
        ):
            assert None not in load(tier, keys)
            tier.match_prefix(keys)
            save(tier, keys)
            tier.stats()
        assert memory.peak_bytes < ROOM_BYTES


@pytest.mark.parametrize("status", [413, 429, 500, 503, 507])
def test_a_server_that_takes_nothing_more_is_read_from(
    liar: LyingHttp, status: int
) -> None:
    """As nginx on a full disk answers 500 to each PUT."""
    keys = keys_of(20)
    saved(on(liar.port), keys[:2])
    liar.lies["PUT"] = lambda _: [http(status)]
    with tier_on(on(liar.port), connections=1) as tier:
        for _ in range(3):
            for done in save(tier, keys[2:]):
                assert not done.ok
            assert load(tier, keys[:2]) == [None] * 2
            assert not tier.resting


def test_another_chunk_s_whole_object(liar: LyingHttp) -> None:
    one, two = keys_of(2)
    saved(on(liar.port), [one, two], LARGE)
    paths = {
        key: path
        for key in (one, two)
        for path in liar.objects
        if path.endswith(key.hex())
    }
    liar.objects[paths[one]] = liar.objects[paths[two]]
    with tier_on(on(liar.port), LARGE) as tier:
        assert load(tier, [one, two], LARGE) == [Reason.FAILED_CHECK, None]
        assert save(tier, [one], LARGE)[0].ok
        assert load(tier, [one, two], LARGE) == [None, None]


@pytest.mark.parametrize("at", [0, 100, 4095, 4096, 1_000_000, WHOLE_BYTES - 1])
def test_one_byte_that_is_another(liar: LyingHttp, at: int) -> None:
    (key,) = keys_of(1)
    saved(on(liar.port), [key], LARGE)
    ((path, value),) = liar.objects.items()
    liar.objects[path] = value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]
    with tier_on(on(liar.port), LARGE) as tier:
        assert load(tier, [key], LARGE) == [Reason.FAILED_CHECK]
        assert save(tier, [key], LARGE)[0].ok
        assert load(tier, [key], LARGE) == [None]


@pytest.mark.parametrize(
    "length", [0, 4095, 4096, 100_000, WHOLE_BYTES - 1, WHOLE_BYTES + 1]
)
def test_an_object_of_another_length(liar: LyingHttp, length: int) -> None:
    (key,) = keys_of(1)
    saved(on(liar.port), [key], LARGE)
    ((path, value),) = liar.objects.items()
    liar.objects[path] = (value + b"x")[:length]
    with tier_on(on(liar.port), LARGE) as tier:
        assert load(tier, [key], LARGE) == [Reason.FAILED_CHECK]


LISTING = '<?xml version="1.0"?><D:multistatus xmlns:D="DAV:">{}</D:multistatus>'
ENTRY = (
    "<D:response><D:href>{}</D:href><D:propstat><D:status>HTTP/1.1 200 OK</D:status><D:prop>"
    "<D:getlastmodified>Thu, 01 Jan 2026 00:00:00 GMT</D:getlastmodified><D:getcontentlength>5"
    "</D:getcontentlength><D:resourcetype/></D:prop></D:propstat></D:response>"
)


def test_names_that_a_server_makes_up_are_not_deleted(liar: LyingHttp) -> None:
    theirs = [
        "/somebody-elses",
        "/p/2/x",
        "/p/1/x",
        "/p/1/../../etc/passwd",
        "/p/1/" + "g" * 64,
        "/",
    ]
    listing = LISTING.format("".join(map(ENTRY.format, theirs)))
    liar.lies["PROPFIND"] = lambda _: [
        http(207, listing.encode(), None, {"Content-Type": "text/xml"})
    ]
    with tier_on(on(liar.port)) as tier, contextlib.suppress(StoreError):
        tier.clear()
    assert not [path for method, path in liar.requests if method == "DELETE"]


def bomb() -> Lie:
    """A small document that would become a large one."""
    entities = "".join(
        f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 12)
    )
    head = f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY l0 "lol">{entities}]>'
    listing = head + '<D:multistatus xmlns:D="DAV:">&l11;</D:multistatus>'
    return [http(207, listing.encode(), None, {"Content-Type": "text/xml"})]


WALKS = ["huge", "chunks without end", "trouble without end", "silence"]


def _walk(port: int, peak: Connection) -> None:
    remote_tier._STEP_SECONDS = 1.0
    with growth() as memory:
        with (
            tier_on(on(port)) as tier,
            soon(LATE_SECONDS),
            contextlib.suppress(StoreError),
        ):
            tier.clear()
        peak.send(memory.peak_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lie", [*(ANSWERS[name] for name in WALKS), bomb], ids=[*WALKS, "a bomb"]
)
def test_a_server_that_answers_a_listing_with(
    liar: LyingHttp, lie: Callable[[], Lie]
) -> None:
    """In a separate process, which still runs afterwards."""
    liar.lies["PROPFIND"] = lambda _: lie()
    mine, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_walk, args=(liar.port, theirs), daemon=True)
    run_all([process])
    assert mine.recv() < ROOM_BYTES


@pytest.mark.parametrize(
    "words", [lambda: SILENCE, endless, lambda: [http(200, NOISE) * 3]]
)
def test_a_server_that_says_without_being_asked(words: Callable[[], Lie]) -> None:
    babble = Babble(words)
    prefix = fresh_prefix()
    try:
        with growth() as memory:
            with (
                soon(3 * LATE_SECONDS),
                hasty_tier(on(babble.port, prefix)) as tier,
            ):
                assert None not in load(tier, keys_of(2))
                save(tier, keys_of(2))
            assert memory.peak_bytes < ROOM_BYTES
    finally:
        babble.close()


ROOT = Path(__file__).parents[2]
QUIETLY = """
import gc, logging, sys, time
from pagoda.tiers.remote.object_store import ObjectStoreClient
from tests.remote.chunks import keys_of, tier_on

logging.getLogger("pagoda").setLevel(logging.ERROR)
for _ in range(2):
    with tier_on(ObjectStoreClient(f"http://127.0.0.1:{sys.argv[1]}/"), deadline_seconds=0.2) as tier:
        tier.match_prefix(keys_of(12))
    gc.collect()
time.sleep(0.7)
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize(
    "lie",
    [lambda: SILENCE, lambda: [http(500)], lambda: [b""]],
    ids=["late", "bad", "cut"],
)
def test_trouble_is_not_printed(liar: LyingHttp, lie: Callable[[], Lie]) -> None:
    """A library's messages about requests that are no longer waited for do not reach an engine's
    output.
    """
    asked = iter(range(1000))

    def answer(_: str) -> Lie:
        if lie() == [b""]:
            raise EOFError
        return lie() if next(asked) % 3 else dripping(http(404), 0.004)

    liar.lies["HEAD"] = answer
    command = [sys.executable, "-c", QUIETLY, str(liar.port)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert done.stdout == ""
    assert done.stderr == ""
