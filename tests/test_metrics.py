"""Reasons, counters, the rate-limited log line and the Prometheus text."""

from __future__ import annotations

import logging
import threading

import pytest

from pagoda.clock import Clock
from pagoda.metrics import COUNTERS, DROPS, MISSES, RateLimitedLog, Reason, prometheus

logger = logging.getLogger("pagoda.test")


class StoppedClock(Clock):
    """A clock that a test advances."""

    now_ns = 10**9

    def monotonic_ns(self) -> int:
        return self.now_ns


def test_a_reason_is_its_lower_case_name() -> None:
    assert all(reason.value == reason.name.lower() for reason in Reason)
    assert (*MISSES, *DROPS) == tuple(Reason)
    assert MISSES[0] is Reason.ABSENT and DROPS[0] is Reason.FULL


def test_counters_have_a_column_each() -> None:
    assert len(set(COUNTERS)) == len(COUNTERS)
    assert COUNTERS[:2] == ("lookups", "hits")
    assert COUNTERS[15] == "miss_absent"
    for reason in Reason:
        assert f"miss_{reason}" in COUNTERS and f"drop_{reason}" in COUNTERS


def test_one_line_a_reason_and_interval(caplog: pytest.LogCaptureFixture) -> None:
    clock = StoppedClock()
    log = RateLimitedLog(clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            log.warn(logger, Reason.IO_ERROR, "the disk said 5%")
        log.warn(logger, Reason.FULL, "no room")
        clock.now_ns += 10 * 10**9
        log.warn(logger, Reason.IO_ERROR, "again")
    assert caplog.messages == [
        "io_error: the disk said 5%",
        "full: no room",
        "io_error: again (4 more of this reason since the last line)",
    ]


def test_many_threads_write_one_line(caplog: pytest.LogCaptureFixture) -> None:
    log = RateLimitedLog()
    threads = [threading.Thread(target=log.warn, args=(logger, Reason.BUSY, "busy")) for _ in range(8)]
    with caplog.at_level(logging.WARNING):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert caplog.messages == ["busy: busy"]


def test_prometheus_text() -> None:
    counters = {
        "lookups": 3,
        "miss_absent": 1,
        "miss_busy": 2,
        "drop_full": 4,
        "hit_tokens": 9,
        "hit_tokens_host": 9,
    }
    assert prometheus(counters, {"slots.free": 7.5}) == (
        "# TYPE pagoda_lookups_total counter\n"
        "pagoda_lookups_total 3\n"
        "# TYPE pagoda_misses_total counter\n"
        'pagoda_misses_total{reason="absent"} 1\n'
        'pagoda_misses_total{reason="busy"} 2\n'
        "# TYPE pagoda_drops_total counter\n"
        'pagoda_drops_total{reason="full"} 4\n'
        "# TYPE pagoda_hit_tokens_total counter\n"
        "pagoda_hit_tokens_total 9\n"
        "# TYPE pagoda_hit_tokens_by_tier_total counter\n"
        'pagoda_hit_tokens_by_tier_total{tier="host"} 9\n'
        "# TYPE pagoda_slots_free gauge\n"
        "pagoda_slots_free 7.5\n"
    )


def test_prometheus_labels_are_escaped() -> None:
    text = prometheus({"hits": 1}, {}, {"model": 'a"\\\n'})
    assert text.splitlines()[1] == r'pagoda_hits_total{model="a\"\\\n"} 1'
    assert prometheus({}, {}) == ""


def test_every_counter_has_one_family() -> None:
    text = prometheus(dict.fromkeys(COUNTERS, 1), {})
    types = [line for line in text.splitlines() if line.startswith("#")]
    assert len(set(types)) == len(types)
    assert len(text.splitlines()) - len(types) == len(COUNTERS)
