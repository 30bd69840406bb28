"""Stores of several layouts in one root: how much space each gets or gives up, without losing other
chunks.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from pagoda.base import file_space
from pagoda.base.clock import Clock
from pagoda.base.errors import NoRoomError, StoreError
from pagoda.base.file_space import size_in_words
from pagoda.ledger import (
    Ledger,
    Present,
    Reserved,
    StoreSpec,
    admin,
    hold_pin_remove,
    rebuild,
    slab_pages,
    space_sharing,
)
from pagoda.ledger.growth_thread import GrowthThread
from pagoda.ledger.root_usage import holdings, root_limit, write_limit
from pagoda.ledger.store_state import Kind, TableMark, set_mark
from pagoda.ledger.stores_under_root import root_locked
from pagoda.ledger.transaction import Transaction
from pagoda.ledger.upkeep_thread import UpkeepThread
from pagoda.slab import FileSlab, MemorySlab, aligned
from testbed.patience import Patience
from tests.children import (
    child,
    in_child,
    kill_self,
    wait,
)
from tests.faults.support import ROOT, AfterReboot, own_mounts, python, succeeded
from tests.ledger.support import (
    PATIENT_SECONDS,
    TENANT,
    Other,
    absorb_nothing,
    keys,
    put,
    spec,
)

PAGE = 4096
LIMIT = 64 * PAGE
KINDS: tuple[Kind, ...] = ("memory", "file")


class Room:
    """One store with its slab, and chunks whose bytes depend on their key."""

    def __init__(
        self,
        root: Path,
        name: str = "a",
        kind: Kind = "memory",
        pages: int = 1,
        limit: int = LIMIT,
        clock: Clock | None = None,
    ) -> None:
        spec = StoreSpec(
            root, name, kind, max(1, limit // (pages * PAGE)), pages * PAGE, limit
        )
        self.ledger = Ledger.open(spec, clock=clock)
        self.ledger.namespaces.register(TENANT, {"model": name})
        self.size = pages * PAGE
        slots = self.ledger.slots
        self.memory = (
            MemorySlab(
                self.ledger.slab_path, slots, self.size, self.ledger.page_guards
            )
            if kind == "memory"
            else None
        )
        self.file = (
            FileSlab(self.ledger.slab_path, slots, self.size)
            if kind == "file"
            else None
        )

    def bytes_of(self, key: bytes) -> np.ndarray:
        return np.frombuffer(blake3(key).digest(self.size), np.uint8)

    def write(self, slot: int, key: bytes) -> None:
        if self.memory is not None:
            self.memory.view(slot)[:] = self.bytes_of(key)
        if self.file is not None:
            room = aligned(self.size)
            room[:] = self.bytes_of(key)
            self.file.write(slot, [room])

    def read(self, slot: int) -> np.ndarray:
        if self.memory is not None:
            return self.memory.view(slot).copy()
        room = aligned(self.size)
        assert self.file is not None
        self.file.read(slot, [room])
        return room

    def put(self, wanted: Sequence[bytes]) -> int:
        """Store single chunks; return how many are stored."""
        done = 0
        for key in wanted:
            got = self.ledger.reserve(
                [key],
                namespace=TENANT,
                tokens=16,
                deadline_seconds=PATIENT_SECONDS,
            )[0]
            if isinstance(got, Reserved):
                self.write(got.slot, key)
                done += self.ledger.commit(
                    [got], deadline_seconds=PATIENT_SECONDS
                )[0]
            done += isinstance(got, Present)
        return done

    def get(self, wanted: Sequence[bytes], touch: bool = True) -> int:
        """Read single chunks and compare every byte; return how many were found."""
        found = 0
        for key in wanted:
            match = self.ledger.match_prefix(
                [key], touch=touch, deadline_seconds=PATIENT_SECONDS
            )
            if len(match.slots):
                copy = self.read(int(match.slots[0]))
                if self.ledger.still_valid(match.slots, match.generations)[0]:
                    assert np.array_equal(copy, self.bytes_of(key)), "wrong bytes"
                    found += 1
        return found

    def give(self, nbytes: int, idle: bool) -> int:
        """Do what another store of the root requests when it needs space."""
        with root_locked(self.ledger.directory.parent, PATIENT_SECONDS):
            return self.ledger.give_pages(nbytes, idle)

    def more(self, pieces: int = 1) -> bool:
        """Do what the ledger's thread does when there are too few slots."""
        done = [self.ledger.space.more() for _ in range(pieces)]
        return all(done)

    @property
    def pages(self) -> int:
        """Return the space of the slab, in pages."""
        return os.stat(self.ledger.slab_path).st_blocks * 512 // PAGE

    @property
    def backed(self) -> int:
        return sum(map(len, self.ledger.pages.backed_ranges()))

    def check(self) -> None:
        """Check that the tables are consistent, and that every slot that can be reserved has
        pages.
        """
        admin.check(self.ledger)
        assert self._agrees(
            lambda gauges: self.backed == gauges["slots"] - gauges["unbacked"]
        )
        if self.memory is not None:
            assert self._agrees(
                lambda _: self.pages * PAGE >= self.backed * self.size
            )

    def _agrees(self, right: Callable[[dict[str, int]], bool]) -> bool:
        """Return whether two readings agree; they are taken again if another process took or gave
        space in between.
        """
        return any(right(admin.gauges(self.ledger)) for _ in range(100))

    def close(self) -> None:
        self.ledger.close()
        for slab in (self.memory, self.file):
            if slab is not None:
                slab.close()


