"""The storage behind vLLM's OffloadingConnector: both halves over real tiers, without an engine."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    Medium,
    ReqContext,
    TierFilter,
    TierMatcher,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pagoda.config import Config
from pagoda.connectors.vllm.offloading import PagodaOffloadingSpec
from pagoda.connectors.vllm.offloading_meta import Greeting, greet, greeted
from pagoda.connectors.vllm.offloading_worker import SlotCopies, Stock
from pagoda.connectors.vllm.shared import let_go
from pagoda.keys import Namespace
from tests.ledger.support import gate_taken
from tests.vllm.halves import (
    BLOCK,
    CHUNK,
    EACH,
    FULL,
    LAYOUT,
    NO_STEP,
    SLIDING,
    WINDOW,
    Halves,
    be_a_rank,
    blocks_of,
    cache_of,
    config_of,
    forks,
    keys,
    manager_of,
    memory,
    store_elsewhere,
    wait_until,
)

HIT, MISS, RETRY, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY, LookupResult.HIT_PENDING
NEEDED = WINDOW // CHUNK


@pytest.fixture
def host(session_shm: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A host tier's directory of one test."""
    root = session_shm / request.node.name[:80].replace("/", "-")
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def config(host: Path) -> Config:
    """64 host slots and no disk."""
    return config_of(host)


@pytest.fixture
def halves(config: Config) -> Iterator[Halves]:
    """Both halves over it."""
    both = Halves(config)
    yield both
    both.close()


# ---- what was stored comes back


def test_what_was_stored_comes_back_bit_by_bit(halves: Halves) -> None:
    blocks = halves.store_prompt("p", 6)
    kept = {group: halves.bytes_of(ids) for group, ids in blocks.items()}
    halves.blank()
    context = halves.request("loads", "p", 6)
    assert halves.hit(context, "p", 6) == 6
    full = list(range(100, 100 + 6 * EACH))
    sliding = list(range(150, 150 + NEEDED * EACH))
    wanted = {FULL: keys("p", FULL, 6), SLIDING: keys("p", SLIDING, 6)[-NEEDED:]}
    halves.load(context, wanted, {FULL: full, SLIDING: sliding})
    assert torch.equal(halves.bytes_of(full), kept[FULL])
    assert torch.equal(halves.bytes_of(sliding), kept[SLIDING][:, -NEEDED * EACH :])
    others = [block for block in range(len(halves.planes[0])) if block not in full + sliding]
    assert not halves.bytes_of(others).any()  # and no other block was touched
    assert halves.manager.get_load_source(wanted[FULL][0], context) in (
        CacheHitSource.HOST,
        CacheHitSource.EXTERNAL_UNSPECIFIED,
    )


def test_the_first_answer_is_ask_again_and_absence_is_a_miss(halves: Halves) -> None:
    context = halves.request("asks", "p", 2)
    (key, other) = keys("p", FULL, 2)
    assert halves.manager.lookup(key, context) is RETRY
    assert halves.manager.lookup(key, context) is RETRY  # and nothing happens before the step ends
    assert halves.answers(context, [key, other]) == [MISS, MISS]
    assert halves.manager.has_pending_work() is False


def test_a_miss_is_asked_again_once_the_chunk_is_stored(halves: Halves) -> None:
    context = halves.request("asks", "p", 2)
    assert halves.answers(context, keys("p", FULL, 2)) == [MISS, MISS]
    halves.store_prompt("p", 2)
    wait_until(lambda: halves.answers(context, keys("p", FULL, 2)) == [HIT, HIT])


def test_a_load_may_begin_and_end_within_a_chunk(halves: Halves) -> None:
    blocks = halves.store_prompt("p", 3)
    kept = halves.bytes_of(blocks[FULL])
    halves.blank()
    context = halves.request("loads", "p", 3)
    assert halves.hit(context, "p", 3) == 3
    loaded = halves.begin_load(context, {FULL: keys("p", FULL, 3)}, {})
    # blocks 1 to 4 of the sequence: the first chunk's head is on the device already, the last one's tail is not wanted
    halves.run(loaded._replace(blocks=GPULoadStoreSpec([90, 91, 92, 93], [4, 0], [1, 0])))
    assert torch.equal(halves.bytes_of([90, 91, 92, 93]), kept[:, 1:5])
    assert int(sum(plane.any(dim=1).sum() for plane in halves.planes)) == 4 * len(halves.planes)


