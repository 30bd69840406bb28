"""Least recently used against a naive one that sorts all slots each time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.ledger.columns import NO_PARENT, NOT_READY, Columns, columns_bytes
from pagoda.policy import make
from pagoda.policy.lru import Lru

NOW = 10**12
NEWEST = 10**15


def columns_of(directory: Path, slots: int) -> Columns:
    path = directory / "columns"
    path.write_bytes(bytes(columns_bytes(slots)))
    columns = Columns(path, slots)
    columns.reset()
    return columns


def fill(
    columns: Columns,
    row: int,
    last_use: int,
    parent: int = NO_PARENT,
    position: int = 0,
) -> None:
    """Let a row hold a new chunk."""
    columns.generation[row] += np.uint64(1)
    columns.last_use[row] = last_use
    columns.lease_until[row] = 0
    columns.position[row] = position
    columns.parent_slot[row] = parent
    columns.parent_generation[row] = (
        columns.generation[parent] if parent >= 0 else 0
    )


def empty(columns: Columns, row: int) -> None:
    columns.generation[row] += np.uint64(1)
    columns.last_use[row] = NOT_READY
    columns.lease_until[row] = 0


def naive(columns: Columns, count: int, stamp: int, now: int) -> list[int]:
    """Return what should be evicted: by recency; then leased ones by the end of their lease."""
    ready = [row for row in range(columns.slots) if columns.last_use[row] < stamp]
    free = sorted(
        (int(columns.last_use[row]), row)
        for row in ready
        if columns.lease_until[row] <= now
    )
    leased = sorted(
        (int(columns.lease_until[row]), row)
        for row in ready
        if columns.lease_until[row] > now
    )
    return [row for _, row in [*free, *leased]][:count]


without_leases = st.one_of(
    st.tuples(st.just("fill"), st.integers(0, 29)),
    st.tuples(st.just("empty"), st.integers(0, 29)),
    st.tuples(st.just("touch"), st.integers(0, 29)),
    st.tuples(st.just("wait"), st.integers(0, 5)),
    st.tuples(st.just("evict"), st.integers(1, 12)),
)
actions = st.lists(
    without_leases | st.tuples(st.just("lease"), st.integers(0, 29)), max_size=60
)


@pytest.mark.slow
@given(actions)
@settings(max_examples=150)
def test_it_evicts_what_a_naive_one_evicts(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]]
) -> None:
    columns = columns_of(tmp_path_factory.mktemp("lru"), 30)
    policy = Lru(columns)
    now = NOW
    stamp = 1000
    for what, n in actions:
        stamp += 1
        ready = columns.last_use[n % 30] != NOT_READY
        if what == "fill" and not ready:
            fill(columns, n, stamp)
        elif what == "empty" and ready:
            empty(columns, n)
        elif what == "touch" and ready:
            policy.touch(np.array([n]), np.array([stamp]))
        elif what == "lease" and ready:
            columns.lease_until[n] = now + 1000 + n
        elif what == "wait":
            now += n * 400
        elif what == "evict":
            victims = policy.victims(n, stamp, now).tolist()
            expected = naive(columns, n, stamp, now)
            assert len(victims) == len(expected)
            assert len(set(victims)) == len(victims)
            leased = [row for row in victims if columns.lease_until[row] > now]
            assert leased == [
                row for row in expected if columns.lease_until[row] > now
            ]
            for row in victims:
                empty(columns, row)


@given(st.lists(without_leases, max_size=60))
@settings(max_examples=150)
def test_without_leases_the_order_is_exact(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]]
) -> None:
    columns = columns_of(tmp_path_factory.mktemp("lru"), 30)
    policy = Lru(columns)
    stamp = 1000
    for what, n in actions:
        stamp += 1
        ready = columns.last_use[n % 30] != NOT_READY
        if what == "fill" and not ready:
            fill(columns, n, stamp)
        elif what == "empty" and ready:
            empty(columns, n)
        elif what == "touch" and ready:
            policy.touch(np.array([n]), np.array([stamp]))
        elif what == "evict":
            victims = policy.victims(n, stamp, NOW).tolist()
            assert victims == naive(columns, n, stamp, NOW)
            for row in victims[: n // 2 + 1]:
                empty(columns, row)


@pytest.mark.parametrize("slots", [300, 6000])
def test_across_many_queues_the_order_is_exact(
    tmp_path: Path, slots: int
) -> None:
    columns = columns_of(tmp_path, slots)
    uses = np.random.default_rng(1).permutation(slots) + 1
    for row in range(slots):
        fill(columns, row, int(uses[row]))
    policy = Lru(columns)
    gone = []
    while len(victims := policy.victims(37, NEWEST, NOW)):
        gone += uses[victims].tolist()
        for row in victims:
            empty(columns, int(row))
    assert gone == sorted(gone)
    assert len(gone) == slots


def chain(columns: Columns, rows: range, stamp: int) -> None:
    for position, row in enumerate(rows):
        fill(
            columns,
            row,
            stamp - position,
            row - 1 if position else NO_PARENT,
            position,
        )


def test_a_tail_goes_before_its_head(tmp_path: Path) -> None:
    columns = columns_of(tmp_path, 20)
    chain(columns, range(10), 1000)
    chain(columns, range(10, 20), 2000)
    assert Lru(columns).victims(20, NEWEST, NOW).tolist() == [
        *range(9, -1, -1),
        *range(19, 9, -1),
    ]


def test_what_is_out_of_reach_goes_first_the_tail_before_its_head(
    tmp_path: Path,
) -> None:
    columns = columns_of(tmp_path, 600)
    chain(columns, range(300), 1000)
    chain(columns, range(300, 600), 5000)
    empty(columns, 400)
    victims = Lru(columns).victims(400, NEWEST, NOW).tolist()
    assert victims == [*range(599, 400, -1), *range(299, 98, -1)]


def test_an_orphan_that_is_reached_again_is_young(tmp_path: Path) -> None:
    columns = columns_of(tmp_path, 400)
    chain(columns, range(200), 1000)
    chain(columns, range(200, 400), 2000)
    empty(columns, 200)
    policy = Lru(columns)
    assert policy.victims(3, NEWEST, NOW).tolist() == [399, 398, 397]
    policy.touch(np.arange(201, 400), np.full(199, 3000))
    columns.parent_slot[201] = NO_PARENT  # its head was stored again
    assert policy.victims(3, NEWEST, NOW).tolist() == [199, 198, 197]


def test_an_orphan_of_the_same_request_is_not_its_victim(tmp_path: Path) -> None:
    columns = columns_of(tmp_path, 40)
    chain(columns, range(10), 5000)
    empty(columns, 0)
    for count in (1, 20):
        assert not len(Lru(columns).victims(count, 4900, NOW))


def test_what_was_leased_when_the_queue_was_made_is_found_when_the_lease_has_ended(
    tmp_path: Path,
) -> None:
    columns = columns_of(tmp_path, 20)
    for row in range(20):
        fill(columns, row, 100 + row)
    columns.lease_until[:10] = NOW + 50
    policy = Lru(columns)
    assert policy.victims(2, 112, NOW).tolist() == [10, 11]
    assert sorted(policy.victims(12, 112, NOW + 60).tolist()) == list(range(12))


def test_a_slot_that_is_being_filled_is_never_made_old(tmp_path: Path) -> None:
    columns = columns_of(tmp_path, 4)
    fill(columns, 0, 100)
    Lru(columns).touch(np.array([0, 1]), np.array([200, 200]))
    assert columns.last_use.tolist() == [200, NOT_READY, NOT_READY, NOT_READY]


def test_torn_hints_do_no_harm(tmp_path: Path) -> None:
    columns = columns_of(tmp_path, 50)
    chain(columns, range(50), 1000)
    columns.parent_slot[::3] = 10**12
    columns.parent_slot[1::3] = -(10**12)
    columns.parent_slot[2::3] = np.arange(2, 50, 3)  # each its own parent
    victims = Lru(columns).victims(100, NEWEST, NOW)
    assert sorted(victims.tolist()) == list(range(50))


def test_an_unknown_policy_is_refused_with_those_there_are(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="lru"):
        make("magic", columns_of(tmp_path, 4))
