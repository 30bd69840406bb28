"""Work that must come to its end: what another thread does to a slot does not stop with the request
for which it began.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def finished(work: Awaitable[T]) -> T:
    """Wait for work that must come to its end, also if the request is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            # also the second time: who is told that it has ended changes the same slot
            is_cancelled = True
    if is_cancelled:
        # its failure is nobody's any more
        with contextlib.suppress(Exception, asyncio.CancelledError):
            task.result()
        raise asyncio.CancelledError
    return task.result()
