"""The checklist of device blocks and the prefix tree, line by line: each test quotes the line that it pins."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from pagoda.blocks import Admitted, BlockManager, Direction, Extended, Match, Plan, Refused, Waiting
from pagoda.cache import Cache
from pagoda.keys import Item
from pagoda.layout import KVLayout
from pagoda.testing import FakeClock
from pagoda.transfer import BlockKV
from tests.blocks.kit import (
    BLOCK,
    LAYOUT,
    NAMESPACE,
    Engine,
    cache_at,
    ledger_of,
    prompt,
    retrieved,
    stored,
    truth,
    wait_until,
)

CAT, DOG = blake3(b"cat").digest(), blake3(b"dog").digest()


# ---- 1


def test_fixed_pools_with_gauges_for_total_free_and_usable(hosted: Engine) -> None:
    """Fixed pools of device blocks and host slots; allocate, recycle; gauges for total/free/usable."""
    stats = hosted.manager.stats
    assert (hosted.manager.total, hosted.manager.free) == (8, 8)
    hosted.start("a", prompt(14))
    assert {name: stats()[name] for name in ("total", "free", "cached", "in_use", "evictable")} == {
        "total": 8,
        "free": 4,
        "cached": 3,
        "in_use": 1,
        "evictable": 0,
    }
    hosted.finish("a")
    assert (hosted.manager.free, stats()["evictable"]) == (5, 3)
    assert hosted.cache is not None and hosted.cache.slots is not None and hosted.cache.slots.count == 64
    hosted.demoted(3)
    gauges = ledger_of(hosted.cache).gauges()
    assert (hosted.manager.free, gauges["ready"], gauges["free"], gauges["slots"]) == (8, 3, 61, 64)


# ---- 2


def test_a_prefix_tree_by_chained_hash(bare: Engine) -> None:
    """Blocks form a prefix tree by chained hash: a block is shared only behind the same prefix."""
    head, tail = prompt(8), prompt(4, 1)
    bare.start("a", head + tail)
    same = bare.start("b", head + prompt(4, 2))
    assert (same.shared, same.computed_tokens) == (2, 8) and same.table[:2] == bare.manager.table("a")[:2]
    bare.add("c", prompt(8, 3) + tail)  # the same third block behind another prefix
    assert bare.manager.match("c").num_tokens == 0


@pytest.mark.parametrize(("digest", "tokens"), [(CAT, 8), (DOG, 0)])
def test_multimodal_digests_are_part_of_the_hash(bare: Engine, digest: bytes, tokens: int) -> None:
    """...(with multimodal digests): the same placeholder tokens under another image are another prefix."""
    bare.start("a", prompt(9), items=[Item(1, 3, CAT)])
    bare.add("b", prompt(9), items=[Item(1, 3, digest)])
    assert bare.manager.match("b").device_tokens == tokens


def test_only_whole_blocks(bare: Engine) -> None:
    """Only whole blocks are shared."""
    bare.start("a", prompt(11))
    bare.add("b", prompt(11)[:7] + prompt(8, 1))
    assert bare.manager.match("b").device_tokens == 4
    bare.add("c", prompt(11) + prompt(1, 1))
    assert bare.manager.match("c").device_tokens == 8  # the third block of "a" has three tokens only


@pytest.mark.parametrize(("tokens", "hit"), [(8, 4), (9, 8), (4, 0), (1, 0)])
def test_the_last_token_is_always_left_to_compute(bare: Engine, tokens: int, hit: int) -> None:
    """The last token is always left to compute."""
    bare.leave("a", prompt(12))
    bare.add("b", prompt(12)[:tokens])
    assert bare.manager.match("b").num_tokens == hit
    assert bare.admit("b").computed_tokens == hit < tokens


# ---- 3


def test_where_a_block_is(shm_root: Path, tmp_path: Path) -> None:
    """Where a block is: device, going to host, host, coming to device, loading from storage, a real FREED state."""
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
        ledger_of(cache).clear(None)
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


def workers_stopped(cache: Cache) -> threading.Event:
    """Keep the threads of a cache busy until the event is set."""
    goes_on, inside = threading.Event(), threading.Semaphore(0)

    class Slow(BlockKV):
        def to_slots(self, *args: object) -> None:
            inside.release()
            assert goes_on.wait(100)
            super().to_slots(*args)  # type: ignore[arg-type]

    seeds = range(1000, 1020)
    busy = [cache.store_future(prompt(4, n), Slow(np.stack(truth(prompt(4, n))), LAYOUT)) for n in seeds]
    assert inside.acquire(timeout=60)
    assert not busy[-1].running() and not busy[-1].done(), "there are more threads than thought"
    return goes_on


# ---- 4


def test_a_hit_on_a_block_on_its_way_to_host_cancels_the_move(hosted: Engine) -> None:
    """A hit on a block that is on its way to host cancels the move."""
    hosted.leave("a", prompt(8))
    down = hosted.manager.demote(2)
    assert down is not None and len(down.copies) == 2
    hosted.add("b", prompt(8))
    admitted = hosted.admit("b")
    assert (admitted.by_tier, admitted.plan, admitted.waits) == ({"device": 4}, None, frozenset())
    assert hosted.places(prompt(8)) == ["device", "to_host"]  # the second was not hit: its last token is left
    hosted.is_right("b", 4)
    settled = hosted.end(down)
    assert (settled.freed, hosted.stat("cancelled_moves"), hosted.stat("demoted_blocks")) == (1, 1, 1)
    assert hosted.places(prompt(8)) == ["device", "host"]
    assert hosted.cache is not None
    assert ledger_of(hosted.cache).gauges()["reserved"] == 0  # the slot of the move that was called off


def test_a_hit_on_a_host_block_brings_it_back(hosted: Engine) -> None:
    """A hit on a host block brings it back."""
    hosted.leave("a", prompt(12))
    assert hosted.demoted(3) == 8
    hosted.kv[:] = 0
    hosted.add("b", prompt(13))
    admitted = hosted.admit("b")
    assert admitted.plan is not None and admitted.plan.direction is Direction.UP
    assert [copy.block for copy in admitted.plan.copies] == admitted.table[:3]
    assert (admitted.by_tier, admitted.computed_tokens, admitted.shared) == ({"host": 12}, 12, 3)
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
    first, second = hosted.admit("b"), hosted.admit("c")
    assert first.plan is not None and second.plan is None
    assert first.waits == second.waits == {first.plan.ticket}
    assert first.table[:2] == second.table[:2] and first.table[2] != second.table[2]
    assert hosted.end(first.plan).ready == ("b", "c")
    hosted.is_right("c", 8)
    assert hosted.stat("promoted_blocks") == 2


# ---- 5


def test_match_reports_device_host_and_storage_separately_in_tokens(shm_root: Path, tmp_path: Path) -> None:
    """Match: device hits, host hits, storage hits reported separately in tokens; the plan says which copies."""
    tokens = prompt(40)
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, tokens[:32])
    with cache_at(shm_root / "wiped", tmp_path) as cache:
        engine = Engine(16, cache, write_back=False)
        stored(cache, tokens[:20])
        engine.start("a", tokens[:8])
        engine.add("b", tokens)
        assert engine.manager.match("b") == Match(8, 12, 12)
        assert engine.manager.match("b").num_tokens == 32
        admitted = engine.admit("b")
        assert admitted.plan is not None and len(admitted.plan.copies) == 3
        assert admitted.by_tier == {"device": 8, "host": 12}  # storage was not fetched


def test_a_preempted_request_finds_its_own_work(hosted: Engine) -> None:
    """Match (prompt + what it has generated, so a preempted request finds its own work)."""
    hosted.start("a", prompt(6))
    hosted.append("a", prompt(5, 1))
    hosted.compute("a")
    hosted.manager.preempt("a")
    hosted.manager.check()
    assert hosted.manager.match("a") == Match(8, 0, 0) and hosted.manager.table("a") == []
    hosted.demoted(1)
    assert hosted.manager.match("a") == Match(4, 4, 0)
    assert hosted.resume("a").by_tier == {"device": 4, "host": 4}


def test_match_pins_nothing(hosted: Engine) -> None:
    """Decided otherwise: match pins nothing, so requests that queue cannot lock each other out; admit pins."""
    hosted.leave("a", prompt(32))
    for i in range(3):
        hosted.add(f"wait {i}", prompt(32) + prompt(4, i))
        assert hosted.manager.match(f"wait {i}").device_tokens == 32
    assert (hosted.stat("evictable"), hosted.stat("in_use")) == (8, 0)
    hosted.add("b", prompt(32, 9))
    assert len(hosted.admit("b").table) == 8  # the whole pool, whoever has looked


# ---- 6


def test_admit_takes_blocks_for_the_prompt_and_the_reserve(bare: Engine) -> None:
    """Admit: needed blocks for prompt + reserved decode blocks."""
    bare.add("a", prompt(6))
    admitted = bare.admit("a", reserve_tokens=7)
    assert (len(admitted.table), admitted.shared, bare.manager.free) == (4, 0, 4)
    with pytest.raises(ValueError, match="negative"):
        bare.manager.admit("a", reserve_tokens=-1)


def test_not_enough_room_evicts(bare: Engine) -> None:
    """Not enough room -> evict."""
    bare.leave("a", prompt(32))
    bare.add("b", prompt(12, 1))
    answer = bare.manager.admit("b")
    assert isinstance(answer, Admitted) and bare.stat("evicted_blocks") == 3
    assert bare.places(prompt(32)) == ["device"] * 5 + ["freed"] * 3


def test_an_eviction_that_needs_copies_is_waited_for(hosted: Engine) -> None:
    """Decided: eviction that needs copies answers Waiting; the room is there when the ticket has ended."""
    hosted.leave("a", prompt(32))
    hosted.add("b", prompt(12, 1))
    waiting = hosted.manager.admit("b")
    assert isinstance(waiting, Waiting) and waiting.plan is not None
    assert waiting.plan.direction is Direction.DOWN and waiting.tickets == {waiting.plan.ticket}
    assert hosted.manager.admit("b") == Waiting(None, waiting.tickets)  # no more is evicted for it
    assert hosted.end(waiting.plan).freed == 3
    admitted = hosted.manager.admit("b")
    assert isinstance(admitted, Admitted)
    assert sorted(admitted.table) == sorted(copy.block for copy in waiting.plan.copies)


def everything(engine: Engine) -> object:
    """All that a refusal must leave alone."""
    manager = engine.manager
    nodes = {
        key: (node.block, node.place, node.locks, node.children, node.last_use, node.entry, node.ticket)
        for key, node in manager._tree.nodes.items()
    }
    stats = {name: n for name, n in manager.stats().items() if not name.endswith("seconds")}
    records = {name: (list(r.table), r.entered, set(r.waits), r.tip) for name, r in manager._records.items()}
    return nodes, stats, records, list(manager._pool._free), sorted(e[:2] for e in manager._tree._heap)


@pytest.mark.parametrize("evict", [True, False])
def test_a_clean_refusal_changes_nothing(hosted: Engine, evict: bool) -> None:
    """Still not -> a clean refusal with nothing changed (no pins, no states, no recency touched)."""
    hosted.leave("old", prompt(8))
    hosted.leave("host", prompt(4, 1))
    hosted.start("runs", prompt(16, 2))
    down = hosted.manager.demote(1)
    hosted.add("b", prompt(8) + prompt(17, 3))
    before = everything(hosted)
    answer = hosted.manager.admit("b", evict=evict)
    assert answer == Refused(5, 2 if evict else 1)  # its own path is not counted as room
    assert everything(hosted) == before
    assert hosted.manager.extend("runs", 99, evict=evict) == Refused(21, 4 if evict else 1)
    assert everything(hosted) == before
    hosted.end(down)
    hosted.manager.release("runs")
    assert hosted.admit("b").computed_tokens == 8


# ---- 7


def test_only_whole_computed_blocks_enter_the_tree(bare: Engine) -> None:
    """Extend during chunked prefill: only whole computed blocks enter the tree."""
    bare.add("a", prompt(14))
    bare.admit("a")
    bare.add("b", prompt(14))
    for count, hit in [(0, 0), (3, 0), (4, 4), (7, 4), (12, 12), (14, 12)]:
        bare.compute("a", count)
        assert bare.manager.match("b").device_tokens == hit
    with pytest.raises(ValueError, match="cannot be computed"):
        bare.manager.computed("a", 13)  # it does not go back
    with pytest.raises(ValueError, match="cannot be computed"):
        bare.manager.computed("a", 15)


def test_extend_gives_room_for_more_tokens(bare: Engine) -> None:
    """Extend: blocks for what is generated, outside the tree until they are kept."""
    bare.start("a", prompt(4))
    assert bare.manager.extend("a", 4) == Extended(bare.manager.table("a"), 0)
    answer = bare.manager.extend("a", 10)
    assert isinstance(answer, Extended) and (answer.new, len(answer.table)) == (2, 3)
    assert (bare.stat("cached"), bare.stat("in_use")) == (1, 2)


def test_extend_makes_room_as_admit_does(hosted: Engine) -> None:
    """Extend: not enough room -> evict, by copies that are waited for; the request goes on with what it has."""
    hosted.leave("old", prompt(28))
    hosted.start("a", prompt(4, 1))
    table = hosted.manager.table("a")
    assert isinstance(hosted.manager.extend("a", 12, evict=False), Refused)
    waiting = hosted.manager.extend("a", 12)
    assert isinstance(waiting, Waiting) and waiting.plan is not None and len(waiting.plan.copies) == 2
    assert hosted.manager.table("a") == table
    hosted.end(waiting.plan)
    answer = hosted.manager.extend("a", 12)
    assert isinstance(answer, Extended) and (answer.new, answer.table[:1]) == (2, table)
    assert hosted.places(prompt(28)) == ["device"] * 5 + ["host"] * 2


@pytest.mark.parametrize(("keep", "hit"), [(True, 12), (False, 4)])
def test_output_blocks_enter_at_the_end_if_they_are_to_be_kept(bare: Engine, keep: bool, hit: int) -> None:
    """Finish: output blocks enter too (option)."""
    bare.start("a", prompt(6))
    bare.append("a", prompt(7, 1))
    bare.compute("a")
    bare.add("b", prompt(6) + prompt(7, 1))
    assert bare.manager.match("b").device_tokens == 4  # not before the end
    bare.finish("a", keep_output=keep)
    assert bare.manager.match("b").device_tokens == hit
    assert bare.manager.free == 8 - hit // BLOCK


def test_a_twin_that_is_there_gives_our_block_back(bare: Engine) -> None:
    """A twin that is already there gives our block back."""
    for name in "ab":
        bare.add(name, prompt(9))
        assert bare.admit(name).shared == 0
    for name in "ab":
        bare.compute(name)
        bare.is_right(name)
    assert not set(bare.manager.table("a")) & set(bare.manager.table("b"))
    assert (bare.stat("cached"), bare.stat("in_use")) == (2, 4)
    bare.finish("b")
    assert bare.manager.free == 8 - 3  # all of its own: the tree has those of "a"
    bare.finish("a")
    assert (bare.manager.free, bare.stat("evictable")) == (6, 2)
    assert bare.start("c", prompt(9)).computed_tokens == 8


def test_a_twin_that_is_coming_is_not_waited_for(hosted: Engine) -> None:
    """A twin that is on its way: our blocks stay our own until it is there."""
    assert hosted.cache is not None
    hosted.add("a", prompt(9))
    hosted.admit("a")
    stored(hosted.cache, prompt(8))  # by somebody else, meanwhile
    hosted.add("b", prompt(9))
    up = hosted.admit("b").plan
    assert up is not None
    hosted.compute("a", 8)
    assert (hosted.stat("in_use"), hosted.stat("in_flight"), hosted.stat("cached")) == (4, 2, 0)
    hosted.end(up)
    hosted.compute("a")
    assert (hosted.stat("in_use"), hosted.stat("cached")) == (4, 2)
    hosted.finish("a")
    assert (hosted.manager.free, hosted.stat("evictable")) == (5, 0)
    hosted.is_right("b", 8)


def test_a_twin_that_leaves_without_its_parent_is_none(hosted: Engine) -> None:
    """A twin out of reach, on its way to the host: ours enters the tree in its place, and its move goes on."""
    assert hosted.cache is not None
    hosted.leave("a", prompt(8))
    stored(hosted.cache, prompt(4))
    down = hosted.manager.demote(2)  # the first is on the host and goes at once; the second is copied
    assert down is not None and len(down.copies) == 1 and hosted.places(prompt(8)) == ["host", "to_host"]
    admitted = hosted.start("b", prompt(9))
    assert admitted.by_tier == {"host": 4} and hosted.stat("cancelled_moves") == 0
    assert hosted.places(prompt(8)) == ["device", "device"]
    assert hosted.end(down).freed == 1
    assert hosted.places(prompt(8)) == ["device", "device"]
    hosted.finish("b")
    assert hosted.manager.demote(2) is None  # the host has both by now
    assert retrieved(hosted.cache, prompt(8)) == (8, True)


def test_a_host_twin_adopts_our_device_block(hosted: Engine) -> None:
    """A host twin adopts our device block: it is found on the device, and needs no copy to go to the host."""
    assert hosted.cache is not None
    hosted.add("a", prompt(9))
    hosted.admit("a")
    stored(hosted.cache, prompt(8))  # by somebody else, meanwhile
    hosted.compute("a")
    assert hosted.places(prompt(8)) == ["device", "device"]
    hosted.finish("a")
    assert hosted.manager.demote(2) is None and hosted.manager.free == 8
    assert hosted.places(prompt(8)) == ["host", "host"] and hosted.stat("dropped_blocks") == 0


# ---- 8


def test_release_unpins_the_path(bare: Engine) -> None:
    """Release: unpins the path; unpinned leaves become eviction candidates."""
    bare.leave("a", prompt(9))
    bare.add("b", prompt(9))
    bare.admit("b")
    assert (bare.stat("evictable"), bare.manager.demote(8)) == (0, None)
    assert bare.places(prompt(8)) == ["device"] * 2
    bare.manager.release("b")
    bare.manager.check()
    assert bare.stat("evictable") == 2
    bare.manager.demote(8)
    assert bare.places(prompt(8)) == ["freed"] * 2 and bare.manager.free == 8


def test_persistent_nodes_are_never_candidates(bare: Engine) -> None:
    """Persistent (pinned) nodes never do."""
    bare.leave("a", prompt(12))
    assert bare.manager.pin(prompt(8) + prompt(9, 1)) == 8
    bare.manager.check()
    assert (bare.stat("pinned"), bare.stat("evictable")) == (1, 1)
    bare.manager.demote(8)
    assert bare.places(prompt(12)) == ["device", "device", "freed"]
    bare.add("b", prompt(28, 2))
    assert bare.manager.admit("b") == Refused(7, 6)
    assert bare.manager.unpin(prompt(8)) == 8
    bare.manager.check()
    assert len(bare.admit("b").table) == 7
    with pytest.raises(ValueError, match="pinned"):
        bare.manager.unpin(prompt(8))


def test_what_is_coming_cannot_be_pinned_yet(hosted: Engine) -> None:
    """...and a pin is for what is on the device: a leaving block is called back, a coming one is not counted."""
    hosted.leave("a", prompt(12))
    hosted.demoted(1)
    down = hosted.manager.demote(1)
    hosted.add("b", prompt(13))
    up = hosted.admit("b").plan
    assert hosted.manager.pin(prompt(12)) == 8
    hosted.end(down)
    hosted.end(up)
    assert hosted.manager.pin(prompt(12)) == 12 and hosted.stat("pinned") == 2
    hosted.manager.release("b")
    hosted.manager.demote(8)
    assert hosted.places(prompt(12)) == ["device"] * 3
    assert [hosted.manager.unpin(prompt(12)) for _ in range(2)] == [12, 8]  # the longest first
    hosted.manager.check()
    assert hosted.stat("evictable") == 3


# ---- 9


def test_leaves_go_first_by_recency_and_parents_when_no_child_is_left(bare: Engine) -> None:
    """Evict leaf-first by recency; a parent becomes a candidate when it has no child in that tier."""
    bare.leave("a", prompt(8) + prompt(4, 1))
    bare.leave("b", prompt(8) + prompt(4, 2))
    bare.leave("c", prompt(8, 3))
    bare.leave("a2", prompt(8) + prompt(4, 1))
    order = [
        (prompt(8) + prompt(4, 2), 2),
        (prompt(8, 3), 1),
        (prompt(8, 3), 0),
        (prompt(8) + prompt(4, 1), 2),
    ]
    for tokens, block in [*order, (prompt(8), 1), (prompt(8), 0)]:
        assert bare.places(tokens)[block] == "device"
        bare.manager.demote(1)
        bare.manager.check()
        assert bare.places(tokens)[block] == "freed"
        assert bare.places(tokens)[:block] == ["device"] * block
    assert bare.manager.free == 8


def test_demote_if_the_host_has_room_or_can_make_it_else_drop(shm_root: Path) -> None:
    """Demote to host when host has room (or can make it), else drop; partial demotion is fine."""
    clock = FakeClock()
    with cache_at(shm_root, slots=16, clock=clock) as cache:
        engine = Engine(16, cache, write_back=False)
        engine.leave("a", prompt(16))
        assert engine.demoted(4) == 16 and engine.places(prompt(16)) == ["host"] * 4
        for seed in range(1, 5):  # 16 blocks more: the host makes room by dropping what is oldest there
            clock.advance(100)
            engine.leave(f"{seed}", prompt(16, seed))
            engine.demoted(4)
            assert engine.places(prompt(16, seed)) == ["host"] * 4
        assert engine.places(prompt(16)) == ["freed"] * 4
        clock.advance(100)
        held = []
        for seed in range(1, 5):  # now nothing there may go
            match = ledger_of(cache).match(engine.keys(prompt(16, seed)))
            assert ledger_of(cache).hold(match.slots, match.generations) == [True] * 4
            held.append(match)
        ledger_of(cache).release(held[0].slots[2:], held[0].generations[2:])  # but for two of them
        clock.advance(100)
        engine.leave("z", prompt(16, 9))
        plan = engine.manager.demote(4)
        assert plan is not None and len(plan.copies) == 2
        assert engine.manager.free == 14 and engine.stat("dropped_blocks") == 2
        engine.end(plan)
        assert engine.places(prompt(16, 9)) == ["host", "host", "freed", "freed"]  # the head is what is kept


def test_the_host_evicts_to_storage(shm_root: Path, tmp_path: Path) -> None:
    """Host evicts to storage/drop the same way."""
    with cache_at(shm_root, tmp_path, slots=16) as cache:
        engine = Engine(16, cache, write_back=False)
        engine.leave("a", prompt(16))
        engine.demoted(4)
        assert cache.flush(60)
        wait_until(lambda: pushed_out(engine, prompt(16)))
        assert engine.places(prompt(16)) == ["storage"] * 4


def pushed_out(engine: Engine, tokens: list[int]) -> bool:
    """Fill the host with other prompts; whether one has gone from there."""
    for seed in range(100, 104):
        name = f"fill {seed} {engine.stat('requests')}"
        engine.leave(name, prompt(16, seed + int(engine.stat("requests"))))
        engine.demoted(4)
        assert engine.cache is not None and engine.cache.flush(60)
    return "host" not in engine.places(tokens)


# ---- 10


def test_write_back_at_finish_copies_what_is_missing_only(housed: Engine) -> None:
    """Storage: write-back at finish (asynchronous, only what is missing there)."""
    housed.start("a", prompt(13))
    plan = housed.manager.finish("a")
    assert plan is not None and plan.direction is Direction.DOWN and len(plan.copies) == 3
    assert (
        housed.places(prompt(12)) == ["device"] * 3 and housed.stat("evictable") == 0
    )  # read until it ended
    housed.end(plan)
    assert housed.places(prompt(12)) == ["device"] * 3 and housed.stat("evictable") == 3
    assert housed.cache is not None and housed.cache.flush(60)
    assert housed.cache.holders(housed.keys(prompt(12))[2]) == ["host", "disk"]
    housed.start("b", prompt(12) + prompt(8, 1))
    plan = housed.manager.finish("b")
    assert plan is not None and len(plan.copies) == 2
    housed.end(plan)
    housed.start("c", prompt(13))
    assert housed.manager.finish("c") is None
    assert housed.manager.demote(16) is None and housed.manager.free == 16  # evicting it costs nothing


def test_prefetch_brings_the_leading_run_and_takes_no_blocks(shm_root: Path, tmp_path: Path) -> None:
    """Prefetch at match (leading run; blocks are taken only after the hit length is known; the tail is given back)."""
    tokens = prompt(40)
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, tokens[:32])
    with cache_at(shm_root / "wiped", tmp_path) as cache:
        engine = Engine(16, cache)
        keys = engine.keys(tokens)
        disk = cache._storeys.lower[0]
        assert disk.remove(keys[5])  # a hole: the run ends before it
        engine.add("a", tokens)
        assert engine.manager.match("a") == Match(0, 0, 20)
        future = engine.manager.prefetch("a")
        assert future is not None and engine.manager.prefetch("a") in (future, None)
        assert (engine.manager.free, engine.manager.in_flight) == (16, 0)
        assert future.result(60).num_tokens == 20
        assert engine.manager.match("a") == Match(0, 20, 0)
        assert ledger_of(cache).gauges()["reserved"] == 0
        admitted = engine.admit("a")
        assert (admitted.by_tier, admitted.computed_tokens) == ({"disk": 20}, 20)
        engine.end(admitted.plan)
        engine.is_right("a", 20)
        assert engine.stat("hit_tokens_storage") == 20 and engine.stat("fetch_seconds") > 0


def test_what_did_not_come_up_gives_its_blocks_to_the_request(hosted: Engine) -> None:
    """...the unread tail is given back: what the copies did not bring is computed in the same blocks."""
    hosted.leave("a", prompt(16))
    hosted.demoted(4)
    hosted.kv[:] = 0
    hosted.add("b", prompt(17))
    admitted = hosted.admit("b")
    settled = hosted.end(admitted.plan, blocks=1)
    assert (settled.shortened, settled.ready, settled.again) == ({"b": 4}, ("b",), ())
    assert hosted.manager.table("b") == admitted.table
    assert hosted.places(prompt(16)) == ["device", "host", "host", "host"]
    hosted.compute("b")
    hosted.is_right("b")


# ---- 11


def test_lengths_agree_by_minimum_over_ranks(shm_root: Path) -> None:
    """Several ranks: lengths agree by minimum; a write is done when all ranks acknowledged; an error is shorter."""
    with cache_at(shm_root) as cache:
        engine = Engine(8, cache, ranks=2, write_back=False)
        engine.leave("a", prompt(16))
        plan = engine.manager.demote(4)
        assert plan is not None
        engine.copy(plan)
        assert not engine.manager.completed(plan.ticket, rank=1).ended
        assert cache.lookup(prompt(16)).num_tokens == 0  # not before both have said so
        assert engine.manager.completed(plan.ticket, rank=0, blocks=3).ended
        assert retrieved(cache, prompt(16)) == (12, True)
        engine.add("b", prompt(16))
        admitted = engine.admit("b")
        assert admitted.plan is not None and admitted.computed_tokens == 12
        engine.copy(admitted.plan)
        assert not engine.manager.completed(admitted.plan.ticket, rank=0).ended
        settled = engine.manager.completed(admitted.plan.ticket, rank=1, blocks=2)
        assert settled.shortened == {"b": 8}
        engine.is_right("b", 8)


# ---- 12


def test_a_decoder_writes_back_by_keys_from_tokens_alone(shm_root: Path) -> None:
    """Producer/decoder split: the decoder writes back by keys from tokens alone (no tree), the producer's keys."""
    with cache_at(shm_root) as ours, cache_at(shm_root) as theirs:
        producer, decoder = Engine(8, ours), Engine(8, theirs)
        image, tokens = [Item(2, 5, CAT)], prompt(19)
        producer.start("a", tokens[:8], items=image, salt="bob")
        producer.finish("a")
        for i, block in enumerate(truth(tokens, image, salt="bob")):
            decoder.kv[i + 3] = block
        plan = decoder.manager.write_back(tokens, [3, 4, 5, 6], items=image, salt="bob")
        assert plan is not None and [copy.block for copy in plan.copies] == [5, 6]  # the producer's are there
        assert (decoder.manager.free, decoder.stat("cached")) == (8, 0)
        decoder.end(plan)
        producer.manager.reset()
        assert producer.start("b", tokens, items=image, salt="bob").by_tier == {"host": 16}


