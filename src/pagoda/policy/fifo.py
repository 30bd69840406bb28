"""First in, first out: the plainest order, to compare others with."""

from __future__ import annotations

import numpy as np

from pagoda.policy import Hints
from pagoda.policy.lru import Lru
from pagoda.policy.queue import Queue, Ranks


class Fifo(Lru):
    """What came first goes first, however often it is asked for."""

    def __init__(self, hints: Hints) -> None:
        self._hints = hints
        self._queue = Queue(hints, self._ranks, by_use=False)

    def _ranks(self) -> Ranks:
        return self._hints.generation.astype(np.float64)
