"""Policies against each other: `python benchmarks/policies.py [--json | --markdown] [--sweep N
--seed S]`.

Prints hits and writes of each policy on the trace that `hindsight` was designed on and, in a
separate table, on other streams; and the cost of each policy. Everything except the costs is exact
and the same in every run. The last results: docs/design/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median

from harness import machine, say
from policies_cost import Cost, costs
from policies_streams import TRACES, Cell, cells, drawn, stream

from pagoda_tools.replay.optimum import optimum
from pagoda_tools.replay.simulate import TierSpec, simulate

POLICIES = ("lru", "hindsight")
# what hindsight may lose against LRU in any cell
_MOST_POINTS = 0.6
_LEAST_RATIO = 0.97
_HEADS = (
    "stream",
    "chunks",
    "policy",
    "hit rate",
    "of LRU's",
    "points over LRU",
    "chunks written",
    "of LRU's",
    "of the gap",
)


@dataclass(frozen=True)
class Row:
    """The result of one policy in one cell; `gap`: the share of the difference between LRU and the
    optimum.
    """

    table: str
    stream: str
    chunks: int
    policy: str
    hit_rate: float
    ratio: float | None
    points: float
    chunks_written: int | None
    written_ratio: float | None
    gap: float | None

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the cells of the table's row."""
        written = (
            "" if self.chunks_written is None else f"{self.chunks_written:,}"
        )
        return (
            self.stream,
            f"{self.chunks:,}",
            self.policy,
            f"{100 * self.hit_rate:.2f} %",
            _share(self.ratio, 3),
            f"{self.points:+.2f}",
            written,
            _share(self.written_ratio, 2),
            "" if self.gap is None else f"{100 * self.gap:.0f} %",
        )


