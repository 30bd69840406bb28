"""Fail when the package is harder to read than before: `python tools/bounds.py` (`make house`).

Prints the figures of `house.py` (lines, names, themes) and `path_modules.py` (modules and functions that a call passes
through) with their bounds and aims. Exit code 1 if a figure is above its bound. A change that lowers a figure also lowers its bound.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# figure: (bound, aim). Which modules a call enters depends a little on timing (a thread that must start, a policy that is
# due): the lowest of three runs counts, and bounds have a margin. Functions are those of all threads.
BOUNDS = {
    "lines of code": (39_950, 23_000),
    "lines of the core": (14_600, 9_200),
    "class names used twice": (0, 5),
    "mixed modules": (0, 0),
    "modules with two themes": (8, 12),
    "store, caller": (24, 24),
    "store, all threads": (32, 32),
    "lookup, caller": (16, 17),
    "retrieve from host, caller": (22, 22),
    "retrieve from disk, caller": (30, 30),
    "retrieve from disk, all threads": (33, 34),
    "store, functions": (170, 170),
    "lookup, functions": (40, 50),
    "retrieve from host, functions": (70, 70),
    "retrieve from disk, functions": (175, 175),
}


def said(tool: str) -> dict[str, object]:
    """Run a tool of this folder and return its JSON."""
    command = [sys.executable, HERE / tool, "--json"]
    done = subprocess.run(
        command, cwd=HERE.parent, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def figures() -> dict[str, int]:
    """Return all figures that have a bound."""
    house, runs = said("house.py"), [said("path_modules.py") for _ in range(3)]
    found = {
        "lines of code": house["code"],
        "lines of the core": house["core"],
        "class names used twice": len(house["class_names_used_twice"]),
        "mixed modules": len(house["mixed"]),
        "modules with two themes": house["two_themes"],
    }
    for name in BOUNDS:
        call, _, counted = name.partition(", ")
        if counted:
            threads = "caller" if counted == "caller" else "all"
            figure = "functions" if counted == "functions" else "modules"
            found[name] = min(run[CALLS[call]][threads][figure] for run in runs)
    return found


CALLS = {
    "store": "store",
    "lookup": "lookup",
    "retrieve from host": "retrieve_host",
    "retrieve from disk": "retrieve_disk",
}


def main() -> int:
    """Print the table; return the exit code."""
    above = False
    print(f"{'figure':34s}{'now':>8s}{'bound':>8s}{'aim':>8s}")
    for name, now in figures().items():
        bound, aim = BOUNDS[name]
        above |= now > bound
        print(f"{name:34s}{now:>8,d}{bound:>8,d}{aim:>8,d}{'  too many' if now > bound else ''}")
    return int(above)


if __name__ == "__main__":
    sys.exit(main())
