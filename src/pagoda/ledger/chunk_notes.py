"""Notes that an engine keeps with its chunks: what is reported of a chunk to routers of requests,
also after a restart.

A file beside a ledger with one page per slot. It is read and written like any file and never
mapped; a full file system costs only notes. A note counts only under the key that is published for
its slot, and only with the right checksum. Engines write notes (`pagoda.kv_events`). Nothing else
depends on them: a chunk without a note is served like any other. When a chunk is cleared or
removed, its note is removed too.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from zlib import crc32

from pagoda.base.file_space import opened
from pagoda.ledger.columns import KEY_BYTES
from pagoda.ledger.store_state import NOTES

_PAGE_BYTES = 4096
_HEAD = Struct(f"<{KEY_BYTES}sII")  # key, length and checksum of the note
MOST_NOTE_BYTES = _PAGE_BYTES - _HEAD.size


class ChunkNotes:
    """The notes of one store. Thread-safe and fork-safe: it keeps no file open."""

    def __init__(self, directory: Path) -> None:
        """Prepare for the store in `directory`; the first note makes the file."""
        self._path = directory / NOTES

    def exist(self) -> bool:
        """Whether there may be any notes."""
        return self._path.exists()

    def write(self, notes: Iterable[tuple[int, bytes, bytes]]) -> None:
        """Write notes, each as slot, key and note of at most MOST_NOTE_BYTES. OSError if one cannot
        be written.
        """
        with opened(self._path, os.O_WRONLY | os.O_CREAT) as file:
            for slot, key, note in notes:
                page = _HEAD.pack(key, len(note), crc32(note)) + note
                if os.pwrite(file, page, slot * _PAGE_BYTES) < len(page):
                    raise OSError(
                        errno.ENOSPC, "no space for a whole note", str(self._path)
                    )

    def read(self, places: Sequence[tuple[int, bytes]]) -> list[bytes | None]:
        """Return the notes of these slots, each None unless it is that key's. OSError.

        Consecutive slots are read by one call, since each call releases the interpreter lock and
        takes it again.
        """
        notes = list[bytes | None]()
        try:
            with opened(self._path, os.O_RDONLY) as file:
                while (at := len(notes)) < len(places):
                    first = places[at][0]
                    end = at + 1
                    while (
                        end < len(places) and places[end][0] == first + end - at
                    ):
                        end += 1
                    pages = os.pread(
                        file, (end - at) * _PAGE_BYTES, first * _PAGE_BYTES
                    )
                    notes += [
                        _note(pages, (slot - first) * _PAGE_BYTES, key)
                        for slot, key in places[at:end]
                    ]
        except FileNotFoundError:
            return [None] * len(places)
        return notes

    def erase(self, places: Iterable[tuple[int, bytes]]) -> None:
        """Erase the note in each of these slots if it is of the key given. Raises OSError."""
        with suppress(FileNotFoundError), opened(self._path, os.O_RDWR) as file:
            for slot, key in places:
                if os.pread(file, KEY_BYTES, slot * _PAGE_BYTES) == key:
                    os.pwrite(file, bytes(_PAGE_BYTES), slot * _PAGE_BYTES)

    def places(self) -> Iterator[tuple[int, bytes]]:
        """Walk the slots that have a note, with the key of each. OSError."""
        with suppress(FileNotFoundError), opened(self._path, os.O_RDONLY) as file:
            at = 0
            while True:
                try:
                    at = (
                        os.lseek(file, at, os.SEEK_DATA)
                        // _PAGE_BYTES
                        * _PAGE_BYTES
                    )
                except OSError as error:
                    if error.errno == errno.ENXIO:  # no data after this offset
                        return
                    raise
                if any(key := os.pread(file, KEY_BYTES, at)):
                    yield at // _PAGE_BYTES, key
                at += _PAGE_BYTES


def _note(pages: bytes, begin: int, key: bytes) -> bytes | None:
    if len(pages) < begin + _HEAD.size:
        return None
    written, length, checksum = _HEAD.unpack_from(pages, begin)
    begin += _HEAD.size
    note = pages[begin : begin + length]
    whole = written == key and len(note) == length <= MOST_NOTE_BYTES
    return note if whole and crc32(note) == checksum else None
