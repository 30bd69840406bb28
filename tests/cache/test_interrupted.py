"""Calls of a cache that an exception of a signal handler ends at a random moment: the cache and its
users continue.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest

from pagoda.base.clock import Deadline
from pagoda.base.finalizers import close_dropped
from pagoda.base.metrics import Reason
from pagoda.cache import Cache, load_pipeline
from pagoda.cache.call import CheckedTransfer
from pagoda.cache.load_destinations import HostDestination
from pagoda.cache.load_pipeline import LoadPipeline
from pagoda.cache.staging_buffers import StagingPool
from pagoda.ledger import admin
from pagoda.tiers import DiskTier, HostTier
from pagoda.tiers.base import Bytes, Done, running_future
from pagoda.tiers.io_queue import WorkerPool
from testbed.patience import wait_until
from tests.cache.kit import (
    CHUNK,
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
from tests.interrupts import Interrupted, interrupted_before, interrupts
from tests.ledger.support import others_get_in

# the other method uses the same timer as these tests
pytestmark = pytest.mark.timeout(300, method="thread")


def interrupted_calls(cache: Cache, times: int, seed: int) -> None:
    """Store and retrieve, each until an exception is raised; served bytes are right."""
    chance = random.Random(seed)
    prompts = [prompt(3, number) for number in range(40)]
    kvs = [kv_of(tokens) for tokens in prompts]
    rooms = [blank(tokens) for tokens in prompts]

    def store_and_retrieve() -> None:
        n = chance.randrange(len(prompts))
        cache.store(prompts[n], kvs[n].transfer)
        hit = cache.retrieve(prompts[n], rooms[n].transfer)
        assert rooms[n].same(
            kvs[n], hit.start_tokens // CHUNK, hit.stop_tokens // CHUNK
        )

    with interrupts(seed, again_seconds=2.0) as until_interrupted:
        for _ in range(times):
            until_interrupted(store_and_retrieve)


def outstanding(cache: Cache) -> dict[str, object]:
    """Return the resources that calls, or their I/O, have not released."""
    resources = cache._resources
    host = cache._tiers.host
    return {
        "reserved": [
            admin.check(ledger).gauges["reserved"]
            for _, ledger in cache._tiers.ledgers()
        ],
        "copies": len(host._copies) if host is not None else 0,
        "buffers": resources.load_staging.in_use
        + cache._resources.store_staging.in_use,
        "waiting": cache.stats()["waiting_chunks"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["host", "host and disk", "disk"])
def test_a_cache_leaves_nothing_behind(
    shm_root: Path, tmp_path: Path, tiers: str
) -> None:
    host = shm_root if "host" in tiers else None
    disk = tmp_path if "disk" in tiers else None
    with cache_at(host, disk) as cache:
        ledgers = [ledger for _, ledger in cache._tiers.ledgers()]
        interrupted_calls(cache, 1000, 1)
        assert all(map(others_get_in, ledgers))
        assert cache.flush(100)
        assert close_dropped(100)
        for ledger in ledgers:
            admin.reap(ledger)
        nothing = {
            "reserved": [0] * len(ledgers),
            "copies": 0,
            "buffers": 0,
            "waiting": 0,
        }
        assert outstanding(cache) == nothing
        answers: list[int] = []
        thread = threading.Thread(
            target=lambda: answers.append(put(cache, prompt(3, 99)).num_chunks)
        )
        thread.start()
        thread.join(60)
        assert answers == [3], "other threads continue too"
        assert hit_of(cache, prompt(3, 99)).num_tokens == 3 * CHUNK
        assert cache.close(100)


def test_what_a_broken_load_may_read_into_is_nobody_elses_until_it_has_ended(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cache_at(None, tmp_path) as cache:
        stored(cache, prompt(3))
    with cache_at(shm_root, tmp_path) as cache:
        reading: list[object] = []

        def load(_: object, buffers: Sequence[object], **__: object) -> None:
            reading.extend(buffers)  # an I/O thread continues with them
            raise Interrupted

        monkeypatch.setattr(cache._tiers.lower[0], "load", load)
        with contextlib.suppress(Interrupted):
            cache.retrieve(prompt(3), blank(prompt(3)).transfer)
        monkeypatch.undo()
        assert len(reading) == 3
        assert close_dropped(60)
        assert outstanding(cache)["reserved"] == [3, 0]
        assert outstanding(cache)["copies"] == 3
        reading.clear()
        # reads that outlived the call may still have slots
        assert close_dropped(60)
        wait_until(
            lambda: (
                (outstanding(cache)["reserved"], outstanding(cache)["copies"])
                == ([0, 0], 0)
            ),
            10,
        )
        assert hit_of(cache, prompt(3)).by_tier == {"disk": 3 * CHUNK}


def test_a_buffer_that_was_lost_makes_room_for_another() -> None:
    staging = StagingPool(64 << 20)
    for _ in range(3 * staging.count):
        assert isinstance(staging.acquire(), np.ndarray), (
            "the previous one was not released"
        )
    kept = [staging.acquire() for _ in range(staging.count)]
    assert staging.acquire() is None
    assert staging.in_use == len(kept)


def test_a_tier_is_closed_whatever_broke_the_start_of_its_threads_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    times = itertools.count()

    def interrupted(thread: threading.Thread) -> None:
        late = thread.name == "pagoda-disk-2"
        if late and next(times) == 0:
            raise RuntimeError("can't start new thread")
        start(thread)
        if late:
            raise Interrupted

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with cache_at(None, tmp_path) as cache:
        ledger = cache._tiers.ledgers()[0][1]
        with pytest.raises(Interrupted):
            stored(cache, prompt(3, 1))
        monkeypatch.undo()
        stored(cache, prompt(3, 2))
        assert cache.flush(60)
    assert ledger.session.closed


def test_nothing_stays_open_if_the_opening_of_a_tier_is_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_off: list[WorkerPool] = []

    def interrupted(threads: WorkerPool) -> None:
        broken_off.append(threads)
        raise Interrupted

    monkeypatch.setattr(WorkerPool, "start", interrupted)
    with pytest.raises(Interrupted), cache_at(None, tmp_path):
        pass
    assert broken_off[0]._serving.backend_closed


def test_a_signal_before_the_commit_of_a_load_leaves_no_slot_reserved(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cache_at(None, tmp_path) as cache:
        stored(cache, prompt(3))

    def interrupted(_: object) -> float:
        raise Interrupted

    with cache_at(shm_root, tmp_path) as cache:
        monkeypatch.setattr(Deadline, "last", interrupted)
        with pytest.raises(Interrupted):
            cache.retrieve(prompt(3), blank(prompt(3)).transfer)
        monkeypatch.undo()
        # reads that outlived the call may still have slots
        assert close_dropped(60)
        wait_until(
            lambda: (
                (outstanding(cache)["reserved"], outstanding(cache)["copies"])
                == ([0, 0], 0)
            ),
            10,
        )
        assert hit_of(cache, prompt(3)).num_tokens == 3 * CHUNK


class Slow(DiskTier):
    """A disk whose reads do not end before a test ends them, or that have failed at once."""

    has_failed = False
    reads: Sequence[Future[Done]] = ()

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[Bytes], **_: object
    ) -> list[Future[Done]]:
        reads = [running_future() for _ in keys]
        self.reads = reads
        if self.has_failed:
            self.fail()
        return reads

    def fail(self) -> None:
        for read in self.reads:
            if not read.done():
                read.set_result(Done(False, Reason.IO_ERROR))
        self.reads = ()  # they know their buffers, even when they have ended


@pytest.mark.parametrize("has_failed", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        LoadPipeline.run,
        load_pipeline._settle_later,
        HostDestination.settle,
    ],
    ids=lambda function: function.__name__,
)
def test_a_signal_while_the_reads_of_a_load_are_given_up_loses_no_slot(
    shm_root: Path, tmp_path: Path, function: FunctionType, has_failed: bool
) -> None:
    """Their slots are free as soon as the reads have ended."""
    disk = Slow.open(LAYOUT, tmp_path, 16 << 20)
    host = HostTier.open(LAYOUT, shm_root, 16 * LAYOUT.slot_bytes)
    tokens = prompt(4)
    kv = blank(tokens).transfer
    with Cache(
        config_of(shm_root, None),
        namespace=NAMESPACE,
        layout=LAYOUT,
        tiers=[host, disk],
    ) as cache:
        disk.has_failed = has_failed
        request = cache._checked(tokens, {"deadline_seconds": 0.0})

        def load() -> None:
            """Load all; what is not settled is given up once nothing refers to it."""
            destination = HostDestination(
                host,
                request._replace(deadline=Deadline(30.0)),
                host.ledger.stamp(),
                0.0,
            )
            pipeline = LoadPipeline(
                disk,
                destination,
                request,
                CheckedTransfer(kv, LAYOUT),
                lambda *_: None,
            )
            pipeline.run(0, 4)

        for line in itertools.count(1):
            ended = not interrupted_before(line, function.__code__, load)
            disk.fail()
            assert close_dropped(60)
            assert outstanding(cache)["reserved"] == [0, 0], line
            assert not host._copies, line
            if ended:
                # a read that has not failed yet is settled later
                assert line > 1 or function is HostDestination.settle
                break
