"""The checklist of device blocks, line by line (reset, metrics, space, discard, pauses): each test
quotes its line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from pagoda.blocks import BlockManager, NoRoom, Plan, PrefixMatch, Waiting
from pagoda.cache import Cache
from pagoda.layout import KVLayout
from pagoda.ledger import admin
from pagoda.ledger.request_ring import NAMESPACE_BYTES
from tests.blocks.kit import (
    BLOCK,
    NAMESPACE,
    Engine,
    cache_at,
    everything,
    ledger_of,
    prompt,
    stored,
)

CAT = blake3(b"cat").digest()
DOG = blake3(b"dog").digest()


def test_reset_drains_moves_in_flight(hosted: Engine) -> None:
    """Reset: drains moves in flight, returns every block and pin."""
    down, up = in_all_states(hosted)
    hosted.manager.reset()
    hosted.manager.check()
    assert hosted.manager.in_flight == 2
    assert hosted.stat("in_flight") == 2
    assert hosted.stat("pinned") == 0
    # those of the copies UP are written to until their ticket has ended
    assert hosted.manager.free == 6
    hosted.start("new", prompt(16, 5))
    assert hosted.end(down) == (True, True, (), {}, (), 0)
    assert hosted.end(up) == (True, True, (), {}, (), 2)
    assert hosted.manager.in_flight == 0
    assert hosted.stat("in_flight") == 0
    hosted.is_right("new")
    hosted.manager.release("new")
    hosted.manager.reset()
    assert hosted.manager.free == 8
    # blocks that were being copied down are not stored
    assert hosted.places(prompt(4, 2)) == ["freed"]


def in_all_states(engine: Engine) -> tuple[Plan, Plan]:
    """A request that runs, one that waits for a copy, one that waits; a pin; copies down and up."""
    engine.leave("x", prompt(8))
    engine.demoted(2)
    engine.start("runs", prompt(4, 1))
    engine.manager.pin(prompt(4, 1))
    engine.leave("goes", prompt(4, 2))
    down = engine.manager.demote(1)
    engine.add("comes", prompt(9))
    up = engine.admit("comes").plan
    engine.add("waits", prompt(20, 3))
    assert down is not None
    assert up is not None
    assert engine.places(prompt(4, 1)) == ["device"]
    assert engine.stat("pinned") == 1
    assert engine.places(prompt(4, 2)) == ["to_host"]
    assert engine.places(prompt(8)) == ["to_device"] * 2
    assert engine.manager.in_flight == 2
    return down, up


def test_reset_abandons_moves_in_flight(hosted: Engine) -> None:
    """A reset that abandons frees all at once, and the ends of old tickets change nothing."""
    down, up = in_all_states(hosted)
    hosted.manager.reset(abandon=True)
    hosted.manager.check()
    assert hosted.manager.free == 8
    assert hosted.manager.in_flight == 0
    for plan in (down, up):
        assert not hosted.manager.completed(plan.ticket).known
    assert hosted.cache is not None
    assert admin.gauges(ledger_of(hosted.cache))["reserved"] == 0
    hosted.add("comes", prompt(8))  # its name is forgotten too


def test_weights_updated_invalidates_everything_cached(housed: Engine) -> None:
    """ "Weights updated" invalidates everything cached, in every tier; what runs keeps its blocks
    and is not cached.
    """
    housed.leave("old", prompt(16))
    housed.demoted(2)
    housed.start("runs", prompt(9, 1))
    housed.add("comes", prompt(16))
    up = housed.admit("comes").plan
    housed.add("waits", prompt(16))
    housed.append("runs", prompt(3, 2))
    table = housed.manager.table("runs")
    assert housed.manager.weights_changed() == ("comes",)
    housed.manager.check()
    housed.end(up)
    assert (
        housed.manager.match("waits")
        == housed.manager.match("comes")
        == PrefixMatch(0, 0, 0)
    )
    assert housed.manager.table("runs") == table
    housed.compute("runs")
    assert housed.manager.finish("runs") is None  # its KV is of the old weights
    housed.manager.check()
    housed.add("again", prompt(9, 1))
    assert housed.manager.match("again") == PrefixMatch(0, 0, 0)
    # and from now on it is cached again
    assert housed.resume("comes").computed_tokens == 0
    assert housed.manager.match("waits").device_tokens == 12


def test_stats_count_requests_hits_and_moves(housed: Engine) -> None:
    """Metrics: requests, hit requests, hit tokens by tier, prepare times by tier."""
    housed.leave("a", prompt(16))
    housed.demoted(2)
    housed.leave("b", prompt(17))
    housed.leave("c", prompt(5, 1))
    stats = housed.manager.stats()
    names = (
        "requests hit_requests asked_tokens hit_tokens_device hit_tokens_host "
        "hit_tokens_storage"
    )
    assert [stats[name] for name in names.split()] == [3, 1, 38, 8, 8, 0]
    moved = "evicted_blocks demoted_blocks promoted_blocks dropped_blocks cancelled_moves"
    assert [stats[name] for name in moved.split()] == [2, 5, 2, 0, 0]
    for name in ("match", "host", "fetch"):
        assert stats[f"{name}_seconds"] >= 0
    assert stats["match_seconds"] > 0
    assert stats["host_seconds"] > 0
    last, *_ = ledger_of(housed.cache).requests.newest()
    assert last.namespace == housed.cache.namespace.root[:NAMESPACE_BYTES]
    assert last.asked_tokens == 5 // BLOCK * BLOCK


def test_blocks_outside_the_tree_return_on_release(bare: Engine) -> None:
    """A short request, the unfilled last block and the decode reserve own blocks outside the tree;
    all return.
    """
    bare.start("short", prompt(3))
    bare.add("long", prompt(6, 1))
    bare.admit("long", reserve_tokens=9)
    bare.compute("long")
    assert bare.stat("in_use") == 4
    assert bare.stat("cached") == 1
    assert bare.manager.free == 3
    bare.manager.release("short")
    bare.manager.release("long")
    bare.manager.check()
    assert bare.stat("in_use") == 0
    assert bare.stat("cached") == 1
    assert bare.manager.free == 7


def test_release_twice_or_of_an_unknown_request(bare: Engine) -> None:
    """Release twice or of an unknown request is a ValueError and changes nothing."""
    bare.start("a", prompt(9))
    bare.add("b", prompt(5))
    bare.manager.release("a")
    before = everything(bare)
    manager = bare.manager
    wrong: list[Callable[[], object]] = [
        lambda: manager.release("a"),
        lambda: manager.release("nobody"),
        lambda: manager.finish("a"),
        lambda: manager.preempt("a"),
        lambda: manager.admit("a"),
        lambda: manager.match("a"),
        lambda: manager.prefetch("a"),
        lambda: manager.append("a", [1]),
        lambda: manager.table("a"),
        lambda: manager.finish("b"),  # it waits
        lambda: manager.preempt("b"),
        lambda: manager.computed("b", 1),
        lambda: manager.extend("b", 8),
        lambda: manager.add("b", prompt(4)),
        lambda: manager.add("c", []),
        lambda: manager.add("c", [-1]),
    ]
    for call in wrong:
        with pytest.raises(ValueError):
            call()
        assert everything(bare) == before
    bare.admit("b")
    again: list[Callable[[str], object]] = [
        manager.admit,
        manager.match,
        manager.prefetch,
    ]
    for other in again:
        with pytest.raises(ValueError, match="admitted already"):
            other("b")


def test_is_there_room_with_or_without_evicting(hosted: Engine) -> None:
    """ "Is there room for n?" may be asked with or without evicting."""
    hosted.leave("a", prompt(8))
    hosted.start("b", prompt(12, 1))
    before = everything(hosted)
    assert [n for n in range(10) if hosted.manager.has_room(n)] == [0, 1, 2, 3]
    assert [n for n in range(10) if hosted.manager.has_room(n, evict=True)] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    assert everything(hosted) == before


def test_admission_separates_shared_from_own_blocks(bare: Engine) -> None:
    """Admission separates shared blocks from the request's own."""
    first = bare.start("a", prompt(10))
    second = bare.start("b", prompt(8) + prompt(4, 1))
    assert first.shared == 0
    assert second.shared == 2
    assert set(first.table) & set(second.table) == set(second.table[:2])


