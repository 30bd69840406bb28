"""put and get: calls of a tier that copy and wait. They use store and load, which only borrow
buffers.

They are for authors of engines; the cache calls store and load. All tiers inherit them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from pagoda.base.metrics import Reason
from pagoda.slab import aligned
from pagoda.tiers.base import (
    OLD_VERBS,
    Bytes,
    Chunk,
    Done,
    Tier,
    check_keys,
    check_sizes,
    completed_future,
    flat_bytes,
)


class BlockingCalls(Tier, ABC):
    """put, put_many, get and get_many of a tier: private copies in and out. Thread-safe if the
    abstract methods are.

    A blocking call waits at most `deadline_seconds` for a chunk. A chunk that takes longer is not
    stored, or is a miss.
    """

    chunk_bytes: int
    slot_bytes: int
    deadline_seconds: float
    read_ahead = 0  # how many chunks get_many loads beyond the one that it yields
    # returns a number that changes when any process clears chunks; by default 0, for a tier that
    # cannot know
    _last_clear: Callable[[], int] = int

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> object:
            renamed = f": call it {OLD_VERBS[name]}" if name in OLD_VERBS else ""
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}{renamed}"
            )

    @abstractmethod
    def load(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Bytes],
        *,
        start: int | None = 0,
        namespace: bytes | None,
        deadline_seconds: float | None = None,
    ) -> list[Future[Done]]:
        """See Tier.load; a namespace of None is not compared."""

    @abstractmethod
    def _drop_reason(self) -> Reason | None:
        """Return why a save would be dropped now; None if it would be accepted."""

    @abstractmethod
    def _count(self, name: str) -> None:
        """Add to a counter of the tier; does nothing if the tier is closed and cannot count."""

    def _dropped(self, reason: Reason) -> Future[Done]:
        self._count(f"drop_{reason}")
        return completed_future(False, reason)

    def _missed(self, reason: Reason) -> Future[Done]:
        # LEDGER_BUSY is counted by the ledger
        if reason is not Reason.LEDGER_BUSY:
            self._count(f"miss_{reason}")
        return completed_future(False, reason)

    def put(
        self,
        key: bytes,
        payload: Bytes,
        *,
        namespace: bytes,
        position: int = 0,
        tokens: int = 0,
        block: bool = True,
    ) -> bool:
        """Store a copy of `payload`. True: it is stored or, without `block`, queued (and readable).

        `payload`: a numpy array, or a tensor in CPU memory, of any element type of KV. Raises
        ValueError for anything else, and for a key that does not have 32 bytes.
        """
        check_keys([key])
        flat = flat_bytes(payload)
        if flat.nbytes > self.chunk_bytes:
            self._dropped(Reason.TOO_LARGE)
            return False
        future = self._put(
            Chunk(key, position, tokens, flat, None, _always), namespace
        )
        if not block and not future.done():
            return True
        return self._result(future).ok

    def put_many(self, items: Iterable[Chunk], *, namespace: bytes) -> int:
        """Store copies of chunks from a lazy iterable, a few at a time; return how many are stored
        at the end.

        A chunk that was evicted for a later one, or removed by another process meanwhile, is not
        counted.
        """
        stored = set[bytes]()
        pending: deque[tuple[bytes, Future[Done]]] = deque()

        def settle() -> None:
            key, future = pending.popleft()
            if self._result(future).ok:
                stored.add(key)

        for chunk in items:
            while pending and (
                self._drop_reason() is Reason.QUEUE_FULL or pending[0][1].done()
            ):
                settle()
            pending.append((chunk.key, self._put(chunk, namespace)))
        while pending:
            settle()
        return sum(map(self.contains, stored))

    def _put(self, chunk: Chunk, namespace: bytes) -> Future[Done]:
        check_keys([chunk.key])
        if chunk.payload.nbytes > self.slot_bytes:
            return self._dropped(Reason.TOO_LARGE)
        check_sizes("payload", [chunk.payload], self.chunk_bytes)
        cleared = self._last_clear()
        last_clear = self._last_clear
        reason = self._drop_reason()
        # checked before the copy is made, so the queue bounds the copies
        if reason is not None:
            return self._dropped(reason)
        copy = aligned(self.slot_bytes)
        np.copyto(copy[: self.chunk_bytes], chunk.payload[: self.chunk_bytes])
        if not chunk.still_valid():
            return self._dropped(Reason.STALE)
        # the copy does not change, but until it has a slot nothing in the tier says that it was
        # cleared
        copied = chunk._replace(
            payload=copy, still_valid=lambda: last_clear() == cleared
        )
        return self.store([copied], namespace)[0]

    def get(self, key: bytes, *, namespace: bytes | None = None) -> Bytes | None:
        """Return a verified private copy of a chunk, (chunk_bytes,) uint8, or None."""
        return self._loaded_or_none(*self._start_get(key, namespace))

    def get_many(
        self, keys: Iterable[bytes], *, namespace: bytes | None = None
    ) -> Iterator[Bytes | None]:
        """Yield `get` of each key, in order. Takes the keys lazily and looks each up once."""
        pending: deque[tuple[Bytes, Future[Done]]] = deque()
        for key in keys:
            pending.append(self._start_get(key, namespace))
            if len(pending) > self.read_ahead:
                yield self._loaded_or_none(*pending.popleft())
        while pending:
            yield self._loaded_or_none(*pending.popleft())

    def _start_get(
        self, key: bytes, namespace: bytes | None
    ) -> tuple[Bytes, Future[Done]]:
        buffer = aligned(self.slot_bytes)
        return buffer, self.load(
            [key], [buffer], start=None, namespace=namespace
        )[0]

    def _loaded_or_none(
        self, buffer: Bytes, future: Future[Done]
    ) -> Bytes | None:
        return buffer[: self.chunk_bytes] if self._result(future).ok else None

    def _result(self, future: Future[Done]) -> Done:
        try:
            return future.result(self.deadline_seconds)
        except TimeoutError:
            return Done(False, Reason.DEADLINE)


def _always() -> bool:
    return True
