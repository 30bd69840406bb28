"""Reserve, commit, abort and adopt: how a free slot becomes a chunk, as steps of a write transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagoda.ledger.columns import Marks, marks_of
from pagoda.ledger.members import reap
from pagoda.ledger.outcomes import Busy, CommitResult, Outcome, Present, Refused, Reserved
from pagoda.ledger.tables import ENTRY, PLACE, SLOT, SLOT_KEY, Reservation
from pagoda.ledger.transaction import Transaction
from pagoda.metrics import Reason

BUSY_NS = 10_000_000_000  # an older reservation no longer keeps others from reserving its key
_REAP_AT_ONCE = 64


class BatchRequest(NamedTuple):
    """One batch of a reserve: `keys` are at chain positions [start, start + len(keys)) of one prompt."""

    keys: Sequence[bytes]
    admitted: Sequence[bool]
    hits: Sequence[int]
    namespace: bytes
    start: int
    parent: bytes | None
    tokens: int
    parts: int
    stamp: int


class ReserveRequest:
    """The keys of one reserve, at positions from `start` on, and what is learned about them on the way.

    `admit_all`: the policy may keep none of them out. `admitted_before`: it has admitted all of them before, and is not
    asked again.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        start: int,
        parent: bytes | None,
        stamp: int,
        admit_all: bool = False,
        admitted_before: bool = False,
    ) -> None:
        self.keys, self.start, self.parent, self.stamp = keys, start, parent, stamp
        self.admit_all, self.admitted_before = admit_all, admitted_before
        self.present = np.zeros(len(keys), np.bool_)
        self.admitted = np.ones(len(keys), np.bool_)
        self.hits = np.zeros(len(keys), np.int64)  # with which each chunk begins

    def ask(self, begin: int, end: int, namespace: bytes, tokens: int, parts: int) -> BatchRequest:
        """Return the batch of keys [begin, end)."""
        parent = self.keys[begin - 1] if begin else self.parent
        return BatchRequest(
            self.keys[begin:end], self.admitted[begin:end].tolist(), self.hits[begin:end].tolist(), namespace,
            self.start + begin, parent, tokens, parts, self.stamp,
        )  # fmt: skip

    def newcomers(self, batch: range) -> tuple[NDArray[np.int64], Marks, NDArray[np.int64]]:
        """Return which keys of a batch are absent, their marks, and the recency stamps that they would have."""
        new = batch.start + np.flatnonzero(~self.present[batch.start : batch.stop])
        return new, marks_of([self.keys[i] for i in new.tolist()]), self.stamp - self.start - new


class Victim(NamedTuple):
    """A chunk that may be evicted: its slot, and the generation of the slot when the policy named it."""

    slot: int
    generation: int


class BatchResult(NamedTuple):
    """The result of a batch: `passed_over` are victims that were pinned or held, `short` is True if slots ran out."""

    outcomes: list[Outcome]
    passed_over: list[int]
    short: bool


def reserve(transaction: Transaction, ask: BatchRequest, victims: Sequence[Victim]) -> BatchResult:
    """Reserve a slot for each key, leading keys first; a chunk that is Present in the same batch is never a victim."""
    quota = transaction.most_reserved()
    number = transaction.namespace(ask.namespace)
    owed = transaction.reserved_by(transaction.member)
    present = _present(transaction, ask.keys, number)
    kept = {found.slot for found in present.values() if isinstance(found, Present)}
    rooms = _SlotSource(transaction, victims, kept)
    outcomes: list[Outcome] = []
    link = _linked(transaction, ask.parent)
    made = 0
    for i, key in enumerate(ask.keys):
        outcome: Outcome | None = present.get(key) or _busy(transaction, key)
        if outcome is None and not ask.admitted[i]:
            outcome = Refused(key, Reason.NOT_ADMITTED)
        if outcome is None and owed + made >= quota:
            outcome = Refused(key, Reason.FULL)
        slot = rooms.next() if outcome is None else None
        if slot is not None:
            # not before: a namespace of which nothing is reserved takes no space
            number = number or transaction.add_namespace(ask.namespace)
            reservation = Reservation(
                transaction.next_generation(), transaction.member, ask.stamp - ask.start - i, transaction.now, number,
                ask.start + i, ask.tokens, key, (transaction.member,) * ask.parts,
            )  # fmt: skip
            _put(transaction, slot, reservation)
            transaction.publish_filling(
                slot, reservation.generation, key, ask.hits[i], reservation.position, link
            )
            made += 1
            outcome = Reserved(key, slot, reservation.generation)
        if isinstance(outcome, Present) and link is not None:
            transaction.publish_parent(outcome.slot, link)
        outcomes.append(outcome or Refused(key, rooms.reason()))
        link = (outcome.slot, outcome.generation) if isinstance(outcome, Reserved | Present) else None
    transaction.add_reserved_by(transaction.member, made)
    if number is not None:
        transaction.add_to_namespace(number, reservations=made)
    return BatchResult(outcomes, rooms.passed_over, rooms.short)


