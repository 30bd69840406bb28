"""Namespaces: their numbers, labels and epochs, in the tables and in a small synced file that outlives them."""

from __future__ import annotations

from pathlib import Path

import lmdb
import msgspec

from pagoda.ledger.state import NAMESPACES, write_synced
from pagoda.ledger.tables import NAMESPACE, SLOT, Reservation, Tables
from pagoda.ledger.writing import Writing

MOST = 4096  # namespaces at once: every tenant is one, and each takes room in the tables


class Labels(msgspec.Struct, frozen=True):
    """One namespace as the file keeps it."""

    fields: dict[str, str]
    epoch: int


class Namespaces:
    """The namespaces of one store. Not thread-safe: called inside the gate, but for `save`, which does I/O."""

    def __init__(self, directory: Path, tables: Tables, in_memory: bool = False) -> None:
        self._directory, self._tables = directory, tables
        self._in_memory = in_memory  # nothing is ever rebuilt, so an epoch without chunks means nothing
        self._roots: dict[int, bytes] = {}
        self.labelled: set[bytes] = set()

    def current(self, writing: Writing, root: bytes) -> tuple[int, int]:
        """Number and epoch of a namespace, which is made if it is new."""
        row = writing.get(self._tables.namespaces, root)
        if row is None:
            self.put(writing, root, {}, 0)
            return self.current(writing, root)
        number, epoch = NAMESPACE.unpack_from(row)
        self._roots[number] = root
        return number, epoch

    def put(
        self, writing: Writing, root: bytes, fields: dict[str, str], epoch: int, bounded: bool = True
    ) -> None:
        """Write labels and epoch (which is never lowered) of a namespace."""
        row = writing.get(self._tables.namespaces, root)
        if row is None:
            if bounded:
                self._make_room(writing)
            number = writing.meta.next_namespace
            writing.meta.next_namespace += 1
        else:
            number, known = NAMESPACE.unpack_from(row)
            epoch = max(epoch, known)
            fields = fields or msgspec.json.decode(row[NAMESPACE.size :], type=dict[str, str])
        value = NAMESPACE.pack(number, epoch) + msgspec.json.encode(fields)
        writing.txn.put(root, value, db=self._tables.namespaces)

    def _make_room(self, writing: Writing) -> None:
        """Forget namespaces that have nothing here; lmdb.MapFullError if there are too many even so."""
        if writing.txn.stat(self._tables.namespaces)["entries"] < MOST:
            return
        used = {SLOT.unpack(row)[1] for _, row in self._tables.rows(writing.txn, self._tables.slots)}
        used |= {
            Reservation.unpack(row).namespace
            for _, row in self._tables.rows(writing.txn, self._tables.reserved)
        }
        forgotten = 0
        for root, (number, epoch, _) in self.known(writing.txn).items():
            if number not in used and (self._in_memory or epoch == 0):
                writing.txn.delete(root, db=self._tables.namespaces)
                self._roots.pop(number, None)
                forgotten += 1
        if not forgotten:
            raise lmdb.MapFullError(f"{MOST} namespaces have chunks here")

    def stands(self, writing: Writing, number: int, epoch: int) -> bool:
        """Whether that epoch of a namespace has not been cleared since."""
        root = self.root(writing.txn, number)
        return root is not None and self.current(writing, root)[1] == epoch

    def raise_epoch(self, writing: Writing, root: bytes | None) -> None:
        """Begin a new epoch of one namespace, or of all: what was reserved before will come to nothing."""
        if root is not None:
            self.current(writing, root)
        for known, (_, epoch, _) in self.known(writing.txn).items():
            if root in (None, known):
                self.put(writing, known, {}, epoch + 1)

    def known(self, txn: lmdb.Transaction) -> dict[bytes, tuple[int, int, dict[str, str]]]:
        """All namespaces: root -> number, epoch, fields."""
        found = {}
        for root, row in self._tables.rows(txn, self._tables.namespaces):
            number, epoch = NAMESPACE.unpack_from(row)
            found[root] = (number, epoch, msgspec.json.decode(row[NAMESPACE.size :], type=dict[str, str]))
        return found

    def root(self, txn: lmdb.Transaction, number: int) -> bytes | None:
        """The root of the namespace of that number."""
        if number not in self._roots:
            self._roots.update({row[0]: root for root, row in self.known(txn).items()})
        return self._roots.get(number)

    def load(self, writing: Writing) -> None:
        """Take over from the file what the tables do not know (a rebuilt ledger knows nothing).

        All epochs, or what was cleared could come back; of mere labels no more than leave room for others.
        """
        known = sorted(read_labels(self._directory).items(), key=lambda item: -item[1].epoch)
        for at, (root, labels) in enumerate(known):
            if labels.epoch or at < MOST // 2:
                self.put(writing, bytes.fromhex(root), labels.fields, labels.epoch, bounded=False)


def read_labels(directory: Path) -> dict[str, Labels]:
    """The file of namespaces: root in hex -> labels. Empty if it is absent or damaged."""
    try:
        labels = msgspec.json.decode((directory / NAMESPACES).read_bytes(), type=dict[str, Labels])
        return labels if all(map(bytes.fromhex, labels)) else {}
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return {}


def save_labels(directory: Path, known: dict[bytes, tuple[int, int, dict[str, str]]]) -> None:
    """Raise the file to what is known, synced; epochs in it are never lowered."""
    labels = read_labels(directory)
    for root, (_, epoch, fields) in known.items():
        before = labels.get(root.hex())
        labels[root.hex()] = Labels(
            fields or (before.fields if before else {}), max(epoch, before.epoch if before else 0)
        )
    write_synced(directory / NAMESPACES, msgspec.json.encode(labels))
