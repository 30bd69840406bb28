"""Chunks that a caller asked to retain: their leases are renewed until then, up to a budget.

A leased chunk is evicted after all others, so it never prevents a store. `Evictor` asks for the
renewals when it chooses victims, so they need no thread. They end with this process.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagoda.ledger.columns import Columns

RETAINED_SHARE = 64
"""Retained chunks take at most this part (1/64) of the chunks that fit now."""

_LEASE_NS = 30_000_000_000
_RENEW_NS = 5_000_000_000

Rows = NDArray[np.int64]


class RetainedChunks:
    """The retained chunks of one tier, in this process. Not thread-safe; callers pass the monotonic
    time (ns).
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        # by slot: the generation of the chunk, and until when it is retained
        self._known: dict[int, tuple[int, int]] = {}
        self._due_at = 0

    @property
    def budget(self) -> int:
        """How many chunks may be retained at once."""
        return -(-self._columns.capacity // RETAINED_SHARE)

    def is_due(self, now: int) -> bool:
        """Whether leases must be renewed. Cheap."""
        return bool(self._known) and now >= self._due_at

    def retain(self, rows: Rows, now: int, nanoseconds: int) -> int:
        """Retain these chunks from `now` on for so long; return how many, from the first on."""
        self.renew(now)
        until = now + nanoseconds
        generations = self._columns.generation
        taken = 0
        for row in rows.tolist():
            if row not in self._known and len(self._known) >= self.budget:
                break
            self._known[row] = (int(generations[row]), until)
            taken += 1
        self._due_at = now
        self.renew(now)
        return taken

    def release(self, rows: Rows) -> None:
        """Retain these chunks no longer."""
        known = [row for row in rows.tolist() if self._known.pop(row, None)]
        self._columns.lease_until[known] = 0

    def renew(self, now: int) -> None:
        """Renew the leases of chunks that are still there, and forget the others."""
        generations = self._columns.generation
        self._known = {
            row: (generation, until)
            for row, (generation, until) in self._known.items()
            if until > now and generations[row] == generation
        }
        self._due_at = now + _RENEW_NS
        if not self._known:
            return
        rows = np.fromiter(self._known, np.int64, len(self._known))
        ends = [until for _, until in self._known.values()]
        left = np.array(ends, np.int64) - now
        # those that end soon need a shorter lease
        for row, each in zip(rows, left, strict=True):
            if each < _LEASE_NS:
                self._columns.lease(row[None], now, int(each))
        self._columns.lease(rows[left >= _LEASE_NS], now, _LEASE_NS)
