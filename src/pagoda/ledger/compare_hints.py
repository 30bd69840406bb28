"""Let the columns of a store on disk say what its tables say, a page at a time.

`session` calls it, in a read transaction.

Columns may lack any transaction, or be of another time: see `hint_pages`. Afterwards each chunk is
ranked, no slot without a chunk is, and ranks are as they were where slot and generation are. A
generation is given out once, so such a rank is of this very chunk.
"""

from __future__ import annotations

from itertools import islice

import lmdb
import numpy as np

from pagoda.ledger.columns import NO_PARENT, NOT_READY, Columns
from pagoda.ledger.lmdb_tables import SLOT, SLOT_KEY, Tables, Txn

_PAGE = 8192  # slots in one transaction: some ms
_MINUTE_NS = 60 * 10**9  # stamps run ahead of the clock, but never that far
_SLOT_ROW = np.dtype(
    [
        ("generation", "<u8"),
        ("namespace", "<u8"),
        ("position", "<u4"),
        ("tokens", "<u4"),
        ("key", "<u8", 4),
    ]
)


def compare_page(
    txn: Txn, tables: Tables, columns: Columns, start: int, stamp: int
) -> int | None:
    """Compare the slots from `start` on; return where to continue, None at the end. `stamp`: the
    recency of now.
    """
    cursor = txn.cursor(db=tables.slots)
    # not by `Tables.rows`, which costs as much again for each row
    rows = (
        list(islice(cursor.iternext(), _PAGE))
        if cursor.set_range(SLOT_KEY.pack(start))
        else []
    )
    keys = b"".join([key for key, _ in rows])
    values = b"".join([value for _, value in rows])
    if len(keys) != SLOT_KEY.size * len(rows) or len(values) != SLOT.size * len(
        rows
    ):
        raise lmdb.CorruptedError("a row of slots has another size")
    slots = np.frombuffer(keys, ">u4").astype(np.int64)
    stored = np.frombuffer(values, _SLOT_ROW)
    if len(slots) and slots[-1] >= columns.slots:  # LMDB has no checksums
        raise lmdb.CorruptedError(
            "a row of slots is of a slot that does not exist"
        )
    end = columns.slots if len(rows) < _PAGE else int(slots[-1]) + 1

    empty = np.ones(end - start, np.bool_)
    empty[slots - start] = False
    silent = start + np.flatnonzero(
        empty & (columns.last_use[start:end] != NOT_READY)
    )
    columns.last_use[silent] = NOT_READY

    same = (columns.generation[slots] == stored["generation"]) & (
        columns.last_use[slots] != NOT_READY
    )
    same &= (columns.keys[slots] == stored["key"]).all(axis=1)
    _rank_anew(
        columns,
        slots[~same],
        stored[~same],
        stamp,
        tables.load_meta(txn).next_generation,
    )
    ahead = slots[same & (columns.last_use[slots] > stamp + _MINUTE_NS)]
    columns.last_use[ahead] = stamp
    return end if end < columns.slots else None


def _rank_anew(
    columns: Columns,
    slots: np.ndarray,
    stored: np.ndarray,
    stamp: int,
    next_generation: int,
) -> None:
    """Rank chunks of which nothing is known as used a minute ago, in the order in which they were
    stored, tail first.

    Not as used just now: a request that is being served takes no chunk that was used after it
    began.
    """
    columns.last_use[slots] = NOT_READY  # first, so that no half of a row counts
    columns.generation[slots] = stored["generation"]
    columns.keys[slots] = stored["key"]
    columns.position[slots] = stored["position"]
    columns.hits[slots] = 0
    columns.lease_until[slots] = 0
    columns.parent_slot[slots] = NO_PARENT
    columns.parent_generation[slots] = 0
    age = (
        next_generation
        - stored["generation"].astype(np.int64)
        + 2 * stored["position"].astype(np.int64)
    )
    columns.last_use[slots] = np.maximum(stamp - _MINUTE_NS - age, 1)
