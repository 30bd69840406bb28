"""The I/O threads of a tier: started at the first use, never waited for without a limit, replaced after a fork."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pagoda.fork import reset_in_child
from pagoda.metrics import Reason
from pagoda.threads import Event, begin
from pagoda.tiers.base import Done
from pagoda.tiers.io_queue import IoQueue, ReadRequest, WriteRequest

_FEWEST = 2  # the background thread and one that reads and writes: they are started first


class IoWorker(Protocol):
    """What one I/O thread uses to do reads and writes; made and used on that thread alone."""

    def load(self, read: ReadRequest) -> None:
        """Do one read and end its future, whatever happens."""

    def save(self, writes: Sequence[WriteRequest], before_each: Callable[[], None]) -> None:
        """Do a batch of writes and end their futures, whatever happens.

        `before_each` runs before each write: it does the reads that are queued, because reads go first.
        """

    def close(self) -> None:
        """Release what the worker holds: the thread ends."""


class WorkerBackend(Protocol):
    """What the threads of one tier share. Thread-safe."""

    name: str  # of the tier
    batch_chunks: int  # how many writes a worker takes at once
    reader_threads: int  # threads that only read

    def attach(self, queue: IoQueue) -> None:
        """Serve this queue from now on, with new locks: at the start and in a forked child."""

    def make_worker(self) -> IoWorker:
        """Return the worker of a new thread."""

    def background(self, stop: Event) -> None:
        """Do other work on a thread for it alone, until it is done or `stop` is set."""

    def interrupt(self) -> None:
        """Wake the background work, and let I/O that hangs fail if that is possible: `stop` was set."""

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter of the tier."""

    def record_error(self, error: Exception, what: str) -> Reason:
        """Log that something failed, count it for the breaker and return the reason to report."""

    def close(self) -> None:
        """Release everything; no thread works any more."""


class WorkerPool:
    """The queue of a tier and the daemon threads that serve it. Thread-safe.

    The threads refer to this object and never to the tier, so a tier that nothing refers to can end them. The backend
    is closed by `close()` or, if I/O hangs then, by the last thread that ends. In a forked child the queue is new and
    empty, and threads start at the next use.
    """

    def __init__(self, backend: WorkerBackend, io_threads: int, queue_chunks: int) -> None:
        self._backend = backend
        self._io_threads = io_threads
        self._queue_chunks = queue_chunks
        self._closed = False
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Start with an empty queue, new locks and no threads: at first and in a forked child."""
        self._lock = threading.Lock()
        self.queue = IoQueue(self._queue_chunks)
        self._backend.attach(self.queue)
        self._stop = Event()
        self._background_done = Event()
        self._threads: list[threading.Thread] = []
        self._ended: set[threading.Thread] = set()
        self._backend_closed = False

    def start(self) -> bool:
        """Start the threads that do not run yet; cheap if all do.

        False: the system gives too few threads to do any work. The next call tries again, also if some are missing.
        """
        if len(self._threads) <= self._io_threads and not self._closed:
            with self._lock:
                readers = self._backend.reader_threads
                targets: list[Callable[[], None]] = [self._background]
                targets += [self._work] * (self._io_threads - readers) + [self._read] * readers
                for target in targets[len(self._threads) :]:
                    if self._closed or not self._begin(target):
                        break
        return len(self._threads) >= _FEWEST

    def _begin(self, target: Callable[[], None]) -> bool:
        name = f"pagoda-{self._backend.name}-{len(self._threads)}"
        thread = threading.Thread(target=self._run, args=(target,), name=name, daemon=True)
        begun = False
        try:
            self._threads.append(thread)
            begun = begin(thread)
        finally:
            if not begun and thread in self._threads:  # if `begin` was interrupted, the thread may still run
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
            self._close_backend()

    def _work(self) -> None:
        worker = self._backend.make_worker()
        try:
            while (job := self.queue.take(self._backend.batch_chunks, self._io_threads)) is not None:
                if isinstance(job, list):
                    worker.save(job, lambda: self._read_all(worker))
                else:
                    worker.load(job)
                del job  # a waiting thread must not keep a payload alive
        finally:
            worker.close()

    def _read(self) -> None:
        worker = self._backend.make_worker()
        try:
            while (read := self.queue.take_read(wait=True)) is not None:
                worker.load(read)
                del read
        finally:
            worker.close()

    def _read_all(self, worker: IoWorker) -> None:
        while (read := self.queue.take_read()) is not None:
            worker.load(read)

    def _background(self) -> None:
        try:
            self._backend.background(self._stop)
        except Exception as error:  # noqa: BLE001  # the thread's outermost call: work left undone is a miss
            self._backend.record_error(error, "work in the background")
        finally:
            self._background_done.set()

    def wait_background(self, timeout: float) -> bool:
        """Wait until the background work has ended; return False after `timeout` seconds."""
        self.start()
        return self._background_done.wait(timeout)

    def close(self, timeout: float) -> None:
        """End the threads within `timeout` seconds and drop what is queued. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
        if not first:
            return
        self._stop.set()
        writes, reads = self.queue.close()
        for write in writes:
            self._backend.count(f"drop_{Reason.CLOSED}")
            self.queue.finish_write(write, Done(False, Reason.CLOSED))
        for read in reads:
            self.queue.finish_read(read, Done(False, Reason.CLOSED), 0)
        self._backend.interrupt()
        self._join(time.monotonic() + timeout)
        self._close_backend()

    def _join(self, deadline: float) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _close_backend(self) -> None:
        """Close the backend once no thread can use it any more."""
        with self._lock:
            last = self._closed and not self._backend_closed and self._ended.issuperset(self._threads)
            self._backend_closed |= last
        if last:
            self._backend.close()
