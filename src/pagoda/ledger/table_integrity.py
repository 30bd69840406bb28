"""Whether the tables of a store can be trusted: a checksum from the last clean close decides, else
a read of all rows.

LMDB has no checksums: a damaged page may cause an error, give a wrong row, or kill the process by a
signal. `store_directory` calls this module.
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import lmdb
import msgspec
import numpy as np
import xxhash

from pagoda.base.errors import LedgerCorrupt
from pagoda.base.file_space import open_regular
from pagoda.ledger import queries
from pagoda.ledger.columns import NOT_READY, Columns
from pagoda.ledger.lmdb_tables import (
    CLEARING_ROW,
    ENTRY,
    META_ROW,
    NAMESPACE,
    NUMBER,
    PLACE,
    SLOT,
    SLOT_KEY,
    Meta,
    Reservation,
    Tables,
    Txn,
)
from pagoda.ledger.outcomes import Report
from pagoda.ledger.store_state import TABLES, StoreState
from pagoda.ledger.table_pages import TablePages

# if it takes longer, reading the headers back in the background is the faster start
_SECONDS = 1.0
# read between two checks of the clock: the tables of most stores are one piece
_PIECE_BYTES = 64 << 20
# up to this number of slots, every row is read when the store is opened: some tenths of a second
_MOST_ROWS = 1 << 17

_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.BadRslotError,
    lmdb.PanicError,
    lmdb.ProblemError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
    lmdb.NotFoundError,
    lmdb.PageFullError,
    lmdb.CursorFullError,
    LedgerCorrupt,
    msgspec.DecodeError,
    UnicodeDecodeError,
)


def is_damage(error: BaseException) -> bool:
    """Whether this error, raised by the tables, means that they are damaged."""
    if isinstance(error, struct.error):
        # otherwise the caller tried to pack a wrong number
        return "unpack" in str(error)
    return isinstance(error, _DAMAGE)


def checksum(directory: Path, used_bytes: int) -> str | None:
    """Return the checksum of the used pages of the tables; None if reading them takes too long.
    OSError.
    """
    until = time.monotonic() + _SECONDS
    state = xxhash.xxh3_128()
    left = used_bytes
    with open_regular(directory / TABLES) as file:
        while left > 0:
            piece = file.read(min(left, _PIECE_BYTES))
            if not piece:
                return None
            state.update(piece)
            left -= len(piece)
            if left > 0 and time.monotonic() > until:
                return None
    return state.hexdigest()


def find_damage(directory: Path, state: StoreState, known: bool) -> str | None:
    """Open the tables as a member will, and return what is wrong with them; None if they are sound.

    `known`: the checksum has shown that they are as they were written; otherwise every row is read.
    May kill the process. OSError or LMDB's error if they cannot be read, or the system does not let
    this process open or write them.
    """
    path = directory / TABLES
    size = state.map_bytes
    if state.kind == "file":
        with closing(TablePages(path, size)) as pages:
            # an error here, instead of a signal when the tables are read
            pages.load()
    is_open = False
    try:
        with Tables.opening, closing(Tables(path, size)) as tables:
            is_open = True
            with tables.env.begin(write=True) as txn:
                meta = tables.load_meta(txn)
                if meta.slots != state.slots:
                    return (
                        f"its tables are of {meta.slots} slots, not {state.slots}"
                    )
                if not known and meta.slots <= _MOST_ROWS:
                    verify(txn, tables)
                # free pages may be damaged too: write to one
                txn.put(META_ROW, meta.pack(), db=tables.meta)
    except (lmdb.Error, struct.error, LedgerCorrupt, ValueError) as error:
        # in a transaction, damaged pages may make LMDB ask for more memory than there is
        if _is_of_the_system(error) or (
            isinstance(error, lmdb.MemoryError) and not is_open
        ):
            raise
        return f"its tables are damaged ({error})"
    return None


def _is_of_the_system(error: Exception) -> bool:
    """Whether an error of LMDB comes from a system call: too many open files, a disk that is full
    or read-only.
    """
    # `lmdb.Error` itself: an error number that LMDB has no class for
    return type(error) is lmdb.Error or isinstance(
        error, lmdb.DiskError | lmdb.ReadonlyError | lmdb.LockError
    )


def check(
    txn: Txn, tables: Tables, columns: Columns, totals: dict[str, int]
) -> Report:
    """Verify the tables; count hints that are wrong, which is no fault. LedgerCorrupt with the
    numbers.
    """
    ready = verify(txn, tables)
    rows = np.fromiter(ready, np.int64)
    generations = np.fromiter((row[0] for row in ready.values()), np.uint64)
    hints = (columns.generation[rows] != generations) | (
        columns.last_use[rows] == NOT_READY
    )
    if len(rows):
        hints |= ~columns.are_published(rows, [row[-1] for row in ready.values()])
    parents = columns.parent_slot[rows]
    child = (parents >= 0) & (parents < columns.slots)
    unreachable = (
        columns.generation[parents[child]]
        != columns.parent_generation[rows[child]]
    )
    return Report(
        totals, int(np.count_nonzero(unreachable)), int(np.count_nonzero(hints))
    )


def verify(
    txn: Txn, tables: Tables
) -> dict[int, tuple[int, int, int, int, bytes]]:
    """Read every row of all tables; LedgerCorrupt, or an error of LMDB or struct. Returns the
    chunks by slot.
    """
    for table in (
        tables.members,
        tables.holds,
        tables.pins,
        tables.labels,
        tables.meta,
    ):
        for _ in tables.rows(txn, table):
            pass
    meta, bare = queries.backing(txn, tables)
    free = {SLOT_KEY.unpack(row)[0] for row, _ in tables.rows(txn, tables.free)}
    ready = {
        SLOT_KEY.unpack(row)[0]: SLOT.unpack(value)
        for row, value in tables.rows(txn, tables.slots)
    }
    rows = tables.rows(txn, tables.reserved)
    reserved = {
        SLOT_KEY.unpack(row)[0]: Reservation.unpack(value) for row, value in rows
    }
    _verify_slots(txn, tables, meta, free, set(bare), ready, reserved)
    return ready


def _verify_slots(
    txn: Txn, tables: Tables, meta: Meta, free: set[int], bare: set[int],
    ready: dict[int, tuple[int, int, int, int, bytes]], reserved: dict[int, Reservation],
) -> None:  # fmt: skip
    unscanned = meta.unscanned()
    never_used = meta.backed - meta.unused
    numbers = (
        f"{len(free)} free + {never_used} never used + {len(reserved)} reserved + {len(ready)} "
        "ready "
        f"+ {unscanned} unscanned + {meta.unbacked()} unbacked, {meta.slots} slots; "
        f"totals say {meta.reserved} reserved, {meta.ready} ready; {len(bare)} of {meta.bare} "
        "bare are listed"
    )
    if (
        len(free)
        + never_used
        + len(reserved)
        + len(ready)
        + unscanned
        + meta.unbacked()
        != meta.slots
    ):
        raise LedgerCorrupt(f"slots do not add up: {numbers}")
    if (len(reserved), len(ready), len(bare)) != (
        meta.reserved,
        meta.ready,
        meta.bare,
    ):
        raise LedgerCorrupt(f"totals are off: {numbers}")
    slots = free | bare | ready.keys() | reserved.keys()
    if len(slots) != len(free) + len(bare) + len(ready) + len(reserved):
        raise LedgerCorrupt(f"a slot is in two tables: {numbers}")
    if max(slots, default=-1) >= meta.backed:
        raise LedgerCorrupt(
            f"slot {max(slots)} does not exist or has no pages: {numbers}"
        )
    entries = {
        key: ENTRY.unpack(value)
        for key, value in tables.rows(txn, tables.entries)
    }
    if {
        row[-1]: (slot, row[0], row[1], row[2]) for slot, row in ready.items()
    } != entries:
        raise LedgerCorrupt(
            f"entries and slots disagree: {len(entries)} entries, {numbers}"
        )
    latest = {(r.key, slot, r.generation) for slot, r in reserved.items()}
    lost = [
        key
        for key, row in tables.rows(txn, tables.pending)
        if (key, *PLACE.unpack(row)) not in latest
    ]
    if lost:
        raise LedgerCorrupt(
            f"{len(lost)} pending keys have no reservation: {numbers}"
        )
    _verify_namespaces(txn, tables, meta, ready, reserved)


def _verify_namespaces(
    txn: Txn, tables: Tables, meta: Meta, ready: dict[int, tuple[int, int, int, int, bytes]],
    reserved: dict[int, Reservation],
) -> None:  # fmt: skip
    chunks = Counter(row[1] for row in ready.values())
    reservations = Counter(r.namespace for r in reserved.values() if r.namespace)
    rows = {
        NUMBER.unpack(key)[0]: NAMESPACE.unpack(row)
        for key, row in tables.rows(txn, tables.namespaces)
    }
    counted = {
        number: (chunks[number], reservations[number])
        for number in {**rows, **chunks, **reservations}
    }
    for number, found in counted.items():
        told = rows[number][2:] if number in rows else None
        if found != told:
            raise LedgerCorrupt(
                f"namespace {number} has (chunks, reservations) {found}, its row says {told}"
            )
        if not any(found) and not meta.scanning:
            raise LedgerCorrupt(f"namespace {number} has nothing, and a row")
    roots = {
        root: NUMBER.unpack(row)[0]
        for root, row in tables.rows(txn, tables.roots)
        if root != CLEARING_ROW
    }
    if roots != {row[0]: number for number, row in rows.items()}:
        raise LedgerCorrupt(
            f"{len(roots)} roots and {len(rows)} namespaces disagree"
        )
