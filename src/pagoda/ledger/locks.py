"""Locks between processes: byte ranges of the file `state` of a store, held by an open file
description.

They lie on `state`, beyond its end, because that file says what the store is and is never replaced:
two processes that use one store cannot have locks on two files. Byte `open` is held on the file
`locks` too, as long as versions may come that know no other (`StoreLocks`).

`F_OFD_SETLK` locks belong to an open file description; a process has one `LockFile` with one
description for each store that it has open. Other code of the process that opens and closes the
same file does not affect these locks; they conflict with the locks of every other description, also
of the same process, and with the POSIX locks of older versions. A kill releases them, and
containers that share the file see them. The threads of a process share a description, so a thread
takes a thread lock before the gate.

A fork shares the description too, so a child first closes its copy and opens a new description
without locks. Otherwise the locks of a dead parent would last, and the child would unlock locks of
its parent. In two cases Python's fork hooks do not run: after an `exec` (which closes the
descriptor), and in a child made in C. Such a child unlocks nothing; if it outlives the parent, the
parent's locks last as long as the child.

| byte | meaning |
| --- | --- |
| 0 | the gate: readers share it, a write transaction holds it exclusively |
| 1 | intent: who gets the gate next holds it; all others pass through it, so that nobody starves |
| 2 | open: shared by all processes that have the store open, exclusive to create, resize, rebuild, discard |
| 3 | scan: the process that reads the headers of a slab back into the ledger |
| 4 | labels: the process that writes the files of labels and of clears |
| 1024 + m | member m is alive |

On `state` the bytes are counted from `BEYOND`, on `locks` and on the lock file of a root from 0.
"""  # noqa: E501, W505

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
from typing import Protocol, TypeVar

from pagoda.base.errors import StoreError, is_gone
from pagoda.base.file_space import require_regular
from pagoda.base.fork import here
from pagoda.ledger.gate_bell import NEXT, OTHERS, GateBell

GATE = 0
INTENT = 1
OPEN = 2
SCAN = 3
LABELS = 4
MEMBERS = 1024
BEYOND = 1 << 20  # beyond the end of every file that has its own locks

T = TypeVar("T")
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
# the range has no end: all bytes
_UNLOCK_ALL = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)
_CLOSED = "the lock file is closed"
_FIRST_PAUSE_SECONDS = 20e-6
_LAST_PAUSE_SECONDS = 1e-3
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_files: weakref.WeakSet[LockFile] = weakref.WeakSet()
_forks = 0  # forks that led to this process, as far as it has seen them


class DeadlineMissedError(Exception):
    """The gate could not be taken in time. It never leaves the ledger: it becomes
    `Reason.LEDGER_BUSY`.
    """


def timed_out(seconds: float, doing: str) -> StoreError:
    """Return the error for a wait that timed out because of another process."""
    return StoreError(
        f"timed out after {seconds:g} s: another process {doing}; look for a stopped process"
    )


class OwnDescription:
    """A file that is open with a description of its own in each process. Not thread-safe."""

    def __init__(self, flags: int) -> None:
        """Nothing is open yet. `flags`: of `os.open`."""
        self._fd = -1
        self._flags = flags

    def own_in_child(self) -> None:
        """Replace, in a forked child, the description that it shares with the parent by a new one.
        It is closed if that is impossible.
        """
        if self._fd < 0:
            return
        try:
            # this works even if the file has been removed
            own = os.open(f"/proc/self/fd/{self._fd}", self._flags)
            os.dup2(own, self._fd, inheritable=False)
            os.close(own)
        except OSError:
            self._close_descriptor()

    def _close_descriptor(self) -> None:
        fd = self._fd
        self._fd = -1
        if fd >= 0:
            os.close(fd)


