"""What was cleared, where it outlives the tables: two files of fixed size, written in place, so
that a clear needs no free space on the disk.

A slab outlives its tables, and then only its headers say what is stored. So every watermark that a
clear sets (see `clears_and_labels`) is on the medium before the clear returns: as the next record
of the active file.

| record | content, each with the number of its run and a checksum |
| --- | --- |
| 0 | the head: the number of records written together with it, and `floor` |
| n | a namespace and the generation before which it was cleared: its watermark |

`floor` is the watermark of every namespace that has no record. When a file is full, the other one
becomes active, with the current generation as its floor and a record for each namespace that has
chunks. This floor also clears all other namespaces, which removes nothing: they have no chunks, and
chunks that they get later have generations above the floor. So a new file starts with at most one
record per slot.

The `state` of the store vouches for the log (`store_state`): the run of the active file, and how
many records it has. If the log is gone, or is older, then it is not known what was cleared, and all
counts as cleared. Run 0 stands for a store that this version or a later one made, and where nothing
was ever cleared: there the log may be lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import numpy as np

from pagoda.base.errors import is_shortage
from pagoda.base.file_space import allocate, open_regular, read_file
from pagoda.base.log import guarded_logger
from pagoda.ledger.store_state import (
    DAMAGED_VOUCHER,
    INCARNATION_BITS,
    Vouched,
    Voucher,
    read_voucher,
    set_voucher,
)

log = guarded_logger("pagoda.ledger.clears")

ALL = 2**64 - 1  # a watermark that clears everything

FILES = ("clears-0", "clears-1")
_RECORD = Struct("<I32sQ")  # run, namespace, watermark
_CHECK = Struct("<I")
_BYTES = _RECORD.size + _CHECK.size
_WORDS = _BYTES // 4
# instead of a namespace: magic, number of records written with it
_HEAD = Struct("<16sQ8x")
_MAGIC = b"pagoda clears 1\0"
_LOG_ID = b"pagoda clears 1\0"
NEVER_CLEARED = Voucher(_LOG_ID, 0, 0)
# no log is that long: one record for each slot
_MOST_BYTES = 1 << 30
_SPARE = 1024  # records in addition to one namespace per slot


class Watermarks(NamedTuple):
    """For each namespace the generation before which it was cleared; `floor` is for all that are
    not in `of`.
    """

    floor: int
    of: Mapping[bytes, int]


class _ActiveFile(NamedTuple):
    """The active file, the number of its run, its floor, and how many records were written with its
    head.
    """

    path: Path
    number: int
    floor: int
    base: int


class ClearLog:
    """The two files of one store. The caller makes sure that only one thread of one process uses it
    at a time.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._paths = [directory / name for name in FILES]

    def allocate(self, slots: int) -> None:
        """Enlarge both files for that many slots; they never shrink. Raises NoRoomError."""
        for path in self._paths:
            allocate(path, _BYTES * (slots + _SPARE))

    def read(self) -> Watermarks | None:
        """Read what is on the medium; None if nothing was ever written. If that is lost, all counts
        as cleared.

        OSError if this process has no files or memory left to read it.
        """
        try:
            return self._read()
        except OSError as error:
            if is_shortage(error):
                raise
            if self.was_never_used():
                return Watermarks(0, {})
            log.warning(
                "cannot read what was cleared (%s): no chunk of the slab is taken back",
                error,
            )
            return Watermarks(ALL, {})

    def was_never_used(self) -> bool:
        """Whether `state` vouches that nothing was ever cleared here."""
        with contextlib.suppress(OSError):
            vouched = read_voucher(self._directory, Vouched.CLEARS)
            return vouched is not None and not vouched.first
        return False

    def vouch(self, begun: bool) -> None:
        """Let `state` vouch for what is in the log now, synced. OSError, also if the log cannot be
        read.

        `begun`: `replace` has just begun it, so what `state` vouched for before does not count.
        """
        found = self._records(compares=not begun)
        if found is not None:
            run, records = found
            set_voucher(
                self._directory,
                Vouched.CLEARS,
                Voucher(_LOG_ID, run.number, len(records)),
            )

    def is_there(self) -> bool:
        """Whether the log is whole, and has what `state` vouches for."""
        with contextlib.suppress(OSError):
            return self._records() is not None
        return False

    def _read(self) -> Watermarks | None:
        found = self._records()
        if found is None:
            return None
        run, records = found
        watermarks: dict[bytes, int] = {}
        for root, watermark in records:
            watermarks[root] = max(watermark, watermarks.get(root, 0))
        return Watermarks(run.floor, watermarks)

    def _records(
        self, compares: bool = True
    ) -> tuple[_ActiveFile, list[tuple[bytes, int]]] | None:
        """Return the active file and its records; None if nothing was ever written. OSError if
        something is lost.

        `compares`: with what `state` vouches for.
        """
        vouched = (
            read_voucher(self._directory, Vouched.CLEARS) if compares else None
        )
        run = self._in_force()
        if run is None:
            if vouched is not None and vouched.first:
                raise OSError(
                    errno.EIO, f"{self._paths[0]} and {self._paths[1]} are lost"
                )
            if any(
                any(read_file(path, _MOST_BYTES))
                for path in self._paths
                if path.exists()
            ):
                raise OSError(
                    errno.EIO,
                    f"{self._paths[0]} and {self._paths[1]} are damaged",
                )
            return None
        data = read_file(run.path, _MOST_BYTES)
        numbers = np.frombuffer(
            data, np.uint32, len(data) // _BYTES * _WORDS
        ).reshape(-1, _WORDS)[1:, 0]
        written = 1 + np.flatnonzero(numbers == run.number)
        found = [
            _parsed(data[at * _BYTES : (at + 1) * _BYTES], run.number)
            for at in written.tolist()
        ]
        if found and found[-1] is None:
            # the last record is torn: the machine went down during the write, so that clear never
            # returned
            found.pop()
        whole = None not in found and written[: len(found)].tolist() == list(
            range(1, 1 + len(found))
        )
        if not whole or len(found) < run.base:
            raise OSError(errno.EIO, f"{run.path} is damaged")
        if vouched is not None and (run.number, len(found)) < (
            vouched.first,
            vouched.second,
        ):
            raise OSError(errno.EIO, f"{run.path} is older than the store")
        return run, list(filter(None, found))

    def add(self, root: bytes, watermark: int) -> bool:
        """Append one more watermark, synced; False if the file is full. OSError."""
        run = self._in_force()
        if run is None:
            return False
        with open_regular(run.path, "r+") as file:
            fd = file.fileno()
            number = run.number
            count = os.fstat(fd).st_size // _BYTES
            end = bisect_left(
                range(count),
                True,
                1 + run.base,
                key=lambda at: (
                    _parsed(os.pread(fd, _BYTES, at * _BYTES), number) is None
                ),
            )
            if end == count:
                return False
            _put(fd, end, _sealed(number, root, watermark))
        return True

    def replace(self, watermarks: Watermarks) -> None:
        """Write all watermarks into the inactive file, synced, which makes it the active one.
        OSError.
        """
        old = self._in_force()
        # the files may have records from before their heads were lost
        if old is None:
            for path in self._paths:
                with open_regular(path, "r+") as file:
                    fd = file.fileno()
                    _put(fd, 0, bytes(os.fstat(fd).st_size))
        path = (
            self._paths[1]
            if old is not None and old.path == self._paths[0]
            else self._paths[0]
        )
        number = 1 + max(
            old.number if old is not None else 0, self._vouched_run()
        )
        records = b"".join(
            _sealed(number, root, watermark)
            for root, watermark in watermarks.of.items()
        )
        with open_regular(path, "r+") as file:
            fd = file.fileno()
            if _BYTES + len(records) > os.fstat(fd).st_size:
                raise OSError(
                    errno.ENOSPC,
                    f"{len(watermarks.of)} namespaces do not fit into {path}",
                )
            _put(fd, 1, records)
            _put(
                fd,
                0,
                _sealed(
                    number,
                    _HEAD.pack(_MAGIC, len(watermarks.of)),
                    watermarks.floor,
                ),
            )
        # invalidated: if the new head is damaged one day, the old file must not count as the latest
        if old is not None:
            with open_regular(old.path, "r+") as file:
                fd = file.fileno()
                _put(fd, 0, bytes(_BYTES))

    def _vouched_run(self) -> int:
        vouched = read_voucher(self._directory, Vouched.CLEARS)
        return (
            0 if vouched is None or vouched == DAMAGED_VOUCHER else vouched.first
        )

    def last_incarnation(self) -> int:
        """Return the last incarnation of the tables that the log knows of; 0 if it cannot be
        read.
        """
        with contextlib.suppress(OSError):
            found = self._records()
            if found is not None:
                run, records = found
                return (
                    max([run.floor, *(watermark for _, watermark in records)])
                    >> INCARNATION_BITS
                )
        return 0

    def _in_force(self) -> _ActiveFile | None:
        runs = [
            run for path in self._paths if (run := _active_file(path)) is not None
        ]
        return max(runs, key=lambda run: run.number, default=None)


