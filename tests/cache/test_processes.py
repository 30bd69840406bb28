"""Several processes with one cache: right bytes and no leaks after any of them dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from pagoda.ledger import Ledger, admin
from pagoda.slab import MemorySlab
from testbed.patience import Patience
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    SPAWN,
    blank,
    cache_at,
    hit_of,
    kv_of,
    prompt,
    put,
    run_all,
    served,
    stored,
)
from tests.cache.test_retrieve_call import Watching

PROMPTS = 12
SMALL = 40 * LAYOUT.slot_bytes  # evicts all the time


def _busy(shm_root: Path, tmp_path: Path, number: int, seconds: float) -> None:
    random = np.random.default_rng(number)
    until = time.monotonic() + seconds
    with cache_at(
        shm_root, tmp_path, host_size=SMALL, deadline_seconds=5.0
    ) as cache:
        calls = 0
        # on a busy machine the opening alone may take this long
        while time.monotonic() < until or calls <= 10:
            calls += 1
            tokens = prompt(
                int(random.integers(1, 16)), int(random.integers(PROMPTS))
            )
            kind = random.integers(10)
            if kind < 5:
                served(cache, tokens)  # checks every byte
            elif kind < 8:
                put(cache, tokens)
            elif kind < 9:
                cache.prefetch(tokens).result()
            else:
                cache.lookup(tokens)
            if calls % 40 == 0 and number == 0:
                cache.clear()


def _whole(shm_root: Path, tmp_path: Path) -> None:
    with cache_at(shm_root, tmp_path, host_size=SMALL) as cache:
        for _, ledger in cache._tiers.ledgers():
            admin.reap(ledger)
            admin.check(ledger)
            assert admin.gauges(ledger)["reserved"] == 0


@pytest.mark.slow
def test_processes_that_share_everything_read_right_bytes(
    shm_root: Path, tmp_path: Path
) -> None:
    run_all(
        [
            SPAWN.Process(target=_busy, args=(shm_root, tmp_path, n, 3.0))
            for n in range(3)
        ]
    )
    _whole(shm_root, tmp_path)


@pytest.mark.slow
def test_processes_that_are_killed_leave_right_bytes_and_no_slots(
    shm_root: Path, tmp_path: Path
) -> None:
    others = [
        SPAWN.Process(target=_busy, args=(shm_root, tmp_path, n, 4.0))
        for n in (1, 2)
    ]
    for process in others:
        process.start()
    for n in range(3):
        victim = SPAWN.Process(
            target=_busy, args=(shm_root, tmp_path, 10 + n, 60.0)
        )
        victim.start()
        time.sleep(1.0)
        victim.kill()
        victim.join(60)
        assert victim.exitcode == -signal.SIGKILL
    for process in others:
        process.join(60)
        assert process.exitcode == 0
    _whole(shm_root, tmp_path)


def _store_and_stand_still(shm_root: Path, began: Event) -> None:
    class Standing(Watching):
        def before(self) -> None:
            began.set()
            time.sleep(100)

    with cache_at(shm_root, None) as cache:
        cache.store(prompt(4), Standing(kv_of(prompt(4)).transfer))


@pytest.mark.slow
def test_what_a_dead_process_was_storing_is_soon_nobody_s(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        began = SPAWN.Event()
        process = SPAWN.Process(
            target=_store_and_stand_still, args=(shm_root, began), daemon=True
        )
        process.start()
        assert began.wait(60)
        assert (
            hit_of(cache, prompt(4), deadline_seconds=0.2).reason is Reason.BUSY
        )
        process.kill()
        process.join(60)
        patience = Patience(20)
        hit, _ = served(cache, prompt(4))
        # not the whole deadline
        assert hit.reason is Reason.ABSENT
        assert not patience.ended, patience.said()
        stored(cache, prompt(4))


def test_a_store_warms_the_next_process(shm_root: Path) -> None:
    def child() -> None:
        with cache_at(shm_root, None) as cache:
            stored(cache, prompt(5))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    with cache_at(shm_root, None) as cache:
        assert hit_of(cache, prompt(5)).by_tier == {"host": 80}


def _in_child(cache: Cache) -> None:
    assert hit_of(cache, prompt(5)).num_tokens == 80
    stored(cache, prompt(5, 1))
    assert (
        cache.retrieve_future(prompt(5, 1), blank(prompt(5, 1)).transfer)
        .result(60)
        .num_tokens
        == 80
    )
    os.kill(os.getppid(), 0)


def test_a_forked_child_goes_on_with_the_same_cache(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(5))
        process = multiprocessing.get_context("fork").Process(
            target=_in_child, args=(cache,)
        )
        process.start()
        stored(cache, prompt(5, 2))
        process.join(60)
        assert process.exitcode == 0
        assert hit_of(cache, prompt(5, 1)).num_tokens == 80
        assert hit_of(cache, prompt(5, 1), tiers=["disk"]).num_tokens == 80
        assert admin.check(cache._tiers.host.ledger).unreachable == 0  # type: ignore[union-attr]


def _count_hits(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        served(cache, prompt(5))


@pytest.mark.slow
def test_counters_are_seen_by_other_processes_and_outlive_them(
    shm_root: Path,
) -> None:
    with cache_at(shm_root, None) as cache:
        stored(cache, prompt(5))
        run_all(
            [
                SPAWN.Process(target=_count_hits, args=(shm_root,))
                for _ in range(2)
            ]
        )
        counters = cache.stats()["counters"]
        assert isinstance(counters, dict)
        assert counters["lookups"] == 2
        assert counters["hit_tokens_host"] == 160


def test_bytes_scribbled_by_another_owner_are_never_served(
    shm_root: Path,
) -> None:
    """A slot that was reassigned during the copy is detected, whatever its bytes are now."""
    with cache_at(shm_root, None) as cache:
        stored(cache, prompt(8, 5))
        ledger = cache._tiers.host.ledger  # type: ignore[union-attr]
        assert isinstance(ledger, Ledger)
        slab = MemorySlab(ledger.slab_path, ledger.slots, LAYOUT.slot_bytes)

        class Scribbling(Watching):
            def before(self) -> None:
                if not self.calls:
                    cache.clear()
                    slab.array[:] = 255

        hit = cache.retrieve(prompt(8, 5), Scribbling(blank(prompt(8)).transfer))
        assert hit.num_tokens == 0
        assert hit.reason == Reason.CLEARED
        assert cache.config.chunk_tokens == CHUNK


def _with_private_memory(cache: Cache) -> None:
    # the memory is the parent's: a hit with right bytes and a miss are both correct
    served(cache, prompt(5))
    put(cache, prompt(5, 1))
    served(cache, prompt(5, 1))


def test_a_forked_child_of_a_cache_in_private_memory_reads_and_leaves_right_bytes(
    shm_root: Path,
) -> None:
    with cache_at(shm_root, None, host_shared=False) as cache:
        stored(cache, prompt(5))
        process = multiprocessing.get_context("fork").Process(
            target=_with_private_memory, args=(cache,)
        )
        process.start()
        process.join(60)
        assert process.exitcode == 0
        # all chunks of the child that it finds have the right bytes
        served(cache, prompt(5, 1))
        assert hit_of(cache, prompt(5)).num_tokens == 80
