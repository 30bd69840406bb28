"""Several ranks copy one plan: the minimum of their lengths counts, nothing settles early, and no
wait is in vain.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from pagoda.blocks import BlockManager, Plan, Settled
from pagoda.ledger import admin
from tests.blocks.kit import BLOCK, Engine, cache_at, ledger_of, prompt, retrieved

UNKNOWN = Settled(known=False, ended=False)
YET = Settled(ended=False)


@pytest.fixture
def four(shm_root: Path) -> Iterator[Engine]:
    """Four ranks over one host tier."""
    with cache_at(shm_root) as cache:
        yield Engine(16, cache, ranks=4, write_back=False)


def going_down(engine: Engine, tokens: list[int]) -> Plan:
    """The plan of a prompt that leaves the device, its copies done on all ranks."""
    engine.leave(f"down {engine.stat('requests')}", tokens)
    plan = engine.manager.demote(len(tokens) // BLOCK)
    assert plan is not None
    engine.copy(plan)
    return plan


def coming_up(engine: Engine, name: str, tokens: list[int]) -> Plan:
    """Return the plan of a request whose prompt was stored before, with its copies done on all
    ranks.
    """
    engine.add(name, [*tokens, 1])
    plan = engine.admit(name).plan
    assert plan is not None
    engine.copy(plan)
    return plan


@pytest.mark.parametrize("order", list(permutations(range(4)))[::5])
def test_a_write_is_done_when_all_ranks_have_said_so(
    four: Engine, order: tuple[int, ...]
) -> None:
    plan = going_down(four, prompt(12))
    for rank in order[:-1]:
        assert four.manager.completed(plan.ticket, rank=rank) == YET
        assert four.places(prompt(12)) == ["to_host"] * 3
        assert four.manager.free == 13
        four.manager.check()
    assert four.manager.completed(plan.ticket, rank=order[-1]) == Settled(freed=3)
    assert four.places(prompt(12)) == ["host"] * 3
    assert four.cache is not None
    assert retrieved(four.cache, prompt(12)) == (12, True)


@pytest.mark.parametrize(
    "good", [(3, 3, 2, 3), (2, 3, 3, 3), (0, 3, 3, 3), (1, 0, 2, 3), (3, 3, 3, 3)]
)
def test_lengths_agree_by_minimum(four: Engine, good: tuple[int, ...]) -> None:
    plan = going_down(four, prompt(12))
    for rank, blocks in enumerate(good):
        four.manager.completed(plan.ticket, rank=rank, blocks=blocks)
    least = min(good)
    assert four.places(prompt(12)) == ["host"] * least + ["freed"] * (3 - least)
    assert four.manager.free == 16
    four.leave("again", prompt(12))
    four.demoted(3)
    plan = coming_up(four, "b", prompt(12))
    for rank, blocks in enumerate(good):
        settled = four.manager.completed(plan.ticket, rank=rank, blocks=blocks)
    four.manager.check()
    assert settled.ready == ("b",)
    assert settled.shortened == ({} if least == 3 else {"b": least * BLOCK})
    four.compute("b")
    four.is_right("b")


def test_a_rank_that_reports_twice_or_late_changes_nothing(four: Engine) -> None:
    plan = going_down(four, prompt(12))
    assert four.manager.completed(plan.ticket, rank=2) == YET
    for _ in range(5):  # nor does it count for the others
        assert four.manager.completed(plan.ticket, rank=2, blocks=0) == UNKNOWN
    for rank in (0, 1):
        assert four.manager.completed(plan.ticket, rank=rank) == YET
    assert four.manager.completed(plan.ticket, rank=3).ended
    before = four.manager.stats()
    for rank in range(4):
        assert four.manager.failed(plan.ticket, rank=rank) == UNKNOWN
        assert four.manager.completed(plan.ticket, rank=rank) == UNKNOWN
    assert four.manager.stats() == before
    assert four.places(prompt(12)) == ["host"] * 3


def test_tickets_end_in_any_order_on_each_rank(four: Engine) -> None:
    plans = [going_down(four, prompt(8, n)) for n in range(4)]
    for rank in range(4):
        for plan in plans[rank:] + plans[:rank]:
            four.manager.completed(plan.ticket, rank=rank)
            four.manager.check()
    assert four.manager.in_flight == 0
    assert four.manager.free == 16
    for n in range(4):
        assert four.places(prompt(8, n)) == ["host"] * 2


def test_what_builds_upon_a_move_waits_for_it(hosted: Engine) -> None:
    hosted.leave("a", prompt(16))
    hosted.demoted(4)
    hosted.add("short", prompt(9))
    first = hosted.admit("short")
    hosted.add("long", prompt(17))
    second = hosted.admit("long")
    assert first.plan is not None
    assert second.plan is not None
    assert second.waits == {first.plan.ticket, second.plan.ticket}
    assert second.computed_tokens == 16
    # its copies have ended, but nothing is known of its head
    assert hosted.end(second.plan) == YET
    assert hosted.manager.in_flight == 2
    settled = hosted.end(first.plan)
    assert sorted(settled.ready) == ["long", "short"]
    assert hosted.manager.in_flight == 0
    hosted.is_right("long", 16)


def test_what_builds_upon_a_move_may_itself_come_in_part(hosted: Engine) -> None:
    hosted.leave("a", prompt(16))
    hosted.demoted(4)
    for name, tokens in (("short", 9), ("long", 17), ("twin", 17)):
        hosted.add(name, prompt(tokens))
    first, second, third = (
        hosted.admit(name) for name in ("short", "long", "twin")
    )
    assert first.plan is not None
    assert second.plan is not None
    assert third.plan is None
    assert hosted.end(second.plan, blocks=1) == YET
    settled = hosted.end(first.plan)
    assert sorted(settled.ready) == ["long", "short"]
    assert settled.shortened == {"long": 12}
    assert settled.again == ("twin",)
    assert hosted.manager.table("twin") == []
    hosted.is_right("long", 12)


def test_what_builds_upon_a_move_that_failed_waits_to_be_admitted_again(
    hosted: Engine,
) -> None:
    hosted.leave("a", prompt(16))
    hosted.demoted(4)
    hosted.add("short", prompt(9))
    first = hosted.admit("short").plan
    hosted.add("long", prompt(17))
    second = hosted.admit("long").plan
    assert first is not None
    assert second is not None
    hosted.end(second)
    settled = hosted.end(first, blocks=1)
    assert settled.again == ("long",)
    assert settled.shortened == {"short": 4}
    assert hosted.manager.in_flight == 0
    assert hosted.manager.table("long") == []
    hosted.compute("short")
    assert hosted.resume("long").computed_tokens == 16


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_a_rank_that_dies_fails_what_waits_for_it(
    four: Engine, when: str
) -> None:
    """Whether the others report before, after or never: nothing hangs, and nothing half written is
    found.
    """
    going = going_down(four, prompt(8, 1))
    for rank in range(4):
        four.manager.completed(going.ticket, rank=rank)
    down = going_down(four, prompt(12))
    up = coming_up(four, "b", prompt(8, 1))
    others = [(plan, rank) for plan in (down, up) for rank in (0, 1, 3)]
    if when == "before":
        for plan, rank in others:
            assert four.manager.completed(plan.ticket, rank=rank) == YET
    settled = four.manager.lost(2)
    four.manager.check()
    if when == "before":
        assert [one.ended for one in settled] == [True, True]
    else:
        assert [one.ended for one in settled] == [False, False]
    if when == "never":
        for rank in (0, 1, 3):
            settled = four.manager.lost(rank)
    if when == "after":
        settled = [
            four.manager.completed(plan.ticket, rank=rank)
            for plan, rank in others
        ]
        settled = [one for one in settled if one.ended]
    assert len(settled) == 2
    assert four.manager.in_flight == 0
    assert {**settled[0].shortened, **settled[1].shortened} == {"b": 0}
    four.manager.check()
    assert four.places(prompt(12)) == ["freed"] * 3
    assert four.manager.completed(down.ticket, rank=2) == UNKNOWN
    four.compute("b")
    four.finish("b")


def test_no_new_moves_without_all_ranks(four: Engine) -> None:
    going_plan = going_down(four, prompt(8))
    for rank in range(4):
        four.manager.completed(going_plan.ticket, rank=rank)
    four.leave("c", prompt(8, 1))
    assert four.manager.lost(0) == []
    assert four.manager.paused
    assert four.manager.demote(2) is None
    assert four.manager.free == 16
    four.add("b", prompt(9))
    assert four.admit("b").plan is None  # it continues, and computes
    four.compute("b")
    assert four.manager.finish("b") is None


def test_a_report_before_the_death_counts(four: Engine) -> None:
    plan = going_down(four, prompt(8))
    assert four.manager.completed(plan.ticket, rank=1) == YET
    assert four.manager.lost(1) == []
    for rank in (0, 2):
        assert four.manager.completed(plan.ticket, rank=rank) == YET
    assert four.manager.completed(plan.ticket, rank=3).freed == 2
    assert four.places(prompt(8)) == ["host"] * 2  # all four shares were written


def test_ranks_are_numbered_from_zero() -> None:
    manager = BlockManager(4, BLOCK, ranks=2)
    for wrong in (-1, 2, 99):
        for call in (manager.completed, manager.failed):
            with pytest.raises(ValueError, match="not one of the 2 ranks"):
                call(1, rank=wrong)
    assert manager.completed(1, rank=1) == UNKNOWN


def test_holds_and_reservations_end_with_the_last_rank(four: Engine) -> None:
    plan = going_down(four, prompt(8))
    assert four.cache is not None
    assert admin.gauges(ledger_of(four.cache))["reserved"] == 2
    for rank in range(4):
        assert admin.gauges(ledger_of(four.cache))["reserved"] == 2
        four.manager.completed(plan.ticket, rank=rank, blocks=0)
    assert admin.gauges(ledger_of(four.cache))["reserved"] == 0
