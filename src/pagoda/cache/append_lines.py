"""Appending lines to one file from several processes: always whole lines, even if a process is
killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from pagoda.base.file_lock import lock_file
from pagoda.base.file_space import opened

# the longest wait for the lock: a stopped process may hold it
_LOCK_SECONDS = 1.0
_TAIL = 1 << 16


def append_lines(
    path: Path, lines: Sequence[bytes]
) -> tuple[int, OSError | None]:
    """Append lines (with their line ends), each in one write; return how many, and the error that
    stopped the rest.

    Cuts off a partial line of a killed process, and leaves none. Safe beside other processes and
    threads that do the same; with no lines, it only repairs the file.
    """
    count = 0
    locked = False
    try:
        # a pipe without a reader must not block the thread
        with opened(
            path, os.O_RDWR | os.O_APPEND | os.O_CREAT, any_kind=True
        ) as fd:
            try:
                locked = stat.S_ISREG(os.fstat(fd).st_mode) and bool(
                    lock_file(fd, _LOCK_SECONDS)
                )
                if locked:
                    _repair(fd)
                for line in lines:
                    _append(fd, line, locked)
                    count += 1
            finally:
                # unlock explicitly: a child that was forked meanwhile also has the descriptor
                if locked:
                    fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        return count, error
    return count, None


def _append(fd: int, line: bytes, locked: bool) -> None:
    begin = os.fstat(fd).st_size
    if os.write(fd, line) < len(line):
        if locked:
            os.ftruncate(fd, begin)
        raise OSError(errno.ENOSPC, "no space for a whole line")


def _repair(fd: int) -> None:
    """Truncate the file after its last end of a line."""
    end = size = os.fstat(fd).st_size
    while end:
        begin = max(0, end - _TAIL)
        at = os.pread(fd, end - begin, begin).rfind(b"\n")
        if at >= 0:
            end = begin + at + 1
            break
        end = begin
    if end < size:
        os.ftruncate(fd, end)
