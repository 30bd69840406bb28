"""A store in memory that begins small and grows as it fills: when it asks for pages, on which
thread, in which order, and what keeps it from growing.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda.base import store_place
from pagoda.base.cgroup_memory import CgroupRoom
from pagoda.base.errors import NoRoomError
from pagoda.base.store_place import FIRST_PIECE_BYTES
from pagoda.ledger import Ledger, StoreSpec, admin, growth_thread, space_sharing
from pagoda.ledger.stores_under_root import allocated_bytes, root_locked
from pagoda.ledger.transaction import Transaction
from pagoda.policy.eviction_queue import RANKED_AT_ONCE
from pagoda.slab import MemorySlab
from pagoda.slab.linux_mmap import HUGE_BYTES
from tests.children import in_child
from tests.huge_pages import huge_bytes
from tests.ledger.support import PATIENT_SECONDS, TENANT, keys, put

MIB = 1 << 20
SLOT = 256 << 10


def growing(
    root: Path,
    mib: int = 96,
    slot_bytes: int = SLOT,
    first: int | None = FIRST_PIECE_BYTES,
    policy: str = "lru",
) -> Ledger:
    """A ledger of a store of at most that size, which grows unless `first` is None."""
    size = mib * MIB
    spec = StoreSpec(
        root,
        "store",
        "memory",
        size // slot_bytes,
        slot_bytes,
        limit_bytes=size,
        first_bytes=first,
    )
    ledger = Ledger.open(spec, policy=policy)
    ledger.namespaces.register(TENANT, {"model": "test"})
    return ledger


def eventually(true: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENT_SECONDS
    while not true() and time.monotonic() < until:
        time.sleep(0.005)
    return true()


def unbacked(ledger: Ledger) -> int:
    return admin.gauges(ledger)["unbacked"]


@pytest.mark.parametrize("slot_bytes", [64 << 10, MIB, 24 * MIB, 40 * MIB])
def test_the_opening_takes_a_piece_and_no_more(
    shm_root: Path, slot_bytes: int
) -> None:
    ledger = growing(shm_root, 1024, slot_bytes)
    assert allocated_bytes(ledger.directory) <= FIRST_PIECE_BYTES
    assert ledger.slots == 1024 * MIB // slot_bytes
    admin.check(ledger)
    ledger.close()
    again = growing(shm_root, 1024, slot_bytes)
    assert allocated_bytes(again.directory) <= FIRST_PIECE_BYTES
    again.close()


def test_a_size_that_was_asked_for_is_allocated_at_once(shm_root: Path) -> None:
    small = growing(shm_root)
    assert unbacked(small) > 0
    whole = growing(shm_root, first=None)
    assert unbacked(whole) == 0
    assert allocated_bytes(whole.directory) >= 96 * MIB
    whole.close()
    small.close()


@pytest.mark.parametrize("slot_bytes", [64 << 10, SLOT, 6 * MIB])
def test_nothing_is_evicted_or_refused_until_the_size_is_reached(
    shm_root: Path, slot_bytes: int
) -> None:
    ledger = growing(shm_root, slot_bytes=slot_bytes)
    wanted = keys(*range(ledger.slots))
    assert len(put(ledger, wanted)) == ledger.slots
    numbers = admin.numbers(ledger)
    assert numbers["unbacked"] == 0
    assert numbers["ready"] == ledger.slots
    assert numbers["evicted_chunks"] == numbers["drop_full"] == 0
    admin.check(ledger)
    ledger.close()


def test_a_request_that_looked_before_the_last_step_is_answered(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # not by the end of the thread
    monkeypatch.setattr(growth_thread, "_IDLE_SECONDS", 1e3)
    ledger = growing(shm_root)
    ledger.growth_thread.wake()
    assert eventually(lambda: not ledger.space.lacks(0))
    until = time.monotonic() + PATIENT_SECONDS
    assert ledger.growth_thread.wait_for_step(1, until)
    ledger.close()


def test_few_chunks_take_little(shm_root: Path) -> None:
    ledger = growing(shm_root, 1024)
    put(ledger, keys(*range(8)))
    assert eventually(lambda: not ledger.space.lacks(0))
    assert allocated_bytes(ledger.directory) <= 64 * MIB
    ledger.close()


def test_no_request_allocates(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set[str]()
    real = space_sharing.allocate_range

    def noted(fd: int, offset: int, nbytes: int) -> bool:
        names.add(threading.current_thread().name)
        return real(fd, offset, nbytes)

    ledger = growing(shm_root)
    monkeypatch.setattr(space_sharing, "allocate_range", noted)
    put(ledger, keys(*range(ledger.slots)))
    assert names == {"pagoda-growth"}
    ledger.close()


def test_pages_are_allocated_then_mapped_then_listed(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a slot that is not listed is never given out."""
    order: list[str] = []
    ledger = growing(shm_root)
    slab = MemorySlab(ledger.slab_path, ledger.slots, SLOT, ledger.page_guards)
    ledger.space.begin_mapped(slab, 0)

    def noting(owner: object, name: str, word: str) -> None:
        real = getattr(owner, name)

        def noted(*arguments: object, **named: object) -> object:
            if threading.current_thread().name == "pagoda-growth":
                order.append(word)
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, noted)

    noting(space_sharing, "reserve_in_place", "tables")
    noting(slab, "allocate_huge", "huge")
    noting(space_sharing, "allocate_range", "slab")
    noting(slab, "populate_slots", "mapped")
    noting(Transaction, "extend_backed", "listed")
    ledger.growth_thread.wake()
    assert eventually(lambda: "listed" in order)
    assert order[:5] == ["tables", "huge", "slab", "mapped", "listed"]
    ledger.close()
    slab.close()


