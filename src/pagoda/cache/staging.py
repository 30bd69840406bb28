"""A few private page-aligned buffers, for chunks that find no host slot."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref

from pagoda.fork import renewed_after_fork
from pagoda.metrics import Reason
from pagoda.slab.memory import aligned
from pagoda.tiers.base import Bytes, Done

__all__ = ["Staged", "Staging"]

_MOST_BYTES = 256 << 20
_MOST_BUFFERS = 16
_LOOK_SECONDS = 0.5  # between two looks for a buffer that has gone


class Staging:
    """A bounded pool of (nbytes,) uint8 buffers, made when first wanted. Thread-safe.

    Whoever takes a buffer gives it back exactly once, when no I/O can touch it any more.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.count = max(2, min(_MOST_BUFFERS, _MOST_BYTES // nbytes))
        self.renew()
        renewed_after_fork(self)

    def renew(self) -> None:
        """Begin anew, with no buffers."""
        self._lock = threading.Lock()
        self._free: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        self._made: list[weakref.ref[Bytes]] = []

    @property
    def out(self) -> int:
        """Buffers that are taken now."""
        with self._lock:
            return self._alive() - self._free.qsize()

    def take(self, timeout: float = 0.0) -> Bytes | None:
        """A buffer of undefined content, or None if none came back within `timeout` seconds."""
        until = time.monotonic() + timeout
        while True:
            with contextlib.suppress(queue.Empty):
                return self._free.get_nowait()
            with self._lock:
                if self._alive() < self.count:
                    buffer = aligned(self.nbytes)
                    self._made.append(weakref.ref(buffer))
                    return buffer
            left = until - time.monotonic()
            if left <= 0:
                return None
            with contextlib.suppress(queue.Empty):
                return self._free.get(timeout=min(left, _LOOK_SECONDS))

    def give(self, buffer: Bytes) -> None:
        """Take a buffer back."""
        self._free.put(buffer)

    def _alive(self) -> int:
        """How many buffers there are; one that an exception of a signal handler lost is none. Holds the lock."""
        self._made = [made for made in self._made if made() is not None]
        return len(self._made)


class Staged:
    """A chunk in a buffer, on its way to some tiers; the buffer goes back when the last has ended. Thread-safe."""

    def __init__(self, staging: Staging, buffer: Bytes, tiers: int) -> None:
        self.buffer = buffer
        self._staging = staging
        self._lock = threading.Lock()
        self._left = tiers
        self._ok, self._free = False, True
        self._reason: Reason | None = None  # of the first that did not take it

    def ended(self, done: Done, unread: bool = True) -> None:
        """One of the tiers is done with the buffer. Once a tier. Not `unread`: it may read it still, for ever."""
        with self._lock:
            self._left -= 1
            self._free = self._free and unread
            self._ok = self._ok or done.ok
            if not done.ok and self._reason is None:
                self._reason = done.reason or Reason.IO_ERROR
            last = self._left == 0
        if last and self._free:
            self._staging.give(self.buffer)

    @property
    def refused(self) -> Reason | None:
        """Why the chunk went nowhere, if every tier has said no."""
        with self._lock:
            return self._reason if self._left == 0 and not self._ok else None
