"""What a cache of another size or policy would have done with recorded requests, with the policies' own code."""

from __future__ import annotations

from pagoda.replay.load import Engines, LoadedOutcome, LoadedTier, Seconds, replay_with_load
from pagoda.replay.optimum import infinite, optimum
from pagoda.replay.simulate import Outcome, Simulation, TierOutcome, TierSpec, simulate
from pagoda.replay.trace import Request, format_request, read_trace

__all__ = [
    "Engines",
    "LoadedOutcome",
    "LoadedTier",
    "Outcome",
    "Request",
    "Seconds",
    "Simulation",
    "TierOutcome",
    "TierSpec",
    "format_request",
    "infinite",
    "optimum",
    "read_trace",
    "replay_with_load",
    "simulate",
]
