"""Sleeping until the gate of a store is released."""

from __future__ import annotations

import itertools
import mmap
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from pagoda.ledger.gate_bell import NEXT, OTHERS, GateBell
from pagoda.ledger.locks import (
    GATE,
    INTENT,
    DeadlineMissedError,
    Gate,
    LockFile,
)
from testbed.patience import Patience
from tests.children import child, wait
from tests.ledger.support import Other, holding, keys, opened, put

_LONG_SECONDS = 20.0


class Slept:
    """A thread that sleeps at a bell."""

    def __init__(self, bell: GateBell, place: int, seconds: float) -> None:
        self.heard: list[bool] = []
        self._turn = bell.turn(place)
        self._thread = threading.Thread(target=self._sleep, daemon=True)
        self._bell = bell
        self._place = place
        self._until = time.monotonic() + seconds
        self._thread.start()

    def _sleep(self) -> None:
        heard = False
        while not heard and (left := self._until - time.monotonic()) > 0:
            heard = self._bell.sleep(self._place, self._turn, left)
        self.heard.append(heard)

    def end(self) -> bool:
        """Return whether it was rung for."""
        self._thread.join(2 * _LONG_SECONDS)
        return self.heard == [True]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "waiting"


@pytest.mark.parametrize("place", [NEXT, OTHERS])
def test_a_ring_of_another_process_wakes_who_sleeps(
    page: Path, place: int
) -> None:
    bell = GateBell(page)
    slept = Slept(bell, place, _LONG_SECONDS)
    wait(child(GateBell(page).ring))
    assert slept.end()


def test_a_ring_between_the_try_and_the_sleep_is_heard(page: Path) -> None:
    bell = GateBell(page)
    turn = bell.turn(OTHERS)
    bell.ring()
    assert bell.sleep(OTHERS, turn, _LONG_SECONDS)


def test_a_ring_at_any_line_of_one_who_begins_to_sleep_is_not_lost(
    page: Path,
) -> None:
    other = GateBell(page)
    other.turn(OTHERS)  # another one who sleeps, so that there is a ring
    for line in itertools.count(1):
        bell = GateBell(page)
        rung, turn = _rung_before(
            line, lambda bell=bell: bell.turn(OTHERS), other.ring
        )
        if not rung:
            break
        other.ring()
        assert bell.sleep(OTHERS, turn, _LONG_SECONDS), line
        other.turn(OTHERS)
    assert line > 2


def test_a_sleep_ends_without_a_ring(page: Path) -> None:
    bell = GateBell(page)
    assert not bell.sleep(OTHERS, bell.turn(OTHERS), 0.001)
    assert not bell.sleep(OTHERS, bell.turn(OTHERS), 0.0)


def test_one_ring_wakes_one_and_the_next_one_first(page: Path) -> None:
    bell = GateBell(page)
    others = [Slept(bell, OTHERS, _LONG_SECONDS) for _ in range(3)]
    first = Slept(bell, NEXT, _LONG_SECONDS)
    everybody = [first, *others]
    _until(lambda: _ring_and_count(bell, [first]) == 1)
    for count in (1, 2, 3):
        _until(lambda count=count: _ring_and_count(bell, others) >= count)
    assert all(one.end() for one in everybody)


def test_a_next_one_that_died_keeps_no_ring_from_the_others(page: Path) -> None:
    bell = GateBell(page)

    def die_waiting() -> None:
        GateBell(page).turn(NEXT)

    wait(child(die_waiting))
    slept = Slept(bell, OTHERS, _LONG_SECONDS)
    _until(lambda: _ring_and_count(bell, [slept]) == 1)


def test_sleeps_are_short_as_long_as_nobody_rings(page: Path) -> None:
    bell = GateBell(page)
    for _ in range(20):
        bell.learn(heard=False)
    began = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    patience = Patience(1.0)
    while not patience.ended:
        bell.sleep(OTHERS, bell.turn(OTHERS), _LONG_SECONDS)
    sleeps = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - began
    assert sleeps > 3 * 32, "as many as if each took a third of the longest"
    for _ in range(20):
        bell.learn(heard=True)
    turn = bell.turn(OTHERS)
    began_at = time.monotonic()
    bell.sleep(OTHERS, turn, _LONG_SECONDS)
    assert time.monotonic() - began_at > 0.03


def test_a_kernel_that_refuses_is_polled(page: Path) -> None:
    bell = GateBell(page)
    bell._number = 100_000  # no system call
    began = time.monotonic()
    assert not bell.sleep(OTHERS, bell.turn(OTHERS), 0.02)
    assert time.monotonic() - began >= 0.02
    bell.ring()
    bell._number = None
    assert not bell.sleep(OTHERS, bell.turn(OTHERS), 0.001)
    bell.ring()


