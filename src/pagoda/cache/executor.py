"""A few threads for calls that do not block their caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TypeVar

from pagoda.base.fork import per_process
from pagoda.base.metrics import Reason
from pagoda.base.signal_safe_threads import NO_THREAD, Answer, Pool
from pagoda.cache.call import Call

T = TypeVar("T")

_THREADS = 4
_MOST_WAITING = 256


class CallExecutor:
    """A bounded pool of threads, started when first needed, in a forked child too. Thread-safe."""

    def __init__(self) -> None:
        self._closed = False

    @per_process
    def _lock(self) -> AbstractContextManager[object]:
        return threading.RLock()  # a signal handler may call at any line

    @per_process
    def _pool(self) -> Pool | None:
        return None  # until it is needed

    def submit(self, call: Call[T]) -> Future[T]:
        """Run a call on one of the threads. It is refused (a miss) if too many calls wait, or after
        `close`.
        """
        with self._lock:
            if self._closed:
                refused = Reason.CLOSED, "closed"
            elif self._pool is not None and self._pool.under_way >= _MOST_WAITING:
                refused = Reason.QUEUE_FULL, "too many calls are waiting"
            elif (started := self._start(call.run)) is not None:
                return started
            else:
                refused = Reason.IO_ERROR, NO_THREAD
        answered: Future[T] = Answer()
        answered.set_result(call.refuse(*refused))
        return answered

    def run_in_background(self, work: Callable[[], T]) -> Future[T]:
        """Run a small piece of work on one of the threads; its exceptions stay in the future."""
        with self._lock:
            started = None if self._closed else self._start(work)
        if started is None:
            started = Answer[T]()
            started.cancel()
        return started

    def _start(self, work: Callable[[], T]) -> Future[T] | None:
        """Submit work to the threads; None if no thread can be started: then no part of the work
        will run.
        """
        if self._pool is None:
            self._pool = Pool(_THREADS, "pagoda-cache")
        try:
            return self._pool.submit(work)
        except RuntimeError:
            return None

    async def run_async(self, call: Call[T]) -> T:
        """Run a call and await it. If cancelled, cancel the call, and raise CancelledError once the
        call has ended.

        So after the await nothing writes into the caller's KV, and the call holds no reservation.
        """
        future = self.submit(call)
        wrapped = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(wrapped)
        except asyncio.CancelledError:
            call.cancel()
            future.cancel()
            while not future.done():
                await _wait_a_moment(wrapped)
            raise

    def close(self) -> None:
        """Accept nothing more; calls that have begun end by their own deadlines. Idempotent."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                # queued calls find the cache closed: each is a miss
                self._pool.shutdown(wait=False)


async def _wait_a_moment(wrapped: asyncio.Future[T]) -> None:
    """Wait a moment for `wrapped`, even if this task is cancelled meanwhile."""
    try:
        await asyncio.wait({wrapped}, timeout=0.1)
    except asyncio.CancelledError:
        return
