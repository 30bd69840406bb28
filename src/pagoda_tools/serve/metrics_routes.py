"""`GET /metrics`: contents and counters of the machine's stores, for Prometheus.

`server` calls `add_routes`; `exposition` makes the text. The stores are read by one thread, at most
once per second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from aiohttp import web

from pagoda.base.clock import Deadline
from pagoda.base.errors import PagodaError
from pagoda.ledger import Ledger
from pagoda.ledger.store_stats import StoreStats
from pagoda_tools.serve.blocking_calls import CALLS
from pagoda_tools.serve.chunk_routes import COUNTS
from pagoda_tools.serve.exposition import Exposition, exposition

_FRESH_SECONDS = 1.0
# to wait for all locks that other processes hold; Prometheus waits ten seconds
_STORES_SECONDS = 1.0


class StoreScrape:
    """Reads all stores for scrapers. For the event loop: concurrent scrapes share one reading."""

    def __init__(self, find_stores: Callable[[], Sequence[Path]]) -> None:
        self._find_stores = find_stores
        self._reading = asyncio.Lock()
        self._read_at = -_FRESH_SECONDS
        self._last = Exposition([])

    async def answer(self, request: web.Request) -> web.Response:
        """Answer `GET /metrics` in the format that the request accepts."""
        async with self._reading:
            if time.monotonic() - self._read_at >= _FRESH_SECONDS:
                self._last = await request.app[CALLS].run(self._read)
                self._read_at = time.monotonic()
        counts = request.app[COUNTS]
        found = replace(self._last, served=counts)
        body, media_type = exposition(found, request.headers.get("Accept", ""))
        return web.Response(
            body=body,
            headers={"Content-Type": media_type, "Cache-Control": "no-store"},
        )

    def _read(self) -> Exposition:
        """Read every store; name those that cannot be read."""
        stores: list[StoreStats] = []
        unreadable: list[str] = []
        deadline = Deadline(_STORES_SECONDS)
        for directory in self._find_stores():
            try:
                with closing(
                    Ledger.attach(directory, deadline_seconds=deadline.last())
                ) as ledger:
                    stores.append(StoreStats.of(ledger, deadline.last()))
            except (PagodaError, OSError):
                unreadable.append(str(directory))
        return Exposition(stores, unreadable)


def add_routes(
    app: web.Application, find_stores: Callable[[], Sequence[Path]]
) -> None:
    """Add `GET /metrics`. `find_stores` returns the directories of the stores that exist."""
    app.router.add_get("/metrics", StoreScrape(find_stores).answer)
