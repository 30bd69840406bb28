"""The next slots to evict, found in batches.

With all ranks, a child is evicted before its parent: a chunk has the highest rank of all its
descendants, the recency of the youngest and the longest lease; among equals the older is first. A
chunk whose parent was evicted cannot be reached and is evicted before all others. All policies use
this module.

To rank all slots takes time in proportion to their number: some 0.1 us each. So only a store of few
slots is ranked within a call. For a larger one, `fill` ranks all slots off the request path and
queues the lowest sixteenth; calls take victims from that queue, and compare each with the columns
first. A call that finds too few there (in a new process, or if the upkeep thread does not run)
ranks a sample of fixed size, and its victims are the lowest of that sample. The sample is made of
runs of neighbouring slots, since the chunks of one prompt are often in neighbouring slots. A chunk
whose child is in no run may be evicted before that child, which then cannot be reached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagoda.policy import Hints

# up to this number of slots, all are ranked within a call: about 1 ms
RANKED_AT_ONCE = 8192
# how many slots of a larger store a call ranks, if too few are queued
SAMPLE = 2048
# or this many for each victim, if that is more
_SAMPLED_FOR_EACH = 4
_NEIGHBOURS = 32  # slots in each run of the sample
# A queue that held recent slots would return a head before the tail that was stored after the queue
# was filled.
SHARE = 16
# of a sample: smaller, since only runs with the end of a prompt have any
_SAMPLE_SHARE = 64
_LEAST = 8
# A store of few slots is ranked for some calls together, but not for more than a quarter of it.
_CALLS_AHEAD = 4
_MOST_AHEAD = 4
LOW = 4  # less than this part of the queue is left: it should be filled again
_LOOK = 256  # entries examined at once
MOST_LOOKED_AT = 16 * _LOOK  # entries examined in one call
# up to this number, slots are searched one by one, which is cheaper than array operations
_FEW = 8
_FEW_LOOKS = 32
NOT_READY = np.iinfo(np.int64).max

Rows = NDArray[np.int64]
Ranks = NDArray[np.float64]
Flags = NDArray[np.bool_]
Chosen: TypeAlias = "Rows | slice"
"""Some slots of the columns, in ascending order, or all of them."""

_NONE: Rows = np.empty(0, np.int64)


class _PrefixTree(NamedTuple):
    """The columns of some slots at one moment, one row for each slot."""

    slots: Rows
    last_use: Rows
    generation: NDArray[np.uint64]
    ready: Flags
    above: Rows  # the row of the parent, or the row itself
    lost: Flags  # not reachable, because its parent was evicted
    kept: Rows  # rows with a child next to the chosen slots, of which nothing is known
    youngest: Rows  # recency of the youngest of the chunk and its descendants
    order: Rows  # the order of eviction for slots of one rank

    @classmethod
    def of(cls, hints: Hints, chosen: Chosen) -> _PrefixTree:
        last_use = hints.last_use[chosen].copy()
        generation = hints.generation[chosen].copy()
        # a slice is of all, or of none
        slots = np.arange(len(last_use)) if isinstance(chosen, slice) else chosen
        ready = last_use != NOT_READY
        above = np.arange(len(slots))
        parents = hints.parent_slot[chosen].copy()
        # a slice may be out of date: another process has let the store grow
        reach = len(slots) if isinstance(chosen, slice) else hints.slots
        child = np.flatnonzero(ready & (parents >= 0) & (parents < reach))
        parent = parents[child]
        parent_generation = hints.parent_generation[chosen][child]
        gone = hints.generation[parent] != parent_generation
        if isinstance(chosen, slice):
            above[child[~gone]] = parent[~gone]
        else:
            at, is_chosen = _places(slots, parent)
            linked = ~gone & is_chosen
            above[child[linked]] = at[linked]
        positions = hints.position[chosen].astype(np.int64)
        # all chunks of one request are as young as its head
        youngest = np.where(ready, last_use, 0) + positions
        _lift(youngest, above)
        youngest -= positions
        lost = np.zeros(len(slots), np.bool_)
        lost[child[gone]] = True
        _spread(lost, above)
        kept = (
            _NONE
            if isinstance(chosen, slice)
            else _parents_of_neighbours(hints, slots)
        )
        return cls(
            slots,
            last_use,
            generation,
            ready,
            above,
            lost,
            kept,
            youngest,
            np.where(lost, -positions, youngest),
        )


class _Snapshot:
    """Slots in the order of eviction that one pass over some of the columns found.

    `rows`: the slots. `rest`: slots that are not queued and not leased are at least as young as
    this stamp. `lapse`: when the first of the leases ends that kept slots out of the queue.
    """

    def __init__(
        self,
        tree: _PrefixTree,
        queued: Rows,
        ranks: Ranks,
        rest: int = 0,
        lapse: int = 0,
    ) -> None:
        self.rows = tree.slots[queued]
        self.ranks = ranks[queued]
        self.uses = tree.last_use[queued]
        self.generations = tree.generation[queued]
        self.youngest = tree.youngest[queued]
        at = np.full(len(ranks), -1)
        at[queued] = np.arange(len(queued))
        # the index of its parent in `rows`
        self.heir = np.where(
            tree.above[queued] == queued, -1, at[tree.above[queued]]
        )
        # it is an ancestor of a chunk that was queued but stays
        self.barred = np.zeros(len(queued), np.bool_)
        self.next = 0
        self.rest = rest
        self.lapse = lapse
        # a call has found too few entries here
        self.is_spent = False

    @classmethod
    def empty(cls, hints: Hints) -> _Snapshot:
        none = np.empty(0, np.int64)
        return cls(_PrefixTree.of(hints, slice(0)), none, np.empty(0))

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

    `rank` returns a new array with a finite number for each of some slots: the lowest is first,
    among equals the oldest. Not thread-safe, but `fill` may run at the same time as the other
    calls.
    """

    def __init__(
        self,
        hints: Hints,
        rank: Callable[[Chosen], Ranks],
    ) -> None:
        self._hints = hints
        self._rank = rank
        self._is_small = hints.slots <= RANKED_AT_ONCE
        # of all slots, and of the latest sample
        self._ranked = _Snapshot.empty(hints)
        self._nothing = _Snapshot.empty(hints)
        self._sampled = self._nothing
        self._samples = 0

    @property
    def is_low(self) -> bool:
        """Whether `fill` should be called soon; never for a store that is ranked within a call."""
        ranked = self._ranked
        left = len(ranked.rows) - ranked.next
        return not self._is_small and (
            ranked.is_spent or left * LOW <= len(ranked.rows)
        )

    def first(self, count: int, stamp: int, now: int) -> Rows:
        """Return the first `count` that are older than `stamp`; slots leased at `now` after all
        others.

        Of a sample, slots that have a child beside it, and then leased ones, are returned only if
        it has no others.
        """
        few = self._few(count, stamp, now) if count <= _FEW else None
        if few is not None:
            return np.array(few, np.int64)
        found, _ = self.unleased(count, stamp, now)
        is_whole = self._ranks_all(count)
        if len(found) < count and (is_whole or not len(found)):
            chosen = self._all() if is_whole else self._sample(count, stamp)
            others = self._others(chosen, found, stamp)[: count - len(found)]
            # when these are evicted, their ancestors may be evicted
            if len(others):
                self._ranked.lapse = 0
            return np.concatenate([found, others])
        return found

    def unleased(self, count: int, stamp: int, now: int) -> tuple[Rows, Ranks]:
        """Return the first `count` that are older than `stamp` and not leased at `now`, and their
        ranks.
        """
        ranked = self._ranked
        found = self._valid(ranked, count, stamp, now)
        if len(found) == count or (stamp <= ranked.rest and now < ranked.lapse):
            return ranked.rows[found], ranked.ranks[found]
        if self._ranks_all(count):
            self.fill(max(count, self._ahead(count)), stamp, now)
            ranked = self._ranked
            found = self._valid(ranked, count, stamp, now)
            return ranked.rows[found], ranked.ranks[found]
        ranked.is_spent = True
        rows = ranked.rows[found]
        others, ranks = self._from_sample(count, stamp, now)
        new = ~np.isin(others, rows)
        return (
            np.concatenate([rows, others[new]])[:count],
            np.concatenate([ranked.ranks[found], ranks[new]])[:count],
        )

    def fill(self, least: int, stamp: int, now: int) -> None:
        """Rank all slots and queue those older than `stamp` that are evicted first, at least
        `least` if there are as many.
        """
        count = max(_LEAST, self._hints.backed // SHARE, least)
        self._ranked = self._snapshot(self._all(), count, stamp, now)
        self._sampled = self._nothing

    def _ranks_all(self, count: int) -> bool:
        """Whether a call for that many victims ranks all slots: few may have chunks, or a sample
        would be half of them.
        """
        few = max(RANKED_AT_ONCE, count * _SAMPLED_FOR_EACH * 2)
        return self._is_small or few >= self._hints.backed

    def _ahead(self, count: int) -> int:
        """Return how many entries are queued for the calls after one for `count` victims."""
        return min(_CALLS_AHEAD * count, self._hints.backed // _MOST_AHEAD)

    def _all(self) -> slice:
        """Return the slots that may have chunks."""
        return slice(0, self._hints.backed)

    def _from_sample(
        self, count: int, stamp: int, now: int
    ) -> tuple[Rows, Ranks]:
        """Do the same as `unleased` for the latest sample, or a new one if that has too few."""
        sampled = self._sampled
        found = self._valid(sampled, count, stamp, now)
        if len(found) < count:
            chosen = self._sample(count, stamp)
            queued = max(len(chosen) // _SAMPLE_SHARE, count)
            sampled = self._snapshot(chosen, queued, stamp, now)
            self._sampled = sampled
            found = self._valid(sampled, count, stamp, now)
        return sampled.rows[found], sampled.ranks[found]

    def _sample(self, count: int, stamp: int) -> Rows:
        """Return the slots of a new sample for that many victims."""
        self._samples += 1
        size = max(SAMPLE, _SAMPLED_FOR_EACH * count)
        return sampled_slots(self._hints.backed, size, stamp + self._samples)

    def _few(self, count: int, stamp: int, now: int) -> list[int] | None:
        """Do the same as `_valid`, one entry at a time; None if the next few entries do not have
        `count` valid ones.
        """
        hints = self._hints
        batch = self._ranked
        found: list[int] = []
        for at in range(
            batch.next, min(batch.next + _FEW_LOOKS, len(batch.rows))
        ):
            row = int(batch.rows[at])
            same = hints.generation[row] == batch.generations[at]
            valid = same and hints.last_use[row] == batch.uses[at]
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

        Examines a limited number of entries: other processes may have evicted many.
        """
        hints = self._hints
        found: list[Rows] = []
        have = 0
        at = batch.next
        most = max(MOST_LOOKED_AT, _SAMPLED_FOR_EACH * count)
        end = min(len(batch.rows), at + most)
        while have < count and at < end:
            look = slice(at, at + _LOOK)
            rows = batch.rows[look]
            same = hints.generation[rows] == batch.generations[look]
            valid = same & (hints.last_use[rows] == batch.uses[look])
            free = valid & (hints.lease_until[rows] <= now)
            stay = at + np.flatnonzero(same & ~free & (batch.heir[look] >= 0))
            for one in stay[~batch.barred[batch.heir[stay]]].tolist():
                batch.bar(one)
            if at == batch.next:
                batch.next += int(valid.argmax()) if valid.any() else len(rows)
            found.append(
                at
                + np.flatnonzero(
                    free & (batch.youngest[look] < stamp) & ~batch.barred[look]
                )
            )
            have += len(found[-1])
            at += _LOOK
        return np.concatenate(found)[:count] if found else np.empty(0, np.int64)

    def _snapshot(
        self, chosen: Chosen, count: int, stamp: int, now: int
    ) -> _Snapshot:
        """Rank these slots and queue the first `count` that are older than `stamp`."""
        hints = self._hints
        tree = _PrefixTree.of(hints, chosen)
        lease_until = hints.lease_until[chosen]
        leased = tree.ready & (lease_until > now)
        ranks = self._rank(chosen)
        ranks[leased] = np.inf
        ranks[tree.kept] = np.inf
        _lift(ranks, tree.above)
        free = tree.ready & (ranks < np.inf)
        ranks[tree.lost] = -np.inf
        rows = np.flatnonzero(free & (tree.youngest < stamp))
        rows = rows[_lowest(ranks[rows], tree.order[rows], count)]
        # nothing is known of the slots outside of a sample
        if not isinstance(chosen, slice):
            return _Snapshot(tree, rows, ranks)
        free[rows] = False
        rest = min(stamp, int(tree.youngest[free].min(initial=NOT_READY)))
        lapse = int(lease_until[leased].min(initial=NOT_READY))
        return _Snapshot(tree, rows, ranks, rest, lapse)

    def _others(self, chosen: Chosen, but: Rows, stamp: int) -> Rows:
        """Return all others of these slots older than `stamp` in the order in which the leases on
        them and their descendants end.

        Some have no lease: they became free after the queue was filled, when another process
        evicted a descendant. They come first.
        """
        tree = _PrefixTree.of(self._hints, chosen)
        until = np.where(tree.ready, self._hints.lease_until[chosen], 0)
        _lift(until, tree.above)
        rows = np.flatnonzero(tree.ready & (tree.youngest < stamp))
        rows = rows[~np.isin(tree.slots[rows], but)]
        ordered: Rows = rows[np.lexsort((tree.order[rows], until[rows]))]
        return tree.slots[ordered]


def sampled_slots(slots: int, count: int, number: int) -> Rows:
    """Return about `count` of the slots, in ascending order: runs of neighbours.

    Another `number` gives other runs. They have no regular step, which could be that of prompts:
    then all runs would be in the same part of a prompt.
    """
    blocks = -(-slots // _NEIGHBOURS)
    runs = -(-count // _NEIGHBOURS)
    random = np.random.default_rng(number % 2**64)
    starts = np.unique(random.integers(0, blocks, runs))
    rows = starts[:, None] * _NEIGHBOURS + np.arange(_NEIGHBOURS)
    chosen: Rows = rows.ravel()
    return chosen[chosen < slots]


def _places(slots: Rows, wanted: Rows) -> tuple[Rows, Flags]:
    """Return the row of each wanted slot among the chosen ones, and whether it is one of them."""
    at = np.minimum(np.searchsorted(slots, wanted), len(slots) - 1)
    return at, slots[at] == wanted


def _parents_of_neighbours(hints: Hints, slots: Rows) -> Rows:
    """Return the rows of those of these slots that have a child in a slot next to a run of them."""
    beside = np.concatenate([slots - 1, slots + 1])
    beside = beside[(beside >= 0) & (beside < hints.slots)]
    beside = beside[~_places(slots, beside)[1]]
    beside = beside[hints.last_use[beside] != NOT_READY]
    parents = hints.parent_slot[beside]
    at, is_chosen = _places(slots, parents)
    beside = beside[is_chosen]
    at = at[is_chosen]
    linked = hints.generation[slots[at]] == hints.parent_generation[beside]
    rows: Rows = at[linked]
    return rows


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
