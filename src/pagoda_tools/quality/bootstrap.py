"""Confidence intervals by the paired bootstrap. Pure.

The prompts are drawn again with replacement, thousands of times, and the figure is computed for
each draw; the interval is between two quantiles of these values. Paired: the same prompts are drawn
for both sides of a comparison, so the difficulty of a prompt cancels out. Draws depend only on the
seed and the number of prompts.

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993): the percentile interval. It
knows only the given
prompts: if no prompt differs, the interval has no width. So the judge must require enough prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pagoda.base.quality_bounds import Interval

DRAWS = 10_000
_AT_ONCE = 1 << 20  # the number of draws' numbers in memory at once

Floats = npt.NDArray[np.float64]
Numbers = Sequence[float] | Floats


def ratio_interval(
    parts: Numbers, wholes: Numbers, *, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Return sum(parts) / sum(wholes) over prompts, and its interval. With wholes of 1 this is the
    mean.

    Args:
        parts: one number per prompt, such as its number of equal tokens.
        wholes: one number per prompt, such as its number of tokens.
        confidence: how often such an interval holds the true figure, below 1.
        seed: the seed of the draws.

    Raises:
        ValueError: no prompts, unequal lengths, or wholes that sum to 0.
    """
    above, below = _paired(parts, wholes)
    if not below.sum():
        raise ValueError(
            "the wholes sum to 0: there is nothing to take a share of"
        )
    drawn = []
    for prompts in _draws(len(above), seed):
        sums = below[prompts].sum(1)
        known = sums != 0  # a draw whose wholes sum to 0 has no ratio
        drawn.append(above[prompts].sum(1)[known] / sums[known])
    rest = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(drawn), [rest, 1 - rest])
    return Interval(float(above.sum() / below.sum()), float(low), float(high))


def difference_interval(
    a: Numbers,
    b: Numbers,
    wholes: Numbers,
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Return (sum(a) - sum(b)) / sum(wholes), and its interval; above 0, a is more than b. See
    `ratio_interval`.
    """
    left, right = _paired(a, b)
    return ratio_interval(left - right, wholes, confidence=confidence, seed=seed)


def _paired(a: Numbers, b: Numbers) -> tuple[Floats, Floats]:
    left = np.asarray(a, np.float64)
    right = np.asarray(b, np.float64)
    if left.shape != right.shape or left.ndim != 1 or not left.size:
        raise ValueError(
            f"one number per prompt is needed on both sides, got {left.shape} and {right.shape}"
        )
    return left, right


def _draws(prompts: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield draws, as rows of indices of prompts."""
    draw = np.random.default_rng(seed)
    left = DRAWS
    while left:
        rows = min(left, max(1, _AT_ONCE // prompts))
        yield draw.integers(prompts, size=(rows, prompts))
        left -= rows
