"""The checklist of device blocks, line by line (admission, extension, twins, release): each quotes
its line.
"""

from __future__ import annotations

import pytest
from blake3 import blake3

from pagoda.blocks import Admitted, Direction, Extended, NoRoom, Waiting
from tests.blocks.kit import (
    BLOCK,
    Engine,
    everything,
    prompt,
    retrieved,
    stored,
)

CAT = blake3(b"cat").digest()
DOG = blake3(b"dog").digest()


def test_admit_takes_blocks_for_the_prompt_and_the_reserve(bare: Engine) -> None:
    """Admit: needed blocks for prompt + reserved decode blocks."""
    bare.add("a", prompt(6))
    admitted = bare.admit("a", reserve_tokens=7)
    assert len(admitted.table) == 4
    assert admitted.shared == 0
    assert bare.manager.free == 4
    with pytest.raises(ValueError, match="negative"):
        bare.manager.admit("a", reserve_tokens=-1)


def test_not_enough_room_evicts(bare: Engine) -> None:
    """Not enough free blocks -> evict."""
    bare.leave("a", prompt(32))
    bare.add("b", prompt(12, 1))
    answer = bare.manager.admit("b")
    assert isinstance(answer, Admitted)
    assert bare.stat("evicted_blocks") == 3
    assert bare.places(prompt(32)) == ["device"] * 5 + ["freed"] * 3


def test_an_eviction_that_needs_copies_is_waited_for(hosted: Engine) -> None:
    """Decided: eviction that needs copies answers Waiting; the blocks are free when the ticket has
    ended.
    """
    hosted.leave("a", prompt(32))
    hosted.add("b", prompt(12, 1))
    waiting = hosted.manager.admit("b")
    assert isinstance(waiting, Waiting)
    assert waiting.plan is not None
    assert waiting.plan.direction is Direction.DOWN
    assert waiting.tickets == {waiting.plan.ticket}
    # no more is evicted for it
    assert hosted.manager.admit("b") == Waiting(None, waiting.tickets)
    assert hosted.end(waiting.plan).freed == 3
    admitted = hosted.manager.admit("b")
    assert isinstance(admitted, Admitted)
    assert sorted(admitted.table) == sorted(
        copy.block for copy in waiting.plan.copies
    )


@pytest.mark.parametrize("evict", [True, False])
def test_a_clean_refusal_changes_nothing(hosted: Engine, evict: bool) -> None:
    """Still not -> a clean refusal with nothing changed (no pins, no states, no recency
    touched).
    """
    hosted.leave("old", prompt(8))
    hosted.leave("host", prompt(4, 1))
    hosted.start("runs", prompt(16, 2))
    down = hosted.manager.demote(1)
    hosted.add("b", prompt(8) + prompt(17, 3))
    before = everything(hosted)
    answer = hosted.manager.admit("b", evict=evict)
    # its own path does not count as available
    assert answer == NoRoom(5, 2 if evict else 1)
    assert everything(hosted) == before
    assert hosted.manager.extend("runs", 99, evict=evict) == NoRoom(
        21, 4 if evict else 1
    )
    assert everything(hosted) == before
    hosted.end(down)
    hosted.manager.release("runs")
    assert hosted.admit("b").computed_tokens == 8


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
    """Extend: blocks for generated tokens, outside the tree until they are cached."""
    bare.start("a", prompt(4))
    same = bare.manager.extend("a", 4)
    assert isinstance(same, Extended)
    assert same.new == 0
    assert same.added == []
    answer = bare.manager.extend("a", 10)
    assert isinstance(answer, Extended)
    assert answer.new == 2
    assert answer.table == same.table + answer.added
    assert bare.stat("cached") == 1
    assert bare.stat("in_use") == 2


def test_extend_makes_room_as_admit_does(hosted: Engine) -> None:
    """Extend: not enough free blocks -> evict, with copies that take time; the request continues
    with what it has.
    """
    hosted.leave("old", prompt(28))
    hosted.start("a", prompt(4, 1))
    table = hosted.manager.table("a")
    assert isinstance(hosted.manager.extend("a", 12, evict=False), NoRoom)
    waiting = hosted.manager.extend("a", 12)
    assert isinstance(waiting, Waiting)
    assert waiting.plan is not None
    assert len(waiting.plan.copies) == 2
    assert hosted.manager.table("a") == table
    hosted.end(waiting.plan)
    answer = hosted.manager.extend("a", 12)
    assert isinstance(answer, Extended)
    assert answer.new == 2
    assert answer.table[:1] == table
    assert hosted.places(prompt(28)) == ["device"] * 5 + ["host"] * 2


@pytest.mark.parametrize(("keep", "hit"), [(True, 12), (False, 4)])
def test_output_blocks_enter_at_the_end_if_they_are_to_be_kept(
    bare: Engine, keep: bool, hit: int
) -> None:
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
    assert bare.stat("cached") == 2
    assert bare.stat("in_use") == 4
    bare.finish("b")
    # all blocks are separate: the tree has those of "a"
    assert bare.manager.free == 8 - 3
    bare.finish("a")
    assert bare.manager.free == 6
    assert bare.stat("evictable") == 2
    assert bare.start("c", prompt(9)).computed_tokens == 8


