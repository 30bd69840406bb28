"""Reads and writes of a disk tier: between the slots of a slab in a file and the buffers of callers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np

from pagoda import codec
from pagoda.codec import HEADER_BYTES
from pagoda.layout import KVLayout
from pagoda.ledger import Busy, Ledger, Present, Reserved, admin
from pagoda.metrics import RateLimitedLog, Reason
from pagoda.slab import aligned
from pagoda.threads import Condition, Event
from pagoda.tiers.base import Bytes, Done, follows, runs
from pagoda.tiers.breaker import CircuitBreaker
from pagoda.tiers.header_scan import HeaderScan
from pagoda.tiers.io_queue import IoQueue, ReadRequest, WriteRequest

BATCH_CHUNKS = 16
BATCH_BYTES = 64 << 20  # a batch holds its payloads and its slots until the last of it is written
_ADMISSIONS = 256  # runs whose admission is remembered
_ADMIT_CHUNKS = 64  # how many the policy is asked about at once
_ADMIT_SECONDS = 0.05  # for the ledger's answer about admission: keys without an answer count as absent
_LEDGER_SECONDS = 10.0  # only the queue waits here, and a chunk already read from the host is worth a wait

_logger = logging.getLogger("pagoda.tiers.disk")


class Slab(Protocol):
    """What a disk tier needs of its slab (`pagoda.slab.FileSlab` or one with its contract)."""

    @property
    def direct(self) -> bool:
        """Whether buffers must start on a page and consist of whole pages."""

    def read(self, slot: int, buffers: Sequence[Bytes]) -> None:
        """Fill the buffers from the start of a slot; OSError if it could not read all of them."""

    def write(self, slot: int, buffers: Sequence[Bytes]) -> None:
        """Write the buffers from the start of a slot; OSError if it could not write all of them."""

    def read_headers(self, first: int, count: int) -> Sequence[memoryview]:
        """Return the first pages of the slots [first, first + count)."""

    def sync(self) -> None:
        """Return when all that was written is on the medium."""

    def close(self) -> None:
        """Close once the last running call ends."""


class _RunAdmission(NamedTuple):
    """How much of a run the policy admits: up to a chain position, and whether it refuses everything after that."""

    end: int
    refused: bool
    told: int  # up to which position the policy knows that the run was requested


_NOTHING_ADMITTED = _RunAdmission(0, False, 0)


class DiskStore:
    """One store on a disk: its ledger and slab, its health, and what its I/O threads share. Thread-safe.

    It is the backend of a disk tier's worker pool (see `WorkerBackend`), which calls `attach` first.
    """

    name = "disk"
    reader_threads = 0

    def __init__(
        self, ledger: Ledger, slab: Slab, layout: KVLayout, breaker: CircuitBreaker, io_threads: int, durable: bool
    ) -> None:  # fmt: skip
        """Take over `ledger` and `slab`, which belong together. `durable`: sync before a commit."""
        self.ledger = ledger
        self.slab = slab
        self.layout = layout
        self.chunk_bytes = layout.chunk_bytes
        self.slot_bytes = layout.slot_bytes
        self.breaker = breaker
        self.durable = durable
        self.log = RateLimitedLog()
        # All threads together stay at half of what one member may have reserved. The rest is for writes that hang and
        # for other tiers of this process.
        share = ledger.window // io_threads
        self.batch_chunks = max(1, min(BATCH_CHUNKS, share, BATCH_BYTES // self.slot_bytes))

    def attach(self, queue: IoQueue) -> None:
        """Serve this queue from now on, with new locks: a thread of a parent process may have held the old ones."""
        self.breaker.reset()
        self.log.reset()
        self._queue = queue
        self._batches = Condition()
        self._reserved_batch = 0  # the number of the last batch that has its slots
        self._admission_lock = threading.Lock()  # only one thread at a time asks the policy about a run
        self._admissions: dict[
            tuple[bytes, int | None], _RunAdmission
        ] = {}  # by namespace and stamp, which are the same within a run

    def make_worker(self) -> DiskWorker:
        """Return the worker of a new thread."""
        return DiskWorker(self, self._queue)

    def background(self, stop: Event) -> None:
        """Read the headers that the ledger has not seen."""
        HeaderScan(self.ledger, self.slab.read_headers, self.layout, self.record_error).run(stop)

    def interrupt(self) -> None:
        """Do nothing: I/O of a disk cannot be interrupted."""

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter of the store."""
        self.ledger.count(name, number)

    def record_error(self, error: Exception, what: str) -> Reason:
        """Log that I/O or a background job failed and return the reason to report. OSErrors count for the breaker."""
        if isinstance(error, OSError):
            self.breaker.record_failure()
        return self.log_reason(Reason.IO_ERROR, f"{what} failed: {type(error).__name__}: {error}")

    def log_reason(self, reason: Reason, message: str) -> Reason:
        """Log why a chunk was not served, at most one line per reason in a while; return the reason."""
        self.log.warn(_logger, reason, message)
        return reason

    def is_valid(self, slot: int, generation: int) -> bool:
        """Return whether the slot still holds what it held under this generation."""
        slots, generations = np.array([slot], np.int64), np.array([generation], np.uint64)
        return bool(self.ledger.still_valid(slots, generations)[0])

    def can_use(self, buffer: Bytes) -> bool:
        """Return whether the slab can move a whole payload to or from `buffer` without a copy."""
        if buffer.nbytes < self.slot_bytes or not buffer.flags.c_contiguous:
            return False
        return not self.slab.direct or buffer.ctypes.data % HEADER_BYTES == 0

    def admit(
        self, keys: Sequence[bytes], namespace: bytes, start: int, stamp: int
    ) -> tuple[int, bool]:  # fmt: skip
        """See DiskTier.admit."""
        with self._admission_lock:  # held for a moment: see _ADMIT_SECONDS
            known, refused = self._admissions.get((namespace, stamp), _NOTHING_ADMITTED), 0
            if start >= known.end and not known.refused:
                some = keys[:_ADMIT_CHUNKS]
                count = self.ledger.admit(some, start=start, stamp=stamp, deadline_seconds=_ADMIT_SECONDS)
                known = _RunAdmission(start + count, count < len(some), start + len(some))
                refused = len(some) - count
            if known.refused and start + len(keys) > known.told:
                rest = keys[
                    max(0, known.told - start) :
                ]  # other threads may have asked about a part of the run
                self.ledger.refuse(rest, start=start + len(keys) - len(rest), stamp=stamp)
                known = known._replace(told=start + len(keys))
                refused += len(rest)
            self._admissions[namespace, stamp] = known
            while len(self._admissions) > _ADMISSIONS:
                del self._admissions[next(iter(self._admissions))]
        if refused:
            self.ledger.count(f"drop_{Reason.NOT_ADMITTED}", refused)
        count = max(0, min(known.end - start, len(keys)))
        return count, known.refused and count < len(keys)

    def admitted_end(self, namespace: bytes, stamp: int | None) -> int:
        """Return up to which position of a run the policy has admitted it until now."""
        return self._admissions.get((namespace, stamp), _NOTHING_ADMITTED).end

    @contextmanager
    def in_turn(self, batch: int) -> Iterator[None]:
        """Let batches reserve slots in the order in which they were queued, or a head could find no free slot."""
        with self._batches:
            self._batches.wait_for(lambda: self._reserved_batch >= batch - 1, _LEDGER_SECONDS)
        try:
            yield
        finally:
            with self._batches:
                self._reserved_batch = max(self._reserved_batch, batch)
                self._batches.notify_all()

    def close(self) -> None:
        """Close the slab and the ledger."""
        self.slab.close()
        self.ledger.close()


