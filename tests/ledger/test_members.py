"""Members: numbers, what dead ones leave, the grace period of a GPU, rows of counters."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from pagoda.base.errors import StoreError
from pagoda.ledger import Busy, Ledger, Reserved, admin, members, rebuild, session
from pagoda.ledger.columns import NOT_READY
from pagoda.ledger.members import DEVICE_GRACE_NS
from pagoda.ledger.transaction import BATCH
from pagoda.testing import FakeClock
from tests.children import (
    child,
    in_child,
    kill_self,
    wait,
)
from tests.ledger.support import (
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
    rooms_for,
)

GRACE_SECONDS = DEVICE_GRACE_NS / 1e9


def test_numbers_are_never_used_again(shm_root: Path) -> None:
    seen = []
    for _ in range(3):
        ledger = opened(shm_root)
        seen.append(ledger.session.member)
        with Other(
            lambda: str((admin.gauges(ledger), ledger.session.member)[1]).encode()  # noqa: B023
        ) as other:
            seen.append(int(other.said))
        ledger.close()
    assert len(set(seen)) == 6
    assert seen == sorted(seen)


def test_the_dead_are_struck_off_with_all_they_had(ledger: Ledger) -> None:
    stored = put_alone(ledger, range(4))

    def work() -> None:
        import numpy as np

        slots = np.array([one.slot for one in stored])
        generations = np.array([one.generation for one in stored], np.uint64)
        assert all(ledger.hold(slots, generations))
        assert len(rooms_for(ledger, keys(10, 11, 12))) == 3

    with Other(work):
        assert admin.reap(ledger) == 0
        assert gauge(ledger, "members") == 2
    assert admin.reap(ledger) == 3
    assert admin.reap(ledger) == 0
    gauges = admin.gauges(ledger)
    assert gauges["members"] == 1
    assert gauges["reserved"] == 0
    assert gauges["free"] == 28
    assert admin.counters(ledger)["reaped_chunks"] == 3
    put_alone(ledger, range(100, 200))
    assert not any(present(ledger, keys(*range(4))))


def test_however_much_the_dead_reserved_is_taken_back_a_part_at_a_time(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root, slots=1024)

    def work() -> None:
        for at in (0, 100):
            assert len(rooms_for(ledger, keys(*range(at, at + 100)))) == 100

    in_child(work)
    assert ledger.session.write(partial(members.reap, most=BATCH)) == BATCH
    assert admin.reap(ledger) == 200 - BATCH
    gauges = admin.gauges(ledger)
    assert gauges["reserved"] == 0
    assert gauges["members"] == 1
    ledger.close()


def test_who_leaves_keeps_the_slots_into_which_another_member_copies(
    ledger: Ledger,
) -> None:
    def work() -> None:
        rooms = rooms_for(ledger, keys(1, 2))
        os.write(
            send,
            b"".join(b"%d %d\n" % (one.slot, one.generation) for one in rooms),
        )
        os.read(go_on, 1)
        ledger.close()

    (receive, send), (go_on, let_go) = os.pipe(), os.pipe()
    pid = child(work)
    lines = os.read(receive, 4096).split()
    rooms = [
        Reserved(key, int(lines[2 * i]), int(lines[2 * i + 1]))
        for i, key in enumerate(keys(1, 2))
    ]
    assert ledger.adopt(rooms[:1], 0) == [True]
    os.write(let_go, b"!")
    assert wait(pid) == 0
    assert gauge(ledger, "reserved") == 1, "only what nobody writes into is free"
    assert ledger.commit(rooms[:1]) == [True]
    assert ledger.commit(rooms[1:]) == [False]
    for end in (receive, send, go_on, let_go):
        os.close(end)


def test_a_chunk_in_memory_whose_member_died_right_after_the_commit_is_found(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root)
    stored = put(ledger, keys(1, 2))
    slots, _ = places(stored)
    ledger.columns.last_use[slots] = NOT_READY
    ledger.columns.generation[slots] = 0
    ledger.columns.keys[slots] = 0
    ledger.close()
    ledger = opened(shm_root)
    admin.reap(ledger)
    assert matched(ledger, keys(1, 2)) == 2
    ledger.close()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_all_that_was_not_published_is_published_by_the_next_who_is_alone(
    shm_root: Path, tmp_path: Path, kind: str
) -> None:
    root = shm_root if kind == "memory" else tmp_path
    ledger = opened(root, slots=4096, kind=kind)
    stored = put(ledger, keys(*range(3000)))
    slots, _ = places(stored)
    ledger.columns.last_use[slots] = NOT_READY
    ledger.close()
    ledger = opened(root, slots=4096, kind=kind)
    admin.reap(ledger)
    assert (ledger.columns.last_use[slots] != NOT_READY).all(), (
        "what is not published is never evicted"
    )
    ledger.close()


def test_what_the_dead_reserved_is_taken_back_when_room_is_short(
    ledger: Ledger,
) -> None:
    put_alone(ledger, range(100, 128))
    in_child(
        lambda: (ledger.reserve(keys(1, 2, 3, 4), namespace=TENANT), None)[1]
    )
    put(ledger, keys(11, 12, 13, 14))
    assert all(present(ledger, keys(*range(100, 128)))), (
        "no stored chunk was evicted"
    )


def test_a_stopped_member_is_alive(ledger: Ledger) -> None:
    with Other(
        lambda: (ledger.reserve(keys(1), namespace=TENANT), None)[1]
    ) as other:
        os.kill(other.pid, signal.SIGSTOP)
        assert admin.reap(ledger) == 0
        assert isinstance(ledger.reserve(keys(1), namespace=TENANT)[0], Busy)


# a GPU


def test_a_slot_that_a_gpu_may_still_write_is_kept_for_a_while_and_its_key_is_not(
    ledger: Ledger, clock: FakeClock
) -> None:
    def work() -> None:
        ledger.register_device()
        assert len(rooms_for(ledger, keys(1, 2))) == 2

    Other(work).end()
    assert admin.reap(ledger) == 0
    assert gauge(ledger, "reserved") == 2
    rooms = rooms_for(ledger, keys(1, 2))
    assert len(rooms) == 2
    assert all(ledger.commit(rooms))
    clock.advance(GRACE_SECONDS - 0.1)
    assert admin.reap(ledger) == 0
    clock.advance(0.2)
    assert admin.reap(ledger) == 2
    assert gauge(ledger, "members") == 1
    assert all(present(ledger, keys(1, 2)))


def test_the_grace_is_for_who_writes_and_not_for_who_reserved(
    ledger: Ledger, clock: FakeClock
) -> None:
    rooms = rooms_for(ledger, keys(1, 2))

    def work() -> None:
        ledger.register_device()
        assert all(ledger.adopt(rooms, 0))

    Other(work).end()
    assert admin.reap(ledger) == 0
    assert gauge(ledger, "reserved") == 2
    clock.advance(GRACE_SECONDS + 1)
    assert admin.reap(ledger) == 2


def test_a_grace_ends_with_the_boot(tmp_path: Path) -> None:
    clock = FakeClock(seconds=10**6)
    ledger = opened(tmp_path, clock=clock, kind="file")

    def work() -> None:
        ledger.register_device()
        ledger.reserve(keys(1), namespace=TENANT)

    Other(work).end()
    admin.reap(ledger)
    ledger.close()
    clock.reboot("next boot", seconds=5)
    again = opened(tmp_path, clock=clock, kind="file")
    assert not len(rebuild.unscanned(again))
    assert not gauge(again, "reserved")
    admin.check(again)
    again.close()


# rows of counters


def test_counters_are_those_of_all_the_living_and_the_dead(
    ledger: Ledger,
) -> None:
    ledger.count({"lookups": 1})

    def work() -> None:
        admin.gauges(ledger)
        ledger.count({"lookups": 10})

    def leave() -> None:
        work()
        ledger.close()

    with Other(work):
        assert admin.counters(ledger)["lookups"] == 11
    assert admin.counters(ledger)["lookups"] == 11
    admin.reap(ledger)
    assert admin.counters(ledger)["lookups"] == 11
    in_child(leave)
    assert admin.counters(ledger)["lookups"] == 21
    admin.reap(ledger)
    with Other(work):  # takes the row of a dead member
        assert admin.counters(ledger)["lookups"] == 31


def test_counters_stay_when_all_have_left(shm_root: Path) -> None:
    ledger = opened(shm_root)
    ledger.count({"lookups": 5})
    ledger.close()
    again = opened(shm_root)
    assert admin.counters(again)["lookups"] == 5
    again.close()


@pytest.mark.slow
def test_too_many_members_are_refused_until_one_leaves(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (members, session):
        monkeypatch.setattr(module, "MEMBER_ROWS", 2)
    ledger = opened(shm_root)

    def work() -> None:
        admin.gauges(ledger)

    def too_many() -> None:
        # this process's own ledger; the process is not a member yet
        ledger.close()
        with pytest.raises(StoreError, match="close some"):
            opened(shm_root)

    second = Other(work)
    third = Other(too_many)  # refused, and continues
    second.end()
    in_child(work)
    third.end()
    admin.reap(ledger)
    assert gauge(ledger, "members") == 1
    ledger.close()


@pytest.mark.slow
def test_a_member_that_died_while_it_enrolled_is_nobody(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(shm_root)

    def die() -> None:
        monkeypatch.setattr(session, "add_member", lambda *_: kill_self())
        admin.gauges(ledger)

    assert wait(child(die)) == -signal.SIGKILL
    in_child(lambda: (admin.gauges(ledger), None)[1])
    admin.reap(ledger)
    assert gauge(ledger, "members") == 1
    ledger.close()


@pytest.mark.slow
def test_a_gauge_is_the_sum_of_what_living_members_say(shm_root: Path) -> None:
    ledger = opened(shm_root)

    def waiting() -> int:
        return admin.numbers(ledger)["waiting_chunks"]

    def says(number: int) -> bytes:
        admin.gauges(ledger)  # become a member
        ledger.session.set_gauge("waiting_chunks", number)
        return b"said"

    ledger.session.set_gauge("waiting_chunks", 2)
    with Other(partial(says, 40)):
        assert waiting() == 42
        with Other(partial(says, 7)):
            assert waiting() == 49
        assert waiting() == 42
    # both ended, one after the other, and left their rows as they were
    assert waiting() == 2
    admin.reap(ledger)
    assert waiting() == 2
    # who comes next has one of their rows
    with Other(partial(says, 1)):
        assert waiting() == 3
    ledger.session.set_gauge("waiting_chunks", 0)
    assert waiting() == 0
    ledger.close()
