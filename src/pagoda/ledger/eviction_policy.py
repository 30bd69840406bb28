"""The one way to a ledger's policy: the ledger and `replay` ask it for victims and admission, and
report uses.

The order itself is made by the policies: `pagoda.policy`. Blocks on a device have another order of
eviction: see `pagoda.blocks.tree`.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from pagoda import policy as policies
from pagoda.base.metrics import Reason
from pagoda.ledger.columns import Columns, Marks
from pagoda.policy import Newcomers

GHOST_REASONS = (
    Reason.EVICTED,
    Reason.CLEARED,
    Reason.REMOVED,
    Reason.FAILED_CHECK,
    Reason.NOT_ADMITTED,
)
_REFUSED = GHOST_REASONS.index(Reason.NOT_ADMITTED)

Rows = NDArray[np.int64]


class Evictor:
    """One policy over the columns of one ledger. Thread-safe; callers pass it the time.

    `stamp` is recency, `now` monotonic time, both in ns.
    """

    def __init__(self, policy: str, columns: Columns) -> None:
        self.policy = policy
        self._columns = columns
        self._policy = policies.make(policy, columns)
        self._lock = threading.Lock()
        self.shared_values = self._policy.shared_values

    def touch(self, rows: Rows, stamps: Rows, asked: bool) -> None:
        """Raise the recency of chunks and, if a request asked for them, their hits."""
        with self._lock:
            self._policy.touch(rows, stamps, asked)
            if asked:
                self._columns.hits[rows] += np.uint32(1)

    def admit(
        self,
        marks: Marks,
        stamps: Rows,
        room: int,
        now: int,
        *,
        admit_all: bool = False,
        refuse_all: bool = False,
        already_admitted: bool = False,
    ) -> tuple[int, NDArray[np.uint32]]:
        """Return how many newcomers, in chain order, are admitted, and the hits with which each
        begins.

        Leaves ghosts of the newcomers that are not admitted.

        `admit_all`, `refuse_all`: overrule the policy, which is still informed. `already_admitted`:
        an earlier call admitted all of them; only their hits are returned.
        """
        ghosts = self._columns.table
        known_hits, last_use = ghosts.recall(marks)
        if already_admitted:
            return len(marks), known_hits + (last_use > 0)
        with self._lock:  # the policy may correct the hits that were recalled
            count = self._policy.admit(
                Newcomers(stamps, known_hits, last_use), room, now
            )
        count = len(marks) if admit_all else 0 if refuse_all else count
        hits = known_hits + (last_use > 0)
        if count < len(marks):
            ghosts.remember(
                marks[count:],
                stamps[count:],
                hits[count:],
                int(stamps[0]),
                _REFUSED,
            )
        return count, hits

    def refuse(self, marks: Marks, stamps: Rows, now: int) -> None:
        """Record requests for newcomers that follow one that was not admitted."""
        self.admit(marks, stamps, len(marks), now, refuse_all=True)

    def victims(self, count: int, stamp: int, now: int) -> Rows:
        """Return up to `count` slots to evict for newcomers of recency `stamp`, in the order of
        eviction.
        """
        with self._lock:
            return self._policy.victims(count, stamp, now)

    def prepare(self, stamp: int, now: int) -> None:
        """Do work in advance that the next calls would have to do. Called by one thread, in
        parallel to other calls.
        """
        self._policy.prepare(stamp, now)

    def share(self, values: NDArray[np.float64]) -> None:
        """Merge what the processes have learned. Inside the gate."""
        with self._lock:
            self._policy.share(values)
