"""Host and disk together: what each would serve and store with recorded requests, and how long
prompts would wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pagoda.cache.request_trace import Request
from pagoda.policy.prefill_cost import objective_of
from pagoda_tools.cli import UsageError, printing
from pagoda_tools.cli.load_speeds import Speeds
from pagoda_tools.cli.replay_inputs import (
    Cell,
    Trace,
    best,
    named,
    run_name,
    spec_of,
)
from pagoda_tools.cli.trace_pool import TraceJob, TracePool
from pagoda_tools.replay.simulate import (
    SimulatedOutcome,
    TierOutcome,
    TierSpec,
    have_hints,
    simulate_each,
)
from pagoda_tools.replay.timed_replay import (
    Engines,
    TimedOutcome,
    TimedTier,
    replay_timed,
)

# the share of time in which engines compute, if their number is not given
_BUSY = 0.7


class ReplayedTiers(NamedTuple):
    """The results of a policy with these tiers; `seconds` are those to the first token, by
    `_summary`.

    These are empty if the speed of prefill is not known.
    """

    policy: str
    outcome: SimulatedOutcome
    saved_tokens: int
    cold_seconds: dict[str, float]
    seconds: dict[str, float]
    load: TimedOutcome | None = None  # with engines in the time of the trace
    optimum: float = 0.0


def tiered(
    requests: Sequence[Request],
    specs: Sequence[TierSpec],
    chunk_bytes: int,
    speeds: Speeds,
) -> ReplayedTiers:
    """Simulate tiers below each other, and the time of each prompt on an idle engine.

    As in the cache itself (`worth_it`), chunks are computed if loading them takes longer, and the
    policy sees what the requests say of themselves.
    """
    outcome, served_by_tier = simulate_each(
        requests, specs, with_hints=have_hints(requests)
    )
    load = [speeds.load_seconds(spec.name, chunk_bytes) for spec in specs]
    saved = 0
    cold = []
    seconds = []
    for request, served in zip(requests, served_by_tier, strict=True):
        chunk_seconds = (
            request.chunk_tokens / speeds.prefill if speeds.prefill else math.inf
        )
        loaded = [
            chunks if each <= chunk_seconds else 0
            for chunks, each in zip(served, load, strict=True)
        ]
        tokens = min(sum(loaded) * request.chunk_tokens, request.input_length)
        saved += tokens
        if speeds.prefill:
            loading = sum(
                chunks * each for chunks, each in zip(loaded, load, strict=True)
            )
            cold.append(request.input_length / speeds.prefill)
            seconds.append(
                (request.input_length - tokens) / speeds.prefill + loading
            )
    return ReplayedTiers(
        run_name(specs[0].policy, objective_of(specs[0].cost)),
        outcome,
        saved,
        _summary(cold),
        _summary(seconds),
    )


def loaded(
    requests: Sequence[Request],
    specs: Sequence[TierSpec],
    chunk_bytes: int,
    speeds: Speeds,
    engines: int,
) -> TimedOutcome:
    """Replay in the time of the trace: prompts wait for engines, loads wait for loads, the write
    queue is bounded.
    """
    assert speeds.prefill is not None
    tiers = [TimedTier(spec, 1e9 * speeds.gbps(spec.name)) for spec in specs]
    token_bytes = -(-chunk_bytes // requests[0].chunk_tokens)
    return replay_timed(
        requests, tiers, Engines(speeds.prefill, token_bytes, engines)
    )


def specs_of(
    trace: Trace, sizes: dict[str, int], chunk_bytes: int, policy: str
) -> list[TierSpec]:
    """Return the tiers to simulate. Raises UsageError for a tier that is smaller than a chunk."""
    for name, size in sizes.items():
        if size < chunk_bytes:
            raise UsageError(
                f"--{name} {printing.size(size)}: a chunk has {printing.size(chunk_bytes)}"
            )
    return [
        spec_of(name, trace.room(size // chunk_bytes), policy, trace.chunk_tokens)
        for name, size in sizes.items()
    ]


def engines_for(trace: Trace, prefill: float) -> int:
    """Return how many engines of that speed would be busy for the share `_BUSY` of the time,
    without a cache.
    """
    if trace.seconds <= 0:
        return 1
    return max(1, math.ceil(trace.input_tokens / prefill / trace.seconds / _BUSY))


class ReplayPlan(NamedTuple):
    """What is simulated. `sizes`: bytes of the tiers by name; `engines` 0: no time is simulated."""

    trace: Trace
    sizes: dict[str, int]
    chunk_bytes: int
    speeds: Speeds
    engines: int


def show(
    plan: ReplayPlan, policies: Sequence[str], jobs: int | None, as_json: bool
) -> None:
    """Simulate the tiers with each policy, and print the results."""
    found = _results(plan, policies, jobs, as_json)
    if as_json:
        runs = [_as_json(plan, result) for result in found]
        facts = {"chunk_bytes": plan.chunk_bytes, "speeds": plan.speeds._asdict()}
        printing.print_json(plan.trace.report(runs, **facts))
    else:
        _print_results(plan, found)


def _results(
    plan: ReplayPlan, policies: Sequence[str], jobs: int | None, quiet: bool
) -> list[ReplayedTiers]:
    """Simulate the tiers with each policy."""
    trace = plan.trace
    chunk_bytes = plan.chunk_bytes
    speeds = plan.speeds
    specs = [
        specs_of(trace, plan.sizes, chunk_bytes, policy) for policy in policies
    ]
    room = trace.room(sum(size // chunk_bytes for size in plan.sizes.values()))
    work: list[TraceJob[ReplayedTiers | TimedOutcome | Cell]] = []
    work += [TraceJob(tiered, (tiers, chunk_bytes, speeds)) for tiers in specs]
    if plan.engines:
        work += [
            TraceJob(loaded, (tiers, chunk_bytes, speeds, plan.engines), 1.3)
            for tiers in specs
        ]
    work.append(TraceJob(best, (room,), 0.2))
    with TracePool(trace.requests, jobs, quiet) as pool:
        found = pool.run(work, f"replaying {trace.name}")
    alone = [one for one in found if isinstance(one, ReplayedTiers)]
    load: list[TimedOutcome | None] = [
        one for one in found if not isinstance(one, ReplayedTiers | Cell)
    ]
    load = load or [None] * len(alone)
    (bound,) = [one.hit_rate for one in found if isinstance(one, Cell)]
    return [
        one._replace(load=timed, optimum=bound)
        for one, timed in zip(alone, load, strict=True)
    ]


def tiers_as_json(
    tiers: Sequence[TierOutcome],
    sizes: Mapping[str, int],
    chunk_bytes: int,
    accesses: int,
) -> list[dict[str, object]]:
    """Return what each tier served of so many chunks, and stored, as plain values."""
    return [
        {
            "tier": tier.name,
            "policy": tier.policy,
            "capacity_bytes": sizes[tier.name],
            "capacity_chunks": sizes[tier.name] // chunk_bytes,
            "hit_rate": tier.hits / accesses,
            "chunks_written": tier.chunks_written,
            "bytes_written": tier.chunks_written * chunk_bytes,
        }
        for tier in tiers
    ]


def _as_json(plan: ReplayPlan, run: ReplayedTiers) -> dict[str, object]:
    trace = plan.trace
    found = {
        **named(run.policy),
        "hit_rate": run.outcome.hit_rate,
        "prefill_saved": run.outcome.saved_rate,
        "chunks_written": sum(tier.chunks_written for tier in run.outcome.tiers),
        "optimum": run.optimum,
        "tiers": tiers_as_json(
            run.outcome.tiers, plan.sizes, plan.chunk_bytes, trace.accesses
        ),
        "input_tokens": trace.input_tokens,
        "prefill_tokens_saved": run.saved_tokens,
    }
    if run.seconds:
        found |= {
            "ttft_seconds": run.seconds,
            "ttft_seconds_cold": run.cold_seconds,
        }
    if run.load is not None:
        found["load"] = _load_as_json(plan, run.load)
    return found


def _load_as_json(plan: ReplayPlan, load: TimedOutcome) -> dict[str, object]:
    return {
        "engines": plan.engines,
        "hit_rate": load.hit_rate,
        "hit_rates": {
            name: count / plan.trace.accesses
            for name, count in zip(plan.sizes, load.loaded, strict=True)
        },
        "dropped_writes": dict(zip(plan.sizes, load.dropped_writes, strict=True)),
        "ttft_seconds": {"p50": load.ttft.median, "p90": load.ttft.p90},
        "ttft_seconds_cold": {
            "p50": load.cold_ttft.median,
            "p90": load.cold_ttft.p90,
        },
        "busy": load.busy,
        "busy_cold": load.cold_busy,
    }


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return the mean and three percentiles."""
    if not seconds:
        return {}
    found = dict(
        zip(
            ("p50", "p90", "p99"),
            np.percentile(seconds, (50, 90, 99)).tolist(),
            strict=True,
        )
    )
    return {"mean": float(np.mean(seconds)), **found}


