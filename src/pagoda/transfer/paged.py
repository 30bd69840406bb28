"""The KV of one sequence in an engine's paged pools, located by a block table or a slot mapping.

Calls `run_table`; copies in CPU memory here and in `cpu_copy`, on GPUs by `gpu.copy_engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagoda.layout import KVLayout
from pagoda.transfer.base import Array, Bytes, Ids, Words, checked_chunks, device_of
from pagoda.transfer.cpu_copy import in_threads
from pagoda.transfer.gpu.copy_engine import GpuCopy, copy_engine_of
from pagoda.transfer.run_table import (
    PoolFormat,
    Pools,
    block_table_runs,
    pool_rows,
    pool_run_table,
    rows_by_token,
    slot_mapping_runs,
)

if TYPE_CHECKING:
    from pagoda.transfer.gpu.copy_engine import CopyEngine
    from pagoda.transfer.gpu.layer_events import LayerEvents

__all__ = ["PagedKV"]


class _RowCopy(NamedTuple):
    """One chunk's part of one pool: the row numbers [planes, runs] and the slot's words [planes, runs, words]."""

    rows: Words
    numbers: Ids
    slot: Words


class PagedKV:
    """The KV of one sequence in paged pools. Tokens are in blocks of `block_size`; a chunk is whole blocks.

    | pool_format        | pools                                                                     |
    | ------------------ | ------------------------------------------------------------------------- |
    | "planes_first"     | per layer [2, blocks, block_size, heads, dim]                             |
    | "blocks_first"     | per layer [blocks, 2, block_size, heads, dim]                             |
    | "blocks_outermost" | one tensor [blocks, layers, 2, block_size, heads, dim]                    |
    | "plane_pools"      | per layer a pool per plane, [blocks, block_size, heads, dim]: K, V may    |
    |                    | differ; one plane (MLA): per layer [blocks, block_size, dim] itself       |

    The tokens are located by `block_table`, the block ids of the sequence in order, or by `slot_mapping`, block *
    block_size + offset of each token. Leading -1 in either mean that the engine has that prefix already:
    `from_slots` never writes there, and storing it is a ValueError. A mapping that is not made of whole blocks is
    copied by token.

    The slot's bytes are those of dense KV with tokens first (or one head), so each finds the other's chunks; with
    "blocks_outermost" the layout may be opaque, and then a slot holds whole blocks in order. Runs of `run_bytes` are
    gathered by one np.take per pool. Pools that are not contiguous work too, run by run.

    Pools on a CUDA device are copied while the engine computes, see `GpuCopy`, by `copy_engine` or the device's default
    one; `layer_events` records each loaded layer. `threads` are for CPU memory.

    Thread-safe as `Transfer` says. Raises ValueError that names what does not match.
    """

    def __init__(
        self,
        pools: Pools,
        layout: KVLayout,
        *,
        pool_format: PoolFormat,
        block_size: int,
        block_table: Array | Sequence[int] | None = None,
        slot_mapping: Array | Sequence[int] | None = None,
        threads: int = 1,
        copy_engine: CopyEngine | None = None,
        layer_events: LayerEvents | None = None,
    ) -> None:
        if block_size < 1 or layout.chunk_tokens % block_size:
            raise ValueError(
                f"chunk_tokens ({layout.chunk_tokens}) must be a multiple of block_size ({block_size})"
            )
        self.layout = layout
        # a thread waits layer by layer: all chunks are best loaded by one call
        self.at_once = layer_events is not None
        self._threads = threads
        device = device_of(pools)
        copy_engine = copy_engine or copy_engine_of(device)
        self._pools, blocks = pool_rows(pools, layout, pool_format, block_size, device)
        if block_table is not None and slot_mapping is None:
            self._runs = block_table_runs(block_table, blocks, block_size)
        elif slot_mapping is not None and block_table is None:
            self._runs = slot_mapping_runs(slot_mapping, blocks, block_size)
        else:
            raise ValueError("give either block_table or slot_mapping")
        self.num_tokens = self._runs.num_tokens
        if self._runs.tokens != block_size:
            if not layout.planes:
                raise ValueError("slot_mapping must be made of whole blocks where the layout is opaque")
            self._pools = [rows_by_token(pool, block_size) for pool in self._pools]
        self._count = layout.chunk_tokens // self._runs.tokens
        self._gpu_copy: GpuCopy | None = None
        if copy_engine is not None:
            self._gpu_copy = GpuCopy(
                copy_engine, pool_run_table(self._pools, layout, self._count), pools, layer_events
            )

    @property
    def device_index(self) -> int | None:
        """The CUDA device of the pools; None for CPU memory."""
        return None if self._gpu_copy is None else self._gpu_copy.device_index

    @property
    def run_bytes(self) -> int:
        """The shortest contiguous run of a copy, in bytes, which decides its speed. For benchmarks."""
        return min(pool.rows[:1].nbytes for pool in self._pools)

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy the chunks that begin at `starts` into `slots`; changes only the slots."""
        skipped = self._runs.skip * self._runs.tokens
        if any(start < skipped for start in starts):
            raise ValueError(f"starts: the first {skipped} tokens are -1 and have no KV to store")
        if self._gpu_copy is not None:
            self._gpu_copy.to_slots(*self._of_chunks(starts, slots, into_slots=True))
        else:
            self._copy(_gather, self._pieces(starts, slots, into_slots=True))

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy `slots` into the chunks that begin at `starts`; changes only those tokens, and none that is -1."""
        if self._gpu_copy is not None:
            self._gpu_copy.from_slots(*self._of_chunks(starts, slots, into_slots=False))
        else:
            self._copy(_scatter, self._pieces(starts, slots, into_slots=False))

    def _copy(self, copy: Callable[[Sequence[_RowCopy]], None], work: list[_RowCopy]) -> None:
        threads = min(self._threads, len(work))
        cuts = [len(work) * part // max(threads, 1) for part in range(threads + 1)]
        in_threads([partial(copy, work[a:b]) for a, b in pairwise(cuts)], threads)

    def _pieces(self, starts: Sequence[int], slots: Sequence[Bytes], *, into_slots: bool) -> list[_RowCopy]:
        chunks = zip(starts, *self._of_chunks(starts, slots, into_slots=into_slots), strict=True)
        return [piece for start, ids, slot in chunks for piece in self._of_chunk(start, ids, slot)]

    def _of_chunks(
        self, starts: Sequence[int], slots: Sequence[Bytes], *, into_slots: bool
    ) -> tuple[Ids, list[Bytes]]:
        """Return the run numbers [chunks, count] and the slots, all checked."""
        odd = [start for start in starts if start % self._runs.tokens]
        if odd:
            raise ValueError(f"starts must be multiples of block_size ({self._runs.tokens}), got {odd[0]}")
        checked = list(checked_chunks(self.layout, self.num_tokens, starts, slots, into_slots=into_slots))
        firsts = np.array([start // self._runs.tokens for start, _ in checked], dtype=np.int64)
        return self._runs.ids[firsts[:, None] + np.arange(self._count)], [slot for _, slot in checked]

    def _of_chunk(self, start: int, ids: Ids, slot: Bytes) -> Iterator[_RowCopy]:
        skip = max(self._runs.skip - start // self._runs.tokens, 0)
        for pool in self._pools if skip < len(ids) else ():
            shape = (len(pool.firsts), len(ids), pool.rows.shape[1])
            in_slot: Words = np.ndarray(shape, pool.rows.dtype, slot, pool.offset)
            yield _RowCopy(pool.rows, pool.numbers(ids[skip:]), in_slot[:, skip:])


def _gather(work: Sequence[_RowCopy]) -> None:
    """Copy rows into slots. A store skips nothing, so the slot's side is contiguous."""
    for rows, numbers, slot in work:
        if rows.flags.c_contiguous:  # otherwise np.take would first copy the whole pool
            np.take(rows, numbers, axis=0, out=slot, mode="clip")  # "raise" would copy through a buffer
        else:
            for target, number in zip(slot.reshape(-1, slot.shape[-1]), numbers.flat, strict=True):
                np.copyto(target, rows[number])


def _scatter(work: Sequence[_RowCopy]) -> None:
    """Copy slots into rows; no row occurs twice."""
    for rows, numbers, slot in work:
        rows[numbers] = slot
