"""The I/O threads of a disk tier: started late, never kept waiting for, renewed after a fork."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

from pagoda.metrics import Reason
from pagoda.tiers.base import Done
from pagoda.tiers.device import Device, Scratch
from pagoda.tiers.queue import IoQueue
from pagoda.tiers.reader import Reader
from pagoda.tiers.scan import scan
from pagoda.tiers.writer import Writer

_all: weakref.WeakSet[IoThreads] = weakref.WeakSet()


class IoThreads:
    """The queue of a disk tier and the daemon threads that work on it. Thread-safe.

    The threads refer to this object and never to the tier, so a tier that nobody holds ends them. Who comes last,
    `close()` or a thread whose I/O hung, closes the device. In a forked child the queue is new and empty, and threads
    start at the next use.
    """

    def __init__(self, device: Device, io_threads: int, queue_chunks: int) -> None:
        self._device = device
        self._io_threads = io_threads
        self._queue_chunks = queue_chunks
        self._closed = False
        self._renew()
        _all.add(self)

    def _renew(self) -> None:
        self._lock = threading.RLock()  # reentrant: a collected tier may close us on any thread, at any line
        self.queue = IoQueue(self._queue_chunks)
        self._reader = Reader(self._device, self.queue)
        self._writer = Writer(self._device, self.queue, self._io_threads)
        self._stop = threading.Event()
        self._scanned = threading.Event()
        self._threads: list[threading.Thread] = []
        self._running = 0

    def start(self) -> None:
        """Start the threads unless they run; cheap."""
        if self._threads:
            return
        with self._lock:
            if self._threads or self._closed:
                return
            targets: list[Callable[[], None]] = [self._scan, *[self._work] * self._io_threads]
            self._threads = [
                threading.Thread(target=self._run, args=(target,), name=f"pagoda-disk-{n}", daemon=True)
                for n, target in enumerate(targets)
            ]
            self._running = len(self._threads)
            for thread in self._threads:
                thread.start()

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        finally:
            with self._lock:
                self._running -= 1
                self._close_device()

    def _work(self) -> None:
        scratch = Scratch(self._device.slot_bytes)
        while True:
            job = self.queue.take(self._writer.batch_chunks, self._io_threads)
            if job is None:
                return
            if isinstance(job, list):
                self._writer.save(job, scratch, lambda: self._read_all(scratch))
            else:
                self._reader.load(job, scratch)
            del job  # while this thread waits it must not keep a payload alive

    def _read_all(self, scratch: Scratch) -> None:
        while (read := self.queue.take_read()) is not None:
            self._reader.load(read, scratch)

    def _scan(self) -> None:
        try:
            scan(self._device, self._stop)
        except Exception as error:  # noqa: BLE001  # the border of the background: what was not scanned stays free
            self._device.trouble(error, "the scan of the slots")
        finally:
            self._scanned.set()

    def wait_scanned(self, timeout: float) -> bool:
        """Wait until the rebuild, if there is one, has ended."""
        self.start()
        return self._scanned.wait(timeout)

    def close(self, timeout: float) -> None:
        """End the threads within `timeout` seconds and drop what they had not begun. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
        if not first:
            return
        self._stop.set()
        writes, reads = self.queue.close()
        for write in writes:
            self._device.ledger.count(f"drop_{Reason.CLOSED}")
            self.queue.saved(write, Done(False, Reason.CLOSED))
        for read in reads:
            self.queue.loaded(read, Done(False, Reason.CLOSED), 0)
        self._join(time.monotonic() + timeout)
        with self._lock:
            self._close_device()

    def _join(self, deadline: float) -> None:
        for thread in self._threads:
            # One that is not alive has ended, or an interrupt in `start` has kept it from beginning: no join then.
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _close_device(self) -> None:
        """Close the ledger and the slab once nobody can touch them any more."""
        if self._closed and self._running == 0:
            self._running = -1
            self._device.close()


def _renew_in_child() -> None:
    for threads in list(_all):
        threads._device.renew()
        threads._renew()


os.register_at_fork(after_in_child=_renew_in_child)
