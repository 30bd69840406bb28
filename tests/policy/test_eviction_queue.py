"""The queue against a plain one that looks at everything each time: random trees, ranks, leases and
touches.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagoda.ledger.columns import NO_PARENT, NOT_READY, Columns
from pagoda.policy.eviction_queue import EvictionQueue

NOW = 10**12
SLOTS = 24


def columns_of(slots: int) -> Columns:
    columns = Columns(None, slots)
    columns.reset()
    return columns


def put(
    columns: Columns, row: int, last_use: int, parent: int = NO_PARENT
) -> None:
    columns.generation[row] = columns.generation.max() + np.uint64(1)
    columns.last_use[row] = last_use
    columns.lease_until[row] = 0
    columns.parent_slot[row] = parent
    columns.parent_generation[row] = (
        columns.generation[parent] if parent >= 0 else 0
    )
    columns.position[row] = columns.position[parent] + 1 if parent >= 0 else 0


def empty(columns: Columns, row: int) -> None:
    columns.generation[row] = columns.generation.max() + np.uint64(1)
    columns.last_use[row] = NOT_READY
    columns.lease_until[row] = 0


def behind(columns: Columns) -> dict[int, list[int]]:
    """Return each slot with a chunk, and all its descendants, itself included."""
    ready = [
        row for row in range(columns.slots) if columns.last_use[row] != NOT_READY
    ]
    below: dict[int, list[int]] = {row: [] for row in ready}
    for row in ready:
        at = row
        while at in below:
            below[at].append(row)
            parent = int(columns.parent_slot[at])
            reached = (
                parent >= 0
                and columns.generation[parent] == columns.parent_generation[at]
            )
            at = parent if reached else NO_PARENT
    return below


def out_of_reach(columns: Columns, row: int) -> bool:
    while columns.parent_slot[row] >= 0:
        parent = int(columns.parent_slot[row])
        if columns.generation[parent] != columns.parent_generation[row]:
            return True
        row = parent
    return False


def plain(
    columns: Columns, ranks: list[float], stamp: int, now: int
) -> list[int]:
    """Return the order of eviction: unreachable first, by rank, by the end of the lease;
    descendants count.
    """
    keys: dict[int, tuple[float, ...]] = {}
    for row, rows in behind(columns).items():
        position = int(columns.position[row])
        age = (
            max(
                int(columns.last_use[one]) + int(columns.position[one])
                for one in rows
            )
            - position
        )
        lease = max(int(columns.lease_until[one]) for one in rows)
        if age >= stamp:
            continue
        order = -position if out_of_reach(columns, row) else age
        if lease > now:
            keys[row] = (2, lease, order)
        elif out_of_reach(columns, row):
            keys[row] = (0, 0, order)
        else:
            keys[row] = (1, max(ranks[one] for one in rows), order)
    return sorted(keys, key=lambda row: keys[row])


def assert_leaf_first(columns: Columns, victims: list[int]) -> None:
    turn = {row: i for i, row in enumerate(victims)}
    for row, rows in behind(columns).items():
        if row in turn:
            assert all(turn.get(one, SLOTS) <= turn[row] for one in rows), victims


trees = st.lists(
    st.tuples(
        st.integers(-1, SLOTS - 1),  # after which earlier one
        st.integers(1, 999),  # last use
        st.integers(0, 3),  # rank
        st.sampled_from([0, 0, 0, NOW, NOW + 5, NOW + 9]),  # lease
        st.sampled_from([False] * 9 + [True]),  # whether it is removed again
    ),
    min_size=1,
    max_size=SLOTS,
)


def grow(
    tree: list[tuple[int, int, int, int, bool]],
) -> tuple[Columns, list[float]]:
    columns = columns_of(SLOTS)
    ranks = [0.0] * SLOTS
    for row, (parent, last_use, rank, lease, _) in enumerate(tree):
        put(columns, row, 100 * last_use, (parent + 1) % (row + 1) - 1)
        columns.lease_until[row], ranks[row] = lease, float(rank)
    for row, (*_, removed) in enumerate(tree):
        if removed:
            empty(columns, row)
    return columns, ranks


@pytest.mark.slow
@given(trees, st.integers(1, SLOTS), st.sampled_from([15_000, 50_000, 10**6]))
@settings(max_examples=300)
def test_the_order_is_that_of_a_plain_one(
    tree: list[tuple[int, int, int, int, bool]], count: int, stamp: int
) -> None:
    columns, ranks = grow(tree)
    victims = (
        EvictionQueue(columns, lambda chosen: np.array(ranks)[chosen])
        .first(count, stamp, NOW)
        .tolist()
    )
    expected = plain(columns, ranks, stamp, NOW)
    assert_leaf_first(columns, victims)
    assert len(victims) == min(count, len(expected))
    # nothing is as old as another
    if len({columns.last_use[row] for row in expected}) == len(expected) == count:
        leased = {
            row
            for row in expected
            if max(columns.lease_until[behind(columns)[row]]) > NOW
        }
        unleased = [row for row in expected if row not in leased]
        assert victims[: len(unleased)] == unleased[:count]


@pytest.mark.slow
@given(
    trees,
    st.lists(
        st.tuples(
            st.sampled_from(["touch", "lease", "go", "wait", "grow"]),
            st.integers(0, SLOTS - 1),
        ),
        max_size=25,
    ),
)
@settings(max_examples=300)
def test_no_parent_before_its_child_whatever_happened_since_it_was_queued(
    tree: list[tuple[int, int, int, int, bool]],
    events: list[tuple[str, int]],
) -> None:
    columns, ranks = grow(tree)
    queue = EvictionQueue(columns, lambda chosen: np.array(ranks)[chosen])
    now = NOW
    stamp = 10**5
    for what, number in events:
        stamp = stamp + 100
        row = number % len(tree)
        count = 1 + number % 14
        if what == "wait":
            now += number
        elif what == "grow":
            # behind one that is touched, as all are in front of which somebody stores
            free = np.flatnonzero(columns.last_use == NOT_READY)
            if len(free) and columns.last_use[row] != NOT_READY:
                columns.last_use[row] = stamp
                put(columns, int(free[0]), stamp - 1, row)
        elif columns.last_use[row] == NOT_READY:
            continue
        elif what == "touch":
            columns.last_use[row] = stamp
        elif what == "lease":
            columns.lease_until[row] = now + 10
        victims = queue.first(count, stamp + 1, now).tolist()
        assert_leaf_first(columns, victims)
        assert len(victims) == len(set(victims))
        assert len(victims) == min(
            count, len(plain(columns, ranks, stamp + 1, now))
        )
        if what == "go":
            for gone in victims:
                empty(columns, gone)


def test_what_is_touched_loses_its_place() -> None:
    columns = columns_of(SLOTS)
    for row in range(SLOTS):
        put(columns, row, 100 + row)
    queue = EvictionQueue(
        columns,
        lambda chosen: columns.generation[chosen].astype(np.float64),
    )
    assert queue.first(2, 1000, NOW).tolist() == [0, 1]
    columns.last_use[0] = 900
    assert queue.first(2, 1000, NOW).tolist() == [1, 2]
    assert queue.first(2, 900, NOW).tolist() == [1, 2]


def test_a_lease_that_ends_frees_those_in_front_of_it() -> None:
    columns = columns_of(SLOTS)
    put(columns, 0, 100)
    put(columns, 1, 99, 0)
    put(columns, 2, 500)
    queue = EvictionQueue(columns, lambda chosen: np.zeros(SLOTS)[chosen])
    assert queue.first(1, 1000, NOW).tolist() == [1]
    columns.lease_until[1] = NOW + 10
    assert queue.first(3, 1000, NOW).tolist() == [2, 1, 0]
    assert queue.first(1, 1000, NOW).tolist() == [2]
    assert queue.first(3, 1000, NOW + 20).tolist() == [1, 0, 2]


@pytest.mark.parametrize("count", [1, 2, 12])
def test_who_is_in_front_of_one_that_stays_stays(count: int) -> None:
    columns = columns_of(SLOTS)
    for row in range(12):
        put(columns, row, 100 - row, row - 1)
    for row in range(12, SLOTS):
        put(columns, row, 1000 + row)
    queue = EvictionQueue(columns, lambda chosen: np.zeros(SLOTS)[chosen])
    assert queue.first(12, 500, NOW).tolist() == list(range(11, -1, -1))
    columns.last_use[5] = 600
    assert queue.first(count, 500, NOW).tolist() == list(range(11, 5, -1))[:count]
    columns.lease_until[9] = NOW + 1
    assert queue.first(count, 500, NOW)[:2].tolist() == [11, 10][:count]
    assert not np.isin(queue.first(count, 500, NOW)[:2], range(9)).any()


def test_what_is_out_of_reach_goes_before_all_others_whatever_it_is_worth() -> (
    None
):
    columns = columns_of(SLOTS)
    for row in range(8):
        put(columns, row, 900 - row, row - 1)
    put(columns, 8, 100)
    empty(columns, 3)
    queue = EvictionQueue(
        columns, lambda chosen: np.arange(SLOTS, 0, -1)[chosen].astype(np.float64)
    )
    assert queue.first(5, 1000, NOW).tolist() == [7, 6, 5, 4, 8]


def test_nobody_is_named_twice_when_a_leased_chunk_was_put_behind_one_that_nobody_touched() -> (
    None
):
    columns = columns_of(SLOTS)
    for row in range(3):
        put(columns, row, 100 + row)
    queue = EvictionQueue(columns, lambda chosen: np.zeros(SLOTS)[chosen])
    assert queue.first(3, 200, NOW).tolist() == [0, 1, 2]
    put(columns, 3, 90, 0)
    columns.lease_until[3] = NOW + 1
    victims = queue.first(9, 103, NOW).tolist()
    assert sorted(victims) == [0, 1, 2, 3]


@pytest.mark.parametrize(("slots", "calls"), [(256, 4), (96, 2)])
def test_a_small_store_is_ranked_for_some_calls_together(
    slots: int, calls: int
) -> None:
    """For four calls like the first, but not for more than a quarter of its slots."""
    columns = columns_of(slots)
    for row in range(slots):
        put(columns, row, last_use=1000 + row)
    ranked: list[int] = []

    def rank(_: object) -> NDArray[np.float64]:
        ranked.append(calls)
        return np.zeros(slots)

    queue = EvictionQueue(columns, rank)
    for call in range(calls):
        victims = queue.first(12, 10**6, NOW).tolist()
        assert victims == list(range(12 * call, 12 * call + 12))
        for row in victims:
            empty(columns, row)
    assert ranked == [calls]
    queue.first(12, 10**6, NOW)
    assert ranked == [calls] * 2
