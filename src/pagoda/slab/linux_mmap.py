"""Linux calls: map shared memory at a huge page's boundary, populate it, collapse it into huge
pages.

By ctypes, because `mmap.mmap` cannot choose an address and its `madvise` keeps the GIL.

Called by `memory` and `pinned`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

HUGE_BYTES = 2 << 20
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
# Linux 6.1: collapses into huge pages, without privileges, whatever the mount's default is
_MADV_COLLAPSE = 25
_FAILED = ctypes.c_void_p(-1).value
_TRIES = 100  # of a call that says EAGAIN

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

Memory = ctypes.Array[ctypes.c_uint8]


def map_shared(fd: int | None, nbytes: int) -> Memory:
    """Map `nbytes` of a file (None: anonymous memory), shared with forked children, beginning on a
    huge page.

    Unmapped when the last array over it is collected. Raises OSError.
    """
    length = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    reserved = length + HUGE_BYTES
    base = _mmap(
        None,
        reserved,
        0,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
        -1,
    )
    start = -(-base // HUGE_BYTES) * HUGE_BYTES
    try:
        flags = (
            mmap.MAP_SHARED
            | _MAP_FIXED
            | (mmap.MAP_ANONYMOUS if fd is None else 0)
        )
        _mmap(
            start,
            length,
            mmap.PROT_READ | mmap.PROT_WRITE,
            flags,
            -1 if fd is None else fd,
        )
    except OSError:
        _libc.munmap(base, reserved)
        raise
    for first, stop in ((base, start), (start + length, base + reserved)):
        if stop > first:
            _libc.munmap(first, stop - first)
    # This is for pages that are faulted in later, if the mount allows huge pages.
    _libc.madvise(start, length, _MADV_HUGEPAGE)
    memory = (ctypes.c_uint8 * nbytes).from_address(start)
    # Not at exit: views may be alive then, and the kernel frees everything.
    weakref.finalize(memory, _libc.munmap, start, length).atexit = False
    return memory


def collapse_huge_pages(address: int, length: int) -> bool:
    """Collapse memory into huge pages if the kernel can; content and mappings of other processes
    stay. Return whether all whole huge pages of it are.

    Of a file in memory the holes beside at least one page are filled too.

    With scattered 4 KiB pages, direct I/O reaches about half the speed of a fast disk, and copies
    0.9 to 0.98 of their speed. If the kernel refuses (an older kernel, no free huge pages), the
    small pages remain in use.
    """
    return bool(_libc.madvise(address, length, _MADV_COLLAPSE) == 0)


def populate(address: int, length: int) -> bool:
    """Fault memory in; False if the kernel cannot, has no memory left or always says "again" (pages
    are then faulted in at first access).
    """
    for _ in range(_TRIES):
        if _libc.madvise(address, length, _MADV_POPULATE_WRITE) == 0:
            return True
        if ctypes.get_errno() not in (errno.EINTR, errno.EAGAIN):
            break
    return False


def _mmap(
    address: int | None, length: int, protection: int, flags: int, fd: int
) -> int:
    found: int | None = _libc.mmap(address, length, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
