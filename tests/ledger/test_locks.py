"""Byte-range locks between processes, and the gate."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pytest

from pagoda.ledger.locks import (
    BEYOND,
    GATE,
    INTENT,
    OPEN,
    DeadlineMissedError,
    Gate,
    LockFile,
    StoreLocks,
    barrier,
)
from testbed.patience import Patience
from tests.children import (
    child,
    in_child,
    kill_self,
    wait,
)
from tests.ledger.support import Other, holding


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store" / "locks"


def test_a_file_is_made_for_its_owner_alone_and_only_if_it_may_be(
    path: Path,
) -> None:
    with pytest.raises(FileNotFoundError):
        LockFile(path, create=False)
    assert not path.exists()
    LockFile(path).close()
    assert path.stat().st_mode & 0o777 == 0o600
    LockFile(path, create=False).close()


@pytest.mark.parametrize("byte", [GATE, INTENT])
def test_a_gate_is_waited_for_while_another_process_has_a_part_of_it(
    path: Path, byte: int
) -> None:
    gate = Gate(LockFile(path))
    with holding(path, byte) as other:
        end = threading.Timer(0.2, other.end)
        end.start()
        assert gate.run(lambda: "in", 30.0) == "in"
        end.join()


def test_two_who_open_a_file_in_one_process_are_two(path: Path) -> None:
    one = LockFile(path)
    two = LockFile(path)
    assert one.lock(7, exclusive=True)
    assert two.held_by_other(7)
    assert not two.lock(7, exclusive=True)
    assert not one.held_by_other(7)
    one.close()
    assert two.lock(7, exclusive=True)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    directory = tmp_path / "a store"
    directory.mkdir()
    (directory / "state").touch()
    return directory


def test_who_gets_one_of_the_two_locks_of_a_store_keeps_neither(
    store: Path,
) -> None:
    locks = StoreLocks(store, "state", "locks")
    with contextlib.closing(LockFile(store / "state", first=BEYOND)) as other:
        assert other.lock(OPEN, exclusive=True)
        assert not locks.lock(OPEN, exclusive=False)
    with contextlib.closing(LockFile(store / "locks")) as older:
        assert not older.held_by_other(OPEN)
    locks.close()


def test_who_has_a_store_open_and_cannot_get_it_alone_still_has_it_open(
    store: Path,
) -> None:
    locks = StoreLocks(store, "state", "locks")
    assert locks.lock(OPEN, exclusive=False)
    with contextlib.closing(LockFile(store / "state", first=BEYOND)) as other:
        assert other.lock(OPEN, exclusive=False)
        assert not locks.lock(OPEN, exclusive=True)
    with contextlib.closing(LockFile(store / "locks")) as older:
        assert not older.lock(OPEN, exclusive=True), (
            "an older version takes the store for its own"
        )
        assert older.lock(OPEN, exclusive=False), (
            "others may no longer open the store"
        )
    locks.close()


def test_a_child_does_not_have_open_what_its_parent_has(store: Path) -> None:
    locks = StoreLocks(store, "state", "locks")
    assert locks.lock(OPEN, exclusive=False)

    def act() -> None:
        with contextlib.closing(LockFile(store / "state", first=BEYOND)) as other:
            assert other.lock(OPEN, exclusive=False)
            assert not locks.lock(OPEN, exclusive=True)  # the parent has both
        with contextlib.closing(LockFile(store / "locks")) as older:
            assert older.held_by_other(OPEN), "by the parent"
        os.write(report, b"!")
        os.read(ended, 1)
        # the parent has left, and another process has `state` to itself
        with contextlib.closing(LockFile(store / "state", first=BEYOND)) as other:
            assert other.lock(OPEN, exclusive=True)
            assert not locks.lock(OPEN, exclusive=False)
        with contextlib.closing(LockFile(store / "locks")) as older:
            assert not older.held_by_other(OPEN)

    reported, report = os.pipe()
    ended, ends = os.pipe()
    pid = child(act)
    os.close(report)
    assert os.read(reported, 1) == b"!"
    locks.close()
    os.write(ends, b"!")
    assert wait(pid) == 0
    for fd in (reported, ended, ends):
        os.close(fd)


def read_it(path: Path) -> None:
    path.read_bytes()


def copy_it(path: Path) -> None:
    shutil.copytree(path.parent, path.parent.with_name("copy"))


def pack_it(path: Path) -> None:
    with tarfile.open(path.parent.with_name("packed"), "w") as packed:
        packed.add(path.parent)


def lock_it(path: Path) -> None:
    with open(path, "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_UN)


@pytest.mark.parametrize("walk", [read_it, copy_it, pack_it, lock_it])
def test_whatever_else_in_the_process_opens_and_closes_the_file_drops_no_lock(
    path: Path, walk: Callable[[Path], None]
) -> None:
    file = LockFile(path)
    assert file.lock(7, exclusive=True)
    assert file.lock(GATE, exclusive=False)
    walk(path)
    in_child(
        lambda: _must(
            LockFile(path).held_by_other(7) and LockFile(path).held_by_other(GATE)
        )
    )


def descriptors(path: Path) -> int:
    """Return how many descriptors this process has of a file; others come and go with the garbage
    of other tests.
    """
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{fd}") == str(path)
    return found


def test_locks_go_with_the_file(path: Path) -> None:
    file = LockFile(path)
    assert file.lock(7, exclusive=True)
    assert descriptors(path) == 1
    file.close()
    file.close()
    file.unlock(7)
    assert descriptors(path) == 0
    with pytest.raises(OSError, match="closed"):
        file.lock(7, exclusive=True)
    assert not file.is_at(path)
    assert not LockFile(path).held_by_other(7)


def test_a_file_that_is_closed_is_unlocked_though_there_is_another_copy_of_its_descriptor(
    path: Path,
) -> None:
    file = LockFile(path)
    assert file.lock(7, exclusive=True)
    copy = os.dup(file._fd)  # as in a child without Python's fork hooks
    file.close()
    assert not LockFile(path).held_by_other(7)
    os.close(copy)


def test_locks_of_an_older_version_and_ours_keep_each_other_out(
    path: Path,
) -> None:
    file = LockFile(path)

    def take() -> None:
        held.append(open(path, "r+b"))  # noqa: SIM115
        fcntl.lockf(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 7)

    def fail() -> None:
        with pytest.raises(OSError):
            take()

    held: list[BinaryIO] = []
    with Other(take):
        assert file.held_by_other(7)
        assert not file.lock(7, exclusive=False)
    assert file.lock(7, exclusive=False)
    in_child(fail)


def test_a_lock_keeps_other_processes_out_until_its_process_is_dead(
    path: Path,
) -> None:
    file = LockFile(path)
    with holding(path, 7):
        assert not file.lock(7, exclusive=True)
        assert not file.lock(7, exclusive=False)
        assert file.held_by_other(7)
        assert not file.held_by_other(8)
        assert file.lock(8, exclusive=True)
    assert file.lock(7, exclusive=True)


def test_shared_locks_go_together(path: Path) -> None:
    file = LockFile(path)
    with holding(path, 7, exclusive=False):
        assert file.lock(7, exclusive=False)
        assert not file.lock(7, exclusive=True), "the shared lock is kept"
        in_child(lambda: _must(LockFile(path).held_by_other(7)))


def test_ones_own_lock_is_not_seen_and_is_converted_at_once(path: Path) -> None:
    file = LockFile(path)
    assert file.lock(7, exclusive=True)
    assert not file.held_by_other(7)
    assert file.lock(7, exclusive=False)
    assert file.lock(7, exclusive=True)


def test_a_fork_inherits_no_lock(path: Path) -> None:
    file = LockFile(path)
    assert file.lock(7, exclusive=True)
    in_child(
        lambda: _must(file.held_by_other(7) and not file.lock(7, exclusive=False))
    )


def test_what_a_child_unlocks_stays_locked(path: Path) -> None:
    file = LockFile(path)
    assert file.lock(7, exclusive=True)
    in_child(lambda: file.unlock(7))
    in_child(lambda: _must(file.held_by_other(7)))


def test_a_child_that_outlives_its_parent_does_not_keep_its_locks(
    path: Path,
) -> None:
    receive, send = os.pipe()

    def parent() -> None:
        file = LockFile(path)
        assert file.lock(7, exclusive=True)
        if os.fork() == 0:
            os.write(send, b"%d" % os.getpid())
            time.sleep(300)
        kill_self()

    assert wait(child(parent)) == -signal.SIGKILL
    orphan = int(os.read(receive, 100))
    try:
        assert not LockFile(path).held_by_other(7)
    finally:
        os.kill(orphan, signal.SIGKILL)
        os.close(receive)
        os.close(send)


def test_a_program_that_is_started_has_no_lock_file(path: Path) -> None:
    file = LockFile(path)
    in_child(
        lambda: _must(not file.lock(7, exclusive=False) or not _inherits(path))
    )
    assert not _inherits(path)
    os.set_inheritable(file._fd, True)
    assert _inherits(path), "the check can return True"


def _inherits(path: Path) -> bool:
    """Return whether a program that is started without Python's fork hooks has the lock file
    open.
    """
    return (
        subprocess.run(
            ["ls", "-l", "/proc/self/fd"],
            capture_output=True,
            text=True,
            close_fds=False,
        ).stdout.count(f"{path}\n")
        > 0
    )


def test_a_child_locks_the_file_of_its_parent_though_it_was_removed(
    path: Path,
) -> None:
    file = LockFile(path)
    assert file.lock(7, exclusive=True)
    path.unlink()
    LockFile(path)
    in_child(lambda: _must(file.held_by_other(7) and not file.is_at(path)))


def test_a_fork_while_the_file_is_being_opened_leaves_no_copy(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that another thread has opened and not yet stored is unknown in the child."""
    opened = os.open
    children: list[Other] = []

    def open_and_fork(*arguments: object) -> int:
        fd = opened(*arguments)  # type: ignore[arg-type]
        if not children and arguments[0] == path:
            children.append(Other(lambda: None))
        return fd

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_and_fork)
        file = LockFile(path)
    assert file.lock(7, exclusive=True)
    file._file.close()  # as at a kill: without cleanup
    assert not LockFile(path).held_by_other(7)
    children[0].end()


