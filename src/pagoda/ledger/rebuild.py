"""Fill an empty ledger from the headers of a slab that outlived it: a tier reads them and calls
this.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.base.metrics import Reason
from pagoda.ledger.clears_and_labels import is_live
from pagoda.ledger.ledger import Ledger
from pagoda.ledger.lmdb_tables import PLACE
from pagoda.ledger.locks import SCAN
from pagoda.ledger.outcomes import ScannedChunk
from pagoda.ledger.store_state import FIRST_OFFSET
from pagoda.ledger.transaction import CompleteChunk, Filling, Transaction


def unscanned(ledger: Ledger) -> range:
    """Return the slots whose headers must still be read after a rebuild. Raises StoreError."""
    meta = ledger.session.read(lambda txn, tables: tables.load_meta(txn))
    return range(meta.scan, meta.scan + meta.unscanned())


def begin_scan(ledger: Ledger) -> bool:
    """Become the one process that reads the headers back; False if another one does."""
    return ledger.session.store.locks.lock(SCAN, exclusive=True)


def end_scan(ledger: Ledger) -> None:
    """Leave the rest of the headers to other processes."""
    ledger.session.store.locks.unlock(SCAN)


def absorb(
    ledger: Ledger, first_slot: int, found: Sequence[ScannedChunk | None]
) -> None:
    """Enter what the headers of the next unscanned slots say; None where a slot is empty. At most
    64 slots.

    `st_blocks` also counts the file system's metadata for the slab (ext4), so a few slots without
    blocks may count as
    backed: at most as many as the metadata would fill. They get their blocks when they are written,
    within the limit; on a full disk that write fails, and its chunk is dropped and counted. Where
    it counts too little (a compressing file system), empty slots are allocated again.
    """
    whole = (
        ledger.slab_path.stat().st_blocks * 512
        >= ledger.slots * ledger.slot_bytes
    )
    # A later number is of an incarnation that an older copy of `state` does not know. It will be
    # given out again, so that a clear could not tell the two apart.
    first = ledger.session.store.state.first_generation()
    known = [
        chunk if chunk is None or chunk.sequence < first else None
        for chunk in found
    ]
    ledger.session.write(
        lambda transaction: _absorb(transaction, first_slot, known, whole)
    )
    if not len(unscanned(ledger)):
        ledger.space.after_scan()


def _absorb(
    transaction: Transaction,
    first_slot: int,
    found: Sequence[ScannedChunk | None],
    all_backed: bool,
) -> None:
    """Enter the next slots that wait to be scanned; ValueError if `first_slot` is not the next.

    A chunk that was cleared is left out; of several chunks with one key, the one with the highest
    sequence is kept. Empty slots are free if the slab is known to have all pages (`all_backed`);
    otherwise they count as bare until they are allocated.
    """
    if first_slot != transaction.meta.scan:
        raise ValueError(
            f"slot {transaction.meta.scan} is the next to be scanned, not {first_slot}"
        )
    for slot, chunk in enumerate(found, first_slot):
        # another store has taken their pages
        if not transaction.meta.unscanned():
            break
        transaction.meta.scan += 1
        if chunk is None or not _enter(transaction, slot, chunk):
            (transaction.free_slot if all_backed else transaction.mark_bare)(slot)
    if not transaction.meta.scanning:
        transaction.meta.scan = transaction.meta.slots
        transaction.remove_empty_namespaces()


def _enter(transaction: Transaction, slot: int, chunk: ScannedChunk) -> bool:
    if not is_live(transaction, chunk.namespace_root, chunk.epoch):
        return False
    other = transaction.get(chunk.key, db=transaction.tables.entries)
    if other is not None:
        other_slot, sequence = PLACE.unpack_from(other)
        if sequence >= chunk.sequence:
            return False
        transaction.remove_chunk(other_slot, Reason.REMOVED)
    number = transaction.namespace(
        chunk.namespace_root
    ) or transaction.add_namespace(chunk.namespace_root)
    # Older than everything that is used from now on. Sequences rise along a chain, but its tail
    # must be the oldest.
    stamp = max(0, min(chunk.sequence, FIRST_OFFSET) - 2 * chunk.position)
    complete = CompleteChunk(
        chunk.key,
        slot,
        chunk.sequence,
        number,
        chunk.position,
        chunk.tokens,
        stamp,
    )
    [added] = transaction.attach([complete])
    if added:
        filling = Filling(
            chunk.key, slot, chunk.sequence, 0, chunk.position, None
        )
        transaction.publish_filling([filling], number)
    return added
