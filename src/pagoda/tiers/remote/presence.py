"""What is known for a moment of which keys of a namespace a remote store has."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from pagoda.clock import Clock

__all__ = ["Memo"]

_MOST_KEYS = 1 << 17  # some MiB


class Memo:
    """Remembers keys that were found under a namespace, and keys that were not. Thread-safe.

    None stands for any namespace: what is there under one is there for who does not say which.

    It is a hint: what is believed to be there may have gone, what is not may have come since.
    """

    def __init__(self, clock: Clock, present_seconds: float = 2.0, absent_seconds: float = 1.0) -> None:
        self._clock = clock
        self._lives_ns = {True: int(present_seconds * 1e9), False: int(absent_seconds * 1e9)}
        self.renew()

    def renew(self) -> None:
        """Forget all, with a new lock, as in a forked child."""
        self._lock = threading.Lock()
        self._known: dict[tuple[bytes | None, bytes], tuple[bool, int]] = {}  # until when, the oldest first

    def note(self, namespace: bytes | None, keys: Iterable[bytes], present: bool) -> None:
        """Note that these keys are there, or are not."""
        until = self._clock.monotonic_ns() + self._lives_ns[present]
        with self._lock:
            for key in keys:
                for asked in {namespace, None} if present else {namespace}:
                    self._known.pop((asked, key), None)
                    self._known[asked, key] = present, until
            while len(self._known) > _MOST_KEYS:
                del self._known[next(iter(self._known))]

    def get(self, namespace: bytes | None, key: bytes) -> bool | None:
        """Whether the key is there; None: not known."""
        present, until = self._known.get((namespace, key), (False, 0))
        return present if self._clock.monotonic_ns() < until else None

    def forget(self) -> None:
        """Forget all."""
        with self._lock:
            self._known.clear()
