"""How chunks get from the slots of a disk tier, or from its queue, into the buffers of a caller."""

from __future__ import annotations

import numpy as np

from pagoda import codec
from pagoda.metrics import Reason
from pagoda.tiers.base import Done
from pagoda.tiers.disk_io import Device, Scratch
from pagoda.tiers.io_queue import IoQueue, Read


class Reader:
    """Reads chunks and verifies every field and byte. Thread-safe; each call on one I/O thread with its scratch."""

    def __init__(self, device: Device, queue: IoQueue) -> None:
        self._device = device
        self._queue = queue

    def load(self, read: Read, scratch: Scratch) -> None:
        """Do one read and end its future, whatever happens."""
        try:
            reason = self._load(read, scratch)
        except Exception as error:  # noqa: BLE001  # the border of the background: becomes the value of the future
            reason = self._device.trouble(error, "a load")
        self._count(reason)
        self._queue.loaded(read, Done(reason is None, reason), self._device.chunk_bytes)

    def _load(self, read: Read, scratch: Scratch) -> Reason | None:
        if self._queue.copied(read, self._device.chunk_bytes):
            return None
        reason = self._from_slot(read, scratch) if read.slot >= 0 else Reason.EVICTED
        if reason is not Reason.EVICTED:
            return reason
        # It left its slot while the read waited, or came from the queue into one: look again, once.
        match = self._device.ledger.match(
            [read.key], start=read.position, namespace=read.namespace, asked=False
        )
        if not len(match.slots):
            return reason if read.slot >= 0 else match.reason
        read.slot, read.generation = int(match.slots[0]), int(match.generations[0])
        return self._from_slot(read, scratch)

    def _from_slot(self, read: Read, scratch: Scratch) -> Reason | None:
        device, nbytes = self._device, self._device.chunk_bytes
        if device.breaker.resting:
            return Reason.TIER_SKIPPED
        direct = device.suits(read.buffer)
        payload = read.buffer[: device.slot_bytes] if direct else scratch.room
        try:
            device.slab.read(read.slot, [scratch.page, payload])
        except OSError as error:
            return self._drop(read, device.trouble(error, f"reading slot {read.slot}"))
        device.breaker.worked()
        if not device.is_valid(read.slot, read.generation):
            return Reason.EVICTED
        if codec.verify(scratch.page, payload, self._expected(read)) is not None:
            if codec.is_foreign(scratch.page):  # it stays: the version that wrote it can read it
                return device.note(Reason.FAILED_CHECK, f"slot {read.slot} was written by another version")
            return self._drop(read, Reason.FAILED_CHECK)
        if not direct:
            np.copyto(read.buffer[:nbytes], payload[:nbytes])
        return None

    def _expected(self, read: Read) -> codec.Expected:
        return codec.Expected(
            store_id=self._device.ledger.store_id,
            slot=read.slot,
            namespace=read.namespace,
            key=read.key,
            position=read.position,
            length=self._device.chunk_bytes,
            codec="raw",
            fingerprint=self._device.fingerprint,
            sequence=read.generation,
        )

    def _drop(self, read: Read, reason: Reason) -> Reason:
        """Take an entry that cannot be served out of the ledger, unless it has changed since."""
        self._device.ledger.drop(read.key, read.slot, read.generation, reason)
        return reason

    def _count(self, reason: Reason | None) -> None:
        ledger = self._device.ledger
        if reason is None:
            ledger.count("loaded_chunks")
            ledger.count("loaded_bytes", self._device.chunk_bytes)
        elif reason is not Reason.LEDGER_BUSY:  # which the ledger counts
            ledger.count(f"miss_{reason}")
