"""Until when one call may wait."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

from pagoda.clock import Clock
from pagoda.threads import wait

__all__ = ["Deadline"]

T = TypeVar("T")

# A device that moves less than this counts as hung: it bounds how long bytes in progress may take.
_SLOWEST_BYTES_PER_SECOND = 50e6
_NEVER_NS = 2**63 - 1
_LAST_SECONDS = 0.05
_SLICE_SECONDS = 0.05  # how late a cancelled call notices it


class Deadline:
    """A bound on the waits of one call. Thread-safe: `cancel` may come from any thread.

    A call may wait `patience_seconds` without progress, and in total no longer than that plus what `nbytes` take on the
    slowest useful device (None: as long as there is progress); with `strict`, not longer than `patience_seconds`.
    """

    def __init__(
        self, clock: Clock, patience_seconds: float, nbytes: int | None = None, strict: bool = False
    ) -> None:
        self._clock = clock
        self.patience_seconds = patience_seconds
        self.cancelled = False
        now = clock.monotonic_ns()
        self._patience_ns = int(patience_seconds * 1e9)
        self._next_ns = now + self._patience_ns
        if strict:
            self._end_ns = self._next_ns
        elif nbytes is None:
            self._end_ns = _NEVER_NS
        else:
            self._end_ns = self._next_ns + int(nbytes / _SLOWEST_BYTES_PER_SECOND * 1e9)

    def remaining(self) -> float:
        """Return the seconds that a wait beginning now may take; 0 when there are none left."""
        return max(0, min(self._end_ns, self._next_ns) - self._clock.monotonic_ns()) / 1e9

    def last(self) -> float:
        """Return the seconds for a last step, never 0: without that step the bytes already moved are wasted."""
        return max(self.remaining(), _LAST_SECONDS)

    @property
    def passed(self) -> bool:
        """Whether the call may wait no longer."""
        return self.remaining() == 0

    def progress(self) -> None:
        """Note progress: `patience_seconds` begin again."""
        self._next_ns = self._clock.monotonic_ns() + self._patience_ns

    def cancel(self) -> None:
        """Let the call end as soon as it can."""
        self.cancelled = True
        self._end_ns = 0

    def wait(self, future: Future[T]) -> T | None:
        """Return the result of `future`, None if it does not come in time. Raises what the future raises."""
        while not future.done():
            if self.passed:
                return None
            self.wait_a_moment(future)
        return future.result()

    def wait_a_moment(self, future: Future[T]) -> None:
        """Wait for `future`, at most a twentieth of a second; its result stays in it."""
        wait([future], timeout=min(self.remaining(), _SLICE_SECONDS))