def _share(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


Played = tuple[float, int | None]  # hit rate, chunks written


def play(traces: Path, job: tuple[Cell, str]) -> Played:
    """Replay one cell with one policy, or compute the optimum."""
    cell, policy = job
    requests = stream(cell.stream, traces)
    if policy == "optimum":
        return optimum(requests, cell.chunks), None
    outcome = simulate(requests, [TierSpec("tier", cell.chunks, policy)])
    return outcome.hit_rate, outcome.tiers[0].chunks_written


def rows(chosen: Sequence[Cell], traces: Path, processes: int) -> list[Row]:
    """Replay all cells with all policies, in `processes` processes."""
    jobs = [
        (cell, policy) for cell in chosen for policy in (*POLICIES, "optimum")
    ]
    found: dict[tuple[Cell, str], Played] = {}
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for number, (job, played) in enumerate(
            zip(jobs, pool.map(partial(play, traces), jobs), strict=True), 1
        ):
            found[job] = played
            say(
                f"{number} of {len(jobs)}: {job[0].stream}, {job[0].chunks} chunks, {job[1]}"
            )
    return [_row(job, found) for job in jobs]


def _row(job: tuple[Cell, str], found: dict[tuple[Cell, str], Played]) -> Row:
    cell, policy = job
    (rate, written), (base, base_written), (best, _) = (
        found[job],
        found[cell, "lru"],
        found[cell, "optimum"],
    )
    ratio = rate / base if base else None
    fewer = (
        None if written is None or not base_written else written / base_written
    )
    gap = (rate - base) / (best - base) if best > base else None
    return Row(
        *cell, policy, rate, ratio, 100 * (rate - base), written, fewer, gap
    )


@dataclass(frozen=True)
class Loss:
    """hindsight against LRU on one random stream."""

    number: int
    stream: str
    chunks: int
    working_set: int
    lru: float
    hindsight: float
    written_ratio: float

    @property
    def points(self) -> float:
        """Return by how many points hindsight is ahead."""
        return 100 * (self.hindsight - self.lru)

    @property
    def ratio(self) -> float:
        """Return the hits of hindsight as a share of LRU's."""
        return self.hindsight / self.lru if self.lru else 1.0

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the cells of the table's row."""
        return (
            str(self.number),
            self.stream,
            f"{self.chunks:,}",
            f"{self.working_set:,}",
            f"{100 * self.lru:.2f} %",
            f"{100 * self.hindsight:.2f} %",
            f"{self.points:+.2f}",
            f"{self.ratio:.3f}",
            f"{self.written_ratio:.2f}",
        )


def lost(seed: int, number: int) -> Loss:
    """Replay one random stream with both policies."""
    text, requests, chunks, working_set = drawn(seed, number)
    base, own = (
        simulate(requests, [TierSpec("tier", chunks, name)])
        for name in ("lru", "hindsight")
    )
    fewer = own.tiers[0].chunks_written / max(1, base.tiers[0].chunks_written)
    return Loss(
        number, text, chunks, working_set, base.hit_rate, own.hit_rate, fewer
    )


def sweep(count: int, seed: int, processes: int) -> list[Loss]:
    """Replay `count` random streams; return the results, the worst first."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        found = []
        for loss in pool.map(partial(lost, seed), range(count)):
            found.append(loss)
            say(f"{len(found)} of {count}: {' '.join(loss.texts)}")
    return sorted(found, key=lambda loss: loss.points)


def spread(found: Sequence[Loss]) -> dict[str, float]:
    """Return the distribution of the losses."""
    points = sorted(loss.points for loss in found)
    return {
        "cells": len(points),
        "points_worst": points[0],
        "points_5th_percentile": points[len(points) // 20],
        "points_median": median(points),
        "points_mean": mean(points),
        "ratio_worst": min(loss.ratio for loss in found),
        f"cells_that_lose_over_{_MOST_POINTS}_points": sum(
            each < -_MOST_POINTS for each in points
        ),
        f"cells_below_{_LEAST_RATIO}_of_lru": sum(
            loss.ratio < _LEAST_RATIO for loss in found
        ),
        "written_ratio_mean": mean(loss.written_ratio for loss in found),
    }


def table(
    heads: Sequence[str], lines: Sequence[Sequence[str]], markdown: bool
) -> str:
    """Format a table for a terminal, or in Markdown."""
    if markdown:
        return "\n".join(
            "| " + " | ".join(line) + " |"
            for line in (heads, ["---"] * len(heads), *lines)
        )
    widths = [
        max(len(line[i]) for line in (heads, *lines)) for i in range(len(heads))
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) for cell, width in zip(line, widths, strict=True)
        )
        for line in (heads, *lines)
    )


def printed(
    found: Sequence[Row], prices: Sequence[Cost], markdown: bool
) -> Iterator[str]:
    """Yield the tables of a run."""
    titles = {
        "designed": "The trace that hindsight was designed on",
        "unseen": "Streams that it was not designed on",
    }
    for name, part in groupby(found, key=lambda row: row.table):
        lines = list(part)
        yield f"\n{'#### ' if markdown else ''}{titles[name]}\n"
        yield table(_HEADS, [row.texts for row in lines], markdown)
        own = [row for row in lines if row.policy == "hindsight"]
        worst = min(own, key=lambda row: row.points)
        gaps = [row.gap for row in own if row.gap is not None]
        yield (
            f"\nhindsight: {worst.points:+.2f} points in its worst cell ({worst.stream}, "
            f"{worst.chunks:,} chunks), "
            f"{100 * mean(gaps):.0f} % of the gap on average over all cells."
        )
    if prices:
        yield f"\n{'#### ' if markdown else ''}What a policy costs\n"
        yield table(Cost.heads, [cost.texts for cost in prices], markdown)


def main() -> None:
    """Read the command line, replay and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument(
        "--markdown",
        action="store_true",
        help="print tables for docs/design/benchmarks.md",
    )
    parser.add_argument(
        "--traces",
        type=Path,
        default=TRACES,
        help="directory of mooncake_*.jsonl",
    )
    parser.add_argument(
        "--processes", type=int, default=0, help="at most (default: one a core)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes only, fewer rounds"
    )
    parser.add_argument(
        "--only",
        choices=("traces", "generated", "cost"),
        help="measure only this part",
    )
    parser.add_argument(
        "--sweep",
        type=int,
        default=0,
        metavar="N",
        help="hindsight against LRU on N random streams",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the sweep")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    processes = min(options.processes or cores, cores)
    if options.sweep:
        _print_sweep(
            sweep(options.sweep, options.seed, processes),
            options.json,
            options.markdown,
        )
        return
    chosen = cells(options.traces, options.only or "", options.quick)
    found = rows(chosen, options.traces, processes) if chosen else []
    prices = (
        []
        if options.only in ("traces", "generated")
        else costs(POLICIES, options.quick)
    )
    if options.json:
        values = {
            "cells": [asdict(row) for row in found],
            "costs": [asdict(cost) for cost in prices],
        }
        print(json.dumps(values | {"machine": machine()}, indent=1))
        return
    print("\n".join(printed(found, prices, options.markdown)).strip())


def _print_sweep(found: Sequence[Loss], as_json: bool, markdown: bool) -> None:
    summary = spread(found)
    if as_json:
        print(
            json.dumps(
                {"spread": summary, "cells": [asdict(loss) for loss in found]},
                indent=1,
            )
        )
        return
    heads = (
        "no.",
        "stream",
        "chunks",
        "working set",
        "LRU",
        "hindsight",
        "points",
        "of LRU's",
        "written, of LRU's",
    )
    print("The cells that lose most\n")
    print(table(heads, [loss.texts for loss in found[:20]], markdown) + "\n")
    print(
        table(
            ("", "value"),
            [(key, f"{value:.4g}") for key, value in summary.items()],
            markdown,
        )
    )


if __name__ == "__main__":
    main()
