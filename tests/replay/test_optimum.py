"""The optimum against all that could be done, and against each policy."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.cache.request_trace import format_request, with_shared_ids
from pagoda_tools.replay import Request, TierSpec, infinite, optimum, simulate
from tests.replay.traces import chained, mooncake, request, sample

POLICIES = ("lru", "hindsight")


def leading(ids: Sequence[int], kept: frozenset[int]) -> int:
    """How many leading chunks are kept."""
    return next((i for i, chunk in enumerate(ids) if chunk not in kept), len(ids))


def best(requests: Sequence[Request], chunks: int) -> int:
    """The most hits there can be: tries all that may be kept after each request."""
    most = {frozenset[int](): 0}  # what is kept -> hits so far
    for asked in requests:
        after: dict[frozenset[int], int] = {}
        for kept, hits in most.items():
            now = hits + leading(asked.hash_ids, kept)
            there = kept | set(asked.hash_ids)
            for size in range(min(chunks, len(there)) + 1):
                for choice in map(frozenset, combinations(sorted(there), size)):
                    after[choice] = max(after.get(choice, 0), now)
        most = after
    return max(most.values())


@given(chained(depth=3, most=6), st.integers(1, 3))
def test_equals_the_best_of_all_that_can_be_done(
    requests: list[Request], chunks: int
) -> None:
    accesses = sum(len(one.hash_ids) for one in requests)
    assert round(optimum(requests, chunks) * accesses) == best(requests, chunks)


@settings(max_examples=30)
@given(chained(most=60), st.integers(1, 20), st.sampled_from(POLICIES))
def test_no_policy_beats_it(
    requests: list[Request], chunks: int, policy: str
) -> None:
    done = simulate(requests, [TierSpec("tier", chunks, policy)])
    assert (
        done.hit_rate
        <= optimum(requests, chunks) + 1e-12
        <= infinite(requests) + 2e-12
    )


@given(chained(most=20))
def test_with_room_for_all_it_is_the_cache_without_bounds(
    requests: list[Request],
) -> None:
    assert optimum(requests, 10_000) == pytest.approx(infinite(requests))


def test_lets_pass_what_is_asked_for_later_than_all_it_keeps() -> None:
    requests = [
        request(1),
        request(2),
        request(1),
        request(2),
        request(1),
        request(2),
    ]
    assert optimum(requests, 1) == pytest.approx(2 / 6)


def test_nothing_is_asked_for() -> None:
    assert optimum([], 1) == infinite([]) == 0.0
    assert optimum([request()], 1) == infinite([request()]) == 0.0


def test_a_capacity_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="room for at least one chunk, not 0"):
        optimum([], 0)


def test_a_cache_without_bounds_serves_leading_runs_only() -> None:
    assert infinite(
        [request(1, 2, 3), request(9, 2, 3), request(1, 2, 4)]
    ) == pytest.approx(2 / 9)


@pytest.mark.parametrize(
    ("name", "without_bounds", "chunks", "percent"),
    [
        ("conversation", 36.6, 1_000, 19.07),
        ("conversation", 36.6, 5_000, 34.12),
        ("conversation", 36.6, 20_000, 36.64),
        ("conversation", 36.6, 50_000, 36.64),
        ("synthetic", 63.96, 1_000, 27.67),
        ("synthetic", 63.96, 5_000, 52.63),
        ("synthetic", 63.96, 20_000, 63.96),
    ],
)
def test_known_figures_of_the_traces(
    name: str, without_bounds: float, chunks: int, percent: float
) -> None:
    requests = mooncake(name)
    assert 100 * infinite(requests) == pytest.approx(without_bounds, abs=0.1)
    assert 100 * optimum(requests, chunks) == pytest.approx(percent, abs=0.1)


@pytest.mark.parametrize(
    ("chunks", "percent"), [(500, 13.314), (1000, 17.999), (5000, 28.906)]
)
def test_figures_of_the_sample(chunks: int, percent: float) -> None:
    assert 100 * infinite(sample()) == pytest.approx(28.906, abs=0.001)
    assert 100 * optimum(sample(), chunks) == pytest.approx(percent, abs=0.001)


@pytest.mark.slow
def test_a_long_trace_takes_little_memory() -> None:
    """Long traces have many accesses to few chunks; each access takes some 60 bytes at most."""
    ids = list(range(10**6, 10**6 + 5_000))
    one = request(*ids)
    accesses = 20 * len(ids)
    optimum([one], 10)
    line = format_request(one).encode()
    decode = msgspec.json.Decoder(Request).decode
    tracemalloc.start()
    try:
        requests = list(with_shared_ids(decode(line) for _ in range(20)))
        read = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        optimum(requests, 1_000)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert requests == [one] * 20
    assert read / accesses < 15
    assert most / accesses < 60
