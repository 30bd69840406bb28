"""A close while bytes are being copied into slots: no slot is reassigned before the copy has
ended.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from pagoda.ledger import admin
from pagoda.testing import Fault
from pagoda.tiers.base import Bytes
from testbed.patience import wait_until
from tests.cache.kit import (
    LAYOUT,
    NAMESPACE,
    blank,
    cache_at,
    config_of,
    hit_of,
    kv_of,
    prompt,
    put,
    stored,
)
from tests.cache.test_retrieve_call import faulty_cache

SECONDS = 60.0
SLOTS = 16


class Slow:
    """KV whose copies to the host block until they are released."""

    layout = LAYOUT

    def __init__(self, tokens: Sequence[int]) -> None:
        self._real = kv_of(tokens).transfer  # type: ignore[arg-type]
        self.inside = threading.Event()
        self.may_go_on = threading.Event()

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        self.inside.set()
        assert self.may_go_on.wait(SECONDS)
        self._real.to_slots(starts, slots)

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        raise AssertionError("it is only stored")


def filled(cache: Cache) -> list[int]:
    """Store more than the host tier has slots; returns the seeds."""
    seeds = list(range(1, 2 * SLOTS))
    for seed in seeds:
        put(cache, prompt(1, seed))
    return seeds


def test_a_close_during_a_store_gives_no_slot_away_that_is_still_copied_into(
    shm_root: Path,
) -> None:
    size = {"host_size": SLOTS * LAYOUT.slot_bytes}
    cache = Cache(
        config_of(shm_root, None, **size), namespace=NAMESPACE, layout=LAYOUT
    )
    kv = Slow(prompt(2))
    storing = threading.Thread(target=cache.store, args=(prompt(2), kv))
    storing.start()
    assert kv.inside.wait(SECONDS)
    cache.close(0.1)
    assert cache.lookup(prompt(2)).reason is Reason.CLOSED
    with cache_at(shm_root, None, **size) as other:
        seeds = filled(other)
        kv.may_go_on.set()
        storing.join(SECONDS)
        # and every byte is right
        assert (
            sum(hit_of(other, prompt(1, seed)).num_tokens for seed in seeds) > 0
        )
        ledger = other._tiers.host.ledger  # type: ignore[union-attr]
        wait_until(lambda: admin.gauges(ledger)["reserved"] == 0)
        admin.check(ledger)


def test_a_close_while_the_disk_hangs_keeps_the_slot_that_is_read_into(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root / "before", tmp_path) as before:
        stored(before, prompt(2))
    cache, slab = faulty_cache(shm_root, tmp_path)
    slab.fail_next("read", Fault.HANG)
    hit = cache.retrieve(
        prompt(2), blank(prompt(2)).transfer, deadline_seconds=0.2
    )
    assert hit.num_tokens == 0
    assert slab.hanging.is_set()
    cache.close(0.2)
    host = cache._tiers.host
    assert host is not None
    assert not host.ledger.session.closed
    slab.release()
    wait_until(lambda: host.ledger.session.closed)


def test_what_is_closed_takes_no_copies(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        host = cache._tiers.host
        assert host is not None
    with pytest.raises(Exception, match="closed"), host.copying():
        pass
    again = put(cache, prompt(1))
    assert again.num_chunks == 0
    assert again.reason == Reason.CLOSED


@pytest.mark.parametrize("policy", ["hindsight", "lru"])
def test_a_closed_cache_leaves_no_file_mapped_until_a_collection(
    policy: str, shm_root: Path, tmp_path: Path
) -> None:
    """They hold memory of stores that were removed, in a process that opens new ones, such as
    `pagoda serve`.
    """

    def mapped() -> bool:
        maps = Path("/proc/self/maps").read_text()
        return str(shm_root) in maps or str(tmp_path) in maps

    gc.collect()
    gc.disable()
    try:
        with cache_at(shm_root, tmp_path, policy=policy) as cache:
            stored(cache, prompt(4))
            assert hit_of(cache, prompt(4)).num_tokens
            assert mapped()
        del cache
        wait_until(lambda: not mapped(), 10.0)
    finally:
        gc.enable()
