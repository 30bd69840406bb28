"""ARC in several processes, over a restart and with chains; how often it misses is tested in
replay.
"""

from __future__ import annotations

import numpy as np
import pytest

from pagoda.ledger.columns import NO_PARENT, NOT_READY, Columns
from pagoda.ledger.eviction_policy import Evictor
from pagoda.policy import Newcomers
from pagoda.policy.arc import Arc

SIZE = 40


class Processes:
    """One store and as many processes that have it open, which take turns; each request is a chain
    of chunks.
    """

    def __init__(self, count: int, size: int = SIZE) -> None:
        self.columns = Columns(None, size)
        self.columns.reset()
        self.advices = [Evictor("arc", self.columns) for _ in range(count)]
        self.values = np.zeros(Arc.shared_values)
        self.rows: dict[int, int] = {}
        self.turn = 0
        self.misses = 0
        self.generation = 1

    def ask(self, *chain: int) -> int:
        self.turn += 1
        stamp = 10**9 + 65536 * self.turn
        advice = self.advices[self.turn % len(self.advices)]
        advice.share(self.values)
        present = next(
            (i for i, mark in enumerate(chain) if mark not in self.rows),
            len(chain),
        )
        rows = np.array([self.rows[mark] for mark in chain[:present]], np.int64)
        advice.touch(rows, stamp - np.arange(present), True)
        self.store(advice, chain, present, stamp)
        advice.share(self.values)
        self.misses += len(chain) - present
        return present

    def store(
        self, advice: Evictor, chain: tuple[int, ...], present: int, stamp: int
    ) -> None:
        columns = self.columns
        marks = np.array(chain[present:], np.uint64)
        if not len(marks):
            return
        free = np.flatnonzero(columns.last_use == NOT_READY)
        stamps = stamp - present - np.arange(len(marks))
        _, known_hits = advice.admit(marks, stamps, len(free), 0)
        if len(marks) > len(free):
            victims = advice.victims(len(marks) - len(free), stamp - present, 0)
            gone = {row: mark for mark, row in self.rows.items()}
            for row in victims.tolist():
                mark = np.array([gone[row]], np.uint64)
                columns.table.remember(
                    mark, columns.last_use[[row]], columns.hits[[row]], stamp, 0
                )
                del self.rows[gone[row]]
            free = np.concatenate([free, victims])
        for i, row in enumerate(free[: len(marks)].tolist()):
            columns.table.forget(marks[i : i + 1])
            before = (
                self.rows.get(chain[present + i - 1]) if present + i else None
            )
            columns.generation[row] = self.generation = self.generation + 1
            columns.hits[row] = known_hits[i]
            columns.position[row] = present + i
            columns.parent_slot[row] = NO_PARENT if before is None else before
            columns.parent_generation[row] = (
                0 if before is None else columns.generation[before]
            )
            columns.last_use[row] = stamps[i]
            self.rows[chain[present + i]] = row


def stream() -> list[int]:
    rng = np.random.default_rng(5)
    parts = [
        rng.zipf(1.3, 300) % 200 + 1,
        np.arange(1000, 1500),
        rng.zipf(1.1, 600) % 100 + 1,
        np.arange(1, 60),
    ]
    return [int(one) for part in parts * 2 for one in part]


@pytest.mark.slow
def test_two_processes_miss_about_as_often_as_one() -> None:
    one = Processes(1)
    two = Processes(2)
    for mark in stream():
        one.ask(mark)
        two.ask(mark)
    assert two.misses == pytest.approx(one.misses, rel=0.01)
    assert two.values[0] == pytest.approx(one.values[0], abs=SIZE / 10)


def test_both_lists_of_ghosts_together_are_no_longer_than_the_cache() -> None:
    processes = Processes(1)
    for mark in stream():
        processes.ask(mark)
        columns = processes.columns
        ghosts = columns.ghosts.last_use > 1
        assert (
            np.count_nonzero(ghosts) <= SIZE + 1
        )  # the ghost of the last victim is forgotten a request later
        once = np.count_nonzero(ghosts & (columns.ghosts.hits == 0))
        t1 = np.count_nonzero(
            (columns.last_use != NOT_READY) & (columns.hits == 0)
        )
        assert once + t1 <= SIZE + 1


