"""The ghosts of a store in memory that grows: how many have pages, what a doubling keeps, and what
processes see that disagree, die inside it, or find no space.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.errors import NoRoomError
from pagoda.base.store_place import FIRST_PIECE_BYTES, Growth
from pagoda.ledger import (
    Ledger,
    StoreSpec,
    admin,
    ghost_pages,
    space_sharing,
    store_directory,
)
from pagoda.ledger.columns import Columns
from pagoda.ledger.ghost_pages import (
    GhostPages,
    first_places,
    ghost_bytes,
    most_places,
)
from pagoda.ledger.ghost_table import WAYS, GhostTable, marks_of
from pagoda.ledger.hint_pages import columns_in_memory
from pagoda.ledger.store_state import COLUMNS, GHOSTS, read_state
from pagoda.ledger.stores_under_root import (
    allocated_bytes,
    remove_store,
    root_locked,
)
from pagoda.policy.hindsight import Hindsight
from tests.children import (
    child,
    in_child,
    in_light_process,
    kill_self,
    wait,
)
from tests.ledger.support import PATIENT_SECONDS, TENANT, keys, put

SLOT = 4096
SLOTS = 4096
FIRST = 64


@pytest.fixture(autouse=True)
def small_tables_grow_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_directory, "_COLUMNS_SHARE", 1 << 30)
    monkeypatch.setattr(store_directory, "_FEWEST_PLACES", FIRST)


def growing(
    root: Path,
    slots: int = SLOTS,
    first: int | None = FIRST * SLOT,
    policy: str = "lru",
) -> Ledger:
    """A ledger of a store that grows, with the fewest places at first, unless `first` is None."""
    spec = StoreSpec(
        root,
        "store",
        "memory",
        slots,
        SLOT,
        limit_bytes=slots * SLOT,
        first_bytes=first,
    )
    ledger = Ledger.open(spec, policy=policy)
    ledger.namespaces.register(TENANT, {"model": "test"})
    return ledger


def pages_of(ledger: Ledger) -> GhostPages:
    pages = ledger.columns.ghost_pages
    assert pages is not None
    return pages


def with_pages(ledger: Ledger) -> int:
    gauges = admin.gauges(ledger)
    return gauges["slots"] - gauges["unbacked"]


def remember(columns: Columns, numbers: range) -> None:
    columns.table.remember(
        marks_of(keys(*numbers)),
        np.arange(len(numbers)) + 1_000,
        np.arange(len(numbers), dtype=np.uint32) % 7,
        10_000_000,
        0,
    )


def known(columns: Columns, numbers: range) -> int:
    """How many have a ghost, and the right one."""
    hits, last_use = columns.table.recall(marks_of(keys(*numbers)))
    right = (last_use == np.arange(len(numbers)) + 1_000) & (
        hits == np.arange(len(numbers)) % 7
    )
    assert (right | (last_use == 0)).all()
    return int(right.sum())


def doubled(ledger: Ledger, places: int) -> bool:
    with root_locked(ledger.directory.parent, PATIENT_SECONDS):
        return pages_of(ledger).grow(places)


def count(columns: Columns) -> int:
    return int(np.count_nonzero(columns.ghosts.last_use))


# ---- how many places


@pytest.mark.parametrize("slots", [1, 2, 63, 64, 65, 1000, 98_304, 98_305])
@pytest.mark.parametrize("least", [1, 64, 1024])
def test_a_table_ends_with_a_place_for_each_slot_and_few_more(
    slots: int, least: int
) -> None:
    first = first_places(slots, least)
    most = most_places(first, slots)
    assert min(slots, least) <= first <= 2 * least
    assert slots <= most < slots + max(1, most // first)
    assert most % first == 0
    assert (most // first).bit_count() == 1


def test_slots_with_pages_never_have_fewer_ghosts_than_all_have(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the file has pages for the ghosts in use only."""
    ledger = growing(shm_root)
    seen = [pages_of(ledger).places]
    file = ledger.directory / GHOSTS
    while ledger.space.more():
        seen.append(pages_of(ledger).places)
        assert seen[-1] >= with_pages(ledger)
        assert file.stat().st_blocks * 512 == ghost_bytes(seen[-1])
        assert len(ledger.columns.ghosts.last_use) == seen[-1] * WAYS
    assert seen[0] == FIRST
    assert len(set(seen)) > 3
    assert seen[-1] == SLOTS == with_pages(ledger)
    assert file.stat().st_size == ghost_bytes(SLOTS)
    gauges = admin.gauges(ledger)
    small_files = 1 << 20
    assert 0 <= gauges["allocated_bytes"] - gauges["most_bytes"] < small_files
    ledger.close()


