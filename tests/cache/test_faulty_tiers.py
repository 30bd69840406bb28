"""Tiers of a caller that break their promises: futures that raise, too few of them, or too many. No
slot or buffer is lost, and none is given to others while the tier may still fill it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from pagoda.tiers import DiskTier, HostTier
from pagoda.tiers.base import Bytes, Chunk, Done
from pagoda.transfer import BlockKV
from testbed.patience import wait_until
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    PATIENT_SECONDS,
    blank,
    config_of,
    kv_of,
    prompt,
    served,
    stored,
)

CHUNKS = 6
FAILED = ["raises", "cancelled"]
MISCOUNTED = ["too few", "too many"]


class Promiser(DiskTier):
    """A disk whose futures are not what was promised, of one call."""

    loads = stores = ""
    # what it may still fill
    kept: list[Bytes]

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[Bytes], **options: object
    ) -> list[Future[Done]]:
        if not self.loads:
            return super().load(keys, buffers, **options)  # type: ignore[arg-type]
        self.kept = [] if self.loads in FAILED else list(buffers)
        wrong = self.loads
        if wrong == "says nothing":
            self.loads = "raises"
        return _as_promised(wrong, len(keys))

    def fill(self) -> None:
        """Fill what it has kept, and keep it no longer."""
        for buffer in self.kept:
            buffer[:] = 0xEE
        self.kept = []

    def store(
        self, chunks: Sequence[Chunk], namespace: bytes, **options: object
    ) -> list[Future[Done]]:
        if not self.stores:
            return super().store(chunks, namespace, **options)  # type: ignore[arg-type]
        return _as_promised(self.stores, len(chunks))


def _as_promised(wrong: str, count: int) -> list[Future[Done]]:
    count += {"too few": -1, "too many": 1}.get(wrong, 0)
    futures = [Future[Done]() for _ in range(count)]
    for at, future in enumerate(futures):
        if wrong == "says nothing":
            future.set_result(Done(None if at else True))  # type: ignore[arg-type]
        elif wrong == "raises":
            future.set_exception(RuntimeError("not a value"))
        elif wrong == "cancelled":
            future.cancel()
    return futures


@pytest.fixture(params=[True, False], ids=["host", "no host"])
def cache(
    shm_root: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Cache]:
    disk = Promiser.open(
        LAYOUT, tmp_path, 64 << 20, deadline_seconds=PATIENT_SECONDS
    )
    tiers: list[HostTier | DiskTier] = [disk]
    if request.param:
        host = HostTier.open(LAYOUT, shm_root, 8 * LAYOUT.slot_bytes)
        tiers = [host, disk]
    with Cache(
        config_of(shm_root, None),
        namespace=NAMESPACE,
        layout=LAYOUT,
        tiers=tiers,
    ) as cache:
        yield cache


def disk_of(cache: Cache) -> Promiser:
    disk = cache._tiers.lower[0]
    assert isinstance(disk, Promiser)
    return disk


def wipe_host(cache: Cache) -> None:
    if (host := cache._tiers.host) is not None:
        host.clear()


def is_nothing_held(cache: Cache) -> bool:
    stats = cache.stats()
    tiers: dict[str, dict[str, int]] = stats["tiers"]
    reserved = sum(tier.get("reserved", 0) for tier in tiers.values())
    return not reserved and not stats["staging_buffers"]


@pytest.mark.parametrize("wrong", FAILED)
def test_a_load_that_raises_later_is_a_miss(cache: Cache, wrong: str) -> None:
    tokens = prompt(CHUNKS)
    stored(cache, tokens)
    wipe_host(cache)
    disk = disk_of(cache)
    disk.loads = wrong
    hit = cache.retrieve(tokens, blank(tokens).transfer)
    assert hit.num_tokens == 0
    assert hit.reason == Reason.IO_ERROR
    # who says that it has failed fills nothing any more
    assert is_nothing_held(cache), cache.stats()
    disk.loads = ""
    assert served(cache, tokens)[0].num_tokens == len(tokens)


def test_what_a_tier_does_not_say_it_has_is_not_served(cache: Cache) -> None:
    """Its answer for all chunks but the first is neither true nor false."""
    tokens = prompt(CHUNKS)
    stored(cache, tokens)
    wipe_host(cache)
    disk = disk_of(cache)
    disk.loads = "says nothing"
    hit = cache.retrieve(tokens, blank(tokens).transfer)
    assert hit.num_tokens <= CHUNK
    disk.loads = ""
    assert served(cache, tokens)[0].num_tokens == len(tokens)


@pytest.mark.parametrize("wrong", MISCOUNTED)
def test_what_a_tier_may_still_fill_is_not_given_to_others(
    cache: Cache, wrong: str
) -> None:
    tokens = prompt(CHUNKS)
    other = prompt(CHUNKS, seed=3)
    for each in (tokens, other):
        stored(cache, each)
    wipe_host(cache)
    disk = disk_of(cache)
    disk.loads = wrong
    hit = cache.retrieve(tokens, blank(tokens).transfer)
    assert hit.num_tokens == 0
    assert hit.reason == Reason.IO_ERROR
    disk.loads = ""

    class Slow(BlockKV):
        """Is copied to while the tier fills what it has kept."""

        def from_slots(
            self, starts: Sequence[int], slots: Sequence[Bytes]
        ) -> None:
            disk.fill()
            super().from_slots(starts, slots)

    kv = blank(other)
    hit = cache.retrieve(other, Slow(kv.blocks, LAYOUT))
    assert hit.num_tokens > 0
    assert kv.same(kv_of(other), 0, hit.num_tokens // CHUNK)
    wait_until(lambda: is_nothing_held(cache), why_not=cache.stats)


@pytest.mark.parametrize("wrong", FAILED + MISCOUNTED)
def test_a_store_that_is_not_as_promised_keeps_nothing(
    cache: Cache, wrong: str
) -> None:
    disk = disk_of(cache)
    disk.stores = wrong
    # more chunks than there are staging buffers
    for seed in range(4):
        tokens = prompt(CHUNKS, seed)
        answer = cache.store(tokens, kv_of(tokens).transfer)
        assert cache.flush(PATIENT_SECONDS)
    if cache._tiers.host is None:
        assert answer.refused == CHUNKS
        assert answer.reason == Reason.IO_ERROR
    if wrong in FAILED:
        wait_until(lambda: is_nothing_held(cache), why_not=cache.stats)
    disk.stores = ""
    tokens = prompt(CHUNKS, seed=9)
    stored(cache, tokens)
    wipe_host(cache)
    assert served(cache, tokens)[0].num_tokens == len(tokens)
