"""The events of a streamed answer: which of them say how the server reads the prompt.

`return_progress` lets the server say, before the first token, how many tokens it reuses
(`/v1/messages` says it anyway). The proxy asks for it to check that, and cuts it out again unless
the client has asked for it as well.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

from pagoda_tools.llama_proxy.request_body import without

_PROGRESS = "prompt_progress"
# /v1/responses adds the progress to an event that it sends anyway, the first time
_IN_PROGRESS = "response.in_progress"
# an end of a line is one of three, and is never taken for two
_LINE = rb"(?>\r\n|\n|\r)"
_LINES = re.compile(_LINE)
_END = re.compile(_LINE + _LINE)
_MOST_EVENT_BYTES = 64 << 20
# with something to say, in which the server says what it reuses, if it does
_FIRST_EVENTS = 3
_TAIL_BYTES = 1 << 16
# what is longer is no number of tokens
_NUMBER = rb'"\s*:\s*(\d{1,15})(?!\d)'
_REUSED = (
    re.compile(rb'"cache_n' + _NUMBER),
    re.compile(rb'"cache_read_input_tokens' + _NUMBER),
    re.compile(rb'"cached_tokens' + _NUMBER),
)
_PREDICTED = (
    re.compile(rb'"predicted_n' + _NUMBER),
    re.compile(rb'"output_tokens' + _NUMBER),
    re.compile(rb'"completion_tokens' + _NUMBER),
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
        seconds = float(milliseconds) / 1e3
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) else 0.0


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
        while seen < _FIRST_EVENTS and self.reused_tokens is None:
            event = await self._event()
            if event is None:
                break
            kept += self._noted(self._kept(event))
            # the server may wait for its turn, however long
            seen += event.says_something
            self.reused_tokens = event.reused_tokens
        return kept

    async def rest(self) -> AsyncIterator[bytes]:
        """Yield the bytes that follow, as they come."""
        is_about_prompt = self._cuts
        while is_about_prompt:
            event = await self._event()
            if event is None:
                return
            is_about_prompt = not event.says_something
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

    def _kept(self, event: _Event) -> bytes:
        """Return what the client gets of an event."""
        if not self._cuts or event.progress is None:
            return event.text
        if event.kind == _IN_PROGRESS and not self._has_in_progress:
            self._has_in_progress = True
            return event.without_progress()
        return event.without_progress() if event.says_something else b""

    def _noted(self, piece: bytes) -> bytes:
        self._tail += piece
        if len(self._tail) > 2 * _TAIL_BYTES:
            del self._tail[:-_TAIL_BYTES]
        return piece

    async def _event(self) -> _Event | None:
        """Return the next event with the empty line behind it; None at the end."""
        while (end := _END.search(self._buffer)) is None:
            try:
                piece = await anext(self._pieces)
            except StopAsyncIteration:
                left = self._buffer
                self._buffer = b""
                return _Event(left) if left else None
            self._buffer += piece
            if len(self._buffer) > _MOST_EVENT_BYTES:
                raise ValueError("an event of the server has no end")
        event = self._buffer[: end.end()]
        self._buffer = self._buffer[end.end() :]
        return _Event(event)


class _Event:
    """One event of a stream, read. `text`: its bytes, with the empty line behind it."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        lines = _LINES.split(text.removeprefix(b"\xef\xbb\xbf"))
        self._data = b"\n".join(
            line[len(b"data:") :].removeprefix(b" ")
            for line in lines
            if line.startswith(b"data:")
        )
        self._others = [
            line for line in lines if line and not line.startswith(b"data:")
        ]
        found = _object_in(self._data)
        progress = found.get(_PROGRESS)
        self.progress = progress if isinstance(progress, dict) else None
        self.kind = found.get("type")
        # False: it only keeps the connection open, or is only about the prompt
        self.says_something = (
            _says_something(found) if found else bool(self._data)
        )

    @property
    def reused_tokens(self) -> int | None:
        """What it says of the reused tokens, at the beginning of an answer."""
        if self.progress is not None:
            reused = self.progress.get("cache")
            return reused if type(reused) is int else None
        if self.kind == "message_start":
            return _number(_REUSED[1:2], self._data)
        return None

    def without_progress(self) -> bytes:
        """Return it as if nobody had asked for the progress."""
        written = without(self._data, [_PROGRESS])
        data = b"data: " + written.replace(b"\n", b"\ndata: ")
        return b"\n".join([*self._others, data, b"", b""])


def _object_in(data: bytes) -> Mapping[str, object]:
    """Return the object of an event; empty if it has none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _says_something(event: Mapping[str, object]) -> bool:
    """Whether an event has a part of the answer. Servers write some without, which have its first
    speaker at most; what cannot be told counts as a part.
    """
    kind = event.get("type")
    if kind is not None:
        return kind != _IN_PROGRESS or _PROGRESS not in event
    choices = event.get("choices")
    if isinstance(choices, list):
        return not choices or any(map(_has_answer, choices))
    if "content" not in event:
        return event.keys() != {_PROGRESS}
    if event["content"] or event.get("stop"):
        return True
    # one without a token of the answer has this one
    return event.get("tokens") not in (None, [], [0])


def _has_answer(choice: object) -> bool:
    """Whether a choice has a part of the answer."""
    if not isinstance(choice, dict):
        return True
    delta = choice.get("delta")
    parts = delta if isinstance(delta, dict) else {"": delta}
    if any(part for name, part in parts.items() if name != "role"):
        return True
    return any(choice.get(name) for name in ("text", "finish_reason", "logprobs"))
