"""The events of a streamed answer: which of them say how the server reads the prompt.

`return_progress` lets the server say, before the first token, how many tokens it reuses. The proxy
asks for it to check that, and cuts these events out unless the client has asked for them as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import NamedTuple

_PROGRESS = b'"prompt_progress"'
_END = re.compile(rb"\r?\n\r?\n")
_MOST_EVENT_BYTES = 64 << 20
_TAIL_BYTES = 1 << 16
_REUSED = re.compile(rb'"cache_n"\s*:\s*(\d+)')
_PREDICTED = re.compile(rb'"predicted_n"\s*:\s*(\d+)')
_COMPUTED = re.compile(rb'"prompt_n"\s*:\s*(\d+)')
_MILLISECONDS = re.compile(rb'"prompt_ms"\s*:\s*([\d.eE+-]+)')


class Timings(NamedTuple):
    """What the server says of an answer at its end; None: it does not say."""

    reused_tokens: int | None
    computed_tokens: int | None
    compute_seconds: float
    answer_tokens: int | None


def timings_of(text: bytes) -> Timings:
    """Return the timings that stand last in an answer, or in the end of one."""
    begin = max(text.rfind(b'"timings"'), 0)
    text = text[begin:]
    if not begin:
        return Timings(None, None, 0.0, None)
    milliseconds = _MILLISECONDS.search(text)
    return Timings(
        _int(_REUSED, text),
        _int(_COMPUTED, text),
        _float(milliseconds[1]) / 1e3 if milliseconds else 0.0,
        _int(_PREDICTED, text),
    )


def _int(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    found = pattern.search(text)
    return int(found[1]) if found else None


def _float(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


class EventStream:
    """Reads the events of one answer. For the event loop."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        """`pieces`: the bytes of the answer, as they come."""
        self._pieces = pieces
        self._buffer = b""
        self._tail = b""
        # how many tokens of the prompt were reused, once the server has said it
        self.reused_tokens: int | None = None

    async def beginning(self) -> list[bytes]:
        """Return the events up to the first one that is not about the prompt, or that says how much
        was reused. [] at the end of the stream.
        """
        events = []
        while (event := await self._event()) is not None:
            events.append(event)
            reused = _reused_in(event)
            if reused is not None:
                self.reused_tokens = reused
                return events
            if _PROGRESS not in event:
                return events
        return events

    async def rest(self, *, with_progress: bool) -> AsyncIterator[bytes]:
        """Yield the bytes that follow. `with_progress`: those about the prompt as well."""
        is_read = with_progress
        while not is_read:
            event = await self._event()
            if event is None:
                return
            if not is_progress(event):
                is_read = True
                yield self._noted(event)
        if self._buffer:
            buffered = self._buffer
            self._buffer = b""
            yield self._noted(buffered)
        async for piece in self._pieces:
            yield self._noted(piece)

    @property
    def timings(self) -> Timings:
        """What the server said at the end of the stream."""
        return timings_of(self._tail)

    def _noted(self, piece: bytes) -> bytes:
        self._tail = (self._tail + piece)[-_TAIL_BYTES:]
        return piece

    async def _event(self) -> bytes | None:
        """Return the next event with the empty line behind it; None at the end."""
        while (end := _END.search(self._buffer)) is None:
            try:
                piece = await anext(self._pieces)
            except StopAsyncIteration:
                left = self._buffer
                self._buffer = b""
                return left or None
            self._buffer += piece
            if len(self._buffer) > _MOST_EVENT_BYTES:
                raise ValueError("an event of the server has no end")
        event = self._buffer[: end.end()]
        self._buffer = self._buffer[end.end() :]
        return event


def is_progress(event: bytes) -> bool:
    """Whether an event is about the prompt only."""
    return _PROGRESS in event and _progress_in(event) is not None


def _reused_in(event: bytes) -> int | None:
    progress = _progress_in(event)
    reused = progress.get("cache") if progress is not None else None
    return reused if isinstance(reused, int) else None


def _progress_in(event: bytes) -> dict[str, object] | None:
    if _PROGRESS not in event:
        return None
    text = event.strip().removeprefix(b"data:")
    try:
        found = json.loads(text)
    except ValueError:
        return None
    progress = found.get("prompt_progress") if isinstance(found, dict) else None
    return progress if isinstance(progress, dict) else None
