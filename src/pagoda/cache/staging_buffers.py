"""A few private page-aligned staging buffers, for chunks that get no host slot."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable

from pagoda.base.clock import Deadline
from pagoda.base.metrics import Reason
from pagoda.slab.memory import aligned
from pagoda.tiers.base import Bytes, Done

_MOST_BYTES = 256 << 20
_MOST_BUFFERS = 16
_LOOK_SECONDS = 0.5  # between two checks for a buffer that was garbage-collected


class StagingPool:
    """A bounded pool of (nbytes,) uint8 buffers, allocated when first needed. Thread-safe.

    Each acquired buffer must be released exactly once, after the last I/O that can touch it.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.count = max(2, min(_MOST_BUFFERS, _MOST_BYTES // nbytes))
        self._lock = threading.Lock()
        self._free: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        self._allocated: list[weakref.ref[Bytes]] = []

    @property
    def in_use(self) -> int:
        """Buffers that are acquired now."""
        with self._lock:
            return self._alive() - self._free.qsize()

    def acquire(self, timeout: float = 0.0) -> Bytes | None:
        """Return a buffer of undefined content; None if no buffer becomes free within `timeout`
        seconds.
        """
        deadline = Deadline(timeout)
        while True:
            with contextlib.suppress(queue.Empty):
                return self._free.get_nowait()
            with self._lock:
                if self._alive() < self.count:
                    buffer = aligned(self.nbytes)
                    self._allocated.append(weakref.ref(buffer))
                    return buffer
            if deadline.passed:
                return None
            with contextlib.suppress(queue.Empty):
                return self._free.get(
                    timeout=min(deadline.remaining(), _LOOK_SECONDS)
                )

    def acquire_some(self, count: int, timeout: float) -> list[Bytes]:
        """Return up to `count` buffers; wait up to `timeout` seconds for the first, and for no
        other.
        """
        buffers: list[Bytes] = []
        with contextlib.suppress(queue.Empty):
            while len(buffers) < count:
                buffers.append(self._free.get_nowait())
        while len(buffers) < count:
            buffer = self.acquire(0.0 if buffers else timeout)
            if buffer is None:
                break
            buffers.append(buffer)
        return buffers

    def release(self, buffer: Bytes) -> None:
        """Put a buffer back into the pool."""
        self._free.put(buffer)

    def _alive(self) -> int:
        """Count the buffers that still exist (an exception of a signal handler may lose one).
        Called with the lock.
        """
        self._allocated = [
            buffer for buffer in self._allocated if buffer() is not None
        ]
        return len(self._allocated)


class StagedChunk:
    """A chunk in a buffer that some tiers will read; the last tier to finish releases the buffer.
    Thread-safe.
    """

    def __init__(
        self,
        staging: StagingPool,
        buffer: Bytes,
        tiers: int,
        still_valid: Callable[[], bool],
    ) -> None:
        """`still_valid`: whether the chunk may still be stored: it was not cleared."""
        self.buffer = buffer
        self.still_valid = still_valid
        self._staging = staging
        self._lock = threading.Lock()
        self._left = tiers
        self._ok = False
        self._releasable = True
        # why the first tier that did not store it refused
        self._reason: Reason | None = None

    def finish(self, done: Done, unread: bool = True) -> None:
        """Note that one tier is done with the buffer, once for each tier. `unread` False: I/O may
        still read it.
        """
        with self._lock:
            self._left -= 1
            self._releasable = self._releasable and unread
            self._ok = self._ok or done.ok
            if not done.ok and self._reason is None:
                self._reason = done.reason or Reason.IO_ERROR
            last = self._left == 0
        if last and self._releasable:
            self._staging.release(self.buffer)

    @property
    def refused(self) -> Reason | None:
        """Why no tier stored the chunk, once every tier has refused it; else None."""
        with self._lock:
            return self._reason if self._left == 0 and not self._ok else None
