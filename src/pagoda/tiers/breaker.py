"""Leave a failing device out for a while, then try it again (a circuit breaker)."""

from __future__ import annotations

import threading

from pagoda.clock import Clock


class Breaker:
    """Counts failures in a row; after `limit` the device rests, then calls are probes until one ends. Thread-safe.

    A probe that fails begins the next rest (what queued up beside it is then left out), one that works ends it.
    """

    def __init__(self, clock: Clock, limit: int = 4, rest_seconds: float = 5.0) -> None:
        self._clock = clock
        self._limit = limit
        self._rest_ns = int(rest_seconds * 1e9)
        self._failures = 0
        self._retry_ns = 0
        self.renew()

    def renew(self) -> None:
        """Make the lock anew, in a forked child: a thread of the parent may have held it."""
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        """Whether there were so many failures in a row, and nothing has worked since; changes nothing."""
        with self._lock:
            return self._failures >= self._limit

    @property
    def resting(self) -> bool:
        """Whether the device is left out now; changes nothing."""
        with self._lock:
            return self._failures >= self._limit and self._clock.monotonic_ns() < self._retry_ns

    def failed(self, *, rests: bool = True) -> None:
        """Count a failure of the device. Without `rests` it does not put off the next probe."""
        with self._lock:
            self._failures += 1
            if rests:
                self._retry_ns = self._clock.monotonic_ns() + self._rest_ns

    def worked(self) -> None:
        """The device did what was asked: it is used again."""
        with self._lock:
            self._failures = 0
