"""The pages of the tables of a store on disk: kept in memory, and tested without a signal before
they are read.

LMDB reads its file through a mapping. If the file system has stopped, a read of a page that is in
memory still works, a read of any other page kills the process by SIGBUS. A `pread` returns an error
instead, and so does a request to load mapped pages. So the pages are loaded when a store is opened
and from time to time, locked in memory as far as that is allowed, and `require` asks the file
system before every transaction. `session` calls this module.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from pathlib import Path
from struct import Struct

import numpy as np

from pagoda.base.file_space import opened

# the tables of about 100,000 chunks; no option counts this memory
MOST_LOCKED_BYTES = 64 << 20
_PAGE_BYTES = 4096
_PIECE_BYTES = 1 << 20
_POPULATE_READ = 22  # of madvise, since Linux 5.14
_TRIES = 100  # of a call that says EAGAIN
_META_PAGES = 2
# of LMDB's format 1: the header of the page, then magic, version, size of a page, number of the
# last page in use
_META = Struct("<16xII16xI92xQ")
# the number of a page's transaction follows
_TRANSACTION = Struct(f"<{_META.size}xQ")
_MAGIC = 0xBEEFC0DE
_VERSION = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class TablePages:
    """A second mapping of the file of tables, never read through. Thread-safe; may be used in a
    forked child.
    """

    def __init__(self, path: Path, map_bytes: int) -> None:
        """Map the file, of `map_bytes` bytes. OSError."""
        with opened(path, os.O_RDONLY) as fd:
            try:
                self._map = mmap.mmap(fd, map_bytes, prot=mmap.PROT_READ)
            except ValueError as error:  # it was cut since it was looked at
                raise OSError(errno.EIO, f"{error}", str(path)) from error
            self._file = os.fdopen(os.dup(fd), "rb", buffering=0)
        self._address = np.frombuffer(self._map, np.uint8).__array_interface__[
            "data"
        ][0]
        self._fd = self._file.fileno()
        self._pid = os.getpid()
        self.locked_bytes = 0  # which the system may not take away
        self._may_lock = True

    def require(self) -> None:
        """Raise OSError if the file system does not answer, or the file was cut. Takes about a
        microsecond.
        """
        if not os.pread(self._fd, 1, len(self._map) - 1):
            raise OSError(errno.EIO, "the file of tables was truncated")

    def last_transaction(self) -> int:
        """Return the number of the last transaction of any process, read without the mapping; -1:
        unknown. OSError.

        Takes about two microseconds and no lock.
        """
        metas = os.pread(self._fd, _META_PAGES * _PAGE_BYTES, 0)
        if len(metas) < _META_PAGES * _PAGE_BYTES:
            return -1
        first: int = _TRANSACTION.unpack_from(metas)[0]
        second: int = _TRANSACTION.unpack_from(metas, _PAGE_BYTES)[0]
        return max(first, second)

    def load(self) -> None:
        """Bring all pages in use into memory, and lock the first of them. OSError if one cannot be
        read.
        """
        used = self._used_bytes()
        if used and not self._populate(used):
            for at in range(0, used, _PIECE_BYTES):
                piece = min(_PIECE_BYTES, used - at)
                if len(os.pread(self._fd, piece, at)) < piece:
                    raise OSError(errno.EIO, "the file of tables was truncated")
        self._lock(used)

    def close(self) -> None:
        """Give up the memory; no other thread may be using it."""
        self.locked_bytes = 0
        self._file.close()
        self._map.close()

    def _used_bytes(self) -> int:
        """Return how many bytes of the file are in use, read without the mapping; 0 if that cannot
        be told. OSError.
        """
        used = 0
        for page in range(_META_PAGES):
            meta = os.pread(self._fd, _META.size, page * _PAGE_BYTES)
            if len(meta) < _META.size:
                continue
            magic, version, page_bytes, last = _META.unpack_from(meta)
            if (magic, version) == (_MAGIC, _VERSION):
                used = max(used, (last + 1) * page_bytes)
        return min(used, len(self._map))

    def _populate(self, nbytes: int) -> bool:
        """Load the first bytes of the mapping; False if this kernel cannot do it without a signal,
        or always says "again". OSError.
        """
        for _ in range(_TRIES):
            if _libc.madvise(self._address, nbytes, _POPULATE_READ) == 0:
                return True
            number = ctypes.get_errno()
            # an older kernel, a sandbox
            if number in (errno.EINVAL, errno.ENOSYS, errno.EPERM):
                return False
            if number not in (errno.EINTR, errno.EAGAIN):
                raise OSError(
                    errno.EIO if number == errno.EFAULT else number,
                    "pages of the tables cannot be read",
                )
        return False

    def _lock(self, nbytes: int) -> None:
        if os.getpid() != self._pid:  # a child does not inherit the locks
            self._pid = os.getpid()
            self.locked_bytes = 0
        wanted = min(nbytes, MOST_LOCKED_BYTES)
        try:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        except OSError:  # a sandbox does not say
            self._may_lock = False
            return
        if limit != resource.RLIM_INFINITY and os.geteuid() != 0:
            wanted = min(
                wanted, limit // 2 // _PAGE_BYTES * _PAGE_BYTES
            )  # others of this process need some, too
        if self._may_lock and wanted > self.locked_bytes:
            if _libc.mlock(self._address, wanted) == 0:
                self.locked_bytes = wanted
            else:  # others have used up what this process may lock
                self._may_lock = False
