"""The remote tier: chunks in a store that many machines share, over a network that may fail.

`RemoteTier` is called by the cache and queues reads and writes. `RemoteStore` is what its threads
share. One thread answers queries and probes a store that failed; each other thread has a
`RemoteWorker`, which moves chunks.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import compress
from operator import methodcaller
from typing import TypeVar

from pagoda import codec
from pagoda.base.clock import Clock, Deadline
from pagoda.base.errors import ConfigError, StoreError
from pagoda.base.fork import per_process
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import COUNTERS, RateLimitedLog, Reason
from pagoda.base.oldest import drop_oldest
from pagoda.base.signal_safe_threads import Event, if_free
from pagoda.codec import HEADER_BYTES, require, require_layout
from pagoda.keys import Namespace
from pagoda.layout import KVLayout, itemsize
from pagoda.slab import aligned
from pagoda.tiers.base import Bytes, Chunk, Done, clamp_deadline
from pagoda.tiers.breaker import CircuitBreaker
from pagoda.tiers.io_queue import (
    IoQueue,
    IoWorker,
    QueuedTier,
    ReadRequest,
    WorkerBackend,
    WriteRequest,
)
from pagoda.tiers.remote.health import Health
from pagoda.tiers.remote.kept_connection import KeptConnection
from pagoda.tiers.remote.leading_run import EXACT_KEYS, EXACT_REQUESTS
from pagoda.tiers.remote.presence import PresenceCache
from pagoda.tiers.remote.query_queue import QueryQueue
from pagoda.tiers.remote.store_client import (
    GetRequest,
    ListingDeadline,
    PutRequest,
    PutResult,
    RefusedError,
    ServerError,
    StoreClient,
    StoreConnection,
    Usage,
    reason_of,
)

# in the header field in which a local store writes its id
STORE_ID = b"pagoda/remote/1\0"

_logger = guarded_logger("pagoda.tiers.remote")

_T = TypeVar("_T")

_SLOWEST_BYTES_PER_SECOND = 10e6  # a connection that moves less counts as hung
# the pause before the next touch after the store refused one
_TOUCH_REST_SECONDS = 600.0
# while the breaker is open: the pause between two checks whether a probe is due
_PROBE_SECONDS = 0.1
_MOST_ROOTS = 4096
_STEP_SECONDS = 10.0  # for one step of a call that lists all names
_LISTING_SECONDS = 60.0  # for all its steps together
# keys touched at once: one round of requests to an object store
_MOST_TOUCHED = 16
# writes of one connection that are claimed at once; few, so that they are sent soon
_BATCH_CHUNKS = 16
_BATCH_BYTES = 4 << 20
# the pause before asking again for a chunk that another machine is sending: as long as the wait so
# far, within these limits
_BUSY_PAUSE_SECONDS = 0.1, 1.0
# how long that is repeated, in addition to twice the time limit for sending a batch
_BUSY_SECONDS = 10.0
# the rank rises by this with each doubling of the position in a chain, so that a tail is evicted
# before its head, although a store compares only a few chunks at a time; but even the last chunk of
# the longest prompt ranks before chunks that were used some seconds earlier
_RANK_MS = 300


_NOT_STORED = {
    PutResult.BUSY: Reason.BUSY,
    PutResult.UNSEEN: Reason.NOT_ADMITTED,
    PutResult.STALE: Reason.STALE,
}


class RemoteTier(QueuedTier):
    """Stores chunks in a remote store, by background threads with one connection each. Thread-safe
    and fork-safe.

    A background thread asks the store which keys it has, and a lookup waits for that at most
    `look_seconds`; a late answer is used by the next lookup. After failures in a row the store is
    skipped (`resting`) until it answers a probe, which is sent in the background; meanwhile no call
    uses the network. Counters are those of this process.
    """

    is_shared = True

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
        answered: Callable[[], None] | None = None,
    ) -> None:
        """Connect to nothing yet. ConfigError for a codec that cannot be used, ValueError for
        counts below 1.

        `answered` is called once, on the background thread, after the store's first answer; it must
        not raise.
        """
        if connections < 1 or queue_chunks < 1:
            raise ValueError(
                f"connections and queue_chunks must be at least 1, got {connections}, "
                f"{queue_chunks}"
            )
        require(codec)
        require_layout(codec, layout)
        self.codec = codec
        self.name = client.name
        self.address = client.address
        self.believed_seconds = client.believed_seconds
        self.read_only = client.read_only
        self.chunk_bytes = layout.chunk_bytes
        self.slot_bytes = layout.slot_bytes
        self.deadline_seconds = deadline_seconds
        self._look_seconds = look_seconds
        self._store = RemoteStore(
            layout,
            client,
            codec,
            connections,
            deadline_seconds,
            clock or Clock(),
            answered,
        )
        super().__init__(self._store, connections, queue_chunks)

    def register(self, namespace: Namespace) -> None:
        """Remember the namespace; nothing is written."""
        self._store.register(namespace.root)

    @property
    def resting(self) -> bool:
        """Whether the store is skipped after failures in a row. During that time nothing is
        found.
        """
        return self._store.breaker.is_open

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
        """Return how many leading keys are stored or queued, as far as that is known in time;
        copies nothing.
        """
        queue = self._open_queue()
        if isinstance(queue, Reason) or not keys:
            return 0
        queued = queue.pending_writes(keys)
        until = time.monotonic() + clamp_deadline(
            self._look_seconds, deadline_seconds
        )
        at = 0
        while at < len(keys):
            write = queued.get(keys[at])
            position = None if start is None else start + at
            is_queued = (
                write is not None
                and write.is_valid()
                and write.matches(namespace, position)
            )
            known = (
                True
                if is_queued
                else self._store.presence.get(namespace, keys[at])
            )
            if known is None:
                asked = keys[at:]
                count = self._store.presence.run_to_ask(
                    namespace, asked, self._store.exact_keys
                )
                asked = asked[:count]
                found = self._find_in_store(asked, namespace, until)
                at += found
                if not found or (found < len(asked) and keys[at] not in queued):
                    break
            elif known:
                at += 1
            else:
                break
        return at

    def match_each(
        self,
        keys: Sequence[bytes],
        *,
        start: int | None = 0,
        stamp: int | None = None,
        namespace: bytes | None = None,
        deadline_seconds: float | None = None,
    ) -> list[bool]:
        """Return for each key whether it is stored or queued, also behind absent ones, as far as
        that is known in time: the store is asked once.
        """
        queue = self._open_queue()
        if isinstance(queue, Reason) or not keys:
            return [False] * len(keys)
        until = time.monotonic() + clamp_deadline(
            self._look_seconds, deadline_seconds
        )
        queued = queue.pending_writes(keys)
        presence = self._store.presence

        def known(at: int) -> bool | None:
            write = queued.get(keys[at])
            position = None if start is None else start + at
            is_queued = (
                write is not None
                and write.is_valid()
                and write.matches(namespace, position)
            )
            if is_queued or presence.is_stored(namespace, keys[at]):
                return True
            # what a look-up took for present was not asked about
            return False if presence.get(namespace, keys[at]) is False else None

        here = [known(at) for at in range(len(keys))]
        unknown = [at for at, there in enumerate(here) if there is None]
        if unknown:
            self._ask_each([keys[at] for at in unknown], namespace, until)
            for at in unknown:
                here[at] = presence.get(namespace, keys[at])
        return [there is True for there in here]

    def _ask_each(
        self, keys: Sequence[bytes], namespace: bytes | None, until: float
    ) -> None:
        """Ask the store which of these keys it has; what it answers is in `presence` afterwards. A
        late answer is used by the next lookup.
        """
        store = self._store

        def ask(connection: StoreConnection) -> int:
            present = set[bytes]()
            began = store.presence.now_ns()
            roots = store.roots(namespace)
            for root in roots:
                for first in range(0, len(keys), EXACT_KEYS):
                    some = keys[first : first + EXACT_KEYS]
                    here = connection.present(root, some, store.deadline())
                    present.update(compress(some, here))
            for is_present in (True, False):
                found = [key for key in keys if (key in present) is is_present]
                store.presence.record(
                    namespace, found, is_present, since_ns=began
                )
            if roots:
                store.note_answer()
            return len(present)

        answer = self._query((namespace, "each", *keys), ask, until)
        if isinstance(answer, Reason):
            store.count({f"miss_{answer}": 1})

    def _find_in_store(
        self, keys: Sequence[bytes], namespace: bytes | None, until: float
    ) -> int:
        """Return how many leading keys the store has; 0 if it does not answer before `until`."""
        store = self._store

        def find(connection: StoreConnection) -> int:
            began = store.presence.now_ns()
            roots = store.roots(namespace)
            found = max(
                (connection.find(root, keys, store.deadline()) for root in roots),
                default=0,
            )
            store.presence.record(
                namespace, keys[:found], True, asked=len(keys) <= store.exact_keys
            )
            store.presence.record(
                namespace, keys[found : found + 1], False, since_ns=began
            )
            if roots:
                store.note_answer()
            return found

        answer = self._query((namespace, *keys), find, until)
        if isinstance(answer, Reason):
            store.count({f"miss_{answer}": 1})
            return 0
        return answer

    def _query(
        self,
        name: object,
        function: Callable[[StoreConnection], int],
        until: float,
    ) -> int | Reason:
        if not self._pool.start():
            return Reason.IO_ERROR
        future = self._store.queries.submit(name, function)
        try:
            return future.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            return Reason.DEADLINE

    def touch(
        self,
        keys: Sequence[bytes],
        *,
        namespace: bytes,
        start: int = 0,
        stamp: int | None = None,
        asked: bool = True,
    ) -> list[bool] | None:
        """Touch these keys in the store. Waits for the store, up to its deadlines. See
        Tier.touch.
        """
        queue = self._open_queue()
        if isinstance(queue, Reason):
            return None
        # read first: a chunk that leaves the queue after this is in the store
        queued = queue.pending_writes(keys)
        here: list[bool] = []
        stamp = self._store.stamp() if stamp is None else stamp
        while len(here) < len(keys):
            touched = keys[len(here) : len(here) + _MOST_TOUCHED]
            there = self._store.touch(
                namespace, touched, start + len(here), stamp
            )
            if there is None:
                return None
            here += there
        return [
            present or key in queued
            for key, present in zip(keys, here, strict=True)
        ]

    def contains(
        self,
        key: bytes,
        namespace: bytes | None = None,
        *,
        deadline_seconds: float | None = None,
    ) -> bool:
        """Return whether the key is stored or queued."""
        return (
            self.match_prefix(
                [key], namespace=namespace, deadline_seconds=deadline_seconds
            )
            == 1
        )

    @property
    def refusal(self) -> tuple[Reason, str] | None:
        """Why the store refused its last question, as a reason and in words; None if it has
        answered since.
        """
        return self._store.refusal

    def knows(self, key: bytes, namespace: bytes) -> bool:
        """Return whether the store has recently answered whether it has this key."""
        return self._store.presence.is_answered(namespace, key)

    def is_silent(self, keys: Sequence[bytes], namespace: bytes) -> bool:
        """Return whether a `match_prefix` of these keys still waits for the store. One that a part
        of the store could not answer does not: the other parts may be asked at once.
        """
        return self._store.queries.is_unanswered((namespace, *keys))

    def holders(self, key: bytes) -> list[str]:
        """Return what keeps this chunk: "in flight" or nothing. The store may evict any chunk."""
        return ["in flight"] if self.in_flight(key) else []

    # ---- saving and loading ----------------------------------------------------------------------

    def store(
        self,
        chunks: Sequence[Chunk],
        namespace: bytes,
        *,
        stamp: int | None = None,
    ) -> list[Future[Done]]:
        """Queue chunks to be sent; never waits for space. See Tier.store."""
        stamp = self._store.stamp() if stamp is None else stamp
        stored = self._stored(chunks, namespace, stamp)
        new = [
            chunk.key
            for chunk, is_stored in zip(chunks, stored, strict=True)
            if not is_stored
        ]
        self._store.client.begin_run(new, stamp)
        return super().store(chunks, namespace, stamp=stamp)

    def _stored(
        self, chunks: Sequence[Chunk], namespace: bytes, stamp: int
    ) -> Iterator[bool]:
        return (
            self._store.presence.is_stored(namespace, chunk.key)
            for chunk in chunks
        )

    def _count(self, name: str) -> None:
        self._store.count({name: 1})

    def _sources(
        self,
        queue: IoQueue,
        keys: Sequence[bytes],
        start: int | None,
        namespace: bytes | None,
        deadline_seconds: float | None,
    ) -> Iterator[WriteRequest | Reason | None]:
        queued = queue.pending_writes(keys)
        presence = self._store.presence
        for key in keys:
            known_absent = (
                namespace is not None
                and key not in queued
                and presence.get(namespace, key) is False
            )
            yield Reason.ABSENT if known_absent else queued.get(key)

    # ---- removing --------------------------------------------------------------------------------

    def remove(self, key: bytes, namespace: bytes | None = None) -> bool:
        """Remove a chunk, queued or stored; return False if it is absent. StoreError if the store
        does not answer.
        """
        if self._closed:
            return False
        cancelled = self._cancel_writes(
            Reason.REMOVED, key=key, wait_seconds=self.deadline_seconds
        )
        store = self._store

        def remove(connection: StoreConnection) -> int:
            return sum(
                connection.remove(root, [key], store.deadline())
                for root in store.roots(namespace)
            )

        removed = self._query(
            object(), remove, time.monotonic() + 2 * self.deadline_seconds
        )
        store.presence.clear()
        if isinstance(removed, Reason):
            raise StoreError(
                f"{self.address}: a chunk was not removed ({removed}): try again"
            )
        return removed > 0 or any(cancelled)

    def clear(self, namespace: bytes | None = None) -> int:
        """Remove all chunks of one namespace (its root), or all under our prefix. Return their
        number.

        Saves of this process that are in flight store nothing; those of other machines may. Raises
        StoreError if the store fails before the end.
        """
        if self._closed:
            return 0
        waiting, _ = self._cancel_writes(
            Reason.CLEARED,
            namespace=namespace,
            wait_seconds=self.deadline_seconds,
        )
        try:
            connection = self._store.make_connection()
            try:
                connection.open(self._store.deadline())
                deadline = ListingDeadline(_STEP_SECONDS, _LISTING_SECONDS)
                return connection.clear(namespace, deadline) + waiting
            finally:
                self._store.disconnect(connection)
        except (OSError, RefusedError) as error:
            raise StoreError(
                f"{self.address}: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._store.presence.clear()

    # ---- statistics ------------------------------------------------------------------------------

    def stats(self) -> Mapping[str, int]:
        """Return this process's counters, `queued_writes`, `queued_reads`, `resting`, and how full
        the store is.
        """
        if not isinstance(self._open_queue(), Reason):
            self._query(
                "usage",
                self._store.update_usage,
                time.monotonic() + self._look_seconds,
            )
        usage = self._store.usage or Usage(None, None)
        sizes = {"used_bytes": usage.used_bytes, "limit_bytes": usage.limit_bytes}
        known = {name: size for name, size in sizes.items() if size is not None}
        return {**self._store.counters(), **self._queue_stats(), **known}


class RemoteStore(Health, WorkerBackend):
    """One remote store: its client, its health, what is known of its keys, and this process's
    counters. Thread-safe.

    It is the backend of a remote tier's worker pool: threads move chunks, and a background thread
    answers queries and probes.
    """

    def __init__(
        self,
        layout: KVLayout,
        client: StoreClient,
        codec_name: str,
        connections: int,
        deadline_seconds: float,
        clock: Clock,
        answered: Callable[[], None] | None = None,
    ) -> None:
        self.client = client
        self.codec_name = codec_name
        self.layout = layout
        self.name = client.name
        self.reader_threads = 1 if connections > 1 else 0
        self.deadline_seconds = deadline_seconds
        # connections share the network link
        self._slowest = _SLOWEST_BYTES_PER_SECOND / connections
        self.chunk_bytes = layout.chunk_bytes
        self.fingerprint = layout.fingerprint
        self.batch_chunks = max(
            1, min(_BATCH_CHUNKS, _BATCH_BYTES // self.chunk_bytes)
        )
        # an opaque layout most likely holds a 16-bit type, since models are served in these
        self.word_bytes = (
            min(4, itemsize(layout.planes[0].dtype)) if layout.planes else 2
        )
        Health.__init__(self, clock)
        self.touch_breaker = CircuitBreaker(clock, 1, _TOUCH_REST_SECONDS)
        # an absent key may be stored at any moment: so it is asked for again soon, unless requests
        # cost money
        costs = client.keepalive_seconds is None
        self.presence = PresenceCache(clock, absent_seconds=1.0 if costs else 0.1)
        # for longer prompts not every key is asked for
        self.exact_keys = EXACT_REQUESTS if costs else EXACT_KEYS
        self.usage: Usage | None = None
        self.has_answered = False
        self._answered = answered
        self.refusal: tuple[Reason, str] | None = None
        self._log = RateLimitedLog(clock)
        self._counts: Counter[str] = Counter()
        self._roots: dict[bytes, None] = {}
        self._stopped = False
        # older connections are replaced before their next use
        self.trusted_since = 0.0

    # connections of a parent process are left alone

    @per_process
    def queries(self) -> QueryQueue:
        """Return the queue of questions."""
        return QueryQueue()

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    @per_process
    def _connections(self) -> set[StoreConnection]:
        return set()

    @per_process
    def _touching(self) -> _Touching:
        return _Touching(self)

    # ---- the backend of the worker pool ----------------------------------------------------------

    def make_worker(self, queue: IoQueue) -> RemoteWorker:
        """Return the worker of a new thread."""
        return RemoteWorker(self, queue)

    def background(self, stop: Event) -> None:
        """Answer queries and keep the connection for them open; probe the store while it rests."""
        connection = WorkerConnection(self)
        pause = self.client.keepalive_seconds
        try:
            while not stop.is_set():
                query = self.queries.take(
                    _PROBE_SECONDS if self.breaker.is_open else pause
                )
                if query is not None:
                    skipped = self.breaker.is_open
                    asked = query.function
                    answer = (
                        Reason.TIER_SKIPPED
                        if skipped
                        else self.call(connection, asked, "a question")
                    )
                    self.queries.finish(query, answer)
                    if self.usage is None and not self.breaker.is_open:
                        self.call(
                            connection,
                            self.update_usage,
                            "asking how it is set up",
                        )
                if stop.is_set():
                    break
                if self.breaker.is_open and not self.breaker.resting:
                    self.call(
                        connection, self._probe, "asking whether it is back"
                    )
                elif (
                    pause is not None
                    and not self.breaker.is_open
                    and connection.idle_for(pause)
                ):
                    self.call(
                        connection, self._probe, "keeping a connection open"
                    )
                self._tell_answered()
            self._tell_answered()
        finally:
            self.queries.close()
            connection.close()

    def note_answer(self) -> None:
        """Note that the store has answered a question, a load or a save: some other calls need no
        answer.

        The background thread tells it, so that no load or save waits for that.
        """
        self.refusal = None
        if not self.has_answered:
            self.has_answered = True
            self.queries.wake()

    def _tell_answered(self) -> None:
        if self.has_answered and self._answered is not None:
            tell = self._answered
            self._answered = None
            tell()

    def call(
        self,
        connection: WorkerConnection,
        work: Callable[[StoreConnection], _T],
        what: str,
        refusals: CircuitBreaker | None = None,
    ) -> _T | Reason:
        """Do some work of a background thread, as `WorkerConnection.call` does; any error becomes a
        reason.
        """
        try:
            return connection.call(work, what, refusals)
        except Exception as error:  # noqa: BLE001
            # a background thread: other queries still need their answers
            return self.record_error(error, what)

    def update_usage(self, connection: StoreConnection) -> int:
        """Ask how full the store is; log once what is wrong with its configuration."""
        is_first = self.usage is None
        self.usage = self.usage or Usage(None, None)
        with contextlib.suppress(RefusedError):
            self.usage = connection.usage(self.deadline())
        if is_first and self.usage.warnings:
            _logger.warning(
                "%s: %s", self.client.address, "; ".join(self.usage.warnings)
            )
        return 0

    def _probe(self, connection: StoreConnection) -> int:
        try:
            connection.ping(self.deadline())
        except RefusedError as refusal:
            if not refusal.contained:
                raise
        return 0

    def interrupt(self) -> None:
        """Wake the background thread, and make all calls that wait for the store fail."""
        with self._lock:
            self._stopped = True
            connections = list(self._connections)
        self.queries.wake()
        for connection in connections:
            connection.abort()

    def count(self, counts: Mapping[str, int]) -> None:
        """Add to counters of this process."""
        with self._lock:
            self._counts.update(counts)

    def record_error(
        self, error: Exception, what: str, *, rests: bool = True
    ) -> Reason:
        """Log that something failed and return the reason to report. OSErrors count for the
        breaker.

        A call that was ended by `interrupt` is not a failure of the store.
        """
        if isinstance(error, OSError):
            if self._stopped:
                return Reason.CLOSED
            self.breaker.record_failure(rests=rests)
            self.queries.wake()
        reason = reason_of(error)
        said = str(error).removeprefix(f"{self.client.address}: ")
        if isinstance(error, ServerError):
            self.refusal = (reason, f"failed: {said}")
        self.log_reason(reason, f"{what} failed: {type(error).__name__}: {said}")
        return reason

    def close(self) -> None:
        """Close the connection for touches; if it is in use, its user closes it. Workers have
        closed their own.
        """
        touching = self._touching
        if_free(touching.lock, touching.connection.close)

    # ---- known keys ------------------------------------------------------------------------------

    def register(self, root: bytes) -> None:
        """Remember that there are keys of this namespace."""
        with self._lock:
            self._roots[root] = None
            drop_oldest(self._roots, _MOST_ROOTS)

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

    def batch_deadline(self) -> float:
        """Return when a batch of writes that is claimed now must be over (time.monotonic())."""
        return self.deadline(self.batch_chunks * self.chunk_bytes)

    def record_refusal(
        self, refusal: RefusedError, what: str, breaker: CircuitBreaker
    ) -> Reason:
        """Log that the store refused, count it for `breaker` and return the reason to report."""
        if refusal.contained:
            return refusal.reason
        self.last_refusal = refusal.reason
        self.refusal = (refusal.reason, f"refused: {refusal}")
        breaker.record_failure()
        self.queries.wake()
        self.log_reason(refusal.reason, f"{what} was refused: {refusal}")
        return refusal.reason

    def log_reason(self, reason: Reason, message: str) -> None:
        """Log what went wrong, at most one line per reason in a while."""
        self._log.warn(_logger, reason, f"{self.client.address}: {message}")

    # ---- recency ---------------------------------------------------------------------------------

    def stamp(self) -> int:
        """Return the recency of a request that begins now (monotonic ns)."""
        return time.monotonic_ns()

    def rank(self, stamp: int, position: int | None) -> int:
        """Return the rank of a chunk of a request, which began some time ago: see
        StoreConnection.
        """
        age_ms = max(0, self.stamp() - stamp) // 1_000_000
        return age_ms + int(_RANK_MS * math.log2(1 + (position or 0)))

    def touch(
        self, namespace: bytes, keys: Sequence[bytes], start: int, stamp: int
    ) -> list[bool] | None:
        """Touch a run of keys and return which of them are present; None: unknown at present.

        If the store refuses touches, the log says so, and only the number of leading keys that are
        present is asked for.
        """

        def touched(connection: StoreConnection) -> list[bool]:
            ranks = [self.rank(stamp, start + n) for n in range(len(keys))]
            return connection.touch(namespace, keys, self.deadline(), ranks)

        def leading(connection: StoreConnection) -> list[bool]:
            found = connection.find(namespace, keys, self.deadline())
            return [True] * found + [False] * (len(keys) - found)

        touching = self._touching
        began = self.presence.now_ns()
        with touching.lock:
            here: list[bool] | Reason = self.last_refusal
            if not self.touch_breaker.resting:
                here = touching.connection.call(
                    touched, "touching chunks in use", self.touch_breaker
                )
            if self.touch_breaker.resting:
                here = touching.connection.call(
                    leading, "asking for chunks in use"
                )
        if isinstance(here, Reason):
            return None
        for present in (True, False):
            known = [
                key
                for key, there in zip(keys, here, strict=True)
                if there is present
            ]
            self.presence.record(namespace, known, present, since_ns=began)
        return here

    # ---- connections -----------------------------------------------------------------------------

    def make_connection(self) -> StoreConnection:
        """Return a connection that is still to be opened; `interrupt` can abort it even then."""
        connection = self.client.connection()
        with self._lock:
            self._connections.add(connection)
            stopped = self._stopped
        if stopped:
            connection.abort()
        return connection

    def disconnect(self, connection: StoreConnection) -> None:
        """Close a connection."""
        with self._lock:
            self._connections.discard(connection)
        connection.close()


class _Touching:
    """The connection of a process for touches, and the lock of its users."""

    def __init__(self, store: RemoteStore) -> None:
        """Connect to nothing yet."""
        self.lock = threading.RLock()
        self.connection = WorkerConnection(store)


class WorkerConnection(KeptConnection[StoreConnection]):
    """The connection of one thread. It is made when it is needed and replaced when it has
    failed.
    """

    def __init__(self, store: RemoteStore) -> None:
        super().__init__(store, store.make_connection, store.disconnect)
        self._store = store

    def call(
        self,
        work: Callable[[StoreConnection], _T],
        what: str,
        refusals: CircuitBreaker | None = None,
    ) -> _T | Reason:
        """Run `work` with the connection, or return why it failed. If an old connection fails, try
        a new one.

        Refusals are counted by `refusals`, by default the store's breaker. A success resets only
        the store's breaker.
        """
        try:
            return self.run(work, self._store.deadline)
        except RefusedError as refusal:
            return self._store.record_refusal(
                refusal, what, refusals or self._store.breaker
            )
        except OSError as error:
            # an old connection may be broken, which says nothing about the store
            return self._store.record_error(error, what, rests=not self.was_old)


class RemoteWorker(IoWorker):
    """The loads and saves of one thread, with its own connection and buffers.

    Chunks are encoded and sealed before they are sent, decoded and verified after they are
    received.
    """

    def __init__(self, store: RemoteStore, queue: IoQueue) -> None:
        super().__init__(store, queue)
        self._store = store
        self._connection = WorkerConnection(store)
        self._page: Bytes = aligned(HEADER_BYTES)
        self._encoded: Bytes | None = None

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _encoding_buffer(self) -> Bytes:
        """Return space for one encoded chunk, made when first needed."""
        if self._encoded is None:
            self._encoded = aligned(self._store.chunk_bytes)
        return self._encoded

    # ---- loading ---------------------------------------------------------------------------------

    def _load(self, read: ReadRequest) -> Reason | None:
        for root in self._store.roots(read.namespace):
            if self._store.breaker.is_open:
                return Reason.TIER_SKIPPED
            reason = self._connection.call(
                lambda connection, root=root: self._get(connection, root, read),  # type: ignore[misc]
                "a load",
            )
            if reason is not Reason.ABSENT:
                if reason is None:
                    self._store.note_answer()
                return reason
        return Reason.ABSENT

    def _get(
        self, connection: StoreConnection, root: bytes, read: ReadRequest
    ) -> Reason | None:
        store = self._store
        payload = read.buffer[: store.chunk_bytes]
        expected = codec.Expected(
            store_id=STORE_ID,
            slot=0,
            namespace=root,
            epoch=0,
            key=read.key,
            length=store.chunk_bytes,
            fingerprint=store.fingerprint,
        )
        found: codec.Header | None = None
        # true for a value that this load cannot serve but that must stay
        stays = False

        def destination() -> Bytes | None:
            nonlocal found, stays
            found = codec.parse(self._page)
            stays = self._is_good_for_others(found, expected, read)
            if stays or found is None or not codec.agrees(found, expected):
                return None
            nbytes = found.stored_bytes or found.length
            return (
                payload
                if found.codec == "raw"
                else self._encoding_buffer()[:nbytes]
            )

        began = store.presence.now_ns()
        try:
            until = store.deadline(store.chunk_bytes)
            rank = store.rank(read.stamp, read.position)
            count = connection.get(
                GetRequest(root, read.key, self._page, destination, rank), until
            )
            if isinstance(count, Reason):
                store.count(
                    {
                        "failed_checks": int(
                            count is Reason.FAILED_CHECK and not stays
                        )
                    }
                )
                return count
            if count is None:
                store.presence.record_hole(root, read.key, began)
                return Reason.ABSENT
        except RefusedError as refusal:
            if refusal.reason is not Reason.FAILED_CHECK:
                raise
            if stays:
                return Reason.FAILED_CHECK
        else:
            if found is not None:
                stored = (
                    payload if found.codec == "raw" else self._encoding_buffer()
                )[:count]
                if (
                    codec.restore(
                        self._page, stored, expected, store.word_bytes, payload
                    )
                    is None
                ):
                    return None
        # remove a value that no caller can use; otherwise its key could not be stored again
        store.count({"failed_checks": 1})
        with contextlib.suppress(RefusedError):
            connection.remove(root, [read.key], store.deadline())
        store.presence.record_hole(root, read.key)
        return Reason.FAILED_CHECK

    def _is_good_for_others(
        self,
        found: codec.Header | None,
        expected: codec.Expected,
        read: ReadRequest,
    ) -> bool:
        """Return whether a value that cannot be served must stay: others can use it, or this
        request was wrong.
        """
        if codec.is_foreign(self._page):
            text = "a chunk that another version wrote cannot be read: it stays"
            self._store.log_reason(Reason.FAILED_CHECK, text)
            return True
        if found is None or not codec.agrees(found, expected):
            return False
        if (
            found.codec in codec.LOSSY
            and self._store.codec_name not in codec.LOSSY
        ):
            text = "a chunk of a lossy codec is not for this exact tier: it stays"
            self._store.log_reason(Reason.FAILED_CHECK, text)
            return True
        return read.position not in (None, found.position) or not self._can_read(
            found.codec
        )

    def _can_read(self, name: str) -> bool:
        """Return whether the library of a codec is installed here; log it if not."""
        try:
            codec.require(name)
        except ConfigError as missing:
            self._store.log_reason(
                Reason.FAILED_CHECK, f"chunks cannot be read: {missing}"
            )
            return False
        return True

    # ---- saving ----------------------------------------------------------------------------------

    def save(self, writes: Sequence[WriteRequest]) -> None:
        """Claim a batch of writes, send what is not stored, and end their futures, whatever
        happens.

        A chunk that another machine is sending is put back, because that machine may die; then its
        claim expires.
        """
        claims = self._claim(writes)
        for write in writes:
            claim = claims.get(write)
            try:
                self._queue.read_all(self.load)
                reason = self._save(write, claim)
            except Exception as error:  # noqa: BLE001
                # a background thread: the error becomes the future's value
                reason = self._store.record_error(error, "a save")
            if (
                reason is Reason.BUSY
                and claim is PutResult.BUSY
                and self._put_back(write)
            ):
                continue
            if reason is not None:
                self._store.count({f"drop_{reason}": 1})
            self._queue.finish_writes([(write, Done(reason is None, reason))])
        self._release(
            [
                write
                for write, claim in claims.items()
                if not isinstance(claim, PutResult)
            ]
        )

    def _claim(
        self, writes: Sequence[WriteRequest]
    ) -> dict[WriteRequest, PutResult | Reason | None]:
        """Claim all writes that are still valid; return for each why it need not be sent, or None
        if it must be.
        """
        store = self._store
        claims: dict[WriteRequest, PutResult | Reason | None] = {}
        asked = [
            write
            for write in writes
            if self._obstacle(write) is None and not self._is_known(write)
        ]
        for namespace in {write.namespace for write in asked}:
            batch = [write for write in asked if write.namespace == namespace]
            keys = [write.chunk.key for write in batch]
            until = store.batch_deadline()
            claim = methodcaller("claim", namespace, keys, until)
            found: list[PutResult | None] | Reason = store.call(
                self._connection,
                claim,
                "asking before a save",
                store.write_breaker,
            )
            claims.update(
                dict.fromkeys(batch, found)
                if isinstance(found, Reason)
                else zip(batch, found, strict=True)
            )
        return claims

    def _release(self, writes: Sequence[WriteRequest]) -> None:
        """End the claims of writes that were not sent or failed, because other machines wait for
        claimed chunks.
        """
        unsent = [write for write in writes if not self._is_known(write)]
        for namespace in {write.namespace for write in unsent}:
            if self._store.breaker.is_open:
                return
            keys = [
                write.chunk.key
                for write in unsent
                if write.namespace == namespace
            ]
            release = methodcaller(
                "release", namespace, keys, self._store.deadline()
            )
            self._store.call(self._connection, release, "releasing claims")

    def _put_back(self, write: WriteRequest) -> bool:
        """Repeat a write a moment later, since another machine is sending the chunk; False if that
        takes too long.
        """
        if write.patience is None:
            write.patience = Deadline(
                2 * (self._store.batch_deadline() - time.monotonic())
                + _BUSY_SECONDS
            )
        waited = write.patience.patience_seconds - write.patience.remaining()
        pause = min(max(waited, _BUSY_PAUSE_SECONDS[0]), _BUSY_PAUSE_SECONDS[1])
        return not write.patience.passed and self._queue.put_back(write, pause)

    def _obstacle(self, write: WriteRequest) -> Reason | None:
        if self._store.breaker.is_open:
            return Reason.TIER_SKIPPED
        if (refusal := self._store.write_refusal) is not None:
            return refusal
        return None if write.is_valid() else write.cancelled or Reason.STALE

    def _is_known(self, write: WriteRequest) -> bool:
        """Return whether the store is known to have the chunk, for example by a late answer to a
        lookup.
        """
        return self._store.presence.is_stored(write.namespace, write.chunk.key)

    def _save(
        self, write: WriteRequest, claim: PutResult | Reason | None
    ) -> Reason | None:
        store = self._store
        reason = claim if isinstance(claim, Reason) else self._obstacle(write)
        if reason is not None or self._is_known(write):
            return reason
        if isinstance(claim, PutResult):
            return self._finish_put(write, claim)
        payload = write.chunk.payload[: store.chunk_bytes]
        encoding_buffer = (
            self._page[:0]
            if store.codec_name == "raw"
            else self._encoding_buffer()
        )
        name, stored = codec.encode(
            store.codec_name,
            payload,
            store.word_bytes,
            encoding_buffer,
            layout=store.layout,
        )
        data = stored if name in codec.LOSSY else payload
        codec.seal(self._header(write, name, stored.nbytes), data, self._page)
        # From before the encoding to this line the payload was the key's chunk, and so is
        # everything that was sealed.
        if not write.is_valid():
            return write.cancelled or Reason.STALE

        def is_valid() -> bool:
            return write.is_valid() if name == "raw" else write.cancelled is None

        def put(connection: StoreConnection) -> PutResult:
            until = store.deadline(stored.nbytes)
            rank = store.rank(write.stamp, write.chunk.position)
            request = PutRequest(
                write.namespace,
                write.chunk.key,
                self._page,
                stored,
                is_valid,
                rank,
            )
            try:
                return connection.put(request, until)
            except ServerError as answer:
                raise RefusedError(Reason.IO_ERROR, str(answer)) from None

        result = self._connection.call(put, "a save", store.write_breaker)
        return (
            result
            if isinstance(result, Reason)
            else self._finish_put(write, result)
        )

    def _finish_put(
        self, write: WriteRequest, result: PutResult
    ) -> Reason | None:
        store = self._store
        key = write.chunk.key
        if (reason := _NOT_STORED.get(result)) is not None:
            return write.cancelled or reason
        # its key was removed while it was being published
        if write.cancelled is not None:
            self._connection.call(
                lambda connection: connection.remove(
                    write.namespace, [key], store.deadline()
                ),
                "a removal",
            )
            return write.cancelled
        store.presence.record(write.namespace, [key], True)
        store.note_answer()
        if result is PutResult.STORED:
            # an answer before the put shows nothing about writes
            store.write_breaker.record_success()
            store.count({"stored_chunks": 1, "stored_bytes": store.chunk_bytes})
        return None

    def _header(
        self, write: WriteRequest, name: str, stored_bytes: int
    ) -> codec.Header:
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
            parent=write.chunk.parent or b"",
        )
