"""The storage of vLLM's OffloadingConnector when loads fail, chunks are removed, or stores are
impossible.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from pagoda.config import Config
from pagoda.connectors.vllm.offloading import (
    lookup_table,
    offloading_manager,
    offloading_worker,
)
from pagoda.connectors.vllm.offloading.messages import (
    WorkerGreeting,
    greet,
    greeted,
)
from pagoda.connectors.vllm.offloading.offloading_worker import (
    EnginePages,
    PagodaOffloadingWorker,
)
from pagoda.connectors.vllm.offloading.spec import PagodaOffloadingSpec
from pagoda.connectors.vllm.options import chunk_options
from pagoda.connectors.vllm.shared_caches import let_go
from pagoda.keys import Namespace
from pagoda.ledger import admin
from tests.ledger.support import Other, gate_taken
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
    blocks_of,
    cache_of,
    config_of,
    keys,
    wait_until,
)

HIT = LookupResult.HIT
MISS = LookupResult.MISS
RETRY = LookupResult.RETRY
PENDING = LookupResult.HIT_PENDING
NEEDED = WINDOW // CHUNK


# ---- waits


def test_an_answer_that_does_not_come_is_a_miss(host: Path) -> None:
    halves = Halves(config_of(host, deadline_seconds=0.3))
    try:
        halves.store_prompt("p", 2)
        context = halves.request("asks", "p", 2)
        wanted = keys("p", FULL, 2)
        with gate_taken(halves.slots._ledger):
            assert halves.answers(context, wanted) == [MISS, MISS]
        # the earlier answer remains valid
        assert halves.answers(context, wanted) == [MISS, MISS]
        halves.finish(context)
        others = (
            halves.request(f"asks later {number}", "p", 2)
            for number in range(10_000)
        )
        # and is forgotten after a while
        wait_until(lambda: halves.answers(next(others), wanted) == [HIT, HIT])
    finally:
        halves.close()


def test_a_look_that_hangs_is_a_miss_and_counted(host: Path) -> None:
    halves = Halves(config_of(host, deadline_seconds=0.3))
    go_on = threading.Event()
    try:
        halves.store_prompt("p", 2)
        halves.manager._questions._answers.submit(go_on.wait, 30)
        context = halves.request("asks", "p", 2)
        wanted = keys("p", FULL, 2)
        assert halves.answers(context, wanted) == [MISS, MISS]
        assert not go_on.is_set()
        stats = halves.manager.get_stats()
        assert stats is not None
        assert stats.reduce()["vllm:pagoda_late_lookups"] == 2
        go_on.set()  # later chunks are not held
        wait_until(
            lambda: (
                halves.manager.on_schedule_end(NO_STEP)
                or not halves.manager._questions._finder.holds.count
            )
        )
        assert halves.answers(context, wanted) == [MISS, MISS]
    finally:
        go_on.set()
        halves.close()


def test_a_store_that_finds_no_slot_in_time_is_refused_and_counted(
    halves: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading_manager, "_RESERVE_SECONDS", 0.02)
    context = halves.request("stores", "p", 2)
    with gate_taken(halves.slots._ledger):
        output = halves.manager.prepare_store(keys("p", FULL, 2), context)
    assert list(output.keys_to_store) == []
    stats = halves.manager.get_stats()
    assert stats is not None
    assert stats.reduce()["vllm:pagoda_refused_chunks"] == 2
    assert halves.manager.get_stats() is None


def test_requests_of_one_step_wait_for_slots_once(
    halves: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped has the ledger: the step must not wait for it once for each
    request.
    """
    monkeypatch.setattr(offloading_manager, "_RESERVE_SECONDS", 0.02)
    tried: list[int] = []
    reserve = halves.manager._slots.reserve

    def counted(keys: Any, **how: Any) -> Any:
        tried.append(len(keys))
        return reserve(keys, **how)

    contexts = [
        halves.request(f"stores {number}", f"p{number}", 2) for number in range(8)
    ]
    with gate_taken(halves.slots._ledger):
        monkeypatch.setattr(halves.manager._slots, "reserve", counted)
        for number, context in enumerate(contexts):
            assert not halves.manager.prepare_store(
                keys(f"p{number}", FULL, 2), context
            ).keys_to_store
        assert tried == [2]
        stats = halves.manager.get_stats()
        assert stats is not None
        assert stats.reduce()["vllm:pagoda_refused_chunks"] == 16
        halves.manager.on_schedule_end(NO_STEP)
        assert not halves.manager.prepare_store(
            keys("p0", FULL, 2), contexts[0]
        ).keys_to_store
        assert tried == [2, 2]
    halves.manager.on_schedule_end(NO_STEP)
    monkeypatch.setattr(offloading_manager, "_RESERVE_SECONDS", 20.0)
    assert (
        len(
            halves.manager.prepare_store(
                keys("p1", FULL, 2), contexts[1]
            ).keys_to_store
        )
        == 2
    )


