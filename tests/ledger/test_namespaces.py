"""Namespaces: labels and epochs, in the tables and in the file that outlives them; what a rebuild takes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda.ledger import Found, Ledger
from pagoda.ledger.namespaces import read_labels
from pagoda.ledger.state import NAMESPACES
from tests.ledger.support import OTHER, TENANT, keys, opened, put, reserved, there


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened_here = opened(tmp_path, kind="file")
    yield opened_here
    opened_here.check()
    opened_here.close()


def rebuilt(root: Path, slots: int = 32) -> Ledger:
    """The store at `root` after its tables were lost."""
    (root / "store" / "data.mdb").unlink()
    ledger = opened(root, slots, kind="file")
    assert ledger.unscanned() == range(slots)
    return ledger


def test_labels_are_kept_and_never_lost_to_empty_ones(ledger: Ledger) -> None:
    ledger.register(OTHER, {"model": "b", "lora": "x"})
    ledger.reserve(keys(1), namespace=OTHER)
    ledger.register(OTHER, {})
    row = ledger.namespaces()[OTHER]
    assert row.fields == {"model": "b", "lora": "x"} and row.epoch == 0 and row.chunks == 0
    assert read_labels(ledger.directory)[OTHER.hex()].fields == row.fields


def test_a_namespace_nobody_registered_is_known_by_its_chunks(ledger: Ledger) -> None:
    put(ledger, keys(1, 2), OTHER)
    assert ledger.namespaces()[OTHER].chunks == 2 and ledger.namespaces()[OTHER].fields == {}


def test_a_clear_is_one_tenants_own(ledger: Ledger) -> None:
    put(ledger, keys(*range(5)))
    put(ledger, keys(*range(10, 13)), OTHER)
    assert ledger.clear(OTHER) == 3 and ledger.clear(OTHER) == 0
    assert all(there(ledger, keys(*range(5))))
    assert (ledger.epoch(TENANT), ledger.epoch(OTHER)) == (0, 2)
    assert ledger.clear() == 5 and (ledger.epoch(TENANT), ledger.epoch(OTHER)) == (1, 3)


def test_clearing_what_nobody_knows_yet_counts_too(ledger: Ledger) -> None:
    assert ledger.clear(OTHER) == 0 and ledger.epoch(OTHER) == 1
    put(ledger, keys(1), OTHER)
    assert there(ledger, keys(1)) == [True]


def test_what_is_stored_after_a_clear_stays(ledger: Ledger) -> None:
    put(ledger, keys(1))
    old = reserved(ledger.reserve(keys(2), namespace=TENANT))
    ledger.clear(TENANT)
    [new] = put(ledger, keys(1))
    assert ledger.commit(old) == [False]
    assert there(ledger, keys(1, 2)) == [True, False] and new.generation > 0


def test_a_rebuild_knows_labels_and_epochs(tmp_path: Path) -> None:
    ledger = opened(tmp_path, kind="file")
    ledger.register(OTHER, {"model": "b"})
    ledger.clear(OTHER)
    ledger.close()
    again = rebuilt(tmp_path)
    rows = again.namespaces()
    assert rows[OTHER].fields == {"model": "b"} and rows[OTHER].epoch == 1 and rows[TENANT].epoch == 0
    again.absorb(0, [Found(keys(1)[0], OTHER, 0, 0, 16, 5), Found(keys(2)[0], OTHER, 1, 0, 16, 6)])
    assert there(again, keys(1, 2)) == [False, True]
    again.close()


def test_an_epoch_is_never_lowered_even_if_the_file_is_behind(tmp_path: Path) -> None:
    """A chunk tells of an epoch that the file has lost: the next clear must take that chunk too."""
    ledger = opened(tmp_path, kind="file")
    ledger.close()
    again = rebuilt(tmp_path)
    again.absorb(0, [Found(keys(1)[0], TENANT, 3, 0, 16, 5), Found(keys(2)[0], TENANT, 2, 0, 16, 6)])
    assert there(again, keys(1, 2)) == [True, False] and again.epoch(TENANT) == 3
    assert again.clear(TENANT) == 1 and there(again, keys(1)) == [False]
    again.close()


@pytest.mark.parametrize("damage", [b"", b"{", b"[1, 2]", b'{"zz": {"fields": {}, "epoch": 1}}'])
def test_a_damaged_file_of_labels_keeps_nobody_from_opening(tmp_path: Path, damage: bytes) -> None:
    opened(tmp_path, kind="file").close()
    (tmp_path / "store" / NAMESPACES).write_bytes(damage)
    again = opened(tmp_path, kind="file")
    put(again, keys(1))
    again.clear()
    again.close()


# absorbing


def test_slots_are_absorbed_in_their_order(tmp_path: Path) -> None:
    opened(tmp_path, kind="file").close()
    ledger = rebuilt(tmp_path)
    for wrong in (1, 31):
        with pytest.raises(ValueError, match="next"):
            ledger.absorb(wrong, [None])
    ledger.absorb(0, [None, None])
    assert ledger.unscanned() == range(2, 32) and ledger.gauges()["free"] == 2
    ledger.check()
    ledger.close()


def test_of_one_key_the_highest_sequence_stands(tmp_path: Path) -> None:
    opened(tmp_path, kind="file").close()
    ledger = rebuilt(tmp_path)
    sequences = [5, 9, 7]
    ledger.absorb(0, [Found(keys(1)[0], TENANT, 0, 0, 16, sequence) for sequence in sequences])
    match = ledger.match(keys(1))
    assert match.slots.tolist() == [1] and match.generations.tolist() == [9]
    assert ledger.gauges()["free"] == 2
    ledger.check()
    ledger.close()


def test_what_is_stored_during_a_scan_stands_before_what_the_scan_finds(tmp_path: Path) -> None:
    opened(tmp_path, kind="file").close()
    ledger = rebuilt(tmp_path)
    ledger.absorb(0, [None] * 4)
    [stored] = put(ledger, keys(1))
    outcomes = ledger.reserve(keys(2), namespace=TENANT)
    ledger.absorb(4, [Found(keys(1)[0], TENANT, 0, 0, 16, 5), Found(keys(2)[0], TENANT, 0, 0, 16, 6)])
    assert ledger.match(keys(1)).slots.tolist() == [stored.slot]
    assert ledger.match(keys(2)).slots.tolist() == [5]
    assert ledger.commit(reserved(outcomes)) == [False], "there is one already"
    ledger.check()
    ledger.absorb(6, [None] * 26)
    assert not len(ledger.unscanned())
    put(ledger, keys(*range(100, 200)), chained=False)
    ledger.check()
    ledger.close()


def test_after_a_rebuild_the_oldest_goes_first_and_of_a_chain_its_tail(tmp_path: Path) -> None:
    opened(tmp_path, kind="file").close()
    ledger = rebuilt(tmp_path)
    chain = [
        Found(key, TENANT, 0, position, 16, 1000 + position) for position, key in enumerate(keys(*range(8)))
    ]
    older = [Found(key, TENANT, 0, 0, 16, sequence) for sequence, key in enumerate(keys(*range(100, 124)), 1)]
    ledger.absorb(0, [*chain, *older])
    put(ledger, keys(*range(200, 224)), chained=False)
    assert not any(there(ledger, keys(*range(100, 124)))) and all(there(ledger, keys(*range(8))))
    put(ledger, keys(300, 301), chained=False)
    assert there(ledger, keys(*range(8))) == [True] * 6 + [False] * 2
    ledger.close()


def test_no_room_during_a_scan_is_said_to_be_for_the_rebuild(tmp_path: Path) -> None:
    from pagoda.ledger import Refused
    from pagoda.metrics import Reason

    opened(tmp_path, kind="file").close()
    ledger = rebuilt(tmp_path)
    assert ledger.reserve(keys(1), namespace=TENANT) == [Refused(keys(1)[0], Reason.REBUILDING)]
    ledger.close()
