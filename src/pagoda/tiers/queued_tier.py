"""What the disk tier and the remote tiers share: a bounded queue and the workers that serve it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial

from pagoda.finalizers import close_when_dropped
from pagoda.metrics import Reason
from pagoda.tiers.base import Done
from pagoda.tiers.blocking import BlockingCalls
from pagoda.tiers.io_queue import WorkerBackend, WorkerPool, WriteRequest


class QueuedTier(BlockingCalls):
    """A tier whose saves and loads wait in one bounded queue and are done by a worker pool. Thread-safe.

    `close()` or garbage collection ends the threads.
    """

    def __init__(self, backend: WorkerBackend, threads: int, queue_chunks: int) -> None:
        self.read_ahead = threads
        self._closed = False
        self._pool = WorkerPool(backend, threads, queue_chunks)
        self._finalizer = close_when_dropped(self, partial(self._pool.close, 1.0))

    @property
    @abstractmethod
    def resting(self) -> bool:
        """Whether the tier is skipped for a while after failures in a row. Nothing is found meanwhile."""

    def in_flight(self, key: bytes) -> bool:
        """Return whether a save of this key is queued or being written."""
        return self._pool.queue.in_flight(key)

    def wait(self, keys: Iterable[bytes], timeout: float) -> bool:
        """Wait until the saves of these keys have ended; return False after `timeout` seconds."""
        return self._pool.queue.wait(keys, timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until nothing is queued or running; return False after `timeout` seconds."""
        return self._pool.queue.wait(None, timeout)

    def _refusal(self) -> Reason | None:
        """Return why nothing can be queued now; None if it can, with the threads running that will do it."""
        if self._closed:
            return Reason.CLOSED
        if self.resting:
            return Reason.TIER_SKIPPED
        return None if self._pool.start() else Reason.IO_ERROR

    def _enqueue_write(self, write: WriteRequest) -> Future[Done]:
        if write.chunk.payload.nbytes > self.slot_bytes:
            return self._dropped(Reason.TOO_LARGE)
        queued = self._pool.queue.add_write(write)
        return self._dropped(queued) if isinstance(queued, Reason) else queued.future

    def _drop_reason(self) -> Reason | None:
        if self._closed:
            return Reason.CLOSED
        return None if self._pool.queue.has_room() else Reason.QUEUE_FULL

    def _cancel_writes(
        self, reason: Reason, *, key: bytes | None = None, namespace: bytes | None = None
    ) -> tuple[list[WriteRequest], list[WriteRequest]]:
        """Cancel the saves of a key or a namespace.

        Returns those that were queued, which have ended now, and those that are running, which end by themselves.
        """
        waiting, running = self._pool.queue.cancel(reason, key=key, namespace=namespace)
        for write in waiting:
            self._count(f"drop_{reason}")
            self._pool.queue.finish_write(write, Done(False, reason))
        return waiting, running

    def _queue_stats(self) -> dict[str, int]:
        writes, reads = self._pool.queue.outstanding()
        return {"queued_writes": writes, "queued_reads": reads, "resting": int(self.resting)}

    def close(self, timeout: float = 5.0) -> None:
        """Close within `timeout` seconds; drop and count what is queued with CLOSED. Idempotent.

        I/O that hangs keeps its thread and its future until it ends; what it works on stays open until then.
        """
        self._closed = True
        self._finalizer.detach()
        self._pool.close(timeout)
