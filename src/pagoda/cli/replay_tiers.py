"""Host and disk together: what each would serve of recorded requests and take in, and how long prompts would wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pagoda.cli import UsageError, printing
from pagoda.cli.replay_inputs import Cell, Trace, best

if TYPE_CHECKING:
    from pagoda.cli.load_speeds import Speeds
    from pagoda.replay import Request, SimulatedOutcome, TierSpec
    from pagoda.replay.timed_replay import TimedOutcome

_BUSY = 0.7  # the share of time that engines compute if their number is not given


class ReplayedTiers(NamedTuple):
    """What a policy made of the trace with these tiers; seconds are those to the first token, as `_summary` has them.

    They are empty if the speed of prefill is not known.
    """

    policy: str
    outcome: SimulatedOutcome
    saved_tokens: int
    cold_seconds: dict[str, float]
    seconds: dict[str, float]


def tiered(
    requests: Sequence[Request], specs: Sequence[TierSpec], chunk_bytes: int, speeds: Speeds
) -> ReplayedTiers:
    """Simulate tiers below each other and say how long each prompt takes when nothing else is going on.

    As in the cache itself (`worth_it`), what would load more slowly than it is computed is computed.
    """
    from pagoda.replay import Simulation

    simulation = Simulation(specs)
    load = [speeds.load_seconds(spec.name, chunk_bytes) for spec in specs]
    saved, cold, seconds = 0, [], []
    for request in requests:
        chunk_seconds = request.chunk_tokens / speeds.prefill if speeds.prefill else math.inf
        served = simulation.request(request)
        loaded = [chunks if each <= chunk_seconds else 0 for chunks, each in zip(served, load, strict=True)]
        tokens = min(sum(loaded) * request.chunk_tokens, request.input_length)
        saved += tokens
        if speeds.prefill:
            loading = sum(chunks * each for chunks, each in zip(loaded, load, strict=True))
            cold.append(request.input_length / speeds.prefill)
            seconds.append((request.input_length - tokens) / speeds.prefill + loading)
    return ReplayedTiers(specs[0].policy, simulation.outcome(), saved, _summary(cold), _summary(seconds))


def loaded(
    requests: Sequence[Request], specs: Sequence[TierSpec], chunk_bytes: int, speeds: Speeds, engines: int
) -> TimedOutcome:
    """Replay in the time of the trace: prompts wait for engines, loads for loads, and writes have a bounded queue."""
    from pagoda.replay.timed_replay import Engines, TimedTier, replay_timed

    assert speeds.prefill is not None
    tiers = [TimedTier(spec, 1e9 * speeds.gbps(spec.name)) for spec in specs]
    token_bytes = -(-chunk_bytes // requests[0].chunk_tokens)
    return replay_timed(requests, tiers, Engines(speeds.prefill, token_bytes, engines))


def specs_of(trace: Trace, sizes: dict[str, int], chunk_bytes: int, policy: str) -> list[TierSpec]:
    """Return the tiers to simulate. Raises UsageError for one that has no room for a chunk."""
    from pagoda.replay import TierSpec

    for name, size in sizes.items():
        if size < chunk_bytes:
            raise UsageError(f"--{name} {printing.size(size)}: a chunk has {printing.size(chunk_bytes)}")
    return [TierSpec(name, trace.room(size // chunk_bytes), policy) for name, size in sizes.items()]


def engines_for(trace: Trace, prefill: float) -> int:
    """Return how many engines of that speed have to compute the trace without a cache for a share of the time only."""
    if trace.seconds <= 0:
        return 1
    return max(1, math.ceil(trace.input_tokens / prefill / trace.seconds / _BUSY))


class ReplayPlan(NamedTuple):
    """What is simulated: tiers by name, their bytes, and those of a chunk; `engines` 0: time is not looked at."""

    trace: Trace
    sizes: dict[str, int]
    chunk_bytes: int
    speeds: Speeds
    engines: int


class ReplayResult(NamedTuple):
    """What a policy made of a plan: with every prompt by itself, and with engines in the time of the trace."""

    alone: ReplayedTiers
    load: TimedOutcome | None
    optimum: float


def results(plan: ReplayPlan, policies: Sequence[str], jobs: int | None, quiet: bool) -> list[ReplayResult]:
    """Simulate the tiers under each policy."""
    from pagoda.cli.trace_pool import TraceJob, TracePool

    trace, chunk_bytes, speeds = plan.trace, plan.chunk_bytes, plan.speeds
    specs = [specs_of(trace, plan.sizes, chunk_bytes, policy) for policy in policies]
    room = trace.room(sum(size // chunk_bytes for size in plan.sizes.values()))
    work: list[TraceJob[ReplayedTiers | TimedOutcome | Cell]] = []
    work += [TraceJob(tiered, (tiers, chunk_bytes, speeds)) for tiers in specs]
    if plan.engines:
        work += [TraceJob(loaded, (tiers, chunk_bytes, speeds, plan.engines), 1.3) for tiers in specs]
    work.append(TraceJob(best, (room,), 0.2))
    with TracePool(trace.requests, jobs, quiet) as pool:
        found = pool.run(work, f"replaying {trace.name}")
    alone = [one for one in found if isinstance(one, ReplayedTiers)]
    load: list[TimedOutcome | None] = [one for one in found if not isinstance(one, ReplayedTiers | Cell)]
    load = load or [None] * len(alone)
    (bound,) = [one.hit_rate for one in found if isinstance(one, Cell)]
    return [ReplayResult(one, with_load, bound) for one, with_load in zip(alone, load, strict=True)]


def as_json(plan: ReplayPlan, found: Sequence[ReplayResult]) -> dict[str, object]:
    """Return all results as "runs"; if there is but one, its keys stand beside the trace's as well."""
    runs = [_as_json(plan, result) for result in found]
    return {
        **plan.trace.as_json(),
        "chunk_bytes": plan.chunk_bytes,
        "speeds": plan.speeds._asdict(),
        **(runs[0] if len(runs) == 1 else {}),
        "runs": runs,
    }


