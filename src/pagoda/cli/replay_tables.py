"""Prints what host and disk together would do, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pagoda.cli import printing

if TYPE_CHECKING:
    from pagoda.cli.replay_tiers import ReplayPlan, ReplayResult

Row = list[object]


def print_results(plan: ReplayPlan, found: Sequence[ReplayResult]) -> None:
    """Print what the tiers serve and take in, what that saves, and what was taken for granted."""
    _tiers(plan, found)
    print()
    _alone(plan, found)
    if plan.engines:
        print()
        _load(plan, found)
    _assumed(plan)


def _tiers(plan: ReplayPlan, found: Sequence[ReplayResult]) -> None:
    rows: list[Row] = []
    for result in found:
        for tier in result.alone.outcome.tiers:
            size = plan.sizes[tier.name]
            row: Row = [result.alone.policy, tier.name, printing.size(size), size // plan.chunk_bytes]
            row += [printing.share(tier.hits, plan.trace.accesses), tier.chunks_written]
            rows.append([*row, printing.size(tier.chunks_written * plan.chunk_bytes)])
    columns = ("policy", "tier", "size", "chunks", "hit rate", "written", "bytes written")
    printing.print_table(plan.trace.title, columns, rows)


def _alone(plan: ReplayPlan, found: Sequence[ReplayResult]) -> None:
    rows: list[Row] = []
    for result in found:
        run = result.alone
        row: Row = [
            run.policy,
            printing.share(run.outcome.hits, plan.trace.accesses),
            printing.share(result.optimum, 1),
        ]
        row += [run.saved_tokens, printing.share(run.saved_tokens, plan.trace.input_tokens)]
        rows.append(row + _waits(run.seconds))
    columns = ["policy", "hit rate", "optimum", "prefill tokens saved", "of all"]
    if found[0].alone.seconds:
        none = printing.share(0, 1)
        rows.append(["no cache", none, "", 0, none, *_waits(found[0].alone.cold_seconds)])
        columns += ["first token: mean", "p50", "p90", "p99"]
    printing.print_table("each prompt by itself", columns, rows)


def _waits(seconds: Mapping[str, float]) -> Row:
    return [printing.wait(value) for value in seconds.values()]


def _load(plan: ReplayPlan, found: Sequence[ReplayResult]) -> None:
    rows: list[Row] = []
    load = None
    for result in found:
        load = result.load
        if load is not None:
            row: Row = [
                result.alone.policy,
                printing.share(load.hit_rate, 1),
                printing.wait(load.ttft.median),
            ]
            rows.append(
                [*row, printing.wait(load.ttft.p90), printing.share(load.busy, 1), sum(load.dropped_writes)]
            )
    if load is not None:
        row = [
            "no cache",
            printing.share(0, 1),
            printing.wait(load.cold_ttft.median),
            printing.wait(load.cold_ttft.p90),
        ]
        rows.append([*row, printing.share(load.cold_busy, 1), 0])
    engines = "one engine" if plan.engines == 1 else f"{plan.engines} engines"
    columns = ("policy", "loaded", "first token: p50", "p90", "busy", "not written in time")
    printing.print_table(f"{engines} in the time of the trace", columns, rows)


def _assumed(plan: ReplayPlan) -> None:
    speeds = plan.speeds
    if not speeds.prefill:
        printing.note("nothing is said of time: give --prefill, or a --model for an estimate")
        return
    loads = [f"{tier} {speeds.gbps(tier):.3g} GB/s ({speeds.sources[tier]})" for tier in plan.sizes]
    print(f"\n{', '.join(loads)}, prefill {speeds.prefill:,.0f} tokens/s ({speeds.sources['prefill']})")
    computed = plan.trace.chunk_tokens / speeds.prefill
    for tier in plan.sizes:
        seconds = speeds.load_seconds(tier, plan.chunk_bytes)
        if seconds > computed:
            printing.note(
                f"a chunk loads from {tier} in {1e3 * seconds:.3g} ms and is computed in {1e3 * computed:.3g} ms:"
                " what it serves is computed and saves nothing"
            )
