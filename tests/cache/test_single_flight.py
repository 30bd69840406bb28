"""A chunk that two calls need at the same time is loaded once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from pagoda.ledger import admin
from pagoda.testing import Fault
from tests.cache.kit import (
    LAYOUT,
    SPAWN,
    blank,
    cache_at,
    kv_of,
    prompt,
    run_all,
    served,
    stored,
)
from tests.cache.test_retrieve_call import faulty_cache, on_disk


def test_many_threads_load_a_prompt_once(shm_root: Path, tmp_path: Path) -> None:
    on_disk(shm_root, tmp_path, 20)
    cache, slab = faulty_cache(shm_root, tmp_path)
    tokens = prompt(20)
    with cache, ThreadPoolExecutor(8) as threads:
        slab.delay_seconds = 0.01
        slab.fail_next("read", Fault.DELAY, times=100)
        hits = [
            hit
            for hit, _ in threads.map(lambda _: served(cache, tokens), range(8))
        ]
        assert [(hit.num_tokens, hit.reason, hit.detail) for hit in hits] == [
            (320, None, "")
        ] * 8
        assert slab.calls["read"] == 20
        assert cache.stats()["tiers"]["disk"]["loaded_chunks"] == 20  # type: ignore[index]
        assert sum(hit.by_tier.get("disk", 0) for hit in hits) == 320
        assert admin.gauges(cache._tiers.host.ledger)["reserved"] == 0  # type: ignore[union-attr]


def test_a_prefetch_and_a_retrieve_of_the_same_chunks_load_them_once(
    shm_root: Path, tmp_path: Path
) -> None:
    on_disk(shm_root, tmp_path, 20)
    cache, slab = faulty_cache(shm_root, tmp_path)
    tokens = prompt(20)
    with cache:
        slab.delay_seconds = 0.01
        slab.fail_next("read", Fault.DELAY, times=100)
        ahead = cache.prefetch(tokens)
        hit, _ = served(cache, tokens)
        assert hit.num_tokens == ahead.result(60).num_tokens == 320
        assert slab.calls["read"] == 20


def test_samples_of_one_prompt_store_it_once(shm_root: Path) -> None:
    tokens = prompt(30)
    with cache_at(shm_root, None) as cache:
        kvs = [kv_of(tokens) for _ in range(6)]
        together = threading.Barrier(6)

        def sample(n: int) -> int:
            together.wait(60)
            return cache.store(tokens, kvs[n].transfer).num_chunks

        with ThreadPoolExecutor(6) as threads:
            assert sum(threads.map(sample, range(6))) == 30
        assert served(cache, tokens)[0].num_tokens == 480


def _process(shm_root: Path, tmp_path: Path, together: Barrier) -> None:
    with cache_at(shm_root, tmp_path, host_size=64 * LAYOUT.slot_bytes) as cache:
        together.wait(60)
        for seed in range(3):
            hit, _ = served(cache, prompt(12, seed))
            assert hit.num_tokens == 192
        together.wait(60)


@pytest.mark.slow
def test_many_processes_load_prompts_once(shm_root: Path, tmp_path: Path) -> None:
    for seed in range(3):
        on_disk(shm_root, tmp_path, 12, seed)
    together = SPAWN.Barrier(3)
    run_all(
        [
            SPAWN.Process(target=_process, args=(shm_root, tmp_path, together))
            for _ in range(3)
        ]
    )
    with cache_at(shm_root, tmp_path) as cache:
        counters = cache.stats()["tiers"]["disk"]  # type: ignore[index]
        # Each process alone would load 36. The bound allows for late commits (processes may pause).
        assert isinstance(counters, dict)
        assert 36 <= counters["loaded_chunks"] <= 44
        assert cache.retrieve(prompt(12), blank(prompt(12)).transfer).by_tier == {
            "host": 192
        }


def test_a_retrieve_that_comes_second_is_served_as_chunks_arrive(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root / "before", tmp_path) as cache:
        stored(cache, prompt(16))
    cache, slab = faulty_cache(shm_root, tmp_path)
    with cache:
        slab.fail_next("read", Fault.HANG, skip=6)
        first = cache.retrieve_future(prompt(16), blank(prompt(16)).transfer)
        assert slab.hanging.wait(30)
        second = cache.retrieve_future(prompt(16), blank(prompt(16)).transfer)
        slab.heal()
        assert first.result(60).num_tokens == second.result(60).num_tokens == 256
        assert slab.calls["read"] == 16
