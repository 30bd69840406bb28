"""A circuit breaker: a tier stops using a device or store that keeps failing, and tries it again
after a pause.
"""

from __future__ import annotations

import threading

from pagoda.base.clock import Clock
from pagoda.base.fork import per_process


class CircuitBreaker:
    """Counts failures in a row. After `limit` of them the device rests; after that, calls are
    probes until one ends.

    A probe that fails starts the next rest, also for the other queued calls. A probe that works
    ends the rest. Thread-safe; may be used in a forked child.
    """

    def __init__(
        self, clock: Clock, limit: int = 4, rest_seconds: float = 5.0
    ) -> None:
        self._clock = clock
        self._limit = limit
        self._rest_ns = int(rest_seconds * 1e9)
        self._failures = 0
        self._retry_ns = 0

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether the limit of failures was reached and nothing has worked since; changes
        nothing.
        """
        return self._failures >= self._limit

    @property
    def resting(self) -> bool:
        """Whether the device must not be used now; changes nothing."""
        # asked at each look-up, so without the lock
        return (
            self._failures >= self._limit
            and self._clock.monotonic_ns() < self._retry_ns
        )

    def record_failure(self, *, rests: bool = True) -> None:
        """Count a failure of the device. If `rests` is False, it does not delay the next probe."""
        with self._lock:
            self._failures += 1
            if rests:
                self._retry_ns = self._clock.monotonic_ns() + self._rest_ns

    def record_success(self) -> None:
        """Reset the count of failures: the device works, so it is used again."""
        if self._failures:
            with self._lock:
                self._failures = 0
