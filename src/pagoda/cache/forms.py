"""The future-returning and the asyncio forms of the calls."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Unpack

from pagoda.cache.hit import Hit, Stored
from pagoda.cache.operations import Calls, Options
from pagoda.keys import TokenIds
from pagoda.transfer import Transfer

__all__ = ["Forms"]


class Forms:
    """Each call a second and a third time; `prefetch` returns a future anyway. Thread-safe.

    ValueErrors for wrong use are raised by the call itself.

    A future's call begins when one of a few threads is free; its deadline runs from the call on. A cancelled await ends
    the call first: when CancelledError is raised, nothing writes into the KV any more and nothing stays reserved.
    """

    _calls: Calls

    def store_future(
        self, tokens: TokenIds | None, kv: Transfer, **options: Unpack[Options]
    ) -> Future[Stored]:
        """As `store`, on another thread. The KV must stay as it is until the future is done."""
        return self._calls.parts.workers.submit(self._calls.store(tokens, kv, options))

    def lookup_future(self, tokens: TokenIds | None, **options: Unpack[Options]) -> Future[Hit]:
        """As `lookup`, on another thread."""
        return self._calls.parts.workers.submit(self._calls.lookup(tokens, True, options))

    def retrieve_future(
        self, tokens: TokenIds | None, kv: Transfer, **options: Unpack[Options]
    ) -> Future[Hit]:
        """As `retrieve`, on another thread."""
        return self._calls.parts.workers.submit(self._calls.retrieve(tokens, kv, True, options))

    async def astore(self, tokens: TokenIds | None, kv: Transfer, **options: Unpack[Options]) -> Stored:
        """As `store`, awaited."""
        return await self._calls.parts.workers.wait_for(self._calls.store(tokens, kv, options))

    async def alookup(self, tokens: TokenIds | None, **options: Unpack[Options]) -> Hit:
        """As `lookup`, awaited."""
        return await self._calls.parts.workers.wait_for(self._calls.lookup(tokens, True, options))

    async def aretrieve(self, tokens: TokenIds | None, kv: Transfer, **options: Unpack[Options]) -> Hit:
        """As `retrieve`, awaited."""
        return await self._calls.parts.workers.wait_for(self._calls.retrieve(tokens, kv, True, options))

    async def aprefetch(self, tokens: TokenIds | None, **options: Unpack[Options]) -> Hit:
        """As `prefetch`, awaited."""
        return await self._calls.parts.workers.wait_for(self._calls.prefetch(tokens, options))
