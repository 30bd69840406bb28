"""A bounded queue of reads and writes, in which reads go first, the I/O threads that serve it, and
a tier of both.

The disk tier and the remote tiers are a `QueuedTier`. The threads start at the first use and are
replaced after a fork. No call waits for them without a limit.
"""

from __future__ import annotations

import heapq
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import TypeAlias

import numpy as np

from pagoda.base.clock import Deadline
from pagoda.base.finalizers import close_when_dropped
from pagoda.base.fork import per_process
from pagoda.base.metrics import Reason
from pagoda.base.signal_safe_threads import (
    Condition,
    Event,
    begin,
    complete,
    running_answers,
)
from pagoda.tiers.base import (
    AskPublished,
    Bytes,
    Chunk,
    Done,
    InSlot,
    check_keys,
    check_sizes,
    running_future,
)
from pagoda.tiers.put_and_load import BlockingCalls

_FEWEST = 2  # the background thread and one I/O thread, which are started first


@dataclass(eq=False)
class WriteRequest:
    """A queued or running save. While it `is_valid()`, its chunk counts as found and is read from
    its payload.
    """

    chunk: Chunk
    namespace: bytes
    stamp: int
    future: Future[Done] = field(default_factory=running_future)
    # REMOVED or CLEARED, if its key was removed or cleared
    cancelled: Reason | None = None
    batch: int = 0  # the number of the batch in which a worker took it
    # how long to wait for another machine that writes the same chunk
    patience: Deadline | None = None

    def is_valid(self) -> bool:
        """Return whether the payload is still what the key names, and the key was not removed.

        Not once the save has ended: its payload belongs to the caller again, who may fill it with
        another chunk.
        """
        return (
            self.cancelled is None
            and not self.future.done()
            and self.chunk.still_valid()
        )

    def matches(self, namespace: bytes | None, position: int | None) -> bool:
        """Return whether this is the chunk at that position of that namespace; an argument of None
        is not compared.
        """
        return namespace in (None, self.namespace) and (
            namespace is None or position in (None, self.chunk.position)
        )

    def copy_to(self, read: ReadRequest, nbytes: int) -> bool:
        """Serve a read from the payload; return False if it asks for another chunk, or if this is
        no longer valid.
        """
        if not self.matches(read.namespace, read.position):
            return False
        np.copyto(read.buffer[:nbytes], self.chunk.payload[:nbytes])
        # checked after the copy, so that the copied bytes are those of the key's chunk
        return self.is_valid()


def valid_writes(writes: Sequence[WriteRequest]) -> list[WriteRequest]:
    """Return those of these writes that are valid; they are being written. What several chunks
    share, such as the last clear, is asked once; so is the ledger of the host tier.
    """
    answers: dict[int, bool] = {}
    slots: dict[AskPublished, list[InSlot]] = {}
    running = [write for write in writes if write.cancelled is None]
    for write in running:
        source = write.chunk.still_valid
        if isinstance(source, InSlot):
            slots.setdefault(source.are_published, []).append(source)
        elif id(source) not in answers:
            answers[id(source)] = source()
    for are_published, asked in slots.items():
        published = are_published([each.place for each in asked])
        answers.update(zip(map(id, asked), published, strict=True))
    return [write for write in running if answers[id(write.chunk.still_valid)]]


# Where a chunk is: in the payload of a save while the save is valid, or in a slot (slot,
# generation); None: not known
Source: TypeAlias = WriteRequest | tuple[int, int] | None


@dataclass(eq=False)
class ReadRequest:
    """A queued or running load."""

    key: bytes
    position: int | None  # None: any; the same for the namespace
    namespace: bytes | None
    buffer: Bytes
    source: Source = None
    future: Future[Done] = field(default_factory=running_future)
    followers: list[ReadRequest] = field(default_factory=list)
    stamp: int = field(default_factory=time.monotonic_ns)

    def is_next_to(self, before: ReadRequest) -> bool:
        """Whether the chunk is in the slot after that of `before`."""
        return (
            isinstance(self.source, tuple)
            and isinstance(before.source, tuple)
            and self.source[0] == before.source[0] + 1
        )


