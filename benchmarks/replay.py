"""The real cache against the simulator: `python benchmarks/replay.py [--json] [--trace NAME]
[--host N] [--disk N]`.

Replays traces with `pagoda.Cache` and tiny chunks, on the clock of the trace, and with the
simulator of `pagoda replay` and as many slots. Host tiers that are smaller than a prompt, over one
disk tier, must reach the hit rate of the simulator, and at least that of the disk tier alone. Exit
code 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from harness import machine, say
from msgspec.structs import replace
from policies import table
from policies_streams import SAMPLE, TRACES, stream

from pagoda.ledger import admin
from pagoda_tools.replay import Request, TierSpec, simulate

# points
_MOST_APART = 0.5
_MOST_WORSE = 0.1
_HEADS = (
    "trace",
    "requests",
    "host",
    "disk",
    "cache",
    "simulator",
    "points apart",
    "points over the disk alone",
)
_GIB_64_MIB = 16  # chunks of 64 MiB (llama-3-8b, 512 tokens) in a GiB


@dataclass(frozen=True)
class Row:
    """The results of one trace with one pair of tiers (in chunks; host 0: the disk tier alone), of
    one or more runs.

    Each run has other keys. Learning policies are sensitive to that, so one run does not resolve a
    tenth of a point.
    """

    trace: str
    requests: int
    host_chunks: int
    disk_chunks: int
    policy: str
    hit_rates: list[float]
    simulated: list[float]
    alone: list[float]  # of the disk tier without a host tier, with the same keys
    by_tier: dict[str, float]  # in the last run
    drops: dict[str, int]
    seconds: float

    @property
    def apart(self) -> float:
        """Return by how many points the cache is ahead of the simulator."""
        return 100 * (mean(self.hit_rates) - mean(self.simulated))

    @property
    def over_alone(self) -> float:
        """Return by how many points the cache is ahead of the disk tier alone."""
        return 100 * (mean(self.hit_rates) - mean(self.alone))

    @property
    def ok(self) -> bool:
        """Return whether both targets are met."""
        return abs(self.apart) <= _MOST_APART and self.over_alone >= -_MOST_WORSE

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the cells of the table's row."""
        rates = (
            f"{100 * mean(self.hit_rates):.3f} %",
            f"{100 * mean(self.simulated):.3f} %",
        )
        over = f"{self.over_alone:+.3f}" if self.host_chunks else ""
        sizes = (
            f"{self.requests:,}",
            f"{self.host_chunks:,}",
            f"{self.disk_chunks:,}",
        )
        return (self.trace, *sizes, *rates, f"{self.apart:+.3f}", over)


def rows(
    trace: str,
    runs: Sequence[Sequence[Request]],
    hosts: Sequence[int],
    disk: int,
    policy: str,
) -> Iterator[Row]:
    """Replay with the disk tier alone, then with each of the host tiers above it."""
    alone: list[float] = []
    for host in (0, *hosts):
        specs = [TierSpec("host", host, policy)] if host else []
        specs.append(TierSpec("disk", disk, policy))
        began = time.monotonic()
        played = list[float]()
        simulated = list[float]()
        for requests in runs:
            rate, by_tier, drops = _live(requests, host, disk, policy)
            played.append(rate)
            simulated.append(simulate(requests, specs).hit_rate)
        alone = alone or played
        seconds = time.monotonic() - began
        row = Row(
            trace,
            len(runs[0]),
            host,
            disk,
            policy,
            played,
            simulated,
            alone,
            by_tier,
            drops,
            seconds,
        )
        say(f"{' '.join(row.texts)} ({seconds:.0f} s)")
        yield row


def _live(
    requests: Sequence[Request], host: int, disk: int, policy: str
) -> tuple[float, dict[str, float], dict[str, int]]:
    """Replay with the real cache; return its hit rate, that of each tier, and the number of drops
    by reason.
    """
    from testbed.live_cache import CHUNK, Live

    with tempfile.TemporaryDirectory(
        prefix="pagoda-bench-", dir="/dev/shm"
    ) as root:
        live = Live(Path(root), policy, host=host, disk=disk)
        rate = live.play(requests)
        counters = admin.counters(live.ledgers[0])
        live.close()
    by_tier = {
        name: counters[f"hit_tokens_{name}"] / CHUNK / rate.accesses
        for name in ("host", "disk")
    }
    drops = {
        name: count
        for name, count in counters.items()
        if name.startswith("drop_") and count
    }
    return rate.share, by_tier, drops


def renamed(requests: Sequence[Request], run: int) -> list[Request]:
    """Return the same requests with other ids, and therefore other keys."""
    return [
        replace(each, hash_ids=tuple(one + (run << 44) for one in each.hash_ids))
        for each in requests
    ]


def main() -> int:
    """Read the command line, replay and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument(
        "--markdown",
        action="store_true",
        help="print a table for docs/design/benchmarks.md",
    )
    parser.add_argument(
        "--traces",
        type=Path,
        default=TRACES,
        help="directory of mooncake_*.jsonl",
    )
    parser.add_argument(
        "--trace",
        nargs="+",
        help="names of traces in --traces (default: all; without any, the shipped sample)",
    )
    parser.add_argument(
        "--host",
        type=int,
        nargs="+",
        default=[2 * _GIB_64_MIB, 4 * _GIB_64_MIB, 8 * _GIB_64_MIB],
        help="sizes of the host tier in chunks",
    )
    parser.add_argument(
        "--disk",
        type=int,
        default=120 * _GIB_64_MIB,
        help="size of the disk tier in chunks",
    )
    parser.add_argument("--policy", default="hindsight")
    parser.add_argument(
        "--requests", type=int, help="use only the first N requests of each trace"
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=1,
        help="runs of each trace, with other keys; the result is their mean",
    )
    parser.add_argument("--quick", action="store_true", help="300 requests")
    options = parser.parse_args()
    # testbed.live_cache drives the cache
    sys.path.append(str(Path(__file__).parents[1]))
    count = options.requests or (300 if options.quick else None)
    names = (
        options.trace
        or sorted(path.stem for path in options.traces.glob("mooncake_*.jsonl"))
        or [SAMPLE]
    )
    found: list[Row] = []
    for name in names:
        requests = stream(name, options.traces)[:count]
        runs = [renamed(requests, run) for run in range(options.runs)]
        found += rows(name, runs, options.host, options.disk, options.policy)
    if options.json:
        values = [
            asdict(row)
            | {
                "points_apart": row.apart,
                "points_over_disk_alone": row.over_alone,
                "ok": row.ok,
            }
            for row in found
        ]
        print(json.dumps({"rows": values, "machine": machine()}, indent=1))
    else:
        print(table(_HEADS, [row.texts for row in found], options.markdown))
    missed = [row for row in found if not row.ok]
    for row in missed:
        say(f"missed: {' '.join(row.texts)}")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
