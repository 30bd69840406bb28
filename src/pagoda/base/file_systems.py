"""Which type of file system a path or an open descriptor is on. Calls the operating system only.

Called by `store_place`, which judges where a store may be, and by `boot_identity`.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from pagoda.base.file_space import opened

# What statfs calls the file systems that matter here; used where /proc does not tell the name.
_MAGIC = {
    0x9FA0: "proc",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x958458F6: "hugetlbfs",
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb3",
    0x517B: "smb",
    0x01021997: "9p",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x65735546: "fuse",
    0x5346414F: "afs",
    0x6B414653: "afs",
    0x564C: "ncpfs",
}
_STATFS_BYTES = 256  # more than the structure has on any machine

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]


def filesystem(path: Path) -> str:
    """Return the type of the file system of `path`, or of its nearest parent that exists; "" if it
    is unknown.

    It is the one that an open reaches, whatever is mounted below or above it. Changes nothing.
    """
    with opened(nearest(path), os.O_PATH, any_kind=True) as fd:
        return filesystem_of(fd)


def nearest(path: Path) -> Path:
    """Return a path, or its nearest parent that exists."""
    parents = path.absolute().parents
    return next(one for one in (path, *parents) if os.path.exists(one))


def filesystem_of(fd: int) -> str:
    """Return the type of the file system that an open descriptor is on; "" if it is unknown.
    Changes nothing.
    """
    return _mounted_as(fd) or _MAGIC.get(_magic(fd), "")


def _mounted_as(fd: int) -> str:
    """Return the type in the mount table of the mount that a descriptor is in; "" if /proc does not
    tell.
    """
    try:
        known = re.search(
            r"^mnt_id:\s*(\d+)$",
            Path(f"/proc/self/fdinfo/{fd}").read_text(),
            re.MULTILINE,
        )
        lines = (
            Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
        )
    except OSError:
        return ""
    for fields in map(str.split, lines):
        if known and fields[0] == known[1]:
            return fields[fields.index("-") + 1]
    return ""


def _magic(fd: int) -> int:
    """Return the number of the file system's type; 0 if the system does not tell."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(fd, found) != 0:
        return 0
    return int(ctypes.c_long.from_buffer(found).value) & 0xFFFFFFFF
