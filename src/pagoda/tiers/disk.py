"""The disk tier: a ledger and a slab in a file, with I/O threads.

`DiskTier` is called by the cache, and queues reads and writes. `DiskStore` is what its threads
share. Each thread has a `DiskWorker`, which moves bytes between the slots and the buffers of
callers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pagoda import codec
from pagoda import policy as policies
from pagoda.base.clock import Clock, Deadline
from pagoda.base.errors import StoreError
from pagoda.base.fork import per_process
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.base.signal_safe_threads import NO_THREAD, Condition, Event
from pagoda.base.store_place import require_room_for_one
from pagoda.codec import HEADER_BYTES
from pagoda.layout import SLOT_ALIGN, KVLayout, itemsize
from pagoda.ledger import (
    Busy,
    Ledger,
    Present,
    Reserved,
    SlotWriter,
    StoreSpec,
    admin,
)
from pagoda.policy.prefill_cost import cost_of
from pagoda.slab import FileSlab, aligned, begin_on_pages
from pagoda.tiers.base import Bytes, Chunk, Done, clamp_deadline
from pagoda.tiers.breaker import CircuitBreaker
from pagoda.tiers.header_scan import HeaderScan
from pagoda.tiers.io_queue import (
    IoQueue,
    IoWorker,
    QueuedTier,
    ReadRequest,
    WorkerBackend,
    WriteRequest,
    valid_writes,
)
from pagoda.tiers.ledger_tier import LedgerTier, discard_unused, opened_store

# a lease for chunks that a load has found, until they are read
_LOAD_LEASE_SECONDS = 10.0
BATCH_CHUNKS = 16
# a batch holds its payloads and slots until all of it is written
BATCH_BYTES = 64 << 20
# smaller batches are written by one thread, and to adjacent slots by one call
_CALL_BYTES = 4 << 20
# What one call reads of adjacent slots: little, since its first chunk waits for its last.
_RUN_BYTES = 1 << 20
_ADMISSIONS = 256  # the number of runs whose admission is remembered
_ADMIT_CHUNKS = 64  # how many the policy is asked about at once
# the wait for an answer that only saves work; a save must not wait longer
_STORED_SECONDS = 0.02
# the wait for the ledger's answer about admission; keys without an answer count as absent
_ADMIT_SECONDS = 0.05
# only I/O threads wait that long, with chunks that are worth it
_LEDGER_SECONDS = 10.0

_logger = guarded_logger("pagoda.tiers.disk")


def _require_positive(io_threads: int, queue_chunks: int) -> None:
    if io_threads < 1 or queue_chunks < 1:
        raise ValueError(
            f"io_threads and queue_chunks must be at least 1, got {io_threads}, {queue_chunks}"
        )


class DiskTier(QueuedTier, LedgerTier):
    """Stores chunks in one file, with background threads. It survives restarts, and the loss of its
    ledger (by a scan).

    Thread-safe and fork-safe. A queued chunk is found, and is read from the queue. `close()` or
    garbage collection ends the threads.
    """

    name = "disk"
    # a lookup costs little, and the policy should learn of every use
    believed_seconds = 0.1
    keeps_recency = True

    def __init__(
        self,
        layout: KVLayout,
        ledger: Ledger,
        slab: FileSlab,
        *,
        codec_name: str = "raw",
        durable: bool = False,
        io_threads: int = 2,
        queue_chunks: int = 64,
        deadline_seconds: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        """Take over `ledger` and `slab`, which belong together; `close()` closes them.

        Raises ConfigError for a codec that cannot encode the layout, StoreError if no thread
        starts.
        """
        codec.require_layout(codec_name, layout)
        _require_positive(io_threads, queue_chunks)
        self.codec = codec_name
        self.chunk_bytes = layout.chunk_bytes
        self.slot_bytes = layout.slot_bytes
        self.ledger = ledger
        self.stamp = ledger.stamp
        self._last_clear = ledger.last_clear
        self.deadline_seconds = deadline_seconds
        self._breaker = CircuitBreaker(clock or Clock())
        self._store = DiskStore(
            ledger, slab, layout, codec_name, self._breaker, io_threads, durable
        )
        super().__init__(self._store, io_threads, queue_chunks)
        with ExitStack() as undo:
            undo.callback(self.close)
            if not self._pool.start():
                raise StoreError(
                    f"the disk tier at {ledger.directory} cannot be opened: {NO_THREAD}"
                )
            undo.pop_all()

    @classmethod
    def open(
        cls,
        layout: KVLayout,
        path: str | os.PathLike[str],
        size_bytes: int,
        *,
        direct: bool | None = None,
        codec_name: str = "raw",
        policy: str = policies.DEFAULT,
        objective: str = policies.DEFAULT_OBJECTIVE,
        durable: bool = False,
        io_threads: int = 2,
        queue_chunks: int = 64,
        deadline_seconds: float = 5.0,
        clock: Clock | None = None,
    ) -> DiskTier:
        """Open or create the store of `layout` under the directory `path`. Raises StoreError,
        ValueError.

        `size_bytes` is for the slots with their headers. The ledger's files need about 5 MiB and 1
        KiB per slot in addition. With a lossy codec ("q8", "q4") slots are smaller, so such a store
        has another name and holds only such chunks.
        """
        codec.require_layout(codec_name, layout)
        _require_positive(io_threads, queue_chunks)
        stride = (
            HEADER_BYTES
            + -(-codec.most_bytes(codec_name, layout) // SLOT_ALIGN) * SLOT_ALIGN
        )
        require_room_for_one("disk", size_bytes, stride)
        slots = size_bytes // stride
        spec = StoreSpec(
            root=Path(path),
            name=layout.fingerprint
            + (f".{codec_name}" if codec_name in codec.LOSSY else ""),
            kind="file",
            slots=slots,
            slot_bytes=stride,
            limit_bytes=size_bytes,
            chunk_bytes=layout.chunk_bytes,
        )
        with opened_store(
            "disk",
            spec,
            policy,
            cost_of(objective, layout.chunk_tokens),
            clock,
            lambda ledger: ledger.open_slab(
                lambda file: FileSlab(file, ledger.slots, stride, direct)
            ),
        ) as (ledger, slab, made):
            pass
        with ExitStack() as undo:
            if (
                made
            ):  # without the tier: that closes the ledger and the slab itself
                undo.callback(discard_unused, ledger.directory)
            tier = cls(
                layout,
                ledger,
                slab,
                codec_name=codec_name,
                durable=durable,
                io_threads=io_threads,
                queue_chunks=queue_chunks,
                deadline_seconds=deadline_seconds,
                clock=clock,
            )
            undo.pop_all()
        tier.made = made
        return tier

    def wait_ready(self, timeout: float) -> bool:
        """Wait until a rebuild of the ledger has ended; return False after `timeout` seconds.

        During a rebuild the tier works, but finds fewer chunks.
        """
        return self._pool.wait_background(timeout)

    @property
    def resting(self) -> bool:
        """Whether the disk is skipped for a while after failures in a row, or since its tables
        cannot be read.

        Nothing is found meanwhile.
        """
        return self._store.resting

    # ---- finding ---------------------------------------------------------------------------------

    def match_prefix(
        self,
        keys: Sequence[bytes],
        *,
        start: int | None = 0,
        stamp: int | None = None,
        namespace: bytes | None = None,
        touch: bool = True,
        deadline_seconds: float | None = None,
    ) -> int:
        """Return how many leading keys are stored or queued; copies nothing."""
        if self._closed or self._store.resting or not self._queued(keys):
            return super().match_prefix(
                keys,
                start=start,
                stamp=stamp,
                namespace=namespace,
                touch=touch,
                deadline_seconds=deadline_seconds,
            )
        sources = self._sources(
            self._pool.queue,
            keys,
            start,
            namespace,
            deadline_seconds,
            stamp=stamp,
            touch=touch,
            lease_seconds=0.0,
            leading=True,
        )
        return sum(not isinstance(source, Reason) for source in sources)

    def _stored(
        self, chunks: Sequence[Chunk], namespace: bytes, stamp: int
    ) -> Iterator[bool]:
        if not chunks:
            return repeat(False)
        match = self.ledger.match_prefix(
            [chunk.key for chunk in chunks],
            start=chunks[0].position,
            namespace=namespace,
            stamp=stamp,
            lease_seconds=1.0,
            asked=False,
            deadline_seconds=_STORED_SECONDS,
        )
        return chain(repeat(True, len(match.slots)), repeat(False))

    def _sources(
        self,
        queue: IoQueue,
        keys: Sequence[bytes],
        start: int | None,
        namespace: bytes | None,
        deadline_seconds: float | None,
        *,
        stamp: int | None = None,
        touch: bool | None = None,
        lease_seconds: float = _LOAD_LEASE_SECONDS,
        leading: bool = False,
    ) -> list[WriteRequest | tuple[int, int] | Reason]:
        """Return where each key is, or why it is absent, one transaction per run; with `leading`,
        only up to the first that is absent.

        Looks into the queue first: a chunk that leaves it afterwards is in the ledger, or was
        dropped and becomes a miss. By default, for a load, this leases the run and does not touch
        it, because `match_prefix` has touched it with one stamp for the whole run. A `get` (of any
        position) comes without a `match_prefix`, so it touches.
        """
        touch = start is None if touch is None else touch
        queued = queue.pending_writes(keys)
        deadline = Deadline(
            clamp_deadline(self.deadline_seconds, deadline_seconds)
        )
        stamp = self.ledger.stamp() if stamp is None else stamp
        found: list[WriteRequest | tuple[int, int] | Reason] = []
        while len(found) < len(keys):
            index = len(found)
            position = None if start is None else start + index
            write = queued.get(keys[index])
            if write is not None and write.is_valid():
                found.append(
                    write if write.matches(namespace, position) else Reason.ABSENT
                )
            else:
                stop = next(
                    (n for n in range(index + 1, len(keys)) if keys[n] in queued),
                    len(keys),
                )
                match = self.ledger.match_prefix(
                    keys[index:stop],
                    start=position,
                    namespace=namespace,
                    stamp=stamp,
                    lease_seconds=lease_seconds,
                    touch=touch,
                    deadline_seconds=deadline.remaining(),
                )
                found += zip(
                    match.slots.tolist(), match.generations.tolist(), strict=True
                )
                if len(found) < stop:
                    found.append(match.reason or Reason.ABSENT)
            if leading and isinstance(found[-1], Reason):
                break
        return found

    def admit(
        self,
        keys: Sequence[bytes],
        *,
        namespace: bytes,
        start: int,
        stamp: int | None,
    ) -> tuple[int, bool]:
        """Return how many of a run's next keys the policy admits, and whether it refuses the keys
        after those.

        The policy is asked once per stamp, about at most 64 keys. Save only admitted chunks, with
        the same stamp. If nothing calls this for a run, each batch of it is judged separately.
        Refused chunks are counted, and the policy learns that they were requested.
        """
        if stamp is None or isinstance(self._open_queue(), Reason):
            # `store` then asks for each batch, or returns the reason
            return len(keys), False
        store = self._store
        run = namespace, stamp
        with store.admission_lock:  # held only for a moment: see _ADMIT_SECONDS
            known = store.admissions.get(run, _NOTHING_ADMITTED)
            if start >= known.end and not known.refused:
                known = self._asked_policy(keys[:_ADMIT_CHUNKS], start, stamp)
            if known.refused and start + len(keys) > known.told:
                known = self._told_policy(known, keys, start, stamp)
            store.admissions[run] = known
            while len(store.admissions) > _ADMISSIONS:
                del store.admissions[next(iter(store.admissions))]
        count = max(0, min(known.end - start, len(keys)))
        return count, known.refused and count < len(keys)

    def _asked_policy(
        self, keys: Sequence[bytes], start: int, stamp: int
    ) -> _RunAdmission:
        """Ask the policy about the next chunks of a run, and count those that it refuses."""
        count = self.ledger.admit(
            keys, start=start, stamp=stamp, deadline_seconds=_ADMIT_SECONDS
        )
        self._count_refused(len(keys) - count)
        return _RunAdmission(start + count, count < len(keys), start + len(keys))

    def _told_policy(
        self, known: _RunAdmission, keys: Sequence[bytes], start: int, stamp: int
    ) -> _RunAdmission:
        """Tell the policy that the rest of a run that it refuses was requested; other threads may
        have told part of it.
        """
        end = start + len(keys)
        rest = keys[max(0, known.told - start) :]
        self.ledger.refuse(rest, start=end - len(rest), stamp=stamp)
        self._count_refused(len(rest))
        return known._replace(told=end)

    def _count_refused(self, chunks: int) -> None:
        if chunks:
            self.ledger.count({f"drop_{Reason.NOT_ADMITTED}": chunks})


class _RunAdmission(NamedTuple):
    """How much of a run the policy admits: up to a chain position, and whether it refuses
    everything after that.
    """

    end: int
    refused: bool
    told: int  # the policy knows up to this position that the run was requested


_NOTHING_ADMITTED = _RunAdmission(0, False, 0)


class _Turns:
    """Which batch of a process reserves slots next."""

    def __init__(self) -> None:
        """No batch has its slots yet."""
        self.changed = Condition()
        # the number of the last batch that has its slots
        self.reserved = 0


class DiskStore(WorkerBackend):
    """One store on a disk: its ledger and slab, its health, and what its I/O threads share.
    Thread-safe.

    It is the backend of a disk tier's worker pool, which calls `reset` first.
    """

    name = "disk"

    def __init__(
        self,
        ledger: Ledger,
        slab: FileSlab,
        layout: KVLayout,
        codec_name: str,
        breaker: CircuitBreaker,
        io_threads: int,
        durable: bool,
    ) -> None:
        """Take over `ledger` and `slab`, which belong together. `durable`: sync before a commit."""
        self.ledger = ledger
        self.count = ledger.count
        self.slab = slab
        self.layout = layout
        self.chunk_bytes = layout.chunk_bytes
        # bytes of a slot without the header
        self.slot_bytes = ledger.slot_bytes - HEADER_BYTES
        self.codec_name = codec_name
        self.is_lossy = codec_name in codec.LOSSY
        self.word_bytes = itemsize(layout.planes[0].dtype) if layout.planes else 1
        self.breaker = breaker
        self.durable = durable
        self.log = RateLimitedLog()
        # All threads together stay at half of what one member may have reserved. The rest is for
        # writes that hang and for other tiers of this process.
        share = ledger.window // io_threads
        self.batch_chunks = max(
            1, min(BATCH_CHUNKS, share, BATCH_BYTES // self.slot_bytes)
        )
        self.fewest_chunks = max(
            1, min(self.batch_chunks, _CALL_BYTES // self.slot_bytes)
        )
        self.run_chunks = max(
            1, min(self.fewest_chunks, _RUN_BYTES // self.slot_bytes)
        )

        # by namespace and stamp, which are the same within a run
        self.admissions: dict[tuple[bytes, int | None], _RunAdmission] = {}

    @per_process
    def _turns(self) -> _Turns:
        return _Turns()

    @per_process
    def admission_lock(self) -> threading.Lock:
        """Return a lock: only one thread at a time asks the policy about a run."""
        return threading.Lock()

    def make_worker(self, queue: IoQueue) -> DiskWorker:
        """Return the worker of a new thread."""
        return DiskWorker(self, queue)

    def background(self, stop: Event) -> None:
        """Read the headers that the ledger has not seen."""
        HeaderScan(
            self.ledger, self.slab.read_headers, self.layout, self.record_error
        ).run(stop)

    def stamp(self) -> int:
        """Return the recency of a new request: one for its whole run, so that its tail is evicted
        before its head.
        """
        return self.ledger.stamp()

    @property
    def resting(self) -> bool:
        """Whether the disk must not be used now."""
        return self.breaker.resting or self.ledger.session.resting

    def record_error(self, error: Exception, what: str) -> Reason:
        """Log that I/O or a background job failed and return the reason to report. OSErrors count
        for the breaker.

        Such an error may mean that no file of this disk can be read any more: the tables are tested
        before their next use, which could kill this process.
        """
        if isinstance(error, OSError):
            self.ledger.session.suspect()
            self.breaker.record_failure()
        return self.log_reason(
            Reason.IO_ERROR, f"{what} failed: {type(error).__name__}: {error}"
        )

    def log_reason(self, reason: Reason, message: str) -> Reason:
        """Log why a chunk was not served, at most one line per reason in a while; return the
        reason.
        """
        self.log.warn(_logger, reason, message)
        return reason

    def can_use(self, buffers: Sequence[Bytes]) -> bool:
        """Return whether the slab can move whole payloads to or from all of these without a
        copy.
        """
        if self.is_lossy:
            return False
        for buffer in buffers:
            if buffer.nbytes < self.slot_bytes or not buffer.flags.c_contiguous:
                return False
        return not self.slab.direct or begin_on_pages(buffers)

    @contextmanager
    def in_turn(self, batch: int) -> Iterator[None]:
        """Let batches reserve slots in the order in which they were queued, or a head could find no
        free slot.
        """
        turns = self._turns
        with turns.changed:
            if turns.reserved < batch - 1:
                turns.changed.wait_for(
                    lambda: turns.reserved >= batch - 1, _LEDGER_SECONDS
                )
        try:
            yield
        finally:
            with turns.changed:
                turns.reserved = max(turns.reserved, batch)
                turns.changed.notify_all()

    def close(self) -> None:
        """Close the slab and the ledger."""
        self.slab.close()
        self.ledger.close()


class _Payload(NamedTuple):
    """Bytes that the slab can write."""

    data: Bytes
    stored_bytes: int = 0  # with a lossy codec: so many of them are used


class _Sealed(NamedTuple):
    """A chunk that is ready to be written to a slot."""

    slot: int
    write: WriteRequest
    pages: tuple[Bytes, Bytes]  # its header and its payload


class DiskWorker(IoWorker):
    """The loads and saves of one I/O thread, with its own buffers.

    A load verifies every field and byte. A save: checksum -> still valid? -> one write with the
    header -> still valid? -> commit, else abort.
    """

    def __init__(self, store: DiskStore, queue: IoQueue) -> None:
        super().__init__(store, queue)
        self._store = store
        # of the chunks that one call writes or reads
        self._header_pages = list(
            aligned(store.fewest_chunks * HEADER_BYTES).reshape(-1, HEADER_BYTES)
        )
        self._spare: list[Bytes] = []  # allocated when first needed

    # ---- loading ---------------------------------------------------------------------------------

    def _load_run(self, reads: Sequence[ReadRequest]) -> list[Reason | None]:
        if not isinstance(reads[0].source, tuple):
            return super()._load_run(reads)
        reasons = self._load_slots(reads)
        return [
            self._load_again(read, reason) if reason is Reason.EVICTED else reason
            for read, reason in zip(reads, reasons, strict=True)
        ]

    def _load(self, read: ReadRequest) -> Reason | None:
        # a chunk that was queued when it was looked up
        return self._load_again(read, None)

    def _load_again(
        self, read: ReadRequest, reason: Reason | None
    ) -> Reason | None:
        """Look a chunk up again, once: it left its slot while the read waited, or moved from the
        queue into a slot.

        `reason`: why the first read failed.
        """
        match = self._store.ledger.match_prefix(
            [read.key], start=read.position, namespace=read.namespace, asked=False
        )
        if not len(match.slots):
            return match.reason if reason is None else reason
        read.source = int(match.slots[0]), int(match.generations[0])
        return self._load_slots([read])[0]

    def _load_slots(self, reads: Sequence[ReadRequest]) -> list[Reason | None]:
        """Fill the buffers of reads of adjacent slots by one call, and verify each chunk by
        itself.
        """
        store = self._store
        if store.resting:
            return [Reason.TIER_SKIPPED] * len(reads)
        places = [_place(read) for read in reads]
        payloads = [read.buffer[: store.slot_bytes] for read in reads]
        if not store.can_use(payloads):
            payloads = self._spare_payloads()
        pages = list(zip(self._header_pages, payloads, strict=False))
        pages = pages[: len(reads)]
        slot = places[0][0]
        try:
            store.slab.read(
                slot, [page for pair in pages for page in pair], len(reads)
            )
        except OSError as error:
            if len(reads) > 1:  # each slot alone: a bad sector affects only one
                return [self._load_slots([read])[0] for read in reads]
            return [
                self._drop_entry(
                    reads[0], store.record_error(error, f"reading slot {slot}")
                )
            ]
        store.breaker.record_success()
        # asked once, after all of them were read
        valid = store.ledger.are_valid(places)
        return [
            self._verify(read, header, payload) if there else Reason.EVICTED
            for read, there, (header, payload) in zip(
                reads, valid, pages, strict=True
            )
        ]

    def _verify(
        self, read: ReadRequest, header: Bytes, payload: Bytes
    ) -> Reason | None:
        """Compare header and checksum of a chunk that was read, and deliver it."""
        store = self._store
        slot, generation = _place(read)
        expected = codec.Expected(
            store_id=store.ledger.store_id,
            slot=slot,
            namespace=read.namespace,
            key=read.key,
            position=read.position,
            length=store.chunk_bytes,
            codec=store.codec_name,
            fingerprint=store.layout.fingerprint,
            sequence=generation,
        )
        if store.is_lossy:
            failed = codec.restore(
                header, payload, expected, store.word_bytes, read.buffer
            )
        else:
            failed = codec.verify(header, payload, expected)
        if failed is not None:
            # the chunk stays: the version that wrote it can read it
            if codec.is_foreign(header):
                message = f"slot {slot} was written by another version"
                return store.log_reason(Reason.FAILED_CHECK, message)
            return self._drop_entry(read, Reason.FAILED_CHECK)
        if not store.is_lossy and not np.may_share_memory(payload, read.buffer):
            np.copyto(
                read.buffer[: store.chunk_bytes], payload[: store.chunk_bytes]
            )
        return None

    def _drop_entry(self, read: ReadRequest, reason: Reason) -> Reason:
        """Remove an entry that cannot be served from the ledger, unless it has changed since."""
        self._store.ledger.remove_exact(read.key, *_place(read), reason)
        return reason

    # ---- saving ----------------------------------------------------------------------------------

    def save(self, writes: Sequence[WriteRequest]) -> None:
        """Write a batch and end its futures, whatever happens."""
        results: dict[WriteRequest, Done] = {}
        try:
            self._save(writes, results)
        except Exception as error:  # noqa: BLE001
            # a background thread: the error becomes the futures' value
            self._store.record_error(error, "a batch of saves")
        # some take these payloads, which end with the writes
        self._queue.read_all(self.load)
        self._queue.finish_writes(
            [
                (write, results.get(write) or self._dropped(Reason.IO_ERROR))
                for write in writes
            ]
        )

    def _save(
        self, writes: Sequence[WriteRequest], results: dict[WriteRequest, Done]
    ) -> None:
        store = self._store
        # What is not committed is given up at the end of the block, not earlier: the slots must
        # not be given to others before their I/O has ended, however late.
        with SlotWriter(store.ledger) as writer:
            with store.in_turn(writes[0].batch):
                reserved = self._reserve(writer, writes, results)
            waiting = list(reserved.items())
            for first in range(0, len(waiting), store.fewest_chunks):
                self._queue.read_all(self.load)
                sealed = self._seal(
                    waiting[first : first + store.fewest_chunks], results
                )
                self._write(sealed, results)
            self._commit(writer, reserved, results)
            # before the writes end: after them, a caller may end the process
            store.ledger.namespaces.save_labels()

    def _drop_invalid(
        self, writes: Sequence[WriteRequest], results: dict[WriteRequest, Done]
    ) -> list[WriteRequest]:
        """Return the writes that are valid now; drop the others."""
        valid = valid_writes(writes)
        for write in set(writes).difference(valid):
            results[write] = self._dropped(write.cancelled or Reason.STALE)
        return valid

    def _reserve(
        self,
        writer: SlotWriter,
        writes: Sequence[WriteRequest],
        results: dict[WriteRequest, Done],
    ) -> dict[WriteRequest, Reserved]:
        """Return the slots of the writes that need one; add the others to `results`."""
        reserved: dict[WriteRequest, Reserved] = {}
        if self._store.resting:
            self._skip(writes, results)
            return reserved
        live = self._drop_invalid(writes, results)
        for run in _runs(live, self._store.ledger.window):
            self._reserve_run(writer, run, reserved, results)
        return reserved

    def _reserve_run(
        self,
        writer: SlotWriter,
        run: Sequence[WriteRequest],
        reserved: dict[WriteRequest, Reserved],
        results: dict[WriteRequest, Done],
    ) -> None:
        first = run[0]
        admitted = self._store.admissions.get(
            (first.namespace, first.stamp), _NOTHING_ADMITTED
        )
        outcomes = writer.reserve(
            [write.chunk.key for write in run],
            namespace=first.namespace,
            start=first.chunk.position,
            parent=first.chunk.parent,
            tokens=first.chunk.tokens,
            stamp=first.stamp,
            already_admitted=run[-1].chunk.position < admitted.end,
            deadline_seconds=_LEDGER_SECONDS,
        )
        for write, outcome in zip(run, outcomes, strict=True):
            if isinstance(outcome, Reserved):
                reserved[write] = outcome
            elif isinstance(outcome, Present):
                results[write] = Done(True, None)
            elif isinstance(outcome, Busy):
                results[write] = self._dropped(Reason.BUSY)
            else:
                # counted by the ledger
                results[write] = Done(False, outcome.reason)

    def _seal(
        self,
        some: Sequence[tuple[WriteRequest, Reserved]],
        results: dict[WriteRequest, Done],
    ) -> list[_Sealed]:
        """Seal chunks, each with its own header page; return them by slot. Adds failed writes to
        `results`.
        """
        store = self._store
        payloads = (
            self._encoded([write for write, _ in some], results)
            if store.is_lossy
            else self._plain([write.chunk.payload for write, _ in some])
        )
        sealed: list[_Sealed] = []
        for (write, reserved), payload, header in zip(
            some, payloads, self._header_pages, strict=False
        ):
            if write in results:
                continue
            described = codec.Header(
                store_id=store.ledger.store_id,
                slot=reserved.slot,
                namespace=write.namespace,
                epoch=reserved.generation,  # compared with clears after a rebuild
                key=write.chunk.key,
                position=write.chunk.position,
                length=store.chunk_bytes,
                tokens=write.chunk.tokens,
                codec=store.codec_name,
                fingerprint=store.layout.fingerprint,
                sequence=reserved.generation,
                stored_bytes=payload.stored_bytes,
            )
            codec.seal(described, payload.data, header)
            sealed.append(_Sealed(reserved.slot, write, (header, payload.data)))
        # Up to this line the payloads were the keys' chunks, and so is everything that matches the
        # checksums.
        valid = self._drop_invalid([one.write for one in sealed], results)
        return sorted(one for one in sealed if one.write in valid)  # by slot

    def _plain(self, payloads: Sequence[Bytes]) -> list[_Payload]:
        """Return payloads from which the slab can write."""
        store = self._store
        if not store.can_use(payloads):
            payloads = self._copied(payloads)
        return [_Payload(payload[: store.slot_bytes]) for payload in payloads]

    def _copied(self, payloads: Sequence[Bytes]) -> list[Bytes]:
        """Copy payloads into page-aligned ones."""
        nbytes = self._store.chunk_bytes
        copies = self._spare_payloads()[: len(payloads)]
        for copy, payload in zip(copies, payloads, strict=True):
            np.copyto(copy[:nbytes], payload[:nbytes])
        return copies

    def _encoded(
        self, writes: Sequence[WriteRequest], results: dict[WriteRequest, Done]
    ) -> list[_Payload]:
        """Return the payloads of writes in a lossy codec. Adds to `results` what it cannot
        encode.
        """
        store = self._store
        encoded: list[_Payload] = []
        for write, spare in zip(writes, self._spare_payloads(), strict=False):
            used, stored = codec.encode(
                store.codec_name,
                write.chunk.payload[: store.chunk_bytes],
                store.word_bytes,
                spare,
                layout=store.layout,
            )
            if used != store.codec_name:
                message = f"a chunk with NaN or infinity is no {store.codec_name}"
                results[write] = self._dropped(
                    store.log_reason(Reason.TOO_LARGE, message)
                )
            encoded.append(_Payload(spare, stored.nbytes))
        return encoded

    def _write(
        self, sealed: Sequence[_Sealed], results: dict[WriteRequest, Done]
    ) -> None:
        """Write chunks, those of adjacent slots by one call; add failed writes to `results`."""
        while sealed:
            end = 1
            while (
                end < len(sealed) and sealed[end].slot == sealed[end - 1].slot + 1
            ):
                end += 1
            self._write_run(sealed[:end], results)
            sealed = sealed[end:]

    def _write_run(
        self, run: Sequence[_Sealed], results: dict[WriteRequest, Done]
    ) -> None:
        """Write chunks to adjacent slots; add failed writes to `results`."""
        store = self._store
        if store.resting:
            self._skip([one.write for one in run], results)
            return
        slot = run[0].slot
        pages = [page for one in run for page in one.pages]
        try:
            store.slab.write(slot, pages, len(run))
        except OSError as error:
            self._note_failed(run, error, results)
        else:
            store.breaker.record_success()

    def _note_failed(
        self,
        run: Sequence[_Sealed],
        error: OSError,
        results: dict[WriteRequest, Done],
    ) -> None:
        """Handle a write that failed. Of several slots each is written alone: a bad sector affects
        only one.
        """
        if len(run) > 1:
            for one in run:
                self._write_run([one], results)
            return
        slot, write, _ = run[0]
        results[write] = self._dropped(
            self._store.record_error(error, f"writing slot {slot}")
        )

    def _skip(
        self, writes: Sequence[WriteRequest], results: dict[WriteRequest, Done]
    ) -> None:
        """Drop writes while the disk rests."""
        for write in writes:
            results[write] = self._dropped(Reason.TIER_SKIPPED)

    def _spare_payloads(self) -> list[Bytes]:
        """Return page-aligned payloads for buffers that the slab cannot use directly, one for each
        header page.
        """
        if not self._spare:
            rows = len(self._header_pages)
            width = self._store.slot_bytes
            self._spare = list(aligned(rows * width).reshape(rows, width))
        return self._spare

    def _commit(
        self,
        writer: SlotWriter,
        reserved: dict[WriteRequest, Reserved],
        results: dict[WriteRequest, Done],
    ) -> None:
        """Commit what was written whole: from chunks that are still valid, after all writes."""
        written = self._drop_invalid(
            [write for write in reserved if write not in results], results
        )
        if not written:
            return
        if self._store.durable and not self._is_synced(written, results):
            return
        kept = writer.commit(
            [reserved[write] for write in written], _LEDGER_SECONDS
        )
        for write, ok in zip(written, kept, strict=True):
            if not ok:
                # counted by the ledger
                results[write] = Done(False, Reason.SUPERSEDED)
            elif write.cancelled is not None:
                # its key was removed or cleared while it was being committed
                admin.remove(
                    self._store.ledger, [write.chunk.key], write.cancelled
                )
                results[write] = self._dropped(write.cancelled)
            else:
                results[write] = Done(True)

    def _is_synced(
        self, written: Sequence[WriteRequest], results: dict[WriteRequest, Done]
    ) -> bool:
        """Sync what was written; drop it and return False if that fails."""
        try:
            self._store.slab.sync()
        except OSError as error:
            reason = self._store.record_error(error, "syncing")
            for write in written:
                results[write] = self._dropped(reason)
            return False
        return True

    def _dropped(self, reason: Reason) -> Done:
        self._store.ledger.count({f"drop_{reason}": 1})
        return Done(False, reason)


def _place(read: ReadRequest) -> tuple[int, int]:
    """Return the slot and the generation of the chunk to read."""
    assert isinstance(read.source, tuple)
    return read.source


def _runs(writes: Sequence[WriteRequest], most: int) -> list[list[WriteRequest]]:
    """Split writes into runs of at most `most`, each of which one reserve can take."""
    found: list[list[WriteRequest]] = []
    for write in writes:
        if found and len(found[-1]) < most and _follows(write, found[-1][-1]):
            found[-1].append(write)
        else:
            found.append([write])
    return found


def _follows(write: WriteRequest, before: WriteRequest) -> bool:
    chunk = write.chunk
    previous = before.chunk
    return (
        chunk.position == previous.position + 1
        and chunk.parent in (None, previous.key)
        and chunk.tokens == previous.tokens
        and write.namespace == before.namespace
        and write.stamp == before.stamp
    )
