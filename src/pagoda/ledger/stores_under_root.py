"""The stores under one root: list them, lock the root, remove a store, and clean up what killed
processes left.

`store_directory` and `space_sharing` call it under the lock of the root, the CLI to list and to
remove stores.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from pagoda.base.errors import StoreError, is_gone
from pagoda.ledger.locks import BEYOND, OPEN, LockFile, timed_out
from pagoda.ledger.store_state import (
    COLUMNS,
    LOCKS,
    SLAB,
    STATE,
    TABLES,
    read_state,
)

_OWN_NAMES = (LOCKS, STATE, TABLES, COLUMNS, SLAB)
MAKING = ".new-"
_GOING = ".gone-"
# exactly the names that are made here
_PASSING = re.compile(r"\.(new|gone)-[0-9a-f]{12}")
# a layout's fingerprint, in memory also the format
_STORE_NAME = re.compile(r"[0-9a-f]{16}(\.\d+)?")
_PRIVATE = ".private-"


def discard(directory: Path) -> None:
    """Rename a whole store, then remove it. Only the caller has it open."""
    doomed = directory.with_name(f"{_GOING}{secrets.token_hex(6)}")
    os.rename(directory, doomed)
    # the next process that opens a store of the root removes what is left
    shutil.rmtree(doomed, ignore_errors=True)


def stores_in(root: Path) -> list[Path]:
    """Return the stores under a root, also damaged ones and those of other versions, but no private
    ones.

    Changes nothing. Raises OSError.
    """
    return [
        store
        for store in stores(root)
        if _is_store(store) and _PRIVATE not in store.name
    ]


def refuse_others(root: Path) -> None:
    """Raise StoreError if a root has a store of another user and none of this user. Also raises
    OSError.
    """
    for path in root.iterdir():
        if (
            _STORE_NAME.fullmatch(path.name)
            and (owner := path.lstat().st_uid) != os.geteuid()
        ):
            raise StoreError(
                f"{path} belongs to user {owner}: run the command as that user"
            )


def remove_store(directory: Path, deadline_seconds: float = 10.0) -> int:
    """Remove a store and its chunks; return how many bytes that freed.

    Raises StoreError, and removes nothing, if a process has it open or if it has files that are not
    a store's.
    """
    with root_locked(directory.parent, deadline_seconds):
        if not _is_store(directory):
            raise StoreError(
                f"{directory} is not a store, or also has other files: remove it by hand"
            )
        if in_use(directory):
            named = [f"{pid} {name}" for pid, name in openers(directory).items()]
            who = f" (pid {', '.join(named)})" if named else ""
            raise StoreError(
                f"{directory} is open in a process{who}: stop it first (`pagoda "
                "serve` keeps stores "
                "open), or forget its chunks with `pagoda clear`"
            )
        nbytes = allocated_bytes(directory)
        discard(directory)
        return nbytes


def allocated_bytes(directory: Path) -> int:
    """Return the bytes that the files of a store take. Changes nothing. Raises OSError."""
    nbytes = 0
    # the store or single files of it may be removed at any time
    with contextlib.suppress(FileNotFoundError):
        for entry in list(directory.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                nbytes += entry.lstat().st_blocks * 512
    return nbytes


def openers(directory: Path) -> dict[int, str]:
    """Return which processes of this user have a store open, with their names; none if the system
    does not say.
    """
    there = {os.path.realpath(entry) for entry in directory.iterdir()}
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        # the process is another user's, or has ended
        with contextlib.suppress(OSError):
            if any(
                os.readlink(file) in there for file in (process / "fd").iterdir()
            ):
                name = (process / "comm").read_text().strip()
                found[int(process.name)] = name
    return found


def _is_store(directory: Path) -> bool:
    entries = list(directory.iterdir())
    own = [entry for entry in entries if entry.name in _OWN_NAMES]
    return len(own) >= 3 and not any(map(_is_of_others, entries))


def _is_of_others(entry: Path) -> bool:
    """Whether this is a directory that has something in it, or a name of its own: a store makes
    none.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(entry.lstat().st_mode):
            return entry.name not in _OWN_NAMES or any(entry.iterdir())
    return False


@contextlib.contextmanager
def root_locked(root: Path, deadline_seconds: float) -> Iterator[None]:
    """Hold the lock for changing which stores there are and which pages they have. StoreError if it
    is not free.

    What a killed process left is removed first: it takes space that no store counts.
    """
    until = time.monotonic() + deadline_seconds
    while True:
        with contextlib.closing(LockFile(root / LOCKS)) as locks:
            if not locks.lock(OPEN, exclusive=True, until=until):
                raise timed_out(
                    deadline_seconds, f"is opening a store under {root}"
                )
            # it was removed during the wait: others lock the new one
            if not locks.is_at(root / LOCKS):
                continue
            _sweep(root)
            yield
            return


def stores(root: Path) -> list[Path]:
    """Return the stores under a root, also damaged ones; other directories there are left alone."""
    return [
        entry
        for entry in _own_directories(root)
        if ((entry / STATE).exists() or (entry / LOCKS).exists())
        and not entry.name.startswith((MAKING, _GOING))
    ]


def _own_directories(root: Path) -> list[Path]:
    """Return the directories under a root that belong to this user, without symbolic links."""
    found = []
    for entry in root.iterdir():
        # a private store may be removed at any time
        with contextlib.suppress(FileNotFoundError):
            status = entry.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                found.append(entry)
    return found


def _sweep(root: Path) -> None:
    """Remove what killed processes left: directories half made or half removed, and private
    stores.
    """
    for entry in _own_directories(root):
        if _PASSING.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
        else:
            # its owner discards it without the lock of the root
            with contextlib.suppress(OSError):
                state = read_state(entry)
                if state is not None and state.private and not in_use(entry):
                    discard(entry)


def in_use(directory: Path) -> bool:
    """Whether this or another process has the store open; False if it does not exist."""
    return _is_held(directory / STATE, BEYOND) or _is_held(directory / LOCKS, 0)


def _is_held(file: Path, first: int) -> bool:
    try:
        with contextlib.closing(
            LockFile(file, create=False, first=first)
        ) as locks:
            return locks.held_by_other(OPEN)
    except OSError as error:
        # what is no regular file has no locks
        if not is_gone(error):
            raise
        return False
