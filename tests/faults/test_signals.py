"""Exceptions that a signal handler raises (Ctrl-C, an alarm) at any moment: no lock, slot or hold
is leaked.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagoda.base.file_space import opened as opened_file
from pagoda.base.signal_safe_threads import if_free
from pagoda.ledger import Ledger, admin
from pagoda.ledger import ledger as module
from pagoda.ledger.columns import NOT_READY
from pagoda.ledger.locks import BEYOND, LABELS, LockFile
from pagoda.ledger.store_state import STATE
from pagoda.ledger.transaction import Transaction
from pagoda.slab import FileSlab, MemorySlab, aligned, pinned
from tests.interrupts import Interrupted, interrupts
from tests.ledger.support import (
    SLOT_BYTES,
    TENANT,
    keys,
    opened,
    others_get_in,
    places,
    put,
    reserved,
    spec,
)

# the other method has the timer that these tests use
pytestmark = pytest.mark.timeout(300, method="thread")


def all_can_be_used(ledger: Ledger) -> None:
    """Nothing is reserved or held, the tables add up, and each slot takes a chunk."""
    assert others_get_in(ledger)
    # what waited for a transaction is done
    put(ledger, keys(100_000), chained=False)
    report = admin.check(ledger)
    assert report.gauges["reserved"] == 0
    assert report.gauges["members"] == 1
    assert report.stale_hints == 0
    put(ledger, keys(*range(200_000, 200_000 + 2 * ledger.slots)), chained=False)
    assert admin.gauges(ledger)["ready"] == ledger.slots
    assert (
        ledger.session.read(
            lambda txn, tables: list(tables.rows(txn, tables.holds)), 30
        )
        == []
    )


@pytest.mark.slow
def test_what_is_reserved_held_and_given_up_survives_any_interruption(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root)
    chance = random.Random(3)

    def act() -> None:
        number = chance.randrange(60)
        outcomes = ledger.reserve(
            keys(number, number + 1), namespace=TENANT, start=0
        )
        try:
            rooms = reserved(outcomes)
            if chance.random() < 0.3:
                ledger.abort(rooms)
            else:
                ledger.commit(rooms)
        except BaseException:
            ledger.abort(outcomes)
            raise

    def keep() -> None:
        match = ledger.match_prefix(keys(chance.randrange(60)))
        ledger.hold(match.slots, match.generations)
        try:
            ledger.release(match.slots, match.generations)
        except BaseException:
            ledger.release(match.slots, match.generations)
            raise

    with interrupts(1, again_seconds=1.0) as until_interrupted:
        for n in range(2500):
            assert until_interrupted(keep if n % 3 == 0 else act)
            assert others_get_in(ledger)
    all_can_be_used(ledger)
    ledger.close()


@pytest.mark.parametrize("step", ["publish", "save"])
def test_an_exception_on_either_side_of_the_commit_is_all_or_nothing(
    shm_root: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(shm_root)
    rooms = reserved(ledger.reserve(keys(1), namespace=TENANT))
    whole = getattr(Transaction, step)
    calls = []

    def interrupted(transaction: Transaction, *more: object) -> None:
        calls.append(transaction)
        if len(calls) == 1:
            raise Interrupted
        whole(transaction, *more)

    monkeypatch.setattr(Transaction, step, interrupted)
    with pytest.raises(Interrupted):
        ledger.commit(rooms)
    monkeypatch.undo()
    assert admin.gauges(ledger)["reserved"] == 0
    match = ledger.match_prefix(keys(1))
    assert len(match.slots) == (step == "publish")
    assert (ledger.columns.last_use[match.slots] != NOT_READY).all(), (
        "it can be evicted"
    )
    all_can_be_used(ledger)
    ledger.close()


def test_a_reservation_whose_answer_was_lost_is_given_up(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(shm_root)

    def interrupted(*_: object, **__: object) -> None:
        raise Interrupted

    # the last that a reserve does
    monkeypatch.setattr(ledger.upkeep_thread, "wake", interrupted)
    with pytest.raises(Interrupted):
        ledger.reserve(keys(1, 2), namespace=TENANT)
    monkeypatch.undo()
    assert admin.gauges(ledger)["reserved"] == 0
    ledger.close()


def test_a_hold_whose_answer_was_lost_is_ended(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(shm_root)
    stored = put(ledger, keys(*range(ledger.slots)), chained=False)
    publish = Transaction.publish

    def interrupted(transaction: Transaction, *more: object) -> None:
        monkeypatch.undo()
        publish(transaction, *more)  # type: ignore[arg-type]
        raise Interrupted

    monkeypatch.setattr(Transaction, "publish", interrupted)
    with pytest.raises(Interrupted):
        ledger.hold(*places(stored))
    all_can_be_used(ledger)
    ledger.close()


@pytest.mark.slow
def test_the_end_of_a_view_is_counted_and_loses_no_exception(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(shm_root)
    lost = list[object]()
    slab = MemorySlab(
        ledger.slab_path, ledger.slots, SLOT_BYTES, ledger.page_guards
    )
    lending = ledger.page_guards
    assert lending is not None
    gc.collect()
    gc.disable()  # or what others have left is finalized in here
    try:
        with (
            interrupts(4, again_seconds=0.0005) as until_interrupted,
            monkeypatch.context() as patch,
        ):
            patch.setattr(sys, "unraisablehook", lost.append)
            for _ in range(600):
                until_interrupted(lambda: slab.views(range(8)))
    finally:
        gc.enable()
    lending.clear_ended()
    assert not lost, lost
    assert not any(lending.marks.row) and not lending.marks.out, (
        "all pages may be given to others"
    )
    slab.close()
    ledger.close()


def test_a_view_that_outlives_the_close_marks_nothing_of_the_next_member(
    shm_root: Path,
) -> None:
    first = opened(shm_root)
    slab = MemorySlab(first.slab_path, first.slots, SLOT_BYTES, first.page_guards)
    old = first.page_guards
    left = slab.views([1])
    slab.close()
    first.close()
    second = opened(shm_root)
    slab = MemorySlab(
        second.slab_path, second.slots, SLOT_BYTES, second.page_guards
    )
    new = second.page_guards
    assert old is not None
    assert new is not None
    kept = slab.views([1])
    assert any(new.marks.row), "it has the row that the first had"
    left.clear()
    old.clear_ended()
    assert any(new.marks.row)
    assert kept
    slab.close()
    second.close()


def taken_and_given_back(
    shm_root: Path, tmp_path: Path
) -> Iterator[tuple[Callable[[], object], Callable[[], bool]]]:
    """What takes something that is not a lock of Python's, and whether all of it is free."""
    ledger = opened(tmp_path, kind="file")
    slab = FileSlab(ledger.slab_path, ledger.slots, SLOT_BYTES)
    page = aligned(SLOT_BYTES)
    slab_path = ledger.slab_path
    descriptors = "/proc/self/fd"

    def clears() -> None:
        with ledger.namespaces._file_lock():
            pass

    def punches() -> None:
        with ledger.pages.slab():
            pass

    def looks(count: int = len(os.listdir(descriptors))) -> bool:
        return len(os.listdir(descriptors)) <= count

    def opens() -> None:
        with opened_file(slab_path, os.O_RDWR):
            pass

    def enters() -> None:
        with opened_file(tmp_path, os.O_RDONLY | os.O_DIRECTORY):
            pass

    def copies() -> None:
        with pinned.copying():
            pass

    def measures() -> None:
        if_free(lock, lambda: None)

    def held(byte: int) -> bool:
        with contextlib.closing(
            LockFile(ledger.directory / STATE, first=BEYOND)
        ) as other:
            return other.held_by_other(byte)

    def openings() -> None:
        Ledger.open(spec(shm_root, name="another")).close()

    def others_take(lock: threading.RLock) -> bool:
        answers: list[bool] = []
        thread = threading.Thread(
            target=lambda: answers.append(lock.acquire(blocking=False))
        )
        thread.start()
        thread.join()
        return answers == [True]

    lock = threading.RLock()
    yield (
        clears,
        lambda: not held(LABELS) and not ledger.namespaces._lock.locked(),
    )
    yield punches, looks
    yield opens, looks
    yield enters, looks
    yield copies, lambda: not pinned._copies
    yield measures, lambda: others_take(lock)
    yield (lambda: slab.read(0, [page])), lambda: not slab._calls
    yield openings, lambda: not module._openings.directories
    slab.close()
    assert slab._fd < 0
    ledger.close()


