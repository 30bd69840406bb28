"""Lossless compression of KV: the bytes of its words are split into planes, and zstd compresses
those that get smaller.

A word of bf16 is sign, 8 bits of exponent, 7 bits of mantissa. The mantissa is noise, the rest is
not; zstd can use this only if the two are separated. Whole words are split, one block at a time:
the high bytes (sign and exponent without its last bit), then the next lower ones.

The stored form; all numbers are little-endian, lengths in bytes:

    head      version u8 = 1 | word_bytes u8 | log2 of block_bytes u8 | payload's length u64
    block ... for each plane, high to low: kind u8 (0 raw, 1 a zstd frame) | length u32; then these
    planes
    tail      the rest of the payload after its last whole word
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger]

VERSION = 1
BLOCK_LOG = 18  # a block, its planes and the scratch stay in the cache of a core
WORDS: dict[int, np.dtype[np.unsignedinteger]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
}

# block sizes that can be read: they bound the time per byte and the scratch memory
_LOGS = range(16, 21)
_MOST_BYTES = 1 << _LOGS[-1]
_SAMPLE_WORDS = 4096
_HEAD = struct.Struct("<BBBQ")
_PLANE = struct.Struct("<BI")
_RAW = 0
_ZSTD = 1


class _NoRoom(Exception):
    """The encoding would be larger than allowed."""


class _Malformed(Exception):
    """The bytes are not an encoding of this payload."""


class _Scratch:
    """The scratch of one thread: two blocks of memory and the contexts of zstd."""

    def __init__(self) -> None:
        import zstandard

        # As level 1, but with a table of 1,024 matches instead of 8,192 and more, and no match
        # under 7 bytes: in exponents short matches are not smaller than their Huffman codes, and
        # slow down encoding and decoding.
        parameters = zstandard.ZstdCompressionParameters(
            window_log=BLOCK_LOG,
            hash_log=10,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            strategy=zstandard.STRATEGY_FAST,
        )
        self.compress = zstandard.ZstdCompressor(
            compression_params=parameters
        ).compress
        self.content_bytes = zstandard.frame_content_size
        self.decompress = zstandard.ZstdDecompressor(
            max_window_size=_MOST_BYTES
        ).decompress
        self.error = zstandard.ZstdError
        self.first, self.second = np.empty((2, _MOST_BYTES), np.uint8)


_threads = threading.local()


def _scratch() -> _Scratch:
    found: _Scratch | None = getattr(_threads, "scratch", None)
    if found is None:
        found = _threads.scratch = _Scratch()
    return found


def encode(payload: Bytes, word_bytes: int, out: Bytes) -> int:
    """Fill `out` from its start; returns the number of bytes, or 0 if they do not fit or are not
    fewer than before.
    """
    room = out[: min(out.nbytes, max(0, payload.nbytes - 1))]
    tail = payload[payload.nbytes - payload.nbytes % word_bytes :]
    head = _HEAD.pack(VERSION, word_bytes, BLOCK_LOG, payload.nbytes)
    try:
        at = _put(head, room, 0)
        for words in _blocks(payload, word_bytes, BLOCK_LOG):
            at = _put_block(words, room, at, _scratch())
        return _put(tail, room, at)
    except _NoRoom:
        return 0


def decode(stored: Bytes, word_bytes: int, payload: Bytes) -> bool:
    """Fill `payload`; False if `stored` is not a complete encoding of that many bytes with this
    word size.
    """
    if stored.nbytes < _HEAD.size:
        return False
    version, word, log, nbytes = _HEAD.unpack_from(stored.data)
    if (
        (version, word, nbytes) != (VERSION, word_bytes, payload.nbytes)
        or word not in WORDS
        or log not in _LOGS
    ):
        return False
    scratch = _scratch()
    at = _HEAD.size
    try:
        for words in _blocks(payload, word, log):
            at = _get_block(stored, at, words, scratch)
    except _Malformed:
        return False
    tail = payload[nbytes - nbytes % word :]
    if stored.nbytes - at != tail.nbytes:
        return False
    np.copyto(tail, stored[at:])
    return True


def shrunk(plane: Bytes) -> Bytes | None:
    """Return a zstd frame of a plane of at most a block; None if it is not smaller."""
    frame = _scratch().compress(plane.data)
    return np.frombuffer(frame, np.uint8) if len(frame) < plane.nbytes else None


def expanded(frame: Bytes, size: int) -> Bytes | None:
    """Return the plane of `size` bytes in a frame, None if there is no such plane or zstandard is
    not installed.

    Does not decode a frame of another size.
    """
    try:
        scratch = _scratch()
    except ImportError:
        return None
    try:
        if scratch.content_bytes(frame.data) != size:
            return None
        return np.frombuffer(
            scratch.decompress(frame.data, allow_extra_data=False), np.uint8
        )
    except scratch.error:
        return None


def _blocks(payload: Bytes, word_bytes: int, log: int) -> Iterator[Words]:
    whole = payload[: payload.nbytes - payload.nbytes % word_bytes].view(
        WORDS[word_bytes]
    )
    step = (1 << log) // word_bytes
    for start in range(0, whole.size, step):
        yield whole[start : start + step]


def _put(piece: bytes | Bytes, room: Bytes, at: int) -> int:
    end = at + len(piece)
    if end > room.nbytes:
        raise _NoRoom
    np.copyto(room[at:end], np.frombuffer(piece, np.uint8))
    return end


def _put_block(words: Words, room: Bytes, at: int, scratch: _Scratch) -> int:
    table = at
    size = words.size
    at += words.itemsize * _PLANE.size
    for place in reversed(range(words.itemsize)):
        frame = _frame(words, place, scratch)
        if frame is not None:
            end = _put(frame, room, at)
        elif (end := at + size) <= room.nbytes:
            _split(words, place, room[at:end], scratch)
        else:
            raise _NoRoom
        _PLANE.pack_into(
            room.data, table, _RAW if frame is None else _ZSTD, end - at
        )
        table = table + _PLANE.size
        at = end
    return at


def _frame(words: Words, place: int, scratch: _Scratch) -> Bytes | None:
    """Return the compressed plane; None if it is not smaller. Lower planes are first tried by a
    sample.
    """
    if place < words.itemsize - 1:
        start = max(0, words.size - _SAMPLE_WORDS) // 2
        sample = words[start : start + _SAMPLE_WORDS]
        plane = _split(sample, place, scratch.second[: sample.size], scratch)
        if len(scratch.compress(plane.data)) > sample.size * 15 // 16:
            return None
    return shrunk(_split(words, place, scratch.second[: words.size], scratch))


def _split(words: Words, place: int, plane: Bytes, scratch: _Scratch) -> Bytes:
    """Copy byte `place` of each word, 0 the lowest, into `plane`. Shift and narrow: far faster than
    a strided copy.
    """
    if place:
        wide = scratch.first[: words.nbytes].view(words.dtype)
        words = np.right_shift(words, 8 * place, out=wide)
    np.copyto(plane, words, casting="unsafe")
    return plane


def _get_block(stored: Bytes, at: int, words: Words, scratch: _Scratch) -> int:
    table = at
    at = at + words.itemsize * _PLANE.size
    if at > stored.nbytes:
        raise _Malformed
    joined = scratch.first[: words.nbytes].view(words.dtype)
    widened = scratch.second[: words.nbytes].view(words.dtype)
    for place in reversed(range(words.itemsize)):
        kind, length = _PLANE.unpack_from(stored.data, table)
        table = table + _PLANE.size
        end = at + length
        if end > stored.nbytes:
            raise _Malformed
        plane = _plane(kind, stored[at:end], words.size)
        _join(plane, place, words, joined, widened)
        at = end
    return at


def _plane(kind: int, piece: Bytes, size: int) -> Bytes:
    """Return the plane of a stored piece."""
    plane: Bytes | None = piece
    if kind == _ZSTD:
        plane = expanded(piece, size)
    elif kind != _RAW:
        plane = None
    if plane is None or plane.size != size:
        raise _Malformed
    return plane


def _join(
    plane: Bytes, place: int, words: Words, joined: Words, widened: Words
) -> None:
    """Add the next lower plane; with the last plane `words` are complete."""
    into = joined if place else words
    if place == words.itemsize - 1:
        np.copyto(into, plane)
        return
    np.left_shift(joined, 8, out=joined)
    np.copyto(widened, plane)
    np.bitwise_or(joined, widened, out=into)
