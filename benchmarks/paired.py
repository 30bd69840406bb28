"""Two source trees against each other: `python benchmarks/paired.py OLD_TREE NEW_TREE --rounds N
[--json] [--quick]`.

Runs the benchmarks of each tree in turns, each time in a new process with that tree's `src` and
`benchmarks` (or with those of `--scripts`) and this Python, and prints for each figure the median
over rounds of new / old within a
round: 1.03 is 3 % more. Drift of the machine affects both. Exit code 1 if a figure is worse than
before, 2 if a benchmark of either tree fails. A figure is worse if its median is by more than
`--worse` (a share, 0.03 by default) and six rounds of seven agree that it is. Without `--only` it
measures the processor time of the calls, which other programs on the machine disturb least.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import machine, say

SUBJECTS = (
    "calls",
    "many_processes",
    "model_calls",
    "cache",
    "local",
    "blocks",
)
AGREE = 6 / 7  # of the rounds


@dataclass(frozen=True)
class Pair:
    """One figure of both trees, round by round. `rises`: more is better (a share of the limit);
    otherwise less is.
    """

    key: str
    rises: bool
    old: Sequence[float]
    new: Sequence[float]

    @property
    def ratio(self) -> float:
        """Return new as a multiple of old: the median over rounds."""
        return statistics.median(
            new / old for old, new in zip(self.old, self.new, strict=True)
        )

    def is_worse(self, share: float) -> bool:
        """Return whether the new tree is worse by more than that, and most rounds agree that it is
        worse.
        """
        worse = 0
        for old, new in zip(self.old, self.new, strict=True):
            worse += new < old if self.rises else new > old
        if worse < AGREE * len(self.old):
            return False
        return self.ratio < 1 - share if self.rises else self.ratio > 1 + share


@dataclass(frozen=True)
class Side:
    """A source tree and the benchmarks that it is measured with."""

    tree: Path
    scripts: Path

    def __post_init__(self) -> None:
        for needed in (self.tree / "src" / "pagoda", self.scripts / "harness.py"):
            if not needed.exists():
                raise ValueError(
                    f"{needed} is missing: name the root of a source tree"
                )


def figures_of(
    side: Side, subject: str, more: Sequence[str]
) -> Mapping[str, object]:
    """Run one benchmark of a tree and return its JSON. Raise RuntimeError if it fails."""
    tree = side.tree
    script = side.scripts / f"{subject}.py"
    environment = os.environ | {
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(script), "--json", *more],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{script} ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
        )
    said: dict[str, object] = json.loads(done.stdout)
    return said


def raced(
    sides: Sequence[Side],
    subjects: Mapping[str, Sequence[str]],
    rounds: int,
    more: Sequence[str],
) -> list[Pair]:
    """Return all figures that both trees have; `subjects`: some parts of each, or all. The first
    tree alternates.
    """
    runs: dict[str, tuple[list[float], list[float]]] = {}
    rises: dict[str, bool] = {}
    for number in range(rounds):
        for subject, parts in subjects.items():
            say(f"round {number + 1} of {rounds}: {subject} ...")
            said: dict[int, Mapping[str, object]] = {}
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                some = [f"--only={','.join(parts)}"] if parts else []
                said[which] = figures_of(sides[which], subject, [*more, *some])
            for key, up in _directions(said[0]).items():
                old = said[0].get(key)
                new = said[1].get(key)
                if (
                    isinstance(old, (int, float))
                    and isinstance(new, (int, float))
                    and old > 0
                ):
                    rises[key] = up
                    each = runs.setdefault(key, ([], []))
                    each[0].append(float(old))
                    each[1].append(float(new))
    return [Pair(key, rises[key], *both) for key, both in runs.items()]


def _directions(said: Mapping[str, object]) -> dict[str, bool]:
    """Return the figures of a run, and for each whether more is better: yes for a share of a limit,
    no for a time.
    """
    quoted = said["runs"]
    assert isinstance(quoted, dict)
    return {key: "ratio" in runs for key, runs in quoted.items()}


def main() -> int:
    """Read the command line, race and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "trees", type=Path, nargs=2, metavar="TREE", help="old, then new"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--only",
        default="calls",
        help=f"of {','.join(SUBJECTS)}, or cache.lookup, ...",
    )
    parser.add_argument(
        "--scripts",
        type=Path,
        help="measure both trees with the benchmarks of this tree",
    )
    parser.add_argument(
        "--worse",
        type=float,
        default=0.03,
        help="share by which a figure may be worse",
    )
    parser.add_argument(
        "--quick", action="store_true", help="run each benchmark with --quick"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object"
    )
    options = parser.parse_args()
    subjects: dict[str, list[str]] = {}
    for name in options.only.split(","):
        subject, _, part = name.partition(".")
        subjects.setdefault(subject, []).extend([part] if part else [])
    if set(subjects) - set(SUBJECTS) or options.rounds < 1:
        parser.error(
            f"--only accepts {', '.join(SUBJECTS)}; --rounds must be at least 1"
        )
    trees = [tree.resolve() for tree in options.trees]
    try:
        sides = [
            Side(tree, (options.scripts or tree).resolve() / "benchmarks")
            for tree in trees
        ]
    except ValueError as trouble:
        parser.error(str(trouble))
    try:
        pairs = raced(
            sides, subjects, options.rounds, ["--quick"] if options.quick else []
        )
    except RuntimeError as trouble:
        say(f"paired: {trouble}")
        return 2
    return _report(pairs, options.worse, options.json)


def _report(pairs: Sequence[Pair], share: float, as_json: bool) -> int:
    worse = [pair for pair in pairs if pair.is_worse(share)]
    if as_json:
        values = {
            pair.key: {
                "new_vs_old": round(pair.ratio, 4),
                "better": "higher" if pair.rises else "lower",
                "worse": pair in worse,
                "old": list(pair.old),
                "new": list(pair.new),
            }
            for pair in pairs
        }
        print(
            json.dumps(
                {
                    "figures": values,
                    "worse_by_more_than": share,
                    "machine": machine(),
                },
                indent=1,
            )
        )
    else:
        width = max((len(pair.key) for pair in pairs), default=0)
        for pair in pairs:
            ratios = " ".join(
                f"{new / old:.3f}"
                for old, new in zip(pair.old, pair.new, strict=True)
            )
            mark = "WORSE" if pair in worse else "ok   "
            print(f"{pair.key:<{width}}  {pair.ratio:6.3f}  {mark}  {ratios}")
        print(", ".join(f"{name} {value}" for name, value in machine().items()))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
