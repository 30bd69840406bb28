"""Reserve, commit, abort and adopt: parts, refusals, quota, window, busy, superseded, and the
choice of victims.
"""

from __future__ import annotations

import os
import pickle
from functools import partial
from pathlib import Path

import pytest

from pagoda.base.metrics import Reason
from pagoda.ledger import (
    Busy,
    CommitResult,
    Ledger,
    Present,
    Refused,
    Reserved,
    admin,
    allocation,
)
from pagoda.ledger.columns import NOT_READY
from pagoda.ledger.transaction import Transaction
from pagoda.testing import FakeClock
from tests.children import child, in_child, wait
from tests.ledger.support import (
    OTHER,
    TENANT,
    Other,
    gauge,
    keys,
    matched,
    opened,
    places,
    present,
    put,
    put_alone,
    reserved,
    rooms_for,
)

# admission


@pytest.mark.parametrize("wrong", [b"", b"short", bytes(33)])
def test_a_key_of_another_length_is_refused_before_anything_is_changed(
    ledger: Ledger, wrong: bytes
) -> None:
    with pytest.raises(ValueError, match="32"):
        ledger.reserve([*keys(1), wrong], namespace=TENANT)
    assert not gauge(ledger, "reserved")


def test_a_chunk_has_a_part(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="part"):
        ledger.reserve(keys(1), namespace=TENANT, parts=0)


def test_nothing_asked_nothing_answered(ledger: Ledger) -> None:
    assert ledger.reserve([], namespace=TENANT) == []
    assert ledger.commit([]) == []
    assert ledger.adopt([], 0) == []
    ledger.abort([])
    assert ledger.match_prefix([]).reason is None


def test_each_key_gets_its_own_answer(ledger: Ledger) -> None:
    [stored] = put(ledger, keys(1))
    ledger.reserve(keys(2), namespace=TENANT)
    present, busy, new = ledger.reserve(keys(1, 2, 3), namespace=TENANT)
    assert present == Present(*stored)
    assert busy == Busy(keys(2)[0], ledger.session.member)
    assert isinstance(new, Reserved)


def test_one_key_twice_in_a_call_is_busy_with_itself(ledger: Ledger) -> None:
    one, two = ledger.reserve(keys(1, 1), namespace=TENANT)
    assert isinstance(one, Reserved)
    assert two == Busy(keys(1)[0], ledger.session.member)
    assert ledger.commit([one]) == [True]


def test_no_two_reservations_have_a_generation_or_a_slot_in_common(
    ledger: Ledger,
) -> None:
    seen: set[int] = set()
    for turn in range(20):
        rooms = rooms_for(ledger, keys(*range(turn * 4, turn * 4 + 4)))
        assert len({room.slot for room in rooms}) == 4
        assert not seen & {room.generation for room in rooms}
        seen |= {room.generation for room in rooms}
        ledger.commit(rooms) if turn % 2 else ledger.abort(rooms)


def test_a_reservation_may_be_sent_to_another_process(ledger: Ledger) -> None:
    [room] = rooms_for(ledger, keys(1))
    sent = pickle.dumps(room)

    def work() -> None:
        again = pickle.loads(sent)
        assert ledger.adopt([again], 0) == [True]
        assert ledger.commit([again]) == [True]

    in_child(work)
    assert ledger.commit([room]) == [False]
    assert present(ledger, keys(1)) == [True]


# bounds


def test_the_window_and_the_quota(ledger: Ledger) -> None:
    first = ledger.reserve(keys(*range(10)), namespace=TENANT)
    assert [type(one) for one in first] == [Reserved] * ledger.window + [
        Refused
    ] * (10 - ledger.window)
    second = ledger.reserve(keys(*range(100, 104)), namespace=TENANT)
    third = ledger.reserve(keys(200), namespace=TENANT)
    for one in second:
        assert isinstance(one, Reserved)
    assert third == [Refused(keys(200)[0], Reason.FULL)]
    ledger.abort(reserved(first)[:1])
    assert isinstance(ledger.reserve(keys(200), namespace=TENANT)[0], Reserved)
    assert admin.counters(ledger)["drop_full"] == 10 - ledger.window + 1


def test_the_quota_is_a_members_own(ledger: Ledger) -> None:
    for start in (0, 4):
        ledger.reserve(keys(*range(start, start + 4)), namespace=TENANT)

    def work() -> None:
        for start in (100, 104):
            assert len(rooms_for(ledger, keys(*range(start, start + 4)))) == 4
        assert not rooms_for(ledger, keys(200))
        assert len(rooms_for(ledger, keys(0))) == 0, "Busy"

    in_child(work)