class LockFile(OwnDescription):
    """Byte-range locks of one file, by one open file description. Single calls are thread-safe.

    `close` releases all of them, and so does the end of the last reference; afterwards none can be
    taken (OSError).
    """

    def __init__(self, path: Path, create: bool = True, first: int = 0) -> None:
        """Open the file; FileNotFoundError if it is absent and `create` is False. StoreError if it
        is another user's.

        Another user could hold a lock of it for ever. `first`: where the bytes are counted from.
        """
        self._first = first
        self.unlock_intent = _FLOCK.pack(
            fcntl.F_UNLCK, os.SEEK_SET, first + INTENT, 1, 0
        )
        # gate and intent, by one call
        self.share_gate, self.take_gate, self.unlock_gate = (
            _FLOCK.pack(kind, os.SEEK_SET, first + GATE, 2, 0)
            for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK)
        )
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        super().__init__(os.O_RDWR | os.O_CLOEXEC)
        _files.add(self)
        while True:
            forks = _forks
            self._file = FileIO(
                path, "r+", opener=lambda name, _: os.open(name, flags, 0o600)
            )
            self._fd = self._file.fileno()
            try:
                require_regular(self._fd, path)
            except OSError:
                self.close()
                raise
            owner = os.fstat(self._fd).st_uid
            if owner != os.geteuid():
                self.close()
                raise StoreError(
                    f"{path} belongs to user {owner}, not to user {os.geteuid()}: remove it, and "
                    "let others make no "
                    f"files there (chmod go-w {path.parent})"
                )
            # otherwise a forked child may have a copy that it does not know of
            if forks == _forks:
                return
            self.close()

    def close(self) -> None:
        """Release all locks and close the descriptor; idempotent. No other thread may be using
        it.
        """
        if self._fd >= 0:
            # a child made in C would keep them
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _UNLOCK_ALL)
            self._close_descriptor()

    def _close_descriptor(self) -> None:
        self._fd = -1
        self._file.close()

    def is_at(self, path: Path) -> bool:
        """Whether `path` still names this very file (one that was removed or replaced does not, nor
        a closed one).

        OSError if that cannot be told.
        """
        try:
            return self._fd >= 0 and os.path.samestat(
                os.stat(path), os.fstat(self._fd)
            )
        except OSError as error:
            if is_gone(error):
                return False
            raise

    def mark(self) -> None:
        """Change what `marked` returns, in every process that has the file open. OSError."""
        os.utime(self._fd, ns=(now := time.time_ns(), now))

    def marked(self) -> int:
        """Return when the file was marked, in ns; -1 after `close`."""
        with contextlib.suppress(OSError):
            return os.fstat(self._fd).st_mtime_ns
        return -1

    def lock(self, byte: int, exclusive: bool, until: float = 0.0) -> bool:
        """Take or convert the lock of one byte; False if another description has it.

        Tries until `time.monotonic()` reaches `until`; by default it tries once.
        """
        request = _request(
            fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK, self._first + byte
        )
        pause = _FIRST_PAUSE_SECONDS
        while True:
            if _taken(self._fd, request):
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(pause)
            pause = min(pause * 2, _LAST_PAUSE_SECONDS)

    def unlock(self, byte: int) -> None:
        """Release the lock of one byte; does nothing after `close`."""
        if self._fd >= 0:
            fcntl.fcntl(
                self._fd,
                fcntl.F_OFD_SETLK,
                _request(fcntl.F_UNLCK, self._first + byte),
            )

    def unlocking(self, byte: int) -> Callable[[], object]:
        """Return a built-in that releases the lock of one byte, if held; no signal handler can run
        before it.
        """
        if self._fd < 0:
            raise OSError(errno.EBADF, _CLOSED)
        return partial(
            fcntl.fcntl,
            self._fd,
            fcntl.F_OFD_SETLK,
            _request(fcntl.F_UNLCK, self._first + byte),
        )

    def held_by_other(self, byte: int) -> bool:
        """Whether another description has a lock on that byte (locks of this one are not seen)."""
        if self._fd < 0:
            raise OSError(errno.EBADF, _CLOSED)
        answer = fcntl.fcntl(
            self._fd,
            fcntl.F_OFD_GETLK,
            _request(fcntl.F_WRLCK, self._first + byte),
        )
        kind: int = _FLOCK.unpack(answer)[0]
        return kind != fcntl.F_UNLCK


@lru_cache(maxsize=256)
def _request(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)


