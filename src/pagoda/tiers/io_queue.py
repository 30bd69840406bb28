"""The outstanding reads and writes of a tier: one bounded queue, reads first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from pagoda.metrics import Reason
from pagoda.threads import Condition
from pagoda.tiers.base import Bytes, Chunk, Done, begun


@dataclass(eq=False)
class Write:
    """A save on its way. It counts as found, and is read from its payload, for as long as it is `usable()`."""

    chunk: Chunk
    namespace: bytes
    stamp: int | None
    future: Future[Done] = field(default_factory=begun)
    cancelled: Reason | None = None  # removed or cleared meanwhile
    turn: int = 0  # the number of the batch that it was taken in

    def usable(self) -> bool:
        """Whether the payload still is what the key names, and nobody took the key away."""
        return self.cancelled is None and self.chunk.still_valid()

    def is_asked(self, namespace: bytes | None, position: int | None) -> bool:
        """Whether this is the chunk at that position of that namespace; None: not asked."""
        return namespace in (None, self.namespace) and (
            namespace is None or position in (None, self.chunk.position)
        )


@dataclass(eq=False)
class Read:
    """A load on its way: from `write` while that is usable, else from the slot."""

    key: bytes
    position: int | None  # None: not asked, as is the namespace
    namespace: bytes | None
    buffer: Bytes
    slot: int = -1  # -1: not known to be in a slot
    generation: int = 0
    write: Write | None = None
    future: Future[Done] = field(default_factory=begun)
    followers: list[Read] = field(default_factory=list)

    @property
    def flight(self) -> tuple[bytes, int | None, bytes | None]:
        """Reads that are alike in this share one flight."""
        return self.key, self.position, self.namespace


class IoQueue:
    """Reads and writes from when they are asked for until they have ended. Thread-safe; no I/O under its lock.

    At most `write_chunks` writes and `read_chunks` reads are outstanding: queued or being done.
    """

    def __init__(self, write_chunks: int, read_chunks: int = 4096) -> None:
        self._write_chunks = write_chunks
        self._read_chunks = read_chunks
        self._changed = Condition()
        self._writes: deque[Write] = deque()
        self._reads: deque[Read] = deque()
        self._saving: dict[bytes, Write] = {}  # queued or being written, by key
        self._loading: dict[tuple[bytes, int | None, bytes | None], Read] = {}  # the leader of each flight
        self._outstanding_reads = 0  # followers included
        self._turn = 0  # of the last batch of writes that was taken
        self._closed = False

    def add_write(self, write: Write) -> Write | Reason:
        """Queue a write, or return the one of the same key that is under way, or why there is no room."""
        with self._changed:
            if self._closed:
                return Reason.CLOSED
            twin = self._saving.get(write.chunk.key)
            if twin is not None and twin.cancelled is None:
                return twin
            if twin is not None:  # its key was taken away while it is being written
                return Reason.BUSY
            if len(self._saving) >= self._write_chunks:
                return Reason.QUEUE_FULL
            self._saving[write.chunk.key] = write
            self._writes.append(write)
            self._changed.notify_all()  # of the threads that wait some only read
            return write

    def add_read(self, read: Read) -> Reason | None:
        """Queue a read, or let it follow one of the same chunk; returns why there is no room."""
        with self._changed:
            if self._closed:
                return Reason.CLOSED
            if self._outstanding_reads >= self._read_chunks:
                return Reason.QUEUE_FULL
            flight = read.flight
            leader = self._loading.get(flight)
            line: list[Read] | deque[Read] = self._reads if leader is None else leader.followers
            # No signal handler runs between here and the end of the append: all of it is done or nothing.
            self._outstanding_reads += 1
            if leader is None:
                self._loading[flight] = read
            line.append(read)
            self._changed.notify_all()
            return None

    def has_room(self) -> bool:
        """Whether a write would find room now."""
        with self._changed:
            return not self._closed and len(self._saving) < self._write_chunks

    def saving(self, keys: Iterable[bytes]) -> dict[bytes, Write]:
        """Those of `keys` that are under way and not taken away."""
        with self._changed:
            found = ((key, self._saving.get(key)) for key in keys) if self._saving else ()
            return {key: write for key, write in found if write is not None and write.cancelled is None}

    def in_flight(self, key: bytes) -> bool:
        """Whether a write of this key is queued or being done, even if its key was taken away."""
        with self._changed:
            return key in self._saving

    def outstanding(self) -> tuple[int, int]:
        """How many writes and reads are queued or being done."""
        with self._changed:
            return len(self._saving), self._outstanding_reads

    def cancel(
        self, reason: Reason, *, key: bytes | None = None, namespace: bytes | None = None
    ) -> tuple[list[Write], list[Write]]:
        """Take the writes of a key or a namespace (None: all) away.

        Returns those that had not begun, out of the queue and for the caller to end, and those being written, which
        end by themselves with `reason`.
        """
        with self._changed:
            chosen = [
                write
                for write in self._saving.values()
                if write.cancelled is None
                and key in (None, write.chunk.key)
                and namespace in (None, write.namespace)
            ]
            for write in chosen:
                write.cancelled = reason
            waiting = [write for write in self._writes if write.cancelled is not None]
            self._writes = deque(write for write in self._writes if write.cancelled is None)
            return waiting, [write for write in chosen if write not in waiting]

    def take(self, most_writes: int, shares: int = 1) -> Read | list[Write] | None:
        """The next read, or the oldest writes (at most this share of the queue); waits. None: the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._reads or self._writes)
            if self._reads:
                return self._reads.popleft()
            if self._closed:
                return None
            count = min(most_writes, -(-len(self._writes) // shares))
            batch = [self._writes.popleft() for _ in range(count)]
            self._turn += 1
            for write in batch:
                write.turn = self._turn
            return batch

    def take_read(self, wait: bool = False) -> Read | None:
        """The next read, if there is one; with `wait`, None means that the queue is closed."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._closed or self._reads)
            return self._reads.popleft() if self._reads else None

    def saved(self, write: Write, done: Done) -> None:
        """A write has ended: its key is no longer in flight when its future is done."""
        with self._changed:
            del self._saving[write.chunk.key]
            self._changed.notify_all()
        write.future.set_result(done)

    @staticmethod
    def copied(read: Read, nbytes: int) -> bool:
        """Serve a read from the save that it goes with; False if there is none, or not any more."""
        write = read.write
        if write is None or not write.is_asked(read.namespace, read.position):
            return False
        np.copyto(read.buffer[:nbytes], write.chunk.payload[:nbytes])
        return write.usable()  # after the copy: what was copied is what the key names

    def loaded(self, read: Read, done: Done, nbytes: int) -> None:
        """A read has ended: who followed it gets a copy first, for its buffer is the caller's again then."""
        with self._changed:
            del self._loading[read.flight]
            followers, read.followers = read.followers, []
        if done.ok:
            for follower in followers:
                np.copyto(follower.buffer[:nbytes], read.buffer[:nbytes])
        with self._changed:
            self._outstanding_reads -= 1 + len(followers)
            self._changed.notify_all()
        for ended in (read, *followers):
            ended.future.set_result(done)

    def wait(self, keys: Iterable[bytes] | None, timeout: float) -> bool:
        """Wait until none of these writes (None: nothing at all) is outstanding; False when `timeout` has passed."""
        chosen = None if keys is None else list(keys)
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._busy_with(chosen):
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return not self._busy_with(chosen)
            return True

    def _busy_with(self, keys: list[bytes] | None) -> bool:
        if keys is None:
            return bool(self._saving) or self._outstanding_reads > 0
        return any(key in self._saving for key in keys)

    def close(self) -> tuple[list[Write], list[Read]]:
        """Take nothing more; returns what was queued and not begun, for the caller to end. Idempotent."""
        with self._changed:
            self._closed = True
            writes, reads = list(self._writes), list(self._reads)
            self._writes.clear()
            self._reads.clear()
            self._changed.notify_all()
            return writes, reads
