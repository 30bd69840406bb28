"""An answer that the server has written and its client has not read yet.

A client that reads slowly keeps no slot: the server's answer is read as fast as it comes, and what
the client has not read waits here, in bounds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

_MOST_BYTES = 16 << 20


class UnreadAnswer:
    """Bytes between one writer and one reader. For the event loop."""

    def __init__(self) -> None:
        self._pieces = deque[bytes]()
        self._nbytes = 0
        self._has_ended = False
        self._changed = asyncio.Condition()

    async def put(self, piece: bytes) -> None:
        """Add bytes; waits for the reader if too many are unread."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._nbytes < _MOST_BYTES)
            self._pieces.append(piece)
            self._nbytes += len(piece)
            self._changed.notify_all()

    async def end(self) -> None:
        """Say that nothing more comes."""
        async with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the bytes until the end."""
        while True:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self._pieces or self._has_ended
                )
                if not self._pieces:
                    return
                piece = self._pieces.popleft()
                self._nbytes -= len(piece)
                self._changed.notify_all()
            yield piece
