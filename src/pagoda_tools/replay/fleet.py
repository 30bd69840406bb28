"""A fleet: machines with local tiers above one shared remote tier, simulated by the policies' own
code.

Requests are served one after the other, in the order of the trace. Chunks that a machine has
computed are found by all others at once, and no two machines compute the same chunk at the same
time. The time for loading is ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pagoda.cache.request_trace import Request
from pagoda.tiers.remote.leading_run import EXACT_REQUESTS, leading_run
from pagoda.tiers.remote.object_store import BELIEVED_SECONDS
from pagoda_tools.replay.simulate import Simulation, TierOutcome, TierSpec
from pagoda_tools.replay.simulated_tier import SecondSightTier, SimulatedTier

ROUTES = ("round-robin", "prefix")
WRITE_POLICIES = ("write_through", "second_sight")
_MINUTE_MS = 60_000


class FleetSpec(NamedTuple):
    """A number of machines, each with these tiers (the first is asked first), above one remote
    tier.

    `route`: how requests are routed. "round-robin": to the next machine in turn. "prefix": to the
    machine that had the longest known prefix last, if that is at least half of the prompt; else the
    next in turn. `write_policy`: that of the remote tier.
    """

    machines: int
    own: Sequence[TierSpec]
    remote: TierSpec
    route: str = ROUTES[0]
    write_policy: str = WRITE_POLICIES[0]


class Traffic(NamedTuple):
    """Chunks that a link carried from the store and to it, and both together in the busiest
    minute.
    """

    read: float
    written: float
    busiest_minute: float


class StoreRequests(NamedTuple):
    """The requests that an object store would have got. `look_heads`: those of lookups only."""

    look_heads: int
    heads: int
    gets: int
    puts: int


class FleetOutcome(NamedTuple):
    """The results of the tiers (the local ones of all machines together), and the traffic on the
    network.

    `machine`: the mean of all machines; `busiest`: the machine that moved most. `lookups`: how
    often the store was asked for a prompt, in total and in the busiest minute. `kept`: chunks in
    the remote tier at the end.
    """

    requests: int
    accesses: int
    seconds: float
    tiers: tuple[TierOutcome, ...]
    store: Traffic
    machine: Traffic
    busiest: Traffic
    lookups: int
    busiest_minute_lookups: int
    asked: StoreRequests
    kept: int

    @property
    def hit_rate(self) -> float:
        """Served chunks as a share of the chunks that were asked for."""
        if not self.accesses:
            return 0.0
        return sum(tier.hits for tier in self.tiers) / self.accesses


def simulate_fleet(requests: Iterable[Request], spec: FleetSpec) -> FleetOutcome:
    """Simulate all requests.

    Raises ValueError for an unknown policy or route, no machine, or a tier without room.
    """
    fleet = _Fleet(spec)
    for request in requests:
        fleet.request(request)
    return fleet.outcome()


class _Router:
    """Chooses the machine for a request."""

    def __init__(self, machines: int, route: str) -> None:
        if machines < 1:
            raise ValueError(f"a fleet has at least one machine, not {machines}")
        if route not in ROUTES:
            raise ValueError(
                f"requests are routed by {' or '.join(ROUTES)}, not {route}"
            )
        self._machines = machines
        self._by_prefix = route == "prefix"
        self._next = 0
        self._latest: dict[int, int] = {}  # which machine had a chunk last

    def machine(self, ids: Sequence[int]) -> int:
        """Choose a machine for a prompt."""
        if self._by_prefix:
            half = ids[(len(ids) - 1) // 2 :]
            known = (
                self._latest[chunk]
                for chunk in reversed(half)
                if chunk in self._latest
            )
            chosen = next(known, None)
            chosen = self._in_turn() if chosen is None else chosen
            self._latest.update(dict.fromkeys(ids, chosen))
            return chosen
        return self._in_turn()

    def _in_turn(self) -> int:
        self._next += 1
        return (self._next - 1) % self._machines


class _Link:
    """Counts the chunks that went over one link."""

    def __init__(self) -> None:
        self.read = self.written = 0
        self._minutes: Counter[int] = Counter()

    def add(self, minute: int, read: int, written: int) -> None:
        self.read += read
        self.written += written
        self._minutes[minute] += read + written

    def traffic(self) -> Traffic:
        return Traffic(
            self.read, self.written, max(self._minutes.values(), default=0)
        )


class _Machine:
    """One machine: its tiers, its link, and when it last knew that the store has a chunk (ms)."""

    def __init__(
        self, spec: FleetSpec, remote: SimulatedTier, begin_ms: float
    ) -> None:
        self.simulation = Simulation(
            spec.own, below=(spec.remote, remote), begin_ms=begin_ms
        )
        self.link = _Link()
        self.known: dict[int, float] = {}


class _Fleet:
    """The state of one pass."""

    def __init__(self, spec: FleetSpec) -> None:
        self._spec = spec
        self._router = _Router(spec.machines, spec.route)
        if spec.write_policy not in WRITE_POLICIES:
            raise ValueError(
                f"writes are {' or '.join(WRITE_POLICIES)}, not {spec.write_policy}"
            )
        kind = (
            SimulatedTier
            if spec.write_policy == WRITE_POLICIES[0]
            else SecondSightTier
        )
        self._remote = kind(spec.remote.chunks, spec.remote.policy)
        self._machines: list[_Machine] = []
        self._store = _Link()
        self._asked: Counter[str] = Counter()
        self._lookups: Counter[int] = Counter()  # by minute
        self._begin_ms = self._end_ms = 0.0

    def request(self, request: Request) -> None:
        """Simulate one request on the machine that gets it."""
        if not self._machines:
            self._begin_ms = request.timestamp_ms
            self._machines = [
                _Machine(self._spec, self._remote, self._begin_ms)
                for _ in range(self._spec.machines)
            ]
        self._end_ms = request.timestamp_ms
        machine = self._machines[self._router.machine(request.hash_ids)]
        before = self._remote.written
        served = machine.simulation.request(request)
        written = self._remote.written - before
        minute = int((request.timestamp_ms - self._begin_ms) // _MINUTE_MS)
        for link in (machine.link, self._store):
            link.add(minute, served[-1], written)
        self._count(
            machine, request, sum(served[:-1]), served[-1], written, minute
        )

    def _count(
        self,
        machine: _Machine,
        request: Request,
        own: int,
        loaded: int,
        written: int,
        minute: int,
    ) -> None:
        """Count the requests to the store, as a remote tier over an object store makes them."""
        now = request.timestamp_ms
        ids = request.hash_ids
        if own < len(ids):
            self._lookups[minute] += 1

            def ask(positions: Sequence[int]) -> list[bool]:
                self._asked["look_heads"] += len(positions)
                return [at < loaded for at in positions]

            leading_run(
                range(len(ids) - own),
                ask,
                probes=EXACT_REQUESTS,
                exact=EXACT_REQUESTS,
            )
        believed = now - 1e3 * BELIEVED_SECONDS
        touched = sum(
            machine.known.get(chunk, -1e3 * BELIEVED_SECONDS) < believed
            for chunk in ids[:own]
        )
        self._asked.update(touches=touched, gets=loaded, puts=written)
        machine.known.update(dict.fromkeys(ids, now))

    def outcome(self) -> FleetOutcome:
        machines = [machine.simulation.outcome() for machine in self._machines]
        own = [
            TierOutcome(
                *spec.told,
                *map(
                    sum,
                    zip(
                        *(found.tiers[at][3:] for found in machines), strict=True
                    ),
                ),
            )
            for at, spec in enumerate(self._spec.own)
        ]
        remote = self._remote
        asked = self._asked
        links = [machine.link.traffic() for machine in self._machines] or [
            Traffic(0, 0, 0)
        ]
        mean = Traffic(
            *(sum(values) / len(links) for values in zip(*links, strict=True))
        )
        return FleetOutcome(
            sum(found.requests for found in machines),
            sum(found.accesses for found in machines),
            (self._end_ms - self._begin_ms) / 1e3,
            (
                *own,
                TierOutcome(
                    *self._spec.remote.told,
                    remote.hits,
                    remote.written,
                    remote.evicted,
                    remote.refused,
                ),
            ),
            self._store.traffic(),
            mean,
            max(links, key=lambda link: link.read + link.written),
            self._lookups.total(),
            max(self._lookups.values(), default=0),
            # before each put, the store is asked for the key
            StoreRequests(
                asked["look_heads"],
                sum(asked[kind] for kind in ("look_heads", "touches", "puts")),
                asked["gets"],
                asked["puts"],
            ),
            len(remote.residents()),
        )
