"""What read transactions look up: the leading run of some keys, rows and totals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import lmdb
import numpy as np
from numpy.typing import NDArray

from pagoda.base.metrics import Reason
from pagoda.ledger.columns import KEY_BYTES, Columns
from pagoda.ledger.lmdb_tables import (
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
# slots, generations, how many are intact, why not more
Found: TypeAlias = tuple[
    "Sequence[int] | NDArray[np.int64]",
    "Sequence[int] | NDArray[np.uint64]",
    int,
    Reason | None,
]
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
) -> Found:  # fmt: skip
    """Look up keys until one is absent, or is not the chunk of that namespace at that position
    (from `start` on).

    Without a namespace, neither namespace nor position is checked: the key alone is no proof, since
    a caller that makes its own keys may pass keys of another namespace. Returns slots and
    generations of that run; how many of its leading chunks are published in these columns under the
    keys asked for; and why the run ends before the last key, if the tables show it. Not
    `published`: the columns are only hints (those of a store on disk, where a read verifies what it
    finds), and all chunks in slots that exist count.
    """
    number: int | None = None
    if namespace is not None:
        row = txn.get(namespace, None, tables.roots)
        number = NUMBER.unpack(row)[0] if row is not None else NO_NAMESPACE
    clears = tables.pending_clears(txn)
    match = _match_few if len(keys) <= _FEW_ENTRIES else _match_many
    found = match(txn, tables, columns, published, keys, number, start, clears)
    _, _, intact, reason = found
    if (
        reason is None
        and intact < len(keys)
        and txn.get(keys[intact], None, tables.pending) is not None
    ):
        return *found[:3], Reason.BUSY
    return found


def _match_few(
    txn: Txn,
    tables: Tables,
    columns: Columns,
    published: bool,
    keys: Sequence[bytes],
    number: int | None,
    start: int | None,
    clears: Sequence[PendingClear],
) -> Found:
    """Return the leading entries that are as asked, and intact. See `match_prefix`. Array
    operations would take several times as long.

    `number`: of the namespace; None: neither it nor the position is checked.
    """
    # by position: a third faster than by name
    get = txn.get
    table = tables.entries
    unpack = ENTRY.unpack
    generation_of = columns.cells[0]
    memory, keys_at = columns.published_keys
    most = columns.slots
    slots: list[int] = []
    generations: list[int] = []
    place = start or 0
    for key in keys:
        row = get(key, None, table)
        if row is None:
            break
        slot, generation, owner, at = unpack(row)
        if owner != number:
            if number is not None:
                return slots, generations, len(slots), Reason.OTHER_NAMESPACE
        elif at != place and start is not None:
            return slots, generations, len(slots), Reason.ABSENT
        if clears and _is_covered(clears, generation, owner):
            return slots, generations, len(slots), Reason.CLEARED
        slots.append(slot)
        generations.append(generation)
        begin = keys_at + slot * KEY_BYTES
        # LMDB has no checksums
        if slot >= most or (
            published
            and (
                generation_of[slot] != generation
                or memory[begin : begin + KEY_BYTES] != key
            )
        ):
            return slots, generations, len(slots) - 1, Reason.FAILED_CHECK
        place += 1
    return slots, generations, len(slots), None


def _match_many(
    txn: Txn,
    tables: Tables,
    columns: Columns,
    published: bool,
    keys: Sequence[bytes],
    number: int | None,
    start: int | None,
    clears: Sequence[PendingClear],
) -> Found:
    """Do the same for many keys, with array operations."""
    rows: list[bytes] = []
    get = txn.get
    table = tables.entries
    for key in keys:
        row = get(key, None, table)
        if row is None:
            break
        rows.append(row)
    joined = b"".join(rows)
    if len(joined) != ENTRY.size * len(rows):
        raise lmdb.CorruptedError("a row of entries has another size")
    entries = np.frombuffer(joined, _ENTRY_ROW)
    count = len(entries)
    reason: Reason | None = None
    if number is not None:
        good = entries["namespace"] == number
        if start is not None:
            good &= entries["position"] == np.arange(start, start + len(entries))
        count = _leading(good)
        if count < len(entries):
            owner = entries["namespace"][count]
            reason = Reason.OTHER_NAMESPACE if owner != number else Reason.ABSENT
    if clears:
        left = _leading(~_cleared(entries[:count], clears))
        if left < count:
            count = left
            reason = Reason.CLEARED
    slots = entries["slot"][:count].astype(np.int64)
    generations = entries["generation"][:count].astype(np.uint64)
    if published:
        intact = _intact(columns, slots, generations, keys[:count])
    else:
        intact = _leading(slots < columns.slots)
    if intact < count:
        reason = Reason.FAILED_CHECK
    return slots, generations, intact, reason


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
    return _is_covered(tables.pending_clears(txn), generation, number)


def _is_covered(
    clears: Sequence[PendingClear], generation: int, number: int
) -> bool:
    """Whether one of the clears under way covers a chunk of that generation and namespace."""
    return any(
        generation < clear.watermark and clear.number in (0, number)
        for clear in clears
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


def find_slots(
    txn: Txn, tables: Tables, keys: Sequence[bytes]
) -> list[tuple[int, int] | None]:
    """Return slot and generation of those of these keys that have an entry or are being stored."""
    found, _ = find_entries(txn, tables, keys)
    places: list[tuple[int, int] | None] = []
    for key, entry in zip(keys, found, strict=True):
        place = None
        if entry is not None:
            place = entry.slot, entry.generation
        elif row := txn.get(key, db=tables.pending):
            place = PLACE.unpack_from(row)
        places.append(place)
    return places


def _intact(
    columns: Columns,
    slots: NDArray[np.int64],
    generations: NDArray[np.uint64],
    keys: Sequence[bytes],
) -> int:
    """Return how many leading slots are published under these keys and generations."""
    if not len(slots):
        return 0
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
