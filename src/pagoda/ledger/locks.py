"""Locks between processes: byte ranges of one file beside the ledger, held by its open file description.

`F_OFD_SETLK` locks belong to the description that a `LockFile` has open, one for each store that a process has open:
what else in the process opens and closes the same file does not touch them, and they conflict with those of every
other description, of the same process too, and with the POSIX locks of older versions. A kill frees them, containers
that share the file see them. Threads of one process share a description: a lock of threads stands before the gate.

A fork shares the description too, so a child gives up its copy first thing and gets a description of its own, with no
locks: else the locks of a dead parent would last, and what the child unlocks would be the parent's. What runs no hooks
of Python is an `exec` (the descriptor is closed by it) or a child made in C, which unlocks nothing; if it outlives the
parent, so do the parent's locks.

| byte | meaning |
| --- | --- |
| 0 | the gate: readers share it, a write transaction has it alone |
| 1 | intent: a writer holds it, readers pass through it, so that writers do not starve |
| 2 | open: shared by all who have the store open, alone to create, resize, rebuild, discard |
| 3 | scan: who reads the headers of a slab back into the ledger |
| 4 | labels: who writes the file of namespaces |
| 1024 + m | member m lives |
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from io import FileIO
from pathlib import Path
from typing import TypeVar

GATE, INTENT, OPEN, SCAN, LABELS = 0, 1, 2, 3, 4
MEMBERS = 1024

T = TypeVar("T")
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_TO_THE_END = 0  # the length of a range without an end
_UNLOCK_BOTH = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, GATE, 2, 0)  # gate and intent
_CLOSED = "the lock file is closed"
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 20e-6, 1e-3

_files: weakref.WeakSet[LockFile] = weakref.WeakSet()
_forks = 0  # of this process so far


class DeadlineMissedError(Exception):
    """The gate could not be had in time. Never leaves the ledger: it becomes `Reason.LEDGER_BUSY`."""


class LockFile:
    """Byte-range locks of one file, by one open file description. Thread-safe as far as single calls go.

    `close` gives up all of them, and so does the end of the last reference; from then on none can be taken (OSError).
    """

    def __init__(self, path: Path, create: bool = True) -> None:
        """Open the file; FileNotFoundError if it is absent and not to be made."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._fd = -1
        _files.add(self)
        while True:
            forks = _forks
            self._file = FileIO(path, "r+", opener=lambda name, _: os.open(name, flags, 0o600))
            self._fd = self._file.fileno()
            if forks == _forks:  # else a child may have a copy that it does not know of
                return
            self.close()

    def close(self) -> None:
        """Give up all locks and the descriptor; idempotent. No other thread may be using it."""
        if self._fd >= 0:
            self._set(fcntl.F_UNLCK, 0, _TO_THE_END)  # for a child made in C would keep them
            self._fd = -1
            self._file.close()

    def is_at(self, path: Path) -> bool:
        """Whether `path` still names this very file (a discarded store's lock file does not)."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._fd))
        except OSError:
            return False

    def try_lock(self, byte: int, exclusive: bool) -> bool:
        """Take or convert the lock of one byte without waiting; False if another description is in the way."""
        try:
            self._set(fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK, byte)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def lock(self, byte: int, exclusive: bool, until: float) -> bool:
        """Take the lock of one byte, trying until `time.monotonic()` passes `until`; False if it was not to be had."""
        pause = _FIRST_PAUSE_SECONDS
        while not self.try_lock(byte, exclusive):
            if time.monotonic() >= until:
                return False
            time.sleep(pause)
            pause = min(pause * 2, _LAST_PAUSE_SECONDS)
        return True

    def unlock(self, byte: int) -> None:
        """Give the lock of one byte back; nothing if all have been given up."""
        if self._fd >= 0:
            self._set(fcntl.F_UNLCK, byte)

    def unlocking(self, byte: int) -> Callable[[], object]:
        """What gives the lock of one byte back, if it is held: built in, so that no signal handler comes before it."""
        if self._fd < 0:
            raise OSError(errno.EBADF, "the lock file is closed")
        return partial(fcntl.fcntl, self._fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, byte, 1))

    def held_by_other(self, byte: int) -> bool:
        """Whether another description has a lock on that byte (the own ones are not seen)."""
        if self._fd < 0:
            raise OSError(errno.EBADF, _CLOSED)
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK, byte, 1))
        kind: int = _FLOCK.unpack(answer)[0]
        return kind != fcntl.F_UNLCK

    def _set(self, kind: int, byte: int, length: int = 1) -> None:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _request(kind, byte, length))
        except ValueError as error:
            raise OSError(errno.EBADF, _CLOSED) from error

    def _after_fork_in_child(self) -> None:
        """Put a description of the child's own in the place of the one that is its parent's."""
        if self._fd < 0:
            return
        try:
            own = os.open(
                f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC
            )  # also if it was removed by now
        except OSError:
            self._fd = -1
            self._file.close()
            raise
        os.dup2(own, self._fd, inheritable=False)
        os.close(own)


@lru_cache(maxsize=256)
def _request(kind: int, byte: int, length: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, length, 0)


class Gate:
    """The one lock around transactions: `gate.shared(work, seconds)` / `gate.exclusive(work, seconds)`.

    Thread-safe. Raises DeadlineMissedError when it cannot be had within the seconds given, and at once to who is inside
    already (a signal handler or a finalizer in the middle of a transaction).

    An exception may come from a signal handler after any call, also after the one that took a lock. So nothing is taken
    before the `try` whose `finally` gives it back, and what gives back are built-in functions, each in a `finally` of
    its own: Python runs no handler between the begin of a `finally` and the end of the first built-in called there.
    """

    def __init__(self, file: LockFile) -> None:
        self._file = file
        self._inside = (
            threading.RLock()
        )  # knows its owner from the moment that it is taken; never taken twice
        self._owner: int | None = None

    @property
    def taken(self) -> bool:
        """Whether a thread of this process is inside, or waits for other processes."""
        return self._owner is not None

    def shared(self, work: Callable[[], T], deadline_seconds: float) -> T:
        """Do `work` while the gate is shared with the readers of other processes."""
        return self._run(work, False, deadline_seconds)

    def exclusive(self, work: Callable[[], T], deadline_seconds: float) -> T:
        """Do `work` while this thread has the gate alone."""
        return self._run(work, True, deadline_seconds)

    def hold(self, deadline_seconds: float) -> bool:
        """Keep the other threads out until `let_go`, called on this thread; False if that could not be in time."""
        return self._owner != threading.get_ident() and self._inside.acquire(
            timeout=max(deadline_seconds, 0.0)
        )

    def let_go(self) -> None:
        """End what `hold` began; nothing if this thread holds nothing."""
        with contextlib.suppress(RuntimeError):
            self._inside.release()

    def _run(self, work: Callable[[], T], exclusive: bool, deadline_seconds: float) -> T:
        me, until, fd, entered = (
            threading.get_ident(),
            time.monotonic() + deadline_seconds,
            self._file._fd,
            False,
        )
        if self._owner == me:
            raise DeadlineMissedError
        try:
            entered = self._inside.acquire(timeout=max(deadline_seconds, 0.0))
            if not entered:
                raise DeadlineMissedError
            self._owner = me
            self._pass(exclusive, until)
            return work()
        finally:
            if entered:
                try:
                    if fd >= 0:
                        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _UNLOCK_BOTH)
                finally:
                    self._owner = None
                    self._inside.release()
            else:
                try:  # noqa: SIM105  # what `contextlib` has is no built-in function
                    self._inside.release()  # it may have been taken and not noted
                except RuntimeError:
                    pass

    def _pass(self, exclusive: bool, until: float) -> None:
        file = self._file
        if not file.lock(INTENT, exclusive, until) or not file.lock(GATE, exclusive, until):
            raise DeadlineMissedError
        file.unlock(INTENT)


def barrier() -> None:
    """Order this thread's memory accesses before against those after (free on x86, a fence on ARM)."""
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


def _count_fork() -> None:
    global _forks
    _forks += 1


def _after_fork_in_child() -> None:
    for file in list(_files):
        with contextlib.suppress(OSError):
            file._after_fork_in_child()


# Before all other hooks of the ledger, which take locks in the child.
os.register_at_fork(after_in_parent=_count_fork, after_in_child=_after_fork_in_child)
