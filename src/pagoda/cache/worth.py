"""Whether loading a chunk is expected to be faster than computing it again."""

from __future__ import annotations

import threading

from pagoda.cache.forks import renewed_after_fork
from pagoda.clock import Clock

__all__ = ["Worth"]

_NEW_SHARE = 0.3  # of a new measurement in the running mean
_FRESH_NS = int(60e9)  # an older measurement condemns nobody: the tier is tried, and measured, again


class Worth:
    """Measured bytes/s of each tier against the engine's measured tokens/s of prefill. Thread-safe.

    Says no only if both are known, and of a tier only while its measurement is fresh: a tier that once was slow gets
    its chance again.
    """

    def __init__(self, chunk_bytes: int, chunk_tokens: int, clock: Clock, enabled: bool = True) -> None:
        self._enabled = enabled
        self._chunk_bytes = chunk_bytes
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._bytes_per_second: dict[str, float] = {}
        self._measured_ns: dict[str, int] = {}
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
            rate = nbytes / seconds
            self._bytes_per_second[tier] = _mean(self._bytes_per_second.get(tier, 0.0), rate)
            self._measured_ns[tier] = self._clock.monotonic_ns()

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Note that the engine computed `tokens` in `seconds`."""
        if tokens <= 0 or seconds <= 0:
            return
        with self._lock:
            self._tokens_per_second = _mean(self._tokens_per_second, tokens / seconds)

    def beats(self, tier: str) -> bool:
        """Whether a chunk from `tier` is expected sooner than a computed one, or nothing is known against it."""
        with self._lock:
            rate, prefill = self._bytes_per_second.get(tier), self._tokens_per_second
            if not self._enabled or not rate or not prefill:
                return True
            if self._chunk_bytes / rate <= self._chunk_tokens / prefill:
                return True
            return self._clock.monotonic_ns() - self._measured_ns[tier] > _FRESH_NS

    def rates(self) -> dict[str, float]:
        """What is known: "<tier>_bytes_per_second" and "prefill_tokens_per_second"."""
        with self._lock:
            known = {f"{tier}_bytes_per_second": rate for tier, rate in self._bytes_per_second.items()}
            return {**known, "prefill_tokens_per_second": self._tokens_per_second}


def _mean(old: float, new: float) -> float:
    return new if not old else old + _NEW_SHARE * (new - old)
