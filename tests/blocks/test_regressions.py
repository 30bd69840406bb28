"""What the model test (tests/stateful/test_blocks_model.py) and a reading found, each as the
shortest way there.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import NoReturn

import pytest
from blake3 import blake3

from pagoda.blocks import Admitted, NoRoom, PrefixMatch, Waiting
from pagoda.cache import Cache
from pagoda.cache.writeback import Generations, Slots
from pagoda.keys import Item
from pagoda.ledger import admin
from testbed.patience import Patience
from tests.blocks.kit import (
    BLOCK,
    Engine,
    cache_at,
    ledger_of,
    prompt,
    stored,
    workers_stopped,
)

IMAGE = (Item(1, 14, blake3(b"an image").digest()),)  # of blocks 0 to 3


def with_half_an_image_on_the_host(engine: Engine) -> list[int]:
    """Leaves an image's first two blocks on the device, the others on the host; returns the
    prompt.
    """
    tokens = prompt(20)
    engine.leave("before", tokens, items=IMAGE)
    engine.demoted(3)
    assert [
        str(engine.manager.where(key)) for key in engine.keys(tokens, IMAGE)
    ] == ["device"] * 2 + ["host"] * 3
    return tokens


def test_an_image_that_begins_on_the_device_and_goes_on_on_the_host(
    hosted: Engine,
) -> None:
    """Its blocks on the device were entered into the tree a second time, and their first nodes were
    lost.
    """
    tokens = with_half_an_image_on_the_host(hosted)
    hosted.add("a", tokens, items=IMAGE)
    assert hosted.manager.match("a") == PrefixMatch(8, 8, 0)
    admitted = hosted.admit("a")
    assert admitted.shared == 4
    assert admitted.by_tier == {"device": 8, "host": 8}
    hosted.end(admitted.plan)
    hosted.compute("a")
    hosted.is_right("a")


@pytest.mark.parametrize("good", [0, 1])
def test_an_image_whose_end_fails_to_come_up(hosted: Engine, good: int) -> None:
    """No computation starts in the middle of an item: the request is admitted again, and computes
    the whole item.
    """
    tokens = with_half_an_image_on_the_host(hosted)
    hosted.add("a", tokens, items=IMAGE)
    settled = hosted.end(hosted.admit("a").plan, good)
    assert settled.again == ("a",)
    assert settled.shortened == {}
    assert settled.ready == ()
    admin.remove(ledger_of(hosted.cache), hosted.keys(tokens, IMAGE))  # type: ignore[arg-type]
    admitted = hosted.admit("a")
    assert admitted.computed_tokens == 0
    assert admitted.shared == 0
    assert admitted.plan is None
    hosted.compute("a")
    hosted.is_right("a")


@pytest.mark.parametrize("gone", [2, 3])
def test_an_image_whose_end_goes_while_it_is_looked_for(
    hosted: Engine, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    """What is held of a run may be less than was found: that, too, may end inside an item."""
    tokens = with_half_an_image_on_the_host(hosted)
    hosted.add("a", tokens, items=IMAGE)
    assert hosted.cache is not None
    assert hosted.cache.slots is not None
    ledger = ledger_of(hosted.cache)
    hold = hosted.cache.slots.hold

    def after_another_removed_it(
        slots: Slots, generations: Generations
    ) -> list[bool]:
        admin.remove(ledger, hosted.keys(tokens, IMAGE)[gone : gone + 1])
        return hold(slots, generations)

    monkeypatch.setattr(hosted.cache.slots, "hold", after_another_removed_it)
    admitted = hosted.admit("a")
    assert admitted.computed_tokens == 0
    assert admitted.plan is None
    assert admitted.waits == frozenset()
    hosted.compute("a")
    hosted.is_right("a")
    hosted.manager.release("a")


def test_who_needs_room_that_a_write_back_still_reads_waits_for_it(
    shm_root: Path,
) -> None:
    """Before the fix it was refused, as if its prompt could never fit, although there was no other
    request.
    """
    with cache_at(shm_root) as cache:
        engine = Engine(8, cache)
        engine.start("a", prompt(29))
        plan = engine.manager.finish("a")
        assert plan is not None
        engine.add("b", prompt(29, 1))
        assert engine.manager.has_room(8, evict=True)
        assert not engine.manager.has_room(9, evict=True)
        before = engine.manager.stats()
        assert engine.manager.admit("b") == Waiting(
            None, frozenset({plan.ticket})
        )
        assert engine.manager.stats() == before
        assert engine.manager.admit("b", evict=False) == NoRoom(8, 1)
        engine.end(plan)
        assert isinstance(engine.admit("b"), Admitted)


def test_who_needs_blocks_that_are_coming_for_nobody_waits_for_them(
    hosted: Engine,
) -> None:
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


def test_a_write_back_keeps_no_block_that_it_does_not_copy(
    shm_root: Path,
) -> None:
    """If the host takes only a part, the later blocks are not kept until the ticket ends."""
    with cache_at(shm_root, slots=16) as cache:
        engine = Engine(8, cache)
        engine.start("a", prompt(32))
        plan = engine.manager.finish("a")
        # a quarter of the slots is what one member may reserve
        assert plan is not None
        assert len(plan.copies) == 4
        assert engine.stat("evictable") == 4
        engine.manager.check()
        engine.end(plan)
        assert engine.stat("evictable") == 8


def test_a_plain_pool_writes_back_and_reports_new_weights(
    shm_root: Path,
) -> None:
    """Without a prefix tree, as a decoder has it, the cache below was not known at all."""
    with cache_at(shm_root) as cache:
        engine = Engine(8, cache, prefix_caching=False)
        tokens = prompt(8)
        engine.start("a", tokens)
        plan = engine.manager.write_back(tokens, engine.manager.table("a")[:2])
        assert engine.end(plan).ended
        assert engine.places(tokens) == ["host", "host"]
        assert cache.lookup(tokens).num_tokens == 8
        engine.manager.weights_changed()
        assert cache.lookup(tokens).num_tokens == 0


def test_the_heir_of_a_run_is_in_no_other_move(shm_root: Path) -> None:
    """Before the fix it kept blocks that a second copy still wrote, waited forever, and both freed
    them.
    """
    long = prompt(40)
    branch = [*long[:20], *prompt(9, 1)]  # continues after both
    with cache_at(shm_root) as cache:
        engine = Engine(24, cache, write_back=False)
        engine.leave("one", long)
        engine.leave("two", branch)
        engine.demoted(24)
        engine.kv[:] = 0
        engine.add("a", [*long, 1])
        engine.add("b", branch)
        first = engine.admit("a")
        second = engine.admit("b")
        engine.manager.release("a")
        settled = engine.end(first.plan, blocks=2)
        assert settled.shortened == {}
        assert settled.again == ("b",)
        assert engine.end(second.plan).ended
        engine.resume("b")


def test_a_block_that_was_called_back_and_leaves_again_leaves_with_its_first_copy(
    hosted: Engine,
) -> None:
    """Its key was busy with that copy, so it got no second one; the first was thrown away: it was
    nowhere.
    """
    tokens = prompt(16)
    hosted.leave("a", tokens)
    down = hosted.manager.demote(4)
    assert hosted.start("b", [*tokens, 1]).by_tier == {"device": 16}
    hosted.manager.release("b")
    assert hosted.manager.demote(4) is None
    hosted.manager.check()
    assert hosted.places(tokens) == ["to_host"] * 4
    assert hosted.end(down).freed == 4
    assert hosted.places(tokens) == ["host"] * 4
    hosted.kv[:] = 0
    assert hosted.start("c", [*tokens, 1]).by_tier == {"host": 16}


def test_what_left_and_did_not_arrive_is_counted(hosted: Engine) -> None:
    """The counters show that copies fail, so that a user sees why nothing hits."""
    hosted.leave("a", prompt(16))
    assert hosted.end(hosted.manager.demote(4), blocks=1).freed == 4
    assert hosted.stat("demoted_blocks") == 1
    assert hosted.stat("dropped_blocks") == 3


def test_the_end_of_a_copy_looks_at_nobody_else(
    hosted: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked every request whether it waited: with 10,000 of them, milliseconds a ticket."""

    class OneByOne(dict[str, object]):
        def values(self) -> NoReturn:
            raise AssertionError("all requests are looked at")

    hosted.leave("a", prompt(16))
    hosted.demoted(4)
    for name in "bc":
        hosted.add(name, prompt(17))
    first = hosted.admit("b")
    second = hosted.admit("c")
    assert first.plan is not None
    assert second.waits == {first.plan.ticket}
    hosted.copy(first.plan)
    with monkeypatch.context() as patched:
        patched.setattr(
            hosted.manager._allocator,
            "requests",
            OneByOne(hosted.manager._requests),
        )
        settled = hosted.manager.completed(first.plan.ticket)
    assert settled.ready == ("b", "c")
    hosted.manager.check()


