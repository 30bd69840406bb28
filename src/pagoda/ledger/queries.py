"""What read transactions look up: the leading run of some keys, rows and totals."""

from __future__ import annotations

from collections.abc import Sequence

import lmdb
import numpy as np
from numpy.typing import NDArray

from pagoda.base.metrics import Reason
from pagoda.ledger.columns import FEW, Columns
from pagoda.ledger.lmdb_tables import (
    CLEARING_ROW,
    ENTRY,
    NAMESPACE,
    NO_NAMESPACE,
    NUMBER,
    PLACE,
    SLOT,
    SLOT_KEY,
    Meta,
    PendingClear,
    Tables,
    Txn,
)
from pagoda.ledger.outcomes import Present

_FEW_ENTRIES = 32  # up to this number, entries are checked one by one
_ENTRY_ROW = np.dtype(
    [
        ("slot", "<u4"),
        ("generation", "<u8"),
        ("namespace", "<u8"),
        ("position", "<u4"),
    ]
)


def match_prefix(
    txn: Txn, tables: Tables, columns: Columns, published: bool, keys: Sequence[bytes],
    namespace: bytes | None, start: int | None,
) -> tuple[NDArray[np.int64], NDArray[np.uint64], int, Reason | None]:  # fmt: skip
    """Look up keys until one is absent, or is not the chunk of that namespace at that position
    (from `start` on).

    Without a namespace, neither namespace nor position is checked. Returns slots and generations of
    that run; how many of its leading chunks are published in these columns under the keys asked
    for; and why the run ends before the last key, if the tables show it. Not `published`: the
    columns are only hints (those of a store on disk, where a read verifies what it finds), and all
    chunks in slots that exist count.
    """
    rows: list[bytes] = []
    get = txn.get
    table = tables.entries
    for key in keys:
        row = get(key, None, table)  # by position: a third faster than by name
        if row is None:
            break
        rows.append(row)
    joined = b"".join(rows)
    if len(joined) != ENTRY.size * len(rows):
        raise lmdb.CorruptedError("a row of entries has another size")
    entries = np.frombuffer(joined, _ENTRY_ROW)
    count, reason = _as_asked(txn, tables, joined, namespace, start)
    if get(CLEARING_ROW, None, tables.roots) is not None:
        left = _leading(~_cleared(entries[:count], tables.pending_clears(txn)))
        if left < count:
            count = left
            reason = Reason.CLEARED
    slots = entries["slot"][:count].astype(np.int64)
    generations = entries["generation"][:count].astype(np.uint64)
    if published:
        intact = _intact(columns, slots, generations, keys[:count])
    else:
        intact = _leading_below(columns.slots, slots)
    if intact < count:
        reason = Reason.FAILED_CHECK
    elif (
        reason is None
        and count < len(keys)
        and txn.get(keys[count], db=tables.pending) is not None
    ):
        reason = Reason.BUSY
    return slots, generations, intact, reason


def _as_asked(
    txn: Txn,
    tables: Tables,
    rows: bytes,
    namespace: bytes | None,
    start: int | None,
) -> tuple[int, Reason | None]:
    """Return how many leading entries are of that namespace and at these positions, and what is
    wrong with the next.

    The key alone is no proof: a caller that makes its own keys may pass keys of another namespace.
    """
    entries = np.frombuffer(rows, _ENTRY_ROW)
    count = 0
    if namespace is None or not len(entries):
        return len(entries), None
    row = txn.get(namespace, db=tables.roots)
    number = NUMBER.unpack(row)[0] if row is not None else NO_NAMESPACE
    if len(entries) > _FEW_ENTRIES:
        good = entries["namespace"] == number
        if start is not None:
            good &= entries["position"] == np.arange(start, start + len(entries))
        count = _leading(good)
    for i, (_, _, owner, position) in enumerate(
        ENTRY.iter_unpack(rows[count * ENTRY.size :]), count
    ):
        if owner != number:
            return i, Reason.OTHER_NAMESPACE
        if start is not None and position != start + i:
            return i, Reason.ABSENT
    return len(entries), None