def _active_file(path: Path) -> _ActiveFile | None:
    """Return what the head of a file says; None if the file has no valid head."""
    try:
        with open_regular(path) as file:
            head = file.read(_BYTES)
    except FileNotFoundError:
        return None
    if len(head) < _BYTES:
        return None
    number: int = _RECORD.unpack_from(head)[0]
    record = _parsed(head, number)
    if record is None or _HEAD.unpack(record[0])[0] != _MAGIC:
        return None
    return _ActiveFile(path, number, record[1], _HEAD.unpack(record[0])[1])


def _parsed(record: bytes, number: int) -> tuple[bytes, int] | None:
    """Return namespace and watermark of a record; None if it is not a valid record of that run."""
    own, root, watermark = _RECORD.unpack_from(record)
    sound = own == number and record[:_BYTES] == _sealed(own, root, watermark)
    return (root, watermark) if sound else None


def _sealed(number: int, root: bytes, watermark: int) -> bytes:
    record = _RECORD.pack(number, root, watermark)
    return record + _CHECK.pack(zlib.crc32(record))


def _put(fd: int, at: int, records: bytes) -> None:
    """Write records in place, synced. OSError."""
    if os.pwrite(fd, records, at * _BYTES) != len(records):
        raise OSError(errno.EIO, "a record was cut short")
    os.fdatasync(fd)
