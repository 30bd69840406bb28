"""KV as runs of bytes and their places in a slot; block tables and slot mappings as run numbers.

Pure: numbers and views only, no byte of KV is read or written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from pagoda.layout import KVLayout, itemsize
from pagoda.transfer.base import Array, Ids, Words, as_words
from pagoda.transfer.pages import PagePlane

if TYPE_CHECKING:
    import torch

__all__ = [
    "ByteRun",
    "PoolFormat",
    "PoolRows",
    "Pools",
    "RunTable",
    "SequenceRuns",
    "block_table_runs",
    "dense_run_table",
    "page_run_table",
    "pool_rows",
    "pool_run_table",
    "rows_by_token",
    "slot_mapping_runs",
]


PoolFormat: TypeAlias = Literal["planes_first", "blocks_first", "blocks_outermost", "plane_pools"]
Pools: TypeAlias = "Array | Sequence[Array | Sequence[Array]]"


class ByteRun(NamedTuple):
    """Bytes that are contiguous on both sides: `nbytes` from `address` on, and from `offset` in the slot on."""

    address: int
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class RunTable:
    """Rows of runs. Every row has `count` runs of a chunk; run j of row p, whose id is `ids[chunk, j]`, is

        device   [address[p] + (id // group) * stride[p] + (id % group) * nbytes[p], + nbytes[p])
        slot     [offset[p] + j * nbytes[p], + nbytes[p])

    The rows follow each other in a slot without a gap, so that any range of rows is one range of its bytes. A run whose
    id is below 0 is skipped. Layer i is rows [layers[i], layers[i + 1]). All arrays are int64 [rows].

    Immutable; thread-safe. Raises ValueError if rows leave a gap in a slot.
    """

    address: Ids
    stride: Ids
    nbytes: Ids
    offset: Ids
    count: int
    group: int
    layers: Ids

    def __post_init__(self) -> None:
        if not len(self.address) or (self.ends[:-1] != self.offset[1:]).any():
            raise ValueError("a table needs rows that follow each other in the slot")

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.address)

    @cached_property
    def ends(self) -> Ids:
        """The end of each row in a slot."""
        return self.offset + self.count * self.nbytes

    @cached_property
    def word_bytes(self) -> int:
        """The widest word of 16, 8, 4, 2, 1 bytes that divides all addresses, offsets and lengths."""
        numbers = np.concatenate([self.address, self.stride, self.nbytes, self.offset])
        return int(np.gcd.reduce(numbers, initial=16))

    @property
    def run_bytes(self) -> int:
        """The shortest run, in bytes."""
        return int(self.nbytes.min())

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Return the byte range of a slot that rows [begin, end) occupy."""
        return int(self.offset[begin]), int(self.ends[end - 1])

    def segments(self, most_bytes: int, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Cut rows [begin, end) into ranges of at most `most_bytes` per chunk, or of one row that has more."""
        end = self.rows if end is None else end
        while begin < end:
            fit = int(np.searchsorted(self.ends, self.offset[begin] + most_bytes, "right"))
            stop = min(max(fit, begin + 1), end)
            yield begin, stop
            begin = stop

    def runs(self, ids: Ids, begin: int, end: int) -> Iterator[ByteRun]:
        """Return the runs of one chunk, whose ids are [count], in rows [begin, end); adjacent ones are joined."""
        there = np.flatnonzero(ids >= 0)
        blocks, tokens = np.divmod(ids[there], self.group)
        address, offset, nbytes = 0, 0, 0
        for row in range(begin, end):
            length = int(self.nbytes[row])
            places = self.address[row] + blocks * self.stride[row] + tokens * length
            offsets = self.offset[row] + there * length
            for place, at in zip(places.tolist(), offsets.tolist(), strict=True):
                if place == address + nbytes and at == offset + nbytes:
                    nbytes += length
                    continue
                if nbytes:
                    yield ByteRun(address, offset, nbytes)
                address, offset, nbytes = place, at, length
        if nbytes:
            yield ByteRun(address, offset, nbytes)


def page_run_table(planes: Sequence[PagePlane], blocks: int, begin: int) -> RunTable:
    """Return the table of planes of pages, `blocks` per chunk; in a slot they begin at `begin`. A plane is a layer."""
    nbytes = _ids([plane.page_bytes for plane in planes])
    return RunTable(
        address=_ids([plane.address for plane in planes]),
        stride=_ids([plane.stride for plane in planes]),
        nbytes=nbytes,
        offset=_consecutive_offsets(nbytes * blocks, begin),
        count=blocks,
        group=1,
        layers=np.arange(len(planes) + 1),
    )


def pool_run_table(pools: Sequence[PoolRows], layout: KVLayout, count: int) -> RunTable:
    """Return the table of paged pools, `count` runs per chunk."""
    address, stride, nbytes, offset = [], [], [], []
    for pool in sorted(pools, key=lambda pool: pool.offset):
        apart, length = pool.rows.strides[0], pool.rows[:1].nbytes
        for number, first in enumerate(pool.firsts.tolist()):
            address.append(pool.rows.ctypes.data + first * pool.group * apart)
            stride.append(pool.step * pool.group * apart)
            nbytes.append(length)
            offset.append(pool.offset + number * count * length)
    return RunTable(
        _ids(address), _ids(stride), _ids(nbytes), _ids(offset), count, pools[0].group, _layer_begins(offset, layout)
    )  # fmt: skip


def dense_run_table(layers: Sequence[Sequence[Words]], layout: KVLayout) -> RunTable:
    """Return the runs of dense KV; the id of a run is a token's number.

    `layers[i]` are the planes of a layer as [heads, tokens, dim], or [tokens, heads, dim] as the layout says. Where the
    tokens of a head are contiguous a run is all of a chunk's, else each token's. Raises ValueError for other strides.
    """
    axis, size = (1, layout.chunk_tokens) if layout.token_order == "heads_first" else (0, layout.chunk_tokens)
    tokens = [
        _token_strides(array, axis, f"layers[{i}]") for i, layer in enumerate(layers) for array in layer
    ]
    heads = [array.shape[0] for array in layers[0]] if axis else [1] * len(layers[0])
    address, stride, nbytes = [], [], []
    for (base, head_stride, token_stride, length), number in zip(tokens, heads * len(layers), strict=True):
        for head in range(number):
            address.append(base + head * head_stride)
            stride.append(token_stride)
            nbytes.append(length)
    whole = stride == nbytes
    each = _ids(nbytes) * (size if whole else 1)
    count = 1 if whole else size
    offset = _consecutive_offsets(each * count, 0)
    return RunTable(
        _ids(address), _ids(stride), each, offset, count, 1, np.arange(layout.layers + 1) * sum(heads)
    )


def _token_strides(array: Words, axis: int, argument: str) -> tuple[int, int, int, int]:
    """Return the address, the strides of heads and tokens, and the contiguous bytes of one token."""
    word = array.itemsize
    inner = array.shape[2] if axis else array.shape[1] * array.shape[2]
    flat = array.shape[2] == 1 or array.strides[2] == word
    if not axis and array.shape[1] > 1:
        flat = flat and array.strides[1] == array.shape[2] * word
    if array.size and not flat:
        raise ValueError(
            f"{argument}: a token's elements must be contiguous on a device, got strides {array.strides} of "
            f"{word}-byte elements: make it contiguous"
        )
    return array.ctypes.data, array.strides[0] if axis else 0, array.strides[axis], inner * word


def _layer_begins(offsets: Sequence[int], layout: KVLayout) -> Ids:
    """Return where each layer's rows begin; all rows are one layer if the layout does not know its layers."""
    if not layout.planes:
        return np.array([0, len(offsets)])
    begins = np.searchsorted(offsets, np.arange(layout.layers) * layout.layer_bytes)
    return np.append(begins, len(offsets)).astype(np.int64)


def _consecutive_offsets(sizes: Ids, begin: int) -> Ids:
    """Return the offsets of rows that follow each other from `begin` on."""
    ends: Ids = begin + np.cumsum(sizes)
    return ends - sizes


def _ids(numbers: Sequence[int]) -> Ids:
    return np.array(numbers, dtype=np.int64)


# ---- paged pools, block tables and slot mappings


class PoolRows(NamedTuple):
    """A pool as [rows, words of one run]: block b of its i-th plane is row `b * step + firsts[i]`."""

    rows: Words
    step: int
    firsts: Ids
    offset: int  # the start of the first of these planes in a slot; the others follow without a gap
    group: int = 1  # rows per block: 1, or block_size if a run is one token

    def numbers(self, ids: Ids) -> Ids:
        """Return the rows [planes, ids] of blocks, or of token slots block * group + offset if there is a group."""
        blocks, offsets = ids // self.group, ids % self.group
        return (blocks * self.step + self.firsts[:, None]) * self.group + offsets


class SequenceRuns(NamedTuple):
    """The runs of a sequence: run i has tokens [i * tokens, (i + 1) * tokens); the first `skip` ids are -1."""

    ids: Ids
    tokens: int
    skip: int
    num_tokens: int


def pool_rows(
    pools: Pools, layout: KVLayout, form: PoolFormat, block_size: int, on: torch.device | None = None
) -> tuple[list[PoolRows], int]:
    """Return the rows of all pools and their number of blocks. Raises ValueError naming what is wrong.

    `on`: the GPU of the pools, None for CPU memory.
    """
    if form not in get_args(PoolFormat):
        raise ValueError(f"pool_format must be one of {', '.join(get_args(PoolFormat))}, got {form!r}")
    if form == "blocks_outermost":
        found = _outermost(pools, layout, block_size, on)
    else:
        _check_layout(layout)
        if len(pools) != layout.layers:
            raise ValueError(f"pools: {len(pools)} layers were given, the layout has {layout.layers}")
        see = _plane_pools if form == "plane_pools" else _paired
        found = [
            rows
            for layer, pool in enumerate(pools)
            for rows in see(pool, layer, layout, form, block_size, on)
        ]
    blocks = {len(pool.rows) // max(pool.step, len(pool.firsts)) for pool in found}
    if len(blocks) != 1:
        raise ValueError(f"pools must all have the same number of blocks, got {sorted(blocks)}")
    return found, blocks.pop()


def rows_by_token(pool: PoolRows, block_size: int) -> PoolRows:
    """Return the same pool with one token per run. Raises ValueError if it is not contiguous."""
    if not pool.rows.flags.c_contiguous:
        raise ValueError("slot_mapping is not made of whole blocks: that needs contiguous pools")
    rows = pool.rows.reshape(len(pool.rows) * block_size, -1)
    return pool._replace(rows=rows, group=block_size)


def block_table_runs(block_table: Array | Sequence[int], blocks: int, block_size: int) -> SequenceRuns:
    """Return the runs of a block table. Raises ValueError naming it."""
    ids, skip = _checked_ids(block_table, "block_table", blocks)
    return SequenceRuns(ids, block_size, skip, len(ids) * block_size)


def slot_mapping_runs(slot_mapping: Array | Sequence[int], blocks: int, block_size: int) -> SequenceRuns:
    """Return the runs of a slot mapping: blocks if it is made of whole ones, else tokens. Raises ValueError."""
    slots, skip = _checked_ids(slot_mapping, "slot_mapping", blocks * block_size)
    whole = len(slots) // block_size * block_size
    by_block = slots[:whole].reshape(-1, block_size)
    used = by_block[skip // block_size :]
    if skip % block_size == 0 and np.all(used[:, 0] % block_size == 0) and np.all(np.diff(used) == 1):
        ids = np.where(by_block[:, 0] < 0, -1, by_block[:, 0] // block_size)
        return SequenceRuns(ids, block_size, skip // block_size, len(slots))
    return SequenceRuns(slots, 1, skip, len(slots))


def _checked_ids(given: Array | Sequence[int], argument: str, limit: int) -> tuple[Ids, int]:
    """Return the ids and the number of leading -1."""
    try:
        array = np.asarray(given)
    except (TypeError, RuntimeError) as error:  # a tensor on a GPU
        raise ValueError(f"{argument} must be readable by the CPU: {error}") from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"{argument} must be 1-D integers, got {array.ndim}-D {array.dtype}")
    ids: Ids = array.astype(np.int64)
    there = np.flatnonzero(ids != -1)
    skip = int(there[0]) if there.size else len(ids)
    rest = ids[skip:]
    bad = rest[(rest < 0) | (rest >= limit)]
    if bad.size:
        raise ValueError(
            f"{argument}: {bad[0]} is not in [0, {limit}), and -1 is allowed only at the beginning"
        )
    if len(np.unique(rest)) != len(rest):
        raise ValueError(f"{argument} names the same place twice")
    return ids, skip


def _check_layout(layout: KVLayout) -> None:
    if not layout.planes:
        raise ValueError("layout is opaque: only pool_format 'blocks_outermost' can be stored without planes")
    if layout.token_order != "tokens_first" and any(plane.heads != 1 for plane in layout.planes):
        raise ValueError(
            "layout must have token_order 'tokens_first': a paged pool keeps tokens before heads"
        )


def _paired(
    pool: object, layer: int, layout: KVLayout, form: PoolFormat, size: int, on: torch.device | None
) -> list[PoolRows]:
    """Return the rows of K and V of a layer in one pool, planes first or blocks first."""
    heads, dim, dtype = layout.planes[0]
    if len(layout.planes) != 2 or layout.planes[1] != layout.planes[0]:
        raise ValueError(f"pool_format {form!r} holds two equal planes, the layout has {layout.planes}")
    array = as_words(pool, f"pools[{layer}]", dtype, on)
    axis = 0 if form == "planes_first" else 1
    blocks = array.shape[1 - axis] if array.ndim == 5 else 0
    lead = (2, blocks) if axis == 0 else (blocks, 2)
    _check_shape(array, f"pools[{layer}]", (*lead, size, heads, dim))
    offset = layout.plane_offset(layer, 0)
    if not array.flags.c_contiguous:
        planes = [array[0], array[1]] if axis == 0 else [array[:, 0], array[:, 1]]
        return [
            _one(plane, f"pools[{layer}]", layout.plane_offset(layer, i)) for i, plane in enumerate(planes)
        ]
    rows = array.reshape(2 * blocks, -1)
    if axis == 0:
        return [PoolRows(rows, 1, np.array([0, blocks]), offset)]
    return [PoolRows(rows, 2, np.array([0, 1]), offset)]


def _plane_pools(
    pool: object, layer: int, layout: KVLayout, form: PoolFormat, size: int, on: torch.device | None
) -> list[PoolRows]:
    """Return the rows of a layer whose planes each have a separate pool."""
    planes = list(pool) if isinstance(pool, list | tuple) else [pool]
    if len(planes) != len(layout.planes):
        raise ValueError(f"pools[{layer}] has {len(planes)} planes, the layout has {len(layout.planes)}")
    found = []
    for number, (given, (heads, dim, dtype)) in enumerate(zip(planes, layout.planes, strict=True)):
        name = f"pools[{layer}][{number}]"
        array = as_words(given, name, dtype, on)
        if array.ndim == 3 and heads == 1:
            array = array[:, :, None]
        _check_shape(array, name, (len(array), size, heads, dim))
        found.append(_one(array, name, layout.plane_offset(layer, number)))
    return found


def _outermost(pools: object, layout: KVLayout, size: int, on: torch.device | None) -> list[PoolRows]:
    """Return the rows of one pool for all layers, block by block."""
    array = as_words(pools, "pools", layout.planes[0].dtype if layout.planes else None, on)
    if not layout.planes:
        return [_one(array, "pools", 0, layout.chunk_bytes * size // layout.chunk_tokens)]
    _check_layout(layout)
    count, (heads, dim, dtype) = len(layout.planes), layout.planes[0]
    if any(plane != layout.planes[0] for plane in layout.planes):
        raise ValueError(f"pool_format 'blocks_outermost' holds equal planes, the layout has {layout.planes}")
    _check_shape(array, "pools", (len(array), layout.layers, count, size, heads, dim))
    run = size * heads * dim * itemsize(dtype)
    if not array[:1].flags.c_contiguous:
        raise ValueError(f"pools: blocks must be contiguous, got strides {array.strides}")
    if array.flags.c_contiguous:
        each = layout.layers * count
        return [PoolRows(array.reshape(-1, run // array.itemsize), each, np.arange(each), 0)]
    return [
        _one(array[:, layer, plane], "pools", layout.plane_offset(layer, plane))
        for layer in range(layout.layers)
        for plane in range(count)
    ]


def _one(array: Words, argument: str, offset: int, run_bytes: int | None = None) -> PoolRows:
    """Return the rows of one plane, [blocks, ...]: each block is contiguous, at any distance."""
    if array.ndim < 2 or not array[:1].flags.c_contiguous:
        raise ValueError(
            f"{argument}: blocks must be contiguous, got shape {array.shape} strides {array.strides}"
        )
    each = array[:1].size
    if run_bytes is not None and each * array.itemsize != run_bytes:
        raise ValueError(
            f"{argument}: a block has {each * array.itemsize} bytes, the layout says {run_bytes}"
        )
    strides = (array.strides[0], array.itemsize)
    rows = np.lib.stride_tricks.as_strided(array, (len(array), each), strides)
    return PoolRows(rows, 1, np.zeros(1, np.int64), offset)


def _check_shape(array: Words, argument: str, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{argument} must have the shape {list(shape)}, got {list(array.shape)}")