def _cleared(
    entries: NDArray[np.void], pending: Sequence[PendingClear]
) -> NDArray[np.bool_]:
    """Return which of these entries a clear under way covers: they are as good as removed."""
    cleared = np.zeros(len(entries), np.bool_)
    for clear in pending:
        before = entries["generation"] < np.uint64(clear.watermark)
        cleared |= (
            before
            if not clear.number
            else before & (entries["namespace"] == np.uint64(clear.number))
        )
    return cleared


def is_cleared(txn: Txn, tables: Tables, entry: bytes) -> bool:
    """Whether a clear under way covers the chunk of a row of `entries`."""
    _, generation, number, _ = ENTRY.unpack(entry)
    return any(
        generation < clear.watermark and clear.number in (0, number)
        for clear in tables.pending_clears(txn)
    )


def _leading(good: NDArray[np.bool_]) -> int:
    """Return how many leading values are True."""
    count = good.tobytes().find(0)
    return len(good) if count < 0 else count


def find_entries(
    txn: Txn, tables: Tables, keys: Sequence[bytes]
) -> tuple[list[Present | None], Meta]:
    """Return which of these keys have an entry, also after holes, and the totals."""
    rows = [txn.get(key, db=tables.entries) for key in keys]
    if tables.pending_clears(txn):
        rows = [
            row if row is not None and not is_cleared(txn, tables, row) else None
            for row in rows
        ]
    found = [
        Present(key, *PLACE.unpack_from(row)) if row is not None else None
        for key, row in zip(keys, rows, strict=True)
    ]
    return found, tables.load_meta(txn)


def _leading_below(slots: int, rows: NDArray[np.int64]) -> int:
    """Return how many leading rows are of slots that exist: LMDB has no checksums."""
    if len(rows) <= FEW and max(rows.tolist(), default=0) < slots:
        return len(rows)
    return _leading(rows < slots)


def _intact(
    columns: Columns,
    slots: NDArray[np.int64],
    generations: NDArray[np.uint64],
    keys: Sequence[bytes],
) -> int:
    """Return how many leading slots are published under these keys and generations."""
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
        return _intact(
            columns, slots[:before], generations[:before], keys[:before]
        )
    same = columns.are_published(slots, keys) & (
        columns.generation[slots] == generations
    )
    return _leading(same)


def are_current(
    txn: Txn, tables: Tables, slots: Sequence[int], generations: Sequence[int]
) -> list[bool]:
    """Return for each slot whether it has a chunk of that generation."""
    rows = [txn.get(SLOT_KEY.pack(slot), db=tables.slots) for slot in slots]
    return [
        row is not None and SLOT.unpack(row)[0] == generation
        for row, generation in zip(rows, generations, strict=True)
    ]


def is_current(txn: Txn, tables: Tables, slot: int, generation: int) -> bool:
    """Return for one slot what `are_current` returns for many, in less time."""
    row = txn.get(SLOT_KEY.pack(slot), db=tables.slots)
    return row is not None and bool(SLOT.unpack(row)[0] == generation)


def backing(txn: Txn, tables: Tables) -> tuple[Meta, list[int]]:
    """Return the totals, and the bare slots in order."""
    bare = [
        int(SLOT_KEY.unpack(row)[0]) for row, _ in tables.rows(txn, tables.bare)
    ]
    return tables.load_meta(txn), bare


# ---- namespaces


def root_of(txn: Txn, tables: Tables, number: int) -> bytes:
    """Return the root of the namespace of that number; empty if there is none."""
    row = txn.get(NUMBER.pack(number), db=tables.namespaces)
    return bytes(NAMESPACE.unpack(row)[0]) if row is not None else b""


def watermark_of(txn: Txn, tables: Tables, root: bytes) -> int:
    """Return the generation before which what a namespace stored or reserved is cleared."""
    meta = tables.load_meta(txn)
    number = txn.get(root, db=tables.roots)
    row = txn.get(number, db=tables.namespaces) if number is not None else None
    return (
        max(NAMESPACE.unpack(row)[1], meta.cleared)
        if row is not None
        else meta.next_generation
    )
