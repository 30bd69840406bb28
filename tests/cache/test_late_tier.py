"""A cache that starts without its disk tier, and the disk tier that takes part later."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagoda.base.errors import StoreError
from pagoda.base.metrics import Reason
from pagoda.cache import Cache, late_tier, open_tiers
from pagoda.config import Config
from pagoda.config.sources import load
from pagoda.ledger.stores_under_root import root_locked
from testbed.patience import wait_until
from tests.cache.kit import (
    LAYOUT,
    NAMESPACE,
    cache_at,
    config_of,
    hit_of,
    prompt,
    stored,
)

REDIS = "redis://127.0.0.1:1/0"  # nobody answers there, and nobody is asked


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attempts follow each other soon."""
    monkeypatch.setattr(late_tier, "_FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(late_tier, "_LAST_PAUSE_SECONDS", 0.05)


_HERE = -100  # AT_FDCWD
_RENAME_EXCHANGE = 2


class Drive:
    """The directory above that of a disk tier. While it is away, a file is in its place."""

    def __init__(self, above: Path) -> None:
        self.path = above / "drive"
        self._away = above / "away"
        self.path.mkdir()

    def goes_away(self) -> None:
        self._away.write_text("")
        exchange(self.path, self._away)

    def comes_back(self) -> None:
        exchange(self.path, self._away)
        self._away.unlink()


def exchange(one: Path, other: Path) -> None:
    """Exchange two files or directories at once: a cache that looks in between finds one of them,
    never nothing, where it would make a directory.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(_HERE, names[0], _HERE, names[1], _RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), "they cannot be exchanged", str(one))


@pytest.fixture
def drive(tmp_path: Path) -> Drive:
    return Drive(tmp_path)


@contextmanager
def without_disk(
    shm_root: Path, drive: Drive, **options: object
) -> Iterator[Cache]:
    """Open a cache while the drive is away."""
    drive.goes_away()
    try:
        with cache_at(
            shm_root, drive.path, start_without="lower", **options
        ) as cache:
            yield cache
    finally:
        if drive.path.is_file():
            drive.comes_back()


def comes_back(drive: Drive, cache: Cache) -> None:
    """Let the drive come back, and wait until the tier takes part."""
    drive.comes_back()
    wait_until(lambda: "disk" in cache.tiers)


def test_engines_start_without_a_disk_and_a_bare_cache_does_not() -> None:
    assert (
        Config().start_without == load(environ={}).config.start_without == "none"
    )
    assert load(environ={}).for_engine().start_without == "lower"
    assert (
        load(environ={"PAGODA_START_WITHOUT": "none"}).for_engine().start_without
        == "none"
    )


def test_a_cache_starts_without_its_disk_says_so_and_uses_it_later(
    shm_root: Path, drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    old = prompt(2, seed=1)
    new = prompt(2, seed=2)
    with cache_at(None, drive.path) as cache:
        stored(cache, old)
    drive.goes_away()
    with pytest.raises(StoreError, match="Not a directory"):
        Cache(config_of(shm_root, drive.path), namespace=NAMESPACE, layout=LAYOUT)
    drive.comes_back()
    with caplog.at_level(logging.WARNING), without_disk(shm_root, drive) as cache:
        assert cache.tiers == ("host",)
        assert "starting without the disk tier" in caplog.text
        assert "Not a directory" in cache.stats()["left_out"]["disk"]
        hit = cache.lookup(old)
        assert hit.reason is Reason.TIER_SKIPPED
        assert "left out at the start" in str(hit.detail)
        stored(cache, new)
        # it is a tier of this cache all the same
        assert cache.lookup(new, tiers=["disk"]).num_tokens == 0
        comes_back(drive, cache)
        assert cache.tiers == ("host", "disk")
        assert "left_out" not in cache.stats()
        assert hit_of(cache, old).by_tier["disk"] == len(old)
        stored(cache, prompt(2, seed=3))
    with cache_at(None, drive.path) as cache:
        assert hit_of(cache, prompt(2, seed=3)).num_tokens == len(old)


def test_weights_that_changed_meanwhile_are_recorded_before_the_tier_takes_part(
    shm_root: Path, drive: Drive
) -> None:
    tokens = prompt(2, seed=1)
    with cache_at(shm_root, drive.path) as cache:
        stored(cache, tokens)
    with without_disk(shm_root, drive) as cache:
        assert cache.lookup(tokens).num_tokens == len(tokens)
        with pytest.raises(
            StoreError,
            match=r"left out could not record.*disk: .*Not a directory",
        ):
            cache.weights_changed()
        assert cache.lookup(tokens).num_tokens == 0
        comes_back(drive, cache)
        assert cache.lookup(tokens).num_tokens == 0
    shutil.rmtree(shm_root / "host")  # a reboot: only the disk knows
    with cache_at(shm_root, drive.path) as cache:
        assert cache.lookup(tokens).num_tokens == 0


def test_a_tier_that_comes_late_with_more_changes_does_not_know_the_present_weights(
    shm_root: Path, drive: Drive
) -> None:
    """Its count is higher, but what it counted was before the change that it missed."""
    tokens = prompt(2, seed=1)
    with cache_at(shm_root, drive.path) as cache:
        for _ in range(3):
            cache.weights_changed()
        stored(cache, tokens)
    shutil.rmtree(shm_root / "host")  # a reboot
    with without_disk(shm_root, drive) as cache:
        with pytest.raises(StoreError, match="left out could not record"):
            cache.weights_changed()
        comes_back(drive, cache)
        assert cache.lookup(tokens).num_tokens == 0
    with cache_at(shm_root, drive.path) as cache:
        assert cache.lookup(tokens).num_tokens == 0


def test_a_cache_of_the_same_weights_that_has_the_tier_compares_its_root(
    shm_root: Path, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares the epoch with a cache that has left the tier out, so nobody has read that root
    yet.
    """
    tokens = prompt(2, seed=1)
    with cache_at(shm_root, drive.path) as cache:
        stored(cache, tokens)
    with cache_at(shm_root, drive.path) as cache:
        assert cache.lookup(tokens, tiers=["disk"]).num_tokens == len(tokens)
        cache.weights_changed()
    # no second attempt comes in between
    monkeypatch.setattr(late_tier, "start_thread", lambda *_: None)
    shutil.rmtree(shm_root / "host")  # a reboot
    with without_disk(shm_root, drive) as cache:
        drive.comes_back()
        config = config_of(shm_root, drive.path, start_without="lower")
        with Cache(
            config, namespace=NAMESPACE, layout=LAYOUT, weights_of=cache
        ) as other:
            assert other.tiers == ("host", "disk")
            assert cache.tiers == ("host",)
            assert other.lookup(tokens).num_tokens == 0


def test_weights_that_changed_while_only_the_root_answers_are_recorded_there(
    shm_root: Path, drive: Drive
) -> None:
    tokens = prompt(2, seed=1)
    with cache_at(shm_root, drive.path) as cache:
        stored(cache, tokens)
    (store,) = (drive.path / "disk").glob("[0-9a-f]" * 16)
    (drive.path / "disk" / "elsewhere").mkdir()
    store.rename(drive.path / "disk" / "elsewhere" / "store")
    # which a store cannot be
    store.symlink_to(drive.path / "disk" / "elsewhere" / "store")
    with cache_at(shm_root, drive.path, start_without="lower") as cache:
        assert cache.tiers == ("host",)
        wait_until(lambda: not cache._weights._epoch.unread)
        cache.weights_changed()
    shutil.rmtree(shm_root / "host")
    store.unlink()
    (drive.path / "disk" / "elsewhere" / "store").rename(store)
    with cache_at(shm_root, drive.path) as cache:
        assert cache.lookup(tokens).num_tokens == 0


def test_the_epoch_of_a_root_that_was_away_counts_from_its_return_on(
    shm_root: Path, drive: Drive
) -> None:
    """Until then no other machine's KV is used: only that root may know of a change."""
    with cache_at(None, drive.path) as cache:
        cache.weights_changed()
    with without_disk(shm_root, drive, remote=(REDIS,)) as cache:
        assert cache.tiers == ("host", "redis")
        assert cache._weights.scope()[1].names == ("host",)
        before = cache.present_namespace().root
        comes_back(drive, cache)
        assert cache.present_namespace().root != before
    with without_disk(shm_root, drive, host_size=0, remote=(REDIS,)) as cache:
        assert cache._weights.scope()[1].names == ()


def test_without_a_change_the_remote_tier_is_used_again_when_the_root_answers(
    shm_root: Path, drive: Drive
) -> None:
    with without_disk(shm_root, drive, remote=(REDIS,)) as cache:
        assert cache._weights.scope()[1].names == ("host",)
        comes_back(drive, cache)
        assert cache._weights.scope()[1].names == ("host", "disk", "redis")


def test_chunks_that_were_cleared_meanwhile_are_removed_before_the_tier_takes_part(
    shm_root: Path, drive: Drive
) -> None:
    tokens = prompt(2, seed=1)
    with cache_at(None, drive.path) as cache:
        stored(cache, tokens)
    with without_disk(shm_root, drive) as cache:
        cleared = cache.clear()
        assert cleared.chunks == {"host": 0}
        assert "left out at the start" in cleared.failed["disk"]
        comes_back(drive, cache)
        assert cache.lookup(tokens).num_tokens == 0
        assert cache.clear().failed == {}
    with cache_at(None, drive.path) as cache:
        assert cache.lookup(tokens).num_tokens == 0


def test_a_disk_that_does_not_answer_is_not_waited_for(
    shm_root: Path, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process holds the lock of its root; a device that is dead does the same."""
    tokens = prompt(2, seed=1)
    with cache_at(None, drive.path) as cache:
        stored(cache, tokens)
    monkeypatch.setattr(open_tiers, "_DISK_SECONDS", 0.1)
    with contextlib.ExitStack() as held:
        held.enter_context(root_locked(drive.path / "disk", 10.0))
        with cache_at(shm_root, drive.path, start_without="lower") as cache:
            assert cache.tiers == ("host",)
            assert "no answer" in cache.stats()["left_out"]["disk"]
            held.close()
            wait_until(lambda: "disk" in cache.tiers)
            assert hit_of(cache, tokens).by_tier["disk"] == len(tokens)


def test_a_cache_that_is_closed_first_leaves_no_thread_and_no_open_store(
    shm_root: Path, drive: Drive
) -> None:
    with without_disk(shm_root, drive) as cache:
        pass
    wait_until(
        lambda: (
            not any(
                thread.name == "pagoda-late-tier"
                for thread in threading.enumerate()
            )
        )
    )
    assert cache.tiers == ("host",)
    with cache_at(None, drive.path) as again:
        assert again.tiers == ("disk",)
