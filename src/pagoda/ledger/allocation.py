"""Reserve, commit, abort and adopt: how a free slot becomes a chunk, as steps of a write
transaction.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Required, TypedDict

from pagoda.base.metrics import Reason
from pagoda.ledger import queries
from pagoda.ledger.lmdb_tables import (
    ENTRY,
    MEMBER,
    MEMBER_KEY,
    PLACE,
    SLOT_KEY,
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
from pagoda.ledger.transaction import Transaction, window

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
    kept: set[int] = set()
    found: list[tuple[int, dict[bytes, Present | Refused]]] = []
    for request, batch in batches:
        number = transaction.namespace(request.namespace)
        keys = request.keys[batch.start : batch.stop]
        present = _present(transaction, keys, number)
        found.append((number, present))
        for one in present.values():
            if isinstance(one, Present):
                kept.add(one.slot)
    looked_at = LookedAt([], [])
    slots = chain(
        transaction.free_slots(),
        _more_slots(transaction, victims, kept, looked_at),
    )
    return [
        _reserve_batch(transaction, request, batch, *known, slots, looked_at)
        for (request, batch), known in zip(batches, found, strict=True)
    ]


def _reserve_batch(
    transaction: Transaction,
    request: ReserveRequest,
    batch: range,
    number: int,
    present: Mapping[bytes, Present | Refused],
    slots: Iterator[int],
    looked_at: LookedAt,
) -> BatchResult:
    """Reserve what is not `present` in a namespace, as long as there are `slots`."""
    keys = request.keys[batch.start : batch.stop]
    first = request.start + batch.start
    meta = transaction.meta
    # at least as many as one reserve asks for
    quota = max(meta.with_pages() // 4, window(meta.slots))
    member = transaction.get(
        MEMBER_KEY.pack(transaction.member), db=transaction.tables.members
    )
    owed = (
        max(
            0,
            MEMBER.unpack(member)[2]
            + transaction.owed.get(transaction.member, 0),
        )
        if member
        else 0
    )
    outcomes: list[Outcome] = []
    link = _linked(
        transaction,
        request.keys[batch.start - 1] if batch.start else request.parent,
    )
    made = 0
    served = len(keys)
    get = transaction.get
    pending = transaction.tables.pending
    for i, key in enumerate(keys):
        outcome: Outcome | None = present.get(key)
        if outcome is None and (place := get(key, None, pending)) is not None:
            outcome = _busy(transaction, key, place)
        if outcome is None and batch[i] >= request.end:
            outcome = Refused(key, Reason.NOT_ADMITTED)
        if outcome is None and owed + made >= quota:
            outcome = Refused(key, Reason.FULL)
        if outcome is None and (slot := next(slots, None)) is not None:
            # as late as this, so that a namespace without reservations takes no space
            number = (
                number
                or transaction.namespace(request.namespace)
                or transaction.add_namespace(request.namespace)
            )
            reservation = Reservation(
                transaction.next_generation(),
                transaction.member,
                request.stamp - first - i,
                transaction.now,
                number,
                first + i,
                request.tokens,
                key,
                (transaction.member,) * request.parts,
            )
            place = PLACE.pack(slot, reservation.generation)
            transaction.put(
                SLOT_KEY.pack(slot),
                reservation.pack(),
                db=transaction.tables.reserved,
            )
            transaction.put(key, place, db=transaction.tables.pending)
            meta.reserved += 1
            transaction.publish_filling(
                slot,
                reservation.generation,
                key,
                request.hits.get(batch[i], 0),
                first + i,
                link,
                number,
            )
            made += 1
            outcome = Reserved(key, slot, reservation.generation)
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
    transaction.owed[transaction.member] += made
    if number:
        transaction.add_to_namespace(number, reservations=made)
    request.made.append((transaction, outcomes))
    return BatchResult(outcomes, *looked_at, served, meta)


def commit(
    transaction: Transaction, reserved: Sequence[Reserved], part: int
) -> list[CommitResult]:
    """Record that one part of each chunk is stored; a chunk is visible when all parts are.

    Counts what becomes visible, and what was superseded, each chunk once: by its last part and by
    its first one.
    """
    # read once for each namespace, since a commit clears nothing
    watermarks: dict[int, int] = {}
    results = [
        _commit_one(transaction, item, part, watermarks) for item in reserved
    ]
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


def _more_slots(
    transaction: Transaction,
    victims: Sequence[tuple[int, int]],
    kept: set[int],
    looked_at: LookedAt,
) -> Iterator[int]:
    """Take the slots that a batch may have once none is free: those of dead members, then those of
    victims.

    Ends when no slot is left: after the first key that gets none, no key gets a slot.
    """
    reap(transaction, _REAP_AT_ONCE)
    yield from transaction.free_slots()
    for slot, generation in victims:
        key = transaction.key_of(slot, generation)
        # that chunk was evicted after the policy named it; the slot's new chunk is not a victim
        if key is None:
            looked_at.gone.append(slot)
        elif slot in kept or transaction.is_protected(slot, key):
            looked_at.passed_over.append(slot)
        else:
            transaction.detach_chunk(slot, Reason.EVICTED)
            yield slot


def _present(
    transaction: Transaction, keys: Sequence[bytes], number: int | None
) -> dict[bytes, Present | Refused]:
    """Return which keys have a chunk. A chunk of another namespace must not be taken for the
    caller's.
    """
    found: dict[bytes, Present | Refused] = {}
    tables = transaction.tables
    clearing = bool(tables.pending_clears(transaction.txn))
    for key in keys:
        row = transaction.get(key, None, tables.entries)
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


def _commit_one(
    transaction: Transaction,
    item: Reserved,
    part: int,
    watermarks: dict[int, int],
) -> CommitResult:
    reservation = transaction.reservation(item.slot, item.generation)
    if reservation is None or reservation.key != item.key:
        return CommitResult.LOST
    if not 0 <= part < len(reservation.writers):
        raise ValueError(
            f"part {part} of a chunk of {len(reservation.writers)} parts"
        )
    if reservation.writers[part] != transaction.member:
        return CommitResult.LOST
    writers = reservation.writers
    writers = (*writers[:part], 0, *writers[part + 1 :])
    latest = transaction.is_latest(reservation)
    if reservation.namespace not in watermarks:
        watermarks[reservation.namespace] = transaction.watermark(
            reservation.namespace
        )
    wanted = (
        latest and reservation.generation >= watermarks[reservation.namespace]
    )
    if any(writers):
        row = reservation._replace(writers=writers).pack()
        transaction.put(
            SLOT_KEY.pack(item.slot), row, db=transaction.tables.reserved
        )
        return CommitResult.PART if wanted else CommitResult.LOST
    transaction.unreserve(item.slot, reservation, latest)
    if not wanted or not transaction.attach_chunk(
        item.slot,
        item.generation,
        reservation.namespace,
        reservation.position,
        reservation.tokens,
        item.key,
    ):
        transaction.free_slot(item.slot)
        return CommitResult.LOST
    transaction.ready[item.slot] = reservation.stamp
    transaction.stored += 1
    return CommitResult.WHOLE


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
