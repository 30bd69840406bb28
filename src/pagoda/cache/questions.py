"""Which of the calls of an engine are one request: that is what a recording has a line of.

A request is looked up (often more than once), retrieved, and stored piece by piece. It is recorded as it is first asked
for, at that moment, by the keys of its prompt:

    read        A counted look-up or retrieve, or what the engine says was `requested`. Looking up the same prompt again
                before it is retrieved or stored is the same request (polling), and so is the retrieve of what was
                looked up. Uncounted calls are parts of a request that is counted elsewhere.
    store       Part of the request whose prompt it stores or continues; a request by itself if there is none. Stores
                that grow are one. Of an engine that reserves slots itself, only until it is seen to read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple

__all__ = ["Call", "Kind", "Questions"]

_SAME_MS = 10_000  # between two calls of one request, but for its stores
_STORED_MS = 600_000  # within this time a request is stored: an answer may take long
_MOST = 512  # requests that are remembered
_ID = 8  # bytes of a key that tell it from others


class Kind(Enum):
    """What an engine did."""

    LOOKED_UP = auto()
    RETRIEVED = auto()
    STORED = auto()
    RESERVED = auto()  # slots, to store into
    REQUESTED = auto()  # it says itself that this is a request


class Call(NamedTuple):
    """One call about the chunks of a prompt from number `first` on."""

    kind: Kind
    counted: bool
    keys: Sequence[bytes]
    first: int
    num_tokens: int  # of the whole prompt
    at_ms: int
    parent: bytes | None = None  # the key before the first


class _Known:
    """A request that was recorded, as far as its prompt and answer are known."""

    def __init__(self, call: Call) -> None:
        self.first, self._ids = call.first, _ids(call.keys)
        self.begun_ms = self.last_ms = call.at_ms
        self.looked_up = call.kind is Kind.LOOKED_UP  # and no more
        self.stored = call.kind in (Kind.STORED, Kind.RESERVED)  # and never read

    @property
    def end(self) -> int:
        return self.first + len(self._ids) // _ID

    def is_kin(self, call: Call) -> bool:
        """Whether one of the two begins with the other, or goes on where it ends: a key names all that is before it."""
        if call.parent is not None and call.first == self.end:
            return self._id(call.first - 1) == call.parent[:_ID]
        at = min(self.end, call.first + len(call.keys)) - 1
        return at >= max(self.first, call.first) and self._id(at) == call.keys[at - call.first][:_ID]

    def continued(self, call: Call) -> None:
        """Add what a call of its kin knows beyond the end."""
        self._ids += _ids(call.keys[max(0, self.end - call.first) :])
        self.last_ms = call.at_ms

    def _id(self, at: int) -> bytes:
        return self._ids[(at - self.first) * _ID : (at - self.first + 1) * _ID]


class Questions:
    """Tells requests from the other calls. Used by one thread."""

    def __init__(self) -> None:
        self._known: deque[_Known] = deque(maxlen=_MOST)
        self._reads = False

    def is_request(self, call: Call) -> bool:
        """Whether this call is the first of a request that is to be recorded; remembers it."""
        if not call.keys:
            return False
        match call.kind:
            case Kind.REQUESTED:
                begins = True
            case Kind.LOOKED_UP:
                begins = call.counted and not self._polled(call)
            case Kind.RETRIEVED:
                begins = not self._was_looked_up(call) and call.counted
            case Kind.STORED | Kind.RESERVED:
                return self._stores(call)
        self._reads |= begins
        if begins:
            self._known.append(_Known(call))
        return begins

    def _polled(self, call: Call) -> bool:
        end = call.first + len(call.keys)
        return self._looked_up(call, lambda known: known.end == end) is not None

    def _was_looked_up(self, call: Call) -> bool:
        end = call.first + len(call.keys)
        known = self._looked_up(call, lambda known: known.end >= end)
        if known is not None:
            known.looked_up = False
        return known is not None

    def _looked_up(self, call: Call, fits: Callable[[_Known], bool]) -> _Known | None:
        for known in reversed(self._known):
            if (
                call.at_ms - known.last_ms <= _SAME_MS
                and known.looked_up
                and fits(known)
                and known.is_kin(call)
            ):
                known.last_ms = call.at_ms
                return known
        return None

    def _stores(self, call: Call) -> bool:
        known = self._stored_by(call)
        if known is not None:
            known.looked_up = False
            known.continued(call)
            return False
        if call.first or (self._reads and call.kind is Kind.RESERVED):
            return False
        self._known.append(_Known(call))
        return True

    def _stored_by(self, call: Call) -> _Known | None:
        """The request that this store belongs to."""
        for known in reversed(self._known):
            if known.stored:
                fits = call.first + len(call.keys) > known.end and call.at_ms - known.last_ms <= _SAME_MS
            else:
                fits = call.at_ms - known.begun_ms <= _STORED_MS
            if fits and known.is_kin(call):
                return known
        return None


def _ids(keys: Sequence[bytes]) -> bytes:
    return b"".join([key[:_ID] for key in keys])