def _print_results(plan: ReplayPlan, found: Sequence[ReplayedTiers]) -> None:
    """Print what the tiers serve and store, what that saves, and the assumptions."""
    runs = [(one.policy, one.outcome.tiers, plan.trace.accesses) for one in found]
    print_tiers(plan.trace, plan.sizes, plan.chunk_bytes, runs)
    print()
    _alone(plan, found)
    if plan.engines:
        print()
        _load(plan, found)
    _assumed(plan)


def print_tiers(
    trace: Trace,
    sizes: Mapping[str, int],
    chunk_bytes: int,
    runs: Sequence[tuple[str, Sequence[TierOutcome], int]],
) -> None:
    """Print what each tier served of so many chunks, and stored, with each policy."""
    rows = [
        {
            "policy": policy,
            "tier": tier.name,
            "size": printing.size(sizes[tier.name]),
            "chunks": sizes[tier.name] // chunk_bytes,
            "hit rate": printing.share(tier.hits, accesses),
            "written": tier.chunks_written,
            "bytes written": printing.size(tier.chunks_written * chunk_bytes),
        }
        for policy, tiers, accesses in runs
        for tier in tiers
    ]
    printing.print_dicts(trace.title, rows)


def _alone(plan: ReplayPlan, found: Sequence[ReplayedTiers]) -> None:
    rows: list[tuple[object, ...]] = []
    for run in found:
        hits = (
            printing.share(run.outcome.hits, plan.trace.accesses),
            printing.share(run.optimum, 1),
        )
        saved = (
            run.saved_tokens,
            printing.share(run.saved_tokens, plan.trace.input_tokens),
            printing.share(run.outcome.saved_rate, 1),
        )
        rows.append((run.policy, *hits, *saved))
    columns = (
        "policy",
        "hit rate",
        "optimum",
        "prefill tokens saved",
        "of all",
        "saved",
    )
    printing.print_table("each prompt alone", columns, rows)
    if cold := found[0].cold_seconds:
        times = {**{run.policy: run.seconds for run in found}, "no cache": cold}
        first = [
            (name, *map(printing.wait, seconds.values()))
            for name, seconds in times.items()
        ]
        print()
        printing.print_table(
            "time to first token", ("policy", "mean", "p50", "p90", "p99"), first
        )


