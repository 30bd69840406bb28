"""Checks before a store is created: enough free space, and a place that may hold a store. Prevents
a later SIGBUS.

A place is judged by what the kernel says of the opened directory, never by its path: a later mount
may hide the one that the path seems to name. Called by the ledger, the slabs, the tiers and the
configuration; calls the operating system only.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from pathlib import Path
from typing import NamedTuple

from pagoda.base.cgroup_memory import cgroup_free_bytes, cgroup_rooms
from pagoda.base.errors import NoRoomError, StoreError
from pagoda.base.file_space import opened, size_in_words
from pagoda.base.file_systems import filesystem, nearest

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
_IN_MEMORY = ("tmpfs", "ramfs")
_FILES_IN_MEMORY = (*_IN_MEMORY, "rootfs", "devtmpfs", "hugetlbfs")
_MEMINFO = Path("/proc/meminfo")
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_PROBED_BYTE = 1 << 40  # no store locks this byte of a directory
_NO_LIMIT = 2**63 - 1
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20))
_LEFT_FOR_OTHERS = 0.95  # of a size that is proposed: others write there too
# What a store that grows leaves free. Above the limit of a cgroup, or when the machine has no
# memory left, an allocation does not fail: the kernel kills a process. A file system that is full
# refuses it, so that a small one needs no more than a share.
_MARGIN_SHARE = 0.05
_LEAST_MARGIN_BYTES = 256 << 20
# It takes this first, and keeps as much free as is in use, between this and an eighth of its slots.
FIRST_PIECE_BYTES = 16 << 20


def require_local(directory: Path) -> None:
    """Refuse a file system where locks, shared mappings or writes cannot be trusted. StoreError
    with the remedy.
    """
    kind = filesystem(directory)
    if kind.startswith(_REMOTE):
        raise StoreError(
            f"{directory} is on {kind}, a network or FUSE file system: choose a path on a local "
            "disk or in /dev/shm"
        )
    if kind == "hugetlbfs":
        raise StoreError(
            f"{directory} is on hugetlbfs, where files can be mapped but not written, and a "
            "store needs both: choose "
            "a path in /dev/shm, or on a tmpfs that is mounted with huge=advise for huge pages"
        )


def require_locks(directory: Path) -> None:
    """Refuse a kernel, sandbox or file system without the locks that a store needs. StoreError.
    Changes nothing.

    It takes the kind of lock that a store takes, on the directory where the store will be.
    """
    with opened(directory, os.O_RDONLY | os.O_DIRECTORY) as fd:
        try:
            fcntl.fcntl(
                fd,
                fcntl.F_OFD_SETLK,
                _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _PROBED_BYTE, 1, 0),
            )
        except OSError as error:
            raise StoreError(
                f"{directory}: here a process cannot lock an open file (fcntl F_OFD_SETLK: "
                f"{error.strerror}), so "
                "processes could overwrite each other's chunks: some sandboxes (gVisor, seccomp "
                "filters) have no such "
                "locks; run outside of it, or without local tiers (host_size = 0, disk_size = 0)"
            ) from error


def is_in_memory(directory: Path) -> bool:
    """Whether a directory is on a file system that keeps its files in memory."""
    return filesystem(directory) in _FILES_IN_MEMORY


def require_memory(root: Path) -> None:
    """Refuse a directory on a disk for host memory: its files are mapped and written there.
    StoreError.

    When a disk fails, or is full and copies on write, a write to such a page kills the process.
    """
    if not is_in_memory(root):
        kind = filesystem(root)
        raise StoreError(
            f"{root} is on {kind or 'a disk'}, and host memory must be in memory: choose a "
            "host_path in /dev/shm or on "
            f"another tmpfs (mount -t tmpfs -o size=SIZE tmpfs {root}), or give the disk to "
            "disk_path"
        )


def require_own(path: Path) -> None:
    """Refuse a path of another user, and a symbolic link made by another user than root. Raises
    StoreError.
    """
    for what, allowed in (
        (os.lstat(path), {0, os.geteuid()}),
        (os.stat(path), {os.geteuid()}),
    ):
        if what.st_uid not in allowed:
            raise StoreError(
                f"{path} belongs to user {what.st_uid}, not to user {os.geteuid()}: run this as "
                "that user, choose "
                "another path or remove it"
            )


def other_place(root: Path) -> str:
    """Return what to do if this user cannot make a directory."""
    return f"choose another path, or as root: install -d -m 700 -o {os.geteuid()} {root}"


def require_umask() -> None:
    """Refuse a umask with which this user could not open the files and directories that it makes.
    StoreError.

    Without /proc the umask cannot be read without changing it for other threads: then nothing is
    refused.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return
    found = re.search(r"^Umask:\s*(\d+)$", status, re.MULTILINE)
    if found and int(found[1], 8) & 0o700:
        raise StoreError(
            f"the umask is {found[1]}: this user could not open what it makes; set it to 077"
        )


def require_place(root: Path, size_bytes: int, in_memory: bool) -> None:
    """Refuse a directory where a tier of `size_bytes` could not be opened. StoreError or
    NoRoomError.

    If the directory holds stores, a tier starts with their space; otherwise all of `size_bytes`
    must be free. For callers that do not know the layout yet. Changes nothing.
    """
    there = nearest(root)
    if there == root:
        require_own(root)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise StoreError(f"{root} cannot be made: {other_place(root)}")
    require_local(there)
    if not any(file.lstat().st_blocks for file in root.glob("*/*")):
        require_free(there, size_bytes, in_memory, size_bytes)


