"""What a place is worth, against the definition in plain loops, and what it should be in plain
cases.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.policy.reuse_worth import (
    AGES,
    CLASSES,
    Table,
    age_of,
    class_of,
    tally,
    worth,
)

SECOND = 10**9
WEIGHT = 20.0


def upper_seconds(age: int) -> float:
    return float(0.1 * 2.0 ** (age / 3))


def width_seconds(age: int) -> float:
    return upper_seconds(age) - (upper_seconds(age - 1) if age else 0.0)


def age_at(seconds: float) -> int:
    return int(age_of(np.array([int(seconds * SECOND)]))[0])


def risks(asked: Table, watched: Table) -> list[list[float]]:
    """How many of a class were there to be asked for at each age; of those forgotten in the midst
    of it, half.
    """
    return [
        [
            sum(watched[one][age + 1 :])
            + asked[one][age]
            + (watched[one][age] - asked[one][age]) / 2
            for age in range(AGES)
        ]
        for one in range(CLASSES)
    ]


def plain_worth(asked: Table, watched: Table) -> Table:
    risk = risks(asked, watched)
    best = np.zeros((CLASSES, AGES))
    for one in range(CLASSES):
        alive = [1.0]
        held = [0.0]
        for age in range(AGES):
            prior = 0.1 * width_seconds(age) / upper_seconds(age)
            asked_of_all = sum(asked[other][age] for other in range(CLASSES))
            risk_of_all = sum(risk[other][age] for other in range(CLASSES))
            guess = (asked_of_all + WEIGHT * prior) / (risk_of_all + WEIGHT)
            hazard = min(
                1.0,
                (asked[one][age] + WEIGHT * guess) / (risk[one][age] + WEIGHT),
            )
            alive.append(alive[-1] * (1 - hazard))
            held.append(
                held[-1] + (alive[-2] + alive[-1]) / 2 * width_seconds(age)
            )
        for age in range(AGES):
            for horizon in range(age + 1, AGES + 1):
                if held[horizon] > held[age]:
                    gain = (alive[age] - alive[horizon]) / (
                        held[horizon] - held[age]
                    )
                    best[one][age] = max(best[one][age], gain)
    return best


@pytest.mark.slow
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.1, 3.0, 1000.0]),
    st.floats(0.0, 1.0),
)
@settings(max_examples=15, deadline=None)
def test_worth_is_as_defined(seed: int, scale: float, share: float) -> None:
    rng = np.random.default_rng(seed)
    watched = rng.exponential(scale, (CLASSES, AGES)) * (
        rng.random((CLASSES, AGES)) < share
    )
    asked = watched * rng.random((CLASSES, AGES))
    assert worth(asked, watched) == pytest.approx(
        plain_worth(asked, watched), rel=1e-6, abs=1e-12
    )


@given(st.integers(0, 2**32))
@settings(max_examples=50)
def test_worth_is_finite_whatever_was_counted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    asked, watched = 10.0 ** rng.uniform(
        -9, 15, (2, CLASSES, AGES)
    ) * rng.integers(0, 2, (2, CLASSES, AGES))
    values = worth(asked, watched)
    assert np.isfinite(values).all()
    assert (values >= 0).all()


def test_worth_changes_nothing() -> None:
    asked = np.ones((CLASSES, AGES))
    watched = np.full((CLASSES, AGES), 2.0)
    worth(asked, watched)
    assert (asked == 1).all()
    assert (watched == 2).all()


def test_what_comes_back_every_minute_is_worth_more_shortly_before() -> None:
    asked = tally(np.full(1000, 2), np.full(1000, age_at(60)))
    never = tally(np.full(1000, 0), np.full(1000, age_at(3600)))
    values = worth(asked, asked + never)
    assert values[2, age_at(50)] > values[2, age_at(5)] > 3 * values[0, age_at(5)]
    assert values[2, age_at(5)] > 3 * values[0, age_at(50)]
    # it should have been here by now
    assert values[2, age_at(300)] < values[2, age_at(5)]


def test_what_has_not_been_watched_to_its_end_is_not_taken_for_dead() -> None:
    asked = tally(np.full(50, 1), np.full(50, age_at(100)))
    young = tally(np.full(5000, 1), np.full(5000, age_at(10)))
    old = tally(np.full(5000, 1), np.full(5000, age_at(1000)))
    at = age_at(60)
    assert (
        worth(asked, asked + young)[1, at] > 3 * worth(asked, asked + old)[1, at]
    )


def test_before_anything_is_known_it_falls_with_age_and_is_the_same_for_all_classes() -> (
    None
):
    values = worth(np.zeros((CLASSES, AGES)), np.zeros((CLASSES, AGES)))
    assert (np.diff(values, axis=1) < 0).all()
    assert (values == values[0]).all()


def test_classes_rise_with_hits_and_every_number_of_hits_has_one() -> None:
    classes = class_of(np.arange(100_000, dtype=np.uint32))
    assert classes[:8].tolist() == [0, 1, 2, 3, 3, 3, 3, 4]
    assert (np.diff(classes) >= 0).all()
    assert classes[-1] == CLASSES - 1
    assert class_of(np.array([2**32 - 1], np.uint32)).tolist() == [CLASSES - 1]
    assert class_of(np.array([2**16 - 1], np.uint16)).tolist() == [CLASSES - 1]


def test_ages_rise_with_time_and_every_time_has_one() -> None:
    assert age_of(np.array([-(10**18), -1, 0, 99_999_999])).tolist() == [
        0,
        0,
        0,
        0,
    ]
    assert age_of(np.array([2**62])).tolist() == [AGES - 1]
    for age in range(AGES - 1):
        assert age_at(upper_seconds(age) * 1.001) == age + 1
        assert age_at(upper_seconds(age) * 0.999) == age


def test_a_tally_counts_each_once() -> None:
    table = tally(np.array([0, 0, 7]), np.array([1, 1, AGES - 1]), 2.5)
    assert table[0, 1] == 5.0
    assert table[7, AGES - 1] == 2.5
    assert table.sum() == 7.5
    assert tally(np.empty(0, np.int64), np.empty(0, np.int64)).shape == (
        CLASSES,
        AGES,
    )
