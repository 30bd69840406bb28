"""The I/O threads of a remote tier: they move chunks, answer queries and probe a store that failed."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from pagoda import codec
from pagoda.clock import Clock
from pagoda.codec import HEADER_BYTES
from pagoda.errors import ConfigError
from pagoda.layout import KVLayout, itemsize
from pagoda.metrics import COUNTERS, RateLimitedLog, Reason
from pagoda.slab import aligned
from pagoda.threads import Event, if_free
from pagoda.tiers.base import Bytes, Done
from pagoda.tiers.breaker import CircuitBreaker
from pagoda.tiers.io_queue import IoQueue, ReadRequest, WriteRequest
from pagoda.tiers.remote.presence import PresenceCache
from pagoda.tiers.remote.query_queue import Query, QueryFunction, QueryQueue
from pagoda.tiers.remote.store_client import PutResult, RefusedError, StoreClient, StoreConnection, Usage

STORE_ID = b"pagoda/remote/1\0"  # in the headers, where a store of one machine has its id

_logger = logging.getLogger("pagoda.tiers.remote")

_T = TypeVar("_T")

_SLOWEST_BYTES_PER_SECOND = 10e6  # a connection that moves less counts as hung
_FAILURES, _REST_SECONDS = 2, 1.0  # after these the store is only probed now and then
_REFUSALS, _REFUSED_SECONDS = (
    4,
    5.0,
)  # after these nothing is written for a while: the store is full or read-only
_TOUCH_REST_SECONDS = 600.0  # after a store refused to be touched
_PROBE_SECONDS = 0.1  # while the breaker is open: between two checks whether it is time for a probe
_MOST_ROOTS = 4096


class RemoteStore:
    """One remote store: its client, its health, what is known of its keys, and this process's counters. Thread-safe.

    It is the backend of a remote tier's worker pool (see `WorkerBackend`): threads move chunks, and a background thread
    answers queries and probes.
    """

    batch_chunks = 1

    def __init__(
        self, layout: KVLayout, client: StoreClient, codec_name: str, connections: int, deadline_seconds: float,
        clock: Clock,
    ) -> None:  # fmt: skip
        self.client, self.codec_name = client, codec_name
        self.name = client.name
        self.reader_threads = 1 if connections > 1 else 0
        self.deadline_seconds = deadline_seconds
        self._slowest = _SLOWEST_BYTES_PER_SECOND / connections  # which share the network link
        self.chunk_bytes, self.fingerprint = layout.chunk_bytes, layout.fingerprint
        # an opaque layout most likely holds the 16-bit types that models are served in
        self.word_bytes = min(4, itemsize(layout.planes[0].dtype)) if layout.planes else 2
        self.breaker = CircuitBreaker(clock, _FAILURES, _REST_SECONDS)
        self.write_breaker = CircuitBreaker(clock, _REFUSALS, _REFUSED_SECONDS)
        self.last_refusal = Reason.IO_ERROR
        self.touch_breaker = CircuitBreaker(clock, 1, _TOUCH_REST_SECONDS)
        self.presence = PresenceCache(clock)
        self.usage = Usage(None, None)
        self._log = RateLimitedLog(clock)
        self._counts: Counter[str] = Counter()
        self._roots: dict[bytes, None] = {}
        self.reset()

    def reset(self) -> None:
        """Start with new locks, in a forked child too; connections of a parent process are left alone."""
        self.queries = QueryQueue()
        self._lock = threading.Lock()
        self._connections: set[StoreConnection] = set()
        self._stopped = False
        self.trusted_since = 0.0  # connections that are older are replaced before their next use
        self._touch_lock, self._touch_connection = threading.RLock(), WorkerConnection(self)
        for part in (self.breaker, self.write_breaker, self.touch_breaker, self.presence, self._log):
            part.reset()

    # ---- the backend of the worker pool --------------------------------------------------------------------------

    def attach(self, queue: IoQueue) -> None:
        """Serve this queue from now on, with new locks."""
        self._queue = queue
        self.reset()

    def make_worker(self) -> RemoteWorker:
        """Return the worker of a new thread."""
        return RemoteWorker(self, self._queue)

    def background(self, stop: Event) -> None:
        """Answer queries and keep the connection for them open; probe the store while it rests."""
        connection = WorkerConnection(self)
        pause = self.client.keepalive_seconds
        try:
            while not stop.is_set():
                query = self.queries.take(_PROBE_SECONDS if self.breaker.is_open else pause)
                if query is not None:
                    self._answer(query, connection)
                if stop.is_set():
                    break
                if self.breaker.is_open and not self.breaker.resting:
                    self._call(connection, self._probe, "asking whether it is back")
                elif pause is not None and not self.breaker.is_open and connection.idle_for(pause):
                    self._call(connection, self._probe, "keeping a connection open")
        finally:
            self.queries.close()
            connection.close()

    def _answer(self, query: Query, connection: WorkerConnection) -> None:
        skipped = self.breaker.is_open
        answer = Reason.TIER_SKIPPED if skipped else self._call(connection, query.function, "a question")
        self.queries.finish(query, answer)

    def _call(self, connection: WorkerConnection, function: QueryFunction, what: str) -> int | Reason:
        try:
            return connection.call(function, what)
        except Exception as error:  # noqa: BLE001  # a background thread: other queries still need their answers
            return self.record_error(error, what)

    def _probe(self, connection: StoreConnection) -> int:
        connection.ping(self.deadline())
        return 0

    def interrupt(self) -> None:
        """Wake the background thread, and make all calls that wait for the store fail."""
        with self._lock:
            self._stopped = True
            connections = list(self._connections)
        self.queries.wake()
        for connection in connections:
            connection.abort()

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter of this process."""
        with self._lock:
            self._counts[name] += number

    def record_error(self, error: Exception, what: str, *, rests: bool = True) -> Reason:
        """Log that something failed and return the reason to report. OSErrors count for the breaker."""
        if isinstance(error, OSError):
            self.breaker.record_failure(rests=rests)
            self.queries.wake()
        reason = Reason.DEADLINE if isinstance(error, TimeoutError) else Reason.IO_ERROR
        self.log_reason(reason, f"{what} failed: {type(error).__name__}: {error}")
        return reason

    def close(self) -> None:
        """Close the connection for touches; if it is in use, its user closes it. Workers have closed their own."""
        if_free(self._touch_lock, self._touch_connection.close)

    # ---- what is known -------------------------------------------------------------------------------------------

    def register(self, root: bytes) -> None:
        """Remember that there are keys of this namespace."""
        with self._lock:
            self._roots[root] = None
            while len(self._roots) > _MOST_ROOTS:
                del self._roots[next(iter(self._roots))]

    def roots(self, namespace: bytes | None) -> Sequence[bytes]:
        """Return the given namespace, or all that are registered."""
        return list(self._roots) if namespace is None else [namespace]

    def counters(self) -> dict[str, int]:
        """Return all counters of this process."""
        with self._lock:
            return {name: self._counts[name] for name in COUNTERS}

    def deadline(self, nbytes: int = 0) -> float:
        """Return when a call that starts now and moves `nbytes` must be over (time.monotonic())."""
        return time.monotonic() + self.deadline_seconds + nbytes / self._slowest

    def record_refusal(self, refusal: RefusedError, what: str, breaker: CircuitBreaker) -> Reason:
        """Log that the store refused, count it for `breaker` and return the reason to report."""
        self.last_refusal = refusal.reason
        breaker.record_failure()
        self.queries.wake()
        self.log_reason(refusal.reason, f"{what} was refused: {refusal}")
        return refusal.reason

    def log_reason(self, reason: Reason, message: str) -> None:
        """Log what went wrong, at most one line per reason in a while."""
        self._log.warn(_logger, reason, f"{self.client.address}: {message}")

    # ---- recency -------------------------------------------------------------------------------------------------

    def touch(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool] | None:
        """Touch these keys and return which of them are present; None: unknown at present.

        If the store refuses touches, the log says so, and the number of leading keys that are present is asked for.
        """

        def touched(connection: StoreConnection) -> list[bool]:
            return connection.touch(namespace, keys, self.deadline())

        def leading(connection: StoreConnection) -> list[bool]:
            found = connection.find(namespace, keys, self.deadline())
            return [True] * found + [False] * (len(keys) - found)

        with self._touch_lock:
            here: list[bool] | Reason = self.last_refusal
            if not self.touch_breaker.resting:
                here = self._touch_connection.call(touched, "touching chunks in use", self.touch_breaker)
            if self.touch_breaker.resting:
                here = self._touch_connection.call(leading, "asking for chunks in use")
        if isinstance(here, Reason):
            return None
        for present in (True, False):
            known = [key for key, there in zip(keys, here, strict=True) if there is present]
            self.presence.record(namespace, known, present)
        return here

    # ---- connections ---------------------------------------------------------------------------------------------

    def connect(self, until: float) -> StoreConnection:
        """Return a new connection that `interrupt` reaches, also while it is being made. OSError, RefusedError."""
        connection = self.client.connection()
        try:
            with self._lock:
                self._connections.add(connection)
                stopped = self._stopped
            if stopped:
                connection.abort()
            return connection.open(until)
        except BaseException:
            self.disconnect(connection)
            raise

    def disconnect(self, connection: StoreConnection) -> None:
        """Close a connection."""
        with self._lock:
            self._connections.discard(connection)
        connection.close()