def test_with_prefix_caching_off_it_is_a_plain_pool(shm_root: Path) -> None:
    """With prefix caching off it is a plain pool."""
    with cache_at(shm_root) as cache:
        stored(cache, prompt(12))
        engine = Engine(8, cache, prefix_caching=False)
        engine.leave("a", prompt(13))
        assert engine.manager.free == 8
        engine.start("b", prompt(13))
        engine.add("c", prompt(13))
        assert engine.manager.match("c") == PrefixMatch(0, 0, 0)
        assert engine.manager.prefetch("c") is None
        assert engine.admit("c").shared == 0
        assert engine.stat("in_use") == 8
        assert engine.stat("cached") == 0
        assert engine.manager.pin(prompt(13)) == 0
        engine.add("d", prompt(1))
        assert engine.manager.admit("d") == NoRoom(1, 0)
        engine.manager.preempt("b")
        assert engine.resume("b").computed_tokens == 0


def test_discard_takes_the_own_blocks_of_an_aborted_request_at_once(
    hosted: Engine,
) -> None:
    """Discard: own blocks are freed at once, without demotion, up to the first one that another
    request uses.
    """
    hosted.leave("before", prompt(4))
    hosted.start("a", prompt(16))  # shares the first block, made the others
    hosted.start("b", prompt(8) + prompt(5, 1))  # uses the second
    hosted.manager.release("a", discard=True)
    hosted.manager.check()
    assert hosted.places(prompt(16)) == ["device", "device", "freed", "freed"]
    assert hosted.manager.in_flight == 0
    assert hosted.stat("demoted_blocks") == 0
    hosted.is_right("b")
    hosted.manager.release("b")
    # without `discard` it stays
    assert hosted.places(prompt(8) + prompt(5, 1)) == ["device"] * 3


