"""Write-back: background threads, one a lower tier, write what was stored above and keep alive there what is used.

Their queues hold notes of chunks in host slots, and staging buffers for what has no slot. A chunk that is evicted from
its slot before its turn is a counted drop. By policy there are written

    write_through   every chunk, in the order of storing
    selective       those that were hit often enough
    write_back      the coldest, ahead of their eviction, so that some slots are always clean

and whatever the policy, what was put into a staging buffer. What is served from above is touched below, some moments
later and many chunks at once, so that it does not grow old there; and what turns out to be missing is written again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from pagoda.cache.below import Batch, Below, Copy, Generations, Leased, Slots, Use, follows
from pagoda.cache.counters import Tally
from pagoda.cache.tier_stack import let_in, stamp_of
from pagoda.config import WritePolicy
from pagoda.fork import renewed_after_fork
from pagoda.ledger import Reserved
from pagoda.ledger.columns import NOT_READY
from pagoda.metrics import Reason
from pagoda.threads import Condition, begin
from pagoda.tiers import HostTier
from pagoda.tiers.base import Done, Tier, runs

__all__ = ["Copy", "Descent", "Descents"]

log = logging.getLogger("pagoda.cache")

_TICK_SECONDS = 0.1  # between two looks for cold chunks
_GATHER_SECONDS = 0.2  # uses are gathered before the tier is told of them
_MOST_USED = 1 << 16  # chunks in notes of uses; the oldest notes give way
_MOST_PIECE = 16  # chunks handed to a tier at once; two pieces are in its hands at most
_WRITE_SECONDS = 60.0  # a write that takes longer is not waited for
_CLEAN_SHARE = 8  # write_back keeps an eighth of the slots free or clean


class Descents:
    """The background writers of one cache, a lower tier each: a slow one keeps no other waiting. Thread-safe."""

    def __init__(self, each: Sequence[Descent]) -> None:
        self._each = tuple(each)

    @property
    def waiting(self) -> int:
        """Chunks that wait for their turn, for each tier they are to go to."""
        return sum(descent.waiting for descent in self._each)

    def stored(
        self, namespace: bytes, copies: Sequence[Copy], tiers: Sequence[Tier], stamps: Sequence[int | None] = ()
    ) -> None:  # fmt: skip
        """Note that these chunks of one run lie in host slots or staging buffers, and may go to `tiers`.

        `namespace` is their root; `stamps` those of the run, a tier each. A staging buffer is made for as many tiers.
        """
        for descent in self._each:
            if descent.tier in tiers:
                stamp = stamps[tiers.index(descent.tier)] if stamps else stamp_of(descent.tier)
                descent.stored(namespace, copies, stamp)

    def know(self, slots: Slots, generations: Generations) -> bool:
        """Whether no tier need be told of what lies in these host slots."""
        return all(descent.knows(slots, generations) for descent in self._each)

    def used(self, use: Use) -> None:
        """Note that chunks were served. Never waits, and asks no tier."""
        for descent in self._each:
            descent.used(use)

    def is_below(self, tier: Tier, rooms: Sequence[Reserved]) -> None:
        """Note that these host slots were filled from `tier`."""
        for descent in self._each:
            if descent.tier is tier:
                descent.is_below(rooms)

    def handed(self, timeout: float) -> bool:
        """Wait until the tiers have what was noted in their queues; False if that takes longer."""
        return self._all(Descent.handed, timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until all that was noted has been written or dropped; False if `timeout` seconds were not enough."""
        return self._all(Descent.flush, timeout)

    def close(self, timeout: float) -> bool:
        """Write what can be written within `timeout` seconds, drop and count the rest, end all. Idempotent."""
        return self._all(Descent.close, timeout)

    def _all(self, wait: Callable[[Descent, float], bool], timeout: float) -> bool:
        until = time.monotonic() + timeout
        done = [wait(descent, max(0.0, until - time.monotonic())) for descent in self._each]
        return all(done)


