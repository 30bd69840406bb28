"""Which boot of the machine this is, and its one clock for all containers. Called by `clock`.

Monotonic times, and memory that outlives a process, can be trusted within one boot only. The kernel
names each boot with a random id. Some processes cannot see it (systemd's ProcSubset=pid, a
container without it), and some see a file that was put over it. They use a stand-in: a file with a
random number in a file system in memory, which a reboot empties. The stand-in counts only as long
as it is the very same file, so a copy of it is another boot. Without either, each process is a boot
of its own, and trusts nothing that an earlier one left open.

A container may have a monotonic clock of its own (a time namespace). The kernel tells by how much
it differs.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from functools import cache
from pathlib import Path

from pagoda.base.errors import is_shortage
from pagoda.base.file_lock import lock_file
from pagoda.base.file_space import require_regular
from pagoda.base.file_systems import filesystem_of
from pagoda.base.log import guarded_logger

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_OFFSETS = Path("/proc/self/timens_offsets")
_MEMORY = Path("/dev/shm")
_STAND_IN = ".boot"
_UUID = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
)
_NIL = "00000000-0000-0000-0000-000000000000"
_NUMBER = re.compile(r"[0-9a-f]{32}\n")
_IN_MEMORY = ("tmpfs", "ramfs")
_LOCK_SECONDS = 2.0


@cache
def boot_id() -> str:
    """Return a name of this boot of the machine, the same in all processes of this user that can
    see the same.

    OSError if this process has no files or memory left to ask.
    """
    return (
        kernel_boot_id(_BOOT_ID)
        or stand_in(_MEMORY / f"pagoda-{os.getuid()}")
        or _own_boot()
    )


def kernel_boot_id(file: Path) -> str | None:
    """Return the kernel's id of this boot; None if the file is absent, or is not the kernel's.
    Changes nothing.

    OSError if this process cannot ask now: that is no other boot, after which host memory would be
    discarded.
    """
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if is_shortage(error):
            raise
        return None
    try:
        found = os.read(fd, 64).decode("ascii", "replace").strip()
        is_kernels = filesystem_of(fd) == "proc"
    except OSError:
        return None
    finally:
        os.close(fd)
    return (
        found if is_kernels and _UUID.fullmatch(found) and found != _NIL else None
    )


def stand_in(directory: Path) -> str | None:
    """Return the name of the stand-in in a directory of this user in memory, making it if there is
    none.

    None if the directory is not in memory, is not only this user's, or cannot be written. OSError
    as `kernel_boot_id`.
    """
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(0o700)
        fd = os.open(
            directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
    except OSError as error:
        if is_shortage(error):
            raise
        return None
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            return None
        if filesystem_of(fd) not in _IN_MEMORY:
            return None
        known = _read_stand_in(fd)
        if known is None:
            known = _made_stand_in(fd)
    except OSError as error:
        if is_shortage(error):
            raise
        return None
    finally:
        os.close(fd)
    return known


def _read_stand_in(directory: int) -> str | None:
    try:
        fd = os.open(
            _STAND_IN,
            os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK,
            dir_fd=directory,
        )
    except FileNotFoundError:
        return None
    try:
        require_regular(fd, _STAND_IN)
        number = os.read(fd, 64).decode("ascii", "replace")
        status = os.fstat(fd)
    finally:
        os.close(fd)
    if not _NUMBER.fullmatch(number) or status.st_uid != os.geteuid():
        return None
    return f"{number.strip()}-{status.st_ino:x}-{status.st_ctime_ns:x}"


def _made_stand_in(directory: int) -> str | None:
    """Make the stand-in, unless another process was first; None if one holds the lock for long.
    Raises OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    locked = os.open(f"{_STAND_IN}-lock", flags, 0o600, dir_fd=directory)
    try:
        if not lock_file(locked, _LOCK_SECONDS):
            return None
        if _read_stand_in(directory) is None:
            _make_stand_in(directory)
        return _read_stand_in(directory)
    finally:
        os.close(locked)


def _make_stand_in(directory: int) -> None:
    """Write the stand-in under another name first: no process ever reads a part of it. Raises
    OSError.
    """
    fresh = f"{_STAND_IN}-{secrets.token_hex(4)}"
    fd = os.open(
        fresh,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
        0o600,
        dir_fd=directory,
    )
    try:
        os.write(fd, f"{secrets.token_hex(16)}\n".encode())
        os.rename(fresh, _STAND_IN, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        os.unlink(fresh, dir_fd=directory)
        raise
    finally:
        os.close(fd)


def _own_boot() -> str:
    guarded_logger("pagoda").warning(
        "this boot of the machine cannot be told from others (no %s, and %s cannot be used): "
        "what earlier processes "
        "left open is not trusted, so host memory starts cold",
        _BOOT_ID,
        _MEMORY,
    )
    return f"unknown-{secrets.token_hex(16)}"


def monotonic_offset_ns(file: Path = _OFFSETS) -> int:
    """Return by how much CLOCK_MONOTONIC of this container is ahead of the machine's; 0 if it does
    not differ.
    """
    try:
        found = re.search(
            r"^monotonic\s+(-?\d+)\s+(\d+)$", file.read_text(), re.MULTILINE
        )
    except OSError:
        return 0
    return int(found[1]) * 1_000_000_000 + int(found[2]) if found else 0
