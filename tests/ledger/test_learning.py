"""The policy that learns, in a real ledger: who is refused and why, what a restart and other processes know of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagoda import policy as policies
from pagoda.config import Config
from pagoda.ledger import Ledger, Present, Refused, Reserved
from pagoda.ledger.ledger import _fresh_locks
from pagoda.metrics import Reason
from pagoda.policy.hindsight import _Learnt
from pagoda.testing import FakeClock
from tests.ledger.support import TENANT, keys, put, spec

SLOTS = 32


def opened(shm_root: Path, clock: FakeClock) -> Ledger:
    ledger = Ledger.open(spec(shm_root, SLOTS), "hindsight", clock=clock)
    ledger.register(TENANT, {"model": "test"})
    return ledger


def teach(ledger: Ledger, clock: FakeClock) -> None:
    """That chunks are asked for again when they are 10 to 50 s old, so that one of 9 s is worth more than a new one."""
    learnt = _Learnt.of(ledger._upkeep.learnt)  # type: ignore[arg-type]
    learnt.asked[:, 20:27] = learnt.watched[:, 20:27] = 100
    for _ in range(2):
        ledger.upkeep()
        clock.advance(6)
    ledger.upkeep()


def full_of_better(ledger: Ledger, clock: FakeClock) -> None:
    teach(ledger, clock)
    assert len(put(ledger, keys(*range(SLOTS)), chained=False)) == SLOTS
    clock.advance(9)


def test_who_is_refused_leaves_a_ghost_that_says_so(shm_root: Path) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    full_of_better(ledger, clock)
    wanted = keys(100, 101, 102)
    outcomes = ledger.reserve(wanted, namespace=TENANT)
    assert [one.reason for one in outcomes if isinstance(one, Refused)] == [Reason.NOT_ADMITTED] * 3
    assert [ledger.why(key).reason for key in wanted] == [Reason.NOT_ADMITTED] * 3
    assert ledger.match(wanted).reason is Reason.NOT_ADMITTED
    assert ledger.counters()["drop_not_admitted"] == 3 and ledger.gauges()["ready"] == SLOTS
    ledger.close()


def test_what_stands_behind_who_was_refused_is_remembered_too(shm_root: Path) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    full_of_better(ledger, clock)
    ledger.refuse(keys(7000, 7001), start=5, stamp=ledger.stamp())
    ledger.refuse([], start=7, stamp=ledger.stamp())
    assert ledger.why(keys(7001)[0]).reason is Reason.NOT_ADMITTED
    ledger.close()


def test_what_is_there_stays_present_whoever_is_refused(shm_root: Path) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    full_of_better(ledger, clock)
    outcomes = ledger.reserve([*keys(3), *keys(100), *keys(4)], namespace=TENANT)
    assert [type(one) for one in outcomes] == [Present, Refused, Present]
    ledger.close()


def test_a_tier_that_must_take_all_refuses_nobody(shm_root: Path) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    ledger.take_all()
    full_of_better(ledger, clock)
    outcomes = ledger.reserve(keys(100, 101), namespace=TENANT)
    assert [type(one) for one in outcomes] == [Reserved, Reserved]
    _fresh_locks()  # what a forked child does
    assert not ledger._advice.refuses
    ledger.close()


def test_a_restart_keeps_what_was_learnt(shm_root: Path) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    full_of_better(ledger, clock)
    ledger.close()
    ledger = opened(shm_root, clock)
    ledger.upkeep()
    assert isinstance(ledger.reserve(keys(100), namespace=TENANT)[0], Refused)
    ledger.close()


def test_what_was_asked_for_before_it_went_counts_when_it_is_back(shm_root: Path) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    put(ledger, keys(1))
    for _ in range(3):
        clock.advance(5)
        ledger.match(keys(1))
    put(ledger, keys(*range(10, 10 + SLOTS)), chained=False)
    assert ledger.why(keys(1)[0]).reason is Reason.EVICTED
    put(ledger, keys(1))
    ((slot),) = ledger.match(keys(1), touch=False).slots.tolist()
    assert ledger.columns.hits[slot] == 4
    assert ledger.why(keys(1)[0]).reason is Reason.ABSENT  # its ghost has gone
    ledger.close()


@pytest.mark.parametrize("asked", [True, False])
def test_storing_is_not_asking(shm_root: Path, asked: bool) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    (stored,) = put(ledger, keys(1))
    clock.advance(5)
    ledger.match(keys(1), asked=asked)
    ledger.reserve(keys(1), namespace=TENANT)
    assert ledger.columns.hits[stored.slot] == asked
    ledger.close()


def test_a_thread_learns_while_there_is_use_for_it(shm_root: Path) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    put(ledger, keys(1))
    thread = ledger._upkeep._thread
    assert thread is not None and thread.daemon
    ledger.close()
    lru = Ledger.open(spec(shm_root, SLOTS, name="other"), "lru", clock=clock)
    lru.register(TENANT, {"model": "test"})
    put(lru, keys(1))
    assert lru._upkeep._thread is None and lru._upkeep.learnt is None
    lru.close()


def test_a_damaged_file_of_what_was_learnt_is_begun_anew(shm_root: Path) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    teach(ledger, clock)
    assert ledger._upkeep.learnt is not None
    ledger._upkeep.learnt[:] = np.nan
    ledger.upkeep()
    assert np.isfinite(ledger._upkeep.learnt).all()
    assert len(put(ledger, keys(*range(2 * SLOTS)), chained=False)) == 2 * SLOTS
    ledger.close()


def test_an_unknown_policy_leaves_nobody_in_the_store(shm_root: Path) -> None:
    with pytest.raises(ValueError, match="unknown policy 'best'; choose one of hindsight, lru, arc, fifo"):
        Ledger.open(spec(shm_root), "best")
    ledger = Ledger.open(spec(shm_root))
    assert ledger.gauges()["members"] == 1
    ledger.close()


@pytest.mark.parametrize("name", policies.NAMES)
def test_every_policy_that_has_a_name_can_be_had(shm_root: Path, name: str) -> None:
    assert Config(policy=name).policy == name
    ledger = Ledger.open(spec(shm_root, SLOTS), name)
    ledger.register(TENANT, {"model": "test"})
    assert len(put(ledger, keys(*range(2 * SLOTS)), chained=False)) == 2 * SLOTS
    assert type(ledger._advice._policy).__name__.lower() == name
    ledger.close()
