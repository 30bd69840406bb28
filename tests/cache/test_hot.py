"""Hot chunks of an upper tier stay in the lower tier: their age is updated, and missing ones are
written again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagoda.cache import Cache
from pagoda.cache.writeback import Access
from pagoda.policy.hindsight import _SharedValues
from pagoda.testing import FakeClock
from pagoda.tiers import DiskTier, HostTier
from testbed.patience import wait_until
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    config_of,
    hit_of,
    keys_of,
    on_disk,
    prompt,
    put,
    served,
    stored,
)

HOT = prompt(20, 1)
DISK = 60 * (LAYOUT.slot_bytes + 4096)


@contextmanager
def small_disk(
    shm_root: Path, tmp_path: Path, clock: FakeClock, **options: object
) -> Iterator[Cache]:
    """A cache whose disk has 60 slots, below a host tier of 512."""
    config = config_of(
        shm_root,
        tmp_path,
        host_size=512 * LAYOUT.slot_bytes,
        disk_size=DISK,
        **options,
    )
    with Cache(config, namespace=NAMESPACE, layout=LAYOUT, clock=clock) as cache:
        yield cache


def use_beside_others(cache: Cache, clock: FakeClock, again: bool) -> None:
    """Serve the hot prompt from the host while others pass through the disk, four times as many as
    it holds.
    """
    for seed in range(30):
        clock.advance(1)
        stored(cache, prompt(8, 100 + seed))
        assert hit_of(cache, HOT).by_tier == {"host": 20 * CHUNK}
        if again:
            assert put(cache, HOT).present == 20
        assert cache.flush(100)


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("policy", ["lru", "hindsight"])
def test_a_hot_prompt_survives_a_reboot_with_a_small_disk(
    shm_root: Path, tmp_path: Path, policy: str, again: bool
) -> None:
    clock = FakeClock()
    with small_disk(shm_root / "before", tmp_path, clock, policy=policy) as cache:
        stored(cache, HOT)
        use_beside_others(cache, clock, again)
        assert cache.stats()["tiers"]["disk"]["ready"] == 60  # type: ignore[index]
    with small_disk(
        shm_root / "after", tmp_path, clock, policy=policy
    ) as cache:  # memory is empty after a boot
        assert hit_of(cache, HOT).by_tier == {"disk": 20 * CHUNK}
        assert hit_of(cache, prompt(8, 100)).num_tokens == 0


@pytest.mark.parametrize("policy", ["write_through", "selective", "write_back"])
def test_what_the_disk_has_lost_is_written_again_when_it_is_used(
    shm_root: Path, tmp_path: Path, policy: str
) -> None:
    clock = FakeClock()
    with small_disk(
        shm_root, tmp_path, clock, write_policy=policy, selective_hits=1
    ) as cache:
        stored(cache, HOT)
        served(cache, HOT)
        assert cache.flush(100)
        assert on_disk(cache, HOT) == 20
        disk = cache._tiers.lower[0]
        for key in keys_of(cache, HOT)[5:]:
            assert disk.remove(key)
        clock.advance(1)
        assert hit_of(cache, HOT).by_tier == {"host": 20 * CHUNK}
        assert cache.flush(100)
        assert on_disk(cache, HOT) == 20


def test_another_process_of_the_host_tier_fills_the_disk_that_it_brings(
    shm_root: Path, tmp_path: Path
) -> None:
    """A process that has written no chunk finds all of them in host memory."""
    with small_disk(shm_root, tmp_path / "one", FakeClock()) as first:
        stored(first, HOT)
        with small_disk(shm_root, tmp_path / "two", FakeClock()) as second:
            assert hit_of(second, HOT).by_tier == {"host": 20 * CHUNK}
            assert second.flush(100)
            assert on_disk(second, HOT) == 20


def asked_again(cache: Cache) -> float:
    """Return of how many chunks the disk's policy has seen a repeated request."""
    disk = cache._tiers.lower[0]
    assert isinstance(disk, DiskTier)
    ledger = disk.ledger
    ledger.upkeep_thread.run_once()
    return float(_SharedValues.of(ledger.upkeep_thread.learned).asked.sum())  # type: ignore[arg-type]


def test_a_use_is_reported_before_what_is_stored_after_it(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storing raises recency in the lower tier: a use reported after it looks like the use of a new
    chunk.
    """
    monkeypatch.setattr("pagoda.cache.writeback._GATHER_SECONDS", 1e6)
    clock = FakeClock()
    with small_disk(shm_root, tmp_path, clock, policy="hindsight") as cache:
        stored(cache, HOT)
        clock.advance(10)
        assert hit_of(cache, HOT).by_tier == {"host": 20 * CHUNK}
        put(cache, HOT)
        wait_until(
            lambda: all(
                queue.waiting == 0 for queue in cache._resources.writeback
            )
        )
        assert cache.flush(100)
        assert asked_again(cache) == 20


def test_a_use_is_reported_before_what_passes_through_a_buffer_after_it(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.cache.writeback._GATHER_SECONDS", 1e6)
    clock = FakeClock()
    with small_disk(shm_root, tmp_path, clock) as cache:
        stored(cache, HOT)
        # the disk is full now, and the hot prompt is its oldest
        for seed in range(2):
            clock.advance(1)
            stored(cache, prompt(20, 100 + seed))
        clock.advance(1)
        assert hit_of(cache, HOT).by_tier == {"host": 20 * CHUNK}
        put(cache, prompt(20, 102), tiers=["disk"])
        assert on_disk(cache, HOT) == 20


class Slow(DiskTier):
    """A disk tier that answers touches on demand."""

    may_answer: threading.Event
    touches: int

    def touch(
        self,
        keys: Sequence[bytes],
        *,
        namespace: bytes,
        start: int = 0,
        stamp: int | None = None,
        asked: bool = True,
    ) -> list[bool] | None:
        self.touches += 1
        assert self.may_answer.wait(60)
        return super().touch(
            keys, namespace=namespace, start=start, stamp=stamp, asked=asked
        )


def test_a_hit_waits_for_no_tier_below(shm_root: Path, tmp_path: Path) -> None:
    clock = FakeClock()
    config = config_of(shm_root, None)
    host = HostTier.open(
        LAYOUT, Path(config.host_path), config.host_bytes, clock=clock
    )
    slow = Slow.open(LAYOUT, tmp_path, DISK, clock=clock)
    slow.may_answer = threading.Event()
    slow.touches = 0
    with Cache(
        config,
        namespace=NAMESPACE,
        layout=LAYOUT,
        tiers=[host, slow],
        clock=clock,
    ) as cache:
        put(cache, HOT)
        for _ in range(20):
            assert hit_of(cache, HOT).by_tier == {"host": 20 * CHUNK}
        assert not cache.flush(0.01)
        slow.may_answer.set()
        assert cache.flush(100)
        for _ in range(2):
            before = slow.touches
            clock.advance(1)
            for _ in range(20):
                served(cache, HOT)
            assert cache.flush(100)
            # the other notes contained nothing new
            assert slow.touches == before + 1


def test_notes_of_uses_are_bounded(shm_root: Path, tmp_path: Path) -> None:
    clock = FakeClock()
    with small_disk(shm_root, tmp_path, clock) as cache:
        stored(cache, HOT)
        (queue,) = cache._resources.writeback
        access = Access(cache.namespace.root, list, 1 << 12)
        for _ in range(100):
            queue.note_access(access)
        assert queue._accessed <= 1 << 16
        assert cache.flush(100)
        assert not queue._accesses
        assert not queue._accessed
