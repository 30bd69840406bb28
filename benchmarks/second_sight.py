"""Second sight against write-through, by replay: `python benchmarks/second_sight.py TRACE...
[--json]`.

Machines with a host tier of one 32nd of the trace's different chunks each share a remote tier of
some sizes. Exact, and the same in every run. The last results: docs/design/benchmarks/writes.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from harness import machine, say

from pagoda_tools.replay import (
    WRITE_POLICIES,
    FleetSpec,
    TierSpec,
    read_trace,
    simulate_fleet,
)

MACHINES = (1, 2, 10)
# the remote tier has room for one such part of the different chunks
SHARES = (16, 8, 4, 2, 1)
HOST_SHARE = 32
# where second sight is recommended
MOST_WRITES = 0.5
MOST_POINTS = 1.0
_HEADS = (
    "trace",
    "machines",
    "remote",
    "hit rate",
    "second sight",
    "points",
    "written",
    "of write-through's",
    "recommended",
)


@dataclass(frozen=True)
class Row:
    """One fleet with both write policies. `share`: 1/share of the trace's chunks fit into the
    remote tier.
    """

    trace: str
    machines: int
    share: int
    chunks: int
    hit_rate: float
    second_sight_hit_rate: float
    chunks_written: int
    second_sight_chunks_written: int

    @property
    def points(self) -> float:
        """Return what second sight gains in points of the hit rate."""
        return 100 * (self.second_sight_hit_rate - self.hit_rate)

    @property
    def writes(self) -> float:
        """Return what second sight writes, as a share of what write-through writes."""
        return self.second_sight_chunks_written / self.chunks_written

    @property
    def is_recommended(self) -> bool:
        """Return whether half of the writes or fewer cost one point or less."""
        return self.writes <= MOST_WRITES and self.points >= -MOST_POINTS

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the cells of the table's row."""
        return (
            self.trace,
            str(self.machines),
            f"1/{self.share}" if self.share > 1 else "all",
            f"{100 * self.hit_rate:.1f} %",
            f"{100 * self.second_sight_hit_rate:.1f} %",
            f"{self.points:+.1f}",
            f"{self.chunks_written:,}",
            f"{self.writes:.2f}",
            "yes" if self.is_recommended else "no",
        )


def compare(trace: Path, machines: int, share: int) -> Row:
    """Simulate one fleet with both policies."""
    requests = list(read_trace(trace))
    different = len({chunk for request in requests for chunk in request.hash_ids})
    own = [TierSpec("host", max(1, different // HOST_SHARE), "hindsight")]
    remote = TierSpec("remote", max(1, different // share), "lru")
    through, sight = (
        simulate_fleet(
            requests, FleetSpec(machines, own, remote, write_policy=policy)
        )
        for policy in WRITE_POLICIES
    )
    written = through.tiers[-1].chunks_written, sight.tiers[-1].chunks_written
    say(f"{trace.stem}, {machines} machines, 1/{share}: done")
    return Row(
        trace.stem,
        machines,
        share,
        remote.chunks,
        through.hit_rate,
        sight.hit_rate,
        *written,
    )


def main() -> int:
    """Read the command line, simulate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "traces",
        nargs="+",
        type=Path,
        metavar="TRACE",
        help="recorded requests, as JSON lines",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes"
    )
    options = parser.parse_args()
    cells = [
        (trace, number, share)
        for trace in options.traces
        for number in MACHINES
        for share in SHARES
    ]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        rows = list(pool.map(compare, *zip(*cells, strict=True)))
    if options.json:
        found = [
            asdict(row) | {"points": row.points, "writes": row.writes}
            for row in rows
        ]
        print(json.dumps({"rows": found, "machine": machine()}, indent=1))
    else:
        for cells_of_row in (
            _HEADS,
            ["---", *["--:"] * (len(_HEADS) - 1)],
            *(row.texts for row in rows),
        ):
            print("| " + " | ".join(cells_of_row) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
