"""Replay with time: busy engines, chunks that are absent until they are computed, tiers that move
bytes.

A request waits for the first free engine. Chunks that are found at that time are loaded, the rest
is computed, and other requests can find the computed chunks only when that has ended. A tier moves
its loads one after the other at its bandwidth, and waiting writes in between. Chunks that wait in a
slot of the tier above may be evicted there before they are written; chunks that do not fit into the
queue are dropped, tail first. Chunks without a slot above (and all chunks, without a tier above)
pass through buffers, for which the store waits. Decoding is not simulated: give as prefill speed
what the engine has left beside it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from pagoda.cache.request_trace import Request
from pagoda_tools.replay.simulate import (
    SimulatedMatch,
    SimulatedOutcome,
    Simulation,
    TierSpec,
)

_PLENTY = 1 << 40


class Engines(NamedTuple):
    """Engines that share the tiers: each computes one prompt at a time, at a given number of tokens
    per second.
    """

    prefill_tokens_per_second: float
    token_bytes: int
    engines: int = 1


class TimedTier(NamedTuple):
    """A tier with a bandwidth, and how many chunks may wait to be written into it.

    None: as many as the tier above can hold; without a tier above, any number.
    """

    spec: TierSpec
    bytes_per_second: float
    queue_chunks: int | None = None


class Seconds(NamedTuple):
    """How long prompts waited for their first token."""

    median: float
    p90: float


class TimedOutcome(NamedTuple):
    """The results with the cache, and the waiting time without one.

    `busy`: the share of time in which the engines computed or waited for a load. Chunks in a tier
    from which loading takes longer than computing are computed.
    """

    found: SimulatedOutcome
    # by tier: chunks that were found and loaded, not computed
    loaded: tuple[int, ...]
    dropped_writes: tuple[int, ...]  # by tier: chunks whose writes were dropped
    ttft: Seconds
    busy: float
    cold_ttft: Seconds
    cold_busy: float

    @property
    def hit_rate(self) -> float:
        """Loaded chunks as a share of the chunks that were asked for."""
        return (
            sum(self.loaded) / self.found.accesses if self.found.accesses else 0.0
        )


def replay_timed(
    requests: Iterable[Request], tiers: Sequence[TimedTier], engines: Engines
) -> TimedOutcome:
    """Simulate all requests in the time of the trace.

    Raises ValueError for engines or tiers without speed, or wrong tiers (see Simulation).
    """
    run = _TimedRun(tiers, engines)
    for request in requests:
        run.request(request)
    return run.outcome()


class _Channel:
    """The channel of one tier: it moves loads first, one after the other, and writes when there is
    nothing to load.
    """

    def __init__(self, bytes_per_second: float, queue_chunks: float) -> None:
        self._speed = bytes_per_second
        self._most = queue_chunks
        self._now = self._loads_until = 0.0
        # `_to_write`: bytes, and whether they take room in the queue; `_waiting`: the bytes that do
        self._to_write: deque[tuple[float, bool]] = deque()
        self._waiting = 0.0

    def load(self, now: float, nbytes: int) -> float:
        """Return when a load that begins now will be complete."""
        self._advance(now)
        self._loads_until = max(self._loads_until, now) + nbytes / self._speed
        return self._loads_until

    def room(self, now: float, chunk_bytes: int) -> int:
        """Return how many chunks of that size may be added to the queue."""
        self._advance(now)
        return int(
            min(
                max(0.0, self._most - math.ceil(self._waiting / chunk_bytes)),
                _PLENTY,
            )
        )

    def write(self, waiting: int, passing: int) -> None:
        """Add bytes to the queue: those that take room in it, then those that a store waits for."""
        self._to_write += ((waiting, True), (passing, False))
        self._waiting += waiting

    def _advance(self, now: float) -> None:
        idle = max(0.0, now - max(self._now, self._loads_until)) * self._speed
        while self._to_write and idle > 0:
            nbytes, waits = self._to_write.popleft()
            written = min(nbytes, idle)
            idle -= written
            self._waiting -= written if waits else 0.0
            if written < nbytes:
                self._to_write.appendleft((nbytes - written, waits))
        self._waiting = self._waiting if self._to_write else 0.0
        self._now = max(self._now, now)


class _Servers:
    """Engines that take the requests in the order of arrival."""

    def __init__(self, count: int) -> None:
        self._free = [0.0] * count
        self._busy = self._end = 0.0
        self._begin = math.inf
        self.waits: list[float] = []

    def start(self, arrival: float) -> float:
        """Return when the next request, which arrives at `arrival`, is started. Call `finish` after
        it.
        """
        return max(arrival, self._free[0])

    def finish(self, arrival: float, start: float, end: float) -> None:
        heapq.heapreplace(self._free, end)
        self._begin = min(self._begin, arrival)
        self._end = max(self._end, end)
        self._busy += end - start
        self.waits.append(end - arrival)

    def busy(self) -> float:
        """The share of time in which the engines were busy."""
        span = (self._end - self._begin) * len(self._free)
        return self._busy / span if span > 0 else 0.0

    def seconds(self) -> Seconds:
        median, p90 = (
            np.percentile(self.waits, (50, 90)).tolist()
            if self.waits
            else (0.0, 0.0)
        )
        return Seconds(median, p90)


class _TimedRun:
    """The state of one pass."""

    def __init__(self, tiers: Sequence[TimedTier], engines: Engines) -> None:
        if min(*engines) <= 0:
            raise ValueError(
                f"engines need a speed, bytes per token and a number above 0, not {engines}"
            )
        for tier in tiers:
            if tier.bytes_per_second <= 0 or (tier.queue_chunks or 0) < 0:
                raise ValueError(
                    f"a tier needs a bandwidth above 0 and no negative queue, not {tier}"
                )
        self._engines = engines
        self._tiers = tiers
        self._simulation = Simulation([tier.spec for tier in tiers])
        above = [math.inf, *(tier.spec.chunks for tier in tiers)]
        self._channels = [
            _Channel(
                tier.bytes_per_second,
                most if tier.queue_chunks is None else tier.queue_chunks,
            )
            for tier, most in zip(tiers, above, strict=False)
        ]
        self._servers = _Servers(engines.engines)
        self._cold = _Servers(engines.engines)
        # until when, which, what, bytes of a chunk
        self._computing: list[tuple[float, int, SimulatedMatch, int]] = []
        self._loaded = [0] * len(tiers)
        self._dropped = [0] * len(tiers)

    def request(self, request: Request) -> None:
        """Simulate one request, after the ends of those that were computed before it starts."""
        arrival = request.timestamp_ms / 1e3
        speed = self._engines.prefill_tokens_per_second
        cold_start = self._cold.start(arrival)
        self._cold.finish(
            arrival, cold_start, cold_start + request.input_length / speed
        )
        start = self._servers.start(arrival)
        self._store_until(start)
        found = self._simulation.look(replace(request, timestamp_ms=start * 1e3))
        chunk_bytes = request.chunk_tokens * self._engines.token_bytes
        loaded_at, chunks = self._load(
            found, start, chunk_bytes, request.chunk_tokens / speed
        )
        tokens = max(
            min(1, request.input_length),
            request.input_length - chunks * request.chunk_tokens,
        )
        end = loaded_at + tokens / speed
        self._servers.finish(arrival, start, end)
        heapq.heappush(
            self._computing, (end, len(self._servers.waits), found, chunk_bytes)
        )

    def outcome(self) -> TimedOutcome:
        self._store_until(math.inf)
        return TimedOutcome(
            self._simulation.outcome(), tuple(self._loaded), tuple(self._dropped),
            self._servers.seconds(), self._servers.busy(), self._cold.seconds(), self._cold.busy(),
        )  # fmt: skip

    def _load(
        self,
        found: SimulatedMatch,
        start: float,
        chunk_bytes: int,
        chunk_seconds: float,
    ) -> tuple[float, int]:
        """Load the found chunks up to the first that is computed faster; return when that is done,
        and their number.
        """
        until = start
        end = 0
        for run in found.runs:
            if (
                chunk_bytes / self._tiers[run.tier].bytes_per_second
                > chunk_seconds
            ):
                break
            end = run.end
            self._loaded[run.tier] += run.end - run.begin
            until = max(
                until,
                self._channels[run.tier].load(
                    start, (run.end - run.begin) * chunk_bytes
                ),
            )
        return until, end

    def _store_until(self, now: float) -> None:
        """Store the chunks that have been computed by now."""
        while self._computing and self._computing[0][0] <= now:
            end, _, found, chunk_bytes = heapq.heappop(self._computing)
            rooms = [channel.room(end, chunk_bytes) for channel in self._channels]
            done = self._simulation.store(
                self._simulation.look_again(found, end * 1e3), rooms
            )
            for at, (written, dropped) in enumerate(done):
                waiting = min(written, rooms[at])
                self._channels[at].write(
                    waiting * chunk_bytes, (written - waiting) * chunk_bytes
                )
                self._dropped[at] += dropped