def test_keys_and_blocks_of_unequal_number_are_refused(hosted: Engine) -> None:
    """Keys and blocks of unequal number are a ValueError."""
    for table in ([], [1], [1, 2, 3]):
        with pytest.raises(ValueError, match="2 whole blocks"):
            hosted.manager.write_back(prompt(9), table)
    assert hosted.manager.in_flight == 0


# ---- 13


@pytest.mark.parametrize(
    ("item", "hit"), [((6, 10), 4), ((4, 9), 4), ((1, 9), 0), ((6, 8), 8), ((8, 10), 8), ((6, 99), 4)]
)
@pytest.mark.parametrize("place", ["device", "host"])
def test_a_match_boundary_inside_an_item_moves_before_it(
    hosted: Engine, item: tuple[int, int], hit: int, place: str
) -> None:
    """A match boundary inside a multimodal item is detected and moved before it."""
    items = [Item(*item, CAT)]
    hosted.leave("a", prompt(8), items=items if item[0] < 8 else [])
    if place == "host":
        hosted.demoted(2)
    hosted.add("b", prompt(12), items=items)
    wanted = Match(hit, 0, 0) if place == "device" else Match(0, hit, 0)
    assert hosted.manager.match("b") == wanted
    admitted = hosted.admit("b")
    assert (admitted.computed_tokens, admitted.shared) == (hit, hit // BLOCK)
    hosted.end(admitted.plan)
    hosted.compute("b")
    hosted.is_right("b")


# ---- 14


def test_reset_drains_moves_in_flight(hosted: Engine) -> None:
    """Reset: drains moves in flight, returns every block and pin."""
    down, up = in_all_states(hosted)
    hosted.manager.reset()
    hosted.manager.check()
    assert (hosted.manager.in_flight, hosted.stat("in_flight"), hosted.stat("pinned")) == (2, 2, 0)
    assert hosted.manager.free == 6  # those of the copies UP are written to until their ticket has ended
    hosted.start("new", prompt(16, 5))
    assert hosted.end(down) == (True, True, (), {}, (), 0)
    assert hosted.end(up) == (True, True, (), {}, (), 2)
    assert (hosted.manager.in_flight, hosted.stat("in_flight")) == (0, 0)
    hosted.is_right("new")
    hosted.manager.release("new")
    hosted.manager.reset()
    assert hosted.manager.free == 8
    assert hosted.places(prompt(4, 2)) == ["freed"]  # what was on its way down is not stored


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
    assert down is not None and up is not None
    return down, up


def test_reset_abandons_moves_in_flight(hosted: Engine) -> None:
    """...or abandons: everything comes back at once, and the ends of old tickets change nothing."""
    down, up = in_all_states(hosted)
    hosted.manager.reset(abandon=True)
    hosted.manager.check()
    assert (hosted.manager.free, hosted.manager.in_flight) == (8, 0)
    for plan in (down, up):
        assert not hosted.manager.completed(plan.ticket).known
    assert hosted.cache is not None
    assert ledger_of(hosted.cache).gauges()["reserved"] == 0
    hosted.add("comes", prompt(8))  # its name is forgotten too


def test_weights_updated_invalidates_everything_cached(housed: Engine) -> None:
    """ "Weights updated" invalidates everything cached, in every tier; what runs keeps its blocks and is not cached."""
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
    assert housed.manager.match("waits") == housed.manager.match("comes") == Match(0, 0, 0)
    assert housed.manager.table("runs") == table
    housed.compute("runs")
    assert housed.manager.finish("runs") is None  # its KV is of the old weights
    housed.manager.check()
    housed.add("again", prompt(9, 1))
    assert housed.manager.match("again") == Match(0, 0, 0)
    assert housed.resume("comes").computed_tokens == 0  # and from now on it is cached anew
    assert housed.manager.match("waits").device_tokens == 12


# ---- 15


def test_metrics(housed: Engine) -> None:
    """Metrics: requests, hit requests, hit tokens by tier, prepare times by tier."""
    housed.leave("a", prompt(16))
    housed.demoted(2)
    housed.leave("b", prompt(17))
    housed.leave("c", prompt(5, 1))
    stats = housed.manager.stats()
    names = "requests hit_requests asked_tokens hit_tokens_device hit_tokens_host hit_tokens_storage"
    assert [stats[name] for name in names.split()] == [3, 1, 38, 8, 8, 0]
    moved = "evicted_blocks demoted_blocks promoted_blocks dropped_blocks cancelled_moves"
    assert [stats[name] for name in moved.split()] == [2, 5, 2, 0, 0]
    assert all(stats[f"{name}_seconds"] >= 0 for name in ("match", "host", "fetch"))
    assert stats["match_seconds"] > 0 and stats["host_seconds"] > 0


# ---- 16


def test_blocks_outside_the_tree_return_on_release(bare: Engine) -> None:
    """A short request, the unfilled last block and the decode reserve own blocks outside the tree; all return."""
    bare.start("short", prompt(3))
    bare.add("long", prompt(6, 1))
    bare.admit("long", reserve_tokens=9)
    bare.compute("long")
    assert (bare.stat("in_use"), bare.stat("cached"), bare.manager.free) == (4, 1, 3)
    bare.manager.release("short")
    bare.manager.release("long")
    bare.manager.check()
    assert (bare.stat("in_use"), bare.stat("cached"), bare.manager.free) == (0, 1, 7)


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
    again: list[Callable[[str], object]] = [manager.admit, manager.match, manager.prefetch]
    for other in again:
        with pytest.raises(ValueError, match="admitted already"):
            other("b")


# ---- 17


def test_is_there_room_with_or_without_evicting(hosted: Engine) -> None:
    """ "Is there room for n?" may be asked with or without evicting."""
    hosted.leave("a", prompt(8))
    hosted.start("b", prompt(12, 1))
    before = everything(hosted)
    assert [n for n in range(10) if hosted.manager.has_room(n)] == [0, 1, 2, 3]
    assert [n for n in range(10) if hosted.manager.has_room(n, evict=True)] == [0, 1, 2, 3, 4, 5]
    assert everything(hosted) == before


def test_admission_tells_shared_from_own_blocks(bare: Engine) -> None:
    """Admission tells shared from own blocks."""
    first = bare.start("a", prompt(10))
    second = bare.start("b", prompt(8) + prompt(4, 1))
    assert (first.shared, second.shared) == (0, 2)
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
        assert engine.manager.match("c") == Match(0, 0, 0) and engine.manager.prefetch("c") is None
        assert engine.admit("c").shared == 0
        assert (engine.stat("in_use"), engine.stat("cached"), engine.manager.pin(prompt(13))) == (8, 0, 0)
        engine.add("d", prompt(1))
        assert engine.manager.admit("d") == Refused(1, 0)
        engine.manager.preempt("b")
        assert engine.resume("b").computed_tokens == 0


# ---- 18


def test_discard_takes_the_own_blocks_of_an_aborted_request_at_once(hosted: Engine) -> None:
    """Discard: own blocks go at once, without demotion, upward as far as nobody else uses them."""
    hosted.leave("before", prompt(4))
    hosted.start("a", prompt(16))  # shares the first block, made the others
    hosted.start("b", prompt(8) + prompt(5, 1))  # uses the second
    hosted.manager.release("a", discard=True)
    hosted.manager.check()
    assert hosted.places(prompt(16)) == ["device", "device", "freed", "freed"]
    assert (hosted.manager.in_flight, hosted.stat("demoted_blocks")) == (0, 0)
    hosted.is_right("b")
    hosted.manager.release("b")
    assert hosted.places(prompt(8) + prompt(5, 1)) == ["device"] * 3  # without `discard` it stays


def test_discard_of_a_request_that_waits_for_copies(hosted: Engine) -> None:
    """...what others have computed and only comes back for it is cached, as for anybody."""
    hosted.leave("a", prompt(8))
    hosted.demoted(2)
    hosted.add("b", prompt(9))
    up = hosted.admit("b").plan
    hosted.manager.release("b", discard=True)
    hosted.manager.check()
    assert (hosted.stat("in_flight"), hosted.manager.free) == (2, 6)
    hosted.end(up)
    assert hosted.places(prompt(8)) == ["device"] * 2 and hosted.stat("evictable") == 2


# ---- 19


def test_moves_can_be_paused_and_drained(hosted: Engine) -> None:
    """Moves can be paused and drained, with the number in flight readable (sleep, weight update)."""
    hosted.leave("a", prompt(8))
    hosted.leave("b", prompt(8, 1))
    down = hosted.manager.demote(2)
    hosted.manager.pause()
    assert hosted.manager.paused and hosted.manager.in_flight == 1
    hosted.end(down)  # what is under way ends as ever
    assert hosted.manager.in_flight == 0
    hosted.add("c", prompt(9))
    assert hosted.manager.match("c") == Match(0, 0, 0) and hosted.manager.prefetch("c") is None
    assert hosted.admit("c").plan is None
    assert hosted.manager.demote(9) is None and hosted.stat("dropped_blocks") == 2
    assert hosted.manager.write_back(prompt(4, 5), [0]) is None
    hosted.manager.release("c")
    hosted.manager.resume()
    hosted.add("d", prompt(9))
    assert hosted.manager.match("d") == Match(0, 8, 0)


def test_clearing_has_a_visible_state(hosted: Engine) -> None:
    """Clearing has a visible state: blocks of old copies are counted as in flight until the last ticket ended."""
    down, up = in_all_states(hosted)
    hosted.manager.reset()
    assert (hosted.manager.in_flight, hosted.stat("in_flight")) == (2, 2)
    hosted.add("big", prompt(32, 7))
    assert hosted.manager.admit("big") == Waiting(None, frozenset({down.ticket, up.ticket}))
    hosted.end(up)
    assert hosted.manager.in_flight == 1 and len(hosted.admit("big").table) == 8


def test_cache_clear_gives_the_host_chunks_up(hosted: Engine) -> None:
    """Decided otherwise: reset keeps what the host has (it is all processes'); Cache.clear frees the chunks."""
    hosted.leave("a", prompt(16))
    hosted.demoted(4)
    hosted.manager.reset()
    assert hosted.places(prompt(16)) == ["host"] * 4 and hosted.cache is not None
    assert hosted.cache.clear().ok
    assert hosted.places(prompt(16)) == ["freed"] * 4
    assert ledger_of(hosted.cache).gauges()["free"] == 64


# ---- 20


def test_a_rank_that_dies_is_noticed(shm_root: Path) -> None:
    """Decided otherwise: the manager has no transfer processes; `lost(rank)` fails what waits for a rank."""
    with cache_at(shm_root) as cache:
        engine = Engine(8, cache, ranks=2, write_back=False)
        engine.leave("a", prompt(8))
        plan = engine.manager.demote(2)
        assert plan is not None
        engine.copy(plan, rank=0)
        engine.manager.completed(plan.ticket, rank=0)
        assert [settled.ended for settled in engine.manager.lost(1)] == [True]
        engine.manager.check()
        assert engine.manager.in_flight == 0 and engine.manager.free == 8
        assert engine.places(prompt(8)) == ["freed"] * 2


def test_replicas_share_host_and_disk_but_never_device_ids(shm_root: Path, tmp_path: Path) -> None:
    """Data-parallel replicas share host and disk but never device ids."""
    with cache_at(shm_root, tmp_path) as ours, cache_at(shm_root, tmp_path) as theirs:
        one, two = Engine(8, ours), Engine(4, theirs)
        one.leave("a", prompt(8))
        two.add("a", prompt(9))  # the same name means nothing to another replica
        assert two.manager.match("a") == Match(0, 8, 0)
        assert one.manager.free == 6 and two.manager.free == 4
        assert two.resume("a").by_tier == {"host": 8}
        assert one.manager.free == 6 and two.manager.free == 1


def test_draft_layers_are_part_of_the_layout(shm_root: Path) -> None:
    """Draft-model (speculative) layers are part of the layout: with and without them, nothing is shared."""
    plain = KVLayout.opaque(BLOCK, 64, "28 layers")
    draft = KVLayout.opaque(BLOCK, 64, "28 layers and 1 of the draft model")
    with cache_at(shm_root) as one:
        options = one.config
    names = []
    for layout in (plain, draft):
        with Cache(options, namespace=NAMESPACE, layout=layout) as cache:
            manager = BlockManager(4, BLOCK, cache=cache)
            names.append([key for _, _, key in cache.keys(prompt(8))])
            manager.add("a", prompt(9))
            assert manager.match("a") == Match(0, 0, 0)
            plan = manager.write_back(prompt(8), [0, 1])
            assert plan is not None
            manager.completed(plan.ticket)
            assert manager.match("a") == Match(0, 8, 0)
    assert not set(names[0]) & set(names[1])


# ---- 21


def test_a_storage_tier_is_given_keys_and_no_token_ids(housed: Engine) -> None:
    """Decided otherwise: a storage tier is not given token ids (they are the user's text); keys name them."""
    tokens = [1_000_003 + n for n in range(16)]
    housed.leave("a", tokens)
    assert housed.cache is not None and housed.cache.flush(60)
    seen: list[object] = []
    for tier in housed.cache._storeys.all:
        assert tier.contains(housed.keys(tokens)[0])
        seen.append({name for name in dir(tier) if "token" in name})
    assert seen == [set(), set()]


def test_the_wrong_cache_is_refused(hosted: Engine) -> None:
    """A block is a chunk: another size of chunks is a ValueError at once."""
    with pytest.raises(ValueError, match="chunk_tokens = block_tokens"):
        BlockManager(8, 16, cache=hosted.cache)
    for wrong in ((0, 4, 1), (8, 0, 1), (8, 4, 0)):
        with pytest.raises(ValueError):
            BlockManager(wrong[0], wrong[1], ranks=wrong[2])