def test_discard_of_a_request_that_waits_for_copies(hosted: Engine) -> None:
    """Blocks that others have computed, and that it only releases, stay cached, as usual."""
    hosted.leave("a", prompt(8))
    hosted.demoted(2)
    hosted.add("b", prompt(9))
    up = hosted.admit("b").plan
    hosted.manager.release("b", discard=True)
    hosted.manager.check()
    assert hosted.stat("in_flight") == 2
    assert hosted.manager.free == 6
    hosted.end(up)
    assert hosted.places(prompt(8)) == ["device"] * 2
    assert hosted.stat("evictable") == 2


def test_moves_can_be_paused_and_drained(hosted: Engine) -> None:
    """Moves can be paused and drained, with the number in flight readable (sleep, weight
    update).
    """
    hosted.leave("a", prompt(8))
    hosted.leave("b", prompt(8, 1))
    down = hosted.manager.demote(2)
    hosted.manager.pause()
    assert hosted.manager.paused
    assert hosted.manager.in_flight == 1
    hosted.end(down)  # running copies end as usual
    assert hosted.manager.in_flight == 0
    hosted.add("c", prompt(9))
    assert hosted.manager.match("c") == PrefixMatch(0, 0, 0)
    assert hosted.manager.prefetch("c") is None
    assert hosted.admit("c").plan is None
    assert hosted.manager.demote(9) is None
    assert hosted.stat("dropped_blocks") == 2
    assert hosted.manager.write_back(prompt(4, 5), [0]) is None
    hosted.manager.release("c")
    hosted.manager.resume()
    hosted.add("d", prompt(9))
    assert hosted.manager.match("d") == PrefixMatch(0, 8, 0)


def test_a_match_while_moves_are_paused_asks_no_storage(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(32))
    with cache_at(shm_root / "wiped", tmp_path) as cache:
        engine = Engine(16, cache, write_back=False)
        engine.add("a", prompt(33))
        engine.manager.pause()
        assert engine.manager.match("a") == PrefixMatch(0, 0, 0)
        engine.manager.resume()
        assert engine.manager.match("a") == PrefixMatch(0, 0, 32)


def test_clearing_has_a_visible_state(hosted: Engine) -> None:
    """Clearing has a visible state: blocks of old copies are counted as in flight until the last
    ticket ended.
    """
    down, up = in_all_states(hosted)
    hosted.manager.reset()
    assert hosted.manager.in_flight == 2
    assert hosted.stat("in_flight") == 2
    hosted.add("big", prompt(32, 7))
    assert hosted.manager.admit("big") == Waiting(
        None, frozenset({down.ticket, up.ticket})
    )
    hosted.end(up)
    assert hosted.manager.in_flight == 1
    assert len(hosted.admit("big").table) == 8


