"""Write-back: one background thread per lower tier writes chunks to it and touches there what is
used above.

Calls enqueue notes of chunks in host slots, and staging buffers for chunks without a slot; the
threads pass them to their tiers. A chunk that is evicted from its slot before its turn is a counted
drop. The policy decides which chunks are written:

    write_through   every chunk, in the order of storing
    selective       chunks that were hit often enough
    write_back      the coldest, ahead of their eviction, so that some slots are always clean

Under every policy, chunks in staging buffers are written. Chunks that are served from above are
touched in the lower tier, a moment later and many at once, so that they do not grow old there;
chunks that it has lost are written again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import compress, count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.base.clock import Clock, Deadline
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import Reason
from pagoda.base.signal_safe_threads import Condition, Event, start_thread
from pagoda.cache.call import CacheRequest
from pagoda.cache.counters import CacheCounters
from pagoda.cache.staging_buffers import StagedChunk
from pagoda.config import Config
from pagoda.ledger import Ledger, Reserved
from pagoda.ledger.columns import NOT_READY
from pagoda.tiers import HostTier
from pagoda.tiers.base import Bytes, Chunk, Done, InSlot, Tier, ends_of

log = guarded_logger("pagoda.cache")

_TICK_SECONDS = 0.1  # between two searches for cold chunks
# the time for which accesses are gathered before they are reported to the tier
_GATHER_SECONDS = 0.2
# chunks in notes of accesses; beyond that the oldest notes are dropped
_MOST_ACCESSED = 1 << 16
# chunks that are being written by a tier; fewer if its queue is shorter
_MOST_WRITING = 32
_WRITE_SECONDS = 60.0  # the thread does not wait longer for a write
_CLEAN_SHARE = 8  # write_back keeps an eighth of what fits now free or clean
_LEASE_SECONDS = 30.0  # how long a slot is leased for a write
# the pause before a lower tier's policy is asked again about a chunk that it refused
_REFUSED_SECONDS = 1.0

Slots = npt.NDArray[np.int64]
Generations = npt.NDArray[np.uint64]


# -- notes -----------------------------------------------------------------------------------------


class ChunkRef(NamedTuple):
    """A chunk of a run, and where its bytes are: in a host slot, in a staging buffer, or nowhere
    (names only).

    Engines that copy themselves make it from what `Cache.slots` reserved, and hand it to
    `Cache.slots.commit` and `Cache.slots.note_access`. Immutable.

    Args:
        key: 32 bytes, which name the chunk and all tokens before it.
        position: which chunk of its prompt it is, from 0 on.
        parent: the key of the chunk before it; None: it is the first one.
        slot: its slot of the host tier; -1: not in a slot.
        generation: the number of that reservation of the slot; no two are equal.
        staged: the buffer with its bytes, if it is in none; only PagodaKV sets it.

    Example:
        >>> from pagoda import ChunkRef
        >>> ChunkRef(b"k" * 32, position=0, parent=None, slot=3, generation=17).reserved.slot
        3
    """

    key: bytes
    position: int
    parent: bytes | None
    slot: int
    generation: int
    staged: StagedChunk | None = None

    @property
    def reserved(self) -> Reserved:
        """The host slot of the chunk, as the ledger reserved it."""
        return Reserved(self.key, self.slot, self.generation)


def chunk_ref(
    request: CacheRequest,
    index: int,
    slot: int = -1,
    generation: int = 0,
    staged: StagedChunk | None = None,
) -> ChunkRef:
    """Return the chunk request.keys[index] and where its bytes are. Without a place it is only a
    name to touch.
    """
    key = request.keys[index]
    parent = request.parent_of(index)
    return ChunkRef(key, request.first + index, parent, slot, generation, staged)


def refs_in_slots(
    request: CacheRequest, first: int, slots: Slots, generations: Generations
) -> list[ChunkRef]:
    """Return the chunks of `request` from keys[first] on, which are in these slots."""
    rows = zip(slots.tolist(), generations.tolist(), strict=True)
    return [chunk_ref(request, i, *row) for i, row in enumerate(rows, first)]


def columns_of(refs: Sequence[ChunkRef | Reserved]) -> tuple[Slots, Generations]:
    """Return the slots and the generations of some chunks."""
    slots = np.fromiter((ref.slot for ref in refs), np.int64, len(refs))
    return slots, np.fromiter(
        (ref.generation for ref in refs), np.uint64, len(refs)
    )


def follows(ref: ChunkRef, before: ChunkRef) -> bool:
    """Whether `ref` comes right after `before` in one chain."""
    return ref.position == before.position + 1 and ref.parent == before.key


def chains(refs: Iterable[ChunkRef]) -> list[list[ChunkRef]]:
    """Split chunks into runs, in which each chunk comes right after the one before it."""
    found: list[list[ChunkRef]] = []
    for ref in refs:
        if found and follows(ref, found[-1][-1]):
            found[-1].append(ref)
        else:
            found.append([ref])
    return found


class _WriteBatch(NamedTuple):
    """A run of chunks for a lower tier, in order, with one stamp, so that its tail is evicted first
    there too.
    """

    namespace: bytes
    refs: list[ChunkRef]
    stamp: int | None
    # the chunks were served from a tier above; otherwise they were stored there
    asked: bool = False


class Access(NamedTuple):
    """Chunks of one run that were served or found. Cheap to make; `refs` returns what a writer
    needs.
    """

    namespace: bytes
    refs: Callable[[], list[ChunkRef]]
    chunks: int
    # the host slots, if all chunks came from there
    where: tuple[Slots, Generations] | None = None
    source: Tier | None = None  # the lower tier that served them
    asked: bool = True
    left_out: tuple[str, ...] = ()  # tiers that may not have these chunks


class _Leases(NamedTuple):
    """The ends of the leases of some slots, before and after they were leased for a write."""

    slots: Slots
    before: npt.NDArray[np.int64]
    after: npt.NDArray[np.int64]


class _Piece:
    """Chunks that were passed to a tier together, all in slots or all in staging buffers."""

    def __init__(
        self,
        refs: Sequence[ChunkRef],
        leases: _Leases | None,
        futures: Sequence[Future[Done]],
    ) -> None:
        """`leases` of the slots, and `futures` of the writes; None and empty: the chunks are in
        staging buffers.
        """
        self.refs = refs
        self.leases = leases
        self.futures = futures
        # Gives 0 to the last write that ends. Its `next` is a built-in, and so atomic.
        self.left = count(len(refs) - 1, -1)


# -- one lower tier --------------------------------------------------------------------------------


class WriteBackQueue:
    """The queue and the thread of one lower tier, so that a slow tier does not delay the others.
    Thread-safe.

    The thread starts with the first note.

    The number of notes is limited by the slots of the host tier (more could not all be valid) and
    the staging buffers.

    What the tier is known to have of the host's slots expires, because a chunk may be evicted or
    removed below at any time. So when a chunk is used after `Tier.believed_seconds`, the tier is
    asked again, and the same call touches the chunk.
    """

    def __init__(
        self,
        tier: Tier,
        host: HostTier | None,
        config: Config,
        chunk_tokens: int,
        counters: CacheCounters,
        clock: Clock,
    ) -> None:
        self.tier = tier
        self._host = host
        self._policy = config.write_policy
        self._hits = config.selective_hits
        self._chunk_tokens = chunk_tokens
        self._counters = counters
        self._clock = clock
        self._slots = host.ledger.slots if host is not None else 0
        self._most_writing = min(_MOST_WRITING, tier.queue_chunks)
        # chunks passed to the tier at once
        self._piece = max(1, self._most_writing // 2)
        # the generation of the chunk in each host slot for which the tier has recently answered,
        # and until when the answer is believed: usually that the tier has the chunk, otherwise that
        # its policy refuses the chunk
        self._known_generation: Generations = np.zeros(self._slots, np.uint64)
        self._known_until: npt.NDArray[np.int64] = np.zeros(self._slots, np.int64)
        # notified at the end of writes, which calls wait for
        self._changed = Condition()
        self._noted = Event()  # wakes the thread
        self._queue: deque[_WriteBatch] = deque()
        # with their stamps
        self._accesses: deque[tuple[Access, int | None]] = deque()
        # when the accesses are reported to the tier (time.monotonic())
        self._due = 0.0
        self._accessed = 0  # chunks in the notes of accesses
        # chunks in the queue, and how many of them are in staging buffers, which have a separate
        # limit
        self._waiting = self._buffered = 0
        self._writing = 0  # chunks that the tier is writing
        # the thread waits until no more than these are being written; -1: it does not wait
        self._awaited = -1
        self._working = False  # the thread is working on a note
        # write_back: by slot
        self._dirty: dict[int, tuple[ChunkRef, _WriteBatch]] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """The number of chunks that wait to be written."""
        with self._changed:
            return self._waiting + len(self._dirty)

    def _tell_waiting(self) -> None:
        """Show all processes how many chunks wait. Called with the lock."""
        self._counters.set_waiting(
            self.tier.name, self._waiting + len(self._dirty)
        )

    # -- from the calls of the engine: never waits -------------------------------------------------

    def enqueue(
        self,
        namespace: bytes,
        refs: Sequence[ChunkRef],
        stamps: Mapping[str, int | None],
    ) -> None:
        """Note that these chunks of one run are in host slots or staging buffers, and may be
        written to some tiers.

        `namespace` is their root; `stamps` are the run's stamps, by the name of each of these
        tiers. Each of these tiers must release a staging buffer once.
        """
        if self.tier.name not in stamps:
            return
        stamp = stamps[self.tier.name]
        if refs and refs[0].staged is not None:
            self._put(_WriteBatch(namespace, list(refs), stamp))
        elif self._policy != "selective":
            fresh = list(
                compress(refs, (~self._is_known(*columns_of(refs))).tolist())
            )
            note = (
                self._put if self._policy == "write_through" else self._mark_dirty
            )
            if fresh:
                note(_WriteBatch(namespace, fresh, stamp))

    def needs_no_note(self, slots: Slots, generations: Generations) -> bool:
        """Whether the chunks in these host slots need no note."""
        return self._policy == "selective" or bool(
            self._is_known(slots, generations).all()
        )

    def note_access(self, access: Access) -> None:
        """Note that chunks were served; the thread soon reports it to the tier."""
        if self.tier.name in access.left_out:
            return
        if access.source is self.tier and self.tier.keeps_recency:
            return  # the tier noted this access when it served the chunks
        if access.where is not None and self._is_known(*access.where).all():
            return
        stamp = self.tier.stamp()
        with self._changed:
            if self._closed:
                return
            if not self._accesses:
                self._due = time.monotonic() + _GATHER_SECONDS
            if not self._accesses or self._thread is None:
                self._wake()
            # no signal handler runs between this line and the end of the append
            self._accessed += access.chunks
            self._accesses.append((access, stamp))
            while self._accessed > _MOST_ACCESSED and len(self._accesses) > 1:
                self._accessed -= self._accesses.popleft()[0].chunks

    def _mark_dirty(self, batch: _WriteBatch) -> None:
        """Note that chunks must be written before they are evicted."""
        with self._changed:
            fresh = [ref for ref in batch.refs if not self._is_dirty(ref)]
            # their slots were reused: those chunks were evicted before they were written
            stale = sum(ref.slot in self._dirty for ref in fresh)
            self._dirty.update((ref.slot, (ref, batch)) for ref in fresh)
            self._tell_waiting()
            self._wake()
        self._counters.add({f"drop_{Reason.STALE}": stale})

    def _is_dirty(self, ref: ChunkRef) -> bool:
        known = self._dirty.get(ref.slot)
        return known is not None and known[0].generation == ref.generation

    def _put(self, batch: _WriteBatch) -> None:
        """Add a batch to the queue. Chunks that do not fit are dropped and counted."""
        staged = batch.refs[0].staged is not None
        with self._changed:
            fitting = (
                len(batch.refs)
                if staged
                else max(0, self._slots - self._waiting + self._buffered)
            )
            fitting, reason = (
                (0, Reason.CLOSED)
                if self._closed
                else (fitting, Reason.QUEUE_FULL)
            )
            late = batch.refs[fitting:]
            batch = batch._replace(refs=batch.refs[:fitting])
            # earlier accesses are reported first, since a write raises recency
            self._due = 0.0
            number = len(batch.refs)
            # no signal handler runs between this line and the end of the append
            if number:
                self._waiting += number
                self._buffered += number if staged else 0
                self._queue.append(batch)
                self._wake()
                self._tell_waiting()
        if late:
            self._drop(late, reason)

    def _wake(self) -> None:
        """Let the thread notice the change. Called with the lock."""
        if self._thread is None and not self._closed:
            # without a thread the notes wait for the next call
            self._thread = start_thread(
                self._run, f"pagoda-writeback-{self.tier.name}"
            )
        self._noted.set()

    # -- waiting for it ----------------------------------------------------------------------------

    def wait_handed_over(self, timeout: float) -> bool:
        """Wait until all notes have been passed to the tier; False if that takes longer than
        `timeout` seconds.
        """
        with self._changed:
            return self._wait_for(
                lambda: not (self._queue or self._working), timeout
            )

    def flush(self, timeout: float) -> bool:
        """Wait until every note has been written or dropped; False if `timeout` seconds were not
        enough.
        """
        deadline = Deadline(timeout)
        with self._changed:
            self._due = 0.0
            accesses_done = self._wait_for(
                lambda: not (self._accesses or self._working), timeout
            )
            dirty = self._dirty
            self._dirty = {}
        for batch in _regroup(dirty.values()):
            self._put(batch)
        with self._changed:
            return (
                self._wait_for(self._is_done, deadline.remaining())
                and accesses_done
            )

    def _wait_for(self, done: Callable[[], bool], timeout: float) -> bool:
        """Wait until `done`; do not wait if no thread can be started. Called with the lock."""
        if done():
            return True
        self._wake()
        return self._thread is not None and self._changed.wait_for(done, timeout)

    def _is_done(self) -> bool:
        return not (
            self._queue or self._accesses or self._working or self._writing
        )

    def close(self, timeout: float) -> bool:
        """Write what can be written within `timeout` seconds, drop and count the rest, end the
        thread. Idempotent.
        """
        flushed = self.flush(timeout)
        with self._changed:
            self._closed = True
            left = [ref for batch in self._queue for ref in batch.refs]
            self._queue.clear()
            self._accesses.clear()
            self._waiting = self._buffered = 0
            self._tell_waiting()
            self._noted.set()
            self._changed.notify_all()
            thread = self._thread
        self._drop(left, Reason.CLOSED)
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
        return flushed

    def _drop(self, refs: Sequence[ChunkRef], reason: Reason) -> None:
        """Count chunks that are not written, and release their buffers."""
        self._counters.add({f"drop_{reason}": len(refs)})
        for ref in refs:
            if ref.staged is not None:
                ref.staged.finish(Done(False, reason))

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._changed:  # `_wake` holds it while it starts a thread
            # a signal handler's exception interrupted `_wake` after the start
            if self._thread is None:
                self._thread = threading.current_thread()
            # and the next `_wake` started another one
            if self._thread is not threading.current_thread():
                return
        while (note := self._wait_for_note()) is not None:
            try:
                self._write(
                    note
                    if isinstance(note, _WriteBatch)
                    else self._batch_of(*note)
                )
            finally:
                with self._changed:
                    self._working = False
                    self._changed.notify_all()

    def _wait_for_note(self) -> _WriteBatch | tuple[Access, int | None] | None:
        """Wait for the next note and take it; None when the thread is to end."""
        while True:
            # cleared before the check, so that a later note wakes the thread
            self._noted.clear()
            with self._changed:
                if self._dirty and not self._queue and self._host is not None:
                    self._enqueue_coldest(self._host.ledger)
                note = self._take_note()
                self._working = note is not None
                if self._closed or note is not None:
                    return note
                pauses = [_TICK_SECONDS] if self._dirty else []
                if self._accesses:
                    pauses.append(max(0.0, self._due - time.monotonic()))
            self._noted.wait(min(pauses, default=None))

    def _take_note(self) -> _WriteBatch | tuple[Access, int | None] | None:
        """Take the next note, if one is due. Called with the lock."""
        if self._accesses and self._due <= time.monotonic():
            access, stamp = self._accesses.popleft()
            self._accessed -= access.chunks
            return access, stamp
        if not self._queue:
            return None
        batch = self._queue.popleft()
        if batch.refs[0].staged is not None:
            while self._queue and _continues(batch, self._queue[0]):
                batch.refs.extend(self._queue.popleft().refs)
            self._buffered -= len(batch.refs)
        self._waiting -= len(batch.refs)
        self._tell_waiting()
        return batch

    def _enqueue_coldest(self, ledger: Ledger) -> None:
        """Queue the coldest dirty chunks if fewer than a share of the chunks that fit now are free
        or clean. Called with the lock.
        """
        columns = ledger.columns
        # slots without pages have no chunk either, and are not free
        taken = int(np.count_nonzero(columns.last_use != NOT_READY))
        fitting = columns.capacity
        wanted = max(1, fitting // _CLEAN_SHARE) - (fitting - taken)
        if wanted <= 0:
            return
        coldest = ledger.next_victims(wanted).tolist()
        if len(coldest) < wanted:
            # the sample of a policy names few chunks if few of many slots have pages
            dirty = np.fromiter(self._dirty, np.int64, len(self._dirty))
            oldest = dirty[np.argsort(columns.last_use[dirty])]
            coldest += oldest[: wanted - len(coldest)].tolist()
        chosen = [
            self._dirty.pop(slot) for slot in coldest if slot in self._dirty
        ]
        live = [
            entry
            for entry in chosen
            if columns.generation[entry[0].slot] == entry[0].generation
        ]
        self._counters.add({f"drop_{Reason.STALE}": len(chosen) - len(live)})
        for batch in _regroup(live):
            self._queue.append(batch)
            self._waiting += len(batch.refs)
        self._tell_waiting()

    # -- writing, with `_working` set --------------------------------------------------------------

    def _batch_of(self, access: Access, stamp: int | None) -> _WriteBatch:
        """Return the batch for an access; empty if an earlier access of the same chunks has done
        its work.
        """
        known = access.where is not None and bool(
            self._is_known(*access.where).all()
        )
        return _WriteBatch(
            access.namespace, [] if known else access.refs(), stamp, access.asked
        )

    def _write(self, batch: _WriteBatch) -> None:
        """Touch the chunks of a batch that the tier has, and pass on those that it lacks, some at
        once.
        """
        left = batch.refs
        try:
            # staged chunks were admitted before they were copied
            if left and left[0].staged is None:
                left = self._lacking(batch)
                left = self._admitted(batch, left)
            while left:
                piece = left[: self._piece]
                left = left[self._piece :]
                self._send(batch, piece)
        except Exception as error:  # noqa: BLE001
            # a boundary: the thread continues after any error
            self._counters.warn(
                log, Reason.IO_ERROR, f"chunks were not written: {error}", error
            )
        finally:
            if left and not batch.asked:
                self._drop(left, Reason.IO_ERROR)

    def _lacking(self, batch: _WriteBatch) -> list[ChunkRef]:
        """Touch the chunks of a batch that the tier has; return those that it lacks and that must
        be written now.
        """
        lacking: list[ChunkRef] = []
        for run in chains(batch.refs):
            lacking += self._touch(batch, run)
        if batch.asked and lacking:
            return self._worth_writing(batch, lacking)
        return lacking

    def _touch(
        self, batch: _WriteBatch, run: Sequence[ChunkRef]
    ) -> list[ChunkRef]:
        """Touch those chunks of a run that the tier has; return those in slots that it lacks."""
        present = self.tier.touch(
            [ref.key for ref in run],
            namespace=batch.namespace,
            start=run[0].position,
            stamp=batch.stamp,
            asked=batch.asked,
        )
        if present is None:
            # no answer; stored chunks are offered anyway: the tier reports why it refuses them
            present = [batch.asked] * len(run)
        elif any(present):
            self.mark_known(list(compress(run, present)))
        # those without a slot are only names
        return [
            ref
            for ref, there in zip(run, present, strict=True)
            if not there and ref.slot >= 0
        ]

    def _worth_writing(
        self, batch: _WriteBatch, lacking: Sequence[ChunkRef]
    ) -> list[ChunkRef]:
        """Return those of these chunks, which were served from above, that the policy wants written
        now.
        """
        assert self._host is not None  # the chunks are in its slots
        ledger = self._host.ledger
        where = columns_of(lacking)
        wanted = ledger.still_valid(*where) & ~self._is_known(*where)
        lacking = list(compress(lacking, wanted.tolist()))
        if self._policy == "selective":
            return [
                ref
                for ref in lacking
                if ledger.columns.hits[ref.slot] >= self._hits
            ]
        if self._policy == "write_back":
            self._mark_dirty(batch._replace(refs=lacking, asked=False))
            return []
        return lacking

    def _admitted(
        self, batch: _WriteBatch, refs: Sequence[ChunkRef]
    ) -> list[ChunkRef]:
        """Return those of these chunks that the tier's policy admits: no chunk after a refused
        one.
        """
        admitted: list[ChunkRef] = []
        for run in chains(refs):
            at = 0
            refusing = False
            while at < len(run) and not refusing:
                count, refusing = self.tier.admit(
                    [ref.key for ref in run[at:]],
                    namespace=batch.namespace,
                    start=run[at].position,
                    stamp=batch.stamp,
                )
                at += count
            admitted += run[:at]
            if refusing:
                self.mark_known(run[at:], _REFUSED_SECONDS)
        return admitted

    def _send(self, batch: _WriteBatch, refs: Sequence[ChunkRef]) -> None:
        """Pass chunks to the tier, after a bounded wait until it is writing few enough."""
        most = self._most_writing - len(refs)
        if self._writing > most:
            self._wait_for_writes(most)
        try:
            leases, chunks = self._chunks(refs)
            futures = self.tier.store(chunks, batch.namespace, stamp=batch.stamp)
            if len(futures) != len(refs):
                # counted as being written, the others would be for ever
                raise ValueError(
                    f"{self.tier.name} gave {len(futures)} futures for {len(refs)} chunks"
                )
        except Exception:
            self._note_unsent(refs)
            raise
        with self._changed:
            self._writing += len(refs)
        piece = _Piece(refs, leases, futures if leases is not None else ())
        for ref, future in zip(refs, futures, strict=True):
            future.add_done_callback(partial(self._on_write_done, piece, ref))

    def _wait_for_writes(self, most: int) -> None:
        """Wait until the tier is writing no more than `most` chunks, up to a limit."""
        with self._changed:
            self._awaited = most
            self._changed.wait_for(
                lambda: self._closed or self._writing <= most, _WRITE_SECONDS
            )
            self._awaited = -1

    def _note_unsent(self, refs: Sequence[ChunkRef]) -> None:
        """Drop chunks that the tier broke on: nobody knows whether it still reads their buffers."""
        self._counters.add({f"drop_{Reason.IO_ERROR}": len(refs)})
        for ref in refs:
            if ref.staged is not None:
                ref.staged.finish(Done(False, Reason.IO_ERROR), unread=False)

    def _chunks(
        self, refs: Sequence[ChunkRef]
    ) -> tuple[_Leases | None, list[Chunk]]:
        """Return chunks in the form in which a tier takes them, and the leases of their slots."""
        if self._host is None or refs[0].staged is not None:
            return None, self._staged_chunks(refs)
        return self._leased_chunks(self._host, refs)

    def _staged_chunks(self, refs: Sequence[ChunkRef]) -> list[Chunk]:
        return [
            self._chunk(ref, ref.staged.buffer, ref.staged.still_valid)
            for ref in refs
            if ref.staged is not None
        ]

    def _leased_chunks(
        self, host: HostTier, refs: Sequence[ChunkRef]
    ) -> tuple[_Leases, list[Chunk]]:
        """Return chunks in slots, which are not evicted while they are written."""
        slots, generations = columns_of(refs)
        ends = host.ledger.columns.lease_until
        before = ends[slots]
        host.ledger.lease(slots, generations, _LEASE_SECONDS)
        leases = _Leases(slots, before, ends[slots])
        valid = host.ledger.are_published
        return leases, [
            self._chunk(ref, view, InSlot(valid, (ref.slot, ref.generation)))
            for ref, view in zip(
                refs, host.slab.views(slots.tolist()), strict=True
            )
        ]

    def _chunk(
        self, ref: ChunkRef, payload: Bytes, still_valid: Callable[[], bool]
    ) -> Chunk:
        tokens = self._chunk_tokens
        return Chunk(
            ref.key, ref.position, tokens, payload, ref.parent, still_valid
        )

    def _on_write_done(
        self, piece: _Piece, ref: ChunkRef, future: Future[Done]
    ) -> None:
        """Release the buffer of a chunk, or note what the writes of a piece have shown once all
        have ended. Runs on a thread of the tier.
        """
        try:
            if ref.staged is not None:
                ref.staged.finish(ends_of([future])[0])
            elif next(piece.left) == 0:
                self._note_written(piece)
        finally:
            with self._changed:
                self._writing -= 1
                # a call that flushes waits for the last one
                if not self._writing or self._writing <= self._awaited:
                    self._changed.notify_all()

    def _note_written(self, piece: _Piece) -> None:
        """Note what the writes of chunks in slots show about the tier, and end their leases."""
        ends = ends_of(piece.futures)
        piece.futures = ()  # their callbacks refer to the piece
        # after the close, the slots may hold other chunks
        if self._closed or self._host is None or piece.leases is None:
            return
        self.mark_known(
            [ref for ref, done in zip(piece.refs, ends, strict=True) if done.ok]
        )
        refused = [
            ref
            for ref, done in zip(piece.refs, ends, strict=True)
            if done.reason is Reason.NOT_ADMITTED
        ]
        if refused:
            self.mark_known(refused, _REFUSED_SECONDS)
        # Restore the old lease ends, unless another call has leased the slot since: clean slots
        # must be evicted first.
        leases = piece.leases
        lease_until = self._host.ledger.columns.lease_until
        ours = lease_until[leases.slots] == leases.after
        lease_until[leases.slots[ours]] = leases.before[ours]

    # -- what the tier has -------------------------------------------------------------------------

    def _is_known(
        self, slots: Slots, generations: Generations
    ) -> npt.NDArray[np.bool_]:
        """Return for each of these slots whether the tier need not be asked about its chunk."""
        now = self._clock.monotonic_ns()
        known: npt.NDArray[np.bool_] = (
            self._known_generation[slots] == generations
        ) & (self._known_until[slots] > now)
        return known

    def mark_known(
        self, refs: Sequence[ChunkRef | Reserved], least_seconds: float = 0.0
    ) -> None:
        """Note that nothing has to be done for a while for the chunks in these slots."""
        until = self._clock.monotonic_ns() + int(
            max(self.tier.believed_seconds, least_seconds) * 1e9
        )
        for ref in refs:
            if ref.slot >= 0:
                self._known_generation[ref.slot] = ref.generation
                self._known_until[ref.slot] = until


def _continues(batch: _WriteBatch, following: _WriteBatch) -> bool:
    """Whether the batch after one in staging buffers is of the same run, and also in buffers, so
    that they can be handed over as one.
    """
    first = following.refs[0]
    last = batch.refs[-1]
    same = (batch.namespace, batch.stamp) == (
        following.namespace,
        following.stamp,
    )
    return same and first.staged is not None and follows(first, last)


def _regroup(dirty: Iterable[tuple[ChunkRef, _WriteBatch]]) -> list[_WriteBatch]:
    """Return the chosen chunks as batches of the runs that they came from, each in the order of its
    chain.
    """
    found: dict[int, tuple[_WriteBatch, list[ChunkRef]]] = {}
    for ref, batch in dirty:
        found.setdefault(id(batch), (batch, []))[1].append(ref)
    return [
        batch._replace(refs=sorted(refs, key=lambda r: r.position))
        for batch, refs in found.values()
    ]