def test_no_block_0_is_ever_written(halves: Halves) -> None:
    halves.store_prompt("p", 1)
    halves.blank()
    context = halves.request("loads", "p", 1)
    assert halves.answers(context, keys("p", FULL, 1)) == [HIT]
    loaded = halves.begin_load(context, {FULL: keys("p", FULL, 1)}, {})
    halves.run(loaded._replace(blocks=GPULoadStoreSpec([0, 91], [2, 0], [0, 0])))
    assert not halves.bytes_of([0]).any() and halves.bytes_of([91]).any()


def test_blocks_that_are_not_those_of_the_chunks_are_not_filled(halves: Halves) -> None:
    halves.store_prompt("p", 3)
    halves.blank()
    context = halves.request("loads", "p", 3)
    assert halves.hit(context, "p", 3) == 3
    loaded = halves.begin_load(context, {FULL: keys("p", FULL, 3)}, {})
    halves.run(loaded._replace(blocks=GPULoadStoreSpec([90, 91], [2, 0], [0, 0])))
    assert halves.worker.take_failed({"loads"}) == {"loads"}
    assert not halves.bytes_of(range(len(halves.planes[0]))).any()


def test_a_chunk_with_a_block_missing_is_not_stored(halves: Halves) -> None:
    """A block that has left its window may have been given away: vLLM does not name it, and its place is not known."""
    context = halves.request("stores", "p", 4)
    wanted = keys("p", SLIDING, 4)
    halves.store(context, wanted, {SLIDING: [0, 52, 53, 54, 55, 56, 57, 58]})
    assert halves.answers(context, wanted) == [MISS, HIT, HIT, HIT]  # the head of the first is missing
    other = halves.request("stores too", "q", 4)
    wanted = keys("q", SLIDING, 4)
    halves.store(other, wanted, {SLIDING: [61, 62, 63, 0, 65, 66, 67, 68]})
    assert halves.answers(other, wanted) == [MISS] * 4  # who can say which of the blocks are whose


def test_what_is_stored_already_is_not_stored_again(halves: Halves) -> None:
    halves.store_prompt("p", 4)
    context = halves.request("again", "p", 6)
    wanted = keys("p", FULL, 6)
    assert halves.store(context, wanted, {FULL: list(range(100, 112))}) == wanted[4:]


# ---- what is held


def test_a_hit_is_held_against_eviction_until_it_is_loaded(halves: Halves, config: Config) -> None:
    blocks = halves.store_prompt("p", 6)
    kept = halves.bytes_of(blocks[FULL])
    context = halves.request("loads", "p", 6)
    assert halves.hit(context, "p", 6) == 6
    _press(halves, range(20))  # four times as many chunks as there are slots
    full = list(range(100, 112))
    halves.load(context, {FULL: keys("p", FULL, 6)}, {FULL: full})
    assert torch.equal(halves.bytes_of(full), kept)
    halves.finish(context)
    wait_until(lambda: halves.manager._questions._finder.holds.count == 0)
    _press(halves, range(20, 40))
    later = halves.request("later", "p", 6)
    assert halves.answers(later, keys("p", FULL, 6)) == [MISS] * 6  # nothing was left held


def _press(halves: Halves, numbers: range) -> None:
    """Store other prompts when no chunk is leased any more."""
    for number in numbers:
        halves.slots._ledger.columns.lease_until[:] = 0
        halves.store_prompt(f"other {number}", 6, at=40)


