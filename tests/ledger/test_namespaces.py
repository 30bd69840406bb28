"""Namespaces: their rows and labels, what a clear removes, and what a rebuild restores."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pagoda.base.clock import Clock
from pagoda.base.errors import StoreError
from pagoda.ledger import (
    Ledger,
    Reserved,
    ScannedChunk,
    StoreSpec,
    admin,
    clears_and_labels,
    hold_pin_remove,
    rebuild,
    session,
)
from pagoda.ledger.clears_and_labels import read_labels
from pagoda.ledger.store_state import NAMESPACES
from testbed.patience import Patience
from tests.ledger.support import (
    OTHER,
    TENANT,
    gate_taken,
    keys,
    opened,
    present,
    put,
    put_alone,
    reserved,
    small_store,
)

LATER = 1 << 60  # a generation after every line


@pytest.fixture
def clock() -> Clock:
    """The machine's clock."""
    return Clock()


@pytest.fixture
def store_spec(tmp_path: Path) -> StoreSpec:
    """A store on disk."""
    return small_store(tmp_path, kind="file")


def rebuilt(root: Path, slots: int = 32) -> Ledger:
    """Open the store at `root` after its tables were lost."""
    (root / "store" / "data.mdb").unlink()
    ledger = opened(root, slots, kind="file")
    assert rebuild.unscanned(ledger) == range(slots)
    return ledger


def test_labels_are_kept_and_never_lost_to_empty_ones(ledger: Ledger) -> None:
    ledger.namespaces.register(OTHER, {"model": "b", "lora": "x"})
    ledger.reserve(keys(1), namespace=OTHER)
    ledger.namespaces.register(OTHER, {})
    row = admin.list_namespaces(ledger)[OTHER]
    assert row.fields == {"model": "b", "lora": "x"}
    assert row.chunks == 0
    ledger.namespaces.save_labels()
    assert read_labels(ledger.directory)[OTHER].fields == row.fields


def test_a_namespace_nobody_registered_is_known_by_its_chunks(
    ledger: Ledger,
) -> None:
    put(ledger, keys(1, 2), OTHER)
    assert admin.list_namespaces(ledger)[OTHER].chunks == 2
    assert admin.list_namespaces(ledger)[OTHER].fields == {}


def test_a_clear_is_one_tenants_own(ledger: Ledger) -> None:
    put(ledger, keys(*range(5)))
    put(ledger, keys(*range(10, 13)), OTHER)
    assert admin.clear(ledger, OTHER) == 3
    assert admin.clear(ledger, OTHER) == 0
    assert all(present(ledger, keys(*range(5))))
    assert admin.clear(ledger) == 5
    assert admin.clear(ledger) == 0


def test_what_is_stored_after_a_clear_of_nothing_stays(ledger: Ledger) -> None:
    assert admin.clear(ledger, OTHER) == 0
    put(ledger, keys(1), OTHER)
    assert present(ledger, keys(1)) == [True]


def test_what_is_stored_after_a_clear_stays(ledger: Ledger) -> None:
    put(ledger, keys(1))
    old = reserved(ledger.reserve(keys(2), namespace=TENANT))
    admin.clear(ledger, TENANT)
    [new] = put(ledger, keys(1))
    assert ledger.commit(old) == [False]
    assert present(ledger, keys(1, 2)) == [True, False]
    assert new.generation > 0


def test_what_is_stored_while_a_clear_removes_stays(ledger: Ledger) -> None:
    """A clear first sets its watermark, and removes the chunks a few at a time."""
    put(ledger, keys(1, 2))
    pending, chunks = ledger.session.write(
        lambda w: clears_and_labels.clear(w, TENANT)
    )
    assert chunks == 2
    [first] = reserved(ledger.reserve(keys(3), namespace=TENANT))
    assert first.generation == pending.watermark
    assert ledger.commit([first]) == [True]
    dropped = hold_pin_remove.drop_cleared
    slots = list(range(ledger.slots))
    assert ledger.session.write(lambda w: dropped(w, slots, pending)) == 2
    assert present(ledger, keys(1, 2, 3)) == [False, False, True]


def test_a_clear_that_cannot_be_written_down_removes_what_is_there(
    ledger: Ledger,
) -> None:
    put(ledger, keys(1, 2))
    for file in ledger.directory.glob("clears-*"):
        file.unlink()
        file.mkdir()
    with pytest.raises(StoreError, match="a power cut may bring it back"):
        admin.clear(ledger)
    assert present(ledger, keys(1, 2)) == [False, False]


