"""Fill an empty ledger from the headers of a slab that outlived it."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.ledger.namespaces import Namespaces
from pagoda.ledger.outcome import Found
from pagoda.ledger.state import FIRST_OFFSET
from pagoda.ledger.tables import ENTRY, PLACE, SLOT, SLOT_KEY
from pagoda.ledger.writing import Writing
from pagoda.metrics import Reason


def absorb(
    writing: Writing, spaces: Namespaces, first_slot: int, found: Sequence[Found | None], all_backed: bool
) -> None:
    """Enter the next slots that wait to be scanned; ValueError if `first_slot` is not the next.

    A chunk that was cleared is left out; of one key the highest sequence stands. Slots that hold nothing are free if
    the slab is known to have `all_backed`; else they count as without pages until they are allocated.
    """
    if first_slot != writing.meta.scan:
        raise ValueError(f"slot {writing.meta.scan} is the next to be scanned, not {first_slot}")
    for slot, chunk in enumerate(found, first_slot):
        if not writing.meta.unscanned():  # another has taken their pages
            break
        writing.meta.scan += 1
        if chunk is None or not _enter(writing, spaces, slot, chunk):
            (writing.give_back if all_backed else writing.strip)(slot)
    if not writing.meta.scanning:
        writing.meta.scan = writing.meta.slots
        spaces.strike_off(writing)


def _enter(writing: Writing, spaces: Namespaces, slot: int, chunk: Found) -> bool:
    if not spaces.stands(writing, chunk.namespace_root, chunk.epoch):
        return False
    other = writing.get(writing.tables.entries, chunk.key)
    if other is not None:
        other_slot, sequence = PLACE.unpack_from(other)
        if sequence >= chunk.sequence:
            return False
        writing.drop(other_slot, Reason.REMOVED)
    number = spaces.find(writing, chunk.namespace_root) or spaces.made(writing, chunk.namespace_root)
    row = SLOT.pack(chunk.sequence, number, chunk.position, chunk.tokens, chunk.key)
    writing.txn.put(SLOT_KEY.pack(slot), row, db=writing.tables.slots)
    entry = ENTRY.pack(slot, chunk.sequence, number, chunk.position)
    writing.txn.put(chunk.key, entry, db=writing.tables.entries)
    writing.meta.ready += 1
    writing.tally(number, chunks=1)
    writing.fill(slot, chunk.sequence, chunk.key, 0, chunk.position, None)
    # Older than whatever is used from now on; sequences rise along a chain, its tail is to be the oldest.
    writing.ready(slot, max(0, min(chunk.sequence, FIRST_OFFSET) - 2 * chunk.position))
    return True
