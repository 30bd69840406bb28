"""Reserve, commit, abort and adopt: how a free slot becomes a chunk, as steps of a write
transaction.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Required, TypedDict

from pagoda.base.metrics import Reason
from pagoda.ledger import queries
from pagoda.ledger.lmdb_tables import (
    ENTRY,
    MEMBER,
    MEMBER_KEY,
    NOBODY,
    PLACE,
    RESERVATION,
    SLOT_KEY,
    WRITER,
    Meta,
    Reservation,
)
from pagoda.ledger.members import reap
from pagoda.ledger.outcomes import (
    Busy,
    CommitResult,
    Outcome,
    Present,
    Refused,
    Reserved,
)
from pagoda.ledger.transaction import (
    CompleteChunk,
    Filling,
    Transaction,
    window,
)

# an older reservation no longer keeps others from reserving its key
BUSY_NS = 10_000_000_000
PRESENT_LEASE_SECONDS = 1.0  # the lease of a chunk that a call found present
# distance between two stamps of one process: larger than the number of positions in a run
STAMP_STEP = 1 << 16
# each examines up to five times as many victims as all earlier ones together
ATTEMPTS = 12
MOST_VICTIMS = 2048  # examined in one transaction; takes some ms
_REAP_AT_ONCE = 64
# a tuple: a union of types is made anew at each test
_WITHOUT_SLOT = (Busy, Refused)


class ReserveOptions(TypedDict, total=False):
    """The options of `Ledger.reserve` that say what is reserved."""

    namespace: Required[bytes]
    start: int
    parent: bytes | None
    tokens: int
    parts: int
    admit_all: bool
    already_admitted: bool
    context: int | None
    found: Sequence[Present | None] | None


@dataclass(eq=False)
class ReserveRequest:
    """The keys of one reserve, at chain positions from `start` on, and what the steps find out
    about them.

    `admit_all`: the policy must admit every key. `already_admitted`: it has already admitted every
    key, and is not asked again.
    """

    keys: Sequence[bytes]
    stamp: int
    start: int = 0
    parent: bytes | None = None
    namespace: bytes = b""
    tokens: int = 0
    parts: int = 1
    admit_all: bool = False
    already_admitted: bool = False
    # of the chunks that get a slot; None: what their keys say
    context: int | None = None
    grow_until: float = (
        0.0  # how long (time.monotonic()) it waits for a store that grows
    )
    # the chunks that the keys have; None: nobody has looked
    found: Sequence[Present | None] | None = None
    # indices of keys, also in the next two fields
    present: set[int] = field(default_factory=set)
    end: int = sys.maxsize  # from this index on no newcomer is admitted
    # the hits with which each newcomer begins
    hits: dict[int, int] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)  # of the leading keys
    # what each transaction reserved, committed or not
    made: list[tuple[Transaction | None, Sequence[Outcome]]] = field(
        default_factory=list
    )


class LookedAt(NamedTuple):
    """The victims of a transaction that could not be evicted; see `BatchResult`."""

    passed_over: list[int]
    gone: list[int]


class BatchResult(NamedTuple):
    """The result of a batch: `passed_over` are victims that were pinned or held, `gone` those whose
    chunk had left since the policy named them.

    `served`: how many leading keys have an outcome; for the rest there was no slot. `totals`: the
    totals after the batch.
    """

    outcomes: list[Outcome]
    passed_over: list[int]
    gone: list[int]
    served: int
    totals: Meta


@dataclass(eq=False)
class _Room:
    """What the batches of one transaction may take: that many slots (`quota`) of these. `taken`:
    the keys that got one.
    """

    quota: int
    slots: Iterator[int]
    taken: set[bytes] = field(default_factory=set)


def reserve(
    transaction: Transaction,
    batches: Sequence[tuple[ReserveRequest, range]],
    victims: Sequence[tuple[int, int]],
) -> list[BatchResult]:
    """Reserve a slot for each key of each of these batches of requests, leading keys first.

    `victims`: slots whose chunk may be evicted, each with its generation when the policy named it.
    A chunk that one of the batches finds Present is evicted for none of them. `passed_over` and
    `gone` are those of all.
    """
    found: list[tuple[int, dict[bytes, Present | Busy | Refused]]] = []
    kept: set[int] = set()
    new: set[bytes] = set()
    for request, batch in batches:
        number = transaction.namespace(request.namespace)
        keys = request.keys[batch.start : batch.stop]
        known = _known(transaction, keys, number)
        found.append((number, known))
        for one in known.values():
            if isinstance(one, Present):
                kept.add(one.slot)
        admitted = keys[: max(0, request.end - batch.start)]
        new.update(key for key in admitted if key not in known)
    quota = _quota(transaction)
    count = min(len(new), quota)
    slots = transaction.take_free(count)
    looked_at = LookedAt([], [])
    if len(slots) < count:
        reap(transaction, _REAP_AT_ONCE)
        slots += transaction.take_free(count - len(slots))
        slots += transaction.evict(victims, count - len(slots), kept, *looked_at)
    room = _Room(quota, iter(slots))
    results: list[BatchResult] = []
    for (request, batch), (number, known) in zip(batches, found, strict=True):
        answer = _answer(transaction, request, batch, number, known, room)
        request.made.append((transaction, answer.outcomes))
        if answer.fillings:
            _add_rows(transaction, request, answer)
            count = len(answer.fillings)
            transaction.meta.reserved += count
            transaction.owed[transaction.member] += count
            transaction.add_to_namespace(answer.number, reservations=count)
            transaction.publish_filling(answer.fillings, answer.number)
        results.append(
            BatchResult(
                answer.outcomes, *looked_at, answer.served, transaction.meta
            )
        )
    return results


def _quota(transaction: Transaction) -> int:
    """Return how many more slots this member may reserve."""
    meta = transaction.meta
    row = transaction.get(
        MEMBER_KEY.pack(transaction.member), None, transaction.tables.members
    )
    owed = 0
    if row is not None:
        change = transaction.owed.get(transaction.member, 0)
        owed = max(0, MEMBER.unpack(row)[2] + change)
    # at least as many as one reserve asks for
    most = max(meta.with_pages() // 4, window(meta.slots))
    return max(0, most - owed)


class _Answer(NamedTuple):
    """What becomes of a batch of keys of a namespace (its number). `served`: see `BatchResult`."""

    outcomes: list[Outcome]
    fillings: list[Filling]
    served: int
    number: int


def _answer(
    transaction: Transaction,
    request: ReserveRequest,
    batch: range,
    number: int,
    known: Mapping[bytes, Present | Busy | Refused],
    room: _Room,
) -> _Answer:
    """Return what becomes of each key: what is not `known` in the namespace gets a slot, as long as
    there is room.
    """
    keys = request.keys[batch.start : batch.stop]
    first = request.start + batch.start
    meta = transaction.meta
    outcomes: list[Outcome] = []
    fillings: list[Filling] = []
    served = len(keys)
    link = _linked(
        transaction,
        request.keys[batch.start - 1] if batch.start else request.parent,
    )
    for i, key in enumerate(keys):
        outcome: Outcome | None = known.get(key)
        if outcome is None and key in room.taken:
            outcome = Busy(key, transaction.member)
        if outcome is None and batch[i] >= request.end:
            outcome = Refused(key, Reason.NOT_ADMITTED)
        if outcome is None and len(room.taken) >= room.quota:
            outcome = Refused(key, Reason.FULL)
        if outcome is None and (slot := next(room.slots, None)) is not None:
            # as late as this, so that a namespace without reservations takes no space;
            # before the generation, which must not be below its watermark
            number = (
                number
                or transaction.namespace(request.namespace)
                or transaction.add_namespace(request.namespace)
            )
            outcome = Reserved(key, slot, meta.next_generation)
            meta.next_generation += 1
            room.taken.add(key)
            hits = request.hits.get(batch[i], 0)
            fillings.append(Filling(*outcome, hits, first + i, link))
        if outcome is None:
            served = min(served, i)
            outcome = Refused(
                key, Reason.REBUILDING if meta.unscanned() else Reason.FULL
            )
        if isinstance(outcome, Present) and link is not None:
            transaction.links[outcome.slot] = link
        outcomes.append(outcome)
        link = (
            None
            if isinstance(outcome, _WITHOUT_SLOT)
            else (outcome.slot, outcome.generation)
        )
    return _Answer(outcomes, fillings, served, number)


def _add_rows(
    transaction: Transaction, request: ReserveRequest, answer: _Answer
) -> None:
    """Add the rows of new reservations of a request."""
    member = transaction.member
    writers = WRITER.pack(member) * request.parts
    reserved: list[tuple[bytes, bytes]] = []
    pending: list[tuple[bytes, bytes]] = []
    for key, slot, generation, _, position, _ in answer.fillings:
        stamp = request.stamp - position
        row = RESERVATION.pack(
            generation,
            member,
            stamp,
            transaction.now,
            answer.number,
            position,
            request.tokens,
            key,
            request.parts,
        )
        reserved.append((SLOT_KEY.pack(slot), row + writers))
        pending.append((key, PLACE.pack(slot, generation)))
    tables = transaction.tables
    transaction.txn.cursor(tables.reserved).putmulti(reserved)
    transaction.txn.cursor(tables.pending).putmulti(pending)


def commit(
    transaction: Transaction, reserved: Sequence[Reserved], part: int
) -> list[CommitResult]:
    """Record that one part of each chunk is stored; a chunk is visible when all parts are.

    Counts what becomes visible, and what was superseded, each chunk once: by its last part and by
    its first one.
    """
    tables = transaction.tables
    mine = WRITER.pack(transaction.member)
    begin = RESERVATION.size + part * WRITER.size
    end = begin + WRITER.size
    # read once for each namespace, since a commit clears nothing
    watermarks: dict[int, int] = {}
    results: list[CommitResult] = []
    ended: list[tuple[int, int]] = []  # owner and namespace
    # the chunks of which no part is missing, and where their results are
    whole: list[CompleteChunk] = []
    at: list[int] = []
    for key, slot, generation in reserved:
        results.append(CommitResult.LOST)
        place = SLOT_KEY.pack(slot)
        row = transaction.get(place, None, tables.reserved)
        if row is None:
            continue
        found, owner, stamp, _, number, position, tokens, own, parts = (
            RESERVATION.unpack_from(row)
        )
        if found != generation or own != key:
            continue
        if not 0 <= part < parts:
            raise ValueError(f"part {part} of a chunk of {parts} parts")
        if row[begin:end] != mine:
            continue
        latest = transaction.get(key, None, tables.pending)
        is_latest = latest == PLACE.pack(slot, generation)
        if number not in watermarks:
            watermarks[number] = transaction.watermark(number)
        wanted = is_latest and generation >= watermarks[number]
        row = row[:begin] + NOBODY + row[end:]
        if any(row[RESERVATION.size :]):  # other parts are missing
            transaction.put(place, row, db=tables.reserved)
            if wanted:
                results[-1] = CommitResult.PART
            continue
        transaction.delete(place, b"", tables.reserved)
        ended.append((owner, number))
        if is_latest:
            transaction.delete(key, b"", tables.pending)
        if wanted:
            at.append(len(results) - 1)
            whole.append(
                CompleteChunk(
                    key, slot, generation, number, position, tokens, stamp
                )
            )
        else:
            transaction.free_slot(slot)
    transaction.end_reservations(ended)
    attached = transaction.attach(whole)
    for index, chunk, is_new in zip(at, whole, attached, strict=True):
        if is_new:
            results[index] = CommitResult.WHOLE
        else:
            transaction.free_slot(chunk.slot)
    transaction.stored += results.count(CommitResult.WHOLE)
    if part == 0:
        transaction.counts["drop_superseded"] += results.count(CommitResult.LOST)
    return results


def abort(transaction: Transaction, reserved: Sequence[Reserved]) -> None:
    """Free the slots, once no other member writes into them; reservations of others are left
    alone.
    """
    for item in reserved:
        reservation = transaction.reservation(item.slot, item.generation)
        if reservation is not None and transaction.member in (
            reservation.owner,
            *reservation.writers,
        ):
            _abort_one(transaction, item, reservation)


def adopt(
    transaction: Transaction,
    reserved: Sequence[Reserved],
    part: int,
    made: list[tuple[Transaction | None, Sequence[Outcome]]],
) -> list[bool]:
    """Make this member the writer of one part of each chunk, and add them to `made`; False where
    that part is not waiting to be written.
    """
    made.append((transaction, reserved))
    return [_adopt_one(transaction, item, part) for item in reserved]


def _known(
    transaction: Transaction, keys: Sequence[bytes], number: int
) -> dict[bytes, Present | Busy | Refused]:
    """Return which keys have a chunk, or are being stored. A chunk of another namespace must not
    be taken for the caller's.
    """
    found: dict[bytes, Present | Busy | Refused] = {}
    tables = transaction.tables
    get = transaction.get
    clearing = bool(tables.pending_clears(transaction.txn))
    storing = transaction.meta.reserved > 0
    for key in keys:
        row = get(key, None, tables.entries)
        if (
            row is not None
            and clearing
            and queries.is_cleared(transaction.txn, tables, row)
        ):
            transaction.remove_chunk(PLACE.unpack_from(row)[0], Reason.CLEARED)
            row = None
        if row is not None:
            slot, generation, namespace, _ = ENTRY.unpack(row)
            own = namespace == number
            found[key] = (
                Present(key, slot, generation)
                if own
                else Refused(key, Reason.OTHER_NAMESPACE)
            )
        elif storing and (place := get(key, None, tables.pending)) is not None:
            busy = _busy(transaction, key, place)
            if busy is not None:
                found[key] = busy
    return found


def _busy(transaction: Transaction, key: bytes, place: bytes) -> Busy | None:
    """Return the living member that is filling a slot (`place`: its row) for that key, if it began
    a short while ago.
    """
    reservation = transaction.reservation(*PLACE.unpack_from(place))
    # a negative age: the time is of another clock
    if (
        reservation is None
        or not 0 <= transaction.now - reservation.started <= BUSY_NS
    ):
        return None
    return next(
        (
            Busy(key, writer)
            for writer in reservation.writers
            if transaction.alive(writer)
        ),
        None,
    )


def _linked(
    transaction: Transaction, parent: bytes | None
) -> tuple[int, int] | None:
    """Return slot and generation of the parent of a batch's first chunk, which may still be
    reserved.
    """
    if parent is None:
        return None
    tables = transaction.tables
    row = transaction.get(parent, db=tables.entries) or transaction.get(
        parent, db=tables.pending
    )
    return PLACE.unpack_from(row) if row is not None else None


def _abort_one(
    transaction: Transaction, item: Reserved, reservation: Reservation
) -> None:
    left = tuple(
        0 if writer == transaction.member else writer
        for writer in reservation.writers
    )
    # another member may still write into the slot, which stays reserved until then
    if any(left):
        transaction.forget_pending(reservation)
        row = reservation._replace(writers=left).pack()
        transaction.put(
            SLOT_KEY.pack(item.slot), row, db=transaction.tables.reserved
        )
    else:
        transaction.unreserve(item.slot, reservation)
        transaction.free_slot(item.slot)


def _adopt_one(transaction: Transaction, item: Reserved, part: int) -> bool:
    reservation = transaction.reservation(item.slot, item.generation)
    if (
        reservation is None
        or not 0 <= part < len(reservation.writers)
        or not reservation.writers[part]
    ):
        return False
    writers = (
        *reservation.writers[:part],
        transaction.member,
        *reservation.writers[part + 1 :],
    )
    transaction.put(
        SLOT_KEY.pack(item.slot),
        reservation._replace(writers=writers).pack(),
        db=transaction.tables.reserved,
    )
    return True
