"""A cache that cannot be opened because of a lower tier leaves no store that it made for itself."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from pagoda import Cache, KVLayout, Namespace
from pagoda.base import recorded_tiers
from pagoda.base.errors import NoRoomError
from pagoda.ledger.space_sharing import SpaceShare
from pagoda.ledger.stores_under_root import stores_in
from pagoda.slab import FileSlab, MemorySlab
from pagoda.tiers import DiskTier, HostTier
from pagoda.tiers.io_queue import WorkerPool
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


def test_an_empty_host_store_that_was_there_before_stays(
    shm_root: Path, tmp_path: Path, register: None
) -> None:
    opened(shm_root, tmp_path / "disk").close()
    refuse(shm_root, tmp_path / "disk")
    assert len(stores_in(shm_root)) == 1


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


def test_a_chunk_that_another_process_stored_meanwhile_stays(
    shm_root: Path, register: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one opened the store just after this one had closed it."""
    tier = HostTier.open(LAYOUT, shm_root, 8 << 20)
    close = tier.close

    def close_and_let_another_store() -> None:
        close()
        other = HostTier.open(LAYOUT, shm_root, 8 << 20)
        payload = np.ones(8192, np.uint8)
        assert other.put(bytes(32), payload, namespace=bytes(32))
        other.close()

    monkeypatch.setattr(tier, "close", close_and_let_another_store)
    tier.undo_opening()
    assert len(stores_in(shm_root)) == 1


def fail(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["__init__", "populate"])
def test_a_host_tier_that_fails_to_open_leaves_no_store(
    shm_root: Path, register: None, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(MemorySlab, step, fail)
    with pytest.raises(KeyboardInterrupt):
        HostTier.open(LAYOUT, shm_root, 8 << 20)
    assert stores_in(shm_root) == []
    assert recorded_tiers.entries() == []


@pytest.mark.parametrize(
    ("part", "step"),
    [(FileSlab, "__init__"), (WorkerPool, "start"), (SpaceShare, "fit_to_limit")],
)
def test_a_disk_tier_that_fails_to_open_leaves_no_store(
    tmp_path: Path,
    register: None,
    monkeypatch: pytest.MonkeyPatch,
    part: type,
    step: str,
) -> None:
    root = tmp_path / "disk"
    with monkeypatch.context() as broken:
        broken.setattr(part, step, fail)
        with pytest.raises(KeyboardInterrupt):
            DiskTier.open(LAYOUT, root, 1 << 20)
    assert stores_in(root) == []
    assert recorded_tiers.entries() == []