@pytest.fixture(autouse=True)
def no_thread(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let only `more` take space, except in tests of the other ways."""
    if "threads" not in request.fixturenames:
        monkeypatch.setattr(UpkeepThread, "wake", lambda *_, **__: None)
        monkeypatch.setattr(GrowthThread, "wake", lambda _: None)


@pytest.fixture
def threads() -> None:
    """Let the ledgers' own threads run in a test."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def test_a_store_that_is_alone_has_all_at_once(
    shm_root: Path, kind: Kind
) -> None:
    one = Room(shm_root, kind=kind)
    assert one.backed == 64
    assert one.pages == 64
    assert admin.gauges(one.ledger)["free"] == 64
    assert not one.more()
    one.check()
    one.close()


def test_the_policy_knows_how_many_chunks_fit(shm_root: Path, kind: Kind) -> None:
    one = Room(shm_root, kind=kind)
    assert one.put(keys(*range(64))) == 64
    assert one.ledger.columns.capacity == 64
    two = Room(shm_root, "b", kind)
    one.get(keys(1))
    two.put(keys(*range(100, 200)))
    while two.more():
        pass
    assert two.ledger.columns.capacity == two.pages < 64
    one.check()
    one.put(keys(*range(200, 210)))
    assert one.ledger.columns.capacity == one.pages < 64
    for room in (one, two):
        room.close()


def test_two_layouts_used_in_turn_keep_what_they_have(
    shm_root: Path, kind: Kind
) -> None:
    for turn in range(4):
        for name, pages in (("a", 1), ("b", 2)):
            room = Room(shm_root, name, kind, pages)
            wanted = keys(*range(8)) if name == "a" else keys(*range(100, 106))
            assert room.get(wanted) == (len(wanted) if turn else 0)
            assert room.put(wanted) == len(wanted)
            room.check()
            room.close()


def test_a_second_layout_opens_beside_a_full_one_and_gets_its_share_in_pieces(
    shm_root: Path, kind: Kind
) -> None:
    one = Room(shm_root, kind=kind)
    cold = keys(*range(32))
    hot = keys(*range(32, 64))
    assert one.put(cold) == 32
    assert one.put(hot) == 32
    two = Room(shm_root, "b", kind, pages=2)
    assert 0 < two.backed * 2 <= 32
    assert one.pages + two.pages <= 64
    two.put(keys(*range(100, 200)))
    while two.more():
        assert one.pages + two.pages <= 64
    assert two.pages == 32
    assert one.pages == 32
    assert one.get(cold, touch=False) == 0 and one.get(hot) == 32, (
        "the coldest were evicted"
    )
    assert (
        two.put(keys(*range(200, 216))) == two.get(keys(*range(200, 216))) == 16
    )
    for room in (one, two):
        room.check()
        room.close()


def test_a_thread_of_the_ledger_gets_what_is_lacking(
    shm_root: Path, threads: None
) -> None:
    one = Room(shm_root)
    two = Room(shm_root, "b")
    patience = Patience(PATIENT_SECONDS)
    number = 0
    while two.backed < 32 and not patience.ended:
        two.put(keys(number))
        number += 1
    assert two.backed == 32
    for room in (one, two):
        room.check()
        room.close()


def test_a_thread_that_was_woken_at_its_end_is_started_again(
    shm_root: Path, threads: None
) -> None:
    one = Room(shm_root, limit=LIMIT)
    # and the thread ended without seeing it
    one.ledger.growth_thread._woken.set()
    one.ledger.growth_thread.wake()
    thread = one.ledger.growth_thread._thread
    assert thread.is_alive()
    one.close()


def test_who_is_at_its_share_takes_only_what_is_colder_and_of_nobody_who_is_within_his(
    shm_root: Path, kind: Kind
) -> None:
    one = Room(shm_root, kind=kind)
    one.put(keys(*range(64)))
    one.close()
    two = Room(shm_root, "b", kind)
    two.more(100)
    assert two.backed == 32
    two.put(keys(*range(100, 132)))
    two.more()
    assert two.backed > 32, (
        "colder chunks of a store that no process has open are evicted"
    )
    one = Room(shm_root, kind=kind)
    before = one.backed
    one.get(keys(*range(64)))
    two.get(keys(*range(100, 132)))  # so that the chunks of `one` are colder
    assert not two.more()
    assert one.backed == before, "in use, and within its share"
    for room in (one, two):
        room.check()
        room.close()


def test_what_is_free_is_taken_before_anything_goes(
    shm_root: Path, kind: Kind
) -> None:
    one = Room(shm_root, kind=kind)
    one.put(keys(*range(8)))
    two = Room(shm_root, "b", kind)
    while two.more():
        pass
    assert two.backed == 32
    assert one.get(keys(*range(8))) == 8
    for room in (one, two):
        room.check()
        room.close()