def test_a_twin_that_is_coming_is_not_waited_for(hosted: Engine) -> None:
    """A twin that is on its way: our blocks stay our own until it is there."""
    assert hosted.cache is not None
    hosted.add("a", prompt(9))
    hosted.admit("a")
    stored(hosted.cache, prompt(8))  # by another process, meanwhile
    hosted.add("b", prompt(9))
    up = hosted.admit("b").plan
    assert up is not None
    hosted.compute("a", 8)
    assert hosted.stat("in_use") == 4
    assert hosted.stat("in_flight") == 2
    assert hosted.stat("cached") == 0
    hosted.end(up)
    hosted.compute("a")
    assert hosted.stat("in_use") == 4
    assert hosted.stat("cached") == 2
    hosted.finish("a")
    assert hosted.manager.free == 5
    assert hosted.stat("evictable") == 0
    hosted.is_right("b", 8)


def test_a_twin_that_leaves_without_its_parent_is_none(hosted: Engine) -> None:
    """A twin is moved to the host and cannot be used: our block takes its place in the tree, its
    move continues.
    """
    assert hosted.cache is not None
    hosted.leave("a", prompt(8))
    stored(hosted.cache, prompt(4))
    # the first is on the host and is dropped at once; the second is copied
    down = hosted.manager.demote(2)
    assert down is not None
    assert len(down.copies) == 1
    assert hosted.places(prompt(8)) == ["host", "to_host"]
    admitted = hosted.start("b", prompt(9))
    assert admitted.by_tier == {"host": 4}
    assert hosted.stat("cancelled_moves") == 0
    assert hosted.places(prompt(8)) == ["device", "device"]
    assert hosted.end(down).freed == 1
    assert hosted.places(prompt(8)) == ["device", "device"]
    hosted.finish("b")
    assert hosted.manager.demote(2) is None  # the host has both by now
    assert retrieved(hosted.cache, prompt(8)) == (8, True)


def test_a_host_twin_adopts_our_device_block(hosted: Engine) -> None:
    """A host twin adopts our device block: it is found on the device, and its eviction to the host
    needs no copy.
    """
    assert hosted.cache is not None
    hosted.add("a", prompt(9))
    hosted.admit("a")
    stored(hosted.cache, prompt(8))  # by another process, meanwhile
    hosted.compute("a")
    assert hosted.places(prompt(8)) == ["device", "device"]
    hosted.finish("a")
    assert hosted.manager.demote(2) is None
    assert hosted.manager.free == 8
    assert hosted.places(prompt(8)) == ["host", "host"]
    assert hosted.stat("dropped_blocks") == 0


def test_release_unpins_the_path(bare: Engine) -> None:
    """Release: unpins the path; unpinned leaves become eviction candidates."""
    bare.leave("a", prompt(9))
    bare.add("b", prompt(9))
    bare.admit("b")
    assert bare.stat("evictable") == 0
    assert bare.manager.demote(8) is None
    assert bare.places(prompt(8)) == ["device"] * 2
    bare.manager.release("b")
    bare.manager.check()
    assert bare.stat("evictable") == 2
    bare.manager.demote(8)
    assert bare.places(prompt(8)) == ["freed"] * 2
    assert bare.manager.free == 8


def test_persistent_nodes_are_never_candidates(bare: Engine) -> None:
    """Persistent (pinned) nodes never do."""
    bare.leave("a", prompt(12))
    assert bare.manager.pin(prompt(8) + prompt(9, 1)) == 8
    bare.manager.check()
    assert bare.stat("pinned") == 1
    assert bare.stat("evictable") == 1
    bare.manager.demote(8)
    assert bare.places(prompt(12)) == ["device", "device", "freed"]
    bare.add("b", prompt(28, 2))
    assert bare.manager.admit("b") == NoRoom(7, 6)
    assert bare.manager.unpin(prompt(8)) == 8
    bare.manager.check()
    assert len(bare.admit("b").table) == 7
    with pytest.raises(ValueError, match="pinned"):
        bare.manager.unpin(prompt(8))


def test_what_is_pinned_on_its_way_to_host_stays(hosted: Engine) -> None:
    hosted.leave("a", prompt(12))
    down = hosted.manager.demote(2)
    assert hosted.places(prompt(12)) == ["device", "to_host", "to_host"]
    assert hosted.manager.pin(prompt(12)) == 12
    hosted.end(down)
    assert hosted.places(prompt(12)) == ["device"] * 3
    assert hosted.manager.unpin(prompt(12)) == 12


def test_what_is_coming_cannot_be_pinned_yet(hosted: Engine) -> None:
    """A pin is for what is on the device: a leaving block is called back, a coming one is not
    counted.
    """
    hosted.leave("a", prompt(12))
    hosted.demoted(1)
    down = hosted.manager.demote(1)
    hosted.add("b", prompt(13))
    up = hosted.admit("b").plan
    assert hosted.manager.pin(prompt(12)) == 8
    hosted.end(down)
    hosted.end(up)
    assert hosted.manager.pin(prompt(12)) == 12
    assert hosted.stat("pinned") == 2
    hosted.manager.release("b")
    hosted.manager.demote(8)
    assert hosted.places(prompt(12)) == ["device"] * 3
    # the longest first
    assert [hosted.manager.unpin(prompt(12)) for _ in range(2)] == [12, 8]
    hosted.manager.check()
    assert hosted.stat("evictable") == 3
