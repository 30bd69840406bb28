"""Is there room, and may this place hold a store? Asked before anything is made, so that nothing ends in a signal."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pagoda.errors import NoRoomError, StoreError

_REMOTE = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "ceph",
    "gluster",
    "lustre",
    "gpfs",
    "beegfs",
    "fuse",
    "afs",
    "ncpfs",
    "virtiofs",
)
_CGROUP = Path("/sys/fs/cgroup")


def require_local(directory: Path) -> None:
    """Refuse a network or FUSE file system: locks and shared mappings cannot be trusted there. StoreError."""
    kind = _filesystem(directory.resolve())
    if kind.startswith(_REMOTE):
        raise StoreError(
            f"{directory} lies on {kind}, a network or FUSE file system: choose a path on a local disk or in /dev/shm"
        )


def require_own(path: Path) -> None:
    """Refuse what belongs to another user. StoreError."""
    owner = os.stat(path).st_uid
    if owner != os.geteuid():
        raise StoreError(
            f"{path} belongs to user {owner}, not to user {os.geteuid()}: choose another path or remove it"
        )


def require_free(directory: Path, need_bytes: int, in_memory: bool) -> None:
    """Refuse to begin what would not fit the file system or, in memory, the cgroup. NoRoomError with the remedy."""
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if need_bytes > free:
        remedy = "mount it with a larger size= (docker: --shm-size)" if in_memory else "free some room"
        raise NoRoomError(
            f"{directory} has {free:,} bytes free, {need_bytes:,} are needed: {remedy} or ask for a smaller size"
        )
    left = cgroup_free_bytes() if in_memory else None
    if left is not None and need_bytes > left:
        raise NoRoomError(
            f"the cgroup may use {left:,} more bytes of memory, {need_bytes:,} are needed: "
            "raise its limit or ask for a smaller size"
        )


def allocate(path: Path, nbytes: int) -> None:
    """Make the file `nbytes` long, all of its blocks reserved: NoRoomError with the remedy, never a later SIGBUS."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        raise NoRoomError(
            f"no room for the {nbytes:,} bytes of {path} ({error.strerror}): free some room or ask for a smaller size"
        ) from error
    finally:
        os.close(fd)


def cgroup_free_bytes(root: Path = _CGROUP) -> int | None:
    """Bytes of memory this process's cgroup may still take (droppable page cache counts as free); None if unlimited."""
    own = Path(_own_group())
    left = [_group_free_bytes(root / group) for group in (own, *own.parents)]
    return min((free for free in left if free is not None), default=None)


def _group_free_bytes(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text())
        lines = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(lines.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None


def _own_group() -> str:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split("::", 1)[1].lstrip("/") for line in lines if "::" in line), "")


def _filesystem(path: Path) -> str:
    """Type of the file system that `path` lies on: that of the longest mount point above it, the latest of equals."""
    best, kind = -1, ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        if (path == point or point in path.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[fields.index("-") + 1]
    return kind
