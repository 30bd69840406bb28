"""Least recently used, tail first: the simplest order.

The recency of a chunk is the stamp of its request less its position in the chain, so a tail is
always older than its head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pagoda.policy import LAST_USE_CELLS, Hints, Newcomers
from pagoda.policy.eviction_queue import Chosen, EvictionQueue, Ranks, Rows


class Lru:
    """Evicts the oldest first. Not thread-safe: the ledger calls it from one thread at a time."""

    shared_values: ClassVar[int] = 0

    def __init__(self, hints: Hints) -> None:
        self._hints = hints

        def equal(chosen: Chosen) -> Ranks:
            return np.zeros(len(hints.last_use[chosen]))

        self._queue = EvictionQueue(hints, equal)

    @property
    def is_low(self) -> bool:
        """Whether `rank` should be called soon."""
        return self._queue.is_low

    def touch(self, rows: Rows, stamps: Rows, asked: bool = True) -> None:
        """Raise the recency of these slots; never lower it."""
        raise_recency(self._hints, rows, stamps)

    def touch_few(
        self, slots: Sequence[int], stamps: Sequence[int], asked: bool = True
    ) -> None:
        """Do the same for few slots, one by one."""
        last_use = self._hints.cells[LAST_USE_CELLS]
        for slot, stamp in zip(slots, stamps, strict=True):
            if last_use[slot] < stamp:
                last_use[slot] = stamp

    def admit(self, newcomers: Newcomers, room: int, now: int) -> int:
        """Admit all; the ledger refuses a newcomer only if it is older than every kept chunk."""
        return len(newcomers.stamps)

    def victims(self, count: int, stamp: int, now: int) -> Rows:
        """Return the oldest slots that are older than `stamp`; slots leased at `now` after all
        others.
        """
        return self._queue.first(count, stamp, now)

    def prepare(self, stamp: int, now: int) -> None:
        """Rank all slots, if few of those that were ranked are left."""
        if self._queue.is_low:
            self.rank(0, stamp, now)

    def rank(self, least: int, stamp: int, now: int) -> None:
        """Rank all slots: at least the first `least` are then known."""
        self._queue.fill(least, stamp, now)

    def share(self, values: NDArray[np.float64]) -> None:
        """Do nothing, because the columns are already shared."""


def raise_recency(hints: Hints, rows: Rows, stamps: Rows) -> None:
    """Record that these slots were used at these stamps; a slot that was used later keeps its
    stamp.
    """
    # A slot that is being filled is younger than all stamps, and must stay so: only older rows are
    # written.
    older = hints.last_use[rows] < stamps
    hints.last_use[rows[older]] = stamps[older]
