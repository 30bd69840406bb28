"""KV as rows of runs of bytes, and their places in a slot.

Pure: numbers and views only, no byte of KV is read or written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pagoda.layout import KVLayout
from pagoda.transfer.base import Ids
from pagoda.transfer.cpu_copy import KvRows
from pagoda.transfer.pages_kv import PagePlane


class ByteRun(NamedTuple):
    """Bytes that are contiguous on both sides: `nbytes` from `address` on, and from `offset` in the
    slot on.
    """

    address: int
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class RunTable:
    """Rows of runs. Every row has `count` runs of a chunk; run j of row p, whose id is `ids[chunk,
    j]`, is

        device   [address[p] + (id // group) * stride[p] + (id % group) * nbytes[p], + nbytes[p])
        slot     [offset[p] + j * nbytes[p], + nbytes[p])

    The rows follow each other in a slot without a gap, so that any range of rows is one range of
    its bytes. A run whose id is below 0 is skipped. Layer i is rows [layers[i], layers[i + 1]). All
    arrays are int64 [rows].

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
            raise ValueError(
                "a table needs rows that follow each other in the slot"
            )

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
        """The widest word of 16, 8, 4, 2, 1 bytes that divides all addresses, offsets and
        lengths.
        """
        numbers = np.concatenate(
            [self.address, self.stride, self.nbytes, self.offset]
        )
        return int(np.gcd.reduce(numbers, initial=16))

    @property
    def run_bytes(self) -> int:
        """The shortest run, in bytes."""
        return int(self.nbytes.min())

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Return the byte range of a slot that rows [begin, end) occupy."""
        return int(self.offset[begin]), int(self.ends[end - 1])

    def segments(
        self, most_bytes: int, begin: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, int]]:
        """Cut rows [begin, end) into ranges of at most `most_bytes` per chunk, or of one row that
        has more.
        """
        end = self.rows if end is None else end
        while begin < end:
            fit = int(
                np.searchsorted(
                    self.ends, self.offset[begin] + most_bytes, "right"
                )
            )
            stop = min(max(fit, begin + 1), end)
            yield begin, stop
            begin = stop

    def runs(self, ids: Ids, begin: int, end: int) -> Iterator[ByteRun]:
        """Return the runs of one chunk, whose ids are [count], in rows [begin, end); adjacent ones
        are joined.
        """
        there = np.flatnonzero(ids >= 0)
        blocks, tokens = np.divmod(ids[there], self.group)
        address = 0
        offset = 0
        nbytes = 0
        for row in range(begin, end):
            length = int(self.nbytes[row])
            places = (
                self.address[row] + blocks * self.stride[row] + tokens * length
            )
            offsets = self.offset[row] + there * length
            for place, at in zip(places.tolist(), offsets.tolist(), strict=True):
                if place == address + nbytes and at == offset + nbytes:
                    nbytes += length
                    continue
                if nbytes:
                    yield ByteRun(address, offset, nbytes)
                address = place
                offset = at
                nbytes = length
        if nbytes:
            yield ByteRun(address, offset, nbytes)


def page_run_table(
    planes: Sequence[PagePlane], blocks: int, begin: int
) -> RunTable:
    """Return the table of planes of pages, `blocks` per chunk; in a slot they begin at `begin`. A
    plane is a layer.
    """
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


def run_table(rows: Sequence[KvRows], layout: KVLayout, count: int) -> RunTable:
    """Return the table of rows whose chunks have `count` runs per plane, each with one id. Reads no
    byte of KV.
    """
    address = []
    stride = []
    nbytes = []
    offset = []
    for row in sorted(rows, key=lambda row: row.offset):
        array = row.array
        length = array.itemsize * math.prod(
            array.shape[2 if row.group == 1 else 3 :]
        )
        for plane in range(len(array)):
            address.append(array.ctypes.data + plane * array.strides[0])
            stride.append(array.strides[1])
            nbytes.append(length)
            offset.append(row.offset + plane * count * length)
    return RunTable(
        _ids(address),
        _ids(stride),
        _ids(nbytes),
        _ids(offset),
        count,
        rows[0].group,
        _layer_begins(offset, layout),
    )


def dense_run_table(rows: Sequence[KvRows], layout: KVLayout) -> RunTable:
    """Return the table of dense KV; the id of a run is a token's number.

    If the tokens of a head are contiguous, a run has all tokens of a chunk, otherwise one token.
    Raises ValueError if the elements of a token are not contiguous.
    """
    per_layer = len(layout.planes)
    for number, row in enumerate(rows):
        array = row.array
        if array.size and not array[:1, :1].flags.c_contiguous:
            raise ValueError(
                f"layers[{number // per_layer}]: a token's elements must be contiguous on a "
                "device, got strides "
                f"{array.strides} of {array.itemsize}-byte elements: make it contiguous"
            )
    table = run_table(rows, layout, layout.chunk_tokens)
    if (table.stride != table.nbytes).any():
        return table
    return replace(table, nbytes=table.nbytes * table.count, count=1)


def _layer_begins(offsets: Sequence[int], layout: KVLayout) -> Ids:
    """Return where each layer's rows begin; without known layers, all rows are one layer."""
    if not layout.planes:
        return np.array([0, len(offsets)])
    begins = np.searchsorted(
        offsets, np.arange(layout.layers) * layout.layer_bytes
    )
    return np.append(begins, len(offsets)).astype(np.int64)


def _consecutive_offsets(sizes: Ids, begin: int) -> Ids:
    """Return the offsets of rows that follow each other from `begin` on."""
    ends: Ids = begin + np.cumsum(sizes)
    return ends - sizes


def _ids(numbers: Sequence[int]) -> Ids:
    return np.array(numbers, dtype=np.int64)
