"""An answer that the server has written and its client has not read yet.

A client that reads slowly keeps no slot: the server's answer is read as fast as it comes, and what
the client has not read waits here, in bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

_MOST_BYTES = 16 << 20


class UnreadAnswer:
    """Bytes between one writer and one reader. For the event loop."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._unread_bytes = 0
        self._has_ended = False
        self._has_changed = asyncio.Event()
        self._has_room = asyncio.Event()

    async def put(self, piece: bytes) -> None:
        """Add bytes; waits for the reader if too many are unread."""
        while self._unread_bytes >= _MOST_BYTES:
            self._has_room.clear()
            await self._has_room.wait()
        self._pieces.append(piece)
        self._unread_bytes += len(piece)
        self._has_changed.set()

    def end(self) -> None:
        """Say that nothing more comes."""
        self._has_ended = True
        self._has_changed.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the bytes until the end, in as few pieces as possible."""
        while True:
            if self._pieces:
                found = b"".join(self._pieces)
                self._pieces.clear()
                self._unread_bytes = 0
                self._has_room.set()
                yield found
            elif self._has_ended:
                return
            else:
                self._has_changed.clear()
                await self._has_changed.wait()