def test_a_part_that_another_committed_frees_the_quota_of_who_reserved(
    ledger: Ledger,
) -> None:
    rooms = rooms_for(ledger, keys(*range(4)))
    in_child(
        lambda: _must(all(ledger.adopt(rooms, 0)) and all(ledger.commit(rooms)))
    )
    assert len(rooms_for(ledger, keys(*range(10, 14)))) == 4
    assert len(rooms_for(ledger, keys(*range(20, 24)))) == 4


# busy and superseded


def test_a_key_is_busy_for_a_while_and_then_whoever_commits_last_loses(
    ledger: Ledger, clock: FakeClock
) -> None:
    slow = rooms_for(ledger, keys(1))
    clock.advance(9.9)
    assert isinstance(ledger.reserve(keys(1), namespace=TENANT)[0], Busy)
    clock.advance(0.2)
    quick = rooms_for(ledger, keys(1))
    assert quick[0].slot != slot_of(slow)
    assert ledger.commit(quick) == [True]
    assert ledger.commit(slow) == [False]
    assert gauge(ledger, "ready") == 1
    assert gauge(ledger, "reserved") == 0


def test_the_superseded_one_loses_also_if_it_is_quicker(
    ledger: Ledger, clock: FakeClock
) -> None:
    slow = rooms_for(ledger, keys(1))
    clock.advance(11)
    quick = rooms_for(ledger, keys(1))
    assert ledger.commit(slow) == [False]
    assert ledger.commit(quick) == [True]


def test_a_dead_writer_keeps_nobody_from_reserving_its_key(
    ledger: Ledger,
) -> None:
    in_child(lambda: (ledger.reserve(keys(1), namespace=TENANT), None)[1])
    [room] = rooms_for(ledger, keys(1))
    assert ledger.commit([room]) == [True]


# parts


def test_a_wrong_part_is_an_error_and_another_members_part_is_not_mine(
    ledger: Ledger,
) -> None:
    rooms = rooms_for(ledger, keys(1), parts=2)
    for part in (-1, 2):
        with pytest.raises(ValueError, match="part"):
            ledger.commit(rooms, part)
        assert ledger.adopt(rooms, part) == [False]
    in_child(lambda: _must(ledger.commit(rooms, 0) == [False]))
    assert ledger.commit(rooms, 0) == [CommitResult.PART]
    assert ledger.commit(rooms, 0) == [False]
    assert ledger.adopt(rooms, 0) == [False], "it was stored"
    assert ledger.commit(rooms, 1) == [CommitResult.WHOLE]


def test_a_reservation_under_another_key_is_not_committed(ledger: Ledger) -> None:
    [room] = rooms_for(ledger, keys(1))
    assert ledger.commit([room._replace(key=keys(2)[0])]) == [False]
    assert ledger.commit([room]) == [True]
    assert present(ledger, keys(1, 2)) == [True, False]


def test_an_abort_waits_for_the_parts_of_the_living(ledger: Ledger) -> None:
    """Bytes are still being copied: no other chunk gets the slot before the copies have ended."""
    [room] = rooms_for(ledger, keys(1), parts=2)

    def adopt() -> None:
        assert ledger.adopt([room], 1) == [True]

    with Other(adopt):
        ledger.abort([room])
        assert gauge(ledger, "reserved") == 1
        assert admin.reap(ledger) == 0
        [again] = rooms_for(ledger, keys(1))
        assert again.slot != room.slot, (
            "the key is free at once, but the slot is not"
        )
        assert ledger.commit([again]) == [True]
        assert ledger.commit([room], 0) == [False]
    assert admin.reap(ledger) == 1
    assert gauge(ledger, "reserved") == 0
    assert ledger.match_prefix(keys(1)).slots.tolist() == [again.slot]


def test_the_last_part_of_what_was_aborted_frees_the_slot_and_is_not_stored(
    ledger: Ledger,
) -> None:
    [room] = rooms_for(ledger, keys(1), parts=3)
    assert ledger.commit([room], 0) == [CommitResult.PART]
    receive, send = os.pipe()

    def finish() -> None:
        os.read(receive, 1)
        assert ledger.commit([room], 2) == [False]
        assert not gauge(ledger, "reserved")

    def adopt_then_finish() -> None:
        assert ledger.adopt([room], 2) == [True]
        os.write(adopted_send, b"x")
        finish()

    adopted_receive, adopted_send = os.pipe()
    pid = child(adopt_then_finish)
    os.read(adopted_receive, 1)
    ledger.abort([room])
    assert gauge(ledger, "reserved") == 1
    os.write(send, b"x")
    assert wait(pid) == 0
    assert gauge(ledger, "reserved") == 0
    assert present(ledger, keys(1)) == [False]