def test_without_memory_for_the_page_the_threads_of_a_process_hear() -> None:
    bell = GateBell()
    slept = Slept(bell, OTHERS, _LONG_SECONDS)
    _until(lambda: _ring_and_count(bell, [slept]) == 1)


# ---- at the gate


def test_who_waits_for_the_gate_sleeps(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    gate = Gate(LockFile(path), GateBell(tmp_path / "waiting"))
    began = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    began_at = time.monotonic()
    with holding(path, GATE), pytest.raises(DeadlineMissedError):
        gate.run(lambda: None, 0.5, exclusive=True)
    tries = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - began
    longest = (time.monotonic() - began_at) / 0.032
    assert tries < 4 * longest + 20, "500 polls, if each takes 1 ms"


@pytest.mark.parametrize("exclusive", [False, True])
def test_who_leaves_the_gate_rings(tmp_path: Path, exclusive: bool) -> None:
    path = tmp_path / "locks"
    bell = GateBell(tmp_path / "waiting")
    gate = Gate(LockFile(path), bell)
    inside = Gate(LockFile(path), GateBell(tmp_path / "waiting"))
    slept: list[Slept] = []

    def work() -> None:
        slept.append(Slept(bell, OTHERS, _LONG_SECONDS))
        patience = Patience(0.05)
        while not patience.ended:
            time.sleep(0.001)

    inside.run(work, 10, exclusive=exclusive)
    assert slept[0].end()
    gate.run(lambda: None, 10, exclusive=True)


@pytest.mark.parametrize("exclusive", [True, False])
def test_who_waits_is_the_next_also_after_a_holder_that_is_killed(
    tmp_path: Path, exclusive: bool
) -> None:
    path = tmp_path / "locks"
    gate = Gate(LockFile(path), GateBell(tmp_path / "waiting"))
    entered: list[bool] = []

    def enter() -> None:
        gate.run(lambda: entered.append(True), 300, exclusive=exclusive)

    with holding(path, GATE) as holder:
        thread = threading.Thread(target=enter)
        thread.start()
        _until(lambda: LockFile(path).held_by_other(INTENT))
        holder.end()
        thread.join(_LONG_SECONDS)
    assert entered == [True]


def test_readers_get_in_among_writers_that_never_pause(shm_root: Path) -> None:
    def write() -> None:
        ledger = opened(shm_root)
        number = os.getpid() * 1000
        while True:
            number += 2
            put(ledger, keys(number, number + 1))

    def writer() -> Other:
        return Other(lambda: threading.Thread(target=write).start())

    ledger = opened(shm_root)
    with writer(), writer():
        for _ in range(100):
            assert ledger.match_prefix(keys(1, 2)) is not None
    ledger.close()


@pytest.mark.parametrize("exclusive", [True, False])
def test_nobody_is_kept_out_by_one_who_comes_again_at_once(
    tmp_path: Path, exclusive: bool
) -> None:
    path = tmp_path / "locks"
    entries = memoryview(mmap.mmap(-1, 8)).cast("Q")

    def enter() -> None:
        entries[0] += 1
        began = time.perf_counter()
        while time.perf_counter() - began < 200e-6:
            pass

    def come_again() -> None:
        gate = Gate(LockFile(path), GateBell(tmp_path / "waiting"))

        def loop() -> None:
            while True:
                gate.run(enter, 300, exclusive=True)

        threading.Thread(target=loop, daemon=True).start()

    gate = Gate(LockFile(path), GateBell(tmp_path / "waiting"))
    between: list[int] = []
    with Other(come_again):
        _until(lambda: entries[0] > 0)
        for _ in range(300):
            before = entries[0]
            gate.run(lambda: None, 300, exclusive=exclusive)
            between.append(entries[0] - before)
    kept_out = sum(1 for entered in between if entered > 300)
    assert kept_out < 15, between


def _rung_before(
    line: int, begin: Callable[[], int], ring: Callable[[], None]
) -> tuple[bool, int]:
    """Ring before the line of that number that runs in `GateBell.turn`; return whether there was
    one, and the turn.
    """
    left = line

    def trace(
        frame: FrameType, event: str, _: object
    ) -> Callable[..., object] | None:
        nonlocal left
        if frame.f_code is not GateBell.turn.__code__:
            return None
        if event == "line":
            left -= 1
            if not left:
                ring()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        turn = begin()
    finally:
        sys.settrace(before)
    return left <= 0, turn


def _until(done: Callable[[], bool]) -> None:
    patience = Patience(_LONG_SECONDS)
    while not done() and not patience.ended:
        time.sleep(0.005)
    assert done(), patience.said()


def _ring_and_count(bell: GateBell, sleepers: list[Slept]) -> int:
    woken = sum(bool(one.heard) for one in sleepers)
    if woken < len(sleepers):
        bell.ring()
        time.sleep(0.01)
    return sum(bool(one.heard) for one in sleepers)
