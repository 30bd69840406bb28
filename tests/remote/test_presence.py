"""Which keys a remote store is known to have or not: for how long, and of how many."""

from __future__ import annotations

import pytest

from pagoda.testing import FakeClock
from pagoda.tiers.remote import presence
from pagoda.tiers.remote.presence import PresenceCache

NS = b"a namespace"


def test_both_answers_are_forgotten_after_a_while() -> None:
    clock = FakeClock()
    known = PresenceCache(clock, present_seconds=2.0, absent_seconds=1.0)
    known.record(NS, [b"a"], True)
    known.record(NS, [b"b"], False)
    assert known.get(NS, b"a") is True
    assert known.get(NS, b"b") is False
    assert known.get(NS, b"c") is None
    clock.advance(1.5)
    assert known.get(NS, b"a") is True
    assert known.get(NS, b"b") is None
    clock.advance(1.0)
    assert known.get(NS, b"a") is None


def test_the_latest_word_stands() -> None:
    known = PresenceCache(FakeClock())
    known.record(NS, [b"a"], False)
    known.record(NS, [b"a"], True)
    assert known.get(NS, b"a") is True
    known.clear()
    assert known.get(NS, b"a") is None


def test_an_absence_from_before_a_store_is_no_news() -> None:
    clock = FakeClock()
    known = PresenceCache(clock)
    asked_before = known.now_ns()
    clock.advance(0.1)
    known.record(NS, [b"a"], True)
    clock.advance(0.1)
    known.record(NS, [b"a", b"b"], False, since_ns=asked_before)
    assert known.get(NS, b"a") is True
    assert known.get(NS, b"b") is False
    known.record(NS, [b"a"], False, since_ns=known.now_ns())
    assert known.get(NS, b"a") is False


def test_the_oldest_go_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # each has two names: under its namespace, and under any
    monkeypatch.setattr(presence, "_MOST_KEYS", 8)
    known = PresenceCache(FakeClock())
    known.record(NS, [b"%d" % n for n in range(5)], True)
    known.record(NS, [b"1"], True)
    known.record(NS, [b"9"], True)
    assert [known.get(NS, b"%d" % n) for n in range(5)] == [
        None,
        True,
        None,
        True,
        True,
    ]


def test_namespaces_are_apart() -> None:
    known = PresenceCache(FakeClock())
    known.record(NS, [b"a"], True)
    known.record(b"other", [b"a"], False)
    assert known.get(NS, b"a") is True
    assert known.get(b"other", b"a") is False
    assert known.get(None, b"a") is True
