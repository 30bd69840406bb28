"""The events of a streamed answer: which of them say how the server reads the prompt.

`return_progress` lets the server say, before the first token, how many tokens it reuses
(`/v1/messages` says it anyway). The proxy asks for it to check that, and cuts it out again unless
the client has asked for it as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import NamedTuple

_PROGRESS = b'"prompt_progress"'
_PROGRESS_MEMBER = re.compile(rb',\s*"prompt_progress"\s*:\s*\{[^{}]*\}')
# /v1/responses adds the progress to an event that it sends anyway, the first time
_IN_PROGRESS = b'"response.in_progress"'
_END = re.compile(rb"\r?\n\r?\n")
_MOST_EVENT_BYTES = 64 << 20
# in which the server says what it reuses, if it does
_FIRST_EVENTS = 3
_TAIL_BYTES = 1 << 16
_NUMBER = rb'"\s*:\s*(\d+)'
_REUSED = (
    re.compile(rb'"cache_n' + _NUMBER),
    re.compile(rb'"cache_read_input_tokens' + _NUMBER),
    re.compile(rb'"cached_tokens' + _NUMBER),
)
_PREDICTED = (
    re.compile(rb'"predicted_n' + _NUMBER),
    re.compile(rb'"output_tokens' + _NUMBER),
)
_COMPUTED = (re.compile(rb'"prompt_n' + _NUMBER),)
_MILLISECONDS = re.compile(rb'"prompt_ms"\s*:\s*([\d.eE+-]+)')


class Timings(NamedTuple):
    """What the server says of an answer at its end; None: it does not say."""

    reused_tokens: int | None
    computed_tokens: int | None
    compute_seconds: float
    answer_tokens: int | None


def timings_of(text: bytes) -> Timings:
    """Return what an answer, or the end of one, says last. What stands in a text of JSON is
    escaped, so it is not taken for that.
    """
    begin = max(text.rfind(b'"usage"'), 0)
    timings = text.rfind(b'"timings"')
    if timings >= 0:
        begin = timings
    end = text[begin:]
    milliseconds = _MILLISECONDS.search(end)
    return Timings(
        _number(_REUSED, end),
        _number(_COMPUTED, end),
        _seconds(milliseconds[1]) if milliseconds else 0.0,
        _number(_PREDICTED, end),
    )


def _number(patterns: tuple[re.Pattern[bytes], ...], text: bytes) -> int | None:
    for pattern in patterns:
        if found := pattern.search(text):
            return int(found[1])
    return None


def _seconds(milliseconds: bytes) -> float:
    try:
        return float(milliseconds) / 1e3
    except ValueError:
        return 0.0


class EventStream:
    """Reads the events of one answer. For the event loop."""

    def __init__(
        self, pieces: AsyncIterator[bytes], *, cuts_progress: bool
    ) -> None:
        """`pieces`: the bytes of the answer, as they come. `cuts_progress`: the client gets no
        events about the progress.
        """
        self._pieces = pieces
        self._cuts = cuts_progress
        self._has_in_progress = False
        self._buffer = b""
        self._tail = bytearray()
        # how many tokens of the prompt were reused, once the server has said it
        self.reused_tokens: int | None = None

    async def beginning(self) -> bytes:
        """Return what the client gets up to the event that says how much was reused, which is one
        of the first if there is one.
        """
        kept = b""
        seen = 0
        while seen < _FIRST_EVENTS:
            event = await self._event()
            if event is None:
                break
            kept += self._kept(event)
            if _is_comment(event):
                # the server waits for its turn, however long
                continue
            seen += 1
            self.reused_tokens = _reused_in(event)
            if self.reused_tokens is not None:
                break
        return kept

    async def rest(self) -> AsyncIterator[bytes]:
        """Yield the bytes that follow, as they come."""
        is_about_prompt = self._cuts
        while is_about_prompt:
            event = await self._event()
            if event is None:
                return
            is_about_prompt = (
                _is_comment(event) or _progress_in(event) is not None
            )
            if kept := self._kept(event):
                yield self._noted(kept)
        buffered = self._buffer
        self._buffer = b""
        if buffered:
            yield self._noted(buffered)
        async for piece in self._pieces:
            yield self._noted(piece)

    @property
    def tail(self) -> bytes:
        """The last bytes of the stream."""
        return bytes(self._tail[-_TAIL_BYTES:])

    def _kept(self, event: bytes) -> bytes:
        """Return what the client gets of an event."""
        if not self._cuts or _progress_in(event) is None:
            return event
        if _IN_PROGRESS in event and not self._has_in_progress:
            self._has_in_progress = True
            return _PROGRESS_MEMBER.sub(b"", event)
        return b""

    def _noted(self, piece: bytes) -> bytes:
        self._tail += piece
        if len(self._tail) > 2 * _TAIL_BYTES:
            del self._tail[:-_TAIL_BYTES]
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


def _reused_in(event: bytes) -> int | None:
    """Return what an event at the beginning says of the reused tokens."""
    progress = _progress_in(event)
    if progress is not None:
        reused = progress.get("cache")
        return reused if isinstance(reused, int) else None
    if b'"message_start"' in event:
        return _number(_REUSED[1:2], event)
    return None


def _is_comment(event: bytes) -> bool:
    """Whether an event only keeps the connection open."""
    return event.startswith(b":") and b"data:" not in event


def _progress_in(event: bytes) -> dict[str, object] | None:
    if _PROGRESS not in event:
        return None
    data = event[event.find(b"data:") + len(b"data:") :]
    try:
        found = json.loads(data)
    except ValueError:
        return None
    progress = found.get("prompt_progress") if isinstance(found, dict) else None
    return progress if isinstance(progress, dict) else None
