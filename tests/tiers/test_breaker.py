"""The circuit breaker of a tier: after which failures it rests, and when it is tried again."""

from __future__ import annotations

from pagoda.testing import FakeClock
from pagoda.tiers.breaker import CircuitBreaker


def test_rests_after_failures_in_a_row_only() -> None:
    breaker = CircuitBreaker(FakeClock(), limit=3)
    for _ in range(2):
        breaker.record_failure()
    breaker.record_success()
    for _ in range(2):
        breaker.record_failure()
    assert not breaker.resting
    breaker.record_failure()
    assert breaker.resting


def test_after_the_rest_it_is_tried_again() -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(clock, limit=1, rest_seconds=5)
    breaker.record_failure()
    clock.advance(4.9)
    assert breaker.resting
    clock.advance(0.2)
    assert not breaker.resting
    breaker.record_success()
    clock.advance(0.2)
    assert not breaker.resting


def test_a_probe_that_fails_begins_another_rest() -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(clock, limit=3, rest_seconds=5)
    for _ in range(3):
        breaker.record_failure()
    clock.advance(5.1)
    breaker.record_failure()
    clock.advance(4.9)
    assert breaker.resting


def test_it_stays_open_after_its_rest_until_something_worked() -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(clock, limit=2, rest_seconds=5)
    breaker.record_failure()
    assert not breaker.is_open
    breaker.record_failure()
    clock.advance(6)
    assert breaker.is_open
    assert not breaker.resting
    breaker.record_success()
    assert not breaker.is_open
