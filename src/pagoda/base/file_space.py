"""Files by their names, without ever waiting for a pipe; and the space of a file: make its
directory, reserve its blocks, free them again, find those with data.

Called by all that make files; calls the operating system only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from struct import Struct

from pagoda.base.errors import NoRoomError, remedy_of_limit

# a terminal does not become this process's either
_NEVER_WAITS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_KEEP_SIZE = 1
_PUNCH_HOLE = 2
_NO_SUCH_CALL = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EINVAL)
_LARGEST_BLOCK_BYTES = 4096
# Of a call that a signal interrupts. A tmpfs, before Linux 6.10, gives up what it has reserved in a
# call: one for many bytes never ends beside a timer.
_TRIES = 100
_LEAST_PIECE_BYTES = 1 << 20
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
# of ioctl: FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_NOCOW_FL
_GET_FLAGS = 0x80086601
_SET_FLAGS = 0x40086602
_NO_COPY = 0x00800000
_FLAGS = Struct("<q")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_int64,
]
_libc.posix_fallocate.argtypes = [
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_int64,
]


def open_file(path: str | Path, flags: int) -> int:
    """Return a descriptor of a regular file, or with O_DIRECTORY of a directory; a new file is only
    for this user. Raises OSError.

    Whoever can write in its directory can put something else under the name: a pipe, whose opening
    would wait for ever, or a device without an end. That is refused (ENXIO). May be the `opener` of
    `open`.
    """
    fd = os.open(path, flags | _NEVER_WAITS, 0o600)
    if not flags & os.O_DIRECTORY:
        try:
            require_regular(fd, path)
        except OSError:
            os.close(fd)
            raise
    return fd


def occupy_standard_streams() -> None:
    """Open /dev/null for each of the descriptors 0, 1 and 2 that is closed, as a daemon may leave
    them. OSError.

    Otherwise the next file that is opened gets such a number, and what any library prints is
    written into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # the lowest free number, which children inherit, as they would a stream
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def require_regular(fd: int, path: str | Path) -> None:
    """Refuse a descriptor of something else than a regular file. OSError (ENXIO)."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise _no_regular_file(path)


def _no_regular_file(path: str | Path) -> OSError:
    return OSError(errno.ENXIO, "Is not a regular file", os.fspath(path))


@contextlib.contextmanager
def opened(path: str | Path, flags: int, any_kind: bool = False) -> Iterator[int]:
    """Open a file, as `open_file` does, and close it at the end. Raises OSError.

    `any_kind`: also what is no regular file.
    """
    fds: list[int] = []
    try:
        # by built-ins alone: a signal handler that raises runs before all of them or behind them
        fds.extend(map(os.open, (path,), (flags | _NEVER_WAITS,), (0o600,)))
        if not any_kind and not flags & os.O_DIRECTORY:
            require_regular(fds[0], path)
        yield fds[0]
    finally:
        if fds:
            os.close(fds[0])


def open_regular(path: str | Path, mode: str = "r") -> FileIO:
    """Open a regular file to read it ("r"), or to read and write it ("r+"). OSError.

    The file is made by a built-in alone, so it closes itself if a signal handler raises in between.
    What is not a regular file is refused as by `open_file`, but before the opening.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise _no_regular_file(path)
    return FileIO(path, mode)


