"""How queued chunks get into the slots of a disk tier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from pagoda import codec
from pagoda.ledger import Busy, Present, Reserved
from pagoda.metrics import Reason
from pagoda.threads import Condition
from pagoda.tiers.base import Bytes, Done, follows, runs
from pagoda.tiers.disk_io import Device, Scratch
from pagoda.tiers.io_queue import IoQueue, Write

BATCH_CHUNKS = 16
BATCH_BYTES = 64 << 20  # a batch holds its payloads and its slots until the last of it is written
_RUNS_JUDGED = 256
_LEDGER_SECONDS = (
    10.0  # nobody waits here but the queue, and a chunk already read from the host is worth a wait
)


class Judged(NamedTuple):
    """How far the policy lets a run in: up to a chain position, and whether nothing behind it comes in."""

    end: int
    shut: bool
    told: int  # up to which position the policy knows that the run was asked for


class Writer:
    """Writes batches: checksum -> still valid? -> one write with the header -> still valid? -> commit, else abort.

    Thread-safe; each call on one I/O thread with that thread's scratch.
    """

    def __init__(self, device: Device, queue: IoQueue, io_threads: int) -> None:
        self._device = device
        self._queue = queue
        # All threads together stay at half of what one member may have reserved: the rest is for writes that hang and
        # for other tiers of this process.
        share = device.ledger.window // io_threads
        self.batch_chunks = max(1, min(BATCH_CHUNKS, share, BATCH_BYTES // device.slot_bytes))
        self._turns = Condition()
        self._turn = 0  # of the last batch that has its slots
        self.judging = threading.Lock()  # a run is judged by one thread, whoever else writes of it
        self._judged: dict[
            tuple[bytes, int | None], Judged
        ] = {}  # by namespace and stamp, which are one run's

    def judged(self, namespace: bytes, stamp: int | None) -> Judged:
        """How far the policy has let a run in by now."""
        return self._judged.get((namespace, stamp), Judged(0, False, 0))

    def judge(self, namespace: bytes, stamp: int | None, judged: Judged) -> None:
        """Note how far the policy lets a run in: it is not to be asked again."""
        with self._turns:
            self._judged[namespace, stamp] = judged
            while len(self._judged) > _RUNS_JUDGED:
                del self._judged[next(iter(self._judged))]

    def save(self, writes: Sequence[Write], scratch: Scratch, between: Callable[[], None]) -> None:
        """Write a batch and end its futures, whatever happens; `between` runs before each chunk (reads go first)."""
        ends: dict[Write, Done] = {}
        try:
            self._save(writes, ends, scratch, between)
        except Exception as error:  # noqa: BLE001  # the border of the background: becomes the value of the futures
            self._device.trouble(error, "a batch of saves")
        for write in writes:
            done = ends.get(write) or self._dropped(Reason.IO_ERROR)
            self._queue.saved(write, done)
        self._device.ledger.save_labels()

    def _save(
        self,
        writes: Sequence[Write],
        ends: dict[Write, Done],
        scratch: Scratch,
        between: Callable[[], None],
    ) -> None:
        ledger = self._device.ledger
        places: dict[Write, Reserved] = {}
        try:
            with self._in_turn(writes[0].turn):
                live = [write for write in writes if not self._ended_before(write, ends)]
                for run in runs(live, ledger.window, _follows):
                    self._reserve(run, places, ends)
            for write, place in places.items():
                between()
                reason = self._write(write, place, scratch)
                if reason is not None:
                    ends[write] = self._dropped(reason)
            self._commit(places, ends)
        finally:
            # Only now has the I/O of these slots ended, however late: nobody else could have been given them before.
            if places:
                ledger.abort(list(places.values()))

    @contextmanager
    def _in_turn(self, turn: int) -> Iterator[None]:
        """Batches get their slots in the order in which they were queued, or a head could find its room taken."""
        with self._turns:
            self._turns.wait_for(lambda: self._turn >= turn - 1, _LEDGER_SECONDS)
        try:
            yield
        finally:
            with self._turns:
                self._turn = max(self._turn, turn)
                self._turns.notify_all()

    def _ended_before(self, write: Write, ends: dict[Write, Done]) -> bool:
        """End a write that needs no slot any more."""
        if self._device.breaker.resting:
            ends[write] = self._dropped(Reason.TIER_SKIPPED)
        elif not write.usable():
            ends[write] = self._dropped(write.cancelled or Reason.STALE)
        return write in ends

    def _reserve(self, run: Sequence[Write], places: dict[Write, Reserved], ends: dict[Write, Done]) -> None:
        first = run[0]
        outcomes = self._device.ledger.reserve(
            [write.chunk.key for write in run],
            namespace=first.namespace,
            start=first.chunk.position,
            parent=first.chunk.parent,
            tokens=first.chunk.tokens,
            stamp=first.stamp,
            judged=run[-1].chunk.position < self.judged(first.namespace, first.stamp).end,
            deadline_seconds=_LEDGER_SECONDS,
        )
        for write, outcome in zip(run, outcomes, strict=True):
            if isinstance(outcome, Reserved):
                places[write] = outcome
            elif isinstance(outcome, Present):
                ends[write] = Done(True, None)
            elif isinstance(outcome, Busy):
                ends[write] = self._dropped(Reason.BUSY)
            else:
                ends[write] = Done(False, outcome.reason)  # counted by the ledger

    def _write(self, write: Write, place: Reserved, scratch: Scratch) -> Reason | None:
        device = self._device
        if device.breaker.resting:
            return Reason.TIER_SKIPPED
        payload = self._payload(write, scratch)
        codec.seal(self._header(write, place), payload, scratch.page)
        # From the checksum to this line the payload was what its key names: so is whatever verifies against it later.
        if not write.usable():
            return write.cancelled or Reason.STALE
        try:
            device.slab.write(place.slot, [scratch.page, payload])
        except OSError as error:
            return device.trouble(error, f"writing slot {place.slot}")
        device.breaker.worked()
        if not write.usable():
            return write.cancelled or Reason.STALE
        return None

    def _payload(self, write: Write, scratch: Scratch) -> Bytes:
        payload = write.chunk.payload
        if self._device.suits(payload):
            return payload[: self._device.slot_bytes]
        np.copyto(scratch.room[: self._device.chunk_bytes], payload[: self._device.chunk_bytes])
        return scratch.room

    def _header(self, write: Write, place: Reserved) -> codec.Header:
        return codec.Header(
            store_id=self._device.ledger.store_id,
            slot=place.slot,
            namespace=write.namespace,
            epoch=place.generation,  # what a clear is compared with, after a rebuild
            key=write.chunk.key,
            position=write.chunk.position,
            length=self._device.chunk_bytes,
            tokens=write.chunk.tokens,
            codec="raw",
            fingerprint=self._device.fingerprint,
            sequence=place.generation,
        )

    def _commit(self, places: dict[Write, Reserved], ends: dict[Write, Done]) -> None:
        """Commit what was written; what it settles leaves `places`."""
        ledger = self._device.ledger
        for write in places:
            if write.cancelled is not None and write not in ends:
                ends[write] = self._dropped(write.cancelled)
        written = [write for write in places if write not in ends]
        if not written or not self._synced(written, ends):
            return
        kept = ledger.commit([places[write] for write in written], deadline_seconds=_LEDGER_SECONDS)
        for write, ok in zip(written, kept, strict=True):
            del places[write]
            ends[write] = self._kept(write) if ok else self._dropped(Reason.SUPERSEDED)

    def _synced(self, written: Sequence[Write], ends: dict[Write, Done]) -> bool:
        if self._device.durable:
            try:
                self._device.slab.sync()
            except OSError as error:
                reason = self._device.trouble(error, "syncing")
                ends.update((write, self._dropped(reason)) for write in written)
                return False
        return True

    def _kept(self, write: Write) -> Done:
        if write.cancelled is not None:  # taken away while it was being committed
            self._device.ledger.remove([write.chunk.key])
            return self._dropped(write.cancelled)
        self._device.ledger.count("stored_bytes", self._device.chunk_bytes)
        return Done(True, None)

    def _dropped(self, reason: Reason) -> Done:
        self._device.ledger.count(f"drop_{reason}")
        return Done(False, reason)


def _follows(write: Write, before: Write) -> bool:
    same = (write.namespace, write.stamp) == (before.namespace, before.stamp)
    return same and follows(write.chunk, before.chunk)