def test_of_a_sliding_window_only_the_window_is_held(halves: Halves) -> None:
    halves.store_prompt("p", 12)
    context = halves.request("loads", "p", 12)
    assert halves.hit(context, "p", 12) == 12
    assert halves.manager._questions._finder.holds.count <= 12 + NEEDED + 1
    halves.finish(context)
    wait_until(lambda: halves.manager._questions._finder.holds.count == 0)


def test_a_hole_in_the_window_moves_the_hit_back(halves: Halves) -> None:
    context = halves.request("stores", "p", 8)
    window = [key for number, key in enumerate(keys("p", SLIDING, 8)) if number != 5]
    for number, key in enumerate([*keys("p", FULL, 8), *window]):
        halves.store(context, [key], {int(key[-1]): [1 + 2 * number, 2 + 2 * number]})
    halves.finish(context)
    assert halves.hit(halves.request("loads", "p", 8), "p", 8) == 5


def test_a_prompt_that_is_longer_than_may_be_held_hits_as_far_as_there_is_room(host: Path) -> None:
    halves = Halves(config_of(host, slots=48))
    try:
        halves.store_prompt("p", 22)
        context = halves.request("loads", "p", 22)
        found = halves.hit(context, "p", 22)
        assert 12 <= found <= 22
        assert halves.manager._questions._finder.holds.count <= 24
        halves.finish(context)
    finally:
        halves.close()


def test_a_chunk_of_two_requests_is_held_until_both_are_done(halves: Halves) -> None:
    halves.store_prompt("p", 2)
    one, two = halves.request("one", "p", 2), halves.request("two", "p", 2)
    wanted = keys("p", FULL, 2)
    assert halves.answers(one, wanted) == halves.answers(two, wanted) == [HIT, HIT]
    halves.load(one, {FULL: wanted}, {FULL: [100, 101, 102, 103]})
    halves.finish(one)
    assert halves.manager.lookup(wanted[0], two) is HIT  # still, and at once
    assert halves.manager._questions._finder.holds.count == 2
    halves.finish(two)
    wait_until(lambda: halves.manager._questions._finder.holds.count == 0)


# ---- waits


def test_an_answer_that_does_not_come_is_a_miss(host: Path) -> None:
    halves = Halves(config_of(host, deadline_seconds=0.3))
    try:
        halves.store_prompt("p", 2)
        context, wanted = halves.request("asks", "p", 2), keys("p", FULL, 2)
        with gate_taken(halves.slots._ledger):
            assert halves.answers(context, wanted) == [MISS, MISS]
        wait_until(lambda: halves.answers(context, wanted) == [HIT, HIT])  # a miss is forgotten after a while
    finally:
        halves.close()


def test_a_store_that_finds_no_slot_in_time_is_refused_and_counted(halves: Halves) -> None:
    context = halves.request("stores", "p", 2)
    with gate_taken(halves.slots._ledger):
        output = halves.manager.prepare_store(keys("p", FULL, 2), context)
    assert list(output.keys_to_store) == []
    stats = halves.manager.get_stats()
    assert stats is not None and stats.reduce()["vllm:pagoda_refused_chunks"] == 2
    assert halves.manager.get_stats() is None


def test_after_wait_blocks_may_be_overwritten(halves: Halves) -> None:
    kept = halves.bytes_of(range(1, 61))
    context = halves.request("stores", "p", 30)
    wanted = keys("p", FULL, 30)
    assert halves.begin_store(context, wanted[:8], {FULL: list(range(1, 17))}) == wanted[:8]
    assert halves.begin_store(context, wanted[8:16], {FULL: list(range(17, 33))}) == wanted[8:16]
    halves.worker.wait({1, 2, 3})
    halves.blank()
    halves.ended(2)
    halves.manager.complete_store(set(wanted[:16]), context)
    assert halves.answers(context, wanted[:16]) == [HIT] * 16
    halves.load(context, {FULL: wanted[:16]}, {FULL: list(range(100, 132))})
    assert torch.equal(halves.bytes_of(range(100, 132)), kept[:, :32])


# ---- lower tiers, other processes