def test_waiting_for_a_lock_ends(path: Path) -> None:
    file = LockFile(path)
    with holding(path, 7):
        patience = Patience(20.0)
        assert not file.lock(7, exclusive=True, until=patience.began + 0.1)
        assert patience.waited >= 0.1
        assert not patience.ended, patience.said()
    assert file.lock(7, exclusive=True, until=0.0)


def test_a_file_knows_whether_it_still_is_the_one_at_its_path(path: Path) -> None:
    file = LockFile(path)
    assert file.is_at(path)
    path.unlink()
    assert not file.is_at(path)
    other = LockFile(path)
    assert other is not file
    assert other.is_at(path)
    assert not file.is_at(path)


def test_the_gate_keeps_the_threads_of_a_process_apart(path: Path) -> None:
    gate = Gate(LockFile(path))
    inside = 0
    most = 0

    def work() -> None:
        for _ in range(50):
            gate.run(step, 60, exclusive=True)

    def step() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0)
        inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == 1


def test_the_gate_opens_again_after_an_error(path: Path) -> None:
    gate = Gate(LockFile(path))
    for entering in (gate.run, partial(gate.run, exclusive=True)):
        with pytest.raises(KeyError):
            entering(lambda: {}[0], 1)
    gate.run(nothing, 0, exclusive=True)
    assert not gate.taken
    in_child(
        lambda: _must(
            LockFile(path).lock(GATE, True) and LockFile(path).lock(INTENT, True)
        )
    )


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 0.05])
def test_a_gate_taken_by_a_thread_of_the_same_process_is_not_waited_for_past_the_deadline(
    path: Path, seconds: float
) -> None:
    gate = Gate(LockFile(path))
    missed = threading.Event()

    def other() -> None:
        patience = Patience(20.0)
        with pytest.raises(DeadlineMissedError):
            gate.run(nothing, seconds)
        assert not patience.ended, patience.said()
        missed.set()

    def wait_for_other() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)

    gate.run(wait_for_other, 1, exclusive=True)
    assert missed.is_set()


