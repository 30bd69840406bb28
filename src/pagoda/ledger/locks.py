"""Locks between processes: POSIX byte ranges of one file beside the ledger.

A kill frees them, a fork does not inherit them, containers that share the file see them. They belong to the
*process*: closing any descriptor of the file drops them all, so a lock file is opened once a process and never
closed. Threads of one process are kept apart by a `threading.Lock` with a timeout in front.

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

import errno
import fcntl
import os
import struct
import threading
import time
from pathlib import Path
from types import TracebackType

GATE, INTENT, OPEN, SCAN, LABELS = 0, 1, 2, 3, 4
MEMBERS = 1024

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 20e-6, 1e-3

_files: dict[tuple[int, int], LockFile] = {}
_stray: list[
    int
] = []  # descriptors of a file that was opened twice in a race: closing one would drop its locks
_files_lock = threading.Lock()


class DeadlineMissedError(Exception):
    """The gate could not be had in time. Never leaves the ledger: it becomes `Reason.LEDGER_BUSY`."""


class LockFile:
    """Byte-range locks of one file, for the whole process. Thread-safe as far as single calls go."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def at(cls, path: Path) -> LockFile:
        """Return the process's one lock file at `path`, creating the file if it is absent."""
        with _files_lock:
            try:
                known = _files.get(_identity(os.stat(path)))
            except FileNotFoundError:
                known = None
            if known is not None:
                return known
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            identity = _identity(os.fstat(fd))
            if identity in _files:
                _stray.append(fd)
            else:
                _files[identity] = cls(fd)
            return _files[identity]

    def is_at(self, path: Path) -> bool:
        """Whether `path` still names this very file (a discarded store's lock file does not)."""
        try:
            return _identity(os.stat(path)) == _identity(os.fstat(self._fd))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def try_lock(self, byte: int, exclusive: bool) -> bool:
        """Take or convert the lock of one byte without waiting; False if another process is in the way."""
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.lockf(self._fd, kind | fcntl.LOCK_NB, 1, byte)
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
        """Give the lock of one byte back."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, byte)

    def held_by_other(self, byte: int) -> bool:
        """Whether another process holds a lock on that byte (one's own locks are not seen)."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        kind: int = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK


class Gate:
    """The one lock around transactions: `with gate.reading(seconds)` / `with gate.writing(seconds)`.

    Thread-safe. Raises DeadlineMissedError when it cannot be had within the seconds given.
    """

    def __init__(self, file: LockFile) -> None:
        self._file = file
        self.inside = threading.Lock()

    def reading(self, deadline_seconds: float) -> _Passage:
        """Share the gate with the readers of other processes."""
        return _Passage(self, exclusive=False, deadline_seconds=deadline_seconds)

    def writing(self, deadline_seconds: float) -> _Passage:
        """Have the gate alone."""
        return _Passage(self, exclusive=True, deadline_seconds=deadline_seconds)

    def _enter(self, exclusive: bool, deadline_seconds: float) -> None:
        until = time.monotonic() + deadline_seconds
        if not self.inside.acquire(timeout=max(deadline_seconds, 0.0)):
            raise DeadlineMissedError
        try:
            self._pass(exclusive, until)
        except BaseException:
            self.inside.release()
            raise

    def _pass(self, exclusive: bool, until: float) -> None:
        if not self._file.lock(INTENT, exclusive, until):
            raise DeadlineMissedError
        try:
            if not self._file.lock(GATE, exclusive, until):
                raise DeadlineMissedError
        finally:
            self._file.unlock(INTENT)

    def _leave(self) -> None:
        try:
            self._file.unlock(GATE)
        finally:
            self.inside.release()


class _Passage:
    """One stay inside the gate."""

    __slots__ = ("_deadline_seconds", "_exclusive", "_gate")

    def __init__(self, gate: Gate, exclusive: bool, deadline_seconds: float) -> None:
        self._gate, self._exclusive, self._deadline_seconds = gate, exclusive, deadline_seconds

    def __enter__(self) -> None:
        self._gate._enter(self._exclusive, self._deadline_seconds)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate._leave()


def barrier() -> None:
    """Order this thread's memory accesses before against those after (free on x86, a fence on ARM)."""
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _fresh_lock() -> None:
    global _files_lock
    _files_lock = threading.Lock()


os.register_at_fork(after_in_child=_fresh_lock)
