"""The tables of a ledger, in LMDB. They contain everything that must be right; all other files are
hints.

| table | row |
| --- | --- |
| entries | key -> slot, generation, number of the namespace, position of a chunk that may be read |
| slots | slot -> generation, number of the namespace, position, tokens, key of the chunk in that slot |
| free | slot that was used and is free again |
| bare | slot below `Meta.backed` that has no pages |
| pending | key -> slot, generation of the latest reservation of that key |
| reserved | slot -> `Reservation` |
| members | number -> counter row, process id, reserved slots, device |
| holds | slot -> (generation, member) ... |
| pins | key -> owners of its pins |
| namespaces | number -> root, the generation at which it was last cleared, chunks, reservations |
| roots | root -> number of a namespace that has chunks or reservations; and one row of the clears under way |
| labels | root -> fields, for people; bounded, so a label may have been removed |
| meta | the totals (`Meta`), the names of the columns of counters, the counters of members that left |

LMDB is opened without its locks, without sync and without a writable map (see `locks`): a thread
that begins a transaction is inside the gate, and ends the transaction before it releases the gate.

A forked child never uses an environment of its parent, whatever call it returns into: all
environments are closed in the child, and a closed environment refuses every use. So each one is
registered here as soon as it is open. What a child cannot close it can never open, since py-lmdb
opens a file once in a process. So a fork waits for the threads that have environments open: at the
gate of each session (`session`), and at `Tables.opening` for the others.
"""  # noqa: E501, W505

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from struct import Struct
from typing import NamedTuple, TypeAlias

import lmdb

from pagoda.base.fork import here
from pagoda.ledger.locks import Gate

# a row of `pending`, and the beginning of a row of `entries`
PLACE = Struct("<IQ")
ENTRY = Struct("<IQQI")
SLOT = Struct("<QQII32s")
SLOT_KEY = Struct(">I")
HOLD = Struct("<QQ")
MEMBER = Struct("<IIIB")
MEMBER_KEY = Struct(">Q")
NAMESPACE = Struct("<32sQII")
NUMBER = Struct(">Q")
_META = Struct("<12Q")
# followed by a WRITER for each part
RESERVATION = Struct("<QQqqQII32sH")
WRITER = Struct("<Q")
_ONE_WRITER_BYTES = RESERVATION.size + WRITER.size
Txn: TypeAlias = "lmdb.Transaction[bytes]"
NO_MEMBER = 0  # no member has this number
NOBODY = WRITER.pack(NO_MEMBER)  # the writer of a part that is stored
NO_NAMESPACE = 0  # no namespace has this number
META_ROW = b"meta"
COUNTERS_ROW = b"counters"
COUNTER_NAMES_ROW = b"counter names"
# The clears under way. In the ordinary case there is no such row; it is in the table that a look-up
# reads anyway, since the first access to one more table costs a transaction as much as the look-up
# of a key.
CLEARING_ROW = b"clearing"
_CLEARING = Struct("<32sQQQ")

BYTES_PER_SLOT = 640  # all tables, half-full pages and copy-on-write included
_LEAST_MAP_BYTES = 4 << 20
# part of the map that only transactions that free slots may use
_SPARE_BYTES = 1 << 20
# part of the map for each label; a label itself takes at most an eighth of that
_BYTES_PER_LABEL = 8192


