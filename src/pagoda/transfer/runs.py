"""KV in a device's memory as runs of bytes, and where each lies in a slot: numbers only, no memory is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pagoda.layout import KVLayout
from pagoda.transfer.base import Words
from pagoda.transfer.pages import Plane
from pagoda.transfer.pools import Ids, Rows

__all__ = ["Run", "RunTable", "dense_runs", "page_runs", "pool_runs"]


class Run(NamedTuple):
    """Bytes that are contiguous on both sides: `nbytes` from `address` on, and from `offset` of the slot on."""

    address: int
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class RunTable:
    """Rows of runs. Of a chunk every row has `count`; run j of row p, whose id is `ids[chunk, j]`, is

        device   [address[p] + (id // group) * stride[p] + (id % group) * nbytes[p], + nbytes[p])
        slot     [offset[p] + j * nbytes[p], + nbytes[p])

    The rows follow each other in a slot without a gap, so that any range of them is one range of its bytes. An id
    below 0 is a run that is passed over. Layer i is rows [layers[i], layers[i + 1]). All arrays are int64 [rows].

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
        """Where each row ends in a slot."""
        return self.offset + self.count * self.nbytes

    @cached_property
    def word_bytes(self) -> int:
        """The widest word of 16, 8, 4, 2, 1 bytes that fits all places on the device and in a slot, and all lengths."""
        numbers = np.concatenate([self.address, self.stride, self.nbytes, self.offset])
        return int(np.gcd.reduce(numbers, initial=16))

    @property
    def run_bytes(self) -> int:
        """The shortest run, in bytes."""
        return int(self.nbytes.min())

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Return the bytes [begin, end) of a slot that rows [begin, end) are."""
        return int(self.offset[begin]), int(self.ends[end - 1])

    def segments(self, most_bytes: int, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Cut rows [begin, end) into ranges of at most `most_bytes` of a chunk each, or of one row that has more."""
        end = self.rows if end is None else end
        while begin < end:
            fit = int(np.searchsorted(self.ends, self.offset[begin] + most_bytes, "right"))
            stop = min(max(fit, begin + 1), end)
            yield begin, stop
            begin = stop

    def runs(self, ids: Ids, begin: int, end: int) -> Iterator[Run]:
        """Return the runs of one chunk, whose ids are [count], in rows [begin, end), neighbours joined."""
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
                    yield Run(address, offset, nbytes)
                address, offset, nbytes = place, at, length
        if nbytes:
            yield Run(address, offset, nbytes)


def page_runs(planes: Sequence[Plane], blocks: int, begin: int) -> RunTable:
    """Return the runs of planes of pages, `blocks` a chunk; in a slot they begin at `begin`. A plane is a layer."""
    nbytes = _ids([plane.page_bytes for plane in planes])
    return RunTable(
        address=_ids([plane.address for plane in planes]),
        stride=_ids([plane.stride for plane in planes]),
        nbytes=nbytes,
        offset=_following(nbytes * blocks, begin),
        count=blocks,
        group=1,
        layers=np.arange(len(planes) + 1),
    )


def pool_runs(pools: Sequence[Rows], layout: KVLayout, count: int) -> RunTable:
    """Return the runs of paged pools, `count` a chunk."""
    address, stride, nbytes, offset = [], [], [], []
    for pool in sorted(pools, key=lambda pool: pool.offset):
        apart, length = pool.rows.strides[0], pool.rows[:1].nbytes
        for number, first in enumerate(pool.firsts.tolist()):
            address.append(pool.rows.ctypes.data + first * pool.group * apart)
            stride.append(pool.step * pool.group * apart)
            nbytes.append(length)
            offset.append(pool.offset + number * count * length)
    return RunTable(
        _ids(address), _ids(stride), _ids(nbytes), _ids(offset), count, pools[0].group, _layers(offset, layout)
    )  # fmt: skip


def dense_runs(layers: Sequence[Sequence[Words]], layout: KVLayout) -> RunTable:
    """Return the runs of dense KV; the id of a run is a token's number.

    `layers[i]` are the planes of a layer as [heads, tokens, dim], or [tokens, heads, dim] as the layout says. Where the
    tokens of a head lie side by side a run is all of a chunk's, else each token's. Raises ValueError for other strides.
    """
    axis, size = (1, layout.chunk_tokens) if layout.token_order == "heads_first" else (0, layout.chunk_tokens)
    tokens = [_by_token(array, axis, f"layers[{i}]") for i, layer in enumerate(layers) for array in layer]
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
    offset = _following(each * count, 0)
    return RunTable(
        _ids(address), _ids(stride), each, offset, count, 1, np.arange(layout.layers + 1) * sum(heads)
    )


def _by_token(array: Words, axis: int, argument: str) -> tuple[int, int, int, int]:
    """Return address, bytes from head to head, from token to token, and of what one token has in one piece."""
    word = array.itemsize
    inner = array.shape[2] if axis else array.shape[1] * array.shape[2]
    flat = array.shape[2] == 1 or array.strides[2] == word
    if not axis and array.shape[1] > 1:
        flat = flat and array.strides[1] == array.shape[2] * word
    if array.size and not flat:
        raise ValueError(
            f"{argument}: what a token has must lie in one piece on a device, got strides {array.strides} of "
            f"{word}-byte elements: make it contiguous"
        )
    return array.ctypes.data, array.strides[0] if axis else 0, array.strides[axis], inner * word


def _layers(offsets: Sequence[int], layout: KVLayout) -> Ids:
    """Where each layer's rows begin; all are one where the layout does not know its layers."""
    if not layout.planes:
        return np.array([0, len(offsets)])
    begins = np.searchsorted(offsets, np.arange(layout.layers) * layout.layer_bytes)
    return np.append(begins, len(offsets)).astype(np.int64)


def _following(sizes: Ids, begin: int) -> Ids:
    """Offsets of rows that follow each other from `begin` on."""
    ends: Ids = begin + np.cumsum(sizes)
    return ends - sizes


def _ids(numbers: Sequence[int]) -> Ids:
    return np.array(numbers, dtype=np.int64)
