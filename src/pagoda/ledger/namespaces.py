"""Namespaces: a row for each that has chunks, the generation at which it was last cleared, and labels for people.

A clear sets a *watermark* in the one sequence of generations: what a namespace reserved before it is cleared, what it
reserves from then on stays. So a namespace without chunks needs no row, and one that comes back begins after every
watermark that there ever was. Only the slots of a slab that outlives its tables still tell of old chunks; the
watermarks that they are compared with after a rebuild are kept in files (see `clear_log`).
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple, cast

import lmdb
import msgspec

from pagoda.ledger.clear_log import ClearLog, Watermarks
from pagoda.ledger.store_state import NAMESPACES, write_synced
from pagoda.ledger.tables import NAMESPACE, NUMBER, SLOT, Meta, Reservation, Tables
from pagoda.ledger.transaction import Transaction

_LABEL_BYTES = 1024  # longer values are cut
_LONGEST_VALUE = 256
_LOOK = 8  # labels of which one is chosen to be removed


class Label(msgspec.Struct, frozen=True, omit_defaults=True):
    """A namespace in the file of labels; `epoch`: how often it was cleared, if an older version wrote the file."""

    fields: dict[str, str]
    epoch: int = 0


class ClearScope(NamedTuple):
    """What a clear covers: chunks reserved before `watermark`, of one namespace by its number (None: of all)."""

    namespace: int | None
    watermark: int
    chunks: int


class NamespaceCounts(NamedTuple):
    """A namespace in the tables; `watermark`: the generation before which it was cleared."""

    root: bytes
    watermark: int
    chunks: int
    reservations: int


class Namespaces:
    """The namespaces of one store, as steps of a transaction, inside the gate."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def find(self, transaction: Transaction, root: bytes) -> int:
        """Return the number of a namespace that has chunks or reservations; 0 if it has none."""
        row = transaction.get(self._tables.roots, root)
        return int(NUMBER.unpack(row)[0]) if row is not None else 0

    def add(self, transaction: Transaction, root: bytes, watermark: int | None = None) -> int:
        """Add the row of a namespace that has none; `save` removes it again if it gets no chunk or reservation.

        Whatever the slab still has of it was evicted or cleared: its watermark is now, so that what was cleared cannot
        come back. During a scan that is not known, but then all that were cleared since `floor` have rows.
        """
        number = transaction.meta.next_namespace
        transaction.meta.next_namespace += 1
        if watermark is None:
            meta = transaction.meta
            watermark = meta.floor if meta.scanning else meta.next_generation
        transaction.txn.put(
            NUMBER.pack(number), NAMESPACE.pack(root, watermark, 0, 0), db=self._tables.namespaces
        )
        transaction.txn.put(root, NUMBER.pack(number), db=self._tables.roots)
        transaction.add_to_namespace(number)
        return number

    def watermark(self, transaction: Transaction, number: int) -> int:
        """Return the generation before which a namespace was cleared; without a row, everything was cleared."""
        row = transaction.get(self._tables.namespaces, NUMBER.pack(number))
        return max(NAMESPACE.unpack(row)[1], transaction.meta.cleared) if row is not None else 2**64

    def is_live(self, transaction: Transaction, root: bytes, reserved: int) -> bool:
        """Whether a chunk that a scan found, reserved at that generation, has not been cleared since."""
        number = self.find(transaction, root)
        watermark = (
            self.watermark(transaction, number)
            if number
            else max(transaction.meta.floor, transaction.meta.cleared)
        )
        return reserved >= watermark

    def clear(self, transaction: Transaction, root: bytes | None) -> ClearScope:
        """Set the watermark of one namespace, or of all: what was reserved before is never committed."""
        watermark = transaction.meta.next_generation
        if root is None:
            transaction.meta.cleared = watermark
            return ClearScope(None, watermark, transaction.meta.ready)
        number = self.find(transaction, root)
        if not number and transaction.meta.scanning:  # the scan may not have found its chunks yet
            number = self.add(transaction, root)
        row = transaction.get(self._tables.namespaces, NUMBER.pack(number))
        if row is None:
            return ClearScope(number, watermark, 0)
        _, _, chunks, reservations = NAMESPACE.unpack(row)
        row = NAMESPACE.pack(root, watermark, chunks, reservations)
        transaction.txn.put(NUMBER.pack(number), row, db=self._tables.namespaces)
        return ClearScope(number, watermark, chunks)

    def remove_empty(self, transaction: Transaction) -> None:
        """Have this transaction remove all namespaces that have nothing: a scan has ended."""
        for row, _ in self._tables.rows(transaction.txn, self._tables.namespaces):
            transaction.add_to_namespace(NUMBER.unpack(row)[0])

    def load(
        self, transaction: Transaction, watermarks: Watermarks, labels: dict[bytes, dict[str, str]]
    ) -> None:
        """Enter what outlived the tables: which namespaces were cleared, and their labels."""
        transaction.meta.floor = max(
            transaction.meta.floor, min(watermarks.floor, transaction.meta.next_generation)
        )
        for root, watermark in watermarks.of.items():
            if not self.find(transaction, root):
                self.add(transaction, root, watermark)
        for root, fields in list(labels.items())[: self._tables.most_labels // 2]:
            self.label(transaction, root, fields)

    # ---- labels

    def label(self, transaction: Transaction, root: bytes, fields: dict[str, str]) -> None:
        """Write the label of a namespace, cut to a bound; if there are too many, another one is removed."""
        row = _encoded(fields)
        known = transaction.get(self._tables.labels, root)
        if not fields or row == known:
            return
        if known is None and transaction.txn.stat(self._tables.labels)["entries"] >= self._tables.most_labels:
            self._forget_label(transaction)
        transaction.txn.put(root, row, db=self._tables.labels)

    def _forget_label(self, transaction: Transaction) -> None:
        """Remove one of a few labels at a random place: one of a namespace that has nothing, if there is one."""
        cursor = transaction.txn.cursor(db=self._tables.labels)
        if not cursor.set_range(secrets.token_bytes(32)):
            cursor.first()
        roots = cast("Iterator[bytes]", cursor.iternext(keys=True, values=False))
        found = list(islice(roots, _LOOK))
        unused = [root for root in found if not self.find(transaction, root)]
        transaction.txn.delete((unused or found)[0], db=self._tables.labels)


def root_of(txn: lmdb.Transaction, tables: Tables, number: int) -> bytes:
    """Return the root of the namespace of that number; empty if there is none."""
    row = cast("bytes | None", txn.get(NUMBER.pack(number), db=tables.namespaces))
    return cast("bytes", NAMESPACE.unpack(row)[0]) if row is not None else b""


def namespace_rows(
    txn: lmdb.Transaction, tables: Tables, start: bytes, most: int
) -> tuple[list[NamespaceCounts], bytes | None]:
    """Return the next namespaces that have a row, `most` at once, and where to continue."""
    rows = list(islice(tables.rows(txn, tables.namespaces, start), most + 1))
    found = [NamespaceCounts(*NAMESPACE.unpack(row)) for _, row in rows[:most]]
    return found, rows[most][0] if len(rows) > most else None


def label_rows(
    txn: lmdb.Transaction, tables: Tables, start: bytes, most: int
) -> tuple[list[tuple[bytes, dict[str, str]]], bytes | None]:
    """Return the next labels, `most` at once, and where to continue."""
    rows = list(islice(tables.rows(txn, tables.labels, start), most + 1))
    found = [(root, msgspec.json.decode(row, type=dict[str, str])) for root, row in rows[:most]]
    return found, rows[most][0] if len(rows) > most else None


def recount(txn: lmdb.Transaction, tables: Tables, meta: Meta) -> None:
    """Count again what each namespace has; one that has nothing is removed, except during a scan."""
    chunks = Counter(SLOT.unpack(row)[1] for _, row in tables.rows(txn, tables.slots))
    reservations = Counter(Reservation.unpack(row).namespace for _, row in tables.rows(txn, tables.reserved))
    for number, row in list(tables.rows(txn, tables.namespaces)):
        root, watermark, *_ = NAMESPACE.unpack(row)
        counted = chunks[NUMBER.unpack(number)[0]], reservations[NUMBER.unpack(number)[0]]
        if any(counted) or meta.scanning:
            txn.put(number, NAMESPACE.pack(root, watermark, *counted), db=tables.namespaces)
        else:
            txn.delete(number, db=tables.namespaces)
            txn.delete(root, db=tables.roots)


def watermark_of(txn: lmdb.Transaction, tables: Tables, root: bytes) -> int:
    """Return the generation before which what a namespace stored or reserved is cleared."""
    meta = tables.load_meta(txn)
    number = cast("bytes | None", txn.get(root, db=tables.roots))
    row = cast("bytes | None", txn.get(number, db=tables.namespaces)) if number is not None else None
    return max(NAMESPACE.unpack(row)[1], meta.cleared) if row is not None else meta.next_generation


def _encoded(fields: dict[str, str]) -> bytes:
    """Return a label as its row: values are cut until the row is within the bound."""
    longest = _LONGEST_VALUE
    while True:
        row = msgspec.json.encode({name: _cut(value, longest) for name, value in fields.items()})
        if len(row) <= _LABEL_BYTES:
            return row
        if not longest:
            return b"{}"
        longest //= 2


def _cut(value: str, longest: int) -> str:
    """Return the beginning and the end of a value that is too long."""
    if len(value) <= longest:
        return value
    return f"{value[: longest // 2]}…{value[len(value) - longest // 2 :]}"


# ---- what outlives the tables


def read_saved(directory: Path) -> tuple[Watermarks, dict[bytes, dict[str, str]]]:
    """Read what a store on disk keeps outside its tables: what was cleared, and the labels."""
    known = read_labels(directory)
    watermarks = ClearLog(directory).read()
    if watermarks is None:  # an older version counted clears, and wrote the number into the headers
        watermarks = Watermarks(0, {root: label.epoch for root, label in known.items() if label.epoch})
    return watermarks, {root: label.fields for root, label in known.items()}


def read_labels(directory: Path) -> dict[bytes, Label]:
    """Read the file of labels, by root. Empty if it is absent or damaged."""
    try:
        known = msgspec.json.decode((directory / NAMESPACES).read_bytes(), type=dict[str, Label])
        return {bytes.fromhex(root): label for root, label in known.items()}
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return {}


def save_labels(directory: Path, known: Mapping[bytes, dict[str, str]]) -> None:
    """Replace the file of labels. OSError."""
    content = {root.hex(): Label(fields) for root, fields in known.items()}
    write_synced(directory / NAMESPACES, msgspec.json.encode(content))
