"""The directory in memory through which states go, of a server that this command starts.

It is removed at the end. A killed process leaves it behind: the next start removes it. Its process
holds a lock on the directory itself for as long as it lives, so that a directory whose lock is free
is a dead one's, also in another container that shares the memory and has other process ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from pagoda.base.errors import StoreError
from pagoda.base.store_place import is_in_memory

MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def slot_directory(parent: Path = MEMORY) -> Iterator[Path]:
    """Make a directory for this process, which only this user can enter; remove it at the end.

    Those of dead processes are removed first. Raises StoreError.
    """
    try:
        if not is_in_memory(parent):
            raise StoreError(f"{parent} is not in memory: {_REMEDY}")
        remove_dead(parent)
        path, lock = _made(parent)
    except OSError as error:
        raise StoreError(
            f"no directory for states can be made in {parent}: {error.strerror}: {_REMEDY}"
        ) from None
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_dead(parent: Path = MEMORY) -> None:
    """Remove the directories of this user's processes that have ended. Raises OSError."""
    for path in parent.glob(f"{_prefix()}*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, _DIRECTORY)
            try:
                if os.fstat(fd).st_uid != os.geteuid():
                    continue
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)


_REMEDY = (
    "write --slot-save-path DIR after llama-server, best a directory in memory"
)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _prefix() -> str:
    return f"pagoda-llama-{os.geteuid()}-"


def _made(parent: Path) -> tuple[Path, int]:
    """Return a new directory and the descriptor that holds its lock. Raises OSError."""
    while True:
        # the process id is for people
        path = parent / f"{_prefix()}{os.getpid()}-{secrets.token_hex(4)}"
        path.mkdir(0o700)
        try:
            fd = os.open(path, _DIRECTORY)
        except FileNotFoundError:
            # 1. made; 2. another process starts, finds no lock and removes it
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # or 1. made and opened; 2. the other one locks it, removes it and unlocks it
            if os.fstat(fd).st_nlink:
                os.fchmod(fd, 0o700)
                return path, fd
        except BlockingIOError:
            pass
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
