"""The seam between a remote tier and the engine behind it (Redis, an object store): connections that move chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

from pagoda.metrics import Reason
from pagoda.tiers.base import Bytes

__all__ = ["Link", "Put", "Refused", "Remote", "Unended", "Usage", "Walk"]

NAME_FORMAT = 1  # of the names and values in remote stores; all names carry it


class Refused(Exception):
    """The engine is there, and its answer is no. The link goes on, unless `reconnect`.

    `reconnect`: a new connection may reach a server that says yes (after a failover the name stands for another one).
    """

    def __init__(self, reason: Reason, message: str, *, reconnect: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.reconnect = reconnect


class Walk:
    """How long a walk over all names may take: none of its steps begins once the whole is over. For one call."""

    def __init__(self, step_seconds: float, whole_seconds: float) -> None:
        """Begin now."""
        self._step_seconds = step_seconds
        self._whole_seconds = whole_seconds
        self._end = time.monotonic() + whole_seconds

    def step(self) -> float:
        """When the next step has to be over (time.monotonic()). Raises Unended if the whole has to be over now."""
        now = time.monotonic()
        if now >= self._end:
            raise Unended(f"the walk over all names had not ended after {self._whole_seconds:g} s")
        return now + self._step_seconds


class Unended(TimeoutError):
    """A walk over all names was given up; its message says so to people."""


class Put(Enum):
    """What became of a put."""

    STORED = auto()
    PRESENT = auto()  # the key was there already, or another writer was first
    BUSY = auto()  # another writer is at it
    STALE = auto()  # the bytes were no longer what the key names: nothing was left behind


class Usage(NamedTuple):
    """How full the engine is, in bytes; None where it does not say."""

    used_bytes: int | None
    limit_bytes: int | None


class Link(Protocol):
    """One connection to a store that many machines share. For one thread at a time, but for `abort`.

    A call has ended at `until` (time.monotonic()), whatever the engine does. Trouble on the way is an OSError
    (TimeoutError: too late), after which the link is of no more use and is closed. An answer that says no is `Refused`;
    so is one that cannot be ours (FAILED_CHECK). Nothing that an engine answers makes a call take more memory than its
    arguments have. Names carry NAME_FORMAT, the namespace (its root) and the key, and nothing else is ever touched.
    """

    def find(self, namespace: bytes, keys: Sequence[bytes], until: float) -> int:
        """How many leading keys are there, in as few round trips as the engine allows; moves no chunk."""

    def touch(self, namespace: bytes, keys: Sequence[bytes], until: float) -> list[bool]:
        """Let the engine know that these keys are in use, as far as it keeps recency; which of them are there."""

    def put(
        self,
        namespace: bytes,
        key: bytes,
        page: Bytes,
        stored: Bytes,
        usable: Callable[[], bool],
        until: float,
    ) -> Put:
        """Store `page` (HEADER_BYTES) and `stored` as one value that appears whole or not at all.

        `usable` is asked after the last byte has been sent and before the value appears (or, where an engine cannot
        wait, right after): if it says no, no value stays.
        """

    def get(
        self, namespace: bytes, key: bytes, page: Bytes, place: Callable[[], Bytes | None], until: float
    ) -> int | None:
        """Fill `page`, call `place`, fill what it returns from its start; how many bytes that were. None: not there.

        `place` looks at the page and says where the rest is to go; None: it is not wanted, and `Refused(FAILED_CHECK)`
        is raised. So it is if the page is not whole, or the rest does not fit.
        """

    def remove(self, namespace: bytes, keys: Sequence[bytes], until: float) -> int:
        """Remove values; how many there were."""

    def clear(self, namespace: bytes | None, walk: Walk) -> int:
        """Remove all values of one namespace (None: all that are ours); how many."""

    def census(self, walk: Walk) -> Mapping[bytes, int]:
        """How many chunks there are of each namespace (its root). Walks over all names: for people."""

    def usage(self, until: float) -> Usage:
        """How full the engine is."""

    def ping(self, until: float) -> None:
        """Return if the engine answers and can be read."""

    def abort(self) -> None:
        """Let whoever waits in this link fail soon with an OSError. From any thread; may do nothing."""

    def close(self) -> None:
        """Let go of the connection; never waits. Idempotent."""


class Remote(Protocol):
    """An engine that links can be made to. Thread-safe. In a forked child it makes new links, or raises OSError."""

    name: str  # of the tier: "redis", "s3", ...
    address: str  # for people: no password in it
    keepalive_seconds: float | None
    """How often an idle connection for look-ups is used, so that it stays ready; None: that would cost requests."""
    believed_seconds: float  # between two questions whether a key in use is there still: see Tier

    def link(self, until: float, begun: Callable[[Link], None] = lambda link: None) -> Link:
        """A new connection, ready to be used (authenticated, encrypted as configured). OSError, Refused.

        `begun` is called with it before anything is waited for: from then on its `abort` ends this call, too.
        """
