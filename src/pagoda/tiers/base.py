"""The Tier protocol: a place that chunks live in, as the cache sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from pagoda.keys import Namespace
from pagoda.metrics import Reason
from pagoda.threads import Answer

Bytes = npt.NDArray[np.uint8]
_T = TypeVar("_T")


class Chunk(NamedTuple):
    """One chunk to be saved. A tier only borrows `payload` until the future of its save is done."""

    key: bytes
    position: int  # in chunks from the start of the chain
    tokens: int
    payload: Bytes  # (nbytes,) uint8, at least chunk_bytes, at most a slot
    parent: bytes | None  # the key at position - 1
    still_valid: Callable[[], bool]  # payload is what the key names for as long as this says so


class Done(NamedTuple):
    """The end of one save or load. `ok` means: stored and visible, or all bytes verified and in the buffer."""

    ok: bool
    reason: Reason | None = None  # why not, if not


@runtime_checkable
class Tier(Protocol):
    """A place that chunks live in. All methods are thread-safe; trouble is a value with a reason, never an exception.

    ValueError is for wrong use only: a payload or buffer smaller than a chunk, keys and buffers of unequal number. What
    must be done or be known to have failed (`register`, `remove`, `clear`, `stats`) raises StoreError after a while.
    After `close()` nothing is found, and saves and loads end with Reason.CLOSED.
    """

    name: str
    chunk_bytes: int
    believed_seconds: float  # for how long a chunk that was seen here is taken to be here still

    def register(self, namespace: Namespace) -> None:
        """Make the namespace known with its labels, so that it can be listed and cleared; idempotent, cheap."""

    def find(
        self,
        keys: Sequence[bytes],
        *,
        start: int = 0,
        stamp: int | None = None,
        namespace: bytes | None = None,
        touch: bool = True,
        deadline_seconds: float | None = None,
    ) -> int:
        """How many leading keys are here or on their way here; copies nothing, touches recency unless told not to.

        What is not found out before the deadline (by default and at most the tier's own) counts as not here.

        `start` is the chain position of keys[0]; calls of one request pass one `stamp`. `namespace` is the root that
        the keys were derived under: who leaves it out has all that are registered looked through.
        """

    def touch(
        self,
        keys: Sequence[bytes],
        *,
        namespace: bytes,
        start: int = 0,
        stamp: int | None = None,
        asked: bool = True,
    ) -> list[bool] | None:
        """Raise the recency of a run of which a tier above has copies; which keys are here or on their way here.

        None: that cannot be said now. `asked`: somebody was served from above; else it was stored there again. Takes
        as long as I/O takes: for background threads.
        """

    def save(
        self, chunks: Sequence[Chunk], namespace: bytes, *, stamp: int | None = None
    ) -> list[Future[Done]]:
        """Store chunks of one namespace (its root), one future each, never waiting for room.

        What finds the queue full is dropped with QUEUE_FULL and counted. A key that is already here is ok.
        """

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[Bytes], *, start: int = 0, namespace: bytes,
        deadline_seconds: float | None = None,
    ) -> list[Future[Done]]:  # fmt: skip
        """Read verified chunks into `buffers` ((>= chunk_bytes,) uint8), in order, several at a time.

        A chunk of another namespace, or at another position than its place from `start` on, is a miss and stays.

        Returns before the deadline (by default and at most the tier's own), however long the reads take then.

        A buffer belongs to the tier until its future is done; if it was not ok, its content is undefined.
        """

    def contains(self, key: bytes, *, deadline_seconds: float | None = None) -> bool:
        """Whether `find` would find this key; touches nothing."""

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
        """Store a copy of `payload`. True: it is stored or, without `block`, on its way (and readable)."""

    def put_many(self, items: Iterable[Chunk], *, namespace: bytes) -> int:
        """Store chunks taken lazily; returns how many are really here then. Waits for the queue, with a deadline."""

    def get(self, key: bytes, *, namespace: bytes | None = None) -> Bytes | None:
        """A verified private copy of a chunk, (chunk_bytes,) uint8, or None."""

    def get_many(self, keys: Iterable[bytes], *, namespace: bytes | None = None) -> Iterator[Bytes | None]:
        """`get` for each key, in order; keys are taken lazily and looked up once."""

    def remove(self, key: bytes) -> bool:
        """Remove a chunk, queued or stored; False if it is not here."""

    def in_flight(self, key: bytes) -> bool:
        """Whether a save of this key has begun and not ended."""

    def wait(self, keys: Iterable[bytes], timeout: float) -> bool:
        """Wait until none of these keys is in flight; False if `timeout` seconds were not enough."""

    def clear(self, namespace: bytes | None = None) -> int:
        """Remove all chunks of one namespace, or all; what is in flight will not appear. Returns how many went."""

    def holders(self, key: bytes) -> list[str]:
        """Who keeps this chunk from eviction: names of pins, "lease", "in flight"."""

    def stats(self) -> Mapping[str, int]:
        """Gauges and counters by name, of all processes that share the store."""

    def close(self, timeout: float = 5.0) -> None:
        """End within `timeout` seconds; what is still queued is dropped with CLOSED. Idempotent."""


def ended(ok: bool, reason: Reason | None = None) -> Future[Done]:
    """A future that is done already."""
    future: Future[Done] = Answer()
    future.set_result(Done(ok, reason))
    return future


def begun() -> Future[Done]:
    """A future that cannot be cancelled: bytes may be moving until it is done."""
    future: Future[Done] = Answer()
    future.set_running_or_notify_cancel()
    return future


def within(own_seconds: float, deadline_seconds: float | None) -> float:
    """The deadline of a call: the tier's own where none was given, and never a longer one."""
    return own_seconds if deadline_seconds is None else max(0.0, min(own_seconds, deadline_seconds))


def flat_bytes(array: npt.NDArray[np.generic]) -> Bytes:
    """`array` as (nbytes,) uint8; a copy only where it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def check_sizes(name: str, arrays: Iterable[Bytes], chunk_bytes: int) -> None:
    """Raise ValueError if one of `arrays` cannot hold a chunk."""
    for array in arrays:
        if array.dtype != np.uint8 or array.ndim != 1 or array.nbytes < chunk_bytes:
            raise ValueError(
                f"{name}: need a flat uint8 array of at least {chunk_bytes} bytes, got {array.dtype} {array.shape}"
            )


def runs(items: Iterable[_T], most: int, follows: Callable[[_T, _T], bool]) -> Iterator[list[_T]]:
    """Cut items into runs of at most `most`, in each of which every one follows the one before."""
    run: list[_T] = []
    for item in items:
        if run and (len(run) == most or not follows(item, run[-1])):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def follows(chunk: Chunk, before: Chunk) -> bool:
    """Whether `chunk` comes right after `before` in one chain, so that one reserve can take both."""
    return (
        chunk.position == before.position + 1
        and chunk.parent in (None, before.key)
        and chunk.tokens == before.tokens
    )
