"""Where the cache counts: in the counters that all processes of its first local tier share."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping

from pagoda.clock import Clock
from pagoda.errors import StoreError
from pagoda.fork import renewed_after_fork
from pagoda.ledger import Ledger
from pagoda.metrics import COUNTERS, RateLimitedLog, Reason

__all__ = ["Tally"]

_LOCAL = ("host", "disk")
_KNOWN = frozenset(COUNTERS)


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
        """Add to one counter, as `add`."""
        self.add({name: number})

    def add(self, counts: Mapping[str, int]) -> None:
        """Add to some counters; nothing to those that the vocabulary lacks."""
        known = {name: number for name, number in counts.items() if number and name in _KNOWN}
        ledger = self._ledger
        if ledger is None:
            with self._lock:
                self._own.update(known)
        elif known:
            ledger.count_all(known)

    def asked(self, num_tokens: int, by_tier: Mapping[str, int], reason: Reason | None) -> None:
        """Count one question about so many tokens and its answer; `reason`: of a miss that no tier has counted."""
        hit_tokens = sum(by_tier.values())
        counts = {"lookups": 1, "asked_tokens": num_tokens}
        if hit_tokens:
            counts["hits"], counts["hit_tokens"] = 1, hit_tokens
            for tier, tokens in by_tier.items():
                name = f"hit_tokens_{tier if tier in _LOCAL else 'remote'}"
                counts[name] = counts.get(name, 0) + tokens
        if reason is not None and reason is not Reason.LEDGER_BUSY:
            counts[f"miss_{reason}"] = 1
        self.add(counts)

    def close(self) -> None:
        """From now on count in this process only: the row in the shared counters may soon be another member's."""
        self._ledger = None

    def counters(self, deadline_seconds: float) -> dict[str, int]:
        """All counters, of all processes that share the tier; of this process alone if they are not had in time."""
        if (ledger := self._ledger) is not None:
            try:
                return ledger.counters(deadline_seconds)
            except StoreError:
                return ledger.own_counters()
        with self._lock:
            return {name: self._own[name] for name in COUNTERS}

    def warn(
        self, logger: logging.Logger, reason: Reason, message: str, trouble: Exception | None = None
    ) -> None:
        """Log trouble, one line a reason in a while; its traceback at debug level."""
        self._lines.warn(logger, reason, message)
        if trouble is not None:
            logger.debug("%s", reason.value, exc_info=trouble)
