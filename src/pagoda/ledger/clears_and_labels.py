"""Namespaces: a row for each that has chunks, the generation at which it was last cleared, and
labels for people.

A clear sets a *watermark* in the one sequence of generations. Chunks that the namespace reserved
before the watermark are cleared; chunks that it reserves later stay. So a namespace without chunks
needs no row, and when it gets chunks again, their generations are above every earlier watermark.
Only the slots of a slab that outlives its tables may still contain old chunks; the watermarks that
they are compared with after a rebuild are kept in files (see `clear_log`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from pagoda.base.errors import is_shortage
from pagoda.base.file_space import read_file
from pagoda.base.synced_files import write_synced
from pagoda.ledger.clear_log import ALL, ClearLog, Watermarks
from pagoda.ledger.lmdb_tables import NAMESPACE, NUMBER, PendingClear
from pagoda.ledger.store_state import NAMESPACES
from pagoda.ledger.transaction import Transaction

NOBODYS = 2**64 - 1  # no namespace has this number
# of their file; one namespace for each slot at most
_MOST_LABEL_BYTES = 256 << 20
_LABEL_BYTES = 1024  # longer values are cut
_LONGEST_VALUE = 256
_LOOK = 8  # the number of labels among which one is chosen for removal


class Label(msgspec.Struct, frozen=True, omit_defaults=True):
    """A namespace in the file of labels; `epoch`: the number of its clears, if an older version
    wrote the file.
    """

    fields: dict[str, str]
    epoch: int = 0


class NamespaceCounts(NamedTuple):
    """A namespace in the tables; `watermark`: the generation before which it was cleared."""

    root: bytes
    watermark: int
    chunks: int
    reservations: int


def is_live(transaction: Transaction, root: bytes, reserved: int) -> bool:
    """Whether a chunk that a scan found was reserved (at generation `reserved`) after the last
    clear.
    """
    number = transaction.namespace(root)
    meta = transaction.meta
    return reserved >= (
        transaction.watermark(number) if number else max(meta.floor, meta.cleared)
    )


def clear(
    transaction: Transaction, root: bytes | None
) -> tuple[PendingClear, int]:
    """Set the watermark of one namespace, or of all: chunks that were reserved before it are gone
    from now on.

    They are never committed, and no look-up finds them. Returns the clear that is now under way,
    and how many chunks it
    covers: they are still to be removed.
    """
    watermark = transaction.meta.next_generation
    member = transaction.member
    if root is None:
        transaction.meta.cleared = watermark
        pending = PendingClear(b"", 0, watermark, member)
        _begin_clear(transaction, pending)
        return pending, transaction.meta.ready
    number = transaction.namespace(root)
    # the scan may not have found its chunks yet
    if not number and transaction.meta.scanning:
        number = transaction.add_namespace(root)
    pending = PendingClear(root, number or NOBODYS, watermark, member)
    row = transaction.get(NUMBER.pack(number), db=transaction.tables.namespaces)
    if row is None:
        return pending, 0
    _, _, chunks, reservations = NAMESPACE.unpack(row)
    row = NAMESPACE.pack(root, watermark, chunks, reservations)
    transaction.put(NUMBER.pack(number), row, db=transaction.tables.namespaces)
    _begin_clear(transaction, pending)
    return pending, chunks


def _begin_clear(transaction: Transaction, pending: PendingClear) -> None:
    others = transaction.tables.pending_clears(transaction.txn)
    kept = [other for other in others if other.number != pending.number]
    transaction.tables.put_pending_clears(transaction.txn, [*kept, pending])


def end_clear(transaction: Transaction, ended: PendingClear) -> None:
    """Record that the chunks of a clear are removed, and that it is on the medium."""
    others = transaction.tables.pending_clears(transaction.txn)
    kept = [
        other
        for other in others
        if (other.number, other.watermark) != (ended.number, ended.watermark)
    ]
    if len(kept) < len(others):
        transaction.tables.put_pending_clears(transaction.txn, kept)


def load_saved(transaction: Transaction, directory: Path) -> None:
    """Enter into the tables what outlived the old ones: which namespaces were cleared, and their
    labels.
    """
    watermarks, labels = read_saved(directory)
    meta = transaction.meta
    # an older copy of `state` leads to an older incarnation: what was cleared in a later one stays
    # below what is new
    highest = max(
        (mark for mark in watermarks.of.values() if mark != ALL), default=0
    )
    meta.next_generation = max(meta.next_generation, highest)
    meta.floor = max(meta.floor, min(watermarks.floor, meta.next_generation))
    for root, watermark in watermarks.of.items():
        if not transaction.namespace(root):
            transaction.add_namespace(root, watermark)
    for root, fields in list(labels.items())[
        : transaction.tables.most_labels // 2
    ]:
        label(transaction, root, fields)


# ---- labels


def label(transaction: Transaction, root: bytes, fields: dict[str, str]) -> None:
    """Write the label of a namespace, cut to a limit; if there are too many labels, one is
    removed.
    """
    labels = transaction.tables.labels
    row = _encoded(fields)
    known = transaction.get(root, db=labels)
    if not fields or row == known:
        return
    if (
        known is None
        and transaction.txn.stat(labels)["entries"]
        >= transaction.tables.most_labels
    ):
        _forget_label(transaction)
    transaction.put(root, row, db=labels)


def _forget_label(transaction: Transaction) -> None:
    """Remove one of the few labels that follow a random key, if possible the label of a namespace
    without chunks.
    """
    labels = transaction.tables.labels
    cursor = transaction.txn.cursor(db=labels)
    if not cursor.set_range(secrets.token_bytes(32)):
        cursor.first()
    found = list(islice(cursor.iternext(values=False), _LOOK))
    unused = [root for root in found if not transaction.namespace(root)]
    transaction.delete((unused or found)[0], db=labels)


def _encoded(fields: dict[str, str]) -> bytes:
    """Return a label as its row: values are cut until the row is within the bound."""
    longest = _LONGEST_VALUE
    while True:
        row = msgspec.json.encode(
            {name: _cut(value, longest) for name, value in fields.items()}
        )
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
    # an older version counted clears and wrote that count into the headers
    if watermarks is None:
        watermarks = Watermarks(
            0, {root: label.epoch for root, label in known.items() if label.epoch}
        )
    return watermarks, {root: label.fields for root, label in known.items()}


def read_labels(directory: Path) -> dict[bytes, Label]:
    """Read the file of labels, by root. Empty if it is absent or damaged.

    OSError if this process has no files or memory left to read it: older versions kept there what
    was cleared.
    """
    try:
        known = msgspec.json.decode(
            read_file(directory / NAMESPACES, _MOST_LABEL_BYTES),
            type=dict[str, Label],
        )
        return {bytes.fromhex(root): label for root, label in known.items()}
    except OSError as error:
        if is_shortage(error):
            raise
        return {}
    except ValueError:  # msgspec's errors are ValueErrors
        return {}


def save_labels(directory: Path, known: Mapping[bytes, dict[str, str]]) -> None:
    """Replace the file of labels. Raises OSError."""
    content = {root.hex(): Label(fields) for root, fields in known.items()}
    write_synced(directory / NAMESPACES, msgspec.json.encode(content))
