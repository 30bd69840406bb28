"""The disk tier: a ledger and a slab in a file, with I/O threads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from pagoda import policy as policies
from pagoda.clock import Clock, Deadline
from pagoda.codec import HEADER_BYTES
from pagoda.errors import StoreError
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger, StoreSpec, admin
from pagoda.metrics import Reason
from pagoda.slab import FileSlab
from pagoda.threads import NO_THREAD
from pagoda.tiers import opened_tiers
from pagoda.tiers.base import Bytes, Chunk, Done, check_sizes, clamp_deadline, completed_future
from pagoda.tiers.breaker import CircuitBreaker
from pagoda.tiers.disk_worker import DiskStore, Slab
from pagoda.tiers.io_queue import QueuedTier, ReadRequest, WriteRequest

_LOAD_LEASE_SECONDS = 10.0  # chunks that a load has found stay until they are read
_PRESENT_SECONDS = 0.02  # for an answer that only saves work: a save does not wait


class DiskTier(QueuedTier):
    """Stores chunks in one file, with background threads. Survives restarts, and the loss of its ledger (by a scan).

    Thread-safe and fork-safe. A queued chunk is found, and is read from the queue. `close()` or garbage collection ends
    the threads.
    """

    name = "disk"
    believed_seconds = 0.1  # a look-up costs little, and the policy should learn of every use

    def __init__(
        self,
        layout: KVLayout,
        ledger: Ledger,
        slab: Slab,
        *,
        durable: bool = False,
        io_threads: int = 2,
        queue_chunks: int = 64,
        deadline_seconds: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        """Take over `ledger` and `slab`, which belong together; `close()` closes them. StoreError: no thread starts."""
        if io_threads < 1 or queue_chunks < 1:
            raise ValueError(
                f"io_threads and queue_chunks must be at least 1, got {io_threads}, {queue_chunks}"
            )
        self.chunk_bytes = layout.chunk_bytes
        self.slot_bytes = layout.slot_bytes
        self.ledger = ledger
        self.deadline_seconds = deadline_seconds
        self._breaker = CircuitBreaker(clock or Clock())
        self._store = DiskStore(ledger, slab, layout, self._breaker, io_threads, durable)
        super().__init__(self._store, io_threads, queue_chunks)
        try:
            if not self._pool.start():
                raise StoreError(f"the disk tier at {ledger.directory} cannot be opened: {NO_THREAD}")
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        layout: KVLayout,
        path: Path,
        size_bytes: int,
        *,
        direct: bool | None = None,
        policy: str = policies.DEFAULT,
        durable: bool = False,
        io_threads: int = 2,
        queue_chunks: int = 64,
        deadline_seconds: float = 5.0,
        clock: Clock | None = None,
    ) -> DiskTier:
        """Open or create the store of `layout` under the directory `path`. Raises StoreError, ValueError.

        `size_bytes` is for the slots with their headers. The ledger's files need about 5 MiB and 1 KiB a slot more.
        """
        stride = HEADER_BYTES + layout.slot_bytes
        slots = size_bytes // stride
        if slots < 1:
            raise ValueError(f"a disk tier of {size_bytes} bytes has no room for one chunk of {stride}")
        spec = StoreSpec(
            root=path,
            name=layout.fingerprint,
            kind="file",
            slots=slots,
            slot_bytes=stride,
            limit_bytes=size_bytes,
        )
        made = not os.path.exists(path / spec.name)  # false if this user may not see it
        ledger = Ledger.open(spec, policy=policy, clock=clock or Clock())
        try:
            slab = ledger.open_slab(lambda file: FileSlab(file, ledger.slots, stride, direct))
        except BaseException:
            ledger.close()
            raise
        opened_tiers.add("disk", path, sum(map(len, ledger.space.backed_ranges())) * stride if made else 0)
        return cls(
            layout,
            ledger,
            slab,
            durable=durable,
            io_threads=io_threads,
            queue_chunks=queue_chunks,
            deadline_seconds=deadline_seconds,
            clock=clock,
        )

    def register(self, namespace: Namespace) -> None:
        """Record the namespace with its labels. Idempotent and cheap."""
        self.ledger.namespaces.register(namespace.root, namespace.fields())

    def wait_ready(self, timeout: float) -> bool:
        """Wait until a rebuild of the ledger has ended; return False after `timeout` seconds.

        The tier works meanwhile, but finds fewer chunks.
        """
        return self._pool.wait_background(timeout)

    @property
    def resting(self) -> bool:
        """Whether the disk is skipped for a while after failures in a row. Nothing is found meanwhile."""
        return self._breaker.resting

    # ---- finding -------------------------------------------------------------------------------------------------

    def find(
        self, keys: Sequence[bytes], *, start: int = 0, stamp: int | None = None, namespace: bytes | None = None,
        touch: bool = True, deadline_seconds: float | None = None,
    ) -> int:  # fmt: skip
        """Return how many leading keys are stored or queued; copies nothing."""
        if self._closed or self._breaker.resting:
            return 0
        found = 0
        for location in self._locate(keys, start, namespace, deadline_seconds, stamp=stamp, touch=touch):
            if isinstance(location, Reason):
                break
            found += 1
        return found

    def touch(
        self, keys: Sequence[bytes], *, namespace: bytes, start: int = 0, stamp: int | None = None, asked: bool = True
    ) -> list[bool] | None:  # fmt: skip
        """Update the recency of the stored part of a run, in one transaction. See Tier.touch."""
        if self._refusal() is not None:
            return None
        queued = self._pool.queue.pending_writes(
            keys
        )  # first: what leaves the queue meanwhile is in the ledger
        here = self.ledger.touch(
            keys, start=start, stamp=stamp, asked=asked, deadline_seconds=self.deadline_seconds
        )
        return here and [present or key in queued for key, present in zip(keys, here, strict=True)]

    def contains(self, key: bytes, *, deadline_seconds: float | None = None) -> bool:
        """Return whether the key is stored or queued; does not update recency."""
        if self._closed or self._breaker.resting:
            return False
        return not isinstance(next(self._locate([key], None, None, deadline_seconds, touch=False)), Reason)

    def holders(self, key: bytes) -> list[str]:
        """Return what keeps this chunk from eviction: names of pins, "in flight"."""
        owners = [owner for owner, keys in admin.list_pins(self.ledger).items() if key in keys]
        return [*owners, "in flight"] if self.in_flight(key) else owners

    def _locate(
        self,
        keys: Sequence[bytes],
        start: int | None,
        namespace: bytes | None,
        deadline_seconds: float | None,
        *,
        stamp: int | None = None,
        touch: bool = True,
        lease_seconds: float = 0.0,
    ) -> Iterator[WriteRequest | tuple[int, int] | Reason]:
        """Yield lazily where each key is (slot, generation), or why it is absent: one transaction a run.

        Looks into the queue first: what leaves it meanwhile is in the ledger, or was dropped and is a miss later.
        """
        queued = self._pool.queue.pending_writes(keys)
        deadline = Deadline(clamp_deadline(self.deadline_seconds, deadline_seconds))
        stamp = self.ledger.stamp() if stamp is None else stamp
        index = 0
        while index < len(keys):
            position = None if start is None else start + index
            write = queued.get(keys[index])
            if write is not None and write.is_valid():
                yield write if write.matches(namespace, position) else Reason.ABSENT
                index += 1
                continue
            stop = next((n for n in range(index + 1, len(keys)) if keys[n] in queued), len(keys))
            match = self.ledger.match_prefix(
                keys[index:stop],
                start=position,
                namespace=namespace,
                stamp=stamp,
                lease_seconds=lease_seconds,
                touch=touch,
                deadline_seconds=deadline.remaining(),
            )
            yield from zip(match.slots.tolist(), match.generations.tolist(), strict=True)
            index += len(match.slots)
            if index < stop:
                yield match.reason or Reason.ABSENT
                index += 1

    def admit(
        self, keys: Sequence[bytes], *, namespace: bytes, start: int, stamp: int
    ) -> tuple[int, bool]:  # fmt: skip
        """Return how many of a run's next keys the policy admits, and whether it refuses the keys after those.

        The policy is asked once per stamp, about at most 64 keys. Save only admitted chunks, with the same stamp. If
        nothing calls this for a run, each batch of it is judged separately. Refused chunks are counted, and the policy
        learns that they were requested.
        """
        if self._refusal() is not None:
            return len(keys), False  # `save` returns the reason
        return self._store.admit(keys, namespace, start, stamp)

    # ---- saving --------------------------------------------------------------------------------------------------

    def save(
        self, chunks: Sequence[Chunk], namespace: bytes, *, stamp: int | None = None
    ) -> list[Future[Done]]:
        """Queue chunks, which are written directly from their payloads; never waits for space. See Tier.save."""
        check_sizes("payload", (chunk.payload for chunk in chunks), self.chunk_bytes)
        refusal = self._refusal()
        if refusal is not None:
            return [self._dropped(refusal) for _ in chunks]
        if stamp is None:  # one for the whole run: its tail is evicted before its head
            stamp = self.ledger.stamp()
        present = self._count_present(chunks, namespace, stamp)
        return [
            completed_future(True)
            if n < present
            else self._enqueue_write(WriteRequest(chunk, namespace, stamp))
            for n, chunk in enumerate(chunks)
        ]

    def _count_present(self, chunks: Sequence[Chunk], namespace: bytes, stamp: int) -> int:
        """Return how many leading chunks are stored already: they are not queued, and the others do not evict them."""
        if not chunks:
            return 0
        keys = [chunk.key for chunk in chunks]
        match = self.ledger.match_prefix(
            keys, start=chunks[0].position, namespace=namespace, stamp=stamp, lease_seconds=1.0, asked=False,
            deadline_seconds=_PRESENT_SECONDS,
        )  # fmt: skip
        return len(match.slots)

    def _count(self, name: str) -> None:
        if not self._closed:  # a closed ledger counts no more
            self.ledger.count(name)

    # ---- loading -------------------------------------------------------------------------------------------------

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[Bytes], *, start: int = 0, namespace: bytes,
        deadline_seconds: float | None = None,
    ) -> list[Future[Done]]:  # fmt: skip
        """Read verified chunks directly into `buffers`; one transaction finds a run. See Tier.load."""
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers: need one buffer a key")
        check_sizes("buffer", buffers, self.chunk_bytes)
        refusal = self._refusal()
        if refusal is not None:
            return [self._missed(refusal) for _ in keys]
        # `find` has touched the run with one stamp; a stamp a window would make its tail younger than its head
        locations = self._locate(
            keys, start, namespace, deadline_seconds, touch=False, lease_seconds=_LOAD_LEASE_SECONDS
        )
        return [
            self._enqueue_read(location, ReadRequest(key, start + n, namespace, buffer))
            for n, (key, buffer, location) in enumerate(zip(keys, buffers, locations, strict=True))
        ]

    def _enqueue_read(
        self, location: WriteRequest | tuple[int, int] | Reason, read: ReadRequest
    ) -> Future[Done]:
        if isinstance(location, Reason):
            return self._missed(location)
        if isinstance(location, WriteRequest):
            read.write = location
        else:
            read.slot, read.generation = location
        refusal = self._pool.queue.add_read(read)
        return read.future if refusal is None else self._missed(refusal)

    def _load_one(self, key: bytes, buffer: Bytes, namespace: bytes | None) -> Future[Done]:
        refusal = self._refusal()
        if refusal is not None:
            return self._missed(refusal)
        locations = self._locate([key], None, namespace, None, lease_seconds=_LOAD_LEASE_SECONDS)
        return self._enqueue_read(next(locations), ReadRequest(key, None, namespace, buffer))

    # ---- removing ------------------------------------------------------------------------------------------------

    def remove(self, key: bytes) -> bool:
        """Remove a chunk, queued or stored; return False if it is not here. Waits for a write of it that is running."""
        if self._closed:
            return False
        waiting, running = self._cancel_writes(Reason.REMOVED, key=key)
        if running:
            self.wait([key], self.deadline_seconds)
        return admin.remove(self.ledger, [key]) > 0 or bool(waiting or running)

    def clear(self, namespace: bytes | None = None) -> int:
        """Remove all chunks of one namespace (its root), or all; saves in flight store nothing. Return how many."""
        if self._closed:
            return 0
        waiting, running = self._cancel_writes(Reason.CLEARED, namespace=namespace)
        return admin.clear(self.ledger, namespace) + len(waiting) + len(running)

    # ---- statistics ----------------------------------------------------------------------------------------------

    def stats(self) -> Mapping[str, int]:
        """Return gauges and counters of the store, and this process's `queued_writes`, `queued_reads`, `resting`.

        StoreError if the ledger does not answer.
        """
        if self._closed:
            return {}
        return {**admin.numbers(self.ledger, self.deadline_seconds), **self._queue_stats()}
