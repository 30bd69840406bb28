"""Time, as one small object, so that tests can bring their own."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

__all__ = ["Clock"]


@cache
def _boot_id() -> str:
    """Read the kernel's random id of this boot; changes nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class Clock:
    """The machine's own clock. Stateless, so safe to share between threads and across fork.

    Monotonic times are only comparable within one boot: store `boot_id()` beside any that is written down.
    """

    def monotonic_ns(self) -> int:
        """Return CLOCK_MONOTONIC in nanoseconds: one clock for all processes of this boot."""
        return time.monotonic_ns()

    def time(self) -> float:
        """Return the wall clock in seconds since the epoch. For people to read, never for deadlines."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Block this thread for `seconds`."""
        time.sleep(seconds)

    def boot_id(self) -> str:
        """Return the id of this boot of the machine."""
        return _boot_id()
