"""Reserve, commit, abort and adopt: the life of a slot from room to chunk, as steps of a write transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagoda.ledger.ghosts import Marks, marks_of
from pagoda.ledger.members import reap
from pagoda.ledger.namespaces import Namespaces
from pagoda.ledger.outcome import Busy, Landed, Outcome, Present, Refused, Reserved
from pagoda.ledger.tables import ENTRY, PLACE, SLOT, SLOT_KEY, Reservation
from pagoda.ledger.writing import Writing
from pagoda.metrics import Reason

BUSY_NS = 10_000_000_000  # a reservation older than this no longer keeps others from reserving its key
_REAP_AT_ONCE = 64


class Ask(NamedTuple):
    """One batch of a reserve: `keys` stand at chain positions [start, start + len(keys)) of one prompt."""

    keys: Sequence[bytes]
    admitted: Sequence[bool]
    hits: Sequence[int]
    namespace: bytes
    start: int
    parent: bytes | None
    tokens: int
    parts: int
    stamp: int


class Request:
    """The keys of one reserve and what is found out of them on the way. They stand at positions from `start` on.

    `all_in`: the policy may keep none of them out; `judged`: it has let all of them in before, and is not asked again.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        start: int,
        parent: bytes | None,
        stamp: int,
        all_in: bool = False,
        judged: bool = False,
    ) -> None:
        self.keys, self.start, self.parent, self.stamp = keys, start, parent, stamp
        self.all_in, self.judged = all_in, judged
        self.present = np.zeros(len(keys), np.bool_)
        self.admitted = np.ones(len(keys), np.bool_)
        self.hits = np.zeros(len(keys), np.int64)  # those with which each begins

    def ask(self, begin: int, end: int, namespace: bytes, tokens: int, parts: int) -> Ask:
        """The batch of keys [begin, end)."""
        parent = self.keys[begin - 1] if begin else self.parent
        return Ask(
            self.keys[begin:end], self.admitted[begin:end].tolist(), self.hits[begin:end].tolist(), namespace,
            self.start + begin, parent, tokens, parts, self.stamp,
        )  # fmt: skip

    def newcomers(self, batch: range) -> tuple[NDArray[np.int64], Marks, NDArray[np.int64]]:
        """Which keys of a batch are not there, their marks, and the recency stamps they would have."""
        new = batch.start + np.flatnonzero(~self.present[batch.start : batch.stop])
        return new, marks_of([self.keys[i] for i in new.tolist()]), self.stamp - self.start - new


class Victim(NamedTuple):
    """A chunk that may go: the slot, and its generation when the policy named it."""

    slot: int
    generation: int


class Batch(NamedTuple):
    """What a batch came to: `passed_over` victims were kept by somebody, `short` keys found no room."""

    outcomes: list[Outcome]
    passed_over: list[int]
    short: bool


def reserve(writing: Writing, ask: Ask, victims: Sequence[Victim], spaces: Namespaces) -> Batch:
    """Give each key a room, leading keys first; what is Present in the same batch is nobody's victim."""
    quota = writing.most_reserved()
    number = spaces.find(writing, ask.namespace)
    owed = writing.owed(writing.member)
    present = _present(writing, ask.keys, number)
    kept = {found.slot for found in present.values() if isinstance(found, Present)}
    rooms = _Rooms(writing, victims, kept)
    outcomes: list[Outcome] = []
    link = _linked(writing, ask.parent)
    made = 0
    for i, key in enumerate(ask.keys):
        outcome: Outcome | None = present.get(key) or _busy(writing, key)
        if outcome is None and not ask.admitted[i]:
            outcome = Refused(key, Reason.NOT_ADMITTED)
        if outcome is None and owed + made >= quota:
            outcome = Refused(key, Reason.FULL)
        slot = rooms.next() if outcome is None else None
        if slot is not None:
            number = number or spaces.made(
                writing, ask.namespace
            )  # a tenant of whom nothing comes in costs no room
            reservation = Reservation(
                writing.next_generation(), writing.member, ask.stamp - ask.start - i, writing.now, number,
                ask.start + i, ask.tokens, key, (writing.member,) * ask.parts,
            )  # fmt: skip
            _put(writing, slot, reservation)
            writing.fill(slot, reservation.generation, key, ask.hits[i], reservation.position, link)
            made += 1
            outcome = Reserved(key, slot, reservation.generation)
        if isinstance(outcome, Present) and link is not None:
            writing.link(outcome.slot, link)
        outcomes.append(outcome or Refused(key, rooms.reason()))
        link = (outcome.slot, outcome.generation) if isinstance(outcome, Reserved | Present) else None
    writing.owe(writing.member, made)
    if number is not None:
        writing.tally(number, reservations=made)
    return Batch(outcomes, rooms.passed_over, rooms.short)