def commit(transaction: Transaction, reserved: Sequence[Reserved], part: int) -> list[CommitResult]:
    """Record that one part of each chunk is stored; a chunk is visible when all parts are."""
    watermarks: dict[int, int] = {}  # each is read once, since a commit clears nothing
    return [_commit_one(transaction, item, part, watermarks) for item in reserved]


def abort(transaction: Transaction, reserved: Sequence[Reserved]) -> None:
    """Free the slots, once no other member writes into them; reservations of others are left alone."""
    for item in reserved:
        reservation = transaction.reservation(item.slot, item.generation)
        if reservation is not None and transaction.member in (reservation.owner, *reservation.writers):
            _abort_one(transaction, item, reservation)


def adopt(transaction: Transaction, reserved: Sequence[Reserved], part: int) -> list[bool]:
    """Make this member the writer of one part of each chunk; False where that part is not waiting to be written."""
    return [_adopt_one(transaction, item, part) for item in reserved]


class _SlotSource:
    """The slots that a batch may take: free ones, then those of dead members, then victims."""

    def __init__(self, transaction: Transaction, victims: Sequence[Victim], wanted: set[int]) -> None:
        self._transaction, self._victims, self._wanted = transaction, iter(victims), wanted
        self._reaped = False
        self.passed_over: list[int] = []
        self.short = False

    def next(self) -> int | None:
        if self.short:  # leading keys first: no slot for a key after the first that got none
            return None
        slot = self._transaction.take_free()
        if slot is None and not self._reaped:
            self._reaped = True
            if reap(self._transaction, _REAP_AT_ONCE):
                slot = self._transaction.take_free()
        if slot is None:
            slot = self._victim()
        self.short = slot is None
        return slot

    def reason(self) -> Reason:
        return Reason.REBUILDING if self._transaction.meta.unscanned() else Reason.FULL

    def _victim(self) -> int | None:
        for slot, generation in self._victims:
            key = self._transaction.key_of(slot, generation)
            if (
                key is None
            ):  # evicted since the policy named it: the chunk that is in the slot now is no victim
                continue
            if slot in self._wanted or self._transaction.is_protected(slot, key):
                self.passed_over.append(slot)
            else:
                self._transaction.detach_chunk(slot, Reason.EVICTED)
                return slot
        return None


def _put(transaction: Transaction, slot: int, reservation: Reservation) -> None:
    transaction.txn.put(SLOT_KEY.pack(slot), reservation.pack(), db=transaction.tables.reserved)
    transaction.txn.put(
        reservation.key, PLACE.pack(slot, reservation.generation), db=transaction.tables.pending
    )
    transaction.meta.reserved += 1


def _present(
    transaction: Transaction, keys: Sequence[bytes], number: int | None
) -> dict[bytes, Present | Refused]:
    """Return which keys have a chunk. A chunk of another namespace must not be taken for the caller's."""
    found: dict[bytes, Present | Refused] = {}
    for key in keys:
        row = transaction.get(transaction.tables.entries, key)
        if row is not None:
            slot, generation, namespace, _ = ENTRY.unpack(row)
            own = namespace == number
            found[key] = Present(key, slot, generation) if own else Refused(key, Reason.OTHER_NAMESPACE)
    return found


