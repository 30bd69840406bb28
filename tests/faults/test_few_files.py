"""A process that may open no more files: what it cannot ask now is not lost, neither for it nor for
the next one. And one whose standard streams are closed.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from pagoda.base import boot_identity
from pagoda.base.errors import StoreError
from pagoda.ledger import admin, rebuild
from pagoda.ledger.clear_log import ClearLog
from pagoda.ledger.clears_and_labels import read_labels
from pagoda.ledger.store_state import Kind
from tests.children import in_child
from tests.faults.support import open_files_left
from tests.ledger.support import TENANT, keys, opened, present, put

CHUNKS = keys(*range(10))
ENOUGH = 24  # files, for a store to be opened


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_start_with_too_few_open_files_loses_nothing(
    shm_root: Path, tmp_path: Path, kind: Kind
) -> None:
    """Whichever file is the first that cannot be opened."""
    root = shm_root if kind == "memory" else tmp_path / "disk"
    ledger = opened(root, kind=kind)
    put(ledger, CHUNKS)
    ledger.close()
    refused = 0

    def start(files: int) -> None:
        nonlocal refused
        boot_identity.boot_id.cache_clear()
        with open_files_left(files):
            try:
                ledger = opened(root, kind=kind)
            except StoreError as error:
                assert "Too many open files" in str(error)
                assert "stop the processes" not in str(error)
                refused += 1
            else:
                assert all(present(ledger, CHUNKS))
                ledger.close()

    def all_starts() -> None:
        for files in range(ENOUGH):
            start(files)
            ledger = opened(root, kind=kind)
            assert not len(rebuild.unscanned(ledger)) and all(
                present(ledger, CHUNKS)
            ), f"after {files} files"
            ledger.close()
        assert 8 < refused < ENOUGH

    in_child(all_starts)


def test_what_was_cleared_is_not_guessed_without_open_files(
    tmp_path: Path,
) -> None:
    """A rebuild would take back nothing if all counted as cleared, and too much if nothing did."""
    ledger = opened(tmp_path, kind="file")
    put(ledger, CHUNKS)
    admin.clear(ledger, TENANT)
    ledger.close()

    def ask() -> None:
        before = ClearLog(ledger.directory).read()
        with open_files_left(0):
            for question in (
                ClearLog(ledger.directory).read,
                partial(read_labels, ledger.directory),
            ):
                with pytest.raises(OSError, match="Too many open files"):
                    question()
        assert ClearLog(ledger.directory).read() == before
        assert before is not None

    in_child(ask)


def test_a_boot_is_no_other_one_without_open_files(tmp_path: Path) -> None:
    def ask() -> None:
        with open_files_left(0):
            for question in (
                boot_identity.kernel_boot_id,
                boot_identity.stand_in,
            ):
                with pytest.raises(OSError, match="Too many open files"):
                    question(tmp_path)

    in_child(ask)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_process_that_could_not_open_its_tables_again_still_has_its_store(
    shm_root: Path,
    kind: Kind,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fork closes the tables of both processes."""
    monkeypatch.setattr("pagoda.ledger.session._REST_SECONDS", 0.0)
    ledger = opened(shm_root, kind=kind)
    put(ledger, CHUNKS)

    def work() -> None:
        missed = 0
        for files in range(6):
            ledger.session._shut()
            with open_files_left(files):
                missed += not len(ledger.match_prefix(CHUNKS).slots)
                ledger.session.look()
            assert len(ledger.match_prefix(CHUNKS).slots) == len(CHUNKS), (
                f"after {files} files"
            )
        assert missed and 1 <= caplog.text.count("Too many open files") <= 2, (
            "a line says why"
        )
        assert "removed or replaced" not in caplog.text

    in_child(work)
    ledger.close()


def test_what_a_library_prints_to_a_closed_stream_is_in_no_file_of_a_store(
    shm_root: Path,
) -> None:
    """The descriptors 0, 1 and 2 of a daemon may be free: the next files get them."""

    def work() -> None:
        for number in range(3):
            os.close(number)
        ledger = opened(shm_root)
        put(ledger, CHUNKS)
        for number in (1, 2):
            os.write(number, b"a line of a library\n" * 1000)
        # no child inherits one of our files as its output
        assert os.path.samestat(os.fstat(1), os.stat(os.devnull))
        os._exit(0)  # killed

    in_child(work)
    ledger = opened(shm_root)
    assert all(present(ledger, CHUNKS))
    ledger.close()
