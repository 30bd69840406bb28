"""Give the tables of a ledger more slots. Only for who has the store alone."""

from __future__ import annotations

from pathlib import Path

import lmdb

from pagoda.ledger.namespaces import recount
from pagoda.ledger.tables import META_ROW, PLACE, Meta, Reservation, Tables


def resize_tables(path: Path, map_bytes: int, slots: int) -> None:
    """Add slots without pages; reservations go all, since nobody lives who could write them."""
    tables = Tables(path, map_bytes)
    try:
        with tables.env.begin(write=True) as txn:
            meta = tables.load_meta(txn)
            for row, value in list(tables.rows(txn, tables.reserved)):
                _unreserve(txn, tables, row, Reservation.unpack(value))
            _recount(meta, slots)
            recount(txn, tables, meta)
            txn.put(META_ROW, meta.pack(), db=tables.meta)
    finally:
        tables.close()


def _unreserve(txn: lmdb.Transaction, tables: Tables, row: bytes, reservation: Reservation) -> None:
    txn.delete(row, db=tables.reserved)
    txn.put(row, b"", db=tables.free)
    pending = txn.get(reservation.key, db=tables.pending)
    if pending is not None and PLACE.unpack_from(pending)[1] == reservation.generation:
        txn.delete(reservation.key, db=tables.pending)


def _recount(meta: Meta, slots: int) -> None:
    meta.reserved = 0
    if not meta.unscanned():
        meta.scan = slots
    meta.slots = slots
