"""pagoda.tiers.memo"""

from __future__ import annotations

import pytest

from pagoda.testing import FakeClock
from pagoda.tiers import memo
from pagoda.tiers.memo import Memo


def test_both_answers_are_forgotten_after_a_while() -> None:
    clock = FakeClock()
    known = Memo(clock, present_seconds=2.0, absent_seconds=1.0)
    known.note([b"a"], True)
    known.note([b"b"], False)
    assert (known.get(b"a"), known.get(b"b"), known.get(b"c")) == (True, False, None)
    clock.advance(1.5)
    assert (known.get(b"a"), known.get(b"b")) == (True, None)
    clock.advance(1.0)
    assert known.get(b"a") is None


def test_the_latest_word_stands() -> None:
    known = Memo(FakeClock())
    known.note([b"a"], False)
    known.note([b"a"], True)
    assert known.get(b"a") is True
    known.forget()
    assert known.get(b"a") is None


def test_the_oldest_go_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "_MOST_KEYS", 4)
    known = Memo(FakeClock())
    known.note([b"%d" % n for n in range(5)], True)
    known.note([b"1"], True)
    known.note([b"9"], True)
    assert [known.get(b"%d" % n) for n in range(5)] == [None, True, None, True, True]
