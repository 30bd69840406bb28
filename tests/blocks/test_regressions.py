"""Bugs that were found by test or by thought, each in its smallest form."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from blake3 import blake3

from pagoda.blocks import Admitted, Match, Refused, Waiting
from pagoda.cache.below import Generations, Slots
from pagoda.keys import Item
from tests.blocks.kit import BLOCK, Engine, cache_at, ledger_of, prompt, stored
from tests.blocks.test_checklist import workers_stopped

IMAGE = (Item(1, 14, blake3(b"an image").digest()),)  # of blocks 0 to 3


def test_a_manager_without_a_cache_has_a_namespace(bare: Engine) -> None:
    bare.leave("a", prompt(9))
    bare.add("b", prompt(9), salt="bob")
    bare.add("c", prompt(9))
    assert bare.manager.match("b") == Match(0, 0, 0) and bare.manager.match("c") == Match(8, 0, 0)
    bare.manager.weights_changed()
    assert bare.manager.match("c") == Match(0, 0, 0)


def test_resume_does_not_bring_a_dead_rank_back(shm_root: Path) -> None:
    """Its share of a chunk would be missing, though all that live have said that theirs is in."""
    with cache_at(shm_root) as cache:
        engine = Engine(8, cache, ranks=2, write_back=False)
        engine.leave("a", prompt(8))
        engine.manager.lost(1)
        engine.manager.pause()
        engine.manager.resume()
        assert engine.manager.paused and engine.manager.demote(2) is None
        assert engine.places(prompt(8)) == ["freed"] * 2


def test_a_prefetch_is_counted_for_one_admission_only(shm_root: Path, tmp_path: Path) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(16))
    shutil.rmtree(shm_root / "host")
    with cache_at(shm_root, tmp_path) as cache:
        engine = Engine(8, cache, write_back=False)
        engine.add("a", prompt(17))
        future = engine.manager.prefetch("a")
        assert future is not None and future.result(60).num_tokens == 16
        assert engine.resume("a").by_tier == {"disk": 16}
        engine.manager.preempt("a")
        engine.demoted(4)
        assert engine.resume("a").by_tier == {"host": 16}  # no disk had to be read this time


def test_a_prefetch_that_was_cancelled_does_not_break_the_admission(shm_root: Path, tmp_path: Path) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(16))
        ledger_of(cache).clear(None)
        engine = Engine(8, cache)
        goes_on = workers_stopped(cache)
        try:
            engine.add("a", prompt(17))
            future = engine.manager.prefetch("a")
            assert future is not None and future.cancel()
            stored_by_hand = engine.manager.write_back(prompt(4), [0])
            assert stored_by_hand is not None
            engine.manager.completed(stored_by_hand.ticket)
            assert engine.admit("a").by_tier == {"host": 4}
        finally:
            goes_on.set()


def test_a_run_that_is_cut_short_ends_before_an_item_as_well(hosted: Engine) -> None:
    items = [Item(6, 14, blake3(b"cat").digest())]
    hosted.leave("a", prompt(16), items=items)
    hosted.demoted(4)
    hosted.kv[:] = 0
    for name in "bc":
        hosted.add(name, prompt(17), items=items)
    first, second = hosted.admit("b"), hosted.admit("c")
    assert first.computed_tokens == second.computed_tokens == 16
    settled = hosted.end(first.plan, blocks=3)  # that is inside the image, where no prefill can begin
    assert (settled.shortened, settled.again) == ({"b": 4}, ("c",))
    hosted.compute("b")
    hosted.is_right("b")
    assert hosted.resume("c").computed_tokens == 16


def test_nothing_to_prefetch(shm_root: Path, tmp_path: Path) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(8))
        engine = Engine(8, cache)
        engine.start("on the device", prompt(8, 1))
        for name, tokens in (("a", prompt(8)), ("b", prompt(8, 1)), ("c", prompt(2))):
            engine.add(name, [*tokens, 1])
            assert engine.manager.prefetch(name) is None, name
        engine.add("new", prompt(9, 2))  # of this one only the tiers can tell
        future = engine.manager.prefetch("new")
        assert future is not None and future.result(60).num_tokens == 0
    with cache_at(shm_root) as cache:
        engine = Engine(8, cache)
        engine.add("a", prompt(9))
        assert engine.manager.prefetch("a") is None  # there is no lower tier


@pytest.mark.parametrize("released", [False, True])
def test_an_end_that_never_was_is_no_end(hosted: Engine, released: bool) -> None:
    hosted.leave("a", prompt(4 * BLOCK))
    hosted.demoted(4)
    hosted.add("b", prompt(17))
    up = hosted.admit("b").plan
    if released:
        hosted.manager.release("b")
    else:
        hosted.manager.preempt("b")
    assert hosted.manager.in_flight == 1 and hosted.stat("in_flight") == 4
    settled = hosted.end(up, blocks=2)
    assert (settled.shortened, settled.again, settled.ready, settled.freed) == ({}, (), (), 2)
    assert hosted.places(prompt(16)) == ["device", "device", "host", "host"]
    assert hosted.cache is not None and ledger_of(hosted.cache).gauges()["reserved"] == 0


def with_half_an_image_on_the_host(engine: Engine) -> list[int]:
    """Leaves an image's first two blocks on the device, the others on the host; returns the prompt."""
    tokens = prompt(20)
    engine.leave("before", tokens, items=IMAGE)
    engine.demoted(3)
    assert [str(engine.manager.where(key)) for key in engine.keys(tokens, IMAGE)] == ["device"] * 2 + [
        "host"
    ] * 3
    return tokens


