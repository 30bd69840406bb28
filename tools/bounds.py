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
# A call passes through more where a thread must start or a policy is due, which is a matter of timing: its path is traced
# until no figure is above its bound, at most so many times, and the lowest figure counts.
MOST_RUNS = 12
# figure: (bound, aim). Functions are those of all threads.
BOUNDS = {
    "lines of code": (39_193, 23_000),
    "lines of the core": (14_691, 9_200),
    "class names used twice": (0, 5),
    "mixed modules": (0, 0),
    "modules with two themes": (8, 12),
    "store, caller": (24, 24),
    "store, all threads": (31, 32),
    "lookup, caller": (15, 17),
    "retrieve from host, caller": (22, 22),
    "retrieve from disk, caller": (30, 30),
    "retrieve from disk, all threads": (32, 34),
    "store, functions": (170, 170),
    "lookup, functions": (39, 50),
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
    house = said("house.py")
    found: dict[str, int] = {
        "lines of code": house["code"],
        "lines of the core": house["core"],
        "class names used twice": len(house["class_names_used_twice"]),
        "mixed modules": len(house["mixed"]),
        "modules with two themes": house["two_themes"],
    }
    paths = [name for name in BOUNDS if name not in found]
    for _ in range(MOST_RUNS):
        run = said("path_modules.py")
        for name in paths:
            call, _, counted = name.partition(", ")
            threads = "caller" if counted == "caller" else "all"
            now = run[CALLS[call]][threads]["functions" if counted == "functions" else "modules"]
            found[name] = min(now, found.get(name, now))
        if all(found[name] <= BOUNDS[name][0] for name in paths):
            break
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
