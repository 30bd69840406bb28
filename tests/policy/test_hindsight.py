"""What hindsight learns, with whom it shares it, and what it keeps."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pagoda.cache.request_trace import Request
from pagoda.ledger.columns import Columns
from pagoda.policy import Newcomers
from pagoda.policy.hindsight import Hindsight, _SharedValues
from pagoda.policy.lru import Lru
from pagoda.policy.reuse_worth import AGES, CLASSES, age_of, class_of
from pagoda_tools.replay.simulate import Simulation, TierSpec

SECOND = 10**9
START = 10**15
SLOTS = 200


def columns_of(seed: int = 0, slots: int = SLOTS) -> Columns:
    """Chunks last used within the last day, some of them often."""
    rng = np.random.default_rng(seed)
    columns = Columns(None, slots)
    columns.reset()
    columns.generation[:] = np.arange(slots) + 1
    columns.last_use[:] = START - (10 ** rng.uniform(8, 14, slots)).astype(
        np.int64
    )
    columns.hits[:] = rng.integers(0, 9, slots)
    return columns


def new_values() -> NDArray[np.float64]:
    return np.zeros(Hindsight.shared_values)


def ask(policy: Hindsight, columns: Columns, rows: list[int], stamp: int) -> None:
    policy.touch(np.array(rows), np.full(len(rows), stamp), True)
    columns.hits[rows] += np.uint32(1)


def learn(policy: Hindsight, values: NDArray[np.float64], stamp: int) -> None:
    """What upkeep does, until it is learnt and published."""
    policy.prepare(stamp, stamp)
    policy.share(values)
    policy.prepare(stamp, stamp)
    policy.share(values)


def ghosts_of(count: int, seconds: float, hits: int) -> Newcomers:
    stamps = START - np.arange(count)
    return Newcomers(
        stamps, np.full(count, hits, np.uint32), stamps - int(seconds * SECOND)
    )


def taught(columns: Columns, values: NDArray[np.float64]) -> Hindsight:
    """Return a policy that has learned: chunks with a repeated request return after a minute, all
    others never.
    """
    policy = Hindsight(columns)
    long_ago = START - 3600 * SECOND - np.arange(1000)
    columns.table.remember(
        np.arange(1, 1001, dtype=np.uint64),
        long_ago,
        np.zeros(1000, np.uint32),
        START,
        0,
    )
    for _ in range(20):
        policy.admit(ghosts_of(64, 60, 1), 64, START)
    learn(policy, values, START)
    return policy


@pytest.mark.parametrize("seconds", [1, 10, 600])
def test_while_nothing_is_asked_for_again_the_oldest_goes_first(
    seconds: int,
) -> None:
    """All chunks were young once without being asked for, and few were old: it does not follow that
    the young are worth less.
    """
    columns = columns_of()
    columns.hits[:] = 0
    ages = np.arange(SLOTS) // 16 * seconds * SECOND
    columns.last_use[:] = START - ages
    values = new_values()
    policy = Hindsight(columns)
    learn(policy, values, START)
    policy.rank(0, START, START)
    victims = policy.victims(SLOTS // 2, START + 1, START)
    assert len(victims) == SLOTS // 2
    assert ages[victims].min() >= np.sort(ages)[SLOTS // 2]


@pytest.mark.parametrize("seed", range(5))
def test_before_anything_is_known_it_does_as_lru_does(seed: int) -> None:
    columns = columns_of(seed)
    policy = Hindsight(columns)
    lru = Lru(columns)
    for count in (5, 60, SLOTS):
        assert (
            policy.victims(count, START, 0).tolist()
            == lru.victims(count, START, 0).tolist()
        )
    newcomers = Newcomers(
        START - np.arange(9), np.zeros(9, np.uint32), np.zeros(9, np.int64)
    )
    assert policy.admit(newcomers, 0, 0) == 9


def test_what_will_come_back_outlives_what_is_younger() -> None:
    columns = columns_of()
    values = new_values()
    columns.last_use[:] = START - 2 * SECOND - np.arange(SLOTS)
    columns.hits[:] = 0
    columns.hits[-50:] = 1
    policy = taught(columns, values)
    assert not np.isin(
        policy.victims(SLOTS - 50, START, 0), np.arange(SLOTS - 50, SLOTS)
    ).any()


def test_a_newcomer_that_never_comes_back_does_not_come_in() -> None:
    columns = columns_of()
    values = new_values()
    columns.last_use[:] = START - 50 * SECOND
    columns.hits[:] = 1
    policy = taught(columns, values)
    nobody = Newcomers(
        START - np.arange(9), np.zeros(9, np.uint32), np.zeros(9, np.int64)
    )
    assert policy.admit(nobody, 0, 0) == 0
    assert policy.admit(nobody, 4, 0) == 4
    columns.hits[:] = 0
    policy.prepare(START + 10**12, 0)  # decides again
    assert policy.admit(ghosts_of(9, 30, 0), 0, 0) == 9


def test_a_head_comes_in_for_its_tail() -> None:
    columns = columns_of()
    values = new_values()
    columns.last_use[:] = START - 20 * SECOND
    columns.hits[:] = 1
    policy = taught(columns, values)
    policy._worth = np.zeros((CLASSES, AGES))
    policy._worth[1] = 0.5
    policy._worth[CLASSES - 1] = 1.0
    stamps = START + 30 * SECOND - np.arange(4)
    hits = np.array([0, 0, 0, 9999], np.uint32)
    for order, admitted in (
        (hits, 4),
        (hits[::-1], 1),
        (hits[[0, 3, 1, 2]], 2),
        (hits[:3], 0),
    ):
        newcomers = Newcomers(
            stamps[: len(order)], order.copy(), np.zeros(len(order), np.int64)
        )
        assert policy.admit(newcomers, 0, 0) == admitted


def test_it_counts_what_is_asked_for_again_and_not_what_is_one_use() -> None:
    columns = columns_of()
    values = new_values()
    columns.last_use[:3] = START
    columns.hits[:3] = [0, 1, 5]
    policy = Hindsight(columns)
    ask(policy, columns, [0, 1, 2], START + SECOND // 2)  # one use
    ask(policy, columns, [0, 1, 2], START + SECOND // 2 + 10 * SECOND)
    policy.touch(
        np.array([0, 1, 2]), np.full(3, START + 90 * SECOND), asked=False
    )
    policy.share(values)
    expected = np.zeros((CLASSES, AGES))
    for hits in (1, 2, 6):
        expected[
            class_of(np.array([hits]))[0], age_of(np.array([10 * SECOND]))[0]
        ] += 1
    assert (_SharedValues.of(values).asked == expected).all()


def test_what_is_being_filled_counts_for_nothing() -> None:
    columns = columns_of()
    values = new_values()
    columns.last_use[:] = np.iinfo(np.int64).max
    policy = Hindsight(columns)
    ask(policy, columns, [0, 1], START)
    learn(policy, values, START)
    assert not _SharedValues.of(values).asked.any()
    assert not len(policy.victims(5, START, 0))


def test_tallies_of_two_processes_add_up_and_what_one_learns_the_other_knows() -> (
    None
):
    columns = columns_of()
    values = new_values()
    ours = Hindsight(columns)
    theirs = Hindsight(columns)
    for turn in range(10):
        ours.admit(ghosts_of(5, 60, 1), 5, 0)
        theirs.admit(ghosts_of(3, 600, 0), 3, 0)
        for policy in (ours, theirs):
            if turn % 3 == 0:
                policy.share(values)
    ours.share(values)
    theirs.share(values)
    learnt = _SharedValues.of(values)
    assert learnt.asked.sum() == learnt.watched.sum() == 80
    assert learnt.asked[1].sum() == 50
    assert learnt.asked[0].sum() == 30
    learn(ours, values, START + 10 * SECOND)
    theirs.share(values)
    assert (theirs._worth == ours._worth).all()
    assert not (theirs._worth == Hindsight(columns)._worth).all()


def test_one_at_a_time_learns_and_another_takes_over_from_who_died() -> None:
    columns = columns_of()
    values = new_values()
    dead = Hindsight(columns)
    alive = Hindsight(columns)
    dead.prepare(START, 0)
    dead.share(values)  # it is elected, and is killed before it has learnt
    for seconds in range(1, 20):
        alive.prepare(START + seconds * SECOND, 0)
        alive.share(values)
        assert (_SharedValues.of(values).version[0] > 0) == (seconds > 5), seconds


def test_who_is_killed_while_publishing_spoils_nothing() -> None:
    columns = columns_of()
    values = new_values()
    writer = taught(columns, values)
    reader = Hindsight(columns)
    reader.share(values)
    whole = _SharedValues.of(values).current().copy()
    learnt = _SharedValues.of(values)
    # and here it was killed
    learnt.worth[(int(learnt.version[0]) + 1) % 2][: CLASSES // 2] = 7.0
    for policy in (reader, Hindsight(columns)):
        policy.share(values)
        assert (policy._worth == whole).all()
    learn(writer, values, START + 60 * SECOND)
    reader.share(values)
    assert (reader._worth == writer._worth).all()
    assert (reader._worth != 7.0).all()


def test_a_restart_keeps_what_was_learnt() -> None:
    columns = columns_of()
    values = new_values()
    before = taught(columns, values)
    after = Hindsight(columns)
    after.prepare(START, 0)
    after.share(np.frombuffer(bytearray(values.tobytes()), np.float64))
    assert (after._worth == before._worth).all()
    assert after._refuses == before._refuses
    for policy in (before, after):
        policy.prepare(START + 10**13, 0)
    assert (
        after.victims(50, START, 0).tolist()
        == before.victims(50, START, 0).tolist()
    )


@pytest.mark.parametrize("at", [0, 1, 5, 2 + CLASSES * AGES, -1])
@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf, -1.0, 1e300])
def test_damaged_values_are_begun_anew(at: int, damage: float) -> None:
    columns = columns_of()
    values = new_values()
    policy = taught(columns, values)
    values[at] = damage
    with np.errstate(all="raise", under="ignore"):
        other = Hindsight(columns)
        for each in (policy, other):
            each.share(values)
        assert _SharedValues.of(values).asked.sum() == 0
        for turn in range(1, 4):
            learn(other, values, START + turn * 10 * SECOND)
            policy.share(values)
    assert np.isfinite(values).all()
    assert np.isfinite(policy._worth).all()
    assert policy.victims(SLOTS, START, 0).size == SLOTS


def test_what_was_seen_long_ago_counts_less_and_never_grows_without_bound() -> (
    None
):
    columns = columns_of()
    values = new_values()
    policy = Hindsight(columns)
    for _ in range(300):
        policy.admit(ghosts_of(64, 60, 1), 64, 0)
        policy.share(values)
    learnt = _SharedValues.of(values)
    assert learnt.watched.sum() <= 32 * SLOTS
    assert learnt.asked.sum() <= 32 * SLOTS
    for _ in range(600):
        policy.admit(ghosts_of(64, 6000, 1), 64, 0)
        policy.share(values)
    asked = _SharedValues.of(values).asked[1]
    assert (
        asked[age_of(np.array([60 * SECOND]))[0]]
        < asked[age_of(np.array([6000 * SECOND]))[0]] / 20
    )


def test_a_clock_that_was_set_back_stops_nothing() -> None:
    columns = columns_of()
    values = new_values()
    taught(columns, values)
    _SharedValues.of(values).learned_at[0] += 10**6
    version = _SharedValues.of(values).version[0]
    policy = Hindsight(columns)
    policy.share(values)
    learn(policy, values, START)
    assert _SharedValues.of(values).version[0] > version


def test_of_many_slots_a_sample_stands_for_all() -> None:
    columns = columns_of(slots=20_000)
    policy = Hindsight(columns)
    census = policy._census(START)
    assert census.sum() == pytest.approx(20_000, rel=0.05)
    exact = np.bincount(class_of(columns.hits), minlength=CLASSES)
    assert census.sum(axis=1) == pytest.approx(exact, rel=0.15, abs=50)


@pytest.mark.slow
def test_it_keeps_what_comes_back_through_a_flood_of_what_does_not() -> None:
    hits = {}
    for name in ("lru", "hindsight"):
        simulation = Simulation([TierSpec("host", 100, name)])
        served = 0
        unique = 10**6
        # fifteen minutes; 40 prompts repeat every minute, 560 never
        for turn in range(9000):
            document = turn % 15 == 0
            unique += 1
            one = turn // 15 % 40 if document else unique
            got = simulation.request(Request(turn * 100.0, 512, 0, (one,)))[0]
            served += got if turn > 4500 else 0
        hits[name] = served
    assert hits["lru"] == 0
    assert hits["hindsight"] >= 0.9 * 4500 / 15


def test_ghosts_that_gave_way_are_not_forgotten_as_what_was_never_asked_for_again() -> (
    None
):
    columns = columns_of(slots=1)
    values = new_values()
    for mark in range(1, 11):  # eight have a place
        columns.table.remember(
            np.array([mark], np.uint64),
            np.array([mark]),
            np.zeros(1, np.uint32),
            START,
            0,
        )
    Hindsight(columns).share(values)
    learnt = _SharedValues.of(values)
    assert (
        learnt.watched[0, age_of(np.array([START]))[0]]
        == learnt.watched.sum()
        == 2
    )
    assert not learnt.asked.any()


def test_those_never_asked_for_again_count_as_well() -> None:
    columns = Columns(None, SLOTS)
    values = new_values()
    columns.reset()
    policy = Hindsight(columns)
    policy.admit(ghosts_of(64, 5, 0), 64, START)
    long_ago = START - 60 * SECOND - np.arange(1000)
    columns.table.remember(
        np.arange(1, 1001, dtype=np.uint64),
        long_ago,
        np.zeros(1000, np.uint32),
        START,
        0,
    )
    learn(policy, values, START)
    chance = 64 / (64 + 1000)  # of requests at an age of about 5 s
    assert policy._worth[0, 0] < 1.5 * chance / 4


def test_nothing_is_counted_where_nothing_is() -> None:
    columns = Columns(None, SLOTS)
    columns.reset()
    assert Hindsight(columns)._census(START).sum() == 0


def test_nobody_is_refused_before_enough_has_been_seen() -> None:
    columns = columns_of()
    values = new_values()
    columns.last_use[:] = START - 50 * SECOND
    columns.hits[:] = 1
    policy = taught(columns, values)
    nobody = Newcomers(
        START - np.arange(9), np.zeros(9, np.uint32), np.zeros(9, np.int64)
    )
    assert policy.admit(nobody, 0, 0) == 0
    _SharedValues.of(values).asked[:] = 0
    policy.share(values)
    assert policy.admit(nobody, 0, 0) == 9


def test_those_for_whom_there_is_room_are_compared_with_nobody() -> None:
    columns = columns_of()
    values = new_values()
    columns.last_use[:] = START - 20 * SECOND
    columns.hits[:] = 1
    policy = taught(columns, values)
    policy._worth = np.zeros((CLASSES, AGES))
    policy._worth[1] = 0.5
    policy._worth[CLASSES - 1] = 1.0
    hits = np.array([0, 0, 9999, 9999, 0], np.uint32)
    stamps = START + 30 * SECOND - np.arange(5)
    assert (
        policy.admit(
            Newcomers(stamps, hits[[2, 0, 0, 0, 0]], np.zeros(5, np.int64)), 2, 0
        )
        == 2
    )
    assert policy.admit(Newcomers(stamps, hits, np.zeros(5, np.int64)), 2, 0) == 4


def test_no_queue_is_kept_ready_while_many_slots_are_free() -> None:
    columns = columns_of()
    policy = Hindsight(columns)
    few = Newcomers(
        START - np.arange(2), np.zeros(2, np.uint32), np.zeros(2, np.int64)
    )
    policy.admit(few, SLOTS // 8, 0)
    policy.prepare(START, 0)
    assert not len(policy._queue._ranked.rows)
    # asked all the same, it makes one
    assert len(policy.victims(3, START, 0)) == 3
    policy = Hindsight(columns)
    policy.admit(few, SLOTS // 8 - 1, 0)
    policy.prepare(START, 0)
    assert len(policy._queue._ranked.rows)
