"""The counters of a store: one mapped row per member, in columns that the tables name.

The row has gauges too (MEMBER_GAUGES), which a member sets; those of a member that left mean
nothing.

A version of PagodaKV that has more counters than another appends their names: members of both
versions share the file, and each reads the columns that it knows. A new counter is therefore no new
format. `session` and `members` call it.
"""

from __future__ import annotations

import mmap

import msgspec
import numpy as np
from numpy.typing import NDArray

from pagoda.base.metrics import COUNTERS, MEMBER_GAUGES
from pagoda.ledger.lmdb_tables import COUNTER_NAMES_ROW, COUNTERS_ROW, Tables, Txn

MEMBER_ROWS = 512
WIDTH = 128  # columns of the file
COUNTERS_BYTES = MEMBER_ROWS * WIDTH * 8

CounterRow = NDArray[np.uint64]


def counter_rows(memory: mmap.mmap) -> CounterRow:
    """Return that memory, of COUNTERS_BYTES bytes, as an array of shape (MEMBER_ROWS, WIDTH)."""
    return np.frombuffer(memory, np.uint64).reshape(MEMBER_ROWS, WIDTH)


def columns_of(txn: Txn, tables: Tables) -> dict[str, int]:
    """Return the column of each counter and gauge of this version; those new to the store get one,
    in a write transaction.

    A counter for which no column is left is not counted.
    """
    here = (*COUNTERS, *MEMBER_GAUGES)
    row = txn.get(COUNTER_NAMES_ROW, db=tables.meta)
    names = msgspec.json.decode(row, type=list[str]) if row is not None else []
    known = set(names)
    named = [*names, *(name for name in here if name not in known)][:WIDTH]
    if named != names:
        txn.put(COUNTER_NAMES_ROW, msgspec.json.encode(named), db=tables.meta)
    return {name: column for column, name in enumerate(named) if name in here}


def folded(row: bytes | None) -> CounterRow:
    """Return the counters of members that left, by column."""
    totals = np.zeros(WIDTH, np.uint64)
    if row is not None:
        known = np.frombuffer(row, np.uint64)[:WIDTH]
        totals[: len(known)] = known
    return totals


def fold(txn: Txn, tables: Tables, row: CounterRow) -> None:
    """Add the row of a member to the counters of those that left."""
    totals = folded(txn.get(COUNTERS_ROW, db=tables.meta)) + row
    txn.put(COUNTERS_ROW, totals.tobytes(), db=tables.meta)
