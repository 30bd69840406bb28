"""The protocol of a store's client: how a remote tier talks to Redis or an object store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol, Self

from pagoda.base.metrics import Reason
from pagoda.tiers.base import Bytes
from pagoda.tiers.remote.leading_run import EXACT_KEYS, leading_run

# the version of names and values in remote stores; all names contain it
NAME_FORMAT = 1


class RefusedError(Exception):
    """The store answered with a refusal. The connection can still be used, unless `reconnect`.

    `reconnect`: a new connection may reach a server that accepts (after a failover the address
    leads to another one).
    `contained`: one part of the store failed, which was counted and logged; the rest of the store
    may work.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        reconnect: bool = False,
        contained: bool = False,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.reconnect = reconnect
        self.contained = contained


class ServerError(OSError):
    """The store answered that it cannot do this now. A failed write (a full disk) does not mean
    that reads fail too.
    """


def reason_of(error: Exception) -> Reason:
    """Return why a call to a store failed or was refused."""
    if isinstance(error, RefusedError):
        return error.reason
    return Reason.DEADLINE if isinstance(error, TimeoutError) else Reason.IO_ERROR


class ListingDeadline:
    """How long a listing of all names may take: no step starts after the whole time is over. For
    one call.
    """

    def __init__(self, step_seconds: float, whole_seconds: float) -> None:
        """Start now."""
        self._step_seconds = step_seconds
        self._whole_seconds = whole_seconds
        self._end = time.monotonic() + whole_seconds

    def next_step(self) -> float:
        """Return when the next step must be over (time.monotonic()). ListingTimeout if the whole
        time is over now.
        """
        now = time.monotonic()
        if now >= self._end:
            raise ListingTimeout(
                f"the listing of all names had not ended after {self._whole_seconds:g} s"
            )
        return now + self._step_seconds


class ListingTimeout(TimeoutError):
    """A listing of all names was given up. Its message is for people."""


class PutResult(Enum):
    """The result of a put."""

    STORED = auto()
    PRESENT = auto()  # the key was present already, or another writer was first
    BUSY = auto()  # another writer is storing it
    # asked for only once so far: it will be stored when it is asked for again
    UNSEEN = auto()
    # the bytes no longer were the key's chunk: nothing was left in the store
    STALE = auto()


class PutRequest(NamedTuple):
    """A chunk to be stored as one value: `page` (HEADER_BYTES), then `stored`.

    `is_valid` returns whether they still are the key's chunk. `rank`: see StoreConnection.
    """

    namespace: bytes
    key: bytes
    page: Bytes
    stored: Bytes
    is_valid: Callable[[], bool]
    rank: int = 0


class GetRequest(NamedTuple):
    """A chunk to be read: first `page` is filled, then the result of `destination`. `rank`: see
    StoreConnection.

    `destination` reads the page and returns where to write the rest. None: the rest is not wanted.
    """

    namespace: bytes
    key: bytes
    page: Bytes
    destination: Callable[[], Bytes | None]
    rank: int = 0

    def space_for(self, nbytes: int) -> Bytes:
        """Return where to write the rest, of `nbytes`. RefusedError: it is not wanted, or does not
        fit.
        """
        found = self.destination()
        if found is None or nbytes > found.nbytes:
            raise RefusedError(
                Reason.FAILED_CHECK, "the value is not the requested chunk"
            )
        return found


class Usage(NamedTuple):
    """How full the store is, in bytes; None if it does not report that."""

    used_bytes: int | None
    limit_bytes: int | None
    # what is wrong with its configuration, and the command that mends it
    warnings: Sequence[str] = ()
    # of a store of several nodes: how many there are, and how many of them answered
    nodes: int | None = None
    answering: int | None = None