def test_cache_clear_gives_the_host_chunks_up(hosted: Engine) -> None:
    """Decided otherwise: reset keeps what the host has (it is all processes'); Cache.clear frees
    the chunks.
    """
    hosted.leave("a", prompt(16))
    hosted.demoted(4)
    hosted.manager.reset()
    assert hosted.places(prompt(16)) == ["host"] * 4
    assert hosted.cache is not None
    assert hosted.cache.clear().ok
    assert hosted.places(prompt(16)) == ["freed"] * 4
    assert admin.gauges(ledger_of(hosted.cache))["free"] == 64


def test_a_rank_that_dies_is_noticed(shm_root: Path) -> None:
    """Decided otherwise: the manager has no transfer processes; `lost(rank)` fails what waits for a
    rank.
    """
    with cache_at(shm_root) as cache:
        engine = Engine(8, cache, ranks=2, write_back=False)
        engine.leave("a", prompt(8))
        plan = engine.manager.demote(2)
        assert plan is not None
        engine.copy(plan, rank=0)
        engine.manager.completed(plan.ticket, rank=0)
        assert [settled.ended for settled in engine.manager.lost(1)] == [True]
        engine.manager.check()
        assert engine.manager.in_flight == 0
        assert engine.manager.free == 8
        assert engine.places(prompt(8)) == ["freed"] * 2


def test_replicas_share_host_and_disk_but_never_device_ids(
    shm_root: Path, tmp_path: Path
) -> None:
    """Data-parallel replicas share host and disk but never device ids."""
    with (
        cache_at(shm_root, tmp_path) as ours,
        cache_at(shm_root, tmp_path) as theirs,
    ):
        one = Engine(8, ours)
        two = Engine(4, theirs)
        one.leave("a", prompt(8))
        two.add("a", prompt(9))  # the same name means nothing to another replica
        assert two.manager.match("a") == PrefixMatch(0, 8, 0)
        assert one.manager.free == 6
        assert two.manager.free == 4
        assert two.resume("a").by_tier == {"host": 8}
        assert one.manager.free == 6
        assert two.manager.free == 1


def test_draft_layers_are_part_of_the_layout(shm_root: Path) -> None:
    """Draft-model (speculative) layers are part of the layout: with and without them, nothing is
    shared.
    """
    plain = KVLayout.dense(
        layers=3, kv_heads=1, head_dim=4, dtype="float16", chunk_tokens=BLOCK
    )
    draft = KVLayout.dense(
        layers=4, kv_heads=1, head_dim=4, dtype="float16", chunk_tokens=BLOCK
    )
    assert draft.chunk_bytes - plain.chunk_bytes == plain.chunk_bytes // 3
    with cache_at(shm_root) as one:
        options = one.config
    keys = list[set[bytes]]()
    for layout in (plain, draft):
        with Cache(options, namespace=NAMESPACE, layout=layout) as cache:
            keys.append({key for _, _, key in cache.keys(prompt(8))})
            assert cache.slots is not None
            assert cache.slots.view(0).nbytes >= layout.chunk_bytes
    assert len(keys[0] | keys[1]) == 4


def test_a_storage_tier_is_given_keys_and_no_token_ids(housed: Engine) -> None:
    """Decided otherwise: a storage tier is not given token ids (they are the user's text); keys
    name them.
    """
    tokens = [1_000_003 + n for n in range(16)]
    housed.leave("a", tokens)
    assert housed.cache is not None
    assert housed.cache.flush(60)
    [key, *_] = housed.keys(tokens)
    directories = [
        tier.ledger.directory
        for tier in housed.cache._tiers.all
        if tier.contains(key)
    ]  # type: ignore[attr-defined]
    assert len(directories) == 2
    for directory in directories:
        stored = b"".join(path.read_bytes() for path in directory.iterdir())
        assert key in stored
        for width in (np.int32, np.int64):
            assert np.array(tokens[:4], width).tobytes() not in stored
        assert str(tokens[0]).encode() not in stored


def test_the_wrong_cache_is_refused(hosted: Engine) -> None:
    """A block is a chunk: another size of chunks is a ValueError at once."""
    with pytest.raises(ValueError, match="chunk_tokens = block_tokens"):
        BlockManager(8, 16, cache=hosted.cache)
    for wrong in ((0, 4, 1), (8, 0, 1), (8, 4, 0)):
        with pytest.raises(ValueError):
            BlockManager(wrong[0], wrong[1], ranks=wrong[2])
