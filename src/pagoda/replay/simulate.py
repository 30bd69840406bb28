"""Simulated tiers: the policies' own code over columns that no slab belongs to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pagoda.ledger.store_state import FIRST_OFFSET
from pagoda.replay.simulated_tier import Chain, SimulatedTier, marks_of_ids
from pagoda.replay.trace import Request

_BEGIN_NS = FIRST_OFFSET + 1  # recency as in a new store


class TierSpec(NamedTuple):
    """A tier to simulate: so many chunks large, under that policy."""

    name: str
    chunks: int
    policy: str


class TierOutcome(NamedTuple):
    """What a tier did, in chunks: served, took in, threw out, did not let in."""

    name: str
    chunks: int
    policy: str
    hits: int
    chunks_written: int
    evicted: int
    refused: int


class SimulatedOutcome(NamedTuple):
    """What all tiers did together; `accesses`: how many chunks were asked for."""

    requests: int
    accesses: int
    tiers: tuple[TierOutcome, ...]

    @property
    def hits(self) -> int:
        """How many chunks some tier served."""
        return sum(tier.hits for tier in self.tiers)

    @property
    def hit_rate(self) -> float:
        """Share of the chunks that were asked for, and served."""
        return self.hits / self.accesses if self.accesses else 0.0


class ServedRun(NamedTuple):
    """Chunks [begin, end) of one request, which the tier of that index served."""

    tier: int
    begin: int
    end: int


class SimulatedMatch(NamedTuple):
    """What was found of a request, in order, and from where on each tier is to take it in."""

    chain: Chain
    runs: Sequence[ServedRun]
    starts: Sequence[int]
    stamps: Sequence[int]


class Simulation:
    """Tiers, the first asked first. Deterministic; not thread-safe.

    A request is served by its leading run, from tier to tier. What a lower tier has is brought into the first one. Each
    tier below the first is told of the whole request, whichever tier serves it, and is offered all that it lacks,
    whatever the tiers above it take in: it does what it would do alone.
    """

    def __init__(
        self,
        tiers: Sequence[TierSpec],
        *,
        below: tuple[TierSpec, SimulatedTier] | None = None,
        begin_ms: float | None = None,
    ) -> None:
        """ValueError for an unknown policy, or a tier without room.

        `below`: the last tier, if others share it; all of them must begin at the same moment, `begin_ms`, which is
        else that of the first request.
        """
        self._specs = (*tiers, below[0]) if below else tuple(tiers)
        if not self._specs:
            raise ValueError("a simulation needs at least one tier")
        self._tiers = [SimulatedTier(spec.chunks, spec.policy) for spec in tiers]
        self._tiers += [below[1]] if below else []
        self._requests = self._accesses = 0
        self._first_ms = begin_ms
        self._now = _BEGIN_NS

    def request(self, request: Request) -> tuple[int, ...]:
        """Look a prompt up and store it; returns how many of its leading chunks each tier served."""
        found = self.look(request)
        self.store(found)
        served = [0] * len(self._tiers)
        for run in found.runs:
            served[run.tier] += run.end - run.begin
        return tuple(served)

    def look(self, request: Request) -> SimulatedMatch:
        """Find the leading run of a prompt, at the moment of its timestamp. Changes recency and counts."""
        ids: Sequence[int] = request.hash_ids
        self._requests += 1
        self._accesses += len(ids)
        if len(set(ids)) < len(ids):  # not what a chained hash can give; the first of each counts
            ids = tuple(dict.fromkeys(ids))
        chain = Chain(ids, marks_of_ids(ids), self._tick(request.timestamp_ms))
        for tier in self._tiers:
            tier.upkeep(chain.now)
        stamps = [tier.stamp(chain.now) for tier in self._tiers]
        runs = self._runs(chain, stamps)
        return SimulatedMatch(chain, runs, self._starts(chain, runs), stamps)

    def _starts(self, chain: Chain, runs: Sequence[ServedRun]) -> list[int]:
        """From where on each tier is offered chunks: the first behind what it served, the others what they lack."""
        total, end = len(chain.ids), runs[-1].end if runs else 0
        first = next((run.begin for run in runs if run.tier > 0), end)
        return [first, *(next(iter(tier.absent(chain, 0, total)), total) for tier in self._tiers[1:])]

    def look_again(self, found: SimulatedMatch, timestamp_ms: float) -> SimulatedMatch:
        """See what is to be stored later, when the engine has all of the prompt and others may have stored some."""
        chain = found.chain._replace(now=self._tick(timestamp_ms))
        stamps = [tier.stamp(chain.now) for tier in self._tiers]
        begins = [0, *found.starts[1:]]
        starts = [
            begin + tier.match(chain, begin, stamp, asked=False)
            for tier, begin, stamp in zip(self._tiers, begins, stamps, strict=True)
        ]
        return found._replace(chain=chain, starts=starts, stamps=stamps)

    def store(self, found: SimulatedMatch, most: Sequence[int] | None = None) -> list[tuple[int, int]]:
        """Bring each tier what it lacks, leading chunks first; no more than `most` chunks into each.

        Returns for each tier how many chunks were written into it, and how many were dropped because of `most`.
        What of a prompt the tier above has no room for comes on top: the store waits until it has passed.
        """
        chain, stored, above = found.chain, list[tuple[int, int]](), math.inf
        for at, tier in enumerate(self._tiers):
            start, end, dropped, before = found.starts[at], len(chain.ids), 0, tier.written
            if most is not None:
                new = tier.absent(chain, start, end)
                room = most[at] + int(max(0, len(new) - above))
                dropped = max(0, len(new) - room)
                end = new[room] if dropped else end
            tier.store(chain, start, end, found.stamps[at])
            stored.append((tier.written - before, dropped))
            above = self._specs[at].chunks
        return stored

    def outcome(self) -> SimulatedOutcome:
        """What came of all requests so far."""
        tiers = (
            TierOutcome(*spec, tier.hits, tier.written, tier.evicted, tier.refused)
            for spec, tier in zip(self._specs, self._tiers, strict=True)
        )
        return SimulatedOutcome(self._requests, self._accesses, tuple(tiers))

    def _tick(self, timestamp_ms: float) -> int:
        """The moment of a request, in ns; time does not go back."""
        if self._first_ms is None:
            self._first_ms = timestamp_ms
        self._now = max(self._now, _BEGIN_NS + int((timestamp_ms - self._first_ms) * 1e6))
        return self._now

    def _runs(self, chain: Chain, stamps: Sequence[int]) -> list[ServedRun]:
        """The leading run, from tier to tier, until none has the next chunk; the tiers below are told of it."""
        runs: list[ServedRun] = []
        end, lacking = 0, 0  # so many tiers in a row are known not to have the next chunk
        while end < len(chain.ids) and lacking < len(self._tiers):
            for at, tier in enumerate(self._tiers):
                count = tier.match(chain, end, stamps[at]) if lacking < len(self._tiers) else 0
                lacking = 1 if count else lacking + 1
                if count:
                    runs.append(ServedRun(at, end, end + count))
                    end += count
        for run in runs:
            for at in range(run.tier + 1, len(self._tiers)):
                self._tiers[at].touch(chain, run.begin, run.end, stamps[at])
        return runs


def simulate(requests: Iterable[Request], tiers: Sequence[TierSpec]) -> SimulatedOutcome:
    """Play all requests."""
    simulation = Simulation(tiers)
    for request in requests:
        simulation.request(request)
    return simulation.outcome()
