"""How full a store is: one figure for all screens."""

from __future__ import annotations

from pathlib import Path

from pagoda import Cache, KVLayout, Namespace
from pagoda.ledger.store_stats import StoreStats

MIB = 1 << 20


def cache(root: Path, size: str, tokens: int = 64) -> Cache:
    layout = KVLayout.opaque(tokens, MIB, f"{tokens:016x}")
    return Cache(
        namespace=Namespace("m"), layout=layout, host_path=root, host_size=size
    )


def of(opened: Cache) -> StoreStats:
    ((_, ledger),) = opened._tiers.ledgers()
    return StoreStats.of(ledger)


def test_a_store_that_grows_is_full_of_the_size_that_it_may_have(
    shm_root: Path,
) -> None:
    with cache(shm_root, "auto") as grows:
        stats = of(grows)
        assert stats.size_bytes < stats.grown_bytes
        assert stats.grown_bytes == stats.gauges["slots"] * MIB


def test_after_a_smaller_size_it_is_that_one(shm_root: Path) -> None:
    cache(shm_root, "64MiB").close()
    with cache(shm_root, "16MiB") as smaller:
        assert smaller.config.host_bytes == 16 * MIB
        assert of(smaller).gauges["slots"] == 64
        assert of(smaller).grown_bytes == 16 * MIB


def test_two_stores_of_one_root_are_full_of_what_they_have_together(
    shm_root: Path,
) -> None:
    with cache(shm_root, "16MiB") as one, cache(shm_root, "16MiB", 32) as two:
        assert of(one).grown_bytes + of(two).grown_bytes == 16 * MIB
        assert of(two).grown_bytes == of(two).size_bytes