def _load(plan: ReplayPlan, found: Sequence[ReplayedTiers]) -> None:
    loads = [(run.policy, run.load) for run in found if run.load is not None]
    runs = [
        (name, load.hit_rate, load.ttft, load.busy, sum(load.dropped_writes))
        for name, load in loads
    ]
    runs += [
        ("no cache", 0.0, load.cold_ttft, load.cold_busy, 0)
        for _, load in loads[-1:]
    ]
    rows = [
        {
            "policy": name,
            "loaded": printing.share(hit_rate, 1),
            "first token: p50": printing.wait(ttft.median),
            "p90": printing.wait(ttft.p90),
            "busy": printing.share(busy, 1),
            "not written in time": dropped,
        }
        for name, hit_rate, ttft, busy, dropped in runs
    ]
    engines = "one engine" if plan.engines == 1 else f"{plan.engines} engines"
    printing.print_dicts(f"{engines} in the time of the trace", rows)


def _assumed(plan: ReplayPlan) -> None:
    speeds = plan.speeds
    if not speeds.prefill:
        printing.note(
            "no times are simulated: give --prefill, or a --model for an estimate"
        )
        return
    loads = [
        f"{tier} {speeds.gbps(tier):.3g} GB/s ({speeds.sources[tier]})"
        for tier in plan.sizes
    ]
    print()
    printing.print_text(
        f"{', '.join(loads)}, prefill {speeds.prefill:,.0f} tokens/s ({speeds.sources['prefill']})"
    )
    computed = plan.trace.chunk_tokens / speeds.prefill
    for tier in plan.sizes:
        seconds = speeds.load_seconds(tier, plan.chunk_bytes)
        if seconds > computed:
            printing.note(
                f"loading a chunk from {tier} takes {1e3 * seconds:.3g} ms, computing it "
                f"{1e3 * computed:.3g} ms: "
                "its chunks are computed, so this tier saves nothing"
            )
