"""Capacity: three layouts in turn under one root, and a prompt larger than the tier."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagoda.ledger import admin
from tests.faults.support import SLOT_BYTES, Store, apart, keys


def used_bytes(root: Path) -> int:
    """Bytes that all files under a root take."""
    return sum(
        path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file()
    )


def fill(root: Path, name: str, limit_bytes: int, slots: int) -> None:
    """Another process stores a prompt under one layout."""

    def work() -> None:
        store = Store(root, slots=slots, name=name, limit_bytes=limit_bytes)
        assert store.save(keys(range(20))) == 20
        store.close()

    apart(work)


@pytest.mark.slow
def test_three_layouts_in_turn_stay_below_the_roots_limit(shm_root: Path) -> None:
    limit = 512 * SLOT_BYTES
    for turn in range(3):
        for name in ("first", "second", "third"):
            fill(shm_root, name, limit, 512)
            held = sum(
                path.stat().st_blocks * 512 for path in shm_root.glob("*/slab")
            )
            assert held <= limit, f"turn {turn}, layout {name}"
    assert {path.name for path in shm_root.iterdir() if path.is_dir()} == {
        "first",
        "second",
        "third",
    }


def test_a_store_that_is_open_keeps_its_share_beside_another_layout(
    shm_root: Path,
) -> None:
    limit = 512 * SLOT_BYTES
    first = Store(shm_root, slots=512, name="first", limit_bytes=limit)
    first.save(keys(range(20)))
    second = Store(shm_root, slots=512, name="second", limit_bytes=limit)
    assert second.save(keys(range(40))) == 40 == second.load(keys(range(40)))
    assert first.load(keys(range(20))) == 20
    first.close()
    second.close()


@pytest.mark.parametrize("slots", [32, 400])
def test_a_prompt_larger_than_the_tier_stored_twice_still_hits(
    shm_root: Path, slots: int
) -> None:
    store = Store(shm_root, slots=slots)
    prompt = keys(range(slots * 12 // 10))
    for _ in range(3):
        store.save(prompt)
        assert store.load(prompt) >= slots * 9 // 10
        admin.check(store.ledger)
    store.close()


def test_a_slab_is_never_larger_than_it_was_asked_to_be(shm_root: Path) -> None:
    store = Store(shm_root, slots=64)
    for turn in range(20):
        store.save(keys(range(turn * 50, turn * 50 + 50)))
        assert os.stat(store.ledger.slab_path).st_size == 64 * SLOT_BYTES
    gauges = admin.gauges(store.ledger)
    assert gauges["ready"] <= 64
    assert gauges["free"] + gauges["ready"] == 64
    store.close()
