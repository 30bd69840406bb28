"""The KV of one sequence in an engine's paged pools, found by a block table or a slot mapping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagoda.layout import KVLayout
from pagoda.transfer.base import Array, Bytes, Ids, Words, device_of, pieces
from pagoda.transfer.cpu_copy import in_threads
from pagoda.transfer.gpu.copy_engine import Beside, copies_for
from pagoda.transfer.run_table import (
    PoolFormat,
    Pools,
    by_token,
    pool_runs,
    runs_of_mapping,
    runs_of_table,
    see_pools,
)

if TYPE_CHECKING:
    from pagoda.transfer.gpu.copy_engine import Copies
    from pagoda.transfer.gpu.layer_events import LayerGate

__all__ = ["PagedKV"]


class _Piece(NamedTuple):
    """One chunk's share of one pool: the rows [planes, runs] and the slot's words [planes, runs, words]."""

    rows: Words
    numbers: Ids
    slot: Words


class PagedKV:
    """The KV of one sequence in paged pools. Tokens lie in blocks of `block_size`; a chunk is whole blocks.

    | pool_format        | pools                                                                     |
    | ------------------ | ------------------------------------------------------------------------- |
    | "planes_first"     | per layer [2, blocks, block_size, heads, dim]                             |
    | "blocks_first"     | per layer [blocks, 2, block_size, heads, dim]                             |
    | "blocks_outermost" | one tensor [blocks, layers, 2, block_size, heads, dim]                    |
    | "plane_pools"      | per layer a pool a plane, [blocks, block_size, heads, dim]: K and V may   |
    |                    | differ; one plane (MLA): per layer [blocks, block_size, dim] itself       |

    Where the tokens are: `block_table`, the block ids of the sequence in order, or `slot_mapping`, block *
    block_size + offset of each token. Leading -1 in either mean that the engine has that prefix already:
    `from_slots` never writes there, and asking to store it is a ValueError. A mapping not made of whole
    blocks is copied by token.

    The slot's bytes are those of dense KV with tokens first (or one head), so both find each other's chunks;
    with "blocks_outermost" the layout may be opaque, and then whole blocks lie one after the other in a slot.
    Runs of `run_bytes` are gathered by one np.take a pool. Pools that are not contiguous work too, run by
    run.

    Pools on a CUDA device are copied beside the engine's work, as `Beside` says, by `copies` or the device's own copy
    engine; `gate` is told of each layer that is loaded. `threads` are for CPU memory.

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
        copies: Copies | None = None,
        gate: LayerGate | None = None,
    ) -> None:
        if block_size < 1 or layout.chunk_tokens % block_size:
            raise ValueError(
                f"chunk_tokens ({layout.chunk_tokens}) must be a multiple of block_size ({block_size})"
            )
        self.layout = layout
        # somebody waits layer by layer: all chunks are best loaded by one call
        self.at_once = gate is not None
        self._threads = threads
        device = device_of(pools)
        copies = copies or copies_for(device)
        self._pools, blocks = see_pools(pools, layout, pool_format, block_size, device)
        if block_table is not None and slot_mapping is None:
            self._runs = runs_of_table(block_table, blocks, block_size)
        elif slot_mapping is not None and block_table is None:
            self._runs = runs_of_mapping(slot_mapping, blocks, block_size)
        else:
            raise ValueError("give either block_table or slot_mapping")
        self.num_tokens = self._runs.num_tokens
        if self._runs.tokens != block_size:
            if not layout.planes:
                raise ValueError("slot_mapping must be made of whole blocks where the layout is opaque")
            self._pools = [by_token(pool, block_size) for pool in self._pools]
        self._count = layout.chunk_tokens // self._runs.tokens
        self._beside: Beside | None = None
        if copies is not None:
            self._beside = Beside(copies, pool_runs(self._pools, layout, self._count), pools, gate)

    @property
    def device_index(self) -> int | None:
        """The CUDA device that the pools lie on; None for CPU memory."""
        return None if self._beside is None else self._beside.device_index

    @property
    def run_bytes(self) -> int:
        """The shortest contiguous run of a copy, in bytes: what its speed depends on. For benchmarks."""
        return min(pool.rows[:1].nbytes for pool in self._pools)

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy the chunks that begin at `starts` into `slots`; changes the slots only."""
        skipped = self._runs.skip * self._runs.tokens
        if any(start < skipped for start in starts):
            raise ValueError(f"starts: the {skipped} tokens that are -1 have no KV here to be stored")
        if self._beside is not None:
            self._beside.to_slots(*self._of_chunks(starts, slots, into_slots=True))
        else:
            self._copy(_gather, self._pieces(starts, slots, into_slots=True))

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy `slots` into the chunks that begin at `starts`; changes those tokens only, none of the -1."""
        if self._beside is not None:
            self._beside.from_slots(*self._of_chunks(starts, slots, into_slots=False))
        else:
            self._copy(_scatter, self._pieces(starts, slots, into_slots=False))

    def _copy(self, copy: Callable[[Sequence[_Piece]], None], work: list[_Piece]) -> None:
        threads = min(self._threads, len(work))
        cuts = [len(work) * part // max(threads, 1) for part in range(threads + 1)]
        in_threads([partial(copy, work[a:b]) for a, b in pairwise(cuts)], threads)

    def _pieces(self, starts: Sequence[int], slots: Sequence[Bytes], *, into_slots: bool) -> list[_Piece]:
        chunks = zip(starts, *self._of_chunks(starts, slots, into_slots=into_slots), strict=True)
        return [piece for start, ids, slot in chunks for piece in self._of_chunk(start, ids, slot)]

    def _of_chunks(
        self, starts: Sequence[int], slots: Sequence[Bytes], *, into_slots: bool
    ) -> tuple[Ids, list[Bytes]]:
        """Return the run numbers [chunks, count] and the slots, all checked."""
        odd = [start for start in starts if start % self._runs.tokens]
        if odd:
            raise ValueError(f"starts must be multiples of block_size ({self._runs.tokens}), got {odd[0]}")
        checked = list(pieces(self.layout, self.num_tokens, starts, slots, into_slots=into_slots))
        firsts = np.array([start // self._runs.tokens for start, _ in checked], dtype=np.int64)
        return self._runs.ids[firsts[:, None] + np.arange(self._count)], [slot for _, slot in checked]

    def _of_chunk(self, start: int, ids: Ids, slot: Bytes) -> Iterator[_Piece]:
        skip = max(self._runs.skip - start // self._runs.tokens, 0)
        for pool in self._pools if skip < len(ids) else ():
            shape = (len(pool.firsts), len(ids), pool.rows.shape[1])
            room: Words = np.ndarray(shape, pool.rows.dtype, slot, pool.offset)
            yield _Piece(pool.rows, pool.numbers(ids[skip:]), room[:, skip:])


def _gather(work: Sequence[_Piece]) -> None:
    """Copy rows into slots. Storing skips nothing, so the slot's side is contiguous."""
    for rows, numbers, slot in work:
        if rows.flags.c_contiguous:  # of any other array np.take would first copy the whole pool
            np.take(rows, numbers, axis=0, out=slot, mode="clip")  # "raise" would go through a buffer
        else:
            for room, number in zip(slot.reshape(-1, slot.shape[-1]), numbers.flat, strict=True):
                np.copyto(room, rows[number])


def _scatter(work: Sequence[_Piece]) -> None:
    """Copy slots into rows; no row comes twice."""
    for rows, numbers, slot in work:
        rows[numbers] = slot
