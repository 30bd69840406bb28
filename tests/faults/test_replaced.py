"""A directory that is removed or replaced beneath a process that has it open: never another store's
tables or bytes.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from pagoda.base.errors import StoreError
from pagoda.base.metrics import Reason
from pagoda.ledger import Ledger, Refused, admin, session
from pagoda.ledger import ledger as ledger_module
from pagoda.ledger.clears_and_labels import read_labels
from pagoda.ledger.eviction_policy import Evictor
from pagoda.ledger.guard_watch import unwatch
from pagoda.ledger.lmdb_tables import Tables
from pagoda.ledger.session import UnavailableError
from pagoda.ledger.store_state import Kind
from pagoda.slab import MemorySlab
from tests.children import in_child
from tests.ledger.support import TENANT, keys, opened, present, put, spec


def fork(ledger: Ledger) -> None:
    in_child(lambda: None)


def fail(ledger: Ledger) -> None:
    """An error of LMDB, after which it is opened again."""

    def work(*_: object) -> None:
        raise lmdb.Error

    with pytest.raises(UnavailableError):
        ledger.session.write(work, 1.0)


def remove(root: Path) -> None:
    shutil.rmtree(root / "store")


def make_anew(root: Path) -> None:
    remove(root)
    # not in a child: a fork would have this process open its tables again
    opened(root).close()


def move_another_there(root: Path) -> None:
    Ledger.open(spec(root, name="other")).close()
    (root / "store").rename(root / "away")
    (root / "other").rename(root / "store")


def copy_over(root: Path) -> None:
    """A backup is written back, file by file."""
    shutil.copytree(root / "store", root / "copy")
    remove(root)
    shutil.copytree(root / "copy", root / "store")
    shutil.rmtree(root / "copy")


REPLACED = [remove, make_anew, move_another_there, copy_over]


def counted(ledger: Ledger, name: str) -> int:
    """Return this member's counts, which a transaction can no longer read."""
    return int(ledger.session._row[ledger.session._column[name]])


def neither_finds_nor_stores(ledger: Ledger) -> None:
    match = ledger.match_prefix(keys(1))
    assert not len(match.slots)
    assert match.reason is Reason.IO_ERROR
    [outcome] = ledger.reserve(keys(2), namespace=TENANT)
    assert isinstance(outcome, Refused)
    assert outcome.reason is Reason.IO_ERROR
    assert ledger.hold(match.slots, match.generations) == []
    with pytest.raises(StoreError):
        admin.clear(ledger)


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("reopens", [fork, fail])
@pytest.mark.parametrize("replaced", REPLACED)
def test_what_took_the_place_of_a_store_is_neither_read_nor_written(
    shm_root: Path,
    kind: Kind,
    reopens: Callable[[Ledger], None],
    replaced: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = opened(shm_root, kind=kind)
    put(ledger, keys(1))
    # else the thread that looks for replaced files may be first
    unwatch(ledger.session)
    replaced(shm_root)
    before = {path: path.read_bytes() for path in (shm_root / "store").rglob("*")}
    assert len(ledger.match_prefix(keys(1)).slots) == 1, (
        "open files continue to work"
    )
    reopens(ledger)
    with caplog.at_level(logging.WARNING):
        neither_finds_nor_stores(ledger)
    assert sum("replaced" in record.message for record in caplog.records) == 1
    assert counted(ledger, "miss_io_error") == 1
    assert counted(ledger, "drop_io_error") >= 1
    ledger.close()
    assert {
        path: path.read_bytes() for path in (shm_root / "store").rglob("*")
    } == before
    shutil.rmtree(shm_root / "store", ignore_errors=True)
    anew = opened(shm_root, kind=kind)
    put(anew, keys(1))
    admin.check(anew)
    anew.close()


@pytest.mark.parametrize("replaced", REPLACED)
def test_a_child_does_not_open_what_took_the_place_of_its_parents_store(
    shm_root: Path, replaced: Callable[[Path], None]
) -> None:
    ledger = opened(shm_root)
    put(ledger, keys(1))
    replaced(shm_root)
    in_child(lambda: neither_finds_nor_stores(ledger))
    in_child(ledger.close)
    ledger.close()


def test_two_stores_of_one_path_go_on_beside_each_other(shm_root: Path) -> None:
    old = opened(shm_root)
    put(old, keys(1))
    remove(shm_root)
    new = opened(shm_root)
    put(new, keys(2))
    fork(old)
    neither_finds_nor_stores(old)
    assert present(new, keys(1, 2)) == [False, True]
    old.close()
    assert admin.gauges(new)["members"] == 1
    assert admin.gauges(new)["reserved"] == 0
    admin.check(new)
    new.close()


def test_a_store_that_is_replaced_while_it_is_being_opened_again_is_not_touched(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(shm_root)
    fork(ledger)

    def late(*arguments: object, **named: object) -> Tables:
        monkeypatch.undo()
        make_anew(shm_root)
        return Tables(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "Tables", late)
    assert ledger.match_prefix(keys(1)).reason is Reason.IO_ERROR
    monkeypatch.undo()
    neither_finds_nor_stores(ledger)
    ledger.close()
    anew = opened(shm_root)
    assert admin.gauges(anew)["members"] == 1
    assert admin.check(anew).gauges["reserved"] == 0
    anew.close()


def test_a_slab_that_lies_there_by_now_is_not_taken_for_the_stores_own(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root)

    def late(path: Path) -> MemorySlab:
        make_anew(shm_root)
        return MemorySlab(path, ledger.slots, ledger.slot_bytes)

    with pytest.raises(StoreError, match="replaced"):
        ledger.open_slab(late)
    ledger.close()


def test_a_directory_that_is_removed_while_it_is_being_opened_is_an_error_that_says_so(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = ledger_module.map_learned

    def late(directory: Path, advice: Evictor) -> object:
        remove(shm_root)
        return enter(directory, advice)

    monkeypatch.setattr(ledger_module, "map_learned", late)
    with pytest.raises(StoreError, match="repair that and open it again"):
        Ledger.open(spec(shm_root), policy="hindsight")
    monkeypatch.undo()
    Ledger.open(spec(shm_root), policy="hindsight").close()


def test_the_labels_of_what_took_its_place_are_left_alone(shm_root: Path) -> None:
    old = opened(shm_root, kind="file")
    make_anew(shm_root)
    new = opened(shm_root, kind="file")
    before = read_labels(new.directory)
    with pytest.raises(StoreError):
        admin.clear(old)
    assert read_labels(new.directory) == before
    old.close()
    new.close()


def test_a_child_of_a_process_whose_directory_was_removed_leaves_no_descriptor(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root)
    remove(shm_root)

    def act() -> None:
        said = subprocess.run(
            ["ls", "-l", f"/proc/{os.getpid()}/fd"],
            capture_output=True,
            text=True,
        ).stdout
        assert f"{shm_root}/store/locks" not in said
        assert f"{shm_root}/store/columns" in said

    in_child(act)
    ledger.close()
