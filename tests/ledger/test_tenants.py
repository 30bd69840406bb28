"""Thousands of tenants: each takes space only while it has chunks, and cleared chunks are never
found again.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from blake3 import blake3

from pagoda.base.errors import LedgerCorrupt
from pagoda.ledger import (
    Ledger,
    Reserved,
    ScannedChunk,
    StoreSpec,
    admin,
    clears_and_labels,
    rebuild,
)
from pagoda.ledger.clear_log import _SPARE, ClearLog
from pagoda.ledger.clears_and_labels import read_labels
from pagoda.ledger.lmdb_tables import NAMESPACE
from pagoda.ledger.store_state import Kind
from pagoda.testing import FakeClock
from tests.children import child, in_child, wait
from tests.ledger.support import (
    OTHER,
    TENANT,
    gate_taken,
    gauge,
    keys,
    opened,
    present,
    put,
    put_alone,
    reserved,
    small_store,
)

# more clears than one file holds before the other one is written
MANY = _SPARE + 200


def tenant(number: int) -> bytes:
    """Return the root of a tenant by number."""
    return blake3(b"tenant %d" % number).digest()


def header(stored: Reserved, namespace: bytes) -> ScannedChunk:
    """Return the contents of a chunk's header, as long as its slot is not written again."""
    return ScannedChunk(
        stored.key, namespace, stored.generation, 0, 16, stored.generation
    )


def after_a_power_cut(
    root: Path, headers: list[ScannedChunk], boot: str = "next"
) -> Ledger:
    """Return the store as after a power failure while it was open; the slab has these headers."""
    ledger = opened(root, clock=FakeClock(boot=boot), kind="file")
    assert len(rebuild.unscanned(ledger)) == ledger.slots
    found = [*headers, *[None] * (ledger.slots - len(headers))]
    for at in range(0, ledger.slots, 16):
        rebuild.absorb(ledger, at, found[at : at + 16])
    admin.check(ledger)
    return ledger


def sizes(ledger: Ledger) -> dict[str, int]:
    """Return the files of a store, except the one of labels, which has its own bound."""
    return {
        path.name: path.stat().st_size
        for path in ledger.directory.iterdir()
        if path.name != "namespaces"
    }


@pytest.fixture
def store_spec(shm_root: Path) -> StoreSpec:
    """A store on disk, as far as its ledger can see."""
    return small_store(shm_root, kind="file")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_any_number_of_tenants_may_come_and_go(
    shm_root: Path, kind: Kind
) -> None:
    ledger = opened(shm_root, kind=kind)
    begun = sizes(ledger)
    for number in range(5000):  # the earlier limit was 4,096
        ledger.namespaces.register(
            tenant(number), {"model": "m", "salt": f"{number}"}
        )
        put(ledger, keys(number), tenant(number), chained=False)
    rows = admin.list_namespaces(ledger)
    assert sum(row.chunks for row in rows.values()) == ledger.slots
    assert (
        len(rows)
        <= ledger.slots
        + ledger.session.read(lambda _, tables: tables).most_labels
    )
    admin.check(ledger)
    assert sizes(ledger) == begun
    ledger.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_any_number_of_tenants_may_be_cleared(shm_root: Path, kind: Kind) -> None:
    ledger = opened(shm_root, kind=kind)
    begun = sizes(ledger)
    for number in range(MANY):
        put(ledger, keys(number), tenant(number))
        assert admin.clear(ledger, tenant(number)) == 1
    for row in admin.list_namespaces(ledger).values():
        assert not row.chunks
    put(ledger, keys(*range(20)), tenant(MANY))
    admin.check(ledger)
    assert sizes(ledger) == begun
    ledger.close()


@pytest.mark.slow
def test_every_slot_may_be_another_tenants(shm_root: Path) -> None:
    ledger = opened(shm_root, slots=6000)
    for number in range(6000):
        ledger.namespaces.register(
            tenant(number), {"model": "m" * 300, "salt": f"{number}" * 100}
        )
        put(ledger, keys(number), tenant(number), chained=False)
    assert gauge(ledger, "ready") == 6000
    assert all(present(ledger, keys(*range(6000))))
    admin.check(ledger)
    assert admin.clear(ledger, tenant(77)) == 1
    assert admin.clear(ledger) == 5999
    ledger.close()


