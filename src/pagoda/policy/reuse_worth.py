"""Learns when chunks are asked for again, and from that what their slots are worth.

Chunks are divided by how often they were asked for (`classes`). For each class the policy learns at
which ages they are asked for again. As in a life table (Kaplan and Meier, 1958), chunks that were
not asked for again *yet* count for the time they were watched, whether they are still kept or only
remembered as ghosts. So the result does not depend on which chunks were evicted.

The worth of a slot is the most that it yields per second: over all horizons, the probability that
the chunk is asked for within the horizon, divided by the expected time in the slot until then or to
the end of the horizon. This is Gittins' index (1979); LHD (Beckmann et al., NSDI 2018) ranks by a
similar density, over the whole life.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

CLASSES = 8
AGES = 84
_SHORTEST_SECONDS = 0.1
_PER_OCTAVE = 3
# to eight months
_UPPER_SECONDS = _SHORTEST_SECONDS * 2.0 ** (np.arange(AGES) / _PER_OCTAVE)
_LOWER_SECONDS = np.concatenate([[0.0], _UPPER_SECONDS[:-1]])
_WIDTH_SECONDS = _UPPER_SECONDS - _LOWER_SECONDS
_UPPER_NS = (_UPPER_SECONDS * 1e9).astype(np.int64)
_UPPER_NS_LIST = _UPPER_NS.tolist()

# The guess before anything is known: the longer ago the last use, the less likely, as in least
# recently used. Its weight is given as a number of watched chunks.
_GUESS = 0.1 * _WIDTH_SECONDS / _UPPER_SECONDS
_GUESS_WEIGHT = 20.0

Table = NDArray[np.float64]


def class_of(hits: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the class of chunks with this number of hits: 0, 1, 2, 3 to 6, 7 to 14, ..."""
    count = hits.astype(np.int64)
    return np.minimum(
        np.where(count < 3, count, np.frexp(count + 1.0)[1]), CLASSES - 1
    )


def age_of(age_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bucket of an age."""
    return np.minimum(np.searchsorted(_UPPER_NS, age_ns, side="right"), AGES - 1)


def class_of_one(hits: int) -> int:
    """Return what `class_of` returns, for one chunk."""
    if hits < 3:
        return hits
    return min((hits + 1).bit_length(), CLASSES - 1)


def age_of_one(age_ns: int) -> int:
    """Return what `age_of` returns, for one chunk."""
    return min(bisect_right(_UPPER_NS_LIST, age_ns), AGES - 1)


def tally(
    classes: NDArray[np.int64],
    ages: NDArray[np.int64],
    weight: float = 1.0,
    rows: int = CLASSES,
) -> Table:
    """Count how many there are of each class and age, (rows, AGES)."""
    counts = np.bincount(classes * AGES + ages, minlength=rows * AGES)
    table: Table = counts.reshape(rows, AGES).astype(np.float64) * weight
    return table


def at_risk(asked: Table, watched: Table) -> Table:
    """Return how many chunks reached each age, and so could be asked for at it."""
    beyond = np.cumsum(watched[:, ::-1], axis=1)[:, ::-1] - watched
    # those not asked for were watched for half of the bucket on average
    risk: Table = beyond + asked + (watched - asked) / 2
    return risk


def guessed(
    asked: NDArray[np.float64],
    risk: NDArray[np.float64],
    guess: NDArray[np.float64],
    weight: float | NDArray[np.float64] = _GUESS_WEIGHT,
) -> NDArray[np.float64]:
    """Return the share of chunks at risk that is asked for at each age, if `guess` counts as much
    as that many watched chunks.
    """
    return (asked + weight * guess) / (risk + weight)


def first_guess(
    asked: NDArray[np.float64], risk: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the same for chunks of all classes together, (AGES,)."""
    return guessed(asked, risk, _GUESS)


def worth(asked: Table, watched: Table) -> Table:
    """Return the yield per second of a slot with a chunk of each class and age, (CLASSES, AGES).

    `asked`: how many were asked for again at that age. `watched`: how many were watched up to that
    age and no longer: those that were asked for, those forgotten at that age, and those that are
    not older yet. Changes nothing.
    """
    risk = at_risk(asked, watched)
    guess = first_guess(asked.sum(axis=0), risk.sum(axis=0))
    return index(np.minimum(guessed(asked, risk, guess), 1.0))


def expected(
    hazard: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the hits that a chunk brings up to the end of each age, and how long it is kept for
    them (s); from the share that is asked for at each, (AGES,).
    """
    alive = np.concatenate([[1.0], np.cumprod(1.0 - hazard)])
    held = np.cumsum((alive[:-1] + alive[1:]) / 2 * _WIDTH_SECONDS)
    return 1.0 - alive[1:], held


def index(hazard: Table) -> Table:
    """Return Gittins' index at each age, from the share that is asked for at each; for each row."""
    # ages first, so that the steps below read neighbours
    hazards = hazard.T
    ones = np.ones((1, len(hazard)))
    alive = np.concatenate([ones, np.cumprod(1.0 - hazards, axis=0)])
    width = _WIDTH_SECONDS[:, None]
    held = np.cumsum((alive[:-1] + alive[1:]) / 2 * width, axis=0)
    held = np.concatenate([np.zeros_like(ones), held])
    best = np.empty_like(hazards)
    for age in range(AGES):
        # from the start of this bucket to the end of the same or a later one
        gain = alive[age] - alive[age + 1 :]
        cost = np.maximum(held[age + 1 :] - held[age], 1e-300)
        best[age] = (gain / cost).max(axis=0)
    return np.ascontiguousarray(best.T)
