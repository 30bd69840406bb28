"""The mapped columns: views, published keys, ghosts, resize."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagoda.ledger.columns import NO_PARENT, NOT_READY, Columns, columns_bytes
from tests.ledger.support import keys


def make(directory: Path, slots: int = 100, name: str = "columns") -> Columns:
    path = directory / name
    path.write_bytes(bytes(columns_bytes(slots)))
    columns = Columns(path, slots)
    columns.reset()
    return columns


@pytest.mark.parametrize("slots", [1, 7, 511, 512, 513])
def test_no_two_columns_share_a_byte(tmp_path: Path, slots: int) -> None:
    columns = make(tmp_path, slots)
    names = (
        "generation",
        "keys",
        "last_use",
        "lease_until",
        "parent_slot",
        "parent_generation",
        "hits",
        "position",
    )
    for number, name in enumerate(names, 1):
        assert len(getattr(columns, name)) == slots
        getattr(columns, name)[:] = number
    for number, name in enumerate(names, 1):
        assert (getattr(columns, name) == number).all(), name


def test_new_columns_hold_nothing(tmp_path: Path) -> None:
    columns = make(tmp_path)
    assert (columns.last_use == NOT_READY).all()
    assert (columns.parent_slot == NO_PARENT).all()
    assert not columns.generation.any()
    assert columns.table.find(keys(1)[0]) is None


def test_what_one_process_assigns_another_sees(tmp_path: Path) -> None:
    one = make(tmp_path)
    other = Columns(tmp_path / "columns", 100)
    one.generation[5] = 77
    one.keys[5] = np.frombuffer(keys(1)[0], np.uint64)
    assert other.generation[5] == 77
    assert other.key_of(5) == keys(1)[0]


def test_published_keys_are_compared_whole(tmp_path: Path) -> None:
    columns = make(tmp_path)
    for slot, key in enumerate(keys(1, 2, 3)):
        columns.keys[slot] = np.frombuffer(key, np.uint64)
    almost = keys(2)[0][:-1] + bytes([keys(2)[0][-1] ^ 1])
    rows = np.array([0, 1, 2], np.int64)
    assert columns.are_published(
        rows, [keys(1)[0], almost, keys(3)[0]]
    ).tolist() == [True, False, True]


@pytest.mark.parametrize("slots", [50, 100, 150])
def test_a_resize_takes_over_what_both_have(tmp_path: Path, slots: int) -> None:
    old = make(tmp_path)
    new = make(tmp_path, slots, "new")
    old.generation[:] = np.arange(100) + 1
    old.last_use[:] = np.arange(100)
    old.parent_slot[:] = np.arange(100) - 1
    old.parent_slot[10] = 90
    new.copy_from(old)
    both = min(slots, 100)
    assert (new.generation[:both] == old.generation[:both]).all()
    assert (new.last_use[both:] == NOT_READY).all()
    assert new.parent_slot[10] == (90 if slots > 90 else NO_PARENT)
    assert new.parent_slot[20] == 19
    assert (new.parent_slot < slots).all()


@pytest.mark.parametrize("slots", [8192, 65536])
@pytest.mark.parametrize("chunks", [2, 4, 32])
def test_half_of_many_slots_are_leased_at_most_whatever_their_order(
    tmp_path: Path, slots: int, chunks: int
) -> None:
    """Leases are counted in a sample, and prompts of equal length have their first chunks at equal
    distances.
    """
    now = 10**12
    rows = np.arange(slots)
    tails = rows[rows % chunks != 0]
    heads = rows[::chunks]
    for wanted, least, most in (
        (tails, 0.45, 0.55),
        (heads, min(0.45, 0.95 / chunks), 0.55),
    ):
        columns = make(tmp_path, slots)
        for part in np.array_split(wanted, 64):
            columns.lease(part, now, 10**10)
        assert least <= np.mean(columns.lease_until > now) <= most


def test_half_of_what_fits_now_is_leased_at_most(tmp_path: Path) -> None:
    columns = make(tmp_path, 256)
    columns.capacity = 64
    columns.lease(np.arange(64), 10**12, 10**10)
    assert np.count_nonzero(columns.lease_until > 10**12) == 32
