"""Byte-range locks between processes, and the gate."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from pagoda.ledger.locks import GATE, INTENT, DeadlineMissedError, Gate, LockFile, barrier
from tests.ledger.support import Other, holding, in_child


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks"


def test_a_file_is_opened_once_a_process_by_whatever_path(path: Path, tmp_path: Path) -> None:
    file = LockFile.at(path)
    (tmp_path / "link").symlink_to(tmp_path)
    os.link(path, tmp_path / "other name")
    assert LockFile.at(tmp_path / "link" / "locks") is file
    assert LockFile.at(tmp_path / "other name") is file
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_lock_keeps_other_processes_out_until_its_process_is_dead(path: Path) -> None:
    file = LockFile.at(path)
    with holding(path, 7):
        assert not file.try_lock(7, exclusive=True) and not file.try_lock(7, exclusive=False)
        assert file.held_by_other(7) and not file.held_by_other(8)
        assert file.try_lock(8, exclusive=True)
    assert file.try_lock(7, exclusive=True)


def test_shared_locks_go_together(path: Path) -> None:
    file = LockFile.at(path)
    with holding(path, 7, exclusive=False):
        assert file.try_lock(7, exclusive=False)
        assert not file.try_lock(7, exclusive=True), "and the shared one is kept"
        in_child(lambda: _must(LockFile.at(path).held_by_other(7)))


def test_ones_own_lock_is_not_seen_and_is_converted_at_once(path: Path) -> None:
    file = LockFile.at(path)
    assert file.try_lock(7, exclusive=True)
    assert not file.held_by_other(7)
    assert file.try_lock(7, exclusive=False) and file.try_lock(7, exclusive=True)


def test_a_fork_inherits_no_lock(path: Path) -> None:
    file = LockFile.at(path)
    assert file.try_lock(7, exclusive=True)
    in_child(lambda: _must(file.held_by_other(7) and not file.try_lock(7, exclusive=False)))


def test_what_a_child_unlocks_stays_locked(path: Path) -> None:
    file = LockFile.at(path)
    assert file.try_lock(7, exclusive=True)
    in_child(lambda: file.unlock(7))
    in_child(lambda: _must(file.held_by_other(7)))


def test_waiting_for_a_lock_ends(path: Path) -> None:
    file = LockFile.at(path)
    with holding(path, 7):
        began = time.monotonic()
        assert not file.lock(7, exclusive=True, until=began + 0.1)
        assert 0.1 <= time.monotonic() - began < 20.0
    assert file.lock(7, exclusive=True, until=0.0)


def test_a_file_knows_whether_it_still_is_the_one_at_its_path(path: Path) -> None:
    file = LockFile.at(path)
    assert file.is_at(path)
    path.unlink()
    assert not file.is_at(path)
    other = LockFile.at(path)
    assert other is not file and other.is_at(path) and not file.is_at(path)


def test_the_gate_keeps_the_threads_of_a_process_apart(path: Path) -> None:
    gate, inside, most = Gate(LockFile.at(path)), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            with gate.writing(60):
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
    gate = Gate(LockFile.at(path))
    for entering in (gate.reading, gate.writing):
        with pytest.raises(KeyError), entering(1):
            raise KeyError
    with gate.writing(0):
        pass
    in_child(
        lambda: _must(LockFile.at(path).try_lock(GATE, True) and LockFile.at(path).try_lock(INTENT, True))
    )


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 0.05])
def test_a_gate_taken_by_a_thread_of_the_same_process_is_not_waited_for_past_the_deadline(
    path: Path, seconds: float
) -> None:
    gate = Gate(LockFile.at(path))
    missed = threading.Event()

    def other() -> None:
        began = time.monotonic()
        with pytest.raises(DeadlineMissedError), gate.reading(seconds):
            pass
        assert time.monotonic() - began < 20.0
        missed.set()

    with gate.writing(1):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
    assert missed.is_set()


@pytest.mark.parametrize("byte", [GATE, INTENT])
def test_a_process_that_stands_in_the_gate_is_not_waited_for_past_the_deadline(path: Path, byte: int) -> None:
    gate = Gate(LockFile.at(path))
    with holding(path, byte):
        for entering in (gate.reading, gate.writing):
            began = time.monotonic()
            with pytest.raises(DeadlineMissedError), entering(0.05):
                pass
            assert time.monotonic() - began < 20.0
    with gate.writing(1):
        pass


def test_readers_of_two_processes_pass_together_and_a_writer_waits_for_them(path: Path) -> None:
    gate = Gate(LockFile.at(path))
    with holding(path, GATE, exclusive=False):
        with gate.reading(0.5):
            pass
        with pytest.raises(DeadlineMissedError), gate.writing(0.05):
            pass


def test_readers_give_way_to_a_writer_that_waits(path: Path) -> None:
    gate = Gate(LockFile.at(path))
    with holding(path, GATE, exclusive=False) as reader, Other(lambda: _wait_to_write(path)) as writer:
        until = time.monotonic() + 30
        while not LockFile.at(path).held_by_other(INTENT) and time.monotonic() < until:
            time.sleep(0.001)
        with pytest.raises(DeadlineMissedError), gate.reading(0.05):
            pass
        reader.end()
        until = time.monotonic() + 30
        while LockFile.at(path).held_by_other(INTENT) and time.monotonic() < until:
            time.sleep(0.001)
        assert LockFile.at(path).held_by_other(GATE), "the writer is in"
        writer.end()
    with gate.reading(1):
        pass


def _wait_to_write(path: Path) -> None:
    def write() -> None:
        with Gate(LockFile.at(path)).writing(100):
            time.sleep(300)

    threading.Thread(target=write, daemon=True).start()


def test_a_barrier_takes_no_time() -> None:
    began = time.perf_counter()
    for _ in range(100):
        barrier()
    assert time.perf_counter() - began < 5.0


def _must(holds: bool) -> None:
    assert holds
