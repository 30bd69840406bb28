"""Generated streams of requests for tests and benchmarks of policies: typical requests to engines,
and harder ones.

Each generator returns a list of `Request` in order of time, the same list for the same arguments.
Chunks are numbers; `after` and `mixed` keep the chunks of their streams distinct. Pure functions:
thread-safe. `rate` is requests a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.random import Generator

from pagoda.cache.request_trace import Request

_CHUNK_TOKENS = 512
_DAY_SECONDS = 86_400.0

Stream = list[Request]
Ids = list[int]


class _Fresh:
    """Allocates numbers that no other chunk of the stream has."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def __call__(self, chunks: int) -> Ids:
        self._next += chunks
        return list(range(self._next - chunks, self._next))


def _asked(
    seconds: float, chunks: Iterable[int], answer_tokens: int = 128
) -> Request:
    ids = tuple(chunks)
    return Request(
        round(seconds * 1e3, 3), len(ids) * _CHUNK_TOKENS, answer_tokens, ids
    )


def _first(requests: Iterable[Request], most: int) -> Stream:
    return sorted(requests, key=lambda each: each.timestamp_ms)[:most]


def _arrivals(random: Generator, requests: int, rate: float) -> list[float]:
    """Return the arrival times of independent requests in seconds."""
    times: list[float] = np.cumsum(
        random.exponential(1.0 / rate, requests)
    ).tolist()
    return times


def _chosen(
    random: Generator, choices: int, items: int, exponent: float
) -> list[int]:
    """Choose among items of unequal popularity: the k-th is chosen k**exponent times less often."""
    weights = np.arange(1, items + 1) ** -float(exponent)
    chosen: list[int] = random.choice(
        items, choices, p=weights / weights.sum()
    ).tolist()
    return chosen


def _prompt(number: int, chunks: int) -> range:
    return range(number * chunks, (number + 1) * chunks)


def unique(requests: int, chunks: int = 1, rate: float = 10.0) -> Stream:
    """Request every chunk once: an endless scan."""
    return [_asked(i / rate, _prompt(i, chunks)) for i in range(requests)]


def loop(
    requests: int, length: int, chunks: int = 1, rate: float = 10.0
) -> Stream:
    """Repeat the same `length` prompts in a loop."""
    return [
        _asked(i / rate, _prompt(i % length, chunks)) for i in range(requests)
    ]