@contextmanager
def nobody_gets_in(cache: Cache) -> Iterator[None]:
    """The ledger's gate is shut, as by a process that was stopped inside."""
    shut = Event()
    opens = Event()

    def stay() -> None:
        ledger_of(cache).session.gate.run(
            lambda: (shut.set(), opens.wait(60)), 60, exclusive=True
        )

    inside = Thread(target=stay)
    inside.start()
    shut.wait(60)
    try:
        yield
    finally:
        opens.set()
        inside.join()


@pytest.mark.parametrize("begun", [False, True])
def test_a_busy_ledger_is_waited_for_once(shm_root: Path, begun: bool) -> None:
    """Eight prompts were eight waits in the engine's step, one after the other, and eight tenants
    eight at the end.
    """
    with cache_at(shm_root, deadline_seconds=0.5) as cache:
        engine = Engine(16, cache, write_back=False)
        for seed in range(8):
            engine.leave(str(seed), prompt(8, seed), salt=str(seed))
        plan = engine.manager.demote(16) if begun else None
        with nobody_gets_in(cache):
            patience = Patience(20)
            if plan is None:
                assert engine.manager.demote(16) is None
            else:
                engine.end(plan)
            assert not patience.ended, patience.said()
        assert engine.manager.free == 16
        assert engine.stat("dropped_blocks") == 16


