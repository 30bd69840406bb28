"""The calls of an operator, which may fail with an error: listings, pins, removal, clearing,
totals, the check.

`Cache`, the tiers and the CLI call these functions. Each waits for the ledger up to some seconds
and raises StoreError if it could not be done; the calls of an engine, which never do, are the
methods of `Ledger`.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice

import lmdb
import numpy as np

from pagoda.base.errors import LedgerCorrupt, StoreError
from pagoda.base.metrics import Reason
from pagoda.ledger import hold_pin_remove, queries, table_integrity
from pagoda.ledger.chunk_notes import ChunkNotes
from pagoda.ledger.columns import NOT_READY
from pagoda.ledger.ghost_pages import ghost_bytes, most_places
from pagoda.ledger.ledger import Ledger
from pagoda.ledger.lmdb_tables import (
    COUNTERS_ROW,
    MEMBER,
    SLOT,
    SLOT_KEY,
    Tables,
    Txn,
)
from pagoda.ledger.member_counters import folded
from pagoda.ledger.outcomes import ChunkRow, NamespaceRow, Report
from pagoda.ledger.session import PATIENT_SECONDS
from pagoda.ledger.stores_under_root import allocated_bytes
from pagoda.ledger.transaction import batches

_PAGE = 256
_PINS_PAGE = 4096  # read in one transaction, which takes some ms

# ---- listings


def list_chunks(
    ledger: Ledger,
    limit: int | None = None,
    *,
    slot: int | None = None,
    deadline_seconds: float = PATIENT_SECONDS,
) -> Iterator[ChunkRow]:
    """Walk all chunks by slot, a page at a time; between pages other calls can run. Raises
    StoreError.

    `slot`: only the chunk in that slot, if it has one, within the deadline.
    """
    now = (
        ledger.session.clock.monotonic_ns()
    )  # one moment, so ages can be compared
    if slot is not None:
        return iter(
            ledger.session.read(
                partial(_chunk_in, ledger, now, slot), deadline_seconds
            )
        )
    rows = ledger.session.read_rows(
        lambda tables: tables.slots,
        partial(_chunk_row, ledger, now),
        most=_PAGE,
    )
    return islice(rows, limit)


def latest_chunks(
    ledger: Ledger,
    limit: int,
    roots: Container[bytes] | None = None,
    number: int | None = None,
) -> list[ChunkRow]:
    """Return the `limit` chunks used last, the latest first; reads no more rows than that.

    With `roots`, only chunks of these namespaces, of which there are `number` (None: as many as the
    store has): then it reads rows until it has found enough. The columns say which are latest.
    These are hints on a disk: if they name fewer chunks than there are, all are walked.
    Raises StoreError.
    """
    known = ledger.session.read(_totals)["ready"] if number is None else number
    wanted = min(limit, known)
    found: list[ChunkRow] = []
    now = ledger.session.clock.monotonic_ns()
    slots = _latest_slots(ledger, limit if roots is None else ledger.slots)
    for start in range(0, len(slots), _PAGE):
        if len(found) >= wanted:
            break
        rows = ledger.session.read(
            partial(_chunks_in, ledger, now, slots[start : start + _PAGE])
        )
        found += [
            row for row in rows if roots is None or row.namespace_root in roots
        ]
    if len(found) < wanted:
        every = list_chunks(ledger)
        found = [
            row for row in every if roots is None or row.namespace_root in roots
        ]
        found.sort(key=lambda row: (row.last_use_age_seconds, row.position))
    return found[:limit]


def _latest_slots(ledger: Ledger, most: int) -> list[int]:
    """Return the slots of the chunks used last, the latest first, as the columns say: `most`, and
    those that were used at the same moment as the last one.
    """
    stamps = ledger.columns.last_use[: ledger.slots].copy()
    ready = np.flatnonzero(stamps != NOT_READY)
    if len(ready) > most > 0:
        least = np.partition(stamps[ready], -most)[-most]
        ready = ready[stamps[ready] >= least]
    order = np.lexsort((ledger.columns.position[ready], -stamps[ready]))
    return [int(slot) for slot in ready[order]]


def _chunks_in(
    ledger: Ledger, now: int, slots: Sequence[int], txn: Txn, tables: Tables
) -> list[ChunkRow]:
    return [
        row for slot in slots for row in _chunk_in(ledger, now, slot, txn, tables)
    ]


def _chunk_in(
    ledger: Ledger, now: int, slot: int, txn: Txn, tables: Tables
) -> list[ChunkRow]:
    row = txn.get(SLOT_KEY.pack(slot), db=tables.slots)
    return (
        []
        if row is None
        else [_chunk_row(ledger, now, txn, tables, SLOT_KEY.pack(slot), row)]
    )


def _chunk_row(
    ledger: Ledger, now: int, txn: Txn, tables: Tables, key: bytes, row: bytes
) -> ChunkRow:
    columns = ledger.columns
    session = ledger.session
    slot: int = SLOT_KEY.unpack(key)[0]
    generation, namespace, position, tokens, name = SLOT.unpack(row)
    age = (session.stamp(now) - int(columns.last_use[slot])) / 1e9
    leased = columns.lease_until[slot] > now
    pinned = txn.get(name, db=tables.pins) is not None
    root = queries.root_of(txn, tables, namespace)
    return ChunkRow(
        name,
        slot,
        generation,
        root,
        position,
        tokens,
        max(0.0, age),
        int(columns.hits[slot]),
        bool(leased),
        pinned,
    )


def list_namespaces(
    ledger: Ledger, deadline_seconds: float = PATIENT_SECONDS
) -> dict[bytes, NamespaceRow]:
    """Return the namespaces that have chunks here, and those that have a label. StoreError if not
    read in time.
    """
    until = time.monotonic() + deadline_seconds
    ledger.namespaces.write_labels(deadline_seconds)
    named = ledger.namespaces.labels(until)
    rows = {
        row.root: NamespaceRow(row.root, named.pop(row.root, {}), row.chunks)
        for row in ledger.namespaces.counts(until)
    }
    return rows | {
        root: NamespaceRow(root, fields, 0) for root, fields in named.items()
    }


def list_pins(
    ledger: Ledger, deadline_seconds: float = PATIENT_SECONDS
) -> dict[str, list[bytes]]:
    """Return the pinned keys of each owner, read a page at a time, so that other calls can run.
    Raises StoreError.
    """
    found: dict[str, list[bytes]] = {}
    until = time.monotonic() + deadline_seconds
    rows = ledger.session.read_rows(
        lambda tables: tables.pins, lambda _, __, *row: row, until, _PINS_PAGE
    )
    for key, owners in rows:
        for owner in owners.decode().split("\n"):
            found.setdefault(owner, []).append(key)
    return found


# ---- pins, removal, clearing


def pin(ledger: Ledger, keys: Sequence[bytes], owner: str) -> int:
    """Keep chunks from eviction in the name of `owner`; return how many. At most a quarter of the
    slots.
    """
    if not owner or "\n" in owner:
        raise ValueError(f"{owner!r} cannot own pins: give a name of one line")
    step = partial(hold_pin_remove.pin, owner=owner)
    return sum(
        ledger.session.write(partial(step, keys=batch)) for batch in batches(keys)
    )


def unpin(ledger: Ledger, keys: Sequence[bytes] | None, owner: str) -> int:
    """End the pins of `owner` on these chunks (None: on all that are pinned now); return how
    many.
    """
    wanted = list_pins(ledger).get(owner, []) if keys is None else keys
    step = partial(hold_pin_remove.unpin, owner=owner)
    return sum(
        ledger.session.write(partial(step, keys=batch))
        for batch in batches(wanted)
    )


def remove(
    ledger: Ledger, keys: Sequence[bytes], reason: Reason = Reason.REMOVED
) -> int:
    """Remove chunks, pinned or not, with their notes; return how many were there. Later misses of
    them say `reason`.
    """
    removed = 0
    notes = ChunkNotes(ledger.directory)
    for batch in batches(keys):
        places = _places_of(ledger, batch) if notes.exist() else []
        work = partial(hold_pin_remove.remove, keys=batch, reason=reason)
        removed += ledger.session.write(work, frees=True)
        # it does no harm: a note is read only under a published key
        with suppress(OSError):
            notes.erase(places)
    return removed


def _places_of(ledger: Ledger, keys: Sequence[bytes]) -> list[tuple[int, bytes]]:
    """Return slot and key of those of these chunks that are stored. Raises StoreError."""
    found, _ = ledger.session.read(partial(queries.find_entries, keys=keys))
    return [(item.slot, item.key) for item in found if item is not None]


def clear(ledger: Ledger, namespace: bytes | None = None) -> int:
    """Remove all chunks of one namespace (None: of all), also those being stored; return how many
    were there.

    Also removes their notes, and the log of prompts of all namespaces. Needs no free space, neither
    in the tables nor on the disk.
    No look-up finds them from the moment on at which the clear is committed, long before the last
    one is removed; if this process dies meanwhile, the next one that opens the store removes the
    rest. What another process stores after this call began may stay. Raises StoreError if it
    failed, or may not survive a power cut.
    """
    return ledger.clearing.clear(namespace)


# ---- totals


def gauges(ledger: Ledger) -> dict[str, int]:
    """Count slots: all, free, reserved, ready, unscanned, pinned, leased; and members.
    StoreError.
    """
    return ledger.session.read(_totals) | _hinted(ledger)


def counters(
    ledger: Ledger, deadline_seconds: float = PATIENT_SECONDS
) -> dict[str, int]:
    """Return the counters of all members together, including those that left. StoreError."""
    return ledger.session.read(
        lambda txn, tables: _counters(ledger, txn, tables), deadline_seconds
    )


def numbers(
    ledger: Ledger, deadline_seconds: float = PATIENT_SECONDS
) -> dict[str, int]:
    """Return gauges and counters, of one moment. StoreError if they cannot be read in time."""
    session = ledger.session

    def work(txn: Txn, tables: Tables) -> dict[str, int]:
        counters = _counters(ledger, txn, tables)
        gauges = session.member_gauges(txn, tables)
        return _totals(txn, tables) | counters | gauges

    return session.read(work, deadline_seconds) | _hinted(ledger)


def check(ledger: Ledger) -> Report:
    """Verify the tables inside the gate. LedgerCorrupt with the numbers if they do not add up.

    StoreError if they cannot be read, which says nothing about them. Slots that are still to be
    read back after a rebuild are counted (`unscanned`) and are no fault.
    """
    reap(ledger)
    hinted = _hinted(ledger)

    def work(txn: Txn, tables: Tables) -> Report:
        totals = _totals(txn, tables) | hinted
        return table_integrity.check(txn, tables, ledger.columns, totals)

    try:
        return ledger.session.read(work)
    except StoreError as error:
        if isinstance(error.__cause__, lmdb.Error):
            raise LedgerCorrupt(
                f"the tables of {ledger.directory} cannot be read: {error.__cause__}"
            ) from error
        raise


def reap(ledger: Ledger) -> int:
    """Reclaim what dead members had reserved; return how many slots."""
    return ledger.session.recover(PATIENT_SECONDS)


def _totals(txn: Txn, tables: Tables) -> dict[str, int]:
    """Return the gauges that the tables know, in a time that does not depend on the number of
    slots.
    """
    meta = tables.load_meta(txn)
    return {
        "slots": meta.slots,
        "free": meta.free(),
        "reserved": meta.reserved,
        "ready": meta.ready,
        "unscanned": meta.unscanned(),
        "unbacked": meta.unbacked(),
        "members": txn.stat(tables.members)["entries"],
        "pinned": txn.stat(tables.pins)["entries"],
    }


def _hinted(ledger: Ledger) -> dict[str, int]:
    """Return the other gauges. Outside the gate: counting leases reads all slots. StoreError if the
    directory cannot be read, as without a free file descriptor.
    """
    leased = ledger.columns.lease_until > ledger.session.clock.monotonic_ns()
    try:
        allocated = allocated_bytes(ledger.directory)
    except OSError as error:
        raise StoreError(
            f"{ledger.directory} cannot be read: {error.strerror}"
        ) from error
    state = ledger.session.store.state
    most = sum(state.sizes().values())
    if state.first_places:
        most += ghost_bytes(most_places(state.first_places, state.slots))
    return {
        "leased": int(np.count_nonzero(leased)),
        "allocated_bytes": allocated,
        "most_bytes": most,
        "hint_bytes": ledger.session.hints.nbytes,
        "locked_bytes": ledger.session.locked_bytes,
    }


def _counters(ledger: Ledger, txn: Txn, tables: Tables) -> dict[str, int]:
    rows = [MEMBER.unpack(row)[0] for _, row in tables.rows(txn, tables.members)]
    return ledger.session.counted(
        rows, folded(txn.get(COUNTERS_ROW, db=tables.meta))
    )
