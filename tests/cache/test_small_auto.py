"""A host store whose size is only an upper limit, on a machine with room for a quarter of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from pagoda.base import store_place
from pagoda.base.cgroup_memory import CgroupRoom
from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger, admin
from pagoda.tiers import DiskTier, HostTier
from pagoda.transfer import BlockKV
from testbed.patience import wait_until
from tests.cache.kit import CHUNK, PATIENT_SECONDS, config_of, prompt

MIB = 1 << 20
LAYOUT = KVLayout.opaque(CHUNK, 256 << 10, "small auto")


@pytest.fixture
def cache(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cache]:
    """A cache of at most 256 chunks in host memory, of which 64 fit."""
    rooms = [CgroupRoom(1024 * MIB, 256 * MIB)]
    monkeypatch.setattr(store_place, "cgroup_rooms", lambda: rooms)
    host = HostTier.open(LAYOUT, shm_root, 64 * MIB, policy="lru", grows=True)
    disk = DiskTier.open(LAYOUT, tmp_path, 64 * MIB, policy="lru")
    made = Cache(
        config_of(None, None, write_policy="write_back"),
        namespace=Namespace("a-model"),
        layout=LAYOUT,
        tiers=[host, disk],
    )
    with closing(made):
        yield made


def ledger_of(cache: Cache) -> Ledger:
    return cache.slots.ledgers["host"]


def store(cache: Cache, seed: int, chunks: int = 4) -> None:
    blocks = np.full((chunks, LAYOUT.chunk_bytes), seed, np.uint8)
    answer = cache.store(prompt(chunks, seed), BlockKV(blocks, LAYOUT))
    assert answer.refused == 0, answer


def fill(cache: Cache) -> int:
    """Store until all slots that have pages are taken; return how many that are."""
    ledger = ledger_of(cache)
    for seed in range(ledger.slots // 4):
        store(cache, seed)
        totals = admin.gauges(ledger)
        if not totals["free"] and ledger.growth_thread.rests:
            break
    fitting = totals["slots"] - totals["unbacked"]
    assert fitting * 2 < ledger.slots
    return fitting


@pytest.mark.parametrize("named", [True, False])
def test_chunks_are_written_before_they_are_evicted(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    if not named:
        # as the sample of a policy, if few of very many slots have pages
        none = np.empty(0, np.int64)
        monkeypatch.setattr(ledger_of(cache), "next_victims", lambda _: none)
    fitting = fill(cache)
    wait_until(
        lambda: cache.stats()["tiers"]["disk"]["ready"] >= fitting // 8,
        seconds=10.0,
    )


def test_a_prefetch_fills_half_of_what_fits(cache: Cache) -> None:
    tokens = prompt(200, 1)
    blocks = np.zeros((200, LAYOUT.chunk_bytes), np.uint8)
    kv = BlockKV(blocks, LAYOUT)
    cache.store(tokens, kv, tiers=["disk"])
    assert cache.flush(PATIENT_SECONDS)
    fitting = fill(cache)
    hit = cache.prefetch(tokens).result(PATIENT_SECONDS)
    assert hit.by_tier["disk"] == fitting // 2 * CHUNK
    assert hit.reason is Reason.FULL
