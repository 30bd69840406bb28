"""Values that another program wrote into the store, with valid headers: a miss, and removed if they
are useless.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import redis as client
import zstandard

from pagoda.base.metrics import Reason
from pagoda.codec import Header, parse, seal
from pagoda.codec import header as header_module
from pagoda.tiers.remote.redis import PIECE_BYTES, RedisClient
from testbed.servers import Server
from tests.remote.chunks import (
    LARGE,
    OTHER,
    fresh_prefix,
    keys_of,
    load,
    name_of,
    payload_of,
    save,
    saved,
    tier_on,
)
from tests.remote.evil import BLOCK, growth

# what a tier may take for anything: its buffers, threads and what libraries keep
ROOM_BYTES = 64 << 20
MIB = 1 << 20
PLANE_BYTES = 1 << 17  # of a block of words of two bytes
NOISE = np.random.default_rng(0).bytes(1 << 20)


class Forger:
    """Writes into the store what it likes, with well-sealed headers."""

    def __init__(self, server: Server) -> None:
        self.prefix = fresh_prefix()
        self.remote = RedisClient(server.url, prefix=self.prefix)
        self.truth = client.Redis(port=server.port)
        # alike in all but their key
        (self.key,), (self.twin,) = keys_of(1), keys_of(1, chain=1)
        for key in (self.key, self.twin):
            saved(self.remote, [key], LARGE)

    def fields(self, key: bytes) -> dict[bytes, bytes]:
        """What is stored under a key."""
        return self.truth.hgetall(name_of(self.prefix, key))  # type: ignore[return-value]

    def header(self, key: bytes) -> Header:
        """Its header."""
        found = parse(self.fields(key)[b"h"])
        assert found is not None
        return found

    def write(self, **changed: bytes) -> None:
        """Change fields of the value under `key`."""
        self.truth.hset(name_of(self.prefix, self.key), mapping=changed)  # type: ignore[arg-type]

    def reseal(self, **changed: object) -> None:
        """Give the value under `key` a header with other fields and a valid checksum."""
        header = self.header(self.key)._replace(**changed)  # type: ignore[arg-type]
        payload = payload_of(self.key, LARGE)
        whole = (
            np.zeros(max(header.length, payload.nbytes), np.uint8)
            if header.length < 1 << 28
            else payload
        )
        whole[: payload.nbytes] = payload
        # what cannot be sealed over its bytes is sealed over none
        if header.length > whole.nbytes:
            header, sealed = header._replace(length=0), header
            page = seal(header, whole)
            header = sealed
        else:
            page = seal(header, whole)
        self.write(h=page.tobytes())

    def is_a_miss(self, reason: Reason = Reason.FAILED_CHECK) -> None:
        """Check that it is not served, that the other one is, and that it is removed and can be
        stored again.
        """
        with (
            tier_on(self.remote, LARGE) as tier,
            growth() as memory,
        ):
            assert load(tier, [self.key], LARGE) == [reason]
            assert tier.stats()[f"miss_{reason}"] == 1
            assert load(tier, [self.twin], LARGE) == [None]
            assert memory.peak_bytes < ROOM_BYTES
            assert save(tier, [self.key], LARGE)[0].ok
            assert load(tier, [self.key], LARGE) == [None]


@pytest.fixture
def forger(server: Server) -> Forger:
    return Forger(server)


CHANGES: dict[str, dict[str, object]] = {
    "another namespace": {"namespace": OTHER.root},
    "another key": {"key": keys_of(1, chain=9)[0]},
    "fewer bytes": {"length": 4096},
    "no bytes": {"length": 0},
    "more bytes": {"length": LARGE.chunk_bytes + 4096},
    "another layout": {"fingerprint": "0123456789abcdef"},
    "a codec that it is not in": {"codec": "zstd"},
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_a_well_sealed_header_of(
    forger: Forger, changed: dict[str, object]
) -> None:
    forger.reseal(**changed)
    forger.is_a_miss()


def stays(forger: Forger, reason: Reason) -> None:
    """Check that it is not served and is left as it is."""
    before = forger.fields(forger.key)
    with tier_on(forger.remote, LARGE) as tier:
        assert load(tier, [forger.key], LARGE) == [reason]
        assert load(tier, [forger.twin], LARGE) == [None]
        assert tier.stats()["failed_checks"] == 0
    assert forger.fields(forger.key) == before


def test_a_chunk_that_was_asked_for_at_another_position_stays(
    forger: Forger,
) -> None:
    forger.reseal(position=3)
    stays(forger, Reason.FAILED_CHECK)


def test_a_codec_that_this_version_does_not_know_stays(forger: Forger) -> None:
    forger.reseal(codec="lzma")
    stays(forger, Reason.FAILED_CHECK)


def test_a_header_of_another_format_stays_while_it_is_whole(
    forger: Forger,
) -> None:
    page = np.frombuffer(
        bytearray(forger.fields(forger.key)[b"h"]), np.uint8
    ).copy()
    struct.pack_into("<I", page.data, 8, 2)  # of format 2
    page[header_module._OWN] = np.frombuffer(
        header_module._own_checksum(page.data), np.uint8
    )
    forger.write(h=page.tobytes())
    stays(forger, Reason.FAILED_CHECK)
    page[3000] ^= 1
    forger.write(h=page.tobytes())
    forger.is_a_miss()


def test_another_chunk_s_whole_value_under_this_key(forger: Forger) -> None:
    truth = forger.truth
    truth.delete(name_of(forger.prefix, forger.key))
    truth.copy(
        name_of(forger.prefix, forger.twin), name_of(forger.prefix, forger.key)
    )
    forger.is_a_miss()


def test_another_namespace_s_whole_value_under_this_name(forger: Forger) -> None:
    """The same tokens in another namespace have another key; the same key there is a forgery all
    the same.
    """
    page = seal(
        forger.header(forger.key)._replace(namespace=OTHER.root),
        payload_of(forger.key, LARGE),
    )
    forger.write(h=page.tobytes())
    forger.is_a_miss()


def test_the_header_of_one_and_the_bytes_of_another(forger: Forger) -> None:
    other = forger.fields(forger.twin)
    forger.write(**{"0": other[b"0"], "1": other[b"1"], "2": other[b"2"]})
    forger.is_a_miss()


@pytest.mark.parametrize(
    "piece", [b"", b"x", NOISE, NOISE + b"x", bytes(40 << 20)], ids=len
)
@pytest.mark.parametrize("field", ["h", "0", "2"])
def test_a_field_of_another_size(
    forger: Forger, field: str, piece: bytes
) -> None:
    forger.write(**{field: piece})
    forger.is_a_miss()


@pytest.mark.parametrize("field", ["h", "0", "1", "2"])
def test_a_field_that_is_missing(forger: Forger, field: str) -> None:
    forger.truth.hdel(name_of(forger.prefix, forger.key), field)
    with tier_on(forger.remote, LARGE) as tier:
        assert load(tier, [forger.key], LARGE)[0] in {
            Reason.FAILED_CHECK,
            Reason.ABSENT,
        }
        assert load(tier, [forger.twin], LARGE) == [None]


def test_thousands_of_fields_are_never_served_wrong(forger: Forger) -> None:
    forger.write(**{str(n): b"more" for n in range(3, 2000)})
    with tier_on(forger.remote, LARGE) as tier:
        load(tier, [forger.key], LARGE)  # served or not: never wrong
        assert load(tier, [forger.twin], LARGE) == [None]


@pytest.mark.parametrize("kind", ["text", "list", "set", "zset", "stream"])
def test_a_value_of_another_kind(forger: Forger, kind: str) -> None:
    name = name_of(forger.prefix, forger.key)
    truth = forger.truth
    truth.delete(name)
    match kind:
        case "text":
            truth.set(name, NOISE)
        case "list":
            truth.rpush(name, *[b"x"] * 1000)
        case "set":
            truth.sadd(name, b"x")
        case "zset":
            truth.zadd(name, {"x": 1.0})
        case "stream":
            truth.xadd(name, {"h": "x"})
    with tier_on(forger.remote, LARGE) as tier:
        assert load(tier, [forger.key], LARGE)[0] in {
            Reason.FAILED_CHECK,
            Reason.IO_ERROR,
        }
        # one bad value does not make a bad server
        assert load(tier, [forger.twin], LARGE) == [None]


# ---- compressed values


@functools.cache
def zeros(nbytes: int, *, says: bool) -> bytes:
    """Return a zstd frame that decodes to `nbytes` of zeros; `says`: whether it announces that
    size.
    """
    squeeze = zstandard.ZstdCompressor(
        level=1, write_content_size=says
    ).compressobj(size=nbytes if says else -1)
    return (
        b"".join(squeeze.compress(BLOCK) for _ in range(nbytes // MIB))
        + squeeze.flush()
    )


def modest(frame: bytes) -> bytes:
    """Return the same frame with a header that announces the expected size."""
    descriptor = frame[4]
    at = 5 if descriptor & 0x20 else 6
    size = {2: 4, 3: 8}[descriptor >> 6]
    return frame[:at] + PLANE_BYTES.to_bytes(size, "little") + frame[at + size :]


BOMBS: dict[str, Callable[[], bytes]] = {
    "much, and it says so": lambda: zeros(1 << 30, says=True),
    "much, and it does not say so": lambda: zeros(1 << 30, says=False),
    "much, and it says little": lambda: modest(zeros(1 << 30, says=True)),
    "a little too much": lambda: zeros(16 << 20, says=False),
    "many frames": lambda: zeros(1 << 20, says=True) * 2000,
    "a frame that says much and has nothing": lambda: (
        b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8
    ),
    "a window as large as can be": lambda: (
        b"\x28\xb5\x2f\xfd\x00\xff" + zeros(1 << 20, says=False)[6:]
    ),
    "frames to be skipped": lambda: (
        b"\x50\x2a\x4d\x18\xf0\xff\xff\xff" + BLOCK[:1000]
    ),
    "another compression": lambda: zlib.compress(BLOCK),
    "nothing": lambda: b"",
    "noise": lambda: NOISE,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("framed", [True, False], ids=["in a plane", "alone"])
def test_a_value_that_would_become_very_large(
    forger: Forger, bomb: Callable[[], bytes], framed: bool
) -> None:
    """Its header is well sealed, and its planes are where they should be."""
    data = bomb()
    table = struct.pack("<BI", 1, len(data))
    head = struct.pack("<BBBQ", 1, 2, 18, LARGE.chunk_bytes)
    value = (head + table + table + data + data if framed else data)[
        : LARGE.chunk_bytes - 1
    ]
    header = forger.header(forger.key)._replace(
        codec="zstd", stored_bytes=len(value)
    )
    forger.truth.delete(name_of(forger.prefix, forger.key))
    pieces = {
        str(n): value[n * PIECE_BYTES :][:PIECE_BYTES]
        for n in range(-(-len(value) // PIECE_BYTES))
    }
    forger.write(
        h=seal(header, payload_of(forger.key, LARGE)).tobytes(), **pieces
    )
    forger.is_a_miss()
