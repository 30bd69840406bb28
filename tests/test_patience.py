"""How long the tests wait: in the time of an idle machine."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from testbed import patience
from testbed.patience import Patience, slowness, wait_until, within


class Machine:
    """A clock on the wall that only a test moves, of a machine as slow as the test says."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slowness = 1.0
        self.measured = 0

    def measure(self) -> float:
        """Return how slow it is."""
        self.measured += 1
        return self.slowness

    def sleep(self, seconds: float) -> None:
        """Let this time pass."""
        self.now += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    clock = SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep)
    monkeypatch.setattr(patience, "time", clock)
    monkeypatch.setattr(patience, "slowness", made.measure)
    return made


def test_a_bound_that_is_kept_measures_nothing(machine: Machine) -> None:
    with within(2.0):
        machine.sleep(1.9)
    assert machine.measured == 0


def test_an_idle_machine_gets_no_more_than_the_bound(machine: Machine) -> None:
    with pytest.raises(AssertionError, match="more than 2 s"), within(2.0):
        machine.sleep(2.1)


def test_a_busy_machine_gets_as_much_more_as_it_is_slower(
    machine: Machine,
) -> None:
    machine.slowness = 10.0
    with within(2.0):
        machine.sleep(19.0)
    with pytest.raises(AssertionError, match=r"10\.0 times"), within(2.0):
        machine.sleep(21.0)


def test_what_was_slow_once_keeps_the_time_that_it_was_given(
    machine: Machine,
) -> None:
    waiting = Patience(2.0)
    machine.slowness = 10.0
    machine.sleep(3.0)
    assert not waiting.ended
    machine.slowness = 1.0
    machine.sleep(10.0)
    assert not waiting.ended
    machine.sleep(10.0)
    assert waiting.ended


def test_a_condition_that_never_comes_about_is_given_up(machine: Machine) -> None:
    machine.slowness = 3.0
    with pytest.raises(AssertionError, match="did not come about"):
        wait_until(lambda: False, 2.0, pause_seconds=0.5)
    assert 106.0 <= machine.now < 107.0
    wait_until(lambda: machine.now > 108.0, 2.0)


def test_a_result_is_returned_and_an_error_is_raised() -> None:
    right = Future[int]()
    right.set_result(7)
    assert Patience(1.0).result(right) == 7
    wrong = Future[int]()
    wrong.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        Patience(1.0).result(wrong)
    with pytest.raises(AssertionError, match="more than 0 s"):
        Patience(0.0).result(Future[int]())


def test_the_measurement_sees_who_shares_the_processor() -> None:
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(every)})
    loops = [
        subprocess.Popen([sys.executable, "-Sc", "while True: pass"])
        for _ in range(3)
    ]
    try:
        wait_until(lambda: slowness() > 1.5)
    finally:
        os.sched_setaffinity(0, every)
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()