def test_a_list_of_namespaces_takes_no_longer_than_its_deadline(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables are read within what is left of it, however often another process keeps the
    gate.
    """
    put(ledger, keys(1))
    ledger.namespaces.write_labels(5.0)
    monkeypatch.setattr(session, "PATIENT_SECONDS", 600.0)
    with gate_taken(ledger):
        patience = Patience(3)
        with pytest.raises(StoreError):
            list(ledger.namespaces.counts(patience.began + 0.2))
        assert not patience.ended, patience.said()


def header(stored: Reserved, namespace: bytes = TENANT) -> ScannedChunk:
    """Return the contents of a chunk's header, as long as its slot is not written again."""
    return ScannedChunk(
        stored.key, namespace, stored.generation, 0, 16, stored.generation
    )


def test_a_rebuild_knows_labels_and_what_was_cleared(tmp_path: Path) -> None:
    ledger = opened(tmp_path, kind="file")
    ledger.namespaces.register(OTHER, {"model": "b"})
    [mine], [old] = put(ledger, keys(1)), put(ledger, keys(2), OTHER)
    admin.clear(ledger, OTHER)
    [new] = put(ledger, keys(3), OTHER)
    ledger.close()
    again = rebuilt(tmp_path)
    rebuild.absorb(
        again, 0, [header(mine), header(old, OTHER), header(new, OTHER)]
    )
    assert present(again, keys(1, 2, 3)) == [True, False, True]
    assert admin.list_namespaces(again)[OTHER] == (OTHER, {"model": "b"}, 1)
    rebuild.absorb(again, 3, [None] * 29)
    admin.check(again)
    again.close()


@pytest.mark.parametrize("everything", [False, True])
def test_a_clear_in_the_middle_of_a_scan_takes_what_is_found_after_it(
    tmp_path: Path, everything: bool
) -> None:
    ledger = opened(tmp_path, kind="file")
    first, second = put(ledger, keys(1, 2))
    [other] = put(ledger, keys(3), OTHER)
    ledger.close()
    again = rebuilt(tmp_path)
    rebuild.absorb(again, 0, [header(first)])
    assert admin.clear(again, None if everything else TENANT) == 1
    [new] = put(again, keys(4), chained=False)
    rebuild.absorb(
        again, rebuild.unscanned(again)[0], [header(second), header(other, OTHER)]
    )
    assert present(again, keys(1, 2, 3, 4)) == [
        False,
        False,
        not everything,
        True,
    ]
    again.close()
    # and once more, before the first scan has ended
    (tmp_path / "store" / "data.mdb").unlink()
    last = opened(tmp_path, kind="file")
    rebuild.absorb(
        last,
        0,
        [header(first), header(second), header(other, OTHER), header(new)],
    )
    assert present(last, keys(1, 2, 3, 4)) == [False, False, not everything, True]
    last.close()


def test_what_is_stored_during_a_scan_takes_nothing_from_what_the_scan_finds(
    tmp_path: Path,
) -> None:
    ledger = opened(tmp_path, kind="file")
    first, second = put(ledger, keys(1, 2))
    ledger.close()
    again = rebuilt(tmp_path)
    rebuild.absorb(again, 0, [None])
    put(again, keys(3), chained=False)  # makes the row of the namespace
    rebuild.absorb(again, 1, [header(first), header(second)])
    assert present(again, keys(1, 2, 3)) == [True, True, True]
    again.close()


def test_a_store_of_an_older_version_knows_what_was_cleared_by_numbers(
    tmp_path: Path,
) -> None:
    """That version counted the clears of each namespace in the file of labels, and wrote the number
    into headers.
    """
    opened(tmp_path, kind="file").close()
    for path in (tmp_path / "store").glob("clears-*"):
        path.unlink()
    old = {
        OTHER.hex(): {"fields": {"model": "b"}, "epoch": 2},
        TENANT.hex(): {"fields": {}, "epoch": 0},
    }
    (tmp_path / "store" / NAMESPACES).write_bytes(msgspec.json.encode(old))
    # its contents are kept, even after the file no longer has them
    for turn in range(2):
        again = rebuilt(tmp_path)
        rebuild.absorb(
            again,
            0,
            [ScannedChunk(keys(n)[0], OTHER, n, 0, 16, 5 + n) for n in range(4)],
        )
        rebuild.absorb(again, 4, [ScannedChunk(keys(9)[0], TENANT, 0, 0, 16, 5)])
        assert present(again, keys(0, 1, 2, 3, 9)) == [
            False,
            False,
            True,
            True,
            True,
        ], turn
        assert admin.list_namespaces(again)[OTHER].fields == {"model": "b"}
        if turn:
            assert admin.clear(again, OTHER) == 2
            assert present(again, keys(2, 3, 9)) == [False, False, True]
        again.close()


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[1, 2]", b'{"zz": {"fields": {}, "epoch": 1}}']
)
def test_a_damaged_file_of_labels_keeps_nobody_from_opening(
    tmp_path: Path, damage: bytes
) -> None:
    opened(tmp_path, kind="file").close()
    (tmp_path / "store" / NAMESPACES).write_bytes(damage)
    again = opened(tmp_path, kind="file")
    put(again, keys(1))
    admin.clear(again)
    again.close()


