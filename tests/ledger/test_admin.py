"""Queries of a ledger's contents, and the checks of its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagoda.base.errors import LedgerCorrupt, StoreError
from pagoda.base.metrics import COUNTERS, Reason
from pagoda.ledger import Ledger, admin
from pagoda.ledger.lmdb_tables import ENTRY, PLACE, SLOT_KEY, Tables, Txn
from pagoda.ledger.store_stats import StoreStats
from pagoda.ledger.stores_under_root import allocated_bytes
from pagoda.ledger.transaction import Transaction
from pagoda.testing import FakeClock
from tests.children import in_child
from tests.faults.support import open_files_left
from tests.ledger.support import (
    OTHER,
    TENANT,
    gauge,
    keys,
    matched,
    opened,
    places,
    put,
    put_alone,
    reserved,
    spec,
)


def test_a_row_describes_its_chunk(ledger: Ledger, clock: FakeClock) -> None:
    admin.clear(ledger, TENANT)
    [_, stored] = put(ledger, keys(1, 2))
    admin.pin(ledger, keys(2), "ann")
    ledger.match_prefix(keys(1, 2), lease_seconds=20)
    clock.advance(10)
    [row] = [row for row in admin.list_chunks(ledger) if row.key == keys(2)[0]]
    assert row.slot == stored.slot
    assert row.generation == stored.generation
    assert row.namespace_root == TENANT
    assert row.position == 1
    assert row.tokens == 16
    assert row.hits == 1
    assert row.leased is True
    assert row.pinned is True
    assert row.last_use_age_seconds == pytest.approx(10, abs=0.01)


def test_rows_come_in_pages_while_others_go_on(shm_root: Path) -> None:
    ledger = opened(shm_root, slots=1024)
    put_alone(ledger, range(700))
    assert len({row.key for row in admin.list_chunks(ledger)}) == 700
    assert [
        len(list(admin.list_chunks(ledger, limit)))
        for limit in (0, 1, 256, 257, 1000)
    ] == [
        0,
        1,
        256,
        257,
        700,
    ]
    walk = admin.list_chunks(ledger)
    first = [next(walk) for _ in range(10)]
    admin.clear(ledger)
    assert len(first) + len(list(walk)) < 300
    ledger.close()


def test_pins_are_listed_by_their_owners(ledger: Ledger) -> None:
    put(ledger, keys(1, 2, 3))
    assert admin.pin(ledger, keys(1, 2, 9), "ann") == 2
    assert admin.pin(ledger, keys(2), "bob") == 1
    assert {
        who: set(pinned) for who, pinned in admin.list_pins(ledger).items()
    } == {
        "ann": set(keys(1, 2)),
        "bob": set(keys(2)),
    }
    assert admin.unpin(ledger, keys(1, 2), "bob") == 1
    assert admin.unpin(ledger, None, "nobody") == 0
    assert admin.unpin(ledger, None, "ann") == 2
    assert admin.list_pins(ledger) == {}
    for owner in ("", "two\nlines"):
        with pytest.raises(ValueError, match="name"):
            admin.pin(ledger, keys(1), owner)


def test_an_unpin_ends_the_pins_of_the_chunks_that_it_names(
    ledger: Ledger,
) -> None:
    put(ledger, keys(1, 2))
    admin.pin(ledger, keys(1, 2), "ann")
    assert admin.unpin(ledger, keys(1), "ann") == 1
    assert admin.list_pins(ledger) == {"ann": keys(2)}
    assert admin.unpin(ledger, None, "ann") == 1
    assert admin.list_pins(ledger) == {}


@pytest.mark.slow
def test_no_call_about_many_pins_holds_the_gate_for_all_of_them(
    shm_root: Path,
) -> None:
    ledger = Ledger.open(spec(shm_root, 36_000, slot_bytes=0))
    many = keys(*range(9_000))
    put(ledger, many)
    for owner, part in (("ann", many[:6_000]), ("bob", many[3_000:])):
        assert admin.pin(ledger, part, owner) == 6_000
    rows: list[int] = []  # of the table of pins that each transaction read
    walk = Tables.rows

    def counted(
        tables: Tables, txn: Txn, table: object, start: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        rows.append(0)
        for row in walk(tables, txn, table, start):  # type: ignore[arg-type]
            rows[-1] += table is tables.pins
            yield row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tables, "rows", counted)
        assert StoreStats.of(ledger).pins == {"ann": 6_000, "bob": 6_000}
        assert admin.unpin(ledger, many[:4_000], "ann") == 4_000
        assert admin.unpin(ledger, None, "bob") == 6_000
        assert {
            owner: sorted(pinned)
            for owner, pinned in admin.list_pins(ledger).items()
        } == {"ann": sorted(many[4_000:6_000])}
    assert 0 < max(rows) <= 5_000
    ledger.close()


def test_many_pins_are_bounded_and_counted(shm_root: Path) -> None:
    ledger = opened(shm_root, slots=1024)
    wanted = keys(*range(600))
    put(ledger, wanted, chained=False)
    assert admin.pin(ledger, wanted, "ann") == 256
    assert admin.counters(ledger)["drop_pin_limit"] == 344
    assert admin.remove(ledger, wanted) == 600
    assert admin.list_pins(ledger) == {}
    admin.check(ledger)
    ledger.close()


def test_gauges_count_every_slot_once(ledger: Ledger) -> None:
    stored = put(ledger, keys(*range(10)))
    ledger.reserve(keys(20, 21), namespace=TENANT)
    ledger.lease(*places(stored[:3]), 5.0)
    admin.pin(ledger, keys(0), "ann")
    gauges = admin.gauges(ledger)
    sizes = ledger.session.store.state.sizes()
    assert gauges.pop("most_bytes") == sum(sizes.values())
    assert gauges.pop("allocated_bytes") >= 32 * ledger.slot_bytes
    assert gauges == {
        "slots": 32,
        "free": 20,
        "reserved": 2,
        "ready": 10,
        "unscanned": 0,
        "unbacked": 0,
        "members": 1,
        "pinned": 1,
        "leased": 3,
        "hint_bytes": 0,
        "locked_bytes": 0,
    }


def test_leases_are_bounded(ledger: Ledger, clock: FakeClock) -> None:
    stored = put_alone(ledger, range(32))
    ledger.lease(*places(stored), 10_000.0)
    assert gauge(ledger, "leased") == 16
    clock.advance(59)
    ledger.lease(*places(stored[:16]), 1.0)
    assert gauge(ledger, "leased") == 16
    clock.advance(2)
    assert gauge(ledger, "leased") == 0


def test_a_lease_of_what_is_gone_keeps_nothing(ledger: Ledger) -> None:
    stored = put(ledger, keys(1))
    admin.remove(ledger, keys(1))
    ledger.lease(*places(stored), 10.0)
    assert gauge(ledger, "leased") == 0


def test_a_lease_ends_with_its_chunk(ledger: Ledger) -> None:
    stored = put(ledger, keys(*range(4)))
    ledger.lease(*places(stored), 30.0)
    admin.remove(ledger, keys(*range(4)))
    assert gauge(ledger, "leased") == 0
    again = put(ledger, keys(*range(10, 14)))
    assert {one.slot for one in again} == {one.slot for one in stored}
    assert gauge(ledger, "leased") == 0, (
        "what comes after it can be evicted at once"
    )


def test_counters_are_the_fixed_vocabulary(ledger: Ledger) -> None:
    assert tuple(admin.counters(ledger)) == COUNTERS
    put(ledger, keys(1, 2))
    admin.remove(ledger, keys(1))
    ledger.count({"hit_tokens": 512})
    counters = admin.counters(ledger)
    assert counters["stored_chunks"] == 2
    assert counters["removed_chunks"] == 1
    assert counters["hit_tokens"] == 512
    with pytest.raises(KeyError):
        ledger.count({"no such counter": 1})


@pytest.mark.parametrize(
    "reason",
    [Reason.EVICTED, Reason.REMOVED, Reason.CLEARED, Reason.FAILED_CHECK],
)
def test_why_a_chunk_is_gone_and_since_when(
    ledger: Ledger, clock: FakeClock, reason: Reason
) -> None:
    [one] = put(ledger, keys(1))
    if reason is Reason.EVICTED:
        put_alone(ledger, range(100, 132))
    elif reason is Reason.REMOVED:
        admin.remove(ledger, keys(1))
    elif reason is Reason.CLEARED:
        admin.clear(ledger)
    else:
        assert ledger.remove_exact(one.key, one.slot, one.generation, reason)
    clock.advance(30)
    miss = ledger.explain_miss(keys(1)[0])
    assert miss.reason is reason
    assert miss.age_seconds == pytest.approx(30, abs=1)
    assert ledger.match_prefix(keys(1)).reason is reason
    assert ledger.explain_miss(keys(10**6)[0]) == (Reason.ABSENT, None)


def test_the_reason_of_a_match_is_that_of_the_first_key_not_in_the_run(
    ledger: Ledger,
) -> None:
    put(ledger, keys(1, 2, 3))
    admin.remove(ledger, keys(2))
    ledger.reserve(keys(5), namespace=OTHER)
    assert ledger.match_prefix(keys(1, 2, 3)).reason is Reason.REMOVED
    assert ledger.match_prefix(keys(1, 5)).reason is Reason.BUSY
    assert ledger.match_prefix(keys(1)).reason is None
    assert ledger.match_prefix(keys(9, 1)).reason is Reason.ABSENT
    assert not matched(ledger, keys(9, 1))


# damage


def test_a_damaged_entry_is_a_miss_and_goes(unchecked_ledger: Ledger) -> None:
    """LMDB has no checksums: an entry may name a slot that does not exist, or the slot of another
    key.
    """
    [one, two] = put(unchecked_ledger, keys(1, 2))
    for slot, generation in ((10**6, one.generation), (two.slot, two.generation)):
        entry = ENTRY.pack(slot, generation, 1, 0)
        unchecked_ledger.session.write(
            lambda w, entry=entry: w.txn.put(one.key, entry, db=w.tables.entries),
            1.0,
        )  # type: ignore[misc]
        match = unchecked_ledger.match_prefix([one.key])
        assert not len(match.slots)
        assert match.reason is Reason.FAILED_CHECK
        assert not len(unchecked_ledger.match_prefix([one.key]).slots)
        assert len(unchecked_ledger.match_prefix(keys(2)).slots) == 1, (
            "the chunk in the named slot is not affected"
        )
        many = keys(*range(100, 108))
        put(unchecked_ledger, many)
        assert len(unchecked_ledger.match_prefix(many).slots) == 8


@pytest.mark.parametrize("length", [12, 40], ids=["one by one", "at once"])
@pytest.mark.parametrize("beyond", [0, 1, 10**6])
def test_an_entry_of_a_long_run_names_a_slot_that_does_not_exist(
    unchecked_ledger: Ledger, beyond: int, length: int
) -> None:
    run = keys(*range(length))
    stored = put(unchecked_ledger, run)[9]
    entry = ENTRY.pack(unchecked_ledger.slots + beyond, stored.generation, 1, 9)
    unchecked_ledger.session.write(
        lambda w: w.txn.put(stored.key, entry, db=w.tables.entries), 1.0
    )
    match = unchecked_ledger.match_prefix(run)
    assert len(match.slots) == 9
    assert match.reason is Reason.FAILED_CHECK


def _entry(transaction: Transaction) -> None:
    transaction.txn.delete(keys(1)[0], db=transaction.tables.entries)


def _slot(transaction: Transaction) -> None:
    slot, *_ = ENTRY.unpack(
        transaction.get(keys(1)[0], db=transaction.tables.entries) or b""
    )
    transaction.txn.delete(SLOT_KEY.pack(slot), db=transaction.tables.slots)


def _free(transaction: Transaction) -> None:
    slot, *_ = ENTRY.unpack(
        transaction.get(keys(1)[0], db=transaction.tables.entries) or b""
    )
    transaction.txn.put(SLOT_KEY.pack(slot), b"", db=transaction.tables.free)


def _ready(transaction: Transaction) -> None:
    transaction.meta.ready += 1


def _reserved(transaction: Transaction) -> None:
    transaction.meta.reserved += 1


def _pending(transaction: Transaction) -> None:
    transaction.txn.put(
        keys(50)[0], PLACE.pack(3, 3), db=transaction.tables.pending
    )


@pytest.mark.parametrize(
    "harm", [_entry, _slot, _free, _ready, _reserved, _pending]
)
def test_what_does_not_add_up_is_found(
    unchecked_ledger: Ledger, harm: Callable[[Transaction], None]
) -> None:
    put(unchecked_ledger, keys(1, 2, 3))
    reserved(unchecked_ledger.reserve(keys(9), namespace=TENANT))
    admin.check(unchecked_ledger)
    unchecked_ledger.session.write(lambda w: harm(w), 1.0)
    with pytest.raises(LedgerCorrupt, match=r"\d"):
        admin.check(unchecked_ledger)


def test_wrong_hints_are_counted_and_not_judged(ledger: Ledger) -> None:
    stored = put(ledger, keys(*range(6)))
    ledger.columns.generation[stored[0].slot] = 0
    ledger.columns.parent_slot[stored[5].slot] = 10**9
    report = admin.check(ledger)
    assert report.stale_hints == 1
    assert report.unreachable == 1
    assert report.gauges["ready"] == 6


def test_leases_are_counted_outside_the_gate(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = ledger.columns
    inside: list[bool] = []

    class Watched:
        @property
        def lease_until(self) -> object:
            inside.append(ledger.session.gate.entered())
            return columns.lease_until

    with (
        monkeypatch.context() as watching
    ):  # the fixture checks the ledger afterwards
        watching.setattr(ledger, "columns", Watched())
        assert admin.numbers(ledger)["leased"] == gauge(ledger, "leased")
    assert inside == [False, False]


@pytest.mark.parametrize("call", [admin.gauges, admin.numbers, admin.check])
def test_without_a_free_file_descriptor_it_is_an_error_of_the_store(
    ledger: Ledger, call: Callable[[Ledger], object]
) -> None:
    def work() -> None:
        call(ledger)
        with (
            open_files_left(0),
            pytest.raises(StoreError, match="cannot be read"),
        ):
            call(ledger)
        call(ledger)

    in_child(work)  # which has no other threads


def test_a_file_that_vanishes_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(bytes(8192))
    listed = list(tmp_path.iterdir())
    least = sum(file.stat().st_blocks * 512 for file in listed) * 2 // 3
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(listed))
    listed[0].unlink()
    assert allocated_bytes(tmp_path) == least
