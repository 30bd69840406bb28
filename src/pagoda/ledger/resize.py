"""Give the tables of a ledger another number of slots. Only for who has the store alone."""

from __future__ import annotations

from pathlib import Path

import lmdb

from pagoda.ledger.tables import ENTRY, META_ROW, SLOT, SLOT_KEY, Meta, Reservation, Tables


def resize_tables(path: Path, map_bytes: int, slots: int) -> None:
    """Drop what lies in slots that go; reservations go all, since nobody lives who could write them."""
    tables = Tables(path, map_bytes)
    try:
        with tables.env.begin(write=True) as txn:
            meta = tables.load_meta(txn)
            for row in [
                row for row, _ in tables.rows(txn, tables.slots, SLOT_KEY.pack(min(slots, meta.slots)))
            ]:
                key = SLOT.unpack(txn.pop(row, db=tables.slots) or b"")[-1]
                txn.delete(key, db=tables.entries)
                txn.delete(key, db=tables.pins)
                meta.ready -= 1
            for row, value in list(tables.rows(txn, tables.reserved)):
                _unreserve(txn, tables, row, Reservation.unpack(value))
            for row in [
                row for row, _ in tables.rows(txn, tables.free, SLOT_KEY.pack(min(slots, meta.slots)))
            ]:
                txn.delete(row, db=tables.free)
            _recount(meta, slots)
            txn.put(META_ROW, meta.pack(), db=tables.meta)
    finally:
        tables.close()


def _unreserve(txn: lmdb.Transaction, tables: Tables, row: bytes, reservation: Reservation) -> None:
    txn.delete(row, db=tables.reserved)
    txn.put(row, b"", db=tables.free)
    pending = txn.get(reservation.key, db=tables.pending)
    if pending is not None and ENTRY.unpack(pending)[1] == reservation.generation:
        txn.delete(reservation.key, db=tables.pending)


def _recount(meta: Meta, slots: int) -> None:
    scanned = meta.scan == meta.slots
    meta.reserved = 0
    meta.unused = min(meta.unused, slots)
    if not scanned and meta.unused == meta.slots:
        meta.unused = slots  # while slots wait to be scanned none counts as never used
    meta.scan = slots if scanned else min(meta.scan, slots)
    meta.slots = slots
