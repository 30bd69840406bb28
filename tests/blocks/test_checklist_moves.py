"""The checklist of device blocks, line by line (eviction, storage, ranks, the decoder, items): each
quotes its line.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3

from pagoda.blocks import Direction, PrefixMatch
from pagoda.keys import Item
from pagoda.ledger import admin
from pagoda.testing import FakeClock
from testbed.patience import wait_until
from tests.blocks.kit import (
    BLOCK,
    Engine,
    cache_at,
    ledger_of,
    prompt,
    retrieved,
    stored,
    truth,
)

CAT = blake3(b"cat").digest()
DOG = blake3(b"dog").digest()


def test_leaves_go_first_by_recency_and_parents_when_no_child_is_left(
    bare: Engine,
) -> None:
    """Evict leaf-first by recency; a parent becomes a candidate when it has no child in that
    tier.
    """
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


def test_demote_if_the_host_has_room_or_can_make_it_else_drop(
    shm_root: Path,
) -> None:
    """Demote to the host if it has space (or can make it), else drop; partial demotion is
    allowed.
    """
    clock = FakeClock()
    with cache_at(shm_root, slots=16, clock=clock) as cache:
        engine = Engine(16, cache, write_back=False)
        engine.leave("a", prompt(16))
        assert engine.demoted(4) == 16
        assert engine.places(prompt(16)) == ["host"] * 4
        # 16 blocks more: the host drops its oldest chunks for them
        for seed in range(1, 5):
            clock.advance(100)
            engine.leave(f"{seed}", prompt(16, seed))
            engine.demoted(4)
            assert engine.places(prompt(16, seed)) == ["host"] * 4
        assert engine.places(prompt(16)) == ["freed"] * 4
        clock.advance(100)
        held = []
        for seed in range(1, 5):  # now nothing there may go
            match = ledger_of(cache).match_prefix(engine.keys(prompt(16, seed)))
            assert (
                ledger_of(cache).hold(match.slots, match.generations)
                == [True] * 4
            )
            held.append(match)
        # but for two of them
        ledger_of(cache).release(held[0].slots[2:], held[0].generations[2:])
        clock.advance(100)
        engine.leave("z", prompt(16, 9))
        plan = engine.manager.demote(4)
        assert plan is not None
        assert len(plan.copies) == 2
        assert engine.manager.free == 14
        assert engine.stat("dropped_blocks") == 2
        engine.end(plan)
        # the head is kept
        assert engine.places(prompt(16, 9)) == ["host", "host", "freed", "freed"]


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
    """Fill the host with other prompts; returns whether one was evicted from there."""
    for seed in range(100, 104):
        name = f"fill {seed} {engine.stat('requests')}"
        engine.leave(name, prompt(16, seed + int(engine.stat("requests"))))
        engine.demoted(4)
        assert engine.cache is not None
        assert engine.cache.flush(60)
    return "host" not in engine.places(tokens)


def test_write_back_at_finish_copies_what_is_missing_only(housed: Engine) -> None:
    """Storage: write-back at finish (asynchronous, only what is missing there)."""
    housed.start("a", prompt(13))
    plan = housed.manager.finish("a")
    assert plan is not None
    assert plan.direction is Direction.DOWN
    assert len(plan.copies) == 3
    # read until it ended
    assert housed.places(prompt(12)) == ["device"] * 3
    assert housed.stat("evictable") == 0
    housed.end(plan)
    assert housed.places(prompt(12)) == ["device"] * 3
    assert housed.stat("evictable") == 3
    assert housed.cache is not None
    assert housed.cache.flush(60)
    assert housed.cache.holders(housed.keys(prompt(12))[2]) == ["host", "disk"]
    housed.start("b", prompt(12) + prompt(8, 1))
    plan = housed.manager.finish("b")
    assert plan is not None
    assert len(plan.copies) == 2
    housed.end(plan)
    housed.start("c", prompt(13))
    assert housed.manager.finish("c") is None
    # evicting it costs nothing
    assert housed.manager.demote(16) is None
    assert housed.manager.free == 16


def test_prefetch_brings_the_leading_run_and_takes_no_blocks(
    shm_root: Path, tmp_path: Path
) -> None:
    """Prefetch at match (leading run; blocks are taken only after the hit length is known; the tail
    is given back).
    """
    tokens = prompt(40)
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, tokens[:32])
    with cache_at(shm_root / "wiped", tmp_path) as cache:
        engine = Engine(16, cache)
        keys = engine.keys(tokens)
        disk = cache._tiers.lower[0]
        assert disk.remove(keys[5])  # a hole: the run ends before it
        engine.add("a", tokens)
        assert engine.manager.match("a") == PrefixMatch(0, 0, 20)
        future = engine.manager.prefetch("a")
        assert future is not None
        assert engine.manager.prefetch("a") in (future, None)
        assert engine.manager.free == 16
        assert engine.manager.in_flight == 0
        assert future.result(60).num_tokens == 20
        assert engine.manager.match("a") == PrefixMatch(0, 20, 0)
        assert admin.gauges(ledger_of(cache))["reserved"] == 0
        admitted = engine.admit("a")
        assert admitted.by_tier == {"disk": 20}
        assert admitted.computed_tokens == 20
        engine.end(admitted.plan)
        engine.is_right("a", 20)
        assert engine.stat("hit_tokens_storage") == 20
        assert engine.stat("fetch_seconds") > 0


def test_what_did_not_come_up_gives_its_blocks_to_the_request(
    hosted: Engine,
) -> None:
    """The unread tail is given back: what no copy brought is computed in the same blocks."""
    hosted.leave("a", prompt(16))
    hosted.demoted(4)
    hosted.kv[:] = 0
    hosted.add("b", prompt(17))
    admitted = hosted.admit("b")
    settled = hosted.end(admitted.plan, blocks=1)
    assert settled.shortened == {"b": 4}
    assert settled.ready == ("b",)
    assert settled.again == ()
    assert hosted.manager.table("b") == admitted.table
    assert hosted.places(prompt(16)) == ["device", "host", "host", "host"]
    hosted.compute("b")
    hosted.is_right("b")


def test_lengths_agree_by_minimum_over_ranks(shm_root: Path) -> None:
    """Several ranks: lengths agree by minimum; a write is done when all ranks acknowledged; an
    error is shorter.
    """
    with cache_at(shm_root) as cache:
        engine = Engine(8, cache, ranks=2, write_back=False)
        engine.leave("a", prompt(16))
        plan = engine.manager.demote(4)
        assert plan is not None
        engine.copy(plan)
        assert not engine.manager.completed(plan.ticket, rank=1).ended
        # not before both have reported
        assert cache.lookup(prompt(16)).num_tokens == 0
        assert engine.manager.completed(plan.ticket, rank=0, blocks=3).ended
        assert retrieved(cache, prompt(16)) == (12, True)
        engine.add("b", prompt(16))
        admitted = engine.admit("b")
        assert admitted.plan is not None
        assert admitted.computed_tokens == 12
        engine.copy(admitted.plan)
        assert not engine.manager.completed(admitted.plan.ticket, rank=0).ended
        settled = engine.manager.completed(admitted.plan.ticket, rank=1, blocks=2)
        assert settled.shortened == {"b": 8}
        engine.is_right("b", 8)


def test_a_decoder_writes_back_by_keys_from_tokens_alone(shm_root: Path) -> None:
    """Producer/decoder split: the decoder writes back by keys from tokens alone (no tree), the
    producer's keys.
    """
    with cache_at(shm_root) as ours, cache_at(shm_root) as theirs:
        producer = Engine(8, ours)
        decoder = Engine(8, theirs)
        image = [Item(2, 5, CAT)]
        tokens = prompt(19)
        producer.start("a", tokens[:8], items=image, salt="bob")
        producer.finish("a")
        for i, block in enumerate(truth(tokens, image, salt="bob")):
            decoder.kv[i + 3] = block
        plan = decoder.manager.write_back(
            tokens, [3, 4, 5, 6], items=image, salt="bob"
        )
        # the producer's are there
        assert plan is not None
        assert [copy.block for copy in plan.copies] == [5, 6]
        assert decoder.manager.free == 8
        assert decoder.stat("cached") == 0
        decoder.end(plan)
        producer.manager.reset()
        assert producer.start("b", tokens, items=image, salt="bob").by_tier == {
            "host": 16
        }


def test_keys_and_blocks_of_unequal_number_are_refused(hosted: Engine) -> None:
    """Keys and blocks of unequal number are a ValueError."""
    for table in ([], [1], [1, 2, 3]):
        with pytest.raises(ValueError, match="2 whole blocks"):
            hosted.manager.write_back(prompt(9), table)
    assert hosted.manager.in_flight == 0


@pytest.mark.parametrize(
    ("item", "hit"),
    [
        ((6, 10), 4),
        ((4, 9), 4),
        ((1, 9), 0),
        ((6, 8), 8),
        ((8, 10), 8),
        ((6, 99), 4),
    ],
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
    wanted = (
        PrefixMatch(hit, 0, 0) if place == "device" else PrefixMatch(0, hit, 0)
    )
    assert hosted.manager.match("b") == wanted
    admitted = hosted.admit("b")
    assert admitted.computed_tokens == hit
    assert admitted.shared == hit // BLOCK
    hosted.end(admitted.plan)
    hosted.compute("b")
    hosted.is_right("b")
