"""The future-returning and the asyncio forms."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.metrics import Reason
from pagoda.ledger import admin
from pagoda.testing import Fault
from testbed.patience import Patience, wait_until
from tests.cache.kit import (
    CHUNK,
    blank,
    cache_at,
    kv_of,
    prompt,
    served,
)
from tests.cache.test_retrieve_call import Watching, faulty_cache, on_disk


def test_futures_say_the_same_as_the_calls(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(6)
    with cache_at(shm_root, tmp_path) as cache:
        assert (
            cache.store_future(tokens, kv_of(tokens).transfer)
            .result(60)
            .num_chunks
            == 6
        )
        assert cache.lookup_future(tokens).result(60).num_tokens == 96
        kv = blank(tokens)
        assert (
            cache.retrieve_future(tokens, kv.transfer, start_tokens=32)
            .result(60)
            .num_tokens
            == 64
        )
        assert kv.same(kv_of(tokens), 2, 6)
        assert cache.prefetch(tokens).result(60).num_tokens == 96


def test_wrong_use_is_raised_by_the_call_itself(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        with pytest.raises(ValueError, match="multiple of the chunk"):
            cache.retrieve_future(
                prompt(2), blank(prompt(2)).transfer, start_tokens=3
            )
        future = cache.retrieve_future(prompt(2), blank(prompt(1)).transfer)
        assert future.result(60).num_tokens == 0  # nothing to copy: no error
        cache.store(prompt(2), kv_of(prompt(2)).transfer)
        with pytest.raises(ValueError, match="not"):
            cache.retrieve_future(prompt(2), blank(prompt(1)).transfer).result(60)


def test_too_many_at_once_are_misses_and_not_a_queue_without_end(
    shm_root: Path,
) -> None:
    tokens = prompt(1)
    with cache_at(shm_root, None) as cache:
        goes_on = threading.Event()

        class Slow(Watching):
            def before(self) -> None:
                assert goes_on.wait(30)

        futures = [
            cache.store_future(prompt(1, seed), Slow(kv_of(tokens).transfer))
            for seed in range(300)
        ]
        refused = [future for future in futures if future.done()]
        assert len(refused) >= 300 - 256
        for future in refused:
            assert future.result().reason is Reason.QUEUE_FULL
        goes_on.set()
        for future in futures:
            assert future.result(30) is not None
        assert cache.lookup_future(tokens).result(60) is not None


def test_asyncio_forms_say_the_same_as_the_calls(shm_root: Path) -> None:
    tokens = prompt(6)

    async def main() -> None:
        assert (
            await cache.astore(tokens, kv_of(tokens).transfer)
        ).num_chunks == 6
        assert (await cache.alookup(tokens)).num_tokens == 96
        kv = blank(tokens)
        hits = await asyncio.gather(
            *(cache.aretrieve(tokens, kv.transfer) for _ in range(8))
        )
        assert {hit.num_tokens for hit in hits} == {96}
        assert kv.same(kv_of(tokens))
        assert (await cache.aprefetch(tokens)).num_tokens == 96
        with pytest.raises(ValueError):
            await cache.alookup(tokens, start_tokens=1)

    with cache_at(shm_root, None) as cache:
        asyncio.run(main())


def test_the_event_loop_goes_on_meanwhile(shm_root: Path, tmp_path: Path) -> None:
    on_disk(shm_root, tmp_path, 4)
    cache, slab = faulty_cache(shm_root, tmp_path)

    async def main() -> int:
        slab.fail_next("read", Fault.HANG)
        task = asyncio.create_task(
            cache.aretrieve(prompt(4), blank(prompt(4)).transfer)
        )
        ticks = 0
        while not slab.hanging.is_set():
            await asyncio.sleep(0.001)
            ticks += 1
        slab.heal()
        assert (await task).num_tokens == 64
        return ticks

    with cache:
        assert asyncio.run(main()) > 0


def test_a_cancelled_retrieve_ends_before_the_await_does(
    shm_root: Path, tmp_path: Path
) -> None:
    on_disk(shm_root, tmp_path, 8)
    cache, slab = faulty_cache(shm_root, tmp_path, deadline_seconds=50.0)
    kv = blank(prompt(8))

    async def main() -> None:
        slab.fail_next("read", Fault.HANG, times=8)
        task = asyncio.create_task(cache.aretrieve(prompt(8), kv.transfer))
        while not slab.hanging.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        patience = Patience(25)  # not the deadline of 50 s
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not patience.ended, patience.said()

    with cache:
        asyncio.run(main())
        before = kv.blocks.copy()
        slab.heal()
        ledger = cache._tiers.host.ledger  # type: ignore[union-attr]
        wait_until(lambda: admin.gauges(ledger)["reserved"] == 0)
        time.sleep(0.05)
        # nothing writes into memory that the engine uses again
        assert np.array_equal(before, kv.blocks)
        assert served(cache, prompt(8))[0].num_tokens == 128
        admin.check(ledger)


def test_a_cancelled_store_is_whole_or_not_there(shm_root: Path) -> None:
    tokens = prompt(40)
    with cache_at(shm_root, None) as cache:
        began = threading.Event()
        cancelled = threading.Event()

        class Slow(Watching):
            def before(self) -> None:
                began.set()
                assert cancelled.wait(60)

        async def main() -> None:
            task = asyncio.create_task(
                cache.astore(tokens, Slow(kv_of(tokens).transfer))
            )
            while not began.is_set():
                await asyncio.sleep(0.001)
            task.cancel()
            task.cancel()
            # the task runs, and gets the cancellation, before the copy continues
            for _ in range(10):
                await asyncio.sleep(0)
            cancelled.set()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        assert admin.gauges(cache._tiers.host.ledger)["reserved"] == 0  # type: ignore[union-attr]
        hit, _ = served(cache, tokens)
        assert hit.num_tokens == 8 * CHUNK  # the running window, and no later one


def test_a_call_cancelled_before_it_began_does_nothing(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        goes_on = threading.Event()

        class Slow(Watching):
            def before(self) -> None:
                assert goes_on.wait(30)

        blocking = [
            cache.store_future(
                prompt(1, seed), Slow(kv_of(prompt(1, seed)).transfer)
            )
            for seed in range(4)
        ]

        async def main() -> None:
            task = asyncio.create_task(
                cache.astore(prompt(3, 9), kv_of(prompt(3, 9)).transfer)
            )
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        goes_on.set()
        for future in blocking:
            assert future.result(30).num_chunks == 1
        assert cache.lookup(prompt(3, 9)).num_tokens == 0


@pytest.mark.slow
def test_close_ends_while_calls_are_under_way(
    shm_root: Path, tmp_path: Path
) -> None:
    on_disk(shm_root, tmp_path, 8)
    cache, slab = faulty_cache(shm_root, tmp_path)
    slab.fail_next("read", Fault.HANG, times=8)
    future = cache.retrieve_future(
        prompt(8), blank(prompt(8)).transfer, deadline_seconds=3.0
    )
    assert slab.hanging.wait(30)
    patience = Patience(30)  # the reads hang for 60 s
    cache.close(timeout=0.5)
    assert not patience.ended, patience.said()
    assert future.result(30).num_tokens == 0
    slab.heal()
