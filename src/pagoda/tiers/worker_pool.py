"""The I/O threads of a tier: started late, never kept waiting for, renewed after a fork."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from pagoda.metrics import Reason
from pagoda.threads import Event, begin
from pagoda.tiers.base import Done
from pagoda.tiers.io_queue import IoQueue, Read, Write

_FEWEST = 2  # the one in the background, and one that reads and writes: they are started first

_all: weakref.WeakSet[IoThreads] = weakref.WeakSet()


class Hand(Protocol):
    """What one I/O thread does its work with; made and used on that thread alone."""

    def load(self, read: Read) -> None:
        """Do one read and end its future, whatever happens."""

    def save(self, writes: Sequence[Write], between: Callable[[], None]) -> None:
        """Do a batch of writes and end their futures, whatever happens; `between` runs before each (reads go first)."""

    def close(self) -> None:
        """The thread ends."""


class Crew(Protocol):
    """What the threads of one tier work on. Thread-safe."""

    name: str  # of the tier
    batch_chunks: int  # writes that a thread takes at once
    readers: int  # threads that only read

    def begin(self, queue: IoQueue) -> None:
        """Work for this queue from now on: at first, and in a forked child, where locks are made anew."""

    def hand(self) -> Hand:
        """What a new thread works with."""

    def background(self, stop: Event) -> None:
        """What else there is to do, on a thread of its own, until it is done or `stop` is set."""

    def interrupt(self) -> None:
        """`stop` was set: wake the background, and let I/O that hangs fail if that is possible."""

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter of the tier."""

    def trouble(self, error: Exception, what: str) -> Reason:
        """Note that something failed; returns the reason to give."""

    def close(self) -> None:
        """Let go of all; no thread works any more."""


class IoThreads:
    """The queue of a tier and the daemon threads that work on it. Thread-safe.

    The threads refer to this object and never to the tier, so a tier that nobody holds ends them. Who comes last,
    `close()` or a thread whose I/O hung, closes the crew. In a forked child the queue is new and empty, and threads
    start at the next use.
    """

    def __init__(self, crew: Crew, io_threads: int, queue_chunks: int) -> None:
        self._crew = crew
        self._io_threads = io_threads
        self._queue_chunks = queue_chunks
        self._closed = False
        self._renew()
        _all.add(self)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self.queue = IoQueue(self._queue_chunks)
        self._crew.begin(self.queue)
        self._stop = Event()
        self._background_done = Event()
        self._threads: list[threading.Thread] = []
        self._ended: set[threading.Thread] = set()
        self._crew_closed = False

    def start(self) -> bool:
        """Start the threads that do not run yet; cheap if all do.

        False: the system gives so few that nothing would be done. The next use tries again, also for those that lack.
        """
        if len(self._threads) <= self._io_threads and not self._closed:
            with self._lock:
                readers = self._crew.readers
                targets: list[Callable[[], None]] = [self._background]
                targets += [self._work] * (self._io_threads - readers) + [self._read] * readers
                for target in targets[len(self._threads) :]:
                    if self._closed or not self._begin(target):
                        break
        return len(self._threads) >= _FEWEST

    def _begin(self, target: Callable[[], None]) -> bool:
        name = f"pagoda-{self._crew.name}-{len(self._threads)}"
        thread = threading.Thread(target=self._run, args=(target,), name=name, daemon=True)
        begun = False
        try:
            self._threads.append(thread)
            begun = begin(thread)
        finally:
            if not begun and thread in self._threads:  # broken off, it may have begun all the same
                self._threads.remove(thread)
        return begun

    def _run(self, target: Callable[[], None]) -> None:
        with self._lock:
            known = threading.current_thread() in self._threads
        try:
            if known:
                target()
        finally:
            with self._lock:
                self._ended.add(threading.current_thread())
            self._close_crew()

    def _work(self) -> None:
        hand = self._crew.hand()
        try:
            while (job := self.queue.take(self._crew.batch_chunks, self._io_threads)) is not None:
                if isinstance(job, list):
                    hand.save(job, lambda: self._read_all(hand))
                else:
                    hand.load(job)
                del job  # while this thread waits it must not keep a payload alive
        finally:
            hand.close()

    def _read(self) -> None:
        hand = self._crew.hand()
        try:
            while (read := self.queue.take_read(wait=True)) is not None:
                hand.load(read)
                del read
        finally:
            hand.close()

    def _read_all(self, hand: Hand) -> None:
        while (read := self.queue.take_read()) is not None:
            hand.load(read)

    def _background(self) -> None:
        try:
            self._crew.background(self._stop)
        except Exception as error:  # noqa: BLE001  # the border of the background: what it left undone is a miss
            self._crew.trouble(error, "work in the background")
        finally:
            self._background_done.set()

    def wait_background(self, timeout: float) -> bool:
        """Wait until the work in the background, if there is any, has ended."""
        self.start()
        return self._background_done.wait(timeout)

    def close(self, timeout: float) -> None:
        """End the threads within `timeout` seconds and drop what they had not begun. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
        if not first:
            return
        self._stop.set()
        writes, reads = self.queue.close()
        for write in writes:
            self._crew.count(f"drop_{Reason.CLOSED}")
            self.queue.saved(write, Done(False, Reason.CLOSED))
        for read in reads:
            self.queue.loaded(read, Done(False, Reason.CLOSED), 0)
        self._crew.interrupt()
        self._join(time.monotonic() + timeout)
        self._close_crew()

    def _join(self, deadline: float) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _close_crew(self) -> None:
        """Close the crew once nobody can touch what it works on any more."""
        with self._lock:
            last = self._closed and not self._crew_closed and self._ended.issuperset(self._threads)
            self._crew_closed |= last
        if last:
            self._crew.close()


def _renew_in_child() -> None:
    for threads in list(_all):
        threads._renew()


os.register_at_fork(after_in_child=_renew_in_child)
