"""Hindsight: learn when chunks are asked for again, also from evicted ones, and keep the chunks
that are worth most.

`reuse_worth.worth` is the worth of a chunk of some class and age. The chunk of least worth is
evicted first. A newcomer that is worth less than every chunk that could be evicted for it is not
admitted; this begins when as many chunks were asked for again as there are slots. Before anything
is learned the order is least recently used: until some chunks were asked for again, nothing says
that a chunk is worth more or less with its age. The same applies while that order would have served
more (`ShadowLru`). Chunks that are said to be over go first there too. With contexts a newcomer
must also bring what its write costs (`write_price`). With the objective "compute" the worth of a
chunk is multiplied by what it saves (`prefill_cost`), and LRU is judged by the same (`WeighedLru`).

Chunks that were not asked for again are in the columns and their ghosts, which several processes
write together. Each process adds the chunks that were asked for again to the shared values.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagoda.policy import HITS_CELLS, LAST_USE_CELLS, Hints, Newcomers
from pagoda.policy.eviction_queue import (
    NOT_READY,
    Chosen,
    EvictionQueue,
    Ranks,
    Rows,
)
from pagoda.policy.prefill_cost import Costs, PrefillCost
from pagoda.policy.reuse_context import (
    ROWS,
    are_over,
    asked_again,
    hazards_in_context,
    known_contexts,
    row_of,
    worth_of_hazards,
)
from pagoda.policy.reuse_worth import (
    AGES,
    CLASSES,
    Table,
    age_of,
    age_of_one,
    class_of,
    class_of_one,
    tally,
    worth,
)
from pagoda.policy.write_price import WritePrice

# repeated requests within this time count as one use: LRU-K's correlated references
_AT_ONCE_NS = 1_000_000_000
_LEARN_SECONDS = 5.0
# the longest age of a queue; a pass takes at most a thousandth of that time
_STALE_NS = 1_000_000_000
_STALE_NS_A_SLOT = 100_000
# how many uses are remembered for each slot; beyond that all counts are halved
_MEMORY = 32
_CENSUS = 1 << 15  # how many slots and ghosts are sampled to learn
# Chunks asked for again before their ages count. If none is, the youngest seem to be worth least:
# all were young without being asked for, and few were old.
_LEAST_ASKED = 20
_MOST = 2.0**53  # all valid shared values are smaller

# `ShadowLru`
_BEHIND = 0.003  # Hindsight may serve less by this share of the requested chunks
# an old lead or lag counts at most this much
_MOST_AHEAD = 0.003
_MOST_BEHIND = 0.0045
_LOOKED_AT = 1 << 15
# share of the slots filled before the oldest is searched again: on average half a queue
_NEWER = 1 / 32


class ShadowLru:
    """Counts what was served, and what LRU would have served, without a second cache.

    LRU keeps the chunks that were used last, as many as there are slots (Mattson's stack, 1970).
    Slots and ghosts together have the last use of more chunks than that, independent of the
    evictions. So one number is enough, the last use of the oldest chunk that LRU would still have:
    it shows for every requested chunk whether LRU would have had it. Counts add up with those of
    the other processes. Not thread-safe.
    """

    shared_values: ClassVar[int] = 3

    def __init__(self, hints: Hints) -> None:
        self._hints = hints
        # last use of the oldest chunk that LRU would have; 0: it would have all
        self._oldest = 0
        # chunks asked for, served, and served by LRU; not yet shared
        self._here = [0, 0, 0]
        self.wins = False
        self._random = np.random.default_rng(1)

    def count(self, last_uses: Rows, served: int) -> None:
        """Count chunks that were asked for, by the stamps of their last use (0: unknown)."""
        if self._oldest:
            shadow = int(np.count_nonzero(last_uses >= self._oldest))
            here = self._here
            self._here = [
                here[0] + len(last_uses),
                here[1] + served,
                here[2] + shadow,
            ]

    def count_few(self, last_uses: Sequence[int]) -> None:
        """Count a few chunks that were asked for and served."""
        oldest = self._oldest
        if oldest:
            here = self._here
            here[0] += len(last_uses)
            here[1] += len(last_uses)
            here[2] += sum(last >= oldest for last in last_uses)

    @property
    def oldest(self) -> int:
        """The last use of the oldest chunk that LRU would have; 0: it would have all."""
        return self._oldest

    def look(self) -> None:
        """Find the oldest chunk that LRU would have; by a sample if there are many slots and
        ghosts.
        """
        hints = self._hints
        ghosts = self._hints.ghosts
        kept = hints.capacity * (1 - _NEWER)
        total = len(hints.last_use) + len(ghosts.last_use)
        if total > _LOOKED_AT:
            kept *= _LOOKED_AT / total
            at = self._random.integers(0, total, _LOOKED_AT)
            uses = _of_both(hints.last_use, ghosts.last_use, at)
        else:
            uses = np.concatenate([hints.last_use, ghosts.last_use])
        uses = uses[(uses > 0) & (uses != NOT_READY)]
        first = len(uses) - int(kept)
        self._oldest = (
            int(np.partition(uses, first)[first]) if 0 <= first < len(uses) else 0
        )

    def share(self, values: NDArray[np.float64], memory: float) -> None:
        """Add to the shared counts, halve them beyond `memory` chunks, and decide which wins. Call
        inside the gate.
        """
        values += self._here
        self._here = [0, 0, 0]
        if values[0] > memory:
            values /= 2
        asked, served, shadow = values.tolist()
        lead = min(
            max(served - shadow, -_MOST_BEHIND * asked), _MOST_AHEAD * asked
        )
        values[1] = max(0.0, shadow + lead)
        self.wins = bool(lead < -_BEHIND * asked)


class WeighedLru:
    """Counts the same as a `ShadowLru`, in computation that was saved. Of this process alone: the
    shared counts are of chunks, for processes with another objective too. Not thread-safe.
    """

    def __init__(self, shadow: ShadowLru, cost: PrefillCost) -> None:
        self._shadow = shadow
        self._cost = cost
        # what chunks asked for cost, those served, those served by LRU; and how many were asked for
        self._counts = [0.0, 0.0, 0.0, 0.0]
        self.wins = False

    def count(
        self, last_uses: Rows, positions: NDArray[np.integer], served: bool
    ) -> None:
        """Count chunks at these positions that were asked for, by the stamps of their last use (0:
        unknown).
        """
        oldest = self._shadow.oldest
        if oldest:
            costs = self._cost.of(positions)
            asked = float(costs.sum())
            counts = self._counts
            counts[0] += asked
            counts[1] += asked * served
            counts[2] += float(costs[last_uses >= oldest].sum())
            counts[3] += len(costs)

    def decide(self, memory: float) -> None:
        """Halve the counts beyond `memory` chunks, and decide which wins."""
        if self._counts[3] > memory:
            self._counts = [count / 2 for count in self._counts]
        asked, served, shadow, _ = self._counts
        lead = min(
            max(served - shadow, -_MOST_BEHIND * asked),
            _MOST_AHEAD * asked,
        )
        self._counts[1] = max(0.0, shadow + lead)
        self.wins = lead < -_BEHIND * asked


class _SharedValues(NamedTuple):
    """The shared values. `version` says which of the two copies of the worth is complete (a writer
    may be killed).
    """

    version: NDArray[np.float64]
    # when a process last began to learn: a stamp, in seconds
    learned_at: NDArray[np.float64]
    asked: Table
    watched: Table
    worth: NDArray[np.float64]  # two tables
    shadow: NDArray[np.float64]

    @classmethod
    def count(cls, rows: int) -> int:
        """Return how many values there are for tables of that many rows."""
        return 2 + 4 * rows * AGES + ShadowLru.shared_values

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> _SharedValues:
        end = len(values) - ShadowLru.shared_values
        tables = values[2:end].reshape(4, -1, AGES)
        return cls(
            values[0:1],
            values[1:2],
            tables[0],
            tables[1],
            tables[2:],
            values[end:],
        )

    def current(self) -> Table:
        """Return the complete copy."""
        copy: Table = self.worth[int(self.version[0]) % 2]
        return copy


class Hindsight:
    """Keeps the chunks that are worth most. Not thread-safe, but `prepare` may run during the other
    calls.
    """

    # without contexts
    shared_values = _SharedValues.count(CLASSES)

    def __init__(self, hints: Hints, cost: PrefillCost | None = None) -> None:
        """`cost`: what a chunk saves; None: each saves the same."""
        self._hints = hints
        self._cost = cost
        # of the tables: see `_row_of`
        self._rows = CLASSES if hints.contexts is None else ROWS
        self.shared_values = _SharedValues.count(self._rows)
        # `me` holds the queue; weak, so that a closed store frees its columns immediately
        me = weakref.proxy(self)
        self._queue = EvictionQueue(hints, lambda chosen: me._ranks(chosen))
        self._shadow = ShadowLru(hints)
        self._weighed = None if cost is None else WeighedLru(self._shadow, cost)
        # counted here, not yet shared
        self._asked = np.zeros((self._rows, AGES))
        self._watched = np.zeros((self._rows, AGES))
        # None: nothing is known of newcomers that tells them apart
        self._price = (
            None if hints.contexts is None else WritePrice(hints.capacity)
        )
        # counts of all processes, when they were last shared
        self._known = self._asked, self._watched
        self._worth = self._worth_of(*self._known)
        self._version = 0.0
        self._stamp = 0  # recency stamp of the latest call
        self._filled_at = 0
        self._room = 0  # free slots when the latest newcomers arrived
        self._elected = False
        self._to_publish = False
        self._refuses = False  # whether enough has been seen to refuse newcomers
        self._knows_ages = False  # whether enough has been asked for again
        self._random = np.random.default_rng(0)

    def touch(self, rows: Rows, stamps: Rows, asked: bool = True) -> None:
        """Raise the recency of these slots, and count after which age each was asked for again."""
        last_uses = self._hints.last_use[rows]
        contexts = self._hints.contexts
        # as in `lru.raise_recency`, but the columns are read once
        older = last_uses < stamps
        self._hints.last_use[rows[older]] = stamps[older]
        if asked and len(rows):
            ready = last_uses != NOT_READY
            last_uses = last_uses[ready]
            before = None
            if contexts is not None:
                generations = self._hints.generation[rows]
                before = known_contexts(contexts, rows, generations)
                contexts.of_slots[rows] = asked_again(before)
                before = before[ready]
            self._note(
                self._hints.hits[rows[ready]], stamps[ready] - last_uses, before
            )
            self._shadow.count(last_uses, len(last_uses))
            if self._weighed is not None:
                positions = self._hints.position[rows[ready]]
                self._weighed.count(last_uses, positions, served=True)
            self._stamp = max(self._stamp, int(stamps[0]))

    def touch_few(
        self, slots: Sequence[int], stamps: Sequence[int], asked: bool = True
    ) -> None:
        """Do the same for few slots, one by one."""
        hints = self._hints
        if hints.contexts is not None or self._weighed is not None:
            # an empty array without a type has floats, which are no rows
            rows = np.array(slots, np.int64)
            self.touch(rows, np.array(stamps, np.int64), asked)
            return
        last_use = hints.cells[LAST_USE_CELLS]
        before: list[int] = []
        for slot, stamp in zip(slots, stamps, strict=True):
            last = last_use[slot]
            if last < stamp:
                last_use[slot] = stamp
                before.append(last)
                if asked and stamp - last >= _AT_ONCE_NS:
                    hits = hints.cells[HITS_CELLS][slot]
                    place = class_of_one(hits), age_of_one(stamp - last)
                    self._asked[place] += 1
                    self._watched[place] += 1
            elif last != NOT_READY:
                before.append(last)
        if asked and slots:
            self._shadow.count_few(before)
            self._stamp = max(self._stamp, stamps[0])

    def admit(self, newcomers: Newcomers, room: int, now: int) -> int:
        """Admit those worth at least as much as their victims; a head is worth at least as much as
        its tail.
        """
        total = len(newcomers.stamps)
        self._room = room
        known = newcomers.last_use > 0
        before = newcomers.contexts
        if known.any():
            self._note(
                newcomers.hits[known],
                newcomers.stamps[known] - newcomers.last_use[known],
                None if before is None else before[known],
            )
        self._shadow.count(newcomers.last_use, 0)
        costs: Costs | None = None
        if self._cost is not None and self._weighed is not None:
            positions = newcomers.stamp - newcomers.stamps
            costs = self._cost.mean(positions)
            self._weighed.count(newcomers.last_use, positions, served=False)
        if total <= room or not self._refuses or self._lru_wins:
            return total
        self._stamp = max(self._stamp, int(newcomers.stamps[0]))
        rows, ranks = self._queue.unleased(
            total - room, int(newcomers.stamps[-1]), now
        )
        arriving = np.full(total, newcomers.arriving, np.uint16)
        kinds = self._row_of(newcomers.hits + known, arriving)
        worths = self._worth[kinds, 0]
        if costs is not None:
            worths = worths * costs
        beyond = slice(room, room + len(rows))
        worths = np.maximum.accumulate(worths[::-1])[::-1][beyond]
        unworthy = worths < ranks
        if self._price is not None:
            self._price.note(ranks)
            unworthy |= self._price.too_dear(kinds, costs)[beyond]
        lesser = np.flatnonzero(unworthy)
        return room + int(lesser[0]) if len(lesser) else total

    @property
    def _lru_wins(self) -> bool:
        """Whether LRU would have served more, by what is counted here."""
        rival = self._weighed
        return self._shadow.wins if rival is None else rival.wins

    def victims(self, count: int, stamp: int, now: int) -> Rows:
        """Return the slots of least worth that are older than `stamp`; slots leased at `now` after
        all others.
        """
        self._stamp = max(self._stamp, stamp)
        return self._queue.first(count, stamp, now)

    @property
    def is_low(self) -> bool:
        """Whether `rank` should be called soon."""
        return self._queue.is_low

    def prepare(self, stamp: int, now: int) -> None:
        """Learn, if it is this process's turn, and rank all slots if few ranked ones are left, or
        the ranks are old.
        """
        self._stamp = max(self._stamp, stamp)
        if self._elected:
            self._elected = False
            asked, watched = self._known
            self._worth = self._worth_of(asked, watched + self._census(stamp))
            self._to_publish = True
        stale = (
            not 0
            <= stamp - self._filled_at
            < max(_STALE_NS, _STALE_NS_A_SLOT * self._hints.slots)
        )
        # otherwise nothing must be evicted soon
        if (stale or self.is_low) and self._room * 8 < self._hints.capacity:
            self.rank(0, stamp, now)

    def rank(self, least: int, stamp: int, now: int) -> None:
        """Rank all slots: at least the first `least` are then known."""
        self._filled_at = stamp
        self._queue.fill(least, stamp, now)

    def share(self, values: NDArray[np.float64]) -> None:
        """Add up the counts of all processes, publish or take over what was learned, and elect the
        next to learn.
        """
        learned = _SharedValues.of(values)
        _forget_damaged(values)
        self._count_forgotten()
        for own, shared in (
            (self._asked, learned.asked),
            (self._watched, learned.watched),
        ):
            np.add(shared, own, out=shared)
            own[:] = 0
        self._halve_old(learned)
        memory = _MEMORY * self._hints.capacity
        self._shadow.share(learned.shadow, memory)
        if self._weighed is not None:
            self._weighed.decide(memory)
        asked = learned.asked.sum()
        self._refuses = bool(asked >= self._hints.capacity)
        self._knows_ages = bool(asked >= _LEAST_ASKED)
        if self._to_publish:
            self._to_publish = False
            learned.worth[(int(learned.version[0]) + 1) % 2] = self._worth
            learned.version[0] += 1
        elif learned.version[0] != self._version:
            self._worth = learned.current().copy()
        self._version = float(learned.version[0])
        seconds = self._stamp / 1e9
        if not 0 <= seconds - learned.learned_at[0] < _LEARN_SECONDS:
            learned.learned_at[0] = seconds
            self._elected = True
            self._known = (learned.asked.copy(), learned.watched.copy())

    def _halve_old(self, learned: _SharedValues) -> None:
        """Halve the counts if they remember more than they should."""
        if learned.watched.sum() > _MEMORY * self._hints.capacity:
            learned.asked[:] /= 2
            learned.watched[:] /= 2

    def _count_forgotten(self) -> None:
        """Count the ghosts that were replaced: their chunks were never asked for again."""
        for hits, ages, contexts in self._hints.forgotten():
            self._watched += self._tally(hits, ages, contexts)

    def _row_of(
        self,
        hits: NDArray[np.integer],
        contexts: NDArray[np.uint16] | None,
    ) -> Rows:
        """Return the row of the tables for chunks with these hits and contexts."""
        if contexts is None or self._rows == CLASSES:
            return class_of(hits)
        return row_of(hits, contexts)

    def _worth_of(self, asked: Table, watched: Table) -> Table:
        if self._rows == CLASSES:
            return worth(asked, watched)
        hazard, by_kind = hazards_in_context(asked, watched)
        if self._price is not None:
            self._price.learn(hazard)
        return worth_of_hazards(hazard, by_kind)

    def _tally(
        self,
        hits: NDArray[np.integer],
        ages_ns: Rows,
        contexts: NDArray[np.uint16] | None,
        weight: float = 1.0,
    ) -> Table:
        rows = self._row_of(hits, contexts)
        return tally(rows, age_of(ages_ns), weight, self._rows)

    def _note(
        self,
        hits: NDArray[np.uint32],
        ages_ns: Rows,
        contexts: NDArray[np.uint16] | None,
    ) -> None:
        """Count chunks with these hits and contexts that were asked for again at these ages."""
        later = ages_ns >= _AT_ONCE_NS
        if later.any():
            if contexts is not None:
                contexts = contexts[later]
            seen = self._tally(hits[later], ages_ns[later], contexts)
            self._asked += seen
            self._watched += seen

    def _census(self, stamp: int) -> Table:
        """Count the ages of chunks that were not asked for again yet, kept or not; takes a sample
        if there are many.
        """
        hints = self._hints
        ghosts = self._hints.ghosts
        weight = 1.0
        total = len(hints.last_use) + len(ghosts.last_use)
        contexts = None
        if total > _CENSUS:
            at = self._random.integers(0, total, _CENSUS)
            uses = _of_both(hints.last_use, ghosts.last_use, at)
            hits = _of_both(hints.hits, ghosts.hits, at)
            weight = total / _CENSUS
            if hints.contexts is not None:
                contexts = _of_both(
                    self._contexts_of(slice(None)), hints.contexts.of_ghosts, at
                )
        else:
            uses = np.concatenate([hints.last_use, ghosts.last_use])
            hits = np.concatenate([hints.hits, ghosts.hits])
            if hints.contexts is not None:
                contexts = np.concatenate(
                    [
                        self._contexts_of(slice(None)),
                        hints.contexts.of_ghosts[: len(ghosts.last_use)],
                    ]
                )
        there = (uses != NOT_READY) & (uses > 0)
        known = None if contexts is None else contexts[there].astype(np.uint16)
        return self._tally(hits[there], stamp - uses[there], known, weight)

    def _contexts_of(self, chosen: Chosen) -> NDArray[np.uint16]:
        """Return what is known of the chunks in these slots."""
        contexts = self._hints.contexts
        assert contexts is not None
        generations = self._hints.generation[chosen]
        return known_contexts(contexts, chosen, generations)

    def _ranks(self, chosen: Chosen) -> Ranks:
        hints = self._hints
        uses = hints.last_use[chosen].copy()
        if isinstance(chosen, slice):
            self._shadow.look()
        contexts = None
        if hints.contexts is not None:
            contexts = self._contexts_of(chosen)
        by_last_use = self._lru_wins or not self._knows_ages
        if by_last_use and contexts is None:
            return np.zeros(len(uses))
        rows = self._row_of(hints.hits[chosen], contexts)
        ranks = self._worth[rows, age_of(self._stamp - uses)]
        if self._cost is not None:
            ranks *= self._cost.mean(hints.position[chosen])
        if by_last_use and contexts is not None:
            # what is over goes first in that order too, until such chunks are asked for
            unasked = are_over(contexts) & (ranks <= 0)
            ranks = np.where(unasked, -1.0, 0.0)
        ranks[uses == NOT_READY] = 0
        return ranks


class HintedHindsight(Hindsight):
    """Hindsight in a process that is given request hints, in a store whose shared values have none.

    What it learns of contexts stays in this process, 4 MB, and ends with it. The shared values
    get the same counts by class, so that processes without hints, and later ones, learn as before.
    As thread-safe as Hindsight.
    """

    def __init__(self, hints: Hints, before: Hindsight) -> None:
        """Go on from `before`, which learned without contexts. The columns have them by now."""
        super().__init__(hints, before._cost)
        # in place of the shared values
        self._own = np.zeros(self.shared_values)
        self.shared_values = before.shared_values
        # counted here by class, not yet shared
        self._asked_of_classes = before._asked.copy()
        self._watched_of_classes = before._watched.copy()
        # the shared counts when this process last added to them
        self._seen = np.zeros((2, CLASSES, AGES))
        self._shadow = before._shadow
        self._weighed = before._weighed
        self._refuses = before._refuses
        self._knows_ages = before._knows_ages
        self._room = before._room
        self._stamp = before._stamp
        self._known = np.zeros_like(self._asked), np.zeros_like(self._asked)
        for table, known in zip(self._known, before._known, strict=True):
            table[:CLASSES] = known
        self._worth = self._worth_of(*self._known)

    def share(self, values: NDArray[np.float64]) -> None:
        """Learn from what the others counted without contexts, let them learn from this process,
        and learn of contexts.
        """
        _forget_damaged(values)
        shared = _SharedValues.of(values)
        own = _SharedValues.of(self._own)
        counts = shared.asked, shared.watched
        for mine, theirs, seen in zip(
            (own.asked, own.watched), counts, self._seen, strict=True
        ):
            # nothing is known of their chunks: workload 0. Less than before: all were halved.
            mine[:CLASSES] += np.maximum(theirs - seen, 0)
        own.shadow[:] = shared.shadow
        super().share(self._own)
        shared.shadow[:] = own.shadow
        shared.asked[:] += self._asked_of_classes
        shared.watched[:] += self._watched_of_classes
        self._asked_of_classes[:] = 0
        self._watched_of_classes[:] = 0
        self._halve_old(shared)
        self._seen = np.array(counts)

    def _count_forgotten(self) -> None:
        for hits, ages, contexts in self._hints.forgotten():
            self._watched += self._tally(hits, ages, contexts)
            self._watched_of_classes += tally(class_of(hits), age_of(ages))

    def _note(
        self,
        hits: NDArray[np.uint32],
        ages_ns: Rows,
        contexts: NDArray[np.uint16] | None,
    ) -> None:
        super()._note(hits, ages_ns, contexts)
        later = ages_ns >= _AT_ONCE_NS
        seen = tally(class_of(hits[later]), age_of(ages_ns[later]))
        self._asked_of_classes += seen
        self._watched_of_classes += seen


def _forget_damaged(values: NDArray[np.float64]) -> None:
    """Start again if there are values that no process writes."""
    if not ((values >= 0) & (values < _MOST)).all():
        values[:] = 0


def _of_both(
    kept: NDArray[np.integer], ghosts: NDArray[np.integer], at: Rows
) -> NDArray[np.int64]:
    """Return these values of a column of the slots that is continued by the same of the ghosts."""
    # most are ghosts: all are read as if they were, which takes less than to divide them
    behind = at - len(kept)
    values = ghosts[np.maximum(behind, 0)].astype(np.int64)
    inside = np.flatnonzero(behind < 0)
    values[inside] = kept[at[inside]]
    return values
