"""Simulated tiers: known figures, a naive simulator, several tiers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_tools.replay import (
    Request,
    SimulatedOutcome,
    Simulation,
    TierSpec,
    infinite,
    simulate,
)
from pagoda_tools.replay.simulated_tier import marks_of_ids
from tests.replay.traces import chained, mooncake, request, sample

POLICIES = ("lru", "hindsight")


def one(
    requests: Sequence[Request], chunks: int, policy: str = "lru"
) -> SimulatedOutcome:
    return simulate(requests, [TierSpec("host", chunks, policy)])


@pytest.mark.slow  # where the traces are; elsewhere the sample is tested
@pytest.mark.parametrize(
    ("name", "chunks", "percent"),
    [
        ("conversation", 1_000, 4.45),
        ("conversation", 5_000, 11.18),
        ("conversation", 20_000, 28.78),
        ("conversation", 50_000, 35.46),
        ("synthetic", 1_000, 8.41),
        ("synthetic", 5_000, 27.93),
        ("synthetic", 20_000, 57.18),
    ],
)
def test_known_figures_of_the_traces(
    name: str, chunks: int, percent: float
) -> None:
    assert 100 * one(mooncake(name), chunks).hit_rate == pytest.approx(
        percent, abs=0.1
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunks", "hits"), [(500, 2055), (1000, 2218), (2000, 2652), (5000, 6324)]
)
def test_figures_of_the_sample(chunks: int, hits: int) -> None:
    done = one(sample(), chunks)
    tier = done.tiers[0]
    assert done.requests == 2000
    assert done.accesses == 54559
    assert done.hits == hits
    assert tier.chunks_written == done.accesses - hits
    assert tier.evicted == tier.chunks_written - chunks
    assert tier.refused == 0


def naive_lru(requests: Sequence[Request], chunks: int) -> list[int]:
    """Hits of each request: least recently used, touched from the tail to the head."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = []
    for asked in requests:
        hits.append(
            next(
                (
                    i
                    for i, chunk in enumerate(asked.hash_ids)
                    if chunk not in kept
                ),
                len(asked.hash_ids),
            )
        )
        for chunk in reversed(asked.hash_ids[:chunks]):
            kept[chunk] = None
            kept.move_to_end(chunk)
        while len(kept) > chunks:
            kept.popitem(last=False)
    return hits


@pytest.mark.slow
@given(chained(most=60), st.integers(1, 30))
def test_lru_is_least_recently_used_tail_first(
    requests: list[Request], chunks: int
) -> None:
    simulation = Simulation([TierSpec("host", chunks, "lru")])
    assert [simulation.request(asked)[0] for asked in requests] == naive_lru(
        requests, chunks
    )


@pytest.mark.slow
@given(chained(most=30), st.sampled_from(POLICIES))
def test_with_room_for_all_everything_stays(
    requests: list[Request], policy: str
) -> None:
    done = one(requests, 2000, policy)
    assert done.hit_rate == pytest.approx(infinite(requests))
    assert done.tiers[0].evicted == 0
    assert done.tiers[0].refused == 0
    assert done.tiers[0].chunks_written == len(
        {chunk for asked in requests for chunk in asked.hash_ids}
    )


@pytest.mark.slow
@given(
    chained(most=60),
    st.integers(1, 10),
    st.integers(1, 40),
    st.sampled_from(POLICIES),
    st.sampled_from(POLICIES),
)
def test_nothing_is_counted_twice(
    requests: list[Request], host: int, disk: int, above: str, below: str
) -> None:
    simulation = Simulation(
        [TierSpec("host", host, above), TierSpec("disk", disk, below)]
    )
    served = [simulation.request(asked) for asked in requests]
    done = simulation.outcome()
    assert done.requests == len(requests)
    assert done.accesses == sum(len(asked.hash_ids) for asked in requests)
    assert [tier.hits for tier in done.tiers] == np.sum(served, axis=0).tolist()
    assert (
        done.hits == sum(map(sum, served)) == round(done.hit_rate * done.accesses)
    )
    for tier, simulated in zip(done.tiers, simulation._tiers, strict=True):
        assert (
            len(simulated.residents())
            == tier.chunks_written - tier.evicted
            <= tier.chunks
        )


@pytest.mark.slow
@given(chained(most=60), st.integers(4, 10), st.integers(60, 90))
def test_a_larger_tier_below_holds_what_it_would_hold_alone(
    requests: list[Request], host: int, disk: int
) -> None:
    alone = [one(requests, chunks).hits for chunks in (host, disk)]
    both = simulate(
        requests, [TierSpec("host", host, "lru"), TierSpec("disk", disk, "lru")]
    )
    assert both.tiers[0].hits == alone[0]
    assert both.hits >= alone[0]