# absorbing


def test_slots_are_absorbed_in_their_order(tmp_path: Path) -> None:
    opened(tmp_path, kind="file").close()
    ledger = rebuilt(tmp_path)
    for wrong in (1, 31):
        with pytest.raises(ValueError, match="next"):
            rebuild.absorb(ledger, wrong, [None])
    rebuild.absorb(ledger, 0, [None, None])
    assert rebuild.unscanned(ledger) == range(2, 32)
    assert admin.gauges(ledger)["free"] == 2
    admin.check(ledger)
    ledger.close()


def test_of_one_key_the_highest_sequence_stands(tmp_path: Path) -> None:
    opened(tmp_path, kind="file").close()
    ledger = rebuilt(tmp_path)
    sequences = [5, 9, 7]
    rebuild.absorb(
        ledger,
        0,
        [
            ScannedChunk(keys(1)[0], TENANT, LATER, 0, 16, sequence)
            for sequence in sequences
        ],
    )
    match = ledger.match_prefix(keys(1))
    assert match.slots.tolist() == [1]
    assert match.generations.tolist() == [9]
    assert admin.gauges(ledger)["free"] == 2
    admin.check(ledger)
    ledger.close()


def test_what_is_stored_during_a_scan_stands_before_what_the_scan_finds(
    tmp_path: Path,
) -> None:
    opened(tmp_path, kind="file").close()
    ledger = rebuilt(tmp_path)
    rebuild.absorb(ledger, 0, [None] * 4)
    [stored] = put(ledger, keys(1))
    outcomes = ledger.reserve(keys(2), namespace=TENANT)
    rebuild.absorb(
        ledger,
        4,
        [
            ScannedChunk(keys(1)[0], TENANT, LATER, 0, 16, 5),
            ScannedChunk(keys(2)[0], TENANT, LATER, 0, 16, 6),
        ],
    )
    assert ledger.match_prefix(keys(1)).slots.tolist() == [stored.slot]
    assert ledger.match_prefix(keys(2)).slots.tolist() == [5]
    assert ledger.commit(reserved(outcomes)) == [False], "one exists already"
    admin.check(ledger)
    rebuild.absorb(ledger, 6, [None] * 26)
    assert not len(rebuild.unscanned(ledger))
    put_alone(ledger, range(100, 200))
    admin.check(ledger)
    ledger.close()


def test_after_a_rebuild_the_oldest_goes_first_and_of_a_chain_its_tail(
    tmp_path: Path,
) -> None:
    opened(tmp_path, kind="file").close()
    ledger = rebuilt(tmp_path)
    chain = [
        ScannedChunk(key, TENANT, LATER, position, 16, 1000 + position)
        for position, key in enumerate(keys(*range(8)))
    ]
    older = [
        ScannedChunk(key, TENANT, LATER, 0, 16, sequence)
        for sequence, key in enumerate(keys(*range(100, 124)), 1)
    ]
    rebuild.absorb(ledger, 0, [*chain, *older])
    put_alone(ledger, range(200, 224))
    assert not any(present(ledger, keys(*range(100, 124))))
    assert all(present(ledger, keys(*range(8))))
    put(ledger, keys(300, 301), chained=False)
    assert present(ledger, keys(*range(8))) == [True] * 6 + [False] * 2
    ledger.close()


def test_no_room_during_a_scan_is_said_to_be_for_the_rebuild(
    tmp_path: Path,
) -> None:
    from pagoda.base.metrics import Reason
    from pagoda.ledger import Refused

    opened(tmp_path, kind="file").close()
    ledger = rebuilt(tmp_path)
    assert ledger.reserve(keys(1), namespace=TENANT) == [
        Refused(keys(1)[0], Reason.REBUILDING)
    ]
    ledger.close()
