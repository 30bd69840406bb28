"""The stream of overviews: every second the stores are read once for all readers, as long as the
server runs.

`operator_routes` calls it. It calls `Overview.take` on a thread, so that a slow store does not
delay the event loop; while nobody reads, only `Overview.look`, so that charts have no hole where
nobody looked. A reader that is too slow is dropped.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
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
    """Gives overviews to readers of one event loop. Call `start` and `close` on that loop."""

    def __init__(self, overview: Overview, calls: BlockingCallPool) -> None:
        self._overview = overview
        self._calls = calls
        self._readers: set[asyncio.Queue[Event]] = set()
        # readers that wait for the history, which is their first event
        self._opening = 0
        self._is_closed = False
        self._sampler: asyncio.Task[None] | None = None
        self._reading: asyncio.Future[None] | None = None
        self._latest: dict[str, object] = {}
        self._sent_until = float(
            "-inf"
        )  # the end of the last span that readers have
        # times of the loop: the begin of the latest overview; the last change of the stores
        self._latest_at = float("-inf")
        self._changed_at = float("-inf")

    def start(self) -> None:
        """Begin to read the stores every second."""
        if self._sampler is None:
            self._sampler = asyncio.create_task(self._run())

    async def latest(self) -> Mapping[str, object]:
        """Return an overview that is at most half a second old, and newer than the last change.

        Raises TimeoutError if the stores do not answer.
        """
        oldest = max(
            self._changed_at, asyncio.get_running_loop().time() - _FRESH_SECONDS
        )
        while self._latest_at < oldest:
            await self._read_stores(self._overview.take)
        return self._latest

    def changed(self) -> None:
        """Note that an operation has changed the stores: older samples are no longer returned."""
        self._changed_at = asyncio.get_running_loop().time()

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[asyncio.Queue[Event]]:
        """Open a stream: a queue of events, the first with the history. Raises TooManyReaders."""
        if len(self._readers) + self._opening >= MOST_READERS:
            raise TooManyReaders(
                f"{MOST_READERS} streams are open: close one of this server's pages"
            )
        self._opening += 1
        try:
            await self.latest()
        finally:
            self._opening -= 1
        spans = list(self._overview.history.seconds)
        history = [span.as_json() for span in spans]
        queue: asyncio.Queue[Event] = asyncio.Queue(_BACKLOG)
        queue.put_nowait(self._event({**self._latest, "history": history}))
        if self._is_closed:
            queue.put_nowait(None)
        self._readers.add(queue)
        try:
            yield queue
        finally:
            self._readers.discard(queue)

    async def minutes(self) -> list[dict[str, object]]:
        """Return what happened in the last day, minute by minute. Raises TimeoutError."""
        await self.latest()
        spans = list(self._overview.history.minutes)
        return [span.as_json() for span in spans]

    def close(self) -> None:
        """End all streams, and no longer read the stores."""
        self._is_closed = True
        for queue in self._readers:
            _end(queue)
        if self._sampler is not None:
            self._sampler.cancel()

    async def _run(self) -> None:
        """Read the stores every second, and send to the readers."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            # a store that is waited for does not make the period longer
            await asyncio.sleep(max(0.0, began + PERIOD_SECONDS - loop.time()))
            began = loop.time()
            is_watched = bool(self._readers or self._opening)
            work = self._overview.take if is_watched else self._overview.look
            trouble = ""
            try:
                await self._read_stores(work)
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
                trouble = (
                    f"the stores cannot be shown: {type(error).__name__}: {error}"
                )
            self._send(trouble)

    def _send(self, trouble: str) -> None:
        """Send the latest overview to all readers; with a trouble it is an old one."""
        # also those that ended because others asked
        spans = [
            span
            for span in list(self._overview.history.seconds)
            if span.end > self._sent_until
        ]
        if spans:
            self._sent_until = spans[-1].end
        if not self._readers:
            return
        shown = {**self._latest, "spans": [span.as_json() for span in spans]}
        if trouble:
            shown["troubles"] = [trouble]
        event = self._event(shown)
        for queue in list(self._readers):
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._readers.discard(queue)
                _end(queue)

    def _event(self, overview: Mapping[str, object]) -> bytes:
        """Return an event. It says how old its figures are: no clock of the reader is needed."""
        age = asyncio.get_running_loop().time() - self._latest_at
        aged = {**overview, "age_seconds": round(age, 3)}
        data = json.dumps(aged, separators=(",", ":"))
        return b"event: snapshot\ndata: " + data.encode() + b"\n\n"

    async def _read_stores(
        self, work: Callable[[], dict[str, object] | None]
    ) -> None:
        """Call `work`, or wait for the call that runs already. Raises TimeoutError.

        Only one call runs at a time. If it has returned an overview, that is the latest.
        """
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call(work))
        reading = self._reading
        try:
            # not `wait_for`: in Python 3.11 that loses a cancellation of `close`
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await asyncio.shield(reading)
        finally:
            if reading.done() and self._reading is reading:
                self._reading = None

    async def _call(self, work: Callable[[], dict[str, object] | None]) -> None:
        began = asyncio.get_running_loop().time()
        found = await self._calls.run(work)
        if found is not None:
            self._latest = found
            self._latest_at = began


def _end(queue: asyncio.Queue[Event]) -> None:
    """Make None the next event of a reader."""
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(None)