def test_a_piece_ends_where_huge_pages_meet(shm_root: Path) -> None:
    ledger = growing(shm_root, slot_bytes=12 << 10)
    ledger.growth_thread.wake()
    assert eventually(lambda: not ledger.space.lacks(0))
    [whole] = ledger.pages.backed_ranges()
    assert whole.stop * (12 << 10) % (2 << 20) == 0
    ledger.close()


@pytest.mark.parametrize("huge_at_once", [True, False], ids=["at once", "later"])
def test_a_store_that_has_grown_is_in_huge_pages(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch, huge_at_once: bool
) -> None:
    """Also those in which two pieces meet, or two steps of what is collapsed later."""
    if not huge_at_once:

        def none_now(*_: object) -> bool:
            return False

        monkeypatch.setattr(MemorySlab, "allocate_huge", none_now)
    size = 192 << 10
    ledger = growing(shm_root, slot_bytes=size)
    slab = MemorySlab(ledger.slab_path, ledger.slots, size, ledger.page_guards)
    backed = ledger.pages.meta().backed
    assert backed * size % HUGE_BYTES
    ledger.space.begin_mapped(slab, backed)
    slab.populate(background=False, backed=[range(backed)])
    put(ledger, keys(*range(ledger.slots)))
    assert eventually(lambda: not ledger.space.lags(ledger.slots))
    huge = huge_bytes(ledger.slab_path)
    if not huge:
        pytest.skip("this kernel gives no huge pages here")
    assert huge == ledger.slots * size
    slab.close()
    ledger.close()


