"""The way through a ring: chunks in units that fit its segments, kernels on one lane, copies on another.

ring     | segment 0 | segment 1 | ...    a kernel fills one while copies empty another, or the other way round
bounce   | segment 0 | segment 1 | ...    the same in pinned host memory, for slots that are not registered
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagoda.transfer.base import Bytes, Ids
from pagoda.transfer.gpu.device import Lane, Mark, Port
from pagoda.transfer.gpu.layer_events import LayerGate
from pagoda.transfer.run_table import RunTable

if TYPE_CHECKING:
    import torch

__all__ = ["Chunks", "Crossing", "Flow", "Ring", "Trip", "Unit", "address_of", "units_of"]

_SEGMENTS = 4


class Chunks(NamedTuple):
    """Chunks of one call that go the same way. `places` are where the device sees their slots."""

    ids: Ids
    slots: list[Bytes]
    places: Ids

    def picked(self, which: Ids) -> Chunks:
        return Chunks(self.ids[which], [self.slots[i] for i in which.tolist()], self.places[which])


class Unit(NamedTuple):
    """What one segment of the ring carries: rows [begin, end) of chunks [first, last)."""

    begin: int
    end: int
    first: int
    last: int
    layer: int | None  # that is complete with these rows


class Trip(NamedTuple):
    """One call."""

    table: RunTable
    down: bool
    after: Mark | None
    gate: LayerGate | None

    def ranges(self) -> Iterator[tuple[int | None, int, int]]:
        """The rows that are launched together: layer by layer if somebody waits for layers, else all."""
        if self.gate is None:
            yield None, 0, self.table.rows
            return
        bounds = self.table.layers.tolist()
        for layer in range(len(bounds) - 1):
            yield layer, bounds[layer], bounds[layer + 1]

    def passed(self, layer: int | None, chunks: int, mark: Mark) -> None:
        if self.gate is not None and layer is not None:
            self.gate.passed(layer, chunks, mark)


class Crossing:
    """Two lanes and, where needed, a ring of device memory and one of pinned memory. For one call at a time."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._lanes: list[Lane] = []
        self._ring: torch.Tensor | None = None
        self._most_bytes = sys.maxsize  # of a segment
        self._bounce: Bytes | None = None

    @property
    def lanes(self) -> list[Lane]:
        if not self._lanes:
            self._lanes = self._port.lanes(2)
        return self._lanes

    def ring(self, staging_bytes: int, table: RunTable) -> Ring:
        """Return a ring whose segments have room for any row of the table: of `staging_bytes` if that will do.

        Where the device has less memory left it is smaller, from then on. Raises torch's error without any.
        """
        least = int((table.ends - table.offset).max())
        segment_bytes = max(min(staging_bytes // _SEGMENTS, self._most_bytes), least)
        while self._ring is None or self._ring.nbytes < _SEGMENTS * segment_bytes:
            self._ring = None
            try:
                self._ring = self._memory(_SEGMENTS * segment_bytes)
            except RuntimeError:  # torch.OutOfMemoryError is one
                if segment_bytes == least:
                    raise
                self._most_bytes = segment_bytes = max(segment_bytes // 4, least)
        return Ring(self._ring.data_ptr(), segment_bytes, table)

    def _memory(self, nbytes: int) -> torch.Tensor:
        """Device memory of a lane of ours: what the allocator has there nobody else's work can still be using."""
        made: list[torch.Tensor] = []
        self.lanes[0].run(lambda: made.append(self._port.memory(nbytes)))
        self.settle()
        return made[0]

    def bounce(self, nbytes: int) -> Bytes:
        """Return pinned memory of so many bytes or more; where the machine has none to give, memory of any kind."""
        if self._bounce is None or self._bounce.nbytes < nbytes:
            pinned = self._port.host_memory(nbytes)
            self._bounce = np.empty(nbytes, np.uint8) if pinned is None else pinned.numpy()
        return self._bounce

    def settle(self) -> None:
        """Wait until all that was launched on the lanes is done."""
        for lane in self._lanes:
            lane.mark().wait()


class Ring(NamedTuple):
    """Where units lie in the segments, side by side, each chunk's rows as in a slot."""

    address: int
    segment_bytes: int
    table: RunTable

    @property
    def nbytes(self) -> int:
        """Of all segments."""
        return _SEGMENTS * self.segment_bytes

    def offset(self, number: int) -> int:
        """Where unit `number` begins, in device and in bounce memory."""
        return number % _SEGMENTS * self.segment_bytes

    def places(self, number: int, unit: Unit) -> Ids:
        """What a kernel is told of each chunk's place."""
        begin, end = self.table.span(unit.begin, unit.end)
        steps: Ids = np.arange(unit.last - unit.first) * (end - begin)
        return self.address + self.offset(number) - begin + steps


class Flow:
    """Units on their way through the ring, in order. Used by one thread, once."""

    def __init__(
        self, port: Port, trip: Trip, chunks: Chunks, ring: Ring, bounce: Bytes | None, kernels: Lane, copies: Lane
    ) -> None:  # fmt: skip
        self._port, self._trip, self._chunks = port, trip, chunks
        self._ring, self._bounce = ring, bounce
        self._kernels, self._copies = kernels, copies
        self._free: list[Mark | None] = [None] * _SEGMENTS  # from when on a segment may be written to
        self._copied: list[Mark | None] = [None] * _SEGMENTS
        self._landed: deque[tuple[int, Unit, Mark]] = deque()  # in the bounce buffer, not yet in slots

    def down(self, number: int, unit: Unit, kernel: Callable[[], None]) -> None:
        """Gather, then copy out."""
        at = number % _SEGMENTS
        if len(self._landed) == _SEGMENTS:
            self._land()
        self._kernels.after(self._free[at])
        self._kernels.run(kernel)
        self._copies.after(self._kernels.mark())
        self._copies.run(partial(self._copy, number, unit))
        self._free[at] = mark = self._copies.mark()
        if self._bounce is not None:
            self._landed.append((number, unit, mark))

    def up(self, number: int, unit: Unit, kernel: Callable[[], None]) -> None:
        """Copy in, then scatter."""
        at = number % _SEGMENTS
        if self._bounce is not None:
            if (copied := self._copied[at]) is not None:
                copied.wait()
            for own, slot in self._bounced(number, unit):
                np.copyto(own, slot)
        self._copies.after(self._free[at])
        self._copies.run(partial(self._copy, number, unit))
        self._copied[at] = mark = self._copies.mark()
        self._kernels.after(mark)
        self._kernels.run(kernel)
        self._free[at] = mark = self._kernels.mark()
        self._trip.passed(unit.layer, unit.last - unit.first, mark)

    def finish(self) -> None:
        """Bring what is still in the bounce buffer into its slots."""
        while self._landed:
            self._land()

    def _land(self) -> None:
        number, unit, mark = self._landed.popleft()
        mark.wait()
        for own, slot in self._bounced(number, unit):
            np.copyto(slot, own)

    def _copy(self, number: int, unit: Unit) -> None:
        """Carry a unit across the link: at once through the bounce buffer, else a copy a chunk."""
        begin, end = self._trip.table.span(unit.begin, unit.end)
        size, here = end - begin, self._ring.address + self._ring.offset(number)
        if self._bounce is not None:
            at = address_of(self._bounce) + self._ring.offset(number)
            pairs = [(here, at, (unit.last - unit.first) * size)]
        else:
            places = self._chunks.places[unit.first : unit.last].tolist()
            pairs = [(here + i * size, place + begin, size) for i, place in enumerate(places)]
        for device, host, nbytes in pairs:
            to, source = (host, device) if self._trip.down else (device, host)
            self._port.copy(to, source, nbytes, self._copies)

    def _bounced(self, number: int, unit: Unit) -> Iterator[tuple[Bytes, Bytes]]:
        """Each chunk's bytes in the bounce buffer and in its slot."""
        assert self._bounce is not None
        begin, end = self._trip.table.span(unit.begin, unit.end)
        at, size = self._ring.offset(number), end - begin
        for slot in self._chunks.slots[unit.first : unit.last]:
            yield self._bounce[at : at + size], slot[begin:end]
            at += size


def units_of(trip: Trip, chunks: int, segment_bytes: int) -> Iterator[Unit]:
    """Cut a trip into what fits a segment."""
    for layer, first_row, last_row in trip.ranges():
        for begin, end in trip.table.segments(segment_bytes, first_row, last_row):
            low, high = trip.table.span(begin, end)
            each = max(1, segment_bytes // (high - low))
            for first in range(0, chunks, each):
                last = min(first + each, chunks)
                yield Unit(begin, end, first, last, layer if end == last_row else None)


def address_of(array: Bytes) -> int:
    found: int = array.__array_interface__["data"][0]  # a tenth of what array.ctypes costs
    return found
