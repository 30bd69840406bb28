"""One rule of the ledger in each test, as small as possible: no interleaving, policy or death may
break it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda.base.clock import Clock
from pagoda.base.errors import StoreError
from pagoda.base.metrics import Reason
from pagoda.ledger import (
    Busy,
    CommitResult,
    Ledger,
    Refused,
    Reserved,
    StoreSpec,
    admin,
)
from pagoda.ledger.clear_log import ClearLog
from pagoda.testing import FakeClock
from testbed.patience import Patience
from tests.children import in_child
from tests.ledger.support import (
    OTHER,
    SLOTS,
    TENANT,
    Other,
    gate_taken,
    gauge,
    keys,
    matched,
    must,
    opened,
    places,
    present,
    put,
    put_alone,
    rooms_for,
    spec,
)


class Interrupting(Clock):
    """The machine's clock; its next reading first runs a call, as if another process had been
    faster.
    """

    def __init__(self) -> None:
        self.first: Callable[[], None] | None = None

    def monotonic_ns(self) -> int:
        """Run the call if there is one, then return the time."""
        if (first := self.first) is not None:
            self.first = None
            first()
        return super().monotonic_ns()


# validity


def test_a_chunk_that_another_process_replaced_during_the_match_is_not_valid(
    shm_root: Path,
) -> None:
    clock = Interrupting()
    ledger = Ledger.open(spec(shm_root, 8), clock=clock)
    [old], [new] = keys(1), keys(2)

    def replace() -> None:
        in_child(child)

    def child() -> None:
        assert admin.remove(ledger, [old]) == 1
        for _ in range(8):
            [room] = rooms_for(ledger, [new])
            assert ledger.commit([room]) == [True]
            if room.slot == slot:
                return
            admin.pin(ledger, [new], "keep")
        raise AssertionError("the slot was not used again")

    seen = 0
    for touch in (True, False):
        [stored] = put(ledger, [old])
        slot = stored.slot
        clock.first = replace
        match = ledger.match_prefix([old], touch=touch)
        replaced = clock.first is None
        clock.first = None
        seen += replaced
        if replaced and len(match.slots):
            assert not ledger.still_valid(match.slots, match.generations).any()
        admin.clear(ledger)
    assert seen, "match never read the clock: this test proves nothing"
    ledger.close()


@pytest.mark.parametrize("how", ["remove", "clear", "drop", "evict"])
def test_a_chunk_that_is_gone_is_no_longer_valid(
    ledger: Ledger, how: str
) -> None:
    [one] = put(ledger, keys(1))
    slots, generations = places([one])
    assert ledger.still_valid(slots, generations).tolist() == [True]
    if how == "remove":
        assert admin.remove(ledger, [one.key]) == 1
    elif how == "clear":
        assert admin.clear(ledger, TENANT) == 1
    elif how == "drop":
        assert ledger.remove_exact(
            one.key, one.slot, one.generation, Reason.FAILED_CHECK
        )
    else:
        put_alone(ledger, range(100, 100 + SLOTS))
    assert ledger.still_valid(slots, generations).tolist() == [False]
    assert not len(ledger.match_prefix([one.key]).slots)


def test_an_aborted_reservation_was_never_valid_to_a_reader(
    ledger: Ledger,
) -> None:
    [room] = rooms_for(ledger, keys(1))
    ledger.abort([room])
    assert ledger.still_valid(*places([room])).tolist() == [False]
    assert ledger.commit([room]) == [False]


def test_a_key_that_was_published_for_another_slot_is_a_miss_and_its_entry_goes(
    ledger: Ledger,
) -> None:
    [one, two] = put(ledger, keys(1, 2))
    # the state of a torn ledger
    ledger.columns.keys[one.slot] = ledger.columns.keys[two.slot]
    assert not len(ledger.match_prefix([one.key]).slots)
    assert present(ledger, [one.key, two.key]) == [False, True]


def test_a_drop_with_another_generation_changes_nothing(ledger: Ledger) -> None:
    [one] = put(ledger, keys(1))
    assert not ledger.remove_exact(
        one.key, one.slot, one.generation + 1, Reason.FAILED_CHECK
    )
    assert present(ledger, [one.key]) == [True]


# visibility


def test_nothing_is_seen_before_its_commit(ledger: Ledger) -> None:
    room = rooms_for(ledger, keys(1))
    assert not matched(ledger, keys(1))
    assert ledger.match_prefix(keys(1)).reason is Reason.BUSY
    assert ledger.commit(room) == [True]
    assert matched(ledger, keys(1)) == 1


def test_a_chunk_of_two_parts_is_seen_when_both_are_in(ledger: Ledger) -> None:
    room = rooms_for(ledger, keys(1), parts=2)
    assert ledger.commit(room, part=1) == [CommitResult.PART]
    assert not matched(ledger, keys(1))
    assert ledger.commit(room, part=1) == [False], (
        "the same part twice is not both parts"
    )
    assert not matched(ledger, keys(1))
    assert ledger.commit(room, part=0) == [CommitResult.WHOLE]
    assert matched(ledger, keys(1)) == 1


def test_the_first_of_two_writers_of_a_key_that_was_taken_over_loses(
    ledger: Ledger, clock: FakeClock
) -> None:
    [slow] = rooms_for(ledger, keys(1))
    clock.advance(60)
    [quick] = rooms_for(ledger, keys(1))
    assert quick.slot != slow.slot
    assert ledger.commit([slow]) == [False]
    assert ledger.commit([quick]) == [True]
    assert ledger.match_prefix(keys(1)).slots.tolist() == [quick.slot]


# clearing


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_in_flight_during_a_clear_does_not_come_in(
    ledger: Ledger, whole: bool
) -> None:
    put(ledger, keys(1), OTHER)
    room = rooms_for(ledger, keys(2))
    admin.clear(ledger, None if whole else TENANT)
    assert ledger.commit(room) == [False]
    assert present(ledger, keys(1, 2)) == [not whole, False]
    assert put(ledger, keys(2)), "the key can be stored again"


def on_disk(root: Path) -> Ledger:
    """A ledger in files."""
    return Ledger.open(
        StoreSpec(root=root, name="rules", kind="file", slots=8, slot_bytes=8192)
    )


def test_what_was_cleared_is_on_the_disk_before_clear_returns(
    tmp_path: Path,
) -> None:
    ledger = on_disk(tmp_path)
    [stored] = put(ledger, keys(1))
    admin.clear(ledger, TENANT)
    lines = ClearLog(ledger.directory).read()
    assert lines is not None
    assert lines.of[TENANT] > stored.generation
    ledger.close()


def test_clearing_says_so_if_what_was_cleared_could_come_back(
    tmp_path: Path,
) -> None:
    ledger = on_disk(tmp_path)
    put(ledger, keys(1))
    for path in ledger.directory.glob("clears-*"):
        path.unlink()
        path.mkdir()  # cannot be written
    with pytest.raises(StoreError, match="may bring it back"):
        admin.clear(ledger, TENANT)
    assert present(ledger, keys(1)) == [False], "it is removed for the present"
    ledger.namespaces.register(OTHER, {"model": "b"})  # does not raise
    ledger.close()


# live and dead members


def filling(ledger: Ledger, *numbers: int) -> Other:
    """Let another process reserve some keys."""

    def work() -> None:
        rooms = rooms_for(ledger, keys(*numbers))
        assert len(rooms) == len(numbers)

    return Other(work)


def test_the_reservation_of_a_living_member_is_never_taken_back(
    ledger: Ledger, clock: FakeClock
) -> None:
    with filling(ledger, 1, 2):
        clock.advance(3600)
        assert admin.reap(ledger) == 0
        for start in range(100, 100 + 4 * SLOTS):
            put(ledger, keys(start))
        assert gauge(ledger, "reserved") == 2
        admin.check(ledger)
    admin.reap(ledger)
    assert gauge(ledger, "reserved") == 0
    assert gauge(ledger, "members") == 1


def test_a_stopped_member_lives(ledger: Ledger) -> None:
    with filling(ledger, 1) as other:
        os.kill(other.pid, signal.SIGSTOP)
        time.sleep(0.05)
        assert admin.reap(ledger) == 0
        assert gauge(ledger, "reserved") == 1
        [outcome] = ledger.reserve(keys(1), namespace=TENANT)
        assert isinstance(outcome, Busy)
        assert outcome.owner != ledger.session.member
        os.kill(other.pid, signal.SIGCONT)


def test_the_reservation_of_a_dead_member_is_taken_back_when_it_is_met(
    ledger: Ledger,
) -> None:
    filling(ledger, 1).end()
    [outcome] = ledger.reserve(keys(1), namespace=TENANT)
    assert isinstance(outcome, Reserved)
    assert ledger.commit([outcome]) == [True]
    admin.reap(ledger)
    assert gauge(ledger, "reserved") == 0


def test_a_living_members_holds_keep_and_a_dead_ones_do_not(
    ledger: Ledger,
) -> None:
    kept = put_alone(ledger, range(4))
    with Other(lambda: must(all(ledger.hold(*places(kept))))):
        put_alone(ledger, range(100, 100 + 2 * SLOTS))
        assert all(present(ledger, keys(*range(4))))
    put_alone(ledger, range(300, 300 + SLOTS))
    assert not any(present(ledger, keys(*range(4))))


def test_a_part_that_a_living_member_adopted_keeps_the_reservation_of_a_dead_one(
    ledger: Ledger,
) -> None:
    def work() -> bytes:
        [room] = rooms_for(ledger, keys(1), parts=2)
        return f"{room.slot} {room.generation}".encode()

    with Other(work) as other:
        slot, generation = map(int, other.said.split())
        room = Reserved(keys(1)[0], slot, generation)
        assert ledger.adopt([room], 1) == [True]
    assert admin.reap(ledger) == 0
    assert gauge(ledger, "reserved") == 1
    assert ledger.adopt([room], 0) == [True]
    assert ledger.commit([room], 0) == [CommitResult.PART]
    assert ledger.commit([room], 1) == [CommitResult.WHOLE]
    assert present(ledger, keys(1)) == [True]


def test_a_part_is_only_committed_by_its_writer(ledger: Ledger) -> None:
    rooms = rooms_for(ledger, keys(1))

    def stranger() -> None:
        assert ledger.commit(rooms) == [False]

    in_child(stranger)
    assert ledger.commit(rooms) == [True]


def test_a_stranger_cannot_abort_what_a_living_member_fills(
    ledger: Ledger,
) -> None:
    rooms = rooms_for(ledger, keys(1))
    in_child(lambda: ledger.abort(rooms))
    assert gauge(ledger, "reserved") == 1
    assert ledger.commit(rooms) == [True]


def test_an_abort_frees_the_slot_only_when_the_writers_of_the_other_parts_are_done(
    ledger: Ledger,
) -> None:
    rooms = rooms_for(ledger, keys(1), parts=2)
    with Other(lambda: must(ledger.adopt(rooms, 1) == [True])):
        ledger.abort(rooms)
        assert admin.reap(ledger) == 0
        assert gauge(ledger, "reserved") == 1
        assert ledger.commit(rooms, 0) == [False]
    assert admin.reap(ledger) == 1
    assert gauge(ledger, "reserved") == 0


# waiting


def test_calls_return_by_their_deadline_while_the_gate_is_taken(
    ledger: Ledger,
) -> None:
    [stored] = put(ledger, keys(1))
    [room] = rooms_for(ledger, keys(2))
    with gate_taken(ledger):
        for call in (
            lambda: ledger.match_prefix(keys(1), deadline_seconds=0.1),
            lambda: ledger.reserve(
                keys(3), namespace=TENANT, deadline_seconds=0.1
            ),
            lambda: ledger.commit([room], deadline_seconds=0.1),
        ):
            patience = Patience(20.0)
            call()
            assert patience.waited >= 0.05
            assert not patience.ended, patience.said()
        assert (
            ledger.match_prefix(keys(1), deadline_seconds=0.0).reason
            is Reason.LEDGER_BUSY
        )
        [refused] = ledger.reserve(
            keys(3), namespace=TENANT, deadline_seconds=0.0
        )
        assert isinstance(refused, Refused)
        assert refused.reason is Reason.LEDGER_BUSY
        assert ledger.still_valid(*places([stored])).all(), (
            "validity needs no gate"
        )
    put(ledger, keys(4))
    assert gauge(ledger, "reserved") == 0, (
        "the next transaction has done the late commit"
    )
    assert admin.counters(ledger)["miss_ledger_busy"] >= 2


def test_an_abort_that_was_late_is_done_by_the_next_transaction(
    ledger: Ledger,
) -> None:
    rooms = rooms_for(ledger, keys(1, 2))
    with gate_taken(ledger):
        ledger.abort(rooms, deadline_seconds=0.05)
    put(ledger, keys(5))
    assert gauge(ledger, "reserved") == 0
    assert present(ledger, keys(1, 2, 5)) == [False, False, True]


@pytest.mark.parametrize("few", [3, 40])
def test_a_run_ends_where_another_tenant_or_place_begins(
    shm_root: Path, few: int
) -> None:
    with contextlib.closing(opened(shm_root, 1024)) as ledger:
        own, others, moved = (list(range(at, at + few)) for at in (0, 100, 200))
        put(ledger, keys(*own))
        put(ledger, keys(*others), namespace=OTHER)
        # each key twice: the second half is Present, at the places of the first
        put(ledger, keys(*moved, *moved))
        for asked, start, found, reason in [
            (own, 0, few, None),
            (own, None, few, None),
            (own, 1, 0, Reason.ABSENT),
            (others, 0, 0, Reason.OTHER_NAMESPACE),
            ([*own, *others], None, few, Reason.OTHER_NAMESPACE),
            ([*own, *moved], 0, few, Reason.ABSENT),
            ([*own, *moved], None, 2 * few, None),
        ]:
            match = ledger.match_prefix(
                keys(*asked), start=start, namespace=TENANT
            )
            assert (len(match.slots), match.reason) == (found, reason), (
                asked,
                start,
            )