class DiskWorker:
    """The loads and saves of one I/O thread, with its own buffers.

    A load verifies every field and byte. A save: checksum -> still valid? -> one write with the header -> still valid?
    -> commit, else abort.
    """

    def __init__(self, store: DiskStore, queue: IoQueue) -> None:
        self._store = store
        self._queue = queue
        self._header_page: Bytes = aligned(HEADER_BYTES)
        self._spare: Bytes | None = None  # made when first needed

    def close(self) -> None:
        """Do nothing: a worker holds only memory."""

    # ---- loading -------------------------------------------------------------------------------------------------

    def load(self, read: ReadRequest) -> None:
        """Do one read and end its future, whatever happens."""
        try:
            reason = self._load(read)
        except Exception as error:  # noqa: BLE001  # a background thread: the error becomes the future's value
            reason = self._store.record_error(error, "a load")
        self._count_load(reason)
        self._queue.finish_read(read, Done(reason is None, reason), self._store.chunk_bytes)

    def _load(self, read: ReadRequest) -> Reason | None:
        if self._queue.copy_from_write(read, self._store.chunk_bytes):
            return None
        reason = self._load_slot(read) if read.slot >= 0 else Reason.EVICTED
        if reason is not Reason.EVICTED:
            return reason
        # It left its slot while the read waited, or moved from the queue into a slot: look it up again, once.
        match = self._store.ledger.match_prefix(
            [read.key], start=read.position, namespace=read.namespace, asked=False
        )
        if not len(match.slots):
            return reason if read.slot >= 0 else match.reason
        read.slot, read.generation = int(match.slots[0]), int(match.generations[0])
        return self._load_slot(read)

    def _load_slot(self, read: ReadRequest) -> Reason | None:
        store, nbytes = self._store, self._store.chunk_bytes
        if store.breaker.resting:
            return Reason.TIER_SKIPPED
        direct = store.can_use(read.buffer)
        payload = read.buffer[: store.slot_bytes] if direct else self._spare_payload()
        header = self._header_page
        try:
            store.slab.read(read.slot, [header, payload])
        except OSError as error:
            return self._drop_entry(read, store.record_error(error, f"reading slot {read.slot}"))
        store.breaker.record_success()
        if not store.is_valid(read.slot, read.generation):
            return Reason.EVICTED
        if codec.verify(header, payload, self._expected_header(read)) is not None:
            if codec.is_foreign(header):  # it stays: the version that wrote it can read it
                message = f"slot {read.slot} was written by another version"
                return store.log_reason(Reason.FAILED_CHECK, message)
            return self._drop_entry(read, Reason.FAILED_CHECK)
        if not direct:
            np.copyto(read.buffer[:nbytes], payload[:nbytes])
        return None

    def _expected_header(self, read: ReadRequest) -> codec.Expected:
        return codec.Expected(
            store_id=self._store.ledger.store_id,
            slot=read.slot,
            namespace=read.namespace,
            key=read.key,
            position=read.position,
            length=self._store.chunk_bytes,
            codec="raw",
            fingerprint=self._store.layout.fingerprint,
            sequence=read.generation,
        )

    def _drop_entry(self, read: ReadRequest, reason: Reason) -> Reason:
        """Remove an entry that cannot be served from the ledger, unless it has changed since."""
        self._store.ledger.remove_exact(read.key, read.slot, read.generation, reason)
        return reason

    def _count_load(self, reason: Reason | None) -> None:
        ledger = self._store.ledger
        if reason is None:
            ledger.count("loaded_chunks")
            ledger.count("loaded_bytes", self._store.chunk_bytes)
        elif reason is not Reason.LEDGER_BUSY:  # which the ledger counts
            ledger.count(f"miss_{reason}")

    # ---- saving --------------------------------------------------------------------------------------------------

    def save(self, writes: Sequence[WriteRequest]) -> None:
        """Write a batch and end its futures, whatever happens."""
        results: dict[WriteRequest, Done] = {}
        try:
            self._save(writes, results)
        except Exception as error:  # noqa: BLE001  # a background thread: the error becomes the futures' value
            self._store.record_error(error, "a batch of saves")
        for write in writes:
            done = results.get(write) or self._dropped(Reason.IO_ERROR)
            self._queue.finish_write(write, done)
        self._store.ledger.namespaces.save_labels()

    def _save(
        self,
        writes: Sequence[WriteRequest],
        results: dict[WriteRequest, Done],
    ) -> None:
        ledger = self._store.ledger
        reserved: dict[WriteRequest, Reserved] = {}
        try:
            with self._store.in_turn(writes[0].batch):
                live = [write for write in writes if not self._needs_no_slot(write, results)]
                for run in runs(live, ledger.window, _follows):
                    self._reserve(run, reserved, results)
            for write, slot in reserved.items():
                self._queue.read_all(self.load)
                reason = self._write(write, slot)
                if reason is not None:
                    results[write] = self._dropped(reason)
            self._commit(reserved, results)
        finally:
            # Only now has the I/O of these slots ended, however late: they could not be given to others before.
            if reserved:
                ledger.abort(list(reserved.values()))

    def _needs_no_slot(self, write: WriteRequest, results: dict[WriteRequest, Done]) -> bool:
        """End a write that needs no slot any more; return whether it did."""
        if self._store.breaker.resting:
            results[write] = self._dropped(Reason.TIER_SKIPPED)
        elif not write.is_valid():
            results[write] = self._dropped(write.cancelled or Reason.STALE)
        return write in results

    def _reserve(
        self,
        run: Sequence[WriteRequest],
        reserved: dict[WriteRequest, Reserved],
        results: dict[WriteRequest, Done],
    ) -> None:
        first = run[0]
        outcomes = self._store.ledger.reserve(
            [write.chunk.key for write in run],
            namespace=first.namespace,
            start=first.chunk.position,
            parent=first.chunk.parent,
            tokens=first.chunk.tokens,
            stamp=first.stamp,
            admitted=run[-1].chunk.position < self._store.admitted_end(first.namespace, first.stamp),
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
                results[write] = Done(False, outcome.reason)  # counted by the ledger

    def _write(self, write: WriteRequest, reserved: Reserved) -> Reason | None:
        store, header = self._store, self._header_page
        if store.breaker.resting:
            return Reason.TIER_SKIPPED
        payload = self._payload(write)
        codec.seal(self._header(write, reserved), payload, header)
        # From the checksum to this line the payload was what its key names, and so is all that verifies against it.
        if not write.is_valid():
            return write.cancelled or Reason.STALE
        try:
            store.slab.write(reserved.slot, [header, payload])
        except OSError as error:
            return store.record_error(error, f"writing slot {reserved.slot}")
        store.breaker.record_success()
        if not write.is_valid():
            return write.cancelled or Reason.STALE
        return None

    def _payload(self, write: WriteRequest) -> Bytes:
        payload, nbytes = write.chunk.payload, self._store.chunk_bytes
        if self._store.can_use(payload):
            return payload[: self._store.slot_bytes]
        spare = self._spare_payload()
        np.copyto(spare[:nbytes], payload[:nbytes])
        return spare

    def _spare_payload(self) -> Bytes:
        """Return a page-aligned payload for buffers that the slab cannot use directly."""
        if self._spare is None:
            self._spare = aligned(self._store.slot_bytes)
        return self._spare

    def _header(self, write: WriteRequest, reserved: Reserved) -> codec.Header:
        return codec.Header(
            store_id=self._store.ledger.store_id,
            slot=reserved.slot,
            namespace=write.namespace,
            epoch=reserved.generation,  # which a clear compares, after a rebuild
            key=write.chunk.key,
            position=write.chunk.position,
            length=self._store.chunk_bytes,
            tokens=write.chunk.tokens,
            codec="raw",
            fingerprint=self._store.layout.fingerprint,
            sequence=reserved.generation,
        )

    def _commit(self, reserved: dict[WriteRequest, Reserved], results: dict[WriteRequest, Done]) -> None:
        """Commit what was written; take what is settled out of `reserved`."""
        ledger = self._store.ledger
        for write in reserved:
            if write.cancelled is not None and write not in results:
                results[write] = self._dropped(write.cancelled)
        written = [write for write in reserved if write not in results]
        if not written:
            return
        if self._store.durable:
            try:
                self._store.slab.sync()
            except OSError as error:
                reason = self._store.record_error(error, "syncing")
                results.update((write, self._dropped(reason)) for write in written)
                return
        kept = ledger.commit([reserved[write] for write in written], deadline_seconds=_LEDGER_SECONDS)
        for write, ok in zip(written, kept, strict=True):
            del reserved[write]
            results[write] = self._committed(write) if ok else self._dropped(Reason.SUPERSEDED)

    def _committed(self, write: WriteRequest) -> Done:
        if write.cancelled is not None:  # its key was removed while it was being committed
            admin.remove(self._store.ledger, [write.chunk.key])
            return self._dropped(write.cancelled)
        self._store.ledger.count("stored_bytes", self._store.chunk_bytes)
        return Done(True, None)

    def _dropped(self, reason: Reason) -> Done:
        self._store.ledger.count(f"drop_{reason}")
        return Done(False, reason)


def _follows(write: WriteRequest, before: WriteRequest) -> bool:
    same = (write.namespace, write.stamp) == (before.namespace, before.stamp)
    return same and follows(write.chunk, before.chunk)