class WorkerConnection:
    """The connection of one thread: made when it is needed, replaced when it has failed."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        self._connection: StoreConnection | None = None
        self._made = self._used = 0.0  # when (time.monotonic())

    def call(
        self, work: Callable[[StoreConnection], _T], what: str, refusals: CircuitBreaker | None = None
    ) -> _T | Reason:
        """Run `work` with the connection, or return why it failed. After an old connection failed, try a new one.

        Refusals count for `refusals`, by default for the store's breaker.
        """
        moved = False
        for _ in range(2):
            old = self._is_ready()
            try:
                done = work(self._connection or self._connected())
            except RefusedError as refusal:
                if refusal.reconnect:
                    self.close()
                    if old:
                        moved = True
                        continue
                return self._store.record_refusal(refusal, what, refusals or self._store.breaker)
            except OSError as error:
                self.close()
                if old and not isinstance(error, TimeoutError):
                    continue
                return self._old_is_late(error, what) if old else self._store.record_error(error, what)
            except BaseException:
                self.close()
                raise
            self._record_success(refusals, moved)
            return done
        raise AssertionError("a new connection is not old")

    def _is_ready(self) -> bool:
        """Return whether there is a connection from before; close one that is no longer trusted."""
        if self._connection is not None and self._made < self._store.trusted_since:
            self.close()
        return self._connection is not None

    def _connected(self) -> StoreConnection:
        made = time.monotonic()
        self._connection = self._store.connect(self._store.deadline())
        self._made = made
        return self._connection

    def _record_success(self, refusals: CircuitBreaker | None, moved: bool) -> None:
        self._used = time.monotonic()
        self._store.breaker.record_success()
        if refusals is not None:
            refusals.record_success()
        if moved:  # the other connections lead to the server that this one has left
            self._store.trusted_since = self._made

    def _old_is_late(self, error: OSError, what: str) -> Reason:
        """Record that an old connection did not answer: it may be broken, and so may all that are as old."""
        self._store.trusted_since = time.monotonic()
        return self._store.record_error(error, what, rests=False)

    def idle_for(self, seconds: float) -> bool:
        """Return whether there is a connection that was last used so long ago."""
        return self._connection is not None and time.monotonic() - self._used >= seconds

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._store.disconnect(self._connection)
            self._connection = None


class RemoteWorker:
    """The loads and saves of one thread, with its own connection and buffers.

    Chunks are encoded and sealed before they are sent, decoded and verified after they are received.
    """

    def __init__(self, store: RemoteStore, queue: IoQueue) -> None:
        self._store, self._queue = store, queue
        self._connection = WorkerConnection(store)
        self._page: Bytes = aligned(HEADER_BYTES)
        self._encoded: Bytes | None = None
        self._keep = False  # whether a value that the present load does not serve stays in the store

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _encoding_buffer(self) -> Bytes:
        """Return space for one encoded chunk, made when first needed."""
        if self._encoded is None:
            self._encoded = aligned(self._store.chunk_bytes)
        return self._encoded

    # ---- loading -------------------------------------------------------------------------------------------------

    def load(self, read: ReadRequest) -> None:
        """Do one read and end its future, whatever happens."""
        store, self._keep = self._store, False
        try:
            reason = self._load(read)
        except Exception as error:  # noqa: BLE001  # a background thread: the error becomes the future's value
            reason = store.record_error(error, "a load")
        if reason is None:
            store.count("loaded_chunks")
            store.count("loaded_bytes", store.chunk_bytes)
        else:
            store.count(f"miss_{reason}")
            if reason in (Reason.ABSENT, Reason.FAILED_CHECK) and not self._keep:  # else it may be present
                store.presence.record(read.namespace, [read.key], False)
        self._queue.finish_read(read, Done(reason is None, reason), store.chunk_bytes)

    def _load(self, read: ReadRequest) -> Reason | None:
        if self._queue.copy_from_write(read, self._store.chunk_bytes):
            return None
        for root in self._store.roots(read.namespace):
            if self._store.breaker.is_open:
                return Reason.TIER_SKIPPED
            reason = self._connection.call(
                lambda connection, root=root: self._get(connection, root, read),  # type: ignore[misc]
                "a load",
            )
            if reason is not Reason.ABSENT:
                return reason
        return Reason.ABSENT

    def _get(self, connection: StoreConnection, root: bytes, read: ReadRequest) -> Reason | None:
        store = self._store
        payload = read.buffer[: store.chunk_bytes]
        expected = self._expected_header(read, root)
        found: codec.Header | None = None

        def destination() -> Bytes | None:
            nonlocal found
            found = codec.parse(self._page)
            self._keep = self._is_good_for_others(found, expected, read)
            if self._keep or found is None or not codec.agrees(found, expected):
                return None
            nbytes = found.stored_bytes or found.length
            return payload if found.codec == "raw" else self._encoding_buffer()[:nbytes]

        try:
            count = connection.get(root, read.key, self._page, destination, store.deadline(store.chunk_bytes))
        except RefusedError as refusal:
            if refusal.reason is not Reason.FAILED_CHECK:
                raise
            return Reason.FAILED_CHECK if self._keep else self._remove_bad(connection, root, read.key)
        if count is None:
            return Reason.ABSENT
        if found is None or not self._decoded(found.codec, count, payload):
            return self._remove_bad(connection, root, read.key)
        if codec.verify(self._page, payload, expected) is not None:
            return self._remove_bad(connection, root, read.key)
        return None

    def _is_good_for_others(
        self, found: codec.Header | None, expected: codec.Expected, read: ReadRequest
    ) -> bool:
        """Return whether a value that cannot be served stays: other callers can use it, or this request was wrong."""
        if codec.is_foreign(self._page):
            self._store.log_reason(
                Reason.FAILED_CHECK, "a chunk that another version wrote cannot be read: it stays"
            )
            return True
        if found is None or not codec.agrees(found, expected):
            return False
        return read.position not in (None, found.position) or not self._can_read(found.codec)

    def _can_read(self, name: str) -> bool:
        """Return whether the library of a codec is installed here; log it if not."""
        try:
            codec.require(name)
        except ConfigError as missing:
            self._store.log_reason(Reason.FAILED_CHECK, f"chunks cannot be read: {missing}")
            return False
        return True

    def _decoded(self, name: str, count: int, payload: Bytes) -> bool:
        if name == "raw":
            return count == payload.nbytes
        return codec.decode(name, self._encoding_buffer()[:count], self._store.word_bytes, payload)

    def _remove_bad(self, connection: StoreConnection, root: bytes, key: bytes) -> Reason:
        """Remove a value that cannot be served; otherwise its key could not be stored again."""
        self._store.count("failed_checks")
        with contextlib.suppress(RefusedError):
            connection.remove(root, [key], self._store.deadline())
        return Reason.FAILED_CHECK

    def _expected_header(self, read: ReadRequest, root: bytes) -> codec.Expected:
        return codec.Expected(
            store_id=STORE_ID,
            slot=0,
            namespace=root,
            epoch=0,
            key=read.key,
            length=self._store.chunk_bytes,
            fingerprint=self._store.fingerprint,
        )

    # ---- saving --------------------------------------------------------------------------------------------------

    def save(self, writes: Sequence[WriteRequest]) -> None:
        """Do a batch of writes and end their futures, whatever happens."""
        for write in writes:
            try:
                self._queue.read_all(self.load)
                reason = self._save(write)
            except Exception as error:  # noqa: BLE001  # a background thread: the error becomes the future's value
                reason = self._store.record_error(error, "a save")
            if reason is not None:
                self._store.count(f"drop_{reason}")
            self._queue.finish_write(write, Done(reason is None, reason))

    def _save(self, write: WriteRequest) -> Reason | None:
        store = self._store
        if store.breaker.is_open:
            return Reason.TIER_SKIPPED
        if store.write_breaker.resting:
            return store.last_refusal
        if not write.is_valid():
            return write.cancelled or Reason.STALE
        if store.presence.get(write.namespace, write.chunk.key):  # the late answer of a look-up
            return None
        payload = write.chunk.payload[: store.chunk_bytes]
        encoding_buffer = self._page[:0] if store.codec_name == "raw" else self._encoding_buffer()
        name, stored = codec.encode(store.codec_name, payload, store.word_bytes, encoding_buffer)
        codec.seal(self._header(write, name, stored.nbytes), payload, self._page)
        # From the checksum to this line the payload was what its key names, and so is all that verifies against it.
        if not write.is_valid():
            return write.cancelled or Reason.STALE

        def is_valid() -> bool:
            return write.is_valid() if name == "raw" else write.cancelled is None

        def put(connection: StoreConnection) -> PutResult:
            until = store.deadline(stored.nbytes)
            return connection.put(write.namespace, write.chunk.key, self._page, stored, is_valid, until)

        result = self._connection.call(put, "a save", store.write_breaker)
        return result if isinstance(result, Reason) else self._finish_put(write, result)

    def _finish_put(self, write: WriteRequest, result: PutResult) -> Reason | None:
        store, key = self._store, write.chunk.key
        if result is PutResult.BUSY:
            return Reason.BUSY
        if result is PutResult.STALE:
            return write.cancelled or Reason.STALE
        if write.cancelled is not None:  # its key was removed while it was being published
            self._connection.call(
                lambda connection: connection.remove(write.namespace, [key], store.deadline()), "a removal"
            )
            return write.cancelled
        store.presence.record(write.namespace, [key], True)
        if result is PutResult.STORED:
            store.count("stored_chunks")
            store.count("stored_bytes", store.chunk_bytes)
        return None

    def _header(self, write: WriteRequest, name: str, stored_bytes: int) -> codec.Header:
        return codec.Header(
            store_id=STORE_ID,
            slot=0,
            namespace=write.namespace,
            epoch=0,
            key=write.chunk.key,
            position=write.chunk.position,
            length=self._store.chunk_bytes,
            tokens=write.chunk.tokens,
            codec=name,
            fingerprint=self._store.fingerprint,
            sequence=secrets.randbits(63),
            stored_bytes=stored_bytes,
        )