class IoQueue:
    """Holds reads and writes from their request to their end. Thread-safe; no I/O under its lock.

    At most `write_chunks` writes and `read_chunks` reads are outstanding: queued or running. A
    worker takes up to `run_chunks` reads at once, if they are next to each other in the queue and
    in the store. `fewest_writes`: how many writes any worker takes at once if there are so many;
    None: some workers only read.
    """

    def __init__(
        self,
        write_chunks: int,
        read_chunks: int = 4096,
        run_chunks: int = 1,
        fewest_writes: int | None = None,
    ) -> None:
        self._fewest_writes = fewest_writes
        self._write_chunks = write_chunks
        self._read_chunks = read_chunks
        self._run_chunks = run_chunks
        # the locks are never held together; `_ended` only wakes `wait`
        self._changed = Condition()
        self._ended = Condition()
        self._writes: deque[WriteRequest] = deque()
        # writes that were put back: a heap, ordered by due time
        self._delayed: list[tuple[float, int, WriteRequest]] = []
        self._reads: deque[ReadRequest] = deque()
        # queued or running, by key
        self._outstanding_writes: dict[bytes, WriteRequest] = {}
        # those that are no longer outstanding, but whose futures are not all done yet
        self._finishing = set[WriteRequest | ReadRequest]()
        # the first read of each chunk, whose result other reads of that chunk wait for
        self._leaders: dict[
            tuple[bytes, int | None, bytes | None], ReadRequest
        ] = {}
        self._read_count = 0  # including followers
        self._batch = 0  # the number of the last batch of writes that was taken
        self._closed = False

    def add_writes(
        self, writes: Iterable[WriteRequest]
    ) -> list[WriteRequest | Reason]:
        """Queue several writes before a worker can take any of them, so that the worker takes many
        at once.

        Returns for each write the write itself, an outstanding write of the same key, or the reason
        why it was not queued.
        """
        added: list[WriteRequest | Reason] = []
        is_woken = False
        with self._changed:
            try:
                for write in writes:
                    twin = self._outstanding_writes.get(write.chunk.key)
                    if self._closed:
                        added.append(Reason.CLOSED)
                    elif twin is not None:
                        # BUSY: its key was removed while it is being written
                        added.append(
                            twin if twin.cancelled is None else Reason.BUSY
                        )
                    elif len(self._outstanding_writes) >= self._write_chunks:
                        added.append(Reason.QUEUE_FULL)
                    else:
                        self._outstanding_writes[write.chunk.key] = write
                        self._writes.append(write)
                        added.append(write)
                if self._fewest_writes is None:
                    # some of the waiting threads only read, so one is not enough
                    self._changed.notify_all()
                else:
                    self._changed.notify(
                        -(-len(self._writes) // self._fewest_writes)
                    )
                is_woken = True
            finally:
                # a signal handler has raised: what is queued must not wait for the next call
                if not is_woken:
                    self._changed.notify_all()
        return added

    def add_reads(self, reads: Sequence[ReadRequest]) -> list[Reason | None]:
        """Queue several reads before a worker can take any of them, or attach them to queued reads
        of the same chunks. Return for each why it was refused, or None.
        """
        refused: list[Reason | None] = []
        runs = 0
        run: list[ReadRequest] = []
        is_woken = False
        with self._changed:
            try:
                for read in reads:
                    if self._closed:
                        refused.append(Reason.CLOSED)
                        continue
                    if self._read_count >= self._read_chunks:
                        refused.append(Reason.QUEUE_FULL)
                        continue
                    refused.append(None)
                    flight = read.key, read.position, read.namespace
                    leader = self._leaders.get(flight)
                    if leader is None:
                        if not self._joins(read, run):
                            run = []
                            runs += 1
                        run.append(read)
                    # No signal handler runs from here to the end of the append, so either all of
                    # this happens or nothing.
                    self._read_count += 1
                    if leader is None:
                        self._leaders[flight] = read
                        self._reads.append(read)
                    else:
                        leader.followers.append(read)
                # any thread serves reads: one for each run
                self._changed.notify(runs)
                is_woken = True
            finally:
                # as in `add_writes`
                if not is_woken:
                    self._changed.notify_all()
        return refused

    def _joins(self, read: ReadRequest, run: Sequence[ReadRequest]) -> bool:
        """Whether a worker takes a read together with the reads before it."""
        return 0 < len(run) < self._run_chunks and read.is_next_to(run[-1])

    def has_room(self, writes: int = 1) -> bool:
        """Return whether so many writes could be queued now."""
        with self._changed:
            return (
                not self._closed
                and len(self._outstanding_writes) + writes <= self._write_chunks
            )

    def pending_writes(self, keys: Iterable[bytes]) -> dict[bytes, WriteRequest]:
        """Return the outstanding writes of `keys` that are not cancelled, by key."""
        with self._changed:
            if not self._outstanding_writes:
                return {}
            found = ((key, self._outstanding_writes.get(key)) for key in keys)
            return {
                key: write
                for key, write in found
                if write is not None and write.cancelled is None
            }

    def in_flight(self, key: bytes) -> bool:
        """Return whether a write of this key is queued or running, cancelled or not."""
        with self._changed:
            return key in self._outstanding_writes

    def outstanding(self) -> tuple[int, int]:
        """Return how many writes and how many reads are queued or running."""
        with self._changed:
            return len(self._outstanding_writes), self._read_count

    def cancel(
        self,
        reason: Reason,
        waiting: list[WriteRequest],
        *,
        key: bytes | None = None,
        namespace: bytes | None = None,
    ) -> list[WriteRequest]:
        """Cancel the writes of a key or a namespace (None: all).

        Adds the queued ones to `waiting` before they leave the queue: the caller must finish them,
        even if a signal handler raises in this call. Returns the running ones, which end on their
        threads with `reason`.
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
            queued = [*self._writes, *(write for *_, write in self._delayed)]
            waiting += [write for write in queued if write.cancelled is not None]
            self._writes = deque(
                write for write in self._writes if write.cancelled is None
            )
            self._delayed = sorted(
                each for each in self._delayed if each[-1].cancelled is None
            )
            return [write for write in chosen if write not in waiting]

    def take(
        self, most_writes: int, shares: int = 1, fewest_writes: int = 1
    ) -> list[ReadRequest] | list[WriteRequest] | None:
        """Wait for work; return the next run of reads, or the oldest writes. None: closed.

        Takes at most 1/`shares` of the queued writes, or `fewest_writes` if that is more. With
        `most_writes` 0, waits for reads only.
        """
        with self._changed:
            while True:
                pause = self._queue_due() if self._delayed else None
                if self._closed or self._reads or (most_writes and self._writes):
                    break
                self._changed.wait(pause)
            if self._reads:
                return self._take_run()
            if self._closed:
                return None
            share = max(fewest_writes, -(-len(self._writes) // shares))
            count = min(most_writes, share, len(self._writes))
            batch = [self._writes.popleft() for _ in range(count)]
            self._batch += 1
            for write in batch:
                write.batch = self._batch
            return batch

    def _queue_due(self) -> float | None:
        """Queue the writes that were put back and are due; return the seconds until the next one.
        Called with the lock.
        """
        now = time.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            self._writes.append(heapq.heappop(self._delayed)[2])
        return self._delayed[0][0] - now if self._delayed else None

    def _take_run(self) -> list[ReadRequest]:
        """Take the next reads of adjacent slots. Called with the lock."""
        reads = self._reads
        run = [reads.popleft()]
        while reads and self._joins(reads[0], run):
            run.append(reads.popleft())
        return run

    def put_back(self, write: WriteRequest, seconds: float) -> bool:
        """Queue again, after some seconds, a write that a worker has taken. False: closed."""
        with self._changed:
            if not self._closed:
                heapq.heappush(
                    self._delayed, (time.monotonic() + seconds, id(write), write)
                )
                self._changed.notify_all()
            return not self._closed

    def read_all(self, load: Callable[[list[ReadRequest]], None]) -> None:
        """Call `load` for each run of reads that is queued. A worker calls it before each write, so
        that reads go first.
        """
        while True:
            with self._changed:
                run = self._take_run() if self._reads else None
            if run is None:
                return
            load(run)

    def finish_writes(self, ends: Sequence[tuple[WriteRequest, Done]]) -> None:
        """End some writes; may be called again. A key is no longer in flight when its future is
        done.
        """
        with self._changed:
            for write, _ in ends:
                if self._outstanding_writes.get(write.chunk.key) is write:
                    del self._outstanding_writes[write.chunk.key]
            self._finishing.update(write for write, _ in ends)
        for write, done in ends:
            if not write.future.done():
                write.future.set_result(done)
        self._finished([write for write, _ in ends])

    def finish_reads(
        self, ends: Sequence[tuple[ReadRequest, Done]], nbytes: int
    ) -> None:
        """End some reads. Their followers get their copies first, because afterwards their buffers
        are the callers' again.

        The last future is done first: who waits for the first chunk of a run finds all others.
        """
        ended: list[tuple[ReadRequest, Done]] = []
        with self._changed:
            for read, done in ends:
                del self._leaders[read.key, read.position, read.namespace]
                ended += [(each, done) for each in (read, *read.followers)]
        for read, done in ends:
            if done.ok:
                for follower in read.followers:
                    np.copyto(follower.buffer[:nbytes], read.buffer[:nbytes])
            read.followers = []
        with self._changed:
            self._read_count -= len(ended)
            self._finishing.update(each for each, _ in ended)
        for each, done in reversed(ended):
            each.future.set_result(done)
        self._finished([each for each, _ in ended])

    def _finished(self, requests: Sequence[WriteRequest | ReadRequest]) -> None:
        with self._ended:
            self._finishing.difference_update(requests)
            self._ended.notify_all()

    def wait(self, keys: Iterable[bytes] | None, timeout: float) -> bool:
        """Wait until no write of these keys is outstanding, or (None) nothing at all, and all
        futures are done; False after `timeout` seconds.
        """
        chosen = None if keys is None else list(keys)
        with self._ended:
            return self._ended.wait_for(partial(self._has_ended, chosen), timeout)

    def _has_ended(self, keys: list[bytes] | None) -> bool:
        if keys is None:
            if self._outstanding_writes or self._read_count:
                return False
            # copied at once: threads that finish others change it
            return all(one.future.done() for one in tuple(self._finishing))
        return not any(key in self._outstanding_writes for key in keys)

    def close(self) -> tuple[list[WriteRequest], list[ReadRequest]]:
        """Accept nothing more; return what was queued but not started, which the caller must
        finish. Idempotent.
        """
        with self._changed:
            self._closed = True
            writes = [*self._writes, *(write for *_, write in self._delayed)]
            reads = list(self._reads)
            self._writes.clear()
            self._delayed.clear()
            self._reads.clear()
            self._changed.notify_all()
            return writes, reads


class WorkerBackend(ABC):
    """What the threads of one tier share. Thread-safe."""

    name: str  # the name of the tier
    chunk_bytes: int
    batch_chunks = 1  # how many writes a worker takes at once
    # the least that a worker takes, even if none are left for other workers
    fewest_chunks = 1
    # how many reads of adjacent slots a worker takes at once
    run_chunks = 1
    reader_threads = 0  # threads that only read
    count: Callable[[Mapping[str, int]], None]  # adds to counters of the tier

    @abstractmethod
    def make_worker(self, queue: IoQueue) -> IoWorker:
        """Return the worker of a new thread that serves this queue."""

    def stamp(self) -> int:
        """Return the recency of a request that has none yet; the same for all its chunks."""
        return 0

    @abstractmethod
    def background(self, stop: Event) -> None:
        """Do background work on a separate thread, until it is done or `stop` is set."""

    # I/O of a disk cannot be interrupted
    def interrupt(self) -> None:  # noqa: B027
        """Wake the background work and, if possible, let I/O that hangs fail. Called after `stop`
        was set.
        """

    @abstractmethod
    def record_error(self, error: Exception, what: str) -> Reason:
        """Log that something failed, count it for the breaker and return the reason to report."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Called when no thread works any more."""


class IoWorker(ABC):
    """The reads and writes of one I/O thread, made and used on that thread alone."""

    def __init__(self, backend: WorkerBackend, queue: IoQueue) -> None:
        self._backend = backend
        self._queue = queue

    def load(self, reads: Sequence[ReadRequest]) -> None:
        """Do reads that were taken together and end their futures, whatever happens."""
        nbytes = self._backend.chunk_bytes
        try:
            reasons = self._load_run(reads)
        except Exception as error:  # noqa: BLE001
            # a background thread: the error becomes the futures' value
            if len(reads) > 1:
                for read in reads:  # each alone: it may be the fault of one
                    self.load([read])
                return
            reasons = [self._backend.record_error(error, "a load")]
        counts = Counter[str]()
        for reason in reasons:
            if reason is None:
                counts["loaded_chunks"] += 1
                counts["loaded_bytes"] += nbytes
            elif reason is not Reason.LEDGER_BUSY:
                # LEDGER_BUSY is counted by the ledger
                counts[f"miss_{reason}"] += 1
        self._backend.count(counts)
        self._queue.finish_reads(
            [
                (read, Done(reason is None, reason))
                for read, reason in zip(reads, reasons, strict=True)
            ],
            nbytes,
        )

    def _load_run(self, reads: Sequence[ReadRequest]) -> list[Reason | None]:
        """Do reads; return for each why its chunk did not arrive, or None."""
        return [self._load_one(read) for read in reads]

    def _load_one(self, read: ReadRequest) -> Reason | None:
        source = read.source
        copied = isinstance(source, WriteRequest) and source.copy_to(
            read, self._backend.chunk_bytes
        )
        return None if copied else self._load(read)

    @abstractmethod
    def _load(self, read: ReadRequest) -> Reason | None:
        """Fill the buffer of a read with a verified chunk, or return why not."""

    @abstractmethod
    def save(self, writes: Sequence[WriteRequest]) -> None:
        """Do a batch of writes, each after `IoQueue.read_all`, and end their futures, whatever
        happens.
        """

    def close(self) -> None:  # most workers hold only memory  # noqa: B027
        """Release what the worker holds. Called when its thread ends."""


class _Serving:
    """The queue and the threads of a pool in one process."""

    def __init__(self, queue: IoQueue) -> None:
        """Begin with that queue, which is empty, and without threads."""
        self.queue = queue
        self.lock = threading.Lock()
        self.stop = Event()
        self.background_done = Event()
        self.threads: list[threading.Thread] = []
        self.ended: set[threading.Thread] = set()
        self.backend_closed = False


class WorkerPool:
    """The queue of a tier and the daemon threads that serve it. Thread-safe.

    The threads refer to this object and never to the tier, so a tier without references can end
    them. The backend is closed by `close()` or, if I/O hangs then, by the last thread that ends. In
    a forked child the queue is new and empty, and threads start at the next use.
    """

    def __init__(
        self, backend: WorkerBackend, io_threads: int, queue_chunks: int
    ) -> None:
        self._backend = backend
        self._io_threads = io_threads
        self._queue_chunks = queue_chunks
        self._closed = False

    @per_process
    def _serving(self) -> _Serving:
        backend = self._backend
        queue = IoQueue(
            self._queue_chunks,
            run_chunks=backend.run_chunks,
            fewest_writes=(
                None if backend.reader_threads else backend.fewest_chunks
            ),
        )
        return _Serving(queue)

    @property
    def queue(self) -> IoQueue:
        """The queue of this process."""
        return self._serving.queue

    def start(self) -> IoQueue | None:
        """Start the threads that are not running; cheap if all are running. Return the queue that
        they serve.

        None: the system gives too few threads to do any work. The next call tries to start the
        missing threads again.
        """
        serving = self._serving
        if len(serving.threads) <= self._io_threads and not self._closed:
            self._start_missing(serving)
        return serving.queue if len(serving.threads) >= _FEWEST else None

    def _start_missing(self, serving: _Serving) -> None:
        readers = self._backend.reader_threads
        writers = self._io_threads - readers
        targets: list[Callable[[], None]] = [self._background]
        targets += [partial(self._work, self._backend.batch_chunks)] * writers
        targets += [partial(self._work, 0)] * readers
        with serving.lock:
            for target in targets[len(serving.threads) :]:
                if self._closed or not self._begin(target, serving.threads):
                    break

    def _begin(
        self, target: Callable[[], None], threads: list[threading.Thread]
    ) -> bool:
        name = f"pagoda-{self._backend.name}-{len(threads)}"
        thread = threading.Thread(
            target=self._run, args=(target,), name=name, daemon=True
        )
        begun = False
        try:
            threads.append(thread)
            begun = begin(thread)
        finally:
            # if `begin` was interrupted, the thread may still run
            if not begun and thread in threads:
                threads.remove(thread)
        return begun

    def _run(self, target: Callable[[], None]) -> None:
        serving = self._serving
        with serving.lock:
            known = threading.current_thread() in serving.threads
        try:
            if known:
                target()
        finally:
            with serving.lock:
                serving.ended.add(threading.current_thread())
            self._close_backend()

    def _work(self, most_writes: int) -> None:
        queue = self.queue
        worker = self._backend.make_worker(queue)
        try:
            while (
                job := queue.take(
                    most_writes, self._io_threads, self._backend.fewest_chunks
                )
            ) is not None:
                if isinstance(job[0], WriteRequest):
                    worker.save(job)
                else:
                    worker.load(job)
                del job  # a waiting thread must not keep a payload alive
        finally:
            worker.close()

    def _background(self) -> None:
        try:
            self._backend.background(self._serving.stop)
        except Exception as error:  # noqa: BLE001
            # the thread's outermost call: work left undone is a miss
            self._backend.record_error(error, "work in the background")
        finally:
            self._serving.background_done.set()

    def wait_background(self, timeout: float) -> bool:
        """Wait until the background work has ended; return False after `timeout` seconds."""
        self.start()
        return self._serving.background_done.wait(timeout)

    def close(self, timeout: float) -> None:
        """End the threads within `timeout` seconds and drop what is queued. Idempotent."""
        serving = self._serving
        with serving.lock:
            first = not self._closed
            self._closed = True
        if not first:
            return
        serving.stop.set()
        queue = serving.queue
        writes, reads = queue.close()
        for write in writes:
            self._backend.count({f"drop_{Reason.CLOSED}": 1})
            queue.finish_writes([(write, Done(False, Reason.CLOSED))])
        closed = Done(False, Reason.CLOSED)
        queue.finish_reads([(read, closed) for read in reads], 0)
        self._backend.interrupt()
        deadline = Deadline(timeout)
        for thread in serving.threads:
            if thread is not threading.current_thread():
                thread.join(deadline.remaining())
        self._close_backend()

    def _close_backend(self) -> None:
        """Close the backend once no thread can use it any more."""
        serving = self._serving
        with serving.lock:
            last = (
                self._closed
                and not serving.backend_closed
                and serving.ended.issuperset(serving.threads)
            )
            serving.backend_closed |= last
        if last:
            self._backend.close()


class QueuedTier(BlockingCalls):
    """A tier whose saves and loads wait in one bounded queue and are done by a worker pool.
    Thread-safe.

    `close()` or garbage collection ends the threads.
    """

    def __init__(
        self, backend: WorkerBackend, threads: int, queue_chunks: int
    ) -> None:
        self.read_ahead = threads
        self.queue_chunks = queue_chunks
        self._backend = backend
        self._closed = False
        self._pool = WorkerPool(backend, threads, queue_chunks)
        self._finalizer = close_when_dropped(self, partial(self._pool.close, 1.0))

    @property
    @abstractmethod
    def resting(self) -> bool:
        """Whether the tier is skipped for a while after failures in a row. Nothing is found
        meanwhile.
        """

    def in_flight(self, key: bytes) -> bool:
        """Return whether a save of this key is queued or being written."""
        return self._pool.queue.in_flight(key)

    def wait(self, keys: Iterable[bytes], timeout: float) -> bool:
        """Wait until the saves of these keys have ended; return False after `timeout` seconds."""
        return self._pool.queue.wait(keys, timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until nothing is queued or running; return False after `timeout` seconds."""
        return self._pool.queue.wait(None, timeout)

    def _queued(self, keys: Sequence[bytes]) -> Collection[bytes]:
        """Return which of these keys are queued, or are being saved."""
        return self._pool.queue.pending_writes(keys)

    def _open_queue(self) -> IoQueue | Reason:
        """Return the queue if it accepts work and its threads are running; otherwise why nothing
        can be queued now.
        """
        if self._closed:
            return Reason.CLOSED
        if self.resting:
            return Reason.TIER_SKIPPED
        return self._pool.start() or Reason.IO_ERROR

    def _count(self, name: str) -> None:
        if not self._closed:  # a closed ledger no longer counts
            self._backend.count({name: 1})

    def _drop_reason(self) -> Reason | None:
        if self._closed:
            return Reason.CLOSED
        return None if self._pool.queue.has_room() else Reason.QUEUE_FULL

    def store(
        self,
        chunks: Sequence[Chunk],
        namespace: bytes,
        *,
        stamp: int | None = None,
    ) -> list[Future[Done]]:
        """Queue chunks, which are written directly from their payloads; never waits for space. See
        Tier.store.
        """
        check_keys([chunk.key for chunk in chunks])
        check_sizes(
            "payload", [chunk.payload for chunk in chunks], self.chunk_bytes
        )
        queue = self._open_queue()
        if isinstance(queue, Reason):
            return [self._dropped(queue) for _ in chunks]
        stamp = self._backend.stamp() if stamp is None else stamp
        # A place costs nothing while there are enough, and whoever takes a write finds out too.
        stored = (
            repeat(False)
            if queue.has_room(len(chunks))
            else self._stored(chunks, namespace, stamp)
        )
        futures: list[Future[Done]] = running_answers(len(chunks))
        writes: dict[int, WriteRequest] = {}
        for at, (chunk, is_stored) in enumerate(
            zip(chunks, stored, strict=False)
        ):
            if is_stored:
                futures[at].set_result(Done(True))
            elif chunk.payload.nbytes > self.slot_bytes:
                self._end_dropped(futures[at], Reason.TOO_LARGE)
            else:
                writes[at] = WriteRequest(chunk, namespace, stamp, futures[at])
        queued = queue.add_writes(writes.values())
        for at, write in zip(writes, queued, strict=True):
            if isinstance(write, Reason):
                self._end_dropped(futures[at], write)
            else:
                # of an earlier write of the same chunk, if there is one
                futures[at] = write.future
        return futures

    def _end_dropped(self, future: Future[Done], reason: Reason) -> None:
        self._count(f"drop_{reason}")
        future.set_result(Done(False, reason))

    @abstractmethod
    def _stored(
        self, chunks: Sequence[Chunk], namespace: bytes, stamp: int
    ) -> Iterator[bool]:
        """Yield for each chunk whether it is known to be stored; then it needs no place in the
        queue.
        """

    def load(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Bytes],
        *,
        start: int | None = 0,
        namespace: bytes | None,
        deadline_seconds: float | None = None,
    ) -> list[Future[Done]]:
        """Queue reads of chunks directly into `buffers`. See Tier.load."""
        check_keys(keys)
        check_sizes("buffer", buffers, self.chunk_bytes, len(keys))
        queue = self._open_queue()
        if isinstance(queue, Reason):
            return [self._missed(queue) for _ in keys]
        futures: list[Future[Done]] = running_answers(len(keys))
        reads: list[ReadRequest] = []
        sources = self._sources(queue, keys, start, namespace, deadline_seconds)
        for at, source in enumerate(sources):
            if isinstance(source, Reason):
                self._end_missed(futures[at], source)
                continue
            position = None if start is None else start + at
            reads.append(
                ReadRequest(
                    keys[at],
                    position,
                    namespace,
                    buffers[at],
                    source,
                    futures[at],
                )
            )
        for read, refused in zip(reads, queue.add_reads(reads), strict=True):
            if refused is not None:
                self._end_missed(read.future, refused)
        return futures

    def _end_missed(self, future: Future[Done], reason: Reason) -> None:
        # LEDGER_BUSY is counted by the ledger
        if reason is not Reason.LEDGER_BUSY:
            self._count(f"miss_{reason}")
        future.set_result(Done(False, reason))

    @abstractmethod
    def _sources(
        self,
        queue: IoQueue,
        keys: Sequence[bytes],
        start: int | None,
        namespace: bytes | None,
        deadline_seconds: float | None,
    ) -> Iterable[Source | Reason]:
        """Yield where a load finds each chunk, or why it is absent."""

    def _cancel_writes(
        self,
        reason: Reason,
        *,
        key: bytes | None = None,
        namespace: bytes | None = None,
        wait_seconds: float = 0.0,
    ) -> tuple[int, int]:
        """Cancel the saves of a key or a namespace; wait until the running ones have ended.

        Returns how many were queued (they have ended now), and how many were running.
        """
        queue = self._pool.queue
        waiting: list[WriteRequest] = []
        left: deque[WriteRequest] = deque()

        def finish() -> None:
            while left:
                queue.finish_writes([(left[0], Done(False, reason))])
                self._backend.count({f"drop_{reason}": 1})
                left.popleft()

        try:
            running = queue.cancel(reason, waiting, key=key, namespace=namespace)
        finally:
            left.extend(waiting)
            complete(finish)
        if running:
            queue.wait([write.chunk.key for write in running], wait_seconds)
        return len(waiting), len(running)

    def _queue_stats(self) -> dict[str, int]:
        writes, reads = self._pool.queue.outstanding()
        return {
            "queued_writes": writes,
            "queued_reads": reads,
            "resting": int(self.resting),
        }

    def close(self, timeout: float = 5.0) -> None:
        """Close within `timeout` seconds; drop and count what is queued with CLOSED. Idempotent.

        I/O that hangs keeps its thread and its future until it ends; its files and buffers stay
        open until then.
        """
        self._closed = True
        self._finalizer.detach()
        self._pool.close(timeout)
