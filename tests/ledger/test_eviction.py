"""Space and eviction, one rule in each test: what is evicted first, what is never evicted, and a
member's limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from pagoda.base.metrics import Reason
from pagoda.ledger import Ledger, Present, Refused, Reserved, StoreSpec, admin
from pagoda.testing import FakeClock
from tests.children import child, wait
from tests.ledger.support import (
    SLOTS,
    TENANT,
    keys,
    matched,
    opened,
    places,
    present,
    put,
    put_alone,
    reserved,
    spec,
)

# eviction


def test_the_tail_of_a_prefix_goes_before_its_head(ledger: Ledger) -> None:
    chain = keys(*range(SLOTS))
    put(ledger, chain)
    put_alone(ledger, range(100, 110))
    assert present(ledger, chain) == [True] * (SLOTS - 10) + [False] * 10


def test_a_touched_run_too_loses_its_tail_first(
    ledger: Ledger, clock: FakeClock
) -> None:
    chain = keys(*range(8))
    put(ledger, chain)
    put_alone(ledger, range(100, 124))
    clock.advance(1)
    ledger.match_prefix(chain)
    put_alone(ledger, range(200, 224))  # all others are evicted
    assert present(ledger, chain) == [True] * 8
    put_alone(ledger, range(300, 302))
    survivors = present(ledger, chain)
    assert survivors == sorted(survivors, reverse=True)


def test_the_least_recently_matched_goes_first(
    ledger: Ledger, clock: FakeClock
) -> None:
    wanted = keys(*range(SLOTS))
    put(ledger, wanted, chained=False)
    clock.advance(1)
    for key in wanted[:4]:
        ledger.match_prefix([key])
    put(ledger, keys(100, 101, 102), chained=False)
    assert present(ledger, wanted) == [True] * 4 + [False] * 3 + [True] * (
        SLOTS - 7
    )


def test_a_chunk_whose_parent_is_gone_goes_first(
    ledger: Ledger, clock: FakeClock
) -> None:
    put_alone(ledger, range(SLOTS - 2))
    clock.advance(1)
    chain = keys(100, 101)
    put(ledger, chain)
    admin.remove(ledger, chain[:1])
    put(ledger, keys(200, 201), chained=False)
    assert present(ledger, chain) == [False] * 2
    assert all(present(ledger, keys(*range(SLOTS - 2))))


def test_orphans_that_are_too_young_to_go_do_not_hide_those_that_may(
    ledger: Ledger, clock: FakeClock
) -> None:
    old = keys(*range(20))
    put(ledger, old, chained=False)
    clock.advance(1)
    stamp = ledger.stamp()
    chain = keys(*range(100, 112))
    for start in range(0, len(chain), ledger.window):
        parent = chain[start - 1] if start else None
        window = chain[start : start + ledger.window]
        assert all(
            ledger.commit(
                reserved(
                    ledger.reserve(
                        window,
                        namespace=TENANT,
                        start=start,
                        parent=parent,
                        stamp=stamp,
                    )
                )
            )
        )
    admin.remove(ledger, chain[:1])
    # of the same request
    outcomes = ledger.reserve(
        keys(200, 201, 202), namespace=TENANT, start=20, stamp=stamp
    )
    assert len(reserved(outcomes)) == 3
    assert present(ledger, chain) == [False] + [True] * 11
    ledger.abort(reserved(outcomes))


def test_pinned_chunks_stay(ledger: Ledger) -> None:
    wanted = keys(*range(SLOTS))
    put(ledger, wanted, chained=False)
    assert admin.pin(ledger, wanted[:5], "ann") == 5
    put_alone(ledger, range(100, 100 + 2 * SLOTS))
    assert present(ledger, wanted[:6]) == [True] * 5 + [False]
    assert admin.unpin(ledger, None, "ann") == 5
    put_alone(ledger, range(300, 300 + SLOTS))
    assert not any(present(ledger, wanted))


def test_pins_take_a_quarter_of_the_slots_at_most(ledger: Ledger) -> None:
    wanted = keys(*range(SLOTS))
    put(ledger, wanted, chained=False)
    assert admin.pin(ledger, wanted[:20], "ann") == SLOTS // 4
    assert admin.pin(ledger, wanted[20:], "bob") == 0
    assert (
        sum(len(pinned) for pinned in admin.list_pins(ledger).values())
        == SLOTS // 4
    )


def test_held_chunks_stay_until_they_are_released(ledger: Ledger) -> None:
    wanted = keys(*range(SLOTS))
    kept = put(ledger, wanted, chained=False)[:5]
    assert ledger.hold(*places(kept)) == [True] * 5
    put_alone(ledger, range(100, 100 + 2 * SLOTS))
    assert present(ledger, wanted[:6]) == [True] * 5 + [False]
    assert ledger.still_valid(*places(kept)).all()
    ledger.release(*places(kept))
    put_alone(ledger, range(300, 300 + SLOTS))
    assert not any(present(ledger, wanted))


def test_leased_chunks_are_passed_by_until_the_lease_ends(
    ledger: Ledger, clock: FakeClock
) -> None:
    wanted = keys(*range(SLOTS))
    kept = put(ledger, wanted, chained=False)[:5]
    ledger.lease(*places(kept), 5.0)
    put_alone(ledger, range(100, 120))
    assert present(ledger, wanted[:6]) == [True] * 5 + [False]
    clock.advance(6)
    put_alone(ledger, range(200, 200 + SLOTS))
    assert not any(present(ledger, wanted))


def test_a_lease_counts_even_if_its_chunk_was_about_to_go(ledger: Ledger) -> None:
    wanted = keys(*range(SLOTS))
    stored = put(ledger, wanted, chained=False)
    # now the policy knows which chunk is next
    put(ledger, keys(100), chained=False)
    ledger.lease(*places(stored[1:3]), 5.0)
    put(ledger, keys(101, 102), chained=False)
    assert present(ledger, wanted[:5]) == [False, True, True, False, False]


def test_leases_far_from_the_front_are_passed_by_in_a_large_store_too(
    shm_root: Path, clock: FakeClock
) -> None:
    ledger = Ledger.open(spec(shm_root, 1024), clock=clock)
    wanted = keys(*range(1024))
    stored = put(ledger, wanted, chained=False)
    ledger.lease(*places(stored[:400]), 5.0)  # the 400 oldest
    put_alone(ledger, range(2000, 2100))
    assert present(ledger, wanted) == [True] * 400 + [False] * 100 + [True] * 524
    ledger.close()


@pytest.mark.slow
def test_pins_and_holds_at_the_front_do_not_hide_what_may_go(
    shm_root: Path, clock: FakeClock
) -> None:
    ledger = Ledger.open(spec(shm_root, 1024), clock=clock)
    wanted = keys(*range(1024))
    stored = put(ledger, wanted, chained=False)
    assert admin.pin(ledger, wanted[:200], "ann") == 200
    assert all(ledger.hold(*places(stored[200:600])))
    assert len(put_alone(ledger, range(2000, 2100))) == 100
    assert present(ledger, wanted) == [True] * 600 + [False] * 100 + [True] * 324
    ledger.close()


def test_leases_give_way_when_only_they_stand_in_the_way_soonest_ending_first(
    ledger: Ledger,
) -> None:
    wanted = keys(*range(SLOTS))
    stored = put(ledger, wanted, chained=False)
    assert all(ledger.hold(*places(stored[SLOTS // 2 :])))
    ledger.lease(*places(stored[1 : SLOTS // 2]), 30.0)
    ledger.lease(*places(stored[:1]), 10.0)
    assert len(put(ledger, keys(100), chained=False)) == 1
    assert present(ledger, wanted) == [False] + [True] * (SLOTS - 1)
    ledger.release(*places(stored[SLOTS // 2 :]))


def test_what_the_same_call_asked_for_is_not_its_victim(
    ledger: Ledger, clock: FakeClock
) -> None:
    old = keys(0, 1)
    kept = keys(*range(10, 10 + SLOTS - 2))
    put(ledger, old)
    stored = put(ledger, kept, chained=False)
    assert all(ledger.hold(*places(stored)))
    clock.advance(1)
    outcomes = ledger.reserve([*old, *keys(100, 101)], namespace=TENANT)
    assert [type(one) for one in outcomes] == [Present, Present, Refused, Refused]
    assert all(present(ledger, old))
    ledger.release(*places(stored))


# space


def test_leading_keys_are_served_first(ledger: Ledger, clock: FakeClock) -> None:
    stored = put_alone(ledger, range(SLOTS))
    assert all(ledger.hold(*places(stored[2:])))
    clock.advance(1)
    outcomes = ledger.reserve(keys(100, 101, 102, 103), namespace=TENANT)
    assert [type(one) for one in outcomes] == [
        Reserved,
        Reserved,
        Refused,
        Refused,
    ]
    for one in outcomes:
        if isinstance(one, Refused):
            assert one.reason is Reason.FULL
    ledger.abort(reserved(outcomes))
    ledger.release(*places(stored))


def test_a_member_reserves_a_quarter_of_the_slots_at_most(ledger: Ledger) -> None:
    rooms: list[Reserved] = []
    for start in range(0, 20, ledger.window):
        rooms += reserved(
            ledger.reserve(
                keys(*range(start, start + ledger.window)), namespace=TENANT
            )
        )
    assert len(rooms) == SLOTS // 4 == admin.gauges(ledger)["reserved"]
    ledger.abort(rooms)
    assert admin.gauges(ledger)["reserved"] == 0


def test_a_run_larger_than_the_window_is_never_served_whole(
    ledger: Ledger,
) -> None:
    assert ledger.window == SLOTS // 8
    wanted = keys(*range(ledger.window + 1))
    try:
        outcomes = ledger.reserve(wanted, namespace=TENANT)
    except ValueError:
        return
    assert [type(one) for one in outcomes] == [Reserved] * ledger.window + [
        Refused
    ]
    ledger.abort(reserved(outcomes))


def test_a_prompt_larger_than_the_store_keeps_its_head(
    ledger: Ledger, clock: FakeClock
) -> None:
    prompt = keys(*range(SLOTS * 12 // 10))
    for _ in range(2):
        stamp = ledger.stamp()
        for start in range(0, len(prompt), ledger.window):
            parent = prompt[start - 1] if start else None
            outcomes = ledger.reserve(
                prompt[start : start + ledger.window],
                namespace=TENANT,
                start=start,
                parent=parent,
                stamp=stamp,
            )
            ledger.commit(reserved(outcomes))
        assert matched(ledger, prompt) >= SLOTS - ledger.window
        clock.advance(1)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_every_mapped_file_has_all_its_blocks_before_it_is_used(
    tmp_path: Path, kind: Literal["memory", "file"]
) -> None:
    ledger = Ledger.open(
        StoreSpec(
            root=tmp_path, name="rules", kind=kind, slots=64, slot_bytes=8192
        )
    )
    for path in ledger.directory.iterdir():
        status = path.stat()
        assert status.st_blocks * 512 >= status.st_size, (
            f"{path.name} has holes: a full disk would end in a signal"
        )
    ledger.close()


def test_more_victims_are_chosen_after_others_took_them(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(shm_root)
    put_alone(ledger, range(SLOTS))
    asked: list[int] = []
    choose = ledger._victims

    def take_the_same() -> None:
        monkeypatch.undo()
        put(ledger, keys(1000, 1001, 1002, 1003))

    def slowly(count: int, stamp: int, until: float) -> list[tuple[int, int]]:
        asked.append(count)
        chosen = choose(count, stamp, until)
        if len(asked) == 1:
            wait(child(take_the_same))
        return chosen

    monkeypatch.setattr(ledger, "_victims", slowly)
    assert len(put(ledger, keys(2000, 2001, 2002, 2003))) == 4
    assert asked == [4, 12]
    assert len(put(ledger, keys(3000, 3001, 3002, 3003))) == 4
    assert asked == [4, 12, 8], "fewer again, since nobody took any"
    ledger.close()