def _as_json(plan: ReplayPlan, result: ReplayResult) -> dict[str, object]:
    run, trace = result.alone, plan.trace
    tiers = [
        {
            "tier": tier.name,
            "capacity_bytes": plan.sizes[tier.name],
            "capacity_chunks": plan.sizes[tier.name] // plan.chunk_bytes,
            "hit_rate": tier.hits / trace.accesses,
            "chunks_written": tier.chunks_written,
            "bytes_written": tier.chunks_written * plan.chunk_bytes,
        }
        for tier in run.outcome.tiers
    ]
    found = {
        "policy": run.policy,
        "hit_rate": run.outcome.hit_rate,
        "chunks_written": sum(tier.chunks_written for tier in run.outcome.tiers),
        "optimum": result.optimum,
        "tiers": tiers,
        "input_tokens": trace.input_tokens,
        "prefill_tokens_saved": run.saved_tokens,
    }
    if run.seconds:
        found |= {"ttft_seconds": run.seconds, "ttft_seconds_cold": run.cold_seconds}
    if result.load is not None:
        found["load"] = _load_as_json(plan, result.load)
    return found


def _load_as_json(plan: ReplayPlan, load: TimedOutcome) -> dict[str, object]:
    return {
        "engines": plan.engines,
        "hit_rate": load.hit_rate,
        "hit_rates": {
            name: count / plan.trace.accesses for name, count in zip(plan.sizes, load.loaded, strict=True)
        },
        "dropped_writes": dict(zip(plan.sizes, load.dropped_writes, strict=True)),
        "ttft_seconds": {"p50": load.ttft.median, "p90": load.ttft.p90},
        "ttft_seconds_cold": {"p50": load.cold_ttft.median, "p90": load.cold_ttft.p90},
        "busy": load.busy,
        "busy_cold": load.cold_busy,
    }


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return the mean and some percentiles."""
    import numpy as np

    if not seconds:
        return {}
    found = dict(zip(("p50", "p90", "p99"), np.percentile(seconds, (50, 90, 99)).tolist(), strict=True))
    return {"mean": float(np.mean(seconds)), **found}