def test_what_is_on_the_disk_comes_back_after_a_restart(host: Path, tmp_path: Path) -> None:
    config = config_of(host, tmp_path / "disk")
    first = Halves(config)
    blocks = first.store_prompt("p", 20)
    kept = {group: first.bytes_of(ids) for group, ids in blocks.items()}
    first.close()
    shutil.rmtree(host)
    second = Halves(config, seed=1)
    try:
        context = second.request("loads", "p", 20)
        assert second.hit(context, "p", 20) == 20
        wanted = {FULL: keys("p", FULL, 20), SLIDING: keys("p", SLIDING, 20)[-NEEDED:]}
        source = {second.manager.get_load_source(key, context) for group in wanted.values() for key in group}
        assert source == {CacheHitSource.DISK}
        full, sliding = list(range(100, 140)), list(range(150, 150 + NEEDED * EACH))
        second.load(context, wanted, {FULL: full, SLIDING: sliding})
        assert torch.equal(second.bytes_of(full), kept[FULL])
        assert torch.equal(second.bytes_of(sliding), kept[SLIDING][:, -NEEDED * EACH :])
    finally:
        second.close()


def test_a_request_that_may_not_use_a_tier_does_not(host: Path, tmp_path: Path) -> None:
    config = config_of(host, tmp_path / "disk")
    first = Halves(config)
    first.store_prompt("p", 2)
    first.close()
    shutil.rmtree(host)
    halves = Halves(config)
    try:
        only_memory = halves.request("memory", "p", 2, TierFilter((TierMatcher(Medium.CPU),)))
        assert halves.answers(only_memory, keys("p", FULL, 2)) == [MISS, MISS]
        nothing = halves.request("nothing", "q", 2, TierFilter(()))
        assert [halves.manager.lookup(key, nothing) for key in keys("q", FULL, 2)] == [MISS, MISS]
        halves.finish(only_memory)
        anywhere = halves.request("anywhere", "p", 2)
        wait_until(lambda: halves.answers(anywhere, keys("p", FULL, 2)) == [HIT, HIT])
    finally:
        halves.close()


def test_another_process_finds_what_this_one_stores(halves: Halves, config: Config) -> None:
    child = forks().Process(target=store_elsewhere, args=(config,))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    theirs = memory(seed=3)
    context = halves.request("loads", "p", 5)
    assert halves.hit(context, "p", 5) == 5
    halves.load(context, {FULL: keys("p", FULL, 5)}, {FULL: list(range(100, 110))})
    for plane, other in zip(halves.planes, theirs, strict=True):
        assert torch.equal(plane[100:110], other[1:11])


def test_each_rank_writes_its_part_and_gets_it_back(config: Config) -> None:
    pipes, ranks = [], []
    for part in range(2):
        ours, theirs = forks().Pipe()
        ranks.append(forks().Process(target=be_a_rank, args=(config, part, theirs)))
        ranks[-1].start()
        pipes.append(ours)
    manager = manager_of(config, parts=2)

    def every(job: tuple[Any, ...]) -> list[Any]:
        for pipe in pipes:
            pipe.send(pickle.loads(pickle.dumps(job)))
        return [pipe.recv() for pipe in pipes]

    try:
        assert [pipe.recv() for pipe in pipes] == ["up", "up"]
        context, wanted = _context("stores", "p", 5), keys("p", FULL, 5)
        manager.on_new_request(context)
        output = manager.prepare_store(wanted, context)
        source = blocks_of(context, wanted, wanted, {FULL: list(range(1, 11))})
        pipes[0].send(("store", 1, source, output.store_spec))
        pipes[0].recv()
        assert _answers(manager, context, wanted) == [MISS] * 5  # half a chunk is none
        pipes[1].send(("store", 1, source, output.store_spec))
        pipes[1].recv()
        manager.complete_store(set(wanted), context)
        wait_until(lambda: _answers(manager, context, wanted) == [HIT] * 5)
        target = blocks_of(context, wanted, wanted, {FULL: list(range(100, 110))})
        loaded = every(("load", 2, manager.prepare_load(wanted, context), target))
        for part, planes in enumerate(loaded):
            assert planes == [plane[1:11].tolist() for plane in memory(seed=10 + part)]
    finally:
        for pipe in pipes:
            pipe.send(None)
        for rank in ranks:
            rank.join(30)
        manager.shutdown()
    assert [rank.exitcode for rank in ranks] == [0, 0]