def _taken(fd: int, request: bytes) -> bool:
    """Take a lock; False if another description has it. OSError."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except ValueError as error:
        raise OSError(errno.EBADF, _CLOSED) from error
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return False
    return True


class StoreLocks(LockFile):
    """The locks of one store: those of `state`, with byte `open` also on `locks`, which older
    versions look at.

    A process that has the store to itself holds `open` of both exclusively. While it is open, its
    directory and the root have a shared `flock`: programs that remove old files (systemd-tmpfiles)
    leave such directories alone.
    """

    def __init__(self, directory: Path, state: str, locks: str) -> None:
        """Open the files of a store; `locks` is made if it is absent. FileNotFoundError if there is
        no `state`.
        """
        self._old: LockFile | None = None
        self._holds_open = -1  # the process (`here`) that holds byte `open`
        self._flocks: list[DirectoryFlock] = []
        self._paths = directory / state, directory / locks
        super().__init__(self._paths[0], create=False, first=BEYOND)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._old = LockFile(self._paths[1])
            _files.discard(self._old)  # see `own_in_child`
            for one in (directory.parent, directory):
                self._flocks.append(DirectoryFlock(one))
            undo.pop_all()

    def close(self) -> None:
        """Release all locks and close the descriptors; idempotent. No other thread may be using
        it.
        """
        if self._old is not None:
            self._old.close()
        for one in self._flocks:
            one.close()
        super().close()

    def are_at(self, directory: Path) -> bool:
        """Whether a directory still has both of these very files. OSError if that cannot be
        told.
        """
        state, locks = self._paths
        in_place = self._old is not None and self._old.is_at(
            directory / locks.name
        )
        return in_place and self.is_at(directory / state.name)

    def are_away(self, directory: Path) -> bool:
        """Whether these files exist, but not in this directory: it was renamed or unmounted, and
        may come back. OSError if that cannot be told.
        """
        return not self.are_at(directory) and os.fstat(self._fd).st_nlink > 0

    def lock(self, byte: int, exclusive: bool, until: float = 0.0) -> bool:
        """Take or convert the lock of one byte; False if another description has it. See
        `LockFile.lock`.
        """
        if byte != OPEN:
            return super().lock(byte, exclusive, until)
        assert self._old is not None
        process = here()
        had = self._holds_open == process
        if not self._old.lock(OPEN, exclusive, until):
            return False
        if not super().lock(OPEN, exclusive, until):
            if had:
                self._old.lock(OPEN, exclusive=False)
            else:
                self._old.unlock(OPEN)
            return False
        self._holds_open = process
        return True

    def unlock(self, byte: int) -> None:
        """Release the lock of one byte; does nothing after `close`."""
        super().unlock(byte)
        if byte == OPEN and self._old is not None:
            self._old.unlock(OPEN)
            self._holds_open = -1

    def own_in_child(self) -> None:
        """Replace all descriptions that are shared with the parent."""
        if self._old is not None:
            self._old.own_in_child()
        for one in self._flocks:
            one.own_in_child()
        super().own_in_child()


class DirectoryFlock(OwnDescription):
    """A shared `flock` of a directory, which keeps programs away that remove old files from it and
    from below it.

    It is taken if it is free now, and kept until `close`, or the end of the last reference. It only
    keeps cleaners away, so nothing fails if it cannot be taken. Not thread-safe.
    """

    def __init__(self, directory: Path) -> None:
        """Take it."""
        super().__init__(_DIRECTORY)
        with contextlib.suppress(OSError):
            self._fd = os.open(directory, _DIRECTORY)
        self._take()

    def _take(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                # a cleaner has it for a moment, or the file system has no such locks
                fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def close(self) -> None:
        """Release it; idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                # a child made in C would keep it
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._close_descriptor()

    def own_in_child(self) -> None:
        """Take an own one: the parent's, which the copy shares, ends with the parent's `close`."""
        super().own_in_child()
        self._take()

    __del__ = OwnDescription._close_descriptor


class GateUser(Protocol):
    """Something that is used inside a gate only, such as the tables."""

    def close_in_child(self) -> None:
        """Close it in a forked child: it is the parent's."""


