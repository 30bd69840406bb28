"""Prompts that get their blocks piece by piece, and a pool whose size changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3

from pagoda.blocks import Admitted, BlockManager, Extended, NoRoom
from pagoda.keys import Item
from tests.blocks.kit import BLOCK, Engine, cache_at, prompt

LONG = prompt(10 * BLOCK + 1)


def computed_in_chunks(engine: Engine, name: str, chunk: int) -> None:
    """Computes the rest of an admitted request, extending it chunk by chunk."""
    tokens = engine.requests[name].tokens
    while (at := engine.manager._requests[name].computed_tokens) < len(tokens):
        stop = min(at + chunk, len(tokens))
        assert isinstance(engine.manager.extend(name, stop), Extended)
        engine.compute(name, stop)
    engine.is_right(name)


def test_a_prompt_is_admitted_with_room_for_its_first_chunk_alone() -> None:
    engine = Engine(12)
    engine.start("busy", prompt(8 * BLOCK, 1))
    engine.add("a", LONG)
    answer = engine.manager.admit("a")
    assert answer == NoRoom(11, 4)
    answer = engine.manager.admit("a", chunk_tokens=2 * BLOCK)
    assert isinstance(answer, Admitted)
    assert len(answer.table) == 2
    assert answer.shared == 0
    assert answer.computed_tokens == 0
    engine.compute("a", 2 * BLOCK)
    assert engine.manager.extend("a", 5 * BLOCK) == NoRoom(3, 2)
    engine.finish("busy")
    computed_in_chunks(engine, "a", 2 * BLOCK)
    engine.finish("a")
    engine.add("b", LONG)
    answer = engine.manager.admit("b", chunk_tokens=1)
    assert isinstance(answer, Admitted)
    assert answer.shared == 10
    assert len(answer.table) == 11


def test_the_least_is_a_chunk_and_no_more_is_taken_than_a_prompt_needs() -> None:
    engine = Engine(12)
    engine.start("busy", prompt(11 * BLOCK, 1))
    engine.add("a", LONG)
    assert engine.manager.admit("a", chunk_tokens=BLOCK + 1) == NoRoom(2, 1)
    engine.add("b", prompt(2))
    answer = engine.manager.admit("b", chunk_tokens=100, reserve_tokens=1)
    assert isinstance(answer, Admitted)
    assert len(answer.table) == 1
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1"):
        engine.manager.admit("a", chunk_tokens=0)


def test_a_host_hit_longer_than_the_free_blocks_is_loaded_as_far_as_there_is_room(
    shm_root: Path,
) -> None:
    with cache_at(shm_root) as cache:
        engine = Engine(12, cache)
        engine.leave("before", LONG)
        engine.demoted(10)
        engine.start("busy", prompt(7 * BLOCK, 1))
        engine.add("a", LONG)
        assert engine.manager.admit("a") == NoRoom(11, 5)
        answer = engine.manager.admit("a", chunk_tokens=BLOCK)
        assert isinstance(answer, Admitted)
        assert answer.plan is not None
        assert len(answer.table) == 5
        assert len(answer.plan.copies) == 5
        assert answer.computed_tokens == 5 * BLOCK
        assert engine.end(answer.plan).ready == ("a",)
        engine.is_right("a", 5 * BLOCK)
        engine.finish("busy")
        computed_in_chunks(engine, "a", BLOCK)
        assert engine.manager.in_flight == 0
        engine.finish("a")
        engine.manager.check()


def test_a_host_hit_with_room_for_all_of_it_is_loaded_whole(
    shm_root: Path,
) -> None:
    with cache_at(shm_root) as cache:
        engine = Engine(24, cache)
        engine.leave("before", LONG)
        engine.demoted(10)
        engine.add("a", LONG)
        answer = engine.manager.admit("a", chunk_tokens=1)
        assert isinstance(answer, Admitted)
        assert answer.plan is not None
        assert len(answer.table) == 11
        assert len(answer.plan.copies) == 10
        engine.end(answer.plan)
        computed_in_chunks(engine, "a", 1)


def test_an_image_that_there_is_no_room_for_is_not_cut(shm_root: Path) -> None:
    image = (Item(1, 6 * BLOCK + 1, blake3(b"an image").digest()),)
    with cache_at(shm_root) as cache:
        engine = Engine(12, cache)
        engine.leave("before", LONG, items=image)
        engine.demoted(10)
        engine.start("busy", prompt(9 * BLOCK, 1))
        engine.add("a", LONG, items=image)
        answer = engine.manager.admit("a", chunk_tokens=BLOCK)
        assert isinstance(answer, Admitted)
        assert answer.plan is None
        assert answer.computed_tokens == 0
        assert len(answer.table) == 3


def test_the_recency_of_a_path_outlives_a_roll_back() -> None:
    engine = Engine(8)
    engine.leave("old", prompt(2 * BLOCK + 1))
    engine.leave("newer", prompt(2 * BLOCK + 1, 1))
    engine.add("a", prompt(2 * BLOCK + 1))
    engine.admit("a")
    engine.manager._allocator.requeue(engine.manager._requests["a"])
    engine.manager.demote(2)
    assert engine.places(prompt(2 * BLOCK)) == ["device"] * 2
    assert engine.places(prompt(2 * BLOCK, 1)) == ["freed"] * 2


def test_a_pool_grows_and_shrinks_with_what_is_cached(shm_root: Path) -> None:
    manager = BlockManager(4, 4)
    manager.add("a", list(range(17)))
    assert manager.admit("a") == NoRoom(5, 4)
    manager.resize(8)
    assert manager.total == 8
    assert manager.free == 8
    assert isinstance(manager.admit("a"), Admitted)
    manager.computed("a", 17)
    with pytest.raises(ValueError, match=r"\[3, 4\] are in use"):
        manager.resize(3)
    manager.check()
    manager.finish("a")
    assert manager.stats()["cached"] == 4
    manager.resize(2)  # the descendants of removed blocks are removed too
    manager.check()
    assert manager.total == 2
    assert manager.stats()["cached"] + manager.free == 2
    manager.add("b", list(range(9)))
    assert manager.match("b").device_tokens == 4 * int(manager.stats()["cached"])
    with pytest.raises(ValueError, match="at least one block"):
        manager.resize(0)


def test_what_hangs_below_a_removed_block_goes_with_it_wherever_it_is() -> None:
    engine = Engine(4)
    engine.add("first", prompt(2))
    assert engine.admit("first").table == [0]
    engine.leave("parent", prompt(4, 1))
    engine.manager.release("first")
    engine.leave("child", prompt(8, 1))
    assert [
        engine.manager._tree.nodes[key].block for key in engine.keys(prompt(8, 1))
    ] == [1, 0]
    engine.manager.resize(1)
    engine.manager.check()
    assert engine.places(prompt(8, 1)) == ["freed", "freed"]
    assert engine.manager.free == 1


def test_a_pool_that_cannot_shrink_changes_nothing() -> None:
    engine = Engine(8)
    engine.leave("cached", prompt(2 * BLOCK))
    engine.start("running", prompt(3 * BLOCK, 1))
    with pytest.raises(ValueError, match="in use"):
        engine.manager.resize(1)
    engine.manager.check()
    assert engine.manager.total == 8
    assert engine.stat("dropped_blocks") == 0
    assert engine.places(prompt(2 * BLOCK)) == ["device"] * 2


def test_a_block_in_flight_keeps_a_pool_from_shrinking(shm_root: Path) -> None:
    with cache_at(shm_root) as cache:
        engine = Engine(8, cache, write_back=False)
        engine.leave("a", prompt(4 * BLOCK))
        down = engine.manager.demote(1)
        assert down is not None
        block = down.copies[0].block
        with pytest.raises(ValueError, match="in use"):
            engine.manager.resize(block)
        engine.manager.check()
        engine.end(down)
        engine.manager.resize(block)
        engine.manager.check()
        assert engine.manager.total == block
