"""Streams that are made to mislead a policy that learns: it is never much worse than least recently
used.

Each with one size of the tier in a run of the tests, with all of its sizes in `make soak`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from benchmarks import streams
from benchmarks.streams import Stream
from pagoda_tools.replay.simulate import TierSpec, simulate

LEAST = 0.97  # of the hits of least recently used
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"

STREAMS: dict[str, tuple[Callable[[], Stream], tuple[int, ...]]] = {
    "never again": (lambda: streams.unique(1_500, chunks=3), (100, 1_000)),
    "loop just over": (lambda: streams.loop(3_000, 525), (500, 520)),
    "loop just under": (lambda: streams.loop(3_000, 490), (500, 600)),
    "zipf": (lambda: streams.zipf(1, 3_000, 1_000, 0.8), (50, 200, 600)),
    "shifting fast": (
        lambda: streams.zipf(2, 4_000, 1_000, 1.0, every=250),
        (200, 600),
    ),
    "shifting": (
        lambda: streams.zipf(3, 4_000, 1_000, 0.9, every=1_000),
        (200, 600),
    ),
    "shifting slowly": (
        lambda: streams.zipf(4, 4_000, 1_000, 0.9, every=2_000),
        (200, 600),
    ),
    "scans": (lambda: streams.scan_zipf(5, 4_000, 500, 0.9, 250), (100, 400)),
    "agents": (lambda: streams.agents(6, 800), (300, 1_000)),
    "agents, fast": (
        lambda: streams.agents(7, 800, think_seconds=2.0, turns=20.0),
        (300, 1_000),
    ),
    "agents, slow": (
        lambda: streams.agents(8, 800, think_seconds=200.0),
        (300, 2_000),
    ),
    "agents, many tools": (
        lambda: streams.agents(9, 800, tools=150, rate=10.0),
        (500, 2_000),
    ),
    "agents, few tools": (lambda: streams.agents(10, 800, tools=1), (300, 1_000)),
    "agents, bursts": (
        lambda: streams.overloaded(streams.agents(11, 800), 150),
        (300, 1_000),
    ),
    "documents": (lambda: streams.documents(12, 800, 100), (500, 2_000)),
    "rag": (lambda: streams.rag(13, 800, 200), (200, 1_000)),
    "chat by day and night": (
        lambda: streams.chat(14, 1_000, day_seconds=600.0),
        (300, 2_000),
    ),
    "regimes": (lambda: streams.alternating(15, 4, 400), (300, 1_000)),
    "late": (lambda: streams.late(16, 2_000), (300, 1_000)),
    "slow and fast": (lambda: streams.slow_and_fast(17, 4, 300), (300, 1_000)),
    "phases": (lambda: streams.phases(18, 3_000), (300, 1_000)),
    "each twice, near": (lambda: streams.twice(3_000, 200), (150, 500)),
    "each twice, far": (lambda: streams.twice(3_000, 600), (500, 700)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_never_far_behind_lru(name: str) -> None:
    make, sizes = STREAMS[name]
    stream = make()
    at = list(STREAMS).index(name) % len(sizes)
    for chunks in sizes if THOROUGH else sizes[at : at + 1]:
        _check(stream, chunks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["no times", "whole seconds", "a batch", "hours between"]
)
@pytest.mark.parametrize("kind", ["agents", "zipf"])
def test_never_far_behind_lru_whatever_the_times(kind: str, name: str) -> None:
    stream = (
        streams.agents(19, 1_000)
        if kind == "agents"
        else streams.zipf(20, 1_000, 300, 0.9)
    )
    sizes = (200, 600) if kind == "agents" else (50, 150)
    for chunks in sizes if THOROUGH else sizes[:1]:
        _check(streams.odd_times(stream)[name], chunks)


@pytest.mark.slow
def test_a_stream_is_the_same_every_time() -> None:
    for make, sizes in list(STREAMS.values())[3:]:
        assert make() == make()
        assert [each.timestamp_ms for each in make()] == sorted(
            each.timestamp_ms for each in make()
        )
        assert streams.chunks_asked(make()) > min(sizes)


def _check(stream: Stream, chunks: int) -> None:
    hits = [
        simulate(stream, [TierSpec("tier", chunks, policy)]).tiers[0].hits
        for policy in ("lru", "hindsight")
    ]
    assert hits[1] >= LEAST * hits[0], (
        f"{chunks} chunks: LRU {hits[0]} hits, hindsight {hits[1]}"
    )
