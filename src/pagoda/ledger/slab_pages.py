"""The pages of one store's slab: which slots have some, and how a store gives pages up.

A store gives only its own pages: `Ledger.give_pages` calls `SlabPages.give` when the root is above
its limit or another store of it needs space. `space_sharing` decides which store gives, and lists
what a store gains.

The steps of a giving, all under the lock of the root:

    the gate    free slots and those of the coldest chunks leave the tables and become bare
    no gate     views of a slab in memory are waited for (`slots_in_use`), then the holes are
                punched

A process that dies between these steps leaves bare slots with pages: the next one that needs space
punches them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pagoda.base.file_space import data_ranges, open_regular, punch
from pagoda.ledger import hold_pin_remove, queries
from pagoda.ledger.columns import BARE
from pagoda.ledger.lmdb_tables import Meta
from pagoda.ledger.root_usage import fair_share, held_bytes, holdings
from pagoda.ledger.session import Session
from pagoda.ledger.store_state import SLAB
from pagoda.ledger.transaction import BATCH, Transaction, batches

_ROOT_SECONDS = 2.0
# how long to wait for copies; a slot that is in use for longer keeps its pages for now
_LENT_SECONDS = 0.2

# returns the slots that a store would evict first if it needed that many
Victims = Callable[[int], NDArray[np.int64]]


class SlabPages:
    """The pages of one store's slab. Thread-safe; changes are made under the lock of the root."""

    def __init__(self, session: Session) -> None:
        state = session.store.state
        self._session = session
        self._slots = state.slots
        self._slot_bytes = state.slot_bytes
        self._directory = session.store.directory
        # what the slab holds beyond its slots when all others are punched
        self._metadata_bytes = 0

    # ---- what there is

    def backed_ranges(self) -> list[range]:
        """Return the slots that have pages, as ranges; other processes may change that at any
        time.
        """
        meta, bare = self.backing()
        edges = [-1, *bare, meta.backed]
        return [
            range(a + 1, b) for a, b in itertools.pairwise(edges) if b - a > 1
        ]

    def meta(self) -> Meta:
        """Return the totals of the tables."""
        return self._session.read(
            lambda txn, tables: tables.load_meta(txn), _ROOT_SECONDS
        )

    def backing(self) -> tuple[Meta, list[int]]:
        """Return the totals, and the bare slots before the first one that never had pages."""
        return self._session.read(queries.backing, _ROOT_SECONDS)

    def own_bytes(self) -> int:
        """Return the bytes that the slab takes, in whole slots."""
        return held_bytes(self._directory / SLAB, self._slot_bytes)

    @contextlib.contextmanager
    def slab(self) -> Iterator[int]:
        """Open the file of the slab, to give it pages or holes."""
        with open_regular(self._directory / SLAB, "r+") as slab:
            # otherwise the file might be another store's
            self._session.require_store()
            yield slab.fileno()

    # ---- giving

    def give(
        self, nbytes: int, idle: bool, in_use_here: bool, victims: Victims
    ) -> int:
        """Free that many bytes: of slots without a chunk first, then of the coldest chunks; return
        how many it freed.

        `idle`: no process has the store open, so a scan of its headers is not waited for.
        `in_use_here`: this process uses the store too. Under the lock of the root.
        """
        before = self.own_bytes()
        # on a file system that cannot punch holes this fails, before any chunk is evicted
        with self.slab() as fd:
            punch(fd, self._slots * self._slot_bytes, self._slot_bytes)
        # another process may have opened it after the plan was made
        if in_use_here or len(self._session.processes()) > 1:
            every = holdings(self._directory.parent)
            fair = fair_share(every, self._slots * self._slot_bytes)
            nbytes = min(nbytes, before - fair)
        self.punch_left_over(self.meta())
        missing = -(-(nbytes - before + self.own_bytes()) // self._slot_bytes)
        self._punch(self._vacate(missing, idle, victims) if missing > 0 else [])
        return before - self.own_bytes()

    def punch_left_over(self, meta: Meta) -> None:
        """Free pages that no table lists: of slots that were in use when their pages were given, or
        of a transfer that did not end. Under the lock of the root.
        """
        listed_bytes = meta.with_pages() * self._slot_bytes
        left_over = self.own_bytes() - listed_bytes
        if left_over <= self._metadata_bytes or self._punch_all():
            self._metadata_bytes = self.own_bytes() - listed_bytes

    def _vacate(self, count: int, idle: bool, victims: Victims) -> list[int]:
        """Take slots out of the tables: free ones, then those of the coldest chunks."""
        meta = self.meta()
        if meta.unscanned():
            if not idle:
                return []
            first = self._last_with_pages(meta, count)
            self._session.write(
                partial(
                    hold_pin_remove.vacate_unscanned, count=meta.backed - first
                ),
                1.0,
            )
            return list(range(first, meta.backed))
        slots = list[int]()
        # if pinned or held chunks were chosen, look further
        for reach in (count - meta.free(), self._slots):
            coldest = self._unleased(victims(reach)) if reach > 0 else []
            while len(slots) < count:
                batch = coldest[:BATCH]
                coldest = coldest[BATCH:]
                most = min(BATCH, count - len(slots))
                vacate = partial(
                    hold_pin_remove.vacate,
                    count=most,
                    victims=batch,
                    in_memory=self._session.store.state.kind == "memory",
                )
                got = self._session.write(vacate, 1.0)
                slots += got
                if not got and not coldest:
                    break
        return slots

    def _unleased(self, slots: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return those of these slots that are not leased, with their generations."""
        now = self._session.clock.monotonic_ns()
        columns = self._session.columns
        slots = slots[columns.lease_until[slots] <= now]
        return list(
            zip(slots.tolist(), columns.generation[slots].tolist(), strict=True)
        )

    def _last_with_pages(self, meta: Meta, count: int) -> int:
        """Return the slot from which on `count` slots that wait to be scanned have pages; some of
        them may be holes.
        """
        nbytes = 0
        size = self._slot_bytes
        with self.slab() as fd:
            for start, stop in reversed(
                data_ranges(fd, meta.scan * size, meta.backed * size)
            ):
                nbytes += stop - start
                if nbytes >= count * size:
                    return (start + nbytes - count * size) // size
        return meta.scan

    def _punch_all(self) -> bool:
        """Punch all slots without pages in the tables; return False if some are in use.

        Under the lock of the root, so none of them gets pages.
        """
        meta, bare = self.backing()
        return self._punch(bare, range(meta.backed, self._slots))

    def _punch(self, slots: list[int], never_used: range = range(0)) -> bool:
        """Free the pages of bare slots, except slots in use; return False if some are. Under the
        lock of the root.
        """
        # readers of memory must see that a slot has no pages
        if self._session.page_guards is not None:
            generation = self._session.columns.generation
            silent = [slot for slot in slots if not int(generation[slot]) & BARE]
            # `silent`: the process that made these slots bare died before it published that they
            # are
            for part in batches(silent):
                self._session.write(
                    partial(Transaction.mark_bare_again, slots=part),
                    _ROOT_SECONDS,
                )
        unused = self._session.untouched(slots, _LENT_SECONDS)
        with self.slab() as fd:
            for hole in filter(len, [*ranges_of(unused), never_used]):
                punch(
                    fd,
                    hole.start * self._slot_bytes,
                    len(hole) * self._slot_bytes,
                )
        return len(unused) == len(slots)


def ranges_of(slots: Sequence[int]) -> list[range]:
    """Return sorted slots as ranges."""
    runs: list[range] = []
    for slot in slots:
        if runs and runs[-1].stop == slot:
            runs[-1] = range(runs[-1].start, slot + 1)
        else:
            runs.append(range(slot, slot + 1))
    return runs