def test_a_prefetch_is_shared_by_those_only_who_need_no_more(
    shm_root: Path, tmp_path: Path
) -> None:
    """What had left the device since was waited for, and was not brought: not a token hit."""
    tokens = prompt(17)
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, tokens)
        admin.clear(ledger_of(cache), None)
        engine = Engine(8, cache, write_back=False)
        engine.leave("before", tokens[:8])
        goes_on = workers_stopped(cache)
        try:
            engine.add("a", tokens)
            part = engine.manager.prefetch("a")
            engine.manager.pause()
            engine.demoted(2)
            engine.manager.resume()
            engine.add("b", tokens)
            whole = engine.manager.prefetch("b")
            assert engine.manager.prefetch("a") is whole is not part
        finally:
            goes_on.set()
        assert whole is not None
        assert whole.result(60).num_tokens == 16
        assert engine.admit("b").computed_tokens == 16


def test_a_generated_token_takes_a_few_bytes(bare: Engine) -> None:
    """Before the fix each node had a separate array: 130 bytes."""
    bare.add("a", prompt(4))
    tracemalloc.start()
    try:
        for token in prompt(2000, 1):
            bare.manager.append("a", [token])
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    keys = 2000 // BLOCK * 100
    assert taken < keys + 2000 * 16


def test_a_pin_can_be_ended_after_others_changed_the_weights(
    shm_root: Path,
) -> None:
    """Its keys are not those of the tokens any more: it kept its blocks until a reset."""
    with cache_at(shm_root) as cache, cache_at(shm_root) as other:
        engine = Engine(8, cache, write_back=False)
        engine.leave("a", prompt(16))
        assert engine.manager.pin(prompt(16)) == 16
        other.weights_changed()
        assert engine.manager.unpin(prompt(16)) == 16
        engine.manager.check()
        assert engine.stat("evictable") == 4


def test_a_path_cut_before_an_image_is_not_loaded_a_second_time(
    shm_root: Path,
) -> None:
    """Another question about the image hit a node that nothing locked: its block was evicted and
    used again.
    """
    # of blocks 1 and 2; block 2 ends with other tokens
    image = (Item(4, 10, blake3(b"an image").digest()),)
    first = prompt(13)
    second = [*first[:10], *prompt(7, 1)]
    with cache_at(shm_root, min_hit_tokens=2 * BLOCK) as cache:
        engine = Engine(8, cache)
        engine.leave("before", first, items=image)
        assert engine.demoted(1) == 6  # its rest on the host is below the minimum
        engine.leave("other", second, items=image)
        lookups = cache.stats()["counters"]["lookups"]
        assert engine.start("a", first, items=image).computed_tokens == BLOCK
        assert cache.stats()["counters"]["lookups"] == lookups + 1
        engine.finish("a")
        engine.start("b", second, items=image)
        engine.demoted(8)
        engine.start("c", prompt(12, 2))
        engine.is_right("b")


def test_a_pin_of_items_that_can_be_read_once_is_found_again(
    bare: Engine,
) -> None:
    """It was kept under the name of the text alone, so its blocks stayed locked."""
    tokens = prompt(16)
    bare.leave("before", tokens, items=IMAGE)
    assert bare.manager.pin(tokens, items=iter(IMAGE)) == 16
    assert bare.manager.unpin(tokens, items=IMAGE) == 16
    bare.manager.check()
    assert bare.stat("pinned") == 0
