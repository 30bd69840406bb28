"""Whether the tables of a store can be trusted: a checksum from its last clean close tells, else a look at every row.

LMDB has no checksums: a damaged page is an error, a wrong row, or the end of the process by a signal. `store` calls it.
"""

from __future__ import annotations

import contextlib
import struct
import time
from pathlib import Path

import lmdb
import msgspec
import xxhash

from pagoda.errors import LedgerCorrupt
from pagoda.ledger import queries
from pagoda.ledger.columns import columns_bytes
from pagoda.ledger.store_files import COLUMNS, TABLES, StoreState
from pagoda.ledger.tables import META_ROW, Tables

_SECONDS = 1.0  # if it takes longer, reading the headers back in the background is the faster start
_PIECE_BYTES = 64 << 20  # read between two checks of the clock: the tables of most stores are one piece
_MOST_ROWS = (
    1 << 17
)  # slots of a store whose tables are read through when it is opened: some tenths of a second

_DAMAGE = (
    lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.BadRslotError, lmdb.PanicError, lmdb.ProblemError,
    lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.IncompatibleError, lmdb.NotFoundError, lmdb.PageFullError,
    lmdb.CursorFullError, LedgerCorrupt, msgspec.DecodeError, UnicodeDecodeError,
)  # fmt: skip


def is_damage(error: BaseException) -> bool:
    """Whether this error, met in the tables, means that they are damaged."""
    if isinstance(error, struct.error):
        return "unpack" in str(error)  # else the caller tried to pack a wrong number
    return isinstance(error, _DAMAGE)


def checksum(directory: Path, slots: int, used_bytes: int) -> str | None:
    """Return that of the used pages of the tables and of the columns; None if reading them takes too long. OSError."""
    until = time.monotonic() + _SECONDS
    state = xxhash.xxh3_128()
    for name, nbytes in ((TABLES, used_bytes), (COLUMNS, columns_bytes(slots))):
        with open(directory / name, "rb", buffering=0) as file:
            while nbytes > 0:
                piece = file.read(min(nbytes, _PIECE_BYTES))
                if not piece:
                    return None
                state.update(piece)
                nbytes -= len(piece)
                if nbytes > 0 and time.monotonic() > until:
                    return None
    return state.hexdigest()


def find_damage(directory: Path, state: StoreState, known: bool) -> str | None:
    """Open the tables as a member will, and say what is wrong with them; None if they are sound.

    `known`: they are what was written when the store was closed; else every row is read. May end the process.
    """
    try:
        tables = Tables(directory / TABLES, state.map_bytes)
        with contextlib.closing(tables), tables.env.begin(write=True) as txn:
            meta = tables.load_meta(txn)
            if meta.slots != state.slots:
                return f"its tables are of {meta.slots} slots, not {state.slots}"
            if not known and meta.slots <= _MOST_ROWS:
                queries.verify(txn, tables)
            txn.put(META_ROW, meta.pack(), db=tables.meta)  # free pages may be damaged too: write to one
    except (lmdb.Error, struct.error, LedgerCorrupt, ValueError) as error:
        return f"its tables are damaged ({error})"
    return None