def test_a_stranger_aborts_nothing(ledger: Ledger) -> None:
    rooms = rooms_for(ledger, keys(1))
    in_child(lambda: ledger.abort(rooms))
    assert ledger.commit(rooms) == [True]


def test_no_part_of_what_was_cleared_is_said_to_be_in(ledger: Ledger) -> None:
    rooms = rooms_for(ledger, keys(1), parts=2)
    admin.clear(ledger, TENANT)
    assert ledger.commit(rooms, 0) == [False]
    assert ledger.commit(rooms, 1) == [False]
    assert not gauge(ledger, "reserved")


# victims


def long_store(root: Path, clock: FakeClock) -> tuple[Ledger, list[bytes]]:
    """Return a full store of 1024 slots whose oldest 64 chunks are the head of a chain of 128
    keys.
    """
    ledger = opened(root, 1024, clock)
    chain = keys(*range(128))
    put(ledger, chain[:64])
    clock.advance(1)
    put_alone(ledger, range(1000, 1960))
    clock.advance(1)
    return ledger, chain


def test_what_one_call_found_is_not_evicted_by_its_own_later_batches(
    shm_root: Path, clock: FakeClock
) -> None:
    ledger, chain = long_store(shm_root, clock)
    outcomes = ledger.reserve(chain, namespace=TENANT)
    assert [type(one) for one in outcomes] == [Present] * 64 + [Reserved] * 64
    assert ledger.still_valid(*places(outcomes[:64])).all()  # type: ignore[arg-type]
    assert ledger.commit(reserved(outcomes)) == [True] * 64
    assert matched(ledger, chain) == 128
    ledger.close()


def test_what_one_call_will_find_is_not_evicted_by_its_own_earlier_batches(
    shm_root: Path, clock: FakeClock
) -> None:
    ledger, chain = long_store(shm_root, clock)
    longer = [*keys(*range(5000, 5064)), *chain[:64]]
    outcomes = ledger.reserve(longer, namespace=TENANT)
    assert [type(one) for one in outcomes] == [Reserved] * 64 + [Present] * 64
    ledger.abort(reserved(outcomes))
    ledger.close()


