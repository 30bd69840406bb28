"""The queued and running reads and writes of a tier: one bounded queue, in which reads go first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from pagoda.metrics import Reason
from pagoda.threads import Condition
from pagoda.tiers.base import Bytes, Chunk, Done, running_future


@dataclass(eq=False)
class WriteRequest:
    """A queued or running save. While it `is_valid()`, its chunk counts as found and is read from its payload."""

    chunk: Chunk
    namespace: bytes
    stamp: int | None
    future: Future[Done] = field(default_factory=running_future)
    cancelled: Reason | None = None  # REMOVED or CLEARED, once its key was removed or cleared
    batch: int = 0  # the number of the batch that a worker took it in

    def is_valid(self) -> bool:
        """Return whether the payload is still what the key names, and the key was not removed."""
        return self.cancelled is None and self.chunk.still_valid()

    def matches(self, namespace: bytes | None, position: int | None) -> bool:
        """Return whether this is the chunk at that position of that namespace; None is not compared."""
        return namespace in (None, self.namespace) and (
            namespace is None or position in (None, self.chunk.position)
        )


@dataclass(eq=False)
class ReadRequest:
    """A queued or running load: from `write` while that is valid, else from the slot."""

    key: bytes
    position: int | None  # None: not compared; so is a namespace of None
    namespace: bytes | None
    buffer: Bytes
    slot: int = -1  # -1: no slot is known
    generation: int = 0
    write: WriteRequest | None = None
    future: Future[Done] = field(default_factory=running_future)
    followers: list[ReadRequest] = field(default_factory=list)

    @property
    def flight_key(self) -> tuple[bytes, int | None, bytes | None]:
        """Reads with the same flight key are done once, for all of them (single flight)."""
        return self.key, self.position, self.namespace


class IoQueue:
    """Holds reads and writes from their request to their end. Thread-safe; no I/O under its lock.

    At most `write_chunks` writes and `read_chunks` reads are outstanding: queued or running.
    """

    def __init__(self, write_chunks: int, read_chunks: int = 4096) -> None:
        self._write_chunks = write_chunks
        self._read_chunks = read_chunks
        self._changed = Condition()
        self._writes: deque[WriteRequest] = deque()
        self._reads: deque[ReadRequest] = deque()
        self._outstanding_writes: dict[bytes, WriteRequest] = {}  # queued or running, by key
        self._leaders: dict[tuple[bytes, int | None, bytes | None], ReadRequest] = {}  # by flight key
        self._read_count = 0  # followers included
        self._batch = 0  # the number of the last batch of writes that was taken
        self._closed = False

    def add_write(self, write: WriteRequest) -> WriteRequest | Reason:
        """Queue a write. Returns it, or the outstanding write of the same key, or why it was not queued."""
        with self._changed:
            if self._closed:
                return Reason.CLOSED
            twin = self._outstanding_writes.get(write.chunk.key)
            if twin is not None and twin.cancelled is None:
                return twin
            if twin is not None:  # its key was removed while it is being written
                return Reason.BUSY
            if len(self._outstanding_writes) >= self._write_chunks:
                return Reason.QUEUE_FULL
            self._outstanding_writes[write.chunk.key] = write
            self._writes.append(write)
            self._changed.notify_all()  # some of the waiting threads only read, so one is not enough
            return write

    def add_read(self, read: ReadRequest) -> Reason | None:
        """Queue a read, or attach it to one of the same chunk. Returns why it was not queued; None: it was."""
        with self._changed:
            if self._closed:
                return Reason.CLOSED
            if self._read_count >= self._read_chunks:
                return Reason.QUEUE_FULL
            flight_key = read.flight_key
            leader = self._leaders.get(flight_key)
            target: list[ReadRequest] | deque[ReadRequest] = (
                self._reads if leader is None else leader.followers
            )
            # No signal handler runs from here to the end of the append, so all of this happens or nothing.
            self._read_count += 1
            if leader is None:
                self._leaders[flight_key] = read
            target.append(read)
            self._changed.notify_all()
            return None

    def has_room(self) -> bool:
        """Return whether a write could be queued now."""
        with self._changed:
            return not self._closed and len(self._outstanding_writes) < self._write_chunks

    def pending_writes(self, keys: Iterable[bytes]) -> dict[bytes, WriteRequest]:
        """Return the outstanding writes of `keys` that are not cancelled, by key."""
        with self._changed:
            found = (
                ((key, self._outstanding_writes.get(key)) for key in keys) if self._outstanding_writes else ()
            )
            return {key: write for key, write in found if write is not None and write.cancelled is None}

    def in_flight(self, key: bytes) -> bool:
        """Return whether a write of this key is queued or running, cancelled or not."""
        with self._changed:
            return key in self._outstanding_writes

    def outstanding(self) -> tuple[int, int]:
        """Return how many writes and how many reads are queued or running."""
        with self._changed:
            return len(self._outstanding_writes), self._read_count

    def cancel(
        self, reason: Reason, *, key: bytes | None = None, namespace: bytes | None = None
    ) -> tuple[list[WriteRequest], list[WriteRequest]]:
        """Cancel the writes of a key or a namespace (None: all).

        Returns the queued ones, which are out of the queue now and which the caller must finish, and the running ones,
        which end by themselves with `reason`.
        """
        with self._changed:
            chosen = [
                write
                for write in self._outstanding_writes.values()
                if write.cancelled is None
                and key in (None, write.chunk.key)
                and namespace in (None, write.namespace)
            ]
            for write in chosen:
                write.cancelled = reason
            waiting = [write for write in self._writes if write.cancelled is not None]
            self._writes = deque(write for write in self._writes if write.cancelled is None)
            return waiting, [write for write in chosen if write not in waiting]

    def take(self, most_writes: int, shares: int = 1) -> ReadRequest | list[WriteRequest] | None:
        """Wait for work; return the next read, or the oldest writes (at most 1/`shares` of the queue). None: closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._reads or self._writes)
            if self._reads:
                return self._reads.popleft()
            if self._closed:
                return None
            count = min(most_writes, -(-len(self._writes) // shares))
            batch = [self._writes.popleft() for _ in range(count)]
            self._batch += 1
            for write in batch:
                write.batch = self._batch
            return batch

    def take_read(self, wait: bool = False) -> ReadRequest | None:
        """Return the next read, if there is one. With `wait`, wait for one; None then means: the queue is closed."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._closed or self._reads)
            return self._reads.popleft() if self._reads else None

    def finish_write(self, write: WriteRequest, done: Done) -> None:
        """End a write. Its key is no longer in flight when its future is done."""
        with self._changed:
            del self._outstanding_writes[write.chunk.key]
            self._changed.notify_all()
        write.future.set_result(done)

    @staticmethod
    def copy_from_write(read: ReadRequest, nbytes: int) -> bool:
        """Serve a read from the payload of its `write`; return False if that is missing or no longer valid."""
        write = read.write
        if write is None or not write.matches(read.namespace, read.position):
            return False
        np.copyto(read.buffer[:nbytes], write.chunk.payload[:nbytes])
        return write.is_valid()  # checked after the copy: the copied bytes are what the key names

    def finish_read(self, read: ReadRequest, done: Done, nbytes: int) -> None:
        """End a read. Its followers get their copies first, because afterwards its buffer is the caller's again."""
        with self._changed:
            del self._leaders[read.flight_key]
            followers, read.followers = read.followers, []
        if done.ok:
            for follower in followers:
                np.copyto(follower.buffer[:nbytes], read.buffer[:nbytes])
        with self._changed:
            self._read_count -= 1 + len(followers)
            self._changed.notify_all()
        for each in (read, *followers):
            each.future.set_result(done)

    def wait(self, keys: Iterable[bytes] | None, timeout: float) -> bool:
        """Wait until no write of these keys (None: nothing at all) is outstanding; False after `timeout` seconds."""
        chosen = None if keys is None else list(keys)
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._is_busy_with(chosen):
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return not self._is_busy_with(chosen)
            return True

    def _is_busy_with(self, keys: list[bytes] | None) -> bool:
        if keys is None:
            return bool(self._outstanding_writes) or self._read_count > 0
        return any(key in self._outstanding_writes for key in keys)

    def close(self) -> tuple[list[WriteRequest], list[ReadRequest]]:
        """Accept nothing more; return what was queued and not started, which the caller must finish. Idempotent."""
        with self._changed:
            self._closed = True
            writes, reads = list(self._writes), list(self._reads)
            self._writes.clear()
            self._reads.clear()
            self._changed.notify_all()
            return writes, reads
