"""The next slots to evict, found in batches: one pass over the columns finds the lowest-ranking
sixteenth.

With all ranks, a child is evicted before its parent: a chunk has the highest rank of all its
descendants, the recency of the youngest and the longest lease; among equals the older is first. A
chunk whose parent was evicted cannot be reached and is evicted before all others. All policies use
this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagoda.policy import Hints

# A queue that held recent slots would return a head before the tail that was stored after the queue
# was filled.
_SHARE = 16
_LEAST = 8
_LOOK = 256  # entries examined at once
# up to this number, slots are searched one by one, which is cheaper than array operations
_FEW = 8
_FEW_LOOKS = 32
NOT_READY = np.iinfo(np.int64).max

Rows = NDArray[np.int64]
Ranks = NDArray[np.float64]
Flags = NDArray[np.bool_]


class _PrefixTree(NamedTuple):
    """The columns at one moment, one row for each slot."""

    last_use: Rows
    generation: NDArray[np.uint64]
    ready: Flags
    above: Rows  # the slot of the parent, or the slot itself
    lost: Flags  # not reachable, because its parent was evicted
    youngest: Rows  # recency of the youngest of the chunk and its descendants
    order: Rows  # the order of eviction for slots of one rank

    @classmethod
    def of(cls, hints: Hints) -> _PrefixTree:
        last_use = hints.last_use.copy()
        generation = hints.generation.copy()
        ready = last_use != NOT_READY
        above = np.arange(hints.slots)
        parents = hints.parent_slot.copy()
        child = np.flatnonzero(ready & (parents >= 0) & (parents < hints.slots))
        parent = parents[child]
        gone = generation[parent] != hints.parent_generation[child]
        above[child[~gone]] = parent[~gone]
        positions = hints.position.astype(np.int64)
        # all chunks of one request are as young as its head
        youngest = np.where(ready, last_use, 0) + positions
        _lift(youngest, above)
        youngest -= positions
        lost = np.zeros(hints.slots, np.bool_)
        lost[child[gone]] = True
        _spread(lost, above)
        return cls(
            last_use,
            generation,
            ready,
            above,
            lost,
            youngest,
            np.where(lost, -positions, youngest),
        )


class _Snapshot:
    """Slots in the order of eviction that one pass over the columns found."""

    def __init__(self, tree: _PrefixTree, rows: Rows, ranks: Ranks) -> None:
        self.rows = rows
        self.ranks = ranks[rows]
        self.uses = tree.last_use[rows]
        self.generations = tree.generation[rows]
        self.youngest = tree.youngest[rows]
        at = np.full(len(ranks), -1)
        at[rows] = np.arange(len(rows))
        # the index of its parent in `rows`
        self.heir = np.where(tree.above[rows] == rows, -1, at[tree.above[rows]])
        # it is an ancestor of a chunk that was queued but stays
        self.barred = np.zeros(len(rows), np.bool_)
        self.next = 0
        # when the first of the leases ends that kept slots out of the queue
        self.lapse = 0
        # slots that are not queued and not leased are at least as young as this stamp
        self.rest = 0

    def bar(self, at: int) -> None:
        """Keep the ancestors of an entry from eviction."""
        at = int(self.heir[at])
        while at >= 0 and not self.barred[at]:
            self.barred[at] = True
            self.rest = min(self.rest, int(self.youngest[at]))
            at = int(self.heir[at])


class EvictionQueue:
    """Slots in the order of eviction; an entry is valid until its slot is touched, leased or
    emptied.

    `rank` returns a new array with a finite number for each slot: the lowest is first, among equals
    the oldest. If the rank does not depend on recency (`by_use` False), a touched slot keeps its
    place. Not thread-safe, but `fill` may run at the same time as the other calls.
    """

    def __init__(
        self, hints: Hints, rank: Callable[[], Ranks], by_use: bool = True
    ) -> None:
        self._hints = hints
        self._rank = rank
        self._by_use = by_use
        self._batch = _Snapshot(
            _PrefixTree.of(hints), np.empty(0, np.int64), np.empty(0)
        )

    def first(self, count: int, stamp: int, now: int) -> Rows:
        """Return the first `count` that are older than `stamp`; slots leased at `now` after all
        others.
        """
        few = self._few(count, stamp, now) if count <= _FEW else None
        if few is not None:
            return np.array(few, np.int64)
        found, _ = self.unleased(count, stamp, now)
        if len(found) < count:
            others = self._others(found, stamp)[: count - len(found)]
            # when these are evicted, their ancestors may be evicted
            if len(others):
                self._batch.lapse = 0
            return np.concatenate([found, others])
        return found

    def unleased(self, count: int, stamp: int, now: int) -> tuple[Rows, Ranks]:
        """Return the first `count` that are older than `stamp` and not leased at `now`, and their
        ranks.
        """
        batch = self._batch
        found = self._valid(batch, count, stamp, now)
        if len(found) < count and not (stamp <= batch.rest and now < batch.lapse):
            self.fill(count, stamp, now)
            batch = self._batch
            found = self._valid(batch, count, stamp, now)
        return batch.rows[found], batch.ranks[found]

    def _few(self, count: int, stamp: int, now: int) -> list[int] | None:
        """Do the same as `_valid`, one entry at a time; None if the next few entries do not have
        `count` valid ones.
        """
        hints = self._hints
        batch = self._batch
        found: list[int] = []
        for at in range(
            batch.next, min(batch.next + _FEW_LOOKS, len(batch.rows))
        ):
            row = int(batch.rows[at])
            same = hints.generation[row] == batch.generations[at]
            valid = same and hints.last_use[row] == batch.uses[at]
            if same and not valid and not self._by_use:
                break
            if valid and hints.lease_until[row] <= now:
                if batch.youngest[at] < stamp and not batch.barred[at]:
                    found.append(row)
            else:
                batch.next += at == batch.next and not valid
                if same:
                    batch.bar(at)
            if len(found) == count:
                return found
        return None

    def _valid(self, batch: _Snapshot, count: int, stamp: int, now: int) -> Rows:
        """Return the indices of the first `count` entries that may be evicted, unchanged since they
        were queued.
        """
        hints = self._hints
        found: list[Rows] = []
        have = 0
        at = batch.next
        while have < count and at < len(batch.rows):
            look = slice(at, at + _LOOK)
            rows = batch.rows[look]
            same = hints.generation[rows] == batch.generations[look]
            valid = same & (hints.last_use[rows] == batch.uses[look])
            # its order may have changed
            if not self._by_use and (same & ~valid).any():
                batch.rest = 0
                break
            free = valid & (hints.lease_until[rows] <= now)
            stay = at + np.flatnonzero(same & ~free & (batch.heir[look] >= 0))
            for one in stay[~batch.barred[batch.heir[stay]]].tolist():
                batch.bar(one)
            if at == batch.next and not valid.any():
                batch.next = min(at + _LOOK, len(batch.rows))
            found.append(
                at
                + np.flatnonzero(
                    free & (batch.youngest[look] < stamp) & ~batch.barred[look]
                )
            )
            have += len(found[-1])
            at += _LOOK
        return np.concatenate(found)[:count] if found else np.empty(0, np.int64)

    def fill(self, least: int, stamp: int, now: int) -> None:
        """Queue the slots older than `stamp` that are evicted first, at least `least` if there are
        as many.
        """
        hints = self._hints
        tree = _PrefixTree.of(hints)
        leased = tree.ready & (hints.lease_until > now)
        ranks = self._rank()
        ranks[leased] = np.inf
        _lift(ranks, tree.above)
        free = tree.ready & (ranks < np.inf)
        ranks[tree.lost] = -np.inf
        rows = np.flatnonzero(free & (tree.youngest < stamp))
        rows = rows[
            _lowest(
                ranks[rows],
                tree.order[rows],
                max(_LEAST, hints.slots // _SHARE, least),
            )
        ]
        batch = _Snapshot(tree, rows, ranks)
        free[rows] = False
        batch.rest = min(stamp, int(tree.youngest[free].min(initial=NOT_READY)))
        batch.lapse = int(hints.lease_until[leased].min(initial=NOT_READY))
        self._batch = batch

    def _others(self, but: Rows, stamp: int) -> Rows:
        """Return all others older than `stamp` in the order in which the leases on them and their
        descendants end.

        Some have no lease: they became free after the queue was filled, when another process
        evicted a descendant. They come first.
        """
        tree = _PrefixTree.of(self._hints)
        until = np.where(tree.ready, self._hints.lease_until, 0)
        _lift(until, tree.above)
        rows = np.flatnonzero(tree.ready & (tree.youngest < stamp))
        rows = rows[~np.isin(rows, but)]
        ordered: Rows = rows[np.lexsort((tree.order[rows], until[rows]))]
        return ordered


def _lift(values: NDArray[np.float64] | Rows, above: Rows) -> None:
    """Give each slot the highest value of all its descendants; `above` is the slot's parent, or
    itself.
    """
    # each round goes twice as far up the chain
    while (values[above] < values).any():
        np.maximum.at(values, above, values.copy())
        above = above[above]


def _spread(flags: Flags, above: Rows) -> None:
    """Flag each descendant of a flagged slot."""
    known = 0
    # each round goes twice as far up the chain
    while known < (found := int(np.count_nonzero(flags))):
        known = found
        flags |= flags[above]
        above = above[above]


def _lowest(ranks: Ranks, uses: Rows, count: int) -> Rows:
    """Return the indices of the lowest `count`, in order of rank and, within one rank, of
    recency.
    """
    if count < len(ranks):
        bound = np.partition(ranks, count - 1)[count - 1]
        below = np.flatnonzero(ranks < bound)
        equal = np.flatnonzero(ranks == bound)
        spare = count - len(below)
        if spare < len(equal):
            equal = equal[np.argpartition(uses[equal], spare - 1)[:spare]]
        chosen = np.concatenate([below, equal])
    else:
        chosen = np.arange(len(ranks))
    ordered: Rows = chosen[np.lexsort((uses[chosen], ranks[chosen]))]
    return ordered
