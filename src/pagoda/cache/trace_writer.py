"""Lines that several processes append to one file: whole ones, whoever is killed and whenever."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["append_lines"]

_LOCK_SECONDS, _PAUSE_SECONDS = 1.0, 0.005  # somebody who stands still inside is not waited for longer
_TAIL = 1 << 16


def append_lines(path: Path, lines: Sequence[bytes]) -> tuple[int, OSError | None]:
    """Append lines (with their ends), each in one write; returns how many, and what kept the others out.

    What a killed process left of a line is cut off, and no half line is left here. Safe beside other processes and
    threads that do the same; with no lines, it only tidies up.
    """
    count = 0
    try:
        # a pipe that nobody reads must not hold the thread up
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as trouble:
        return count, trouble
    alone = False
    try:
        alone = stat.S_ISREG(os.fstat(fd).st_mode) and _locked(fd)
        if alone:
            _mend(fd)
        for line in lines:
            _append(fd, line, alone)
            count += 1
    except OSError as trouble:
        return count, trouble
    finally:
        if alone:  # a child that was forked meanwhile has the descriptor too
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
    return count, None


def _append(fd: int, line: bytes, alone: bool) -> None:
    begin = os.fstat(fd).st_size
    if os.write(fd, line) < len(line):
        if alone:
            os.ftruncate(fd, begin)
        raise OSError(errno.ENOSPC, "no room for a whole line")


def _locked(fd: int) -> bool:
    """Get the file for this descriptor alone; False where that takes too long, or the file system knows no locks."""
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(_PAUSE_SECONDS)
        except OSError:
            return False
        else:
            return True


def _mend(fd: int) -> None:
    """Cut off what follows the last end of a line."""
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
