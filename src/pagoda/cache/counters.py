"""Where the cache counts: in the counters that all processes of its first local tier share."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from pagoda.base.clock import Clock
from pagoda.base.errors import StoreError
from pagoda.base.fork import reset_now_and_in_child
from pagoda.base.metrics import (
    COUNTERS,
    LOAD_BUCKETS,
    LOAD_SECONDS,
    TIER_KINDS,
    RateLimitedLog,
    Reason,
)
from pagoda.ledger import Ledger, admin

_KNOWN = frozenset(COUNTERS)
# the counter of each bucket, by its number
_BUCKETS = {kind: tuple(LOAD_BUCKETS[kind].values()) for kind in TIER_KINDS}
_HIT_TOKENS = {kind: f"hit_tokens_{kind}" for kind in TIER_KINDS}
_MICROSECONDS = {kind: f"load_microseconds_{kind}" for kind in TIER_KINDS}


class CacheCounters:
    """Count by name, and write rate-limited log lines. Thread-safe; never raises, never waits for
    another process.
    """

    def __init__(
        self, ledger: Ledger | None, clock: Clock, approximate: bool = False
    ) -> None:
        """`approximate`: the cache has a lossy codec."""
        self._approximate = approximate
        self._ledger = ledger
        # used if there is no local tier to share
        self._own: Counter[str] = Counter()
        self._log_lines = RateLimitedLog(clock)
        reset_now_and_in_child(self)

    def reset(self) -> None:
        """Create the locks; a child has nothing in its queues."""
        self._lock = threading.Lock()
        self._waiting: dict[str, int] = {}

    def add(self, counts: Mapping[str, int]) -> None:
        """Add to some counters; ignore unknown names."""
        known = {
            name: number
            for name, number in counts.items()
            if number and name in _KNOWN
        }
        ledger = self._ledger
        if ledger is None:
            with self._lock:
                self._own.update(known)
        elif known:
            ledger.count(known)

    def set_waiting(self, tier: str, chunks: int) -> None:
        """Say how many chunks of this process wait to be written to a tier."""
        self._waiting[tier] = chunks
        ledger = self._ledger
        if ledger is not None:
            total = sum(self._waiting.values())
            ledger.session.set_gauge("waiting_chunks", total)

    def count_request(
        self,
        num_tokens: int,
        by_tier: Mapping[str, int],
        reason: Reason | None,
        namespace: bytes,
        *,
        miss_counted: bool = False,
        more: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Count one request for that many tokens and its answer, and remember it among the last
        requests.

        `reason`: why it got no more. `miss_counted`: a tier has already counted the miss.
        `namespace`: the root, empty if it is not known. Of a request that may not read
        (`NOT_ASKED`) only the reason is counted, so that it is in no rate. `more`: further counters
        to add, such as those of the request's loads.
        """
        hit_tokens = sum(by_tier.values())
        counts = {"lookups": 1, "asked_tokens": num_tokens, **more}
        if reason is Reason.NOT_ASKED:
            return self._count_unasked(num_tokens, namespace)
        if hit_tokens:
            counts["hits"] = 1
            counts["hit_tokens"] = hit_tokens
            if self._approximate:
                counts["approximate_hit_tokens"] = hit_tokens
            for tier, tokens in by_tier.items():
                name = _HIT_TOKENS.get(tier, "hit_tokens_remote")
                counts[name] = counts.get(name, 0) + tokens
        if (
            reason is not None
            and reason is not Reason.LEDGER_BUSY
            and not miss_counted
        ):
            counts[f"miss_{reason}"] = 1
        if (ledger := self._ledger) is None:
            self.add(counts)
        else:
            ledger.count(counts)
            ledger.requests.append(counts, namespace, reason or "")
        return None

    def _count_unasked(self, num_tokens: int, namespace: bytes) -> None:
        self.add({f"miss_{Reason.NOT_ASKED}": 1})
        if (ledger := self._ledger) is not None:
            ledger.requests.append(
                {"asked_tokens": num_tokens}, namespace, Reason.NOT_ASKED
            )

    @staticmethod
    def load_counts(
        chunks: int, nbytes: int, seconds: Mapping[str, float]
    ) -> dict[str, int]:
        """Return the counters of one call: the bytes copied out of host slots, and the load time of
        each tier.
        """
        counts = {"loaded_chunks": chunks, "loaded_bytes": nbytes}
        for tier, spent in seconds.items():
            kind = tier if tier in TIER_KINDS else "remote"
            bucket = _BUCKETS[kind][bisect_left(LOAD_SECONDS, spent)]
            total = _MICROSECONDS[kind]
            counts[bucket] = counts.get(bucket, 0) + 1
            counts[total] = counts.get(total, 0) + int(spent * 1e6)
        return counts

    def close(self) -> None:
        """Count in this process only from now on: another member may soon own the row in the shared
        counters.
        """
        self._ledger = None

    def read(self, deadline_seconds: float) -> dict[str, int]:
        """Return all counters of all processes that share the tier; only this process's if that
        takes too long.
        """
        if (ledger := self._ledger) is not None:
            try:
                return admin.counters(ledger, deadline_seconds)
            except StoreError:
                return ledger.session.own_counters()
        with self._lock:
            return {name: self._own[name] for name in COUNTERS}

    def warn(
        self,
        logger: logging.Logger,
        reason: Reason,
        message: str,
        error: Exception | None = None,
    ) -> None:
        """Log an error, one line per reason in a while; its traceback at debug level."""
        self._log_lines.warn(logger, reason, message)
        if error is not None:
            logger.debug("%s", reason.value, exc_info=error)