def test_nothing_that_is_kept_is_taken(shm_root: Path) -> None:
    one = Room(shm_root)
    one.put(keys(*range(64)))
    rooms = [
        r
        for r in one.ledger.reserve(keys(1000, 1001), namespace=TENANT)
        if isinstance(r, Reserved)
    ]
    pinned = keys(*range(2, 12))
    held = keys(*range(12, 22))
    leased = keys(*range(22, 52))
    assert admin.pin(one.ledger, pinned, "ann") == 10
    for key in held:
        match = one.ledger.match_prefix([key], touch=False)
        assert one.ledger.hold(match.slots, match.generations) == [True]
    for key in leased:
        one.ledger.match_prefix([key], touch=False, lease_seconds=60.0)
    two = Room(shm_root, "b")
    while two.more():
        pass
    for item in rooms:
        one.write(item.slot, item.key)
    assert one.ledger.commit(rooms) == [True, True]
    assert one.get([*pinned, *held, *leased, *keys(1000, 1001)]) == 52
    for room in (one, two):
        room.check()
        room.close()


@pytest.mark.parametrize("how", ["pinned", "held"])
def test_what_is_kept_and_cold_hides_nothing_behind_it(
    shm_root: Path, how: str
) -> None:
    one = Room(shm_root)
    one.put(keys(*range(64)))
    kept = keys(*range(16))  # more than a piece, and the coldest
    if how == "pinned":
        assert admin.pin(one.ledger, kept, "ann") == 16
    else:
        for key in kept:
            match = one.ledger.match_prefix([key], touch=False)
            assert one.ledger.hold(match.slots, match.generations) == [True]
    two = Room(shm_root, "b")
    while two.more():
        pass
    assert one.backed == 32
    assert two.backed == 32
    assert one.get([*kept, *keys(*range(48, 64))]) == 32
    for room in (one, two):
        room.check()
        room.close()


def test_a_taking_from_a_store_that_keeps_all_ends(shm_root: Path) -> None:
    one = Room(shm_root)
    one.put(keys(*range(64)))
    for key in keys(*range(64)):
        match = one.ledger.match_prefix([key], touch=False)
        assert one.ledger.hold(match.slots, match.generations) == [True]
    with pytest.raises(NoRoomError, match="open in this process"):
        Room(shm_root, "b")
    assert one.get(keys(*range(64))) == 64
    one.close()


@pytest.mark.parametrize("how", ["damaged", "reboot"])
def test_an_idle_store_that_cannot_be_used_any_more_gives_its_room(
    shm_root: Path, how: str
) -> None:
    def fill() -> None:
        room = Room(shm_root)
        room.put(keys(*range(64)))
        room.close()

    in_child(fill)
    clock = Clock()
    if how == "damaged":
        set_mark(shm_root / "a", TableMark.DAMAGED, 1)
    else:
        clock = AfterReboot()
    two = Room(shm_root, "b", clock=clock)
    assert two.backed
    assert two.put(keys(*range(100, 164))) == 64
    while two.more():
        pass
    assert two.backed == 64
    assert not (shm_root / "a").exists()
    two.check()
    two.close()


def test_hints_of_another_boot_or_without_a_state_say_nothing_about_age(
    shm_root: Path,
) -> None:
    """Such a store gives first: its recency is of another clock."""
    two = Room(shm_root, "b")
    earlier = Room(shm_root, "a", clock=AfterReboot())
    earlier.put(keys(*range(4)))
    assert two.ledger.space._age(shm_root / "a") == math.inf
    assert two.ledger.space._age(shm_root / "absent") == math.inf
    two.put(keys(*range(100, 104)))
    assert 0 <= two.ledger.space._age(shm_root / "b") < math.inf
    earlier.close()
    two.close()


def test_a_damaged_limit_allows_nothing(shm_root: Path) -> None:
    one = Room(shm_root)
    for text in ("-1", str(1 << 70), "", "many"):
        (shm_root / "a" / "limit").write_text(text)
        assert root_limit(holdings(shm_root)) is None
    write_limit(shm_root / "a", LIMIT, sole=False)
    assert root_limit(holdings(shm_root)) == LIMIT
    one.close()


@pytest.mark.parametrize(
    "hot", [range(8), range(56, 64)], ids=["the first slots", "the last slots"]
)
def test_holes_of_an_idle_store_that_is_to_be_scanned_are_no_room(
    shm_root: Path, hot: range
) -> None:
    one = Room(shm_root, kind="file")
    one.put(keys(*range(64)))
    one.get(keys(*hot))
    one.close()
    one = Room(shm_root, kind="file", limit=8 * PAGE)
    assert one.backed == one.pages == 8
    one.close()
    (shm_root / "a" / "data.mdb").unlink()
    two = Room(shm_root, "b", "file", limit=8 * PAGE)
    assert two.backed == 2, "half of its share at once"
    while two.more():
        pass
    assert two.backed >= 4
    assert two.pages + one.pages == 8
    two.check()
    two.close()
    one = Room(shm_root, kind="file", limit=8 * PAGE)
    one.check()
    absorb_nothing(one.ledger)
    one.check()
    one.close()


