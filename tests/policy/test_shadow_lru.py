"""What LRU would have served is counted without a second cache, and it takes over where that is
more.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import streams
from pagoda.cache.request_trace import Request
from pagoda.ledger.columns import Columns
from pagoda.policy.hindsight import Hindsight, ShadowLru
from pagoda_tools.replay.simulate import Simulation, TierSpec, simulate

SLOTS = 64


def columns_of(slots: int = SLOTS) -> Columns:
    """Slots used at 1001, 1002, ..., and twice as many ghosts used before, at 1000, 999, ..."""
    columns = Columns(None, slots)
    columns.reset()
    columns.last_use[:] = 1001 + np.arange(slots)
    gone = np.arange(1, 2 * slots + 1)
    columns.table.remember(
        gone.astype(np.uint64),
        1001 - gone,
        np.zeros(2 * slots, np.uint32),
        10**6,
        0,
    )
    return columns


def test_lru_has_what_was_used_last_wherever_it_is() -> None:
    columns = columns_of()
    # kept by the policy though long unused; LRU would have 32 of the ghosts instead
    columns.last_use[:32] = 500
    shadow = ShadowLru(columns)
    values = np.zeros(ShadowLru.shared_values)
    shadow.look()
    shadow.count(np.array([500, 0, 1000, 1040, 900]), served=2)
    shadow.share(values, 10**6)
    asked, _, by_lru = values
    assert asked == 5
    assert by_lru == 2


def test_nothing_is_counted_before_there_is_more_than_fits() -> None:
    columns = Columns(None, SLOTS)
    columns.reset()
    columns.last_use[:9] = 5
    shadow = ShadowLru(columns)
    values = np.zeros(ShadowLru.shared_values)
    shadow.look()
    shadow.count(np.array([5, 6]), served=0)
    shadow.share(values, 100)
    assert not values.any()
    assert not shadow.wins


def test_it_wins_where_it_would_have_served_more_and_processes_count_together() -> (
    None
):
    columns = columns_of()
    values = np.zeros(ShadowLru.shared_values)
    one = ShadowLru(columns)
    other = ShadowLru(columns)
    for shadow in (one, other):
        shadow.look()
        shadow.share(values, 10**6)
    one.count(np.full(1000, 1060), served=990)
    one.share(values, 10**6)
    other.share(values, 10**6)
    assert one.wins
    assert other.wins
    other.count(np.full(1000, 1060), served=1000)
    other.share(values, 10**6)
    one.share(values, 10**6)
    assert not one.wins
    assert not other.wins


@pytest.mark.parametrize("ahead", [True, False])
def test_what_was_won_or_lost_long_ago_is_soon_made_up_for(ahead: bool) -> None:
    columns = columns_of()
    values = np.zeros(ShadowLru.shared_values)
    shadow = ShadowLru(columns)
    shadow.look()
    for served in (1000 * ahead, 1000 * (not ahead)):
        for _ in range(20):
            shadow.count(np.full(1000, 1060 if served == 0 else 1), served)
            shadow.share(values, 10**4)
        assert shadow.wins == (served == 0)


def test_of_many_slots_a_sample_is_looked_at() -> None:
    columns = columns_of(20_000)
    shadow = ShadowLru(columns)
    shadow.look()
    exact = 1001 + 20_000 * (1 / 32)
    assert abs(shadow._oldest - exact) < 0.05 * 20_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["agents", "loop"])
def test_by_the_bound_it_serves_what_lru_serves(name: str) -> None:
    """The count of what LRU would serve agrees with a separate cache that runs LRU."""
    requests = (
        streams.agents(3, requests=1500)
        if name == "agents"
        else [Request(200.0 * i, 512, 1, (i % 50,)) for i in range(4000)]
    )
    simulation = Simulation([TierSpec("host", 400, "hindsight")])
    policy = simulation._tiers[0]._advice._policy
    assert isinstance(policy, Hindsight)
    counted = np.zeros(3)
    count = policy._shadow.count

    def counting(
        last_uses: np.ndarray[tuple[int], np.dtype[np.int64]], served: int
    ) -> None:
        before = policy._shadow._here.copy()
        count(last_uses, served)
        counted[:] += np.subtract(policy._shadow._here, before)

    policy._shadow.count = counting  # type: ignore[method-assign]
    for request in requests:
        simulation.request(request)
    lru = simulate(requests, [TierSpec("host", 400, "lru")])
    # everything fits: there is no other policy to compare with
    if counted[0] == 0:
        assert lru.hits == simulation.outcome().hits
    else:
        assert abs(counted[2] / counted[0] - lru.hit_rate) < 0.02
