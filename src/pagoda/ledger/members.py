"""Members: who has the store open, and taking back what the dead left."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from pagoda.ledger.columns import NOT_READY, Columns
from pagoda.ledger.counters import MEMBER_ROWS, fold
from pagoda.ledger.tables import HOLD, MEMBER, MEMBER_KEY, NOBODY, SLOT, SLOT_KEY, Reservation
from pagoda.ledger.writing import Writing

DEVICE_GRACE_NS = 5_000_000_000  # a copy begun by a GPU may outlive the process that began it
_LOOK = 2048  # slots that `mend` looks at in one transaction


def enrol(writing: Writing) -> int:
    """Write the row of this member; return its row of counters. LookupError if all rows are taken."""
    taken = {MEMBER.unpack(row)[0] for _, row in writing.tables.rows(writing.txn, writing.tables.members)}
    counter_row = next((row for row in range(MEMBER_ROWS) if row not in taken), None)
    if counter_row is None:
        raise LookupError
    row = MEMBER.pack(counter_row, os.getpid() & 0xFFFFFFFF, 0, 0)
    writing.txn.put(MEMBER_KEY.pack(writing.member), row, db=writing.tables.members)
    return counter_row


def mark_device(writing: Writing) -> None:
    """Note that this member's memory is registered with a GPU: its slots outlive it by a grace."""
    row = writing.get(writing.tables.members, MEMBER_KEY.pack(writing.member))
    if row is not None:
        counter_row, pid, reserved, _ = MEMBER.unpack(row)
        row = MEMBER.pack(counter_row, pid, reserved, 1)
        writing.txn.put(MEMBER_KEY.pack(writing.member), row, db=writing.tables.members)


def has_device(writing: Writing) -> bool:
    """Whether a living member has registered its memory with a GPU."""
    rows = writing.tables.rows(writing.txn, writing.tables.members)
    return any(MEMBER.unpack(row)[3] and writing.alive(MEMBER_KEY.unpack(key)[0]) for key, row in rows)


def reap(writing: Writing, most: int) -> int:
    """Take back up to `most` slots that only dead members could still fill; return how many.

    A dead member's row goes when nothing is left of it. Its counters stay in its row until then (see `retire`).
    """
    freed = 0
    for slot, reservation in _abandoned(writing):
        if freed == most:
            return freed
        if _may_still_be_written(writing, reservation):
            _orphan(writing, slot, reservation)
            continue
        writing.unreserve(slot, reservation)
        writing.give_back(slot)
        writing.count("reaped_chunks")
        freed += 1
    return freed


def dead(writing: Writing) -> list[int]:
    """Members whose process is gone."""
    numbers = [
        MEMBER_KEY.unpack(row)[0] for row, _ in writing.tables.rows(writing.txn, writing.tables.members)
    ]
    return [number for number in numbers if not writing.alive(number)]


def retire(writing: Writing, member: int, counters: NDArray[np.uint64]) -> None:
    """Strike a member off: its holds go, its counters are folded into those of the dead."""
    key = MEMBER_KEY.pack(member)
    row = writing.txn.pop(key, db=writing.tables.members)
    if row is None:
        return
    fold(writing.txn, writing.tables, counters[MEMBER.unpack(row)[0]])
    for slot, held in list(writing.tables.rows(writing.txn, writing.tables.holds)):
        others = b"".join(HOLD.pack(*hold) for hold in HOLD.iter_unpack(held) if hold[1] != member)
        if others and others != held:
            writing.txn.put(slot, others, db=writing.tables.holds)
        elif not others:
            writing.txn.delete(slot, db=writing.tables.holds)


def mend(writing: Writing, columns: Columns, start: int, stamp: int) -> int | None:
    """Publish chunks among the slots from `start` on whose committer died before it could; where to go on.

    Their recency would otherwise never let them be evicted, and what a rebuild found would not be believed.
    """
    end = min(writing.meta.scan, writing.meta.unused)  # no slot beyond has ever been touched
    silent = start + np.flatnonzero(columns.last_use[start:end] == NOT_READY)
    for slot in silent[:_LOOK].tolist():
        row = writing.get(writing.tables.slots, SLOT_KEY.pack(slot))
        if row is None:
            continue
        generation, _, position, _, key = SLOT.unpack(row)
        if columns.generation[slot] != generation or columns.key_of(slot) != key:
            writing.fill(slot, generation, key, 0, position, None)
        writing.ready(slot, stamp)
    return int(silent[_LOOK]) if len(silent) > _LOOK else None


def owes(writing: Writing, member: int) -> bool:
    """Whether a slot is still reserved that only this member could fill."""
    return any(member in (r.owner, *r.writers) for _, r in _reservations(writing))


def _reservations(writing: Writing) -> list[tuple[int, Reservation]]:
    rows = writing.tables.rows(writing.txn, writing.tables.reserved)
    return [(SLOT_KEY.unpack(row)[0], Reservation.unpack(value)) for row, value in rows]


def _abandoned(writing: Writing) -> list[tuple[int, Reservation]]:
    """Reservations of which no living member holds an uncommitted part."""
    return [(slot, r) for slot, r in _reservations(writing) if not any(map(writing.alive, r.writers))]


def _may_still_be_written(writing: Writing, reservation: Reservation) -> bool:
    if reservation.owner == NOBODY:  # since a time of another boot: long ago
        return 0 <= writing.now - reservation.started < DEVICE_GRACE_NS
    rows = [writing.get(writing.tables.members, MEMBER_KEY.pack(w)) for w in reservation.writers if w]
    return any(MEMBER.unpack(row)[3] for row in rows if row is not None)


def _orphan(writing: Writing, slot: int, reservation: Reservation) -> None:
    """Free the key at once and the slot after the grace."""
    if reservation.owner == NOBODY:
        return
    writing.forget_pending(reservation)
    writing.owe(reservation.owner, -1)
    orphan = reservation._replace(owner=NOBODY, started=writing.now)
    writing.txn.put(SLOT_KEY.pack(slot), orphan.pack(), db=writing.tables.reserved)
