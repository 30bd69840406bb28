"""Least recently used by a dictionary: the figures are those of the policy itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.ledger.allocation import STAMP_STEP
from pagoda.policy.eviction_queue import RANKED_AT_ONCE
from pagoda_tools.replay import (
    Request,
    SimulatedOutcome,
    Simulation,
    TierSpec,
    simulate,
)
from pagoda_tools.replay.exact_lru import LruTier, NotExactError
from pagoda_tools.replay.simulate import simulate_each
from tests.replay.traces import chained, mooncake, request, sample

Figures = tuple[SimulatedOutcome, list[tuple[int, ...]]]


def tiers_of(*sizes: int) -> list[TierSpec]:
    return [TierSpec(f"tier{at}", size, "lru") for at, size in enumerate(sizes)]


def by_the_policy(requests: Sequence[Request], *sizes: int) -> Figures:
    simulation = Simulation(tiers_of(*sizes))
    served = [simulation.request(each) for each in requests]
    return simulation.outcome(), served


def is_exact(requests: Sequence[Request], size: int) -> bool:
    tier = LruTier(size)
    try:
        for each in requests:
            tier.request(each.hash_ids)
    except NotExactError:
        return False
    return True


def conversations(seed: int, count: int, longest: int) -> list[Request]:
    """Generate prompts that begin like one of 300 others, which become longer."""
    random = np.random.default_rng(seed)
    latest: list[list[int]] = [[] for _ in range(300)]
    requests = []
    last = 0
    for ms in range(count):
        which = int(random.zipf(1.2)) % len(latest)
        before = latest[which][: int(random.integers(longest))]
        end = last + int(random.integers(1, longest))
        latest[which] = [*before, *range(last, end)]
        last = end
        requests.append(request(*latest[which], ms=float(ms)))
    return requests


@pytest.mark.slow
@given(chained(most=60), st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_random_requests_have_the_figures_of_the_policy(
    requests: list[Request], sizes: list[int]
) -> None:
    for size in sizes:
        assert is_exact(requests, size)
    assert simulate_each(requests, tiers_of(*sizes)) == by_the_policy(
        requests, *sizes
    )


@given(
    st.lists(st.lists(st.integers(0, 12), max_size=8), max_size=40),
    st.lists(st.integers(1, 12), min_size=1, max_size=2),
)
def test_so_have_ids_that_do_not_name_whole_prefixes(
    prompts: list[list[int]], sizes: list[int]
) -> None:
    requests = [request(*ids) for ids in prompts]
    assert simulate_each(requests, tiers_of(*sizes)) == by_the_policy(
        requests, *sizes
    )


@pytest.mark.parametrize(
    "prompts",
    [
        [(1, 2), (9,), (9, 2)],  # it follows another one than before
        [(1, 2), (9, 2)],  # it is kept, the one before it is not
        [(1, 2, 1)],
        [(1, 2), (1, 2, 2)],
    ],
    ids=["moved", "hole", "twice", "twice after a hit"],
)
def test_what_the_policy_orders_otherwise_is_seen(
    prompts: list[tuple[int, ...]],
) -> None:
    requests = [request(*ids) for ids in prompts]
    assert not is_exact(requests, 100)
    assert simulate_each(requests, tiers_of(100)) == by_the_policy(requests, 100)


def test_stamps_of_two_requests_may_be_equal_if_one_is_very_long() -> None:
    assert is_exact([request(*range(STAMP_STEP))], 100)
    assert not is_exact([request(*range(STAMP_STEP + 1))], 100)


def test_what_has_no_room_is_refused() -> None:
    requests = [request(*range(10)), request(*range(10)), request(20)]
    outcome, served = simulate_each(requests, tiers_of(4))
    assert served == [(0,), (4,), (0,)]
    assert outcome.tiers[0][3:] == (4, 5, 1, 12)
    assert (outcome, served) == by_the_policy(requests, 4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_ranked_slots_that_are_used_up_are_seen(seed: int) -> None:
    """A queue has a sixteenth of the slots; prompts of 400 chunks use more than it may have left,
    those of 40 never do.
    """
    size = RANKED_AT_ONCE + 1
    short = conversations(seed, 2000, longest=40)
    assert is_exact(short, size)
    assert simulate_each(short, tiers_of(size)) == by_the_policy(short, size)
    long = conversations(seed, 300, longest=400)
    assert not is_exact(long, size)
    assert is_exact(long, size - 1)
    assert simulate_each(long, tiers_of(size)) == by_the_policy(long, size)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1_000, 8_192, 8_193, 12_000, 20_000, 40_000])
def test_the_sample_has_the_figures_of_the_policy(chunks: int) -> None:
    assert simulate_each(sample(), tiers_of(chunks)) == by_the_policy(
        sample(), chunks
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("conversation", (20_000,)),
        ("conversation", (100_000,)),
        ("synthetic", (1_000, 15_000)),
        ("synthetic", (12_000,)),
    ],
)
def test_so_have_the_traces(name: str, sizes: tuple[int, ...]) -> None:
    assert simulate_each(mooncake(name), tiers_of(*sizes)) == by_the_policy(
        mooncake(name), *sizes
    )


def test_requests_are_read_once() -> None:
    requests = [request(1, 2), request(9, 2), request(1, 2)]
    assert simulate(iter(requests), tiers_of(10)).hits == 2
