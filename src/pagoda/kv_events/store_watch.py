"""Wait until files of a store are changed, by any process: Linux's inotify.

`StoredEvents` waits here while there is nothing to report. A transaction writes to the tables by
`pwrite`, which inotify reports; what is written through a mapping it does not report. Python has no
functions for these calls, so they are made through `ctypes`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import threading
from collections.abc import Iterable
from pathlib import Path
from struct import Struct

_MODIFIED = 0x2
_FILE_CHANGES = _MODIFIED | 0x4 | 0x400 | 0x800  # and attributes, deleted, moved
_DIRECTORY_CHANGES = _MODIFIED | 0x80 | 0x100  # and moved to there, created
_HEAD = Struct("iIII")  # watch, mask, cookie, length of the name
_READ_BYTES = 1 << 16


class StoreWatch:
    """A watch on some files and directories. `wake` is thread-safe; one thread uses the rest."""

    def __init__(
        self, files: Iterable[Path], directories: Iterable[Path]
    ) -> None:
        """Begin to watch. OSError if the system allows no more watches, or a file is gone."""
        self._inotify = self._woken = -1
        # so that `wake` never writes to a descriptor that was closed and is another file's by now;
        # an RLock, since a signal handler may call `wake` too
        self._open = threading.RLock()
        system = ctypes.CDLL(None, use_errno=True)
        self._inotify = system.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._inotify < 0:
            raise _last_error("inotify")
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            for paths, changes in (
                (files, _FILE_CHANGES),
                (directories, _DIRECTORY_CHANGES),
            ):
                for path in paths:
                    name = os.fsencode(path)
                    watch = system.inotify_add_watch(self._inotify, name, changes)
                    if watch < 0:
                        raise _last_error(str(path))
            undo.pop_all()
        self._poll = select.poll()
        for fd in (self._inotify, self._woken):
            self._poll.register(fd, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Wait until something is changed or `wake` is called, since the last `forget`; return
        whether so.
        """
        return bool(self._poll.poll(seconds * 1000))

    def wake(self) -> None:
        """End the wait. Cheap; does nothing after `close`."""
        with self._open, contextlib.suppress(OSError):
            if self._woken >= 0:
                os.eventfd_write(self._woken, 1)

    def forget(self) -> bool:
        """Forget all changes up to now; return whether a file was not only modified: it may be
        gone.
        """
        with contextlib.suppress(OSError):  # nothing
            os.eventfd_read(self._woken)
        is_gone = False
        with contextlib.suppress(BlockingIOError):
            while changes := os.read(self._inotify, _READ_BYTES):
                at = 0
                while at < len(changes):
                    _, mask, _, length = _HEAD.unpack_from(changes, at)
                    is_gone |= mask != _MODIFIED
                    at += _HEAD.size + length
        return is_gone

    def close(self) -> None:
        """End the watch. Idempotent; no other call may be running, except `wake`."""
        with self._open:
            for fd in (self._inotify, self._woken):
                if fd >= 0:
                    os.close(fd)
            self._inotify = self._woken = -1


def _last_error(what: str) -> OSError:
    number = ctypes.get_errno() or errno.EIO
    return OSError(number, os.strerror(number), what)
