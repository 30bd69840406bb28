"""The host tier (what every tier does is in tests/conformance)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.errors import ClosedError, StoreError
from pagoda.base.metrics import Reason
from pagoda.layout import KVLayout
from pagoda.ledger import admin
from pagoda.tiers import Done, HostTier
from tests.children import in_child
from tests.tiers.tools import (
    LAYOUT,
    NAMESPACE,
    ROOT,
    check,
    chunks_of,
    ends,
    is_right,
    keys_of,
    payload_of,
    right,
    room,
    store,
)

SIZE = 64 * LAYOUT.slot_bytes


def open_host(
    root: Path, *, shared: bool = True, size_bytes: int = SIZE
) -> HostTier:
    tier = HostTier.open(
        LAYOUT,
        root,
        size_bytes,
        policy="lru",
        shared=shared,
        deadline_seconds=30.0,
    )
    tier.register(NAMESPACE)
    return tier


def test_a_run_longer_than_the_window_is_stored_whole(shm_root: Path) -> None:
    tier = open_host(shm_root)
    keys = keys_of(3 * tier.ledger.window + 1)
    store(tier, keys)
    assert tier.match_prefix(keys) == len(keys)
    for key in keys:
        assert right(tier, key)
    check(tier)
    tier.close()


def test_slots_are_filled_in_place_by_who_has_the_ledger(shm_root: Path) -> None:
    tier = open_host(shm_root)
    (key,) = keys_of(1)
    (reserved,) = tier.ledger.reserve([key], namespace=ROOT)
    tier.slab.view(reserved.slot)[:] = payload_of(key)
    assert not tier.contains(key)
    assert tier.ledger.commit([reserved]) == [True]  # type: ignore[list-item]
    assert right(tier, key)
    tier.close()


def test_an_evicted_chunk_is_a_miss_with_its_reason(shm_root: Path) -> None:
    tier = open_host(shm_root, size_bytes=8 * LAYOUT.slot_bytes)
    old = keys_of(8, chain=1)
    new = keys_of(8, chain=2)
    store(tier, old)
    store(tier, new)
    assert ends(tier.load(old[:1], [room()], namespace=ROOT)) == [
        Done(False, Reason.EVICTED)
    ]
    assert tier.match_prefix(new) == 8
    tier.close()


def test_a_source_that_goes_while_it_is_copied_is_not_stored(
    shm_root: Path,
) -> None:
    tier = open_host(shm_root)
    keys = keys_of(1)
    (done,) = ends(tier.store(chunks_of(keys, still_valid=lambda: False), ROOT))
    assert done == Done(False, Reason.STALE)
    assert not tier.contains(keys[0])
    assert tier.stats()["drop_stale"] == 1
    assert check(tier)["free"] == 64
    tier.close()


def test_a_payload_that_is_longer_than_a_chunk_is_not_cut(shm_root: Path) -> None:
    tier = open_host(shm_root)
    (key,) = keys_of(1)
    assert LAYOUT.chunk_bytes + 1 < LAYOUT.slot_bytes
    assert not tier.put(
        key, payload_of(key)[: LAYOUT.chunk_bytes + 1], namespace=ROOT
    )
    assert not tier.contains(key)
    assert tier.stats()["drop_too_large"] == 1
    assert tier.put(key, payload_of(key)[: LAYOUT.chunk_bytes], namespace=ROOT)
    assert right(tier, key)
    tier.close()


def test_a_source_that_raises_frees_its_slot(shm_root: Path) -> None:
    tier = open_host(shm_root)

    def raises() -> bool:
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        tier.store(chunks_of(keys_of(2), still_valid=raises), ROOT)
    assert check(tier)["free"] == 64
    tier.close()


@pytest.mark.slow
def test_another_tier_of_the_machine_sees_the_same_chunks(shm_root: Path) -> None:
    tier = open_host(shm_root)
    keys = keys_of(4)
    store(tier, keys)
    code = f"""
