"""Where chunks from a lower tier are read to: host slots, or a few private buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from pagoda.cache.deadline import Deadline
from pagoda.cache.request import Ask
from pagoda.cache.staging import Staging
from pagoda.ledger import Busy, Outcome, Present, Refused, Reserved
from pagoda.tiers import HostTier
from pagoda.tiers.base import Bytes

__all__ = ["HostRooms", "Room", "Rooms", "StagedRooms"]


class Room(NamedTuple):
    """Room for one chunk, owned by one call until it is settled or delivered."""

    at: int  # of the chunk in Ask.keys
    payload: Bytes  # (slot_bytes,) uint8
    reserved: Reserved | None  # None: a private buffer ...
    buffer: list[Bytes]  # ... which is in here until it is given back


class Rooms(Protocol):
    """Gives rooms for chunks [begin, end) of one ask. Used by one thread, `settle` by any."""

    most: int  # rooms that may be out at once

    def take(self, begin: int, end: int, may_wait: bool) -> list[Room]:
        """Rooms for a leading part of [begin, end); empty when there are none to be had now."""

    def keep(self, rooms: Sequence[Room]) -> int:
        """The bytes are in: make them visible. Returns for how many leading rooms that came about."""

    def valid(self, rooms: Sequence[Room]) -> int:
        """How many leading rooms still held their chunks after the copy out of them."""

    def settle(self, room: Room, ok: bool) -> None:
        """Give up a room that nobody waits for any more, now that no I/O touches it; nothing if it was given."""

    def give(self, rooms: Sequence[Room]) -> None:
        """The copy out of these rooms has ended."""

    def lose(self, rooms: Sequence[Room]) -> None:
        """Give up rooms of one `take` into which something may be read, nobody knows what: once nobody holds them."""


class HostRooms:
    """Rooms in the host tier: chunks read into them are there for everybody."""

    def __init__(
        self, host: HostTier, ask: Ask, deadline: Deadline, stamp: int, lease_seconds: float
    ) -> None:
        """`lease_seconds`: how long what is wanted on the host, whatever its policy says, stays there; 0: none is."""
        self._host = host
        self._ask = ask
        self._deadline = deadline
        self._stamp = stamp
        self._lease_seconds = lease_seconds
        self.most = max(1, min(host.ledger.window, (512 << 20) // host.slot_bytes, 64))
        self.stopped: Present | Busy | Refused | None = None  # why there were no more

    def take(self, begin: int, end: int, may_wait: bool) -> list[Room]:
        """Reserve slots for the leading chunks that need one; `stopped` says what the first other one is."""
        ledger, ask = self._host.ledger, self._ask
        self.stopped = None
        outcomes = ledger.reserve(
            ask.keys[begin:end],
            namespace=ask.namespace.root,
            start=ask.first + begin,
            parent=ask.before(begin),
            tokens=ask.chunk_tokens,
            stamp=self._stamp,
            all_in=self._lease_seconds > 0,
            deadline_seconds=self._deadline.remaining(),
        )
        try:
            leading, spare = self._split(outcomes)
            if spare:  # nobody may wait for somebody else while holding what others wait for
                ledger.abort(spare, self._deadline.last())
            views = self._host.slab.views([item.slot for item in leading])
            rooms = [
                Room(begin + i, view, item, [])
                for i, (view, item) in enumerate(zip(views, leading, strict=True))
            ]
            self._host.begin_copies(leading)  # until they are settled or given: I/O may last longer
            return rooms
        except BaseException:
            ledger.give_up(outcomes, self._deadline.last())
            self._host.end_copies([item for item in outcomes if isinstance(item, Reserved)])
            raise

    def _split(self, outcomes: Sequence[Outcome]) -> tuple[list[Reserved], list[Reserved]]:
        leading: list[Reserved] = []
        spare: list[Reserved] = []
        for outcome in outcomes:
            if isinstance(outcome, Reserved):
                (leading if self.stopped is None else spare).append(outcome)
            elif self.stopped is None:
                self.stopped = outcome
        return leading, spare

    def keep(self, rooms: Sequence[Room]) -> int:
        """Commit; the lease keeps a neighbour from evicting what is about to be copied."""
        reserved = _reserved(rooms)
        committed = self._host.ledger.commit(reserved, deadline_seconds=self._deadline.last())
        self._host.ledger.count("stored_bytes", sum(committed) * self._host.chunk_bytes)
        kept = _leading(committed)
        if self._lease_seconds and kept:
            self._host.ledger.lease(*_columns(reserved[:kept]), self._lease_seconds)
        return kept

    def valid(self, rooms: Sequence[Room]) -> int:
        """Compare generations, after the copy."""
        reserved = _reserved(rooms)
        return _leading(self._host.ledger.still_valid(*_columns(reserved)).tolist())

    def settle(self, room: Room, ok: bool) -> None:
        """Keep what came late but whole; free the slot of what did not."""
        try:
            if room.reserved is not None:
                if ok:
                    self._host.ledger.commit([room.reserved])
                else:
                    self._host.ledger.abort([room.reserved])
        finally:
            self._host.end_copies(_reserved([room]))

    def give(self, rooms: Sequence[Room]) -> None:
        """Committed slots belong to the ledger."""
        self._host.end_copies(_reserved(rooms))

    def lose(self, rooms: Sequence[Room]) -> None:
        """Free the slots then."""
        base = rooms[0].payload.base  # of all views of one `take`, and of whatever is made of them
        assert isinstance(base, np.ndarray)
        self._host.abort_when_dropped(_reserved(rooms), base)


class StagedRooms:
    """Rooms in private memory: chunks only pass through them."""

    def __init__(self, staging: Staging, deadline: Deadline) -> None:
        self._staging = staging
        self._deadline = deadline
        self.most = staging.count

    def take(self, begin: int, end: int, may_wait: bool) -> list[Room]:
        """Take what is free; wait only for the first one, and only if nothing of this call is under way."""
        rooms: list[Room] = []
        for index in range(begin, end):
            wait = self._deadline.remaining() if may_wait and not rooms else 0.0
            buffer = self._staging.take(wait)
            if buffer is None:
                break
            rooms.append(Room(index, buffer, None, [buffer]))
        return rooms

    def keep(self, rooms: Sequence[Room]) -> int:
        """Nothing to do: nobody else sees them."""
        return len(rooms)

    def valid(self, rooms: Sequence[Room]) -> int:
        """All: a private buffer cannot be evicted."""
        return len(rooms)

    def settle(self, room: Room, ok: bool) -> None:
        """Give the buffer back."""
        while room.buffer:
            self._staging.give(room.buffer.pop())

    def give(self, rooms: Sequence[Room]) -> None:
        """Give the buffers back."""
        for room in rooms:
            self.settle(room, True)

    def lose(self, rooms: Sequence[Room]) -> None:
        """Nothing to do: a buffer that nobody holds any more makes room for another."""


def _columns(
    reserved: Sequence[Reserved],
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.uint64]]]:
    slots = np.fromiter((item.slot for item in reserved), np.int64, len(reserved))
    return slots, np.fromiter((item.generation for item in reserved), np.uint64, len(reserved))


def _reserved(rooms: Sequence[Room]) -> list[Reserved]:
    return [room.reserved for room in rooms if room.reserved is not None]


def _leading(flags: Sequence[bool]) -> int:
    """How many leading flags are set."""
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))
