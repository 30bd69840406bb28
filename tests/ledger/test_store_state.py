"""The file `state`: written in place, and never torn."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import msgspec
import pytest

from pagoda.ledger.store_state import (
    FORMAT,
    STATE,
    StoreState,
    TableMark,
    is_marked,
    read_state,
    set_mark,
    write_state,
)
from tests.children import in_child

PAGE = 4096


def state_of(**changed: object) -> StoreState:
    made = StoreState(
        format=FORMAT,
        kind="file",
        store_id="00" * 16,
        slots=8,
        slot_bytes=4096,
        map_bytes=1 << 22,
        incarnation=1,
        recency_offset=0,
        boot_id="this",
        clean=False,
        private=False,
        inodes={},
    )
    return msgspec.structs.replace(made, **changed)


def test_what_was_written_last_is_read(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    for n in range(1, 8):
        write_state(tmp_path, state_of(incarnation=n, clean=bool(n % 2)))
        assert read_state(tmp_path) == state_of(incarnation=n, clean=bool(n % 2))
    assert os.stat(tmp_path / STATE).st_size == 3 * PAGE
    assert [p.name for p in tmp_path.iterdir()] == [STATE]


@pytest.mark.parametrize("written", [1, 2, 3])
def test_a_torn_write_leaves_what_stood(tmp_path: Path, written: int) -> None:
    """A torn `clean` must never read as clean; an unreadable page loses at most one record."""
    for n in range(1, written + 1):
        write_state(tmp_path, state_of(incarnation=n))
    before = (tmp_path / STATE).read_bytes()
    write_state(
        tmp_path, state_of(incarnation=written, clean=True, checksum="ab" * 16)
    )
    after = (tmp_path / STATE).read_bytes()
    changed = [at for at in range(len(after)) if before[at] != after[at]]
    assert len({at // PAGE for at in changed}) == 1
    for cut in range(changed[0], changed[-1] + 1, 7):
        (tmp_path / STATE).write_bytes(after[:cut] + before[cut:])
        state = read_state(tmp_path)
        assert state == state_of(incarnation=written), f"torn at {cut}"
    (tmp_path / STATE).write_bytes(after)
    state = read_state(tmp_path)
    assert state is not None
    assert state.clean


def test_a_file_that_is_no_state_is_none(tmp_path: Path) -> None:
    # no UTF-8
    old = msgspec.json.encode(state_of(boot_id="here")).replace(
        b"here", b"\xffere"
    )
    for content in (
        b"",
        b"{}",
        b"x" * 3 * PAGE,
        bytes(3 * PAGE),
        b"PAGODAST" + b"\xff" * (3 * PAGE - 8),
        old,
    ):
        (tmp_path / STATE).write_bytes(content)
        assert read_state(tmp_path) is None
    (tmp_path / STATE).unlink()
    (tmp_path / STATE).mkdir()
    assert read_state(tmp_path) is None


def test_a_full_disk_hinders_no_write(tmp_path: Path) -> None:
    """RLIMIT_FSIZE simulates it: no file may be created or lengthened."""
    write_state(tmp_path, state_of())

    def write_without_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * PAGE, 3 * PAGE))
        for n in range(5):
            write_state(tmp_path, state_of(incarnation=n))
            set_mark(tmp_path, TableMark.DAMAGED, n)
        assert os.stat(tmp_path / STATE).st_blocks * 512 >= 3 * PAGE

    in_child(write_without_room)
    assert read_state(tmp_path) == state_of(incarnation=4)


def test_marks_are_of_one_incarnation_each(tmp_path: Path) -> None:
    write_state(tmp_path, state_of())
    for mark in TableMark:
        assert not is_marked(tmp_path, mark, 1)
    set_mark(tmp_path, TableMark.DAMAGED, 5)
    assert is_marked(tmp_path, TableMark.DAMAGED, 5)
    assert not is_marked(tmp_path, TableMark.DAMAGED, 6)
    assert not is_marked(tmp_path, TableMark.OPENING, 5)
    set_mark(tmp_path, TableMark.OPENING, 5)
    write_state(tmp_path, state_of(incarnation=5))
    assert is_marked(tmp_path, TableMark.DAMAGED, 5)
    assert is_marked(tmp_path, TableMark.OPENING, 5)
    set_mark(tmp_path, TableMark.OPENING, 0)
    assert not is_marked(tmp_path, TableMark.OPENING, 5)
    assert is_marked(tmp_path, TableMark.DAMAGED, 5)


def test_fields_of_a_later_version_hinder_nothing(tmp_path: Path) -> None:
    class Later(StoreState, frozen=True, kw_only=True):
        new_field: int = 7

    fields = msgspec.to_builtins(state_of(format=FORMAT + 5))
    write_state(tmp_path, msgspec.convert(fields, Later))
    assert read_state(tmp_path) == state_of(format=FORMAT + 5)