def test_who_is_inside_does_not_wait_for_itself(path: Path) -> None:
    """A finalizer or a signal handler runs in the middle of a transaction."""
    gate = Gate(LockFile(path))

    def again() -> None:
        for entering in (gate.run, partial(gate.run, exclusive=True)):
            with pytest.raises(DeadlineMissedError):
                entering(nothing, 100)
        assert not gate.hold(100)

    gate.run(again, 1, exclusive=True)
    gate.run(again, 1)
    gate.run(nothing, 0, exclusive=True)


def test_what_keeps_threads_out_is_let_go_by_its_own_thread_only(
    path: Path,
) -> None:
    gate = Gate(LockFile(path))
    assert gate.hold(0)
    thread = threading.Thread(target=gate.let_go)
    thread.start()
    thread.join(60)
    missed = threading.Event()

    def other() -> None:
        with pytest.raises(DeadlineMissedError):
            gate.run(nothing, 0.01)
        missed.set()

    for _ in range(2):
        thread = threading.Thread(
            target=other if not missed.is_set() else partial(gate.run, nothing, 0)
        )
        thread.start()
        thread.join(60)
        assert missed.is_set()
        gate.let_go()
        gate.let_go()


class Interrupted(Exception):
    """Raised by the signal handler."""


@pytest.mark.slow
# the other method uses the same timer as this test
@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize("times", [1, 2, 3])
def test_no_exceptions_of_signal_handlers_leave_the_gate_taken(
    path: Path, times: int
) -> None:
    """Each exception except the first is raised while the previous one is being handled."""
    gate = Gate(LockFile(path))
    other = LockFile(path)
    chance = random.Random(times)
    to_come = done = 0

    def handler(*_: object) -> None:
        nonlocal to_come
        to_come -= 1
        if to_come:
            signal.setitimer(signal.ITIMER_REAL, 10 ** chance.uniform(-6, -4.5))
        raise Interrupted

    def go_on(more: int) -> None:
        """Each interruption ends one level at most."""
        nonlocal done
        try:
            if more:
                go_on(more - 1)
            else:
                signal.setitimer(signal.ITIMER_REAL, 10 ** chance.uniform(-5, -3))
            while to_come:
                gate.run(nothing, 10, exclusive=True)
                gate.run(nothing, 10)
                done += 1
        except Interrupted:
            pass

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for _ in range(3000):
            to_come = times
            go_on(times)
            assert not other.held_by_other(GATE)
            assert not other.held_by_other(INTENT)
            assert not gate.taken
    finally:
        signal.signal(signal.SIGALRM, before)
    assert done > 1000
    thread = threading.Thread(
        target=partial(gate.run, nothing, 10, exclusive=True)
    )
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), (
        "the threads' lock was released as often as it was taken"
    )


