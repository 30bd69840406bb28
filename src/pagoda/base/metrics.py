"""The names of all reasons and counters, the loggers, and a rate-limited log.

Pure Python; the ledger stores the counters (one row for each member, in a mapped file), and
`serve.exposition` shows them to Prometheus.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from enum import StrEnum, auto

from pagoda.base.clock import Clock
from pagoda.base.fork import per_process


class Reason(StrEnum):
    """Why a chunk was not served (a miss) or not stored (a drop). The value is the lower-case
    name.

    `Hit.reason` and `Stored.reason` have it, and the counters `miss_...` and `drop_...` are named
    by it. docs/reference/metrics.md says what each means and what to do. Later versions add
    reasons and rename none.

    Example:
        >>> from pagoda import Reason
        >>> Reason.SHORT_PROMPT == "short_prompt"
        True
    """

    # mostly for misses
    ABSENT = auto()
    EVICTED = auto()
    CLEARED = auto()
    REMOVED = auto()
    OTHER_NAMESPACE = auto()
    BUSY = auto()
    FAILED_CHECK = auto()
    BELOW_MINIMUM = auto()
    NOT_WORTH_IT = auto()
    LEDGER_BUSY = auto()
    DEADLINE = auto()
    IO_ERROR = auto()
    SHORT_PROMPT = auto()
    # of a request that may read nothing: it counts as no lookup
    NOT_ASKED = auto()
    TIER_SKIPPED = auto()
    # mostly for drops
    FULL = auto()
    NOT_ADMITTED = auto()
    QUEUE_FULL = auto()
    TOO_LARGE = auto()
    STALE = auto()
    SUPERSEDED = auto()
    CLOSED = auto()
    PIN_LIMIT = auto()
    REBUILDING = auto()
    # mostly a miss; the last, because the numbers of the others stay
    NOT_CACHEABLE = auto()


# what may keep a store in memory from growing: see `store_place.Growth`
GROWTH_BOUNDS = ("filesystem", "cgroup", "machine")
# every tier except the first two kinds counts as remote
TIER_KINDS = ("host", "disk", "remote")
# upper edges of the buckets; one more bucket has no upper edge
LOAD_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
# by kind of tier: upper edge in seconds -> the counter of calls that loaded from it in that time
LOAD_BUCKETS: Mapping[str, Mapping[str, str]] = {
    kind: {
        edge: f"loads_{kind}_le_{edge}"
        for edge in (*map(str, LOAD_SECONDS), "inf")
    }
    for kind in TIER_KINDS
}

# Stores keep them by name: a new one does not change the format, and a name is never reused with
# another meaning. Every reason has both a miss_ and a drop_ column, because a BUSY may end either a
# load or a store.
COUNTERS: tuple[str, ...] = (
    "lookups",
    "hits",
    "hit_tokens",
    "asked_tokens",
    "stored_chunks",
    "stored_bytes",
    "loaded_chunks",
    "loaded_bytes",
    "evicted_chunks",
    "removed_chunks",
    "reaped_chunks",
    "failed_checks",
    *(f"hit_tokens_{kind}" for kind in TIER_KINDS),
    *(f"miss_{reason}" for reason in Reason),
    *(f"drop_{reason}" for reason in Reason),
    *(counter for kind in TIER_KINDS for counter in LOAD_BUCKETS[kind].values()),
    *(f"load_microseconds_{kind}" for kind in TIER_KINDS),
    "prefill_tokens",
    "prefill_microseconds",
    "approximate_hit_tokens",
    "hint_write_failures",
    # pieces that a store in memory did not get, by what had too little room (`store_place.Growth`)
    *(f"growth_refused_{bound}" for bound in GROWTH_BOUNDS),
    "growth_failures",
    # what became of request hints
    "hints_accepted",
    "hints_clipped",
    "hints_refused",
)


# What each process says of itself at present, in the same rows as its counters: only those of
# processes that live are added up.
MEMBER_GAUGES: tuple[str, ...] = ("waiting_chunks",)


def by_reason(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    """Return the counters of all reasons with that prefix ("miss_", "drop_") that are above 0, by
    reason.
    """
    return {
        str(reason): count
        for reason in Reason
        if (count := counters.get(f"{prefix}{reason}", 0))
    }


class RateLimitedLog:
    """At most one log line for each reason in `every_seconds`, with the number of suppressed ones.

    Thread-safe; may be used in a forked child.
    """

    def __init__(
        self, clock: Clock | None = None, every_seconds: float = 10.0
    ) -> None:
        self._clock = clock or Clock()
        self._every_ns = int(every_seconds * 1e9)
        # reason -> (monotonic ns of its last line, suppressed since)
        self._seen: dict[Reason, tuple[int, int]] = {}

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    def warn(self, logger: logging.Logger, reason: Reason, message: str) -> None:
        """Log `message` as a warning, or only count it if this reason had a line less than
        `every_seconds` ago.
        """
        now = self._clock.monotonic_ns()
        with self._lock:
            last = self._seen.get(reason)
            if last is not None and now - last[0] < self._every_ns:
                self._seen[reason] = (last[0], last[1] + 1)
                return
            self._seen[reason] = (now, 0)
        suppressed = last[1] if last is not None else 0
        more = (
            f" ({suppressed} more of this reason since the last line)"
            if suppressed
            else ""
        )
        logger.warning("%s: %s%s", reason.value, message, more)