def twice(requests: int, gap: int, chunks: int = 1, rate: float = 10.0) -> Stream:
    """Request each prompt exactly twice, with `gap` others between: a second use predicts
    nothing.
    """
    stream: Stream = []
    for i in range(requests // 2):
        stream.append(_asked(i / rate, _prompt(i, chunks)))
        if i >= gap:
            stream.append(_asked((i + 0.5) / rate, _prompt(i - gap, chunks)))
    return stream


def zipf(
    seed: int,
    requests: int,
    items: int,
    exponent: float,
    chunks: int = 1,
    rate: float = 10.0,
    every: int = 0,
) -> Stream:
    """Request prompts of unequal popularity; new ones replace half of them after each `every`
    requests.
    """
    random = np.random.default_rng(seed)
    chosen = _chosen(random, requests, items, exponent)
    times = _arrivals(random, requests, rate)
    return [
        _asked(
            times[i],
            _prompt(
                chosen[i] + (i // every * (items // 2) if every else 0), chunks
            ),
        )
        for i in range(requests)
    ]


def scan_zipf(
    seed: int,
    requests: int,
    items: int,
    exponent: float,
    every: int,
    chunks: int = 1,
    rate: float = 10.0,
) -> Stream:
    """Alternate `zipf` with prompts that are requested once, `every` requests each."""
    fresh = _Fresh(items * chunks)
    stream = zipf(seed, requests, items, exponent, chunks, rate)
    return [
        _asked(each.timestamp_ms / 1e3, fresh(chunks)) if i // every % 2 else each
        for i, each in enumerate(stream)
    ]


def agents(
    seed: int,
    requests: int,
    rate: float = 5.0,
    tools: int = 20,
    tool_chunks: int = 12,
    turns: float = 8.0,
    think_seconds: float = 10.0,
    growth: int = 2,
) -> Stream:
    """Request as agents that share the prompts of their tools; each turn extends all turns before
    it.

    `turns`, `tool_chunks`, `think_seconds` and `growth` (chunks a turn) are means.
    """
    random = np.random.default_rng(seed)
    fresh = _Fresh()
    prompts = [
        fresh(int(random.integers(1, 2 * tool_chunks))) for _ in range(tools)
    ]
    conversations = round(requests * 2 / turns) + 1
    starts = _arrivals(random, conversations, rate / turns)
    stream: Stream = []
    for at, tool in zip(
        starts, _chosen(random, conversations, tools, 1.0), strict=True
    ):
        context = prompts[tool]
        for _ in range(int(random.geometric(1.0 / turns))):
            context = context + fresh(int(random.integers(1, 2 * growth)))
            stream.append(_asked(at, context))
            at += 1.0 + random.exponential(think_seconds)
    return _first(stream, requests)


def documents(
    seed: int,
    requests: int,
    items: int,
    chunks: int = 40,
    exponent: float = 0.8,
    rate: float = 2.0,
) -> Stream:
    """Ask questions about long shared documents, all after one system prompt."""
    random = np.random.default_rng(seed)
    chosen = _chosen(random, requests, items, exponent)
    times = _arrivals(random, requests, rate)
    fresh = _Fresh(1 + items * chunks)
    return [
        _asked(
            at,
            [
                items * chunks,
                *_prompt(item, chunks),
                *fresh(int(random.integers(1, 3))),
            ],
        )
        for at, item in zip(times, chosen, strict=True)
    ]


def rag(
    seed: int,
    requests: int,
    passages: int,
    exponent: float = 0.9,
    each: int = 4,
    chunks: int = 2,
    rate: float = 5.0,
) -> Stream:
    """Request a system prompt, `each` passages of unequal popularity, and a unique question.

    A passage has the same chunks only after the same passages: its KV depends on everything before
    it.
    """
    random = np.random.default_rng(seed)
    fresh = _Fresh()
    system = fresh(3)
    seen: dict[tuple[int, ...], Ids] = {}
    found = _chosen(random, requests * each, passages, exponent)
    stream: Stream = []
    for i, at in enumerate(_arrivals(random, requests, rate)):
        chain = tuple(found[i * each : (i + 1) * each])
        context = list(system)
        for k in range(each):
            if chain[: k + 1] not in seen:
                seen[chain[: k + 1]] = fresh(chunks)
            context += seen[chain[: k + 1]]
        stream.append(_asked(at, context + fresh(1)))
    return stream


def chat(
    seed: int,
    requests: int,
    rate: float = 3.0,
    turns: float = 3.0,
    think_seconds: float = 60.0,
    first: int = 6,
    growth: int = 2,
    day_seconds: float = _DAY_SECONDS,
) -> Stream:
    """Request as people who may continue a chat later; day and night vary the rate from 0.2 to 1.8
    times.
    """
    random = np.random.default_rng(seed)
    fresh = _Fresh()
    system = fresh(1)
    stream: Stream = []
    at = 0.0
    while len(stream) < 2 * requests:
        at += random.exponential(
            turns / rate / (1.0 + 0.8 * np.sin(2 * np.pi * at / day_seconds))
        )
        context = list(system)
        moment = at
        for turn in range(int(random.geometric(1.0 / turns))):
            context = context + fresh(
                int(random.integers(1, 2 * (growth if turn else first)))
            )
            stream.append(_asked(moment, context))
            moment += 2.0 + think_seconds * random.lognormal(-0.5, 1.0)
    return _first(stream, requests)


def overloaded(
    stream: Stream, every: int, faster: float = 4.0, slower: float = 0.5
) -> Stream:
    """Return the same requests in bursts: `every` of them `faster`, then as many `slower`, in
    turn.
    """
    out: Stream = []
    at = before = 0.0
    for i, each in enumerate(stream):
        at += (each.timestamp_ms - before) / (
            faster if i // every % 2 else slower
        )
        before = each.timestamp_ms
        out.append(replace(each, timestamp_ms=round(at, 3)))
    return out


def after(*streams: Stream) -> Stream:
    """Concatenate streams; they share no chunks."""
    out: Stream = []
    at = 0.0
    number = 0
    for stream in streams:
        out += [_moved(each, at, number) for each in stream]
        at = out[-1].timestamp_ms + 1.0
        number = number + _numbers(stream)
    return out


def mixed(*streams: Stream) -> Stream:
    """Merge streams by time; they share no chunks."""
    out: Stream = []
    number = 0
    for stream in streams:
        out += [_moved(each, 0.0, number) for each in stream]
        number += _numbers(stream)
    return _first(out, len(out))


def _moved(request: Request, milliseconds: float, number: int) -> Request:
    ids = tuple(each + number for each in request.hash_ids)
    return replace(
        request,
        timestamp_ms=round(request.timestamp_ms + milliseconds, 3),
        hash_ids=ids,
    )


def _numbers(stream: Stream) -> int:
    return 1 + max(max(each.hash_ids) for each in stream)


def alternating(seed: int, rounds: int, requests: int) -> Stream:
    """Alternate between prompts without reuse and agents whose every turn is reused."""
    return after(
        *(
            agents(seed + i, requests)
            if i % 2
            else unique(requests, chunks=8, rate=5.0)
            for i in range(rounds)
        )
    )


def late(seed: int, requests: int) -> Stream:
    """Start with a long phase without reuse, then request as agents."""
    return after(
        unique(requests * 3 // 4, chunks=8, rate=5.0), agents(seed, requests // 4)
    )


def slow_and_fast(seed: int, rounds: int, requests: int) -> Stream:
    """Alternate between agents that think for minutes and agents that answer at once."""
    return after(
        *(
            agents(
                seed + i,
                requests,
                rate=4.0,
                turns=6.0,
                think_seconds=5.0 if i % 2 else 120.0,
            )
            for i in range(rounds)
        )
    )


def phases(seed: int, requests: int) -> Stream:
    """Request prompts, then agents, then prompts whose popularity shifts: what a policy learned is
    wrong later.
    """
    part = requests // 3
    return after(
        zipf(seed, part, 20_000, 0.7),
        agents(seed, part),
        zipf(seed, part, 3_000, 0.9, every=3_000),
    )


def retimed(stream: Stream, seconds: Callable[[int], float]) -> Stream:
    """Return the same requests, the i-th at `seconds(i)`."""
    return [
        replace(each, timestamp_ms=seconds(i) * 1e3)
        for i, each in enumerate(stream)
    ]


def odd_times(stream: Stream) -> dict[str, Stream]:
    """Return the same requests with times as in traces: none, whole seconds, a batch at once, hours
    between.
    """
    return {
        "no times": retimed(stream, lambda _: 0.0),
        "whole seconds": [
            replace(each, timestamp_ms=each.timestamp_ms // 1000 * 1000.0)
            for each in stream
        ],
        "a batch": retimed(stream, lambda i: i * 1e-6),
        "hours between": retimed(stream, lambda i: i * 10_000.0),
    }


def chunks_asked(stream: Sequence[Request]) -> int:
    """Return the number of distinct requested chunks: the working set."""
    return len({each for request in stream for each in request.hash_ids})
