"""Planes of pages in an accelerator's memory: gathered and scattered there, beside the engine's own work."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from pagoda.layout import KVLayout
from pagoda.threads import Pool
from pagoda.transfer.base import Bytes, pieces
from pagoda.transfer.gpu.copy_engine import Beside, Copies, copies_for
from pagoda.transfer.gpu.device import CpuPort, Mark
from pagoda.transfer.gpu.layer_events import LayerGate
from pagoda.transfer.pages import Places, Plane, see_plane
from pagoda.transfer.run_table import page_runs

if TYPE_CHECKING:
    import torch

__all__ = ["DevicePagesKV", "Snapshot", "Staging"]


class DevicePagesKV:
    """The KV of one sequence in planes of pages on a CUDA device, or in CPU memory; else as `PagesKV`.

    Pages are copied by `copies`, or the device's own copy engine, on streams beside the engine's, behind all that the
    engine had launched on the stream that was current where and when this object was made; each call returns when its
    copies are complete, so that slots may be validated then, and what the engine launches afterwards sees them. Nothing
    here orders the engine's later work behind a call that has not returned: until then the engine must leave the blocks
    alone. (`snapshot` is for those that it will not.) `gate` is told of each plane that is loaded, as a layer.

    Thread-safe as `Transfer` says. Raises ValueError that names what does not match, before anything is copied.
    """

    def __init__(
        self,
        planes: Sequence[torch.Tensor],
        layout: KVLayout,
        *,
        block_tokens: int,
        block_table: Sequence[int],
        part: int = 0,
        parts: int = 1,
        copies: Copies | None = None,
        gate: LayerGate | None = None,
    ) -> None:
        import torch

        for number, plane in enumerate(planes):
            if not isinstance(plane, torch.Tensor) or plane.device != planes[0].device:
                raise ValueError(f"planes[{number}] must be a tensor on one device with the others")
        seen = [see_plane(plane, f"planes[{number}]") for number, plane in enumerate(planes)]
        self._places = Places(seen, layout, block_tokens, block_table, part, parts)
        self._begin = part * self._places.part_bytes
        device = planes[0].device
        copies = copies or copies_for(None if device.type == "cpu" else device) or Copies(CpuPort())
        table = page_runs(seen, self._places.blocks, self._begin)
        copies.prepare(table)
        self._beside = Beside(copies, table, planes, gate)
        self.layout = layout
        # somebody waits layer by layer: all chunks are best loaded by one call
        self.at_once = gate is not None
        self.num_tokens = self._places.num_tokens

    def with_table(self, block_table: Sequence[int]) -> DevicePagesKV:
        """Return one for another sequence in the same planes, which are not looked at again; changes nothing.

        It waits for what this thread has launched until now, as one made anew does. Raises ValueError if the
        table names a block that is not there.
        """
        other = copy(self)
        other._places = self._places.with_table(block_table)
        other.num_tokens = other._places.num_tokens
        other._beside = self._beside.renewed()
        return other

    @property
    def device_index(self) -> int | None:
        """The CUDA device that the planes lie on; None for CPU memory."""
        return self._beside.device_index

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy the chunks that begin at `starts` into this part of `slots`; changes nothing else."""
        checked = pieces(self.layout, self.num_tokens, starts, slots, into_slots=True)
        ids = self._places.blocks_of(starts, into_slots=True)
        self._beside.to_slots(ids, [slot for _, slot in checked])

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy this part of `slots` into the blocks of `starts`; changes those blocks only, none that is -1."""
        checked = pieces(self.layout, self.num_tokens, starts, slots, into_slots=False)
        ids = self._places.blocks_of(starts, into_slots=False)
        self._beside.from_slots(ids, [slot for _, slot in checked])

    def reserve(self, snapshot_bytes: int) -> tuple[Staging, int]:
        """Take now what device memory copies and snapshots will need; returns the latter's, and the bytes of both.

        Snapshots get no more than `snapshot_bytes`, and less where the device has less left, but one chunk always.
        It is asked for by a thread of its own: where the caller's allocations go to a pool that is taken away while an
        engine sleeps, this must not. Raises torch's error without memory.
        """
        beside = self._beside
        begin, end = beside.table.span(0, beside.table.rows)
        share = end - begin

        def taken() -> tuple[Staging, int]:
            rings, rows = beside.copies.reserve(beside.table), max(1, snapshot_bytes // share)
            while True:
                try:
                    memory = beside.copies.port.memory(rows * share).view(rows, share)
                    return Staging(memory), rings + memory.nbytes
                except RuntimeError:  # torch.OutOfMemoryError is one
                    if rows == 1:
                        raise
                    rows = max(1, rows // 2)

        with Pool(1, "pagoda-reserve") as thread:
            return thread.submit(taken).result()

    def snapshot(self, starts: Sequence[int], staging: Staging | None = None) -> Snapshot:
        """Copy the chunks that begin at `starts` within the device, in the current stream's order; waits for nothing.

        What the engine launches on that stream afterwards may overwrite the blocks. They go to `staging`, which must
        have room for them, until the snapshot is released, or to new memory: raises torch's own error where the device
        has none left.
        """
        ids = self._places.blocks_of(starts, into_slots=True)
        beside = self._beside
        rows = list(range(len(starts))) if staging is None else staging.take(len(starts))
        into = None if staging is None else (staging.memory, rows)
        try:
            memory, taken = beside.copies.take(beside.table, ids, beside.made, into)
        except BaseException:
            if staging is not None:
                staging.give(rows)
            raise
        return Snapshot(beside, self.layout, self._begin, memory, rows, taken, staging)


class Staging:
    """Device memory that snapshots share: rows of one chunk's share. Thread-safe."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._free = list(range(len(memory)))
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """How many chunks there is room for."""
        return len(self._free)

    def take(self, number: int) -> list[int]:
        """Return so many rows, the caller's until `give`. Raises ValueError if fewer are free."""
        with self._lock:
            if number > len(self._free):
                raise ValueError(
                    f"room for {len(self._free)} chunks is left on the device, {number} are to be kept"
                )
            rows, self._free = self._free[:number], self._free[number:]
        return rows

    def give(self, rows: Sequence[int]) -> None:
        """Give rows back into which nothing is copied, and out of which nothing is, on another stream any more."""
        with self._lock:
            self._free += rows


