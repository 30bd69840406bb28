"""This process's part in a store: transactions, what waits for the next, forks, threads, the
end.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from pagoda.base.clock import Clock
from pagoda.base.errors import ClosedError
from pagoda.base.metrics import Reason
from pagoda.ledger import (
    Ledger,
    Present,
    Refused,
    Reserved,
    admin,
    lmdb_tables,
    session,
)
from pagoda.ledger.columns import NOT_READY
from pagoda.ledger.hint_pages import HintPages
from pagoda.ledger.session import UnavailableError
from pagoda.ledger.store_directory import OpenStore
from pagoda.ledger.transaction import Transaction
from testbed.patience import Patience
from tests.children import (
    child,
    in_child,
    kill_self,
    wait,
)
from tests.ledger.support import (
    OTHER,
    PATIENT_SECONDS,
    TENANT,
    Other,
    gate_taken,
    gauge,
    keys,
    matched,
    opened,
    places,
    present,
    put,
    put_alone,
    reserved,
    rooms_for,
    spec,
)


@pytest.fixture
def clock() -> Clock:
    """The machine's clock."""
    return Clock()


def busy_store(ledger: Ledger) -> None:
    """Check that every use of a store works."""
    put_alone(ledger, range(1000, 1100))
    assert matched(ledger, keys(1099)) == 1
    admin.remove(ledger, keys(1099))
    assert admin.clear(ledger) > 0
    assert gauge(ledger, "free") == ledger.slots
    admin.check(ledger)


# transactions


def test_trouble_in_a_transaction_is_a_reason_and_changes_nothing(
    ledger: Ledger,
) -> None:
    for error, reason in (
        (lmdb.MapFullError(), Reason.FULL),
        (lmdb.Error(), Reason.IO_ERROR),
        (OSError(), Reason.IO_ERROR),
    ):

        def work(transaction: Transaction, error: Exception = error) -> None:
            transaction.meta.ready = 12345
            raise error

        with pytest.raises(UnavailableError) as caught:
            ledger.session.write(work, 1.0)
        assert caught.value.reason is reason
        put(ledger, keys(1))
    admin.check(ledger)


def test_the_error_of_a_transaction_can_be_sent_to_another_process(
    ledger: Ledger,
) -> None:
    def fill(_: object) -> None:
        raise lmdb.MapFullError

    with pytest.raises(UnavailableError) as caught:
        ledger.session.write(fill)
    sent = pickle.loads(pickle.dumps(caught.value))
    assert str(sent) == str(caught.value)
    assert sent.reason is Reason.FULL


def test_after_an_error_of_lmdb_the_environment_is_another(
    ledger: Ledger,
) -> None:
    """LMDB does not continue with a transaction whose commit failed: every later call would fail
    too.
    """
    before = ledger.session.read(lambda _, tables: tables).env

    def fail(*_: object) -> None:
        raise lmdb.Error

    with pytest.raises(UnavailableError):
        ledger.session.write(fail, 1.0)
    assert ledger.session.read(lambda _, tables: tables).env is not before
    with pytest.raises(lmdb.Error):
        before.begin()  # it was closed


def test_the_last_to_leave_syncs_before_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(tmp_path, kind="file")
    put(ledger, keys(1))
    done: list[str] = []

    class Watched:
        """The environment, with a record of its calls."""

        def __init__(self, env: lmdb.Environment) -> None:
            self._env = env

        def __getattr__(self, name: str) -> object:
            if name == "sync":
                done.append(name)
            return getattr(self._env, name)

    tables = ledger.session.read(lambda _, tables: tables)
    tables.env = Watched(tables.env)  # type: ignore[assignment]
    save = HintPages.save
    mark = OpenStore.mark_clean
    monkeypatch.setattr(
        HintPages, "save", lambda self: (done.append("save"), save(self))[1]
    )
    monkeypatch.setattr(
        OpenStore,
        "mark_clean",
        lambda self, *a: (done.append("clean"), mark(self, *a))[1],
    )
    ledger.close()
    assert done == ["save", "sync", "clean"]


def fill_map(ledger: Ledger) -> None:
    """Fill the map to the last page that an ordinary transaction can use."""
    size = 1 << 20
    number = 0

    def write(transaction: Transaction) -> None:
        transaction.txn.put(
            b"%d" % number, b"x" * size, db=transaction.tables.pins
        )

    while size:
        try:
            ledger.session.write(write, 1.0)
        except UnavailableError as full:
            assert full.reason is Reason.FULL
            size //= 2
        number += 1


