"""The figures of the vLLM connector: first tokens, the scheduler's time, throughput without hits,
copies.

All engines of a run live from the beginning, each in a process, and take turns. An engine without
the turn waits for a message and uses no processor time, which is also measured.
"""

from __future__ import annotations

import atexit
import dataclasses
import random
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import vllm_engine as inside
from ground import Plan
from harness import Figure
from vllm_engine import (
    BLOCK,
    VOCABULARY,
    Copied,
    Engine,
    First,
    Turn,
    connector,
    options,
    wait_for_model,
)

from pagoda.ledger import Ledger, admin
from pagoda.ledger.store_state import STATE

PROMPT = 3_000
ANSWERED = 16
THREADS = 1  # of each engine, and of each copy
_DRAW = random.Random(2)
CASES = ("device_without", "device", "host", "disk")
CALLS = {
    "lookup_first": "get_num_new_matched_tokens_first",
    "lookup_again": "get_num_new_matched_tokens_again",
    "build_meta": "build_connector_meta",
}


class House:
    """Engines with one model: without the connector, with host memory only, with host memory and a
    disk.
    """

    def __init__(self, plan: Plan) -> None:
        self._shm = Path(tempfile.mkdtemp(prefix="pagoda-bench-", dir=plan.shm))
        self._disk = Path(tempfile.mkdtemp(prefix="pagoda-bench-", dir=plan.disk))
        self._draw = random.Random(1)
        atexit.register(self.close)
        model = self._disk / "model"
        wait_for_model(model)
        self.engines: dict[str, Engine] = {}
        self.without = self._started("without", model)
        self.host = self._started(
            "host", model, **self._tiers("host", disk=False)
        )
        self.both = self._started("both", model, **self._tiers("both"))
        for engine in self.engines.values():
            engine.answer()
            engine.call(inside.first_token, self.prompt(PROMPT))
            engine.call(inside.turn, [self.prompt(64)] * 2, 2)

    def _started(self, name: str, model: Path, **extra: object) -> Engine:
        given = options(model, **(connector(**extra) if extra else {}))
        self.engines[name] = Engine(name, self._disk / f"{name}.log", **given)
        return self.engines[name]

    def _tiers(self, name: str, disk: bool = True) -> dict[str, object]:
        tiers = {
            "host_path": str(self._shm / name),
            "host_size": "256MiB",
            "worth_it": False,
            "deadline_seconds": 20.0,
        }
        return tiers | (
            {"disk_path": str(self._disk / name), "disk_size": "2GiB"}
            if disk
            else {}
        )

    def prompt(self, tokens: int) -> list[int]:
        """Return a new prompt."""
        return self._draw.choices(range(3, VOCABULARY), k=tokens)

    def first(self, case: str, engine: Engine, prompt: Sequence[int]) -> First:
        """Compute the first token of a prompt that is in the tier of the case, and in none above
        it.
        """
        if case != "disk":
            # loads it into the upper tiers
            engine.call(inside.first_token, prompt)
        engine.call(inside.settle)
        if case == "disk":
            empty(self._shm / engine.name)
        if case in ("host", "disk"):
            engine.call(inside.reset)
        return engine.call(inside.first_token, prompt)  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the engines and remove their files."""
        for engine in getattr(self, "engines", {}).values():
            engine.close()
        shutil.rmtree(self._shm, ignore_errors=True)
        shutil.rmtree(self._disk, ignore_errors=True)


def prompt_of(tokens: int) -> list[int]:
    """Return a new prompt."""
    return _DRAW.choices(range(3, VOCABULARY), k=tokens)


def empty(root: Path) -> None:
    """Remove all chunks of an engine's host tier, as an eviction would."""
    (store,) = (path for path in root.iterdir() if (path / STATE).is_file())
    ledger = Ledger.attach(store)
    try:
        admin.clear(ledger, None)
    finally:
        ledger.close()


@cache
def house(plan: Plan) -> House:
    """Return the engines of this run, started once."""
    return House(plan)


# ---- first tokens, the scheduler's time and the copies of the same requests


