"""Forked children: new members with no reservations, that may outlive their parent or die at any
moment.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from random import Random
from threading import Thread
from types import FrameType

import lmdb
import pytest

from pagoda.base.finalizers import close_dropped
from pagoda.ledger import Busy, Ledger, Reserved, admin
from pagoda.ledger.lmdb_tables import Tables
from pagoda.ledger.locks import OPEN, Gate, StoreLocks
from pagoda.ledger.session import Session
from pagoda.ledger.store_state import LOCKS, STATE, TABLES
from testbed.patience import Patience
from tests.cache.kit import cache_at
from tests.children import (
    child,
    in_child,
    in_light_process,
    kill_self,
    wait,
)
from tests.faults.support import (
    NAMESPACE,
    PATIENT_SECONDS,
    Store,
    keys,
    memory_spec,
    python,
    succeeded,
)

OUTLIVES = """
import os, signal, sys, time
from pathlib import Path
from pagoda.ledger import admin
from support import Store, keys
store = Store(Path(sys.argv[1]))
store.save(keys(range(5)))
parent = os.getpid()
if os.fork():
    os.kill(parent, signal.SIGKILL)
while os.getppid() == parent:
    time.sleep(0.01)
assert store.load(keys(range(5))) == 5
for turn in range(20):
    prompt = keys(range(turn * 10, turn * 10 + 10))
    assert store.save(prompt) == 10 and store.load(prompt) == 10
gauges = admin.gauges(store.ledger)
admin.reap(store.ledger)
admin.check(store.ledger)
assert admin.gauges(store.ledger)["members"] == 1, admin.gauges(store.ledger)
store.close()
Path(sys.argv[2]).write_text("fine")
"""


@pytest.mark.slow
def test_a_child_outlives_its_killed_parent(
    shm_root: Path, tmp_path: Path
) -> None:
    done = python(OUTLIVES, shm_root, tmp_path / "said")
    assert done.returncode == -signal.SIGKILL
    patience = Patience(90)
    said = tmp_path / "said"
    # made first, then written
    while not (said.exists() and said.read_text()) and not patience.ended:
        time.sleep(0.02)
    assert said.read_text() == "fine", done.stderr


def test_a_child_is_a_member_of_its_own_without_reservations(
    shm_root: Path,
) -> None:
    store = Store(shm_root)
    [mine] = store.ledger.reserve(keys([1]), namespace=NAMESPACE)
    assert isinstance(mine, Reserved)
    number = store.ledger.session.member

    def child() -> None:
        assert store.ledger.commit([mine]) == [False]
        [other] = store.ledger.reserve(keys([1]), namespace=NAMESPACE)
        assert isinstance(other, Busy)
        assert other.owner == number
        assert store.ledger.session.member != number
        store.ledger.abort([mine])

    in_child(child)
    assert store.ledger.commit([mine]) == [True]
    admin.check(store.ledger)
    store.close()


def test_a_child_has_the_store_open_when_its_parent_has_closed_it(
    shm_root: Path,
) -> None:
    """Even before its first call: nobody may change the files that it has mapped."""
    store = Store(shm_root)
    directory = store.ledger.directory
    waits, go = os.pipe()
    lives, begun = os.pipe()
    pid = child(lambda: (os.write(begun, b"!"), os.read(waits, 1)))
    os.read(lives, 1)
    store.close()
    locks = StoreLocks(directory, STATE, LOCKS)
    try:
        assert not locks.lock(OPEN, exclusive=True)
        os.write(go, b"!")
        assert wait(pid) == 0
        assert locks.lock(OPEN, exclusive=True)
    finally:
        locks.close()
        for fd in (waits, go, lives, begun):
            os.close(fd)


def test_what_a_killed_child_reserved_and_held_comes_back(shm_root: Path) -> None:
    store = Store(shm_root)
    store.save(keys(range(4)))
    match = store.ledger.match_prefix(keys(range(4)))

    def child() -> None:
        assert all(store.ledger.hold(match.slots, match.generations))
        for one in store.ledger.reserve(keys(range(10, 14)), namespace=NAMESPACE):
            assert isinstance(one, Reserved)
        kill_self()

    in_child(child, -signal.SIGKILL)
    outcomes = store.ledger.reserve(keys(range(10, 14)), namespace=NAMESPACE)
    assert all(isinstance(one, Reserved) for one in outcomes), (
        "the dead child's reservations are taken back when they are met"
    )
    store.ledger.abort([one for one in outcomes if isinstance(one, Reserved)])
    for turn in range(10):
        store.save(keys(range(100 * turn + 100, 100 * turn + 132)))
    assert store.load(keys(range(4))) == 0, "a dead member holds nothing"
    admin.reap(store.ledger)
    gauges = admin.gauges(store.ledger)
    assert gauges["reserved"] == 0
    assert gauges["members"] == 1
    admin.check(store.ledger)
    store.close()


@pytest.mark.slow
def test_a_fork_among_busy_threads_leaves_both_sides_working(
    shm_root: Path,
) -> None:
    code = """