def test_a_piece_in_huge_pages_is_not_collapsed_again(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = growing(shm_root)
    slab = MemorySlab(ledger.slab_path, ledger.slots, SLOT, ledger.page_guards)
    backed = ledger.pages.meta().backed
    ledger.space.begin_mapped(slab, backed)

    def all_of_it(*_: object) -> bool:
        return True

    monkeypatch.setattr(MemorySlab, "allocate_huge", all_of_it)
    assert ledger.space.more()
    more = ledger.pages.meta().backed
    assert more > backed
    assert not ledger.space.lags(more)
    ledger.close()
    slab.close()


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> list[CgroupRoom]:
    """The rooms of the cgroup, which the test may change: at first none is left."""
    rooms = [CgroupRoom(1024 * MIB, 256 * MIB)]
    monkeypatch.setattr(store_place, "cgroup_rooms", lambda: rooms)
    monkeypatch.setattr(growth_thread, "_NO_ROOM_SECONDS", 0.01)
    return rooms


@pytest.mark.slow
def test_what_a_cgroup_has_less_a_margin_bounds_each_piece(
    shm_root: Path, no_memory: list[CgroupRoom], caplog: pytest.LogCaptureFixture
) -> None:
    ledger = growing(shm_root)
    before = unbacked(ledger)
    room = ledger.slots - before
    stored = put(ledger, keys(*range(2 * room)), chained=False)
    assert len(stored) == 2 * room, "it evicts"
    assert admin.numbers(ledger)["growth_refused_cgroup"] > 0
    assert unbacked(ledger) == before
    lines = [one for one in caplog.messages if "the cgroup has no more" in one]
    assert len(lines) == 1
    no_memory.clear()
    number = 1000

    def is_whole() -> bool:
        nonlocal number
        put(ledger, keys(number), chained=False)
        number += 1
        return unbacked(ledger) == 0

    assert eventually(is_whole), "it asks again while it is used"
    admin.check(ledger)
    ledger.close()


@pytest.mark.parametrize("policy", ["lru", "hindsight"])
def test_where_few_of_many_slots_have_pages_victims_are_found(
    shm_root: Path, no_memory: list[CgroupRoom], policy: str
) -> None:
    ledger = growing(shm_root, 1600, 64 << 10, policy=policy, first=16 * MIB)
    ledger.upkeep_thread.close()  # on a busy machine it ranks all slots first
    assert ledger.slots > 3 * RANKED_AT_ONCE
    fitting = ledger.slots - unbacked(ledger)
    assert 0 < fitting < ledger.slots // 100
    for number in range(3 * fitting):
        assert len(put(ledger, keys(number), chained=False)) == 1
    assert len(no_memory) == 1
    admin.check(ledger)
    ledger.close()


def test_without_memory_for_one_chunk_the_error_names_what_is_full(
    shm_root: Path, no_memory: list[CgroupRoom]
) -> None:
    expected = (
        rf"the cgroup of {shm_root} has 0 bytes to spare\. Free some memory"
    )
    with pytest.raises(NoRoomError, match=expected):
        growing(shm_root, slot_bytes=24 * MIB)
    assert len(no_memory) == 1


def test_a_request_does_not_wait_for_a_piece_that_was_refused(
    shm_root: Path, no_memory: list[CgroupRoom], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_memory[:] = [CgroupRoom(1024 * MIB, 0)]
    monkeypatch.setattr(growth_thread, "_NO_ROOM_SECONDS", 1e9)
    ledger = growing(shm_root)
    put(ledger, keys(*range(ledger.slots - unbacked(ledger) + 8)))
    assert ledger.growth_thread.rests
    waited = ledger.growth_thread.wait_for_step(8, time.monotonic() + 1e3)
    assert not waited
    ledger.close()


def test_a_step_that_fails_is_counted_and_logged_once(
    shm_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = growing(shm_root)
    monkeypatch.setattr(space_sharing, "_ROOT_SECONDS", 0.01)
    # as a process does that was stopped inside
    with root_locked(shm_root, PATIENT_SECONDS):
        assert not ledger.space.more()
        assert not ledger.space.more()
    assert ledger.space.in_trouble
    assert admin.numbers(ledger)["growth_failures"] == 2
    assert caplog.text.count("keeps its size for now") == 1
    assert ledger.space.more()
    assert not ledger.space.in_trouble
    ledger.close()
    assert not ledger.space.more()
    assert caplog.text.count("keeps its size for now") == 1, "it was closed"


def test_pages_that_another_store_has_got_are_not_faulted_in(
    shm_root: Path,
) -> None:
    ledger = growing(shm_root)
    for n in range(ledger.slots):  # the first ones are the coldest
        put(ledger, keys(n))
    spec = StoreSpec(
        shm_root, "other", "memory", 96 << 2, SLOT, limit_bytes=96 * MIB
    )
    other = Ledger.open(spec)  # as many pages as its fair share
    held = allocated_bytes(ledger.directory)
    assert unbacked(ledger) > 0
    slab = MemorySlab(ledger.slab_path, ledger.slots, SLOT, ledger.page_guards)
    ledger.space.begin_mapped(
        slab, 0
    )  # a process that looked last before it grew
    while ledger.space.finish_pages():
        pass
    assert allocated_bytes(ledger.directory) <= held
    slab.close()
    for each in (other, ledger):
        each.close()


def test_a_smaller_size_gives_pages_back_at_the_next_start(
    shm_root: Path,
) -> None:
    ledger = growing(shm_root)
    wanted = keys(*range(ledger.slots))
    put(ledger, wanted)
    ledger.close()
    smaller = growing(shm_root, 32)
    assert allocated_bytes(smaller.directory) <= 48 * MIB
    assert admin.gauges(smaller)["ready"] > 0
    admin.check(smaller)
    smaller.close()


def test_idle_memory_is_not_taken_away_at_the_next_start(shm_root: Path) -> None:
    ledger = growing(shm_root)
    put(ledger, keys(*range(ledger.slots)))
    ledger.close()
    again = growing(shm_root)
    assert admin.gauges(again)["ready"] == again.slots
    again.close()


def test_growth_in_another_process_is_noticed(shm_root: Path) -> None:
    ledger = growing(shm_root)
    known = ledger.look_for_pages()

    def fill() -> None:
        put(ledger, keys(*range(ledger.slots)))
        ledger.close()

    in_child(fill)
    ledger._looks_again = 0.0
    assert ledger.look_for_pages() > known
    admin.check(ledger)
    ledger.close()


def test_a_ledger_that_is_dropped_leaves_its_thread(shm_root: Path) -> None:
    ledger = growing(shm_root)
    ledger.growth_thread.wake()
    thread = ledger.growth_thread._thread
    ledger.close()
    del ledger
    gc.collect()
    thread.join(PATIENT_SECONDS)
    assert not thread.is_alive()


def test_pieces_of_other_stores_are_no_new_refusals(
    shm_root: Path, no_memory: list[CgroupRoom], caplog: pytest.LogCaptureFixture
) -> None:
    """Each piece comes from the other store after free memory was refused."""
    spec = StoreSpec(
        shm_root, "idle", "memory", 256, SLOT, limit_bytes=256 * SLOT
    )
    idle = Ledger.open(spec)
    idle.namespaces.register(TENANT, {"model": "test"})
    put(idle, keys(*range(256)), chained=False)
    idle.close()
    ledger = growing(shm_root)
    before = unbacked(ledger)
    steps = 0
    while ledger.space.more():
        steps += 1
    assert steps > 1
    assert unbacked(ledger) < before
    assert len(no_memory) == 1
    assert caplog.text.count("chunks for now") == 1
    ledger.close()


def test_refusals_between_free_pieces_are_logged_once_in_a_while(
    shm_root: Path, no_memory: list[CgroupRoom], caplog: pytest.LogCaptureFixture
) -> None:
    ledger = growing(shm_root)
    refused = list(no_memory)
    for _ in range(3):
        no_memory[:] = refused
        assert not ledger.space.more()
        no_memory.clear()
        assert ledger.space.more()
    assert caplog.text.count("chunks for now") == 1
    ledger.close()


def test_one_request_waits_once_for_growth(
    shm_root: Path, no_memory: list[CgroupRoom], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for room before it asks the policy, and again before it evicts."""
    assert len(no_memory) == 1
    ledger = growing(shm_root)
    times = list[float]()

    def note(_: int, until: float) -> bool:
        times.append(until)
        return False

    monkeypatch.setattr(ledger.growth_thread, "wait_for_step", note)
    put(ledger, keys(*range(ledger.slots - unbacked(ledger))), chained=False)
    times.clear()
    ledger.reserve(keys(1000), namespace=TENANT, deadline_seconds=100.0)
    assert len(times) > 1
    assert len(set(times)) == 1
    ledger.close()


def test_other_processes_get_the_root_between_two_pieces_that_are_finished(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = growing(shm_root)
    spans = list[tuple[float, float]]()

    def finish() -> bool:
        began = time.monotonic()
        time.sleep(0.01)
        spans.append((began, time.monotonic()))
        return len(spans) < 8

    monkeypatch.setattr(ledger.space, "finish_pages", finish)
    ledger.growth_thread.wake()
    assert eventually(lambda: len(spans) == 8)
    busy = sum(end - began for began, end in spans[:-1])
    assert spans[-1][0] - spans[0][0] > 1.8 * busy
    ledger.close()


def test_a_slab_may_be_added_while_pages_are_finished(shm_root: Path) -> None:
    class Slab:
        def allocate_huge(self, fd: int, slots: range) -> bool:
            return False

        def populate_slots(self, slots: range, collapse: bool) -> None:
            pass

    ledger = growing(shm_root)
    slabs = [Slab() for _ in range(5_000)]

    def add() -> None:
        for slab in slabs:
            ledger.space.begin_mapped(slab, 0)

    thread = threading.Thread(target=add)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        while thread.is_alive():
            ledger.space.begin_mapped(slabs[0], ledger.slots)
            ledger.space.finish_pages()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    ledger.close()
