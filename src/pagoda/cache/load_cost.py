"""Whether loading a chunk is expected to be faster than computing it again."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from pagoda.clock import Clock
from pagoda.fork import reset_in_child

__all__ = ["LoadCost"]

_NEW_SHARE = 0.3  # of a new measurement in the running mean of the prefill rate
_LAST = 5  # measurements of a tier whose median counts
_FEWEST = 3  # of them: a single copy during which the process was paused proves nothing
_PROBE_NS = (
    1_000_000_000  # after a measurement the tier is tried, and measured, again; doubled while it stays slow
)
_LATEST_PROBE_NS = 60 * _PROBE_NS


@dataclass(eq=False)
class _TierSpeed:
    """The last measurements of one tier."""

    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))  # bytes/s
    rate: float = 0.0  # their median
    measured_ns: int = 0
    slow: int = 0  # of the last measurements in a row


class LoadCost:
    """Measured bytes/s of each tier against the engine's measured tokens/s of prefill. Thread-safe.

    Refuses a tier only if both are known and most of its last copies were slow; it is soon tried again.
    """

    def __init__(self, chunk_bytes: int, chunk_tokens: int, clock: Clock, enabled: bool = True) -> None:
        self._enabled = enabled
        self._chunk_bytes = chunk_bytes
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._speeds: dict[str, _TierSpeed] = {}
        self._tokens_per_second = 0.0
        self._break_even = 0.0  # the bytes/s at which loading is as fast as computing; 0: not known
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Create the lock; the measurements stay."""
        self._lock = threading.Lock()

    def record_load(self, tier: str, nbytes: int, seconds: float) -> None:
        """Note that loading `nbytes` from `tier` took `seconds`."""
        if nbytes <= 0 or seconds <= 0:
            return
        with self._lock:
            speed, rate = self._speeds.get(tier), nbytes / seconds
            if speed is None:
                speed = self._speeds[tier] = _TierSpeed()
            speed.rates.append(rate)
            speed.rate = sorted(speed.rates)[len(speed.rates) // 2]
            speed.measured_ns = self._clock.monotonic_ns()
            speed.slow = speed.slow + 1 if rate < self._break_even else 0

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Note that the engine computed `tokens` in `seconds`."""
        if tokens <= 0 or seconds <= 0:
            return
        with self._lock:
            old, new = self._tokens_per_second, tokens / seconds
            self._tokens_per_second = old + _NEW_SHARE * (new - old) if old else new
            self._break_even = self._chunk_bytes * self._tokens_per_second / self._chunk_tokens

    def is_worth_loading(self, tier: str) -> bool:
        """Whether a chunk from `tier` is expected sooner than a computed one, or too little is known."""
        with self._lock:
            speed = self._speeds.get(tier)
            if not self._enabled or speed is None:
                return True
            if len(speed.rates) < _FEWEST or speed.rate >= self._break_even:
                return True
            doublings = max(0, speed.slow - _FEWEST)
            pause = min(_PROBE_NS << min(doublings, 6), _LATEST_PROBE_NS)
            return self._clock.monotonic_ns() - speed.measured_ns > pause

    @staticmethod
    def refusal(tier: str) -> str:
        """Say why nothing is loaded from a tier that is not worth it."""
        return f"computing is faster than reading from {tier}"

    def rates(self) -> dict[str, float]:
        """Return the known rates: "<tier>_bytes_per_second" and "prefill_tokens_per_second"."""
        with self._lock:
            known = {f"{tier}_bytes_per_second": speed.rate for tier, speed in self._speeds.items()}
            return {**known, "prefill_tokens_per_second": self._tokens_per_second}
