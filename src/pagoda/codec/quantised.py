"""Lossy compression of KV: a few levels for each group of numbers, then zstd in some codecs. Called
by `pagoda.codec`.

K is quantised by channel: one group is a channel of one head over all tokens of the chunk, because
channels of K differ in size and offset. V is quantised by token: one group is a token of one head,
or of several small ones. (Liu and others, "KIVI", 2024.)
A group has its smallest number `low` and a `step`; each number becomes a code from 0 to `levels`:
low + code * step. How many levels a layer has is the codec's choice: early layers more than late
ones in "qzstd", as in CacheGen (Liu and others, SIGCOMM 2024). Up to 15 levels, two codes share a
byte. With "qzstd" zstd compresses the bytes of the codes, where CacheGen has an arithmetic coder.

The error of a number is at most half a step, and half a unit of its dtype's last place.

The stored form describes itself; all numbers are little-endian, lengths in bytes:

    head      version u8 = 1 | word_bytes u8 | dtype u8 | planes u8 | 8 numbers u32 (`_Shape`)
    levels    for each layer and plane: u8
    block ... for each layer and plane, of at most 262,144 numbers:
              low (of the dtype) and step u16 (upper half of a float32) of each group |
              kind u8 (0 raw, 1 a zstd frame) | length u32 | codes
"""

from __future__ import annotations

import math
import struct
import threading
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.codec import zstd
from pagoda.layout import KVLayout

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.unsignedinteger]

# of the form and of the arithmetic: raise it when the same KV would be decoded to other numbers
VERSION = 1

_DTYPES = ("bfloat16", "float16", "float32")
_WORD_BYTES = (2, 2, 4)
_LARGEST = (
    np.float32(3.3895314e38),
    np.float32(65504.0),
    np.finfo(np.float32).max,
)
_HEAD = struct.Struct("<BBBB8I")
_CODES = struct.Struct("<BI")
_RAW = 0
_ZSTD = 1
# numbers in a block; with smaller blocks Python's share of the time grows
_BLOCK = 1 << 18
_MOST_LAYERS = 4096  # bounds the time per byte of a malicious head
_WIDE = 1024  # numbers in one inner loop of numpy
_ROW = 128  # heads with fewer numbers of V than this share a group
_NIBBLE = 15  # levels up to which two codes share a byte
# the difference between the biases of the two exponents
_F16 = np.float32(2.0**112)


class _Shape(NamedTuple):
    """Where the numbers of one layer are; `outer` is 0 without V.

    K is (groups, tokens, channels). V is (outer, heads, inner, dim): a group is the `dim` numbers
    of `heads` heads.
    """

    dtype: int
    layers: int
    groups: int
    tokens: int
    channels: int
    outer: int
    heads: int
    inner: int
    dim: int

    @property
    def planes(self) -> int:
        return 2 if self.outer else 1

    @property
    def nbytes(self) -> int:
        numbers = (
            self.groups * self.tokens * self.channels
            + self.outer * self.heads * self.inner * self.dim
        )
        return self.layers * numbers * _WORD_BYTES[self.dtype]


class _BadForm(Exception):
    """The bytes are not an encoding of this payload."""


class _UnfitError(Exception):
    """The payload has numbers that no group can hold, or its encoding has no room."""


class _QuantiseScratch:
    """The scratch memory of one thread."""

    def __init__(self) -> None:
        self.numbers: Floats = np.empty(_BLOCK, np.float32)
        self.signs = np.empty(_BLOCK, np.uint32)
        self.halves = np.empty(_BLOCK, np.uint16)
        self.codes: Bytes = np.empty(_BLOCK, np.uint8)
        self.packed: Bytes = np.empty(_BLOCK, np.uint8)


_threads = threading.local()


def _scratch() -> _QuantiseScratch:
    found: _QuantiseScratch | None = getattr(_threads, "quantised", None)
    if found is None:
        found = _threads.quantised = _QuantiseScratch()
    return found