def test_an_image_that_begins_on_the_device_and_goes_on_on_the_host(hosted: Engine) -> None:
    """Its blocks on the device were entered into the tree a second time, and their first nodes were lost."""
    tokens = with_half_an_image_on_the_host(hosted)
    hosted.add("a", tokens, items=IMAGE)
    assert hosted.manager.match("a") == Match(8, 8, 0)
    admitted = hosted.admit("a")
    assert (admitted.shared, admitted.by_tier) == (4, {"device": 8, "host": 8})
    hosted.end(admitted.plan)
    hosted.compute("a")
    hosted.is_right("a")


@pytest.mark.parametrize("good", [0, 1])
def test_an_image_whose_end_fails_to_come_up(hosted: Engine, good: int) -> None:
    """Nobody computes into the middle of an item: the request is admitted again, and computes it as a whole."""
    tokens = with_half_an_image_on_the_host(hosted)
    hosted.add("a", tokens, items=IMAGE)
    settled = hosted.end(hosted.admit("a").plan, good)
    assert (settled.again, settled.shortened, settled.ready) == (("a",), {}, ())
    ledger_of(hosted.cache).remove(hosted.keys(tokens, IMAGE))  # type: ignore[arg-type]
    admitted = hosted.admit("a")
    assert (admitted.computed_tokens, admitted.shared, admitted.plan) == (0, 0, None)
    hosted.compute("a")
    hosted.is_right("a")


@pytest.mark.parametrize("gone", [2, 3])
def test_an_image_whose_end_goes_while_it_is_looked_for(
    hosted: Engine, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    """What is held of a run may be less than was found: that, too, may end inside an item."""
    tokens = with_half_an_image_on_the_host(hosted)
    hosted.add("a", tokens, items=IMAGE)
    assert hosted.cache is not None and hosted.cache.slots is not None
    ledger, hold = ledger_of(hosted.cache), hosted.cache.slots.hold

    def after_another_removed_it(slots: Slots, generations: Generations) -> list[bool]:
        ledger.remove(hosted.keys(tokens, IMAGE)[gone : gone + 1])
        return hold(slots, generations)

    monkeypatch.setattr(hosted.cache.slots, "hold", after_another_removed_it)
    admitted = hosted.admit("a")
    assert (admitted.computed_tokens, admitted.plan, admitted.waits) == (0, None, frozenset())
    hosted.compute("a")
    hosted.is_right("a")
    hosted.manager.release("a")


def test_who_needs_room_that_a_write_back_still_reads_waits_for_it(shm_root: Path) -> None:
    """It was refused, though nobody else was there: as if its prompt could never fit."""
    with cache_at(shm_root) as cache:
        engine = Engine(8, cache)
        engine.start("a", prompt(29))
        plan = engine.manager.finish("a")
        assert plan is not None
        engine.add("b", prompt(29, 1))
        assert engine.manager.has_room(8, evict=True)
        assert not engine.manager.has_room(9, evict=True)
        before = engine.manager.stats()
        assert engine.manager.admit("b") == Waiting(None, frozenset({plan.ticket}))
        assert engine.manager.stats() == before
        assert engine.manager.admit("b", evict=False) == Refused(8, 1)
        engine.end(plan)
        assert isinstance(engine.admit("b"), Admitted)


def test_who_needs_blocks_that_are_coming_for_nobody_waits_for_them(hosted: Engine) -> None:
    """The same for the blocks of a request that was aborted while its KV was on the way up."""
    hosted.leave("a", prompt(32))
    hosted.demoted(8)
    hosted.add("b", prompt(32))
    up = hosted.admit("b").plan
    assert up is not None
    hosted.manager.release("b")
    hosted.add("c", prompt(32, 1))
    assert hosted.manager.admit("c") == Waiting(None, frozenset({up.ticket}))
    hosted.end(up)
    assert isinstance(hosted.admit("c"), Admitted)


def test_a_write_back_keeps_no_block_that_it_does_not_copy(shm_root: Path) -> None:
    """The host may take a part only: the blocks behind it were kept until the ticket ended, for nothing."""
    with cache_at(shm_root, slots=16) as cache:
        engine = Engine(8, cache)
        engine.start("a", prompt(32))
        plan = engine.manager.finish("a")
        assert (
            plan is not None and len(plan.copies) == 4
        )  # a quarter of the slots is what one member may reserve
        assert engine.stat("evictable") == 4
        engine.manager.check()
        engine.end(plan)
        assert engine.stat("evictable") == 8


def test_a_plain_pool_writes_back_and_tells_of_new_weights(shm_root: Path) -> None:
    """Without a prefix tree, as a decoder has it, the cache below was not known at all."""
    with cache_at(shm_root) as cache:
        engine = Engine(8, cache, prefix_caching=False)
        tokens = prompt(8)
        engine.start("a", tokens)
        plan = engine.manager.write_back(tokens, engine.manager.table("a")[:2])
        assert engine.end(plan).ended and engine.places(tokens) == ["host", "host"]
        assert cache.lookup(tokens).num_tokens == 8
        engine.manager.weights_changed()
        assert cache.lookup(tokens).num_tokens == 0
