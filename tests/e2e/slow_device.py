"""A copy engine over CPU memory whose streams are threads: launched work is done later, as on a
GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from pagoda.transfer.gpu.copy_engine import CopyEngine
from pagoda.transfer.gpu.device import CpuDevice

LONG = 20.0


class DeviceEvent:
    """An event. A thread that waits for it raises the errors of its stream; a stream that waits
    does not.
    """

    def __init__(self, stream: ThreadStream) -> None:
        self.done = threading.Event()
        self._stream = stream

    def synchronize(self) -> None:
        self.reached()
        trouble = self._stream.trouble
        self._stream.trouble = None
        if trouble is not None:
            raise trouble

    def reached(self) -> None:
        assert self.done.wait(LONG), "no thread reached this event"


class ThreadStream:
    """A stream: one thread does its work in order."""

    handle = 0

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.trouble: Exception | None = None
        self.thread = threading.Thread(target=self._go, daemon=True)
        self.thread.start()

    def _go(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as trouble:  # noqa: BLE001
                # raised at the next event
                self.trouble = trouble

    def run(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def wait_event(self, event: DeviceEvent | None) -> None:
        if event is not None:
            self._work.put(event.done.wait)

    def record_event(self) -> DeviceEvent:
        event = DeviceEvent(self)
        self._work.put(event.done.set)
        return event

    def end(self) -> None:
        self._work.put(None)
        self.thread.join(LONG)


class SlowDevice(CpuDevice):
    """A device. `before(number)` is called before copy `number`, on the stream's thread: it may
    sleep, wait or fail.

    `begun()` is called on the thread that loads or stores, before it launches anything. `waited`
    counts the events that a current stream had to wait for: only a load layer by layer has any.
    `streams_wait`: whether it does so at once, since the stream of a CPU is its thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[int], None] = lambda number: None
        self.begun: Callable[[], None] = lambda: None
        self.streams_wait = True
        self.copied = 0
        self.waited = 0
        self._made: list[ThreadStream] = []

    def current_stream_wait(self, event: DeviceEvent | None) -> None:
        if event is not None:
            self.waited += 1
            if self.streams_wait:
                event.reached()

    def device_address(self, address: int, nbytes: int) -> int | None:
        self.begun()
        return super().device_address(address, nbytes)

    def new_streams(self, number: int) -> list[ThreadStream]:
        streams = [ThreadStream() for _ in range(number)]
        self._made += streams
        return streams

    def current_stream(self) -> ThreadStream:
        raise AssertionError("nothing here goes by the current stream")

    def copy(
        self, to: int, source: int, nbytes: int, stream: ThreadStream
    ) -> None:
        self.copied += 1
        self.before(self.copied)
        super().copy(to, source, nbytes, stream)

    def allocate(self, nbytes: int) -> torch.Tensor:
        raise AssertionError("without kernels there is no ring")

    def end(self) -> None:
        for stream in self._made:
            stream.end()


def engine_over(device: SlowDevice) -> CopyEngine:
    """A copy engine that copies run by run: there are no kernels on a CPU."""
    return CopyEngine(device, way="runs")