# ---- what goes away


def test_a_chunk_that_is_removed_while_it_is_loaded_is_found_below(host: Path, tmp_path: Path) -> None:
    halves = Halves(config_of(host, tmp_path / "disk"))
    try:
        blocks = halves.store_prompt("p", 3)
        kept = halves.bytes_of(blocks[FULL])
        halves.worker._cache.flush(30)
        context = halves.request("loads", "p", 3)
        assert halves.hit(context, "p", 3) == 3
        loaded = halves.begin_load(context, {FULL: keys("p", FULL, 3)}, {FULL: list(range(100, 106))})
        halves.slots._host.clear(None)
        halves.run(loaded)
        assert halves.worker.take_failed({"loads"}) == set()
        assert torch.equal(halves.bytes_of(range(100, 106)), kept)
    finally:
        halves.close()


def test_a_chunk_that_has_gone_from_everywhere_fails_its_request(halves: Halves) -> None:
    halves.store_prompt("p", 3)
    context = halves.request("loads", "p", 3)
    assert halves.hit(context, "p", 3) == 3
    loaded = halves.begin_load(context, {FULL: keys("p", FULL, 3)}, {FULL: list(range(100, 106))})
    assert halves.worker._cache.clear(everything=True).ok
    halves.run(loaded)
    assert halves.worker.take_failed({"another"}) == set()
    assert halves.worker.take_failed({"loads", "another"}) == {"loads"}
    halves.manager.complete_load(set(keys("p", FULL, 3)), context)
    assert halves.answers(context, keys("p", FULL, 3)) == [MISS] * 3  # so it is not tried for ever


def test_a_load_of_what_was_no_hit_fails_its_request(halves: Halves) -> None:
    halves.store_prompt("p", 2)
    context = halves.request("loads", "p", 2)
    halves.run(halves.begin_load(context, {FULL: keys("p", FULL, 2)}, {FULL: [100, 101, 102, 103]}))
    assert halves.worker.take_failed({"loads"}) == {"loads"}


def test_slots_of_another_store_are_not_touched(halves: Halves) -> None:
    halves.store_prompt("p", 2)
    context = halves.request("loads", "p", 2)
    assert halves.answers(context, keys("p", FULL, 2)) == [HIT, HIT]
    loaded = halves.begin_load(context, {FULL: keys("p", FULL, 2)}, {FULL: [100, 101, 102, 103]})
    loaded.spec.fingerprint = "f" * 16
    halves.blank()
    halves.run(loaded)
    assert halves.worker.take_failed({"loads"}) == {"loads"}
    assert not halves.bytes_of(range(len(halves.planes[0]))).any()


def test_a_reset_forgets_what_was_stored_and_what_is_being_computed(halves: Halves) -> None:
    halves.store_prompt("p", 3)
    before = halves.request("before", "p", 4)
    assert halves.hit(before, "p", 3) == 3
    halves.manager.reset_cache()
    wait_until(lambda: halves.manager._questions._finder.holds.count == 0)
    assert halves.store(before, keys("p", FULL, 4), {FULL: list(range(1, 9))}) == []  # by which weights?
    assert halves.manager.lookup(keys("p", FULL, 1)[0], before) is MISS
    after = halves.request("after", "p", 3)
    assert halves.answers(after, keys("p", FULL, 3)) == [MISS] * 3
    halves.store_prompt("p", 3, at=20, name="anew")
    wait_until(lambda: halves.answers(after, keys("p", FULL, 3)) == [HIT] * 3)


