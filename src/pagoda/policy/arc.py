"""ARC, the adaptive replacement cache (Megiddo and Modha, FAST 2003), over the columns and ghosts
of a ledger.

T1 are the chunks without a hit, T2 those with hits; B1 and B2 are their ghosts. Each is in order of
recency. How many slots T1 should have is learned: a newcomer with a ghost in B1 raises the target,
one with a ghost in B2 lowers it.

ARC forgets ghosts sooner than the ledger does: it makes them as old as possible, so that others
replace them first.

In a store of many slots no call goes through all slots or ghosts: the sizes of the lists are
estimated from a sample of fixed size, another one in each call, and the ghosts that are forgotten
are the oldest of the sample.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pagoda.policy import Hints, Newcomers
from pagoda.policy.eviction_queue import (
    NOT_READY,
    RANKED_AT_ONCE,
    SAMPLE,
    Chosen,
    EvictionQueue,
    Ranks,
    Rows,
    sampled_slots,
)
from pagoda.policy.lru import raise_recency

_FORGOTTEN = 1  # `last_use` of ghosts that are neither in B1 nor in B2
# how many ghosts of a large store a call looks at; a key's place among the ghosts is random, so
# that neighbours are a sample
_GHOSTS = 8192


class Arc:
    """Splits the slots between recent and frequent chunks, guided by the ghosts. Not
    thread-safe.
    """

    shared_values: ClassVar[int] = 1

    def __init__(self, hints: Hints) -> None:
        self._hints = hints

        def not_in_t1(chosen: Chosen) -> Ranks:
            ranks: Ranks = np.minimum(hints.hits[chosen], 1).astype(np.float64)
            return ranks

        def not_in_t2(chosen: Chosen) -> Ranks:
            ranks: Ranks = (hints.hits[chosen] == 0).astype(np.float64)
            return ranks

        self._t1 = EvictionQueue(hints, not_in_t1)
        self._t2 = EvictionQueue(hints, not_in_t2)
        self._is_small = hints.slots <= RANKED_AT_ONCE
        self._samples = 0
        self._target = 0.0  # of the size of T1: p of the paper
        self._shared = 0.0  # the value of `_target` when it was last shared
        # for each victim of the latest newcomers, whether T1 loses it
        self._from_t1: list[bool] = []
        self._forgets = 0  # how many of those are not remembered
        # chunks that T1 lost count as in B1 only if they are younger than this stamp
        self._unremembered = 0

    def touch(self, rows: Rows, stamps: Rows, asked: bool = True) -> None:
        """Raise the recency of these slots; slots that were asked for now have hits and are
        therefore in T2.
        """
        raise_recency(self._hints, rows, stamps)

    def admit(self, newcomers: Newcomers, room: int, now: int) -> int:
        """Admit all; learn from newcomers that were in B1 or B2, and forget ghosts as the paper
        does.
        """
        hits = newcomers.hits
        last_use = newcomers.last_use
        fresh = (last_use <= _FORGOTTEN) | (
            (hits == 0) & (last_use <= self._unremembered)
        )
        hits[fresh] = 0
        last_use[fresh] = 0
        if len(hits) > room or not fresh.all():
            self._look_ahead(
                np.where(fresh, 0, np.where(hits == 0, 1, 2)).tolist(), room
            )
        return len(hits)

    def victims(self, count: int, stamp: int, now: int) -> Rows:
        """Return as many slots of T1 and of T2 as each should lose; slots leased at `now` after all
        others.
        """
        ones = self._of_t1(count)
        of_t1 = self._own(self._t1, ones, stamp, now)
        of_t2 = self._own(self._t2, count - ones, stamp, now)
        last = min(self._forgets, len(of_t1))
        if last:
            self._unremembered = int(self._hints.last_use[of_t1[last - 1]])
        rows = np.concatenate([of_t1, of_t2[~np.isin(of_t2, of_t1)]])
        return rows if len(rows) == count else self._t1.first(count, stamp, now)

    def prepare(self, stamp: int, now: int) -> None:
        """Rank all slots, if few of those that were ranked are left."""
        for queue in (self._t1, self._t2):
            if queue.is_low:
                queue.fill(0, stamp, now)

    @property
    def is_low(self) -> bool:
        """Whether `prepare` should be called soon."""
        return self._t1.is_low or self._t2.is_low

    def rank(self, least: int, stamp: int, now: int) -> None:
        """Rank all slots: at least the first `least` are then known."""
        for queue in (self._t1, self._t2):
            queue.fill(least, stamp, now)

    def share(self, values: NDArray[np.float64]) -> None:
        """Merge the targets for the size of T1 of all processes."""
        if not 0 <= values[0] <= self._hints.slots:  # damaged: start again
            values[0] = 0
        if values[0] != self._shared:
            learnt = float(values[0]) + self._target - self._shared
            self._target = min(max(learnt, 0.0), float(self._hints.capacity))
        self._shared = values[0] = self._target

    def _look_ahead(self, origins: list[int], room: int) -> None:
        """Apply the cases II to IV to newcomers of B1 (1), of B2 (2), or of neither (0)."""
        ghosts = self._hints.ghosts
        size = self._hints.capacity
        t1, t2 = self._sizes()
        looked_at, weight = self._ghosts_to_look_at()
        known = looked_at.start + np.flatnonzero(
            ghosts.last_use[looked_at] > _FORGOTTEN
        )
        once = ghosts.hits[known] == 0
        forgotten = once & (ghosts.last_use[known] <= self._unremembered)
        ghosts.last_use[known[forgotten]] = _FORGOTTEN
        in_b1 = known[once & ~forgotten]
        in_b2 = known[~once]
        b1 = round(len(in_b1) * weight)
        b2 = round(len(in_b2) * weight)
        known_b1 = b1
        less_b1 = 0
        less_b2 = 0
        from_t1 = []
        for turn, origin in enumerate(origins):
            if origin == 1:
                self._target = min(self._target + max(b2 / max(b1, 1), 1.0), size)
                b1 = b1 - 1
            elif origin == 2:
                self._target = max(self._target - max(b1 / max(b2, 1), 1.0), 0.0)
                b2 = b2 - 1
            if turn >= room:
                if origin == 0 and t1 + b1 >= size:
                    b1 = b1 - 1
                    less_b1 = less_b1 + 1
                elif origin == 0 and b2 and t1 + t2 + b1 + b2 >= 2 * size:
                    b2 = b2 - 1
                    less_b2 = less_b2 + 1
                too_many = t1 > self._target or (
                    t1 == self._target and origin == 2
                )
                one = t2 == 0 or (t1 > 0 and too_many)
                t1, b1, t2, b2 = (
                    (t1 - 1, b1 + 1, t2, b2) if one else (t1, b1, t2 - 1, b2 + 1)
                )
                from_t1.append(one)
            t1, t2 = (t1 + 1, t2) if origin == 0 else (t1, t2 + 1)
        self._forget(in_b1, less_b1)
        self._forget(in_b2, less_b2)
        self._from_t1 = from_t1
        self._forgets = max(0, less_b1 - known_b1)

    def _ghosts_to_look_at(self) -> tuple[slice, float]:
        """Return the ghosts that a call looks at, and for how many each of them stands."""
        total = len(self._hints.ghosts.last_use)
        if self._is_small or total <= _GHOSTS:
            return slice(0, total), 1.0
        self._samples += 1
        first = self._samples % (total // _GHOSTS) * _GHOSTS
        return slice(first, first + _GHOSTS), total / _GHOSTS

    def _forget(self, ghosts: Rows, count: int) -> None:
        """Forget the oldest of these ghosts."""
        last_use = self._hints.ghosts.last_use
        if 0 < count < len(ghosts):
            ghosts = ghosts[np.argpartition(last_use[ghosts], count - 1)[:count]]
        if count > 0:
            last_use[ghosts] = _FORGOTTEN

    def _sizes(self) -> tuple[int, int]:
        hints = self._hints
        chosen: Chosen = slice(None)
        weight = 1.0
        if not self._is_small:
            self._samples += 1
            chosen = sampled_slots(hints.backed, SAMPLE, self._samples)
            weight = hints.backed / len(chosen)
        ready = hints.last_use[chosen] != NOT_READY
        t1 = int(np.count_nonzero(ready & (hints.hits[chosen] == 0)))
        t2 = int(np.count_nonzero(ready)) - t1
        return round(t1 * weight), round(t2 * weight)

    def _of_t1(self, count: int) -> int:
        """Return how many of the next victims should be from T1: by the plan, then as many as T1
        has too many.
        """
        planned = self._from_t1[:count]
        ones = sum(planned)
        if len(planned) < count:
            surplus = self._sizes()[0] - ones - self._target
            ones += min(count - len(planned), max(0, math.ceil(surplus)))
        return ones

    def _own(
        self, queue: EvictionQueue, count: int, stamp: int, now: int
    ) -> Rows:
        """Return the first slots of a queue that belong to its list; the slots of the other list
        come after them.
        """
        rows, ranks = queue.unleased(count, stamp, now)
        # the queue had none left, but may have got more since; of a large store, the next `prepare`
        # finds them
        if count and self._is_small and (ranks > 0).any():
            queue.fill(count, stamp, now)
            rows, ranks = queue.unleased(count, stamp, now)
        return rows[ranks <= 0]