def test_a_tenant_that_gets_no_room_leaves_nothing(ledger: Ledger) -> None:
    put_alone(ledger, range(32))
    admin.pin(ledger, keys(*range(8)), "ann")
    match = ledger.match_prefix(keys(*range(32)))
    ledger.hold(match.slots, match.generations)
    held = [row.slot for row in admin.list_chunks(ledger)]
    for number in range(32):
        match = ledger.match_prefix(keys(number))
        ledger.hold(match.slots, match.generations)
    assert not reserved(ledger.reserve(keys(100), namespace=OTHER))
    assert len(held) == 32
    assert OTHER not in admin.list_namespaces(ledger)


def test_a_row_goes_with_the_last_chunk_or_reservation(ledger: Ledger) -> None:
    [room] = reserved(ledger.reserve(keys(1), namespace=OTHER))
    put(ledger, keys(2), OTHER)
    ledger.abort([room])
    assert admin.list_namespaces(ledger)[OTHER].chunks == 1
    admin.check(ledger)
    admin.remove(ledger, keys(2))
    assert OTHER not in admin.list_namespaces(ledger)


def test_counts_that_are_off_are_found(shm_root: Path) -> None:
    ledger = opened(shm_root)
    put(ledger, keys(1, 2))

    def miscount(transaction: object) -> None:
        for key, row in list(
            transaction.tables.rows(
                transaction.txn, transaction.tables.namespaces
            )
        ):  # type: ignore[attr-defined]
            root, line, chunks, reservations = NAMESPACE.unpack(row)
            wrong = NAMESPACE.pack(root, line, chunks + 1, reservations)
            transaction.txn.put(key, wrong, db=transaction.tables.namespaces)  # type: ignore[attr-defined]

    ledger.session.write(miscount, 1.0)
    with pytest.raises(LedgerCorrupt, match="its row says"):
        admin.check(ledger)
    ledger.close()


# chunks that must never be found again


@pytest.mark.slow
def test_what_was_cleared_stays_away_when_its_tenant_is_forgotten(
    shm_root: Path,
) -> None:
    """More tenants are cleared than have single records; some of them return, and others are
    new.
    """

    def before() -> None:
        ledger = opened(shm_root, clock=FakeClock(), kind="file")
        [kept] = put(ledger, keys(1), OTHER)  # never cleared, and older than all
        [doomed] = put(ledger, keys(2), tenant(0))
        admin.clear(ledger, tenant(0))
        for number in range(1, MANY):
            admin.clear(ledger, tenant(number))
        lines = ClearLog(ledger.directory).read()
        assert (
            lines is not None and tenant(0) not in lines.of and OTHER in lines.of
        ), "a new file was written"
        [back] = put(ledger, keys(3), tenant(0))
        [evicted] = put(ledger, keys(4), tenant(5))
        admin.remove(ledger, keys(4))
        admin.clear(ledger, tenant(5))
        (shm_root / "headers").write_text(
            repr([tuple(one) for one in (kept, doomed, back, evicted)])
        )
        os.kill(os.getpid(), 9)

    assert wait(child(before)) == -9
    kept, doomed, back, evicted = (
        Reserved(*one) for one in eval((shm_root / "headers").read_text())
    )
    headers = [
        header(kept, OTHER),
        header(doomed, tenant(0)),
        header(back, tenant(0)),
        header(evicted, tenant(5)),
    ]
    ledger = after_a_power_cut(shm_root, headers)
    assert present(ledger, keys(1, 2, 3, 4)) == [True, False, True, False]
    admin.clear(ledger, OTHER)
    ledger.close()


def test_a_clear_of_everything_stays_in_force_with_others_after_it(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root, clock=FakeClock(), kind="file")
    [one], [two] = put(ledger, keys(1), TENANT), put(ledger, keys(2), OTHER)
    admin.clear(ledger)
    [new] = put(ledger, keys(3), OTHER)
    admin.clear(ledger, TENANT)
    ledger.namespaces._clear_log.replace(ledger.namespaces._watermarks())
    ledger.close()
    (shm_root / "store" / "data.mdb").unlink()
    again = after_a_power_cut(
        shm_root, [header(one, TENANT), header(two, OTHER), header(new, OTHER)]
    )
    assert present(again, keys(1, 2, 3)) == [False, False, True]
    again.close()


