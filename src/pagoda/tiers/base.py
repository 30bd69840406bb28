"""The Tier protocol: how the cache sees a place that stores chunks.

`pagoda.cache.open_tiers` opens the tiers that are configured; `Cache(tiers=...)` takes any others.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import (
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    runtime_checkable,
)

import numpy as np
import numpy.typing as npt

from pagoda.base.metrics import Reason
from pagoda.base.signal_safe_threads import Answer, running_answers
from pagoda.keys import KEY_BYTES, Namespace
from pagoda.transfer.base import as_words

Bytes = npt.NDArray[np.uint8]
_T = TypeVar("_T")

# what calls of a tier were named before, and what they are named now
OLD_VERBS = {"find": "match_prefix", "find_each": "match_each", "save": "store"}


class Chunk(NamedTuple):
    """A chunk to save. A tier borrows `payload` until the future of the save is done."""

    key: bytes
    position: int  # in chunks from the start of the chain
    tokens: int
    payload: Bytes  # (nbytes,) uint8, at least chunk_bytes, at most a slot
    parent: bytes | None  # the key at position - 1
    # True for as long as the payload is what the key names
    still_valid: Callable[[], bool]


# `Ledger.are_published`
AskPublished: TypeAlias = Callable[[Sequence[tuple[int, int]]], list[bool]]


@dataclass(frozen=True, slots=True)
class InSlot:
    """`Chunk.still_valid` of a payload in a slot of the host tier. A tier may ask about many at
    once.

    Args:
        are_published: `Ledger.are_published` of the host tier.
        place: the slot, and the generation of the chunk in it.
    """

    are_published: AskPublished
    place: tuple[int, int]

    def __call__(self) -> bool:
        """Return whether the slot still has the chunk."""
        return self.are_published([self.place])[0]


class Done(NamedTuple):
    """The result of a save or load. `ok`: the chunk is stored and visible, or verified and in the
    buffer.
    """

    ok: bool
    reason: Reason | None = None  # of a failure


@runtime_checkable
class Tier(Protocol):
    """A place that stores chunks. All methods are thread-safe; a failure is a value with a reason,
    not an exception.

    ValueError is for wrong use only, and then nothing is changed: a key that does not have 32
    bytes, a payload or buffer smaller than a chunk, or unequal numbers of keys and buffers.
    Calls whose failure the caller must notice (`register`, `remove`, `clear`, `stats`) raise
    StoreError after some seconds. After `close()` nothing is found, and saves and loads end with
    Reason.CLOSED.

    A subclass inherits defaults for what few tiers change: the attributes from `codec` to
    `resting`, `stamp`, `admit` and `flush`.
    """

    name: str
    chunk_bytes: int
    # the time for which a chunk that was found here is assumed to stay here
    believed_seconds: float
    codec: str = "raw"  # the codec of the stored bytes
    address: str = ""  # where the tier is; shown in the log
    # shared by machines: not used while the weights have no name that all machines know
    is_shared: bool = False
    read_only: bool = False  # nothing is saved or touched here
    queue_chunks: int = 64  # the saves that may be outstanding; more are refused
    # `match_prefix` updates recency here, so a chunk that was loaded need not be touched
    keeps_recency: bool = False
    # returns a recency stamp for one run; it is passed to all calls for the run, so that its tail
    # stays older
    stamp: Callable[[], int] = time.monotonic_ns

    def __init_subclass__(cls) -> None:
        """Raise TypeError if a tier has a method by the name that it had before."""
        super().__init_subclass__()
        for old, new in OLD_VERBS.items():
            if old in cls.__dict__:
                raise TypeError(f"{cls.__name__}.{old}: name it {new}")

    @property
    def resting(self) -> bool:
        """Whether the tier is skipped for a while, after failures in a row. During that time
        nothing is found.
        """
        return False

    @abstractmethod
    def register(self, namespace: Namespace) -> None:
        """Record the namespace with its labels, so that it can be listed and cleared. Idempotent
        and cheap.
        """

    @abstractmethod
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
        """Return how many leading keys are stored or queued. Copies nothing; updates recency if
        `touch`.

        A key whose state is not known before the deadline counts as absent. The tier's own deadline
        is default and maximum.

        `start` is the chain position of keys[0] (None: any); the calls of one request pass the same
        `stamp`. `namespace` is the root that the keys were derived under; without it all registered
        namespaces are searched.
        """

    def match_each(
        self,
        keys: Sequence[bytes],
        *,
        start: int | None = 0,
        stamp: int | None = None,
        namespace: bytes | None = None,
        deadline_seconds: float | None = None,
    ) -> list[bool]:
        """Return for each key whether `match_prefix` would find it, also behind keys that are
        absent. Copies nothing; updates recency.

        Arguments are those of `match_prefix`, and so is what a key counts as whose state is not
        known before the deadline. By default `match_prefix` is called once for each run of keys.
        """
        return confirm_each(
            [True] * len(keys),
            lambda begin, stop, seconds: self.match_prefix(
                keys[begin:stop],
                start=None if start is None else start + begin,
                stamp=stamp,
                namespace=namespace,
                deadline_seconds=seconds,
            ),
            deadline_seconds,
        )

    @abstractmethod
    def touch(
        self,
        keys: Sequence[bytes],
        *,
        namespace: bytes,
        start: int = 0,
        stamp: int | None = None,
        asked: bool = True,
    ) -> list[bool] | None:
        """Update the recency of a run that a higher tier has copies of; return which keys are
        stored or queued.

        None: unknown at present. `asked`: a higher tier served the run; otherwise the run was
        stored there again. May wait for I/O, so call it from background threads.
        """

    def admit(
        self,
        keys: Sequence[bytes],
        *,
        namespace: bytes,
        start: int,
        stamp: int | None,
    ) -> tuple[int, bool]:
        """Return how many of a run's next keys a save would store, and whether the rest of the run
        is refused.

        `start` is the chain position of keys[0]. By default all are stored. A tier counts what it
        refuses.
        """
        return len(keys), False

    @abstractmethod
    def store(
        self,
        chunks: Sequence[Chunk],
        namespace: bytes,
        *,
        stamp: int | None = None,
    ) -> list[Future[Done]]:
        """Store chunks of one namespace (its root) and return one future per chunk. Never waits for
        space.

        A chunk that finds the queue full is dropped with QUEUE_FULL and counted. A key that is
        already stored is a success.
        """

    @abstractmethod
    def load(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Bytes],
        *,
        start: int | None = 0,
        namespace: bytes,
        deadline_seconds: float | None = None,
    ) -> list[Future[Done]]:
        """Read verified chunks into `buffers` ((>= chunk_bytes,) uint8), in order, several at a
        time.

        A chunk of another namespace, or of another position than its index from `start` on (None:
        any), is a miss and stays in the tier.

        Returns before the deadline (the tier's own is default and maximum); the reads may take
        longer.

        A buffer belongs to the tier until its future is done. If the result is not ok, the content
        is undefined.
        """

    @abstractmethod
    def contains(
        self, key: bytes, *, deadline_seconds: float | None = None
    ) -> bool:
        """Return whether `match_prefix` would find this key; does not update recency."""

    @abstractmethod
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
        """Store a copy of `payload`. True: it is stored or, without `block`, queued (and
        readable).
        """

    @abstractmethod
    def put_many(self, items: Iterable[Chunk], *, namespace: bytes) -> int:
        """Store chunks from a lazy iterable; return how many are stored at the end. Waits, up to a
        limit.
        """

    @abstractmethod
    def get(self, key: bytes, *, namespace: bytes | None = None) -> Bytes | None:
        """Return a verified private copy of a chunk, (chunk_bytes,) uint8, or None."""

    @abstractmethod
    def get_many(
        self, keys: Iterable[bytes], *, namespace: bytes | None = None
    ) -> Iterator[Bytes | None]:
        """Yield `get` of each key, in order. Takes the keys lazily and looks each up once."""

    @abstractmethod
    def remove(self, key: bytes) -> bool:
        """Remove a chunk, queued or stored; return False if it is absent."""

    @abstractmethod
    def in_flight(self, key: bytes) -> bool:
        """Return whether a save of this key is queued or running."""

    @abstractmethod
    def wait(self, keys: Iterable[bytes], timeout: float) -> bool:
        """Wait until the saves of these keys have ended; return False after `timeout` seconds."""

    def flush(self, timeout: float) -> bool:
        """Wait until no save is queued or running; return False after `timeout` seconds."""
        return True

    @abstractmethod
    def clear(self, namespace: bytes | None = None) -> int:
        """Remove all chunks of one namespace, or all; saves in flight store nothing. Return how
        many were removed.
        """

    @abstractmethod
    def holders(self, key: bytes) -> list[str]:
        """Return what keeps this chunk from eviction: names of pins, "lease", "in flight"."""

    @abstractmethod
    def stats(self) -> Mapping[str, int]:
        """Return gauges and counters by name, of all processes that share the store."""

    @abstractmethod
    def close(self, timeout: float = 5.0) -> None:
        """Close within `timeout` seconds; drop what is still queued with CLOSED. Idempotent."""


def confirm_each(
    perhaps: Sequence[bool],
    find: Callable[[int, int, float | None], int],
    deadline_seconds: float | None,
) -> list[bool]:
    """Return for each key whether it is present, also behind keys that are absent.

    Args:
        perhaps: whether a key may be present.
        find: returns how many leading keys of [begin, stop) are present, within some seconds
            (None: its own deadline).
        deadline_seconds: for all; keys that were not asked about by then count as absent.
    """
    until = (
        None if deadline_seconds is None else time.monotonic() + deadline_seconds
    )
    here = [False] * len(perhaps)
    end = len(perhaps)
    at = 0
    stop = 0  # the end of the run that `at` is in
    while at < end:
        if not perhaps[at]:
            at += 1
            continue
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            break
        stop = max(stop, at)
        while stop < end and perhaps[stop]:
            stop += 1
        found = min(find(at, stop, left), stop - at)
        here[at : at + found] = [True] * found
        at += found + 1  # the one behind them is absent
    return here


def completed_future(ok: bool, reason: Reason | None = None) -> Future[Done]:
    """Return a future that is already done."""
    future: Future[Done] = Answer()
    future.set_result(Done(ok, reason))
    return future


def running_future() -> Future[Done]:
    """Return a future that cannot be cancelled: bytes may be in transfer until it is done."""
    futures: list[Future[Done]] = running_answers(1)
    return futures[0]


def end_of(future: Future[Done]) -> Done:
    """Return how a save or load that is done has ended; a tier whose future raises or was cancelled
    has failed. Raises nothing.
    """
    if future.cancelled() or future.exception() is not None:
        return Done(False, Reason.IO_ERROR)
    return future.result()


def ends_of(futures: Iterable[Future[Done]]) -> list[Done]:
    """Return what `end_of` returns for each."""
    return [end_of(future) for future in futures]


def clamp_deadline(own_seconds: float, deadline_seconds: float | None) -> float:
    """Return the deadline of a call: the tier's own is default and maximum."""
    return (
        own_seconds
        if deadline_seconds is None
        else max(0.0, min(own_seconds, deadline_seconds))
    )


def flat_bytes(array: object) -> Bytes:
    """Return a numpy array, or a tensor in CPU memory, as (nbytes,) uint8; copies only if it is not
    contiguous.

    numpy has no bfloat16 and no fp8: a tensor of these is taken as it is. Raises ValueError for
    anything else.
    """
    words = as_words(array, "payload", None)
    return np.ascontiguousarray(words).reshape(-1).view(np.uint8)


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise ValueError that names the first key that is none."""
    for at, key in enumerate(keys):
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise ValueError(
                f"keys[{at}] is not a key of {KEY_BYTES} bytes: use Cache.keys, KeyChain or "
                "derive_keys"
            )


def check_sizes(
    name: str, arrays: Sequence[Bytes], chunk_bytes: int, keys: int | None = None
) -> None:
    """Raise ValueError if one of `arrays` cannot hold a chunk, or if their number is not `keys`."""
    if keys not in (None, len(arrays)):
        raise ValueError(
            f"{keys} keys and {len(arrays)} {name}s: need one {name} per key"
        )
    for array in arrays:
        if (
            array.dtype != np.uint8
            or array.ndim != 1
            or array.nbytes < chunk_bytes
        ):
            raise ValueError(
                f"{name}: need a flat uint8 array of at least {chunk_bytes} bytes, got "
                f"{array.dtype} {array.shape}"
            )


def runs(
    items: Iterable[_T], most: int, follows: Callable[[_T, _T], bool]
) -> Iterator[list[_T]]:
    """Split items into runs of at most `most`, in which each item follows the one before it."""
    run: list[_T] = []
    for item in items:
        if run and (len(run) == most or not follows(item, run[-1])):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def follows(chunk: Chunk, before: Chunk) -> bool:
    """Return whether `chunk` directly follows `before` in one chain, so that one reserve can take
    both.
    """
    return (
        chunk.position == before.position + 1
        and chunk.parent in (None, before.key)
        and chunk.tokens == before.tokens
    )
