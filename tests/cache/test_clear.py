"""Clearing: all tiers, this namespace only, and no cleared chunk is found again."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from pagoda.base.metrics import Reason
from pagoda.ledger import admin
from pagoda.ledger.namespace_registry import NamespaceRegistry
from pagoda.tiers import Chunk, Done
from tests.cache.kit import (
    NAMESPACE,
    blank,
    cache_at,
    hit_of,
    keys_of,
    kv_of,
    on_disk,
    prompt,
    put,
    stored,
)


def test_every_tier_is_cleared_and_counted(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(5))
        cleared = cache.clear()
        assert cleared.ok
        assert cleared.chunks == {"host": 5, "disk": 5}
        assert hit_of(cache, prompt(5)).num_tokens == 0
    with cache_at(shm_root / "after", tmp_path) as cache:
        assert hit_of(cache, prompt(5)).num_tokens == 0


def test_what_is_stored_after_a_clear_hits_again_on_the_disk(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        for turn in range(3):
            stored(cache, prompt(4))
            assert hit_of(cache, prompt(4), tiers=["disk"]).num_tokens == 64, turn
            assert cache.clear(everything=turn == 1).ok
            assert hit_of(cache, prompt(4)).num_tokens == 0


def test_what_comes_up_in_the_middle_of_a_clear_is_cleared_above_as_well(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another call loads the chunks from the disk, which is not cleared yet, after the host is
    cleared.
    """
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(4))
        host = cache._tiers.host
        [disk] = cache._tiers.lower
        assert host is not None
        clear = disk.clear
        came = []

        def bring_up_and_clear(namespace: bytes | None = None) -> int:
            came.append(hit_of(cache, prompt(4)).num_tokens)
            return clear(namespace)

        monkeypatch.setattr(disk, "clear", bring_up_and_clear)
        assert cache.clear().chunks == {"host": 8, "disk": 4}
        assert came == [64]
        assert admin.gauges(host.ledger)["ready"] == 0
        assert hit_of(cache, prompt(4)).num_tokens == 0


def test_one_tenant_is_cleared_and_the_others_stay(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        for salt in ("", "one", "two"):
            stored(cache, prompt(4), salt=salt)
        assert cache.clear(salt="one").chunks == {"host": 4, "disk": 4}
        assert cache.lookup(prompt(4), salt="one").num_tokens == 0
        assert hit_of(cache, prompt(4), salt="two").num_tokens == 64
        assert (
            hit_of(cache, prompt(4), salt="two", tiers=["disk"]).num_tokens == 64
        )
        assert cache.clear().chunks == {"host": 4, "disk": 4}
        assert hit_of(cache, prompt(4), salt="two").num_tokens == 64
        assert cache.clear(everything=True).chunks == {"host": 4, "disk": 4}
        assert cache.lookup(prompt(4), salt="two").num_tokens == 0


def test_another_model_stays(shm_root: Path) -> None:
    with (
        cache_at(shm_root, None) as cache,
        cache_at(shm_root, None, NAMESPACE.with_(model="b")) as other,
    ):
        stored(cache, prompt(4))
        stored(other, prompt(4))
        assert cache.clear().chunks == {"host": 4}
        assert hit_of(other, prompt(4)).num_tokens == 64


def test_a_tier_that_fails_is_named_and_the_others_are_cleared(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(5))
        host = cache._tiers.host
        assert host is not None

        def broken(_: object = None) -> int:
            raise OSError("out of order")

        monkeypatch.setattr(host, "clear", broken)
        cleared = cache.clear()
        assert not cleared.ok
        assert cleared.chunks["disk"] == 5
        assert "out of order" in cleared.failed["host"]


@pytest.mark.parametrize("by", ["this cache", "another"])
def test_what_waits_in_a_staging_buffer_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Without a host slot, a chunk waits in a buffer until the disk takes it, also while another
    cache clears.
    """
    with cache_at(None, tmp_path) as cache, cache_at(None, tmp_path) as other:
        [disk] = cache._tiers.lower
        save = disk.store
        waits = threading.Event()
        may_save = threading.Event()

        def save_later(
            chunks: Sequence[Chunk], namespace: bytes, *, stamp: int | None = None
        ) -> list[Future[Done]]:
            waits.set()
            assert may_save.wait(60)
            return save(chunks, namespace, stamp=stamp)

        def save_first(
            registry: NamespaceRegistry, namespace: bytes | None
        ) -> None:
            """Save the chunks after the tables are cleared, and before the record is on the
            disk.
            """
            may_save.set()
            storing.result(60)
            assert cache.flush(60)
            save_clear(registry, namespace)

        save_clear = NamespaceRegistry.save_clear
        monkeypatch.setattr(NamespaceRegistry, "save_clear", save_first)
        monkeypatch.setattr(disk, "store", save_later)
        storing = cache.store_future(prompt(4), kv_of(prompt(4)).transfer)
        assert waits.wait(60)
        assert (cache if by == "this cache" else other).clear().ok
        may_save.set()
        storing.result(60)
        assert cache.flush(60)
        assert [other.holders(key) for key in keys_of(cache, prompt(4))] == [
            []
        ] * 4
        stored(cache, prompt(4))
        assert on_disk(other, prompt(4)) == 4


def test_a_store_that_began_before_does_not_come_back(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stop = threading.Event()
        clears = 0

        def storing() -> None:
            seed = 0
            while not stop.is_set():
                seed += 1
                put(cache, prompt(4, seed))

        thread = threading.Thread(target=storing)
        thread.start()
        until = time.monotonic() + 60
        rounds = 0
        # until the thread has started
        while rounds < 20 or (not clears and time.monotonic() < until):
            rounds += 1
            clears += sum(cache.clear().chunks.values())
        stop.set()
        thread.join(60)
        assert cache.flush(100)
        cache.clear()
        assert clears > 0
        for tier in cache._tiers.all:
            assert tier.stats()["ready"] == 0
        assert cache.retrieve(prompt(4, 1), blank(prompt(4)).transfer).reason in (
            Reason.CLEARED,
            Reason.EVICTED,  # by a later chunk, before a clear
            Reason.ABSENT,
        )