def test_a_tenant_that_comes_back_is_listed_with_a_line_of_its_own(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root, clock=FakeClock(), kind="file")
    [old] = put(ledger, keys(1), OTHER)
    admin.clear(ledger, OTHER)
    [new] = put(ledger, keys(2), OTHER)
    put(ledger, keys(3))  # a new file begins with a floor above that
    ledger.namespaces._clear_log.replace(ledger.namespaces._watermarks())
    ledger.close()
    (shm_root / "store" / "data.mdb").unlink()
    again = after_a_power_cut(shm_root, [header(old, OTHER), header(new, OTHER)])
    assert present(again, keys(1, 2)) == [False, True]
    again.close()


def test_a_clear_that_is_written_late_brings_nothing_back(shm_root: Path) -> None:
    """Between the two steps of a clear of one tenant, another process clears everything."""
    ledger = opened(shm_root, clock=FakeClock(), kind="file")
    ledger.session.write(lambda w: clears_and_labels.clear(w, OTHER), 1.0)
    [stored] = put(ledger, keys(1), OTHER)
    assert reserved(ledger.reserve(keys(2), namespace=OTHER)), "its row stays"
    admin.clear(ledger)
    ledger.namespaces.save_clear(OTHER)
    ledger.close()
    (shm_root / "store" / "data.mdb").unlink()
    again = after_a_power_cut(shm_root, [header(stored, OTHER)])
    assert present(again, keys(1)) == [False]
    again.close()


@pytest.mark.slow
def test_several_processes_clear_at_once(shm_root: Path) -> None:
    """Each process has separate tenants, more than a file holds, and one that it never clears."""

    def work(which: int) -> None:
        ledger = opened(shm_root, clock=FakeClock(), kind="file")
        headers = [(0, *put(ledger, keys(which), tenant(10_000 * which)))]
        for number in range(1, MANY):
            name = 10_000 * which + number
            if number % 100 == 0:
                headers.append((number, *put(ledger, keys(name), tenant(name))))
            admin.clear(ledger, tenant(name))
        text = repr([(number, tuple(stored)) for number, stored in headers])
        (shm_root / f"headers-{which}").write_text(text)
        os.kill(os.getpid(), 9)

    first = opened(shm_root, clock=FakeClock(), kind="file")
    workers = [child(lambda which=which: work(which)) for which in (1, 2, 3)]  # type: ignore[misc]
    assert [wait(pid) for pid in workers] == [-9] * 3
    headers = [
        header(Reserved(*stored), tenant(10_000 * which + number))
        for which in (1, 2, 3)
        for number, stored in eval((shm_root / f"headers-{which}").read_text())
    ]
    admin.check(first)
    first.close()
    (shm_root / "store" / "data.mdb").unlink()
    again = after_a_power_cut(shm_root, headers[:32])
    assert {row.namespace_root for row in admin.list_chunks(again)} <= {
        tenant(10_000 * which) for which in (1, 2, 3)
    }
    assert present(again, keys(1)) == [True]
    again.close()


@pytest.mark.parametrize("damage", ["head", "record", "both"])
def test_damaged_files_of_clears_bring_nothing_back(
    shm_root: Path, damage: str
) -> None:
    ledger = opened(shm_root, clock=FakeClock(), kind="file")
    [one] = put(ledger, keys(1))
    admin.clear(ledger, TENANT)
    ledger.namespaces._clear_log.replace(ledger.namespaces._watermarks())
    [two] = put(ledger, keys(2))
    for number in range(5):
        admin.clear(ledger, tenant(number))
    ledger.close()
    (shm_root / "store" / "data.mdb").unlink()
    for path in (shm_root / "store").glob("clears-*"):
        content = bytearray(path.read_bytes())
        if damage in ("head", "both"):
            content[20:24] = b"oops"
        if damage in ("record", "both"):
            content[48 + 20 : 48 + 24] = b"oops"
        path.write_bytes(content)
    again = after_a_power_cut(
        shm_root, [header(one, TENANT), header(two, TENANT)]
    )
    assert present(again, keys(1)) == [False]
    [new] = put(again, keys(3))
    again.close()
    (shm_root / "store" / "data.mdb").unlink()
    last = after_a_power_cut(shm_root, [header(one, TENANT), header(new, TENANT)])
    assert present(last, keys(1, 3)) == [False, True]
    last.close()