def first_figures(plan: Plan) -> list[Figure]:
    """Measure seconds to the first token after 3,000, by the prompt's tier, and the calls and
    copies for it.
    """
    at = house(plan)
    at.both.call(inside.take)
    runs = _first_rounds(at, at.both, PROMPT, 3 if plan.quick else 11)
    calls, copies = at.both.call(inside.take)
    crowd = _crowd(at, 1 if plan.quick else 5)
    figures = [
        _seconds(f"ttft_{case}_seconds", each, _where(each))
        for case, each in runs.items()
    ]
    figures += [
        _ratio(
            "host_hit_vs_device_hit", runs["host"], runs["device_without"], 1.5
        ),
        _ratio("disk_hit_vs_device_hit", runs["disk"], runs["device_without"]),
        _ratio("host_hit_vs_cold", runs["host"], runs["cold_without"]),
        _ratio("cold_vs_cold_without", runs["cold"], runs["cold_without"]),
        _ratio("device_hit_vs_without", runs["device"], runs["device_without"]),
    ]
    return figures + _calls(calls, crowd) + _copies(at, copies)


def _first_rounds(
    at: House, ours: Engine, tokens: int, rounds: int
) -> dict[str, list[First]]:
    """Measure a new prompt in each round: cold, then in each tier, in rotating order."""
    runs: dict[str, list[First]] = {
        case: [] for case in ("cold_without", "cold", *CASES)
    }
    chunk: int = ours.call(inside.chunk_tokens)
    for number in range(rounds):
        prompt = at.prompt(tokens)
        order = [("cold_without", at.without), ("cold", ours)]
        for name, engine in order[:: -1 if number % 2 else 1]:
            runs[name].append(engine.call(inside.first_token, prompt))
        for case in CASES[number % 4 :] + CASES[: number % 4]:
            first = at.first(
                case, at.without if case == "device_without" else ours, prompt
            )
            runs[case].append(_checked(case, first, tokens, chunk))
    return runs


