"""Least recently used, tail first.

All chunks of one request carry one recency stamp less their position in the chain, so a tail is always older than its
head and no head goes before its tail; a chunk whose parent has gone is out of reach and goes before all others.

The order is looked up in batches: one pass over the columns fills a queue with the oldest sixteenth; until it is
used up, whatever is not in the queue is younger than all that is, but for slots that were leased at the time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagoda.policy import Hints

# A queue that held recent slots would give out a head before the tail that was stored after the queue was filled.
_QUEUE_SHARE, _QUEUE_LEAST = 16, 8
_LOOK = 256  # queue entries looked at in one go
_FEW, _FEW_LOOKS = 8, 32  # so few are looked for one by one: cheaper than array operations
_NOT_READY = np.iinfo(np.int64).max

Rows = NDArray[np.int64]


class Lru:
    """The default policy. Not thread-safe: the ledger calls it from one thread at a time."""

    def __init__(self, hints: Hints) -> None:
        self._hints = hints
        self._rows: Rows = np.empty(0, np.int64)
        self._uses: Rows = np.empty(0, np.int64)
        self._generations: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._last_uses: Rows = np.empty(0, np.int64)  # as `_uses`, but for orphans what the columns said
        self._next = 0
        self._lapse = 0  # when the first lease ends of those that kept a slot out of the queue

    def touch(self, rows: Rows, stamps: Rows) -> None:
        """Raise the recency of these slots; never lower it."""
        # A slot that is being filled is younger than all stamps, and must stay so: not one more is written.
        older = self._hints.last_use[rows] < stamps
        self._hints.last_use[rows[older]] = stamps[older]

    def admit(self, keys: Sequence[bytes]) -> list[bool]:
        """Admit everybody; being older than all that is kept is what refuses a newcomer."""
        return [True] * len(keys)

    def evicted(self, rows: Rows) -> None:
        """Nothing to remember: the queue notices by the generation."""

    def victims(self, count: int, stamp: int, now: int) -> Rows:
        """Return the oldest slots that are older than `stamp`; slots leased at `now` after all others."""
        few = self._few(count, stamp, now) if count <= _FEW else None
        if few is not None:
            return np.array(few, np.int64)
        found, all_seen = self._queued(count, stamp, now)
        if len(found) < count and not (all_seen and now < self._lapse):
            self._fill(now, count, stamp)
            found, _ = self._queued(count, stamp, now)
        if len(found) < count:
            return np.concatenate([found, self._leased(count - len(found), stamp, now)])
        return found

    def _few(self, count: int, stamp: int, now: int) -> list[int] | None:
        """The same as `_queued`, one by one; None if `count` are not among the next few entries."""
        hints = self._hints
        found: list[int] = []
        for at in range(self._next, min(self._next + _FEW_LOOKS, len(self._rows))):
            row, use = int(self._rows[at]), int(self._uses[at])
            same = hints.last_use[row] == self._last_uses[at]
            if not same or hints.generation[row] != self._generations[at]:
                self._next += at == self._next
            elif use >= stamp:
                return None
            elif self._last_uses[at] < stamp and hints.lease_until[row] <= now:
                found.append(row)
            if len(found) == count:
                return found
        return None

    def _queued(self, count: int, stamp: int, now: int) -> tuple[Rows, bool]:
        """The first `count` in the queue that stand as they were queued and may go, and whether no other slot can.

        Slots outside the queue are younger than those in it: one that stands but is too young ends the search.
        """
        found: list[Rows] = []
        have, at, too_young = 0, self._next, False
        while have < count and at < len(self._rows) and not too_young:
            rows, standing = self._look(at)
            if at == self._next and not standing.any():
                self._next = min(at + _LOOK, len(self._rows))
            too_young = bool((standing & (self._uses[at : at + _LOOK] >= stamp)).any())
            older = self._last_uses[at : at + _LOOK] < stamp
            found.append(rows[standing & older & (self._hints.lease_until[rows] <= now)])
            have += len(found[-1])
            at += _LOOK
        return (np.concatenate(found)[:count] if found else np.empty(0, np.int64)), too_young

    def _look(self, at: int) -> tuple[Rows, NDArray[np.bool_]]:
        rows = self._rows[at : at + _LOOK]
        same = self._hints.last_use[rows] == self._last_uses[at : at + _LOOK]
        return rows, same & (self._hints.generation[rows] == self._generations[at : at + _LOOK])

    def _fill(self, now: int, least: int, stamp: int) -> None:
        """Queue the oldest unleased slots, `least` of them if there are as many: one pass over the columns.

        Orphans go first, but not those as young as `stamp`: they may not go yet, and would hide those who may.
        """
        hints = self._hints
        uses = hints.last_use.copy()
        orphans = self._orphans(uses)
        orphans = orphans[uses[orphans] < stamp]
        uses[orphans] = -1 - hints.position[orphans].astype(np.int64)
        leased = (hints.lease_until > now) & (uses != _NOT_READY)
        self._lapse = int(hints.lease_until[leased].min(initial=_NOT_READY))
        uses[leased] = _NOT_READY
        size = min(max(_QUEUE_LEAST, hints.slots // _QUEUE_SHARE, least), hints.slots)
        rows = np.argpartition(uses, size - 1)[:size] if size < hints.slots else np.arange(hints.slots)
        rows = rows[np.argsort(uses[rows], kind="stable")]
        rows = rows[uses[rows] != _NOT_READY].astype(np.int64)
        self._rows, self._uses, self._generations = rows, uses[rows], hints.generation[rows]
        self._last_uses = np.where(self._uses < 0, hints.last_use[rows], self._uses)
        self._next = 0

    def _orphans(self, uses: Rows) -> Rows:
        """Slots whose chunk cannot be reached any more: its parent has gone, or its parent's parent, and so on."""
        hints = self._hints
        linked = (hints.parent_slot >= 0) & (hints.parent_slot < hints.slots) & (uses != _NOT_READY)
        child: Rows = np.flatnonzero(linked)
        parent = hints.parent_slot[child]
        gone = hints.generation[parent] != hints.parent_generation[child]
        if not gone.any():
            return np.empty(0, np.int64)
        lost = np.zeros(hints.slots, np.bool_)
        lost[child] = gone
        above = np.arange(hints.slots)
        above[child[~gone]] = parent[~gone]
        known = -1
        while known < (found := int(np.count_nonzero(lost))):  # twice as far up the chain each time
            known = found
            lost |= lost[above]
            above = above[above]
        rows: Rows = np.flatnonzero(lost)
        return rows

    def _leased(self, count: int, stamp: int, now: int) -> Rows:
        """Leased slots, the soonest-ending lease first: asked for when only they stand in the way."""
        hints = self._hints
        rows = np.flatnonzero((hints.lease_until > now) & (hints.last_use < stamp))
        return rows[np.argsort(hints.lease_until[rows], kind="stable")][:count]