def test_a_torn_record_is_none(shm_root: Path) -> None:
    """The power failed in the middle of a clear, which did not return: earlier clears remain
    valid.
    """
    ledger = opened(shm_root, clock=FakeClock(), kind="file")
    [one], [two] = put(ledger, keys(1)), put(ledger, keys(2), OTHER)
    admin.clear(ledger, TENANT)
    ledger.close()
    [path] = [
        path
        for path in (shm_root / "store").glob("clears-*")
        if any(path.read_bytes())
    ]
    content = bytearray(path.read_bytes())
    content[2 * 48 : 2 * 48 + 30] = content[48 : 48 + 30]
    path.write_bytes(content)
    (shm_root / "store" / "data.mdb").unlink()
    again = after_a_power_cut(shm_root, [header(one, TENANT), header(two, OTHER)])
    assert present(again, keys(1, 2)) == [False, True]
    again.close()


# names


def test_names_are_bounded_in_length_and_number(shm_root: Path) -> None:
    ledger = opened(shm_root, kind="file")
    put(ledger, keys(1))
    most = ledger.session.read(lambda _, tables: tables).most_labels
    for number in range(3 * most):
        fields = {
            "model": "m" * 400,
            "lora": f"{number:05d}" + "/a/path/to/an/adapter" * 40,
        }
        ledger.namespaces.register(tenant(number), fields)
        if number % 50 == 0:
            ledger.namespaces.write_labels()
    rows = admin.list_namespaces(ledger)
    assert len(rows) <= most
    assert rows[TENANT].fields == {"model": "test"}
    cut = next(row.fields for row in rows.values() if "lora" in row.fields)
    assert cut["model"].startswith("mmm")
    assert cut["lora"].endswith("/adapter")
    assert len(str(cut)) < 1024
    put(ledger, keys(*range(2, 30)))
    ledger.close()
    assert (shm_root / "store" / "namespaces").stat().st_size < most * 1200


def test_a_name_is_registered_without_a_transaction_of_its_own(
    ledger: Ledger,
) -> None:
    with gate_taken(ledger):
        for number in range(100):
            # waits for no lock
            ledger.namespaces.register(tenant(number), {"model": f"{number}"})
    put(ledger, keys(1))  # writes them in its own transaction
    in_child(lambda: _knows(ledger.directory, 100))


def _knows(directory: Path, count: int) -> None:
    known = admin.list_namespaces(Ledger.attach(directory, clock=FakeClock()))
    for number in range(count):
        assert known[tenant(number)].fields == {"model": f"{number}"}


def test_a_flood_of_names_loses_none_that_is_registered_again(
    ledger: Ledger,
) -> None:
    for _ in range(3):
        for number in range(600):
            ledger.namespaces.register(tenant(number), {"model": f"{number}"})
        ledger.namespaces.write_labels()
    rows = admin.list_namespaces(ledger)
    most = ledger.session.read(lambda _, tables: tables).most_labels
    assert (
        sum(tenant(number) in rows for number in range(600)) >= min(600, most) - 1
    )


def test_names_outlive_the_tables_when_they_were_saved(shm_root: Path) -> None:
    def before() -> None:
        ledger = opened(shm_root, clock=FakeClock(), kind="file")
        ledger.namespaces.register(OTHER, {"model": "b"})
        ledger.namespaces.save_labels()
        os.kill(os.getpid(), 9)

    assert wait(child(before)) == -9
    assert read_labels(shm_root / "store")[OTHER].fields == {"model": "b"}
    again = after_a_power_cut(shm_root, [])
    assert admin.list_namespaces(again)[OTHER].fields == {"model": "b"}
    again.close()
