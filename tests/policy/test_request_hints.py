"""What requests say of themselves decides which chunks go first."""

from __future__ import annotations

import numpy as np

from pagoda.ledger.columns import Columns
from pagoda.ledger.eviction_policy import Evictor
from pagoda.policy.hindsight import Hindsight
from pagoda.policy.request_hints import ContextWriter, RequestHint
from pagoda.policy.reuse_context import (
    ENDED,
    ROWS,
    Ending,
    gap_octave,
    hazards_in_context,
    hint_second,
    next_gap_octave,
    seconds_since,
    worth_of_hazards,
)
from pagoda.policy.reuse_worth import AGES

SLOTS = 40
SECOND = 10**9
START = 10**6 * SECOND
PROMPT = 10  # chunks


class Tier:
    """Columns with chains of ten chunks, and what is known of them."""

    def __init__(self) -> None:
        self.columns = Columns(None, SLOTS)
        self.columns.reset()
        contexts = self.columns.note_contexts()
        self.hints = ContextWriter(contexts, self.columns.generation)
        self.advice = Evictor("hindsight", self.columns)
        self.now = START
        self.generation = 0

    def request(
        self, first: int, hint: RequestHint, chunks: int = PROMPT
    ) -> None:
        """Store the chunks of a prompt, or ask for them again, and answer."""
        self.now += 2 * SECOND
        columns = self.columns
        rows = np.arange(first, first + chunks)
        stamps = self.now - np.arange(chunks)
        new = rows[columns.generation[rows] == 0]
        context = self.hints.arriving(hint, None, self.now)
        if len(new):
            self.generation += 1
            columns.generation[new] = self.generation
            columns.position[new] = new - first
            columns.parent_slot[new] = np.where(new > first, new - 1, -1)
            columns.parent_generation[new] = self.generation
            self.hints.put(new, context)
            columns.last_use[new] = stamps[-len(new) :]
        else:
            self.advice.touch(rows, stamps, True)
        self.hints.answered(rows, hint, context, self.now)

    def first_to_go(self, count: int = PROMPT) -> set[int]:
        victims = self.advice.victims(count, self.now + SECOND, self.now)
        return set(victims.tolist())


def said(session: int, ending: Ending = Ending.TOOL_CALL) -> RequestHint:
    return RequestHint(0, ending, session)


def test_a_session_that_is_over_goes_before_an_older_one() -> None:
    tier = Tier()
    tier.request(0, said(1))
    tier.request(10, said(2))
    assert tier.first_to_go() == set(range(10))
    tier.hints.end(2)
    tier.advice.rank(0, tier.now, tier.now)
    assert tier.first_to_go() == set(range(10, 20))


def test_also_while_least_recently_used_serves_more() -> None:
    tier = Tier()
    tier.request(0, said(1))
    tier.request(10, said(2))
    policy = tier.advice._policy
    assert isinstance(policy, Hindsight)
    policy._shadow.wins = True
    assert tier.first_to_go() == set(range(10))
    tier.hints.answered(
        np.arange(10, 20), said(2)._replace(drop=True), 0, tier.now
    )
    tier.advice.rank(0, tier.now, tier.now)
    assert tier.first_to_go() == set(range(10, 20))
    # but not if such chunks were asked for all the same
    asked = np.zeros((ROWS, AGES))
    asked[ENDED, 30] = 1
    policy._worth = worth_of_hazards(*hazards_in_context(asked, asked))
    tier.advice.rank(0, tier.now, tier.now)
    assert tier.first_to_go() == set(range(10))


def test_unless_another_session_has_used_its_chunks() -> None:
    for another in (said(3), RequestHint()):
        tier = Tier()
        tier.request(0, said(1))
        tier.request(10, said(2))
        tier.request(10, another)
        tier.hints.end(2)
        tier.advice.rank(0, tier.now, tier.now)
        assert tier.first_to_go() == set(range(10)), another


def test_or_asks_for_them_afterwards() -> None:
    tier = Tier()
    tier.request(0, said(1))
    tier.request(10, said(2))
    tier.hints.end(2)
    tier.request(10, said(3))
    tier.advice.rank(0, tier.now, tier.now)
    assert tier.first_to_go() == set(range(10))


def test_a_hint_moves_no_chunk_of_another_session() -> None:
    tier = Tier()
    tier.request(0, said(1))
    tier.request(10, said(2))
    contexts = tier.columns.contexts
    assert contexts is not None
    before = contexts.of_slots[:10].copy()
    tier.request(10, said(2, Ending.TURN))
    tier.hints.end(2)
    tier.hints.end(9)
    assert (contexts.of_slots[:10] == before).all()


def test_a_session_that_goes_on_without_a_chunk_leaves_it() -> None:
    tier = Tier()
    tier.request(0, said(1))
    tier.request(0, said(1), chunks=7)
    contexts = tier.columns.contexts
    assert contexts is not None
    left = contexts.of_slots[:10] == int(Ending.LEFT) << 4
    assert left.tolist() == [False] * 7 + [True] * 3


def test_gaps_are_those_of_the_session() -> None:
    tier = Tier()
    tier.request(0, said(1))
    octaves = set()
    for seconds in (60, 60, 60):
        tier.now += seconds * SECOND
        context = tier.hints.arriving(said(1), 9, tier.now)
        tier.hints.answered(np.arange(10), said(1), context, tier.now)
        octaves.add(context >> 7)
    assert octaves == {7}
    # nothing is known of chunks after one that was never hinted at
    assert tier.hints.arriving(said(1), 20, tier.now) >> 7 == 0


def test_what_was_said_of_a_chunk_is_forgotten_with_it() -> None:
    """Another process has put other chunks into its slots."""
    tier = Tier()
    tier.request(0, said(1))
    tier.request(10, said(2))
    tier.hints.end(2)
    rows = np.arange(10, 20)
    before = tier.columns.contexts_of(rows)
    assert before is not None
    assert before.all()
    tier.columns.generation[rows] += 1
    tier.columns.parent_generation[rows] += 1
    after = tier.columns.contexts_of(rows)
    assert after is not None
    assert not after.any()
    tier.advice.rank(0, tier.now, tier.now)
    assert tier.first_to_go() == set(range(10))
    # whose they are now is known when they are asked for here
    tier.hints.used(rows, 3, workload=5)
    found = tier.columns.contexts_of(rows)
    assert found is not None
    assert set(found.tolist()) == {5}
    tier.hints.end(2)
    assert set(found.tolist()) == {5}


def test_a_gap_is_counted_beyond_the_end_of_the_clock() -> None:
    later = 65_545 * SECOND + SECOND // 2
    assert seconds_since(hint_second(65_530 * SECOND), later) == 15.5
    assert hint_second(65_535 * SECOND) == 1


def test_a_gap_is_known_when_the_session_asks_again() -> None:
    """Then how its last answer ended is forgotten, and nothing else of the context is left."""
    tier = Tier()
    tier.request(0, said(1))
    rows = np.arange(PROMPT)
    tier.now += 20 * SECOND
    tier.advice.touch(rows, tier.now - rows, True)
    assert not tier.columns.contexts.of_slots[rows].any()  # type: ignore[union-attr]
    context = tier.hints.arriving(said(1), 0, tier.now)
    assert gap_octave(context) == next_gap_octave(0, 20)