def commit(writing: Writing, reserved: Sequence[Reserved], part: int, spaces: Namespaces) -> list[Landed]:
    """Note that one part of each chunk is in; a chunk is visible when all are."""
    standing = _Standing(writing, spaces)
    return [_commit_one(writing, item, part, standing) for item in reserved]


def abort(writing: Writing, reserved: Sequence[Reserved]) -> None:
    """Free the slots again, once nobody else writes into them; what is not this member's is left alone."""
    for item in reserved:
        reservation = writing.reservation(item.slot, item.generation)
        if reservation is not None and writing.member in (reservation.owner, *reservation.writers):
            _abort_one(writing, item, reservation)


def adopt(writing: Writing, reserved: Sequence[Reserved], part: int) -> list[bool]:
    """Name this member as the writer of one part of each chunk; False where that part is not there to be written."""
    return [_adopt_one(writing, item, part) for item in reserved]


class _Rooms:
    """The slots a batch may take: free ones, then those of dead members, then victims."""

    def __init__(self, writing: Writing, victims: Sequence[Victim], wanted: set[int]) -> None:
        self._writing, self._victims, self._wanted = writing, iter(victims), wanted
        self._reaped = False
        self.passed_over: list[int] = []
        self.short = False

    def next(self) -> int | None:
        if self.short:  # leading keys first: nothing behind the first that found no room
            return None
        slot = self._writing.take_free()
        if slot is None and not self._reaped:
            self._reaped = True
            if reap(self._writing, _REAP_AT_ONCE):
                slot = self._writing.take_free()
        if slot is None:
            slot = self._victim()
        self.short = slot is None
        return slot

    def reason(self) -> Reason:
        return Reason.REBUILDING if self._writing.meta.unscanned() else Reason.FULL

    def _victim(self) -> int | None:
        for slot, generation in self._victims:
            key = self._writing.chunk(slot, generation)
            if key is None:  # evicted since it was looked up; what is in the slot by now was nobody's victim
                continue
            if slot in self._wanted or self._writing.kept(slot, key):
                self.passed_over.append(slot)
            else:
                self._writing.take_out(slot, Reason.EVICTED)
                return slot
        return None


def _put(writing: Writing, slot: int, reservation: Reservation) -> None:
    writing.txn.put(SLOT_KEY.pack(slot), reservation.pack(), db=writing.tables.reserved)
    writing.txn.put(reservation.key, PLACE.pack(slot, reservation.generation), db=writing.tables.pending)
    writing.meta.reserved += 1


def _present(writing: Writing, keys: Sequence[bytes], number: int | None) -> dict[bytes, Present | Refused]:
    """Which keys have a chunk. That of another namespace is not the asker's, and its bytes must not be taken for it."""
    found: dict[bytes, Present | Refused] = {}
    for key in keys:
        row = writing.get(writing.tables.entries, key)
        if row is not None:
            slot, generation, namespace, _ = ENTRY.unpack(row)
            own = namespace == number
            found[key] = Present(key, slot, generation) if own else Refused(key, Reason.OTHER_NAMESPACE)
    return found