class Gate:
    """The one lock around transactions: `gate.run(work, seconds)`; a writer calls it with
    `exclusive=True`. Who waits for another process sleeps at the `bell` of the store; without one,
    only threads of this process ring.

    Thread-safe. Raises DeadlineMissedError if it cannot be taken within the seconds given, and at
    once in a thread that is already inside (a signal handler or a finalizer in the middle of a
    transaction).

    A signal handler may raise an exception after any call, also after the call that took a lock. So
    nothing is taken before the `try` whose `finally` releases it, and built-in functions release
    it, each in a separate `finally`: Python runs no handler between the begin of a `finally` and
    the end of the first built-in called there. A `with` statement cannot promise that: a handler
    may run before the first statement of an `__exit__` written in Python.
    """

    def __init__(self, file: LockFile, bell: GateBell | None = None) -> None:
        self._file = file
        self._bell = GateBell() if bell is None else bell
        # not a method of `StoreLocks`, which would cost each transaction two more calls
        self._lock = partial(LockFile.lock, file)
        # an RLock, because it knows its owner as soon as it is taken; it is never taken twice
        self._inside = threading.RLock()
        # whether this thread is inside, or waits for other processes. A signal handler or a
        # finalizer asks it; so does a transaction, because a child that a signal handler forks in
        # the middle of a call is not inside
        self.entered: Callable[[], bool] = self._inside._is_owned  # type: ignore[attr-defined]
        self._owner: int | None = None
        # what is used inside only, and closed in a child
        self.users: weakref.WeakSet[GateUser] = weakref.WeakSet()
        # this process is a child of the one that made the gate
        self.forked = False

    @property
    def taken(self) -> bool:
        """Whether a thread of this process is inside, or waits for other processes."""
        return self._owner is not None

    def run(
        self,
        work: Callable[[], T],
        deadline_seconds: float,
        exclusive: bool = False,
    ) -> T:
        """Run `work` while the gate is shared with the readers of other processes, or held
        exclusively.
        """
        me = threading.get_ident()
        until = time.monotonic() + deadline_seconds
        file = self._file
        fd = self._file._fd
        entered = False
        if self._owner == me:
            raise DeadlineMissedError
        try:
            entered = self._inside.acquire(timeout=max(deadline_seconds, 0.0))
            if not entered:
                raise DeadlineMissedError
            self._owner = me
            both = file.take_gate if exclusive else file.share_gate
            if not _taken(fd, both) and not self._wait(exclusive, both, until):
                raise DeadlineMissedError
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, file.unlock_intent)
            return work()
        finally:
            if entered:
                try:
                    if fd >= 0:
                        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, file.unlock_gate)
                finally:
                    self._owner = None
                    self._inside.release()
                self._bell.ring()
            else:
                # `contextlib.suppress` is no built-in function
                try:  # noqa: SIM105
                    # an interrupt may come between taking it and recording that
                    self._inside.release()
                except RuntimeError:
                    pass

    def _wait(self, exclusive: bool, both: bytes, until: float) -> bool:
        """Sleep until the gate can be taken; False if it cannot in time. Who has intent gets the
        gate next, whoever else comes: so a thread that was woken loses it once at most.
        """
        bell = self._bell
        place = OTHERS
        slept = heard = False
        while True:
            turn = bell.turn(place)
            if place == NEXT:
                taken = self._lock(GATE, exclusive)
            else:
                taken = _taken(self._file._fd, both)
            if taken:
                if slept:
                    bell.learn(heard)
                if not exclusive:
                    bell.ring()  # other readers may come in too
                return True
            if place == OTHERS and self._lock(INTENT, exclusive=True):
                place = NEXT
                continue
            left = until - time.monotonic()
            if left <= 0:
                return False
            heard = bell.sleep(place, turn, left)
            slept = True

    def hold(self, deadline_seconds: float) -> bool:
        """Keep other threads out until `let_go` is called on this thread; False if it could not be
        taken in time.
        """
        return not self.entered() and self._inside.acquire(
            timeout=max(deadline_seconds, 0.0)
        )

    def let_go(self) -> None:
        """End what `hold` began; does nothing if this thread holds nothing."""
        with contextlib.suppress(RuntimeError):
            self._inside.release()


def barrier() -> None:
    """Complete this thread's earlier memory accesses before its later ones (free on x86, a fence on
    ARM).
    """
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


def note_fork() -> None:
    """Note in the parent that it has forked: a file that a thread is opening may have a copy."""
    global _forks
    _forks += 1


def in_child() -> list[Callable[[], None]]:
    """Return the steps by which a forked child gives up its parent's locks."""
    return [file.own_in_child for file in _files]
