"""Namespaces: their rows and labels, what a clear takes, and what a rebuild takes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pagoda.ledger import Found, Ledger, Reserved
from pagoda.ledger.namespaces import read_labels
from pagoda.ledger.state import NAMESPACES
from tests.ledger.support import OTHER, TENANT, keys, opened, put, reserved, there

LATER = 1 << 60  # a generation behind every line


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
    assert row.fields == {"model": "b", "lora": "x"} and row.chunks == 0
    ledger.save_labels()
    assert read_labels(ledger.directory)[OTHER].fields == row.fields


def test_a_namespace_nobody_registered_is_known_by_its_chunks(ledger: Ledger) -> None:
    put(ledger, keys(1, 2), OTHER)
    assert ledger.namespaces()[OTHER].chunks == 2 and ledger.namespaces()[OTHER].fields == {}


def test_a_clear_is_one_tenants_own(ledger: Ledger) -> None:
    put(ledger, keys(*range(5)))
    put(ledger, keys(*range(10, 13)), OTHER)
    assert ledger.clear(OTHER) == 3 and ledger.clear(OTHER) == 0
    assert all(there(ledger, keys(*range(5))))
    assert ledger.clear() == 5 and ledger.clear() == 0


def test_what_is_stored_after_a_clear_of_nothing_stays(ledger: Ledger) -> None:
    assert ledger.clear(OTHER) == 0
    put(ledger, keys(1), OTHER)
    assert there(ledger, keys(1)) == [True]


def test_what_is_stored_after_a_clear_stays(ledger: Ledger) -> None:
    put(ledger, keys(1))
    old = reserved(ledger.reserve(keys(2), namespace=TENANT))
    ledger.clear(TENANT)
    [new] = put(ledger, keys(1))
    assert ledger.commit(old) == [False]
    assert there(ledger, keys(1, 2)) == [True, False] and new.generation > 0


def header(stored: Reserved, namespace: bytes = TENANT) -> Found:
    """What the header of a chunk says, as long as its slot is not written again."""
    return Found(stored.key, namespace, stored.generation, 0, 16, stored.generation)


def test_a_rebuild_knows_labels_and_what_was_cleared(tmp_path: Path) -> None:
    ledger = opened(tmp_path, kind="file")
    ledger.register(OTHER, {"model": "b"})
    [mine], [old] = put(ledger, keys(1)), put(ledger, keys(2), OTHER)
    ledger.clear(OTHER)
    [new] = put(ledger, keys(3), OTHER)
    ledger.close()
    again = rebuilt(tmp_path)
    again.absorb(0, [header(mine), header(old, OTHER), header(new, OTHER)])
    assert there(again, keys(1, 2, 3)) == [True, False, True]
    assert again.namespaces()[OTHER] == (OTHER, {"model": "b"}, 1)
    again.absorb(3, [None] * 29)
    again.check()
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
    again.absorb(0, [header(first)])
    assert again.clear(None if everything else TENANT) == 1
    [new] = put(again, keys(4), chained=False)
    again.absorb(again.unscanned()[0], [header(second), header(other, OTHER)])
    assert there(again, keys(1, 2, 3, 4)) == [False, False, not everything, True]
    again.close()
    (tmp_path / "store" / "data.mdb").unlink()  # and once more, before the first scan has ended
    last = opened(tmp_path, kind="file")
    last.absorb(0, [header(first), header(second), header(other, OTHER), header(new)])
    assert there(last, keys(1, 2, 3, 4)) == [False, False, not everything, True]
    last.close()


def test_what_is_stored_during_a_scan_takes_nothing_from_what_the_scan_finds(tmp_path: Path) -> None:
    ledger = opened(tmp_path, kind="file")
    first, second = put(ledger, keys(1, 2))
    ledger.close()
    again = rebuilt(tmp_path)
    again.absorb(0, [None])
    put(again, keys(3), chained=False)  # makes the row of the namespace
    again.absorb(1, [header(first), header(second)])
    assert there(again, keys(1, 2, 3)) == [True, True, True]
    again.close()


def test_a_store_of_an_older_version_tells_what_was_cleared_by_numbers(tmp_path: Path) -> None:
    """It counted the clears of each namespace, in one file with the labels, and wrote the number into the headers."""
    opened(tmp_path, kind="file").close()
    for path in (tmp_path / "store").glob("clears-*"):
        path.unlink()
    old = {OTHER.hex(): {"fields": {"model": "b"}, "epoch": 2}, TENANT.hex(): {"fields": {}, "epoch": 0}}
    (tmp_path / "store" / NAMESPACES).write_bytes(msgspec.json.encode(old))
    for turn in range(2):  # what it says is kept, also when the file says it no more
        again = rebuilt(tmp_path)
        again.absorb(0, [Found(keys(n)[0], OTHER, n, 0, 16, 5 + n) for n in range(4)])
        again.absorb(4, [Found(keys(9)[0], TENANT, 0, 0, 16, 5)])
        assert there(again, keys(0, 1, 2, 3, 9)) == [False, False, True, True, True], turn
        assert again.namespaces()[OTHER].fields == {"model": "b"}
        if turn:
            assert again.clear(OTHER) == 2 and there(again, keys(2, 3, 9)) == [False, False, True]
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
    ledger.absorb(0, [Found(keys(1)[0], TENANT, LATER, 0, 16, sequence) for sequence in sequences])
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
    ledger.absorb(4, [Found(keys(1)[0], TENANT, LATER, 0, 16, 5), Found(keys(2)[0], TENANT, LATER, 0, 16, 6)])
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
        Found(key, TENANT, LATER, position, 16, 1000 + position)
        for position, key in enumerate(keys(*range(8)))
    ]
    older = [
        Found(key, TENANT, LATER, 0, 16, sequence) for sequence, key in enumerate(keys(*range(100, 124)), 1)
    ]
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
