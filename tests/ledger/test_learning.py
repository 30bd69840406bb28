"""The policy that learns, in a real ledger: what is refused and why; a restart and other processes
share it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagoda import policy as policies
from pagoda.base.metrics import Reason
from pagoda.config import Config
from pagoda.ledger import Ledger, Present, Refused, Reserved, admin
from pagoda.testing import FakeClock
from tests.ledger.support import (
    TENANT,
    keys,
    put,
    put_alone,
    spec,
    teach,
)

SLOTS = 32


def opened(shm_root: Path, clock: FakeClock) -> Ledger:
    ledger = Ledger.open(spec(shm_root, SLOTS), "hindsight", clock=clock)
    ledger.namespaces.register(TENANT, {"model": "test"})
    return ledger


def full_of_better(ledger: Ledger, clock: FakeClock) -> None:
    teach(ledger, clock)
    assert len(put_alone(ledger, range(SLOTS))) == SLOTS
    clock.advance(9)


def test_who_is_refused_leaves_a_ghost_that_says_so(shm_root: Path) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    full_of_better(ledger, clock)
    wanted = keys(100, 101, 102)
    outcomes = ledger.reserve(wanted, namespace=TENANT)
    assert [one.reason for one in outcomes if isinstance(one, Refused)] == [
        Reason.NOT_ADMITTED
    ] * 3
    assert [ledger.explain_miss(key).reason for key in wanted] == [
        Reason.NOT_ADMITTED
    ] * 3
    assert ledger.match_prefix(wanted).reason is Reason.NOT_ADMITTED
    assert admin.counters(ledger)["drop_not_admitted"] == 3
    assert admin.gauges(ledger)["ready"] == SLOTS
    ledger.close()


def test_what_stands_behind_who_was_refused_is_remembered_too(
    shm_root: Path,
) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    full_of_better(ledger, clock)
    ledger.refuse(keys(7000, 7001), start=5, stamp=ledger.stamp())
    ledger.refuse([], start=7, stamp=ledger.stamp())
    assert ledger.explain_miss(keys(7001)[0]).reason is Reason.NOT_ADMITTED
    ledger.close()


def test_what_is_there_stays_present_whoever_is_refused(shm_root: Path) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    full_of_better(ledger, clock)
    outcomes = ledger.reserve([*keys(3), *keys(100), *keys(4)], namespace=TENANT)
    assert [type(one) for one in outcomes] == [Present, Refused, Present]
    ledger.close()


def test_a_reserve_may_ask_for_all_to_be_let_in(shm_root: Path) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    full_of_better(ledger, clock)
    assert isinstance(ledger.reserve(keys(100), namespace=TENANT)[0], Refused)
    outcomes = ledger.reserve(keys(100, 101), namespace=TENANT, admit_all=True)
    assert [type(one) for one in outcomes] == [Reserved, Reserved]
    ledger.close()


def test_what_was_judged_once_is_not_asked_about_again(shm_root: Path) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    full_of_better(ledger, clock)
    stamp = ledger.stamp()
    assert ledger.admit(keys(3), start=0, stamp=stamp) == 1  # it is stored
    assert ledger.admit([*keys(3), *keys(100, 101)], start=0, stamp=stamp) == 1
    assert ledger.explain_miss(keys(100)[0]).reason is Reason.NOT_ADMITTED
    outcomes = ledger.reserve(
        keys(100), namespace=TENANT, stamp=stamp, already_admitted=True
    )
    assert [type(one) for one in outcomes] == [Reserved]
    ledger.close()


@pytest.mark.parametrize("asked", [True, False])
def test_a_touch_raises_what_is_here_and_says_which_is_not(
    shm_root: Path, asked: bool
) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    wanted = keys(0, 1, 2, 3)
    stored = put(ledger, wanted)
    admin.remove(ledger, wanted[1:2])
    slots = [one.slot for one in stored]
    before = ledger.columns.last_use[slots].copy()
    clock.advance(5)
    assert ledger.touch(wanted, asked=asked) == [True, False, True, True]
    later = ledger.columns.last_use[slots] - before
    assert (later[[0, 2, 3]] >= 5e9).all()
    assert later[1] < 5e9
    assert (
        ledger.columns.last_use[slots[0]] == ledger.columns.last_use[slots[2]] + 2
    )
    assert (
        ledger.columns.last_use[slots[3]] == ledger.columns.last_use[slots[2]] - 1
    )
    assert ledger.columns.hits[slots].tolist() == [asked, 0, asked, asked]
    assert ledger.touch([]) == []
    ledger.close()


def test_a_restart_keeps_what_was_learnt(shm_root: Path) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    full_of_better(ledger, clock)
    ledger.close()
    ledger = opened(shm_root, clock)
    ledger.upkeep_thread.run_once()
    assert isinstance(ledger.reserve(keys(100), namespace=TENANT)[0], Refused)
    ledger.close()


def test_what_was_asked_for_before_it_went_counts_when_it_is_back(
    shm_root: Path,
) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    put(ledger, keys(1))
    for _ in range(3):
        clock.advance(5)
        ledger.match_prefix(keys(1))
    put_alone(ledger, range(10, 10 + SLOTS))
    assert ledger.explain_miss(keys(1)[0]).reason is Reason.EVICTED
    put(ledger, keys(1))
    ((slot),) = ledger.match_prefix(keys(1), touch=False).slots.tolist()
    assert ledger.columns.hits[slot] == 4
    # its ghost was removed
    assert ledger.explain_miss(keys(1)[0]).reason is Reason.ABSENT
    ledger.close()


@pytest.mark.parametrize("asked", [True, False])
def test_storing_is_not_asking(shm_root: Path, asked: bool) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    (stored,) = put(ledger, keys(1))
    clock.advance(5)
    ledger.match_prefix(keys(1), asked=asked)
    ledger.reserve(keys(1), namespace=TENANT)
    assert ledger.columns.hits[stored.slot] == asked
    ledger.close()


def test_a_thread_learns_while_there_is_use_for_it(shm_root: Path) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    put(ledger, keys(1))
    thread = ledger.upkeep_thread._thread
    assert thread.is_alive()
    assert thread.daemon
    ledger.close()
    lru = Ledger.open(spec(shm_root, SLOTS, name="other"), "lru", clock=clock)
    lru.namespaces.register(TENANT, {"model": "test"})
    put(lru, keys(1))
    assert not lru.upkeep_thread._thread.is_alive()
    assert lru.upkeep_thread.learned is None
    lru.close()


def test_a_damaged_file_of_what_was_learnt_is_begun_anew(shm_root: Path) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock)
    teach(ledger, clock)
    assert ledger.upkeep_thread.learned is not None
    ledger.upkeep_thread.learned[:] = np.nan
    ledger.upkeep_thread.run_once()
    assert np.isfinite(ledger.upkeep_thread.learned).all()
    assert len(put_alone(ledger, range(2 * SLOTS))) == 2 * SLOTS
    ledger.close()


def test_an_unknown_policy_leaves_nobody_in_the_store(shm_root: Path) -> None:
    with pytest.raises(
        ValueError,
        match="unknown policy 'best'; choose one of hindsight, lru",
    ):
        Ledger.open(spec(shm_root), "best")
    ledger = Ledger.open(spec(shm_root))
    assert admin.gauges(ledger)["members"] == 1
    ledger.close()


@pytest.mark.parametrize("name", policies.NAMES)
def test_every_policy_that_has_a_name_can_be_had(
    shm_root: Path, name: str
) -> None:
    assert Config(policy=name).policy == name
    ledger = Ledger.open(spec(shm_root, SLOTS), name)
    ledger.namespaces.register(TENANT, {"model": "test"})
    assert len(put_alone(ledger, range(2 * SLOTS))) == 2 * SLOTS
    assert type(ledger.evictor._policy).__name__.lower() == name
    ledger.close()


def test_with_room_for_all_a_run_is_admitted_without_a_transaction(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(shm_root, FakeClock())
    assert (
        ledger.admit(keys(0, 1), start=0, stamp=ledger.stamp()) == 2
    )  # how much room there is, is not known yet
    assert len(put(ledger, keys(0, 1))) == 2
    reads = list[object]()
    read = ledger.session.read
    monkeypatch.setattr(
        ledger.session, "read", lambda *given: reads.append(given) or read(*given)
    )
    assert (
        ledger.admit(keys(*range(2, SLOTS)), start=2, stamp=ledger.stamp())
        == SLOTS - 2
    )
    assert not reads
    assert (
        ledger.admit(keys(*range(2, SLOTS + 1)), start=2, stamp=ledger.stamp())
        == SLOTS - 1
    )
    assert reads
    ledger.close()
