"""A clock that tests advance."""

from __future__ import annotations

import threading
import time

from pagoda.base.clock import Clock


class FakeClock(Clock):
    """A clock that stops until `advance`; `sleep` advances it at once. Thread-safe."""

    def __init__(
        self,
        seconds: float = 1_000.0,
        wall: float = 1_700_000_000.0,
        boot: str = "fake-boot",
    ) -> None:
        self._lock = threading.Lock()
        self._now_ns = int(seconds * 1e9)
        self._wall_offset = wall - seconds
        self._boot = boot

    def advance(self, seconds: float) -> None:
        """Advance the clock by `seconds`. Raises ValueError for a negative number."""
        if seconds < 0:
            raise ValueError(f"time does not go back, got {seconds} seconds")
        with self._lock:
            self._now_ns += round(seconds * 1e9)

    def reboot(self, boot: str, seconds: float = 0.0) -> None:
        """Simulate a reboot of the machine: another boot id, and monotonic time starts again at
        `seconds`.
        """
        wall = self.time()
        with self._lock:
            self._boot = boot
            self._now_ns = int(seconds * 1e9)
            self._wall_offset = wall - seconds

    def monotonic_ns(self) -> int:
        """Return the fake monotonic time in nanoseconds."""
        with self._lock:
            return self._now_ns

    def time(self) -> float:
        """Return the fake wall time in seconds; it advances with the monotonic one."""
        with self._lock:
            return self._wall_offset + self._now_ns / 1e9

    def sleep(self, seconds: float) -> None:
        """Advance by `seconds` without waiting; lets other threads run."""
        self.advance(max(0.0, seconds))
        time.sleep(0)

    def boot_id(self) -> str:
        """Return the fake id of this boot."""
        with self._lock:
            return self._boot
