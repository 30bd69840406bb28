"""Namespaces: a row for each that has chunks, the generation at which it was last cleared, and labels for people.

A clear draws a *line* through the one sequence of generations: what a namespace reserved before it is gone, what it
reserves from then on stays. So a namespace that has nothing needs no row, and one that comes back begins behind every
line there ever was. Only the slots of a slab that outlives its tables still tell of old chunks; what they are compared
with after a rebuild is kept in files (see `clears`).
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

from pagoda.ledger.clears import Clears, Lines
from pagoda.ledger.state import NAMESPACES, write_synced
from pagoda.ledger.tables import NAMESPACE, NUMBER, SLOT, Meta, Reservation, Tables
from pagoda.ledger.writing import Writing

_LABEL_BYTES = 1024  # longer values are cut
_LONGEST_VALUE = 256
_LOOK = 8  # labels among which one is chosen to go


class Label(msgspec.Struct, frozen=True, omit_defaults=True):
    """A namespace as the file of labels has it; `epoch`: how often it was cleared, where an older version wrote it."""

    fields: dict[str, str]
    epoch: int = 0


class Cleared(NamedTuple):
    """What a clear takes: chunks reserved before `line` of one namespace, by its number (None: of all)."""

    namespace: int | None
    line: int
    chunks: int


class Tenant(NamedTuple):
    """A namespace as the tables have it; `line`: the generation before which it was cleared."""

    root: bytes
    line: int
    chunks: int
    reservations: int


class Namespaces:
    """The namespaces of one store, as steps of a transaction: called inside the gate."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def find(self, writing: Writing, root: bytes) -> int:
        """The number of a namespace that has chunks or reservations; 0 if it has none."""
        row = writing.get(self._tables.roots, root)
        return int(NUMBER.unpack(row)[0]) if row is not None else 0

    def made(self, writing: Writing, root: bytes, line: int | None = None) -> int:
        """Make the row of a namespace that has none; without a chunk or reservation it is gone with the transaction.

        Whatever the slab still holds of it has been evicted or cleared: its line is now, so that what was cleared
        cannot come back. During a scan that is not known, but then all that were cleared since `floor` have rows.
        """
        number = writing.meta.next_namespace
        writing.meta.next_namespace += 1
        if line is None:
            line = writing.meta.floor if writing.meta.scanning else writing.meta.next_generation
        writing.txn.put(NUMBER.pack(number), NAMESPACE.pack(root, line, 0, 0), db=self._tables.namespaces)
        writing.txn.put(root, NUMBER.pack(number), db=self._tables.roots)
        writing.tally(number)
        return number

    def line(self, writing: Writing, number: int) -> int:
        """The generation before which a namespace has been cleared; what is reserved for none was cleared, too."""
        row = writing.get(self._tables.namespaces, NUMBER.pack(number))
        return max(NAMESPACE.unpack(row)[1], writing.meta.cleared) if row is not None else 2**64

    def stands(self, writing: Writing, root: bytes, reserved: int) -> bool:
        """Whether what a slab says was reserved at that generation has not been cleared since. During a scan."""
        number = self.find(writing, root)
        line = self.line(writing, number) if number else max(writing.meta.floor, writing.meta.cleared)
        return reserved >= line

    def clear(self, writing: Writing, root: bytes | None) -> Cleared:
        """Draw a line under one namespace, or all: what was reserved before will come to nothing."""
        line = writing.meta.next_generation
        if root is None:
            writing.meta.cleared = line
            return Cleared(None, line, writing.meta.ready)
        number = self.find(writing, root)
        if not number and writing.meta.scanning:  # its chunks may not have been found yet
            number = self.made(writing, root)
        row = writing.get(self._tables.namespaces, NUMBER.pack(number))
        if row is None:
            return Cleared(number, line, 0)
        _, _, chunks, reservations = NAMESPACE.unpack(row)
        row = NAMESPACE.pack(root, line, chunks, reservations)
        writing.txn.put(NUMBER.pack(number), row, db=self._tables.namespaces)
        return Cleared(number, line, chunks)

    def strike_off(self, writing: Writing) -> None:
        """Have all namespaces that have nothing struck off with this transaction: a scan has ended."""
        for row, _ in self._tables.rows(writing.txn, self._tables.namespaces):
            writing.tally(NUMBER.unpack(row)[0])

    def load(self, writing: Writing, lines: Lines, labels: dict[bytes, dict[str, str]]) -> None:
        """Take over what outlived the tables: which namespaces were cleared, and their labels."""
        writing.meta.floor = max(writing.meta.floor, min(lines.floor, writing.meta.next_generation))
        for root, line in lines.of.items():
            if not self.find(writing, root):
                self.made(writing, root, line)
        for root, fields in list(labels.items())[: self._tables.most_labels // 2]:
            self.label(writing, root, fields)

    # ---- labels

    def label(self, writing: Writing, root: bytes, fields: dict[str, str]) -> None:
        """Write the label of a namespace, cut to a bound; with too many of them, another goes."""
        row = _encoded(fields)
        known = writing.get(self._tables.labels, root)
        if not fields or row == known:
            return
        if known is None and writing.txn.stat(self._tables.labels)["entries"] >= self._tables.most_labels:
            self._forget_label(writing)
        writing.txn.put(root, row, db=self._tables.labels)

    def _forget_label(self, writing: Writing) -> None:
        """Remove a label: of a few in a random place, one of a namespace that has nothing, if there is one."""
        cursor = writing.txn.cursor(db=self._tables.labels)
        if not cursor.set_range(secrets.token_bytes(32)):
            cursor.first()
        roots = cast("Iterator[bytes]", cursor.iternext(keys=True, values=False))
        found = list(islice(roots, _LOOK))
        unused = [root for root in found if not self.find(writing, root)]
        writing.txn.delete((unused or found)[0], db=self._tables.labels)


def root_of(txn: lmdb.Transaction, tables: Tables, number: int) -> bytes:
    """The root of the namespace of that number; empty if there is none."""
    row = cast("bytes | None", txn.get(NUMBER.pack(number), db=tables.namespaces))
    return cast("bytes", NAMESPACE.unpack(row)[0]) if row is not None else b""


def tenants(
    txn: lmdb.Transaction, tables: Tables, start: bytes, most: int
) -> tuple[list[Tenant], bytes | None]:
    """The next namespaces that have a row, `most` at once, and where to go on."""
    rows = list(islice(tables.rows(txn, tables.namespaces, start), most + 1))
    found = [Tenant(*NAMESPACE.unpack(row)) for _, row in rows[:most]]
    return found, rows[most][0] if len(rows) > most else None


def labels(
    txn: lmdb.Transaction, tables: Tables, start: bytes, most: int
) -> tuple[list[tuple[bytes, dict[str, str]]], bytes | None]:
    """The next labels, `most` at once, and where to go on."""
    rows = list(islice(tables.rows(txn, tables.labels, start), most + 1))
    found = [(root, msgspec.json.decode(row, type=dict[str, str])) for root, row in rows[:most]]
    return found, rows[most][0] if len(rows) > most else None


def recount(txn: lmdb.Transaction, tables: Tables, meta: Meta) -> None:
    """Count what each namespace has anew; what has nothing is struck off, but for the time of a scan."""
    chunks = Counter(SLOT.unpack(row)[1] for _, row in tables.rows(txn, tables.slots))
    reservations = Counter(Reservation.unpack(row).namespace for _, row in tables.rows(txn, tables.reserved))
    for number, row in list(tables.rows(txn, tables.namespaces)):
        root, line, *_ = NAMESPACE.unpack(row)
        counted = chunks[NUMBER.unpack(number)[0]], reservations[NUMBER.unpack(number)[0]]
        if any(counted) or meta.scanning:
            txn.put(number, NAMESPACE.pack(root, line, *counted), db=tables.namespaces)
        else:
            txn.delete(number, db=tables.namespaces)
            txn.delete(root, db=tables.roots)


def line_of(txn: lmdb.Transaction, tables: Tables, root: bytes) -> int:
    """The generation before which a namespace has no chunk any more, and none that it reserved will come in."""
    meta = tables.load_meta(txn)
    number = cast("bytes | None", txn.get(root, db=tables.roots))
    row = cast("bytes | None", txn.get(number, db=tables.namespaces)) if number is not None else None
    return max(NAMESPACE.unpack(row)[1], meta.cleared) if row is not None else meta.next_generation


def _encoded(fields: dict[str, str]) -> bytes:
    """A label as its row: values are cut until all of it is within the bound."""
    longest = _LONGEST_VALUE
    while True:
        row = msgspec.json.encode({name: _cut(value, longest) for name, value in fields.items()})
        if len(row) <= _LABEL_BYTES:
            return row
        if not longest:
            return b"{}"
        longest //= 2


def _cut(value: str, longest: int) -> str:
    """The beginning and the end of a value that is too long."""
    if len(value) <= longest:
        return value
    return f"{value[: longest // 2]}…{value[len(value) - longest // 2 :]}"


# ---- what outlives the tables


def outlived(directory: Path) -> tuple[Lines, dict[bytes, dict[str, str]]]:
    """Read what a store on disk keeps beside its tables: what was cleared, and the labels."""
    known = read_labels(directory)
    lines = Clears(directory).read()
    if lines is None:  # an older version counted clears, and wrote the number into the headers
        lines = Lines(0, {root: label.epoch for root, label in known.items() if label.epoch})
    return lines, {root: label.fields for root, label in known.items()}


def read_labels(directory: Path) -> dict[bytes, Label]:
    """The file of labels, by root. Empty if it is absent or damaged."""
    try:
        known = msgspec.json.decode((directory / NAMESPACES).read_bytes(), type=dict[str, Label])
        return {bytes.fromhex(root): label for root, label in known.items()}
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return {}


def save_labels(directory: Path, known: Mapping[bytes, dict[str, str]]) -> None:
    """Replace the file of labels. OSError."""
    content = {root.hex(): Label(fields) for root, fields in known.items()}
    write_synced(directory / NAMESPACES, msgspec.json.encode(content))
