"""The staging ring: chunks in batches that fit its segments, kernels on one stream, copies on
another.

ring     | segment 0 | segment 1 | ...    a kernel fills one while copies empty another, or the reverse
bounce   | segment 0 | segment 1 | ...    the same in pinned host memory, for slots that are not registered

Called by `copy_engine`; calls `device`.
"""  # noqa: E501, W505

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagoda.slab import address
from pagoda.transfer.base import Bytes, Ids
from pagoda.transfer.gpu.device import Device, DeviceEvent, DeviceStream
from pagoda.transfer.gpu.layer_events import LayerEvents
from pagoda.transfer.run_table import RunTable

if TYPE_CHECKING:
    import torch

_SEGMENTS = 4


class Chunks(NamedTuple):
    """Chunks of one call that are copied the same way. `places` are the device's addresses of their
    slots.
    """

    ids: Ids
    slots: list[Bytes]
    places: Ids

    def picked(self, which: Ids) -> Chunks:
        """Return some of the chunks, by their numbers."""
        return Chunks(
            self.ids[which],
            [self.slots[i] for i in which.tolist()],
            self.places[which],
        )


class RingBatch(NamedTuple):
    """What one segment of the ring holds: rows [begin, end) of chunks [first, last)."""

    begin: int
    end: int
    first: int
    last: int
    layer: int | None  # the layer that is complete with these rows


class CopyCall(NamedTuple):
    """One call of the copy engine: a store or a load of chunks of one table."""

    table: RunTable
    storing: bool  # from the device into slots
    after: DeviceEvent | None
    layer_events: LayerEvents | None

    def ranges(self) -> Iterator[tuple[int | None, int, int]]:
        """Return (layer, begin, end) of the rows to launch together: by layer if a thread waits for
        layers, or all.
        """
        if self.layer_events is None:
            yield None, 0, self.table.rows
            return
        bounds = self.table.layers.tolist()
        for layer in range(len(bounds) - 1):
            yield layer, bounds[layer], bounds[layer + 1]

    def record(self, layer: int | None, chunks: int, event: DeviceEvent) -> None:
        """Note that `chunks` chunks of a layer are launched; they are complete at `event`."""
        if self.layer_events is not None and layer is not None:
            self.layer_events.record(layer, chunks, event)


class Workspace:
    """Two streams and, on demand, a ring of device memory and a pinned bounce buffer. For one call
    at a time.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams: list[DeviceStream] = []
        self._ring: torch.Tensor | None = None
        self._most_bytes = sys.maxsize  # limit for a segment
        self._bounce: Bytes | None = None

    @property
    def streams(self) -> list[DeviceStream]:
        """The stream of kernels and the stream of copies."""
        if not self._streams:
            self._streams = self._device.new_streams(2)
        return self._streams

    def ring(self, staging_bytes: int, table: RunTable) -> StagingRing:
        """Return a ring whose segments have room for any row of the table; it has `staging_bytes`
        if that is enough.

        If the device has less memory left, this ring and all later rings are smaller. Raises
        torch's error if it has too little for any.
        """
        least = int((table.ends - table.offset).max())
        segment_bytes = max(
            min(staging_bytes // _SEGMENTS, self._most_bytes), least
        )
        while self._ring is None or self._ring.nbytes < _SEGMENTS * segment_bytes:
            self._ring = None
            try:
                self._ring = self.allocate(_SEGMENTS * segment_bytes)
            except RuntimeError:  # torch.OutOfMemoryError is one
                if segment_bytes == least:
                    raise
                self._most_bytes = segment_bytes = max(segment_bytes // 4, least)
        return StagingRing(self._ring.data_ptr(), segment_bytes, table)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate device memory on our own stream: no other stream can still use memory that torch
        gives there.
        """
        made: list[torch.Tensor] = []
        self.streams[0].run(lambda: made.append(self._device.allocate(nbytes)))
        self.synchronize()
        return made[0]

    def bounce_buffer(self, nbytes: int) -> Bytes:
        """Return at least `nbytes` of pinned memory; pageable memory if the machine refuses to pin
        any.
        """
        if self._bounce is None or self._bounce.nbytes < nbytes:
            pinned = self._device.allocate_host(nbytes)
            self._bounce = (
                np.empty(nbytes, np.uint8) if pinned is None else pinned.numpy()
            )
        return self._bounce

    def synchronize(self) -> None:
        """Wait until all work launched on the streams is done."""
        for stream in self._streams:
            stream.record_event().synchronize()


