"""A few threads for calls that do not block their caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from pagoda.cache.border import Job
from pagoda.cache.forks import renewed_after_fork
from pagoda.metrics import Reason

__all__ = ["Workers"]

T = TypeVar("T")

_THREADS = 4
_MOST_WAITING = 256


class Workers:
    """A bounded pool of threads, begun when first wanted, anew after a fork. Thread-safe."""

    def __init__(self) -> None:
        self._closed = False
        self.renew()
        renewed_after_fork(self)

    def renew(self) -> None:
        """Begin anew, with no threads and nothing waiting."""
        self._lock = threading.RLock()  # a future may be done, and call back, while it is being made
        self._pool: ThreadPoolExecutor | None = None
        self._waiting = 0

    def submit(self, job: Job[T]) -> Future[T]:
        """Run a job on one of the threads. With too many waiting, or after close, it is refused: a miss, at once."""
        with self._lock:
            refused = Reason.CLOSED if self._closed else Reason.QUEUE_FULL
            if not self._closed and self._waiting < _MOST_WAITING:
                return self._start(job.run)
        answered: Future[T] = Future()
        answered.set_result(
            job.refused(refused, "too many calls are waiting" if not self._closed else "closed")
        )
        return answered

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run something small behind the scenes; its exceptions stay in the future."""
        with self._lock:
            if self._closed:
                ended: Future[T] = Future()
                ended.cancel()
                return ended
            return self._start(work)

    def _start(self, work: Callable[[], T]) -> Future[T]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="pagoda-cache")
        self._waiting += 1
        future = self._pool.submit(work)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: object) -> None:
        with self._lock:
            self._waiting -= 1

    async def wait_for(self, job: Job[T]) -> T:
        """Run a job and await it. Cancelled: the job is told to end, and has ended when this raises CancelledError.

        So nothing is written into the caller's KV, and no reservation of its is left, once the await is over.
        """
        future = self.submit(job)
        wrapped = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(wrapped)
        except asyncio.CancelledError:
            job.deadline.cancel()
            future.cancel()
            while not future.done():
                await _moment(wrapped)
            raise

    def close(self) -> None:
        """Take nothing more; what has begun ends by its own deadline. Idempotent."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.shutdown(wait=False)  # what waits there finds the cache closed: a miss


async def _moment(wrapped: asyncio.Future[T]) -> None:
    """Wait a moment for `wrapped`, whatever cancels this task meanwhile."""
    try:
        await asyncio.wait({wrapped}, timeout=0.1)
    except asyncio.CancelledError:
        return
