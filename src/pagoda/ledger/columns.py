"""The columns of a ledger: one row per slot, mapped, shared by all processes; hints that may be
lost or torn.

In host memory `generation` and `key` are more than hints: they are the published copy of what the
tables say, and are compared with it. They are assigned inside the gate, after the commit of the
transaction that decided them, and before the first byte of the slot is written. For a store on disk
all columns are hints: what is served is decided by its tables and by the headers of its slots, and
the columns only rank chunks (see `hint_pages`).

Beside them is the table of ghosts (`ghost_table`): behind the columns in their file, or, where it
grows, in a file of its own (`ghost_pages`).
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

# else the first large `np.isin` imports it, and a child that is forked meanwhile waits forever
import numpy.ma
from numpy.typing import NDArray

from pagoda.base.errors import NoRoomError
from pagoda.base.file_space import allocate, opened
from pagoda.ledger.ghost_pages import GhostPages
from pagoda.ledger.ghost_table import (
    LAST_STAMP,
    WAYS,
    WIDTHS,
    GhostTable,
    Rows,
    marks_of,
)
from pagoda.policy import Contexts, Ghosts
from pagoda.policy.reuse_context import known_contexts

# `last_use` of a slot that has no chunk to evict
NOT_READY = np.iinfo(np.int64).max
LONGEST_LEASE_NS = 60 * 10**9
NO_PARENT = -1
BARE = 1 << 63  # in the published generation of a slot that has no pages
# up to this number of rows, a loop over `Columns.cells` is cheaper than several array operations
FEW_USED = 32
# the place of some columns in `Columns.cells`
_LEASE_CELLS = 3
PARENT_CELLS = 4
KEY_BYTES = 32
_ALIGN = 4096

# ghosts of a store on disk: eight for each slot as in host memory, but together at most this many,
# or one for each slot
_MOST_GHOSTS = 1 << 20
# the number of slots sampled to estimate how many are leased; takes some us
_COUNTED = 2048

PER_SLOT = 8
D = TypeVar("D", bound=np.generic)


class Columns:
    """Numpy views of the mapped file, each of length `slots`. Writers follow the rule in the
    module's docstring.

    generation uint64 · keys uint64 (slots, 4) · last_use int64 (recency stamp) · lease_until int64
    (ns, monotonic) · parent_slot int64 · parent_generation uint64 · hits uint32 · position uint32.
    """

    def __init__(
        self,
        source: Path | mmap.mmap | None,
        slots: int,
        ghosts: int | None = None,
        ghost_pages: GhostPages | None = None,
    ) -> None:
        """Map the file `source`, or use that memory; None: private memory, zeroed. It has
        `columns_bytes` bytes.

        `ghosts`: how many that memory has, by default 8 for each slot. `ghost_pages`: where ghosts
        are instead.
        """
        ghosts = PER_SLOT * slots if ghosts is None else ghosts
        nbytes = columns_bytes(slots, ghosts)
        if source is None:
            self._map = mmap.mmap(-1, nbytes)
        elif isinstance(source, mmap.mmap):
            self._map = source
        else:
            self._map = map_file(source, nbytes)
        self.slots = self.capacity = self.backed = slots
        self._offset = 0
        self.generation: NDArray[np.uint64] = self._view(np.uint64, slots)
        # to read keys as bytes: the memory, and where the first one is
        self.published_keys = self._map, self._offset
        self.keys: NDArray[np.uint64] = self._view(np.uint64, slots * 4).reshape(
            slots, 4
        )
        self.last_use: NDArray[np.int64] = self._view(np.int64, slots)
        self.lease_until: NDArray[np.int64] = self._view(np.int64, slots)
        self.parent_slot: NDArray[np.int64] = self._view(np.int64, slots)
        self.parent_generation: NDArray[np.uint64] = self._view(np.uint64, slots)
        self.hits: NDArray[np.uint32] = self._view(np.uint32, slots)
        self.position: NDArray[np.uint32] = self._view(np.uint32, slots)
        self.cells = self.new_cells()
        self.ghost_pages = ghost_pages
        # what `ghost_pages` said when the table was last looked at
        self._said = 0
        if ghost_pages is None:
            self._table = GhostTable(
                self._view(np.uint64, ghosts),
                self._view(np.int64, ghosts),
                self._view(np.int64, ghosts),
                self._view(np.uint16, ghosts),
                self._view(np.uint8, ghosts),
            )
        else:
            self._said = ghost_pages.said[0]
            self._table = ghost_pages.table()
        self.contexts: Contexts | None = None

    @property
    def table(self) -> GhostTable:
        """The ghosts. One that grows is another object after that, so take it anew for each
        call.
        """
        pages = self.ghost_pages
        if pages is not None and pages.said[0] != self._said:
            self._said = pages.said[0]
            self._table = pages.table(self._table)
        return self._table

    @property
    def ghosts(self) -> Ghosts:
        """The part of the ghosts that policies read."""
        return self.table.read_by_policies

    def forgotten(
        self,
    ) -> Iterator[tuple[NDArray[np.uint32], Rows, NDArray[np.uint16]]]:
        """Take the ghosts that this process replaced since the last call."""
        return self._table.forgotten()

    def note_contexts(self) -> Contexts:
        """Keep the context of each chunk from now on, in private memory: all are unknown."""
        pages = self.ghost_pages
        most = self._table.places if pages is None else pages.most
        ghosts = most * WAYS
        self.contexts = Contexts(
            np.zeros(self.slots, np.uint16),
            np.zeros(self.slots, np.uint16),
            np.zeros(self.slots, np.uint16),
            np.zeros(self.slots, np.uint16),
            np.zeros(ghosts, np.uint16),
        )
        self._table.contexts = self.contexts.of_ghosts
        return self.contexts

    def forget_contexts(self) -> None:
        """Keep no contexts from now on: a forked child has none of its own."""
        self.contexts = None
        self._table.contexts = None

    def contexts_of(self, slots: Rows) -> NDArray[np.uint16] | None:
        """Return the contexts of the chunks in these slots; None if nobody keeps them."""
        if self.contexts is None:
            return None
        return known_contexts(self.contexts, slots, self.generation[slots])

    def note_pages(self, backed: int, fitting: int) -> None:
        """Note that slots from `backed` on have no pages, and how many have some."""
        self.backed = max(1, backed)
        self.capacity = max(1, fitting)

    def new_cells(self) -> list[memoryview]:
        """Return memory views of the columns, for single values at two thirds of the cost; keys as
        bytes.

        Code that uses `cells` which were released gets ValueError at its next access.
        """
        return [
            self.keys.data.cast("B") if one is self.keys else one.data
            for one in self._all()
        ]

    def _view(self, dtype: type[D], count: int) -> NDArray[D]:
        view: NDArray[D] = np.frombuffer(self._map, dtype, count, self._offset)
        self._offset += _aligned(view.nbytes)
        return view

    def reset(self) -> None:
        """Write the columns of an empty store."""
        self.last_use[:] = NOT_READY
        self.parent_slot[:] = NO_PARENT

    def copy_from(self, other: Columns) -> None:
        """Copy the rows that both have (after a resize), and the ghosts."""
        both = min(self.slots, other.slots)
        for own, old in zip(self._all(), other._all(), strict=True):
            own[:both] = old[:both]
        self.parent_slot[self.parent_slot >= self.slots] = NO_PARENT
        self.table.copy_from(other.table)

    def _all(self) -> tuple[NDArray[np.generic], ...]:
        return (
            self.generation,
            self.keys,
            self.last_use,
            self.lease_until,
            self.parent_slot,
            self.parent_generation,
            self.hits,
            self.position,
        )

    def key_of(self, slot: int) -> bytes:
        """Return the published key of a slot."""
        memory, keys_at = self.published_keys
        begin = keys_at + slot * KEY_BYTES
        return memory[begin : begin + KEY_BYTES]

    def places_of(self, keys: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """Return slot and key for each of these keys that is published, complete or not. Reads all
        rows.
        """
        slots = np.flatnonzero(np.isin(self.keys[:, 0], marks_of(keys)))
        asked = set(keys)
        return [
            (slot, key)
            for slot in slots.tolist()
            if (key := self.key_of(slot)) in asked
        ]

    def are_published(
        self, slots: Rows, keys: Sequence[bytes]
    ) -> NDArray[np.bool_]:
        """Return for each of these slots whether it is published under its key."""
        asked = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 4)
        return np.asarray((self.keys[slots] == asked).all(axis=1))

    def lease(self, rows: Rows, now: int, nanoseconds: int) -> None:
        """Keep these slots from eviction for a while from `now` on; at most half of the chunks that
        fit now are leased at once.

        In a large store a sample is counted: counting all slots would cost more than the rest of a
        lookup.
        """
        fresh = self.lease_until[rows] <= now
        if fresh.any():
            room = self._room_for_leases(now)
            rows = np.concatenate([rows[~fresh], rows[fresh][:room]])
        self.lease_until[rows] = np.maximum(
            self.lease_until[rows], now + nanoseconds
        )

    def lease_few(self, slots: Sequence[int], now: int, nanoseconds: int) -> None:
        """Do the same for few slots, one by one."""
        lease_until = self.cells[_LEASE_CELLS]
        end = now + nanoseconds
        room = -1  # not known yet
        for slot in slots:
            before = lease_until[slot]
            if before <= now:
                if room < 0:
                    room = self._room_for_leases(now)
                if not room:
                    continue
                room -= 1
            if before < end:
                lease_until[slot] = end

    def _room_for_leases(self, now: int) -> int:
        """Return how many more chunks may be leased."""
        # take another sample each time, at an odd step: the slots of one prompt often have a
        # regular step, a power of two
        step = self.slots // _COUNTED | 1
        sample = self.lease_until[now % step :: step]
        leased = int(np.count_nonzero(sample > now)) * self.slots // len(sample)
        return max(0, self.capacity // 2 - leased)

    def sane(self) -> None:
        """Replace values that no process writes: these columns were read from a file."""
        # these times may be from another boot
        self.lease_until[
            self.lease_until > time.monotonic_ns() + LONGEST_LEASE_NS
        ] = 0
        self.last_use[self.last_use > LAST_STAMP] = NOT_READY
        outside = (self.parent_slot < NO_PARENT) | (
            self.parent_slot >= self.slots
        )
        self.parent_slot[outside] = NO_PARENT
        self.table.sane()


def map_file(path: Path, nbytes: int) -> mmap.mmap:
    """Map a file, shared with other processes."""
    with opened(path, os.O_RDWR) as fd:
        return mmap.mmap(fd, nbytes)


def map_or_private(source: Path | mmap.mmap | None, nbytes: int) -> memoryview:
    """Return that memory, or map that file; make it if it does not exist. Without space for it:
    private memory.
    """
    if isinstance(source, mmap.mmap):
        return memoryview(source)
    if source is not None:
        with suppress(NoRoomError, OSError):
            allocate(source, nbytes)
            return memoryview(map_file(source, nbytes))
    return memoryview(bytearray(nbytes))


def columns_bytes(slots: int, ghosts: int | None = None) -> int:
    """Return the size of the file of columns."""
    ghosts = PER_SLOT * slots if ghosts is None else ghosts
    per_slot = (8, 32, 8, 8, 8, 8, 4, 4)
    columns = sum(_aligned(width * slots) for width in per_slot)
    return columns + sum(_aligned(width * ghosts) for width in WIDTHS)


def bounded_ghosts(slots: int) -> int:
    """Return how many ghosts a store on disk has: they take memory that no option counts."""
    return min(PER_SLOT * slots, max(_MOST_GHOSTS, -(-slots // WAYS) * WAYS))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
