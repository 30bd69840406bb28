"""The tables of a ledger, in LMDB: all that must be right.

| table | row |
| --- | --- |
| entries | key -> slot, generation of a chunk that may be read |
| slots | slot -> generation, namespace, epoch, position, tokens, key of the same |
| free | slot, once used and given back |
| pending | key -> slot, generation of the latest reservation of that key |
| reserved | slot -> `Reservation` |
| members | number -> counter row, process id, reserved slots, device |
| holds | slot -> (generation, member) ... |
| pins | key -> names of those who pinned it |
| namespaces | root -> number, epoch, fields |
| meta | the totals (`Meta`) and the folded counters of the dead |

LMDB is opened without its own locks, without sync and without a writable map (see `locks`): whoever begins a
transaction is inside the gate, on one thread, and ends it before leaving.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import NamedTuple, cast

import lmdb

ENTRY = Struct("<IQ")
SLOT = Struct("<QIIII32s")
SLOT_KEY = Struct(">I")
HOLD = Struct("<QQ")
MEMBER = Struct("<IIIB")
MEMBER_KEY = Struct(">Q")
NAMESPACE = Struct("<II")
_META = Struct("<8Q")
_RESERVATION = Struct("<QQqqIIII32sH")
_WRITER = Struct("<Q")
NOBODY = 0  # no member has this number
META_ROW, COUNTERS_ROW = b"meta", b"counters"

_BYTES_PER_SLOT = 640  # all tables, half-full pages and copy-on-write included
_LEAST_MAP_BYTES = 4 << 20


@dataclass(slots=True)
class Meta:
    """The totals. `unused`: slots from there on were never used. `scan`: slots from there on wait to be scanned."""

    slots: int
    next_generation: int
    next_member: int = 1
    next_namespace: int = 1
    unused: int = 0
    scan: int = 0
    ready: int = 0
    reserved: int = 0

    def pack(self) -> bytes:
        """The row as bytes."""
        return _META.pack(
            self.slots, self.next_generation, self.next_member, self.next_namespace,
            self.unused, self.scan, self.ready, self.reserved,
        )  # fmt: skip

    @classmethod
    def unpack(cls, row: bytes) -> Meta:
        """The row from bytes."""
        return cls(*_META.unpack(row))

    def free(self) -> int:
        """Slots that hold nothing and are promised to nobody."""
        return self.slots - self.ready - self.reserved - (self.slots - self.scan)


class Reservation(NamedTuple):
    """A slot that is being filled. `writers`: per part the member that has yet to write it, 0 once it is in.

    Of owner NOBODY it will not become a chunk: the slot waits until its `writers` are gone. They may still write, or,
    where a chunk was removed while it was held, they are its holders.
    """

    generation: int
    owner: int
    stamp: int
    started: int
    namespace: int
    epoch: int
    position: int
    tokens: int
    key: bytes
    writers: tuple[int, ...]

    def pack(self) -> bytes:
        """The row as bytes."""
        return _RESERVATION.pack(*self[:9], len(self.writers)) + b"".join(map(_WRITER.pack, self.writers))

    @classmethod
    def unpack(cls, row: bytes) -> Reservation:
        """The row from bytes."""
        head = _RESERVATION.unpack_from(row)
        writers = tuple(writer for (writer,) in _WRITER.iter_unpack(row[_RESERVATION.size :]))
        generation, owner, stamp, started, namespace, epoch, position, tokens, key, _ = head
        return cls(generation, owner, stamp, started, namespace, epoch, position, tokens, key, writers)


class Tables:
    """The LMDB environment and its tables. Not thread-safe: the gate is what keeps callers apart."""

    NAMES = (
        "entries",
        "slots",
        "free",
        "pending",
        "reserved",
        "members",
        "holds",
        "pins",
        "namespaces",
        "meta",
    )

    def __init__(self, path: Path, map_bytes: int, create: bool = False) -> None:
        self.env = lmdb.open(
            str(path), map_size=map_bytes, subdir=False, lock=False, writemap=False, sync=False,
            metasync=False, readahead=False, create=create, mode=0o600, max_dbs=len(self.NAMES),
        )  # fmt: skip
        try:
            opened = [self.env.open_db(name.encode(), create=create) for name in self.NAMES]
        except lmdb.Error:
            self.env.close()
            raise
        (self.entries, self.slots, self.free, self.pending, self.reserved, self.members, self.holds, self.pins,
         self.namespaces, self.meta) = opened  # fmt: skip

    def load_meta(self, txn: lmdb.Transaction) -> Meta:
        """Read the totals."""
        row = cast("bytes | None", txn.get(META_ROW, db=self.meta))
        if row is None:
            raise lmdb.Error("the ledger has no totals")
        return Meta.unpack(row)

    def rows(
        self, txn: lmdb.Transaction, table: lmdb._Database, start: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        """Walk a table from `start` on, in the order of its keys."""
        cursor = txn.cursor(db=table)
        found = cursor.set_range(start) if start else cursor.first()
        if found:
            yield from cast("Iterator[tuple[bytes, bytes]]", cursor.iternext(keys=True, values=True))

    def close(self) -> None:
        """Close the environment; no transaction may be open."""
        self.env.close()


def map_bytes(slots: int) -> int:
    """Size of the LMDB file for that many slots."""
    return _LEAST_MAP_BYTES + _BYTES_PER_SLOT * slots // 4096 * 4096
