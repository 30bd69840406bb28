"""Chunks of one lower tier, on their way to the engine or into the host tier.

disk  | read 4 5 6 7 | read 8 9 ...        buffers in flight: a deque, refilled when half empty
host    commit 0..3  | commit 4 5          one transaction for all chunks that have arrived
KV        copy 0..3  |   copy 4 5          then validated
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import NamedTuple

from pagoda.base.metrics import Reason
from pagoda.cache.call import CacheRequest, CheckedTransfer
from pagoda.cache.load_destinations import (
    LoadBuffer,
    LoadDestination,
    StagingDestination,
    reserved_in,
)
from pagoda.ledger import Reserved
from pagoda.tiers.base import Done, Tier, end_of

# the most bytes that are copied out at once while reads are in flight
_ARRIVED_BYTES = 64 << 20


class _LoadInFlight(NamedTuple):
    """A chunk that is being read from a lower tier into a buffer."""

    buffer: LoadBuffer
    future: Future[Done]


class LoadEnd(NamedTuple):
    """Why a pipeline ended before the end of its run."""

    reason: Reason
    detail: str
    counted: bool  # the tier has counted the miss


class LoadPipeline:
    """Loads one run from one tier: later chunks are read while earlier ones are copied out. Used by
    one thread, once.

    `served` is called with the chunks that have been validated, in order; `committed` are the host
    slots filled.
    """

    def __init__(
        self,
        tier: Tier,
        destination: LoadDestination,
        request: CacheRequest,
        kv: CheckedTransfer | None,
        served: Callable[[int, str], None],
    ) -> None:
        self._tier = tier
        self._destination = destination
        self._kv = kv
        self._served = served
        self._request = request
        self._deadline = request.deadline
        self._done = 0
        self._end: LoadEnd | None = None
        # kept until their buffers are settled or released
        self._flights: deque[_LoadInFlight] = deque()
        self.committed: list[Reserved] = []

    def run(self, begin: int, stop: int) -> LoadEnd | None:
        """Load chunks [begin, stop) of the request, in order, as far as there are buffers.

        Returns why a chunk that was being read did not arrive, None if all did. Keeps no buffer: a
        buffer into which the tier is still reading is settled when its I/O has ended.
        """
        self._done = asked = begin
        more = True
        most = self._destination.most
        flights = self._flights
        with self._destination.writer:
            try:
                while self._end is None:
                    if more and asked < stop and len(flights) <= most // 2:
                        begun = len(flights)
                        self._start_loads(asked, min(stop, asked + most - begun))
                        more = len(flights) > begun
                        asked = asked + len(flights) - begun
                    if not flights or not self._wait_for_next():
                        break
            finally:
                for flight in flights:
                    _settle_later(self._destination, flight)
        return self._end

    def _start_loads(self, begin: int, end: int) -> None:
        """Begin to read a leading part of [begin, end)."""
        may_wait = not self._flights
        buffers = self._destination.reserve(begin, end, may_wait)
        if not buffers:
            if may_wait and isinstance(self._destination, StagingDestination):
                self._stop(
                    Reason.DEADLINE, "no staging buffer was released in time"
                )
            return
        request = self._request
        futures = self._tier.load(
            request.keys[begin : begin + len(buffers)],
            [buffer.payload for buffer in buffers],
            start=request.position_of(begin),
            namespace=request.namespace.root,
            deadline_seconds=self._deadline.remaining(),
        )
        self._flights.extend(
            [_LoadInFlight(*pair) for pair in zip(buffers, futures, strict=True)]
        )

    def _wait_for_next(self) -> bool:
        """Wait for the next chunk and deliver all that have arrived, in order; False: end the run
        here.
        """
        flights = self._flights
        first = self._deadline.wait(flights[0].future)
        if first is None:
            self._stop(
                Reason.DEADLINE, f"{self._tier.name} did not deliver in time"
            )
            return False
        if not first.ok:
            self._destination.settle(flights[0].buffer, False)
            flights.popleft()
            self._stop(
                first.reason or Reason.IO_ERROR,
                f"{self._tier.name} could not deliver",
                counted=True,
            )
            return False
        most = max(1, _ARRIVED_BYTES // self._tier.chunk_bytes)
        arrived: list[LoadBuffer] = []
        for flight in islice(flights, most):
            if not (flight.future.done() and end_of(flight.future).ok):
                break
            arrived.append(flight.buffer)
        return self._deliver(arrived)

    def _deliver(self, arrived: Sequence[LoadBuffer]) -> bool:
        """Commit, copy out, validate. After an exception `run` settles the buffers, which may not
        be committed.
        """
        good = self._destination.commit(arrived)
        self.committed += reserved_in(arrived)
        if self._kv is not None and good:
            starts = self._request.starts(self._done, self._done + good)
            self._kv.from_slots(
                starts, [buffer.payload for buffer in arrived[:good]]
            )
            good = self._destination.count_valid(arrived[:good])
        self._done += good
        self._served(good, self._tier.name)
        self._destination.release(arrived)
        for _ in arrived:
            self._flights.popleft()
        return good == len(arrived)

    def _stop(self, reason: Reason, detail: str, counted: bool = False) -> None:
        self._end = LoadEnd(reason, detail, counted)


def _settle_later(destination: LoadDestination, flight: _LoadInFlight) -> None:
    """Settle the buffer when its I/O has really ended: now, or later on the tier's thread. May be
    called again.
    """
    flight.future.add_done_callback(
        lambda future: destination.settle(flight.buffer, end_of(future).ok)
    )