@pytest.mark.slow
def test_nothing_stays_taken_between_its_taking_and_the_try(
    shm_root: Path, tmp_path: Path
) -> None:
    for work, free in taken_and_given_back(shm_root, tmp_path):
        with interrupts(5, (-5, -3), again_seconds=1.0) as until_interrupted:
            for _ in range(400):
                until_interrupted(work)
        gc.collect()
        assert free(), work


@pytest.mark.slow
def test_what_was_deferred_is_done_once_whatever_interrupts_it(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root)
    asked = done = 0

    def count(*_: object) -> None:
        nonlocal done
        done += 1

    def act() -> None:
        nonlocal asked
        ledger.session.defer(count)
        asked += 1
        put(ledger, keys(asked % 50), chained=False)

    with interrupts(2, again_seconds=1.0) as until_interrupted:
        for _ in range(500):
            until_interrupted(act)
    put(ledger, keys(1000))
    assert asked <= done
    assert not ledger.session._deferred
    ledger.close()


@pytest.mark.slow
def test_a_process_that_is_interrupted_while_it_forks_goes_on(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root)
    children: list[int] = []
    left = 0

    def fork() -> None:
        nonlocal left
        while left:  # what is raised within the hooks of a fork is lost
            left -= 1
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            children.append(pid)
        raise Interrupted

    with interrupts(3, again_seconds=0.0) as until_interrupted:
        for _ in range(40):
            left = 3
            until_interrupted(fork)
            assert others_get_in(ledger)
    # and none that this process had before: those may live on
    for pid in children:
        os.waitpid(pid, 0)
    answers: list[int] = []
    thread = threading.Thread(
        target=lambda: answers.append(len(put(ledger, keys(1))))
    )
    thread.start()
    thread.join(60)
    assert answers == [1], "other threads get in"
    admin.reap(ledger)
    all_can_be_used(ledger)
    ledger.close()