@pytest.mark.parametrize("byte", [GATE, INTENT])
def test_a_process_that_stands_in_the_gate_is_not_waited_for_past_the_deadline(
    path: Path, byte: int
) -> None:
    gate = Gate(LockFile(path))
    with holding(path, byte):
        for entering in (gate.run, partial(gate.run, exclusive=True)):
            patience = Patience(20.0)
            with pytest.raises(DeadlineMissedError):
                entering(nothing, 0.05)
            assert not patience.ended, patience.said()
    gate.run(nothing, 1, exclusive=True)


def test_readers_of_two_processes_pass_together_and_a_writer_waits_for_them(
    path: Path,
) -> None:
    gate = Gate(LockFile(path))
    with holding(path, GATE, exclusive=False):
        gate.run(nothing, 0.5)
        with pytest.raises(DeadlineMissedError):
            gate.run(nothing, 0.05, exclusive=True)


def test_readers_give_way_to_a_writer_that_waits(path: Path) -> None:
    gate = Gate(LockFile(path))
    with (
        holding(path, GATE, exclusive=False) as reader,
        Other(lambda: _wait_to_write(path)) as writer,
    ):
        patience = Patience(30)
        while not LockFile(path).held_by_other(INTENT) and not patience.ended:
            time.sleep(0.001)
        with pytest.raises(DeadlineMissedError):
            gate.run(nothing, 0.05)
        reader.end()
        patience = Patience(30)
        while LockFile(path).held_by_other(INTENT) and not patience.ended:
            time.sleep(0.001)
        assert LockFile(path).held_by_other(GATE), "the writer has the gate"
        writer.end()
    gate.run(nothing, 1)


def _wait_to_write(path: Path) -> None:
    def write() -> None:
        Gate(LockFile(path)).run(lambda: time.sleep(300), 100, exclusive=True)

    threading.Thread(target=write, daemon=True).start()


def test_a_barrier_takes_no_time() -> None:
    patience = Patience(5.0)
    for _ in range(100):
        barrier()
    assert not patience.ended, patience.said()


def nothing() -> None:
    """What is done inside."""


def _must(holds: bool) -> None:
    assert holds