class StoreConnection(Protocol):
    """One connection to a store that many machines share. For one thread at a time, except `abort`.

    A call ends by `until` (time.monotonic()), whatever the store does. A failure is an OSError
    (TimeoutError: late); after it the connection cannot be used and is closed. A refusal is a
    RefusedError, and so is an answer that cannot be one of our chunks (FAILED_CHECK). For stores
    with an order of eviction, a `rank` says how many milliseconds earlier a chunk may be evicted
    than the head of a chain that is used now. Whatever a store answers, a call uses no more memory
    than its arguments have. Names contain NAME_FORMAT, the namespace (its root) and the key; other
    names are never touched.

    Implementations inherit from it, for what is the same in most stores.
    """

    exact_keys: int = EXACT_KEYS

    def open(self, until: float) -> Self:
        """Connect, authenticate and prove that the store answers; return this connection. OSError,
        RefusedError.

        Called once, before all calls except `abort` and `close`. If it fails, the caller closes the
        connection.
        """
        self.ping(until)
        return self

    def find(self, namespace: bytes, keys: Sequence[bytes], until: float) -> int:
        """Return how many leading keys are present, in as few round trips as possible; moves no
        chunk.

        Of many keys, only some positions may be asked about: see `leading_run`. This default uses
        `touch`, with up to `exact_keys` at once: it is for stores in which a touch changes nothing.
        """
        return leading_run(
            keys,
            lambda some: self.touch(namespace, some, until),
            exact=self.exact_keys,
        )

    def present(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> list[bool]:
        """Return which of these keys are present, also behind absent ones, in as few round trips as
        possible; moves no chunk.

        This default is for stores in which a touch changes nothing.
        """
        return self.touch(namespace, keys, until)

    def touch(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        until: float,
        ranks: Sequence[int] | None = None,
    ) -> list[bool]:
        """Touch these keys, if the store keeps recency; return which of them are present."""

    def claim(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> list[PutResult | None]:
        """Ask before puts: return PRESENT, BUSY or UNSEEN for each key that must not be sent, None
        for the others.

        If the store can, it keeps other writers away from these others until they are put, or until
        a while after `until`. In this default there are no claims.
        """
        return [
            PutResult.PRESENT if present else None
            for present in self.touch(namespace, keys, until)
        ]

    def release(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> None:
        """Release keys that were claimed and not put, for other writers. Never ends the claim of
        another process.
        """
        return None

    def put(self, request: PutRequest, until: float) -> PutResult:
        """Store a chunk as a value that appears completely or not at all.

        `is_valid` is called after the last byte was sent and before the value appears (or, if a
        store cannot wait, directly after). If it returns False, no value stays.
        """

    def get(self, request: GetRequest, until: float) -> int | Reason | None:
        """Fill `page`, call `destination`, fill its result from the start; return the number of
        bytes. None: absent.

        A reason: a miss that says nothing about the store as a whole. `RefusedError(FAILED_CHECK)`
        is raised if the rest is not wanted or does not fit, or the page is incomplete.
        """

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> int:
        """Remove values; return how many were present."""

    def clear(self, namespace: bytes | None, deadline: ListingDeadline) -> int:
        """Remove all values of one namespace (None: all of ours); return how many."""

    def count_by_namespace(
        self, deadline: ListingDeadline
    ) -> Mapping[bytes, int]:
        """Return the number of chunks of each namespace (its root). Lists all names: for people."""

    def usage(self, until: float) -> Usage:
        """Return how full the store is; by default nothing is known."""
        return Usage(None, None)

    def ping(self, until: float) -> None:
        """Return if the store answers and can be read. A contained refusal: only a part of it
        does.
        """

    def abort(self) -> None:
        """Make a call that waits in this connection fail soon with an OSError. From any thread; may
        do nothing.
        """

    def close(self) -> None:
        """Close the connection; never waits. Idempotent."""


class StoreClient(Protocol):
    """Makes connections to one store. Thread-safe. In a forked child it makes new connections, or
    raises OSError.
    """

    name: str  # name of the tier: "redis", "s3", ...
    address: str  # for people: contains no password
    keepalive_seconds: float | None = 20.0
    """How often an idle connection for lookups is used, so that it stays ready; None: never (it
    costs money).
    """
    # how long a key in use is assumed to stay present: see Tier
    believed_seconds: float = 2.0
    # nothing is ever stored there: no write-back, no touches
    read_only: bool = False

    def connection(self) -> StoreConnection:
        """Return a new connection that is still to be opened. Never waits. OSError."""

    def begin_run(self, keys: Sequence[bytes], stamp: int) -> None:
        """Note that these chunks are about to be stored, in order, by the request that has this
        stamp.

        A store of several places may keep together what one request stores. Never waits; changes
        nothing by default.
        """
        return None