def _checked(case: str, first: First, tokens: int, chunk: int) -> First:
    """Raise RuntimeError if the hit did not come from the expected tier."""
    device = (tokens - 1) // BLOCK * BLOCK
    below = min(tokens // chunk * chunk, device)
    wanted = {"host": (0, below, 0), "disk": (0, 0, below)}.get(
        case, (device, 0, 0)
    )
    if first[1:] != wanted:
        raise RuntimeError(
            f"{case}: hit {first[1:]} tokens of device, host and disk, expected {wanted}"
        )
    return first


def _crowd(at: House, rounds: int) -> dict[str, list[float]]:
    """Serve more prompts than fit on the device, all of them in host memory: the scheduler asks
    again.
    """
    prompts = [at.prompt(PROMPT) for _ in range(8)]
    at.both.call(inside.turn, prompts, 1)
    at.both.call(inside.take)
    for _ in range(rounds):
        at.both.call(inside.reset)
        at.both.call(inside.turn, prompts, ANSWERED)
    calls, _ = at.both.call(inside.take)
    return calls  # type: ignore[no-any-return]


def _calls(
    single: Mapping[str, list[float]], crowd: Mapping[str, list[float]]
) -> list[Figure]:
    figures = []
    for name, call in CALLS.items():
        for kind, calls in (("", single), ("_crowd", crowd)):
            if spent := calls.get(call, []):
                ordered = sorted(spent)
                note = (
                    f"{len(ordered)} calls, 90 % below "
                    f"{ordered[len(ordered) * 9 // 10] * 1e6:.0f} us, "
                    f"longest {ordered[-1] * 1e6:.0f} us"
                )
                figures.append(_seconds(f"{name}{kind}_seconds", spent, note))
    others = {
        f"{call}{kind}": {
            "median_us": round(statistics.median(spent) * 1e6, 1),
            "calls": len(spent),
        }
        for kind, calls in (("", single), ("_crowd", crowd))
        for call, spent in calls.items()
        if call not in CALLS.values()
    }
    return [
        dataclasses.replace(
            figures[0], runs={**figures[0].runs, "other_calls": others}
        ),
        *figures[1:],
    ]


def _copies(at: House, copies: Sequence[Copied]) -> list[Figure]:
    """Compare copies of pages to np.copyto of as many bytes in runs of the same length, in the same
    process.
    """
    figures = []
    for way in ("save", "load"):
        mine = [
            copy
            for copy in copies
            if copy.way == way and copy.nbytes * 2 > PROMPT * 6 * 1024
        ][-15:]
        limit = [
            at.both.call(inside.memcpy, copy.nbytes, copy.run_bytes, number)
            for number, copy in enumerate(mine)
        ]
        ours = [copy.nbytes / copy.seconds / 1e9 for copy in mine]
        theirs = [
            copy.nbytes / spent / 1e9
            for copy, spent in zip(mine, limit, strict=True)
        ]
        quoted = {
            "gb_per_second": _rounded(ours),
            "memcpy_gb_per_second": _rounded(theirs),
            "nbytes": [copy.nbytes for copy in mine],
            "run_bytes": [copy.run_bytes for copy in mine],
            "threads": THREADS,
        }
        value = statistics.median(ours) / statistics.median(theirs)
        note = (
            f"{statistics.median(ours):.1f} of {statistics.median(theirs):.1f} GB/s, "
            f"runs of {mine[0].run_bytes >> 10} KiB, 1 thread"
        )
        figures.append(
            Figure(f"{way}_vs_memcpy", value, None, "ratio", quoted, note)
        )
    return figures


# ---- throughput of prompts that never hit


def throughput_figures(plan: Plan) -> list[Figure]:
    """Measure tokens a second of new prompts, with the connector against without, stores
    included.
    """
    at = house(plan)
    pairs = 3 if plan.quick else 15
    figures = _no_hit(at.host, at.host, "no_hit_throughput", (0.97, 0.01), pairs)
    figures += _no_hit(
        at.both, at.both, "no_hit_throughput_with_disk", (0.97, 0.015), pairs
    )
    if not plan.quick:
        figures += _no_hit(
            at.without,
            at.host,
            "no_hit_throughput_of_two_engines",
            (None, None),
            12,
        )
    return figures


def _no_hit(
    without: Engine,
    ours: Engine,
    name: str,
    targets: tuple[float | None, float | None],
    pairs: int,
) -> list[Figure]:
    """Measure pairs of two turns each: without, with, with, without, so that drift of the machine
    affects both sides.

    With one engine for both, its connector is attached and detached. Two engines differ in the
    placement of memory. `targets`: of the processor time of both, and of our share of it.
    """
    at = {"without": without, "with": ours}
    runs: dict[str, list[Turn]] = {kind: [] for kind in at}
    idle: list[float] = []
    shares: list[float] = []
    ours.call(inside.take)
    for number in range(pairs + 1):
        order = list(at)[:: 1 if number % 2 else -1]
        pair: dict[str, list[Turn]] = {kind: [] for kind in at}
        for kind in (*order, *order[::-1]):
            prompts = [prompt_of(512) for _ in range(4)]
            other = next(
                (each for each in at.values() if each is not at[kind]), None
            )
            before = other.cpu_seconds() if other is not None else 0.0
            if other is None:
                ours.call(inside.attach, kind == "with")
            pair[kind].append(at[kind].call(inside.turn, prompts, ANSWERED))
            idle.append(
                other.cpu_seconds() - before if other is not None else 0.0
            )
        if number:  # the first pair warms up
            shares += map(_our_share, pair["with"])
            for kind, turns in pair.items():
                seconds, tokens, cpus, settled = zip(*turns, strict=True)
                cpu: Counter[str] = Counter()
                for spent in cpus:
                    cpu.update(spent)
                runs[kind].append(
                    Turn(sum(seconds), sum(tokens), cpu, sum(settled))
                )
    if without is ours:
        ours.call(inside.attach, True)
    calls, _ = ours.call(inside.take)
    # of the two turns of a pair, on the engine's own thread
    hooks = sum(map(sum, calls.values())) / (pairs + 1)
    whole, share = targets
    return [
        *_of_pairs(name, whole, runs, idle, hooks),
        Figure(
            f"{name}_our_share",
            statistics.median(shares),
            share,
            "times",
            {"shares": _rounded(shares, 5)},
            f"calls and threads of PagodaKV, of the engine's thread in the same turn, of "
            f"{len(shares)} turns: {min(shares):.2%} {statistics.median(shares):.2%} "
            f"{max(shares):.2%}",
        ),
    ]


def _of_pairs(
    name: str,
    target: float | None,
    runs: Mapping[str, list[Turn]],
    idle: list[float],
    hooks: float,
) -> list[Figure]:
    both = list(zip(runs["with"], runs["without"], strict=True))
    ratios = [a.tokens / a.seconds / (b.tokens / b.seconds) for a, b in both]
    processor = [
        b.cpu_seconds["engine"] / (a.cpu_seconds["engine"] + _our_threads(a))
        for a, b in both
    ]
    apiece = statistics.median(b.cpu_seconds["engine"] for _, b in both)
    ours = statistics.median(
        a.cpu_seconds["calls"] + _our_threads(a) for a, _ in both
    )
    names = sorted(
        set[str]().union(*(a.cpu_seconds for a, _ in both)) - {"engine"}
    )
    threads = {
        name: round(
            statistics.median(a.cpu_seconds[name] for a, _ in both) / 2 * 1e3, 2
        )
        for name in names
    }
    speeds = {
        kind: [each.tokens / each.seconds for each in turns]
        for kind, turns in runs.items()
    }
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    quoted = {
        "ratio": _rounded(ratios),
        "ratio_of_processor_time": _rounded(processor),
        "tokens_per_second_with": _rounded(speeds["with"], 1),
        "tokens_per_second_without": _rounded(speeds["without"], 1),
        "settle_seconds": _rounded(
            [each.settle_seconds for each in runs["with"]], 6
        ),
        "processor_seconds_of_the_idle_engine": {
            "most": max(idle),
            "sum": round(sum(idle), 2),
        },
        "threads": THREADS,
    }
    note = (
        f"{statistics.median(speeds['with']):,.0f} of "
        f"{statistics.median(speeds['without']):,.0f} tokens/s, "
        f"quartiles {low:.3f} {middle:.3f} {high:.3f} of {len(both)} pairs, of processor time "
        f"{statistics.median(processor):.3f}; 1 thread each"
    )
    return [
        Figure(name, middle, None, "ratio", quoted, note),
        Figure(
            f"{name}_of_processor_time",
            apiece / (apiece + ours),
            target,
            "ratio",
            {"milliseconds_a_turn": threads},
            f"of {apiece / 2 * 1e3:.0f} ms a turn; "
            + ", ".join(
                f"{thread} {spent}" for thread, spent in threads.items() if spent
            ),
        ),
        Figure(
            f"{name}_lower_quartile",
            low,
            None,
            "ratio",
            {"ratio": _rounded(ratios)},
            "of the same pairs",
        ),
        Figure(
            f"{name}_share_of_calls",
            hooks / statistics.median(each.seconds for each in runs["with"]),
            None,
            "times",
            {"seconds_a_pair": round(hooks, 6)},
            f"{hooks / 2 * 1e3:.2f} ms of a turn are spent inside the connector's calls",
        ),
    ]


# ---- parts of it


def _our_threads(turn: Turn) -> float:
    """Return the processor time of PagodaKV's own threads."""
    return sum(
        spent
        for thread, spent in turn.cpu_seconds.items()
        if thread.startswith("pagoda")
    )


def _our_share(turn: Turn) -> float:
    """Return the processor time of PagodaKV's calls and threads, over that of the engine's thread
    outside these calls.
    """
    calls = turn.cpu_seconds["calls"]
    return (calls + _our_threads(turn)) / (turn.cpu_seconds["engine"] - calls)


def _seconds(
    key: str, runs: Sequence[First] | Sequence[float], note: str
) -> Figure:
    seconds = [each.seconds if isinstance(each, First) else each for each in runs]
    return Figure(
        key,
        statistics.median(seconds),
        None,
        "seconds",
        {"seconds": _rounded(seconds, 7)},
        note,
    )


def _ratio(
    key: str,
    ours: Sequence[First],
    limit: Sequence[First],
    target: float | None = None,
) -> Figure:
    """Return our time as a multiple of the limit's: the median over the rounds."""
    times = [a.seconds / b.seconds for a, b in zip(ours, limit, strict=True)]
    medians = [
        statistics.median(each.seconds for each in side) * 1e3
        for side in (ours, limit)
    ]
    note = (
        f"{medians[0]:.1f} ms against {medians[1]:.1f} ms, hits {sum(ours[0][1:])} and "
        f"{sum(limit[0][1:])} tokens"
    )
    return Figure(
        key,
        statistics.median(times),
        target,
        "times",
        {"times": _rounded(times)},
        note,
    )


def _where(runs: Sequence[First]) -> str:
    hits = zip(("device", "host", "disk"), runs[0][1:], strict=True)
    return (
        " and ".join(
            f"{tokens} tokens of {tier}" for tier, tokens in hits if tokens
        )
        or "nothing hit"
    )


def _rounded(numbers: Sequence[float], digits: int = 4) -> list[float]:
    return [round(number, digits) for number in numbers]


PARTS: dict[str, Callable[[Plan], Sequence[Figure]]] = {
    "first": first_figures,
    "throughput": throughput_figures,
}
