"""Stores of runs: space, refusals, write policies, and the writes to lower tiers after a store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from pagoda.cache.writeback import WriteBackQueue
from pagoda.ledger import Ledger, StoreSpec, admin
from pagoda.policy.hindsight import _SharedValues
from pagoda.testing import FakeClock, Fault, FaultySlab
from pagoda.tiers import DiskTier, HostTier
from pagoda.tiers.disk import DiskWorker
from pagoda.tiers.io_queue import WriteRequest
from testbed.patience import Patience, wait_until
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    PATIENT_SECONDS,
    blank,
    cache_at,
    config_of,
    keys_of,
    kv_of,
    on_disk,
    prompt,
    put,
    served,
    stored,
    written,
)
from tests.cache.test_retrieve_call import Watching, faulty_cache


def _next_are_written(cache: Cache, count: int) -> bool:
    """Whether the next chunks to be evicted are in the tier below, and nothing is being written.

    A slot that is being written is not evicted, and the order of eviction is found in batches: for
    a moment, others that are not written yet may be the next.
    """
    leased = cache.stats()["tiers"]["host"]["leased"]  # type: ignore[index]
    (queue,), host = cache._resources.writeback, cache._tiers.host
    if leased or queue._queue or queue._working or queue._writing or host is None:
        return False
    return not any(
        slot in queue._dirty for slot in host.ledger.next_victims(count).tolist()
    )


def _on_disk(cache: Cache) -> int:
    ready = cache.stats()["tiers"]["disk"]["ready"]  # type: ignore[index]
    assert isinstance(ready, int)
    return ready


def test_a_run_longer_than_the_host_tier_keeps_its_head(shm_root: Path) -> None:
    tokens = prompt(100)
    with cache_at(shm_root, None) as cache:
        answer = put(cache, tokens)
        assert answer == (64, 64 * CHUNK, 0, 36, Reason.FULL)
        assert served(cache, tokens)[0].num_tokens == 64 * CHUNK
        assert put(cache, tokens).present == 64
        # the same twice: nothing was lost
        assert served(cache, tokens)[0].num_tokens == 64 * CHUNK


def test_a_prompt_of_more_than_the_tier_stored_twice_still_hits(
    shm_root: Path,
) -> None:
    tokens = prompt(77)  # 1.2 times the tier
    with cache_at(shm_root, None) as cache:
        for _ in range(2):
            put(cache, tokens)
        assert served(cache, tokens)[0].num_tokens == 64 * CHUNK


def test_newer_prompts_take_the_place_of_older_ones(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        for seed in range(10):
            assert put(cache, prompt(16, seed)).num_chunks == 16
        assert served(cache, prompt(16, 9))[0].num_tokens == 256
        assert served(cache, prompt(16, 0))[0].num_tokens == 0
        assert admin.check(cache._tiers.host.ledger).unreachable == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_finds_no_room_on_the_host_goes_below(
    shm_root: Path, tmp_path: Path, policy: str
) -> None:
    tokens = prompt(100)
    with cache_at(shm_root, tmp_path, write_policy=policy) as cache:
        answer = put(cache, tokens)
        assert answer == (100, 100 * CHUNK, 0, 0, None)
        assert cache.flush(100)
        assert _on_disk(cache) == 100
        assert cache.stats()["staging_buffers"] == 0
        assert served(cache, tokens, tiers=["disk"])[0].num_tokens == 100 * CHUNK
        hit, _ = served(cache, tokens)
        assert hit.by_tier == {"host": 64 * CHUNK, "disk": 36 * CHUNK}
        assert put(cache, tokens).present == 100


@pytest.mark.slow
def test_a_flush_drops_nothing_while_chunks_in_buffers_wait(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread comes late, as on a busy machine; chunks in buffers take no room from those in
    slots.
    """
    take = WriteBackQueue._wait_for_note

    def late(queue: WriteBackQueue) -> object:
        time.sleep(0.2)
        return take(queue)

    monkeypatch.setattr(WriteBackQueue, "_wait_for_note", late)
    tokens = prompt(100)
    with cache_at(shm_root, tmp_path, write_policy="write_back") as cache:
        put(cache, tokens)
        assert cache.flush(100)
        assert _on_disk(cache) == 100
        (queue,) = cache._resources.writeback
        assert queue._waiting == queue._buffered == 0, (
            "else the queue has no bound from now on"
        )


