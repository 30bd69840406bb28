"""What read transactions look up: the leading run of some keys, rows, totals, and whether the numbers add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import lmdb
import numpy as np
from numpy.typing import NDArray

from pagoda.errors import LedgerCorrupt
from pagoda.ledger.columns import FEW, NOT_READY, Columns
from pagoda.ledger.outcome import Present, Report
from pagoda.ledger.tables import ENTRY, SLOT, SLOT_KEY, Meta, Reservation, Tables
from pagoda.metrics import Reason

_ENTRY_ROW = np.dtype([("slot", "<u4"), ("generation", "<u8")])


class Run(NamedTuple):
    """A leading run as the entries have it. `intact` chunks of it are published under the keys asked for."""

    slots: NDArray[np.int64]
    generations: NDArray[np.uint64]
    intact: int
    pending: bool


def find(txn: lmdb.Transaction, tables: Tables, columns: Columns, keys: Sequence[bytes]) -> Run:
    """Look up keys until one is absent; compare each slot's published key with the one asked for."""
    rows: list[bytes] = []
    for key in keys:
        row = cast("bytes | None", txn.get(key, db=tables.entries))
        if row is None:
            break
        rows.append(row)
    entries = np.frombuffer(b"".join(rows), _ENTRY_ROW)
    slots, generations = entries["slot"].astype(np.int64), entries["generation"].astype(np.uint64)
    intact = _intact(columns, slots, generations, keys[: len(rows)])
    pending = len(rows) < len(keys) and txn.get(keys[len(rows)], db=tables.pending) is not None
    return Run(slots, generations, intact, pending)


def look(txn: lmdb.Transaction, tables: Tables, keys: Sequence[bytes]) -> tuple[list[Present | None], int]:
    """Which of these keys have an entry, holes notwithstanding, and how many slots are free."""
    rows = [cast("bytes | None", txn.get(key, db=tables.entries)) for key in keys]
    found = [
        Present(key, *ENTRY.unpack(row)) if row is not None else None
        for key, row in zip(keys, rows, strict=True)
    ]
    return found, tables.load_meta(txn).free()


def _intact(
    columns: Columns, slots: NDArray[np.int64], generations: NDArray[np.uint64], keys: Sequence[bytes]
) -> int:
    """How many leading slots are published under these keys and generations."""
    if len(keys) <= FEW:
        for i, key in enumerate(keys):
            slot = int(slots[i])
            if (
                slot >= columns.slots
                or columns.key_of(slot) != key
                or columns.generation[slot] != generations[i]
            ):
                return i
        return len(keys)
    if slots.max() >= columns.slots:  # LMDB has no checksums
        before = int(np.argmax(slots >= columns.slots))
        return _intact(columns, slots[:before], generations[:before], keys[:before])
    same = columns.names(slots, keys) & (columns.generation[slots] == generations)
    return len(keys) if same.all() else int(np.argmin(same))


def outdated(
    txn: lmdb.Transaction, tables: Tables, epochs: dict[int, int], start: int, most: int, rows: int
) -> tuple[list[int], int | None]:
    """Slots whose namespace has begun a newer epoch, `most` at once, among the next `rows`; where to go on."""
    found: list[int] = []
    for seen, (key, row) in enumerate(tables.rows(txn, tables.slots, SLOT_KEY.pack(start))):
        slot: int = SLOT_KEY.unpack(key)[0]
        if len(found) == most or seen == rows:
            return found, slot
        _, namespace, epoch, *_ = SLOT.unpack(row)
        if epoch < epochs.get(namespace, 0):
            found.append(slot)
    return found, None


def gauges(txn: lmdb.Transaction, tables: Tables, columns: Columns, now: int) -> dict[str, int]:
    """The totals, from the tables; leased slots from the hints."""
    meta = tables.load_meta(txn)
    return {
        "slots": meta.slots,
        "free": meta.free(),
        "reserved": meta.reserved,
        "ready": meta.ready,
        "unscanned": meta.slots - meta.scan,
        "members": txn.stat(tables.members)["entries"],
        "pinned": txn.stat(tables.pins)["entries"],
        "leased": int(np.count_nonzero(columns.lease_until > now)),
    }


def check(txn: lmdb.Transaction, tables: Tables, columns: Columns, totals: dict[str, int]) -> Report:
    """Judge the tables alone; count, but do not judge, hints that are wrong. LedgerCorrupt with the numbers."""
    meta = tables.load_meta(txn)
    free = {SLOT_KEY.unpack(row)[0] for row, _ in tables.rows(txn, tables.free)}
    ready = {SLOT_KEY.unpack(row)[0]: SLOT.unpack(value) for row, value in tables.rows(txn, tables.slots)}
    reserved = {
        SLOT_KEY.unpack(row)[0]: Reservation.unpack(value) for row, value in tables.rows(txn, tables.reserved)
    }
    _judge(txn, tables, meta, free, ready, reserved)
    rows = np.fromiter(ready, np.int64)
    generations = np.fromiter((row[0] for row in ready.values()), np.uint64)
    hints = (columns.generation[rows] != generations) | (columns.last_use[rows] == NOT_READY)
    if len(rows):
        hints |= ~columns.names(rows, [row[-1] for row in ready.values()])
    parents = columns.parent_slot[rows]
    child = (parents >= 0) & (parents < columns.slots)
    unreachable = columns.generation[parents[child]] != columns.parent_generation[rows[child]]
    return Report(totals, int(np.count_nonzero(unreachable)), int(np.count_nonzero(hints)))


def _judge(
    txn: lmdb.Transaction, tables: Tables, meta: Meta, free: set[int],
    ready: dict[int, tuple[int, int, int, int, int, bytes]], reserved: dict[int, Reservation],
) -> None:  # fmt: skip
    unscanned = meta.slots - meta.scan
    never_used = meta.slots - meta.unused if not unscanned else 0
    numbers = (
        f"{len(free)} free + {never_used} never used + {len(reserved)} reserved + {len(ready)} ready "
        f"+ {unscanned} unscanned, {meta.slots} slots; totals say {meta.reserved} reserved, {meta.ready} ready"
    )
    if len(free) + never_used + len(reserved) + len(ready) + unscanned != meta.slots:
        raise LedgerCorrupt(f"slots do not add up: {numbers}")
    if (len(reserved), len(ready)) != (meta.reserved, meta.ready):
        raise LedgerCorrupt(f"totals are off: {numbers}")
    if len(free | ready.keys() | reserved.keys()) != len(free) + len(ready) + len(reserved):
        raise LedgerCorrupt(f"a slot is in two tables: {numbers}")
    entries = {key: ENTRY.unpack(value) for key, value in tables.rows(txn, tables.entries)}
    if {row[-1]: (slot, row[0]) for slot, row in ready.items()} != entries:
        raise LedgerCorrupt(f"entries and slots disagree: {len(entries)} entries, {numbers}")
    latest = {(r.key, slot, r.generation) for slot, r in reserved.items()}
    lost = [key for key, row in tables.rows(txn, tables.pending) if (key, *ENTRY.unpack(row)) not in latest]
    if lost:
        raise LedgerCorrupt(f"{len(lost)} pending keys have no reservation: {numbers}")


def miss_reason(run: Run, keys: Sequence[bytes]) -> Reason | None:
    """Why the run ends, as far as the tables tell: None where the ghosts must be asked or all keys are in it."""
    if run.intact < len(run.slots):
        return Reason.FAILED_CHECK
    return Reason.BUSY if run.pending else None