@dataclass(slots=True)
class Meta:
    """The totals.

    `unused`: slots from this one on were never used. `backed`: slots from this one on have no
    pages. `bare`: the number of slots before `backed` that have no pages. `scan`: slots from `scan`
    to `backed` wait to be scanned; during a scan `unused` equals `backed`. Only a slot with pages
    may be reserved.

    `cleared`: chunks of all namespaces that were reserved before that generation are cleared.
    `floor`: the same during a scan, for chunks of namespaces that have no row.
    """

    slots: int
    next_generation: int
    next_member: int = 1
    next_namespace: int = 1
    unused: int = 0
    scan: int = 0
    ready: int = 0
    reserved: int = 0
    cleared: int = 0
    floor: int = 0
    backed: int = 0
    bare: int = 0

    def pack(self) -> bytes:
        """Return the row as bytes."""
        return _META.pack(
            self.slots,
            self.next_generation,
            self.next_member,
            self.next_namespace,
            self.unused,
            self.scan,
            self.ready,
            self.reserved,
            self.cleared,
            self.floor,
            self.backed,
            self.bare,
        )

    @property
    def scanning(self) -> bool:
        """Whether slots wait to be scanned."""
        return self.unscanned() > 0

    def with_pages(self) -> int:
        """Count the slots that have pages, which is the number of chunks that fit now."""
        return self.backed - self.bare

    def unscanned(self) -> int:
        """Count the slots whose headers have not been read after a rebuild."""
        return self.backed - self.scan if self.scan < self.backed else 0

    def unbacked(self) -> int:
        """Count the slots that have no pages."""
        return self.slots - self.with_pages()

    def free(self) -> int:
        """Count the slots that have pages, no chunk and no reservation."""
        unscanned = self.backed - self.scan if self.scan < self.backed else 0
        return self.backed - self.bare - self.ready - self.reserved - unscanned


class PendingClear(NamedTuple):
    """A clear under way: of the chunks reserved before `watermark`, of one namespace, or of all
    (number 0).

    `member`: whoever ends it.
    """

    root: bytes
    number: int
    watermark: int
    member: int


class Reservation(NamedTuple):
    """A slot that is being filled. `writers`: for each part the member that must still write it, 0
    once it is stored.

    With owner NO_MEMBER it will not become a chunk: the slot waits until its `writers` are done.
    These members may still write into it; or, if a chunk was removed while it was held, they are
    its holders.
    """

    generation: int
    owner: int
    stamp: int
    started: int
    namespace: int
    position: int
    tokens: int
    key: bytes
    writers: tuple[int, ...]

    def pack(self) -> bytes:
        """Return the row as bytes."""
        writers = self[8]
        row: bytes = RESERVATION.pack(*self[:8], len(writers))
        if len(writers) == 1:
            return row + WRITER.pack(writers[0])
        return row + b"".join(map(WRITER.pack, writers))

    @staticmethod
    def packed_writers(row: bytes) -> bytes:
        """Return the writers of a row, as they are in it: equal for equal writers."""
        return row[RESERVATION.size :]

    @classmethod
    def unpack(cls, row: bytes) -> Reservation:
        """Make a row from bytes."""
        if len(row) == _ONE_WRITER_BYTES:
            writers = WRITER.unpack_from(row, RESERVATION.size)
        else:
            rest = WRITER.iter_unpack(row[RESERVATION.size :])
            writers = tuple(chain.from_iterable(rest))
        return cls._make((*RESERVATION.unpack_from(row)[:8], writers))


# tables that are open without a gate
without_gate: weakref.WeakSet[Tables] = weakref.WeakSet()


