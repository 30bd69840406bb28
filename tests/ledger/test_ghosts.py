"""The ghosts of removed chunks: places, forgetting, learning from replaced ghosts, resize."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.ledger.columns import PER_SLOT, Columns
from pagoda.ledger.ghost_table import GhostTable, marks_of
from tests.ledger.support import keys


def table(slots: int) -> GhostTable:
    return Columns(None, slots).table


def remember(
    ghosts: GhostTable,
    numbers: list[int],
    last_use: int,
    hits: int = 0,
    went: int | None = None,
) -> None:
    size = len(numbers)
    ghosts.remember(
        marks_of(keys(*numbers)),
        np.full(size, last_use),
        np.full(size, hits, np.uint32),
        went or last_use,
        0,
    )


@pytest.mark.parametrize("count", [1, 4, 5, 64])
def test_ghosts_of_few_and_of_many(count: int) -> None:
    ghosts = table(4096)
    gone = keys(*range(count))
    uses = np.arange(count) + 5
    hits = np.arange(count, dtype=np.uint32)
    ghosts.remember(marks_of(gone), uses, hits, 123_456, 2)
    for key in gone:
        assert ghosts.find(key) == (123_456, 2)
    assert ghosts.find(keys(10**6)[0]) is None
    known_hits, last_use = ghosts.recall(marks_of([*gone, *keys(10**6)]))
    assert known_hits.tolist() == [*range(count), 0]
    assert last_use.tolist() == [*(uses.tolist()), 0]


def test_no_ghosts_to_remember_or_recall() -> None:
    ghosts = table(3)
    none = marks_of([])
    ghosts.remember(none, np.empty(0, np.int64), np.empty(0, np.uint32), 1, 0)
    ghosts.forget(none)
    assert [len(part) for part in ghosts.recall(none)] == [0, 0]


def test_who_comes_back_is_forgotten() -> None:
    ghosts = table(10)
    remember(ghosts, [1, 2, 3], 7)
    ghosts.forget(marks_of(keys(2, 9)))
    assert ghosts.find(keys(2)[0]) is None
    assert ghosts.find(keys(3)[0]) is not None


def test_a_ghost_left_again_is_one_ghost() -> None:
    ghosts = table(1)
    for time in range(1, 20):
        remember(ghosts, [1], time, time)
    assert np.count_nonzero(ghosts.last_use) == 1
    assert [part.tolist() for part in ghosts.recall(marks_of(keys(1)))] == [
        [19],
        [19],
    ]
    assert not list(ghosts.forgotten())


def test_the_ghost_gives_way_that_was_asked_for_longest_ago_and_is_learnt_from() -> (
    None
):
    ghosts = table(1)
    for number in range(PER_SLOT):
        remember(ghosts, [number], 100 + number, number)
    remember(ghosts, [PER_SLOT], 500, went=1000)
    assert ghosts.find(keys(0)[0]) is None
    for key in keys(*range(1, PER_SLOT + 1)):
        assert ghosts.find(key)
    ((hits, ages, contexts),) = ghosts.forgotten()
    assert not contexts.any()
    assert hits.tolist() == [0]
    assert ages.tolist() == [900]
    assert not list(ghosts.forgotten())


def test_many_of_one_place_in_one_call() -> None:
    ghosts = table(1)
    remember(ghosts, list(range(20)), 9)
    assert np.count_nonzero(ghosts.last_use) == PER_SLOT
    assert sum(len(hits) for hits, _, _ in ghosts.forgotten()) == 20 - PER_SLOT


def test_hits_beyond_what_fits_stay_the_most() -> None:
    ghosts = table(1)
    ghosts.remember(
        marks_of(keys(1)), np.array([5]), np.array([2**31], np.uint32), 5, 0
    )
    assert ghosts.recall(marks_of(keys(1)))[0].tolist() == [2**16 - 1]


def test_a_stamp_that_was_never_published_is_taken_for_now() -> None:
    ghosts = table(1)
    remember(ghosts, [1], np.iinfo(np.int64).max, went=77)
    assert ghosts.recall(marks_of(keys(1)))[1].tolist() == [77]


@pytest.mark.parametrize("slots", [1, 5, 10, 40])
def test_a_resize_takes_over_the_latest(slots: int) -> None:
    old = table(10)
    new = table(slots)
    for number in range(60):
        remember(old, [number], 1 + number, number % 5, went=2000 + number)
    new.copy_from(old)
    kept = [n for n in range(60) if new.find(keys(n)[0])]
    assert len(kept) == np.count_nonzero(new.last_use) <= PER_SLOT * slots
    for n in kept:
        assert old.find(keys(n)[0]) == new.find(keys(n)[0])
    if slots >= 10:
        lost = 60 - len(kept)
        assert lost <= 12
        assert kept[-1] == 59
    if slots == 1:
        assert kept == list(range(60 - PER_SLOT, 60))


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["remember", "forget"]),
            st.lists(st.integers(0, 40), max_size=6, unique=True),
        )
    )
)
def test_what_is_recalled_was_remembered(
    steps: list[tuple[str, list[int]]],
) -> None:
    ghosts = table(2)
    model = dict[int, tuple[int, int]]()
    for time, (what, numbers) in enumerate(steps, 1):
        if what == "remember":
            remember(ghosts, numbers, time, time % 7)
            model.update((number, (time % 7, time)) for number in numbers)
        else:
            ghosts.forget(marks_of(keys(*numbers)))
            for number in numbers:
                model.pop(number, None)
        for number in range(41):
            hits, last_use = ghosts.recall(marks_of(keys(number)))
            if last_use[0]:
                assert model[number] == (hits[0], last_use[0])
            assert (ghosts.find(keys(number)[0]) is not None) == (last_use[0] > 0)
    assert np.count_nonzero(ghosts.last_use) <= 2 * PER_SLOT
