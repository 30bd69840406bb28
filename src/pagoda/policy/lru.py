"""Least recently used, tail first.

All chunks of one request carry one recency stamp less their position in the chain, so a tail is always older than its
head.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pagoda.policy import Hints, Newcomers
from pagoda.policy.queue import Queue, Ranks, Rows


class Lru:
    """The oldest goes first. Not thread-safe: the ledger calls it from one thread at a time."""

    shared_values: ClassVar[int] = 0

    def __init__(self, hints: Hints) -> None:
        self._hints = hints
        self._queue = Queue(hints, self._ranks)

    def touch(self, rows: Rows, stamps: Rows, asked: bool = True) -> None:
        """Raise the recency of these slots; never lower it."""
        raise_recency(self._hints, rows, stamps)

    def admit(self, newcomers: Newcomers, room: int, now: int) -> int:
        """Admit everybody; being older than all that is kept is what refuses a newcomer."""
        return len(newcomers.stamps)

    def victims(self, count: int, stamp: int, now: int) -> Rows:
        """Return the oldest slots that are older than `stamp`; slots leased at `now` after all others."""
        return self._queue.first(count, stamp, now)

    def prepare(self, stamp: int, now: int) -> None:
        """Nothing: a pass is short."""

    def share(self, values: NDArray[np.float64]) -> None:
        """Nothing: the columns are shared already."""

    def _ranks(self) -> Ranks:
        return np.zeros(self._hints.slots)


def raise_recency(hints: Hints, rows: Rows, stamps: Rows) -> None:
    """Note that these slots were used at these stamps; what was used later stays as it is."""
    # A slot that is being filled is younger than all stamps, and must stay so: not one more is written.
    older = hints.last_use[rows] < stamps
    hints.last_use[rows[older]] = stamps[older]
