"""What was cleared, where it outlives the tables: two files of fixed size, written in place, so that a clear needs no
room on the disk.

A slab outlives its tables, and its headers then are all there is to say what is stored. So every line that a clear
draws (see `namespaces`) is on the medium before the clear returns: the next record of the file in force.

| record | content, each with the number of its run and a checksum |
| --- | --- |
| 0 | the head: how many records were written with it, and `floor` |
| n | a namespace and the generation before which it was cleared |

`floor` is the line of every namespace that has no record. When a file is full, the other one comes into force: with a
floor of now, and a record for each namespace that has chunks. All others are cleared by it, which takes nothing: they
have no chunks, and when they come back, their generations are above it. So it never holds more than a record a slot.
"""

from __future__ import annotations

import errno
import logging
import os
import zlib
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import numpy as np

from pagoda.room import allocate

log = logging.getLogger(__name__)

ALL = 2**64 - 1  # a line that takes whatever there is

_FILES = ("clears-0", "clears-1")
_RECORD = Struct("<I32sQ")  # run, namespace, line
_CHECK = Struct("<I")
_BYTES = _RECORD.size + _CHECK.size
_WORDS = _BYTES // 4
_HEAD = Struct("<16sQ8x")  # where other records have a namespace: magic, records written with it
_MAGIC = b"pagoda clears 1\0"
_SPARE = 1024  # records beside those of one namespace a slot


class Lines(NamedTuple):
    """For each namespace the generation before which it was cleared; `floor` for those that are not named."""

    floor: int
    of: Mapping[bytes, int]


class _Run(NamedTuple):
    """The file in force, its number, its floor, and how many records were written with its head."""

    path: Path
    number: int
    floor: int
    base: int


class Clears:
    """The two files of one store. Used by one thread of one process at a time, which the caller sees to."""

    def __init__(self, directory: Path) -> None:
        self._paths = [directory / name for name in _FILES]

    def allocate(self, slots: int) -> None:
        """Give both files the size for so many slots; they never shrink. NoRoomError."""
        for path in self._paths:
            allocate(path, clears_bytes(slots) // 2)

    def read(self) -> Lines | None:
        """What is on the medium; None if nothing was ever written. What cannot be read says that all was cleared."""
        try:
            return self._read()
        except OSError as error:
            log.warning(
                "what was cleared cannot be read (%s): nothing that the slab holds is taken back", error
            )
            return Lines(ALL, {})

    def _read(self) -> Lines | None:
        run = self._in_force()
        if run is None:
            if any(any(path.read_bytes()) for path in self._paths if path.exists()):
                raise OSError(errno.EIO, f"{self._paths[0]} and {self._paths[1]} are damaged")
            return None
        data = run.path.read_bytes()
        numbers = np.frombuffer(data, np.uint32, len(data) // _BYTES * _WORDS).reshape(-1, _WORDS)[1:, 0]
        written = 1 + np.flatnonzero(numbers == run.number)
        found = [_parsed(data[at * _BYTES : (at + 1) * _BYTES], run.number) for at in written.tolist()]
        if found and found[-1] is None:
            found.pop()  # the machine went down while it was written: that clear never returned
        whole = None not in found and written[: len(found)].tolist() == list(range(1, 1 + len(found)))
        if not whole or len(found) < run.base:
            raise OSError(errno.EIO, f"{run.path} is damaged")
        lines: dict[bytes, int] = {}
        for root, line in filter(None, found):
            lines[root] = max(line, lines.get(root, 0))
        return Lines(run.floor, lines)

    def add(self, root: bytes, line: int) -> bool:
        """Write one more line, synced; False if there is no room for it. OSError."""
        run = self._in_force()
        if run is None:
            return False
        with open(run.path, "r+b", buffering=0) as file:
            fd, number = file.fileno(), run.number
            count = os.fstat(fd).st_size // _BYTES
            end = bisect_left(range(count), True, 1 + run.base, key=lambda at: _at(fd, at, number) is None)
            if end == count:
                return False
            _put(fd, end, _sealed(number, root, line))
        return True

    def replace(self, lines: Lines) -> None:
        """Write all lines anew into the file that is not in force, which then is, synced. OSError."""
        old = self._in_force()
        if old is None:  # records of a forgotten run may lie there
            for path in self._paths:
                _blank(path)
        path = self._paths[1] if old is not None and old.path == self._paths[0] else self._paths[0]
        number = old.number + 1 if old is not None else 1
        records = b"".join(_sealed(number, root, line) for root, line in lines.of.items())
        with open(path, "r+b", buffering=0) as file:
            if _BYTES + len(records) > os.fstat(file.fileno()).st_size:
                raise OSError(errno.ENOSPC, f"{len(lines.of)} namespaces are more than {path} has room for")
            _put(file.fileno(), 1, records)
            _put(file.fileno(), 0, _sealed(number, _HEAD.pack(_MAGIC, len(lines.of)), lines.floor))
        if (
            old is not None
        ):  # should the new head be damaged one day, the old file must not pass for the last word
            with open(old.path, "r+b", buffering=0) as file:
                _put(file.fileno(), 0, bytes(_BYTES))

    def _in_force(self) -> _Run | None:
        runs = [run for path in self._paths if (run := _run(path)) is not None]
        return max(runs, key=lambda run: run.number, default=None)


def clears_bytes(slots: int) -> int:
    """The size of both files for so many slots."""
    return len(_FILES) * _BYTES * (slots + _SPARE)


def _run(path: Path) -> _Run | None:
    """What the head of a file says; None if it is not in force."""
    try:
        with open(path, "rb", buffering=0) as file:
            head = file.read(_BYTES)
    except FileNotFoundError:
        return None
    if len(head) < _BYTES:
        return None
    number: int = _RECORD.unpack_from(head)[0]
    record = _parsed(head, number)
    if record is None or _HEAD.unpack(record[0])[0] != _MAGIC:
        return None
    return _Run(path, number, record[1], _HEAD.unpack(record[0])[1])


def _blank(path: Path) -> None:
    with open(path, "r+b", buffering=0) as file:
        _put(file.fileno(), 0, bytes(os.fstat(file.fileno()).st_size))


def _at(fd: int, at: int, number: int) -> tuple[bytes, int] | None:
    return _parsed(os.pread(fd, _BYTES, at * _BYTES), number)


def _parsed(record: bytes, number: int) -> tuple[bytes, int] | None:
    """Namespace and line of a record of that run; None if it is none."""
    own, root, line = _RECORD.unpack_from(record)
    sound = own == number and _CHECK.unpack_from(record, _RECORD.size)[0] == zlib.crc32(
        record[: _RECORD.size]
    )
    return (root, line) if sound else None


def _sealed(number: int, root: bytes, line: int) -> bytes:
    record = _RECORD.pack(number, root, line)
    return record + _CHECK.pack(zlib.crc32(record))


def _put(fd: int, at: int, records: bytes) -> None:
    """Write records in place, synced. OSError."""
    if os.pwrite(fd, records, at * _BYTES) != len(records):
        raise OSError(errno.EIO, "a record was cut short")
    os.fdatasync(fd)
