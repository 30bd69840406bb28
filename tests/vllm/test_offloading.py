"""The storage of vLLM's OffloadingConnector: both halves over real tiers, without an engine."""

from __future__ import annotations

import itertools
import logging
import pickle
import shutil
from pathlib import Path
from threading import Event
from types import SimpleNamespace
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
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pagoda.cache.prompt_log import logged_prompts
from pagoda.config import Config
from pagoda.connectors.vllm.offloading import offloading_manager
from pagoda.keys import derive_keys
from pagoda.ledger.request_ring import NAMESPACE_BYTES
from testbed.servers import pagoda_server
from tests.vllm.halves import (
    CHUNK,
    EACH,
    FULL,
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

HIT = LookupResult.HIT
MISS = LookupResult.MISS
RETRY = LookupResult.RETRY
PENDING = LookupResult.HIT_PENDING
NEEDED = WINDOW // CHUNK


# ---- stored chunks are loaded


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
    assert torch.equal(
        halves.bytes_of(sliding), kept[SLIDING][:, -NEEDED * EACH :]
    )
    others = [
        block
        for block in range(len(halves.planes[0]))
        if block not in full + sliding
    ]
    assert not halves.bytes_of(others).any()  # and no other block was touched
    assert halves.manager.get_load_source(wanted[FULL][0], context) in (
        CacheHitSource.HOST,
        CacheHitSource.EXTERNAL_UNSPECIFIED,
    )


def test_the_first_answer_is_ask_again_and_absence_is_a_miss(
    halves: Halves,
) -> None:
    context = halves.request("asks", "p", 2)
    (key, other) = keys("p", FULL, 2)
    assert halves.manager.lookup(key, context) is RETRY
    # and nothing happens before the step ends
    assert halves.manager.lookup(key, context) is RETRY
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
    # blocks 1 to 4 of the sequence: the first chunk's head is on the device already, the last one's
    # tail is not wanted
    halves.run(
        loaded._replace(blocks=GPULoadStoreSpec([90, 91, 92, 93], [4, 0], [1, 0]))
    )
    assert torch.equal(halves.bytes_of([90, 91, 92, 93]), kept[:, 1:5])
    assert int(sum(plane.any(dim=1).sum() for plane in halves.planes)) == 4 * len(
        halves.planes
    )


def test_no_block_0_is_ever_written(halves: Halves) -> None:
    halves.store_prompt("p", 1)
    halves.blank()
    context = halves.request("loads", "p", 1)
    assert halves.answers(context, keys("p", FULL, 1)) == [HIT]
    loaded = halves.begin_load(context, {FULL: keys("p", FULL, 1)}, {})
    halves.run(loaded._replace(blocks=GPULoadStoreSpec([0, 91], [2, 0], [0, 0])))
    assert not halves.bytes_of([0]).any()
    assert halves.bytes_of([91]).any()


def test_blocks_that_are_not_those_of_the_chunks_are_not_filled(
    halves: Halves,
) -> None:
    halves.store_prompt("p", 3)
    halves.blank()
    context = halves.request("loads", "p", 3)
    assert halves.hit(context, "p", 3) == 3
    loaded = halves.begin_load(context, {FULL: keys("p", FULL, 3)}, {})
    halves.run(loaded._replace(blocks=GPULoadStoreSpec([90, 91], [2, 0], [0, 0])))
    assert halves.worker.take_failed({"loads"}) == {"loads"}
    assert not halves.bytes_of(range(len(halves.planes[0]))).any()


def test_a_chunk_with_a_block_missing_is_not_stored(halves: Halves) -> None:
    """A block outside its window may have been reused: vLLM does not name it, and its place is
    unknown.
    """
    context = halves.request("stores", "p", 4)
    wanted = keys("p", SLIDING, 4)
    halves.store(context, wanted, {SLIDING: [0, 52, 53, 54, 55, 56, 57, 58]})
    # the head of the first is missing
    assert halves.answers(context, wanted) == [MISS, HIT, HIT, HIT]
    other = halves.request("stores too", "q", 4)
    wanted = keys("q", SLIDING, 4)
    halves.store(other, wanted, {SLIDING: [61, 62, 63, 0, 65, 66, 67, 68]})
    # the owners of the blocks are unknown
    assert halves.answers(other, wanted) == [MISS] * 4


def test_what_is_stored_already_is_not_stored_again(halves: Halves) -> None:
    halves.store_prompt("p", 4)
    context = halves.request("again", "p", 6)
    wanted = keys("p", FULL, 6)
    assert (
        halves.store(context, wanted, {FULL: list(range(100, 112))}) == wanted[4:]
    )


# ---- what is held


def test_a_hit_is_held_against_eviction_until_it_is_loaded(
    halves: Halves, config: Config
) -> None:
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
    numbers = itertools.count(20)

    def nothing_is_held() -> bool:
        _press(halves, range(first := next(numbers) * 20, first + 20))
        later = halves.request(f"later {first}", "p", 6)
        answers = halves.answers(later, keys("p", FULL, 6))
        halves.finish(later)
        return answers == [MISS] * 6

    # threads may lease a chunk once more between two stores
    wait_until(nothing_is_held)


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
    window = [
        key for number, key in enumerate(keys("p", SLIDING, 8)) if number != 5
    ]
    for number, key in enumerate([*keys("p", FULL, 8), *window]):
        halves.store(
            context, [key], {int(key[-1]): [1 + 2 * number, 2 + 2 * number]}
        )
    halves.finish(context)
    assert halves.hit(halves.request("loads", "p", 8), "p", 8) == 5


def test_a_prompt_that_is_longer_than_may_be_held_hits_as_far_as_there_is_room(
    host: Path,
) -> None:
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


def test_no_more_than_half_of_the_slots_are_held_whatever_is_asked(
    halves: Halves,
) -> None:
    found = []
    for prompt in ("p", "q"):
        context = halves.request(prompt, prompt, 20)
        wanted = keys(prompt, SLIDING, 20)
        for at in range(0, 20, 5):
            halves.store(
                context, wanted[at : at + 5], {SLIDING: list(range(1, 11))}
            )
        found += halves.answers(context, wanted)
    assert set(found) == {HIT, MISS}
    assert halves.manager._questions._finder.holds.count == found.count(HIT) <= 32


def test_where_room_is_short_every_group_gets_some_of_it(halves: Halves) -> None:
    wanted = [*keys("p", FULL, 24), *keys("p", SLIDING, 24)]
    taken = halves.manager.prepare_store(
        wanted, halves.request("stores", "p", 24)
    ).keys_to_store
    assert {key[-1] for key in taken} == {FULL, SLIDING}
    assert len(taken) < len(wanted)


def test_only_what_was_stored_of_a_request_is_logged(halves: Halves) -> None:
    """For `pagoda explain`: up to the last chunk of the group with full attention that was reserved
    or found.
    """
    wanted = [*keys("p", FULL, 24), *keys("p", SLIDING, 24)]
    contexts = {
        name: halves.request(name, "p", 24)
        for name in ("waits", "salted", "ends")
    }
    taken = halves.manager.prepare_store(wanted, contexts["ends"]).keys_to_store
    kept = sum(key[-1] == FULL for key in taken)
    assert 0 < kept < 24
    halves.manager.prepare_store(wanted, contexts["salted"])
    halves.manager._requests["salted"].kept = {0: kept}
    tokens = list(range(24 * CHUNK + 5))
    for name in contexts:
        request = SimpleNamespace(
            request_id=name,
            mm_features=[],
            prompt_embeds=None,
            all_token_ids=tokens,
            cache_salt="a tenant's" if name == "salted" else None,
            block_hashes=[key[:-4] for key in keys("p", FULL, 24)],
        )
        halves.manager.request_ended(request, CHUNK)
    halves.manager._thread.join(30.0)
    halves.slots._resources.prompt_log.flush()
    (logged,) = logged_prompts(halves.slots._ledger.directory)
    assert len(logged.keys) == kept
    assert logged.tokens.tolist() == tokens[: kept * CHUNK]
    assert logged.keys == derive_keys(
        keys("p", FULL, kept), halves.slots.namespace()
    )


def test_few_prompts_wait_to_be_logged(halves: Halves) -> None:
    """Behind a thread that is busy: requests that end keep their tokens alive no longer than
    that.
    """
    free = Event()
    halves.manager._thread.later(free.wait, 60.0)
    for number in range(40):
        name = f"p{number}"
        halves.manager.prepare_store(
            keys(name, FULL, 1), halves.request(name, name, 1)
        )
        request = SimpleNamespace(
            request_id=name,
            mm_features=[],
            prompt_embeds=None,
            all_token_ids=[number] * CHUNK,
            cache_salt=None,
            block_hashes=[keys(name, FULL, 1)[0][:-4]],
        )
        halves.manager.request_ended(request, CHUNK)
    assert halves.manager._thread.under_way <= offloading_manager._MOST_LOGS
    free.set()
    halves.manager._thread.join(30.0)
    halves.slots._resources.prompt_log.flush()
    logged = list(logged_prompts(halves.slots._ledger.directory))
    assert [int(one.tokens[0]) for one in logged] == list(
        range(offloading_manager._MOST_LOGS - 1)
    )


def test_a_chunk_of_two_requests_is_held_until_both_are_done(
    halves: Halves,
) -> None:
    halves.store_prompt("p", 2)
    one = halves.request("one", "p", 2)
    two = halves.request("two", "p", 2)
    wanted = keys("p", FULL, 2)
    assert (
        halves.answers(one, wanted) == halves.answers(two, wanted) == [HIT, HIT]
    )
    halves.load(one, {FULL: wanted}, {FULL: [100, 101, 102, 103]})
    halves.finish(one)
    assert halves.manager.lookup(wanted[0], two) is HIT  # still, and at once
    assert halves.manager._questions._finder.holds.count == 2
    halves.finish(two)
    wait_until(lambda: halves.manager._questions._finder.holds.count == 0)


# ---- lower tiers, other processes


def test_what_is_on_the_disk_comes_back_after_a_restart(
    host: Path, tmp_path: Path
) -> None:
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
        wanted = {
            FULL: keys("p", FULL, 20),
            SLIDING: keys("p", SLIDING, 20)[-NEEDED:],
        }
        source = {
            second.manager.get_load_source(key, context)
            for group in wanted.values()
            for key in group
        }
        assert source == {CacheHitSource.DISK}
        full = list(range(100, 140))
        sliding = list(range(150, 150 + NEEDED * EACH))
        second.load(context, wanted, {FULL: full, SLIDING: sliding})
        assert torch.equal(second.bytes_of(full), kept[FULL])
        assert torch.equal(
            second.bytes_of(sliding), kept[SLIDING][:, -NEEDED * EACH :]
        )
    finally:
        second.close()


def test_hits_are_counted_by_the_tier_that_had_them(
    host: Path, tmp_path: Path
) -> None:
    first = Halves(config_of(host / "first"))
    first.store_prompt("p", 6)
    first.close()
    with pagoda_server(host / "first") as neighbour:
        peers = [f"{neighbour.url}?password_file={neighbour.root / 'token'}"]
        config = config_of(host / "second", tmp_path / "disk", peers=peers)
        second = Halves(config)
        try:
            # a look-up waits for it a moment only
            names = (f"try {number}" for number in itertools.count())
            wait_until(
                lambda: (
                    second.hit(second.request(next(names), "p", 6), "p", 6) == 6
                )
            )
            (key, *_) = keys("p", FULL, 6)
            assert (
                second.manager.get_load_source(
                    key, second.request("says", "p", 6)
                )
                is CacheHitSource.P2P
            )
            counters = cache_of(config).stats()["counters"]
            assert (
                counters["hit_tokens_disk"] == 0 < counters["hit_tokens_remote"]
            )
            requests = cache_of(config).slots._ledger.requests.newest()
            assert any(one.hit_tokens["remote"] for one in requests)
            assert {one.namespace for one in requests} == {
                cache_of(config).namespace.root[:NAMESPACE_BYTES]
            }
        finally:
            second.close()


def test_a_request_that_may_not_use_a_tier_does_not(
    host: Path, tmp_path: Path
) -> None:
    config = config_of(host, tmp_path / "disk")
    first = Halves(config)
    first.store_prompt("p", 2)
    first.close()
    shutil.rmtree(host)
    halves = Halves(config)
    try:
        only_memory = halves.request(
            "memory", "p", 2, TierFilter((TierMatcher(Medium.CPU),))
        )
        assert halves.answers(only_memory, keys("p", FULL, 2)) == [MISS, MISS]
        nothing = halves.request("nothing", "q", 2, TierFilter(()))
        assert [
            halves.manager.lookup(key, nothing) for key in keys("q", FULL, 2)
        ] == [MISS, MISS]
        halves.finish(only_memory)
        anywhere = halves.request("anywhere", "p", 2)
        wait_until(
            lambda: halves.answers(anywhere, keys("p", FULL, 2)) == [HIT, HIT]
        )
    finally:
        halves.close()


@pytest.mark.slow
def test_another_process_finds_what_this_one_stores(
    halves: Halves, config: Config
) -> None:
    child = forks().Process(target=store_elsewhere, args=(config,))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    theirs = memory(seed=3)
    context = halves.request("loads", "p", 5)
    assert halves.hit(context, "p", 5) == 5
    halves.load(
        context, {FULL: keys("p", FULL, 5)}, {FULL: list(range(100, 110))}
    )
    for plane, other in zip(halves.planes, theirs, strict=True):
        assert torch.equal(plane[100:110], other[1:11])


def test_each_rank_writes_its_part_and_gets_it_back(config: Config) -> None:
    pipes = []
    ranks = []
    for part in range(2):
        ours, theirs = forks().Pipe()
        ranks.append(
            forks().Process(target=be_a_rank, args=(config, part, theirs))
        )
        ranks[-1].start()
        pipes.append(ours)
    manager = manager_of(config, parts=2)

    def every(job: tuple[Any, ...]) -> list[Any]:
        for pipe in pipes:
            pipe.send(pickle.loads(pickle.dumps(job)))
        return [pipe.recv() for pipe in pipes]

    try:
        assert [pipe.recv() for pipe in pipes] == ["up", "up"]
        context = _context("stores", "p", 5)
        wanted = keys("p", FULL, 5)
        manager.on_new_request(context)
        output = manager.prepare_store(wanted, context)
        source = blocks_of(context, wanted, wanted, {FULL: list(range(1, 11))})
        pipes[0].send(("store", 1, source, output.store_spec))
        pipes[0].recv()
        # half a chunk is none
        assert _answers(manager, context, wanted) == [MISS] * 5
        pipes[1].send(("store", 1, source, output.store_spec))
        pipes[1].recv()
        manager.complete_store(set(wanted), context)
        wait_until(lambda: _answers(manager, context, wanted) == [HIT] * 5)
        target = blocks_of(context, wanted, wanted, {FULL: list(range(100, 110))})
        loaded = every(("load", 2, manager.prepare_load(wanted, context), target))
        for part, planes in enumerate(loaded):
            assert planes == [
                plane[1:11].tolist() for plane in memory(seed=10 + part)
            ]
    finally:
        for pipe in pipes:
            pipe.send(None)
        for rank in ranks:
            rank.join(30)
        manager.shutdown()
    assert [rank.exitcode for rank in ranks] == [0, 0]


def _context(name: str, prompt: str, chunks: int) -> ReqContext:
    context = ReqContext(name)
    for number, key in enumerate(keys(prompt, FULL, chunks)):
        context.set_offload_key_position(key, (number + 1) * CHUNK)
    return context


def _answers(
    manager: Any, context: ReqContext, wanted: list[bytes]
) -> list[LookupResult]:
    found: list[LookupResult] = []

    def asked() -> bool:
        found[:] = [manager.lookup(key, context) for key in wanted]
        manager.on_schedule_end(NO_STEP)
        return not {RETRY, PENDING} & set(found)

    wait_until(asked)
    return found


def test_chunks_of_media_without_a_name_by_content_are_the_engines_own(
    host: Path,
) -> None:
    """The full attention of what is before the image is shared; later chunks are another engine's
    by the same name.
    """
    image = ("renderer0-mm-1-image-0", 2 * CHUNK + 5)
    one = Halves(config_of(host))
    other = Halves(config_of(host), seed=1)
    try:
        context = one.request("stores", "p", 4, image=image)
        wanted = [*keys("p", FULL, 4), *keys("p", SLIDING, 4)]
        blocks = {FULL: list(range(1, 9)), SLIDING: list(range(9, 17))}
        assert len(one.store(context, wanted, blocks)) == 8
        one.finish(context)
        assert one.hit(one.request("again", "p", 4, image=image), "p", 4) == 4
        elsewhere = other.request("elsewhere", "p", 4, image=image)
        assert other.answers(elsewhere, keys("p", FULL, 4)) == [
            HIT,
            HIT,
            MISS,
            MISS,
        ]
        assert other.hit(other.request("plain", "p", 4), "p", 4) == 2
        assert other.store(elsewhere, wanted, blocks) == [
            *keys("p", FULL, 4)[2:],
            *keys("p", SLIDING, 4)[2:],
        ]
    finally:
        other.close()
        one.close()


def test_how_much_can_hit_is_logged_at_the_start(
    host: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who has given a hybrid model too little host memory finds in the log why prompts hit no
    more.
    """
    caplog.set_level(logging.INFO, logger="pagoda")
    halves = Halves(config_of(host, slots=24))
    try:
        (line,) = [
            one
            for one in caplog.messages
            if one.startswith("a request hits at most")
        ]
        most = halves.manager._questions._finder._run_most
        assert f"at most {most * CHUNK} tokens: each of 2 group(s)" in line
        assert "24 slots" in line
        halves.store_prompt("p", most + 2)
        context = halves.request("long", "p", most + 2)
        assert (
            halves.answers(context, keys("p", FULL, most + 2))
            == [HIT] * most + [MISS] * 2
        )
    finally:
        halves.close()
