"""Where the cache counts: in the counters that all processes of its first local tier share."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping

from pagoda.cache.forks import renewed_after_fork
from pagoda.clock import Clock
from pagoda.ledger import Ledger
from pagoda.metrics import COUNTERS, RateLimitedLog, Reason

__all__ = ["Tally"]

_LOCAL = ("host", "disk")


class Tally:
    """Counts by name, and writes rate-limited log lines. Thread-safe; never raises, never waits for another process."""

    def __init__(self, ledger: Ledger | None, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock
        self._own: Counter[str] = Counter()  # where no local tier is there to be shared
        self.renew()
        renewed_after_fork(self)

    def renew(self) -> None:
        """Make the locks anew."""
        self._lock = threading.Lock()
        self._lines = RateLimitedLog(self._clock)

    def count(self, name: str, number: int = 1) -> None:
        """Add to one counter of the vocabulary."""
        if number and name in COUNTERS:
            ledger = self._ledger
            if ledger is not None:
                ledger.count(name, number)
            else:
                with self._lock:
                    self._own[name] += number

    def asked(self, num_tokens: int, by_tier: Mapping[str, int], reason: Reason | None) -> None:
        """Count one question about so many tokens and its answer; `reason`: of a miss that no tier has counted."""
        self.count("lookups")
        self.count("asked_tokens", num_tokens)
        self.count("hits", bool(sum(by_tier.values())))
        self.count("hit_tokens", sum(by_tier.values()))
        for tier, tokens in by_tier.items():
            self.count(f"hit_tokens_{tier if tier in _LOCAL else 'remote'}", tokens)
        if reason is not None and reason is not Reason.LEDGER_BUSY:
            self.count(f"miss_{reason}")

    def close(self) -> None:
        """From now on count in this process only: the row in the shared counters may soon be another member's."""
        self._ledger = None

    def counters(self) -> dict[str, int]:
        """All counters, of all processes that share the tier."""
        if self._ledger is not None:
            return self._ledger.counters()
        with self._lock:
            return {name: self._own[name] for name in COUNTERS}

    def warn(
        self, logger: logging.Logger, reason: Reason, message: str, trouble: Exception | None = None
    ) -> None:
        """Log trouble, one line a reason in a while; its traceback at debug level."""
        self._lines.warn(logger, reason, message)
        if trouble is not None:
            logger.debug("%s", reason.value, exc_info=trouble)
