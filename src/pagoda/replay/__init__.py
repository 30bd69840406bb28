"""What a cache of another size or policy would have done with recorded requests, with the policies' own code.

trace           recorded requests
simulate        tiers of one trace, by the policies' own code
simulated_tier  one of them
timed_replay    with time: engines that are busy, tiers that move bytes
optimum         what no cache can do better
"""

from __future__ import annotations

from pagoda.replay.optimum import infinite, optimum
from pagoda.replay.simulate import SimulatedOutcome, Simulation, TierOutcome, TierSpec, simulate
from pagoda.replay.timed_replay import Engines, Seconds, TimedOutcome, TimedTier, replay_timed
from pagoda.replay.trace import Request, format_request, read_trace

__all__ = [
    "Engines",
    "Request",
    "Seconds",
    "SimulatedOutcome",
    "Simulation",
    "TierOutcome",
    "TierSpec",
    "TimedOutcome",
    "TimedTier",
    "format_request",
    "infinite",
    "optimum",
    "read_trace",
    "replay_timed",
    "simulate",
]
