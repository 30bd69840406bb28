from __future__ import annotations

import numpy as np
import pytest

from pagoda_tools.quality.bootstrap import difference_interval, ratio_interval


def test_of_a_mean_it_is_what_the_normal_distribution_gives() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    found = ratio_interval(values, np.ones(400))
    error = values.std() / 20
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(
        values.mean() - 1.96 * error, abs=0.1 * error
    )
    assert found.high == pytest.approx(
        values.mean() + 1.96 * error, abs=0.1 * error
    )


def test_of_a_share_it_is_what_the_binomial_distribution_gives() -> None:
    right = np.arange(200) < 150
    found = ratio_interval(right, np.ones(200))
    assert found.value == 0.75
    # 0.75 -+ 1.96 * 0.0306
    assert (found.low, found.high) == pytest.approx((0.69, 0.81), abs=0.006)


@pytest.mark.slow
def test_it_holds_the_true_value_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(2)
    held = 0
    for seed in range(100):
        found = ratio_interval(
            draw.exponential(1.0, 60), np.ones(60), confidence=0.9, seed=seed
        )
        held += found.low <= 1.0 <= found.high
    assert 80 <= held <= 98  # of 100; 90 expected, a little fewer as it is skewed


def test_pairs_cancel_what_both_sides_share() -> None:
    draw = np.random.default_rng(3)
    # how hard each prompt is: far more than the difference
    hard = draw.normal(0.0, 10.0, 100)
    a = hard + 1.0 + draw.normal(0, 0.1, 100)
    b = hard
    paired = difference_interval(a, b, np.ones(100))
    assert 0.9 < paired.low < paired.value < paired.high < 1.1
    unpaired = difference_interval(a, draw.permutation(b), np.ones(100))
    assert unpaired.low < 0 < unpaired.high


def test_a_constant_ratio_has_no_width() -> None:
    wholes = np.arange(1.0, 31.0)
    found = ratio_interval(0.25 * wholes, wholes)
    assert (found.value, found.low, found.high) == pytest.approx(
        (0.25, 0.25, 0.25)
    )


def test_a_ratio_is_weighted_by_its_wholes() -> None:
    assert ratio_interval([1, 0], [1, 99]).value == 0.01


def test_a_seed_gives_the_same_and_another_seed_hardly_another() -> None:
    values = np.random.default_rng(4).random(50)
    ones = np.ones(50)
    assert ratio_interval(values, ones, seed=7) == ratio_interval(
        values, ones, seed=7
    )
    a = ratio_interval(values, ones, seed=7)
    b = ratio_interval(values, ones, seed=8)
    assert a != b
    assert a.low == pytest.approx(b.low, abs=0.01)


def test_confidence_makes_it_wider() -> None:
    values = np.random.default_rng(5).random(50)
    ones = np.ones(50)
    narrow = ratio_interval(values, ones, confidence=0.8)
    wide = ratio_interval(values, ones, confidence=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_draws_without_a_whole_are_left_out() -> None:
    found = ratio_interval([1, 0, 0], [1, 0, 0])
    assert found.value == 1.0
    assert found.low == 1.0
    assert found.high == 1.0


@pytest.mark.parametrize(
    ("parts", "wholes"), [([], []), ([1.0], [1.0, 2.0]), ([1.0, 1.0], [0.0, 0.0])]
)
def test_what_cannot_be_divided(parts: list[float], wholes: list[float]) -> None:
    with pytest.raises(
        ValueError, match=r"one number per prompt|nothing to take"
    ):
        ratio_interval(parts, wholes)
