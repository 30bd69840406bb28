"""The health of a remote store: when it is left alone, and when nothing is written to it."""

from __future__ import annotations

from pagoda.base.metrics import Reason
from pagoda.testing import FakeClock
from pagoda.tiers.remote.health import Health


def test_two_failures_in_a_row_are_a_rest() -> None:
    clock = FakeClock()
    health = Health(clock, rest_seconds=0.25)
    health.breaker.record_failure()
    health.breaker.record_success()
    health.breaker.record_failure()
    assert not health.breaker.resting
    health.breaker.record_failure()
    assert health.breaker.resting
    clock.advance(0.3)
    assert not health.breaker.resting
    assert health.write_refusal is None


def test_four_refused_writes_in_a_row_stop_writes_alone() -> None:
    clock = FakeClock()
    health = Health(clock)
    health.last_refusal = Reason.FULL
    for _ in range(3):
        health.write_breaker.record_failure()
    assert health.write_refusal is None
    health.write_breaker.record_failure()
    assert health.write_refusal is Reason.FULL
    assert not health.breaker.resting
    clock.advance(5.1)
    assert health.write_refusal is None
