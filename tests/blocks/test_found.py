"""Bugs of the block manager that were found by thought, each in its smallest form."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from blake3 import blake3

from pagoda.blocks import PrefixMatch
from pagoda.keys import Item
from pagoda.ledger import admin
from tests.blocks.kit import (
    BLOCK,
    Engine,
    cache_at,
    ledger_of,
    prompt,
    stored,
    workers_stopped,
)


def test_a_manager_without_a_cache_has_a_namespace(bare: Engine) -> None:
    bare.leave("a", prompt(9))
    bare.add("b", prompt(9), salt="bob")
    bare.add("c", prompt(9))
    assert bare.manager.match("b") == PrefixMatch(0, 0, 0)
    assert bare.manager.match("c") == PrefixMatch(8, 0, 0)
    bare.manager.weights_changed()
    assert bare.manager.match("c") == PrefixMatch(0, 0, 0)


def test_resume_does_not_bring_a_dead_rank_back(shm_root: Path) -> None:
    """Its share of a chunk would be missing, although all live ranks have reported theirs."""
    with cache_at(shm_root) as cache:
        engine = Engine(8, cache, ranks=2, write_back=False)
        engine.leave("a", prompt(8))
        engine.manager.lost(1)
        engine.manager.pause()
        engine.manager.resume()
        assert engine.manager.paused
        assert engine.manager.demote(2) is None
        assert engine.places(prompt(8)) == ["freed"] * 2


def test_a_prefetch_is_counted_for_one_admission_only(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(16))
    shutil.rmtree(shm_root / "host")
    with cache_at(shm_root, tmp_path) as cache:
        engine = Engine(8, cache, write_back=False)
        engine.add("a", prompt(17))
        future = engine.manager.prefetch("a")
        assert future is not None
        assert future.result(60).num_tokens == 16
        assert engine.resume("a").by_tier == {"disk": 16}
        engine.manager.preempt("a")
        engine.demoted(4)
        # no disk had to be read this time
        assert engine.resume("a").by_tier == {"host": 16}


def test_a_prefetch_that_was_cancelled_does_not_break_the_admission(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(16))
        admin.clear(ledger_of(cache), None)
        engine = Engine(8, cache)
        goes_on = workers_stopped(cache)
        try:
            engine.add("a", prompt(17))
            future = engine.manager.prefetch("a")
            assert future is not None
            assert future.cancel()
            stored_by_hand = engine.manager.write_back(prompt(4), [0])
            assert stored_by_hand is not None
            engine.manager.completed(stored_by_hand.ticket)
            assert engine.admit("a").by_tier == {"host": 4}
        finally:
            goes_on.set()


def test_a_run_that_is_cut_short_ends_before_an_item_as_well(
    hosted: Engine,
) -> None:
    items = [Item(6, 14, blake3(b"cat").digest())]
    hosted.leave("a", prompt(16), items=items)
    hosted.demoted(4)
    hosted.kv[:] = 0
    for name in "bc":
        hosted.add(name, prompt(17), items=items)
    first = hosted.admit("b")
    second = hosted.admit("c")
    assert first.computed_tokens == second.computed_tokens == 16
    # that is inside the image, where no prefill can begin
    settled = hosted.end(first.plan, blocks=3)
    assert settled.shortened == {"b": 4}
    assert settled.again == ("c",)
    hosted.compute("b")
    hosted.is_right("b")
    assert hosted.resume("c").computed_tokens == 16


def test_without_a_hit_in_a_lower_tier_there_is_nothing_to_prefetch(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(8))
        engine = Engine(8, cache)
        engine.start("on the device", prompt(8, 1))
        for name, tokens in (
            ("a", prompt(8)),
            ("b", prompt(8, 1)),
            ("c", prompt(2)),
        ):
            engine.add(name, [*tokens, 1])
            assert engine.manager.prefetch(name) is None, name
        engine.add("new", prompt(9, 2))  # only the tiers know of this one
        future = engine.manager.prefetch("new")
        assert future is not None
        assert future.result(60).num_tokens == 0
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
    assert hosted.manager.in_flight == 1
    assert hosted.stat("in_flight") == 4
    settled = hosted.end(up, blocks=2)
    assert settled.shortened == {}
    assert settled.again == ()
    assert settled.ready == ()
    assert settled.freed == 2
    assert hosted.places(prompt(16)) == ["device", "device", "host", "host"]
    assert hosted.cache is not None
    assert admin.gauges(ledger_of(hosted.cache))["reserved"] == 0


@pytest.mark.parametrize("half", [False, True])
def test_match_promises_nothing_below_the_minimum(
    shm_root: Path, half: bool
) -> None:
    """Before the fix it reported host tokens that an admission does not load, because they are too
    few.
    """
    items = [Item(1, 14, blake3(b"cat").digest())] if half else []
    with cache_at(shm_root, min_hit_tokens=12) as cache:
        engine = Engine(8, cache, write_back=False)
        engine.leave("a", prompt(20), items=items)
        engine.demoted(3)
        engine.add("b", prompt(17), items=items)
        wanted = 0 if half else 8
        assert engine.manager.match("b") == PrefixMatch(wanted, 0, 0)
        assert engine.admit("b").computed_tokens == wanted
        engine.manager.release("b")
        engine.demoted(1)
        engine.add("c", prompt(17), items=items)
        assert engine.manager.match("c") == PrefixMatch(4, 12, 0)
        assert engine.admit("c").computed_tokens == 16


def test_a_negative_count_is_refused_and_changes_nothing(hosted: Engine) -> None:
    """It was taken for nothing at all, which hides a mistake in the engine's arithmetic."""
    hosted.leave("a", prompt(16))
    hosted.add("b", prompt(16))
    before = hosted.manager.stats()
    for wrong in (
        lambda: hosted.manager.demote(-1),
        lambda: hosted.manager.has_room(-1),
        lambda: hosted.manager.admit("b", reserve_tokens=-1),
    ):
        with pytest.raises(ValueError, match="negative"):
            wrong()
    after = hosted.manager.stats()
    assert {
        name: after[name] for name in ("free", "evicted_blocks", "requests")
    } == {name: before[name] for name in ("free", "evicted_blocks", "requests")}
    hosted.admit("b")
    with pytest.raises(ValueError, match="negative"):
        hosted.manager.extend("b", -5)
