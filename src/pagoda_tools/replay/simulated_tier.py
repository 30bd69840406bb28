"""One simulated tier: a dictionary in place of the ledger's tables; the columns and the policies
are the ledger's own.

It does what `Ledger.match_prefix` and `Ledger.reserve` do for one process that stores at once, in
the same order. So the policy gets the same calls and names the same victims.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagoda.base.metrics import Reason
from pagoda.cache.lookup_call import LEASE_SECONDS
from pagoda.ledger.allocation import (
    ATTEMPTS,
    MOST_VICTIMS,
    PRESENT_LEASE_SECONDS,
    STAMP_STEP,
)
from pagoda.ledger.columns import NO_PARENT, NOT_READY, Columns
from pagoda.ledger.eviction_policy import GHOST_REASONS, Evictor
from pagoda.ledger.ghost_table import Marks
from pagoda.ledger.transaction import BATCH, window
from pagoda.policy.prefill_cost import PrefillCost
from pagoda.policy.request_hints import ContextWriter, RequestHint
from pagoda.tiers.remote.redis import GHOST_SECONDS
from pagoda.tiers.remote.redis_pool import mixed

_LEASE_NS = int(PRESENT_LEASE_SECONDS * 1e9)
_HIT_LEASE_NS = int(LEASE_SECONDS * 1e9)
_SHARE_NS = 1_000_000_000
_PREPARE_NS = 100_000_000
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_EVICTED = GHOST_REASONS.index(Reason.EVICTED)

Rows = NDArray[np.int64]


class Chain(NamedTuple):
    """The chunks of one request in order, each once; their marks; the time of the request (ns);
    what it says of itself; and for how long its prompt is retained.
    """

    ids: Sequence[int]
    marks: Marks
    now: int
    hint: RequestHint = RequestHint()
    retain_seconds: float = 0.0


class _Wanted:
    """The chunks to store for one request, and the result."""

    def __init__(self, chain: Chain, stamp: int) -> None:
        self.chain = chain
        self.stamp = stamp
        self.context = 0  # of new chunks
        # the hits with which each chunk begins
        self.hits = np.zeros(len(chain.ids), np.uint32)
        self.positions: list[int] = []  # positions of the chunks that were stored
        self.rows: list[int] = []


class _Filled:
    """The changes that one transaction publishes."""

    def __init__(self, parent: tuple[int, int] | None) -> None:
        self.link = parent  # row and generation of the parent of the next chunk
        self.positions: list[int] = []
        self.rows: list[int] = []
        self.parents: list[tuple[int, int]] = []
        self.links: dict[int, tuple[int, int]] = {}
        self.gone: list[int] = []  # rows of the victims
        self.passed_over: list[int] = []
        # the position of the first chunk that got no row
        self.full_at: int | None = None


class SimulatedTier:
    """Holds up to `chunks` ids. Deterministic; not thread-safe."""

    def __init__(
        self,
        chunks: int,
        policy: str,
        with_hints: bool = False,
        cost: PrefillCost | None = None,
    ) -> None:
        """Raise ValueError for an unknown policy, or for no room at all. `with_hints`: the policy
        sees what requests say of themselves. `cost`: see `Evictor`.
        """
        if chunks < 1:
            raise ValueError(
                f"a tier has room for at least one chunk, not {chunks}"
            )
        self.hits = self.written = self.evicted = self.refused = 0
        self._columns = Columns(None, chunks)
        self._columns.reset()
        self._hints: ContextWriter | None = None
        if with_hints:
            contexts = self._columns.note_contexts()
            self._hints = ContextWriter(contexts, self._columns.generation)
        self._advice = Evictor(policy, self._columns, cost)
        # in lru what was just asked for goes last anyway, as `exact_lru` counts on
        self._leases = policy != "lru"
        self._learnt = np.zeros(self._advice.shared_values)
        self._rows: dict[int, int] = {}
        self._ids: list[int] = []  # the id in each row
        self._generation = 1
        self._last_stamp = 0
        self._shared_at = self._prepared_at = -_SHARE_NS

    def residents(self) -> dict[int, int]:
        """The row of each id that is present."""
        return self._rows.copy()

    def upkeep(self, now: int) -> None:
        """Let the policy learn and look ahead if it is time, like a thread of the ledger."""
        is_full = self._free() * 8 < self._columns.capacity
        if is_full and self._advice.is_low:
            self._advice.rank(0, max(now, self._last_stamp), now)
        if self._advice.shared_values and now - self._shared_at >= _SHARE_NS:
            self._shared_at = now
            self._advice.share(self._learnt)
        if self._advice.shared_values and now - self._prepared_at >= _PREPARE_NS:
            self._prepared_at = now
            self._advice.prepare(now, now)

    def stamp(self, now: int) -> int:
        """The recency stamp of a request."""
        self._last_stamp = max(self._last_stamp + STAMP_STEP, now)
        return self._last_stamp

    def match(
        self, chain: Chain, start: int, stamp: int, asked: bool = True
    ) -> int:
        """Return how many chunks from `start` on are present without a hole; each gets a hit if
        `asked` for.
        """
        rows: list[int] = []
        for row in map(self._rows.get, chain.ids[start:] if start else chain.ids):
            if row is None:
                break
            rows.append(row)
        if rows:
            found = np.array(rows)
            columns = self._columns
            self._advice.touch(found, stamp - start - np.arange(len(rows)), asked)
            columns.parent_slot[found[1:]] = found[:-1]
            columns.parent_generation[found[1:]] = columns.generation[found[:-1]]
            self.hits += len(rows) if asked else 0
            if asked and self._leases:
                columns.lease(found, chain.now, _HIT_LEASE_NS)
        return len(rows)

    def touch(self, chain: Chain, begin: int, end: int, stamp: int) -> None:
        """Note that chunks [begin, end) were asked for and served by a tier above; touches those
        that are present.
        """
        here = [
            (i, row)
            for i in range(begin, end)
            if (row := self._rows.get(chain.ids[i])) is not None
        ]
        if here:
            positions, rows = np.array(here).T
            self._advice.touch(rows, stamp - positions, asked=True)

    def absent(self, chain: Chain, start: int, end: int) -> list[int]:
        """Return which of the chunks [start, end) are absent."""
        return [i for i in range(start, end) if chain.ids[i] not in self._rows]

    def store(self, chain: Chain, start: int, end: int, stamp: int) -> None:
        """Store the chunks [start, end), leading chunks first, as far as there is room and the
        policy admits them.
        """
        wanted = _Wanted(chain, stamp)
        known = self._rows
        if self._hints is not None:
            parent = known.get(chain.ids[start - 1]) if start else None
            wanted.context = self._hints.arriving(chain.hint, parent, stamp)
        refused: Reason | None = None
        most = window(self._columns.slots)
        for at in range(start, end, most):
            stop = min(at + most, end)
            refused = self._store_window(wanted, at, stop)
            if refused is Reason.NOT_ADMITTED:
                self._refuse(wanted, list(range(stop, end)))
            if refused is not None:
                break
        self.written += len(wanted.rows)
        if refused is not None:
            self.refused += len(self.absent(chain, start, end))
        if self._hints is not None:
            found = [known[each] for each in chain.ids if each in known]
            rows = np.array(found, np.int64)
            dropped = self._hints.answered(
                rows, chain.hint, wanted.context, stamp
            )
            for session in chain.hint.over:
                self._hints.end(session)
            self._advice.release(dropped)
            if chain.retain_seconds:
                self._advice.retain(rows, chain.now, chain.retain_seconds)

    def _store_window(
        self, wanted: _Wanted, start: int, end: int
    ) -> Reason | None:
        """Store the chunks [start, end), as one `reserve` and its commit; return why the rest got
        no row.
        """
        chain = wanted.chain
        new = self.absent(chain, start, end)
        if len(new) < end - start:
            known = self._rows
            have = [i for i in range(start, end) if chain.ids[i] in known]
            self._keep(chain, have, wanted.stamp)
        before = len(wanted.rows)
        hindrance: Reason | None = None
        for at in range(start, end, BATCH):
            stop = min(at + BATCH, end)
            batch = new
            if end - start > BATCH:
                batch = [i for i in new if at <= i < stop]
            allowed = stop
            if batch:
                allowed = self._admit(wanted, batch, stop, hindrance)
            if hindrance is None:
                hindrance = self._reserve(wanted, at, stop, allowed)
        # a slot that is being filled cannot be a victim: so all become ready only at the end
        rows = wanted.rows[before:]
        if rows:
            positions = np.array(wanted.positions[before:])
            self._columns.last_use[rows] = wanted.stamp - positions
        return hindrance

    def _keep(self, chain: Chain, positions: list[int], stamp: int) -> None:
        """Touch and lease the present chunks after a missing one, before their neighbours can be
        evicted for others.
        """
        rows = np.array([self._rows[chain.ids[i]] for i in positions])
        self._advice.touch(rows, stamp - np.array(positions), asked=False)
        self._columns.lease(rows, chain.now, _LEASE_NS)

    def _admit(
        self, wanted: _Wanted, new: list[int], end: int, hindrance: Reason | None
    ) -> int:
        """Ask the policy which newcomers of a batch are admitted; return from which position on
        none is.
        """
        if hindrance is Reason.NOT_ADMITTED:
            self._refuse(wanted, new)
        elif hindrance is None:
            marks = wanted.chain.marks[new]
            stamps = wanted.stamp - np.array(new)
            now = wanted.chain.now
            leading, wanted.hits[new] = self._advice.admit(
                marks,
                stamps,
                self._free(),
                now,
                arriving=wanted.context,
                stamp=wanted.stamp,
            )
            if leading < len(new):
                return new[leading]
        return end

    def _refuse(self, wanted: _Wanted, new: list[int]) -> None:
        """Tell the policy of requests for newcomers after one that was not admitted."""
        if new:
            chain = wanted.chain
            stamps = wanted.stamp - np.array(new)
            self._advice.refuse(
                chain.marks[new],
                stamps,
                chain.now,
                wanted.context,
                wanted.stamp,
            )

    def _reserve(
        self, wanted: _Wanted, start: int, end: int, allowed: int
    ) -> Reason | None:
        """Give each chunk of a batch a row, as long as there are rows; return why the rest got
        none.
        """
        passed_over = 0
        for _ in range(ATTEMPTS):
            looked = self._free() < end - start
            count = min(allowed - start + 4 * passed_over, MOST_VICTIMS)
            newest = wanted.stamp - STAMP_STEP + 1
            now = wanted.chain.now
            victims = (
                self._advice.victims(count, newest, now).tolist()
                if looked
                else []
            )
            filled = self._fill(wanted.chain.ids, start, end, allowed, victims)
            self._publish(wanted, filled)
            if filled.passed_over:
                rows = np.array(filled.passed_over)
                stamp = max(self.stamp(wanted.chain.now), wanted.stamp)
                self._advice.touch(rows, np.full(len(rows), stamp), asked=False)
            passed_over += len(filled.passed_over)
            if filled.full_at is None:
                return None if allowed == end else Reason.NOT_ADMITTED
            if looked and not victims:
                break
            start = filled.full_at
        return Reason.FULL

    def _fill(
        self,
        ids: Sequence[int],
        start: int,
        end: int,
        allowed: int,
        victims: list[int],
    ) -> _Filled:
        """Store the chunks [start, end), but none from `allowed` on, in one transaction."""
        known = self._rows
        generations = self._columns.generation
        parent = known.get(ids[start - 1]) if start else None
        filled = _Filled(
            None if parent is None else (parent, int(generations[parent]))
        )
        found = [known.get(chunk) for chunk in ids[start:end]]
        present = {row: int(generations[row]) for row in found if row is not None}
        rooms = self._rooms(victims, present, filled)
        for i, row in enumerate(found, start):
            if row is not None:
                if filled.link is not None:
                    filled.links[row] = filled.link
                filled.link = row, present[row]
                continue
            room = (
                next(rooms, None)
                if i < allowed and filled.full_at is None
                else None
            )
            if room is None:
                filled.full_at = (
                    i
                    if i < allowed and filled.full_at is None
                    else filled.full_at
                )
                filled.link = None
                continue
            known[ids[i]] = room
            self._ids[room] = ids[i]
            filled.positions.append(i)
            filled.rows.append(room)
            filled.parents.append(filled.link or (NO_PARENT, 0))
            filled.link = room, self._generation
            self._generation += 1
        return filled

    def _rooms(
        self, victims: list[int], present: Container[int], filled: _Filled
    ) -> Iterator[int]:
        """Yield free rows, then rows of victims, except chunks that the same transaction found
        present.
        """
        while len(self._ids) < self._columns.slots:
            self._ids.append(0)
            yield len(self._ids) - 1
        for row in victims:
            if row in present:
                filled.passed_over.append(row)
            else:
                del self._rows[self._ids[row]]
                filled.gone.append(row)
                yield row

    def _publish(self, wanted: _Wanted, filled: _Filled) -> None:
        columns = self._columns
        chain = wanted.chain
        if filled.gone:
            gone = np.array(filled.gone)
            marks = columns.keys[gone, 0]
            uses = columns.last_use[gone]
            hits = columns.hits[gone]
            contexts = columns.contexts_of(gone)
            columns.table.remember(
                marks, uses, hits, chain.now, _EVICTED, contexts
            )
            self.evicted += len(gone)
        if filled.rows:
            rows, positions, parents = map(
                np.array, (filled.rows, filled.positions, filled.parents)
            )
            marks = chain.marks[positions]
            columns.generation[rows] = np.arange(
                self._generation - len(rows), self._generation
            )
            columns.last_use[rows] = NOT_READY
            columns.lease_until[rows] = 0
            columns.hits[rows] = wanted.hits[positions]
            columns.keys[rows, 0] = marks
            columns.position[rows] = positions
            columns.parent_slot[rows] = parents[:, 0]
            columns.parent_generation[rows] = parents[:, 1]
            columns.table.forget(marks)
            if self._hints is not None:
                self._hints.put(rows, wanted.context)
            wanted.rows += filled.rows
            wanted.positions += filled.positions
        for row, (parent, generation) in filled.links.items():
            columns.parent_slot[row] = parent
            columns.parent_generation[row] = generation

    def _free(self) -> int:
        return self._columns.slots - len(self._ids)


class SecondSightTier(SimulatedTier):
    """Stores a chunk when a second request asks for it, like a Redis with
    write_policy=second_sight.
    """

    def __init__(self, chunks: int, policy: str) -> None:
        super().__init__(chunks, policy)
        # until when it is remembered that a chunk was asked for (ns)
        self._ghosts: dict[int, int] = {}

    def store(self, chain: Chain, start: int, end: int, stamp: int) -> None:
        """Store those of the chunks [start, end) that were asked for before."""
        begin = start
        for at in range(start, end):
            if (
                chain.ids[at] not in self._rows
                and self._ghosts.get(chain.ids[at], 0) <= chain.now
            ):
                self._ghosts[chain.ids[at]] = chain.now + int(GHOST_SECONDS * 1e9)
                super().store(chain, begin, at, stamp)
                begin = at + 1
        super().store(chain, begin, end, stamp)


def marks_of_ids(ids: Sequence[int]) -> Marks:
    """Return a mark for each id, as evenly spread as the first bytes of a key (the mixing of
    splitmix64).
    """
    return mixed(np.array(ids, np.uint64) + _GOLDEN)