def test_the_opening_of_many_small_slots_takes_a_piece(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of a laptop, with slots of 64 KiB."""
    monkeypatch.undo()
    slot = 64 << 10
    size = 6 << 30
    spec = StoreSpec(
        shm_root,
        "store",
        "memory",
        size // slot,
        slot,
        limit_bytes=size,
        first_bytes=FIRST_PIECE_BYTES,
    )
    for _ in range(2):
        ledger = Ledger.open(spec)
        assert allocated_bytes(ledger.directory) <= FIRST_PIECE_BYTES
        assert with_pages(ledger) > 0
        admin.check(ledger)
        ledger.close()


def test_stores_whose_columns_are_small_have_the_files_that_all_versions_know(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    ledger = growing(shm_root, first=FIRST_PIECE_BYTES)
    assert ledger.columns.ghost_pages is None
    assert len(ledger.columns.ghosts.last_use) == SLOTS * WAYS
    assert not (ledger.directory / GHOSTS).exists()
    ledger.close()


def test_a_store_of_a_size_that_was_asked_for_has_its_ghosts_at_once(
    shm_root: Path,
) -> None:
    ledger = growing(shm_root, first=None)
    assert ledger.columns.ghost_pages is None
    assert len(ledger.columns.ghosts.last_use) == SLOTS * WAYS
    ledger.close()


# ---- what a doubling keeps


def test_a_doubling_loses_no_ghost_and_has_none_twice(shm_root: Path) -> None:
    ledger = growing(shm_root)
    columns = ledger.columns
    numbers = range(100)
    remember(columns, numbers)
    kept = known(columns, numbers)
    assert kept > 90
    for places in (2 * FIRST, 16 * FIRST, SLOTS):
        assert doubled(ledger, places)
        assert pages_of(ledger).places == places
        assert known(columns, numbers) == kept == count(columns)
    ledger.close()


def test_what_replaced_ghosts_tell_is_not_lost(shm_root: Path) -> None:
    ledger = growing(shm_root)
    remember(ledger.columns, range(FIRST * WAYS))
    remember(ledger.columns, range(10_000, 10_000 + FIRST * WAYS))
    assert doubled(ledger, 2 * FIRST)
    assert ledger.columns.table.places == 2 * FIRST
    assert sum(len(hits) for hits, *_ in ledger.columns.forgotten()) > 0
    ledger.close()


def test_contexts_of_ghosts_move_with_them(shm_root: Path) -> None:
    ledger = growing(shm_root)
    columns = ledger.columns
    columns.note_contexts()
    marks = marks_of(keys(*range(50)))
    contexts = np.arange(50).astype(np.uint16) + 1
    uses = np.full(50, 7)
    columns.table.remember(marks, uses, np.zeros(50, np.uint32), 9, 0, contexts)
    known_before = columns.table.recall_contexts(marks)
    assert known_before is not None
    assert np.count_nonzero(known_before) == 50
    assert doubled(ledger, 8 * FIRST)
    known_after = columns.table.recall_contexts(marks)
    assert known_after is not None
    assert known_after.tolist() == known_before.tolist()
    ledger.close()


def test_a_policy_that_reads_all_ghosts_reads_those_in_use(
    shm_root: Path,
) -> None:
    """Also while the table grows under it, with contexts and without."""
    ledger = growing(shm_root)
    columns = ledger.columns
    for with_contexts in (False, True):
        if with_contexts:
            columns.note_contexts()
        policy = Hindsight(columns)
        for _ in range(2):
            remember(columns, range(100))
            seen = policy._census(20_000_000_000)
            assert seen.sum() == count(columns) > 0
            policy._shadow.look()
            doubled(ledger, 2 * pages_of(ledger).places)
    ledger.close()


# ---- other processes


def test_other_processes_see_a_doubling_at_their_next_call(
    shm_root: Path,
) -> None:
    ledger = growing(shm_root)
    remember(ledger.columns, range(100))
    kept = known(ledger.columns, range(100))

    def grow() -> None:
        other = growing(shm_root)
        assert doubled(other, SLOTS)
        remember(other.columns, range(50_000, 50_100))

    in_child(grow)
    assert known(ledger.columns, range(100)) == kept
    assert pages_of(ledger).places == SLOTS
    assert known(ledger.columns, range(50_000, 50_100)) == 100
    ledger.close()


def test_who_has_not_seen_it_yet_disagrees_harmlessly(shm_root: Path) -> None:
    ledger = growing(shm_root)
    before = ledger.columns.table
    assert doubled(ledger, 2 * FIRST)
    marks = marks_of(keys(*range(100)))
    before.remember(marks, np.full(100, 5), np.zeros(100, np.uint32), 9, 0)
    _, last_use = ledger.columns.table.recall(marks)
    assert 0 < np.count_nonzero(last_use) < 100
    assert set(last_use.tolist()) == {0, 5}
    before.forget(marks)
    assert count(ledger.columns) == 0
    # ghosts at a place that is not theirs are dropped by the next doubling
    before.remember(marks, np.full(100, 5), np.zeros(100, np.uint32), 9, 0)
    kept = np.count_nonzero(ledger.columns.table.recall(marks)[1])
    assert doubled(ledger, 4 * FIRST)
    assert count(ledger.columns) == kept
    ledger.close()


def test_a_forked_child_and_its_parent_grow_in_turn(shm_root: Path) -> None:
    ledger = growing(shm_root)
    remember(ledger.columns, range(60))

    def grow() -> None:
        assert doubled(ledger, 4 * FIRST)
        assert known(ledger.columns, range(60)) == 60

    in_child(grow)
    assert known(ledger.columns, range(60)) == 60
    assert pages_of(ledger).places == 4 * FIRST
    assert doubled(ledger, 8 * FIRST)
    in_child(lambda: growing_is(ledger, 8 * FIRST))
    ledger.close()


def growing_is(ledger: Ledger, places: int) -> None:
    assert pages_of(ledger).places == places == ledger.columns.table.places


def test_processes_that_grow_at_once_agree(shm_root: Path) -> None:
    ledger = growing(shm_root)
    remember(ledger.columns, range(100))
    kept = known(ledger.columns, range(100))

    def fill(first: int) -> None:
        other = growing(shm_root)
        put(other, keys(*range(first, first + SLOTS // 2)))
        assert pages_of(other).places >= with_pages(other)
        other.close()

    children = [
        child(lambda: fill(10_000)),
        child(lambda: fill(20_000)),
    ]
    assert [wait(one) for one in children] == [0, 0]
    assert known(ledger.columns, range(100)) == kept
    assert pages_of(ledger).places == SLOTS
    numbers = admin.numbers(ledger)
    assert numbers["ready"] == SLOTS
    assert numbers["evicted_chunks"] == 0
    admin.check(ledger)
    ledger.close()


POINTS: dict[str, tuple[object, str]] = {
    "allocated": (GhostPages, "_allocate"),
    "copied": (GhostTable, "spread"),
    "published": (GhostTable, "drop_misplaced"),
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_dies_inside_a_doubling_loses_no_ghost(
    shm_root: Path, point: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = growing(shm_root)
    remember(ledger.columns, range(100))
    kept = known(ledger.columns, range(100))
    owner, name = POINTS[point]
    real: Callable[..., object] = getattr(owner, name)

    def die(*arguments: object) -> object:
        if when == "after":
            real(*arguments)
        kill_self()
        return None

    def grow() -> None:
        monkeypatch.setattr(owner, name, die)
        other = growing(shm_root)
        doubled(other, SLOTS)

    in_child(grow, -signal.SIGKILL)
    assert known(ledger.columns, range(100)) == kept
    ledger.close()
    again = growing(shm_root)
    assert known(again.columns, range(100)) == kept
    while again.space.more():
        assert pages_of(again).places >= with_pages(again)
    assert known(again.columns, range(100)) == kept == count(again.columns)
    assert (again.directory / GHOSTS).stat().st_blocks * 512 == ghost_bytes(SLOTS)
    admin.check(again)
    again.close()


# ---- without space


@pytest.mark.parametrize("column", range(5))
def test_without_space_for_all_columns_nothing_is_taken_and_it_is_asked_again(
    shm_root: Path, column: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = growing(shm_root)
    remember(ledger.columns, range(100))
    while pages_of(ledger).places > with_pages(ledger) and ledger.space.more():
        pass
    places = pages_of(ledger).places
    listed = with_pages(ledger)
    held = (ledger.directory / GHOSTS).stat().st_blocks
    real = ghost_pages.allocate_range
    calls = 0

    def full(fd: int, offset: int, nbytes: int) -> bool:
        nonlocal calls
        calls += 1
        return calls % 5 != (column + 1) % 5 and real(fd, offset, nbytes)

    monkeypatch.setattr(ghost_pages, "allocate_range", full)
    assert not ledger.space.more()
    assert calls == column + 1
    assert pages_of(ledger).places == places
    assert with_pages(ledger) == listed
    assert (ledger.directory / GHOSTS).stat().st_blocks == held
    assert admin.numbers(ledger)["growth_refused_filesystem"] == 1
    assert admin.numbers(ledger)["growth_failures"] == 0
    monkeypatch.setattr(ghost_pages, "allocate_range", real)
    assert ledger.space.more()
    assert pages_of(ledger).places > places
    ledger.close()


def test_slots_for_which_there_are_ghosts_are_given_without_more(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = growing(shm_root, 3000)
    assert ledger.space.more()
    places = pages_of(ledger).places
    assert with_pages(ledger) < places, "a piece is no power of two"
    monkeypatch.setattr(ghost_pages, "allocate_range", lambda *_: False)
    assert ledger.space.more()
    assert with_pages(ledger) == places == pages_of(ledger).places
    assert not ledger.space.more()
    ledger.close()


def test_a_doubling_needs_room_beside_its_slots(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cgroup, a lack of memory would be no error, but the end of a process."""
    ledger = growing(shm_root)
    while pages_of(ledger).places > with_pages(ledger) and ledger.space.more():
        pass
    places = pages_of(ledger).places
    more = ghost_bytes(2 * places) - ghost_bytes(places)
    rooms = [more + SLOT - 1]
    monkeypatch.setattr(
        space_sharing, "growth_room", lambda _: Growth(rooms[0], "cgroup")
    )
    assert not ledger.space.more()
    assert admin.numbers(ledger)["growth_refused_cgroup"] == 1
    assert pages_of(ledger).places == places
    rooms[0] += 3 * SLOT
    assert ledger.space.more()
    assert with_pages(ledger) == places + 3
    assert pages_of(ledger).places == 2 * places
    ledger.close()


def test_a_store_without_space_for_its_first_ghosts_is_an_error_with_the_remedy(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ghost_pages, "allocate_range", lambda *_: False)
    with pytest.raises(NoRoomError, match="ghosts: free some space or ask for a"):
        growing(shm_root)
    assert not (shm_root / "store").exists()


# ---- a file that is gone or damaged


def test_a_file_that_was_removed_costs_its_ghosts_only(shm_root: Path) -> None:
    ledger = growing(shm_root)
    put(ledger, keys(*range(1000)))
    remember(ledger.columns, range(50_000, 50_100))
    (ledger.directory / GHOSTS).unlink()
    places = pages_of(ledger).places
    put(ledger, keys(*range(1000, SLOTS)))
    assert with_pages(ledger) == SLOTS
    assert pages_of(ledger).places == places
    assert known(ledger.columns, range(50_000, 50_100)) == 100

    in_light_process(join_whole, shm_root)
    ledger.close()
    again = growing(shm_root)
    assert pages_of(again).places == SLOTS
    assert admin.gauges(again)["ready"] == SLOTS
    again.close()


def join_whole(root: Path) -> None:
    other = growing(root)
    assert pages_of(other).places == SLOTS
    assert known(other.columns, range(50_000, 50_100)) == 0
    admin.check(other)
    other.close()


@pytest.mark.parametrize(
    "said", [0, 1, FIRST - 1, 3 * FIRST, SLOTS, 2 * SLOTS, 2**64 - 1]
)
def test_a_number_that_no_process_wrote_is_not_believed(
    shm_root: Path, said: int
) -> None:
    """Nothing is touched that has no pages, and the store grows as before."""
    ledger = growing(shm_root)
    assert doubled(ledger, 2 * FIRST)
    remember(ledger.columns, range(100))
    kept = known(ledger.columns, range(100))
    pages_of(ledger).said[0] = said
    assert known(ledger.columns, range(100)) == kept
    held = (ledger.directory / GHOSTS).stat().st_blocks
    remember(ledger.columns, range(10_000, 20_000))
    assert (ledger.directory / GHOSTS).stat().st_blocks == held
    put(ledger, keys(*range(SLOTS)))
    assert with_pages(ledger) == SLOTS
    ledger.close()


# ---- other sizes


@pytest.mark.parametrize("grows", [True, False])
def test_a_larger_size_keeps_the_ghosts(shm_root: Path, grows: bool) -> None:
    ledger = growing(shm_root)
    put(ledger, keys(*range(300)))
    # not while a thread doubles the places: a ghost that is written then may be missed
    with root_locked(ledger.directory.parent, PATIENT_SECONDS):
        remember(ledger.columns, range(10_000, 10_100))
        kept = known(ledger.columns, range(10_000, 10_100))
    places = pages_of(ledger).places
    ledger.close()
    larger = growing(shm_root, 3 * SLOTS, FIRST * SLOT if grows else None)
    assert larger.slots == 3 * SLOTS
    with root_locked(larger.directory.parent, PATIENT_SECONDS):
        assert known(larger.columns, range(10_000, 10_100)) == kept
    if grows:
        assert places <= pages_of(larger).places < SLOTS
        while larger.space.more():
            assert pages_of(larger).places >= with_pages(larger)
    else:
        assert larger.columns.ghost_pages is None
        assert not (larger.directory / GHOSTS).exists()
    assert with_pages(larger) == 3 * SLOTS
    assert known(larger.columns, range(10_000, 10_100)) == kept
    admin.check(larger)
    larger.close()


def test_a_store_that_grows_at_its_next_start_takes_its_ghosts_along(
    shm_root: Path,
) -> None:
    ledger = growing(shm_root, 300, first=None)
    remember(ledger.columns, range(100))
    kept = known(ledger.columns, range(100))
    ledger.close()
    larger = growing(shm_root)
    assert pages_of(larger).places >= 300
    assert known(larger.columns, range(100)) == kept
    admin.check(larger)
    larger.close()


def test_the_same_size_asked_for_allocates_all_ghosts(shm_root: Path) -> None:
    for is_open in (True, False):
        root = shm_root / str(is_open)
        ledger = growing(root)
        assert pages_of(ledger).places < SLOTS
        if not is_open:
            ledger.close()
        whole = growing(root, first=None)
        assert with_pages(whole) == SLOTS == pages_of(whole).places
        whole.close()
        if is_open:
            ledger.close()


@pytest.mark.parametrize("step", ["allocate", "make", "_resize_tables"])
def test_a_crash_in_the_middle_of_a_resize_is_no_damage(
    shm_root: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = growing(shm_root)
    put(ledger, keys(*range(20)))
    ledger.close()

    def crash() -> None:
        def die(*_: object) -> None:
            kill_self()

        owner = ghost_pages if step == "make" else store_directory
        monkeypatch.setattr(owner, step, die)
        growing(shm_root, 2 * SLOTS)

    in_child(crash, -signal.SIGKILL)
    again = growing(shm_root, 2 * SLOTS)
    put(again, keys(*range(100, 100 + 2 * SLOTS)), chained=False)
    assert pages_of(again).places == 2 * SLOTS
    admin.check(again)
    again.close()


def test_a_smaller_size_and_removal(shm_root: Path) -> None:
    ledger = growing(shm_root)
    put(ledger, keys(*range(SLOTS)))
    ledger.close()
    smaller = growing(shm_root, SLOTS // 4)
    assert with_pages(smaller) <= SLOTS // 4 + 1
    assert pages_of(smaller).places == SLOTS, "they are remembered"
    put(smaller, keys(*range(50_000, 50_000 + SLOTS)), chained=False)
    admin.check(smaller)
    smaller.close()
    assert remove_store(shm_root / "store") > ghost_bytes(SLOTS)
    assert not (shm_root / "store").exists()


def test_columns_are_read_without_their_ghosts(shm_root: Path) -> None:
    ledger = growing(shm_root)
    put(ledger, keys(*range(20)))
    state = read_state(ledger.directory)
    assert state is not None
    held = (ledger.directory / COLUMNS).stat()
    assert held.st_blocks * 512 == held.st_size == state.sizes()[COLUMNS]
    columns = columns_in_memory(ledger.directory, state, ghosts=False)
    assert (columns.last_use == ledger.columns.last_use).all()
    assert columns.ghost_pages is None
    ledger.close()