@contextmanager
def _two_stores_of_which_one_waits(
    halves: Halves,
) -> Iterator[tuple[ReqContext, list[bytes], Other]]:
    """Two jobs are submitted; the second does not begin before another process releases the
    ledger.
    """
    context = halves.request("stores", "p", 8)
    wanted = keys("p", FULL, 8)
    outputs = [
        halves.manager.prepare_store(wanted[at : at + 4], context)
        for at in (0, 4)
    ]
    with gate_taken(halves.slots._ledger) as other:
        for job, output in enumerate(outputs, 1):
            blocks = {FULL: list(range(8 * job - 7, 8 * job + 1))}
            source = blocks_of(
                context, list(output.keys_to_store), output.keys_to_store, blocks
            )
            assert halves.worker.submit_store(job, source, output.store_spec)
        yield context, wanted, other
    halves.ended(2)
    halves.manager.complete_store(set(wanted), context)


def test_after_wait_blocks_may_be_overwritten(halves: Halves) -> None:
    kept = halves.bytes_of(range(1, 17))
    with _two_stores_of_which_one_waits(halves) as (context, wanted, other):
        timer = threading.Timer(0.5, other.end)
        timer.start()
        halves.worker.wait({1, 2, 3})
        halves.blank()
        timer.join()
    assert halves.answers(context, wanted) == [HIT] * 8
    halves.load(context, {FULL: wanted}, {FULL: list(range(100, 116))})
    assert torch.equal(halves.bytes_of(range(100, 116)), kept)


def test_a_store_that_is_not_waited_for_any_longer_is_dropped(
    halves: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading_worker, "_FENCE_SECONDS", 0.2)
    kept = halves.bytes_of(range(1, 9))
    with _two_stores_of_which_one_waits(halves) as (context, wanted, _):
        halves.worker.wait({1, 2})
        halves.blank()
    assert halves.answers(context, wanted) == [HIT] * 4 + [MISS] * 4
    halves.load(context, {FULL: wanted[:4]}, {FULL: list(range(100, 108))})
    assert torch.equal(halves.bytes_of(range(100, 108)), kept)


