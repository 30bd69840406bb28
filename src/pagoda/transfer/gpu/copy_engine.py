"""The copy engine: copies KV between a device's memory and slots in host memory while the LLM
engine computes.

    direct   a kernel reads or writes the slots themselves, where they are registered with the
             device
    staged   a kernel gathers into a ring of device memory; one copy per chunk crosses the link. A
             load does the reverse
    runs     one copy per run: best where runs are long, and the only way without Triton

The fastest way is measured once for each kind of table. Slots that are not registered are copied
through a bounce buffer in pinned memory. Every call returns, or raises, when none of its copies is
in flight any more.

Called by the views (`dense_kv`, `paged_kv`, `device_pages_kv`) through `GpuCopy`. Calls
`staging_ring`, `autotune` and `device`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args
from weakref import WeakKeyDictionary

import numpy as np

from pagoda.base.signal_safe_threads import Condition, complete, if_free
from pagoda.slab import address
from pagoda.transfer.base import Bytes, Ids
from pagoda.transfer.gpu.autotune import fastest_way
from pagoda.transfer.gpu.device import (
    CudaDevice,
    Device,
    DeviceEvent,
    DeviceStream,
)
from pagoda.transfer.gpu.layer_events import LayerEvents
from pagoda.transfer.gpu.staging_ring import (
    Chunks,
    CopyCall,
    RingPipeline,
    Workspace,
    ring_batches,
)
from pagoda.transfer.run_table import RunTable

if TYPE_CHECKING:
    import torch

    from pagoda.transfer.gpu.kernels import DeviceTable

Way: TypeAlias = Literal["direct", "staged", "runs"]
WAYS: tuple[Way, ...] = get_args(Way)

_STAGING_BYTES = 64 << 20
_WORKSPACES = 4  # calls that may run at once; each has a separate ring
_PATIENCE_SECONDS = 60.0
_SLICE_SECONDS = 0.05

_Launch: TypeAlias = Callable[[int, int, slice, slice], None]


class CopyEngine:
    """Copies chunks between one device and slots. Thread-safe; four calls run at once, others wait
    up to a minute.

    `way` None: the fastest by measurement. Raises ValueError for a way that this machine does not
    have.
    """

    def __init__(
        self,
        device: Device,
        *,
        way: str | None = None,
        staging_bytes: int = _STAGING_BYTES,
    ) -> None:
        if way is not None and way not in WAYS:
            raise ValueError(f"way must be one of {', '.join(WAYS)}, got {way!r}")
        if way not in (None, "runs") and device.kernels is None:
            raise ValueError(f"way {way!r} needs Triton: pip install triton")
        self.device = device
        self._way = way
        self._staging_bytes = staging_bytes
        self._workspaces = [Workspace(device) for _ in range(_WORKSPACES)]
        self._in_use: dict[object, Workspace] = {}  # call -> its workspace
        self._changed = Condition()
        self._measuring = threading.RLock()
        self._fastest: dict[tuple[bool, int], str] = {}
        self._uploaded: WeakKeyDictionary[RunTable, DeviceTable] = (
            WeakKeyDictionary()
        )

    def store(
        self,
        table: RunTable,
        ids: Ids,
        slots: Sequence[Bytes],
        after: DeviceEvent | None = None,
    ) -> None:
        """Copy chunks, whose runs are `ids` [chunks, count], into `slots`; changes only the slots.

        Copies begin after the event `after`. Raises ValueError for an id below 0: such a run has no
        KV.
        """
        if (ids < 0).any():
            raise ValueError("ids: a run below 0 has no KV and cannot be stored")
        self._copy(CopyCall(table, True, after, None), ids, slots)

    def load(
        self,
        table: RunTable,
        ids: Ids,
        slots: Sequence[Bytes],
        after: DeviceEvent | None = None,
        layer_events: LayerEvents | None = None,
    ) -> None:
        """Copy `slots` into the runs `ids` [chunks, count], after the event `after`; records each
        launched layer.
        """
        self._copy(CopyCall(table, False, after, layer_events), ids, slots)

    def gather(
        self,
        table: RunTable,
        ids: Ids,
        after: DeviceEvent | None = None,
        into: tuple[torch.Tensor, Sequence[int]] | None = None,
    ) -> tuple[torch.Tensor, DeviceEvent]:
        """Gather chunks within the device, in the order of this thread's current stream; does not
        wait.

        The copies are written `into` rows of uint8 [any number, bytes of all rows of the table], or
        into new memory; raises torch's error if the device has none left. Returns that memory and
        an event after the copy; keep the table until the event.
        """
        begin, end = table.span(0, table.rows)
        size = end - begin
        stream = self.device.current_stream()
        if into is None:
            into = (
                self.device.allocate(len(ids) * size).view(len(ids), size),
                range(len(ids)),
            )
        staging, rows = into
        places = (
            staging.data_ptr() - begin + np.array(rows, dtype=np.int64) * size
        )
        stream.wait_event(after)
        if (kernels := self.device.kernels) is None:
            call = CopyCall(table, True, None, None)
            chunks = Chunks(ids, [], places)
            stream.run(
                partial(self._copy_runs, call, chunks, stream, 0, table.rows)
            )
        else:
            word = _word_bytes(table, places)

            def gather() -> None:
                # No caller waits, and the table may be dropped before this runs. So the table is
                # uploaded again: the kernel's inputs are allocated on this stream, and torch reuses
                # them in the order of this stream.
                inputs = (
                    kernels.upload(table),
                    self.device.upload(ids),
                    self.device.upload(places),
                )
                kernels.move(*inputs, 0, table.rows, word, gather=True)

            stream.run(gather)
        return staging, stream.record_event()

    def allocate_rings(self, table: RunTable) -> int:
        """Allocate the rings of all calls that may run at once, so that no later call allocates;
        returns their bytes.

        The rings are smaller if the device has less memory left. Raises torch's error if it has too
        little for any.
        """
        if self.device.kernels is None:
            return 0  # without a ring, runs are copied one by one
        nbytes = 0
        with ExitStack() as leases:
            idle = [
                leases.enter_context(self._workspace())
                for _ in range(_WORKSPACES - len(self._in_use))
            ]
            with self.device.copy_scope():
                nbytes = sum(
                    workspace.ring(self._staging_bytes, table).nbytes
                    for workspace in idle
                )
        return nbytes

    def prepare(self, table: RunTable) -> None:
        """Measure the ways of this table and upload it now, so that no later call has to. Changes
        nothing else.
        """
        with self.device.copy_scope():
            for storing in (True, False):
                self.way_of(table, storing)
            if (
                kernels := self.device.kernels
            ) is not None and table not in self._uploaded:
                uploaded: list[DeviceTable] = []
                with self._workspace() as workspace:
                    workspace.streams[0].run(
                        lambda: uploaded.append(kernels.upload(table))
                    )
                self._uploaded[table] = uploaded[0]

    def way_of(self, table: RunTable, storing: bool) -> str:
        """Return the way for registered slots of such a table; measures if the table is the first
        of its kind.
        """
        if self._way is not None or self.device.kernels is None:
            return self._way or "runs"
        if table.rows * table.count == 1:
            # a chunk is contiguous on both sides, so there is nothing to gather or to measure
            return "runs"
        kind = (storing, table.run_bytes.bit_length())

        def measure() -> None:
            if kind not in self._fastest:
                with self.device.copy_scope():
                    self._fastest[kind] = fastest_way(
                        table,
                        self.device,
                        WAYS,
                        partial(self._run_trial, storing),
                    )

        if kind not in self._fastest:
            if_free(self._measuring, measure, _PATIENCE_SECONDS)
        return self._fastest.get(kind, "staged")

    def _run_trial(
        self,
        storing: bool,
        way: str,
        table: RunTable,
        ids: Ids,
        slots: list[Bytes],
    ) -> None:
        """Copy scratch memory in one way; its addresses are also valid on the device."""
        chunks = Chunks(
            ids,
            slots,
            np.array([address(slot) for slot in slots], dtype=np.int64),
        )
        with self._workspace() as workspace:
            self._method_of(way)(
                workspace, CopyCall(table, storing, None, None), chunks
            )

    def _copy(self, call: CopyCall, ids: Ids, slots: Sequence[Bytes]) -> None:
        if not len(slots):
            return
        with self.device.copy_scope():
            self._copy_in_scope(call, ids, slots)

    def _copy_in_scope(
        self, call: CopyCall, ids: Ids, slots: Sequence[Bytes]
    ) -> None:
        way = self.way_of(call.table, call.storing)
        begin, end = call.table.span(0, call.table.rows)
        found = [
            self.device.device_address(address(slot) + begin, end - begin)
            for slot in slots
        ]
        places = np.array(
            [0 if place is None else place - begin for place in found],
            dtype=np.int64,
        )
        chunks = Chunks(ids, list(slots), places)
        registered, others = (
            chunks.picked(np.flatnonzero(which))
            for which in (places != 0, places == 0)
        )
        with self._workspace() as workspace:
            if registered.slots:
                self._method_of(way)(workspace, call, registered)
            if others.slots and self.device.kernels is None:
                self._bounced(workspace, call, others)
            elif others.slots:
                if registered.slots and way == "staged":
                    # copies to registered slots are still using the ring
                    workspace.synchronize()
                self._staged(workspace, call, others, bounced=True)

    def _method_of(
        self, way: str
    ) -> Callable[[Workspace, CopyCall, Chunks], None]:
        return {
            "direct": self._direct,
            "staged": self._staged,
            "runs": self._runs,
        }[way]

    # ---- the three ways

    def _runs(self, workspace: Workspace, call: CopyCall, chunks: Chunks) -> None:
        stream = workspace.streams[0]
        stream.wait_event(call.after)
        for layer, begin, end in call.ranges():
            stream.run(partial(self._copy_runs, call, chunks, stream, begin, end))
            call.record(layer, len(chunks.slots), stream.record_event())

    def _bounced(
        self, workspace: Workspace, call: CopyCall, chunks: Chunks
    ) -> None:
        """Copy runs, one chunk at a time, through the bounce buffer: CUDA cannot copy a partly
        registered slot.
        """
        stream = workspace.streams[0]
        (begin, end) = call.table.span(0, call.table.rows)
        bounce = workspace.bounce_buffer(end - begin)[: end - begin]
        stream.wait_event(call.after)
        for ids, slot in zip(chunks.ids, chunks.slots, strict=True):
            if not call.storing:
                np.copyto(bounce, slot[begin:end])
            bounced = Chunks(
                ids[None], [slot], np.array([address(bounce) - begin])
            )
            for layer, first, last in call.ranges():
                stream.run(
                    partial(self._copy_runs, call, bounced, stream, first, last)
                )
                call.record(layer, 1, stream.record_event())
            stream.record_event().synchronize()
            if call.storing:
                np.copyto(slot[begin:end], bounce)

    def _copy_runs(
        self,
        call: CopyCall,
        chunks: Chunks,
        stream: DeviceStream,
        begin: int,
        end: int,
    ) -> None:
        for ids, place in zip(chunks.ids, chunks.places.tolist(), strict=True):
            for run in call.table.runs(ids, begin, end):
                host = place + run.offset
                to, source = (
                    (host, run.address) if call.storing else (run.address, host)
                )
                self.device.copy(to, source, run.nbytes, stream)

    def _direct(
        self, workspace: Workspace, call: CopyCall, chunks: Chunks
    ) -> None:
        stream = workspace.streams[0]
        launch = self._kernel(call, stream, chunks.ids, chunks.places)
        stream.wait_event(call.after)
        for layer, begin, end in call.ranges():
            stream.run(partial(launch, begin, end, slice(None), slice(None)))
            call.record(layer, len(chunks.slots), stream.record_event())

    def _staged(
        self,
        workspace: Workspace,
        call: CopyCall,
        chunks: Chunks,
        bounced: bool = False,
    ) -> None:
        ring = workspace.ring(self._staging_bytes, call.table)
        bounce = workspace.bounce_buffer(ring.nbytes) if bounced else None
        batches = list(ring_batches(call, len(chunks.slots), ring.segment_bytes))
        places = np.concatenate(
            [ring.places(number, batch) for number, batch in enumerate(batches)]
        )
        kernel_stream, copy_stream = workspace.streams
        launch = self._kernel(call, kernel_stream, chunks.ids, places)
        kernel_stream.wait_event(call.after)
        pipeline = RingPipeline(
            self.device, call, chunks, ring, bounce, kernel_stream, copy_stream
        )
        at = 0
        for number, batch in enumerate(batches):
            which = slice(batch.first, batch.last)
            where = slice(at, at + batch.last - batch.first)
            kernel = partial(launch, batch.begin, batch.end, which, where)
            (pipeline.store if call.storing else pipeline.load)(
                number, batch, kernel
            )
            at = where.stop
        pipeline.finish()

    def _kernel(
        self, call: CopyCall, stream: DeviceStream, ids: Ids, places: Ids
    ) -> _Launch:
        """Upload ids and places; return a function that launches the kernel for some rows of some
        chunks.
        """
        kernels = self.device.kernels
        assert kernels is not None
        table = self._uploaded.get(call.table)
        word = _word_bytes(call.table, places)
        tables: list[DeviceTable] = []
        inputs: list[torch.Tensor] = []

        def upload() -> None:
            tables.append(kernels.upload(call.table) if table is None else table)
            inputs.extend((self.device.upload(ids), self.device.upload(places)))

        stream.run(upload)

        def launch(begin: int, end: int, which: slice, where: slice) -> None:
            ids = inputs[0][which]
            places = inputs[1][where]
            kernels.move(
                tables[0], ids, places, begin, end, word, gather=call.storing
            )

        return launch

    @contextmanager
    def _workspace(self) -> Iterator[Workspace]:
        """Lease a workspace; leave when nothing is in flight on its streams. Raises TimeoutError if
        all stay in use.
        """
        user = object()
        try:
            workspace = self._acquire(user)
            try:
                yield workspace
            finally:
                # no copy may be in flight after this call
                complete(workspace.synchronize)
        finally:
            # a built-in: no exception of a signal handler can come before it
            self._in_use.pop(user, None)
            with self._changed:
                self._changed.notify()

    def _acquire(self, user: object) -> Workspace:
        until = time.monotonic() + _PATIENCE_SECONDS
        with self._changed:
            while not (
                idle := [
                    one
                    for one in self._workspaces
                    if one not in self._in_use.values()
                ]
            ):
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"{self.device.torch_device}: timed out after a minute: all "
                        f"{_WORKSPACES} copies are in flight"
                    )
                self._changed.wait(_SLICE_SECONDS)
            self._in_use[user] = idle[0]
            return idle[0]


class GpuCopy:
    """The copies of one transfer: its run table, its copy engine and the event after which copies
    may begin.

    Copies run on the copy engine's streams, not on the LLM engine's, and after all work that this
    thread's current stream had when this object was made. Each call returns when its copies are
    complete; `keep` keeps the memory that is copied alive until then. Thread-safe.
    """

    def __init__(
        self,
        copy_engine: CopyEngine,
        table: RunTable,
        keep: object,
        layer_events: LayerEvents | None = None,
    ) -> None:
        self.copy_engine = copy_engine
        self.table = table
        self._keep = keep
        self._layer_events = layer_events
        self.after = copy_engine.device.current_event()
        device = copy_engine.device.torch_device
        self.device_index: int | None = (
            device.index if device.type == "cuda" else None
        )

    def after_now(self) -> GpuCopy:
        """Return the same object, except that copies begin after all work launched until now;
        changes nothing.
        """
        other = copy(self)
        other.after = self.copy_engine.device.current_event()
        return other

    def copy(self, ids: Ids, slots: Sequence[Bytes], *, into_slots: bool) -> None:
        """Copy runs into slots, or slots into runs except those whose id is below 0; changes
        nothing else.
        """
        if into_slots:
            self.copy_engine.store(self.table, ids, slots, self.after)
        else:
            self.copy_engine.load(
                self.table, ids, slots, self.after, self._layer_events
            )


def _word_bytes(table: RunTable, places: Ids) -> int:
    """Return the widest word that fits the table and these places."""
    return int(np.gcd.reduce(places, initial=table.word_bytes))


def copy_engine_of(device: torch.device | None) -> CopyEngine | None:
    """Return this process's copy engine of a CUDA device, made at the first call; None for CPU
    memory (None).

    Raises ValueError for any other device, and for a CUDA device that cannot be used.
    """
    if device is None:
        return None
    if device.type != "cuda":
        raise ValueError(
            f"KV is on {device}: only KV on NVIDIA GPUs or in CPU memory can be copied; move it "
            "there"
        )
    return _cuda_copy_engine(device)


@lru_cache(maxsize=64)
def _cuda_copy_engine(device: torch.device) -> CopyEngine:
    return CopyEngine(CudaDevice(device))
