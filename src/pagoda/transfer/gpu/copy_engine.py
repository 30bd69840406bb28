"""The copy engine: KV between a device's memory and slots in host memory, beside the engine's own work.

    direct   a kernel reads or writes the slots themselves, where they are registered with the device
    staged   a kernel gathers into a ring of device memory, one copy a chunk crosses the link; or the other way round
    runs     one copy a run: best where runs are long, and all there is without Triton

Which way is fastest is measured once for each kind of table. Slots that are not registered cross by a bounce buffer in
pinned memory. Every call returns, or raises, when nothing of it is under way any more.
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

from pagoda.threads import Condition, if_free
from pagoda.transfer.base import Bytes, Ids
from pagoda.transfer.gpu.autotune import fastest
from pagoda.transfer.gpu.device import CudaPort, Lane, Mark, Port
from pagoda.transfer.gpu.layer_events import LayerGate
from pagoda.transfer.gpu.staging_ring import Chunks, Crossing, Flow, Trip, address_of, units_of
from pagoda.transfer.run_table import RunTable

if TYPE_CHECKING:
    import torch

    from pagoda.transfer.gpu.kernels import SentTable

__all__ = ["WAYS", "Beside", "Copies", "Way", "copies_for", "copies_of"]

Way: TypeAlias = Literal["direct", "staged", "runs"]
WAYS: tuple[Way, ...] = get_args(Way)

_STAGING_BYTES = 64 << 20
_CROSSINGS = 4  # calls at once; each has a ring of its own
_PATIENCE_SECONDS, _SLICE_SECONDS = 60.0, 0.05

_Launch: TypeAlias = Callable[[int, int, slice, slice], None]


class Copies:
    """Copies chunks between one device and slots. Thread-safe; at most four calls run at once, others wait a minute.

    `way` None: what was measured to be fastest. Raises ValueError for a way that this machine does not have.
    """

    def __init__(self, port: Port, *, way: str | None = None, staging_bytes: int = _STAGING_BYTES) -> None:
        if way is not None and way not in WAYS:
            raise ValueError(f"way must be one of {', '.join(WAYS)}, got {way!r}")
        if way not in (None, "runs") and port.kernels is None:
            raise ValueError(f"way {way!r} needs Triton: pip install triton")
        self.port = port
        self._way = way
        self._staging_bytes = staging_bytes
        self._crossings = [Crossing(port) for _ in range(_CROSSINGS)]
        self._taken: dict[object, Crossing] = {}  # by who has it
        self._changed = Condition()
        self._measuring = threading.RLock()
        self._fastest: dict[tuple[bool, int], str] = {}
        self._sent: WeakKeyDictionary[RunTable, SentTable] = WeakKeyDictionary()

    def down(self, table: RunTable, ids: Ids, slots: Sequence[Bytes], after: Mark | None = None) -> None:
        """Copy chunks, whose runs are `ids` [chunks, count], into `slots`, behind `after`; changes the slots only.

        Raises ValueError if a run is not there (an id below 0).
        """
        if (ids < 0).any():
            raise ValueError("ids: a run below 0 is nowhere, and cannot be stored")
        self._go(Trip(table, True, after, None), ids, slots)

    def up(
        self,
        table: RunTable,
        ids: Ids,
        slots: Sequence[Bytes],
        after: Mark | None = None,
        gate: LayerGate | None = None,
    ) -> None:
        """Copy `slots` into the runs `ids` [chunks, count], behind `after`; tells `gate` of each layer as it goes."""
        self._go(Trip(table, False, after, gate), ids, slots)

    def take(
        self,
        table: RunTable,
        ids: Ids,
        after: Mark | None = None,
        into: tuple[torch.Tensor, Sequence[int]] | None = None,
    ) -> tuple[torch.Tensor, Mark]:
        """Gather chunks within the device, in the order of this thread's current stream; does not wait.

        They go `into` rows of uint8 [any number, bytes of all rows of the table], or into new memory: raises torch's
        error where there is none. Returns it, and a mark behind the copy; keep the table until then.
        """
        begin, end = table.span(0, table.rows)
        size, lane = end - begin, self.port.current()
        if into is None:
            into = self.port.memory(len(ids) * size).view(len(ids), size), range(len(ids))
        staging, rows = into
        places = staging.data_ptr() - begin + np.array(rows, dtype=np.int64) * size
        lane.after(after)
        if (kernels := self.port.kernels) is None:
            chunks = Chunks(ids, [], places)
            lane.run(partial(self._copy_runs, Trip(table, True, None, None), chunks, lane, 0, table.rows))
        else:
            word = _word_bytes(table, places)

            def gather() -> None:
                # Nobody waits, and the table may be dropped before this runs: so it is sent anew, and what the kernel
                # needs is this stream's own, which is given away in its order.
                sent = kernels.send(table)
                kernels.gather(sent, self.port.send(ids), self.port.send(places), 0, table.rows, word)

            lane.run(gather)
        return staging, lane.mark()

    def reserve(self, table: RunTable) -> int:
        """Take the rings of all calls that may run at once, so that none is asked for later; returns their bytes.

        Where the device has less left they are smaller. Raises torch's error without any.
        """
        if self.port.kernels is None:
            return 0  # then runs are copied one by one
        nbytes = 0
        with ExitStack() as taken:
            idle = [taken.enter_context(self._crossing()) for _ in range(_CROSSINGS - len(self._taken))]
            with self.port.crossing():
                nbytes = sum(crossing.ring(self._staging_bytes, table).nbytes for crossing in idle)
        return nbytes

    def prepare(self, table: RunTable) -> None:
        """Compile, measure and send for this table now, so that no call has to. Changes nothing else."""
        with self.port.crossing():
            for down in (True, False):
                self.way_of(table, down)
            if (kernels := self.port.kernels) is not None and table not in self._sent:
                there: list[SentTable] = []
                with self._crossing() as crossing:
                    crossing.lanes[0].run(lambda: there.append(kernels.send(table)))
                self._sent[table] = there[0]

    def way_of(self, table: RunTable, down: bool) -> str:
        """Return the way that registered slots of such a table go; measures if it is the first of its kind."""
        if self._way is not None or self.port.kernels is None:
            return self._way or "runs"
        if table.rows * table.count == 1:
            return "runs"  # a chunk is one piece on both sides: there is nothing to gather, and nothing to measure
        kind = (down, table.run_bytes.bit_length())

        def measure() -> None:
            if kind not in self._fastest:
                with self.port.crossing():
                    self._fastest[kind] = fastest(table, self.port, WAYS, partial(self._try, down))

        if kind not in self._fastest:
            if_free(self._measuring, measure, _PATIENCE_SECONDS)
        return self._fastest.get(kind, "staged")

    def _try(self, down: bool, way: str, table: RunTable, ids: Ids, slots: list[Bytes]) -> None:
        """Go one way with scratch memory that the device can reach under the addresses it has here."""
        chunks = Chunks(ids, slots, np.array([address_of(slot) for slot in slots], dtype=np.int64))
        with self._crossing() as crossing:
            self._by(way)(crossing, Trip(table, down, None, None), chunks)

    def _go(self, trip: Trip, ids: Ids, slots: Sequence[Bytes]) -> None:
        if not len(slots):
            return
        with self.port.crossing():
            self._across(trip, ids, slots)

    def _across(self, trip: Trip, ids: Ids, slots: Sequence[Bytes]) -> None:
        way = self.way_of(trip.table, trip.down)
        begin, end = trip.table.span(0, trip.table.rows)
        found = [self.port.place_of(address_of(slot) + begin, end - begin) for slot in slots]
        places = np.array([0 if place is None else place - begin for place in found], dtype=np.int64)
        chunks = Chunks(ids, list(slots), places)
        near, far = (chunks.picked(np.flatnonzero(which)) for which in (places != 0, places == 0))
        with self._crossing() as crossing:
            if near.slots:
                self._by(way)(crossing, trip, near)
            if far.slots and self.port.kernels is None:
                self._bounced(crossing, trip, far)
            elif far.slots:
                if near.slots and way == "staged":
                    crossing.settle()  # the near ones are still in the ring
                self._staged(crossing, trip, far, bounced=True)

    def _by(self, way: str) -> Callable[[Crossing, Trip, Chunks], None]:
        return {"direct": self._direct, "staged": self._staged, "runs": self._runs}[way]

    # ---- the three ways

    def _runs(self, crossing: Crossing, trip: Trip, chunks: Chunks) -> None:
        lane = crossing.lanes[0]
        lane.after(trip.after)
        for layer, begin, end in trip.ranges():
            lane.run(partial(self._copy_runs, trip, chunks, lane, begin, end))
            trip.passed(layer, len(chunks.slots), lane.mark())

    def _bounced(self, crossing: Crossing, trip: Trip, chunks: Chunks) -> None:
        """Runs, a chunk at a time through the bounce buffer: of a slot some may be registered, which no copy takes."""
        lane, (begin, end) = crossing.lanes[0], trip.table.span(0, trip.table.rows)
        bounce = crossing.bounce(end - begin)[: end - begin]
        lane.after(trip.after)
        for ids, slot in zip(chunks.ids, chunks.slots, strict=True):
            if not trip.down:
                np.copyto(bounce, slot[begin:end])
            own = Chunks(ids[None], [slot], np.array([address_of(bounce) - begin]))
            for layer, first, last in trip.ranges():
                lane.run(partial(self._copy_runs, trip, own, lane, first, last))
                trip.passed(layer, 1, lane.mark())
            lane.mark().wait()
            if trip.down:
                np.copyto(slot[begin:end], bounce)

    def _copy_runs(self, trip: Trip, chunks: Chunks, lane: Lane, begin: int, end: int) -> None:
        for ids, place in zip(chunks.ids, chunks.places.tolist(), strict=True):
            for run in trip.table.runs(ids, begin, end):
                host = place + run.offset
                to, source = (host, run.address) if trip.down else (run.address, host)
                self.port.copy(to, source, run.nbytes, lane)

    def _direct(self, crossing: Crossing, trip: Trip, chunks: Chunks) -> None:
        lane = crossing.lanes[0]
        launch = self._kernel(trip, lane, chunks.ids, chunks.places)
        lane.after(trip.after)
        for layer, begin, end in trip.ranges():
            lane.run(partial(launch, begin, end, slice(None), slice(None)))
            trip.passed(layer, len(chunks.slots), lane.mark())

    def _staged(self, crossing: Crossing, trip: Trip, chunks: Chunks, bounced: bool = False) -> None:
        ring = crossing.ring(self._staging_bytes, trip.table)
        bounce = crossing.bounce(ring.nbytes) if bounced else None
        units = list(units_of(trip, len(chunks.slots), ring.segment_bytes))
        places = np.concatenate([ring.places(number, unit) for number, unit in enumerate(units)])
        lane, copies = crossing.lanes
        launch = self._kernel(trip, lane, chunks.ids, places)
        lane.after(trip.after)
        flow, at = Flow(self.port, trip, chunks, ring, bounce, lane, copies), 0
        for number, unit in enumerate(units):
            which, where = slice(unit.first, unit.last), slice(at, at + unit.last - unit.first)
            kernel = partial(launch, unit.begin, unit.end, which, where)
            (flow.down if trip.down else flow.up)(number, unit, kernel)
            at = where.stop
        flow.finish()

    def _kernel(self, trip: Trip, lane: Lane, ids: Ids, places: Ids) -> _Launch:
        """Send ids and places; return what launches the kernel for some rows of some chunks."""
        kernels = self.port.kernels
        assert kernels is not None
        table, word = self._sent.get(trip.table), _word_bytes(trip.table, places)
        tables: list[SentTable] = []
        there: list[torch.Tensor] = []

        def send() -> None:
            tables.append(kernels.send(trip.table) if table is None else table)
            there.extend((self.port.send(ids), self.port.send(places)))

        lane.run(send)
        move = kernels.gather if trip.down else kernels.scatter

        def launch(begin: int, end: int, which: slice, where: slice) -> None:
            move(tables[0], there[0][which], there[1][where], begin, end, word)

        return launch

    @contextmanager
    def _crossing(self) -> Iterator[Crossing]:
        """Lend lanes and a ring; leave when nothing is under way on them. Raises TimeoutError if all stay taken."""
        me = object()
        try:
            crossing = self._take(me)
            try:
                yield crossing
            finally:
                try:
                    crossing.settle()
                except BaseException:  # Ctrl-C: even then nothing may be under way when this call has ended
                    crossing.settle()
                    raise
        finally:
            self._taken.pop(me, None)  # built in: no exception of a signal handler comes before it
            with self._changed:
                self._changed.notify()

    def _take(self, me: object) -> Crossing:
        until = time.monotonic() + _PATIENCE_SECONDS
        with self._changed:
            while not (idle := [one for one in self._crossings if one not in self._taken.values()]):
                if time.monotonic() > until:
                    raise TimeoutError(f"{self.port.device}: all copies of a minute ago are still under way")
                self._changed.wait(_SLICE_SECONDS)
            self._taken[me] = idle[0]
            return idle[0]


class Beside:
    """The copies of one transfer. They happen on streams beside the engine's, behind all that this thread's current
    stream had been given when this object was made; each call returns when its copies are complete. What is being
    copied is kept alive until then.

    Thread-safe.
    """

    def __init__(self, copies: Copies, table: RunTable, keep: object, gate: LayerGate | None = None) -> None:
        self.copies = copies
        self.table = table
        self._keep = keep
        self._gate = gate
        self.made = copies.port.here()

    def renewed(self) -> Beside:
        """Return one that comes behind what has been launched until now."""
        other = copy(self)
        other.made = self.copies.port.here()
        return other

    @property
    def device_index(self) -> int | None:
        """The number of the CUDA device; None for CPU memory."""
        device = self.copies.port.device
        return device.index if device.type == "cuda" else None

    def to_slots(self, ids: Ids, slots: Sequence[Bytes]) -> None:
        """Copy runs into slots; changes nothing else."""
        self.copies.down(self.table, ids, slots, self.made)

    def from_slots(self, ids: Ids, slots: Sequence[Bytes]) -> None:
        """Copy slots into runs, none whose id is below 0; changes nothing else."""
        self.copies.up(self.table, ids, slots, self.made, self._gate)


def _word_bytes(table: RunTable, places: Ids) -> int:
    """The widest word that fits the table and these places."""
    return int(np.gcd.reduce(places, initial=table.word_bytes))


@lru_cache(maxsize=64)
def copies_of(device: torch.device) -> Copies:
    """Return this process's copy engine of a CUDA device. Raises ValueError if the device cannot be used."""
    return Copies(CudaPort(device))


def copies_for(device: torch.device | None) -> Copies | None:
    """Return the copy engine for memory on a device; None for CPU memory. Raises ValueError for any other device."""
    if device is None:
        return None
    if device.type != "cuda":
        raise ValueError(f"KV lies on {device}: only NVIDIA GPUs and CPU memory can be copied")
    return copies_of(device)
