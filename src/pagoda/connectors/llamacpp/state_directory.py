"""The directory through which states go between this process and llama.cpp's server.

It is the server's `--slot-save-path`, best in memory, and only this user's. A process holds a lock
on a file of its own there for as long as it lives; whose lock is free is dead, and its states are
removed by the next one that opens the directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from pagoda.base.errors import ClosedError, StoreError
from pagoda.base.file_space import make_directory
from pagoda.base.fork import per_process
from pagoda.base.store_place import free_bytes, is_in_memory, require_own

_LOCK = "pagoda-lock-"
_STATE = "pagoda-state-"
_FULL_BYTES = 64 << 10  # a file system with less has no room for anything
_MEMORY_SHARE = 8  # the part of free memory that one state may take, by default


# their descriptors: a child closes them, or its parent's locks would outlive the parent
_open_locks: set[int] = set()


class NoRoomForState(StoreError):
    """The directory has no room for a state. The message says what to do."""


def make_state_directory(path: str | os.PathLike[str]) -> Path:
    """Make a directory for the states of one server, only for this user, if there is none; return
    it. Start the server with `--slot-save-path` of it.

    Raises StoreError if it is another user's, or others can read it.
    """
    directory = Path(path).absolute()
    try:
        make_directory(directory)
        require_own(directory)
        mode = stat.S_IMODE(directory.stat().st_mode)
    except OSError as error:
        raise StoreError(f"{directory} cannot be made: {error}") from None
    if mode & 0o077 or not directory.is_dir():
        raise StoreError(
            f"{directory} is open to others (mode {mode:o}), and states hold what users wrote: "
            f"chmod 700 {directory}"
        )
    return directory


class _OwnLock:
    """The lock of a process on a file of its own, and the token that names its files."""

    def __init__(self) -> None:
        """Nothing is locked yet."""
        self.taking = threading.Lock()
        self.fd = -1
        self.token = ""


class StateDirectory:
    """Names for state files in one directory, and their removal. Thread-safe.

    A forked child has none of its parent's files: its first state takes a lock of its own.
    """

    def __init__(
        self, path: str | os.PathLike[str], state_bytes: int | None
    ) -> None:
        """Open the directory, made if there is none, and remove what dead processes left.

        `state_bytes`: the most bytes of one state; None: an eighth of the free memory. Raises
        StoreError.
        """
        self.path = make_state_directory(path)
        self._closed = False
        try:
            self._own_token()
            self._sweep()
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be used for states: {error}"
            ) from None
        if state_bytes is None:
            free = free_bytes(self.path, is_in_memory(self.path))
            state_bytes = free // _MEMORY_SHARE
        self.state_bytes = state_bytes

    @per_process
    def _own(self) -> _OwnLock:
        return _OwnLock()

    def _own_token(self) -> str:
        """Return the token of this process; it is taken and locked first if there is none.

        Raises OSError, ClosedError.
        """
        own = self._own
        with own.taking:
            if self._closed:
                raise ClosedError(f"{self.path} was closed")
            if own.fd < 0:
                own.token, own.fd = _locked(self.path)
                _open_locks.add(own.fd)
            return own.token

    @contextlib.contextmanager
    def state(self) -> Iterator[Path]:
        """Yield a path for a state that does not exist yet, and remove it at the end."""
        token = self._own_token()
        path = self.path / f"{_STATE}{token}-{secrets.token_hex(4)}"
        try:
            yield path
        finally:
            self.remove_own()

    def remove_own(self) -> None:
        """Remove all states of this object, also those that the server wrote after a deadline."""
        if token := self._own.token:
            _remove(self.path, f"{_STATE}{token}-")

    @contextlib.contextmanager
    def room_for(self, nbytes: int = 0) -> Iterator[None]:
        """Let a state of so many bytes be written here, by this process or by the server.

        `nbytes`: 0: nobody knows. Raises NoRoomForState before, if the file system says that there
        is none, and where the writing failed because of that.
        """
        self._require_free(nbytes)
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self._no_room(nbytes, str(error.strerror)) from None
        except Exception:
            # the server does not say why; what it has written until then is still there
            self._require_free(0)
            raise

    def _require_free(self, nbytes: int) -> None:
        """Raise NoRoomForState unless so many bytes are free, as far as the file system says."""
        try:
            # memory has a limit of its own: `state_bytes`
            free = free_bytes(self.path, in_memory=False)
        except OSError:
            return
        if free < max(nbytes, _FULL_BYTES):
            raise self._no_room(nbytes, f"{free:,} bytes are free")

    def _no_room(self, nbytes: int, why: str) -> NoRoomForState:
        size = f" of {nbytes:,} bytes" if nbytes else ""
        return NoRoomForState(
            f"{self.path} has no room for a state{size} ({why}): free some there, or start the "
            "server with another --slot-save-path"
        )

    def close(self) -> None:
        """Remove everything of this object; idempotent."""
        own = self._own
        with own.taking:
            self._closed = True
            lock = own.fd
            if lock < 0:
                return
            self.remove_own()
            with contextlib.suppress(OSError):
                (self.path / f"{_LOCK}{own.token}").unlink()
            own.fd = -1
            _open_locks.discard(lock)
            os.close(lock)

    def _sweep(self) -> None:
        """Remove the states of processes that are dead."""
        # before the locks: a process that starts meanwhile has its lock before its first state
        states = list(self.path.glob(f"{_STATE}*"))
        own = self._own.token
        alive = {own}
        for file in self.path.glob(f"{_LOCK}*"):
            token = file.name.removeprefix(_LOCK)
            if token != own and not _take_over(file):
                alive.add(token)
        for file in states:
            token = file.name.removeprefix(_STATE).partition("-")[0]
            if token not in alive:
                _remove(self.path, file.name)


def _locked(directory: Path) -> tuple[str, int]:
    """Return a new token of this process, and the descriptor that holds its lock. OSError."""
    while True:
        token = secrets.token_hex(8)
        file = directory / f"{_LOCK}{token}"
        fd = os.open(
            file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # another process may have taken it for that of a dead one
            if os.fstat(fd).st_nlink:
                return token, fd
        except BlockingIOError:
            pass
        os.close(fd)


def _take_over(file: Path) -> bool:
    """Remove a lock that nobody holds; return whether it is gone."""
    try:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _remove(directory: Path, prefix: str) -> None:
    for file in directory.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            file.unlink()


def _close_locks() -> None:
    while _open_locks:
        with contextlib.suppress(OSError):
            os.close(_open_locks.pop())


os.register_at_fork(after_in_child=_close_locks)
