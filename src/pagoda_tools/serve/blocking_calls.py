"""Runs calls that may wait (for a ledger, a disk, a checksum) on threads, never on the event
loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from aiohttp import web

from pagoda.base.signal_safe_threads import Pool

P = ParamSpec("P")
T = TypeVar("T")


# the time that running calls have after `close`; they can be interrupted anywhere
_EXIT_SECONDS = 0.25


class OverloadedError(Exception):
    """Too many calls wait for a thread."""


class BlockingCallPool:
    """A bounded number of threads, and of calls that wait for them. Call `run` on the event
    loop.
    """

    def __init__(self, threads: int = 8, most_waiting: int = 256) -> None:
        self._most = threads + most_waiting
        self._pool = Pool(threads, "pagoda-serve", _EXIT_SECONDS)

    async def run(
        self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return what `call` returns on another thread. Raises what it raises, or
        OverloadedError.
        """
        if self._pool.under_way >= self._most:
            raise OverloadedError
        try:
            future = self._pool.submit(call, *args, **kwargs)
        except RuntimeError as error:  # no thread can be started
            raise OverloadedError from error
        called = asyncio.wrap_future(future)
        # take the exception, even if the request has ended
        called.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )
        return await asyncio.shield(called)

    def close(self) -> None:
        """End the threads; cancel the calls that have not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


CALLS: web.AppKey[BlockingCallPool] = web.AppKey("calls", BlockingCallPool)
