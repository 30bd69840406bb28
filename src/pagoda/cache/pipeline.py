"""Chunks from a lower tier through rooms to the engine: later ones are read while earlier ones are copied out.

disk  | read 4 5 6 7 | read 8 9 ...        rooms in the air: a deque, refilled when half empty
host    commit 0..3  | commit 4 5          one transaction for all that have landed
KV        copy 0..3  |   copy 4 5          then validated
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from pagoda.cache.ask import Ask
from pagoda.cache.deadline import Deadline
from pagoda.cache.rooms import Room, Rooms, StagedRooms
from pagoda.ledger import Reserved
from pagoda.metrics import Reason
from pagoda.tiers.base import Done, Tier
from pagoda.transfer import Transfer

__all__ = ["End", "Pipeline"]

_LAND_BYTES = 64 << 20  # copied out at once while reads are in the air


class Flight(NamedTuple):
    """A chunk on its way from a lower tier into a room."""

    room: Room
    future: Future[Done]


class End(NamedTuple):
    """Why a pipeline ended before its run did."""

    reason: Reason
    detail: str
    counted: bool  # by the tier


class Pipeline:
    """Carries one run up from one tier. Used by one thread, once.

    `served` is told of chunks as they have been validated, in order; `kept` are the host slots that were filled.
    """

    def __init__(
        self,
        tier: Tier,
        rooms: Rooms,
        ask: Ask,
        kv: Transfer | None,
        deadline: Deadline,
        served: Callable[[int, str], None],
    ) -> None:
        self._tier = tier
        self._rooms = rooms
        self._ask = ask
        self._kv = kv
        self._deadline = deadline
        self._served = served
        self._done = 0
        self._end: End | None = None
        self.kept: list[Reserved] = []

    def carry(self, begin: int, stop: int) -> End | None:
        """Carry chunks [begin, stop) of the ask, in order, as far as there are rooms.

        Returns why a chunk that was on its way did not come, None if all did. Leaves no room behind: what is still
        being read then is settled when its I/O has ended.
        """
        flights: deque[Flight] = deque()
        self._done = asked = begin
        more, most = True, self._rooms.most
        try:
            while self._end is None:
                if more and asked < stop and len(flights) <= most // 2:
                    taken = self._depart(asked, min(stop, asked + most - len(flights)), not flights)
                    more, asked = bool(taken), asked + len(taken)
                    flights.extend(taken)
                if not flights or not self._land(flights):
                    break
        finally:
            for flight in flights:
                _settle_later(self._rooms, flight)
        return self._end

    def _depart(self, begin: int, end: int, may_wait: bool) -> list[Flight]:
        """Begin to read a leading part of [begin, end)."""
        taken = self._rooms.take(begin, end, may_wait)
        if not taken:
            if may_wait and isinstance(self._rooms, StagedRooms):
                self._stop(Reason.DEADLINE, "no staging buffer came free")
            return []
        keys = self._ask.keys[begin : begin + len(taken)]
        try:
            futures = self._tier.load(
                keys,
                [room.payload for room in taken],
                start=self._ask.first + begin,
                namespace=self._ask.namespace.root,
            )
        except BaseException:
            for room in taken:
                self._rooms.settle(room, False)
            raise
        return [Flight(*pair) for pair in zip(taken, futures, strict=True)]

    def _land(self, flights: deque[Flight]) -> bool:
        """Wait for the next chunk and deliver all that are there in order; False: look again from the top."""
        first = self._deadline.wait(flights[0].future)
        if first is None:
            self._stop(Reason.DEADLINE, f"{self._tier.name} did not deliver in time")
            return False
        if not first.ok:
            self._rooms.settle(flights.popleft().room, False)
            self._stop(first.reason or Reason.IO_ERROR, f"{self._tier.name} could not deliver", counted=True)
            return False
        most = max(1, _LAND_BYTES // self._tier.chunk_bytes)
        landed: list[Room] = []
        while flights and len(landed) < most and _has_landed(flights[0]):
            landed.append(flights.popleft().room)
        return self._deliver(landed)

    def _deliver(self, landed: Sequence[Room]) -> bool:
        """Commit, copy out, validate."""
        try:
            kept = self._rooms.keep(landed)
            self.kept += [room.reserved for room in landed if room.reserved is not None]
            if self._kv is not None and kept:
                self._kv.from_slots(
                    self._ask.starts(self._done, self._done + kept), [room.payload for room in landed[:kept]]
                )
                kept = self._rooms.valid(landed[:kept])
            self._done += kept
            self._served(kept, self._tier.name)
        finally:
            self._rooms.give(landed)
        return kept == len(landed)

    def _stop(self, reason: Reason, detail: str, counted: bool = False) -> None:
        self._end = End(reason, detail, counted)


def _has_landed(flight: Flight) -> bool:
    return flight.future.done() and flight.future.result().ok


def _settle_later(rooms: Rooms, flight: Flight) -> None:
    """Settle the room when its I/O has really ended, at once or on the tier's thread."""
    flight.future.add_done_callback(lambda future: rooms.settle(flight.room, future.result().ok))