def test_holes_that_a_scan_finds_are_not_given_out(shm_root: Path) -> None:
    one = Room(shm_root, kind="file")
    one.put(keys(*range(64)))
    one.close()
    Room(shm_root, kind="file", limit=8 * PAGE).close()
    (shm_root / "a" / "data.mdb").unlink()
    one = Room(shm_root, kind="file", limit=8 * PAGE)
    absorb_nothing(one.ledger)
    assert one.backed == one.pages == 8
    one.put(keys(*range(64)))
    assert one.backed == one.pages == 8
    one.check()
    one.close()


def test_a_file_system_without_holes_costs_no_chunk(
    shm_root: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no holes here")

    one = Room(shm_root, kind=kind)
    one.put(keys(*range(64)))
    monkeypatch.setattr(slab_pages, "punch", refuses)
    with pytest.raises(NoRoomError, match="open in this process"):
        Room(shm_root, "b", kind)
    assert one.get(keys(*range(64))) == one.backed == 64
    one.check()
    one.close()


def test_pages_that_a_gpu_knows_stay(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Room(shm_root)
    one.put(keys(*range(64)))
    assert one.ledger.register_device() == [range(64)]
    with pytest.raises(
        NoRoomError, match=f"a holds {size_in_words(LIMIT)}, open in this process"
    ):
        Room(shm_root, "b")
    assert one.get(keys(*range(64))) == 64
    one.close()
    two = Room(shm_root, "b")
    assert two.backed
    two.close()


def test_an_error_names_who_holds_the_room(shm_root: Path) -> None:
    (shm_root / "strange").mkdir()
    (shm_root / "strange" / "locks").touch()
    (shm_root / "strange" / "state").write_text("of a later version")
    (shm_root / "strange" / "slab").write_bytes(bytes(LIMIT))
    with pytest.raises(NoRoomError) as raised:
        Room(shm_root)
    said = str(raised.value)
    assert "strange holds" in said
    assert "does not know" in said
    assert "-" not in said.replace(str(shm_root), "")
    assert (shm_root / "strange" / "slab").stat().st_size == LIMIT, (
        "and left alone"
    )
    assert not (shm_root / "a").exists()

    def hold() -> None:
        other = Room(shm_root / "other")
        other.ledger.register_device()

    with (
        Other(hold) as process,
        pytest.raises(
            NoRoomError,
            match=f"a holds {size_in_words(LIMIT)}, open in process {process.pid}",
        ),
    ):
        Room(shm_root / "other", "b")


# sizes


@pytest.mark.parametrize(
    "limits", [(64, 16, 64, 8, 100), (8, 64, 9), (64, 1, 33)]
)
def test_sizes_change_at_any_restart_and_keep_what_fits(
    shm_root: Path, kind: Kind, limits: tuple[int, ...]
) -> None:
    stored: list[bytes] = []
    number = 0
    for limit in limits:
        room = Room(shm_root, kind=kind, limit=limit * PAGE)
        assert room.backed == room.pages == limit
        assert room.get(stored[-limit:], touch=False) == min(
            limit, len(stored)
        ), "the coldest were evicted"
        stored = stored[-limit:]
        new = keys(*range(number, number + limit // 2))
        assert room.put(new) == len(new)
        number += len(new)
        stored = (stored + new)[-limit:]
        assert room.get(stored, touch=False) == len(stored)
        room.check()
        room.close()


def test_a_size_of_another_time_does_not_count_for_who_only_looks(
    shm_root: Path,
) -> None:
    in_child(lambda: Room(shm_root).close())
    two = Room(shm_root, "b", limit=16 * PAGE)
    assert (
        two.pages + os.stat(shm_root / "a" / "slab").st_blocks * 512 // PAGE <= 16
    )
    looks = Ledger.attach(shm_root / "a")  # with 64 slots
    while two.more():
        pass
    assert two.pages + os.stat(looks.slab_path).st_blocks * 512 // PAGE <= 16
    looks.close()
    two.close()


def test_a_smaller_size_beside_others_waits_for_them(shm_root: Path) -> None:
    def fill() -> None:
        room = Room(shm_root)
        room.put(keys(*range(64)))
        kept.append(room)

    kept: list[Room] = []
    # first: a later child would inherit the open stores of this process
    with Other(fill):
        one = Room(shm_root, limit=8 * PAGE)
        assert one.backed == 64
        assert one.get(keys(*range(64))) == 64
        one.close()
    one = Room(shm_root)
    assert one.get(keys(*range(64))) == 64
    in_child(lambda: Room(shm_root, "b", limit=8 * PAGE).close())
    assert one.backed + 8 >= 64, "a small request takes little space"
    one.check()
    one.close()
    one = Room(shm_root, limit=8 * PAGE)
    assert one.backed == one.pages == 4, "the other half is b's share"
    one.close()


def test_less_than_a_slot_from_each_of_several_stores_is_enough_to_begin(
    shm_root: Path,
) -> None:
    kept: list[Ledger] = []

    def hold(name: str, slots: int, pages: int) -> None:
        spec = StoreSpec(shm_root, name, "memory", slots, pages * PAGE, LIMIT)
        kept.append(Ledger.open(spec))
        if name == "c":
            put(kept[-1], keys(1))  # a store with chunks is asked last

    # of four stores each has a share of 16 pages: the first two can give one each, and a slot needs
    # four
    others = [("a", 17, 1), ("b", 17, 1), ("c", 10, 3)]
    with contextlib.ExitStack() as stack:
        for other in others:
            stack.enter_context(Other(partial(hold, *other)))
        room = Room(shm_root, "d", pages=4)
        assert room.backed
        room.check()
        room.close()


def test_sizes_of_one_process_are_heeded_as_those_of_several(
    shm_root: Path, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    Room(shm_root, kind=kind).close()
    one = Room(shm_root, kind=kind, limit=8 * PAGE)
    assert one.backed == one.pages == 8
    assert not caplog.records
    two = Room(shm_root, kind=kind)
    assert one.backed == one.pages == 64
    three = Room(shm_root, kind=kind, limit=16 * PAGE)
    assert one.pages == 64
    assert f"may hold {size_in_words(LIMIT)}" in caplog.text
    four = Room(shm_root, kind=kind, limit=2 * LIMIT)
    assert "at most 64 slots" in caplog.text
    assert f"64 slots ({size_in_words(LIMIT)})" in caplog.text
    assert f"128 ({size_in_words(2 * LIMIT)}) asked for" in caplog.text
    for room in (four, three, two, one):
        room.check()
        room.close()


def test_a_smaller_size_beside_others_says_so(
    shm_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[Room] = []
    with Other(lambda: kept.append(Room(shm_root))):
        one = Room(shm_root, limit=8 * PAGE)
        assert f"may hold {size_in_words(LIMIT)}" in caplog.text
        assert f"not the {size_in_words(8 * PAGE)} asked for" in caplog.text
        one.close()


def test_a_second_policy_in_one_process_says_that_it_is_not_used(
    shm_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = StoreSpec(shm_root, "a", "memory", 64, PAGE, LIMIT)
    with (
        contextlib.closing(Ledger.open(spec, "lru")),
        contextlib.closing(Ledger.open(spec, "lru")),
    ):
        assert not caplog.records
        Ledger.open(spec, "hindsight").close()
        assert "has policy lru" in caplog.text
        assert "not the hindsight asked for" in caplog.text


def test_what_was_leased_at_a_smaller_size_is_given_back_later(
    shm_root: Path, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    one = Room(shm_root, kind=kind)
    every = keys(*range(64))
    assert one.put(every) == 64
    for key in every:
        one.ledger.match_prefix([key], lease_seconds=30.0)
    one.close()
    one = Room(shm_root, kind=kind, limit=8 * PAGE)
    assert one.pages == one.get(every, touch=False) > 8, (
        "nobody gave what was leased"
    )
    assert "given back later" in caplog.text
    assert one.ledger.space.exceeds
    one.ledger.columns.lease_until[:] = 0
    one.more()
    assert one.pages == one.backed == 8
    assert not one.ledger.space.exceeds
    assert one.get(every, touch=False) == 8
    one.check()
    one.close()


# death of processes


def test_killed_before_a_taking_is_published(
    shm_root: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Room(shm_root, kind=kind)
    one.put(keys(*range(64)))
    matches = [
        one.ledger.match_prefix([key], touch=False) for key in keys(*range(64))
    ]
    real = hold_pin_remove.vacate

    def vacates(
        transaction: Transaction,
        count: int,
        victims: Sequence[tuple[int, int]],
        in_memory: bool,
    ) -> list[int]:
        monkeypatch.setattr(
            Transaction,
            "publish",
            lambda *_: kill_self(),
        )
        return real(transaction, count, victims, in_memory)

    def take() -> None:
        monkeypatch.setattr(hold_pin_remove, "vacate", vacates)
        Room(shm_root, "b", kind)

    assert wait(child(take)) == -signal.SIGKILL
    two = Room(shm_root, "b", kind)
    while two.more():
        pass
    for key, match in zip(keys(*range(64)), matches, strict=True):
        copy = one.read(int(match.slots[0]))
        if one.ledger.still_valid(match.slots, match.generations)[0]:
            assert np.array_equal(copy, one.bytes_of(key)), (
                "a reader took zeros for the chunk"
            )
    for room in (one, two):
        room.check()
        room.close()


@pytest.mark.parametrize(
    "step", ["vacate", "punch", "punched", "allocate_range", "allocated"]
)
def test_killed_at_any_step_of_a_taking(
    shm_root: Path, kind: Kind, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Room(shm_root, kind=kind)
    one.put(keys(*range(64)))
    one.get(keys(*range(40, 64)))
    name = {"punched": "punch", "allocated": "allocate_range"}.get(step, step)
    place = space_sharing
    if step == "vacate":
        place = hold_pin_remove
    if name == "punch":
        place = slab_pages
    real = getattr(place, name)

    def dies(*arguments: int, **_: object) -> object:
        # checks whether holes are possible
        if name == "punch" and arguments[1] >= os.fstat(arguments[0]).st_size:
            return real(*arguments)
        if step in ("punched", "allocated"):
            real(*arguments)
        kill_self()

    def take() -> None:
        monkeypatch.setattr(place, name, dies)
        Room(shm_root, "b", kind).more(10)

    assert wait(child(take)) == -signal.SIGKILL
    one.check()
    left = one.get(keys(*range(40, 64)))
    assert left == 24
    two = Room(shm_root, "b", kind)
    while two.more():
        pass
    assert two.backed == two.pages == one.backed == one.pages == 32, (
        "no space is lost permanently"
    )
    assert one.get(keys(*range(40, 64))) == 24
    two.put(keys(*range(100, 132)))
    assert two.get(keys(*range(100, 132))) == 32
    for room in (one, two):
        room.check()
        room.close()


# at the same time


def test_a_view_keeps_its_pages_and_one_of_a_bare_slot_touches_none(
    shm_root: Path,
) -> None:
    one = Room(shm_root)
    one.put(keys(0))
    match = one.ledger.match_prefix(keys(0), touch=False)
    slot = int(match.slots[0])
    assert one.memory is not None
    view = one.memory.view(slot)[16:].view(np.uint64)[1:]
    one.give(LIMIT, idle=False)
    assert one.backed == 0 and one.pages == 1, "slots with a view stay for now"
    assert not one.ledger.still_valid(match.slots, match.generations)[0]
    assert np.array_equal(view, one.bytes_of(keys(0)[0])[16:].view(np.uint64)[1:])
    assert not one.memory.view(slot).any(), "a slot without pages reads as zeros"
    del view
    one.give(1, idle=False)
    assert one.pages == 0
    assert not one.memory.view(slot).any()
    assert one.pages == 0
    while one.more():
        pass
    assert one.backed == 64
    assert one.put(keys(*range(64))) == 64
    assert one.get(keys(*range(64))) == 64
    one.check()
    one.close()


def test_the_view_of_another_process_keeps_its_pages_until_it_dies(
    shm_root: Path,
) -> None:
    one = Room(shm_root)
    two = Room(shm_root, "b")
    one.put(keys(*range(48)))
    coldest = one.ledger.next_victims(2).tolist()
    kept: list[object] = []

    def look() -> None:
        room = Room(shm_root)
        assert room.memory is not None
        kept.extend([room, room.memory.views(coldest)])

    with Other(look):
        assert one.give(PAGE * 8, idle=False) == PAGE * 6
        assert one.backed == 40
        assert one.pages == 42
    assert one.give(PAGE * 2, idle=False) == PAGE * 2
    assert one.backed == 40
    assert one.pages == 40
    for room in (one, two):
        room.check()
        room.close()


def test_the_views_of_the_dead_are_not_those_of_the_next_member(
    shm_root: Path,
) -> None:
    one = Room(shm_root)
    two = Room(shm_root, "b")
    one.put(keys(*range(48)))
    coldest = one.ledger.next_victims(2).tolist()
    kept: list[object] = []

    def look() -> None:
        room = Room(shm_root)
        assert room.memory is not None
        kept.extend([room, *[room.memory.views(coldest) for _ in range(3)]])

    def join() -> None:
        kept.append(Room(shm_root))
        # as a new member, in the row of the dead one
        assert one.get(keys(47)) == 1

    Other(look).end()
    with Other(join):
        assert one.give(PAGE * 8, idle=False) == PAGE * 8
    for room in (one, two):
        room.check()
        room.close()


def test_a_forked_child_lends_for_itself_and_gives_nothing_back_for_its_parent(
    shm_root: Path,
) -> None:
    one = Room(shm_root)
    two = Room(shm_root, "b")
    one.put(keys(*range(48)))
    coldest = one.ledger.next_victims(4).tolist()
    assert one.memory is not None
    views = one.memory.views(coldest[:2])
    kept: list[object] = []

    def act() -> None:
        views.clear()
        assert one.memory is not None
        kept.extend(one.memory.views(coldest[2:3]))  # before any other call

    with Other(act):
        assert one.give(4 * PAGE, idle=False) == PAGE
        views.clear()
        assert one.give(PAGE, idle=False) == 2 * PAGE
    assert one.give(PAGE, idle=False) == PAGE
    assert one.backed == one.pages == 44
    for room in (one, two):
        room.check()
        room.close()


@pytest.mark.slow
def test_several_layouts_at_once_over_many_takings(
    shm_root: Path, kind: Kind, threads: None
) -> None:
    def work(name: str, pages: int, seed: int) -> Callable[[], None]:
        def act() -> None:
            dice = random.Random(seed)
            room = Room(shm_root, name, kind, pages)
            for turn in range(60):
                first = dice.randrange(200)
                wanted = keys(*range(first, first + 20))
                for step in (room.get, room.put, room.get):
                    step(wanted)
                if turn % 10 == 5:
                    room.check()
                if turn % 20 == 19:
                    room.close()
                    room = Room(shm_root, name, kind, pages)
            room.close()

        return act

    layouts = [("a", 1), ("b", 2), ("a", 1), ("c", 3)]
    children = [
        child(work(name, pages, seed))
        for seed, (name, pages) in enumerate(layouts)
    ]
    assert [wait(pid) for pid in children] == [0, 0, 0, 0]
    rooms = [Room(shm_root, name, kind, pages) for name, pages in layouts[1:]]
    for room in rooms:
        room.check()
    assert sum(room.pages for room in rooms) <= 64
    for room in rooms:
        room.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_anything_in_any_order_adds_up(
    shm_root: Path, kind: Kind, seed: int
) -> None:
    dice = random.Random(seed)
    rooms = dict[str, Room]()
    pages = {"a": 1, "b": 2, "c": 5}
    for _ in range(120):
        name = dice.choice("abc")
        room = rooms.get(name)
        if room is None:
            limit = dice.choice([LIMIT, LIMIT // 2, LIMIT * 2])
            # space that all others protect is not taken
            with contextlib.suppress(NoRoomError):
                rooms[name] = Room(shm_root, name, kind, pages[name], limit)
            continue
        wanted = keys(
            *range(first := dice.randrange(60), first + dice.randrange(1, 12))
        )
        match dice.randrange(9):
            case 0 | 1 | 2:
                room.put(wanted)
            case 3:
                room.get(wanted)
            case 4 | 5:
                room.more()
            case 6:
                room.give(dice.randrange(1, 20) * PAGE, idle=False)
            case 7:
                (admin.pin if dice.random() < 0.5 else admin.unpin)(
                    room.ledger, wanted, "ann"
                )
            case 8:
                rooms.pop(name).close()
        for other in rooms.values():
            other.check()
        assert sum(other.pages for other in rooms.values()) * PAGE <= 2 * LIMIT
    for room in rooms.values():
        room.get(keys(*range(72)))
        room.check()
        room.close()


def test_a_file_system_that_is_full_in_the_middle_gives_fewer_slots(
    shm_root: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Room(shm_root, kind=kind)
    one.put(keys(*range(64)))
    one.give(LIMIT // 2, idle=False)
    real = space_sharing.allocate_range
    left = [3]

    def allocate(fd: int, offset: int, nbytes: int) -> bool:
        left[0] -= 1
        return left[0] >= 0 and real(fd, offset, nbytes)

    monkeypatch.setattr(space_sharing, "_RANGE_BYTES", 2 * PAGE)
    monkeypatch.setattr(space_sharing, "allocate_range", allocate)
    before = one.backed
    one.more()
    assert one.backed == one.pages == before + 6
    one.check()
    assert one.put(keys(*range(100, 100 + one.backed))) == one.backed
    one.check()
    one.close()


FULL = """
import os, subprocess, sys, threading
from functools import partial
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.ledger.support import keys
from tests.ledger.test_space_sharing import Room

where = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m,mode=0700", "tmpfs", where], check=True)
one = Room(where / "root", "a", pages=64, limit=32 << 20)
assert one.put(keys(*range(128))) == 128
match = one.ledger.match_prefix(keys(7), touch=False)
views = one.memory.views(match.slots.tolist())  # of a reader that is blocked all the time
stop, wrong = threading.Event(), []

def reads():
    try:
        while not stop.is_set():
            one.get(keys(*range(0, 128, 3)))
    except BaseException as error:
        wrong.append(error)

readers = [threading.Thread(target=reads) for _ in range(2)]
for reader in readers:
    reader.start()
two = Room(where / "root", "b", pages=32, limit=32 << 20)
fd = os.open(where / "junk", os.O_CREAT | os.O_WRONLY)
for turn in range(30):
    for piece in (1 << 20, 4096, 1):
        try:
            while True:
                os.write(fd, bytes(piece))
        except OSError:
            pass
    two.put(keys(*range(turn * 50, turn * 50 + 50)))
    two.get(keys(*range(turn * 50, turn * 50 + 50)))
    two.more()
    one.put(keys(*range(turn * 20, turn * 20 + 10)))
    one.more()
stop.set()
for reader in readers:
    reader.join()
assert not wrong, wrong
assert not one.ledger.still_valid(match.slots, match.generations)[0], "it was to go"
assert one.memory.array[match.slots[0]].any(), "every page still exists"
del views
one.check()
two.check()
print("fine", one.backed, two.backed)
"""


@pytest.mark.slow
def test_a_full_file_system_is_never_a_signal(tmp_path: Path) -> None:
    assert "fine" in succeeded(
        python(FULL, tmp_path, ROOT, before=own_mounts(), seconds=200)
    )


def test_pages_behind_the_slots_that_were_ever_used_come_back(
    shm_root: Path, kind: Kind
) -> None:
    one = Room(shm_root, kind=kind)
    one.put(keys(*range(64)))
    two = Room(shm_root, "b", kind)
    backed = two.backed
    fd = os.open(two.ledger.slab_path, os.O_RDWR)
    # like a process that is killed before it records them
    os.posix_fallocate(fd, backed * PAGE, 8 * PAGE)
    os.close(fd)
    assert two.pages == backed + 8
    two.give(PAGE, idle=False)
    assert two.pages == two.backed == backed
    for room in (one, two):
        room.check()
        room.close()


def test_an_allocation_that_fails_in_the_middle_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.posix_fallocate

    # like file systems without a way to undo it
    def half(fd: int, offset: int, nbytes: int) -> None:
        real(fd, offset, nbytes // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open(tmp_path / "slab", "w+b") as slab:
        slab.truncate(16 * PAGE)
        real(slab.fileno(), 0, PAGE)
        monkeypatch.setattr(file_space, "posix_fallocate", half)
        assert not space_sharing.allocate_range(slab.fileno(), 4 * PAGE, 8 * PAGE)
        assert os.fstat(slab.fileno()).st_blocks * 512 == PAGE


def test_a_scan_that_ends_by_a_taking_leaves_no_tenant_without_chunks(
    shm_root: Path,
) -> None:
    one = Room(shm_root, kind="file")
    one.put(keys(*range(64)))
    admin.clear(one.ledger, TENANT)
    one.put(keys(*range(64)))
    one.close()
    set_mark(shm_root / "a", TableMark.DAMAGED, 1)
    one = Room(shm_root, kind="file")
    assert len(rebuild.unscanned(one.ledger)) == 64
    assert list(one.ledger.namespaces.counts())
    one.give(LIMIT, idle=True)
    assert not rebuild.unscanned(one.ledger)
    assert one.pages == 0
    assert not list(one.ledger.namespaces.counts())
    one.close()


def test_a_directory_that_was_replaced_gives_nothing(
    shm_root: Path, kind: Kind
) -> None:
    one = Room(shm_root, kind=kind)
    one.put(keys(*range(64)))
    shutil.copytree(shm_root / "a", shm_root / "copy")
    os.rename(shm_root / "a", shm_root / "away")
    os.rename(shm_root / "copy", shm_root / "a")
    before = one.pages
    with contextlib.suppress(StoreError):
        one.give(LIMIT, idle=False)
    assert one.pages == before == 64, "the pages there belong to another store"
    one.close()


def test_what_others_use_gives_no_more_than_is_above_its_share(
    shm_root: Path, kind: Kind
) -> None:
    one = Room(shm_root, kind=kind)
    two = Room(shm_root, "b", kind)
    one.put(keys(*range(one.backed)))
    assert one.backed > 32

    def use() -> None:
        assert one.get(keys(0)) == 1

    with Other(use):
        one.give(LIMIT, idle=True)
        assert one.backed == one.pages == 32
    for room in (one, two):
        room.check()
        room.close()


def test_the_limit_of_a_store_that_nobody_has_open_counts_no_more(
    shm_root: Path, kind: Kind
) -> None:
    one = Room(shm_root, kind=kind, limit=2 * LIMIT)
    one.put(keys(*range(128)))
    one.give(112 * PAGE, idle=False)
    assert one.pages == 16
    one.close()
    two = Room(shm_root, "b", kind)  # grows into what is free
    assert (
        os.stat(shm_root / "a" / "slab").st_blocks * 512 + two.pages * PAGE
        <= LIMIT
    )
    two.check()
    two.close()


@pytest.mark.parametrize(
    "trouble", ["its writer was killed", "it cannot be written"]
)
def test_no_half_written_limit_is_left(
    shm_root: Path, kind: Kind, trouble: str
) -> None:
    one = Room(shm_root, kind=kind)
    one.close()
    if trouble == "its writer was killed":
        (shm_root / "a" / "limit.new").touch()
    else:
        (shm_root / "a" / "limit").unlink()
        (shm_root / "a" / "limit").mkdir()
    one = Room(shm_root, kind=kind)
    assert not (shm_root / "a" / "limit.new").exists()
    one.check()
    one.close()


@pytest.mark.parametrize("passing", [".new-0123456789ab", ".gone-0123456789ab"])
def test_what_was_killed_while_it_made_or_removed_a_store_is_not_grown_beside(
    shm_root: Path, kind: Kind, passing: str
) -> None:
    one = Room(shm_root, kind=kind)
    one.put(keys(*range(64)))
    one.give(LIMIT // 2, idle=False)
    shutil.copytree(shm_root / "a", shm_root / passing)
    while one.more():
        pass
    assert one.pages == 64
    assert not (shm_root / passing).exists()
    one.check()
    one.close()


def test_space_that_another_store_of_the_root_holds_is_no_lack_of_memory(
    shm_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A second cache in one root gets its share later; the log must not send people to look for
    memory.
    """
    size = 32 << 20
    stores = [
        Ledger.open(
            spec(
                shm_root,
                size // 24576,
                name=name,
                slot_bytes=24576,
                limit_bytes=size,
            )
        )
        for name in ("a", "b")
    ]
    for store in stores:
        store.close()
    assert "no more" not in caplog.text