def _busy(transaction: Transaction, key: bytes) -> Busy | None:
    """Return which living member fills a slot for that key, if it began a short while ago."""
    row = transaction.get(transaction.tables.pending, key)
    reservation = transaction.reservation(*PLACE.unpack_from(row)) if row is not None else None
    if reservation is None or transaction.now - reservation.started > BUSY_NS:
        return None
    return next((Busy(key, writer) for writer in reservation.writers if transaction.alive(writer)), None)


def _linked(transaction: Transaction, parent: bytes | None) -> tuple[int, int] | None:
    """Return where the chunk before the first of a batch is or will be."""
    if parent is None:
        return None
    tables = transaction.tables
    row = transaction.get(tables.entries, parent) or transaction.get(tables.pending, parent)
    return PLACE.unpack_from(row) if row is not None else None


def _commit_one(
    transaction: Transaction, item: Reserved, part: int, watermarks: dict[int, int]
) -> CommitResult:
    reservation = transaction.reservation(item.slot, item.generation)
    if reservation is None or reservation.key != item.key or not _is_writer(transaction, reservation, part):
        return CommitResult.LOST
    writers = (*reservation.writers[:part], 0, *reservation.writers[part + 1 :])
    latest = transaction.is_latest(reservation)
    if reservation.namespace not in watermarks:
        watermarks[reservation.namespace] = transaction.watermark(reservation.namespace)
    wanted = latest and reservation.generation >= watermarks[reservation.namespace]
    if any(writers):
        row = reservation._replace(writers=writers).pack()
        transaction.txn.put(SLOT_KEY.pack(item.slot), row, db=transaction.tables.reserved)
        return CommitResult.PART if wanted else CommitResult.LOST
    transaction.unreserve(item.slot, reservation, latest)
    entry = ENTRY.pack(item.slot, item.generation, reservation.namespace, reservation.position)
    if not wanted or not transaction.txn.put(item.key, entry, overwrite=False, db=transaction.tables.entries):
        transaction.free_slot(item.slot)
        return CommitResult.LOST
    row = SLOT.pack(
        item.generation,
        reservation.namespace,
        reservation.position,
        reservation.tokens,
        item.key,
    )
    transaction.txn.put(SLOT_KEY.pack(item.slot), row, db=transaction.tables.slots)
    transaction.meta.ready += 1
    transaction.add_to_namespace(reservation.namespace, chunks=1)
    transaction.publish_ready(item.slot, reservation.stamp)
    transaction.count("stored_chunks")
    return CommitResult.WHOLE


def _is_writer(transaction: Transaction, reservation: Reservation, part: int) -> bool:
    if not 0 <= part < len(reservation.writers):
        raise ValueError(f"part {part} of a chunk of {len(reservation.writers)} parts")
    return reservation.writers[part] == transaction.member


def _abort_one(transaction: Transaction, item: Reserved, reservation: Reservation) -> None:
    left = tuple(0 if writer == transaction.member else writer for writer in reservation.writers)
    if any(left):  # another member may still write into the slot: it stays until then, and never is a chunk
        transaction.forget_pending(reservation)
        row = reservation._replace(writers=left).pack()
        transaction.txn.put(SLOT_KEY.pack(item.slot), row, db=transaction.tables.reserved)
    else:
        transaction.unreserve(item.slot, reservation)
        transaction.free_slot(item.slot)


def _adopt_one(transaction: Transaction, item: Reserved, part: int) -> bool:
    reservation = transaction.reservation(item.slot, item.generation)
    if reservation is None or not 0 <= part < len(reservation.writers) or not reservation.writers[part]:
        return False
    writers = (*reservation.writers[:part], transaction.member, *reservation.writers[part + 1 :])
    transaction.txn.put(
        SLOT_KEY.pack(item.slot), reservation._replace(writers=writers).pack(), db=transaction.tables.reserved
    )
    return True
