"""What the I/O threads of a disk tier work on: reads, writes and the scan of one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagoda.metrics import Reason
from pagoda.threads import Event
from pagoda.tiers.disk_io import Device, Scratch
from pagoda.tiers.disk_scan import scan
from pagoda.tiers.io_queue import IoQueue, Read, Write
from pagoda.tiers.reader import Reader
from pagoda.tiers.writer import Writer


class DiskCrew:
    """Reads and writes chunks of one device. Thread-safe; see `Crew`."""

    name = "disk"
    readers = 0

    def __init__(self, device: Device, io_threads: int) -> None:
        self.device = device
        self._io_threads = io_threads

    def begin(self, queue: IoQueue) -> None:
        """Work for this queue, with new locks."""
        self.device.renew()
        self._reader = Reader(self.device, queue)
        self.writer = Writer(self.device, queue, self._io_threads)
        self.batch_chunks = self.writer.batch_chunks

    def hand(self) -> DiskHand:
        """What a thread works with."""
        return DiskHand(self._reader, self.writer, Scratch(self.device.slot_bytes))

    def background(self, stop: Event) -> None:
        """Read the headers that the ledger has not seen."""
        scan(self.device, stop)

    def interrupt(self) -> None:
        """Nothing: I/O of a disk cannot be interrupted."""

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter of the store."""
        self.device.ledger.count(name, number)

    def trouble(self, error: Exception, what: str) -> Reason:
        """Note that something failed."""
        return self.device.trouble(error, what)

    def close(self) -> None:
        """Close the device."""
        self.device.close()


class DiskHand:
    """One thread's reads and writes, with its own buffers."""

    def __init__(self, reader: Reader, writer: Writer, scratch: Scratch) -> None:
        self._reader, self._writer, self._scratch = reader, writer, scratch

    def load(self, read: Read) -> None:
        """Do one read."""
        self._reader.load(read, self._scratch)

    def save(self, writes: Sequence[Write], between: Callable[[], None]) -> None:
        """Do a batch of writes."""
        self._writer.save(writes, self._scratch, between)

    def close(self) -> None:
        """Nothing is held."""
