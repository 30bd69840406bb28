"""A few private page-aligned buffers, for chunks that find no host slot."""

from __future__ import annotations

import threading

from pagoda.cache.forks import renewed_after_fork
from pagoda.slab.memory import aligned
from pagoda.tiers.base import Bytes

__all__ = ["Staging"]

_MOST_BYTES = 256 << 20
_MOST_BUFFERS = 16


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
        self._room = threading.Semaphore(self.count)
        self._lock = threading.Lock()
        self._free: list[Bytes] = []
        self._out = 0

    @property
    def out(self) -> int:
        """Buffers that are taken now."""
        with self._lock:
            return self._out

    def take(self, timeout: float = 0.0) -> Bytes | None:
        """A buffer of undefined content, or None if none came back within `timeout` seconds."""
        if not self._room.acquire(timeout=timeout or None, blocking=timeout > 0):
            return None
        with self._lock:
            self._out += 1
            if self._free:
                return self._free.pop()
        return aligned(self.nbytes)

    def give(self, buffer: Bytes) -> None:
        """Take a buffer back."""
        with self._lock:
            self._out -= 1
            self._free.append(buffer)
        self._room.release()
