"""Holds, pins and removal, as steps of a write transaction."""

from __future__ import annotations

from collections.abc import Sequence

import lmdb

from pagoda.ledger.tables import ENTRY, HOLD, SLOT, SLOT_KEY
from pagoda.ledger.writing import Writing
from pagoda.metrics import Reason

_OWNERS = "\n"  # between the names of those who pinned one chunk


def hold(writing: Writing, slot: int, generation: int) -> bool:
    """Add a hold of this member on a chunk; False if the slot holds another by now."""
    row = writing.get(writing.tables.slots, SLOT_KEY.pack(slot))
    if row is None or SLOT.unpack(row)[0] != generation:
        return False
    held = writing.get(writing.tables.holds, SLOT_KEY.pack(slot)) or b""
    writing.txn.put(
        SLOT_KEY.pack(slot), held + HOLD.pack(generation, writing.member), db=writing.tables.holds
    )
    return True


def release(writing: Writing, slot: int, generation: int) -> None:
    """End one hold of this member on a chunk, if it has one; the last frees the slot if the chunk has gone."""
    holds = list(HOLD.iter_unpack(writing.get(writing.tables.holds, SLOT_KEY.pack(slot)) or b""))
    if (generation, writing.member) in holds:
        holds.remove((generation, writing.member))
        left = b"".join(HOLD.pack(*row) for row in holds)
        _put_or_delete(writing, writing.tables.holds, SLOT_KEY.pack(slot), left)
        writing.unheld(slot)


def pin(writing: Writing, keys: Sequence[bytes], owner: str, most: int) -> int:
    """Pin the chunks that are there in the name of `owner`, as long as no more than `most` are pinned."""
    pinned = 0
    for key in keys:
        names = set((writing.get(writing.tables.pins, key) or b"").decode().split(_OWNERS)) - {""}
        if writing.get(writing.tables.entries, key) is None:
            continue
        if not names and writing.txn.stat(writing.tables.pins)["entries"] >= most:
            writing.count(f"drop_{Reason.PIN_LIMIT}")
            continue
        writing.txn.put(key, _OWNERS.join(sorted(names | {owner})).encode(), db=writing.tables.pins)
        pinned += 1
    return pinned


def unpin(writing: Writing, keys: Sequence[bytes] | None, owner: str) -> int:
    """End the pins of `owner` on these chunks, or on all."""
    ended = 0
    wanted = None if keys is None else set(keys)
    for key, value in list(writing.tables.rows(writing.txn, writing.tables.pins)):
        names = value.decode().split(_OWNERS)
        if owner in names and (wanted is None or key in wanted):
            left = _OWNERS.join(name for name in names if name != owner)
            _put_or_delete(writing, writing.tables.pins, key, left.encode())
            ended += 1
    return ended


def remove(writing: Writing, keys: Sequence[bytes]) -> int:
    """Drop the chunks of these keys."""
    rows = [writing.get(writing.tables.entries, key) for key in keys]
    return sum(writing.drop(ENTRY.unpack(row)[0], Reason.REMOVED) for row in rows if row is not None)


def drop(writing: Writing, key: bytes, slot: int, generation: int, reason: Reason) -> bool:
    """Drop one chunk if the entry still names that slot and generation."""
    row = writing.get(writing.tables.entries, key)
    if row is None or ENTRY.unpack(row) != (slot, generation):
        return False
    held = writing.get(writing.tables.slots, SLOT_KEY.pack(slot))
    if held is None or SLOT.unpack(held)[0] != generation or SLOT.unpack(held)[-1] != key:
        return writing.txn.delete(key, db=writing.tables.entries)  # a damaged entry: the slot is not its own
    return writing.drop(slot, reason)


def drop_outdated(writing: Writing, slots: Sequence[int], epochs: dict[int, int]) -> int:
    """Drop the chunks of these slots that are of an epoch that was cleared."""
    dropped = 0
    for slot in slots:
        row = writing.get(writing.tables.slots, SLOT_KEY.pack(slot))
        if row is not None and SLOT.unpack(row)[2] < epochs.get(SLOT.unpack(row)[1], 0):
            dropped += writing.drop(slot, Reason.CLEARED)
    return dropped


def _put_or_delete(writing: Writing, table: lmdb._Database, key: bytes, value: bytes) -> None:
    if value:
        writing.txn.put(key, value, db=table)
    else:
        writing.txn.delete(key, db=table)
