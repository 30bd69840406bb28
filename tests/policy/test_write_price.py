"""With hints, newcomers that bring hardly more than what they evict are not written."""

from __future__ import annotations

import numpy as np
import pytest

from pagoda.ledger.columns import Columns
from pagoda.policy import Newcomers
from pagoda.policy.hindsight import Hindsight, HintedHindsight
from pagoda.policy.reuse_context import (
    KINDS,
    ROWS,
    Ending,
    context_of,
    hazards_in_context,
    row_of,
    worth_of_hazards,
)
from pagoda.policy.reuse_worth import AGES, Table, expected, index
from pagoda.policy.write_price import HITS_A_WRITE, WritePrice
from tests.policy.test_hindsight import START, columns_of

SOON = 20  # the age at which chunks are asked for: about ten seconds
SELDOM, OFTEN = 0, KINDS  # the rows of two workloads
NEWCOMERS = 9


def hazard_of(shares: dict[int, float]) -> Table:
    """These shares of the chunks of each row are asked for at one age, others never."""
    hazard = np.zeros((ROWS, AGES))
    for row, share in shares.items():
        hazard[row, SOON] = share
    return hazard


def price_of(rate: float, shares: dict[int, float]) -> WritePrice:
    price = WritePrice(100)
    price.learn(hazard_of(shares))
    price.note(np.full(100, rate))
    return price


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_what_it_brings_is_nothing_at_a_rate_that_is_its_worth(
    share: float,
) -> None:
    hazard = hazard_of({SELDOM: share})
    hits, seconds = expected(hazard[SELDOM])
    worth = index(hazard)[SELDOM, 0]
    assert hits[-1] == pytest.approx(share)
    assert (hits - worth * seconds).max() == pytest.approx(0, abs=1e-9)
    assert (hits - worth / 2 * seconds).max() == pytest.approx(share / 2)


def test_too_dear_is_what_brings_less_than_its_write_costs() -> None:
    shares = {SELDOM: 2 * HITS_A_WRITE, OFTEN: 0.9}
    rows = np.array([SELDOM, SELDOM])
    worth = float(index(hazard_of(shares))[SELDOM, 0])
    assert not price_of(0.4 * worth, shares).too_dear(rows).any()
    assert price_of(0.6 * worth, shares).too_dear(rows).all()
    # a head brings at least as much as its tail
    mixed = np.array([SELDOM, OFTEN, SELDOM])
    dear = price_of(0.6 * worth, shares).too_dear(mixed)
    assert dear.tolist() == [False, False, True]


def row_after(ending: Ending, octave: int, workload: int = 3) -> int:
    context = np.array([context_of(workload, ending, octave)], np.uint16)
    return int(row_of(np.zeros(1, np.uint32), context)[0])


def test_what_follows_a_tool_call_pays_nothing() -> None:
    """None of them is asked for, so that all others are too dear."""
    price = price_of(1.0, {})
    for octave in range(16):
        call = row_after(Ending.TOOL_CALL, octave)
        assert not price.too_dear(np.array([call, call])).any()
        for ending in set(Ending) - {Ending.TOOL_CALL}:
            row = row_after(ending, octave)
            dear = price.too_dear(np.array([row, call, row]))
            # also a head of it
            assert dear.tolist() == [False, False, True]


def test_some_victims_that_are_worth_nothing_change_no_price() -> None:
    shares = {SELDOM: 2 * HITS_A_WRITE}
    worth = float(index(hazard_of(shares))[SELDOM, 0])
    price = price_of(0.7 * worth, shares)
    rows = np.array([SELDOM])
    price.note(np.zeros(5))
    assert price.too_dear(rows).all()
    for _ in range(20):
        price.note(np.zeros(5))
    assert not price.too_dear(rows).any()
    price.note(np.zeros(0))


def hinted(columns: Columns, shares: dict[int, float]) -> HintedHindsight:
    """Return a policy that knows these shares, and refuses."""
    before = Hindsight(columns)
    columns.note_contexts()
    policy = HintedHindsight(columns, before)
    hazard = hazard_of(shares)
    policy._worth = worth_of_hazards(hazard, np.zeros((KINDS, AGES)))
    assert policy._price is not None
    policy._price.learn(hazard)
    policy._refuses = policy._knows_ages = True
    return policy


def newcomers(context: int) -> Newcomers:
    return Newcomers(
        START - np.arange(NEWCOMERS),
        np.zeros(NEWCOMERS, np.uint32),
        np.zeros(NEWCOMERS, np.int64),
        np.zeros(NEWCOMERS, np.uint16),
        context,
    )


def test_a_newcomer_is_admitted_if_it_brings_what_its_write_costs() -> None:
    """All slots have chunks of workload 0, which are worth less than any newcomer."""
    columns = columns_of()
    columns.last_use[:] = START - 10**9
    columns.hits[:] = 0
    shares = {SELDOM: HITS_A_WRITE, OFTEN: 1.3 * HITS_A_WRITE, 2 * KINDS: 0.9}
    policy = hinted(columns, shares)
    policy.rank(0, START, START)
    victims, ranks = policy._queue.unleased(NEWCOMERS, START - 100, START)
    assert len(victims) == NEWCOMERS
    assert (policy._worth[OFTEN, 0] > ranks).all()
    assert policy.admit(newcomers(1), 0, START) == 0
    assert policy.admit(newcomers(1), 4, START) == 4
    assert policy.admit(newcomers(2), 0, START) == NEWCOMERS
    # while least recently used serves more, nothing is refused
    policy._shadow.wins = True
    assert policy.admit(newcomers(1), 0, START) == NEWCOMERS


def test_after_a_tool_call_a_newcomer_is_admitted_all_the_same() -> None:
    columns = columns_of()
    columns.last_use[:] = START - 10**9
    columns.hits[:] = 0
    call, turn = (
        context_of(1, ending, 5) for ending in (Ending.TOOL_CALL, Ending.TURN)
    )
    rows = [row_after(end, 5, 1) for end in (Ending.TOOL_CALL, Ending.TURN)]
    shares = dict.fromkeys(rows, 1.3 * HITS_A_WRITE)
    policy = hinted(columns, {SELDOM: HITS_A_WRITE, **shares})
    policy.rank(0, START, START)
    assert policy.admit(newcomers(turn), 0, START) == 0
    assert policy.admit(newcomers(call), 0, START) == NEWCOMERS
    # worth less than what it would evict: refused as ever
    policy._worth[rows] = 0
    assert policy.admit(newcomers(call), 0, START) == 0


def test_what_is_learnt_sets_the_prices() -> None:
    columns = columns_of()
    before = Hindsight(columns)
    columns.note_contexts()
    policy = HintedHindsight(columns, before)
    assert policy._price is not None
    asked = np.zeros((ROWS, AGES))
    watched = np.zeros((ROWS, AGES))
    watched[SELDOM, 60] = watched[OFTEN, SOON] = asked[OFTEN, SOON] = 50_000
    policy._price.note(np.full(100, 0.001))
    policy._worth_of(asked, watched)
    rows = np.array([OFTEN, SELDOM])
    assert policy._price.too_dear(rows).tolist() == [False, True]
    hazard, by_kind = hazards_in_context(asked, watched)
    assert hazard[OFTEN, SOON] > by_kind[SELDOM, SOON] > hazard[SELDOM, SOON]


def test_without_contexts_there_is_no_price() -> None:
    assert Hindsight(columns_of())._price is None
