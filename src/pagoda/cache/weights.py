"""The weights epoch of a model on this machine, kept in a small file under every local root.

The epoch is the file's *size*: raising it appends one byte, which two processes can do at once without losing one,
and noticing it is one `stat`. The largest of the roots stands, so one that is wiped (a reboot) loses nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

from pagoda.cache.forks import renewed_after_fork
from pagoda.errors import StoreError

__all__ = ["Weights"]


class Weights:
    """Reads and raises the epoch of one model. Thread-safe; other processes notice at their next `epoch()`."""

    def __init__(self, roots: Iterable[Path], model: str, begun_at: int = 0) -> None:
        """`begun_at`: the epoch that all machines agreed on; within each of them this machine counts from 0."""
        name = f"{model}\0{begun_at}" if begun_at else model
        digest = blake3(name.encode(), derive_key_context="PagodaKV weights epoch").hexdigest(8)
        self._paths = [root / f"weights-{digest}" for root in roots]
        self._known = 0  # never goes back in this process, whatever becomes of the files
        self.renew()
        renewed_after_fork(self)

    def renew(self) -> None:
        """Make the lock anew."""
        self._lock = threading.Lock()

    def epoch(self) -> int:
        """The number of times that the weights were changed in place. Costs one stat a root."""
        self._known = max(self._known, *map(_size, self._paths), 0)
        return self._known

    def raised(self) -> int:
        """Raise the epoch and return it: on the medium, under every root, before this returns.

        Raises StoreError if no root could be written: other processes would go on with the old weights' chunks.
        """
        with self._lock:
            target = self.epoch() + 1
            troubles = [trouble for path in self._paths if (trouble := _grow(path, target))]
            self._known = max(target, self.epoch())
            if troubles and len(troubles) == len(self._paths):
                raise StoreError(
                    f"the weights epoch could not be kept, clear the cache instead: {troubles[0]}"
                )
            return self._known


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _grow(path: Path, target: int) -> OSError | None:
    """Append to `path` at least one byte, and up to `target`, and sync it. Appends of others add up."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"+" * max(1, target - os.fstat(fd).st_size))
            os.fsync(fd)
        finally:
            os.close(fd)
        _sync_directory(path.parent)
    except OSError as trouble:
        return trouble
    return None


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
