"""One write transaction: what it changes in the tables, and what it publishes in the columns after its commit.

`session` runs it; the steps in `allocation`, `chunk_ops`, `members` and `namespaces` change the tables through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

import lmdb
import numpy as np
from numpy.typing import NDArray

from pagoda.ledger.columns import BARE, FEW, NO_PARENT, NOT_READY, Columns, marks_of
from pagoda.ledger.eviction import GHOST_REASONS
from pagoda.ledger.tables import (
    HOLD,
    MEMBER,
    MEMBER_KEY,
    META_ROW,
    NAMESPACE,
    NO_MEMBER,
    NUMBER,
    PLACE,
    SLOT,
    SLOT_KEY,
    Meta,
    Reservation,
    Tables,
)
from pagoda.metrics import Reason

BATCH = 64  # chunks a transaction

T = TypeVar("T")


def batches(items: Sequence[T]) -> list[Sequence[T]]:
    """Split items, in the order given, into as many as one transaction takes."""
    return [items[at : at + BATCH] for at in range(0, len(items), BATCH)]


def window(slots: int) -> int:
    """Return how many slots one reserve gets at most."""
    return max(1, slots // 8)


class Transaction:
    """The state of one write transaction. Used inside the gate, on one thread, and not after `publish`."""

    def __init__(
        self, txn: lmdb.Transaction, tables: Tables, member: int, alive: Callable[[int], bool], now: int
    ) -> None:
        self.txn, self.tables, self.member, self.now = txn, tables, member, now
        self.id: int = txn.id()
        self.committed = False
        self.meta: Meta = tables.load_meta(txn)
        self.counts: dict[str, int] = {}
        self._owed: dict[int, int] = {}  # member -> change of the number of slots it has reserved
        self._tenants: dict[int, list[int]] = {}  # namespace -> change of its chunks and reservations
        self._alive, self._known_alive = alive, {member: True, 0: False}
        self._generations: dict[int, int] = {}
        self._filling: dict[
            int, tuple[bytes, int, int, int, int]
        ] = {}  # slot -> key, hits, position, parent slot, its generation
        self._links: dict[int, tuple[int, int]] = {}  # slot -> parent slot, its generation
        self._ready: dict[int, int] = {}  # slot -> recency stamp
        self._ghosts: dict[Reason, list[tuple[int, bytes]]] = {}  # slot, key

    def get(self, table: lmdb._Database, key: bytes) -> bytes | None:
        """Return the row of a key, if there is one."""
        return cast("bytes | None", self.txn.get(key, db=table))

    # ---- slots

    def next_generation(self) -> int:
        """Return a number that no slot has had before."""
        self.meta.next_generation += 1
        return self.meta.next_generation - 1

    def take_free(self) -> int | None:
        """Take a free slot; None if there is none."""
        if self.meta.free() > self.meta.backed - self.meta.unused:
            cursor = self.txn.cursor(db=self.tables.free)
            if cursor.first():
                slot: int = SLOT_KEY.unpack(cursor.key())[0]
                cursor.delete()
                return slot
        if self.meta.unused < self.meta.backed:
            self.meta.unused += 1
            return self.meta.unused - 1
        return None

    def free_slot(self, slot: int) -> None:
        """Put a slot among the free ones, with a new generation: what is being read from it must not count as valid."""
        self.txn.put(SLOT_KEY.pack(slot), b"", db=self.tables.free)
        self._generations[slot] = self.next_generation()
        self._ready.pop(slot, None)

    def mark_bare(self, slot: int) -> None:
        """Put a slot among those without pages; the pages are taken away after the commit and not before.

        The generation published for it says so: a reader must not touch it (see `PageGuards`).
        """
        self.txn.put(SLOT_KEY.pack(slot), b"", db=self.tables.bare)
        self.meta.bare += 1
        self._generations[slot] = BARE | self.next_generation()
        self._ready.pop(slot, None)

    def mark_bare_again(self, slots: Sequence[int]) -> None:
        """Publish again that these slots have no pages."""
        for slot in slots:
            self._generations[slot] = BARE | self.next_generation()

    def add_pages(self, slots: Sequence[int]) -> None:
        """Put bare slots among the free ones: they have been allocated."""
        for slot in slots:
            if self.txn.delete(SLOT_KEY.pack(slot), db=self.tables.bare):
                self.txn.put(SLOT_KEY.pack(slot), b"", db=self.tables.free)
                self.meta.bare -= 1

    def extend_backed(self, backed: int) -> None:
        """Count all slots up to `backed` among those that have pages: they have been allocated."""
        self.meta.backed = max(self.meta.backed, backed)

    def detach_chunk(self, slot: int, reason: Reason) -> bytes | None:
        """Remove the chunk of a slot from the tables; return its key, or None. The caller then owns the slot."""
        row = self.txn.pop(SLOT_KEY.pack(slot), db=self.tables.slots)
        if row is None:
            return None
        namespace: int = SLOT.unpack(row)[1]
        key: bytes = SLOT.unpack(row)[-1]
        self.txn.delete(key, db=self.tables.entries)
        self.meta.ready -= 1
        self.add_to_namespace(namespace, chunks=-1)
        self._ghosts.setdefault(reason, []).append((slot, key))
        self.count("evicted_chunks" if reason is Reason.EVICTED else "removed_chunks")
        return key

    def remove_chunk(self, slot: int, reason: Reason) -> bool:
        """Remove the chunk of a slot, pinned or held; the slot is free at once, or when its last hold ends."""
        key = self.detach_chunk(slot, reason)
        if key is None:
            return False
        self.txn.delete(key, db=self.tables.pins)
        holders = self.holders(slot)
        if holders:  # they may be copying out of it, and do not check again: no byte of it may change
            reservation = Reservation(self.next_generation(), NO_MEMBER, 0, 0, 0, 0, 0, key, holders)
            self.txn.put(SLOT_KEY.pack(slot), reservation.pack(), db=self.tables.reserved)
            self.meta.reserved += 1
            self._generations[slot] = reservation.generation
            self._ready.pop(slot, None)
        else:
            self.txn.delete(SLOT_KEY.pack(slot), db=self.tables.holds)
            self.free_slot(slot)
        return True

    def free_if_unheld(self, slot: int) -> None:
        """Free a slot whose chunk was removed while it was held, if it is no longer held."""
        row = self.get(self.tables.reserved, SLOT_KEY.pack(slot))
        reservation = Reservation.unpack(row) if row is not None else None
        if reservation is None or reservation.owner != NO_MEMBER:
            return
        holders = self.holders(slot)
        if holders:
            row = reservation._replace(writers=holders).pack()
            self.txn.put(SLOT_KEY.pack(slot), row, db=self.tables.reserved)
        else:
            self.txn.delete(SLOT_KEY.pack(slot), db=self.tables.holds)
            self.unreserve(slot, reservation, latest=False)
            self.free_slot(slot)

    def key_of(self, slot: int, generation: int) -> bytes | None:
        """Return the key of the chunk in a slot, if it still has that generation."""
        row = self.get(self.tables.slots, SLOT_KEY.pack(slot))
        if row is None:
            return None
        held, *_, key = SLOT.unpack(row)
        return key if held == generation else None

    def is_protected(self, slot: int, key: bytes) -> bool:
        """Whether the chunk in a slot is pinned, or held by a living member."""
        return self.get(self.tables.pins, key) is not None or bool(self.holders(slot))

    def holders(self, slot: int) -> tuple[int, ...]:
        """Return the living members that hold the chunk in a slot."""
        holds = HOLD.iter_unpack(self.get(self.tables.holds, SLOT_KEY.pack(slot)) or b"")
        return tuple(sorted({member for _, member in holds if self.alive(member)}))

    # ---- reservations

    def publish_filling(
        self, slot: int, generation: int, key: bytes, hits: int, position: int, parent: tuple[int, int] | None
    ) -> None:
        """Publish, after the commit, that a slot is being filled with a key."""
        self._generations[slot] = generation
        self._ready.pop(slot, None)
        self._filling[slot] = (key, hits, position, *(parent or (NO_PARENT, 0)))

    def publish_parent(self, slot: int, parent: tuple[int, int]) -> None:
        """Publish, after the commit, which parent a stored chunk has now."""
        self._links[slot] = parent

    def publish_ready(self, slot: int, stamp: int) -> None:
        """Publish, after the commit, that a slot may be evicted in the order of its recency."""
        self._ready[slot] = stamp

    def reservation(self, slot: int, generation: int) -> Reservation | None:
        """Return the reservation of that slot, if it still has that generation."""
        row = self.get(self.tables.reserved, SLOT_KEY.pack(slot))
        if row is None:
            return None
        reservation = Reservation.unpack(row)
        return reservation if reservation.generation == generation else None

    def unreserve(self, slot: int, reservation: Reservation, latest: bool | None = None) -> None:
        """Remove a reservation from the tables; the caller then owns the slot. `latest`: `is_latest`, if known."""
        self.txn.delete(SLOT_KEY.pack(slot), db=self.tables.reserved)
        if self.is_latest(reservation) if latest is None else latest:
            self.txn.delete(reservation.key, db=self.tables.pending)
        self.meta.reserved -= 1
        self.add_to_namespace(reservation.namespace, reservations=-1)
        self.add_reserved_by(reservation.owner, -1)

    def forget_pending(self, reservation: Reservation) -> None:
        """Let others reserve the key of a reservation, unless they have done so already."""
        if self.is_latest(reservation):
            self.txn.delete(reservation.key, db=self.tables.pending)

    def is_latest(self, reservation: Reservation) -> bool:
        """Whether no member has reserved the same key since."""
        row = self.get(self.tables.pending, reservation.key)
        return row is not None and bool(PLACE.unpack_from(row)[1] == reservation.generation)

    # ---- namespaces

    def namespace(self, root: bytes) -> int:
        """Return the number of a namespace that has chunks or reservations; 0 if it has none."""
        row = self.get(self.tables.roots, root)
        return int(NUMBER.unpack(row)[0]) if row is not None else 0

    def add_namespace(self, root: bytes, watermark: int | None = None) -> int:
        """Add the row of a namespace that has none; `save` removes it again if it gets no chunk or reservation.

        Whatever the slab still has of it was evicted or cleared: its watermark is now, so that what was cleared cannot
        come back. During a scan that is not known, but then all that were cleared since `floor` have rows.
        """
        meta = self.meta
        number = meta.next_namespace
        meta.next_namespace += 1
        if watermark is None:
            watermark = meta.floor if meta.scanning else meta.next_generation
        row = NAMESPACE.pack(root, watermark, 0, 0)
        self.txn.put(NUMBER.pack(number), row, db=self.tables.namespaces)
        self.txn.put(root, NUMBER.pack(number), db=self.tables.roots)
        self.add_to_namespace(number)
        return number

    def watermark(self, namespace: int) -> int:
        """Return the generation before which a namespace was cleared; without a row, everything was cleared."""
        row = self.get(self.tables.namespaces, NUMBER.pack(namespace))
        return max(NAMESPACE.unpack(row)[1], self.meta.cleared) if row is not None else 2**64

    def remove_empty_namespaces(self) -> None:
        """Have `save` remove all namespaces that have nothing: a scan has ended."""
        for row, _ in self.tables.rows(self.txn, self.tables.namespaces):
            self.add_to_namespace(NUMBER.unpack(row)[0])

    def add_to_namespace(self, namespace: int, chunks: int = 0, reservations: int = 0) -> None:
        """Change how many chunks and reservations a namespace (by number; 0: none) has; written once, by `save`."""
        if namespace:
            change = self._tenants.get(namespace)
            if change is None:
                change = self._tenants[namespace] = [0, 0]
            change[0] += chunks
            change[1] += reservations

    def _save_tenants(self) -> None:
        """Write the counts. A namespace that has nothing is removed, except during a scan (see `Meta.floor`)."""
        for namespace, change in self._tenants.items():
            row = self.get(self.tables.namespaces, NUMBER.pack(namespace))
            if row is None:
                raise lmdb.CorruptedError(f"there is no namespace {namespace}")
            root, line, chunks, reservations = NAMESPACE.unpack(row)
            chunks, reservations = chunks + change[0], reservations + change[1]
            if chunks or reservations or self.meta.scanning:
                row = NAMESPACE.pack(root, line, chunks, reservations)
                self.txn.put(NUMBER.pack(namespace), row, db=self.tables.namespaces)
            else:
                self.txn.delete(NUMBER.pack(namespace), db=self.tables.namespaces)
                self.txn.delete(root, db=self.tables.roots)

    # ---- members

    def alive(self, member: int) -> bool:
        """Whether a member's process lives (its byte is locked)."""
        if member not in self._known_alive:
            self._known_alive[member] = self._alive(member)
        return self._known_alive[member]

    def reserved_by(self, member: int) -> int:
        """Return the number of slots that a member has reserved."""
        row = self.get(self.tables.members, MEMBER_KEY.pack(member))
        return 0 if row is None else max(0, MEMBER.unpack(row)[2] + self._owed.get(member, 0))

    def add_reserved_by(self, member: int, change: int) -> None:
        """Change the number of slots that a member has reserved; written once, by `save`."""
        self._owed[member] = self._owed.get(member, 0) + change

    def _save_owed(self) -> None:
        for member, change in self._owed.items():
            row = self.get(self.tables.members, MEMBER_KEY.pack(member))
            if row is not None and change:
                counter_row, pid, reserved, device = MEMBER.unpack(row)
                row = MEMBER.pack(counter_row, pid, max(0, reserved + change), device)
                self.txn.put(MEMBER_KEY.pack(member), row, db=self.tables.members)

    def count(self, counter: str, n: int = 1) -> None:
        """Add to a counter after the commit."""
        self.counts[counter] = self.counts.get(counter, 0) + n

    # ---- the end

    def save(self) -> None:
        """Write the totals: the last step inside the transaction."""
        self._save_owed()
        self._save_tenants()
        self.txn.put(META_ROW, self.meta.pack(), db=self.tables.meta)

    def publish(self, columns: Columns, stamp: int) -> None:
        """Assign to the columns what was committed: after the commit, before the gate is released."""
        columns.capacity = max(1, self.meta.with_pages())
        for reason, gone in self._ghosts.items():
            slots = np.array([slot for slot, _ in gone], np.int64)
            marks = marks_of([key for _, key in gone])
            last_use, hits = columns.last_use[slots], columns.hits[slots]
            columns.table.remember(marks, last_use, hits, stamp, GHOST_REASONS.index(reason))
        if max(len(self._generations), len(self._ready)) <= FEW:
            self._publish_few(columns)
        else:
            self._publish_many(columns)
        for slot, (parent, generation) in self._links.items():
            columns.parent_slot[slot] = parent
            columns.parent_generation[slot] = generation
        if self._filling:
            columns.table.forget(marks_of([key for key, *_ in self._filling.values()]))

    def _publish_few(self, columns: Columns) -> None:
        for slot, generation in self._generations.items():
            columns.generation[slot] = generation
            columns.last_use[slot] = NOT_READY
            columns.lease_until[slot] = 0
            columns.hits[slot] = 0
        for slot, (key, hits, position, parent, parent_generation) in self._filling.items():
            columns.hits[slot] = hits
            columns.keys[slot] = np.frombuffer(key, np.uint64)
            columns.position[slot] = position
            columns.parent_slot[slot] = parent
            columns.parent_generation[slot] = parent_generation
        for slot, recency in self._ready.items():
            columns.last_use[slot] = recency

    def _publish_many(self, columns: Columns) -> None:
        if self._generations:
            slots = _array(self._generations, np.int64)
            columns.generation[slots] = _array(self._generations.values(), np.uint64)
            columns.last_use[slots] = NOT_READY
            columns.lease_until[slots] = 0
            columns.hits[slots] = 0
        if self._filling:
            slots = _array(self._filling, np.int64)
            keys, hits, positions, parents, generations = zip(*self._filling.values(), strict=True)
            columns.hits[slots] = hits
            columns.keys[slots] = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 4)
            columns.position[slots] = positions
            columns.parent_slot[slots] = parents
            columns.parent_generation[slots] = np.array(generations, np.uint64)
        if self._ready:
            columns.last_use[_array(self._ready, np.int64)] = _array(self._ready.values(), np.int64)


def _array(values: Iterable[int], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.fromiter(values, dtype)
