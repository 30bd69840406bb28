"""Simulates what a cache of another size or policy would have done with recorded requests, by the
policies' own code. `pagoda.cache.request_trace` reads and writes the requests.

simulate        simulates the tiers of one cache on a trace
simulated_tier  one simulated tier
exact_lru       the same for `lru` by a dictionary, where that has the same figures
timed_replay    the same with time: busy engines, tiers with a bandwidth
fleet           machines that share a remote tier
optimum         upper bounds for any cache
"""

from __future__ import annotations

from pagoda.cache.request_trace import Request, format_request, read_trace
from pagoda_tools.replay.fleet import (
    ROUTES,
    WRITE_POLICIES,
    FleetOutcome,
    FleetSpec,
    Traffic,
    simulate_fleet,
)
from pagoda_tools.replay.optimum import infinite, optimum
from pagoda_tools.replay.simulate import (
    SimulatedOutcome,
    Simulation,
    TierOutcome,
    TierSpec,
    simulate,
)
from pagoda_tools.replay.timed_replay import (
    Engines,
    TimedOutcome,
    TimedTier,
    replay_timed,
)

__all__ = [
    "ROUTES",
    "WRITE_POLICIES",
    "Engines",
    "FleetOutcome",
    "FleetSpec",
    "Request",
    "SimulatedOutcome",
    "Simulation",
    "TierOutcome",
    "TierSpec",
    "TimedOutcome",
    "TimedTier",
    "Traffic",
    "format_request",
    "infinite",
    "optimum",
    "read_trace",
    "replay_timed",
    "simulate",
    "simulate_fleet",
]
