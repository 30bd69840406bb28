"""One request starts at a time, where a request that starts empties the idle slots of the server:
among them one that was restored and waits for its own request.
"""

from __future__ import annotations

import asyncio
import contextlib

from pagoda.connectors.llamacpp.server_requests import ServerTrouble
from pagoda_tools.llama_proxy.upstream import Upstream

# to start while others start
_START_SECONDS = 2.0
_LOOK_SECONDS = 0.01


class StartRight:
    """The right to let a request start, until it has."""

    def __init__(self, lock: asyncio.Lock | None) -> None:
        """`lock`: is held for it; None: nobody needs to wait."""
        self._lock = lock

    @property
    def is_held(self) -> bool:
        """Whether others wait for its end."""
        return self._lock is not None

    def release(self) -> None:
        """Let others start; idempotent."""
        lock = self._lock
        self._lock = None
        if lock is not None:
            lock.release()


class RequestStarts:
    """The starts of all requests to one server. For the event loop."""

    def __init__(self, upstream: Upstream, *, is_needed: bool) -> None:
        """`is_needed`: every request that starts empties the idle slots."""
        self._upstream = upstream
        self._is_needed = is_needed
        # held from a restore until its request has started
        self._starting = asyncio.Lock()

    async def right(self) -> StartRight:
        """Wait until no restored slot waits for its request, and keep others from starting, unless
        that is not needed, or takes too long.
        """
        if self._is_needed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_START_SECONDS):
                    await self._starting.acquire()
                    return StartRight(self._starting)
        return StartRight(None)

    async def release_when_computing(self, slot: int, right: StartRight) -> None:
        """Let others start as soon as the server computes in this slot."""
        with contextlib.suppress(ServerTrouble):
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                listed = await self._upstream.slots()
                if listed.get(slot, {}).get("is_processing"):
                    right.release()
                    return
