"""Planes of pages in a GPU's memory: stored, loaded and snapshotted while the engine computes.

Called by the vLLM connector; calls `copy_engine`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pagoda.base.signal_safe_threads import Pool
from pagoda.layout import KVLayout
from pagoda.transfer.base import Bytes, Ids, RunTransfer, checked_slots
from pagoda.transfer.gpu.copy_engine import CopyEngine, GpuCopy, copy_engine_of
from pagoda.transfer.gpu.device import CpuDevice, DeviceEvent
from pagoda.transfer.gpu.layer_events import LayerEvents
from pagoda.transfer.pages_kv import PagePlane, PageTable, page_plane
from pagoda.transfer.run_table import page_run_table

if TYPE_CHECKING:
    import torch


class DevicePagesKV(RunTransfer):
    """The KV of one sequence in planes of pages on a CUDA device, or in CPU memory; otherwise as
    `PagesKV`.

    Pages are copied by `copy_engine`, or by the device's default one, on streams other than the LLM
    engine's, after all work on the stream that was current when and where this object was made.
    Each call returns when its copies are complete, so slots may be validated then, and later work
    of the LLM engine sees the copies. While a call is running, the engine must not change the
    blocks: nothing here makes its later work wait for the call. (`snapshot` is for blocks that the
    engine will change.) `layer_events` records each loaded plane as a layer.

    Thread-safe as `Transfer` says. Raises ValueError that names what does not match, before
    anything is copied.
    """

    _copier: GpuCopy

    def __init__(
        self,
        planes: Sequence[torch.Tensor],
        layout: KVLayout,
        *,
        block_tokens: int,
        block_table: Sequence[int],
        part: int = 0,
        parts: int = 1,
        copy_engine: CopyEngine | None = None,
        layer_events: LayerEvents | None = None,
    ) -> None:
        import torch

        for number, plane in enumerate(planes):
            if (
                not isinstance(plane, torch.Tensor)
                or plane.device != planes[0].device
            ):
                raise ValueError(
                    f"planes[{number}] must be a tensor on one device with the others"
                )
        seen = [
            page_plane(plane, f"planes[{number}]")
            for number, plane in enumerate(planes)
        ]
        self._page_table = PageTable(
            seen, layout, block_tokens, block_table, part, parts
        )
        self._begin = part * self._page_table.part_bytes
        device = planes[0].device
        gpu = None if device.type == "cpu" else device
        copy_engine = (
            copy_engine or copy_engine_of(gpu) or CopyEngine(CpuDevice())
        )
        table = page_run_table(seen, self._page_table.blocks, self._begin)
        copy_engine.prepare(table)
        self._copier = GpuCopy(copy_engine, table, planes, layer_events)
        # a CUDA device; None for CPU memory
        self.device_index = self._copier.device_index
        self.layout = layout
        # a thread waits layer by layer, so all chunks should be loaded by one call
        self.at_once = layer_events is not None
        self.num_tokens = self._page_table.num_tokens

    def with_table(self, block_table: Sequence[int]) -> DevicePagesKV:
        """Return a transfer for another sequence in the same planes, which are not checked again;
        changes nothing.

        Like a new object, it waits for the work that this thread has launched until now. Raises
        ValueError if the table names a block that does not exist.
        """
        other = copy(self)
        other._page_table = self._page_table.with_table(block_table)
        other.num_tokens = other._page_table.num_tokens
        other._copier = self._copier.after_now()
        return other

    def _run_ids(self, starts: Sequence[int], *, into_slots: bool) -> Ids:
        return self._page_table.blocks_of(starts, into_slots=into_slots)

    def preallocate(self, snapshot_bytes: int) -> tuple[SnapshotBuffer, int]:
        """Allocate now the device memory of copies and snapshots; returns the snapshots' buffer,
        and the bytes of both.

        Snapshots get at most `snapshot_bytes`, less if the device has less left, but always one
        chunk. A separate thread allocates: the caller's allocations may come from a pool that is
        taken away while an engine sleeps, and this memory must not. Raises torch's error if there
        is too little memory.
        """
        gpu_copy = self._copier
        begin, end = gpu_copy.table.span(0, gpu_copy.table.rows)
        row_bytes = end - begin

        def allocate() -> tuple[SnapshotBuffer, int]:
            rings = gpu_copy.copy_engine.allocate_rings(gpu_copy.table)
            rows = max(1, snapshot_bytes // row_bytes)
            while True:
                try:
                    memory = gpu_copy.copy_engine.device.allocate(
                        rows * row_bytes
                    ).view(rows, row_bytes)
                    return SnapshotBuffer(memory), rings + memory.nbytes
                except RuntimeError:  # torch.OutOfMemoryError is one
                    if rows == 1:
                        raise
                    rows = max(1, rows // 2)

        with Pool(1, "pagoda-reserve") as thread:
            return thread.submit(allocate).result()

    def snapshot(
        self, starts: Sequence[int], buffer: SnapshotBuffer | None = None
    ) -> DeviceSnapshot:
        """Copy the chunks that begin at `starts` within the device, in the order of the current
        stream; never waits.

        Later work on that stream may overwrite the blocks. The chunks are copied to rows of
        `buffer`, which must have enough free rows, until the snapshot is released; without a
        buffer, to new memory. Raises torch's error if none is left.
        """
        ids = self._page_table.blocks_of(starts, into_slots=True)
        gpu_copy = self._copier
        rows = (
            list(range(len(starts)))
            if buffer is None
            else buffer.acquire(len(starts))
        )
        into = None if buffer is None else (buffer.memory, rows)
        with ExitStack() as undo:
            if buffer is not None:
                undo.callback(buffer.release, rows)
            memory, copied = gpu_copy.copy_engine.gather(
                gpu_copy.table, ids, gpu_copy.after, into
            )
            undo.pop_all()
        return DeviceSnapshot(
            gpu_copy, self.layout, self._begin, memory, rows, copied, buffer
        )


class SnapshotBuffer:
    """Device memory that snapshots share, one row per chunk. Thread-safe."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._free = list(range(len(memory)))
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """How many rows are free."""
        return len(self._free)

    def acquire(self, number: int) -> list[int]:
        """Return that many rows, which only the caller may use until `release`. Raises ValueError
        if fewer are free.
        """
        with self._lock:
            if number > len(self._free):
                raise ValueError(
                    f"room for {len(self._free)} chunks is left on the device, {number} are needed"
                )
            rows = self._free[:number]
            self._free = self._free[number:]
        return rows

    def release(self, rows: Sequence[int]) -> None:
        """Free rows. No copy on another stream may still read or write them."""
        with self._lock:
            self._free += rows