def require_free(
    directory: Path, need_bytes: int, in_memory: bool, size_bytes: int = 0
) -> None:
    """Refuse a size that the file system or, in memory, the cgroup or the machine has no space for.

    Args:
        directory: where the files would be.
        need_bytes: what must be free there.
        in_memory: whether files there are memory.
        size_bytes: the part of `need_bytes` that the user asked for; the rest are tables.

    Raises NoRoomError with the remedy, and a size that would fit if `size_bytes` is given.
    """
    bounds = _bounds(directory, in_memory)
    for left, said, remedy in bounds:
        if need_bytes > left:
            option = "host_size" if in_memory else "disk_size"
            smaller = f"ask for a smaller {option}"
            least = min(bound[0] for bound in bounds)
            if fitting := _fitting(least * size_bytes // need_bytes):
                smaller = f'ask for less: {option} = "{fitting}" would fit'
            raise NoRoomError(
                f"{said}, {size_in_words(need_bytes)} are needed: {remedy}{smaller}"
            )


def no_private_memory(size_bytes: int, why: str) -> NoRoomError:
    """Return the error of a process that does not get this much private memory for its host
    tier.
    """
    smaller = "ask for a smaller host_size"
    free = free_memory_bytes()
    if fitting := _fitting(min(free, size_bytes)):
        smaller = f'ask for less: host_size = "{fitting}" would fit'
    left = f"{size_in_words(free)} free, " if free < _NO_LIMIT else ""
    return NoRoomError(
        f"memory of one process: {left}{size_in_words(size_bytes)} are needed ({why}): {smaller}"
    )


def require_room_for_one(kind: str, size_bytes: int, chunk_bytes: int) -> None:
    """Refuse a size of a tier, "host" or "disk", in which not even one chunk has room.
    ValueError.
    """
    if size_bytes < chunk_bytes:
        raise ValueError(
            f"a {kind} tier of {size_in_words(size_bytes)} has no room for one chunk of "
            f"{size_in_words(chunk_bytes)}: ask for a larger {kind}_size"
        )


def _fitting(nbytes: int) -> str:
    """Return a size, as an option takes it, a little below `nbytes`; empty if that is too little
    for a store.
    """
    for unit, factor in _UNITS:
        whole = int(nbytes * _LEFT_FOR_OTHERS) // factor
        if whole:
            return f"{whole}{unit}"
    return ""


def free_bytes(directory: Path, in_memory: bool) -> int:
    """Return the bytes that the file system and, in memory, the cgroup and the machine have
    left.
    """
    return min(
        (left for left, _, _ in _bounds(directory, in_memory)), default=_NO_LIMIT
    )


class Growth(NamedTuple):
    """How many bytes a store in memory may still take, and what sets that limit: "filesystem",
    "cgroup" or "machine".
    """

    nbytes: int
    bound: str


def growth_room(directory: Path) -> Growth:
    """Return how much more memory a store that grows may take there now, and leave a margin to
    others. OSError.
    """
    found = [Growth(_NO_LIMIT, "filesystem")]
    status = os.statvfs(directory)
    if status.f_blocks:
        margin = int(status.f_blocks * status.f_frsize * _MARGIN_SHARE)
        free = status.f_bavail * status.f_frsize
        found.append(Growth(free - margin, "filesystem"))
    for limit, free in cgroup_rooms():
        found.append(Growth(free - _margin_bytes(limit), "cgroup"))
    if (free_of_machine := _machine_free_bytes(directory)) is not None:
        ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found.append(Growth(free_of_machine - _margin_bytes(ram), "machine"))
    least = min(found)
    return least._replace(nbytes=max(0, least.nbytes))


def _margin_bytes(limit: int) -> int:
    return max(int(limit * _MARGIN_SHARE), _LEAST_MARGIN_BYTES)


def _bounds(directory: Path, in_memory: bool) -> list[tuple[int, str, str]]:
    """Return the limits of the space there: for each the bytes left, the same in words, and how to
    get more.
    """
    found: list[tuple[int, str, str]] = []
    status = os.statvfs(directory)
    if status.f_blocks:  # a tmpfs without a size limit says 0 of 0
        free = status.f_bavail * status.f_frsize
        remedy = (
            "mount it with a larger size= (docker: --shm-size) or "
            if in_memory
            else "free some space or "
        )
        found.append(
            (free, f"{directory} has {size_in_words(free)} free", remedy)
        )
    if in_memory and (free_of_cgroup := cgroup_free_bytes()) is not None:
        said = (
            f"the cgroup may use {size_in_words(free_of_cgroup)} more of memory"
        )
        found.append((free_of_cgroup, said, "raise its limit or "))
    if (
        in_memory
        and (free_of_machine := _machine_free_bytes(directory)) is not None
    ):
        found.append(
            (
                free_of_machine,
                f"the machine has {size_in_words(free_of_machine)} of memory left",
                "",
            )
        )
    return found


def _machine_free_bytes(directory: Path, meminfo: Path = _MEMINFO) -> int | None:
    """Return the bytes that files in memory may take before the kernel kills processes; None for
    other places.

    A tmpfs may be declared larger than the memory of the machine.
    """
    if filesystem(directory) not in _IN_MEMORY:
        return None
    return _available_bytes(meminfo)


def free_memory_bytes() -> int:
    """Return the bytes of memory that the cgroup and the machine have left for a process."""
    found = (cgroup_free_bytes(), _available_bytes(_MEMINFO))
    return min((left for left in found if left is not None), default=_NO_LIMIT)


def _available_bytes(meminfo: Path) -> int | None:
    """Return what the machine has left before the kernel kills processes; None if it does not
    say.
    """
    try:
        lines = dict(
            line.split(":", 1) for line in meminfo.read_text().splitlines()
        )
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return None
