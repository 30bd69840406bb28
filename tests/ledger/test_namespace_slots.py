"""A clear of one namespace finds its chunks by hints; where these are wrong, by all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda.ledger import Ledger, StoreSpec, admin
from pagoda.ledger.lmdb_tables import Tables
from tests.children import in_child
from tests.ledger.support import OTHER, TENANT, keys, opened, present, put

NEW = keys(*range(10**6, 10**6 + 16))


def filled(root: Path, slots: int) -> Ledger:
    """Open a store with chunks of two tenants: 16 of one, all others of the other one."""
    ledger = Ledger.open(StoreSpec(root, str(slots), "memory", slots, 0))
    for at in range(0, slots - 64, 64):
        put(ledger, keys(*range(at, at + 64)), OTHER)
    put(ledger, NEW)
    return ledger


class Work:
    """How many rows were read one after another, and how many transactions there were."""

    def __init__(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = self.transactions = 0
        rows = Tables.rows

        def counted(*arguments: object) -> Iterator[tuple[bytes, bytes]]:
            for row in rows(*arguments):  # type: ignore[arg-type]
                self.rows += 1
                yield row

        monkeypatch.setattr(Tables, "rows", counted)
        session = ledger.session
        for name in ("read", "write"):
            monkeypatch.setattr(session, name, self._counted(session, name))

    def _counted(self, session: object, name: str) -> Callable[..., object]:
        run = getattr(session, name)

        def counted(*arguments: object, **options: object) -> object:
            self.transactions += 1
            return run(*arguments, **options)

        return counted


@pytest.mark.slow
def test_a_clear_of_few_chunks_costs_the_same_in_a_large_store(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = []
    for slots in (1024, 8192):
        ledger = filled(shm_root, slots)
        with monkeypatch.context() as patch:
            work = Work(ledger, patch)
            assert admin.clear(ledger, TENANT) == 16
            spent.append((work.rows, work.transactions))
        assert not any(present(ledger, NEW))
        admin.check(ledger)
        ledger.close()
    assert spent[0] == spent[1]
    assert spent[0][0] < 64


@pytest.mark.parametrize("damage", [0, 7, 2**16 - 1])
def test_hints_that_are_wrong_leave_no_chunk(shm_root: Path, damage: int) -> None:
    ledger = opened(shm_root, 64)
    put(ledger, keys(*range(20)), OTHER)
    put(ledger, NEW)
    ledger.session.namespace_slots._numbers[::2] = damage
    assert admin.clear(ledger, TENANT) == 16
    assert not any(present(ledger, NEW))
    assert all(present(ledger, keys(*range(20))))
    admin.check(ledger)


def test_hints_that_name_all_slots_remove_no_chunk_of_others(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root, 64)
    put(ledger, keys(*range(20)), OTHER)
    put(ledger, NEW)
    numbers = ledger.session.namespace_slots._numbers
    numbers[:] = numbers.max()
    assert admin.clear(ledger, TENANT) == 16
    assert all(present(ledger, keys(*range(20))))


def test_the_search_in_pieces_finds_all_that_is_noted(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.ledger.namespace_slots._PIECE", 24)
    slots = opened(shm_root, 64).session.namespace_slots
    noted = [0, 1, 23, 24, 40, 47, 48, 63]  # both ends of each piece
    slots.note(dict.fromkeys(range(64), 6))
    slots.note(dict.fromkeys(noted, 7))
    assert list(slots.of(7)) == noted
    assert list(slots.of(8)) == []


def test_all_rows_are_read_once_and_the_hints_are_right_again(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(shm_root, 64)
    put(ledger, keys(*range(20)), OTHER)
    put(ledger, NEW)
    ledger.session.namespace_slots._numbers[:] = 0
    assert admin.clear(ledger, TENANT) == 16
    work = Work(ledger, monkeypatch)
    assert admin.clear(ledger, OTHER) == 20
    assert work.rows < 20


def test_what_another_process_stored_is_found_by_its_hints(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(shm_root, 64)
    in_child(lambda: put(ledger, NEW) and None)
    assert np.count_nonzero(ledger.session.namespace_slots._numbers) == 16
    work = Work(ledger, monkeypatch)
    assert admin.clear(ledger, TENANT) == 16
    assert not work.rows


def test_chunks_evicted_since_are_not_looked_for_in_all_rows(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(shm_root, 32)
    put(ledger, keys(*range(10)), chained=False)
    put(ledger, keys(*range(100, 100 + 30)), OTHER, chained=False)
    left = sum(present(ledger, keys(*range(10))))
    assert 0 < left < 10
    work = Work(ledger, monkeypatch)
    assert admin.clear(ledger, TENANT) == left
    assert not work.rows


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_store_that_was_resized_has_hints_of_its_size(
    shm_root: Path, tmp_path: Path, kind: str
) -> None:
    root = shm_root if kind == "memory" else tmp_path
    for slots in (64, 32, 128):
        ledger = opened(root, slots, kind=kind)  # type: ignore[arg-type]
        assert len(ledger.session.namespace_slots._numbers) == ledger.slots
        put(ledger, NEW)
        assert admin.clear(ledger, TENANT) == 16
        ledger.close()