def test_a_reset_while_chunks_are_stored_and_loaded_ends_well(halves: Halves) -> None:
    halves.store_prompt("p", 3)
    loads, stores = halves.request("loads", "p", 3), halves.request("stores", "q", 3)
    assert halves.hit(loads, "p", 3) == 3
    loaded = halves.begin_load(loads, {FULL: keys("p", FULL, 3)}, {FULL: list(range(100, 106))})
    kept = halves.bytes_of(range(1, 7))
    assert halves.begin_store(stores, keys("q", FULL, 3), {FULL: list(range(30, 36))}) == keys("q", FULL, 3)
    halves.manager.reset_cache()  # vLLM says nothing more of these two
    halves.run(loaded)
    assert torch.equal(halves.bytes_of(range(100, 106)), kept)
    assert halves.answers(halves.request("after", "q", 3), keys("q", FULL, 3)) == [MISS] * 3


def test_weights_that_another_process_changed_are_noticed(halves: Halves, config: Config) -> None:
    halves.store_prompt("p", 2)
    other = cache_of(config)
    assert halves.answers(halves.request("one", "p", 2), keys("p", FULL, 2)) == [HIT, HIT]
    other.weights_changed()
    let_go(other)
    halves.manager.on_schedule_end(NO_STEP)
    assert halves.answers(halves.request("two", "p", 2), keys("p", FULL, 2)) == [MISS, MISS]


def test_events_tell_what_is_stored_and_what_has_gone(config: Config) -> None:
    halves = Halves(config, events=True)
    try:
        halves.store_prompt("p", 2)
        told: list[Any] = []
        wait_until(lambda: told.extend(halves.manager.take_events()) or told)
        assert [(set(event.keys), event.medium, event.removed) for event in told] == [
            ({*keys("p", FULL, 2), *keys("p", SLIDING, 2)}, Medium.CPU, False)
        ]
        halves.worker._cache.clear(everything=True)
        told.clear()
        wait_until(lambda: told.extend(halves.manager.take_events()) or told)
        assert [(len(event.keys), event.removed) for event in told] == [(4, True)]
    finally:
        halves.close()


def test_the_end_comes_twice_and_leaves_nothing_held(halves: Halves, config: Config) -> None:
    halves.store_prompt("p", 4)
    context = halves.request("asks", "p", 4)
    assert halves.hit(context, "p", 4) == 4
    watcher = cache_of(config)
    halves.close()
    halves.close()
    assert watcher.slots is not None
    assert halves.manager._questions._finder.holds.count == 0
    assert watcher.slots._ledger.check().gauges["reserved"] == 0
    let_go(watcher)
    assert halves.manager.lookup(keys("p", FULL, 5)[4], context) is not HIT


# ---- what is refused, and what the halves tell each other


