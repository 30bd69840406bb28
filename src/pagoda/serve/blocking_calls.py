"""Calls that may wait (a ledger, a disk, a checksum), on threads and never on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from aiohttp import web

from pagoda.threads import Pool

P = ParamSpec("P")
T = TypeVar("T")


_EXIT_SECONDS = 0.25  # after `close`, for calls that run: whatever they do can be interrupted


class OverloadedError(Exception):
    """More calls wait for a thread than may."""


class BlockingCallPool:
    """A bounded number of threads, with a bounded number of calls that wait for them. `run` is of the event loop."""

    def __init__(self, threads: int = 8, most_waiting: int = 256) -> None:
        self._most = threads + most_waiting
        self._pool = Pool(threads, "pagoda-serve", _EXIT_SECONDS)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what `call` returns on another thread. Raises what it raises, or OverloadedError."""
        if self._pool.under_way >= self._most:
            raise OverloadedError
        try:
            future = self._pool.submit(call, *args, **kwargs)
        except RuntimeError as error:  # no thread starts
            raise OverloadedError from error
        called = asyncio.wrap_future(future)
        # also if nobody waits any more
        called.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(called)

    def close(self) -> None:
        """End the threads; calls that have not begun are cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)


CALLS: web.AppKey[BlockingCallPool] = web.AppKey("calls", BlockingCallPool)
