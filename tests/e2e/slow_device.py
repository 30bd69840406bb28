"""A copy engine over CPU memory whose lanes are threads: what is launched is done later, as on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from pagoda.transfer.gpu.copy_engine import Copies
from pagoda.transfer.gpu.device import CpuPort

LONG = 20.0


class Mark:
    """An event. What went wrong on its lane is raised by the thread that waits for it, not by a stream that does."""

    def __init__(self, lane: ThreadLane) -> None:
        self.done = threading.Event()
        self._lane = lane

    def wait(self) -> None:
        self.reached()
        trouble, self._lane.trouble = self._lane.trouble, None
        if trouble is not None:
            raise trouble

    def reached(self) -> None:
        assert self.done.wait(LONG), "nobody came to this mark"


class ThreadLane:
    """A stream: one thread does what it is given, in order."""

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
            except Exception as trouble:  # noqa: BLE001  # raised at the next mark
                self.trouble = trouble

    def run(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def after(self, mark: Mark | None) -> None:
        if mark is not None:
            self._work.put(mark.done.wait)

    def mark(self) -> Mark:
        mark = Mark(self)
        self._work.put(mark.done.set)
        return mark

    def end(self) -> None:
        self._work.put(None)
        self.thread.join(LONG)


class SlowDevice(CpuPort):
    """A port. `before(number)` is called before copy `number`, on the lane's thread: to sleep there, to wait, to fail.

    `begun()` is called on the thread that loads or stores, before it launches anything. `waited` counts the marks that
    a current stream had to wait for: only a load layer by layer has any. `streams_wait`: whether it does so at once,
    since the stream of a CPU is its thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[int], None] = lambda number: None
        self.begun: Callable[[], None] = lambda: None
        self.streams_wait = True
        self.copied = 0
        self.waited = 0
        self._made: list[ThreadLane] = []

    def wait_here(self, mark: Mark | None) -> None:
        if mark is not None:
            self.waited += 1
            if self.streams_wait:
                mark.reached()

    def place_of(self, address: int, nbytes: int) -> int | None:
        self.begun()
        return super().place_of(address, nbytes)

    def lanes(self, number: int) -> list[ThreadLane]:
        lanes = [ThreadLane() for _ in range(number)]
        self._made += lanes
        return lanes

    def current(self) -> ThreadLane:
        raise AssertionError("nothing here goes by the current stream")

    def copy(self, to: int, source: int, nbytes: int, lane: ThreadLane) -> None:
        self.copied += 1
        self.before(self.copied)
        super().copy(to, source, nbytes, lane)

    def memory(self, nbytes: int) -> torch.Tensor:
        raise AssertionError("without kernels there is no ring")

    def end(self) -> None:
        for lane in self._made:
            lane.end()


def copies_over(port: SlowDevice) -> Copies:
    """A copy engine that copies run by run: there are no kernels on a CPU."""
    return Copies(port, way="runs")
