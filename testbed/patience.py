"""How long to wait on a machine that is busy: its own speed is measured when a wait lasts.

A bound such as "2 seconds" says how long something takes on a machine with nothing else to do.
Beside twenty other processes everything takes ten times as long, the right and the wrong; so a
bound grows by what the machine is slower now. The measurement is made only when a bound is
exceeded: on a quiet machine it costs nothing.

Called by tests and by `testbed.servers`. Thread-safe.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

_SPIN_SECONDS = 0.02  # of processor time: some turns of the scheduler


def slowness() -> float:
    """Return how many times as long work takes now as it would on a processor of its own.

    At least 1.0; takes 20 ms of processor time.
    """
    began = time.monotonic()
    worked = time.thread_time()
    while time.thread_time() - worked < _SPIN_SECONDS:
        pass
    return max(1.0, (time.monotonic() - began) / (time.thread_time() - worked))


class Patience:
    """A bound that begins now, in seconds of a machine that has nothing else to do."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.began = time.monotonic()
        self._slowness = 1.0  # the most that was measured

    @property
    def waited(self) -> float:
        """Return the seconds since the begin, of the clock on the wall."""
        return time.monotonic() - self.began

    @property
    def ended(self) -> bool:
        """Return whether it is over; measures the machine if it seems to be."""
        if self.waited < self.seconds * self._slowness:
            return False
        self._slowness = max(self._slowness, slowness())
        return self.waited >= self.seconds * self._slowness

    @property
    def left(self) -> float:
        """Return the seconds until the machine is measured again, for a timeout; above 0."""
        return max(0.01, self.seconds * self._slowness - self.waited)

    def result(self, future: Future[T]) -> T:
        """Return the result of a future, or raise what it raises; AssertionError if it is late."""
        while not wait([future], self.left).done:
            assert not self.ended, self.said()
        return future.result(0)

    def said(self) -> str:
        """Return what was waited for how long, for a failed assertion."""
        return (
            f"{self.waited:.1f} s are more than {self.seconds:g} s on a machine that is "
            f"{self._slowness:.1f} times as slow as an idle one"
        )


def wait_until(
    true: Callable[[], object],
    seconds: float = 60.0,
    pause_seconds: float = 0.01,
    why_not: Callable[[], object] = str,
) -> None:
    """Wait for a condition; AssertionError if it does not come about.

    Arguments:
        true: asked again and again
        seconds: the bound, on a machine that has nothing else to do
        pause_seconds: between two questions
        why_not: asked if it does not come about; the error says what it returns
    """
    patience = Patience(seconds)
    while not true():
        assert not patience.ended, (
            f"it did not come about: {patience.said()} {why_not()}"
        )
        time.sleep(pause_seconds)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[Patience]:
    """Check that a block takes no longer than that on a machine that has nothing else to do."""
    patience = Patience(seconds)
    yield patience
    assert not patience.ended, patience.said()