def test_a_full_map_is_a_refusal_and_the_rest_goes_on(shm_root: Path) -> None:
    ledger = opened(shm_root)
    put(ledger, keys(1))
    fill_map(ledger)
    [outcome] = ledger.reserve(keys(5), namespace=TENANT)
    assert outcome == Refused(keys(5)[0], Reason.FULL)
    assert matched(ledger, keys(1)) == 1
    ledger.close()
    again = opened(shm_root)
    assert len(again.match_prefix(keys(1)).slots) == 1
    again.close()


@pytest.mark.parametrize("everything", [False, True])
def test_a_full_map_keeps_nothing_from_being_taken_out(
    shm_root: Path, everything: bool
) -> None:
    """The map grows more than once, while other processes have opened the smaller map."""
    ledger = opened(shm_root, slots=1024)
    go_on = multiprocessing.Event()
    said = multiprocessing.Event()

    def look() -> None:
        other = Ledger.open(spec(shm_root, 1024))
        assert matched(other, keys(0)) == 1
        said.set()
        assert go_on.wait(60)
        assert not matched(other, keys(0))
        put(other, keys(2000))
        assert admin.remove(other, keys(2000)) == 1
        other.close()

    put(ledger, keys(*range(600)))
    pid = child(look)
    assert said.wait(60)
    for turn in range(5):
        fill_map(ledger)
        assert isinstance(ledger.reserve(keys(5000), namespace=OTHER)[0], Refused)
        assert admin.remove(ledger, keys(599)) == 1
        assert admin.clear(ledger, None if everything else TENANT) == 599, turn
        if turn < 4:
            put(ledger, keys(*range(600)))
    go_on.set()
    assert wait(pid) == 0
    admin.check(ledger)
    ledger.close()


def test_what_waits_is_done_once_even_if_a_transaction_fails_between(
    ledger: Ledger,
) -> None:
    done = []
    ledger.session.defer(lambda transaction: done.append(transaction))

    def fail(*_: object) -> None:
        raise lmdb.Error

    for _ in range(2):
        with pytest.raises(UnavailableError):
            ledger.session.write(fail, 1.0)
    put(ledger, keys(1))
    assert len(done) == 3
    assert len({id(transaction) for transaction in done}) == 3
    put(ledger, keys(2))
    assert len(done) == 3, "once it has been committed it is not done again"


def test_a_late_commit_with_a_wrong_part_spoils_nobody_elses_call(
    ledger: Ledger,
) -> None:
    rooms = rooms_for(ledger, keys(1))
    with pytest.raises(ValueError, match="part"):
        ledger.commit(rooms, part=3)
    with gate_taken(ledger):
        assert ledger.commit(rooms, part=3, deadline_seconds=0.02) == [False]
    put(ledger, keys(2))
    assert ledger.commit(rooms) == [True]


