"""Checks before a store is created: enough free space, and a place that may hold a store. Prevents a later SIGBUS.

Called by the ledger, the slabs, the tiers and the configuration; calls the operating system only.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pagoda.cgroup_memory import cgroup_free_bytes
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
_MEMINFO = Path("/proc/meminfo")


def require_local(directory: Path) -> None:
    """Refuse a network or FUSE file system: locks and shared mappings cannot be trusted there. StoreError."""
    kind = _filesystem(directory.resolve())
    if kind.startswith(_REMOTE):
        raise StoreError(
            f"{directory} is on {kind}, a network or FUSE file system: choose a path on a local disk or in /dev/shm"
        )


_IN_MEMORY = ("tmpfs", "ramfs", "rootfs", "devtmpfs", "hugetlbfs")


def is_in_memory(directory: Path) -> bool:
    """Whether a directory is on a file system that keeps its files in memory."""
    return _filesystem(directory.resolve()) in _IN_MEMORY


def require_memory(root: Path) -> None:
    """Refuse a directory on a disk for host memory: its files are mapped and written there. StoreError.

    When a disk fails, or is full and copies on write, a write to such a page kills the process.
    """
    there = next(path for path in (root, *root.absolute().parents) if os.path.exists(path))
    if not is_in_memory(there):
        kind = _filesystem(there.resolve())
        raise StoreError(
            f"{root} is on {kind or 'a disk'}, and host memory must be in memory: choose a host_path in /dev/shm or on "
            f"another tmpfs (mount -t tmpfs -o size=SIZE tmpfs {root}), or give the disk to disk_path"
        )


def require_own(path: Path) -> None:
    """Refuse a path of another user, and a symbolic link made by another user than root. Raises StoreError."""
    for what, allowed in ((os.lstat(path), {0, os.geteuid()}), (os.stat(path), {os.geteuid()})):
        if what.st_uid not in allowed:
            raise StoreError(
                f"{path} belongs to user {what.st_uid}, not to user {os.geteuid()}: run this as that user, choose "
                "another path or remove it"
            )


def other_place(root: Path) -> str:
    """Return what to do if this user cannot make a directory."""
    return f"choose another path, or as root: install -d -m 700 -o {os.geteuid()} {root}"


def require_umask() -> None:
    """Refuse a umask with which this user could not open the files and directories that it makes. StoreError."""
    found = re.search(r"^Umask:\s*(\d+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found and int(found[1], 8) & 0o700:
        raise StoreError(f"the umask is {found[1]}: this user could not open what it makes; set it to 077")


def require_place(root: Path, size_bytes: int, in_memory: bool) -> None:
    """Refuse a directory where a tier of `size_bytes` could not be opened. StoreError or NoRoomError.

    If the directory holds stores, a tier starts with their space; otherwise all of `size_bytes` must be free. For
    callers that do not know the layout yet. Changes nothing.
    """
    there = next(path for path in (root, *root.absolute().parents) if os.path.exists(path))
    if there == root:
        require_own(root)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise StoreError(f"{root} cannot be made: {other_place(root)}")
    require_local(there)
    if not any(file.lstat().st_blocks for file in root.glob("*/*")):
        require_free(there, size_bytes, in_memory)


def require_free(directory: Path, need_bytes: int, in_memory: bool) -> None:
    """Refuse a size that the file system or, in memory, the cgroup or the machine has no space for.

    Raises NoRoomError with the remedy.
    """
    for left, said, remedy in _bounds(directory, in_memory):
        if need_bytes > left:
            raise NoRoomError(f"{said}, {need_bytes:,} are needed: {remedy}ask for a smaller size")


def free_bytes(directory: Path, in_memory: bool) -> int:
    """Return the bytes that the file system and, in memory, the cgroup and the machine have left."""
    return min(left for left, _, _ in _bounds(directory, in_memory))


def _bounds(directory: Path, in_memory: bool) -> list[tuple[int, str, str]]:
    """Return the limits of the space there: for each the bytes left, the same in words, and how to get more."""
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    remedy = "mount it with a larger size= (docker: --shm-size) or " if in_memory else "free some space or "
    found = [(free, f"{directory} has {free:,} bytes free", remedy)]
    if in_memory and (free_of_cgroup := cgroup_free_bytes()) is not None:
        said = f"the cgroup may use {free_of_cgroup:,} more bytes of memory"
        found.append((free_of_cgroup, said, "raise its limit or "))
    if in_memory and (free_of_machine := _machine_free_bytes(directory)) is not None:
        found.append((free_of_machine, f"the machine has {free_of_machine:,} bytes of memory left", ""))
    return found


def _machine_free_bytes(directory: Path, meminfo: Path = _MEMINFO) -> int | None:
    """Return the bytes that a tmpfs may take before the kernel kills processes; None for others (huge pages).

    A tmpfs may be declared larger than the memory of the machine.
    """
    if _filesystem(directory.resolve()) != "tmpfs":
        return None
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return None


def _filesystem(path: Path) -> str:
    """Return the type of the file system of `path`: of the longest mount point above it (of equals, the last)."""
    best, kind = -1, ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        if (path == point or point in path.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[fields.index("-") + 1]
    return kind