class Descent:
    """The background writer of one lower tier. Thread-safe; the thread begins with the first note, anew after a fork.

    Notes to write are bounded by the slots of the host tier (more could not all be valid) and the staging buffers.
    """

    def __init__(
        self,
        host: HostTier | None,
        below: Below,
        policy: WritePolicy,
        hits: int,
        queue_chunks: int,
        tally: Tally,
    ) -> None:
        self._host = host
        self._below = below
        self._policy = policy
        self._hits = hits
        self._tally = tally
        self._slots = host.ledger.slots if host is not None else 0
        self._piece = max(1, min(_MOST_PIECE, queue_chunks // 2))
        self.renew()
        renewed_after_fork(self)

    def renew(self) -> None:
        """Begin anew, with no thread and nothing waiting: what a parent noted, the parent writes."""
        self._changed = Condition()
        self._queue: deque[Batch] = deque()
        self._uses: deque[tuple[Use, int | None]] = deque()  # with their stamps
        self._due = 0.0  # when the tier is told of the uses (time.monotonic())
        self._used = 0  # chunks in the notes of uses
        self._waiting = 0  # copies in the queue
        self._writing = 0  # copies in the hands of the tier
        self._working = False  # on a note
        self._dirty: dict[int, tuple[Copy, Batch]] = {}  # write_back: by slot
        self._closed = False
        self._thread: threading.Thread | None = None

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

    def stored(self, namespace: bytes, copies: Sequence[Copy], stamp: int | None) -> None:
        """Note that these chunks of one run are to be written; `namespace` is the root of theirs."""
        if copies and copies[0].staged is not None:
            self._put(Batch(namespace, list(copies), stamp))
        elif self._policy != "selective" and (fresh := self._below.unsettled(copies)):
            batch = Batch(namespace, fresh, stamp)
            if self._policy == "write_through":
                self._put(batch)
            else:
                self._soil(batch)

    def knows(self, slots: Slots, generations: Generations) -> bool:
        """Whether the tier need not be told of what lies in these host slots."""
        return self._policy == "selective" or self._below.knows(slots, generations)

    def used(self, use: Use) -> None:
        """Note that chunks were served, for the tier to be told of it soon."""
        stamp = stamp_of(self.tier)
        if use.source is self.tier and stamp is not None:
            return  # it keeps recency itself, and has noted this when it was asked
        if use.where is not None and self._below.knows(*use.where):
            return
        with self._changed:
            if self._closed:
                return
            if not self._uses:
                self._due = time.monotonic() + _GATHER_SECONDS
            if not self._uses or self._thread is None:
                self._wake()
            self._used += use.chunks  # no signal handler runs between this and the end of the append
            self._uses.append((use, stamp))
            while self._used > _MOST_USED and len(self._uses) > 1:
                self._used -= self._uses.popleft()[0].chunks

    def is_below(self, rooms: Sequence[Reserved]) -> None:
        """Note that these host slots were filled from the tier."""
        self._below.settle(rooms)

    def _soil(self, batch: Batch) -> None:
        """Note that chunks are to be written before they are evicted."""
        with self._changed:
            fresh = [copy for copy in batch.copies if not self._is_dirty(copy)]
            stale = sum(copy.slot in self._dirty for copy in fresh)  # evicted before they were written
            self._dirty.update((copy.slot, (copy, batch)) for copy in fresh)
            self._wake()
        self._tally.count(f"drop_{Reason.STALE}", stale)

    def _is_dirty(self, copy: Copy) -> bool:
        known = self._dirty.get(copy.slot)
        return known is not None and known[0].generation == copy.generation

    def _put(self, batch: Batch) -> None:
        """Queue a batch. What it does not take is dropped, counted."""
        staged = batch.copies[0].staged is not None
        with self._changed:
            room = len(batch.copies) if staged else max(0, self._slots - self._waiting)
            room, reason = (0, Reason.CLOSED) if self._closed else (room, Reason.QUEUE_FULL)
            late = batch.copies[room:]
            batch = batch._replace(copies=batch.copies[:room])
            self._due = 0.0  # what was used before is told before: being written raises its recency
            number = len(batch.copies)
            if number:  # no signal handler runs between here and the end of the append
                self._waiting += number
                self._queue.append(batch)
                self._wake()
        self._drop(late, reason)

    def _wake(self) -> None:
        """Let the thread notice what was changed. Holds the lock."""
        if self._thread is None and not self._closed:
            name = f"pagoda-descent-{self.tier.name}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread = thread if begin(thread) else None  # what is noted waits for the next call
        self._changed.notify_all()

    # -- waiting for it -------------------------------------------------------------------------------------------

    def handed(self, timeout: float) -> bool:
        """Wait until the tier has been given what was noted; False if that takes longer."""
        with self._changed:
            return self._wait_for(lambda: not (self._queue or self._working), timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until all that was noted has been written or dropped; False if `timeout` seconds were not enough."""
        until = time.monotonic() + timeout
        with self._changed:
            self._due = 0.0
            told = self._wait_for(lambda: not (self._uses or self._working), timeout)
            dirty, self._dirty = self._dirty, {}
        for batch in _regroup(dirty.values()):
            self._put(batch)
        with self._changed:
            return self._wait_for(self._is_done, max(0.0, until - time.monotonic())) and told

    def _wait_for(self, done: Callable[[], bool], timeout: float) -> bool:
        """Wait until the thread has done something; not if there is none, and none can be started. Holds the lock."""
        if done():
            return True
        self._wake()
        return self._thread is not None and self._changed.wait_for(done, timeout)

    def _is_done(self) -> bool:
        return not (self._queue or self._uses or self._working or self._writing)

    def close(self, timeout: float) -> bool:
        """Write what can be written within `timeout` seconds, drop and count the rest, end the thread. Idempotent."""
        flushed = self.flush(timeout)
        with self._changed:
            self._closed = True
            self._below.stopped.set()
            left = [copy for batch in self._queue for copy in batch.copies]
            self._queue.clear()
            self._uses.clear()
            self._waiting = 0
            self._changed.notify_all()
            thread = self._thread
        self._drop(left, Reason.CLOSED)
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
        return flushed

    def _drop(self, copies: Sequence[Copy], reason: Reason) -> None:
        """Count what is not written, and give its buffers back."""
        self._tally.count(f"drop_{reason}", len(copies))
        for copy in copies:
            if copy.staged is not None:
                copy.staged.ended(Done(False, reason))

    # -- the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (note := self._next()) is not None:
            try:
                self._write(note if isinstance(note, Batch) else self._batch_of(*note))
            finally:
                self._rest()

    def _rest(self) -> None:
        """The note is done with."""
        with self._changed:
            self._working = False
            self._changed.notify_all()

    def _next(self) -> Batch | tuple[Use, int | None] | None:
        """The next note; None when it is time to end. Waits."""
        with self._changed:
            while (note := self._taken()) is None:
                if self._closed:
                    return None
                self._changed.wait(self._pause())
                self._choose_cold()
            self._working = True
            return note

    def _taken(self) -> Batch | tuple[Use, int | None] | None:
        """The next note, if it is time for one. Holds the lock."""
        if self._uses and self._due <= time.monotonic():
            use, stamp = self._uses.popleft()
            self._used -= use.chunks
            return use, stamp
        if not self._queue:
            return None
        batch = self._queue.popleft()
        while self._queue and _goes_on(batch, self._queue[0]):
            batch.copies.extend(self._queue.popleft().copies)
        self._waiting -= len(batch.copies)
        return batch

    def _pause(self) -> float | None:
        """For how long there is nothing to do unless something comes. Holds the lock."""
        pauses = [_TICK_SECONDS] if self._dirty else []
        if self._uses:
            pauses.append(max(0.0, self._due - time.monotonic()))
        return min(pauses, default=None)

    def _choose_cold(self) -> None:
        """Queue the coldest dirty chunks if fewer than a share of the slots are free or clean. Holds the lock."""
        if not self._dirty or self._host is None:
            return
        columns = self._host.ledger.columns
        wanted = max(1, self._slots // _CLEAN_SHARE) - int(np.count_nonzero(columns.last_use == NOT_READY))
        if wanted <= 0:
            return
        coldest = self._host.ledger.next_to_go(wanted).tolist()
        chosen = [self._dirty.pop(slot) for slot in coldest if slot in self._dirty]
        live = [entry for entry in chosen if columns.generation[entry[0].slot] == entry[0].generation]
        self._tally.count(f"drop_{Reason.STALE}", len(chosen) - len(live))
        for batch in _regroup(live):
            self._queue.append(batch)
            self._waiting += len(batch.copies)

    # -- writing, with `_working` set -----------------------------------------------------------------------------

    def _batch_of(self, use: Use, stamp: int | None) -> Batch:
        """What there is to do for a use; nothing if an earlier one of the same chunks has done it."""
        known = use.where is not None and self._below.knows(*use.where)
        return Batch(use.namespace, [] if known else use.copies(), stamp, use.asked)

    def _write(self, batch: Batch) -> None:
        """Touch what the tier has of a batch, and hand it what it lacks, some chunks at once."""
        left = batch.copies
        try:
            left = self._wanted(batch) if left else []
            if left and left[0].staged is None:
                left = self._let_in(batch, left)
            while left:
                self._wait_for_room(min(len(left), self._piece))
                piece, left = left[: self._piece], left[self._piece :]
                self._send(batch, piece)
        except Exception as trouble:  # noqa: BLE001  # a border: whatever it is, the writer goes on
            self._tally.warn(log, Reason.IO_ERROR, f"chunks were not written down: {trouble}", trouble)
        finally:
            self._drop([] if batch.asked else left, Reason.IO_ERROR)

    def _wanted(self, batch: Batch) -> list[Copy]:
        """What the tier lacks of a batch, can be copied and is to be written now."""
        lacking = [copy for copy in self._below.missing(batch) if copy.slot >= 0 or copy.staged is not None]
        if not batch.asked or not lacking:
            return lacking
        lacking = self._below.standing(self._below.unsettled(lacking))
        if self._policy == "selective" and self._host is not None:
            hits = self._host.ledger.columns.hits
            return [copy for copy in lacking if hits[copy.slot] >= self._hits]
        if self._policy == "write_back":
            self._soil(batch._replace(copies=lacking, asked=False))
            return []
        return lacking

    def _let_in(self, batch: Batch, copies: Sequence[Copy]) -> list[Copy]:
        """Those of these chunks that the tier's policy takes: none behind one that it does not."""
        taken: list[Copy] = []
        for run in runs(copies, len(copies), follows):
            at, shut = 0, False
            while at < len(run) and not shut:
                keys = [copy.key for copy in run[at:]]
                count, shut = let_in(self.tier, keys, batch.namespace, run[at].position, batch.stamp)
                taken += run[at : at + count]
                at += count
            self._below.settle_refused(run[at:])
        return taken

    def _wait_for_room(self, count: int) -> None:
        """Wait until the tier has few enough in its hands to be given more, but not for ever."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._writing + count <= 2 * self._piece, _WRITE_SECONDS
            )

    def _send(self, batch: Batch, piece: Sequence[Copy]) -> None:
        """Hand chunks to the tier."""
        with self._changed:
            self._writing += len(piece)
        try:
            leased = self._below.lease(piece)
            chunks = [self._below.chunk(copy) for copy in piece]
            futures = self.tier.save(chunks, batch.namespace, stamp=batch.stamp)
        except Exception:
            self._tally.count(f"drop_{Reason.IO_ERROR}", len(piece))
            for copy in piece:
                if copy.staged is not None:
                    copy.staged.ended(Done(False, Reason.IO_ERROR), unread=False)
            self._written(len(piece))
            raise
        for copy, lease, future in zip(piece, leased, futures, strict=True):
            future.add_done_callback(partial(self._ended, copy, lease))

    def _ended(self, copy: Copy, leased: Leased | None, future: Future[Done]) -> None:
        """A write has ended; on a thread of the tier."""
        try:
            self._below.ended(copy, leased, future.result())
        finally:
            self._written(1)

    def _written(self, count: int) -> None:
        with self._changed:
            self._writing -= count
            self._changed.notify_all()


def _goes_on(batch: Batch, following: Batch) -> bool:
    """Whether two batches in staging buffers are of one run, so that they can be handed over as one."""
    first, last = following.copies[0], batch.copies[-1]
    same = (batch.namespace, batch.stamp) == (following.namespace, following.stamp)
    return same and first.staged is not None and last.staged is not None and follows(first, last)


def _regroup(dirty: Iterable[tuple[Copy, Batch]]) -> list[Batch]:
    """The chosen copies as batches of the runs that they came from, each in the order of its chain."""
    found: dict[int, tuple[Batch, list[Copy]]] = {}
    for copy, batch in dirty:
        found.setdefault(id(batch), (batch, []))[1].append(copy)
    return [
        batch._replace(copies=sorted(copies, key=lambda c: c.position)) for batch, copies in found.values()
    ]
