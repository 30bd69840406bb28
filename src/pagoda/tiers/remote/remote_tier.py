"""The remote tier: chunks in a store that many machines share, over a network that may fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from pagoda import codec as codecs
from pagoda.clock import Clock
from pagoda.errors import StoreError
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.metrics import Reason
from pagoda.tiers.base import Bytes, Chunk, Done, check_sizes, clamp_deadline, completed_future
from pagoda.tiers.io_queue import QueuedTier, ReadRequest, WriteRequest
from pagoda.tiers.remote.remote_worker import RemoteStore
from pagoda.tiers.remote.store_client import (
    ListingDeadline,
    RefusedError,
    StoreClient,
    StoreConnection,
)

_MOST_KEYS = 1024  # in one query
_STEP_SECONDS = 10.0  # for a step of a call that lists all names
_LISTING_SECONDS = 60.0  # for all its steps together
_MOST_TOUCHED = 16  # at once: one round of requests to an object store


class RemoteTier(QueuedTier):
    """Stores chunks in a remote store, with background threads that have a connection each. Thread-safe and fork-safe.

    A background thread asks the store which keys it has, and a look-up waits for that at most `look_seconds`: a late
    answer serves the next look-up. After failures in a row the store is skipped (`resting`) until it answers a probe,
    which is sent in the background; meanwhile no call touches the network. Counters are of this process.
    """

    def __init__(
        self,
        layout: KVLayout,
        client: StoreClient,
        *,
        codec: str = "raw",
        connections: int = 4,
        queue_chunks: int = 64,
        deadline_seconds: float = 1.0,
        look_seconds: float = 0.05,
        clock: Clock | None = None,
    ) -> None:
        """Connect to nothing yet. ConfigError for a codec that cannot be used, ValueError for counts below 1."""
        if connections < 1 or queue_chunks < 1:
            raise ValueError(
                f"connections and queue_chunks must be at least 1, got {connections}, {queue_chunks}"
            )
        codecs.require(codec)
        self.name = client.name
        self.address = client.address
        self.believed_seconds = client.believed_seconds
        self.chunk_bytes = layout.chunk_bytes
        self.slot_bytes = layout.slot_bytes
        self.deadline_seconds = deadline_seconds
        self._look_seconds = look_seconds
        self._store = RemoteStore(layout, client, codec, connections, deadline_seconds, clock or Clock())
        super().__init__(self._store, connections, queue_chunks)

    def register(self, namespace: Namespace) -> None:
        """Remember the namespace; nothing is written."""
        self._store.register(namespace.root)

    @property
    def resting(self) -> bool:
        """Whether the store is skipped after failures in a row. Nothing is found meanwhile."""
        return self._store.breaker.is_open

    # ---- finding -------------------------------------------------------------------------------------------------

    def find(
        self, keys: Sequence[bytes], *, start: int = 0, stamp: int | None = None, namespace: bytes | None = None,
        touch: bool = True, deadline_seconds: float | None = None,
    ) -> int:  # fmt: skip
        """Return how many leading keys are stored or queued, as far as that is known soon; copies nothing."""
        if self._refusal() is not None or not keys:
            return 0
        queued = self._pool.queue.pending_writes(keys)
        until = time.monotonic() + clamp_deadline(self._look_seconds, deadline_seconds)
        at = 0
        while at < len(keys):
            write = queued.get(keys[at])
            is_queued = write is not None and write.is_valid() and write.matches(namespace, start + at)
            known = True if is_queued else self._store.presence.get(namespace, keys[at])
            if known is None:
                asked = keys[at : at + _MOST_KEYS]
                found = self._find_in_store(asked, namespace, until)
                at += found
                if not found or (found < len(asked) and keys[at] not in queued):
                    break
            elif known:
                at += 1
            else:
                break
        return at

    def _find_in_store(self, keys: Sequence[bytes], namespace: bytes | None, until: float) -> int:
        """Return how many leading keys the store has; 0 if it does not answer before `until`."""
        store = self._store

        def find(connection: StoreConnection) -> int:
            roots = store.roots(namespace)
            found = max((connection.find(root, keys, store.deadline()) for root in roots), default=0)
            store.presence.record(namespace, keys[:found], True)
            store.presence.record(namespace, keys[found : found + 1], False)
            return found

        answer = self._query((namespace, *keys), find, until)
        if isinstance(answer, Reason):
            store.count(f"miss_{answer}")
            return 0
        return answer

    def _query(self, name: object, function: Callable[[StoreConnection], int], until: float) -> int | Reason:
        if not self._pool.start():
            return Reason.IO_ERROR
        future = self._store.queries.submit(name, function)
        try:
            return future.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            return Reason.DEADLINE

    def touch(
        self, keys: Sequence[bytes], *, namespace: bytes, start: int = 0, stamp: int | None = None, asked: bool = True
    ) -> list[bool] | None:  # fmt: skip
        """Tell the store that these keys are in use. Waits for it, up to its deadlines. See Tier.touch."""
        if self._refusal() is not None:
            return None
        queued = self._pool.queue.pending_writes(
            keys
        )  # first: what leaves the queue meanwhile is in the store
        here: list[bool] = []
        while len(here) < len(keys):
            there = self._store.touch(namespace, keys[len(here) : len(here) + _MOST_TOUCHED])
            if there is None:
                return None
            here += there
        return [present or key in queued for key, present in zip(keys, here, strict=True)]

    def contains(
        self, key: bytes, namespace: bytes | None = None, *, deadline_seconds: float | None = None
    ) -> bool:
        """Return whether the key is stored or queued."""
        return self.find([key], namespace=namespace, deadline_seconds=deadline_seconds) == 1

    def knows(self, key: bytes, namespace: bytes) -> bool:
        """Return whether the store said lately if it has this key."""
        return self._store.presence.get(namespace, key) is not None

    def holders(self, key: bytes) -> list[str]:
        """Return what keeps this chunk: "in flight". Nothing can prevent the store from evicting it."""
        return ["in flight"] if self.in_flight(key) else []

    # ---- saving --------------------------------------------------------------------------------------------------

    def save(
        self, chunks: Sequence[Chunk], namespace: bytes, *, stamp: int | None = None
    ) -> list[Future[Done]]:
        """Queue chunks, which are sent directly from their payloads; never waits for space. See Tier.save."""
        check_sizes("payload", (chunk.payload for chunk in chunks), self.chunk_bytes)
        refusal = self._refusal()
        if refusal is not None:
            return [self._dropped(refusal) for _ in chunks]
        return [
            completed_future(True)
            if self._store.presence.get(namespace, chunk.key)
            else self._enqueue_write(WriteRequest(chunk, namespace, stamp))
            for chunk in chunks
        ]

    def _count(self, name: str) -> None:
        self._store.count(name)

    # ---- loading -------------------------------------------------------------------------------------------------

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[Bytes], *, start: int = 0, namespace: bytes,
        deadline_seconds: float | None = None,
    ) -> list[Future[Done]]:  # fmt: skip
        """Receive chunks directly into `buffers` and verify them. See Tier.load."""
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers: need one buffer a key")
        check_sizes("buffer", buffers, self.chunk_bytes)
        reads = [
            ReadRequest(key, start + n, namespace, buffer)
            for n, (key, buffer) in enumerate(zip(keys, buffers, strict=True))
        ]
        queued = self._pool.queue.pending_writes(keys)
        return [self._enqueue_read(read, queued.get(read.key)) for read in reads]

    def _enqueue_read(self, read: ReadRequest, write: WriteRequest | None) -> Future[Done]:
        read.write = write
        refusal = self._refusal()
        if refusal is None and write is None and self._store.presence.get(read.namespace, read.key) is False:
            refusal = Reason.ABSENT
        if refusal is None:
            refusal = self._pool.queue.add_read(read)
        if refusal is None:
            return read.future
        self._store.count(f"miss_{refusal}")
        return completed_future(False, refusal)

    def _load_one(self, key: bytes, buffer: Bytes, namespace: bytes | None) -> Future[Done]:
        read = ReadRequest(key, None, namespace, buffer)
        return self._enqueue_read(read, self._pool.queue.pending_writes([key]).get(key))

    # ---- removing ------------------------------------------------------------------------------------------------

    def remove(self, key: bytes, namespace: bytes | None = None) -> bool:
        """Remove a chunk, queued or stored; return False if it is not here. StoreError if the store does not answer."""
        if self._closed:
            return False
        waiting, running = self._cancel_writes(Reason.REMOVED, key=key)
        if running:
            self.wait([key], self.deadline_seconds)
        store = self._store

        def remove(connection: StoreConnection) -> int:
            return sum(connection.remove(root, [key], store.deadline()) for root in store.roots(namespace))

        removed = self._query(object(), remove, time.monotonic() + 2 * self.deadline_seconds)
        store.presence.clear()
        if isinstance(removed, Reason):
            raise StoreError(f"{self.address}: a chunk was not removed ({removed}): try again")
        return removed > 0 or bool(waiting or running)

    def clear(self, namespace: bytes | None = None) -> int:
        """Remove all chunks of one namespace (its root), or all under our prefix. Return how many.

        Saves of this process that are in flight store nothing; those of other machines may. Raises StoreError if the
        store fails before the end.
        """
        if self._closed:
            return 0
        waiting, running = self._cancel_writes(Reason.CLEARED, namespace=namespace)
        self.wait([write.chunk.key for write in running], self.deadline_seconds)
        try:
            connection = self._store.connect(self._store.deadline())
            try:
                deadline = ListingDeadline(_STEP_SECONDS, _LISTING_SECONDS)
                return connection.clear(namespace, deadline) + len(waiting)
            finally:
                self._store.disconnect(connection)
        except (OSError, RefusedError) as error:
            raise StoreError(f"{self.address}: {type(error).__name__}: {error}") from error
        finally:
            self._store.presence.clear()

    # ---- statistics ----------------------------------------------------------------------------------------------

    def stats(self) -> Mapping[str, int]:
        """Return this process's counters, `queued_writes`, `queued_reads`, `resting`, and how full the store is."""
        if self._refusal() is None:
            self._query("usage", self._update_usage, time.monotonic() + self._look_seconds)
        known = {name: size for name, size in self._store.usage._asdict().items() if size is not None}
        return {**self._store.counters(), **self._queue_stats(), **known}

    def _update_usage(self, connection: StoreConnection) -> int:
        self._store.usage = connection.usage(self._store.deadline())
        return 0
