"""The counters of a store: a mapped row a member, in columns that the tables name.

A version of PagodaKV that counts more than another appends the names of its own: members of both share the file, and
each reads the columns that it knows. A new counter is therefore no new format.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import cast

import lmdb
import msgspec
import numpy as np
from numpy.typing import NDArray

from pagoda.ledger.tables import COUNTER_NAMES_ROW, COUNTERS_ROW, Tables
from pagoda.metrics import COUNTERS

MEMBER_ROWS = 512
WIDTH = 128  # columns there is room for
COUNTERS_BYTES = MEMBER_ROWS * WIDTH * 8

Row = NDArray[np.uint64]


def map_counters(path: Path) -> Row:
    """The mapped file, (MEMBER_ROWS, WIDTH)."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(fd, COUNTERS_BYTES)
    finally:
        os.close(fd)
    return np.frombuffer(mapped, np.uint64).reshape(MEMBER_ROWS, WIDTH)


def columns_of(txn: lmdb.Transaction, tables: Tables) -> dict[str, int]:
    """The column of each counter of this version; those new to the store get one, in a write transaction.

    A counter that finds no column left is not counted.
    """
    row = cast("bytes | None", txn.get(COUNTER_NAMES_ROW, db=tables.meta))
    names = msgspec.json.decode(row, type=list[str]) if row is not None else []
    known = set(names)
    named = [*names, *(name for name in COUNTERS if name not in known)][:WIDTH]
    if named != names:
        txn.put(COUNTER_NAMES_ROW, msgspec.json.encode(named), db=tables.meta)
    return {name: column for column, name in enumerate(named) if name in COUNTERS}


def folded(row: bytes | None) -> Row:
    """The counters of the dead, by column."""
    totals = np.zeros(WIDTH, np.uint64)
    if row is not None:
        known = np.frombuffer(row, np.uint64)[:WIDTH]
        totals[: len(known)] = known
    return totals


def fold(txn: lmdb.Transaction, tables: Tables, row: Row) -> None:
    """Add the row of a member that has left to those of the dead."""
    totals = folded(cast("bytes | None", txn.get(COUNTERS_ROW, db=tables.meta))) + row
    txn.put(COUNTERS_ROW, totals.tobytes(), db=tables.meta)
