"""Whether loading a chunk is expected to be faster than computing it again."""

from __future__ import annotations

import threading
from collections import deque

from pagoda.clock import Clock
from pagoda.fork import renewed_after_fork

__all__ = ["Worth"]

_NEW_SHARE = 0.3  # of a new measurement in the running mean of the prefill rate
_LAST = 5  # measurements of a tier whose median counts
_FEWEST = 3  # of them: a single copy during which the process was paused says nothing
_PROBE_NS = 1_000_000_000  # after a measurement the tier is tried, and measured, again; doubled as long as that is slow
_LATEST_PROBE_NS = 60 * _PROBE_NS


class _Speed:
    """The last measurements of one tier."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_LAST)  # bytes/s
        self.rate = 0.0  # their median
        self._measured_ns = 0
        self._slow = 0  # of the last measurements in a row

    def measured(self, rate: float, enough: float, now_ns: int) -> None:
        self._rates.append(rate)
        self.rate = sorted(self._rates)[len(self._rates) // 2]
        self._measured_ns = now_ns
        self._slow = self._slow + 1 if rate < enough else 0

    def is_too_slow(self, enough: float, now_ns: int) -> bool:
        if len(self._rates) < _FEWEST or self.rate >= enough:
            return False
        doublings = max(0, self._slow - _FEWEST)
        pause = min(_PROBE_NS << min(doublings, 6), _LATEST_PROBE_NS)
        return now_ns - self._measured_ns <= pause


class Worth:
    """Measured bytes/s of each tier against the engine's measured tokens/s of prefill. Thread-safe.

    Says no only if both are known, and of a tier only if most of its last copies were slow; soon it is tried again.
    """

    def __init__(self, chunk_bytes: int, chunk_tokens: int, clock: Clock, enabled: bool = True) -> None:
        self._enabled = enabled
        self._chunk_bytes = chunk_bytes
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._speeds: dict[str, _Speed] = {}
        self._tokens_per_second = 0.0
        self.renew()
        renewed_after_fork(self)

    def renew(self) -> None:
        """Make the lock anew; what was measured stays."""
        self._lock = threading.Lock()

    def measured(self, tier: str, nbytes: int, seconds: float) -> None:
        """Note that `nbytes` came up from `tier` in `seconds`."""
        if nbytes <= 0 or seconds <= 0:
            return
        with self._lock:
            speed = self._speeds.get(tier)
            if speed is None:
                speed = self._speeds[tier] = _Speed()
            speed.measured(nbytes / seconds, self._enough(), self._clock.monotonic_ns())

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Note that the engine computed `tokens` in `seconds`."""
        if tokens <= 0 or seconds <= 0:
            return
        with self._lock:
            self._tokens_per_second = _mean(self._tokens_per_second, tokens / seconds)

    def beats(self, tier: str) -> bool:
        """Whether a chunk from `tier` is expected sooner than a computed one, or nothing is known against it."""
        with self._lock:
            speed = self._speeds.get(tier)
            if not self._enabled or speed is None:
                return True
            return not speed.is_too_slow(self._enough(), self._clock.monotonic_ns())

    def _enough(self) -> float:
        """The bytes/s that computing is worth; 0 if that is not known."""
        return self._chunk_bytes * self._tokens_per_second / self._chunk_tokens

    def rates(self) -> dict[str, float]:
        """What is known: "<tier>_bytes_per_second" and "prefill_tokens_per_second"."""
        with self._lock:
            known = {f"{tier}_bytes_per_second": speed.rate for tier, speed in self._speeds.items()}
            return {**known, "prefill_tokens_per_second": self._tokens_per_second}


def _mean(old: float, new: float) -> float:
    return new if not old else old + _NEW_SHARE * (new - old)
