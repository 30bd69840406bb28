"""`make soak`: the stress test for a million operations (`--operations N`), with continuous kill -9
and SIGSTOP.

Then a fifth as many operations of caches with faults of every kind and in surroundings that change
(`--trouble`: only these). Prints progress and tables; exit code 1 if a byte was wrong, something
leaked, or a call was late.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests import stress_outlives
from tests.stress import Summary, run


def progress(summary: Summary) -> None:
    """Show the progress of the run, on one line of a terminal or one line every ten seconds."""
    counts = summary.counts
    line = (
        f"{summary.seconds:7.1f} s  {counts['ops']:>9,} operations  {counts['checked']:>9,} "
        "chunks compared  "
        f"{summary.kills} killed  {summary.stops} stopped  {counts['wrong']} wrong  "
        f"{counts['late']} late"
    )
    if sys.stdout.isatty():
        print(f"\r{line}", end="", flush=True)
    elif int(summary.seconds / 10) > progress.shown:  # type: ignore[attr-defined]
        progress.shown = int(summary.seconds / 10)  # type: ignore[attr-defined]
        print(line, flush=True)


progress.shown = -1  # type: ignore[attr-defined]


def main() -> int:
    """Run the host slab, then a disk below it, then caches with faults; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument(
        "--seed", type=int, default=int.from_bytes(os.urandom(2), "little")
    )
    parser.add_argument("--limit-seconds", type=float, default=7200.0)
    parser.add_argument(
        "--trouble",
        action="store_true",
        help="only the part with faults of every kind",
    )
    options = parser.parse_args()
    shm = Path(tempfile.mkdtemp(prefix="pagoda-soak-", dir="/dev/shm"))
    work = Path(tempfile.mkdtemp(prefix="pagoda-soak-"))
    shares: dict[str, tuple[int, Path | None]] = {
        "host slab": (options.operations * 4 // 5, None),
        "host slab and disk": (options.operations // 5, work / "disk"),
    }
    code = 0
    try:
        if options.trouble:
            shares.clear()
        for name, (operations, disk) in shares.items():
            print(f"## {name}, seed {options.seed}", flush=True)
            progress.shown = -1  # type: ignore[attr-defined]
            directory = shm / ("below" if disk else "alone")
            summary = run(
                work / "run",
                directory,
                operations,
                options.seed,
                options.limit_seconds,
                disk,
                progress,
            )
            print(f"\n{summary.table()}\n", flush=True)
            for violation in summary.violations:
                print(f"VIOLATION: {violation}", file=sys.stderr)
            code = code or int(bool(summary.violations))
        operations = options.operations // 5
        print(
            f"## with faults of every kind, {operations:,} operations, seed {options.seed}",
            flush=True,
        )
        outcome = stress_outlives.run(
            shm / "trouble", operations, options.seed, options.limit_seconds
        )
        print(f"{outcome}\n{dict(outcome.counts)}", flush=True)
        print(
            f"the disk was never full: {outcome.full_disk}\n"
            if outcome.full_disk
            else "",
            flush=True,
        )
        for violation in outcome.violations:
            print(f"VIOLATION: {violation}", file=sys.stderr)
        code = code or int(bool(outcome.violations))
    finally:
        shutil.rmtree(shm, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