def test_late_commits_of_many_threads_are_all_done(ledger: Ledger) -> None:
    rooms = rooms_for(ledger, keys(1, 2, 3, 4))
    with gate_taken(ledger):
        threads = [
            threading.Thread(
                target=ledger.commit,
                args=([room], 0),
                kwargs={"deadline_seconds": 0.02},
            )
            for room in rooms
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    put(ledger, keys(9))
    assert all(present(ledger, keys(1, 2, 3, 4)))
    assert not gauge(ledger, "reserved")


@pytest.mark.slow
def test_every_call_ends_by_its_deadline_however_many_transactions_it_takes(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root, slots=2048)
    rooms = rooms_for(ledger, keys(*range(256)))
    assert len(rooms) == 256
    with gate_taken(ledger):
        for call in (
            # 64 for each transaction: 40 transactions
            lambda: ledger.commit(rooms * 10, deadline_seconds=0.3),
            lambda: ledger.adopt(rooms * 10, 0, deadline_seconds=0.3),
            lambda: ledger.abort(rooms * 10, deadline_seconds=0.3),
            # four transactions
            lambda: ledger.reserve(
                keys(*range(1000, 1256)), namespace=TENANT, deadline_seconds=2.5
            ),
            lambda: ledger.match_prefix(keys(*range(256)), deadline_seconds=0.3),
        ):
            patience = Patience(9.0)
            call()
            assert not patience.ended, patience.said()
        outcomes = ledger.reserve(
            keys(*range(256)), namespace=TENANT, deadline_seconds=0.0
        )
        assert {one.reason for one in outcomes if isinstance(one, Refused)} == {
            Reason.LEDGER_BUSY
        }
    ledger.close()


def test_a_call_of_a_child_ends_by_its_deadline_too(ledger: Ledger) -> None:
    def act() -> None:
        patience = Patience(20.0)
        assert (
            ledger.match_prefix(keys(1), deadline_seconds=0.3).reason
            is Reason.LEDGER_BUSY
        )
        assert not patience.ended, patience.said()

    with gate_taken(ledger):
        in_child(act)


# death between two steps


def steps(ledger: Ledger, rooms: list[Reserved], step: str) -> None:
    if step == "reserve":
        ledger.reserve(keys(500, 501), namespace=TENANT)
    elif step == "commit":
        ledger.commit(rooms_for(ledger, keys(600, 601)))
    elif step == "abort":
        ledger.abort(rooms_for(ledger, keys(600, 601)))
    elif step == "remove":
        admin.remove(ledger, [room.key for room in rooms[:3]])
    else:
        admin.clear(ledger, TENANT)


@pytest.mark.parametrize(
    "step", ["reserve", "commit", "abort", "remove", "clear"]
)
@pytest.mark.parametrize("when", ["before the commit", "before publishing"])
def test_a_death_at_any_step_loses_no_slot(
    shm_root: Path, step: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(shm_root)
    rooms = put_alone(ledger, range(32))

    def die() -> None:
        method = "save" if when == "before the commit" else "publish"
        whole = getattr(Transaction, method)
        calls = iter(range(10))
        admin.gauges(ledger)  # is a member by now

        def last(transaction: Transaction, *more: object) -> None:
            if next(calls) == (1 if step in ("commit", "abort") else 0):
                kill_self()
            whole(transaction, *more)

        monkeypatch.setattr(Transaction, method, last)
        steps(ledger, rooms, step)

    assert wait(child(die)) == -signal.SIGKILL
    admin.reap(ledger)
    report = admin.check(ledger)
    assert not report.gauges["reserved"]
    assert report.stale_hints == 0
    for turn in range(3):
        put(
            ledger,
            keys(*range(2000 + 100 * turn, 2032 + 100 * turn)),
            chained=False,
        )
    assert gauge(ledger, "ready") == 32 and not any(
        present(ledger, keys(600, 601))
    ), "all slots can be used again"
    busy_store(ledger)
    ledger.close()


def test_what_a_dead_member_committed_and_did_not_publish_can_be_evicted_after_the_next_opening(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        ledger = opened(shm_root)
        rooms = rooms_for(ledger, keys(1, 2))
        monkeypatch.setattr(
            Transaction,
            "publish",
            lambda *_: kill_self(),
        )
        ledger.commit(rooms)

    assert wait(child(die)) == -signal.SIGKILL
    ledger = opened(shm_root)
    match = ledger.match_prefix(keys(1, 2))
    assert len(match.slots) == 2
    assert (ledger.columns.last_use[match.slots] != NOT_READY).all()
    ledger.close()


# forks


def test_a_child_is_a_stranger_with_a_number_of_its_own(ledger: Ledger) -> None:
    [room] = rooms_for(ledger, keys(1))
    number = ledger.session.member

    def act() -> None:
        assert ledger.commit([room]) == [False]
        ledger.abort([room])
        assert ledger.session.member not in (0, number)
        put(ledger, keys(2))

    in_child(act)
    assert ledger.session.member == number
    assert ledger.commit([room]) == [True]
    assert all(present(ledger, keys(1, 2)))


def test_grandchildren_work_too(ledger: Ledger) -> None:
    def act() -> None:
        put(ledger, keys(1))
        in_child(lambda: (put(ledger, keys(2)), None)[1])
        put(ledger, keys(3))

    in_child(act)
    assert all(present(ledger, keys(1, 2, 3)))


def test_what_a_child_counts_before_its_first_transaction_is_not_its_parents(
    ledger: Ledger,
) -> None:
    ledger.count({"lookups": 7})
    in_child(lambda: ledger.count({"lookups": 100}))
    assert admin.counters(ledger)["lookups"] == 7

    def act() -> None:
        ledger.count({"lookups": 10})
        ledger.match_prefix(keys(1))
        ledger.count({"lookups": 10})

    in_child(act)
    assert admin.counters(ledger)["lookups"] == 27


def test_what_waits_in_the_parent_is_not_done_by_the_child(
    ledger: Ledger,
) -> None:
    rooms = rooms_for(ledger, keys(1))
    with gate_taken(ledger):
        ledger.abort(rooms, deadline_seconds=0.02)

    def act() -> None:
        put(ledger, keys(2))
        assert gauge(ledger, "reserved") == 1

    in_child(act)
    put(ledger, keys(3))
    assert gauge(ledger, "reserved") == 0


def test_a_fork_while_a_thread_waits_at_the_gate(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_FORK_SECONDS", 0.1)
    put(ledger, keys(1))
    receive, send = os.pipe()

    def act() -> None:
        os.read(receive, 1)  # the gate is free
        assert matched(ledger, keys(1)) == 1
        put(ledger, keys(2))

    with gate_taken(ledger):
        waiting = threading.Thread(
            target=ledger.match_prefix,
            args=(keys(1),),
            kwargs={"deadline_seconds": 60},
        )
        waiting.start()
        patience = Patience(30)
        while not ledger.session.gate.taken and not patience.ended:
            time.sleep(0.005)
        patience = Patience(25.0)
        pid = child(act)
        assert not patience.ended, "a fork does not wait for a stopped process"
    waiting.join(60)
    os.write(send, b"x")
    assert wait(pid) == 0
    assert all(present(ledger, keys(1, 2)))


@pytest.mark.slow
def test_a_fork_while_a_thread_writes_hangs_nobody(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB's close in the child would wait for that thread, which the child does not have."""
    monkeypatch.setattr(session, "_FORK_SECONDS", 0.1)
    put(ledger, keys(1))
    inside = threading.Event()
    leave = threading.Event()

    writer = threading.Thread(
        target=lambda: ledger.session.write(
            lambda *_: (inside.set(), leave.wait(60)), 60.0
        )
    )
    writer.start()
    assert inside.wait(60)
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(20)  # instead of a hang
            missed = ledger.match_prefix(keys(1)).reason
            os._exit(0 if missed in (Reason.LEDGER_BUSY, Reason.IO_ERROR) else 2)
        finally:
            os._exit(1)
    patience = Patience(30)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and not patience.ended:
        time.sleep(0.01)
    if not ended[0]:  # it would hang in the fork itself, before any alarm
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    leave.set()
    writer.join(60)
    assert ended == (pid, 0)
    assert matched(ledger, keys(1)) == 1
    put(ledger, keys(2))


def test_two_threads_that_fork_at_once_leave_the_gate_open(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_FORK_SECONDS", 0.05)
    session._before_fork()
    other = threading.Thread(
        target=lambda: (session._before_fork(), session._after_in_parent())
    )
    other.start()
    other.join(60)
    session._after_in_parent()
    assert (
        ledger.match_prefix(keys(1), deadline_seconds=60).reason is Reason.ABSENT
    )


@pytest.mark.slow
def test_forks_among_busy_threads(ledger: Ledger) -> None:
    done = threading.Event()

    def work(first: int) -> None:
        number = first
        while not done.is_set():
            put(ledger, keys(number))
            ledger.match_prefix(keys(number))
            number += 1

    threads = [
        threading.Thread(target=work, args=(first,)) for first in (10_000, 20_000)
    ]
    for thread in threads:
        thread.start()
    try:
        for number in range(10):
            in_child(lambda: (put(ledger, keys(number)), None)[1])  # noqa: B023
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
    admin.reap(ledger)
    assert gauge(ledger, "members") == 1
    assert not gauge(ledger, "reserved")


# threads


def test_threads_share_one_ledger(shm_root: Path) -> None:
    ledger = opened(shm_root, slots=256)
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for number in range(first, first + 60):
                outcomes = ledger.reserve(
                    keys(number, 7), namespace=TENANT, deadline_seconds=30.0
                )
                ledger.commit(reserved(outcomes), deadline_seconds=30.0)
                match = ledger.match_prefix(keys(number), deadline_seconds=30.0)
                assert len(match.slots) == 1
                assert ledger.still_valid(match.slots, match.generations).all()
                for one in outcomes:
                    assert not isinstance(one, Refused)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(1000 * n,)) for n in range(1, 5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    admin.check(ledger)
    assert gauge(ledger, "ready") == 241
    assert isinstance(ledger.reserve(keys(7), namespace=TENANT)[0], Present)
    ledger.close()


# the end


def test_closing_gives_up_what_was_reserved_and_held(shm_root: Path) -> None:
    ledger = opened(shm_root)
    stored = put(ledger, keys(*range(5)))
    with Other(lambda: (admin.gauges(opened(shm_root)), None)[1]):
        ledger.hold(*places(stored))
        ledger.reserve(keys(10, 11), namespace=TENANT)
        ledger.close()
        again = opened(shm_root)
        gauges = admin.gauges(again)
        assert gauges["reserved"] == 0
        assert gauges["members"] == 2
        assert gauges["ready"] == 5
        put(again, keys(*range(100, 200)), chained=False)
        assert not any(present(again, keys(*range(5))))
        again.close()


@pytest.mark.parametrize("call", ["match", "reserve", "gauges", "close"])
def test_a_closed_ledger_says_so(shm_root: Path, call: str) -> None:
    ledger = opened(shm_root)
    ledger.close()
    calls: dict[str, Callable[[], object]] = {
        "match": lambda: ledger.match_prefix(keys(1)),
        "reserve": lambda: ledger.reserve(keys(1), namespace=TENANT),
        "gauges": lambda: admin.gauges(ledger),
    }
    if call == "close":
        ledger.close()
    else:
        with pytest.raises(ClosedError):
            calls[call]()


@pytest.mark.slow
def test_closing_ends_in_time_while_another_sits_in_the_gate(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root)
    ledger.reserve(keys(1), namespace=TENANT)
    with gate_taken(ledger):
        patience = Patience(25.0)
        ledger.close()
        assert not patience.ended, patience.said()
    again = opened(shm_root)
    gauges = admin.gauges(again)
    assert gauges["reserved"] == 0
    assert gauges["members"] == 1
    again.close()


@pytest.mark.slow
def test_what_another_thread_opens_during_a_fork_can_be_opened_in_the_child(
    shm_root: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB lets a process open a file once; what the parent's thread opened could not be closed in
    the child.
    """
    hold = session.Session.before_fork
    opens = list[threading.Thread]()

    def slowly(held: session.Session, until: float) -> None:
        if not opens:
            opens.append(
                threading.Thread(target=lambda: opened(shm_root / "other"))
            )
            opens[0].start()
            opens[0].join(1.0)
        hold(held, until)

    def work() -> None:
        assert put(opened(shm_root / "other"), keys(1))

    monkeypatch.setattr(session.Session, "before_fork", slowly)
    in_child(work)
    opens[0].join(PATIENT_SECONDS)
    other = opened(shm_root / "other")
    assert matched(other, keys(1)) == 1
    for _ in range(2):
        other.close()


@pytest.mark.parametrize("step", ["make", "resize", "check"])
def test_tables_that_another_thread_has_open_without_a_session_can_be_opened_in_a_child(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    if step != "make":
        opened(shm_root, slots=16).close()
    monkeypatch.setattr(session, "_FORK_SECONDS", PATIENT_SECONDS)
    is_open = threading.Event()
    forked = threading.Event()
    init = lmdb_tables.Tables.__init__
    number = {"make": 1, "check": 1, "resize": 2}[step]
    seen: list[object] = []

    def slowly(
        tables: lmdb_tables.Tables, *arguments: object, **named: object
    ) -> None:
        init(tables, *arguments, **named)  # type: ignore[arg-type]
        seen.append(tables)
        if len(seen) == number:
            is_open.set()
            forked.wait(0.5)  # a fork that waits for these tables waits longer

    monkeypatch.setattr(lmdb_tables.Tables, "__init__", slowly)
    ledgers = list[Ledger]()
    thread = threading.Thread(
        target=lambda: ledgers.append(
            opened(shm_root, slots=32 if step == "resize" else 16)
        )
    )
    thread.start()
    assert is_open.wait(PATIENT_SECONDS)
    pid = child(lambda: put(opened(shm_root, slots=16), keys(1)))
    forked.set()
    thread.join(PATIENT_SECONDS)
    assert wait(pid) == 0
    assert present(ledgers[0], keys(1)) == [True]
    ledgers[0].close()