import os, sys, threading
from pathlib import Path
from pagoda.ledger import admin
from support import Store, keys
store = Store(Path(sys.argv[1]), slots=64)
done = threading.Event()
def work(seed):
    turn = 0
    while not done.is_set():
        own = seed * 100000
        prompt = keys([*range(own, own + 3), *range(own + turn * 3 + 3, own + turn * 3 + 6)])
        store.save(prompt)
        store.load(prompt)
        turn += 1
threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
for thread in threads:
    thread.start()
bad = 0
for turn in range(25):
    pid = os.fork()
    if pid == 0:
        try:
            own = keys(range(10**8, 10**8 + 5))
            # One try may find nothing older than itself: the threads go round 64 slots in some milliseconds.
            assert any(store.save(own) == 5 for _ in range(20))
            store.load(own)
            store.close()
        except BaseException as error:
            print("child:", repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    bad += os.waitpid(pid, 0)[1] != 0
done.set()
for thread in threads:
    thread.join(60)
assert not any(thread.is_alive() for thread in threads)
admin.reap(store.ledger)
admin.check(store.ledger)
assert admin.gauges(store.ledger)["reserved"] == 0
sys.exit(bad)
"""  # noqa: E501
    succeeded(python(code, shm_root))


def test_what_was_open_at_a_fork_can_be_closed(shm_root: Path) -> None:
    def mapped() -> list[str]:
        return [
            line
            for line in Path("/proc/self/maps").read_text().splitlines()
            if str(shm_root) in line
        ]

    with cache_at(shm_root, None):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        assert mapped()
    # what `close_dropped` waits for is the whole of it
    patience = Patience(8)
    while mapped():
        gc.collect()
        assert close_dropped(60) and not patience.ended, mapped()
        time.sleep(0.01)


def forks_in_transactions(root: Path) -> None:
    """Call a ledger while a signal handler forks, at random moments."""
    store = Store(root, slots=64)
    parent = os.getpid()
    random = Random(0)
    ledger = store.ledger
    children = list[int]()

    def fork(*_: object) -> None:
        if (child := os.fork()) == 0:
            signal.alarm(60)  # instead of a hang
        else:
            children.append(child)

    def call(prompt: list[bytes]) -> None:
        outcomes = ledger.reserve(
            prompt, namespace=NAMESPACE, deadline_seconds=30.0
        )
        ledger.commit(
            [one for one in outcomes if isinstance(one, Reserved)],
            deadline_seconds=30.0,
        )
        ledger.match_prefix(prompt, deadline_seconds=30.0)

    before = signal.signal(signal.SIGALRM, fork)
    try:
        for turn in range(400):
            signal.setitimer(signal.ITIMER_REAL, 10 ** random.uniform(-4.5, -2.5))
            try:
                call(keys(range(turn * 10, turn * 10 + 10)))
            finally:
                if os.getpid() != parent:
                    # whatever it has met: the store is unavailable in the middle of its parent's
                    # call
                    os._exit(0)
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(children) > 100
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
    admin.reap(ledger)
    admin.check(ledger)
    ledger.close()
    again = Ledger.open(memory_spec(root, 64))  # and not a new store
    assert again.directory == ledger.directory
    assert admin.gauges(again)["ready"]


@pytest.mark.slow
def test_a_child_that_a_signal_handler_forks_in_a_transaction_leaves_the_tables_alone(
    shm_root: Path,
) -> None:
    """It returns into the middle of the parent's call: a commit in both processes would damage the
    tables.
    """
    in_light_process(forks_in_transactions, shm_root)


def test_a_child_that_is_forked_while_the_tables_are_opened_writes_nothing(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a signal handler: it returns into a call whose gate is the parent's, before there is a
    transaction.
    """
    ledger = Store(shm_root, slots=64).ledger
    parent = os.getpid()
    ends = list[int]()
    session = ledger.session
    own_tables = Session._own_tables

    def forking(self: Session, gate: Gate) -> Tables:
        tables = own_tables(self, gate)
        if self is session and os.getpid() == parent and (child := os.fork()):
            # the child ends while its parent has the gate
            ends.append(os.waitpid(child, 0)[1])
        return tables

    session._shut()  # as after a fork: the next call opens them
    monkeypatch.setattr(Session, "_own_tables", forking)
    try:
        outcomes = ledger.reserve(
            keys(range(5)), namespace=NAMESPACE, deadline_seconds=0.5
        )
    finally:
        if os.getpid() != parent:
            os._exit(session.member != 0)  # it has written that it is one
    assert ends == [0]
    for one in outcomes:
        assert isinstance(one, Reserved)
    assert ledger.commit(outcomes) == [True] * 5
    admin.check(ledger)
    ledger.close()


def test_a_child_that_is_forked_while_the_tables_are_opened_uses_the_store_afterwards(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(shm_root, slots=64)
    parent = os.getpid()
    ends = list[int]()
    store.save(keys(range(5)))
    session = store.ledger.session
    own_tables = Session._own_tables

    def forking(self: Session, gate: Gate) -> Tables:
        tables = own_tables(self, gate)
        if self is session and os.getpid() == parent and not ends:
            ends.append(os.fork())
        return tables

    session._shut()  # as after a fork: the next call opens them
    monkeypatch.setattr(Session, "_own_tables", forking)
    try:
        found = len(
            store.ledger.match_prefix(
                keys(range(5)), deadline_seconds=PATIENT_SECONDS
            ).slots
        )
    finally:
        if os.getpid() != parent:
            try:
                os._exit(store.load(keys(range(5))) != 5)
            finally:
                os._exit(1)
    assert found == 5
    assert os.waitpid(ends[0], 0)[1] == 0
    store.close()


def test_a_child_that_is_forked_within_the_opening_of_tables_does_not_have_them(
    shm_root: Path,
) -> None:
    """`lmdb.open` runs Python code, in which a handler may run. These are tables without a gate, as
    of a new store.
    """
    store = Store(shm_root)
    path = shm_root / "tables"
    parent = os.getpid()
    ends = list[int]()
    shutil.copy(store.ledger.directory / TABLES, path)

    def fork(frame: FrameType, _event: str, _argument: object) -> None:
        if "lmdb" in Path(frame.f_code.co_filename).parts and not ends:
            ends.append(os.fork())

    sys.settrace(fork)
    refused = False
    try:
        with Tables.opening:
            Tables(path, store.ledger.session.store.state.map_bytes).close()
    except lmdb.Error:
        refused = True
    finally:
        sys.settrace(None)
        if os.getpid() != parent:
            os._exit(not refused)
    assert not refused
    assert [os.waitpid(child, 0)[1] for child in ends] == [0]
    store.close()


def test_a_handler_that_forks_in_a_transaction_does_not_open_the_gate(
    shm_root: Path,
) -> None:
    store = Store(shm_root)
    gate = None
    gate = store.ledger.session.gate

    def fork_inside() -> bool:
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        taken: list[bool] = []
        other = Thread(
            target=lambda: taken.append(gate._inside.acquire(timeout=0.2))
        )
        other.start()
        other.join()
        return taken[0]

    assert not gate.run(fork_inside, 10.0, exclusive=True)
    assert gate.run(lambda: True, 10.0)