def read_file(path: str | Path, most_bytes: int) -> bytes:
    """Return the content that a regular file had when it was opened; it may be growing. OSError,
    also if that is more than `most_bytes`, below 2 GiB.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(
                errno.EFBIG,
                f"Has more than {most_bytes:,} bytes",
                os.fspath(path),
            )
        return file.read(size)


def size_in_words(nbytes: int) -> str:
    """Return a number of bytes as people read it, such as "1.5 GiB". Pure."""
    for unit, factor in _UNITS:
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} bytes"


def make_directory(path: Path, mode: int = 0o700) -> None:
    """Make a directory, and its parents for all to read, whatever the umask: others never write
    there. OSError.
    """
    try:
        path.mkdir(mode, exist_ok=True)
    except FileNotFoundError:
        make_directory(path.parent, 0o755)
        path.mkdir(mode, exist_ok=True)


def write_in_place(directory: Path) -> None:
    """Let files that are made in a directory from now on be written in place, where a file system
    would copy (btrfs).

    Otherwise a write into a file whose blocks are all allocated still needs a new block, and fails
    on a full disk. Where that is not possible, nothing changes.
    """
    with (
        contextlib.suppress(OSError),
        opened(directory, os.O_RDONLY | os.O_DIRECTORY) as fd,
    ):
        flags = _FLAGS.unpack(fcntl.ioctl(fd, _GET_FLAGS, bytes(_FLAGS.size)))[0]
        if not flags & _NO_COPY:
            fcntl.ioctl(fd, _SET_FLAGS, _FLAGS.pack(flags | _NO_COPY))


def lengthen(path: Path, nbytes: int) -> None:
    """Make the file at least `nbytes` long; the added part is a hole. Never shortens it, because it
    may be mapped.
    """
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        if os.fstat(fd).st_size < nbytes:
            os.ftruncate(fd, nbytes)


def allocate_range(fd: int, offset: int, nbytes: int) -> bool:
    """Reserve the blocks of a part of a file; return False, and reserve nothing, if the file system
    is full.
    """
    try:
        reserve(fd, offset, nbytes)
    except OSError:
        with contextlib.suppress(OSError):
            punch(fd, offset, nbytes)
        return False
    return True


def reserve_in_place(fd: int, offset: int, nbytes: int) -> bool:
    """Reserve the blocks of a part of a file that others may be writing to; False if there is no
    space for all of them.

    It writes and frees nothing: what was reserved before stays. Where the system has no call for
    it, the blocks are allocated when they are written.
    """
    try:
        _fallocate(fd, 0, offset, nbytes)
    except OSError as error:
        return error.errno in _NO_SUCH_CALL
    return True


def reserve(fd: int, offset: int, nbytes: int) -> None:
    """Reserve blocks, and lengthen the file as far as needed; what the file has stays. OSError.

    Without the call for it (a C library that does not replace it, a sandbox), or if signals always
    interrupt it, a byte of each block is written. No other process may write to this part of the
    file meanwhile.
    """
    end = offset + nbytes
    piece = nbytes
    interrupted = 0
    while offset < end:
        piece = min(piece, end - offset)
        try:
            posix_fallocate(fd, offset, piece)
            offset += piece
        except InterruptedError:
            if interrupted == _TRIES:
                break
            interrupted += 1
            piece = max(piece // 2, _LEAST_PIECE_BYTES)
        except OSError as error:
            if error.errno not in _NO_SUCH_CALL:
                raise
            break
    if offset < end:
        _write_blocks(fd, offset, end - offset)


def posix_fallocate(fd: int, offset: int, nbytes: int) -> None:
    """Reserve blocks in one call of the system: that of `os` begins again for as long as signals
    interrupt it. OSError.
    """
    if number := _libc.posix_fallocate(fd, offset, nbytes):
        raise OSError(number, os.strerror(number))


def _write_blocks(fd: int, offset: int, nbytes: int) -> None:
    step = min(max(os.fstatvfs(fd).f_bsize, 512), _LARGEST_BLOCK_BYTES)
    end = offset + nbytes
    for at in (*range(offset, end, step), end - 1):
        found = os.pread(fd, 1, at)
        if found in (b"", b"\0"):  # a block with another byte exists
            os.pwrite(fd, b"\0", at)


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Free the blocks of a part of a file: it reads as zeros, the length stays. OSError."""
    _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, nbytes)


def reserve_beyond(fd: int, nbytes: int) -> None:
    """Reserve the first bytes of a file without making it longer, so that appends need no more
    space. OSError.
    """
    _fallocate(fd, _KEEP_SIZE, 0, nbytes)


def _fallocate(fd: int, mode: int, offset: int, nbytes: int) -> None:
    number = 0
    for _ in range(_TRIES):
        if _libc.fallocate(fd, mode, offset, nbytes) == 0:
            return
        number = ctypes.get_errno()
        if number != errno.EINTR:
            break
    raise OSError(number, os.strerror(number))


def data_ranges(fd: int, start: int, stop: int) -> list[tuple[int, int]]:
    """Return the ranges with data between two offsets. Blocks that were never written may count as
    a hole.
    """
    found: list[tuple[int, int]] = []
    while start < stop:
        try:
            begin = os.lseek(fd, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # only holes from here on
                raise
            break
        start = min(os.lseek(fd, begin, os.SEEK_HOLE), stop)
        if begin < stop:
            found.append((begin, start))
    return found


def allocate(path: Path, nbytes: int) -> None:
    """Make the file `nbytes` long with all blocks reserved: NoRoomError with the remedy, never a
    later SIGBUS.
    """
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        try:
            reserve(fd, 0, nbytes)
        except OSError as error:
            remedy = remedy_of_limit(
                error,
                "free some space or ask for a smaller size (host_size, disk_size)",
            )
            raise NoRoomError(
                f"no space for the {size_in_words(nbytes)} of {path} ({error.strerror}): {remedy}"
            ) from error
