"""Known mistakes of block managers, which must not occur again. Each test names the mistake that it
pins.
"""

from __future__ import annotations

import heapq
import tracemalloc
from pathlib import Path

import pytest
from blake3 import blake3

import pagoda.keys
from pagoda.blocks import Admitted, BlockManager, Direction, NoRoom, Waiting
from pagoda.blocks.tree import upward
from pagoda.ledger import admin
from pagoda.testing import FakeClock
from testbed.patience import Patience
from tests.blocks.kit import (
    BLOCK,
    Engine,
    cache_at,
    ledger_of,
    prompt,
    retrieved,
    stored,
)
from tests.ledger.support import gate_taken


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every message that is hashed from now on."""
    lengths: list[int] = []

    def counting(data: bytes, **options: object) -> object:
        lengths.append(len(data))
        return blake3(data, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(pagoda.keys, "blake3", counting)
    return lengths


def test_mistake_8_hashing_the_whole_prompt_at_each_step(
    hosted: Engine, hashed: list[int]
) -> None:
    engine = Engine(64, hosted.cache)
    hashed.clear()
    engine.manager.add("a", prompt(160))
    assert hashed == [BLOCK * 4] * 40
    hashed.clear()
    engine.manager.match("a")
    engine.manager.admit("a")
    engine.manager.computed("a", 160)
    for step in range(1, 41):
        engine.manager.append("a", [step])
        engine.manager.extend("a", 160 + step)
        engine.manager.computed("a", 160 + step)
        # each block once, when it is full
        assert hashed == [BLOCK * 4] * (step // BLOCK)
    engine.manager.preempt("a")
    engine.manager.match("a")
    engine.manager.admit("a")
    engine.manager.finish("a")
    assert len(hashed) == 10


@pytest.mark.slow
def test_mistake_8_a_heap_that_is_searched_or_rebuilt_on_each_match(
    bare: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    work: list[int] = []
    real = heapq.heapify

    def counting(heap: list[int]) -> None:
        work.append(len(heap))
        real(heap)

    monkeypatch.setattr(heapq, "heapify", counting)
    manager = BlockManager(600, BLOCK)
    for n in range(300):  # 600 nodes, 300 leaves
        manager.add("x", [n + 1] * 9)
        manager.admit("x")
        manager.computed("x", 9)
        manager.finish("x")
        manager.check() if n % 100 == 0 else None
    longest = 0
    steps = 6000
    for n in range(steps):
        manager.add("x", [n % 300 + 1] * 9)
        manager.admit("x")
        manager.finish("x")
        longest = max(longest, len(manager._tree._heap))
    manager.check()
    assert longest <= 2 * 300 + 1024 + 1
    # amortized: a few entries a step, whatever is in the tree
    assert sum(work) <= 4 * steps


@pytest.mark.slow
def test_mistake_8_prompts_kept_alive_by_nodes() -> None:
    block_tokens = 1024
    prompts = 32
    manager = BlockManager(prompts * 16, block_tokens)
    manager.add("first", prompt(16 * block_tokens, 99))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for n in range(prompts):
            name = str(n)
            manager.add(name, prompt(16 * block_tokens, n))
            manager.admit(name)
            manager.computed(name, 16 * block_tokens)
            manager.finish(name)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert manager.stats()["cached"] == prompts * 16
    # bytes a node; its tokens alone would be 4 each
    assert (after - before) / (prompts * 16) < block_tokens


def test_mistake_9_state_changed_before_the_refusal_with_no_rollback(
    shm_root: Path,
) -> None:
    with cache_at(shm_root) as cache:
        engine = Engine(8, cache, write_back=False)
        engine.leave("seen", prompt(8))
        engine.leave("younger", prompt(4, 1))
        engine.start("runs", prompt(16, 2))
        # a prompt that will never fit, tried again and again, hits the oldest
        for n in range(20):
            engine.add(f"big {n}", prompt(8) + prompt(24, 3))
            assert isinstance(engine.manager.admit(f"big {n}"), NoRoom)
            engine.manager.release(f"big {n}")
        assert engine.stat("evictable") == 3
        assert engine.stat("evicted_blocks") == 0
        assert engine.stat("requests") == 3
        engine.end(engine.manager.demote(1))
        # its recency was not touched
        assert engine.places(prompt(8)) == ["device", "host"]
        engine.manager.release("runs")
        engine.manager.check()
        assert engine.stat("in_use") == 0
        assert engine.manager.has_room(8, evict=True)


def test_mistake_9_extend_is_all_or_nothing(bare: Engine) -> None:
    bare.start("a", prompt(20))
    bare.start("b", prompt(8, 1))
    table = bare.manager.table("b")
    assert bare.manager.extend("b", 16) == NoRoom(2, 1)
    assert bare.manager.table("b") == table
    assert bare.manager.free == 1
    bare.manager.check()


def test_mistake_10_a_hit_on_a_block_in_flight_that_leaves_a_hole(
    hosted: Engine,
) -> None:
    hosted.leave("a", prompt(16))
    hosted.demoted(2)
    hosted.kv[hosted.manager._pool._free] = 0
    for name in "bcd":
        hosted.add(name, prompt(17))
    down = hosted.manager.demote(1)  # device, leaving, coming: all in one path
    first, second, third = (hosted.admit(name) for name in "bcd")
    hosted.end(down)
    assert first.plan is not None
    assert second.plan is third.plan is None
    for admitted in (first, second, third):
        assert admitted.computed_tokens == 16
        assert admitted.shared == 4
        assert len(admitted.table) == 5
        assert admitted.table[:4] == first.table[:4]
        assert len(set(admitted.table)) == 5
        assert admitted.waits == {first.plan.ticket}
    settled = hosted.end(first.plan)
    assert settled.ready == ("b", "c", "d")
    for name in "bcd":
        hosted.is_right(name, 16)


def test_mistake_10_who_shares_a_block_that_did_not_come_waits_again(
    hosted: Engine,
) -> None:
    hosted.leave("a", prompt(12))
    hosted.demoted(3)
    hosted.kv[:] = 0
    for name in "bcd":
        hosted.add(name, prompt(12)[: 5 if name == "d" else 12] + prompt(2, 1))
    first = hosted.admit("b")
    second = hosted.admit("c")
    third = hosted.admit("d")
    assert [a.computed_tokens for a in (first, second, third)] == [12, 12, 4]
    settled = hosted.end(first.plan, blocks=1)
    assert settled.shortened == {"b": 4}
    assert settled.again == ("c",)
    assert settled.ready == ("b", "d")
    assert hosted.manager.table("c") == []
    assert hosted.manager.table("b") == first.table
    hosted.compute("b")
    assert hosted.admit("c").by_tier == {"device": 12}
    for name in "bcd":
        hosted.compute(name)
        hosted.is_right(name)


def test_mistake_11_a_late_ticket_after_its_block_was_used_again(
    hosted: Engine,
) -> None:
    hosted.leave("a", prompt(4))
    first = hosted.manager.demote(1)
    assert first is not None
    hosted.manager.failed(first.ticket)
    hosted.start("b", prompt(4, 1))  # in the same block
    hosted.finish("b")
    second = hosted.manager.demote(1)
    assert second is not None
    assert second.copies[0].block == first.copies[0].block
    assert second.ticket != first.ticket
    before = hosted.manager.stats()
    # of the same block, to the host as well
    late = hosted.manager.completed(first.ticket)
    assert late.known is False
    assert late.ended is False
    assert late.freed == 0
    assert late.ready == ()
    assert late.again == ()
    assert not hosted.manager.failed(first.ticket).known
    assert not hosted.manager.completed(999).known
    assert not hosted.manager.completed(-1).known
    assert hosted.manager.stats() == before
    assert hosted.places(prompt(4, 1)) == ["to_host"]
    hosted.end(second)
    assert hosted.cache is not None
    assert retrieved(hosted.cache, prompt(4, 1)) == (4, True)
    assert retrieved(hosted.cache, prompt(4)) == (0, True)


def test_mistake_11_tickets_are_never_used_twice_not_even_after_a_reset(
    hosted: Engine,
) -> None:
    seen = []
    for n in range(5):
        hosted.leave(f"{n}", prompt(8, n))
        plan = hosted.manager.demote(2)
        assert plan is not None
        seen.append(plan.ticket)
        hosted.manager.reset(abandon=True)
    assert len(set(seen)) == 5
    hosted.leave("x", prompt(8, 9))
    plan = hosted.manager.demote(2)
    assert plan is not None
    for ticket in seen:
        assert not hosted.manager.completed(ticket).known
    assert hosted.end(plan).freed == 2


def test_mistake_11_a_request_of_the_same_name_has_nothing_of_the_old_ones_ticket(
    hosted: Engine,
) -> None:
    hosted.leave("a", prompt(8))
    hosted.demoted(2)
    hosted.add("b", prompt(9))
    up = hosted.admit("b").plan
    hosted.manager.release("b")
    hosted.add("b", prompt(9, 1))  # the name again, another prompt
    admitted = hosted.admit("b")
    assert admitted.waits == frozenset()
    settled = hosted.end(up)
    assert settled.ready == ()
    assert settled.shortened == {}
    assert settled.again == ()
    assert hosted.manager.table("b") == admitted.table


def test_mistake_12_a_freed_block_that_counts_as_one_on_the_host(
    hosted: Engine,
) -> None:
    assert hosted.cache is not None
    ledger = ledger_of(hosted.cache)
    hosted.manager.pause()  # blocks evicted now are dropped: no tier has them
    hosted.leave("a", prompt(16))
    hosted.manager.demote(4)
    assert hosted.places(prompt(16)) == ["freed"] * 4
    # each list has its own, and all of it
    assert hosted.manager.free == 8
    assert admin.gauges(ledger)["free"] == 64
    hosted.manager.resume()
    hosted.add("b", prompt(17))
    assert hosted.admit("b").computed_tokens == 0
    hosted.compute("b")
    hosted.finish("b")
    hosted.demoted(4)
    gauges = admin.gauges(ledger)
    assert gauges["free"] + gauges["ready"] == 64
    assert gauges["ready"] == 4
    hosted.manager.check()


@pytest.mark.slow
def test_mistake_13_waiting_for_ever_on_another_process(shm_root: Path) -> None:
    with cache_at(shm_root, deadline_seconds=0.5) as cache:
        engine = Engine(8, cache)
        stored(cache, prompt(16))
        engine.start("runs", prompt(8, 1))
        engine.add("a", prompt(17))
        patience = Patience(30)
        with gate_taken(ledger_of(cache)):
            answers = [engine.manager.finish("runs"), engine.manager.demote(1)]
            # nothing can be written: no plan, and no error
            assert answers == [None, None]
            answer = engine.manager.admit("a")
            assert isinstance(answer, Admitted)
        assert not patience.ended, patience.said()
        engine.manager.check()
        engine.manager.release("a")
        engine.add("b", prompt(17))
        # and nothing is broken afterwards
        assert engine.resume("b").computed_tokens == 16


def test_mistake_13_one_bad_report_and_nobody_listens_any_more(
    shm_root: Path,
) -> None:
    with cache_at(shm_root) as cache:
        engine = Engine(8, cache, ranks=2, write_back=False)
        engine.leave("a", prompt(8))
        plan = engine.manager.demote(2)
        assert plan is not None
        engine.copy(plan)
        for blocks in (-1, 3):
            with pytest.raises(ValueError, match="of 2 copies"):
                engine.manager.completed(plan.ticket, blocks=blocks)
        for rank in (-1, 2):
            with pytest.raises(ValueError, match="not one of the 2 ranks"):
                engine.manager.completed(plan.ticket, rank=rank)
            with pytest.raises(ValueError, match="not one of the 2 ranks"):
                engine.manager.lost(rank)
        assert engine.manager.in_flight == 1
        assert not engine.manager.completed(plan.ticket).ended
        assert engine.manager.completed(plan.ticket, rank=1).freed == 2
        assert engine.places(prompt(8)) == ["host"] * 2


def test_mistake_13_a_copy_whose_end_is_never_reported_stops_nobody_else(
    hosted: Engine,
) -> None:
    hosted.leave("a", prompt(8))
    hosted.demoted(2)
    hosted.add("b", prompt(9))
    up = hosted.admit("b").plan  # and the engine forgets it
    for n in range(10):
        hosted.leave(f"{n}", prompt(19, n + 1))
    assert hosted.manager.in_flight == 1
    hosted.manager.reset(abandon=True)
    assert hosted.manager.free == 8
    assert up is not None
    assert not hosted.manager.completed(up.ticket).known


def test_mistake_17_evicting_parents_before_children(hosted: Engine) -> None:
    hosted.leave("a", prompt(16))
    hosted.leave("b", prompt(8) + prompt(8, 1))
    for n in range(6):
        hosted.end(hosted.manager.demote(1))
        for tokens in (prompt(16), prompt(8) + prompt(8, 1)):
            places = hosted.places(tokens)
            # "device" before "host"
            assert places == sorted(places), f"a hole after {n + 1}: {places}"
    assert hosted.manager.free == 8


def test_mistake_17_the_host_gets_parents_before_children(shm_root: Path) -> None:
    clock = FakeClock()
    with cache_at(shm_root, slots=16, clock=clock) as cache:
        engine = Engine(24, cache, write_back=False)
        engine.leave("a", prompt(80))
        # a quarter of the slots is promised to one: the head
        plan = engine.manager.demote(20)
        assert plan is not None
        assert len(plan.copies) == 4
        engine.end(plan)
        assert engine.places(prompt(80)) == ["host"] * 4 + ["freed"] * 16
        assert retrieved(cache, prompt(80)) == (16, True)


def test_mistake_17_what_comes_back_is_inserted_behind_its_parent(
    hosted: Engine,
) -> None:
    hosted.leave("a", prompt(16))
    hosted.demoted(2)
    hosted.start("b", prompt(17))
    nodes = list(upward(hosted.manager._tree.nodes[hosted.keys(prompt(16))[3]]))
    assert [node.position for node in nodes] == [3, 2, 1, 0]
    assert [node.key for node in reversed(nodes)] == hosted.keys(prompt(16))
    hosted.finish("b")
    hosted.demoted(1)
    # not the first of the freed blocks
    assert hosted.places(prompt(16)) == ["device"] * 3 + ["host"]


def test_mistake_19_a_rank_that_has_nothing_reports_as_well(
    shm_root: Path,
) -> None:
    with cache_at(shm_root) as cache:
        engine = Engine(8, cache, ranks=3, write_back=False)
        engine.leave("a", prompt(8))
        plan = engine.manager.demote(2)
        assert plan is not None
        engine.copy(plan)
        # that it failed here settles nothing yet
        assert not engine.manager.failed(plan.ticket, rank=0).ended
        assert not engine.manager.completed(plan.ticket, rank=2).ended
        assert engine.manager.free == 6  # rank 1 may be reading still
        assert engine.manager.completed(plan.ticket, rank=1).ended
        assert engine.manager.free == 8
        assert engine.places(prompt(8)) == ["freed"] * 2


def test_mistake_20_loading_what_is_cheaper_to_compute(shm_root: Path) -> None:
    with cache_at(shm_root, min_hit_tokens=12) as cache:
        engine = Engine(16, cache, write_back=False)
        engine.leave("a", prompt(16))
        engine.demoted(4)
        engine.add("short", prompt(9))
        admitted = engine.admit("short")
        assert admitted.plan is None
        assert admitted.computed_tokens == 0
        engine.manager.release("short")
        engine.add("long", prompt(13))
        assert engine.admit("long").computed_tokens == 12


def test_mistake_20_writing_what_is_there_or_never_read_again(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(
        shm_root, tmp_path, write_policy="selective", selective_hits=2
    ) as cache:
        engine = Engine(16, cache)
        engine.leave("a", prompt(16))
        engine.leave("once", prompt(16, 1))
        assert engine.stat("demoted_blocks") == 8
        # not copied a second time
        assert engine.manager.demote(16) is None
        assert engine.manager.free == 16
        assert cache.flush(60)
        keys = engine.keys(prompt(16))
        assert cache.holders(keys[0]) == ["host"]  # it was not read
        for n in range(2):
            engine.leave(f"hit {n}", prompt(17))
            assert engine.manager.demote(16) is None
            assert cache.flush(60)
        assert engine.stat("promoted_blocks") == 8
        assert engine.stat("demoted_blocks") == 8
        assert (
            cache.holders(keys[0]) == cache.holders(keys[3]) == ["host", "disk"]
        )
        assert cache.holders(engine.keys(prompt(16, 1))[0]) == ["host"]


@pytest.mark.parametrize("place", ["device", "host", "coming"])
def test_mistake_21_a_hit_that_covers_the_whole_prompt(
    hosted: Engine, place: str
) -> None:
    hosted.leave("a", prompt(16))
    if place != "device":
        hosted.demoted(4)
    if place == "coming":
        hosted.add("other", prompt(17))
        assert hosted.admit("other").plan is not None
    hosted.add("b", prompt(16))
    assert hosted.manager.match("b").num_tokens == 12
    admitted = hosted.admit("b")
    assert admitted.computed_tokens == 12
    assert admitted.shared == 3
    assert len(admitted.table) == 4
    hosted.manager.release("b")
    hosted.add("c", prompt(16)[:13])
    assert hosted.manager.match("c").num_tokens == 12  # one token is enough


def test_a_waiting_answer_is_not_a_promise(hosted: Engine) -> None:
    """Two requests wait for the same blocks: the first gets them, the other waits again and blocks
    nothing.
    """
    hosted.leave("a", prompt(32))
    hosted.add("b", prompt(20, 1))
    hosted.add("c", prompt(20, 2))
    first = hosted.manager.admit("b")
    second = hosted.manager.admit("c")
    assert isinstance(first, Waiting)
    assert isinstance(second, Waiting)
    assert first.plan is not None
    assert second.plan is None
    hosted.end(first.plan)
    assert isinstance(hosted.manager.admit("c"), Admitted)
    again = hosted.manager.admit("b")
    assert isinstance(again, NoRoom)
    assert again.available == 3
    assert first.plan.direction is Direction.DOWN
    hosted.manager.release("c")
    assert len(hosted.admit("b").table) == 5


def test_mistake_5_evicting_what_is_being_loaded(shm_root: Path) -> None:
    clock = FakeClock()
    with cache_at(shm_root, slots=16, clock=clock) as cache:
        engine = Engine(16, cache, write_back=False)
        engine.leave("a", prompt(16))
        engine.demoted(4)
        engine.kv[:] = 0
        engine.add("b", prompt(17))
        plan = engine.admit("b").plan
        # twenty chunks more than fit, after every lease has ended
        for n in range(1, 6):
            clock.advance(100)
            stored(cache, prompt(16, n))
        assert engine.end(plan).shortened == {}
        engine.is_right("b", 16)
        clock.advance(100)
        engine.finish("b")
        for n in range(6, 10):
            clock.advance(100)
            stored(cache, prompt(16, n))
        # the hold has ended with the ticket
        assert retrieved(cache, prompt(16)) == (0, True)


def test_mistake_15_copies_that_were_overtaken_count_as_good(
    hosted: Engine,
) -> None:
    assert hosted.cache is not None
    hosted.leave("a", prompt(16))
    hosted.demoted(4)
    hosted.add("b", prompt(17))
    plan = hosted.admit("b").plan
    assert hosted.cache.clear().ok  # the slots may contain anything now
    assert hosted.end(plan).shortened == {"b": 0}
    hosted.compute("b")
    hosted.is_right("b")


def test_mistake_9_a_request_that_must_wait_has_no_pins(hosted: Engine) -> None:
    hosted.leave("a", prompt(16))
    hosted.leave("b", prompt(16, 1))
    hosted.add("c", prompt(16) + prompt(8, 2))
    waiting = hosted.manager.admit("c")
    assert isinstance(waiting, Waiting)
    hosted.manager.check()
    assert hosted.stat("evictable") == 6
    hosted.end(waiting.plan)
    hosted.manager.release("c")
    assert hosted.demoted(8) == 8
