"""Members are the processes that have the store open. These steps of a transaction also reclaim
what dead ones left.

A member lives as long as another process sees its byte of the lock file locked (`locks`): a kill
frees it.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from pagoda.ledger.columns import NOT_READY, Columns
from pagoda.ledger.lmdb_tables import (
    HOLD,
    MEMBER,
    MEMBER_KEY,
    NO_MEMBER,
    SLOT,
    SLOT_KEY,
    Reservation,
)
from pagoda.ledger.member_counters import MEMBER_ROWS, fold
from pagoda.ledger.transaction import Filling, Transaction

# a copy by a GPU may outlive the process that began it
DEVICE_GRACE_NS = 5_000_000_000
_LOOK = 2048  # slots that `publish_committed` examines in one transaction


def add_member(transaction: Transaction) -> int:
    """Write the row of this member; return its row of counters. LookupError if all rows are
    taken.
    """
    rows = transaction.tables.rows(transaction.txn, transaction.tables.members)
    taken = {MEMBER.unpack(row)[0] for _, row in rows}
    counter_row = next(
        (row for row in range(MEMBER_ROWS) if row not in taken), None
    )
    if counter_row is None:
        raise LookupError
    row = MEMBER.pack(counter_row, os.getpid() & 0xFFFFFFFF, 0, 0)
    transaction.put(
        MEMBER_KEY.pack(transaction.member), row, db=transaction.tables.members
    )
    return counter_row


def mark_device(transaction: Transaction) -> None:
    """Record that this member's memory is registered with a GPU: its slots are freed a while after
    its death.
    """
    row = transaction.get(
        MEMBER_KEY.pack(transaction.member), db=transaction.tables.members
    )
    if row is not None:
        counter_row, pid, reserved, _ = MEMBER.unpack(row)
        row = MEMBER.pack(counter_row, pid, reserved, 1)
        transaction.put(
            MEMBER_KEY.pack(transaction.member),
            row,
            db=transaction.tables.members,
        )


def has_device(transaction: Transaction) -> bool:
    """Whether a living member has registered its memory with a GPU."""
    rows = transaction.tables.rows(transaction.txn, transaction.tables.members)
    return any(
        MEMBER.unpack(row)[3] and transaction.alive(MEMBER_KEY.unpack(key)[0])
        for key, row in rows
    )


def reap(transaction: Transaction, most: int) -> int:
    """Reclaim up to `most` slots that only dead members could still fill; return how many.

    A dead member's row is removed when it has no reservation left; its counters stay there until
    then (`remove_member`).
    """
    freed = 0
    for slot, reservation in _abandoned(transaction):
        if freed == most:
            return freed
        if _may_still_be_written(transaction, reservation):
            _orphan(transaction, slot, reservation)
            continue
        transaction.unreserve(slot, reservation)
        transaction.free_slot(slot)
        transaction.counts["reaped_chunks"] += 1
        freed += 1
    return freed


def remove_dead(transaction: Transaction, counters: NDArray[np.uint64]) -> bool:
    """Remove the dead members that have no reservation left; return whether there was one."""
    tables = transaction.tables
    numbers = [
        MEMBER_KEY.unpack(row)[0]
        for row, _ in tables.rows(transaction.txn, tables.members)
    ]
    dead = [number for number in numbers if not transaction.alive(number)]
    reservations = _reservations(transaction) if dead else []
    writers = {
        member for _, r in reservations for member in (r.owner, *r.writers)
    }
    gone = [number for number in dead if number not in writers]
    for number in gone:
        remove_member(transaction, number, counters)
    return bool(gone)


def remove_member(
    transaction: Transaction, member: int, counters: NDArray[np.uint64]
) -> None:
    """Remove a member and its holds; its counters are added to those of members that left."""
    key = MEMBER_KEY.pack(member)
    row = transaction.pop(key, db=transaction.tables.members)
    if row is None:
        return
    fold(transaction.txn, transaction.tables, counters[MEMBER.unpack(row)[0]])
    for slot, held in list(
        transaction.tables.rows(transaction.txn, transaction.tables.holds)
    ):
        others = b"".join(
            HOLD.pack(*hold)
            for hold in HOLD.iter_unpack(held)
            if hold[1] != member
        )
        if others and others != held:
            transaction.put(slot, others, db=transaction.tables.holds)
        elif not others:
            transaction.delete(slot, db=transaction.tables.holds)


def leave(transaction: Transaction, counters: NDArray[np.uint64]) -> None:
    """Remove this member, its holds, and its reservations that no other member writes into."""
    for slot, reservation in _reservations(transaction):
        own = {0, transaction.member}
        # NO_MEMBER is 0
        if reservation.owner in own and own.issuperset(reservation.writers):
            transaction.unreserve(slot, reservation)
            transaction.free_slot(slot)
    remove_member(transaction, transaction.member, counters)


def publish_committed(
    transaction: Transaction, columns: Columns, start: int, stamp: int
) -> int | None:
    """Publish committed chunks, in slots from `start` on, whose member died before it published
    them.

    Returns the slot to continue at, None at the end. Without this call the recency of such a chunk
    would keep it from eviction for ever, and every lookup of it would be a miss.
    """
    # the slots from `end` on were never used
    end = min(transaction.meta.scan, transaction.meta.unused)
    silent = start + np.flatnonzero(columns.last_use[start:end] == NOT_READY)
    for slot in silent[:_LOOK].tolist():
        row = transaction.get(SLOT_KEY.pack(slot), db=transaction.tables.slots)
        if row is None:
            continue
        generation, namespace, position, _, key = SLOT.unpack(row)
        if columns.generation[slot] != generation or columns.key_of(slot) != key:
            filling = Filling(key, slot, generation, 0, position, None)
            transaction.publish_filling([filling], namespace)
        transaction.ready[slot] = stamp
    return int(silent[_LOOK]) if len(silent) > _LOOK else None


def _abandoned(transaction: Transaction) -> list[tuple[int, Reservation]]:
    """Return the reservations of which no writer lives. Each store of a full tier asks: where many
    processes store, nearly all rows are of writers that were found alive in an earlier row.
    """
    found: list[tuple[int, Reservation]] = []
    living: set[bytes] = set()
    rows = transaction.tables.rows(transaction.txn, transaction.tables.reserved)
    for key, row in rows:
        writers = Reservation.packed_writers(row)
        if writers in living:
            continue
        reservation = Reservation.unpack(row)
        if any(map(transaction.alive, reservation.writers)):
            living.add(writers)
        else:
            found.append((SLOT_KEY.unpack(key)[0], reservation))
    return found


def _reservations(transaction: Transaction) -> list[tuple[int, Reservation]]:
    rows = transaction.tables.rows(transaction.txn, transaction.tables.reserved)
    return [
        (SLOT_KEY.unpack(row)[0], Reservation.unpack(value))
        for row, value in rows
    ]


def _may_still_be_written(
    transaction: Transaction, reservation: Reservation
) -> bool:
    # a negative age: the time is from another boot, long ago
    if reservation.owner == NO_MEMBER:
        return 0 <= transaction.now - reservation.started < DEVICE_GRACE_NS
    keys = (MEMBER_KEY.pack(writer) for writer in reservation.writers if writer)
    rows = (transaction.get(key, db=transaction.tables.members) for key in keys)
    return any(MEMBER.unpack(row)[3] for row in rows if row is not None)


def _orphan(
    transaction: Transaction, slot: int, reservation: Reservation
) -> None:
    """Free the key now, and the slot after the grace period."""
    if reservation.owner == NO_MEMBER:
        return
    transaction.forget_pending(reservation)
    transaction.owed[reservation.owner] -= 1
    orphan = reservation._replace(owner=NO_MEMBER, started=transaction.now)
    transaction.put(
        SLOT_KEY.pack(slot), orphan.pack(), db=transaction.tables.reserved
    )