def refusal(layout: KVLayout) -> str:
    """Return why chunks of this layout cannot be quantised, in one sentence; empty if they can."""
    planes = layout.planes
    if not planes:
        return (
            "a lossy codec needs to know where K and V are, and the pages of this layout are "
            "opaque: use codec=zstd"
        )
    if len(planes) > 2 or any(plane.dtype not in _DTYPES for plane in planes):
        known = ", ".join(_DTYPES)
        kinds = ", ".join(plane.dtype for plane in planes)
        return (
            f"a lossy codec takes K, or K and V, of {known}, and this layout has {kinds}: "
            "use codec=zstd"
        )
    if len({plane.dtype for plane in planes}) > 1:
        return "a lossy codec takes K and V of one dtype, and this layout has two: use codec=zstd"
    if layout.layers > _MOST_LAYERS or any(
        _longest(layout, plane) > _BLOCK for plane in range(len(planes))
    ):
        return (
            f"a lossy codec takes at most {_MOST_LAYERS} layers and {_BLOCK} numbers a "
            "channel: use codec=zstd"
        )
    return ""


def levels_of(codec: str, layers: int, layer: int, plane: int) -> int:
    """Return the highest code of a layer's K (plane 0) or V (plane 1)."""
    if codec == "q8":
        return 255
    if codec == "q4":
        return _NIBBLE
    return _BY_THIRD[min(2, 3 * layer // layers)][plane]


# levels of K and V in the first, middle and last third of the layers
_BY_THIRD = ((39, 27), (27, 19), (15, 15))


def most_bytes(codec: str, layout: KVLayout) -> int:
    """Return the most bytes that an encoding of a chunk takes. The layout is one that can be
    quantised.
    """
    shape = _shape_of(layout)
    levels = _levels(codec, shape)
    return _HEAD.size + sum(
        1
        + sum(
            block.params_bytes + _CODES.size + _packed_bytes(block.size, level)
            for block in _blocks(shape, plane)
        )
        for (_, plane), level in levels.items()
    )


def encode(codec: str, payload: Bytes, layout: KVLayout, out: Bytes) -> int:
    """Fill `out` from its start; returns the number of bytes, or 0 if they do not fit or a number
    is not finite.
    """
    shape = _shape_of(layout)
    levels = _levels(codec, shape)
    out = out[: max(0, payload.nbytes - 1)]
    head = _HEAD.pack(
        VERSION, _WORD_BYTES[shape.dtype], shape.dtype, shape.planes, *shape[1:]
    )
    at = len(head) + len(levels)
    if at > out.nbytes:
        return 0
    out[:at] = np.frombuffer(head + bytes(levels.values()), np.uint8)
    scratch = _scratch()
    entropy = codec == "qzstd"
    try:
        with np.errstate(all="ignore"):
            for (layer, plane), level in levels.items():
                words = _plane(payload, shape, layer, plane)
                for block in _blocks(shape, plane):
                    at = _put_block(
                        block,
                        words,
                        level,
                        shape.dtype,
                        out,
                        at,
                        scratch,
                        entropy,
                    )
    except _UnfitError:
        return 0
    return at


def decode(stored: Bytes, word_bytes: int, payload: Bytes) -> bool:
    """Fill `payload`; False if `stored` is not a complete encoding of that many bytes with this
    word size.
    """
    if stored.nbytes < _HEAD.size:
        return False
    version, word, dtype, planes, *numbers = _HEAD.unpack_from(stored.data)
    if (
        version != VERSION
        or dtype >= len(_DTYPES)
        or not word == word_bytes == _WORD_BYTES[dtype]
    ):
        return False
    shape = _Shape(dtype, *numbers)
    at = _HEAD.size + shape.layers * planes
    if (
        planes != shape.planes
        or not _is_sound(shape)
        or shape.nbytes != payload.nbytes
        or at > stored.nbytes
    ):
        return False
    levels = stored[_HEAD.size : at].tolist()
    if not all(levels):
        return False
    scratch = _scratch()
    try:
        with np.errstate(all="ignore"):
            for index, level in enumerate(levels):
                layer, plane = divmod(index, planes)
                words = _plane(payload, shape, layer, plane)
                for block in _blocks(shape, plane):
                    at = _get_block(
                        block, words, level, dtype, stored, at, scratch
                    )
    except _BadForm:
        return False
    return bool(at == stored.nbytes)


# ---- shapes


def _shape_of(layout: KVLayout) -> _Shape:
    if why := refusal(layout):
        raise ValueError(why)
    k, *v = layout.planes
    tokens = layout.chunk_tokens
    first = layout.token_order == "heads_first"
    groups, channels = (k.heads, k.dim) if first else (1, k.heads * k.dim)
    rows = _rows_of(v[0].heads, v[0].dim, tokens, first) if v else (0, 0, 0, 0)
    return _Shape(
        _DTYPES.index(k.dtype), layout.layers, groups, tokens, channels, *rows
    )


def _rows_of(
    heads: int, dim: int, tokens: int, first: bool
) -> tuple[int, int, int, int]:
    """Return outer, heads, inner, dim of V: small heads share a group, since a step per head would
    cost too much.
    """
    together = max(
        many
        for many in range(1, heads + 1)
        if heads % many == 0 and many * dim <= max(dim, _ROW)
    )
    if first and together > 1:
        return heads // together, together, tokens, dim
    return heads // together * tokens, 1, 1, together * dim


def _longest(layout: KVLayout, plane: int) -> int:
    """Return the numbers of the longest group."""
    return layout.planes[plane].dim if plane else layout.chunk_tokens


def _is_sound(shape: _Shape) -> bool:
    v = shape[5:]
    return (
        min(shape[1:5]) >= 1
        and shape.layers <= _MOST_LAYERS
        and shape.tokens <= _BLOCK
        and shape.heads * shape.dim <= _BLOCK
        and (min(v) >= 1 or max(v) == 0)
    )


def _levels(codec: str, shape: _Shape) -> dict[tuple[int, int], int]:
    return {
        (layer, plane): levels_of(codec, shape.layers, layer, plane)
        for layer in range(shape.layers)
        for plane in range(shape.planes)
    }


def _plane(payload: Bytes, shape: _Shape, layer: int, plane: int) -> Words:
    """Return a view of one plane of one layer: (groups, tokens, channels), or (outer, inner, heads,
    dim).
    """
    word = _WORD_BYTES[shape.dtype]
    k_shape = (shape.groups, shape.tokens, shape.channels)
    v_shape = (shape.outer, shape.heads, shape.inner, shape.dim)
    k = math.prod(k_shape) * word
    v = math.prod(v_shape) * word
    begin = layer * (k + v) + plane * k
    words: Words = payload[begin : begin + (v if plane else k)].view(
        zstd.WORDS[word]
    )
    return (
        words.reshape(v_shape).transpose(0, 2, 1, 3)
        if plane
        else words.reshape(k_shape)
    )


class _Block(NamedTuple):
    """A part of a plane that is encoded at once.

    Its numbers have `shape` in the plane. A group extends over axis 1 of `rows` in K, over axis -1
    in V. `wide` is like `rows`, in K with several tokens per row, for numpy's inner loop.
    """

    where: tuple[slice, ...]
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    wide: tuple[int, ...]
    axis: int
    size: int
    groups: int
    low_bytes: int
    params_bytes: int

    def over_groups(self, params: Floats) -> Floats:
        """Return one number per group in a shape that numpy extends to `wide`."""
        if self.axis == -1:
            return params.reshape(-1, 1)
        many, tokens, channels = self.rows
        repeats = tokens // self.wide[1]
        return np.repeat(params.reshape(many, 1, channels), repeats, 1).reshape(
            many, 1, -1
        )


def _block(
    where: tuple[slice, ...], shape: tuple[int, ...], plane: int, word_bytes: int
) -> _Block:
    rows = wide = shape
    if plane:
        count = shape[0] * shape[1]
        rows = wide = count, shape[2] * shape[3]
    else:
        many, tokens, channels = shape
        count = many * channels
        while tokens % 2 == 0 and 2 * channels <= _WIDE:
            tokens = tokens // 2
            channels = 2 * channels
        wide = many, tokens, channels
    return _Block(
        where,
        shape,
        rows,
        wide,
        -1 if plane else 1,
        math.prod(shape),
        count,
        count * word_bytes,
        count * (word_bytes + 2),
    )


@lru_cache(maxsize=16)
def _blocks(shape: _Shape, plane: int) -> tuple[_Block, ...]:
    """Cut a plane along the two axes over which no group extends."""
    if plane:
        sizes = (shape.outer, shape.inner)
        step = max(1, _BLOCK // (shape.heads * shape.dim))
    else:
        sizes = (shape.groups, shape.channels)
        step = max(1, _BLOCK // shape.tokens)
    first = max(1, step // sizes[1])
    second = min(sizes[1], step)
    found = []
    for at in range(0, sizes[0], first):
        for begin in range(0, sizes[1], second):
            one = slice(at, min(at + first, sizes[0]))
            two = slice(begin, min(begin + second, sizes[1]))
            counts = one.stop - one.start, two.stop - two.start
            where: tuple[slice, ...] = (
                (one, two) if plane else (one, slice(None), two)
            )
            part = (
                (*counts, shape.heads, shape.dim)
                if plane
                else (counts[0], shape.tokens, counts[1])
            )
            found.append(_block(where, part, plane, _WORD_BYTES[shape.dtype]))
    return tuple(found)


# ---- one block


def _put_block(
    block: _Block,
    words: Words,
    level: int,
    dtype: int,
    out: Bytes,
    at: int,
    scratch: _QuantiseScratch,
    entropy: bool,
) -> int:
    numbers = scratch.numbers[: block.size]
    _widen(words[block.where], dtype, numbers.reshape(block.shape), scratch)
    rows = numbers.reshape(block.rows)
    low = _folded(np.minimum, rows, block.axis).reshape(-1)
    high = _folded(np.maximum, rows, block.axis).reshape(-1)
    # up, so that no code is above `level`
    rounded = ((high - low) / np.float32(level)).view(np.uint32)
    steps = ((rounded + np.uint32(0xFFFF)) >> np.uint32(16)).astype("<u2")
    step = _of_upper(steps)
    if (
        not (np.abs(low) <= _LARGEST[dtype]).all()
        or not (low + step * level <= _LARGEST[dtype]).all()
    ):
        # a number is not finite, or so large that the decoded number might not be finite
        raise _UnfitError
    wide = numbers.reshape(block.wide)
    np.subtract(wide, block.over_groups(low), out=wide)
    np.divide(
        wide, block.over_groups(np.where(step > 0, step, np.float32(1))), out=wide
    )
    np.add(numbers, np.float32(0.5), out=numbers)
    codes = scratch.codes[: block.size]
    np.copyto(codes, numbers, casting="unsafe")
    packed = _pack(codes, level, scratch)
    kind = _RAW
    frame = packed
    if entropy and (found := zstd.shrunk(packed)) is not None:
        kind = _ZSTD
        frame = found
    end = at + block.params_bytes
    stop = end + _CODES.size + frame.nbytes
    if stop > out.nbytes:
        raise _UnfitError
    middle = at + block.low_bytes
    exact = np.empty(block.groups, words.dtype)
    _narrow(low, dtype, exact, scratch)
    out[at:middle] = exact.view(np.uint8)
    out[middle:end] = steps.view(np.uint8)
    _CODES.pack_into(out.data, end, kind, frame.nbytes)
    out[end + _CODES.size : stop] = frame
    return stop


def _get_block(
    block: _Block,
    words: Words,
    level: int,
    dtype: int,
    stored: Bytes,
    at: int,
    scratch: _QuantiseScratch,
) -> int:
    middle = at + block.low_bytes
    end = at + block.params_bytes
    begin = end + _CODES.size
    if begin > stored.nbytes:
        raise _BadForm
    kind, length = _CODES.unpack_from(stored.data, end)
    stop = begin + int(length)
    if stop > stored.nbytes:
        raise _BadForm
    low = np.empty(block.groups, np.float32)
    _widen(_unaligned(stored[at:middle], words.dtype), dtype, low, scratch)
    step = _of_upper(_unaligned(stored[middle:end], np.dtype("<u2")))
    packed = (
        zstd.expanded(stored[begin:stop], _packed_bytes(block.size, level))
        if kind == _ZSTD
        else stored[begin:stop]
    )
    if (
        kind not in (_RAW, _ZSTD)
        or packed is None
        or packed.nbytes != _packed_bytes(block.size, level)
    ):
        raise _BadForm
    numbers = scratch.numbers[: block.size]
    np.copyto(numbers, _unpack(packed, block.size, level, scratch))
    wide = numbers.reshape(block.wide)
    np.multiply(wide, block.over_groups(step), out=wide)
    np.add(wide, block.over_groups(low), out=wide)
    _narrow(numbers.reshape(block.shape), dtype, words[block.where], scratch)
    return stop


# ---- numbers


def _folded(smaller: np.ufunc, numbers: Floats, axis: int) -> Floats:
    """Return the smallest or largest number of each group: halves against each other, which numpy
    does fast.
    """
    while (half := numbers.shape[axis] // 2) * 2 == numbers.shape[axis] > 8:
        if axis == 1:
            numbers = smaller(numbers[:, :half], numbers[:, half:])
        else:
            numbers = smaller(numbers[..., :half], numbers[..., half:])
    found: Floats = smaller.reduce(numbers, axis)
    return found


def _of_upper(upper: npt.NDArray[np.uint16]) -> Floats:
    """Return the float32 numbers of which these are the upper halves."""
    return (upper.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _unaligned(stored: Bytes, dtype: np.dtype[np.unsignedinteger]) -> Words:
    return np.frombuffer(stored.tobytes(), dtype)


def _widen(
    words: Words, dtype: int, numbers: Floats, scratch: _QuantiseScratch
) -> None:
    """Fill `numbers` from the words of a dtype. Avoids numpy's float16, whose conversions take ten
    times as long.
    """
    bits = numbers.view(np.uint32)
    np.copyto(bits, words)
    if _DTYPES[dtype] == "bfloat16":
        np.left_shift(bits, 16, out=bits)
    elif _DTYPES[dtype] == "float16":
        # infinity and NaN become numbers above the largest float16
        signs = scratch.signs[: bits.size].reshape(bits.shape)
        np.bitwise_and(bits, 0x8000, out=signs)
        np.left_shift(signs, 16, out=signs)
        np.bitwise_and(bits, 0x7FFF, out=bits)
        np.left_shift(bits, 13, out=bits)
        np.multiply(numbers, _F16, out=numbers)
        np.bitwise_or(bits, signs, out=bits)


def _narrow(
    numbers: Floats, dtype: int, words: Words, scratch: _QuantiseScratch
) -> None:
    """Fill `words` with the nearest numbers of a dtype; `numbers` are undefined afterwards."""
    bits = numbers.view(np.uint32)
    if _DTYPES[dtype] == "bfloat16":
        np.add(bits, 0x8000, out=bits)
        np.right_shift(bits, 16, out=bits)
    elif _DTYPES[dtype] == "float16":
        shifted = scratch.signs[: bits.size].reshape(bits.shape)
        signs = scratch.halves[: bits.size].reshape(bits.shape)
        np.right_shift(bits, 16, out=shifted)
        np.copyto(signs, shifted, casting="unsafe")
        np.bitwise_and(signs, 0x8000, out=signs)
        np.multiply(numbers, 1 / _F16, out=numbers)
        np.add(bits, 0x1000, out=bits)
        np.right_shift(bits, 13, out=bits)
        # without the sign, which is in the higher bits
        np.copyto(words, bits, casting="unsafe")
        np.bitwise_or(words, signs, out=words)
        return
    np.copyto(words, bits, casting="unsafe")


def _packed_bytes(size: int, level: int) -> int:
    return (size + 1) // 2 if level <= _NIBBLE else size


def _pack(codes: Bytes, level: int, scratch: _QuantiseScratch) -> Bytes:
    if level > _NIBBLE:
        return codes
    even = codes.size // 2
    pairs = codes[: 2 * even].view("<u2")
    packed = scratch.packed[: _packed_bytes(codes.size, level)]
    # both codes are in the lower byte
    np.bitwise_or(pairs, pairs >> 4, out=pairs)
    np.copyto(packed[:even], pairs, casting="unsafe")
    if codes.size % 2:
        packed[even] = codes[-1]
    return packed


def _unpack(
    packed: Bytes, size: int, level: int, scratch: _QuantiseScratch
) -> Bytes:
    if level > _NIBBLE:
        return packed
    codes = scratch.codes[:size]
    even = size // 2
    pairs = codes[: 2 * even].view("<u2")
    np.copyto(pairs, packed[:even])
    np.bitwise_or(pairs, pairs << 4, out=pairs)
    np.bitwise_and(pairs, 0x0F0F, out=pairs)
    if size % 2:
        codes[-1] = packed[even] & _NIBBLE
    return codes
