"""put and get: the calls of a tier that copy, on top of save and load, which only borrow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from pagoda.metrics import Reason
from pagoda.slab import aligned
from pagoda.tiers.base import Bytes, Chunk, Done, check_sizes, flat_bytes


class Copies(ABC):
    """Private copies in and out of a tier. Thread-safe if the five methods below are.

    A blocking call waits at most `deadline_seconds` for a chunk; what takes longer is not stored, or a miss.
    """

    chunk_bytes: int
    slot_bytes: int
    deadline_seconds: float
    ahead = 0  # how many chunks get_many reads ahead of the one it yields

    @abstractmethod
    def save(
        self, chunks: Sequence[Chunk], namespace: bytes, *, stamp: int | None = None
    ) -> list[Future[Done]]:
        """See Tier.save."""

    @abstractmethod
    def contains(self, key: bytes) -> bool:
        """See Tier.contains."""

    @abstractmethod
    def _load_one(self, key: bytes, buffer: Bytes, namespace: bytes | None) -> Future[Done]:
        """Load one chunk from wherever in its chain it stands; a namespace of None is not compared."""

    @abstractmethod
    def _no_room(self) -> Reason | None:
        """Why a save would be dropped now."""

    @abstractmethod
    def _dropped(self, reason: Reason) -> Future[Done]:
        """Count a drop and return its end."""

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
        """Store a copy of `payload`. True: stored or, without `block`, on its way (and readable)."""
        flat = flat_bytes(payload)
        if flat.nbytes > self.chunk_bytes:
            self._dropped(Reason.TOO_LARGE)
            return False
        future = self._put(Chunk(key, position, tokens, flat, None, _always), namespace)
        if not block and not future.done():
            return True
        return self._result(future).ok

    def put_many(self, items: Iterable[Chunk], *, namespace: bytes) -> int:
        """Store copies of chunks taken lazily, a few on their way at a time; returns how many are here at the end.

        One that a later one evicted, or that another process removed meanwhile, is not.
        """
        stored = set[bytes]()
        moving: deque[tuple[bytes, Future[Done]]] = deque()

        def settle() -> None:
            key, future = moving.popleft()
            if self._result(future).ok:
                stored.add(key)

        for chunk in items:
            while moving and (self._no_room() is Reason.QUEUE_FULL or moving[0][1].done()):
                settle()
            moving.append((chunk.key, self._put(chunk, namespace)))
        while moving:
            settle()
        return sum(map(self.contains, stored))

    def _put(self, chunk: Chunk, namespace: bytes) -> Future[Done]:
        if chunk.payload.nbytes > self.slot_bytes:
            return self._dropped(Reason.TOO_LARGE)
        check_sizes("payload", [chunk.payload], self.chunk_bytes)
        reason = self._no_room()
        if reason is not None:  # asked before the copy is made: so copies are bounded by the queue
            return self._dropped(reason)
        own = aligned(self.slot_bytes)
        np.copyto(own[: self.chunk_bytes], chunk.payload[: self.chunk_bytes])
        if not chunk.still_valid():
            return self._dropped(Reason.STALE)
        return self.save([chunk._replace(payload=own, still_valid=_always)], namespace)[0]

    def get(self, key: bytes, *, namespace: bytes | None = None) -> Bytes | None:
        """A verified private copy of a chunk, (chunk_bytes,) uint8, or None."""
        return self._got(*self._get(key, namespace))

    def get_many(self, keys: Iterable[bytes], *, namespace: bytes | None = None) -> Iterator[Bytes | None]:
        """`get` for each key, in order; keys are taken lazily and looked up once."""
        moving: deque[tuple[Bytes, Future[Done]]] = deque()
        for key in keys:
            moving.append(self._get(key, namespace))
            if len(moving) > self.ahead:
                yield self._got(*moving.popleft())
        while moving:
            yield self._got(*moving.popleft())

    def _get(self, key: bytes, namespace: bytes | None) -> tuple[Bytes, Future[Done]]:
        room = aligned(self.slot_bytes)
        return room, self._load_one(key, room, namespace)

    def _got(self, room: Bytes, future: Future[Done]) -> Bytes | None:
        return room[: self.chunk_bytes] if self._result(future).ok else None

    def _result(self, future: Future[Done]) -> Done:
        try:
            return future.result(self.deadline_seconds)
        except TimeoutError:
            return Done(False, Reason.DEADLINE)


def _always() -> bool:
    return True
