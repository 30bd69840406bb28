"""How much memory the cgroups of this process allow it. Called by `store_place` and the
configuration.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
# a larger limit means unlimited: version 1 writes a number a little below 2**63 instead of "max"
_UNLIMITED = 1 << 62


class _GroupFiles(NamedTuple):
    """The files with a cgroup's limits and use, and the line of memory.stat that counts droppable
    pages.
    """

    limits: tuple[str, ...]
    used: str
    droppable: str


# above memory.high, each of the group's processes is slowed down until it needs less
_VERSION_2 = _GroupFiles(
    ("memory.max", "memory.high"), "memory.current", "inactive_file"
)
_VERSION_1 = _GroupFiles(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
)


def memory_limit_bytes(root: Path = _CGROUP, process: Path = _OWN_CGROUPS) -> int:
    """Return the bytes that this process may use: the tightest limit of its cgroup and its parents,
    else the RAM.
    """
    limits = [
        _limit_bytes(group, files) for group, files in _groups(root, process)
    ]
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([ram, *(limit for limit in limits if limit is not None)])


class CgroupRoom(NamedTuple):
    """The limit of one cgroup, and how much of it is left. Clean page cache counts as free."""

    limit_bytes: int
    free_bytes: int


def cgroup_free_bytes(
    root: Path = _CGROUP, process: Path = _OWN_CGROUPS
) -> int | None:
    """Return the bytes that this cgroup may still take; None if unlimited. Clean page cache counts
    as free.
    """
    return min(
        (room.free_bytes for room in cgroup_rooms(root, process)), default=None
    )


def cgroup_rooms(
    root: Path = _CGROUP, process: Path = _OWN_CGROUPS
) -> list[CgroupRoom]:
    """Return the room of this process's cgroup and of each of its parents that has a limit."""
    found: list[CgroupRoom] = []
    for group, files in _groups(root, process):
        limit = _limit_bytes(group, files)
        free = None if limit is None else _free_bytes(group, files, limit)
        if limit is not None and free is not None:
            found.append(CgroupRoom(limit, free))
    return found


def _free_bytes(group: Path, files: _GroupFiles, limit: int) -> int | None:
    try:
        used = int((group / files.used).read_text())
        lines = dict(
            line.split()
            for line in (group / "memory.stat").read_text().splitlines()
        )
        return max(0, limit - used + int(lines.get(files.droppable, 0)))
    except (OSError, ValueError):
        return None


def _limit_bytes(group: Path, files: _GroupFiles) -> int | None:
    """Return the limit of one group; None if there is none, or it cannot be read."""
    limits = [_read_limit(group / name) for name in files.limits]
    return min((limit for limit in limits if limit is not None), default=None)


def _read_limit(file: Path) -> int | None:
    try:
        limit = int(file.read_text())
    except (OSError, ValueError):  # ValueError: the file says "max"
        return None
    return limit if limit < _UNLIMITED else None


def _groups(root: Path, process: Path) -> Iterator[tuple[Path, _GroupFiles]]:
    """Yield this process's cgroups and their parents, of both versions; the root's if its own are
    not known.
    """
    try:
        lines = process.read_text().splitlines()
    except OSError:
        lines = ["0::/", "1:memory:/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base = root
            files = _VERSION_2
        elif "memory" in controllers.split(","):
            base = root / "memory"
            files = _VERSION_1
        else:
            continue
        inside = Path(path.lstrip("/"))
        yield from ((base / level, files) for level in (inside, *inside.parents))
