"""What happens behind a store: background threads bring chunks from host slots to the lower tiers, one each.

It holds no bytes, only notes of where they are; a chunk that is evicted before its turn is a counted drop. By policy:

    write_through   every chunk, in the order of storing
    selective       those that were hit often enough
    write_back      the coldest, ahead of their eviction, so that some slots are always clean
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from pagoda.cache.below import Batch, Below, Copy
from pagoda.cache.forks import renewed_after_fork
from pagoda.cache.storeys import stamp_of
from pagoda.cache.tally import Tally
from pagoda.config import WritePolicy
from pagoda.ledger import Reserved
from pagoda.ledger.columns import NOT_READY
from pagoda.metrics import Reason
from pagoda.tiers import HostTier
from pagoda.tiers.base import Tier

__all__ = ["Copy", "Descent", "Descents"]

log = logging.getLogger("pagoda.cache")

_TICK_SECONDS = 0.1  # between two looks for cold chunks
_CLEAN_SHARE = 8  # write_back keeps an eighth of the slots free or clean


class Descents:
    """The background writers of one cache, a lower tier each: a slow one keeps no other waiting. Thread-safe."""

    def __init__(self, each: Sequence[Descent]) -> None:
        self._each = tuple(each)

    @property
    def waiting(self) -> int:
        """Chunks that wait for their turn, for each tier they are to go to."""
        return sum(descent.waiting for descent in self._each)

    def stored(self, namespace: bytes, copies: Sequence[Copy], tiers: Sequence[Tier]) -> None:
        """Note that these chunks of one run lie in host slots, and may go to `tiers`; `namespace` is their root."""
        for descent in self._each:
            if descent.tier in tiers:
                descent.stored(namespace, copies)

    def used(self, namespace: bytes, copies: Iterable[Copy]) -> None:
        """Note that these chunks of one run were served from host slots; looks at them only if that matters."""
        listening = [descent for descent in self._each if descent.selective]
        run = list(copies) if listening else []
        for descent in listening:
            descent.used(namespace, run)

    def is_below(self, tier: Tier, rooms: Sequence[Reserved]) -> None:
        """Note that these host slots were filled from `tier`."""
        for descent in self._each:
            if descent.tier is tier:
                descent.is_below(rooms)

    def flush(self, timeout: float) -> bool:
        """Wait until all that was noted has been written or dropped; False if `timeout` seconds were not enough."""
        until = time.monotonic() + timeout
        done = [descent.flush(max(0.0, until - time.monotonic())) for descent in self._each]
        return all(done)

    def close(self, timeout: float) -> bool:
        """Write what can be written within `timeout` seconds, drop and count the rest, end all. Idempotent."""
        until = time.monotonic() + timeout
        done = [descent.close(max(0.0, until - time.monotonic())) for descent in self._each]
        return all(done)


class Descent:
    """The background writer of one lower tier. Thread-safe; the thread begins with the first chunk, anew after a fork.

    Waiting notes are bounded by the slots of the host tier (more could not all be valid).
    """

    def __init__(
        self,
        host: HostTier,
        below: Below,
        policy: WritePolicy,
        hits: int,
        tally: Tally,
    ) -> None:
        self._host = host
        self._columns = host.ledger.columns
        self._below = below
        self._policy = policy
        self._hits = hits
        self._tally = tally
        self._most = host.ledger.slots
        self.renew()
        renewed_after_fork(self)

    def renew(self) -> None:
        """Begin anew, with no thread and nothing waiting: what a parent noted, the parent writes."""
        self._changed = threading.Condition()
        self._queue: deque[Batch] = deque()
        self._waiting = 0  # copies in the queue
        self._working = False
        self._dirty: dict[int, tuple[Copy, Batch]] = {}  # write_back: by slot
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def selective(self) -> bool:
        """Whether it writes what is hit often."""
        return self._policy == "selective"

    @property
    def tier(self) -> Tier:
        """The tier that it writes to."""
        return self._below.tier

    @property
    def waiting(self) -> int:
        """Chunks that wait for their turn."""
        with self._changed:
            return self._waiting + len(self._dirty)

    # -- from the calls of the engine: never waits ----------------------------------------------------------------

    def stored(self, namespace: bytes, copies: Sequence[Copy]) -> None:
        """Note that these chunks of one run lie in host slots; `namespace` is the root of theirs."""
        fresh = self._below.unclean(copies) if self._policy != "selective" else []
        if not fresh:
            return
        batch = self._batch(namespace, fresh)
        if self._policy == "write_through":
            self._put(batch)
            return
        with self._awake():
            stale = sum(map(self._replaces, fresh))
            self._dirty.update((copy.slot, (copy, batch)) for copy in fresh)
        self._tally.count(f"drop_{Reason.STALE}", stale)

    def _replaces(self, copy: Copy) -> bool:
        """Whether another dirty chunk was evicted from this slot before it was written."""
        known = self._dirty.get(copy.slot)
        return known is not None and known[0].generation != copy.generation

    def used(self, namespace: bytes, copies: Iterable[Copy]) -> None:
        """Note that these chunks of one run were served from host slots: those that were hit often are written."""
        hits = self._columns.hits
        often = [copy for copy in copies if hits[copy.slot] >= self._hits]
        fresh = self._below.unclean(often)
        if fresh:
            self._put(self._batch(namespace, fresh))

    def is_below(self, rooms: Sequence[Reserved]) -> None:
        """Note that these host slots were filled from the tier."""
        self._below.note_clean(rooms)

    def _batch(self, namespace: bytes, copies: list[Copy]) -> Batch:
        return Batch(namespace, copies, stamp_of(self._below.tier))

    def _put(self, batch: Batch) -> None:
        with self._awake():
            room = 0 if self._closed else max(0, self._most - self._waiting)
            dropped = len(batch.copies) - room
            if dropped > 0:
                self._tally.count(f"drop_{Reason.CLOSED if self._closed else Reason.QUEUE_FULL}", dropped)
                batch = batch._replace(copies=batch.copies[:room])
            if batch.copies:
                self._queue.append(batch)
                self._waiting += len(batch.copies)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Hold the condition; whatever was changed, the thread notices afterwards."""
        with self._changed:
            yield
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._work, name=f"pagoda-descent-{self.tier.name}", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    # -- waiting for it -------------------------------------------------------------------------------------------

    def flush(self, timeout: float) -> bool:
        """Wait until all that was noted has been written or dropped; False if `timeout` seconds were not enough."""
        with self._changed:
            dirty, self._dirty = self._dirty, {}
        for batch in _regroup(dirty.values()):
            self._put(batch)
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._working, timeout)

    def close(self, timeout: float) -> bool:
        """Write what can be written within `timeout` seconds, drop and count the rest, end the thread. Idempotent."""
        flushed = self.flush(timeout)
        with self._changed:
            self._closed = True
            self._below.stopped.set()
            self._tally.count(f"drop_{Reason.CLOSED}", self._waiting)
            self._queue.clear()
            self._waiting = 0
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(1.0)
        return flushed

    # -- the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            try:
                self._below.write(batch)
            except Exception as trouble:  # noqa: BLE001  # a border: whatever it is, the thread lives on
                self._tally.count(f"drop_{Reason.IO_ERROR}", len(batch.copies))
                self._tally.warn(log, Reason.IO_ERROR, f"chunks were not written down: {trouble}", trouble)
            finally:
                with self._changed:
                    self._working = False
                    self._changed.notify_all()

    def _next(self) -> Batch | None:
        """The next batch to write, None when it is time to end; waits."""
        with self._changed:
            while True:
                if self._queue:
                    batch = self._queue.popleft()
                    self._waiting -= len(batch.copies)
                    self._working = True
                    return batch
                if self._closed:
                    return None
                self._changed.wait(_TICK_SECONDS if self._dirty else None)
                self._choose_cold()

    def _choose_cold(self) -> None:
        """Queue the coldest dirty chunks if fewer than a share of the slots are free or clean. Holds the condition."""
        columns = self._columns
        wanted = max(1, self._most // _CLEAN_SHARE) - int(np.count_nonzero(columns.last_use == NOT_READY))
        if not self._dirty or wanted <= 0:
            return
        coldest = self._host.ledger.next_to_go(wanted).tolist()
        chosen = [self._dirty.pop(slot) for slot in coldest if slot in self._dirty]
        live = [entry for entry in chosen if columns.generation[entry[0].slot] == entry[0].generation]
        self._tally.count(f"drop_{Reason.STALE}", len(chosen) - len(live))
        for batch in _regroup(live):
            self._queue.append(batch)
            self._waiting += len(batch.copies)


def _regroup(dirty: Iterable[tuple[Copy, Batch]]) -> list[Batch]:
    """The chosen copies as batches of the runs that they came from, each in the order of its chain."""
    runs: dict[int, tuple[Batch, list[Copy]]] = {}
    for copy, batch in dirty:
        runs.setdefault(id(batch), (batch, []))[1].append(copy)
    return [
        batch._replace(copies=sorted(copies, key=lambda c: c.position)) for batch, copies in runs.values()
    ]
