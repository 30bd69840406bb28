"""What the policy of a ledger advises, and what it is told: the one way to it, for the ledger and for `replay`."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagoda import policy as policies
from pagoda.ledger.columns import Columns
from pagoda.ledger.ghosts import Marks
from pagoda.metrics import Reason
from pagoda.policy import Newcomers

GHOST_REASONS = (Reason.EVICTED, Reason.CLEARED, Reason.REMOVED, Reason.FAILED_CHECK, Reason.NOT_ADMITTED)
_REFUSED = GHOST_REASONS.index(Reason.NOT_ADMITTED)

Rows = NDArray[np.int64]


class Admission(NamedTuple):
    """How many leading newcomers may come in, and the hits with which each begins."""

    leading: int
    hits: NDArray[np.uint32]


class Advice:
    """One policy over the columns of one ledger. Thread-safe; what it needs of the clock it is told.

    `stamp` is recency, `now` monotonic time, both in ns.
    """

    def __init__(self, policy: str, columns: Columns) -> None:
        self.policy, self._columns = policy, columns
        self._policy = policies.make(policy, columns)
        self._lock = threading.Lock()
        self.shared_values = self._policy.shared_values

    def touch(self, rows: Rows, stamps: Rows, asked: bool) -> None:
        """Raise the recency of chunks, and, if somebody asked for them, their hits."""
        with self._lock:
            self._policy.touch(rows, stamps, asked)
            if asked:
                self._columns.hits[rows] += np.uint32(1)

    def admit(self, marks: Marks, stamps: Rows, room: int, now: int, *, all_in: bool = False) -> Admission:
        """Say which newcomers, in chain order, may come in (with `all_in`: all); leaves ghosts of the others."""
        ghosts = self._columns.table
        known_hits, last_use = ghosts.recall(marks)
        with self._lock:
            count = self._policy.admit(Newcomers(stamps, known_hits, last_use), room, now)
            count = len(marks) if all_in else count
        hits = known_hits + (last_use > 0).astype(np.uint32)
        if count < len(marks):
            ghosts.remember(marks[count:], stamps[count:], hits[count:], int(stamps[0]), _REFUSED)
        return Admission(count, hits)

    def hits_of(self, marks: Marks) -> NDArray[np.int64]:
        """The hits with which newcomers begin that were let in before. Changes nothing."""
        known_hits, last_use = self._columns.table.recall(marks)
        return (known_hits + (last_use > 0)).astype(np.int64)

    def refuse(self, marks: Marks, stamps: Rows, now: int) -> None:
        """Note that newcomers were asked for who stand behind one that was not admitted."""
        ghosts = self._columns.table
        known_hits, last_use = ghosts.recall(marks)
        with self._lock:
            self._policy.admit(Newcomers(stamps, known_hits, last_use), len(marks), now)
        hits = known_hits + (last_use > 0).astype(np.uint32)
        ghosts.remember(marks, stamps, hits, int(stamps[0]), _REFUSED)

    def victims(self, count: int, stamp: int, now: int) -> Rows:
        """Up to `count` slots that may go for newcomers of recency `stamp`, the first to go first."""
        with self._lock:
            return self._policy.victims(count, stamp, now)

    def prepare(self, stamp: int, now: int) -> None:
        """Do ahead what the next calls would have to do. By one thread at a time, beside all others."""
        self._policy.prepare(stamp, now)

    def share(self, values: NDArray[np.float64]) -> None:
        """Bring together what the processes have learnt. Inside the gate."""
        with self._lock:
            self._policy.share(values)
