"""Until when one call may wait."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from pagoda.base.clock import Deadline, seconds_of
from pagoda.testing import FakeClock
from testbed.patience import Patience


def test_patience_begins_anew_when_something_arrives_but_not_for_ever() -> None:
    clock = FakeClock()
    deadline = Deadline(1.0, limit_seconds=3.0, clock=clock)
    for _ in range(3):
        clock.advance(0.9)
        assert not deadline.passed
        deadline.progress()
    clock.advance(0.4)
    assert deadline.passed


def test_silence_ends_it_before_the_whole_is_over() -> None:
    clock = FakeClock()
    deadline = Deadline(1.0, limit_seconds=21.0, clock=clock)
    clock.advance(1.0)
    assert deadline.passed


def test_a_strict_one_ends_whatever_arrives() -> None:
    clock = FakeClock()
    deadline = Deadline(1.0, limit_seconds=1.0, clock=clock)
    clock.advance(0.9)
    deadline.progress()
    clock.advance(0.2)
    assert deadline.passed


def test_a_cancelled_one_ends_a_wait_that_has_begun() -> None:
    deadline = Deadline(100.0)
    threading.Timer(0.05, deadline.cancel).start()
    patience = Patience(50)
    assert deadline.wait(Future[int]()) is None
    assert not patience.ended, patience.said()
    assert deadline.cancelled


def test_what_has_come_is_returned_even_when_it_is_late() -> None:
    deadline = Deadline(0.0)
    future: Future[int] = Future()
    assert deadline.wait(future) is None
    future.set_result(7)
    assert deadline.wait(future) == 7


@pytest.mark.parametrize("seconds", [10**400, float("inf"), float("nan"), "1"])
def test_what_is_no_finite_number_of_seconds_is_refused(seconds: object) -> None:
    with pytest.raises(ValueError, match="a finite number of seconds is needed"):
        seconds_of("deadline_seconds", seconds)
