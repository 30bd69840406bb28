"""Count what least recently used would have served of the same requests, without a second cache.

LRU keeps the chunks that were used last, as many as there are slots (Mattson's stack, 1970). Slots and ghosts together
have the last use of more chunks than that, independent of the evictions. So one number is enough, the last use of the
oldest chunk that LRU would still have: it shows for every requested chunk whether LRU would have had it. `hindsight`
calls this.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pagoda.policy import Hints
from pagoda.policy.eviction_queue import NOT_READY, Rows

_BEHIND = 0.003  # of the requested chunks: Hindsight may serve that much less
_MOST_AHEAD, _MOST_BEHIND = 0.003, 0.0045  # an old lead or lag counts at most that much
_LOOKED_AT = 1 << 15
_NEWER = 1 / 32  # share of the slots filled before the oldest is searched again: on average half a queue


class ShadowLru:
    """Counts what was served and what LRU would have served, together with the other processes. Not thread-safe."""

    shared_values: ClassVar[int] = 3

    def __init__(self, hints: Hints) -> None:
        self._hints = hints
        self._oldest = 0  # last use of the oldest chunk that LRU would have; 0: it would have all
        self._here = [0, 0, 0]  # asked for, served, served by LRU; not yet shared
        self.wins = False
        self._random = np.random.default_rng(1)

    def count(self, last_uses: Rows, served: int) -> None:
        """Count chunks that were asked for, by the stamps of their last use (0: unknown)."""
        if self._oldest:
            shadow = int(np.count_nonzero(last_uses >= self._oldest))
            here = self._here
            self._here = [here[0] + len(last_uses), here[1] + served, here[2] + shadow]

    def look(self) -> None:
        """Find the oldest chunk that LRU would have; by a sample if there are many slots and ghosts."""
        hints, ghosts = self._hints, self._hints.ghosts
        uses = np.concatenate([hints.last_use, ghosts.last_use])
        kept = hints.capacity * (1 - _NEWER)
        if len(uses) > _LOOKED_AT:
            kept *= _LOOKED_AT / len(uses)
            uses = uses[self._random.integers(0, len(uses), _LOOKED_AT)]
        uses = uses[(uses > 0) & (uses != NOT_READY)]
        at = len(uses) - int(kept)
        self._oldest = int(np.partition(uses, at)[at]) if 0 <= at < len(uses) else 0

    def share(self, values: NDArray[np.float64], memory: float) -> None:
        """Add to the shared counts, halve them beyond `memory` chunks, and decide which wins. Call inside the gate."""
        values += self._here
        self._here = [0, 0, 0]
        if values[0] > memory:
            values /= 2
        asked, served, shadow = values.tolist()
        lead = min(max(served - shadow, -_MOST_BEHIND * asked), _MOST_AHEAD * asked)
        values[1] = max(0.0, shadow + lead)
        self.wins = bool(lead < -_BEHIND * asked)
