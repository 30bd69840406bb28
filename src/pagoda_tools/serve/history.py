"""What happened in the last day, in seconds and minutes: the charts and rates of the operator's
page.

`overview` gives it the counters of all stores, about once a second, and reads it. Times are seconds
of the machine since its start, sleep included, so a wall clock that is set back changes nothing.

A span says what was counted between two looks, and how long that took. Where nobody looked there is
no span: what was counted meanwhile is in the totals, but nobody knows when it happened.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pagoda.base.metrics import LOAD_BUCKETS, TIER_KINDS, Reason

MOST_SECONDS = (
    300  # spans of a second, or half of one if others ask: five minutes
)
MOST_MINUTES = 1440  # spans of about a minute: a day
# two looks with a longer pause between them have no span: it would spread over the pause what may
# have happened in one moment of it
LONGEST_SPAN_SECONDS = 5.0
# a shorter span would say little: one request in a tenth of a second looks like ten a second
SHORTEST_SPAN_SECONDS = 0.5
RECENT_SECONDS = 60.0  # the time that rates are about

_MINUTE_SECONDS = 60.0
_DAY_SECONDS = 86400.0
_COUNTED = (
    "lookups",
    "asked_tokens",
    "loaded_bytes",
    "stored_bytes",
    "evicted_chunks",
)

Counters = Mapping[str, int]


class StoreId(NamedTuple):
    """A store; one that is made again in the same directory has another identity."""

    directory: Path
    identity: bytes


def machine_seconds() -> float:
    """Return the seconds since this machine started, sleep included; nobody sets this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Span:
    """What all stores counted in the `seconds` before `end`. Immutable.

    `time` is the wall clock at its end, for people. `by_store` has the counts of each store.
    """

    end: float
    seconds: float
    time: float
    counts: Tally[str] = field(default_factory=Tally)
    by_store: Mapping[StoreId, Counters] = field(default_factory=dict)

    @property
    def begin(self) -> float:
        """When it began; spans follow each other without a pause, or there is a gap."""
        return self.end - self.seconds

    def as_json(self) -> dict[str, object]:
        """Return it in plain types, without the single stores."""
        return {
            "time": self.time,
            "end": self.end,
            "seconds": self.seconds,
            **activity(self.counts),
        }


@dataclass(frozen=True)
class RecentActivity:
    """The counts of the last minute: of all stores, and of each."""

    seconds: float  # how much of the minute somebody looked
    counts: Counters
    by_store: Mapping[StoreId, Counters]


class History:
    """Keeps the spans of one server, at most a day. Of one thread; others may copy its deques."""

    def __init__(self) -> None:
        self.seconds: deque[Span] = deque()
        self.minutes: deque[Span] = deque(maxlen=MOST_MINUTES)
        self._looked_at: float | None = None
        self._before: Mapping[StoreId, Counters] = {}

    def add(
        self,
        now: float,
        wall: float,
        stores: Mapping[StoreId, Counters],
        failed: Collection[StoreId] = (),
    ) -> Span | None:
        """Take the counters of all stores at a moment; return the span since the look before.

        None, and no span, if that look is too long ago, or a moment ago: then it is left out. A
        store that is new, or was made again, adds nothing to its first span. While a store fails
        that was read before, there is no span; if it does not come back soon, the others go on
        without it.

        Args:
            now: `machine_seconds()`.
            wall: Unix time.
            stores: the counters of each store that could be read.
            failed: stores that could not be read.
        """
        before_at = self._looked_at
        before = self._before
        is_late = before_at is None or now - before_at > LONGEST_SPAN_SECONDS
        if before_at is not None and 0 <= now - before_at < SHORTEST_SPAN_SECONDS:
            return None
        if not is_late and any(store in before for store in failed):
            return None
        self._looked_at = now
        self._before = dict(stores)
        if before_at is None or is_late or now <= before_at:
            return None
        by_store = {
            store: rise
            for store, counters in stores.items()
            if store in before
            and (rise := _rise(before[store], counters)) is not None
        }
        counts: Tally[str] = Tally()
        for rise in by_store.values():
            counts.update(rise)
        span = Span(now, now - before_at, wall, counts, by_store)
        self.seconds.append(span)
        while self.seconds[0].end <= now - MOST_SECONDS:
            self.seconds.popleft()
        self._add_to_minutes(span)
        return span

    def recent(self, now: float) -> RecentActivity:
        """Return what was counted in the last minute before `now`."""
        seconds = 0.0
        counts: Tally[str] = Tally()
        by_store: dict[StoreId, Tally[str]] = {}
        for span in reversed(self.seconds):
            if span.begin < now - RECENT_SECONDS:
                break
            seconds += span.seconds
            counts.update(span.counts)
            for store, own in span.by_store.items():
                by_store.setdefault(store, Tally()).update(own)
        return RecentActivity(seconds, counts, by_store)

    def _add_to_minutes(self, span: Span) -> None:
        last = self.minutes[-1] if self.minutes else None
        follows = last is not None and abs(span.begin - last.end) < 1e-3
        if last is None or not follows or span.end - last.begin > _MINUTE_SECONDS:
            self.minutes.append(
                Span(span.end, span.seconds, span.time, span.counts)
            )
        else:
            # a new one, because another thread may be reading the old one
            seconds = last.seconds + span.seconds
            counts = last.counts + span.counts
            self.minutes[-1] = Span(span.end, seconds, span.time, counts)
        while self.minutes[0].end < span.end - _DAY_SECONDS:
            self.minutes.popleft()


def activity(counts: Counters) -> dict[str, object]:
    """Return the figures of some counts that pages show: requests, loads, evictions, drops."""
    loads = sum(
        counts.get(counter, 0)
        for edges in LOAD_BUCKETS.values()
        for counter in edges.values()
    )
    microseconds = sum(
        counts.get(f"load_microseconds_{kind}", 0) for kind in TIER_KINDS
    )
    return {
        **{name: counts.get(name, 0) for name in _COUNTED},
        "hit_tokens": {
            kind: counts.get(f"hit_tokens_{kind}", 0) for kind in TIER_KINDS
        },
        "loads": loads,
        "load_seconds": microseconds / 1e6,
        "dropped_chunks": dropped(counts),
    }


def dropped(counts: Counters) -> int:
    """Return how many chunks were not stored, for any reason."""
    return sum(counts.get(f"drop_{reason}", 0) for reason in Reason)


def load_seconds_within(counts: Counters, share: float) -> float | None:
    """Return the time within which that share of the loads ended: the upper edge of their bucket.

    None if there were no loads, or if it is above the last edge.
    """
    edges = next(iter(LOAD_BUCKETS.values()))
    by_edge = {
        edge: sum(counts.get(named[edge], 0) for named in LOAD_BUCKETS.values())
        for edge in edges
    }
    wanted = share * sum(by_edge.values())
    total = 0
    for edge, loads in by_edge.items():
        total += loads
        if total and total >= wanted:
            return None if edge == "inf" else float(edge)
    return None


def _rise(before: Counters, now: Counters) -> Counters | None:
    """Return what was counted between two looks at a store; None if it was made again."""
    rise = {
        name: count - before.get(name, 0)
        for name, count in now.items()
        if count != before.get(name, 0)
    }
    return rise if all(count > 0 for count in rise.values()) else None
