"""Is there room, and may this place hold a store? Asked before anything is made, so that nothing ends in a signal."""

from __future__ import annotations

import contextlib
import ctypes
import errno
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
_MEMINFO = Path("/proc/meminfo")
_KEEP_SIZE, _PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def require_local(directory: Path) -> None:
    """Refuse a network or FUSE file system: locks and shared mappings cannot be trusted there. StoreError."""
    kind = _filesystem(directory.resolve())
    if kind.startswith(_REMOTE):
        raise StoreError(
            f"{directory} lies on {kind}, a network or FUSE file system: choose a path on a local disk or in /dev/shm"
        )


def require_own(path: Path) -> None:
    """Refuse what belongs to another user, and a symbolic link that another user (but root) has made. StoreError."""
    for what, allowed in ((os.lstat(path), {0, os.geteuid()}), (os.stat(path), {os.geteuid()})):
        if what.st_uid not in allowed:
            raise StoreError(
                f"{path} belongs to user {what.st_uid}, not to user {os.geteuid()}: choose another path or remove it"
            )


def require_place(root: Path, size_bytes: int, in_memory: bool) -> None:
    """Refuse a directory where a tier of `size_bytes` could not be opened. StoreError or NoRoomError.

    Where stores are, a tier begins with what they have; where none is, all of it has to be free. For those who do not
    know the layout yet; changes nothing.
    """
    there = next(path for path in (root, *root.absolute().parents) if os.path.exists(path))
    if there == root:
        require_own(root)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise StoreError(f"{root} cannot be made: choose another path")
    require_local(there)
    if not any(file.lstat().st_blocks for file in root.glob("*/*")):
        require_free(there, size_bytes, in_memory)


def require_free(directory: Path, need_bytes: int, in_memory: bool) -> None:
    """Refuse to begin what would not fit the file system or, in memory, the cgroup and the machine.

    Raises NoRoomError with the remedy.
    """
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
    left = _machine_free_bytes(directory) if in_memory else None
    if left is not None and need_bytes > left:
        raise NoRoomError(
            f"the machine has {left:,} bytes of memory left, {need_bytes:,} are needed: ask for a smaller size"
        )


def free_bytes(directory: Path, in_memory: bool) -> int:
    """How much the file system and, in memory, the cgroup and the machine have left."""
    status = os.statvfs(directory)
    left = [status.f_bavail * status.f_frsize]
    if in_memory:
        left += [free for free in (cgroup_free_bytes(), _machine_free_bytes(directory)) if free is not None]
    return min(left)


def lengthen(path: Path, nbytes: int) -> None:
    """Make the file at least `nbytes` long, with no pages in what is added. Never shorter: it may be mapped."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size < nbytes:
            os.ftruncate(fd, nbytes)
    finally:
        os.close(fd)


def allocate_range(fd: int, offset: int, nbytes: int) -> bool:
    """Reserve the blocks of a part of a file; False, and none of them, if the file system has not got them."""
    try:
        os.posix_fallocate(fd, offset, nbytes)
    except OSError:
        with contextlib.suppress(OSError):
            punch(fd, offset, nbytes)
        return False
    return True


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Give the blocks of a part of a file back; it reads as zeros, the file stays as long. OSError."""
    while _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, nbytes) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def reserve_beyond(fd: int, nbytes: int) -> None:
    """Reserve the first bytes of a file without making it longer: what is appended needs no room then. OSError."""
    while _libc.fallocate(fd, _KEEP_SIZE, 0, nbytes) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def data_ranges(fd: int, start: int, stop: int) -> list[tuple[int, int]]:
    """Where, between two offsets, a file is no hole. What is allocated but was never written may count as one."""
    found: list[tuple[int, int]] = []
    while start < stop:
        try:
            begin = os.lseek(fd, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # nothing but holes from here on
                raise
            break
        start = min(os.lseek(fd, begin, os.SEEK_HOLE), stop)
        if begin < stop:
            found.append((begin, start))
    return found


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


def _machine_free_bytes(directory: Path, meminfo: Path = _MEMINFO) -> int | None:
    """Bytes of memory that a tmpfs may take before the kernel ends processes to get some; None elsewhere (huge pages).

    A tmpfs may be larger than the memory that it lies in.
    """
    if _filesystem(directory.resolve()) != "tmpfs":
        return None
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
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