def test_what_goes_below_lies_behind_its_head_there(
    shm_root: Path, tmp_path: Path
) -> None:
    """All in one queue: a tail written first would be useless alone on the disk, and would be
    evicted last.
    """
    tokens = prompt(100)
    with cache_at(shm_root, tmp_path) as cache:
        put(cache, tokens)
        assert cache.flush(100)
        columns = cache._tiers.ledgers()[1][1].columns
        rows = {
            row.key: row.slot
            for row in admin.list_chunks(cache._tiers.ledgers()[1][1])
        }
        slots = [rows[key] for key in keys_of(cache, tokens)]
        assert columns.parent_slot[slots[1:]].tolist() == slots[:-1]
        assert (np.diff(columns.last_use[slots]) < 0).all()


def refusing(cache: Cache, clock: FakeClock) -> None:
    """Make the host's policy refuse new chunks: it is full of more valuable ones."""
    ledger = cache._tiers.host.ledger  # type: ignore[union-attr]
    learnt = _SharedValues.of(ledger.upkeep_thread.learned)  # type: ignore[arg-type]
    # requested again at an age of 10 to 50 s
    learnt.asked[:, 20:27] = learnt.watched[:, 20:27] = 1000
    for _ in range(3):
        ledger.upkeep_thread.run_once()
        clock.advance(6)
    for seed in range(4):
        assert put(cache, prompt(16, 900 + seed)).refused == 0
    assert cache.flush(100)
    clock.advance(9)
    ledger.upkeep_thread.run_once()


def test_what_the_policy_of_the_host_keeps_out_goes_below(
    shm_root: Path, tmp_path: Path
) -> None:
    clock = FakeClock()
    tokens = prompt(12)
    config = config_of(shm_root, tmp_path, policy="hindsight")
    with Cache(config, namespace=NAMESPACE, layout=LAYOUT, clock=clock) as cache:
        refusing(cache, clock)
        answer = put(cache, tokens)
        assert answer == (12, 12 * CHUNK, 0, 0, None)
        assert cache.flush(100)
        assert cache.lookup(tokens, tiers=["host"]).num_tokens == 0
        assert served(cache, tokens)[0].by_tier == {"disk": 12 * CHUNK}
        # a load does not admit it either
        assert cache.lookup(tokens, tiers=["host"]).num_tokens == 0
        # unless it is needed there
        assert cache.prefetch(tokens).result(PATIENT_SECONDS).by_tier == {
            "disk": 12 * CHUNK
        }
        assert cache.lookup(tokens).by_tier == {"host": 12 * CHUNK}


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.EIO])
def test_the_host_takes_what_its_policy_keeps_out_if_the_disk_does_not(
    shm_root: Path, tmp_path: Path, fault: Fault
) -> None:
    """No store waits for a disk if a tier above it has space."""
    clock = FakeClock()
    tokens = prompt(40)
    disk_ledger = Ledger.open(
        StoreSpec(
            tmp_path, LAYOUT.fingerprint, "file", 256, LAYOUT.slot_bytes + 4096
        )
    )
    slab = FaultySlab(disk_ledger.slab_path, 256, LAYOUT.slot_bytes + 4096)
    disk = DiskTier(LAYOUT, disk_ledger, slab, clock=clock)
    config = config_of(shm_root, None, policy="hindsight")
    host = HostTier.open(
        LAYOUT,
        Path(config.host_path),
        config.host_bytes,
        policy="hindsight",
        clock=clock,
    )
    with Cache(
        config,
        namespace=NAMESPACE,
        layout=LAYOUT,
        tiers=[host, disk],
        clock=clock,
    ) as cache:
        refusing(cache, clock)
        slab.fail_next("write", fault, times=100)
        patience = Patience(PATIENT_SECONDS)
        answer = put(cache, tokens)
        # a write hangs for 60 s
        assert not patience.ended, patience.said()
        # there are 16 buffers
        assert answer.num_chunks + answer.refused == 40
        assert answer.refused <= 16
        assert host.match_prefix(keys_of(cache, tokens)[16:], start=16) == 24
        slab.heal()