@dataclass(eq=False)
class DeviceSnapshot:
    """Chunks as they were at one point of a stream, in device memory until `release` or until this
    object is deleted.

    `to_slots` is for one thread, any thread.
    """

    _copier: GpuCopy  # the copy reads its table until `_copied`
    _layout: KVLayout
    _begin: int
    _memory: torch.Tensor
    _rows: list[int]
    _copied: DeviceEvent
    _buffer: SnapshotBuffer | None

    @property
    def nbytes(self) -> int:
        """The bytes of its device memory."""
        return len(self._rows) * self._memory.shape[1]

    def to_slots(self, slots: Sequence[Bytes]) -> None:
        """Copy the chunks into this part of `slots`, in the order of the starts; returns when all
        are copied.
        """
        rows, row_bytes = self._memory.shape
        tokens = len(self._rows) * self._layout.chunk_tokens
        starts = range(0, tokens, self._layout.chunk_tokens)
        checked = checked_slots(
            self._layout, tokens, starts, slots, into_slots=True
        )
        plane = PagePlane(self._memory.data_ptr(), row_bytes, row_bytes, rows, 0)
        ids = np.array(self._rows, dtype=np.int64)[:, None]
        self._copier.copy_engine.store(
            page_run_table([plane], 1, self._begin), ids, checked, self._copied
        )

    def release(self) -> None:
        """Free its rows for other snapshots; idempotent. Afterwards nothing may be copied out of
        it.
        """
        buffer = self._buffer
        self._buffer = None
        if buffer is not None:
            buffer.release(self._rows)
