"""Fill an empty ledger from the headers of a slab that outlived it."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.ledger.namespaces import Namespaces
from pagoda.ledger.outcome import Found
from pagoda.ledger.state import FIRST_OFFSET
from pagoda.ledger.tables import ENTRY, SLOT, SLOT_KEY
from pagoda.ledger.writing import Writing
from pagoda.metrics import Reason


def absorb(writing: Writing, spaces: Namespaces, first_slot: int, found: Sequence[Found | None]) -> None:
    """Enter the next slots that wait to be scanned; ValueError if `first_slot` is not the next.

    A chunk of an epoch that was cleared is left out; of one key the highest sequence stands.
    """
    if first_slot != writing.meta.scan:
        raise ValueError(f"slot {writing.meta.scan} is the next to be scanned, not {first_slot}")
    for slot, chunk in enumerate(found, first_slot):
        writing.meta.scan += 1
        if chunk is None or not _enter(writing, spaces, slot, chunk):
            writing.give_back(slot)


def _enter(writing: Writing, spaces: Namespaces, slot: int, chunk: Found) -> bool:
    number, epoch = spaces.current(writing, chunk.namespace_root)
    if chunk.epoch < epoch:
        return False
    if chunk.epoch > epoch:  # the file of namespaces is behind, or lost
        spaces.put(writing, chunk.namespace_root, {}, chunk.epoch)
    other = writing.get(writing.tables.entries, chunk.key)
    if other is not None:
        other_slot, sequence = ENTRY.unpack(other)
        if sequence >= chunk.sequence:
            return False
        writing.drop(other_slot, Reason.REMOVED)
    row = SLOT.pack(chunk.sequence, number, chunk.epoch, chunk.position, chunk.tokens, chunk.key)
    writing.txn.put(SLOT_KEY.pack(slot), row, db=writing.tables.slots)
    writing.txn.put(chunk.key, ENTRY.pack(slot, chunk.sequence), db=writing.tables.entries)
    writing.meta.ready += 1
    writing.fill(slot, chunk.sequence, chunk.key, 0, chunk.position, None)
    # Older than whatever is used from now on; sequences rise along a chain, its tail is to be the oldest.
    writing.ready(slot, max(0, min(chunk.sequence, FIRST_OFFSET) - 2 * chunk.position))
    return True
