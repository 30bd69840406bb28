"""A few threads for calls that do not block their caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from pagoda.cache.call import Job
from pagoda.fork import renewed_after_fork
from pagoda.metrics import Reason
from pagoda.threads import NO_THREAD, Answer, Pool

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
        self._lock = threading.RLock()  # a signal handler may call at any line
        self._pool: Pool | None = None

    def submit(self, job: Job[T]) -> Future[T]:
        """Run a job on one of the threads. With too many waiting, or after close, it is refused: a miss, at once."""
        with self._lock:
            if self._closed:
                refused = Reason.CLOSED, "closed"
            elif self._pool is not None and self._pool.under_way >= _MOST_WAITING:
                refused = Reason.QUEUE_FULL, "too many calls are waiting"
            elif (begun := self._start(job.run)) is not None:
                return begun
            else:
                refused = Reason.IO_ERROR, NO_THREAD
        answered: Future[T] = Answer()
        answered.set_result(job.refused(*refused))
        return answered

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run something small behind the scenes; its exceptions stay in the future."""
        with self._lock:
            begun = None if self._closed else self._start(work)
        if begun is None:
            begun = Answer[T]()
            begun.cancel()
        return begun

    def _start(self, work: Callable[[], T]) -> Future[T] | None:
        """Hand work to the threads; None if there are none to be had, and nothing of it will run."""
        if self._pool is None:
            self._pool = Pool(_THREADS, "pagoda-cache")
        try:
            return self._pool.submit(work)
        except RuntimeError:
            return None

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
