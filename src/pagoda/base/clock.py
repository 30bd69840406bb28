"""Time, as a small object that tests can replace; and the deadline of a call."""

from __future__ import annotations

import contextlib
import math
import time
from numbers import Real
from typing import TYPE_CHECKING, TypeVar

from pagoda.base import boot_identity

if TYPE_CHECKING:
    from concurrent.futures import Future


T = TypeVar("T")

# A slower device counts as hung. So this limits how long the transfer of some bytes may take.
SLOWEST_BYTES_PER_SECOND = 50e6
_NEVER_NS = 2**63 - 1
_MOST_SECONDS = 1e9  # what every lock and system call can wait
_LAST_SECONDS = 0.05
_SLICE_SECONDS = 0.05  # how late a cancelled call notices it
_AHEAD_NS = boot_identity.monotonic_offset_ns()


def seconds_of(name: str, value: object) -> float:
    """Return a time span that a caller gave; more than 30 years are 30 years. Pure.

    Raises:
        ValueError: it is not a finite number; `name` is what the caller calls it.
    """
    if isinstance(value, Real):
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.inf
        if math.isfinite(seconds):
            return min(seconds, _MOST_SECONDS)
    raise ValueError(f"{name} = {value!r}: a finite number of seconds is needed")


class Clock:
    """The machine's own clock. Stateless, so safe to share between threads and across fork.

    Monotonic times are comparable only within one boot: store `boot_id()` with every monotonic
    time.
    """

    def monotonic_ns(self) -> int:
        """Return CLOCK_MONOTONIC in nanoseconds: one clock for all processes and containers of this
        boot.
        """
        return time.monotonic_ns() - _AHEAD_NS

    def time(self) -> float:
        """Return the wall clock in seconds since the epoch. For people to read, never for
        deadlines.
        """
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Block this thread for `seconds`."""
        time.sleep(seconds)

    def boot_id(self) -> str:
        """Return the id of this boot of the machine: see `boot_identity`."""
        return boot_identity.boot_id()


_MACHINE = Clock()


class Deadline:
    """A limit for the waits of one call. Thread-safe: any thread may call `cancel`.

    A call may wait `patience_seconds` without progress, and `limit_seconds` in total (None: no
    total limit while there is progress). If progress is never noted, `Deadline(seconds)` is simply
    that many seconds from now.
    """

    def __init__(
        self,
        patience_seconds: float,
        limit_seconds: float | None = None,
        clock: Clock = _MACHINE,
    ) -> None:
        self._clock = clock
        self.patience_seconds = patience_seconds
        self.cancelled = False
        now = clock.monotonic_ns()
        self._patience_ns = int(patience_seconds * 1e9)
        self._next_ns = now + self._patience_ns
        self._end_ns = (
            _NEVER_NS if limit_seconds is None else now + int(limit_seconds * 1e9)
        )

    def remaining(self) -> float:
        """Return the seconds that a wait beginning now may take; 0 after the deadline."""
        return (
            max(0, min(self._end_ns, self._next_ns) - self._clock.monotonic_ns())
            / 1e9
        )

    def last(self) -> float:
        """Return the seconds for a last step, never 0: without that step the bytes already moved
        would be wasted.
        """
        return max(self.remaining(), _LAST_SECONDS)

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed: the call may no longer wait."""
        return self.remaining() == 0

    def progress(self) -> None:
        """Note progress: `patience_seconds` start again."""
        self._next_ns = self._clock.monotonic_ns() + self._patience_ns

    def cancel(self) -> None:
        """End the call as soon as possible."""
        self.cancelled = True
        self._end_ns = 0

    def wait(self, future: Future[T]) -> T | None:
        """Return the result of `future`, None if it is not ready in time. Raises what the future
        raises.
        """
        while not future.done():
            if self.passed:
                return None
            with contextlib.suppress(TimeoutError):
                future.exception(min(self.remaining(), _SLICE_SECONDS))
        return future.result()
