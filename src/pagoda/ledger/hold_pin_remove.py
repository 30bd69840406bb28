"""Hold, pin and remove chunks, and take slots out of use, as steps of a write transaction."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import lmdb

from pagoda.base.metrics import Reason
from pagoda.ledger.lmdb_tables import HOLD, PLACE, SLOT, SLOT_KEY, PendingClear
from pagoda.ledger.members import has_device
from pagoda.ledger.transaction import Transaction

_OWNERS = "\n"  # separates the owners of the pins of one chunk


def hold(
    transaction: Transaction,
    chunks: Sequence[tuple[int, int]],
    held: list[tuple[Transaction, list[tuple[int, int]]]],
) -> list[bool]:
    """Add a hold of this member on each chunk (slot, generation), and add those to `held`.

    False where the slot has another chunk by now.
    """
    there = [transaction.key_of(*chunk) is not None for chunk in chunks]
    found = list(compress(chunks, there))
    held.append((transaction, found))
    for slot, generation in found:
        rows = (
            transaction.get(SLOT_KEY.pack(slot), db=transaction.tables.holds)
            or b""
        )
        rows += HOLD.pack(generation, transaction.member)
        transaction.put(SLOT_KEY.pack(slot), rows, db=transaction.tables.holds)
    return there


def vacate(
    transaction: Transaction,
    count: int,
    victims: Sequence[tuple[int, int]],
    in_memory: bool,
) -> list[int]:
    """Make up to `count` slots bare: free ones, then `victims` (slot, generation) that are not
    pinned or held.

    Returns these slots. Returns none if a living member has registered the slab with a GPU: its
    pages would stay.
    """
    if in_memory and has_device(transaction):
        return []
    slots = transaction.take_free(count)
    slots += transaction.evict(victims, count - len(slots), (), [], [])
    for slot in slots:
        transaction.mark_bare(slot)
    return slots


def vacate_unscanned(transaction: Transaction, count: int) -> int:
    """Make up to `count` slots bare that wait to be scanned, the last first; return how many."""
    meta = transaction.meta
    taken = min(count, meta.unscanned())
    if taken:
        meta.backed -= taken
        meta.unused = meta.backed
        if not meta.scanning:
            meta.scan = meta.slots
            transaction.remove_empty_namespaces()
    return taken


def release(transaction: Transaction, chunks: Sequence[tuple[int, int]]) -> None:
    """End one hold of this member on each chunk, if it has one; the last hold frees the slot of a
    removed chunk.
    """
    for slot, generation in chunks:
        row = transaction.get(SLOT_KEY.pack(slot), db=transaction.tables.holds)
        holds = list(HOLD.iter_unpack(row or b""))
        if (generation, transaction.member) in holds:
            holds.remove((generation, transaction.member))
            left = b"".join(HOLD.pack(*row) for row in holds)
            _put_or_delete(
                transaction, transaction.tables.holds, SLOT_KEY.pack(slot), left
            )
            transaction.free_if_unheld(slot)


def pin(transaction: Transaction, keys: Sequence[bytes], owner: str) -> int:
    """Pin those of the chunks that are stored, in the name of `owner`; at most a quarter of the
    slots are pinned.
    """
    pinned = 0
    most = max(1, transaction.meta.with_pages() // 4)
    for key in keys:
        names = set(
            (transaction.get(key, db=transaction.tables.pins) or b"")
            .decode()
            .split(_OWNERS)
        ) - {""}
        if transaction.get(key, db=transaction.tables.entries) is None:
            continue
        if (
            not names
            and transaction.txn.stat(transaction.tables.pins)["entries"] >= most
        ):
            transaction.counts[f"drop_{Reason.PIN_LIMIT}"] += 1
            continue
        transaction.put(
            key,
            _OWNERS.join(sorted(names | {owner})).encode(),
            db=transaction.tables.pins,
        )
        pinned += 1
    return pinned


def unpin(transaction: Transaction, keys: Sequence[bytes], owner: str) -> int:
    """End the pins of `owner` on these chunks; return how many."""
    ended = 0
    for key in keys:
        names = (
            (transaction.get(key, db=transaction.tables.pins) or b"")
            .decode()
            .split(_OWNERS)
        )
        if owner in names:
            left = _OWNERS.join(name for name in names if name != owner)
            _put_or_delete(
                transaction, transaction.tables.pins, key, left.encode()
            )
            ended += 1
    return ended


def remove(
    transaction: Transaction, keys: Sequence[bytes], reason: Reason
) -> int:
    """Remove the chunks of these keys; return how many were stored."""
    rows = [transaction.get(key, db=transaction.tables.entries) for key in keys]
    return sum(
        transaction.remove_chunk(PLACE.unpack_from(row)[0], reason)
        for row in rows
        if row is not None
    )


def drop(
    transaction: Transaction,
    key: bytes,
    slot: int,
    generation: int,
    reason: Reason,
) -> bool:
    """Remove one chunk if its entry still names that slot and generation."""
    row = transaction.get(key, db=transaction.tables.entries)
    if row is None or PLACE.unpack_from(row) != (slot, generation):
        return False
    held = transaction.get(SLOT_KEY.pack(slot), db=transaction.tables.slots)
    if (
        held is None
        or SLOT.unpack(held)[0] != generation
        or SLOT.unpack(held)[-1] != key
    ):
        # the entry is damaged: its slot has another chunk
        return transaction.delete(key, db=transaction.tables.entries)
    return transaction.remove_chunk(slot, reason)


def drop_cleared(
    transaction: Transaction, slots: Sequence[int], pending: PendingClear
) -> int:
    """Remove the chunks of these slots that a clear covers."""
    dropped = 0
    for slot in slots:
        row = transaction.get(SLOT_KEY.pack(slot), db=transaction.tables.slots)
        if row is not None and is_cleared(row, pending):
            dropped += transaction.remove_chunk(slot, Reason.CLEARED)
    return dropped


def is_cleared(row: bytes, pending: PendingClear) -> bool:
    """Whether a clear covers the chunk of a row of `slots`."""
    generation, own, *_ = SLOT.unpack(row)
    return generation < pending.watermark and pending.number in (0, own)


def _put_or_delete(
    transaction: Transaction, table: lmdb._Database, key: bytes, value: bytes
) -> None:
    if value:
        transaction.put(key, value, db=table)
    else:
        transaction.delete(key, db=table)
