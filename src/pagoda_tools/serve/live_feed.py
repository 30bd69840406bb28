"""The stream of overviews: the stores are sampled once for all readers, and only while there are
readers.

`operator_routes` calls it. It calls `Overview.take` on a thread, so that a slow store does not
delay the event loop. A reader that is too slow is dropped.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from pagoda_tools.serve.blocking_calls import BlockingCallPool, OverloadedError
from pagoda_tools.serve.overview import Overview

MOST_READERS = 16
PERIOD_SECONDS = 1.0
_BACKLOG = 4  # the most events that wait for one reader; then it is dropped
# for one sample; then readers get an error, and the next sample waits for its end
_PATIENCE_SECONDS = 5.0
# the highest age of an overview that answers a single request
_FRESH_SECONDS = 0.5

Event = bytes | None  # None: the reader was too slow, or the server ends


class TooManyReaders(Exception):
    """The most allowed streams are open; the message says what to do."""


class LiveFeed:
    """Gives overviews to readers of one event loop; call `close` on that loop at the end."""

    def __init__(self, overview: Overview, calls: BlockingCallPool) -> None:
        self._overview = overview
        self._calls = calls
        self._readers: set[asyncio.Queue[Event]] = set()
        self._sampler: asyncio.Task[None] | None = None
        self._taking: asyncio.Future[dict[str, object]] | None = None
        self._latest: dict[str, object] = {}
        # times of the loop: the begin of the present and of the latest sample; the last change of
        # the stores
        self._taking_at = self._latest_at = self._changed_at = float("-inf")

    async def latest(self) -> Mapping[str, object]:
        """Return an overview that is at most half a second old, and newer than the last change.

        Raises TimeoutError if the stores do not answer.
        """
        oldest = max(
            self._changed_at, asyncio.get_running_loop().time() - _FRESH_SECONDS
        )
        while self._latest_at < oldest:
            await self._take()
        return self._latest

    def changed(self) -> None:
        """Note that an operation has changed the stores: older samples are no longer returned."""
        self._changed_at = asyncio.get_running_loop().time()

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[asyncio.Queue[Event]]:
        """Open a stream: a queue of events, the first with the history. Raises TooManyReaders."""
        if len(self._readers) >= MOST_READERS:
            raise TooManyReaders(
                f"{MOST_READERS} streams are open: close one of this server's pages"
            )
        queue: asyncio.Queue[Event] = asyncio.Queue(_BACKLOG)
        self._readers.add(queue)
        try:
            first = {
                **await self.latest(),
                "history": list(self._overview.history),
            }
            queue.put_nowait(_event(first))
            if self._sampler is None:
                self._sampler = asyncio.create_task(self._run())
            yield queue
        finally:
            self._readers.discard(queue)

    def close(self) -> None:
        """End all streams and the sampler."""
        for queue in self._readers:
            _end(queue)
        if self._sampler is not None:
            self._sampler.cancel()

    async def _run(self) -> None:
        """Sample and send while there are readers."""
        try:
            while self._readers:
                await asyncio.sleep(PERIOD_SECONDS)
                if not self._readers:
                    return
                trouble = ""
                try:
                    await self._take()
                except TimeoutError:
                    trouble = (
                        f"the stores have not answered for {_PATIENCE_SECONDS:g} s: look for "
                        "a stopped process"
                    )
                except OverloadedError:
                    trouble = (
                        "the stores are not read: too many requests wait for a thread of "
                        "this server"
                    )
                except Exception as error:  # noqa: BLE001
                    # a boundary: readers would not see that the stream ended
                    trouble = f"the stores cannot be shown: {type(error).__name__}: {error}"
                shown = (
                    {**self._latest, "troubles": [trouble], "sample": None}
                    if trouble
                    else self._latest
                )
                event = _event(shown)
                for queue in list(self._readers):
                    try:
                        queue.put_nowait(event)
                    except asyncio.QueueFull:
                        self._readers.discard(queue)
                        _end(queue)
        finally:
            self._sampler = None

    async def _take(self) -> None:
        """Take a new overview; concurrent callers share one sample. Raises TimeoutError."""
        if self._taking is None:
            self._taking_at = asyncio.get_running_loop().time()
            self._taking = asyncio.ensure_future(
                self._calls.run(self._overview.take)
            )
        taking = self._taking
        taking_at = self._taking_at
        try:
            found = await asyncio.wait_for(
                asyncio.shield(taking), _PATIENCE_SECONDS
            )
        finally:
            if taking.done() and self._taking is taking:
                self._taking = None
        self._latest = found
        self._latest_at = taking_at


def _event(overview: Mapping[str, object]) -> bytes:
    return (
        b"event: snapshot\ndata: "
        + json.dumps(overview, separators=(",", ":")).encode()
        + b"\n\n"
    )


def _end(queue: asyncio.Queue[Event]) -> None:
    """Make None the next event of a reader."""
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(None)