def test_the_first_answer_to_a_request_stands_while_it_asks(
    halves: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a step takes: answers that ran out one after another would never all be there at
    once.
    """
    monkeypatch.setattr(lookup_table, "_MISS_SECONDS", -1.0)
    halves.store_prompt("p", 2)
    context = halves.request("asks", "p", 4)
    wanted = keys("p", FULL, 4)
    for _ in range(3):
        assert halves.answers(context, wanted) == [HIT, HIT, MISS, MISS]


def test_a_hit_that_nobody_looks_at_is_let_go_and_found_again(
    halves: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_table, "_IDLE_SECONDS", 0.5)
    monkeypatch.setattr(lookup_table, "_MISS_SECONDS", 0.0)
    halves.store_prompt("p", 3)
    context = halves.request("queues", "p", 3)
    for _ in range(2):
        assert halves.answers(context, keys("p", FULL, 3)) == [HIT] * 3
        wait_until(
            lambda: (
                halves.manager.on_schedule_end(NO_STEP)
                or not halves.manager._questions._known
            )
        )
        wait_until(lambda: halves.manager._questions._finder.holds.count == 0)


# ---- chunks that are removed


def test_a_chunk_that_is_removed_while_it_is_loaded_is_found_below(
    host: Path, tmp_path: Path
) -> None:
    halves = Halves(config_of(host, tmp_path / "disk"))
    try:
        blocks = halves.store_prompt("p", 3)
        kept = halves.bytes_of(blocks[FULL])
        halves.worker._cache.flush(30)
        context = halves.request("loads", "p", 3)
        assert halves.hit(context, "p", 3) == 3
        loaded = halves.begin_load(
            context, {FULL: keys("p", FULL, 3)}, {FULL: list(range(100, 106))}
        )
        halves.slots._host.clear(None)
        halves.run(loaded)
        assert halves.worker.take_failed({"loads"}) == set()
        assert torch.equal(halves.bytes_of(range(100, 106)), kept)
    finally:
        halves.close()


def test_a_chunk_that_has_gone_from_everywhere_fails_its_request(
    halves: Halves,
) -> None:
    halves.store_prompt("p", 3)
    context = halves.request("loads", "p", 3)
    assert halves.hit(context, "p", 3) == 3
    loaded = halves.begin_load(
        context, {FULL: keys("p", FULL, 3)}, {FULL: list(range(100, 106))}
    )
    assert halves.worker._cache.clear(everything=True).ok
    halves.run(loaded)
    assert halves.worker.take_failed({"another"}) == set()
    assert halves.worker.take_failed({"loads", "another"}) == {"loads"}
    halves.manager.complete_load(set(keys("p", FULL, 3)), context)
    # so it is not retried forever
    assert halves.answers(context, keys("p", FULL, 3)) == [MISS] * 3


def test_what_was_cleared_is_no_hit_any_more_for_requests_that_had_found_it(
    halves: Halves,
) -> None:
    """A hold keeps the bytes of a slot; what was cleared is not loaded from it, so it may not be
    offered either.
    """
    halves.store_prompt("p", 3)
    one, two = (halves.request(name, "p", 3) for name in ("one", "two"))
    wanted = keys("p", FULL, 3)
    assert halves.answers(one, wanted) == halves.answers(two, wanted) == [HIT] * 3
    loaded = halves.begin_load(one, {FULL: wanted}, {FULL: list(range(100, 106))})
    assert halves.worker._cache.clear(everything=True).ok
    assert halves.answers(two, wanted) == [MISS] * 3
    halves.run(loaded)
    halves.manager.complete_load(set(wanted), one)
    assert halves.worker.take_failed({"one"}) == {"one"}
    # chunks stored since then are found by requests without an earlier look-up
    halves.store_prompt("p", 3, name="anew")
    three = halves.request("three", "p", 3)
    wait_until(lambda: halves.answers(three, wanted) == [HIT] * 3)


def test_a_hold_of_what_was_cleared_ends_with_the_load_from_it(
    halves: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_table, "_LINGER_SECONDS", 0.0)
    monkeypatch.setattr(lookup_table, "_MISS_SECONDS", 0.0)
    halves.store_prompt("p", 3)
    one, two = (halves.request(name, "p", 3) for name in ("one", "two"))
    wanted = keys("p", FULL, 3)
    assert halves.answers(one, wanted) == [HIT] * 3
    halves.begin_load(one, {FULL: wanted[:1]}, {FULL: [100, 101]})
    assert halves.worker._cache.clear(everything=True).ok
    assert halves.answers(two, wanted) == [MISS] * 3
    wait_until(
        lambda: (
            halves.manager.on_schedule_end(NO_STEP)
            or not halves.manager._questions._finder.holds.count
        )
    )


def test_a_request_whose_load_failed_is_offered_nothing_again(
    halves: Halves,
) -> None:
    halves.store_prompt("p", 3)
    one, two = (halves.request(name, "p", 3) for name in ("one", "two"))
    wanted = keys("p", FULL, 3)
    assert halves.answers(one, wanted) == [HIT] * 3
    for _ in range(2):  # vLLM may report it more than once
        halves.manager.load_failed("one")
    halves.manager.load_failed("unknown")
    assert halves.answers(one, wanted) == [MISS] * 3
    assert halves.answers(two, wanted) == [HIT] * 3
    stats = halves.manager.get_stats()
    assert stats is not None
    assert stats.reduce()["vllm:pagoda_failed_loads"] == 1
    blocks = {FULL: list(range(20, 24))}
    # it is stored all the same
    assert (
        halves.store(one, keys("p", FULL, 5)[3:], blocks)
        == keys("p", FULL, 5)[3:]
    )


def test_a_load_of_what_was_no_hit_fails_its_request(
    halves: Halves, caplog: pytest.LogCaptureFixture
) -> None:
    halves.store_prompt("p", 2)
    for name in ("loads", "loads too"):
        context = halves.request(name, "p", 2)
        halves.run(
            halves.begin_load(
                context, {FULL: keys("p", FULL, 2)}, {FULL: [100, 101, 102, 103]}
            )
        )
        assert halves.worker.take_failed({name}) == {name}
    logged = [line for line in caplog.messages if "a load failed" in line]
    assert len(logged) == 1 and logged[0].startswith(
        "io_error: a load failed: "
    ), logged


def test_slots_of_another_store_are_not_touched(halves: Halves) -> None:
    halves.store_prompt("p", 2)
    context = halves.request("loads", "p", 2)
    assert halves.answers(context, keys("p", FULL, 2)) == [HIT, HIT]
    loaded = halves.begin_load(
        context, {FULL: keys("p", FULL, 2)}, {FULL: [100, 101, 102, 103]}
    )
    loaded.spec.fingerprint = "f" * 16
    halves.blank()
    halves.run(loaded)
    assert halves.worker.take_failed({"loads"}) == {"loads"}
    assert not halves.bytes_of(range(len(halves.planes[0]))).any()


def test_a_reset_forgets_what_was_stored_and_what_is_being_computed(
    halves: Halves,
) -> None:
    halves.store_prompt("p", 3)
    before = halves.request("before", "p", 4)
    assert halves.hit(before, "p", 3) == 3
    halves.manager.reset_cache()
    wait_until(lambda: halves.manager._questions._finder.holds.count == 0)
    # by which weights?
    assert (
        halves.store(before, keys("p", FULL, 4), {FULL: list(range(1, 9))}) == []
    )
    assert halves.manager.lookup(keys("p", FULL, 1)[0], before) is MISS
    after = halves.request("after", "p", 3)
    assert halves.answers(after, keys("p", FULL, 3)) == [MISS] * 3
    halves.store_prompt("p", 3, at=20, name="anew")
    wait_until(lambda: halves.answers(after, keys("p", FULL, 3)) == [HIT] * 3)


def test_what_ended_before_a_version_was_named_is_not_stored_under_its_name(
    halves: Halves,
) -> None:
    """vLLM stores the last chunks of a request with the step after its end: of the weights that
    computed it.
    """
    ended = halves.request("ended", "p", 4)
    waits = halves.request("waits", "q", 4)
    request = SimpleNamespace(
        request_id="ended",
        mm_features=[],
        prompt_embeds=None,
        cache_salt=None,
        all_token_ids=[],
        block_hashes=[],
    )
    halves.manager.request_ended(request, CHUNK)
    # without a reset: vLLM does not forget what has ended
    halves.manager._take_version("a-run/step-1", True)
    assert (
        halves.store(ended, keys("p", FULL, 4), {FULL: list(range(1, 9))}) == []
    )
    assert halves.store(
        waits, keys("q", FULL, 4), {FULL: list(range(1, 9))}
    ) == keys("q", FULL, 4)


def test_a_reset_while_chunks_are_stored_and_loaded_ends_well(
    halves: Halves,
) -> None:
    halves.store_prompt("p", 3)
    loads = halves.request("loads", "p", 3)
    stores = halves.request("stores", "q", 3)
    assert halves.hit(loads, "p", 3) == 3
    loaded = halves.begin_load(
        loads, {FULL: keys("p", FULL, 3)}, {FULL: list(range(100, 106))}
    )
    kept = halves.bytes_of(range(1, 7))
    assert halves.begin_store(
        stores, keys("q", FULL, 3), {FULL: list(range(30, 36))}
    ) == keys("q", FULL, 3)
    halves.manager.reset_cache()  # vLLM says nothing more of these two
    halves.run(loaded)
    assert torch.equal(halves.bytes_of(range(100, 106)), kept)
    after = halves.request("after", "q", 3)
    wanted = keys("q", FULL, 3)
    assert halves.answers(after, wanted) == [MISS] * 3
    assert halves.store(after, wanted, {FULL: list(range(30, 36))}) == wanted


def test_weights_that_another_process_changed_are_noticed(
    halves: Halves, config: Config
) -> None:
    halves.store_prompt("p", 2)
    other = cache_of(config)
    assert halves.answers(halves.request("one", "p", 2), keys("p", FULL, 2)) == [
        HIT,
        HIT,
    ]
    other.weights_changed()
    let_go(other)
    halves.manager.on_schedule_end(NO_STEP)
    assert halves.answers(halves.request("two", "p", 2), keys("p", FULL, 2)) == [
        MISS,
        MISS,
    ]


def test_the_end_comes_twice_and_leaves_nothing_held(
    halves: Halves, config: Config
) -> None:
    halves.store_prompt("p", 4)
    context = halves.request("asks", "p", 4)
    assert halves.hit(context, "p", 4) == 4
    watcher = cache_of(config)
    halves.close()
    halves.close()
    assert watcher.slots is not None
    assert halves.manager._questions._finder.holds.count == 0
    assert admin.check(watcher.slots._ledger).gauges["reserved"] == 0
    let_go(watcher)
    assert halves.manager.lookup(keys("p", FULL, 5)[4], context) is not HIT


# ---- refusals, and messages between the halves


def _offloading(host: Path, **extra: Any) -> OffloadingConfig:
    given = {
        "spec_name": "PagodaOffloadingSpec",
        "host_path": str(host),
        "host_size": "1MiB",
        **extra,
    }
    groups = tuple(
        OffloadingGroupConfig(BLOCK, (f"layer {number}",), number)
        for number in (FULL, SLIDING)
    )
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False)
    blocks = int(
        given.get("blocks_per_chunk")
        or int(given.get("block_size") or BLOCK) // BLOCK
    )
    cache = OffloadingCacheConfig(BLOCK, blocks)
    model = OffloadingModelConfig("m", "float32")
    return OffloadingConfig(
        groups, PAGE_BYTES, False, given, "engine", model, cache, parallel
    )


PAGE_BYTES = LAYOUT.chunk_bytes // EACH


@pytest.mark.parametrize(
    ("extra", "blocks"),
    [
        ({}, 32 // BLOCK),
        ({"chunk_tokens": 64}, 4),
        ({"block_size": 48}, 3),
        ({"blocks_per_chunk": 2}, 2),
        ({"blocks_per_chunk": 2, "chunk_tokens": 32}, 2),
    ],
)
def test_how_many_blocks_a_chunk_has(
    host: Path, extra: dict[str, Any], blocks: int
) -> None:
    spec = PagodaOffloadingSpec(_offloading(host, **extra))
    assert spec.blocks_per_chunk == blocks
    assert spec.options.config.chunk_tokens == blocks * BLOCK


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"blocks_per_chunk": 2, "chunk_tokens": 64},
            "blocks_per_chunk = 2 makes chunks of 32 tokens",
        ),
        ({"chunk_tokens": 40}, "vLLM's blocks have 16 tokens"),
        ({"host_size": 0}, "host_size = 0"),
        ({"chunk_token": 32}, "chunk_tokens"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(
    host: Path, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PagodaOffloadingSpec(_offloading(host, **extra))


def test_a_chunk_of_a_model_with_states_is_one_block(host: Path) -> None:
    options, blocks = chunk_options(_offloading(host), states=True)
    assert options.config.chunk_tokens == BLOCK
    assert blocks == 1
    with pytest.raises(
        ValueError,
        match="linear attention or Mamba layers makes chunks of 16 tokens",
    ):
        chunk_options(_offloading(host, chunk_tokens=2 * BLOCK), states=True)
    _, blocks = chunk_options(_offloading(host, blocks_per_chunk=2), states=True)
    assert blocks == 2  # by vLLM's own option


def test_a_canonical_layout_is_refused(host: Path) -> None:
    with pytest.raises(ValueError, match="canonical_layout"):
        PagodaOffloadingSpec(replace(_offloading(host), canonical_layout=True))


def test_groups_of_other_block_sizes_take_vllms_chunks(host: Path) -> None:
    config = _offloading(host)
    groups = (
        config.groups[0],
        replace(config.groups[1], tokens_per_block=4 * BLOCK),
    )
    spec = PagodaOffloadingSpec(replace(config, groups=groups))
    assert spec.blocks_per_chunk == 1
    assert spec.options.config.chunk_tokens == 4 * BLOCK
    with pytest.raises(ValueError, match="groups with blocks of"):
        PagodaOffloadingSpec(
            replace(_offloading(host, chunk_tokens=32), groups=groups)
        )


def test_a_scheduler_without_its_workers_is_refused(host: Path) -> None:
    with pytest.raises(ValueError, match="worker 0 of 1 left no description"):
        PagodaOffloadingSpec(_offloading(host)).get_manager()


def test_below_a_connector_that_gets_no_failures_it_is_refused(
    host: Path,
) -> None:
    """vLLM's plain OffloadingConnector would promise cleared chunks forever."""
    with pytest.raises(
        ValueError, match="PagodaConnector only: name that as kv_connector"
    ):
        PagodaOffloadingSpec(_offloading(host))._connector()


def _greeting(**changes: Any) -> WorkerGreeting:
    given = {
        "namespace": Namespace("m", salt="secret"),
        "chunk_tokens": CHUNK,
        "chunk_bytes": LAYOUT.chunk_bytes,
    }
    return WorkerGreeting(
        **given
        | {"description": "d", "parts": 1, "windows": (None, 96)}
        | changes
    )


def test_greetings_arrive_once_and_must_agree(host: Path) -> None:
    greet(host, "e", 0, _greeting(description="an older engine of that name"))
    for rank in range(2):
        greet(host, "e", rank, _greeting())
    # a salt is a secret
    assert [path.stat().st_mode & 0o777 for path in host.iterdir()] == [
        0o600,
        0o600,
    ]
    assert greeted(host, "e", 2) == _greeting()
    assert list(host.iterdir()) == []
    with pytest.raises(ValueError, match="worker 0 of 2"):
        greeted(host, "e", 2)
    greet(host, "e", 0, _greeting())
    greet(host, "e", 1, _greeting(description="another instruction set"))
    with pytest.raises(ValueError, match="have different KV layouts"):
        greeted(host, "e", 2)


def test_a_scheduler_that_cuts_other_chunks_is_refused(host: Path) -> None:
    greet(host, "engine", 0, _greeting())
    with pytest.raises(ValueError, match=f"chunks of {CHUNK} tokens in 1 parts"):
        PagodaOffloadingSpec(_offloading(host, chunk_tokens=64)).get_manager()


def test_memory_that_does_not_fit_the_layout_is_refused(config: Config) -> None:
    cache = cache_of(config)
    wide = [
        EnginePages(
            FULL,
            [torch.zeros(4, 2 * LAYOUT.chunk_bytes, dtype=torch.int8)],
            BLOCK,
            EACH,
        )
    ]
    with pytest.raises(ValueError, match="a chunk needs"):
        PagodaOffloadingWorker(cache, wide)
    let_go(cache)