def _offloading(host: Path, **extra: Any) -> OffloadingConfig:
    given = {"spec_name": "PagodaOffloadingSpec", "host_path": str(host), "host_size": "1MiB", **extra}
    groups = tuple(OffloadingGroupConfig(BLOCK, (f"layer {number}",), number) for number in (FULL, SLIDING))
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False)
    blocks = int(given.get("blocks_per_chunk") or int(given.get("block_size") or BLOCK) // BLOCK)
    cache = OffloadingCacheConfig(BLOCK, blocks)
    model = OffloadingModelConfig("m", "float32")
    return OffloadingConfig(groups, PAGE_BYTES, False, given, "engine", model, cache, parallel)


PAGE_BYTES = LAYOUT.chunk_bytes // EACH


@pytest.mark.parametrize(
    ("extra", "blocks"),
    [
        ({}, 256 // BLOCK),
        ({"chunk_tokens": 64}, 4),
        ({"block_size": 48}, 3),
        ({"blocks_per_chunk": 2}, 2),
        ({"blocks_per_chunk": 2, "chunk_tokens": 32}, 2),
    ],
)
def test_how_many_blocks_a_chunk_has(host: Path, extra: dict[str, Any], blocks: int) -> None:
    spec = PagodaOffloadingSpec(_offloading(host, **extra))
    assert spec.blocks_per_chunk == blocks
    assert spec.options.config.chunk_tokens == blocks * BLOCK


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"blocks_per_chunk": 2, "chunk_tokens": 64}, "blocks_per_chunk = 2 makes chunks of 32 tokens"),
        ({"chunk_tokens": 40}, "vLLM's blocks have 16 tokens"),
        ({"host_size": 0}, "host_size = 0"),
        ({"chunk_token": 32}, "chunk_tokens"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(host: Path, extra: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        PagodaOffloadingSpec(_offloading(host, **extra))


def test_a_canonical_layout_is_refused(host: Path) -> None:
    with pytest.raises(ValueError, match="canonical_layout"):
        PagodaOffloadingSpec(replace(_offloading(host), canonical_layout=True))


def test_groups_of_other_block_sizes_take_vllms_chunks(host: Path) -> None:
    config = _offloading(host)
    groups = (config.groups[0], replace(config.groups[1], tokens_per_block=4 * BLOCK))
    spec = PagodaOffloadingSpec(replace(config, groups=groups))
    assert (spec.blocks_per_chunk, spec.options.config.chunk_tokens) == (1, 4 * BLOCK)
    with pytest.raises(ValueError, match="groups with blocks of"):
        PagodaOffloadingSpec(replace(_offloading(host, chunk_tokens=32), groups=groups))


def test_a_scheduler_without_its_workers_is_refused(host: Path) -> None:
    with pytest.raises(ValueError, match="worker 0 of 1 left no description"):
        PagodaOffloadingSpec(_offloading(host)).get_manager()


def _greeting(**changes: Any) -> Greeting:
    given = {
        "namespace": Namespace("m", salt="secret"),
        "chunk_tokens": CHUNK,
        "chunk_bytes": LAYOUT.chunk_bytes,
    }
    return Greeting(**given | {"description": "d", "parts": 1, "windows": (None, 96)} | changes)


def test_greetings_arrive_once_and_must_agree(host: Path) -> None:
    greet(host, "e", 0, _greeting(description="an older engine of that name"))
    for rank in range(2):
        greet(host, "e", rank, _greeting())
    assert [path.stat().st_mode & 0o777 for path in host.iterdir()] == [0o600, 0o600]  # a salt is a secret
    assert greeted(host, "e", 2) == _greeting()
    assert list(host.iterdir()) == []
    with pytest.raises(ValueError, match="worker 0 of 2"):
        greeted(host, "e", 2)
    greet(host, "e", 0, _greeting())
    greet(host, "e", 1, _greeting(description="another instruction set"))
    with pytest.raises(ValueError, match="lay out their KV differently"):
        greeted(host, "e", 2)


def test_a_scheduler_that_cuts_other_chunks_is_refused(host: Path) -> None:
    greet(host, "engine", 0, _greeting())
    with pytest.raises(ValueError, match=f"chunks of {CHUNK} tokens in 1 parts"):
        PagodaOffloadingSpec(_offloading(host, chunk_tokens=64)).get_manager()


def test_memory_that_does_not_fit_the_layout_is_refused(config: Config) -> None:
    cache = cache_of(config)
    wide = [Stock(FULL, [torch.zeros(4, 2 * LAYOUT.chunk_bytes, dtype=torch.int8)], BLOCK, EACH)]
    with pytest.raises(ValueError, match="a chunk needs"):
        SlotCopies(cache, wide)
    let_go(cache)


def _context(name: str, prompt: str, chunks: int) -> ReqContext:
    context = ReqContext(name)
    for number, key in enumerate(keys(prompt, FULL, chunks)):
        context.set_offload_key_position(key, (number + 1) * CHUNK)
    return context


def _answers(manager: Any, context: ReqContext, wanted: list[bytes]) -> list[LookupResult]:
    found: list[LookupResult] = []

    def asked() -> bool:
        found[:] = [manager.lookup(key, context) for key in wanted]
        manager.on_schedule_end(NO_STEP)
        return not {RETRY, PENDING} & set(found)

    wait_until(asked)
    return found