def test_what_a_lower_tier_has_is_brought_up() -> None:
    simulation = Simulation(
        [TierSpec("host", 3, "lru"), TierSpec("disk", 100, "lru")]
    )
    first = request(1, 2, 3)
    second = request(4, 5, 6)
    assert simulation.request(first) == (0, 0)
    assert simulation.request(second) == (0, 0)
    assert simulation.request(first) == (0, 3)
    assert simulation.request(first) == (3, 0)
    assert simulation.request(request(1, 2, 9)) == (2, 0)
    assert simulation.request(request(4, 5, 6, 7)) == (0, 3)
    host, disk = simulation.outcome().tiers
    assert host.chunks_written == 3 + 3 + 3 + 1 + 3
    assert disk.chunks_written == 3 + 3 + 1 + 1
    assert host.hits == 5
    assert disk.hits == 6


def test_what_found_no_room_above_goes_below() -> None:
    simulation = Simulation(
        [TierSpec("host", 4, "lru"), TierSpec("disk", 100, "lru")]
    )
    long = request(*range(10))
    assert simulation.request(long) == (0, 0)
    assert simulation.request(long) == (4, 6)
    host, disk = simulation.outcome().tiers
    assert host.chunks_written == 4
    assert host.refused == 12
    assert disk.chunks_written == 10


@pytest.mark.slow
def test_every_tier_may_refuse() -> None:
    tiers = [
        TierSpec("host", 300, "hindsight"),
        TierSpec("disk", 1000, "hindsight"),
    ]
    host, disk = simulate(sample(), tiers).tiers
    alone = simulate(sample(), tiers[:1]).tiers[0]
    assert host.refused > 0
    assert disk.refused > 0
    assert host.chunks_written < alone.chunks_written + disk.hits


@pytest.mark.slow
@given(
    chained(most=60),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(POLICIES),
)
def test_a_tier_below_does_what_it_would_do_alone(
    requests: list[Request], host: int, disk: int, policy: str
) -> None:
    """So that a host tier above it, however small, never makes it serve less."""
    alone = Simulation([TierSpec("disk", disk, policy)])
    both = Simulation(
        [TierSpec("host", host, policy), TierSpec("disk", disk, policy)]
    )
    for asked in requests:
        assert sum(both.request(asked)) >= sum(alone.request(asked))
        assert (
            both._tiers[1].residents().keys()
            == alone._tiers[0].residents().keys()
        )


def test_what_is_hot_above_stays_below() -> None:
    simulation = Simulation(
        [TierSpec("host", 8, "lru"), TierSpec("disk", 12, "lru")]
    )
    hot = request(1, 2, 3)
    for number in range(10):
        simulation.request(hot)
        simulation.request(request(100 + 2 * number, 101 + 2 * number))
        assert {1, 2, 3} <= simulation._tiers[1].residents().keys()


@pytest.mark.slow
def test_a_simulation_repeats_exactly() -> None:
    tiers = [
        TierSpec("host", 300, "hindsight"),
        TierSpec("disk", 1000, "hindsight"),
    ]
    assert simulate(sample()[:500], tiers) == simulate(sample()[:500], tiers)


def test_only_the_leading_run_counts() -> None:
    done = simulate(
        [request(1, 2, 3), request(9, 2, 3), request(1, 2, 4)],
        [TierSpec("host", 100, "lru")],
    )
    assert done.hits == 2
    assert done.tiers[0].chunks_written == 5


def test_an_id_that_comes_twice_in_a_request_counts_once() -> None:
    simulation = Simulation([TierSpec("host", 100, "lru")])
    assert simulation.request(request(1, 2, 1, 3)) == (0,)
    assert simulation.request(request(1, 2, 1, 3)) == (3,)
    assert simulation.outcome().accesses == 8


def test_no_chunks_no_requests() -> None:
    simulation = Simulation([TierSpec("host", 1, "lru")])
    assert simulation.outcome().hit_rate == 0.0
    assert simulation.request(request()) == (0,)
    assert simulation.outcome().hit_rate == 0.0


@pytest.mark.parametrize(
    ("tiers", "wrong"),
    [
        ([], "at least one tier"),
        ([TierSpec("host", 0, "lru")], "room for at least one chunk, not 0"),
        ([TierSpec("host", 5, "luck")], "unknown policy 'luck'"),
    ],
)
def test_wrong_tiers_are_refused(tiers: list[TierSpec], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Simulation(tiers)


def test_marks_are_spread() -> None:
    marks = marks_of_ids(range(100_000))
    assert len(set(marks.tolist())) == 100_000
    counts = np.bincount((marks % np.uint64(64)).astype(np.int64), minlength=64)
    assert counts.min() > 1300
    assert marks_of_ids([0, 2**64 - 1]).dtype == np.uint64