class Snapshot:
    """Chunks as they were at one moment of a stream, in device memory until `release`, or until this object goes.

    `to_slots` is for one thread, any thread.
    """

    def __init__(
        self,
        beside: Beside,
        layout: KVLayout,
        begin: int,
        memory: torch.Tensor,
        rows: list[int],
        taken: Mark,
        staging: Staging | None,
    ) -> None:
        self._beside = beside  # its table is read until `taken`
        self._layout, self._begin = layout, begin
        self._staging, self._rows, self._taken = memory, rows, taken
        self._owner = staging

    @property
    def nbytes(self) -> int:
        """The device memory that it takes."""
        return len(self._rows) * self._staging.shape[1]

    def to_slots(self, slots: Sequence[Bytes]) -> None:
        """Copy the chunks into this part of `slots`, in the order of the starts; returns when they are complete."""
        room, share = self._staging.shape
        tokens = len(self._rows) * self._layout.chunk_tokens
        starts = range(0, tokens, self._layout.chunk_tokens)
        checked = pieces(self._layout, tokens, starts, slots, into_slots=True)
        plane = Plane(self._staging.data_ptr(), share, share, room, 0)
        ids = np.array(self._rows, dtype=np.int64)[:, None]
        self._beside.copies.down(
            page_runs([plane], 1, self._begin), ids, [slot for _, slot in checked], self._taken
        )

    def release(self) -> None:
        """Let other snapshots have its room; idempotent. Nothing may be copied out of it any more."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.give(self._rows)
