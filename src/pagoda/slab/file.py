"""A slab in a file: reads and writes slots with preadv/pwritev, past the page cache if the
filesystem can.

Called by `DiskTier`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pagoda.base.errors import StoreError
from pagoda.base.fork import per_process
from pagoda.base.log import guarded_logger
from pagoda.slab.memory import (
    PAGE_BYTES,
    Bytes,
    aligned,
    begin_on_pages,
    open_slab,
)

__all__ = ["FileSlab", "aligned"]

_IOV_MAX = 1024
# the consecutive calls without a whole page transferred before an error is raised
_MAX_STALLS = 16
# what a file system says to direct I/O that it cannot do
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
# what a sandbox says
_NO_SUCH_CALL = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)

log = guarded_logger("pagoda")

_Move = Callable[[Sequence[memoryview], int], int]


class FileSlab:
    """`slots` slots of `slot_bytes` bytes (a header page and the payload) in an existing file.

    `direct` None: O_DIRECT as long as it works; True: StoreError if an aligned read does not work
    with it; False: buffered. Under O_DIRECT every buffer must begin on a page (4096) and have whole
    pages, else ValueError.

    Thread-safe: all methods (positioned I/O, no shared offset); the ledger prevents two writers of
    one slot. Every failed I/O is an OSError: EIO at the end of the file, EBADF after close().
    """

    def __init__(
        self, path: Path, slots: int, slot_bytes: int, direct: bool | None = None
    ) -> None:
        if slots < 1 or slot_bytes < PAGE_BYTES or slot_bytes % PAGE_BYTES:
            raise ValueError(
                f"need slots >= 1 and slot_bytes in whole pages, got {slots} and {slot_bytes}"
            )
        self.path = path
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._fd, self.direct = _open(path, slots * slot_bytes, direct)
        self._may_change = direct is None
        self._vectors = _has_vectors(self._fd)
        self._closed = False

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    @per_process
    def _calls(self) -> set[object]:
        """The calls of this process that may be using _fd now."""
        return set()

    def read(self, slot: int, buffers: Sequence[Bytes], slots: int = 1) -> None:
        """Fill `buffers` in order from the start of `slot`; OSError if not all bytes were read.

        With `slots` above 1 they are for adjacent slots, and fill all but the last.
        """
        views = self._views(slot, buffers, slots)
        offset = slot * self.slot_bytes
        with self._open_fd() as fd:
            self._move_all(self._readv, views, offset)
            # the caller has the bytes, so the page cache need not keep them
            if not self.direct:
                _drop_page_cache(fd, offset, sum(view.nbytes for view in views))

    def write(self, slot: int, buffers: Sequence[Bytes], slots: int = 1) -> None:
        """Write `buffers` in order from the start of `slot`; an OSError leaves the slot torn.

        With `slots` above 1 they are for adjacent slots, and fill all but the last.
        """
        views = self._views(slot, buffers, slots)
        with self._open_fd():
            self._move_all(self._writev, views, slot * self.slot_bytes)

    def read_headers(self, first: int, count: int) -> list[Bytes]:
        """Return the first page of each slot in [first, first + count); OSError if any of them
        cannot be read.
        """
        headers = list(
            aligned(max(0, count) * PAGE_BYTES).reshape(-1, PAGE_BYTES)
        )
        for slot, header in enumerate(headers, first):
            self.read(slot, [header])
        return headers

    def sync(self) -> None:
        """Return when all written bytes are on the medium (fdatasync)."""
        with self._open_fd() as fd:
            os.fdatasync(fd)
            if not self.direct:
                _drop_page_cache(fd, 0, 0)  # the kernel drops only clean pages

    def close(self) -> None:
        """Refuse new calls and close the file when the last running call ends; idempotent, never
        waits.
        """
        self._closed = True
        self._close_if_idle()

    @contextlib.contextmanager
    def _open_fd(self) -> Iterator[int]:
        # A descriptor that is closed during a call could already belong to another file, which
        # would then be written to.
        call = object()
        calls = self._calls
        try:
            # add first, then check: `close` does both in the reverse order
            calls.add(call)
            if self._closed:
                raise OSError(errno.EBADF, "this slab is closed", str(self.path))
            yield self._fd
        finally:
            # a built-in: no signal handler's exception can come before it
            calls.discard(call)
            if self._closed:
                self._close_if_idle()

    def _close_if_idle(self) -> None:
        with self._lock:
            if not self._calls and self._fd >= 0:
                fd = self._fd
                self._fd = -1
                os.close(fd)

    def _views(
        self, slot: int, buffers: Sequence[Bytes], slots: int = 1
    ) -> list[memoryview]:
        if not 0 <= slot <= self.slots - slots:
            raise ValueError(f"slot {slot} is outside [0, {self.slots})")
        used = [buffer for buffer in buffers if buffer.nbytes]
        total = sum(buffer.nbytes for buffer in used)
        if total > self.slot_bytes * slots:
            raise ValueError(
                f"{total} bytes do not fit a slot of {self.slot_bytes}"
            )
        if self.direct and not (
            begin_on_pages(used)
            and all(buffer.nbytes % PAGE_BYTES == 0 for buffer in used)
        ):
            raise ValueError(
                f"O_DIRECT needs whole pages of {PAGE_BYTES} bytes that begin on a page"
            )
        return [buffer.data.cast("B") for buffer in used]

    def _move_all(
        self, move: _Move, views: Sequence[memoryview], offset: int
    ) -> None:
        """Repeat `move` until all of `views` is transferred.

        Invariant: [0, done) is transferred, and done is in whole pages under O_DIRECT: a page in
        which a short call ended is transferred again.
        """
        total = sum(view.nbytes for view in views)
        done = stalls = 0
        left = views
        while done < total:
            try:
                moved = move(left[:_IOV_MAX], offset + done)
            except OSError as error:
                if error.errno not in _NOT_DIRECT or not self._leave_direct(
                    error
                ):
                    raise
                continue
            if moved <= 0:
                raise OSError(
                    errno.EIO,
                    f"{total - done} bytes missing at {offset + done}",
                    str(self.path),
                )
            reached = done + moved
            if self.direct and reached < total:
                reached -= reached % PAGE_BYTES
            stalls = stalls + 1 if reached == done else 0
            if stalls > _MAX_STALLS:
                raise OSError(
                    errno.EIO, f"no progress at {offset + done}", str(self.path)
                )
            done = reached
            if done < total:
                left = _skip_bytes(views, done)

    def _leave_direct(self, error: OSError) -> bool:
        """Continue through the page cache: a first read said nothing about this I/O. False if that
        changes nothing.
        """
        if not self.direct or not self._may_change:
            return False
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False
        log.warning(
            "%s: direct I/O failed (%s), so the page cache is used",
            self.path,
            error.strerror,
        )
        return True

    # pagoda.testing.FaultySlab overrides the two calls below.
    def _readv(self, views: Sequence[memoryview], offset: int) -> int:
        if self._vectors:
            return os.preadv(self._fd, views, offset)
        found = os.pread(self._fd, views[0].nbytes, offset)
        views[0][: len(found)] = found
        return len(found)

    def _writev(self, views: Sequence[memoryview], offset: int) -> int:
        return (
            os.pwritev(self._fd, views, offset)
            if self._vectors
            else os.pwrite(self._fd, views[0], offset)
        )


def _skip_bytes(views: Sequence[memoryview], skip: int) -> list[memoryview]:
    """Return `views` without their first `skip` bytes."""
    for index, view in enumerate(views):
        if skip < view.nbytes:
            return [view[skip:], *views[index + 1 :]]
        skip -= view.nbytes
    return []


def _drop_page_cache(fd: int, offset: int, length: int) -> None:
    """Advise the kernel to drop clean pages of the range (length 0: to the end) from the page
    cache.
    """
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def _open(path: Path, nbytes: int, direct: bool | None) -> tuple[int, bool]:
    """Return a descriptor of the file, and whether it was opened with O_DIRECT."""
    use_direct = direct is not False and _can_direct(path)
    if direct and not use_direct:
        raise StoreError(
            f"the filesystem of {path} cannot do O_DIRECT: set disk_direct to None or False"
        )
    return open_slab(path, nbytes, os.O_DIRECT if use_direct else 0), use_direct


def _has_vectors(fd: int) -> bool:
    """Whether the system has calls for several buffers: an old sandbox refuses calls that it does
    not know.

    Moves no byte.
    """
    try:
        os.preadv(fd, [bytearray()], 0)
        os.pwritev(fd, [b""], 0)
    except OSError as error:
        return error.errno not in _NO_SUCH_CALL
    return True


def _can_direct(path: Path) -> bool:
    """Whether the file can be opened and read with O_DIRECT: some filesystems accept the flag and
    refuse the I/O.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        try:
            os.preadv(fd, [aligned(PAGE_BYTES).data], 0)
        finally:
            os.close(fd)
    except OSError:
        return False
    return True
