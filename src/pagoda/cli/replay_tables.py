"""Prints what host and disk together would do, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pagoda.cli import printing

if TYPE_CHECKING:
    from pagoda.cli.replay_inputs import Trace
    from pagoda.cli.replay_tiers import ReplayPlan, ReplayResult
    from pagoda.replay.simulate import TierOutcome


def print_results(plan: ReplayPlan, found: Sequence[ReplayResult]) -> None:
    """Print what the tiers serve and take in, what that saves, and what was taken for granted."""
    runs = [(one.alone.policy, one.alone.outcome.tiers, plan.trace.accesses) for one in found]
    print_tiers(plan.trace, plan.sizes, plan.chunk_bytes, runs)
    print()
    _alone(plan, found)
    if plan.engines:
        print()
        _load(plan, found)
    _assumed(plan)


def print_tiers(
    trace: Trace, sizes: Mapping[str, int], chunk_bytes: int, runs: Sequence[tuple[str, Sequence[TierOutcome], int]]
) -> None:  # fmt: skip
    """Print what each tier served of so many chunks, and took in, under each policy."""
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


def _alone(plan: ReplayPlan, found: Sequence[ReplayResult]) -> None:
    rows: list[tuple[object, ...]] = []
    for result in found:
        run = result.alone
        hits = printing.share(run.outcome.hits, plan.trace.accesses), printing.share(result.optimum, 1)
        saved = run.saved_tokens, printing.share(run.saved_tokens, plan.trace.input_tokens)
        rows.append((run.policy, *hits, *saved))
    columns = ("policy", "hit rate", "optimum", "prefill tokens saved", "of all")
    printing.print_table("each prompt by itself", columns, rows)
    if cold := found[0].alone.cold_seconds:
        times = {**{result.alone.policy: result.alone.seconds for result in found}, "no cache": cold}
        first = [(name, *map(printing.wait, seconds.values())) for name, seconds in times.items()]
        print()
        printing.print_table("its time to first token", ("policy", "mean", "p50", "p90", "p99"), first)


def _load(plan: ReplayPlan, found: Sequence[ReplayResult]) -> None:
    loads = [(result.alone.policy, result.load) for result in found if result.load is not None]
    runs = [(name, load.hit_rate, load.ttft, load.busy, sum(load.dropped_writes)) for name, load in loads]
    runs += [("no cache", 0.0, load.cold_ttft, load.cold_busy, 0) for _, load in loads[-1:]]
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
        printing.note("nothing is said of time: give --prefill, or a --model for an estimate")
        return
    loads = [f"{tier} {speeds.gbps(tier):.3g} GB/s ({speeds.sources[tier]})" for tier in plan.sizes]
    print()
    printing.print_text(
        f"{', '.join(loads)}, prefill {speeds.prefill:,.0f} tokens/s ({speeds.sources['prefill']})"
    )
    computed = plan.trace.chunk_tokens / speeds.prefill
    for tier in plan.sizes:
        seconds = speeds.load_seconds(tier, plan.chunk_bytes)
        if seconds > computed:
            printing.note(
                f"a chunk loads from {tier} in {1e3 * seconds:.3g} ms and is computed in {1e3 * computed:.3g} ms:"
                " what it serves is computed and saves nothing"
            )
