"""What can be seen of a ledger, and whether its numbers add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagoda.errors import LedgerCorrupt
from pagoda.ledger import Ledger
from pagoda.ledger.tables import ENTRY, PLACE, SLOT_KEY
from pagoda.ledger.writing import Writing
from pagoda.metrics import COUNTERS, Reason
from pagoda.testing import FakeClock
from tests.ledger.support import OTHER, TENANT, keys, opened, places, put, reserved


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def ledger(shm_root: Path, clock: FakeClock) -> Iterator[Ledger]:
    opened_here = opened(shm_root, clock=clock)
    yield opened_here
    opened_here.close()


def test_a_row_tells_all_of_its_chunk(ledger: Ledger, clock: FakeClock) -> None:
    ledger.clear(TENANT)
    [_, stored] = put(ledger, keys(1, 2))
    ledger.pin(keys(2), "ann")
    ledger.match(keys(1, 2), lease_seconds=20)
    clock.advance(10)
    [row] = [row for row in ledger.rows() if row.key == keys(2)[0]]
    assert (row.slot, row.generation) == (stored.slot, stored.generation)
    assert (row.namespace_root, row.position, row.tokens) == (TENANT, 1, 16)
    assert (row.hits, row.leased, row.pinned) == (1, True, True)
    assert row.last_use_age_seconds == pytest.approx(10, abs=0.01)


def test_rows_come_in_pages_while_others_go_on(shm_root: Path) -> None:
    ledger = opened(shm_root, slots=1024)
    put(ledger, keys(*range(700)), chained=False)
    assert len({row.key for row in ledger.rows()}) == 700
    assert [len(list(ledger.rows(limit))) for limit in (0, 1, 256, 257, 1000)] == [0, 1, 256, 257, 700]
    walk = ledger.rows()
    first = [next(walk) for _ in range(10)]
    ledger.clear()
    assert len(first) + len(list(walk)) < 300
    ledger.close()


def test_pins_are_listed_by_their_owners(ledger: Ledger) -> None:
    put(ledger, keys(1, 2, 3))
    assert ledger.pin(keys(1, 2, 9), "ann") == 2 and ledger.pin(keys(2), "bob") == 1
    assert {who: set(pinned) for who, pinned in ledger.pins().items()} == {
        "ann": set(keys(1, 2)),
        "bob": set(keys(2)),
    }
    assert ledger.unpin(keys(1, 2), "bob") == 1 and ledger.unpin(None, "nobody") == 0
    assert ledger.unpin(None, "ann") == 2 and ledger.pins() == {}
    for owner in ("", "two\nlines"):
        with pytest.raises(ValueError, match="name"):
            ledger.pin(keys(1), owner)


def test_many_pins_are_bounded_and_counted(shm_root: Path) -> None:
    ledger = opened(shm_root, slots=1024)
    wanted = keys(*range(600))
    put(ledger, wanted, chained=False)
    assert ledger.pin(wanted, "ann") == 256
    assert ledger.counters()["drop_pin_limit"] == 344
    assert ledger.remove(wanted) == 600 and ledger.pins() == {}
    ledger.check()
    ledger.close()


def test_gauges_count_every_slot_once(ledger: Ledger) -> None:
    stored = put(ledger, keys(*range(10)))
    ledger.reserve(keys(20, 21), namespace=TENANT)
    ledger.lease(*places(stored[:3]), 5.0)
    ledger.pin(keys(0), "ann")
    assert ledger.gauges() == {
        "slots": 32, "free": 20, "reserved": 2, "ready": 10, "unscanned": 0, "unbacked": 0, "members": 1, "pinned": 1,
        "leased": 3,
    }  # fmt: skip


def test_leases_are_bounded(ledger: Ledger, clock: FakeClock) -> None:
    stored = put(ledger, keys(*range(32)), chained=False)
    ledger.lease(*places(stored), 10_000.0)
    assert ledger.gauges()["leased"] == 16
    clock.advance(59)
    ledger.lease(*places(stored[:16]), 1.0)
    assert ledger.gauges()["leased"] == 16
    clock.advance(2)
    assert ledger.gauges()["leased"] == 0


def test_a_lease_of_what_is_gone_keeps_nothing(ledger: Ledger) -> None:
    stored = put(ledger, keys(1))
    ledger.remove(keys(1))
    ledger.lease(*places(stored), 10.0)
    assert ledger.gauges()["leased"] == 0


def test_counters_are_the_fixed_vocabulary(ledger: Ledger) -> None:
    assert tuple(ledger.counters()) == COUNTERS
    put(ledger, keys(1, 2))
    ledger.remove(keys(1))
    ledger.count("hit_tokens", 512)
    counters = ledger.counters()
    assert (counters["stored_chunks"], counters["removed_chunks"], counters["hit_tokens"]) == (2, 1, 512)
    with pytest.raises(KeyError):
        ledger.count("no such counter")


@pytest.mark.parametrize("reason", [Reason.EVICTED, Reason.REMOVED, Reason.CLEARED, Reason.FAILED_CHECK])
def test_why_a_chunk_is_gone_and_since_when(ledger: Ledger, clock: FakeClock, reason: Reason) -> None:
    [one] = put(ledger, keys(1))
    if reason is Reason.EVICTED:
        put(ledger, keys(*range(100, 132)), chained=False)
    elif reason is Reason.REMOVED:
        ledger.remove(keys(1))
    elif reason is Reason.CLEARED:
        ledger.clear()
    else:
        assert ledger.drop(one.key, one.slot, one.generation, reason)
    clock.advance(30)
    miss = ledger.why(keys(1)[0])
    assert miss.reason is reason and miss.age_seconds == pytest.approx(30, abs=1)
    assert ledger.match(keys(1)).reason is reason
    assert ledger.why(keys(10**6)[0]) == (Reason.ABSENT, None)


def test_the_reason_of_a_match_is_that_of_the_first_key_not_in_the_run(ledger: Ledger) -> None:
    put(ledger, keys(1, 2, 3))
    ledger.remove(keys(2))
    ledger.reserve(keys(5), namespace=OTHER)
    assert ledger.match(keys(1, 2, 3)).reason is Reason.REMOVED
    assert ledger.match(keys(1, 5)).reason is Reason.BUSY
    assert ledger.match(keys(1)).reason is None
    assert ledger.match(keys(9, 1)).reason is Reason.ABSENT and not len(ledger.match(keys(9, 1)).slots)


# damage


def test_a_damaged_entry_is_a_miss_and_goes(ledger: Ledger) -> None:
    """LMDB has no checksums: a slot that does not exist, or that is another key's."""
    [one, two] = put(ledger, keys(1, 2))
    for slot, generation in ((10**6, one.generation), (two.slot, two.generation)):
        ledger._session.write(
            lambda w, _: w.txn.put(one.key, ENTRY.pack(slot, generation, 1, 0), db=w.tables.entries),  # noqa: B023
            1.0,
        )
        match = ledger.match([one.key])
        assert not len(match.slots) and match.reason is Reason.FAILED_CHECK
        assert not len(ledger.match([one.key]).slots)
        assert len(ledger.match(keys(2)).slots) == 1, "the chunk whose slot it named is none the worse"
        many = keys(*range(100, 108))
        put(ledger, many)
        assert len(ledger.match(many).slots) == 8