from pathlib import Path
from tests.tiers.test_host import *
tier = open_host(Path({str(shm_root)!r}))
print(sum(right(tier, key) for key in keys_of(4)))
"""
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.split() == ["4"]
    tier.close()


def test_chunks_outlive_the_tier_object(shm_root: Path) -> None:
    tier = open_host(shm_root)
    keys = keys_of(4)
    store(tier, keys)
    tier.close()
    tier.close()
    again = open_host(shm_root)
    for key in keys:
        assert right(again, key)
    again.close()


def test_private_tiers_share_nothing(shm_root: Path) -> None:
    one = open_host(shm_root, shared=False)
    two = open_host(shm_root, shared=False)
    keys = keys_of(2)
    store(one, keys)
    assert one.match_prefix(keys) == 2
    assert two.match_prefix(keys) == 0
    one.close()
    two.close()
    assert [path.name for path in shm_root.iterdir() if path.is_dir()] == []


def test_private_memory_costs_no_file(shm_root: Path) -> None:
    tier = HostTier.open(
        LAYOUT, shm_root, 4000 * LAYOUT.slot_bytes, shared=False, populate=False
    )
    assert (
        sum(path.stat().st_size for path in shm_root.rglob("*"))
        < 2000 * LAYOUT.slot_bytes
    )
    tier.close()


def test_a_forked_child_shares_the_memory(shm_root: Path) -> None:
    tier = open_host(shm_root)
    mine = keys_of(2, chain=1)
    childs = keys_of(2, chain=2)
    store(tier, mine)

    def work() -> None:
        for key in mine:
            assert right(tier, key)
        store(tier, childs)

    in_child(work)
    for key in childs:
        assert right(tier, key)
    tier.close()


def test_a_forked_child_does_not_use_private_memory(shm_root: Path) -> None:
    tier = open_host(shm_root, shared=False)
    keys = keys_of(2)
    store(tier, keys)

    def work() -> None:
        (saved,) = ends(tier.store(chunks_of(keys_of(1, chain=7)), ROOT))
        assert tier.match_prefix(keys) == 0
        assert tier.get(keys[0]) is None
        assert saved.ok is False

    in_child(work)
    for key in keys:
        assert right(tier, key)
    tier.close()


def test_a_forked_child_cannot_reserve_in_private_memory(shm_root: Path) -> None:
    """Its bytes would be written to its own copy of the slab, and the parent would see its own old
    bytes instead.
    """
    tier = open_host(shm_root, shared=False)

    def work() -> None:
        with pytest.raises(ClosedError):
            tier.ledger.reserve(keys_of(1), namespace=ROOT)

    in_child(work)
    assert check(tier)["free"] == 64
    tier.close()


def test_a_load_into_plain_buffers(shm_root: Path) -> None:
    tier = open_host(shm_root)
    keys = keys_of(3)
    store(tier, keys)
    buffers = [np.empty(LAYOUT.chunk_bytes + 1, np.uint8)[1:] for _ in keys]
    for done in ends(tier.load(keys, buffers, namespace=ROOT)):
        assert done.ok
    for key, buffer in zip(keys, buffers, strict=True):
        assert is_right(key, buffer)
    tier.close()


def test_a_size_without_room_for_a_chunk_is_a_value_error(shm_root: Path) -> None:
    layout = KVLayout.opaque(4, 3 << 20, "large")
    expected = r"a host tier of 2\.0 MiB has .* chunk of 3\.0 MiB: ask for a larger host_size"
    with pytest.raises(ValueError, match=expected):
        HostTier.open(layout, shm_root, 2 << 20)
    with pytest.raises(ValueError, match="no room for one chunk"):
        HostTier.open(LAYOUT, shm_root, LAYOUT.slot_bytes - 1)


def test_two_layouts_of_one_root_lie_apart(shm_root: Path) -> None:
    other = KVLayout.opaque(4, 5000, "another")
    one = HostTier.open(LAYOUT, shm_root, SIZE)
    one.close()
    two = HostTier.open(other, shm_root, SIZE)
    (key,) = keys_of(1)
    assert two.put(key, np.ones(5000, np.uint8), namespace=ROOT)
    two.close()


def test_holders_are_those_who_pinned(shm_root: Path) -> None:
    tier = open_host(shm_root)
    keys = keys_of(1)
    store(tier, keys)
    admin.pin(tier.ledger, keys, "somebody")
    assert tier.holders(keys[0]) == ["somebody"]
    tier.close()


@pytest.mark.parametrize("shared", [True, False])
def test_host_memory_on_a_disk_is_refused(tmp_path: Path, shared: bool) -> None:
    with pytest.raises(StoreError, match="choose a host_path in /dev/shm"):
        open_host(tmp_path / "host", shared=shared)
    assert not (tmp_path / "host").exists()
