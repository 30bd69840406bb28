"""The remote tier: chunks in a store that many machines share, behind a network that may fail."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

from pagoda import codec as codecs
from pagoda.clock import Clock
from pagoda.errors import StoreError
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.metrics import Reason
from pagoda.tiers.base import Bytes, Chunk, Done, check_sizes, ended, within
from pagoda.tiers.io_queue import Read, Write
from pagoda.tiers.queued_tier import Queued
from pagoda.tiers.remote.remote_crew import RemoteCrew
from pagoda.tiers.remote.remote_worker import RemoteStore
from pagoda.tiers.remote.store_client import Link, Refused, Remote, Usage, Walk

_MOST_KEYS = 1024  # in one question
_STEP_SECONDS, _WALK_SECONDS = (
    10.0,
    60.0,
)  # for a step of a call that walks over all names, and for all of them
_MOST_TOUCHED = 16  # at once: one round of requests to an object store


class RemoteTier(Queued):
    """Chunks in a remote store, moved by background threads with a connection each. Thread-safe and fork-safe.

    What the store has is asked for on a thread of its own, and waited for `look_seconds` at most: an answer that comes
    later serves the next who asks. After failures in a row the store is left out (`resting`) until it answers
    a probe, which is sent in the background: meanwhile no call touches the network. Counters are this process's.
    """

    def __init__(
        self,
        layout: KVLayout,
        remote: Remote,
        *,
        codec: str = "raw",
        connections: int = 4,
        queue_chunks: int = 64,
        deadline_seconds: float = 1.0,
        look_seconds: float = 0.05,
        clock: Clock | None = None,
    ) -> None:
        """Connects to nothing yet. ConfigError for a codec that cannot be used, ValueError for counts below 1."""
        if connections < 1 or queue_chunks < 1:
            raise ValueError(
                f"connections and queue_chunks must be at least 1, got {connections}, {queue_chunks}"
            )
        codecs.require(codec)
        self.name = remote.name
        self.address = remote.address
        self.believed_seconds = remote.believed_seconds
        self.chunk_bytes = layout.chunk_bytes
        self.slot_bytes = layout.slot_bytes
        self.deadline_seconds = deadline_seconds
        self._look_seconds = look_seconds
        self._store = RemoteStore(layout, remote, codec, connections, deadline_seconds, clock or Clock())
        super().__init__(RemoteCrew(self._store, connections), connections, queue_chunks)

    def register(self, namespace: Namespace) -> None:
        """Remember the namespace; nothing is written."""
        self._store.register(namespace.root)

    @property
    def resting(self) -> bool:
        """Whether the store is left out, after failures in a row: nothing is found meanwhile."""
        return self._store.breaker.open

    # ---- finding -------------------------------------------------------------------------------------------------

    def find(
        self, keys: Sequence[bytes], *, start: int = 0, stamp: int | None = None, namespace: bytes | None = None,
        touch: bool = True, deadline_seconds: float | None = None,
    ) -> int:  # fmt: skip
        """How many leading keys are there or queued, as far as that is known in a moment; copies nothing."""
        if self._refused() is not None or not keys:
            return 0
        queued = self._threads.queue.saving(keys)
        until = time.monotonic() + within(self._look_seconds, deadline_seconds)
        at = 0
        while at < len(keys):
            write = queued.get(keys[at])
            coming = write is not None and write.usable() and write.is_asked(namespace, start + at)
            known = True if coming else self._store.memo.get(namespace, keys[at])
            if known is None:
                asked = keys[at : at + _MOST_KEYS]
                there = self._ask_for(asked, namespace, until)
                at += there
                if not there or (there < len(asked) and keys[at] not in queued):
                    break
            elif known:
                at += 1
            else:
                break
        return at

    def _ask_for(self, keys: Sequence[bytes], namespace: bytes | None, until: float) -> int:
        """How many leading keys the store has; 0 if that cannot be learnt before `until`."""
        store = self._store

        def question(link: Link) -> int:
            found = max((link.find(root, keys, store.until()) for root in store.roots(namespace)), default=0)
            store.memo.note(namespace, keys[:found], True)
            store.memo.note(namespace, keys[found : found + 1], False)
            return found

        answer = self._ask((namespace, *keys), question, until)
        if isinstance(answer, Reason):
            store.count(f"miss_{answer}")
            return 0
        return answer

    def _ask(self, name: object, question: Callable[[Link], int], until: float) -> int | Reason:
        if not self._threads.start():
            return Reason.IO_ERROR
        future = self._store.asks.put(name, question)
        try:
            return future.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            return Reason.DEADLINE

    def touch(
        self, keys: Sequence[bytes], *, namespace: bytes, start: int = 0, stamp: int | None = None, asked: bool = True
    ) -> list[bool] | None:  # fmt: skip
        """Let the store know that these keys are in use. Waits for it, up to its deadlines. See Tier.touch."""
        if self._refused() is not None:
            return None
        coming = self._threads.queue.saving(keys)  # first: what leaves it meanwhile is in the store
        here: list[bool] = []
        while len(here) < len(keys):
            there = self._store.touch(namespace, keys[len(here) : len(here) + _MOST_TOUCHED])
            if there is None:
                return None
            here += there
        return [there or key in coming for key, there in zip(keys, here, strict=True)]

    def contains(
        self, key: bytes, namespace: bytes | None = None, *, deadline_seconds: float | None = None
    ) -> bool:
        """Whether the key is there or queued."""
        return self.find([key], namespace=namespace, deadline_seconds=deadline_seconds) == 1

    def has_said(self, key: bytes, namespace: bytes) -> bool:
        """Whether the store answered lately if it has this key."""
        return self._store.memo.get(namespace, key) is not None

    def holders(self, key: bytes) -> list[str]:
        """Who keeps this chunk: "in flight"; nobody can keep what the store throws out."""
        return ["in flight"] if self.in_flight(key) else []

    # ---- saving --------------------------------------------------------------------------------------------------

    def save(
        self, chunks: Sequence[Chunk], namespace: bytes, *, stamp: int | None = None
    ) -> list[Future[Done]]:
        """Queue chunks to be sent straight from their payloads; never waits for room. See Tier.save."""
        check_sizes("payload", (chunk.payload for chunk in chunks), self.chunk_bytes)
        refused = self._refused()
        if refused is not None:
            return [self._dropped(refused) for _ in chunks]
        return [
            ended(True)
            if self._store.memo.get(namespace, chunk.key)
            else self._save(Write(chunk, namespace, stamp))
            for chunk in chunks
        ]

    def _count(self, name: str) -> None:
        self._store.count(name)

    # ---- loading -------------------------------------------------------------------------------------------------

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[Bytes], *, start: int = 0, namespace: bytes,
        deadline_seconds: float | None = None,
    ) -> list[Future[Done]]:  # fmt: skip
        """Receive chunks straight into `buffers` and verify them. See Tier.load."""
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers: need one buffer a key")
        check_sizes("buffer", buffers, self.chunk_bytes)
        reads = [
            Read(key, start + n, namespace, buffer)
            for n, (key, buffer) in enumerate(zip(keys, buffers, strict=True))
        ]
        queued = self._threads.queue.saving(keys)
        return [self._load(read, queued.get(read.key)) for read in reads]

    def _load(self, read: Read, write: Write | None) -> Future[Done]:
        read.write = write
        refused = self._refused()
        if refused is None and write is None and self._store.memo.get(read.namespace, read.key) is False:
            refused = Reason.ABSENT
        if refused is None:
            refused = self._threads.queue.add_read(read)
        if refused is None:
            return read.future
        self._store.count(f"miss_{refused}")
        return ended(False, refused)

    def _load_one(self, key: bytes, buffer: Bytes, namespace: bytes | None) -> Future[Done]:
        read = Read(key, None, namespace, buffer)
        return self._load(read, self._threads.queue.saving([key]).get(key))

    # ---- taking away ---------------------------------------------------------------------------------------------

    def remove(self, key: bytes, namespace: bytes | None = None) -> bool:
        """Remove a chunk, queued or stored; False if it is not here. StoreError if the store does not answer."""
        if self._closed:
            return False
        waiting, begun = self._taken_away(Reason.REMOVED, key=key)
        if begun:
            self.wait([key], self.deadline_seconds)
        store = self._store

        def question(link: Link) -> int:
            return sum(link.remove(root, [key], store.until()) for root in store.roots(namespace))

        removed = self._ask(object(), question, time.monotonic() + 2 * self.deadline_seconds)
        store.memo.forget()
        if isinstance(removed, Reason):
            raise StoreError(f"{self.address}: a chunk was not removed ({removed}): try again")
        return removed > 0 or bool(waiting or begun)

    def clear(self, namespace: bytes | None = None) -> int:
        """Remove all chunks of one namespace (its root), or all under our prefix; what this process sends is stopped.

        What other machines are sending meanwhile may appear. Raises StoreError if the store fails before the end.
        """
        if self._closed:
            return 0
        waiting, begun = self._taken_away(Reason.CLEARED, namespace=namespace)
        self.wait([write.chunk.key for write in begun], self.deadline_seconds)
        try:
            with self._walking() as link:
                return link.clear(namespace, Walk(_STEP_SECONDS, _WALK_SECONDS)) + len(waiting)
        finally:
            self._store.memo.forget()

    # ---- the whole -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _walking(self) -> Iterator[Link]:
        """A link of this call's own. StoreError for whatever goes wrong with it."""
        try:
            link = self._store.link(self._store.until())
            try:
                yield link
            finally:
                self._store.drop(link)
        except (OSError, Refused) as trouble:
            raise StoreError(f"{self.address}: {type(trouble).__name__}: {trouble}") from trouble

    def usage(self) -> Usage:
        """How full the store is; asks it. StoreError if it does not answer."""
        with self._walking() as link:
            return link.usage(self._store.until())

    def census(self) -> Mapping[bytes, int]:
        """How many chunks there are of each namespace (its root); walks over all names. StoreError."""
        with self._walking() as link:
            return link.census(Walk(_STEP_SECONDS, _WALK_SECONDS))

    def stats(self) -> Mapping[str, int]:
        """This process's counters, `queued_writes`, `queued_reads`, `resting`, and what the store said of its room."""
        if self._refused() is None:
            self._ask("usage", self._note_usage, time.monotonic() + self._look_seconds)
        known = {name: size for name, size in self._store.usage._asdict().items() if size is not None}
        return {**self._store.counters(), **self._queue_stats(), **known}

    def _note_usage(self, link: Link) -> int:
        self._store.usage = link.usage(self._store.until())
        return 0
