"""What contexts say, and what chunks are worth by them."""

from __future__ import annotations

import numpy as np
import pytest

from pagoda.policy.reuse_context import (
    ENDED,
    KINDS,
    LEFT,
    ROWS,
    WORKLOADS,
    Ending,
    asked_again,
    context_of,
    ended,
    gap_octave,
    hazards_in_context,
    kinds_of_ending,
    next_gap_octave,
    row_of,
    worth_of_hazards,
)
from pagoda.policy.reuse_worth import AGES, CLASSES, class_of, worth

HITS = np.array([0, 1, 2, 5, 9, 100], np.uint32)


def row(hits: int, context: int) -> int:
    return int(
        row_of(np.array([hits], np.uint32), np.array([context], np.uint16))[0]
    )


def test_without_hints_there_is_a_row_for_each_class_and_workload() -> None:
    for workload in range(WORKLOADS):
        contexts = np.full(len(HITS), context_of(workload), np.uint16)
        rows = row_of(HITS, contexts)
        assert (rows == workload * KINDS + class_of(HITS)).all()


def test_with_an_ending_the_number_of_uses_is_nothing() -> None:
    for ending in (Ending.TOOL_CALL, Ending.TURN, Ending.OTHER):
        kinds = {
            row(hits, context_of(3, ending, octave)) - 3 * KINDS
            for hits in (0, 7)
            for octave in range(16)
        }
        there = kinds_of_ending(ending)
        assert kinds == set(range(there.start, there.stop))
    for hits in (0, 7):
        assert row(hits, context_of(3, Ending.SESSION)) == 3 * KINDS + ENDED
        assert row(hits, context_of(3, Ending.LEFT)) == 3 * KINDS + LEFT


def test_whatever_is_in_a_column_has_a_row() -> None:
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    rows = row_of(np.zeros(len(every), np.uint32), every)
    assert rows.min() >= 0
    assert rows.max() < ROWS


def test_a_chunk_that_is_asked_for_keeps_its_workload_and_gap_only() -> None:
    before = np.array([context_of(5, Ending.SESSION, 9)], np.uint16)
    after = asked_again(before)
    assert row(1, int(after[0])) == row(1, context_of(5))
    assert gap_octave(int(after[0])) == 9
    answered = ended(after, Ending.TURN, 4)
    assert int(answered[0]) == context_of(5, Ending.TURN, 4)


def test_the_gap_of_a_session_follows_its_gaps() -> None:
    assert next_gap_octave(0, 0.0) == next_gap_octave(0, 1.0) == 1
    assert next_gap_octave(0, 16.0) == 5
    assert next_gap_octave(0, 1e12) == 15
    octave = next_gap_octave(0, 1024.0)
    seen = []
    for _ in range(5):
        octave = next_gap_octave(octave, 2.0)
        seen.append(octave)
    assert seen == sorted(seen, reverse=True)
    assert 2 <= seen[-1] <= 3


def nothing() -> np.ndarray:
    return np.zeros((ROWS, AGES))


def test_a_session_that_is_over_is_worth_nothing_until_it_is_asked_for() -> None:
    asked = nothing()
    watched = nothing()
    assert not worth_of_hazards(*hazards_in_context(asked, watched))[
        ENDED::KINDS
    ].any()
    asked[ENDED, 30] = 5_000
    watched[ENDED, 30] = 5_000
    found = worth_of_hazards(*hazards_in_context(asked, watched))
    assert found[ENDED, 20] > found[0, 20] / 2


def test_what_one_workload_does_is_expected_of_others_that_are_little_known() -> (
    None
):
    asked = nothing()
    watched = nothing()
    soon = kinds_of_ending(Ending.TOOL_CALL).start + 2
    late = kinds_of_ending(Ending.TURN).start + 2
    asked[soon, 20] = watched[soon, 20] = 20_000
    asked[late, 45] = watched[late, 45] = 20_000
    found = worth_of_hazards(*hazards_in_context(asked, watched))
    other = 4 * KINDS
    assert found[other + soon, 10] > 3 * found[other + late, 10]
    # and a gap that was never seen is judged by its ending
    assert found[other + soon + 3, 10] > 3 * found[other + late + 3, 10]


@pytest.mark.parametrize("seed", range(3))
def test_one_workload_without_hints_is_judged_as_without_contexts(
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    watched = nothing()
    watched[:CLASSES] = random.integers(0, 5_000, (CLASSES, AGES))
    asked = np.floor(watched * random.random((ROWS, AGES)) / 2)
    found = worth_of_hazards(*hazards_in_context(asked, watched))[:CLASSES]
    alone = worth(asked[:CLASSES], watched[:CLASSES])
    assert np.abs(found / alone - 1).max() < 0.1