def test_what_a_store_has_looked_for_is_not_looked_for_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it found behind a chunk that is absent is not evicted either."""
    put_alone(ledger, range(ledger.slots))
    wanted = keys(101, 0, 102)  # 0 is the coldest
    have = ledger.match_prefix(wanted, asked=False, ahead=ledger.window)
    assert not len(have.slots)
    assert have.following is not None
    assert [one is not None for one in have.following] == [False, True, False]
    reads = []
    read = ledger.session.read
    monkeypatch.setattr(
        ledger.session,
        "read",
        lambda *how: reads.append(how) or read(*how),
    )
    outcomes = ledger.reserve(wanted, namespace=TENANT, found=have.following)
    assert [type(one) for one in outcomes] == [Reserved, Present, Reserved]
    assert not reads


def test_with_room_for_all_a_store_looks_for_nothing_ahead(
    ledger: Ledger,
) -> None:
    put(ledger, keys(1))
    have = ledger.match_prefix(keys(1, 2), asked=False, ahead=ledger.window)
    assert len(have.slots) == 1
    assert have.following is None


def test_what_a_call_found_is_not_evicted_by_its_second_attempt(
    ledger: Ledger, clock: FakeClock
) -> None:
    old = put(ledger, keys(1, 2))
    pinned = put_alone(ledger, range(100, 104))
    admin.pin(ledger, [one.key for one in pinned], "ann")
    clock.advance(1)
    put_alone(ledger, range(200, 226))
    clock.advance(1)
    for room in old:
        ledger.columns.last_use[room.slot] += 1
    outcomes = ledger.reserve(keys(1, 2, 3, 4), namespace=TENANT)
    assert [type(one) for one in outcomes] == [
        Present,
        Present,
        Reserved,
        Reserved,
    ]
    assert ledger.still_valid(*places(old)).all()
    ledger.abort(reserved(outcomes))


def test_a_chain_whose_head_is_stored_anew_is_no_orphan(
    ledger: Ledger, clock: FakeClock
) -> None:
    chain = keys(*range(4))
    put(ledger, chain)
    put_alone(ledger, range(100, 128))
    admin.remove(ledger, chain[:1])
    clock.advance(1)
    outcomes = ledger.reserve(chain, namespace=TENANT)
    assert [type(one) for one in outcomes] == [
        Reserved,
        Present,
        Present,
        Present,
    ]
    assert ledger.commit(reserved(outcomes)) == [True]
    assert admin.check(ledger).unreachable == 0
    clock.advance(2)
    put_alone(ledger, range(200, 228))
    assert all(present(ledger, chain))


def test_a_chunk_behind_a_chunk_whose_parent_is_gone_goes_first_too(
    ledger: Ledger, clock: FakeClock
) -> None:
    put_alone(ledger, range(100, 128))
    clock.advance(1)
    chain = keys(*range(4))
    put(ledger, chain)
    admin.remove(ledger, chain[:1])
    put(ledger, keys(300, 301, 302, 303), chained=False)
    assert present(ledger, chain) == [False] * 4
    assert all(present(ledger, keys(*range(100, 128))))


def test_tenants_share_the_room(ledger: Ledger, clock: FakeClock) -> None:
    put_alone(ledger, range(32))
    clock.advance(1)
    put(ledger, keys(*range(100, 116)), OTHER, chained=False)
    assert present(ledger, keys(*range(32))) == [False] * 16 + [True] * 16
    counts = {
        root: row.chunks for root, row in admin.list_namespaces(ledger).items()
    }
    assert counts == {TENANT: 16, OTHER: 16}


def slot_of(rooms: list[Reserved]) -> int:
    return rooms[0].slot


def _must(holds: bool) -> None:
    assert holds


def test_a_victim_that_another_has_evicted_and_filled_since_is_left_alone(
    ledger: Ledger, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = put_alone(ledger, range(100, 100 + ledger.slots))
    clock.advance(1)
    name_victims = ledger._victims
    named = list[tuple[int, int]]()

    def overtaken(count: int, stamp: int, until: float) -> list[tuple[int, int]]:
        named.extend(name_victims(count, stamp, until))
        monkeypatch.undo()
        in_child(lambda: put(ledger, keys(777)) and None)
        return named

    monkeypatch.setattr(ledger, "_victims", overtaken)
    [room] = rooms_for(ledger, keys(888))
    assert present(ledger, keys(777)) == [True], (
        "a new chunk was evicted instead of an old one"
    )
    assert room.slot not in [slot for slot, _ in named]
    assert sum(present(ledger, [one.key for one in old])) == ledger.slots - 2
    ledger.abort([room])


def test_a_chunk_that_a_call_finds_is_no_victim_of_the_same_call(
    ledger: Ledger,
) -> None:
    stored = put_alone(ledger, range(100, 100 + ledger.slots))
    found, other = stored[:2]
    request = allocation.ReserveRequest(
        [found.key, *keys(888)], ledger.stamp(), namespace=TENANT
    )
    reserve = partial(
        allocation.reserve,
        batches=[(request, range(2))],
        victims=[one[1:] for one in (found, other)],
    )
    [made] = ledger.session.write(reserve)
    assert made.outcomes[0] == Present(*found)
    assert made.passed_over == [found.slot]
    assert [room.slot for room in reserved(made.outcomes[1:])] == [other.slot]
    ledger.abort(made.outcomes)


def test_a_slot_that_is_filled_anew_by_who_stored_its_chunk_has_none_to_evict(
    ledger: Ledger,
) -> None:
    """A late commit may be done by the transaction of a reserve."""
    put_alone(ledger, range(100, 99 + ledger.slots))
    [late] = rooms_for(ledger, keys(888))
    request = allocation.ReserveRequest(
        keys(999), ledger.stamp(), namespace=TENANT
    )

    def both(transaction: Transaction) -> list[allocation.BatchResult]:
        assert allocation.commit(transaction, [late], 0) == [CommitResult.WHOLE]
        return allocation.reserve(transaction, [(request, range(1))], [late[1:]])

    [made] = ledger.session.write(both)
    [room] = reserved(made.outcomes)
    assert room.slot == late.slot
    assert ledger.columns.last_use[room.slot] == NOT_READY
    ledger.abort([room])


def test_what_is_not_admitted_takes_no_slot(ledger: Ledger) -> None:
    request = allocation.ReserveRequest(
        keys(1, 2, 3), ledger.stamp(), namespace=TENANT, end=1
    )
    reserve = partial(
        allocation.reserve, batches=[(request, range(3))], victims=[]
    )
    [made] = ledger.session.write(reserve)
    assert made.outcomes[1:] == [
        Refused(key, Reason.NOT_ADMITTED) for key in keys(2, 3)
    ]
    admin.check(ledger)
    ledger.abort(made.outcomes)
