"""KV in blocks of one chunk each: a chunk is one contiguous run, so a copy is one call.

Calls `cpu_copy`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagoda.layout import KVLayout
from pagoda.transfer.base import (
    Array,
    Bytes,
    Words,
    as_words,
    checked_slots,
    no_loads,
)
from pagoda.transfer.cpu_copy import copy_pairs


class BlockKV:
    """Blocks [blocks, ...] of one chunk each: any inner shape, contiguous, of `layout.chunk_bytes`
    bytes.

    Blocks are stored in the engine's own order of bytes; let the layout name that order
    (`KVLayout.opaque`), or use [blocks, layers, planes, heads, tokens, dim] where the layout has
    planes. Tokens [i * chunk_tokens, (i + 1) * chunk_tokens) of the sequence are in block
    `table[i]`; without a table in block i.

    Thread-safe as `Transfer` says. Raises ValueError that names what does not match.
    """

    def __init__(
        self,
        blocks: Array,
        layout: KVLayout,
        *,
        table: Sequence[int] | None = None,
        threads: int | None = None,
    ) -> None:
        array = as_words(blocks, "blocks", None)
        if array.ndim < 2 or not len(array) or not array[0].flags.c_contiguous:
            raise ValueError(
                f"blocks must be [blocks, ...], each contiguous, got {array.shape} strides "
                f"{array.strides}"
            )
        if array[0].nbytes != layout.chunk_bytes:
            raise ValueError(
                f"blocks: one has {array[0].nbytes} bytes, a chunk of the layout "
                f"{layout.chunk_bytes}"
            )
        self.layout = layout
        # the bytes of a contiguous run of a copy; for benchmarks
        self.run_bytes = layout.chunk_bytes
        self._threads = threads
        self._blocks = _as_bytes(array)
        # why nothing can be copied out of slots
        self._no_loads = no_loads(self._blocks, "blocks")
        self._table = (
            range(len(array))
            if table is None
            else _checked_table(table, len(array))
        )
        self.num_tokens = len(self._table) * layout.chunk_tokens

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy the chunks that begin at `starts` into `slots`; changes only the slots."""
        copy_pairs(
            [(slot, own) for own, slot in self._pairs(starts, slots, True)],
            self._threads,
        )

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy `slots` into the blocks of `starts`; changes only those blocks."""
        copy_pairs(self._pairs(starts, slots, False), self._threads)

    def _pairs(
        self, starts: Sequence[int], slots: Sequence[Bytes], into_slots: bool
    ) -> list[tuple[Bytes, Bytes]]:
        if self._no_loads and not into_slots:
            raise ValueError(self._no_loads)
        size = self.layout.chunk_tokens
        odd = [start for start in starts if start % size]
        if odd:
            raise ValueError(
                f"starts must be multiples of chunk_tokens ({size}), got {odd[0]}"
            )
        checked = checked_slots(
            self.layout, self.num_tokens, starts, slots, into_slots=into_slots
        )
        return [
            (self._blocks[self._table[start // size]], slot)
            for start, slot in zip(starts, checked, strict=True)
        ]


def _as_bytes(array: Words) -> Bytes:
    """Return [blocks, bytes] over the same memory; the stride from block to block may be
    anything.
    """
    first = array[0].reshape(-1).view(np.uint8)
    return np.lib.stride_tricks.as_strided(
        first, (len(array), first.size), (array.strides[0], 1)
    )


def _checked_table(table: Sequence[int], blocks: int) -> list[int]:
    ids: npt.NDArray[np.int64] = np.asarray(table, dtype=np.int64)
    if ids.ndim != 1 or np.any(ids < 0) or np.any(ids >= blocks):
        raise ValueError(f"table must be 1-D block numbers in [0, {blocks})")
    if len(np.unique(ids)) != len(ids):
        raise ValueError("table names a block twice")
    return [int(number) for number in ids]
