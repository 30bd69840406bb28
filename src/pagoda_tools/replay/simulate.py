"""Simulated tiers: the policies' own code over columns without a slab."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from msgspec import UNSET

from pagoda.cache.caller_hints import MOST_SECONDS
from pagoda.cache.request_trace import Request
from pagoda.ledger.ghost_table import Marks
from pagoda.ledger.store_state import FIRST_OFFSET
from pagoda.policy.prefill_cost import PrefillCost
from pagoda.policy.request_hints import SHARED, RequestHint
from pagoda.policy.reuse_context import Ending, workload_of
from pagoda_tools.replay.exact_lru import LruTier, NotExactError
from pagoda_tools.replay.simulated_tier import Chain, SimulatedTier, marks_of_ids

# the stop reasons of servers: of Anthropic's API, and of OpenAI's
_ENDINGS = {
    "tool_use": Ending.TOOL_CALL,
    "tool_calls": Ending.TOOL_CALL,
    "end_turn": Ending.TURN,
    "stop": Ending.TURN,
}
_BEGIN_NS = FIRST_OFFSET + 1  # recency as in a new store


class TierSpec(NamedTuple):
    """A tier to simulate: its size in chunks, its policy, and what that counts (None: chunks)."""

    name: str
    chunks: int
    policy: str
    cost: PrefillCost | None = None

    @property
    def told(self) -> tuple[str, int, str]:
        """What a `TierOutcome` takes over."""
        return self.name, self.chunks, self.policy


class TierOutcome(NamedTuple):
    """The results of a tier, in chunks: served, stored, evicted, not admitted."""

    name: str
    chunks: int
    policy: str
    hits: int
    chunks_written: int
    evicted: int
    refused: int


class SimulatedOutcome(NamedTuple):
    """The results of all tiers together; `accesses`: how many chunks were asked for. `prefill`: the
    cost of computing them (see `prefill_cost`), and `saved`, of those that were served.
    """

    requests: int
    accesses: int
    tiers: tuple[TierOutcome, ...]
    prefill: float = 0.0
    saved: float = 0.0

    @property
    def hits(self) -> int:
        """The number of chunks that any tier served."""
        return sum(tier.hits for tier in self.tiers)

    @property
    def hit_rate(self) -> float:
        """Served chunks as a share of the chunks that were asked for."""
        return self.hits / self.accesses if self.accesses else 0.0

    @property
    def saved_rate(self) -> float:
        """The computation that hits save, as a share of what all prompts take without a cache."""
        return self.saved / self.prefill if self.prefill else 0.0


class _Prefill:
    """Counts what prompts take to compute, and what of it hits save."""

    def __init__(self) -> None:
        self.all = self.saved = 0.0

    def add(self, request: Request, served: int) -> None:
        cost = PrefillCost.of_chunks(request.chunk_tokens)
        self.all += cost.of_prompt(len(request.hash_ids))
        self.saved += cost.of_prompt(served)


class ServedRun(NamedTuple):
    """Chunks [begin, end) of one request, which the tier of that index served."""

    tier: int
    begin: int
    end: int


class SimulatedMatch(NamedTuple):
    """The runs found for a request, in order, and from which chunk on each tier must store it."""

    chain: Chain
    runs: Sequence[ServedRun]
    starts: Sequence[int]
    stamps: Sequence[int]


class Simulation:
    """Simulates tiers, the top one first. Deterministic; not thread-safe.

    A request is served by its leading run, from tier to tier. Chunks of a lower tier are loaded
    into the first tier. Each lower tier sees the whole request, whichever tier serves it, and is
    offered all chunks that it lacks, whatever the tiers above store: so it does what it would do
    alone.
    """

    def __init__(
        self,
        tiers: Sequence[TierSpec],
        *,
        below: tuple[TierSpec, SimulatedTier] | None = None,
        begin_ms: float | None = None,
        with_hints: bool = False,
    ) -> None:
        """Raise ValueError for an unknown policy, or for a tier without room.

        `below`: the last tier, if several simulations share it; all must begin at the same moment
        `begin_ms`, which is otherwise the time of the first request. `with_hints`: the policies see
        sessions and endings of answers, if the trace has them, and whose prompts are alike.
        """
        self._specs = (*tiers, below[0]) if below else tuple(tiers)
        if not self._specs:
            raise ValueError("a simulation needs at least one tier")
        self._with_hints = with_hints
        # the numbers of the agents of each session that is not over
        self._agents: dict[str, set[int]] = {}
        self._tiers = [
            SimulatedTier(spec.chunks, spec.policy, with_hints, spec.cost)
            for spec in tiers
        ]
        self._tiers += [below[1]] if below else []
        self._requests = self._accesses = 0
        self._prefill = _Prefill()
        self._first_ms = begin_ms
        self._now = _BEGIN_NS

    def request(self, request: Request) -> tuple[int, ...]:
        """Look a prompt up and store it; return how many of its leading chunks each tier served."""
        found = self.look(request)
        self.store(found)
        served = [0] * len(self._tiers)
        for run in found.runs:
            served[run.tier] += run.end - run.begin
        return tuple(served)

    def look(self, request: Request) -> SimulatedMatch:
        """Find the leading run of a prompt, at the moment of its timestamp. Changes recency and
        counts.
        """
        ids: Sequence[int] = request.hash_ids
        self._requests += 1
        self._accesses += len(ids)
        # impossible with chained hashes; of equal ids, the first counts
        if len(set(ids)) < len(ids):
            ids = tuple(dict.fromkeys(ids))
        marks = marks_of_ids(ids)
        hint = RequestHint()
        retain_seconds = 0.0
        if self._with_hints:
            hint = self._hint_of(request, marks)
            retain_seconds = min(request.retain_seconds or 0.0, MOST_SECONDS)
        now = self._tick(request.timestamp_ms)
        chain = Chain(ids, marks, now, hint, retain_seconds)
        for tier in self._tiers:
            tier.upkeep(chain.now)
        stamps = [tier.stamp(chain.now) for tier in self._tiers]
        runs = self._runs(chain, stamps)
        self._prefill.add(request, runs[-1].end if runs else 0)
        return SimulatedMatch(chain, runs, self._starts(chain, runs), stamps)

    def _starts(self, chain: Chain, runs: Sequence[ServedRun]) -> list[int]:
        """Return from where on each tier is offered chunks: the first after its run, others after
        what they have.
        """
        total = len(chain.ids)
        end = runs[-1].end if runs else 0
        first = next((run.begin for run in runs if run.tier > 0), end)
        return [
            first,
            *(
                next(iter(tier.absent(chain, 0, total)), total)
                for tier in self._tiers[1:]
            ),
        ]

    def look_again(
        self, found: SimulatedMatch, timestamp_ms: float
    ) -> SimulatedMatch:
        """Find again what must be stored, later, when the engine has computed it; others may have
        stored some.
        """
        chain = found.chain._replace(now=self._tick(timestamp_ms))
        stamps = [tier.stamp(chain.now) for tier in self._tiers]
        begins = [0, *found.starts[1:]]
        starts = [
            begin + tier.match(chain, begin, stamp, asked=False)
            for tier, begin, stamp in zip(
                self._tiers, begins, stamps, strict=True
            )
        ]
        return found._replace(chain=chain, starts=starts, stamps=stamps)

    def store(
        self, found: SimulatedMatch, most: Sequence[int] | None = None
    ) -> list[tuple[int, int]]:
        """Store in each tier the chunks that it lacks, leading chunks first; at most `most` chunks
        in each.

        Returns for each tier how many chunks were written into it, and how many were dropped
        because of `most`. Chunks that have no room in the tier above come in addition: the store
        waits until they are written.
        """
        chain = found.chain
        stored = list[tuple[int, int]]()
        above = math.inf
        for at, tier in enumerate(self._tiers):
            start = found.starts[at]
            end = len(chain.ids)
            dropped = 0
            before = tier.written
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
        """Return the results of all requests so far."""
        tiers = (
            TierOutcome(
                *spec.told,
                tier.hits,
                tier.written,
                tier.evicted,
                tier.refused,
            )
            for spec, tier in zip(self._specs, self._tiers, strict=True)
        )
        return SimulatedOutcome(
            self._requests,
            self._accesses,
            tuple(tiers),
            self._prefill.all,
            self._prefill.saved,
        )

    def _tick(self, timestamp_ms: float) -> int:
        """Return the time of a request in ns; it never decreases."""
        if self._first_ms is None:
            self._first_ms = timestamp_ms
        self._now = max(
            self._now, _BEGIN_NS + int((timestamp_ms - self._first_ms) * 1e6)
        )
        return self._now

    def _hint_of(self, request: Request, marks: Marks) -> RequestHint:
        """Return what a request of a trace says of itself."""
        workload = workload_of(marks)
        stop = str(request.stop)
        drop = request.drop is True
        if request.session is None or request.session is UNSET:
            ending = _ENDINGS.get(stop, Ending.UNKNOWN)
            return RequestHint(workload, ending, drop=drop)
        name = str(request.session)
        # each agent of a session has a conversation of its own
        agent = f"{name}/{request.agent}"
        number = 1 + zlib.crc32(agent.encode()) % (SHARED - 1)
        self._agents.setdefault(name, set()).add(number)
        over: tuple[int, ...] = ()
        if request.last is True:
            over = tuple(sorted(self._agents.pop(name)))
        return RequestHint(
            workload, _ENDINGS.get(stop, Ending.OTHER), number, over, drop
        )

    def _runs(self, chain: Chain, stamps: Sequence[int]) -> list[ServedRun]:
        """Return the leading run, from tier to tier, until no tier has the next chunk; touch it in
        tiers below.
        """
        runs: list[ServedRun] = []
        # `lacking`: the number of tiers in a row that do not have the next chunk
        end = 0
        lacking = 0
        while end < len(chain.ids) and lacking < len(self._tiers):
            for at, tier in enumerate(self._tiers):
                count = (
                    tier.match(chain, end, stamps[at])
                    if lacking < len(self._tiers)
                    else 0
                )
                lacking = 1 if count else lacking + 1
                if count:
                    runs.append(ServedRun(at, end, end + count))
                    end += count
        for run in runs:
            for at in range(run.tier + 1, len(self._tiers)):
                self._tiers[at].touch(chain, run.begin, run.end, stamps[at])
        return runs


def have_hints(requests: Iterable[Request]) -> bool:
    """Whether some of these requests say anything of themselves."""
    return any(
        isinstance(one.session, int | str)
        or isinstance(one.stop, str)
        or one.drop is True
        or bool(one.retain_seconds)
        for one in requests
    )


def simulate(
    requests: Iterable[Request],
    tiers: Sequence[TierSpec],
    *,
    with_hints: bool = False,
) -> SimulatedOutcome:
    """Simulate all requests. `with_hints`: see `Simulation`."""
    return simulate_each(requests, tiers, with_hints=with_hints)[0]


def simulate_each(
    requests: Iterable[Request],
    tiers: Sequence[TierSpec],
    *,
    with_hints: bool = False,
) -> tuple[SimulatedOutcome, list[tuple[int, ...]]]:
    """Simulate all requests; return also how many leading chunks each tier served of each.
    `with_hints`: see `Simulation`.
    """
    if not with_hints and all(tier.policy == "lru" for tier in tiers):
        requests = list(requests)  # they may be simulated twice
        with suppress(NotExactError):
            return _by_dictionaries(requests, tiers)
    simulation = Simulation(tiers, with_hints=with_hints)
    served = [simulation.request(request) for request in requests]
    return simulation.outcome(), served


def _by_dictionaries(
    requests: Sequence[Request], specs: Sequence[TierSpec]
) -> tuple[SimulatedOutcome, list[tuple[int, ...]]]:
    """Do the same for tiers that evict the least recently used chunk.

    Each does what it would do alone, and keeps whole prefixes: so it serves what is beyond the
    longest prefix above it.
    """
    if not specs or min(spec.chunks for spec in specs) < 1:
        raise NotExactError  # `Simulation` says what is wrong
    tiers = [LruTier(spec.chunks) for spec in specs]
    served: list[tuple[int, ...]] = []
    hits = [0] * len(tiers)
    accesses = 0
    prefill = _Prefill()
    for request in requests:
        ids = request.hash_ids
        accesses += len(ids)
        end = 0
        counts = []
        for at, tier in enumerate(tiers):
            count = max(0, tier.request(ids) - end)
            end += count
            hits[at] += count
            counts.append(count)
        served.append(tuple(counts))
        prefill.add(request, end)
    outcomes = (
        TierOutcome(*spec.told, count, tier.written, tier.evicted, tier.refused)
        for spec, count, tier in zip(specs, hits, tiers, strict=True)
    )
    found = SimulatedOutcome(
        len(requests), accesses, tuple(outcomes), prefill.all, prefill.saved
    )
    return found, served
