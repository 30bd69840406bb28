"""Holds, pins and removal, as steps of a write transaction."""

from __future__ import annotations

from collections.abc import Sequence

import lmdb

from pagoda.ledger.members import has_device
from pagoda.ledger.namespaces import Namespaces
from pagoda.ledger.tables import HOLD, PLACE, SLOT, SLOT_KEY
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


def vacate(writing: Writing, count: int, victims: Sequence[tuple[int, int]], in_memory: bool) -> list[int]:
    """Make up to `count` slots bare: those that hold nothing, then `victims` (slot, generation) that nobody keeps.

    Returns them; none of a slab in memory that a living member has registered with a GPU, whose pages would stay.
    """
    if in_memory and has_device(writing):
        return []
    slots: list[int] = []
    while len(slots) < count and (free := writing.take_free()) is not None:
        slots.append(free)
    for slot, generation in victims:
        key = writing.chunk(slot, generation)
        if len(slots) < count and key is not None and not writing.kept(slot, key):
            writing.take_out(slot, Reason.EVICTED)
            slots.append(slot)
    for slot in slots:
        writing.strip(slot)
    return slots


def vacate_unscanned(writing: Writing, spaces: Namespaces, count: int) -> int:
    """Take up to `count` slots from those that wait to be scanned, the last first; return how many."""
    meta = writing.meta
    taken = min(count, meta.unscanned())
    if taken:
        meta.backed -= taken
        meta.unused = meta.backed
        if not meta.scanning:
            meta.scan = meta.slots
            spaces.strike_off(writing)
    return taken


def release(writing: Writing, slot: int, generation: int) -> None:
    """End one hold of this member on a chunk, if it has one; the last frees the slot if the chunk has gone."""
    holds = list(HOLD.iter_unpack(writing.get(writing.tables.holds, SLOT_KEY.pack(slot)) or b""))
    if (generation, writing.member) in holds:
        holds.remove((generation, writing.member))
        left = b"".join(HOLD.pack(*row) for row in holds)
        _put_or_delete(writing, writing.tables.holds, SLOT_KEY.pack(slot), left)
        writing.unheld(slot)


def pin(writing: Writing, keys: Sequence[bytes], owner: str) -> int:
    """Pin the chunks that are there in the name of `owner`, as long as no more than a quarter of the slots are."""
    pinned, most = 0, writing.most_pinned()
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
    return sum(writing.drop(PLACE.unpack_from(row)[0], Reason.REMOVED) for row in rows if row is not None)


def drop(writing: Writing, key: bytes, slot: int, generation: int, reason: Reason) -> bool:
    """Drop one chunk if the entry still names that slot and generation."""
    row = writing.get(writing.tables.entries, key)
    if row is None or PLACE.unpack_from(row) != (slot, generation):
        return False
    held = writing.get(writing.tables.slots, SLOT_KEY.pack(slot))
    if held is None or SLOT.unpack(held)[0] != generation or SLOT.unpack(held)[-1] != key:
        return writing.txn.delete(key, db=writing.tables.entries)  # a damaged entry: the slot is not its own
    return writing.drop(slot, reason)


def drop_cleared(writing: Writing, slots: Sequence[int], namespace: int | None, line: int) -> int:
    """Drop the chunks of these slots that a clear at generation `line` took, of one namespace or of all."""
    dropped = 0
    for slot in slots:
        row = writing.get(writing.tables.slots, SLOT_KEY.pack(slot))
        if row is not None and takes(row, namespace, line):
            dropped += writing.drop(slot, Reason.CLEARED)
    return dropped


def takes(row: bytes, namespace: int | None, line: int) -> bool:
    """Whether a clear at generation `line`, of one namespace (its number) or of all, takes the chunk of a row."""
    generation, own, *_ = SLOT.unpack(row)
    return generation < line and namespace in (None, own)


def _put_or_delete(writing: Writing, table: lmdb._Database, key: bytes, value: bytes) -> None:
    if value:
        writing.txn.put(key, value, db=table)
    else:
        writing.txn.delete(key, db=table)
