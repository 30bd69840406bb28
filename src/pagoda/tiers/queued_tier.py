"""A tier with a queue: what every one of them does with it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial

from pagoda.dropped import close_when_dropped
from pagoda.metrics import Reason
from pagoda.tiers.base import Done, ended
from pagoda.tiers.blocking import Copies
from pagoda.tiers.io_queue import Write
from pagoda.tiers.worker_pool import Crew, IoThreads


class Queued(Copies):
    """Saves and loads by background threads, over one bounded queue. Thread-safe.

    `close()` or garbage collection ends the threads.
    """

    def __init__(self, crew: Crew, threads: int, queue_chunks: int) -> None:
        self.ahead = threads
        self._closed = False
        self._threads = IoThreads(crew, threads, queue_chunks)
        self._finalizer = close_when_dropped(self, partial(self._threads.close, 1.0))

    @abstractmethod
    def _count(self, name: str) -> None:
        """Add to a counter of the tier; does nothing where a closed tier cannot count."""

    @property
    @abstractmethod
    def resting(self) -> bool:
        """Whether the tier is left out for a while, after failures in a row: nothing is found meanwhile."""

    def in_flight(self, key: bytes) -> bool:
        """Whether a save of this key is queued or being written."""
        return self._threads.queue.in_flight(key)

    def wait(self, keys: Iterable[bytes], timeout: float) -> bool:
        """Wait until no save of these keys is in flight; False if `timeout` seconds were not enough."""
        return self._threads.queue.wait(keys, timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until nothing at all is queued or being done; False if `timeout` seconds were not enough."""
        return self._threads.queue.wait(None, timeout)

    def _refused(self) -> Reason | None:
        """Why nothing can be queued now; None with the threads running that will do it."""
        if self._closed:
            return Reason.CLOSED
        if self.resting:
            return Reason.TIER_SKIPPED
        return None if self._threads.start() else Reason.IO_ERROR

    def _save(self, write: Write) -> Future[Done]:
        if write.chunk.payload.nbytes > self.slot_bytes:
            return self._dropped(Reason.TOO_LARGE)
        queued = self._threads.queue.add_write(write)
        return self._dropped(queued) if isinstance(queued, Reason) else queued.future

    def _dropped(self, reason: Reason) -> Future[Done]:
        self._count(f"drop_{reason}")
        return ended(False, reason)

    def _no_room(self) -> Reason | None:
        if self._closed:
            return Reason.CLOSED
        return None if self._threads.queue.has_room() else Reason.QUEUE_FULL

    def _taken_away(
        self, reason: Reason, *, key: bytes | None = None, namespace: bytes | None = None
    ) -> tuple[list[Write], list[Write]]:
        """End queued saves of a key or a namespace; returns those, and those that had begun and end by themselves."""
        waiting, begun = self._threads.queue.cancel(reason, key=key, namespace=namespace)
        for write in waiting:
            self._count(f"drop_{reason}")
            self._threads.queue.saved(write, Done(False, reason))
        return waiting, begun

    def _queue_stats(self) -> dict[str, int]:
        writes, reads = self._threads.queue.outstanding()
        return {"queued_writes": writes, "queued_reads": reads, "resting": int(self.resting)}

    def close(self, timeout: float = 5.0) -> None:
        """End within `timeout` seconds: drops what is queued with CLOSED, counted. Idempotent.

        I/O that hangs keeps its own thread and future until it ends, and what it works on stays open until then.
        """
        self._closed = True
        self._finalizer.detach()
        self._threads.close(timeout)
