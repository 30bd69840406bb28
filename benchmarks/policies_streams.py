"""The streams of the policy benchmarks: traces, generated streams that no policy was tuned on, and
random streams.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
import streams
from numpy.random import Generator
from streams import Stream

from pagoda.cache.request_trace import Request, read_trace

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
SAMPLE = "sample"
_SIZES = (1_000, 2_000, 5_000, 20_000, 50_000)
_SEED = 7_001  # seeds from this one on have no other use

GENERATED: dict[str, Callable[[], Stream]] = {
    "agents": lambda: streams.agents(_SEED, 5_000),
    "agents, many tools": lambda: streams.agents(
        _SEED + 1, 4_000, rate=10.0, tools=150, turns=15.0, think_seconds=25.0
    ),
    "agents, slow": lambda: streams.agents(
        _SEED + 2, 6_000, rate=3.0, turns=6.0, think_seconds=150.0
    ),
    "agents, bursts": lambda: streams.overloaded(
        streams.agents(_SEED + 3, 5_000, turns=10.0, think_seconds=15.0), 500
    ),
    "documents": lambda: streams.documents(_SEED + 4, 4_000, 400),
    "rag": lambda: streams.rag(_SEED + 5, 8_000, 500),
    "chat, day and night": lambda: streams.chat(
        _SEED + 6, 8_000, day_seconds=3_600.0
    ),
    "zipf": lambda: streams.zipf(_SEED + 7, 30_000, 20_000, 0.8),
    "zipf, shifting": lambda: streams.zipf(
        _SEED + 8, 30_000, 4_000, 0.9, every=3_000
    ),
    "zipf and scans": lambda: streams.scan_zipf(
        _SEED + 9, 30_000, 6_000, 0.9, 3_000
    ),
    "regimes": lambda: streams.alternating(_SEED + 10, 6, 1_000),
    "late agents": lambda: streams.late(_SEED + 20, 12_000),
    "slow and fast": lambda: streams.slow_and_fast(_SEED + 30, 6, 1_000),
    "phases": lambda: streams.phases(_SEED + 40, 24_000),
    "loop over 1,100": lambda: streams.loop(20_000, 1_100),
    "each twice": lambda: streams.twice(20_000, 1_500),
    "never again": lambda: streams.unique(10_000, chunks=6),
}


class Cell(NamedTuple):
    """One stream and one size of the tier. `table`: "designed" or "unseen"."""

    table: str
    stream: str
    chunks: int


def cells(traces: Path, only: str, quick: bool) -> list[Cell]:
    """Return the cells of the tables; without the traces the shipped sample replaces the first
    one.
    """
    if only == "cost":
        return []
    found = (traces / "mooncake_conversation.jsonl").exists()
    if not found:
        print(
            f"no traces in {traces}: the shipped sample is used instead",
            file=sys.stderr,
        )
    designed = "mooncake_conversation" if found else SAMPLE
    listed: list[Cell] = []
    if only != "generated":
        listed += [
            Cell("designed", designed, size)
            for size in (_SIZES if found else _SIZES[:3])
        ]
    if only != "generated" and found:
        listed += [Cell("unseen", "mooncake_synthetic", size) for size in _SIZES]
    if only != "traces":
        listed += [
            Cell("unseen", name, size)
            for name in GENERATED
            for size in (1_000, 5_000)
        ]
    return [each for each in listed if each.chunks <= 2_000] if quick else listed


@cache
def stream(name: str, traces: Path) -> list[Request]:
    """Return the requests of a stream. Raise OSError or ValueError if it cannot be read."""
    if name in GENERATED:
        return GENERATED[name]()
    if name == SAMPLE:
        with resources.as_file(
            resources.files("pagoda_tools.replay") / "sample.jsonl.gz"
        ) as path:
            return list(read_trace(path))
    return list(read_trace(traces / f"{name}.jsonl"))


class Drawn(NamedTuple):
    """Draw a random stream and the size of a tier for it."""

    text: str
    stream: Stream
    chunks: int
    working_set: int


def drawn(seed: int, number: int, requests: int = 5_000) -> Drawn:
    """Return the `number`-th random stream of a seed: one kind, or several: at once, in sequence or
    alternating.
    """
    random = np.random.default_rng([seed, number])
    how = str(
        random.choice(["one", "one", "mixed", "mixed", "after", "after", "turns"])
    )
    kinds = {"one": 1, "turns": 2}.get(how) or int(random.integers(2, 4))
    turns = int(random.choice([4, 6])) if how == "turns" else kinds
    share = requests if kinds == 1 else 2 * requests // turns
    seeds = [int(random.integers(1 << 30)) for _ in range(kinds)]
    parts = [
        _part(np.random.default_rng(seeds[i % kinds]), share)
        for i in range(turns)
    ]
    made = [part for _, part in parts]
    if how == "mixed":
        result = streams.mixed(*made)
    elif turns > 1:
        result = streams.after(*made)
    else:
        result = made[0]
    texts = [text for text, _ in parts[:kinds]]
    if random.random() < 0.25:
        result = streams.overloaded(result, _log(random, 50, 1_000))
        texts.append("bursts")
    if random.random() < 0.06:
        odd = streams.odd_times(result)
        texts.append(str(random.choice(list(odd))))
        result = odd[texts[-1]]
    working_set = streams.chunks_asked(result)
    size = int(
        np.clip(
            working_set * np.exp(random.uniform(np.log(0.004), np.log(0.7))),
            32,
            20_000,
        )
    )
    return Drawn(f"{how}: {' + '.join(texts)}", result, size, working_set)


def _part(random: Generator, requests: int) -> tuple[str, Stream]:
    """Return a stream of one kind with random parameters, and its name."""
    name = str(random.choice(_KINDS))
    return name, _PARTS[name](random, int(random.integers(1 << 30)), requests)


def _log(random: Generator, low: float, high: float) -> int:
    return round(_spread(random, low, high))


def _spread(random: Generator, low: float, high: float) -> float:
    """Draw a log-uniform number: 1 to 2 is as likely as 10 to 20."""
    return float(np.exp(random.uniform(np.log(low), np.log(high))))


def _agents(random: Generator, seed: int, requests: int) -> Stream:
    return streams.agents(
        seed,
        requests,
        rate=_spread(random, 0.3, 20),
        tools=_log(random, 1, 300),
        tool_chunks=_log(random, 2, 30),
        turns=_spread(random, 2, 40),
        think_seconds=_spread(random, 1, 300),
        growth=_log(random, 1, 5),
    )


def _chat(random: Generator, seed: int, requests: int) -> Stream:
    return streams.chat(
        seed,
        requests,
        rate=_spread(random, 0.3, 20),
        turns=_spread(random, 1.2, 8),
        think_seconds=_spread(random, 5, 600),
        first=_log(random, 2, 20),
        growth=_log(random, 1, 6),
        day_seconds=_spread(random, 600, 86_400),
    )


def _documents(random: Generator, seed: int, requests: int) -> Stream:
    items = _log(random, 20, 3_000)
    chunks = _log(random, 4, 40)
    exponent = random.uniform(0.3, 1.3)
    rate = _spread(random, 0.3, 20)
    return streams.documents(seed, requests // 2, items, chunks, exponent, rate)


def _rag(random: Generator, seed: int, requests: int) -> Stream:
    passages = _log(random, 20, 2_000)
    exponent = random.uniform(0.5, 1.4)
    each = int(random.integers(1, 6))
    return streams.rag(
        seed,
        requests,
        passages,
        exponent,
        each,
        _log(random, 1, 5),
        _spread(random, 0.3, 20),
    )


def _zipf(random: Generator, seed: int, requests: int) -> Stream:
    items = _log(random, 100, 20_000)
    exponent = random.uniform(0.3, 1.3)
    every = int(random.choice([0, requests // 20, requests // 5, requests // 2]))
    return streams.zipf(seed, requests, items, exponent, *_plain(random), every)


def _scan_zipf(random: Generator, seed: int, requests: int) -> Stream:
    items = _log(random, 100, 10_000)
    exponent = random.uniform(0.5, 1.3)
    return streams.scan_zipf(
        seed,
        requests,
        items,
        exponent,
        _log(random, 50, requests // 2),
        *_plain(random),
    )


def _plain(random: Generator) -> tuple[int, float]:
    """Draw the chunks of a prompt, and the requests a second."""
    return _log(random, 1, 12), _spread(random, 0.3, 50)


_PARTS: dict[str, Callable[[Generator, int, int], Stream]] = {
    "agents": _agents,
    "chat": _chat,
    "documents": _documents,
    "rag": _rag,
    "zipf": _zipf,
    "scan_zipf": _scan_zipf,
    "unique": lambda r, _, n: streams.unique(n, *_plain(r)),
    "loop": lambda r, _, n: streams.loop(n, _log(r, 20, n // 3), *_plain(r)),
    "twice": lambda r, _, n: streams.twice(n, _log(r, 5, n // 4), *_plain(r)),
}
# the most common requests to engines
_KINDS = [*_PARTS, "agents", "agents", "chat"]