def _entry(writing: Writing) -> None:
    writing.txn.delete(keys(1)[0], db=writing.tables.entries)


def _slot(writing: Writing) -> None:
    slot, *_ = ENTRY.unpack(writing.get(writing.tables.entries, keys(1)[0]) or b"")
    writing.txn.delete(SLOT_KEY.pack(slot), db=writing.tables.slots)


def _free(writing: Writing) -> None:
    slot, *_ = ENTRY.unpack(writing.get(writing.tables.entries, keys(1)[0]) or b"")
    writing.txn.put(SLOT_KEY.pack(slot), b"", db=writing.tables.free)


def _ready(writing: Writing) -> None:
    writing.meta.ready += 1


def _reserved(writing: Writing) -> None:
    writing.meta.reserved += 1


def _pending(writing: Writing) -> None:
    writing.txn.put(keys(50)[0], PLACE.pack(3, 3), db=writing.tables.pending)


@pytest.mark.parametrize("harm", [_entry, _slot, _free, _ready, _reserved, _pending])
def test_what_does_not_add_up_is_found(ledger: Ledger, harm: Callable[[Writing], None]) -> None:
    put(ledger, keys(1, 2, 3))
    reserved(ledger.reserve(keys(9), namespace=TENANT))
    ledger.check()
    ledger._session.write(lambda w, _: harm(w), 1.0)
    with pytest.raises(LedgerCorrupt, match=r"\d"):
        ledger.check()


def test_wrong_hints_are_counted_and_not_judged(ledger: Ledger) -> None:
    stored = put(ledger, keys(*range(6)))
    ledger.columns.generation[stored[0].slot] = 0
    ledger.columns.parent_slot[stored[5].slot] = 10**9
    report = ledger.check()
    assert report.stale_hints == 1 and report.unreachable == 1 and report.gauges["ready"] == 6
