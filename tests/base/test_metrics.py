"""Reasons, counters and the rate-limited log line."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

import pytest

import pagoda
from pagoda.base.clock import Clock
from pagoda.base.metrics import (
    COUNTERS,
    LOAD_BUCKETS,
    LOAD_SECONDS,
    TIER_KINDS,
    RateLimitedLog,
    Reason,
    by_reason,
)
from pagoda.ledger.member_counters import WIDTH

logger = logging.getLogger("pagoda.test")


class StoppedClock(Clock):
    """A clock that a test advances."""

    now_ns = 10**9

    def monotonic_ns(self) -> int:
        return self.now_ns


def test_the_loggers_of_all_modules_are_guarded() -> None:
    own = re.compile(r"^\w+ = logging\.getLogger", re.MULTILINE)
    sources = Path(pagoda.__file__).parents[1].rglob("*.py")
    assert not [path for path in sources if own.search(path.read_text())]


def test_a_reason_is_its_lower_case_name() -> None:
    for reason in Reason:
        assert reason.value == reason.name.lower()


@pytest.mark.parametrize("prefix", ["miss_", "drop_"])
def test_any_reason_may_end_a_load_and_a_store(prefix: str) -> None:
    counters = {name: number for number, name in enumerate(COUNTERS, 1)}
    assert by_reason(counters, prefix) == {
        str(reason): counters[prefix + reason] for reason in Reason
    }
    assert by_reason({f"{prefix}busy": 3, f"{prefix}full": 0}, prefix) == {
        "busy": 3
    }


def test_counters_have_a_column_each() -> None:
    assert len(set(COUNTERS)) == len(COUNTERS)
    assert COUNTERS[:2] == ("lookups", "hits")
    assert COUNTERS[15] == "miss_absent"
    for reason in Reason:
        assert f"miss_{reason}" in COUNTERS
        assert f"drop_{reason}" in COUNTERS
    assert set(LOAD_BUCKETS) == set(TIER_KINDS)
    for kind, buckets in LOAD_BUCKETS.items():
        assert [float(edge) for edge in buckets] == [*LOAD_SECONDS, float("inf")]
        assert {*buckets.values(), f"load_microseconds_{kind}"} <= set(COUNTERS)
    assert len(COUNTERS) <= WIDTH, "a counter without a column is not counted"


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
    threads = [
        threading.Thread(target=log.warn, args=(logger, Reason.BUSY, "busy"))
        for _ in range(8)
    ]
    with caplog.at_level(logging.WARNING):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert caplog.messages == ["busy: busy"]
