"""How much room the stores of one root hold, and how much they may hold together.

`store` and `space_sharing` call it under the lock of the root.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagoda.ledger.store_files import FORMAT, SLAB, StoreState, read_state
from pagoda.ledger.store_root import in_use, stores

_LIMIT = "limit"


@dataclass(frozen=True)
class Holding:
    """What one store of a root holds of the room that all share. `state` None: of a format that is not known.

    `limit`: what those who have it open were told that all may hold.
    """

    directory: Path
    state: StoreState | None
    nbytes: int
    in_use: bool
    limit: int | None


def holdings(root: Path) -> list[Holding]:
    """What the stores of a root hold: pages of slabs, and all files of a store whose format is not known.

    What another version has in memory is not counted: two versions side by side have a limit each.
    """
    found = []
    for directory in stores(root):
        state = read_state(directory)
        if state is not None and is_of_another_version(state):
            continue
        with contextlib.suppress(FileNotFoundError):  # a private store may go at any time
            files = directory.iterdir() if state is None else [directory / SLAB] if state.slot_bytes else []
            nbytes = sum(held_bytes(file) for file in files if file.is_file())
            found.append(Holding(directory, state, nbytes, in_use(directory), _read_limit(directory)))
    return found


def held_bytes(file: Path) -> int:
    """The bytes that a file takes; blocks in which a file system keeps where its pages are do not count."""
    status = file.stat()
    return min(status.st_blocks * 512, -(-status.st_size // 4096) * 4096)


def root_limit(every: Sequence[Holding]) -> int | None:
    """How much all stores of a root may hold: the most that one of those in use was told; None if none was."""
    return max((one.limit for one in every if one.in_use and one.limit is not None), default=None)


def write_limit(directory: Path, nbytes: int | None, sole: bool) -> None:
    """Note how much the stores of the root may hold; for others who have this one open it becomes no less.

    None: who opens it only looks at it, or takes from it. What was said at another time does not count then.
    """
    file = directory / _LIMIT
    if nbytes is None:
        if sole:
            file.unlink(missing_ok=True)
        return
    known = _read_limit(directory) or 0
    if known == nbytes or (known > nbytes and not sole):
        return
    with contextlib.suppress(OSError):  # a full file system: what was said before holds
        fresh = file.with_suffix(".new")
        fresh.write_text(f"{nbytes}\n")
        fresh.chmod(0o600)
        os.replace(fresh, file)


def _read_limit(directory: Path) -> int | None:
    try:
        return int((directory / _LIMIT).read_text())
    except (OSError, ValueError):
        return None


def is_of_another_version(state: StoreState) -> bool:
    """Whether another version made a store in memory: where it lies, this one never looks for its own."""
    return state.kind == "memory" and state.format != FORMAT