class StagingRing(NamedTuple):
    """Where batches are in the segments: chunks side by side, each chunk's rows as in a slot."""

    address: int
    segment_bytes: int
    table: RunTable

    @property
    def nbytes(self) -> int:
        """The bytes of all segments."""
        return _SEGMENTS * self.segment_bytes

    def offset(self, number: int) -> int:
        """Return where batch `number` begins, in device memory and in the bounce buffer."""
        return number % _SEGMENTS * self.segment_bytes

    def places(self, number: int, batch: RingBatch) -> Ids:
        """Return the place of each chunk as a kernel needs it."""
        begin, end = self.table.span(batch.begin, batch.end)
        steps: Ids = np.arange(batch.last - batch.first) * (end - begin)
        return self.address + self.offset(number) - begin + steps


@dataclass(eq=False)
class RingPipeline:
    """Copies the batches of one call through the ring, in order. Used by one thread, once."""

    _device: Device
    _call: CopyCall
    _chunks: Chunks
    _ring: StagingRing
    _bounce: Bytes | None
    _kernel_stream: DeviceStream
    _copy_stream: DeviceStream

    def __post_init__(self) -> None:
        # the event after which each segment may be overwritten
        self._free: list[DeviceEvent | None] = [None] * _SEGMENTS
        self._copied: list[DeviceEvent | None] = [None] * _SEGMENTS
        # Batches that are in the bounce buffer but not yet in slots.
        self._unfinished: deque[tuple[int, RingBatch, DeviceEvent]] = deque()

    def store(
        self, number: int, batch: RingBatch, kernel: Callable[[], None]
    ) -> None:
        """Gather a batch into its segment, then copy it out."""
        at = number % _SEGMENTS
        if len(self._unfinished) == _SEGMENTS:
            self._finish_oldest()
        self._kernel_stream.wait_event(self._free[at])
        self._kernel_stream.run(kernel)
        self._copy_stream.wait_event(self._kernel_stream.record_event())
        self._copy_stream.run(partial(self._copy, number, batch))
        self._free[at] = event = self._copy_stream.record_event()
        if self._bounce is not None:
            self._unfinished.append((number, batch, event))

    def load(
        self, number: int, batch: RingBatch, kernel: Callable[[], None]
    ) -> None:
        """Copy a batch into its segment, then scatter it."""
        at = number % _SEGMENTS
        if self._bounce is not None:
            if (copied := self._copied[at]) is not None:
                copied.synchronize()
            for bounced, slot in self._bounced(number, batch):
                np.copyto(bounced, slot)
        self._copy_stream.wait_event(self._free[at])
        self._copy_stream.run(partial(self._copy, number, batch))
        self._copied[at] = event = self._copy_stream.record_event()
        self._kernel_stream.wait_event(event)
        self._kernel_stream.run(kernel)
        self._free[at] = event = self._kernel_stream.record_event()
        self._call.record(batch.layer, batch.last - batch.first, event)

    def finish(self) -> None:
        """Copy what is still in the bounce buffer into its slots."""
        while self._unfinished:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        number, batch, event = self._unfinished.popleft()
        event.synchronize()
        for bounced, slot in self._bounced(number, batch):
            np.copyto(slot, bounced)

    def _copy(self, number: int, batch: RingBatch) -> None:
        """Copy a batch across the link: in one copy to or from the bounce buffer, else with one
        copy per chunk.
        """
        begin, end = self._call.table.span(batch.begin, batch.end)
        size = end - begin
        segment = self._ring.address + self._ring.offset(number)
        if self._bounce is not None:
            at = address(self._bounce) + self._ring.offset(number)
            pairs = [(segment, at, (batch.last - batch.first) * size)]
        else:
            places = self._chunks.places[batch.first : batch.last].tolist()
            pairs = [
                (segment + i * size, place + begin, size)
                for i, place in enumerate(places)
            ]
        for device, host, nbytes in pairs:
            to, source = (host, device) if self._call.storing else (device, host)
            self._device.copy(to, source, nbytes, self._copy_stream)

    def _bounced(
        self, number: int, batch: RingBatch
    ) -> Iterator[tuple[Bytes, Bytes]]:
        """Return each chunk's bytes in the bounce buffer and in its slot."""
        assert self._bounce is not None
        begin, end = self._call.table.span(batch.begin, batch.end)
        at = self._ring.offset(number)
        size = end - begin
        for slot in self._chunks.slots[batch.first : batch.last]:
            yield self._bounce[at : at + size], slot[begin:end]
            at += size


def ring_batches(
    call: CopyCall, chunks: int, segment_bytes: int
) -> Iterator[RingBatch]:
    """Cut a call into batches that fit a segment."""
    for layer, first_row, last_row in call.ranges():
        for begin, end in call.table.segments(segment_bytes, first_row, last_row):
            low, high = call.table.span(begin, end)
            each = max(1, segment_bytes // (high - low))
            for first in range(0, chunks, each):
                last = min(first + each, chunks)
                yield RingBatch(
                    begin, end, first, last, layer if end == last_row else None
                )
