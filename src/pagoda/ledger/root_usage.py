"""How much space the stores of one root hold, and how much they may hold together.

`store_directory`, `space_sharing` and `slab_pages` call it under the lock of the root.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagoda.base.file_space import read_file
from pagoda.ledger.store_state import FORMAT, SLAB, StoreState, read_state
from pagoda.ledger.stores_under_root import in_use, stores

_LIMIT = "limit"
_UNLIMITED = 1 << 62
_MOST_LIMIT_BYTES = 64


@dataclass(frozen=True)
class Holding:
    """How much of the shared space one store of a root holds. `state` is None for a store of an
    unknown format.

    `limit`: how much all stores may hold together, according to the processes that have this one
    open.
    """

    directory: Path
    state: StoreState | None
    nbytes: int
    in_use: bool
    limit: int | None


def holdings(root: Path) -> list[Holding]:
    """Return what the stores of a root hold: slots of slabs, and all files of a store of an unknown
    format.

    Stores of another version in memory are not counted: two versions side by side have separate
    limits.
    """
    found = []
    for directory in stores(root):
        state: StoreState | None = None
        # it may be readable later; until then it gives nothing
        with contextlib.suppress(OSError):
            state = read_state(directory)
        if state is not None and is_of_another_version(state):
            continue
        # a private store may be removed at any time
        with contextlib.suppress(FileNotFoundError):
            files = (
                directory.iterdir()
                if state is None
                else [directory / SLAB]
                if state.slot_bytes
                else []
            )
            unit = 1 if state is None else state.slot_bytes
            nbytes = sum(
                held_bytes(file, unit) for file in files if file.is_file()
            )
            found.append(
                Holding(
                    directory,
                    state,
                    nbytes,
                    in_use(directory),
                    _read_limit(directory),
                )
            )
    return found


def held_bytes(file: Path, unit: int) -> int:
    """Return the bytes that a file takes, in whole units: the file system's metadata for its holes
    rarely fill one.
    """
    status = file.stat()
    return (
        min(status.st_blocks * 512, -(-status.st_size // 4096) * 4096)
        // unit
        * unit
    )


def root_limit(every: Sequence[Holding]) -> int | None:
    """Return how much all stores of a root may hold: the largest limit of those in use; None if
    none has one.
    """
    return max(
        (one.limit for one in every if one.in_use and one.limit is not None),
        default=None,
    )


def fair_share(every: Sequence[Holding], unlimited_bytes: int) -> int:
    """Return the bytes of a fair share: of the limit, or of `unlimited_bytes` if there is none."""
    takers = [
        one
        for one in every
        if one.nbytes
        or (one.in_use and one.state is not None and one.state.slot_bytes)
    ]
    limit = root_limit(every)
    shared = unlimited_bytes if limit is None else limit
    return shared // max(1, len(takers))


def write_limit(directory: Path, nbytes: int | None, sole: bool) -> None:
    """Record how much the stores of the root may hold; while other processes have the store open,
    it never shrinks.

    None: the caller only reads the store, or takes space from it; if it is the only user (`sole`),
    an old limit is removed.
    """
    file = directory / _LIMIT
    fresh = file.with_suffix(".new")
    # left by a process that was killed while it wrote; a directory is nobody's
    with contextlib.suppress(OSError):
        fresh.unlink()
    if nbytes is None:
        if sole:
            with contextlib.suppress(OSError):  # none, or a directory
                file.unlink()
        return
    known = _read_limit(directory) or 0
    if known == nbytes or (known > nbytes and not sole):
        return
    try:
        fresh.write_text(f"{nbytes}\n")
        fresh.chmod(0o600)
        os.replace(fresh, file)
    except OSError:  # the file system is full: the old limit stays
        pass
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()


def _read_limit(directory: Path) -> int | None:
    try:
        limit = int(read_file(directory / _LIMIT, _MOST_LIMIT_BYTES))
    except (OSError, ValueError):
        return None
    # else it is damaged, and nobody asked for it
    return limit if 0 <= limit < _UNLIMITED else None


def is_of_another_version(state: StoreState) -> bool:
    """Whether another version made this store in memory: this version never searches its
    directory.
    """
    return state.kind == "memory" and state.format != FORMAT
