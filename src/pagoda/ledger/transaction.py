"""One write transaction: what it changes in the tables, and what it publishes in the columns after
its commit.

`session` runs it. The steps in `allocation`, `hold_pin_remove`, `members` and `clears_and_labels`
change the tables through it.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import compress
from typing import NamedTuple, TypeVar

import lmdb
import numpy as np

from pagoda.base.metrics import Reason
from pagoda.ledger.columns import BARE, KEY_BYTES, NO_PARENT, NOT_READY, Columns
from pagoda.ledger.eviction_policy import GHOST_REASONS
from pagoda.ledger.ghost_table import marks_of
from pagoda.ledger.lmdb_tables import (
    ENTRY,
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
    Txn,
)

BATCH = 64  # chunks per transaction
# for a slot without a chunk, in place of the fields of its row
_NO_CHUNK = (-1, 0, 0, 0, b"")

T = TypeVar("T")


def batches(items: Sequence[T]) -> list[Sequence[T]]:
    """Split items, in the order given, into batches of at most BATCH."""
    return [items[at : at + BATCH] for at in range(0, len(items), BATCH)]


def window(slots: int) -> int:
    """Return how many slots one reserve gets at most."""
    return max(1, slots // 8)


class Filling(NamedTuple):
    """A slot that is being filled: what is published of it. `hits`: those with which the chunk
    begins. `parent`: slot and generation.
    """

    key: bytes
    slot: int
    generation: int
    hits: int
    position: int
    parent: tuple[int, int] | None


class CompleteChunk(NamedTuple):
    """A chunk in a slot, all of which is stored. `namespace`: its number. `stamp`: its recency."""

    key: bytes
    slot: int
    generation: int
    namespace: int
    position: int
    tokens: int
    stamp: int


class Transaction:
    """The state of one write transaction. Used inside the gate, on one thread, and not after
    `publish`.
    """

    def __init__(
        self,
        txn: Txn,
        tables: Tables,
        member: int,
        alive: Callable[[int], bool],
        now: int,
        chunk_bytes: int = 0,
    ) -> None:
        """`chunk_bytes`: the size of a payload, to count what is stored; 0: unknown, so no bytes
        are counted.
        """
        self.txn = txn
        self.tables = tables
        self.member = member
        self.now = now
        self._chunk_bytes = chunk_bytes
        self.get = txn.get
        self.put = txn.put
        self.pop = txn.pop
        self.delete = txn.delete
        self.id: int = txn.id()
        self.pid = os.getpid()
        self.stored = 0  # chunks that this transaction makes visible
        self.committed = False
        # called, inside the gate, once this is committed; it may be called again
        self.then: Callable[[], object] | None = None
        self.meta: Meta = tables.load_meta(txn)
        self.counts: defaultdict[str, int] = defaultdict(int)  # see `take_counts`
        # member -> change of the slots it has reserved
        self.owed: defaultdict[int, int] = defaultdict(int)
        # to be published: `links`: slot -> parent slot and its generation; `ready`: slot -> recency
        # stamp of a complete chunk
        self.links: dict[int, tuple[int, int]] = {}
        self.ready: dict[int, int] = {}
        # slot -> number of the namespace of the chunk that was put there
        self.namespace_of: dict[int, int] = {}
        self._namespace_changes: dict[
            int, list[int]
        ] = {}  # namespace -> change of its chunks and reservations
        self._alive = alive
        self._known_alive = {member: True, 0: False}
        self._generations: dict[int, int] = {}
        self._filling: dict[int, Filling] = {}
        self._ghosts: dict[Reason, list[tuple[int, bytes]]] = {}  # slot, key

    # ---- slots

    def next_generation(self) -> int:
        """Return a number that no slot has had before."""
        self.meta.next_generation += 1
        return self.meta.next_generation - 1

    def take_free(self, count: int) -> list[int]:
        """Take up to `count` free slots that have pages."""
        meta = self.meta
        slots: list[int] = []
        if count and meta.free() > meta.backed - meta.unused:
            cursor = self.txn.cursor(self.tables.free)
            while len(slots) < count and cursor.first():
                slots += SLOT_KEY.unpack(cursor.key())
                cursor.delete()
        never_used = min(count - len(slots), meta.backed - meta.unused)
        slots += range(meta.unused, meta.unused + never_used)
        meta.unused += never_used
        return slots

    def evict(
        self,
        victims: Iterable[tuple[int, int]],
        count: int,
        kept: Container[int],
        passed_over: list[int],
        gone: list[int],
    ) -> list[int]:
        """Remove the chunks of up to `count` victims from the tables; return their slots, which the
        caller then owns.

        Args:
            victims: slots, each with the generation of the chunk that may go.
            count: of chunks.
            kept: slots whose chunk stays.
            passed_over: gets the slots whose chunk is kept, pinned or held.
            gone: gets the slots whose chunk is another one.
        """
        get = self.get
        tables = self.tables
        removed: list[tuple[int, bytes, int]] = []
        for slot, generation in victims:
            if len(removed) == count:
                break
            place = SLOT_KEY.pack(slot)
            row = get(place, None, tables.slots)
            found, namespace, _, _, key = _NO_CHUNK
            if row is not None:
                found, namespace, _, _, key = SLOT.unpack(row)
            # that chunk was evicted after the policy named it; the slot's new chunk is no victim
            if found != generation:
                gone.append(slot)
            elif (
                slot in kept
                or get(key, None, tables.pins) is not None
                or (get(place, None, tables.holds) and self.holders(slot))
            ):
                passed_over.append(slot)
            else:
                self.delete(place, b"", tables.slots)
                self.delete(key, b"", tables.entries)
                removed.append((slot, key, namespace))
        self._note_removed(removed, Reason.EVICTED)
        return [slot for slot, _, _ in removed]

    def free_slot(self, slot: int) -> None:
        """Put a slot among the free ones, with a new generation, so that a read in progress is not
        valid.
        """
        self.put(SLOT_KEY.pack(slot), b"", db=self.tables.free)
        self._generations[slot] = self.next_generation()
        self.ready.pop(slot, None)

    def mark_bare(self, slot: int) -> None:
        """Put a slot among those without pages; the pages are punched only after the commit.

        The published generation marks it as bare: a reader must not touch it (see `PageGuards`).
        """
        self.put(SLOT_KEY.pack(slot), b"", db=self.tables.bare)
        self.meta.bare += 1
        self._generations[slot] = BARE | self.next_generation()
        self.ready.pop(slot, None)

    def mark_bare_again(self, slots: Sequence[int]) -> None:
        """Publish again that these slots have no pages."""
        for slot in slots:
            self._generations[slot] = BARE | self.next_generation()

    def add_pages(self, slots: Sequence[int]) -> None:
        """Put bare slots among the free ones, after their pages were allocated."""
        for slot in slots:
            if self.delete(SLOT_KEY.pack(slot), db=self.tables.bare):
                self.put(SLOT_KEY.pack(slot), b"", db=self.tables.free)
                self.meta.bare -= 1

    def extend_backed(self, backed: int) -> None:
        """Count all slots before `backed` among those that have pages, after these were
        allocated.
        """
        self.meta.backed = max(self.meta.backed, backed)

    def attach(self, chunks: Sequence[CompleteChunk]) -> list[bool]:
        """Add chunks to the tables; return for each whether it was added: not if its key has
        one.
        """
        tables = self.tables
        added: list[bool] = []
        rows: list[tuple[bytes, bytes]] = []
        for key, slot, generation, namespace, position, tokens, stamp in chunks:
            entry = ENTRY.pack(slot, generation, namespace, position)
            is_new = self.put(key, entry, overwrite=False, db=tables.entries)
            added.append(is_new)
            if is_new:
                row = SLOT.pack(generation, namespace, position, tokens, key)
                rows.append((SLOT_KEY.pack(slot), row))
                self.ready[slot] = stamp
        self.txn.cursor(tables.slots).putmulti(rows)
        self.meta.ready += len(rows)
        new = compress((one.namespace for one in chunks), added)
        for namespace, count in Counter(new).items():
            self.add_to_namespace(namespace, chunks=count)
        return added

    def detach_chunk(self, slot: int, reason: Reason) -> bytes | None:
        """Remove the chunk of a slot from the tables; return its key, or None. The caller then owns
        the slot.
        """
        row = self.pop(SLOT_KEY.pack(slot), self.tables.slots)
        if row is None:
            return None
        _, namespace, _, _, key = SLOT.unpack(row)
        self.delete(key, b"", self.tables.entries)
        self._note_removed([(slot, key, namespace)], reason)
        return bytes(key)

    def _note_removed(
        self, chunks: Sequence[tuple[int, bytes, int]], reason: Reason
    ) -> None:
        """Count chunks (slot, key, number of the namespace) that left the tables, and let them
        leave ghosts.
        """
        if not chunks:
            return
        self.meta.ready -= len(chunks)
        evicted = reason is Reason.EVICTED
        self.counts["evicted_chunks" if evicted else "removed_chunks"] += len(
            chunks
        )
        ghosts = self._ghosts.setdefault(reason, [])
        ghosts += [(slot, key) for slot, key, _ in chunks]
        for slot, _, _ in chunks:
            self.ready.pop(slot, None)
        of_each = Counter(namespace for _, _, namespace in chunks)
        for namespace, count in of_each.items():
            self.add_to_namespace(namespace, chunks=-count)

    def remove_chunk(self, slot: int, reason: Reason) -> bool:
        """Remove the chunk of a slot, pinned or held; the slot is free at once, or when its last
        hold ends.
        """
        key = self.detach_chunk(slot, reason)
        if key is None:
            return False
        self.delete(key, db=self.tables.pins)
        holders = self.holders(slot)
        # they may be copying out of it without a second check, so no byte of it may change
        if holders:
            reservation = Reservation(
                self.next_generation(), NO_MEMBER, 0, 0, 0, 0, 0, key, holders
            )
            self.put(
                SLOT_KEY.pack(slot), reservation.pack(), db=self.tables.reserved
            )
            self.meta.reserved += 1
            self._generations[slot] = reservation.generation
            self.ready.pop(slot, None)
        else:
            self.delete(SLOT_KEY.pack(slot), db=self.tables.holds)
            self.free_slot(slot)
        return True

    def free_if_unheld(self, slot: int) -> None:
        """Free a slot whose chunk was removed while it was held, if it is no longer held."""
        row = self.get(SLOT_KEY.pack(slot), db=self.tables.reserved)
        reservation = Reservation.unpack(row) if row is not None else None
        if reservation is None or reservation.owner != NO_MEMBER:
            return
        holders = self.holders(slot)
        if holders:
            row = reservation._replace(writers=holders).pack()
            self.put(SLOT_KEY.pack(slot), row, db=self.tables.reserved)
        else:
            self.delete(SLOT_KEY.pack(slot), db=self.tables.holds)
            self.unreserve(slot, reservation, latest=False)
            self.free_slot(slot)

    def key_of(self, slot: int, generation: int) -> bytes | None:
        """Return the key of the chunk in a slot, if it still has that generation."""
        row = self.get(SLOT_KEY.pack(slot), None, self.tables.slots)
        if row is None:
            return None
        fields = SLOT.unpack(row)
        held: int = fields[0]
        key: bytes = fields[-1]
        return key if held == generation else None

    def holders(self, slot: int) -> tuple[int, ...]:
        """Return the living members that hold the chunk in a slot."""
        row = self.get(SLOT_KEY.pack(slot), None, self.tables.holds)
        if row is None:
            return ()
        holds = HOLD.iter_unpack(row)
        return tuple(
            sorted({member for _, member in holds if self.alive(member)})
        )

    # ---- reservations

    def publish_filling(
        self, fillings: Iterable[Filling], namespace: int
    ) -> None:
        """Publish, after the commit, that slots are being filled with chunks of a namespace (by
        number).
        """
        for one in fillings:
            slot = one.slot
            self._generations[slot] = one.generation
            self._filling[slot] = one
            self.namespace_of[slot] = namespace

    def reservation(self, slot: int, generation: int) -> Reservation | None:
        """Return the reservation of that slot, if it still has that generation."""
        row = self.get(SLOT_KEY.pack(slot), None, self.tables.reserved)
        if row is None:
            return None
        reservation = Reservation.unpack(row)
        return reservation if reservation.generation == generation else None

    def unreserve(
        self, slot: int, reservation: Reservation, latest: bool | None = None
    ) -> None:
        """Remove a reservation from the tables; the caller then owns the slot. `latest`:
        `is_latest`, if known.
        """
        self.delete(SLOT_KEY.pack(slot), b"", self.tables.reserved)
        if self.is_latest(reservation) if latest is None else latest:
            self.delete(reservation.key, b"", self.tables.pending)
        self.end_reservations([(reservation.owner, reservation.namespace)])

    def end_reservations(self, ended: Sequence[tuple[int, int]]) -> None:
        """Count reservations (owner, number of the namespace) whose rows were removed."""
        self.meta.reserved -= len(ended)
        for (owner, namespace), count in Counter(ended).items():
            self.owed[owner] -= count
            self.add_to_namespace(namespace, reservations=-count)

    def forget_pending(self, reservation: Reservation) -> None:
        """Remove the pending key of a reservation, if it is still the latest, so that others may
        reserve the key.
        """
        if self.is_latest(reservation):
            self.delete(reservation.key, db=self.tables.pending)

    def is_latest(self, reservation: Reservation) -> bool:
        """Whether this is the latest reservation of its key."""
        row = self.get(reservation.key, None, self.tables.pending)
        return row is not None and bool(
            PLACE.unpack_from(row)[1] == reservation.generation
        )

    # ---- namespaces

    def namespace(self, root: bytes) -> int:
        """Return the number of a namespace that has chunks or reservations; 0 if it has none."""
        row = self.get(root, db=self.tables.roots)
        return int(NUMBER.unpack(row)[0]) if row is not None else 0

    def add_namespace(self, root: bytes, watermark: int | None = None) -> int:
        """Add the row of a namespace that has none; `save` removes it again if it gets no chunk or
        reservation.

        Whatever the slab still has of this namespace was evicted or cleared. Its watermark is the
        current generation, so that chunks that were cleared cannot come back. During a scan the
        slab's content is not known; but then all namespaces that were cleared since `floor` have
        rows.
        """
        meta = self.meta
        number = meta.next_namespace
        meta.next_namespace += 1
        if watermark is None:
            watermark = meta.floor if meta.scanning else meta.next_generation
        row = NAMESPACE.pack(root, watermark, 0, 0)
        self.put(NUMBER.pack(number), row, db=self.tables.namespaces)
        self.put(root, NUMBER.pack(number), db=self.tables.roots)
        self.add_to_namespace(number)
        return number

    def watermark(self, namespace: int) -> int:
        """Return the generation before which a namespace was cleared; without a row, everything was
        cleared.
        """
        row = self.get(NUMBER.pack(namespace), db=self.tables.namespaces)
        return (
            max(NAMESPACE.unpack(row)[1], self.meta.cleared)
            if row is not None
            else 2**64
        )

    def remove_empty_namespaces(self) -> None:
        """Let `save` remove all namespaces that have no chunk or reservation, after a scan has
        ended.
        """
        for row, _ in self.tables.rows(self.txn, self.tables.namespaces):
            self.add_to_namespace(NUMBER.unpack(row)[0])

    def add_to_namespace(
        self, namespace: int, chunks: int = 0, reservations: int = 0
    ) -> None:
        """Change how many chunks and reservations a namespace (by number; 0: none) has; written
        once, by `save`.
        """
        if namespace:
            change = self._namespace_changes.setdefault(namespace, [0, 0])
            change[0] += chunks
            change[1] += reservations

    # ---- members

    def alive(self, member: int) -> bool:
        """Whether a member's process lives (its byte is locked)."""
        if member not in self._known_alive:
            self._known_alive[member] = self._alive(member)
        return self._known_alive[member]

    # ---- the end

    def save(self) -> None:
        """Write the counts and totals: the last step inside the transaction.

        A namespace without chunks and reservations is removed, except during a scan (see
        `Meta.floor`).
        """
        for member, change in self.owed.items():
            row = self.get(MEMBER_KEY.pack(member), db=self.tables.members)
            if row is not None and change:
                counter_row, pid, reserved, device = MEMBER.unpack(row)
                row = MEMBER.pack(
                    counter_row, pid, max(0, reserved + change), device
                )
                self.put(MEMBER_KEY.pack(member), row, db=self.tables.members)
        for namespace, (
            more_chunks,
            more_reservations,
        ) in self._namespace_changes.items():
            row = self.get(NUMBER.pack(namespace), db=self.tables.namespaces)
            if row is None:
                raise lmdb.CorruptedError(f"there is no namespace {namespace}")
            root, watermark, chunks, reservations = NAMESPACE.unpack(row)
            chunks = chunks + more_chunks
            reservations = reservations + more_reservations
            if chunks or reservations or self.meta.scanning:
                row = NAMESPACE.pack(root, watermark, chunks, reservations)
                self.put(NUMBER.pack(namespace), row, db=self.tables.namespaces)
            else:
                self.delete(NUMBER.pack(namespace), db=self.tables.namespaces)
                self.delete(root, db=self.tables.roots)
        self.put(META_ROW, self.meta.pack(), db=self.tables.meta)

    def take_counts(self) -> dict[str, int]:
        """Return what was counted, and forget it, so that no repetition counts twice; a forked
        child gets nothing.
        """
        counts: dict[str, int] = {}
        if os.getpid() == self.pid:
            counts.update(self.counts)
            if self.stored:
                counts["stored_chunks"] = self.stored
                counts["stored_bytes"] = self.stored * self._chunk_bytes
            self.counts.clear()
            self.stored = 0
        return counts

    def publish(self, columns: Columns, stamp: int) -> None:
        """Assign to the columns what was committed: after the commit, before the gate is
        released.
        """
        # read once, first: a fork between two steps releases them in the child
        cells = columns.cells
        if os.getpid() != self.pid:
            return  # a signal handler has forked: the parent publishes
        columns.note_pages(self.meta.backed, self.meta.with_pages())
        for reason, gone in self._ghosts.items():
            slots = np.array([slot for slot, _ in gone], np.int64)
            marks = marks_of([key for _, key in gone])
            columns.table.remember(
                marks,
                columns.last_use[slots],
                columns.hits[slots],
                stamp,
                GHOST_REASONS.index(reason),
                columns.contexts_of(slots),
            )
        (
            generation,
            keys,
            last_use,
            lease_until,
            parent_slot,
            parent_generation,
            hits,
            position,
        ) = cells
        for slot, number in self._generations.items():
            # first: no reader may take the old chunk for the new generation's
            last_use[slot] = NOT_READY
            generation[slot] = number
            lease_until[slot] = hits[slot] = 0
        for key, slot, _, asked, place, parent in self._filling.values():
            keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] = key
            hits[slot] = asked
            position[slot] = place
            parent_slot[slot], parent_generation[slot] = parent or (NO_PARENT, 0)
        for slot, recency in self.ready.items():
            last_use[slot] = recency
        for slot, link in self.links.items():
            parent_slot[slot], parent_generation[slot] = link
        # a chunk that has a ghost begins with hits, unless this transaction made the ghost
        back = [
            one.key for one in self._filling.values() if one.hits or self._ghosts
        ]
        if back:
            columns.table.forget(marks_of(back))
