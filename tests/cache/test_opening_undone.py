"""A cache that cannot be opened because of a lower tier leaves no store that it made for itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagoda import Cache, KVLayout, Namespace
from pagoda.base.errors import NoRoomError
from pagoda.ledger.stores_under_root import stores_in
from pagoda.tiers import recorded_tiers
from pagoda.transfer import BlockKV

LAYOUT = KVLayout.opaque(16, 8192, "undone")
TOKENS = np.arange(64, dtype=np.int32)


def opened(host: Path, disk: Path, disk_size: int | str = 0) -> Cache:
    return Cache(
        namespace=Namespace(model="m"),
        layout=LAYOUT,
        chunk_tokens=16,
        host_path=str(host),
        host_size="8MiB",
        disk_path=str(disk) if disk_size else "",
        disk_size=disk_size,
        worth_it=False,
    )


def refuse(host: Path, disk: Path) -> None:
    """Open a cache whose disk has no room for its size."""
    with pytest.raises(NoRoomError):
        opened(host, disk, "900TiB")


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_a_host_store_made_for_a_cache_that_was_refused_is_removed(
    shm_root: Path, tmp_path: Path, register: None
) -> None:
    refuse(shm_root, tmp_path / "disk")
    assert stores_in(shm_root) == []
    assert recorded_tiers.entries() == []


def test_a_host_store_that_was_there_before_stays(
    shm_root: Path, tmp_path: Path, register: None
) -> None:
    kv = BlockKV(np.ones((4, 8192), np.uint8), LAYOUT)
    with opened(shm_root, tmp_path / "disk") as cache:
        cache.store(TOKENS, kv)
    refuse(shm_root, tmp_path / "disk")
    with opened(shm_root, tmp_path / "disk") as cache:
        assert cache.lookup(TOKENS).num_tokens == 64
    assert [entry.tier for entry in recorded_tiers.entries()] == ["host"]


def test_a_host_store_that_another_cache_has_open_stays(
    shm_root: Path, tmp_path: Path, register: None
) -> None:
    kv = BlockKV(np.ones((4, 8192), np.uint8), LAYOUT)
    with opened(shm_root, tmp_path / "disk") as cache:
        refuse(shm_root, tmp_path / "disk")
        cache.store(TOKENS, kv)
        assert cache.lookup(TOKENS).num_tokens == 64
    assert len(stores_in(shm_root)) == 1


def test_a_store_that_the_first_of_two_caches_made_keeps_its_chunks(
    shm_root: Path, tmp_path: Path, register: None
) -> None:
    """The ledger of one process is shared: what the first made is not the second's."""
    first = opened(shm_root, tmp_path / "disk")
    kv = BlockKV(np.ones((4, 8192), np.uint8), LAYOUT)
    first.store(TOKENS, kv)
    refuse(shm_root, tmp_path / "disk")
    first.close()
    with opened(shm_root, tmp_path / "disk") as cache:
        assert cache.lookup(TOKENS).num_tokens == 64