def test_a_forgotten_ghost_still_says_why_and_its_chunk_begins_as_a_new_one() -> (
    None
):
    processes = Processes(1, 4)
    for mark in range(1, 20):
        processes.ask(mark)
    table = processes.columns.table
    mark = 15
    assert table.find(np.array([mark] + [0] * 3, np.uint64).tobytes()) is not None
    processes.ask(mark)
    assert processes.columns.hits[processes.rows[mark]] == 0


def test_what_is_asked_for_again_outlives_a_scan() -> None:
    processes = Processes(1)
    for turn in range(6):
        for mark in [*range(1, 11)] * 2:
            processes.ask(mark, 100 + mark)  # 20 chunks
        for mark in range(50):
            processes.ask(1000 + 100 * turn + mark)
    assert all(processes.ask(mark, 100 + mark) == 2 for mark in range(1, 11))


def test_a_long_chain_of_new_chunks_loses_no_head_before_its_tail() -> None:
    processes = Processes(1)
    for turn in range(200):
        length = 1 + turn * 7 % 30
        processes.ask(*range(1000 * (turn % 9), 1000 * (turn % 9) + length))
        columns = processes.columns
        ready = np.flatnonzero(
            (columns.last_use != NOT_READY) & (columns.parent_slot >= 0)
        )
        parents = columns.parent_slot[ready]
        assert (
            columns.generation[parents] == columns.parent_generation[ready]
        ).all()


def test_what_two_learn_at_once_adds_up_and_a_restart_keeps_it() -> None:
    columns = Columns(None, 10)
    columns.reset()
    ours = Arc(columns)
    theirs = Arc(columns)
    values = np.zeros(1)
    out_of_b1 = Newcomers(
        np.array([900]), np.zeros(1, np.uint32), np.array([500])
    )
    for policy in (ours, ours, theirs):
        policy.admit(out_of_b1, 1, 0)
    for policy in (ours, theirs, ours):
        policy.share(values)
    assert values[0] == 3 == ours._target == theirs._target
    again = Arc(columns)
    again.share(np.frombuffer(bytearray(values.tobytes())))
    assert again._target == 3
    for _ in range(30):
        ours.admit(out_of_b1, 1, 0)
        theirs.admit(out_of_b1, 1, 0)
    ours.share(values)
    theirs.share(values)
    assert values[0] == 10


@pytest.mark.parametrize("damage", [np.nan, np.inf, -1.0, 11.0])
def test_damaged_values_are_begun_anew(damage: float) -> None:
    columns = Columns(None, 10)
    columns.reset()
    policy = Arc(columns)
    values = np.full(1, damage)
    policy.share(values)
    assert values[0] == 0


def halves(target: float) -> tuple[Columns, Arc]:
    """Five chunks in T1, five in T2, a ghost in B1 and one in B2."""
    columns = Columns(None, 10)
    columns.reset()
    columns.generation[:] = np.arange(10) + 1
    columns.last_use[:] = 100 + np.arange(10)
    columns.hits[5:] = 1
    columns.table.remember(
        np.array([1, 2], np.uint64),
        np.array([50, 51]),
        np.array([0, 1], np.uint32),
        900,
        0,
    )
    policy = Arc(columns)
    policy._target = target
    return columns, policy


@pytest.mark.parametrize(
    ("target", "hits", "victim"),
    [
        (6.0, 1, 0),
        (7.0, 1, 5),
        (5.0, 1, 0),
        (4.0, 0, 5),
        (3.0, 0, 0),
        (9.5, 0, 5),
    ],
)
def test_where_the_victim_comes_from(
    target: float, hits: int, victim: int
) -> None:
    _, policy = halves(target)
    back = Newcomers(
        np.array([900]), np.array([hits], np.uint32), np.array([50 + hits])
    )
    assert policy.admit(back, 0, 0) == 1
    assert policy.victims(1, 900, 0).tolist() == [victim]
    assert policy.victims(1, 900, 0).tolist() == [victim]
    assert policy._target == min(10, target + 1 if hits == 0 else target - 1)


def test_what_is_out_of_reach_goes_once_and_first_whichever_list_is_asked() -> (
    None
):
    columns, policy = halves(3.0)
    for row in (2, 7):
        columns.parent_slot[row] = 0
        columns.parent_generation[row] = 77
    for count in range(1, 11):
        victims = policy.victims(count, 900, 0).tolist()
        assert len(set(victims)) == count
        assert count < 2 or {2, 7} <= set(victims)
