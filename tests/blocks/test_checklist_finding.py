"""The checklist of device blocks, line by line (pools, the tree, places, hits, matches): each
quotes its line.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3

from pagoda.blocks import Direction, PrefixMatch
from pagoda.keys import Item
from pagoda.ledger import admin
from tests.blocks.kit import (
    Engine,
    cache_at,
    ledger_of,
    prompt,
    stored,
    workers_stopped,
)

CAT = blake3(b"cat").digest()
DOG = blake3(b"dog").digest()


def test_fixed_pools_with_gauges_for_total_free_and_usable(
    hosted: Engine,
) -> None:
    """Fixed pools of device blocks and host slots; allocate, recycle; gauges for
    total/free/usable.
    """
    stats = hosted.manager.stats
    assert hosted.manager.total == 8
    assert hosted.manager.free == 8
    hosted.start("a", prompt(14))
    assert {
        name: stats()[name]
        for name in ("total", "free", "cached", "in_use", "evictable")
    } == {
        "total": 8,
        "free": 4,
        "cached": 3,
        "in_use": 1,
        "evictable": 0,
    }
    hosted.finish("a")
    assert hosted.manager.free == 5
    assert stats()["evictable"] == 3
    assert hosted.cache is not None
    assert hosted.cache.slots is not None
    assert hosted.cache.slots.count == 64
    hosted.demoted(3)
    gauges = admin.gauges(ledger_of(hosted.cache))
    assert hosted.manager.free == 8
    assert gauges["ready"] == 3
    assert gauges["free"] == 61
    assert gauges["slots"] == 64


def test_a_prefix_tree_by_chained_hash(bare: Engine) -> None:
    """Blocks form a prefix tree by chained hash: a block is shared only after the same prefix."""
    head = prompt(8)
    tail = prompt(4, 1)
    bare.start("a", head + tail)
    same = bare.start("b", head + prompt(4, 2))
    assert same.shared == 2
    assert same.computed_tokens == 8
    assert same.table[:2] == bare.manager.table("a")[:2]
    # the same third block after another prefix
    bare.add("c", prompt(8, 3) + tail)
    assert bare.manager.match("c").num_tokens == 0


@pytest.mark.parametrize(("digest", "tokens"), [(CAT, 8), (DOG, 0)])
def test_multimodal_digests_are_part_of_the_hash(
    bare: Engine, digest: bytes, tokens: int
) -> None:
    """Multimodal digests are part of the hash: the same placeholder tokens under another image are
    another prefix.
    """
    bare.start("a", prompt(9), items=[Item(1, 3, CAT)])
    bare.add("b", prompt(9), items=[Item(1, 3, digest)])
    assert bare.manager.match("b").device_tokens == tokens


def test_only_whole_blocks(bare: Engine) -> None:
    """Only whole blocks are shared."""
    bare.start("a", prompt(11))
    bare.add("b", prompt(11)[:7] + prompt(8, 1))
    assert bare.manager.match("b").device_tokens == 4
    bare.add("c", prompt(11) + prompt(1, 1))
    # the third block of "a" has three tokens only
    assert bare.manager.match("c").device_tokens == 8


@pytest.mark.parametrize(("tokens", "hit"), [(8, 4), (9, 8), (4, 0), (1, 0)])
def test_the_last_token_is_always_left_to_compute(
    bare: Engine, tokens: int, hit: int
) -> None:
    """The last token is always left to compute."""
    bare.leave("a", prompt(12))
    bare.add("b", prompt(12)[:tokens])
    assert bare.manager.match("b").num_tokens == hit
    assert bare.admit("b").computed_tokens == hit < tokens


def test_where_a_block_is(shm_root: Path, tmp_path: Path) -> None:
    """Where a block is: device, going to host, host, coming to device, loading from storage, a real
    FREED state.
    """
    with cache_at(shm_root, tmp_path) as cache:
        engine = Engine(8, cache, write_back=False)
        tokens = prompt(5)
        assert engine.places(tokens) == ["freed"]
        engine.start("a", tokens)
        assert engine.places(tokens) == ["device"]
        engine.finish("a")
        down = engine.manager.demote(1)
        assert engine.places(tokens) == ["to_host"]
        engine.end(down)
        assert engine.places(tokens) == ["host"]
        engine.add("b", tokens)
        admitted = engine.admit("b")
        assert engine.places(tokens) == ["to_device"]
        engine.end(admitted.plan)
        assert engine.places(tokens) == ["device"]
        engine.manager.release("b")
        engine.demoted(1)
        assert cache.flush(60)
        admin.clear(ledger_of(cache), None)
        assert engine.places(tokens) == ["storage"]
        goes_on = workers_stopped(cache)
        engine.add("c", tokens)
        future = engine.manager.prefetch("c")
        assert future is not None
        assert engine.places(tokens) == ["loading"]
        goes_on.set()
        assert future.result(60).num_tokens == 4
        assert engine.places(tokens) == ["host"]
        assert cache.clear().ok
        assert engine.places(tokens) == ["freed"]


def test_a_hit_on_a_block_on_its_way_to_host_cancels_the_move(
    hosted: Engine,
) -> None:
    """A hit on a block that is on its way to host cancels the move."""
    hosted.leave("a", prompt(8))
    down = hosted.manager.demote(2)
    assert down is not None
    assert len(down.copies) == 2
    hosted.add("b", prompt(8))
    admitted = hosted.admit("b")
    assert admitted.by_tier == {"device": 4}
    assert admitted.plan is None
    assert admitted.waits == frozenset()
    # the second was not hit: its last token is left
    assert hosted.places(prompt(8)) == ["device", "to_host"]
    hosted.is_right("b", 4)
    settled = hosted.end(down)
    assert settled.freed == 1
    assert hosted.stat("cancelled_moves") == 1
    assert hosted.stat("demoted_blocks") == 1
    assert hosted.places(prompt(8)) == ["device", "host"]
    assert hosted.cache is not None
    # the slot of the move that was called off
    assert admin.gauges(ledger_of(hosted.cache))["reserved"] == 0


def test_a_hit_on_a_host_block_brings_it_back(hosted: Engine) -> None:
    """A hit on a host block loads it again."""
    hosted.leave("a", prompt(12))
    assert hosted.demoted(3) == 8
    hosted.kv[:] = 0
    hosted.add("b", prompt(13))
    admitted = hosted.admit("b")
    assert admitted.plan is not None
    assert admitted.plan.direction is Direction.UP
    assert [copy.block for copy in admitted.plan.copies] == admitted.table[:3]
    assert admitted.by_tier == {"host": 12}
    assert admitted.computed_tokens == 12
    assert admitted.shared == 3
    assert admitted.waits == {admitted.plan.ticket}
    with pytest.raises(ValueError, match="waits for tickets"):
        hosted.manager.computed("b", 13)
    assert hosted.end(admitted.plan).ready == ("b",)
    hosted.is_right("b", 12)


def test_a_second_request_waits_for_the_same_move(hosted: Engine) -> None:
    """A second request that hits a block on its way back waits for the same move (loaded once)."""
    hosted.leave("a", prompt(8))
    hosted.demoted(2)
    hosted.kv[:] = 0
    for name in "bc":
        hosted.add(name, prompt(8) + prompt(2, 1))
    first = hosted.admit("b")
    second = hosted.admit("c")
    assert first.plan is not None
    assert second.plan is None
    assert first.waits == second.waits == {first.plan.ticket}
    assert first.table[:2] == second.table[:2]
    assert first.table[2] != second.table[2]
    assert hosted.end(first.plan).ready == ("b", "c")
    hosted.is_right("c", 8)
    assert hosted.stat("promoted_blocks") == 2


def test_match_reports_device_host_and_storage_separately_in_tokens(
    shm_root: Path, tmp_path: Path
) -> None:
    """Match: device hits, host hits, storage hits reported separately in tokens; the plan says
    which copies.
    """
    tokens = prompt(40)
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, tokens[:32])
    with cache_at(shm_root / "wiped", tmp_path) as cache:
        engine = Engine(16, cache, write_back=False)
        stored(cache, tokens[:20])
        engine.start("a", tokens[:8])
        engine.add("b", tokens)
        assert engine.manager.match("b") == PrefixMatch(8, 12, 12)
        assert engine.manager.match("b").num_tokens == 32
        admitted = engine.admit("b")
        assert admitted.plan is not None
        assert len(admitted.plan.copies) == 3
        # storage was not fetched
        assert admitted.by_tier == {"device": 8, "host": 12}


def test_a_preempted_request_finds_its_own_work(hosted: Engine) -> None:
    """Match (prompt + what it has generated, so a preempted request finds its own work)."""
    hosted.start("a", prompt(6))
    hosted.append("a", prompt(5, 1))
    hosted.compute("a")
    hosted.manager.preempt("a")
    hosted.manager.check()
    assert hosted.manager.match("a") == PrefixMatch(8, 0, 0)
    assert hosted.manager.table("a") == []
    hosted.demoted(1)
    assert hosted.manager.match("a") == PrefixMatch(4, 4, 0)
    assert hosted.resume("a").by_tier == {"device": 4, "host": 4}


def test_match_pins_nothing(hosted: Engine) -> None:
    """Decided otherwise: match pins nothing, so requests that queue cannot lock each other out;
    admit pins.
    """
    hosted.leave("a", prompt(32))
    for i in range(3):
        hosted.add(f"wait {i}", prompt(32) + prompt(4, i))
        assert hosted.manager.match(f"wait {i}").device_tokens == 32
    assert hosted.stat("evictable") == 8
    assert hosted.stat("in_use") == 0
    hosted.add("b", prompt(32, 9))
    assert len(hosted.admit("b").table) == 8  # the whole pool, after any look-up
