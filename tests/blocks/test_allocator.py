"""The pool: blocks are allocated, freed and allocated again; a wrong free is reported and changes
nothing.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.blocks import BlockPool


def numbers(pool: BlockPool) -> tuple[int, int, int]:
    pool.check()
    return pool.total, pool.free, pool.used


def test_blocks_are_taken_lowest_first_and_come_back() -> None:
    pool = BlockPool(5)
    assert pool.allocate(2) == [0, 1]
    assert numbers(pool) == (5, 3, 2)
    assert pool.allocate(3) == [2, 3, 4]
    assert numbers(pool) == (5, 0, 5)
    pool.release([3, 0])
    assert numbers(pool) == (5, 2, 3)
    assert [pool.is_free(block) for block in range(5)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    again = pool.allocate(2)
    assert again is not None
    assert sorted(again) == [0, 3]


def test_more_than_there_is_takes_nothing_at_all() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert numbers(pool) == (3, 3, 0)
    assert pool.allocate(3) is not None
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    with pytest.raises(ValueError, match="-1"):
        pool.allocate(-1)
    assert numbers(pool) == (3, 0, 3)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ([4, 2], r"\[2\] are freed twice"),  # free already
        ([4, 3, 4, 3], r"\[3, 4\] are freed twice"),  # twice in one call
        ([4, 6], r"\[6\] are not of this pool of 6"),
        ([4, -1], r"\[-1\] are not of this pool"),
    ],
)
def test_a_wrong_free_is_named_by_id_and_frees_nothing(
    wrong: list[int], named: str
) -> None:
    pool = BlockPool(6)
    taken = pool.allocate(6)
    assert taken is not None
    pool.release([2])
    with pytest.raises(ValueError, match=named):
        pool.release(wrong)
    assert numbers(pool) == (6, 1, 5)
    assert not pool.is_free(4)
    pool.release([4])
    assert pool.allocate(2) is not None


def test_it_is_resized_as_long_as_what_goes_is_free() -> None:
    pool = BlockPool(2)
    pool.resize(4)
    assert numbers(pool) == (4, 4, 0)
    taken = pool.allocate(1)
    assert taken == [0]
    pool.resize(8)
    assert numbers(pool) == (8, 7, 1)
    more = pool.allocate(3)
    assert more == [1, 2, 3]
    with pytest.raises(ValueError, match=r"\[3\] are in use"):
        pool.resize(3)
    assert numbers(pool) == (8, 4, 4)
    pool.release([3, 0])
    pool.resize(3)
    assert numbers(pool) == (3, 1, 2)
    pool.check()
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [0]
    for size in (0, -1):
        with pytest.raises(ValueError, match="at least one block"):
            BlockPool(size)


@given(
    st.lists(
        st.one_of(st.integers(0, 5), st.lists(st.integers(-1, 9), max_size=4)),
        max_size=40,
    )
)
def test_no_block_is_ever_had_twice(steps: list[int | list[int]]) -> None:
    pool = BlockPool(9)
    ours = set[int]()
    for step in steps:
        if isinstance(step, int):
            taken = pool.allocate(step)
            assert (taken is None) == (step > 9 - len(ours))
            assert not ours.intersection(taken or [])
            ours.update(taken or [])
        elif set(step) <= ours and max(Counter(step).values(), default=1) == 1:
            pool.release(step)
            ours.difference_update(step)
        else:
            with pytest.raises(ValueError, match="blocks"):
                pool.release(step)
        assert numbers(pool) == (9, 9 - len(ours), len(ours))
        for block in range(9):
            assert pool.is_free(block) != (block in ours)