class Tables:
    """The LMDB environment and its tables. Not thread-safe: the gate serializes its callers."""

    NAMES = (
        "entries",
        "slots",
        "free",
        "bare",
        "pending",
        "reserved",
        "members",
        "holds",
        "pins",
        "namespaces",
        "roots",
        "labels",
        "meta",
    )
    # held by a fork, by a thread that has tables without a gate, from before it opens them until
    # they are closed, and while a session is added to those that a fork asks
    opening = threading.RLock()

    def __init__(
        self,
        path: Path,
        map_bytes: int,
        create: bool = False,
        gate: Gate | None = None,
    ) -> None:
        """Open them. `gate`: their users are inside it, also the caller; None: the caller holds
        `opening`.

        Raises LMDB's errors, also in a child that a signal handler has forked since the gate was
        taken.
        """
        self.most_labels = map_bytes // _BYTES_PER_LABEL
        self._map_bytes = map_bytes
        self._entered: Callable[[], bool]
        if gate is None:
            self._entered = self.opening._is_owned  # type: ignore[attr-defined]
        else:
            self._entered = gate.entered
        if not self._entered():
            raise RuntimeError(
                "tables are opened inside their gate or `opening`, for forks to wait for them"
            )
        self._opened: list[lmdb.Environment] = []
        self._process = here()
        # a child closes them, whatever the constructor has got to
        (without_gate if gate is None else gate.users).add(self)
        opener = partial(
            lmdb.open,
            map_size=map_bytes - _SPARE_BYTES,
            subdir=False,
            lock=False,
            writemap=False,
            sync=False,
            metasync=False,
            readahead=False,
            create=create,
            mode=0o600,
            max_dbs=len(self.NAMES),
        )
        # as bytes, because LMDB takes no text that is not UTF-8; a built-in: no signal handler runs
        # in between
        self._opened.extend(map(opener, [os.fsencode(path)]))
        [self.env] = self._opened
        try:
            # the fork came before the opening or during it (`opener` calls Python)
            if self._process != here() or (gate is not None and gate.forked):
                raise lmdb.Error(
                    "a signal handler forked: the tables are the parent's"
                )
            opened = [
                self.env.open_db(name.encode(), create=create)
                for name in self.NAMES
            ]
        except lmdb.Error:
            self.env.close()
            raise
        (
            self.entries,
            self.slots,
            self.free,
            self.bare,
            self.pending,
            self.reserved,
            self.members,
            self.holds,
            self.pins,
            self.namespaces,
            self.roots,
            self.labels,
            self.meta,
        ) = opened

    def load_meta(self, txn: Txn) -> Meta:
        """Read the totals."""
        row = txn.get(META_ROW, db=self.meta)
        if row is None:
            raise lmdb.CorruptedError("the ledger has no totals")
        return Meta(*_META.unpack(row))

    def pending_clears(self, txn: Txn) -> list[PendingClear]:
        """Return the clears under way."""
        # by position: a third faster than by name
        row = txn.get(CLEARING_ROW, None, self.roots)
        if row is None:
            return []
        return [PendingClear(*each) for each in _CLEARING.iter_unpack(row)]

    def put_pending_clears(
        self, txn: Txn, pending: Iterable[PendingClear]
    ) -> None:
        """Replace the row of clears under way."""
        row = b"".join(_CLEARING.pack(*each) for each in pending)
        if row:
            txn.put(CLEARING_ROW, row, db=self.roots)
        else:
            txn.delete(CLEARING_ROW, db=self.roots)

    def rows(
        self, txn: Txn, table: lmdb._Database, start: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        """Walk a table from `start` on, in the order of its keys."""
        cursor = txn.cursor(db=table)
        found = cursor.set_range(start) if start else cursor.first()
        if found:
            yield from cursor.iternext()

    def used_bytes(self) -> int:
        """Return how many bytes of the file are, or once were, in use."""
        return (int(self.env.info()["last_pgno"]) + 1) * int(
            self.env.stat()["psize"]
        )

    def begin(self, write: bool = False) -> Txn:
        """Begin a transaction; inside the gate."""
        try:
            return self.env.begin(write=write)
        except lmdb.MapResizedError:
            # another process has used some of the spare part
            self.narrow()
            return self.env.begin(write=write)

    def widen(self) -> None:
        """Let the next transaction of this process use the whole map; inside the gate, between
        transactions.
        """
        self.env.set_mapsize(self._map_bytes)

    def narrow(self) -> None:
        """Reserve the spare part for transactions that free slots; LMDB keeps at least what is in
        use.
        """
        self.env.set_mapsize(self._map_bytes - _SPARE_BYTES)

    def close(self) -> None:
        """Close the environment; no transaction may be open."""
        self.env.close()

    def close_in_child(self) -> None:
        """Close, in a forked child, what its parent had open, also a transaction in which a signal
        handler forked.

        If another thread of the parent was using it, a close would wait for that thread, which does
        not exist in the child. Then the environment stays open as long as the process lives,
        whichever references to it are dropped; no code that runs in the child has a reference to
        it.
        """
        for env in self._opened:
            if self._entered():
                env.close()
            else:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(env))


def map_bytes(slots: int) -> int:
    """Return the size of the LMDB file for that many slots."""
    return _LEAST_MAP_BYTES + BYTES_PER_SLOT * slots // 4096 * 4096
