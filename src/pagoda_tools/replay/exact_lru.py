"""Least recently used by a dictionary: what `SimulatedTier` does with the policy `lru`, in a tenth
of its time.

`simulate` calls it, and simulates again with the policy itself after `NotExactError`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from pagoda.ledger.allocation import STAMP_STEP
from pagoda.ledger.transaction import BATCH
from pagoda.policy.eviction_queue import (
    LOW,
    MOST_LOOKED_AT,
    RANKED_AT_ONCE,
    SHARE,
)

_NO_PARENT = -1  # ids are natural numbers


class NotExactError(Exception):
    """The policy may evict other chunks than the dictionary."""


class LruTier:
    """Holds up to `chunks` ids. Deterministic; not thread-safe.

    The dictionary has the chunks in the order of eviction: by their last request, and of one
    request the tail first. So no parent is evicted before its child. The policy has the same order,
    at whatever time the requests come, but for two cases, in which `request` raises NotExactError:

    - The ids do not name whole prefixes: one follows another id than before, or is kept although
      one before it is not. The policy orders by descendants, and leases such chunks.
    - In a tier of many slots the ranked ones are used up within one request. The policy then takes
      victims from a sample. `_fill_queue` and `_look_at_queue` follow how many ranked ones are left
      in an `EvictionQueue`.

    After NotExactError the tier must not be used any more.
    """

    def __init__(self, chunks: int) -> None:
        self.written = self.evicted = self.refused = 0
        self._chunks = chunks
        # when each chunk that is kept was used last, the first to evict first
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._parents: dict[int, int] = {}
        self._uses = 0
        self._ranks_all = chunks <= RANKED_AT_ONCE
        # last uses of the ranked chunks, in ascending order
        self._queue: list[int] = []
        # how many of these chunks were neither used again nor evicted
        self._valid = 0
        # the first that was valid when victims were asked for
        self._next = 0
        self._is_spent = False

    def request(self, ids: Sequence[int]) -> int:
        """Look a prompt up and store it; return how many of its leading chunks were kept."""
        if len(ids) > STAMP_STEP:
            raise NotExactError
        kept = self._kept
        parents = self._parents
        free = self._chunks - len(kept)
        self._fill_queue(free)
        run = self._run(ids)
        self._leave_queue(ids[:run])
        new = ids[run:]
        if new:
            if len(set(new)) < len(new) or not parents.keys().isdisjoint(new):
                raise NotExactError
            # the chunks of one request are not evicted for each other
            self.refused += max(0, len(ids) - self._chunks)
            ids = ids[: self._chunks]
            new = ids[run:]
            before = ids[run - 1] if run else _NO_PARENT
            parents.update(zip(new, (before, *new), strict=False))
            self.written += len(new)
        for use, chunk in enumerate(reversed(ids), self._uses):
            kept[chunk] = use
            kept.move_to_end(chunk)
        self._uses += len(ids)
        self._make_room(len(new), free)
        return run

    def _run(self, ids: Sequence[int]) -> int:
        """Return how many leading chunks are kept."""
        parents = self._parents
        before = _NO_PARENT
        for at, chunk in enumerate(ids):
            parent = parents.get(chunk)
            if parent != before:
                if parent is not None:
                    raise NotExactError
                return at
            before = chunk
        return len(ids)

    def _make_room(self, new: int, free: int) -> None:
        """Evict for that many new chunks, of which `free` need no victim."""
        if self._ranks_all:
            self._evict(new - free)
            return
        # as `SimulatedTier.store`
        for begin in range(0, new, BATCH):
            count = min(BATCH, new - begin)
            if count > free:
                self._look_at_queue(count, count - free)
                self._evict(count - free)
            free = max(0, free - count)

    def _evict(self, count: int) -> None:
        """Evict that many chunks, if it is above 0."""
        for _ in range(count):
            chunk, _ = self._kept.popitem(last=False)
            del self._parents[chunk]
            self.evicted += 1

    def _fill_queue(self, free: int) -> None:
        """Rank the chunks if it is time, as `SimulatedTier.upkeep`."""
        if self._ranks_all or free * 8 >= self._chunks:
            return
        left = len(self._queue) - self._next
        if self._is_spent or left * LOW <= len(self._queue):
            count = self._chunks // SHARE
            self._queue = list(islice(self._kept.values(), count))
            self._valid = count
            self._next = 0
            self._is_spent = False

    def _leave_queue(self, used: Sequence[int]) -> None:
        """Note that these chunks are used again."""
        if self._valid:
            bound = self._queue[-1]
            queued = [chunk for chunk in used if self._kept[chunk] <= bound]
            self._valid -= len(queued)

    def _look_at_queue(self, count: int, needed: int) -> None:
        """Take `needed` of the `count` victims for which the policy is asked. Raise NotExactError
        if the queue has fewer.
        """
        if needed > self._valid:
            raise NotExactError
        uses = self._kept.values()
        first = self._next
        self._next = bisect_left(self._queue, next(iter(uses)))
        if count > self._valid:
            count = self._valid
            self._is_spent = True
        # the policy looks at that many entries, or some more
        if len(self._queue) - first > MOST_LOOKED_AT:
            last = next(islice(uses, count - 1, None))
            if last > self._queue[first + MOST_LOOKED_AT - 1]:
                raise NotExactError
        self._valid -= needed
