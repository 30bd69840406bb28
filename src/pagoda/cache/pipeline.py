"""Chunks from a lower tier through rooms to the engine: later ones are read while earlier ones are copied out.

disk  | read 4 5 6 7 | read 8 9 ...        rooms in the air: a deque, refilled when half empty
host    commit 0..3  | commit 4 5          one transaction for all that have landed
KV        copy 0..3  |   copy 4 5          then validated
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import islice, takewhile
from typing import NamedTuple

from pagoda.cache.deadline import Deadline
from pagoda.cache.request import Ask
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
        self._flights: deque[Flight] = deque()  # until their rooms are settled or given
        self.kept: list[Reserved] = []

    def carry(self, begin: int, stop: int) -> End | None:
        """Carry chunks [begin, stop) of the ask, in order, as far as there are rooms.

        Returns why a chunk that was on its way did not come, None if all did. Leaves no room behind: what is still
        being read then is settled when its I/O has ended.
        """
        self._done = asked = begin
        more, most, flights = True, self._rooms.most, self._flights
        try:
            while self._end is None:
                if more and asked < stop and len(flights) <= most // 2:
                    under_way = len(flights)
                    self._depart(asked, min(stop, asked + most - under_way))
                    more, asked = len(flights) > under_way, asked + len(flights) - under_way
                if not flights or not self._land():
                    break
        finally:
            for flight in flights:
                _settle_later(self._rooms, flight)
        return self._end

    def _depart(self, begin: int, end: int) -> None:
        """Begin to read a leading part of [begin, end)."""
        may_wait = not self._flights
        taken = self._rooms.take(begin, end, may_wait)
        asked = False
        try:
            if not taken and may_wait and isinstance(self._rooms, StagedRooms):
                self._stop(Reason.DEADLINE, "no staging buffer came free")
            if not taken:
                return
            keys, left = self._ask.keys[begin : begin + len(taken)], self._deadline.remaining()
            payloads, start, root = (
                [room.payload for room in taken],
                self._ask.first + begin,
                self._ask.namespace.root,
            )
            asked = True
            futures = self._tier.load(keys, payloads, start=start, namespace=root, deadline_seconds=left)
            self._flights.extend([Flight(*pair) for pair in zip(taken, futures, strict=True)])
        except BaseException as error:
            if self._flights and taken and self._flights[-1].room is taken[-1]:
                raise  # `carry` settles them
            if asked and not isinstance(error, ValueError):
                self._rooms.lose(taken)  # a load that a signal handler broke off may be reading
            else:
                for room in taken:
                    self._rooms.settle(room, False)
            raise

    def _land(self) -> bool:
        """Wait for the next chunk and deliver all that are there in order; False: look again from the top."""
        flights = self._flights
        first = self._deadline.wait(flights[0].future)
        if first is None:
            self._stop(Reason.DEADLINE, f"{self._tier.name} did not deliver in time")
            return False
        if not first.ok:
            self._rooms.settle(flights[0].room, False)
            flights.popleft()
            self._stop(first.reason or Reason.IO_ERROR, f"{self._tier.name} could not deliver", counted=True)
            return False
        most = max(1, _LAND_BYTES // self._tier.chunk_bytes)
        return self._deliver([flight.room for flight in takewhile(_has_landed, islice(flights, most))])

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
            for _ in landed:
                self._flights.popleft()
        return kept == len(landed)

    def _stop(self, reason: Reason, detail: str, counted: bool = False) -> None:
        self._end = End(reason, detail, counted)


def _has_landed(flight: Flight) -> bool:
    return flight.future.done() and flight.future.result().ok


def _settle_later(rooms: Rooms, flight: Flight) -> None:
    """Settle the room when its I/O has really ended, at once or on the tier's thread."""
    flight.future.add_done_callback(lambda future: rooms.settle(flight.room, future.result().ok))
