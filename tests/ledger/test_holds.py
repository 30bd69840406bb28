"""Held chunks: while a living member holds a slot, no other chunk gets it, even if its own chunk
was removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pagoda.base.clock import Clock
from pagoda.base.metrics import Reason
from pagoda.ledger import Ledger, Reserved, admin
from pagoda.ledger.lmdb_tables import HOLD, SLOT_KEY
from tests.children import in_child
from tests.ledger.support import (
    TENANT,
    Other,
    gauge,
    keys,
    places,
    present,
    put,
    put_alone,
    rooms_for,
)

SLOTS = 32


@pytest.fixture
def clock() -> Clock:
    """The machine's clock."""
    return Clock()


def held(ledger: Ledger, *numbers: int) -> list[Reserved]:
    """Store and hold chunks."""
    stored = put(ledger, keys(*numbers), chained=False)
    assert ledger.hold(*places(stored)) == [True] * len(stored)
    return stored


def handed_out(ledger: Ledger) -> set[int]:
    """Return all slots that other calls can reserve; abort the reservations."""
    got: set[int] = set()
    for at in range(1000, 1000 + 4 * SLOTS):
        rooms = rooms_for(ledger, keys(at))
        got |= {room.slot for room in rooms}
        ledger.commit(rooms)
    return got


def removed(ledger: Ledger, stored: Sequence[Reserved]) -> None:
    assert admin.remove(ledger, [one.key for one in stored]) == len(stored)


def cleared(ledger: Ledger, stored: Sequence[Reserved]) -> None:
    assert admin.clear(ledger, TENANT) >= len(stored)


def failed(ledger: Ledger, stored: Sequence[Reserved]) -> None:
    for one in stored:
        assert ledger.remove_exact(*one, Reason.FAILED_CHECK)


@pytest.mark.parametrize("end", [removed, cleared, failed])
def test_the_slot_of_a_chunk_that_goes_while_it_is_held_is_nobodys_until_the_release(
    ledger: Ledger, end: Callable[[Ledger, Sequence[Reserved]], None]
) -> None:
    stored = held(ledger, 1, 2, 3)
    slots = {one.slot for one in stored}
    in_child(lambda: end(ledger, stored))
    assert present(ledger, keys(1, 2, 3)) == [False] * 3
    assert not ledger.still_valid(*places(stored)).any()
    assert ledger.hold(*places(stored)) == [False] * 3
    assert gauge(ledger, "reserved") == 3
    assert admin.check(ledger)
    assert not slots & handed_out(ledger)
    assert not slots & {one.slot for one in put(ledger, keys(1, 2, 3))}, (
        "the keys are free at once"
    )
    ledger.release(*places(stored[:1]))
    assert gauge(ledger, "reserved") == 2
    assert admin.check(ledger)
    assert slots & handed_out(ledger) == {stored[0].slot}
    ledger.release(*places(stored[1:]))
    assert gauge(ledger, "reserved") == 0
    assert slots <= handed_out(ledger)


def test_the_last_of_several_holds_frees_the_slot(ledger: Ledger) -> None:
    stored = held(ledger, 1)
    with Other(lambda: _must(ledger.hold(*places(stored)) == [True])) as other:
        assert ledger.hold(*places(stored)) == [True]
        removed(ledger, stored)
        for _ in range(2):
            assert stored[0].slot not in handed_out(ledger)
            ledger.release(*places(stored))
        assert stored[0].slot not in handed_out(ledger), (
            "the other process holds it"
        )
        ledger.release(*places(stored))
        assert gauge(ledger, "reserved") == 1, (
            "a release without a hold does not end another process's hold"
        )
        other.end()
        assert admin.reap(ledger) == 1
        assert gauge(ledger, "reserved") == 0
        assert stored[0].slot in handed_out(ledger)


def test_each_hold_of_one_process_is_ended_by_itself(ledger: Ledger) -> None:
    stored = held(ledger, 1)
    assert ledger.hold(*places(stored)) == [True], "a second load of this process"
    removed(ledger, stored)
    ledger.release(*places(stored))
    assert gauge(ledger, "reserved") == 1, "the second load still reads it"
    ledger.release(*places(stored))
    assert gauge(ledger, "reserved") == 0


def test_a_chunk_that_has_taken_the_slot_since_is_not_held(
    ledger: Ledger,
) -> None:
    [before] = put(ledger, keys(1))
    removed(ledger, [before])
    after = put(ledger, keys(2))
    assert [one.slot for one in after] == [before.slot]
    assert ledger.hold(*places([before])) == [False]
    assert ledger.hold(*places(after)) == [True]


def test_a_holder_that_leaves_frees_what_it_held(
    shm_root: Path, ledger: Ledger
) -> None:
    stored = put(ledger, keys(1), chained=False)

    def hold_remove_leave() -> None:
        assert ledger.hold(*places(stored)) == [True]
        removed(ledger, stored)
        assert gauge(ledger, "reserved") == 1
        ledger.close()

    in_child(hold_remove_leave)
    assert gauge(ledger, "reserved") == 0


def test_a_dead_holder_keeps_nothing(ledger: Ledger) -> None:
    stored = put(ledger, keys(1), chained=False)
    with Other(lambda: _must(ledger.hold(*places(stored)) == [True])):
        pass
    removed(ledger, stored)
    assert gauge(ledger, "reserved") == 0


def test_the_holds_of_a_dead_member_leave_nothing_in_the_tables(
    ledger: Ledger,
) -> None:
    """Otherwise each process that dies would leave a row for every chunk that it was reading."""
    stored = put_alone(ledger, range(4))
    ledger.hold(*places(stored[:1]))
    with Other(lambda: _must(ledger.hold(*places(stored)) == [True] * 4)):
        pass
    admin.reap(ledger)
    held = ledger.session.read(
        lambda txn, t: [(row, len(value)) for row, value in t.rows(txn, t.holds)],
        5.0,
    )
    assert held == [(SLOT_KEY.pack(stored[0].slot), HOLD.size)]
    ledger.release(*places(stored[:1]))


def _must(true: bool) -> None:
    assert true
