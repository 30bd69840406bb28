"""How the stores of one root share its space: each grows into free space, then the coldest chunk of
all is evicted.

The limit is for the pages of all slabs of the root: the largest that a store in use was opened
with. A fair share is the limit divided by the stores that are in use or hold something. When
nothing is free, a store below its share takes from those above theirs. A store at or above its
share only takes what is colder than its own coldest chunk, from stores above their share or without
a process that has them open. Stores of unknown formats on disk count, and are left alone; stores of
other versions in memory have a separate limit.

The steps of one transfer, all under the lock of the root, and never inside two gates at once:

    the giver           frees pages of its slab (`slab_pages`)
    no gate             the taker allocates pages for its slots: without free space it gets fewer,
                        without an error
    the taker's gate    these slots become free, and may be reserved only from now on

A process that dies between these steps leaves pages that no table lists: the next one that needs
space punches them. `Ledger` calls this module to fit a new store into the root, and hands it the
call that asks another store to give; `growth_thread` calls it to get more slots.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from pagoda.base.errors import ClosedError, NoRoomError, StoreError
from pagoda.base.file_space import (
    allocate_range,
    open_regular,
    reserve_in_place,
    size_in_words,
)
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.base.store_place import FIRST_PIECE_BYTES, free_bytes, growth_room
from pagoda.ledger.columns import NOT_READY
from pagoda.ledger.hint_pages import coldest_stamp
from pagoda.ledger.lmdb_tables import Meta, map_bytes
from pagoda.ledger.root_usage import (
    Holding,
    fair_share,
    holdings,
    root_limit,
    write_limit,
)
from pagoda.ledger.session import Session
from pagoda.ledger.slab_pages import SlabPages, ranges_of
from pagoda.ledger.store_state import FORMAT, TABLES, read_state
from pagoda.ledger.stores_under_root import openers, root_locked
from pagoda.ledger.transaction import Transaction, batches, window

log = guarded_logger("pagoda")

# taken in one transfer, which holds the lock of the root for some tens of ms
_MOST_PIECE_BYTES = 64 << 20
_LEAST_PIECES = 8  # into how many pieces a limit is divided at least
_RANGE_BYTES = 1 << 30  # how much one call allocates
_STEP_BYTES = (
    32 << 20
)  # how much a store that grows takes at once: some tens of ms
_FINISHED_BYTES = 8 << 20  # moved into huge pages at once
_HUGE_PAGE_BYTES = 2 << 20  # where a piece ends, if its slots allow that
_ROOT_SECONDS = 2.0
_SETTLE_SECONDS = 3.0  # how long an opening may take pieces from other stores
# the pause before a store that had nothing to give is asked again
_BARREN_SECONDS = 10.0
_TROUBLE = (StoreError, ClosedError, OSError)

# asks a store of the root to free that many bytes; returns how many it freed
Ask = Callable[[Holding, int], int]


class MappedSlab(Protocol):
    """A slab in memory, mapped by this process: `pagoda.slab.MemorySlab`."""

    def allocate_huge(self, fd: int, slots: range) -> bool:
        """Allocate the huge pages within these slots, which nobody uses yet, as far as there are
        some; return whether that is all of these slots.
        """

    def populate_slots(self, slots: range, collapse: bool) -> None:
        """Fault the pages of these slots in, which are allocated; `collapse` them into huge
        pages.
        """


class SpaceShare:
    """The share of one store in its root. Thread-safe: it makes every change under the lock of the
    root.
    """

    def __init__(self, session: Session, pages: SlabPages, ask: Ask) -> None:
        state = session.store.state
        self._session = session
        self._pages = pages
        self._asked_of = ask
        self._slots = state.slots
        self._slot_bytes = state.slot_bytes
        self._directory = session.store.directory
        self._root = self._directory.parent
        self._in_memory = state.kind == "memory"
        self.grown = 0  # how often it has grown, in this process
        # whether the last `more` found free memory or disk space
        self.has_grown = False
        # whether it failed, by an error or for lack of time
        self.in_trouble = False
        # what had too little room for the last piece, empty if it was allocated
        self.refused = ""
        # the mappings of this process, in which new pages are faulted in before they are used
        # a list, which one thread may read while another adds to it
        self._slabs: list[weakref.ref[MappedSlab]] = []
        self._mapped = 0  # the slots before this one are, in huge pages
        # whether the root held more than its limit when that was last checked
        self.exceeds = False
        self._log_lines = RateLimitedLog(session.clock)
        # store -> until when it is not asked
        self._barren: dict[Path, float] = {}

    # ---- taking

    def fit_to_limit(
        self, asked_bytes: int | None, first_bytes: int | None, seconds: float
    ) -> None:
        """Grow into free space, shrink to a smaller limit, take a first share. NoRoomError names
        the holders.

        `asked_bytes`: the limit that is asked for; while other users have asked for a larger one,
        that one counts. `first_bytes`: how much a store that grows as it fills takes now; None: as
        much as it may.
        """
        if not self._slot_bytes:
            return
        # or other stores would take what was given
        with root_locked(self._root, seconds):
            write_limit(self._directory, asked_bytes, sole=False)
            until = time.monotonic() + min(seconds, _SETTLE_SECONDS)
            # holes that are filled need no metadata: there may be space for more then
            if first_bytes is None:
                while self._grow(self._slots) and time.monotonic() < until:
                    pass
            until = time.monotonic() + min(seconds, _SETTLE_SECONDS)
            excess = self._shrink()
            begin_with = self._fair(holdings(self._root)) // 2
            if first_bytes is not None:
                begin_with = self._first_share(first_bytes, begin_with)
            while (
                self._pages.own_bytes() < begin_with
                and time.monotonic() < until
                and self._take()
            ):
                pass
        self._tell(excess)
        meta = self._pages.meta()
        every = holdings(self._root)
        if not meta.with_pages():
            self._require_later_pages(first_bytes is not None)
        if asked_bytes is not None and self._limit(every) > asked_bytes:
            text = (
                "%s may hold %s as long as it is open with that size elsewhere, not the "
                "%s asked for"
            )
            held, asked = self._limit(every), asked_bytes
            log.warning(
                text, self._root, size_in_words(held), size_in_words(asked)
            )
        if not meta.unbacked() or meta.unscanned() or first_bytes is not None:
            return
        left = self._limit(every) - sum(holding.nbytes for holding in every)
        wanted = min(left, meta.unbacked() * self._slot_bytes)
        # what the other stores of the root hold is shared later, and is no lack of space
        if (
            wanted >= self._slot_bytes
            and free_bytes(self._root, self._in_memory) < wanted
        ):
            log.warning(
                "%s has space for %d of %d chunks: %s has no more",
                self._directory,
                meta.with_pages(),
                meta.slots,
                "memory" if self._in_memory else "the disk",
            )

    def _first_share(self, first_bytes: int, fair_bytes: int) -> int:
        """Return how many bytes a store that grows as it fills may take from other stores when it
        is opened.
        """
        least = max(first_bytes // 2, self._slot_bytes)
        # what is free will do
        free = growth_room(self._root).nbytes
        return 0 if free >= self._slot_bytes else min(least, fair_bytes)

    def ahead(self, meta: Meta) -> int:
        """Return how many slots should be free, so that the next requests find some; 0 if all slots
        have pages. Cheap.
        """
        if not meta.unbacked() or not self._slot_bytes:
            return 0
        least = max(1, FIRST_PIECE_BYTES // self._slot_bytes)
        used = meta.with_pages() - meta.free()
        return min(window(self._slots), max(least, used))

    def lacks(self, wanted: int) -> bool:
        """Whether more pages are needed: for `wanted` free slots and, ahead of need, for those
        after them; or the root holds too much. Never raises for a failure at run time.
        """
        try:
            meta = self._pages.meta()
        except _TROUBLE:
            return False
        ahead = self.ahead(meta)
        few = bool(ahead) and meta.free() < max(ahead, wanted)
        return few or (self.exceeds and meta.free() < window(self._slots))

    def more(self) -> bool:
        """Get one more piece, free or from other stores; False if there is none now.

        If the root holds too much, because leased or used slots could not be given earlier, the
        excess is given back now.
        """
        was_in_trouble = self.in_trouble
        self.has_grown = False
        self.in_trouble = False
        try:
            with root_locked(self._root, _ROOT_SECONDS):
                self._shrink()
                piece = self._piece(holdings(self._root))
                if self._in_memory:
                    held = max(self._pages.own_bytes(), FIRST_PIECE_BYTES)
                    piece = min(piece, held, _STEP_BYTES)
                least = max(1, piece // self._slot_bytes)
                self.has_grown = self._grow(least, spares=True) > 0
                return self.has_grown or self._take()
        except ClosedError:
            return False
        except _TROUBLE as error:
            self.in_trouble = True
            self._session.count({"growth_failures": 1})
            if not was_in_trouble:
                self._log_lines.warn(
                    log,
                    Reason.IO_ERROR,
                    f"{self._directory} keeps its size for now: {error}; it asks again while it is "
                    "used",
                )
            return False

    def lags(self, backed: int) -> bool:
        """Whether this process has not yet faulted in all slots before `backed`. Cheap."""
        return backed > self._mapped and bool(self._slabs)

    def finish_pages(self) -> bool:
        """Fault in, in huge pages, some of what the store has gained, in whichever process; return
        whether there was any.
        """
        slabs = self._mapped_slabs()
        with contextlib.suppress(*_TROUBLE):
            if not slabs or self._mapped >= self._pages.meta().backed:
                return False
            # Slots whose pages another store has got since must stay without: under the lock of
            # the root no store gives pages away.
            with root_locked(self._root, _ROOT_SECONDS):
                stop = self._pages.meta().backed
                some = max(1, _FINISHED_BYTES // max(1, self._slot_bytes))
                fresh = range(self._mapped, min(stop, self._mapped + some))
                # a huge page is collapsed as a whole: the one in which the last step ended too
                border = fresh.start * self._slot_bytes // _HUGE_PAGE_BYTES
                first = border * _HUGE_PAGE_BYTES // max(1, self._slot_bytes)
                ending = range(first, fresh.stop)
                for slots in _common(self._pages.backed_ranges(), ending):
                    for slab in slabs:
                        slab.populate_slots(slots, collapse=True)
                self._mapped = max(self._mapped, fresh.stop)
                return len(fresh) > 0
        return False

    def begin_mapped(self, slab: MappedSlab, backed: int) -> None:
        """Fault new pages in for this slab too; it does so itself for the slots before `backed`."""
        self._mapped = max(self._mapped, backed)
        self._slabs.append(weakref.ref(slab, self._slabs.remove))

    def _mapped_slabs(self) -> list[MappedSlab]:
        found = [reference() for reference in list(self._slabs)]
        return [slab for slab in found if slab is not None]

    def after_scan(self) -> None:
        """Allocate pages again, within the limit, for the slots that a scan found empty."""
        with contextlib.suppress(*_TROUBLE):
            with root_locked(self._root, _ROOT_SECONDS):
                self._grow(self._slots)
                excess = self._shrink()
            self._tell(excess)

    def _shrink(self) -> int:
        """Take what the root holds beyond its limit from the stores above their share; return how
        much is left.

        Under the lock of the root.
        """
        every = holdings(self._root)
        limit = root_limit(every)
        excess = (
            0
            if limit is None
            else sum(holding.nbytes for holding in every) - limit
        )
        fair = self._fair(every)
        for holding in sorted(
            every, key=lambda one: one.directory != self._directory
        ):
            spare = min(excess, holding.nbytes - fair)
            if spare > 0:
                excess -= self._ask(holding, spare)
        self.exceeds = excess > self._slot_bytes
        return excess

    def _tell(self, excess: int) -> None:
        """Log which store holds how much, if it is too much. Not under the lock of the root: it
        opens other stores.
        """
        if self.exceeds:
            text = "%d bytes above the limit are still in use, and are given back later: %s"
            log.warning(text, excess, self._holders())

    def _grow(self, most: int, spares: bool = False) -> int:
        """Allocate up to `most` slots in free space; return how many. Under the lock of the
        root.

        `spares`: nobody asked for these bytes in particular, so a margin of memory is left to
        others. The order is: allocate, then list in the tables, which publishes; no slot is touched
        before.
        """
        meta = self._pages.meta()
        nbytes = self._slot_bytes
        if meta.unscanned() or not meta.unbacked():
            return 0
        self._pages.punch_left_over(meta)
        every = holdings(self._root)
        limit = root_limit(every)
        count = min(most, meta.unbacked())
        if limit is not None:
            count = min(
                count,
                (limit - sum(holding.nbytes for holding in every)) // nbytes,
            )
        if count <= 0:
            return 0
        spares = spares and self._in_memory
        if spares:
            room = growth_room(self._root)
            free = room.nbytes
            bound = room.bound
        else:
            free = free_bytes(self._root, self._in_memory)
            bound = "filesystem"
        count = min(count, free // nbytes)
        count = self._with_room_for_ghosts(meta, count, free)
        if count > 0 and not self._allocate_ghosts(meta, count):
            count = self._known_ghosts(meta)
            bound = "filesystem"
        if count <= 0:
            if spares:
                self._note_refusal(bound)
            return 0
        bare = self._pages.backing()[1][:count]
        tail = range(meta.backed, meta.backed + count - len(bare))
        if spares:
            tail = self._whole_pages(tail)
        got: list[range] = []
        huge = False
        slabs = self._mapped_slabs() if spares else []
        if self._allocate_tables(meta.backed, tail.stop):
            got, huge = self._allocate(ranges_of(bare), tail, slabs)
        if not got:
            if spares:
                self._note_refusal("filesystem")
            return 0
        # what another store gave says nothing about free memory
        if spares:
            self.refused = ""
        # not by the request that uses them first: that would take it several times as long
        for slab in slabs:
            for slots in got:
                slab.populate_slots(slots, collapse=False)
        listed = [
            slot for slots in got if slots.start < meta.backed for slot in slots
        ]
        for part in batches(listed):
            self._session.write(
                partial(Transaction.add_pages, slots=part), _ROOT_SECONDS
            )
        backed = max(slots.stop for slots in [*got, range(meta.backed)])
        self._session.write(
            partial(Transaction.extend_backed, backed=backed), _ROOT_SECONDS
        )
        if huge and self._mapped >= tail.start:
            self._mapped = max(self._mapped, tail.stop)
        self.grown += 1
        return sum(map(len, got))

    def _known_ghosts(self, meta: Meta) -> int:
        """Return for how many more slots there are ghosts, at least; all if the table does not
        grow.
        """
        ghosts = self._session.columns.ghost_pages
        if ghosts is None:
            return meta.slots
        return max(0, ghosts.places - meta.with_pages())

    def _with_room_for_ghosts(
        self, meta: Meta, count: int, free_bytes: int
    ) -> int:
        """Return for how many of `count` slots there is room, with the ghosts that they need."""
        ghosts = self._session.columns.ghost_pages
        if ghosts is None or count <= self._known_ghosts(meta):
            return count
        free_bytes -= ghosts.more_bytes(meta.with_pages() + count)
        fitting = max(self._known_ghosts(meta), free_bytes // self._slot_bytes)
        return min(count, fitting)

    def _allocate_ghosts(self, meta: Meta, count: int) -> bool:
        """Allocate the ghosts for `count` more slots; False without space for them."""
        ghosts = self._session.columns.ghost_pages
        return ghosts is None or ghosts.grow(meta.with_pages() + count)

    def _allocate_tables(self, backed: int, stop: int) -> bool:
        """Allocate the rows of the tables for slots from `backed` to `stop`; False without space
        for them.

        Tables of a store that grew under an older version, or on a disk, have them already.
        """
        if not self._in_memory:
            return True
        first = map_bytes(backed)
        nbytes = min(map_bytes(stop), self._session.store.state.map_bytes) - first
        if nbytes <= 0:
            return True
        with open_regular(self._directory / TABLES, "r+") as tables:
            self._session.require_store()
            return reserve_in_place(tables.fileno(), first, nbytes)

    def _whole_pages(self, tail: range) -> range:
        """Return these slots up to a border of huge pages, if there is one after a slot."""
        slots = _HUGE_PAGE_BYTES // math.gcd(_HUGE_PAGE_BYTES, self._slot_bytes)
        stop = tail.stop // slots * slots
        whole = tail.stop == self._slots or stop <= tail.start
        return tail if whole else range(tail.start, stop)

    def _note_refusal(self, bound: str) -> None:
        """Count a piece that was refused, and log the first of several."""
        self._session.count({f"growth_refused_{bound}": 1})
        if not self.refused:
            meta = self._pages.meta()
            self._log_lines.warn(
                log,
                Reason.FULL,
                f"{self._directory} keeps its {meta.with_pages()} of {meta.slots} chunks for now: "
                f"the {_in_words(bound)} has no more memory to spare; it asks again while it is "
                "used",
            )
        self.refused = bound

    def _allocate(
        self, bare: Iterable[range], tail: range, slabs: Sequence[MappedSlab]
    ) -> tuple[list[range], bool]:
        """Allocate slots until the file system is full, the tail in huge pages if one of `slabs`
        has some; return those that have pages now, and whether all of the tail are huge.
        """
        got: list[range] = []
        huge = bool(slabs)
        step = max(1, _RANGE_BYTES // self._slot_bytes)
        with self._pages.slab() as fd:
            for part in (
                slots[at : at + step]
                for slots in (*bare, tail)
                for at in range(0, len(slots), step)
            ):
                # if the part is refused, its huge pages are punched too
                if slabs and part.start >= tail.start:
                    huge = slabs[0].allocate_huge(fd, part) and huge
                if not allocate_range(
                    fd,
                    part.start * self._slot_bytes,
                    len(part) * self._slot_bytes,
                ):
                    return got, False
                got.append(part)
        return got, huge

    def _take(self) -> bool:
        """Take one piece from the store that must give, and grow by it; False if no store can give
        any.

        Under the lock of the root.
        """
        unbacked = self._pages.meta().unbacked() * self._slot_bytes
        plan = self._plan(unbacked) if unbacked else None
        if plan is None:
            return False
        giver, nbytes = plan
        given = self._ask(giver, nbytes)
        if not given:
            self._barren[giver.directory] = time.monotonic() + _BARREN_SECONDS
            return True  # another store may give
        # it may have given less than a slot needs: then another store gives the rest
        return (
            self._grow(max(1, nbytes // self._slot_bytes)) > 0 or given < nbytes
        )

    def _ask(self, holding: Holding, nbytes: int) -> int:
        """Make a store give that many bytes of pages; return how many it gave. Under the lock of
        the root.
        """
        if not _gives(holding):
            return 0
        try:
            return self._asked_of(holding, nbytes)
        except _TROUBLE as error:
            log.debug("%s gives nothing: %s", holding.directory, error)
            # unusable, so it was removed: all is free
            return 0 if holding.directory.exists() else holding.nbytes

    # ---- which store gives

    def _plan(self, most: int) -> tuple[Holding, int] | None:
        """Choose from which store to take how many bytes, at most `most`; None if it must evict its
        own coldest.
        """
        every = holdings(self._root)
        piece = self._piece(every)
        fair = self._fair(every)
        own = self._pages.own_bytes()
        below = own + self._slot_bytes <= fair
        own_age = 0.0 if below else self._age(self._directory)
        best: tuple[float, Holding, int] | None = None
        for other in every:
            spare = other.nbytes - fair
            may = spare > 0 or not (below or other.in_use)
            rests = self._barren.get(other.directory, 0.0) > time.monotonic()
            if (
                other.directory == self._directory
                or not may
                or rests
                or not _gives(other)
            ):
                continue
            age = self._age(other.directory)
            if age > own_age and (best is None or age > best[0]):
                room = min(
                    piece,
                    most,
                    spare if spare > 0 else other.nbytes,
                    fair - own if below else piece,
                )
                best = age, other, max(room, self._slot_bytes)
        return None if best is None else best[1:]

    def most_slots(self) -> int:
        """Return how many slots may have pages if no other store of the root needs space; all if
        that is not known.
        """
        if self._slot_bytes:
            with contextlib.suppress(OSError):  # the root may have been removed
                return min(
                    self._slots,
                    self._limit(holdings(self._root)) // self._slot_bytes,
                )
        return self._slots

    def growable(self) -> int:
        """Return how many slots in memory could get pages now, of free space; others may be
        faster.
        """
        if not self._in_memory or not self._slot_bytes:
            return 0
        with contextlib.suppress(*_TROUBLE):
            every = holdings(self._root)
            held = sum(holding.nbytes for holding in every)
            left = min(self._limit(every) - held, growth_room(self._root).nbytes)
            return max(
                0, min(self._pages.meta().unbacked(), left // self._slot_bytes)
            )
        return 0

    def _fair(self, every: Sequence[Holding]) -> int:
        """Return the bytes of a fair share."""
        return fair_share(every, self._slots * self._slot_bytes)

    def _limit(self, every: Sequence[Holding]) -> int:
        limit = root_limit(every)
        return self._slots * self._slot_bytes if limit is None else limit

    def _piece(self, every: Sequence[Holding]) -> int:
        return max(
            self._slot_bytes,
            min(_MOST_PIECE_BYTES, self._limit(every) // _LEAST_PIECES),
        )

    def _age(self, directory: Path) -> float:
        """Return for how long (ns) the coldest chunk of a store was not used, according to its
        hints.
        """
        try:
            state = read_state(directory)
            if state is None or state.boot_id != self._session.clock.boot_id():
                return math.inf
            coldest = coldest_stamp(directory, state)
        except (OSError, ValueError):  # being rebuilt
            return 0.0
        now = self._session.clock.monotonic_ns() + state.recency_offset
        return math.inf if coldest == NOT_READY else float(now - coldest)

    def _require_later_pages(self, grows: bool) -> None:
        """Check that a store without pages will get some. One that grows may take them later, if a
        slot needs more than is taken at once. NoRoomError.
        """
        lacks = f"no space for a chunk of {size_in_words(self._slot_bytes)}"
        if not grows:
            raise NoRoomError(f"{lacks}: {self._holders()}")
        room = growth_room(self._root)
        if room.nbytes < self._slot_bytes:
            bound = _in_words(room.bound)
            raise NoRoomError(
                f"{lacks}: the {bound} of {self._root} has {size_in_words(room.nbytes)} to "
                "spare. Free some memory, choose a smaller chunk_tokens, or set host_size to 0"
            )

    def _holders(self) -> str:
        """Describe which store holds how much of the root, and what can be done."""
        every = holdings(self._root)
        told = [f"{self._root} may hold {size_in_words(self._limit(every))}"]
        for one in every:
            if one.nbytes:
                kind = (
                    ""
                    if _gives(one)
                    else " (of a format that this version does not know)"
                )
                used = (
                    f", open in {_processes(one.directory)}" if one.in_use else ""
                )
                told.append(
                    f"{one.directory.name} holds {size_in_words(one.nbytes)}{kind}{used}"
                )
        return (
            "; ".join(told)
            + f". Raise {'host_size' if self._in_memory else 'disk_size'}, stop or remove one of "
            "them, or choose another path"
        )


def _common(ranges: Iterable[range], within: range) -> Iterator[range]:
    """Return the parts of these ranges that lie within another one."""
    for one in ranges:
        start = max(one.start, within.start)
        stop = min(one.stop, within.stop)
        if start < stop:
            yield range(start, stop)


def _in_words(bound: str) -> str:
    return "file system" if bound == "filesystem" else bound


def _processes(directory: Path) -> str:
    """Describe which processes have a store open."""
    pids = list[int]()
    with contextlib.suppress(OSError):  # it is being removed
        pids = sorted(openers(directory))
    if pids == [os.getpid()]:
        return "this process"
    others = [str(pid) for pid in pids if pid != os.getpid()]
    if not others:
        return "another process"
    return f"process{'es' * (len(others) != 1)} {', '.join(others)}"


def _gives(holding: Holding) -> bool:
    """Whether a store can be asked to give space: a store of an unknown format cannot."""
    state = holding.state
    return (
        state is not None
        and state.format == FORMAT
        and not state.private
        and holding.nbytes > 0
    )