def test_engines_that_copy_into_slots_themselves_are_refused_nothing_that_is_needed_below(
    shm_root: Path, tmp_path: Path
) -> None:
    clock = FakeClock()
    config = config_of(shm_root, tmp_path, policy="hindsight")
    with Cache(config, namespace=NAMESPACE, layout=LAYOUT, clock=clock) as cache:
        refusing(cache, clock)
        assert len(written(cache, prompt(6))) == 6
        assert cache.flush(100)
        assert on_disk(cache, prompt(6)) == 6


def test_the_tail_of_a_prompt_goes_before_its_head(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        put(cache, prompt(60, 0))
        put(cache, prompt(30, 1))
        left = served(cache, prompt(60, 0))[0].num_tokens // CHUNK
        assert 0 < left <= 34
        assert served(cache, prompt(30, 1))[0].num_tokens == 30 * CHUNK


def test_an_exception_in_the_middle_of_a_store_leaves_no_reservation(
    shm_root: Path,
) -> None:
    with cache_at(shm_root, None) as cache:
        tokens = prompt(20)

        class Breaking(Watching):
            def before(self) -> None:
                if len(self.calls) == 1:
                    raise RuntimeError("the engine's stream was lost")

        answer = cache.store(tokens, Breaking(kv_of(tokens).transfer))
        assert answer.reason is Reason.IO_ERROR
        ledger = cache._tiers.host.ledger  # type: ignore[union-attr]
        assert admin.gauges(ledger)["reserved"] == 0
        # the first window was whole
        assert served(cache, tokens)[0].num_tokens == 8 * CHUNK
        admin.check(ledger)


def test_a_chunk_is_visible_only_after_its_copy(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        tokens = prompt(4)
        seen: list[int] = []

        class Peeking(Watching):
            def before(self) -> None:
                seen.append(cache.lookup(tokens).num_tokens)

        cache.store(tokens, Peeking(kv_of(tokens).transfer))
        assert seen == [0]
        assert cache.lookup(tokens).num_tokens == 64


def test_what_is_cleared_during_its_copy_is_refused_with_the_reason(
    shm_root: Path,
) -> None:
    with cache_at(shm_root, None) as cache:
        tokens = prompt(4)

        class Clearing(Watching):
            def before(self) -> None:
                cache.clear()

        answer = cache.store(tokens, Clearing(kv_of(tokens).transfer))
        assert answer == (0, 0, 0, 4, Reason.SUPERSEDED)
        assert cache.lookup(tokens).num_tokens == 0


def test_store_does_not_wait_for_the_disk(shm_root: Path, tmp_path: Path) -> None:
    cache, slab = faulty_cache(shm_root, tmp_path)
    with cache:
        slab.fail_next("write", Fault.HANG, times=2)
        patience = Patience(40)  # a write hangs for 60 s
        for seed in range(20):
            put(cache, prompt(8, seed))
        assert not patience.ended, patience.said()
        assert slab.hanging.wait(30)
        assert served(cache, prompt(8, 19))[0].by_tier == {"host": 128}
        slab.heal()
        assert cache.flush(100)
        counters = cache.stats()["tiers"]["disk"]  # type: ignore[index]
        assert isinstance(counters, dict)
        # a chunk that was evicted before its write is a drop with a reason, and never counts as
        # stored
        assert counters["stored_chunks"] == counters["ready"]
        assert counters["stored_chunks"] + counters["drop_stale"] >= 64


def test_chunks_that_the_disk_dropped_are_written_by_the_next_store(
    shm_root: Path, tmp_path: Path
) -> None:
    cache, slab = faulty_cache(shm_root, tmp_path)
    tokens = prompt(6)
    with cache:
        slab.fail_next("write", Fault.ENOSPC, times=2)
        put(cache, tokens)
        assert cache.flush(100)
        assert cache.lookup(tokens, tiers=["disk"]).num_tokens < 96
        slab.heal()
        assert put(cache, tokens).present == 6
        assert cache.flush(100)
        assert served(cache, tokens, tiers=["disk"])[0].num_tokens == 96


def test_a_full_disk_is_a_drop_and_the_host_goes_on(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(
        shm_root, tmp_path, disk_size=40 * (LAYOUT.slot_bytes + 4096)
    ) as cache:
        for seed in range(6):
            stored(cache, prompt(10, seed))
        assert _on_disk(cache) <= 40
        assert served(cache, prompt(10, 5))[0].by_tier == {"host": 160}
        assert served(cache, prompt(10, 5), tiers=["disk"])[0].num_tokens == 160


def test_write_through_writes_every_chunk(shm_root: Path, tmp_path: Path) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(40))
        assert _on_disk(cache) == 40
        assert cache._tiers.lower[0].stats()["loaded_chunks"] == 0


def test_selective_writes_what_was_hit_often_enough(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(
        shm_root, tmp_path, write_policy="selective", selective_hits=3
    ) as cache:
        tokens = prompt(10)
        other = prompt(10, 1)
        stored(cache, tokens)
        stored(cache, other)
        for _ in range(2):
            served(cache, tokens)
        assert cache.flush(100)
        assert _on_disk(cache) == 0
        served(cache, tokens[: 6 * CHUNK])
        assert cache.flush(100)
        assert _on_disk(cache) == 6
        served(cache, tokens)
        assert cache.flush(100)
        assert _on_disk(cache) == 10
        assert cache.lookup(other, tiers=["disk"]).num_tokens == 0


def test_write_back_writes_the_coldest_ahead_of_their_eviction(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path, write_policy="write_back") as cache:
        for seed in range(3):
            put(cache, prompt(10, seed))
        time.sleep(0.3)
        # there is enough space: nothing needs to be clean
        assert _on_disk(cache) == 0
        for seed in range(3, 6):
            put(cache, prompt(10, seed))
        wait_until(lambda: _on_disk(cache) > 0)
        keys = keys_of(cache, prompt(10, 0))
        # the coldest: the tail of the oldest prompt; its piece is queued one by one
        wait_until(lambda: cache._tiers.lower[0].contains(keys[-1]))
        assert cache.lookup(prompt(10, 5), tiers=["disk"]).num_tokens == 0
        assert cache.flush(100)
        assert _on_disk(cache) == 60  # on request, everything is written down


@pytest.mark.slow
def test_write_back_keeps_up_with_a_stream_of_prompts(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path, write_policy="write_back") as cache:
        for seed in range(20):
            put(cache, prompt(8, seed))
            # full: the next prompt's slots are written before it arrives
            if seed >= 7:
                wait_until(lambda: _next_are_written(cache, 8))
                assert _on_disk(cache) >= 8 * (seed - 6)
        assert cache.flush(100)
        hits = sum(
            served(cache, prompt(8, seed))[0].num_tokens for seed in range(20)
        )
        assert hits == 20 * 8 * CHUNK


def test_write_back_writes_what_is_left_when_it_closes(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path, write_policy="write_back") as cache:
        put(cache, prompt(10))
    with cache_at(shm_root / "after", tmp_path) as cache:
        assert served(cache, prompt(10))[0].by_tier == {"disk": 160}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["write_through", "selective", "write_back"])
def test_close_is_bounded_even_if_the_disk_hangs(
    shm_root: Path, tmp_path: Path, policy: str
) -> None:
    cache, slab = faulty_cache(
        shm_root, tmp_path, write_policy=policy, selective_hits=1
    )
    slab.fail_next("write", Fault.HANG, times=4)
    for _ in range(2):
        put(cache, prompt(8))
        cache.retrieve(prompt(8), blank(prompt(8)).transfer)
    patience = Patience(30)  # the writes hang for 60 s
    assert not cache.close(timeout=1.0)
    assert not patience.ended, patience.said()
    slab.heal()


def test_a_store_without_a_host_tier_is_bounded_by_its_buffers(
    tmp_path: Path,
) -> None:
    with cache_at(
        None, tmp_path, disk_size=30 * (LAYOUT.slot_bytes + 4096)
    ) as cache:
        tokens = prompt(60)
        answer = put(cache, tokens)
        assert answer.num_chunks + answer.refused == 60
        assert cache.flush(100)
        assert cache.stats()["staging_buffers"] == 0
        assert served(cache, tokens)[0].num_tokens == 30 * CHUNK


def test_small_chunks_without_a_host_slot_are_handed_over_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one batch: a wake-up, two transactions and a write for all of them."""
    batches = list[int]()
    save = DiskWorker.save

    def counted(self: DiskWorker, writes: Sequence[WriteRequest]) -> None:
        batches.append(len(writes))
        save(self, writes)

    monkeypatch.setattr(DiskWorker, "save", counted)
    with cache_at(None, tmp_path) as cache:
        first = prompt(4)
        tokens = prompt(12)
        assert stored(cache, first).same(kv_of(first))
        assert cache.flush(100)
        assert put(cache, tokens) == (8, 128, 4, 0, None)
        assert cache.flush(100)
        assert batches == [4, 8]
        assert cache.stats()["staging_buffers"] == 0
        assert served(cache, tokens)[0].num_tokens == 12 * CHUNK


def test_a_copy_into_buffers_that_fails_keeps_none_of_them(
    tmp_path: Path,
) -> None:
    with cache_at(None, tmp_path) as cache:
        tokens = prompt(12)

        class Failing(Watching):
            def before(self) -> None:
                raise RuntimeError("the engine's memory is gone")

        cache.store(tokens, Failing(kv_of(tokens).transfer))
        assert cache.stats()["staging_buffers"] == 0
        assert served(cache, tokens)[0].num_tokens == 0


def test_close_writes_what_a_store_without_a_host_tier_said_it_keeps(
    tmp_path: Path,
) -> None:
    tokens = prompt(100)
    cache = Cache(config_of(None, tmp_path), namespace=NAMESPACE, layout=LAYOUT)
    assert put(cache, tokens).num_chunks == 100
    assert cache.close(PATIENT_SECONDS)
    with cache_at(None, tmp_path) as cache:
        assert served(cache, tokens)[0].num_tokens == 100 * CHUNK


@pytest.mark.slow
@pytest.mark.parametrize("with_host", [False, True])
def test_close_says_what_it_could_not_write(
    shm_root: Path, tmp_path: Path, with_host: bool
) -> None:
    ledger = Ledger.open(
        StoreSpec(
            tmp_path, LAYOUT.fingerprint, "file", 256, LAYOUT.slot_bytes + 4096
        )
    )
    slab = FaultySlab(ledger.slab_path, 256, LAYOUT.slot_bytes + 4096)
    disk = DiskTier(LAYOUT, ledger, slab, io_threads=1)
    config = config_of(
        shm_root if with_host else None, None, deadline_seconds=0.2
    )
    host = (
        [HostTier.open(LAYOUT, Path(config.host_path), config.host_bytes)]
        if with_host
        else []
    )
    cache = Cache(config, namespace=NAMESPACE, layout=LAYOUT, tiers=[*host, disk])
    slab.fail_next("write", Fault.HANG, times=100)
    tokens = prompt(10)
    assert put(cache, tokens).num_chunks == 10
    assert slab.hanging.wait(PATIENT_SECONDS)
    assert not cache.close(1.0)
    slab.heal()
    # every buffer was released
    wait_until(lambda: cache._resources.store_staging.in_use == 0)
