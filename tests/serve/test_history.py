"""The history of the page: what was counted, when, and where nobody knows it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from pagoda_tools.serve.history import (
    LONGEST_SPAN_SECONDS,
    MOST_MINUTES,
    MOST_SECONDS,
    History,
    StoreId,
    activity,
    load_seconds_within,
)

ONE = StoreId(Path("/one"), b"1")
TWO = StoreId(Path("/two"), b"1")
WALL = 1.8e9


def looked(history: History, now: float, *failed: StoreId, **counts: int):  # type: ignore[no-untyped-def]
    """Look at the store ONE."""
    return history.add(now, WALL + now, {ONE: counts}, failed)


def test_a_span_has_what_was_counted_between_two_looks() -> None:
    history = History()
    assert looked(history, 100.0, lookups=5) is None
    span = looked(history, 101.5, lookups=7, evicted_chunks=3)
    assert span.begin == 100.0
    assert span.end == 101.5
    assert span.seconds == 1.5
    assert span.counts == {"lookups": 2, "evicted_chunks": 3}
    recent = history.recent(101.5)
    assert recent.seconds == 1.5
    assert recent.by_store[ONE]["evicted_chunks"] == 3


def test_after_a_pause_there_is_a_gap_and_nothing_is_spread_over_it() -> None:
    """A stopped server, a laptop that slept, stores that did not answer."""
    history = History()
    looked(history, 100.0, lookups=0)
    looked(history, 101.0, lookups=1)
    wake = 101.0 + LONGEST_SPAN_SECONDS + 0.1
    assert looked(history, wake, lookups=1_000_000) is None
    span = looked(history, wake + 1.0, lookups=1_000_001)
    assert span.counts["lookups"] == 1
    assert [one.end for one in history.seconds] == [101.0, wake + 1.0]
    # the minute ends at the gap, too
    assert [one.begin for one in history.minutes] == [100.0, wake]
    assert sum(one.counts["lookups"] for one in history.minutes) == 2


def test_two_looks_right_after_each_other_make_no_peak() -> None:
    history = History()
    looked(history, 100.0, lookups=0)
    assert looked(history, 100.1, lookups=10) is None
    span = looked(history, 101.0, lookups=10)
    assert span.counts["lookups"] == 10
    assert span.seconds == 1.0


def test_a_store_that_fails_for_a_moment_does_not_bend_the_sum() -> None:
    history = History()
    counts = {ONE: {"lookups": 0}, TWO: {"lookups": 0}}
    history.add(100.0, WALL, counts)
    assert history.add(101.0, WALL, {ONE: {"lookups": 10}}, [TWO]) is None
    both = {ONE: {"lookups": 20}, TWO: {"lookups": 20}}
    span = history.add(102.0, WALL, both)
    assert span is not None
    # both over the same two seconds
    assert span.counts["lookups"] == 40
    assert span.seconds == 2.0


def test_a_store_that_stays_away_does_not_end_the_history_of_the_others() -> None:
    history = History()
    history.add(100.0, WALL, {ONE: {"lookups": 0}, TWO: {"lookups": 0}})
    spans = [
        history.add(100.0 + n, WALL, {ONE: {"lookups": n}}, [TWO])
        for n in range(1, 12)
    ]
    assert spans[0] is None
    assert spans[-1] is not None
    assert spans[-1].counts["lookups"] == 1
    # back with all that it counted meanwhile: nobody knows when
    back = history.add(112.0, WALL, {ONE: {"lookups": 12}, TWO: {"lookups": 999}})
    assert back is not None
    assert back.counts["lookups"] == 1


@pytest.mark.parametrize(
    "again", [(StoreId(ONE.directory, b"2"), 1000), (ONE, 1)]
)
def test_a_store_that_was_made_again_adds_nothing_to_its_first_span(
    again: tuple[StoreId, int],
) -> None:
    history = History()
    history.add(100.0, WALL, {ONE: {"lookups": 50, "hits": 1}})
    store, lookups = again
    span = history.add(101.0, WALL, {store: {"lookups": lookups, "hits": 9}})
    assert span is not None
    assert not any(span.counts.values())


def test_a_clock_that_people_set_changes_only_the_time_for_people() -> None:
    history = History()
    history.add(100.0, WALL, {ONE: {"lookups": 0}})
    span = history.add(101.0, WALL - 86400, {ONE: {"lookups": 3}})
    assert span is not None
    assert span.seconds == 1.0


def test_short_spans_are_kept_as_long_as_others() -> None:
    history = History()
    for n in range(4 * MOST_SECONDS):
        looked(history, 100.0 + n / 2, lookups=n)
    assert sum(one.seconds for one in history.seconds) == MOST_SECONDS


@pytest.mark.slow
def test_a_day_is_kept_in_bounded_rings() -> None:
    history = History()
    seconds = 86_400 + 7_200
    for n in range(seconds):
        looked(history, 100.0 + n, lookups=n)
    assert len(history.seconds) == MOST_SECONDS
    assert len(history.minutes) <= MOST_MINUTES
    assert sum(one.seconds for one in history.minutes) > 86_300
    for one in history.minutes:
        assert one.counts["lookups"] == one.seconds <= 60.0
    for before, after in pairwise(history.minutes):
        assert after.begin == pytest.approx(before.end)
    # many gaps: minutes that end early do not make the ring longer than a day
    for n in range(3 * MOST_MINUTES):
        looked(history, 1e6 + 10.0 * n, lookups=0)
        looked(history, 1e6 + 10.0 * n + 1.0, lookups=1)
    assert len(history.minutes) <= MOST_MINUTES
    # old ones go although few are there
    looked(history, 2e6, lookups=0)
    looked(history, 2e6 + 1.0, lookups=0)
    assert len(history.minutes) == 1


def test_rates_are_of_the_last_minute_only() -> None:
    history = History()
    for n in range(200):
        looked(history, 100.0 + n, lookups=n)
    recent = history.recent(299.0)
    assert recent.seconds == pytest.approx(60.0)
    assert recent.counts["lookups"] == 60
    # after a pause
    assert history.recent(330.0).seconds == pytest.approx(29.0)
    assert history.recent(1000.0).seconds == 0


def test_load_times_are_the_upper_edges_of_their_buckets() -> None:
    counts = Counter({"loads_host_le_0.003": 97, "loads_disk_le_0.1": 3})
    assert load_seconds_within(counts, 0.5) == 0.003
    assert load_seconds_within(counts, 0.99) == 0.1
    assert load_seconds_within(Counter(), 0.5) is None
    assert load_seconds_within(Counter({"loads_disk_le_inf": 1}), 0.5) is None


def test_drops_of_all_reasons_and_loads_of_all_tiers_are_counted() -> None:
    counts = Counter(
        {
            "drop_full": 2,
            "drop_queue_full": 3,
            "loads_host_le_0.001": 1,
            "loads_remote_le_inf": 1,
            "load_microseconds_disk": 5_000_000,
        }
    )
    found = activity(counts)
    assert found["dropped_chunks"] == 5
    assert found["loads"] == 2
    assert found["load_seconds"] == 5.0