def _busy(writing: Writing, key: bytes) -> Busy | None:
    """Who is filling a slot for that key, if a living member began to a short while ago."""
    row = writing.get(writing.tables.pending, key)
    reservation = writing.reservation(*PLACE.unpack_from(row)) if row is not None else None
    if reservation is None or writing.now - reservation.started > BUSY_NS:
        return None
    return next((Busy(key, writer) for writer in reservation.writers if writing.alive(writer)), None)


def _linked(writing: Writing, parent: bytes | None) -> tuple[int, int] | None:
    """Where the chunk before the first of a batch is or will be."""
    if parent is None:
        return None
    row = writing.get(writing.tables.entries, parent) or writing.txn.get(parent, db=writing.tables.pending)
    return PLACE.unpack_from(row) if row is not None else None


class _Standing(dict[int, int]):
    """Where each namespace (its number) was last cleared; asked once, for nothing is cleared by a commit."""

    def __init__(self, writing: Writing, spaces: Namespaces) -> None:
        super().__init__()
        self._writing, self._spaces = writing, spaces

    def __missing__(self, number: int) -> int:
        self[number] = self._spaces.line(self._writing, number)
        return self[number]


def _commit_one(writing: Writing, item: Reserved, part: int, standing: _Standing) -> Landed:
    reservation = writing.reservation(item.slot, item.generation)
    if reservation is None or reservation.key != item.key or not _is_writer(writing, reservation, part):
        return Landed.LOST
    writers = (*reservation.writers[:part], 0, *reservation.writers[part + 1 :])
    latest = writing.is_latest(reservation)
    wanted = latest and reservation.generation >= standing[reservation.namespace]
    if any(writers):
        row = reservation._replace(writers=writers).pack()
        writing.txn.put(SLOT_KEY.pack(item.slot), row, db=writing.tables.reserved)
        return Landed.PART if wanted else Landed.LOST
    writing.unreserve(item.slot, reservation, latest)
    entry = ENTRY.pack(item.slot, item.generation, reservation.namespace, reservation.position)
    if not wanted or not writing.txn.put(item.key, entry, overwrite=False, db=writing.tables.entries):
        writing.give_back(item.slot)
        return Landed.LOST
    row = SLOT.pack(
        item.generation,
        reservation.namespace,
        reservation.position,
        reservation.tokens,
        item.key,
    )
    writing.txn.put(SLOT_KEY.pack(item.slot), row, db=writing.tables.slots)
    writing.meta.ready += 1
    writing.tally(reservation.namespace, chunks=1)
    writing.ready(item.slot, reservation.stamp)
    writing.count("stored_chunks")
    return Landed.WHOLE


def _is_writer(writing: Writing, reservation: Reservation, part: int) -> bool:
    if not 0 <= part < len(reservation.writers):
        raise ValueError(f"part {part} of a chunk of {len(reservation.writers)} parts")
    return reservation.writers[part] == writing.member


def _abort_one(writing: Writing, item: Reserved, reservation: Reservation) -> None:
    left = tuple(0 if writer == writing.member else writer for writer in reservation.writers)
    if any(left):  # another's bytes may yet land in the slot: it stays until then, and never becomes a chunk
        writing.forget_pending(reservation)
        row = reservation._replace(writers=left).pack()
        writing.txn.put(SLOT_KEY.pack(item.slot), row, db=writing.tables.reserved)
    else:
        writing.unreserve(item.slot, reservation)
        writing.give_back(item.slot)


def _adopt_one(writing: Writing, item: Reserved, part: int) -> bool:
    reservation = writing.reservation(item.slot, item.generation)
    if reservation is None or not 0 <= part < len(reservation.writers) or not reservation.writers[part]:
        return False
    writers = (*reservation.writers[:part], writing.member, *reservation.writers[part + 1 :])
    writing.txn.put(
        SLOT_KEY.pack(item.slot), reservation._replace(writers=writers).pack(), db=writing.tables.reserved
    )
    return True
