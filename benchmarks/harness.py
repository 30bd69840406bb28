"""Race candidates against limits in turns, and report the results. This module does not import
`pagoda`.

A machine's speed drifts while a benchmark runs (other tenants, clocks, disk caches), so absolute
figures of two separate runs cannot be compared. Here each entrant has a turn in every round, the
order rotates, and the result is the median over rounds of the ratio *within* a round. Every round
is quoted.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

# Keep the tiers of a benchmark out of the user's register, where `pagoda` would search for them for
# weeks.
_register = tempfile.TemporaryDirectory(prefix="pagoda-bench-register-")
os.environ["XDG_STATE_HOME"] = _register.name

MIB = 1 << 20
GIB = 1 << 30

Step = Callable[[int], None]
Runs = dict[str, list[float]]
Json = Mapping[str, object]


@dataclass(frozen=True)
class Figure:
    """One figure; `value` must be at least (ratio) or below (seconds, times) `target`, if there is
    one.
    """

    key: str
    value: float
    target: float | None
    # "ratio": share of the limit; "seconds"; "times": multiple of the other side's time; or a
    # counted thing
    unit: str
    runs: Json = field(default_factory=dict)
    note: str = ""

    @property
    def ok(self) -> bool:
        """Return whether the target is met."""
        if self.target is None:
            return True
        return (
            self.value >= self.target
            if self.unit == "ratio"
            else self.value < self.target
        )

    @property
    def wanted(self) -> str:
        """Return the target as text."""
        if self.target is None:
            return ""
        if self.unit == "seconds":
            return f"< {seconds_text(self.target)}"
        return (
            f">= {self.target:.2f}"
            if self.unit == "ratio"
            else f"< {self.target:.2f} x"
        )

    @property
    def text(self) -> str:
        """Return the value as text."""
        if self.unit == "seconds":
            return seconds_text(self.value)
        return (
            f"{self.value:.3f}"
            if self.unit in ("ratio", "times")
            else f"{self.value:,.0f}"
        )


def race(
    entrants: Mapping[str, Step],
    rounds: int,
    steps: int = 1,
    warm: int = 1,
    before: Callable[[], None] | None = None,
) -> Runs:
    """Give each entrant `steps` timed calls a round, interleaved step by step in rotating order.

    Each call gets a running number (to cycle through memory or keys). Return seconds per round
    by entrant; the first `warm` rounds are not counted. `before` is called before each round,
    untimed.
    """
    names = list(entrants)
    runs: Runs = {name: [] for name in names}
    number = 0
    for turn in range(warm + rounds):
        if before is not None:
            before()
        spent = dict.fromkeys(names, 0.0)
        for _ in range(steps):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                began = time.perf_counter()
                entrants[name](number)
                spent[name] += time.perf_counter() - began
            number += 1
        if turn >= warm:
            for name in names:
                runs[name].append(spent[name])
    return runs


def joined(parts: Sequence[Runs]) -> Runs:
    """Concatenate the rounds of several races of the same entrants."""
    return {
        name: [spent for part in parts for spent in part[name]]
        for name in parts[0]
    }


def ratios(limit: Sequence[float], candidate: Sequence[float]) -> list[float]:
    """Return the candidate's speed as a share of the limit's, round by round (both given in
    seconds).
    """
    return [above / below for above, below in zip(limit, candidate, strict=True)]


def gb_per_second(seconds: Sequence[float], size_bytes: int) -> list[float]:
    """Convert seconds for `size_bytes` to 10^9 bytes a second, three digits."""
    return [round(size_bytes / each / 1e9, 3) for each in seconds]


def ratio_figure(
    key: str,
    target: float,
    runs: Runs,
    *,
    size_bytes: int,
    threads: str,
    candidate: str = "candidate",
    limit: str = "limit",
    beside: Json | None = None,
) -> Figure:
    """Return a figure from paired rounds of a candidate and a limit that each moved `size_bytes` a
    round.
    """
    paired = ratios(runs[limit], runs[candidate])
    ours = gb_per_second(runs[candidate], size_bytes)
    theirs = gb_per_second(runs[limit], size_bytes)
    note = f"{statistics.median(ours):.2f} of {statistics.median(theirs):.2f} GB/s, {threads}"
    quoted: dict[str, object] = {
        "candidate_gb_per_second": ours,
        "limit_gb_per_second": theirs,
        "ratio": [round(each, 4) for each in paired],
        "threads": threads,
    }
    quoted |= beside or {}
    return Figure(key, statistics.median(paired), target, "ratio", quoted, note)


def seconds_figure(
    key: str,
    target: float,
    seconds: Sequence[float],
    note: str = "",
    **more: object,
) -> Figure:
    """Return a figure in seconds: the median over rounds."""
    quoted = {"seconds": [round(each, 9) for each in seconds], **more}
    return Figure(
        key, statistics.median(seconds), target, "seconds", quoted, note
    )


def seconds_text(seconds: float) -> str:
    """Format seconds in a suitable unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def machine() -> dict[str, object]:
    """Describe the machine: cores, load, Python."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def document(
    figures: Sequence[Figure],
    beside: Sequence[Figure] = (),
    extra: Json | None = None,
) -> Json:
    """Return the figures as one JSON object. `beside`: figures whose targets do not count here."""
    wanted = [each for each in figures if each.target is not None]
    everything = [*figures, *beside]
    values: dict[str, object] = {
        each.key: round(each.value, 9) for each in everything
    }
    values["targets"] = {
        each.key: {"target": each.target, "ok": each.ok} for each in wanted
    }
    values["notes"] = {each.key: each.note for each in everything}
    values["runs"] = {each.key: each.runs for each in everything}
    return values | {"machine": machine()} | dict(extra or {})


def report(
    figures: Sequence[Figure],
    as_json: bool,
    beside: Sequence[Figure] = (),
    extra: Json | None = None,
) -> None:
    """Print one JSON object, or a readable table. `beside`: figures whose targets do not count
    here.
    """
    if as_json:
        print(json.dumps(document(figures, beside, extra), indent=1))
        return
    wanted = [each for each in figures if each.target is not None]
    everything = [*figures, *beside]
    width = max(len(each.key) for each in everything)
    for each in everything:
        mark = "    "
        target = ""
        if each in wanted:
            mark = "ok  " if each.ok else "MISS"
            target = each.wanted
        print(
            f"{each.key:<{width}}  {each.text:>9}  {target:>10}  {mark}  {each.note}"
        )
    for name, value in (machine() | dict(extra or {})).items():
        print(f"{name}: {value}")


def say(message: str) -> None:
    """Print one line of progress to stderr (stdout is for the result)."""
    print(message, file=sys.stderr, flush=True)


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
