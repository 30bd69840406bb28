"""The ghosts of a store in memory that grows as it fills, in a file of their own, of which only the
part in use has pages.

The file is as long as it can ever be. Its first page says how many places are in use; behind it are
the columns of the ghosts, each for all places that there may be. The number of places doubles as
slots get pages, so that there are never fewer places than such slots. In this order, under the lock
of the root, off the request path:

    the next places of each column are allocated; without space for all of them none is
    the places in use are copied there: a key of place i has its next place at i or behind all of
    them, so nothing is lost
    the new number is published, and nothing is touched beyond the places that it says
    ghosts that are at two places now are forgotten at the wrong one

Processes take no lock to read it. One that looks up ghosts among the old places meanwhile disagrees
with the others about half of the keys: a ghost may be lost at any time.

A version that knows no such file finds the columns too short. It refuses the store while others
have it open, and replaces it after that: it would touch ghosts that have no pages. So a store whose
columns are small keeps its ghosts in them, as before.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pagoda.base.errors import NoRoomError
from pagoda.base.file_space import (
    allocate_range,
    lengthen,
    opened,
    punch,
    size_in_words,
)
from pagoda.ledger.ghost_table import GHOST_TYPES, WAYS, WIDTHS, GhostTable

_PAGE_BYTES = 4096


class GhostPages:
    """The file of one store, mapped. Thread-safe, apart from `grow`."""

    def __init__(self, path: Path, first: int, slots: int) -> None:
        """Map a file that `make` made for as many slots. OSError."""
        self._path = path
        self._first = first
        self.most = most_places(first, slots)
        with opened(path, os.O_RDWR) as fd:
            self._inode = os.fstat(fd).st_ino
            self._map = mmap.mmap(fd, ghost_bytes(self.most))
        # what the file says: one word, which any process may have damaged
        self.said = memoryview(self._map)[:8].cast("Q")
        # the first ones have had pages since the file was made
        self._places = first

    @property
    def places(self) -> int:
        """How many places are in use; all of them have pages."""
        said = self.said[0]
        if said != self._places and self._is_sound(said):
            self._places = said
        return self._places

    def table(self, before: GhostTable | None = None) -> GhostTable:
        """Return the ghosts of the places in use: `before`, if it has as many."""
        places = self.places
        if before is not None and before.places == places:
            return before
        table = self._view(places)
        if before is not None:
            table.follow(before)
        return table

    def more_bytes(self, places: int) -> int:
        """Return the bytes that must be allocated to have that many places in use."""
        known = self.places
        return ghost_bytes(doubled(known, self.most, places)) - ghost_bytes(known)

    def grow(self, places: int) -> bool:
        """Double the places in use until there are that many; False without space for them. Under
        the lock of the root.

        They stay as they are if the file was removed, or is damaged: its ghosts are hints.
        """
        while (known := self.places) < min(places, self.most):
            if not self._is_sound(self.said[0]):
                return True
            if not self._allocate(2 * known):
                return False
            table = self._view(2 * known)
            table.spread()
            self._places = 2 * known
            self.said[0] = self._places
            table.drop_misplaced()
        return True

    def _view(self, places: int) -> GhostTable:
        count = places * WAYS
        offsets = _offsets(self.most)
        return GhostTable(
            *(
                np.frombuffer(self._map, dtype, count, offset)
                for dtype, offset in zip(GHOST_TYPES, offsets, strict=True)
            )
        )

    def _allocate(self, places: int) -> bool:
        """Allocate that many places, twice those in use; False, and no more than before, without
        space.
        """
        got: list[tuple[int, int]] = []
        with opened(self._path, os.O_RDWR) as fd:
            for start, stop in _pages(self.most, self.places, places):
                if not allocate_range(fd, start, stop - start):
                    for begin, end in got:
                        punch(fd, begin, end - begin)
                    return False
                got.append((start, stop))
        return True

    def _is_sound(self, places: int) -> bool:
        """Whether that many places may be in use, and the file has pages for them."""
        doublings, rest = divmod(places, self._first)
        if rest or doublings.bit_count() != 1 or places > self.most:
            return False
        try:
            status = os.stat(self._path)
        except OSError:
            return False
        return (
            status.st_ino == self._inode
            and status.st_blocks * 512 >= ghost_bytes(places)
        )


def make(path: Path, first: int, slots: int, places: int) -> None:
    """Make the file of a store without ghosts, with at least that many places in use, or replace
    it. NoRoomError.

    Args:
        path: of the file.
        first: `first_places` of the store.
        slots: its slots.
        places: how many places to begin with, if these are more.
    """
    most = most_places(first, slots)
    begun = doubled(first, most, places)
    # a process may be killed before the pages are there
    fresh = path.with_suffix(".new")
    try:
        fresh.unlink(missing_ok=True)
        lengthen(fresh, ghost_bytes(most))
        with opened(fresh, os.O_RDWR) as fd:
            for start, stop in ((0, _PAGE_BYTES), *_pages(most, 0, begun)):
                if not allocate_range(fd, start, stop - start):
                    raise NoRoomError(
                        f"no space for the {size_in_words(ghost_bytes(begun))} of {path}: free "
                        "some space or ask for a smaller size (host_size, disk_size)"
                    )
            os.pwrite(fd, begun.to_bytes(8, "little"), 0)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def first_places(slots: int, least: int) -> int:
    """Return with how many places a table begins that will have one for each slot: `least`, or a
    few more, or one for each slot.
    """
    doublings = max(0, (slots // least).bit_length() - 1)
    return -(-slots >> doublings)


def most_places(first: int, slots: int) -> int:
    """Return how many places there are in the end."""
    return doubled(first, slots, slots)


def doubled(places: int, most: int, wanted: int) -> int:
    """Return that number, doubled until it is as many as are wanted, or the most."""
    while places < min(wanted, most):
        places *= 2
    return places


def ghost_bytes(places: int) -> int:
    """Return the bytes that the file takes while that many places are in use; of the most, its
    length.
    """
    return _PAGE_BYTES + sum(_rounded(width * WAYS * places) for width in WIDTHS)


def _offsets(most: int) -> Iterator[int]:
    """Return where each column begins."""
    at = _PAGE_BYTES
    for width in WIDTHS:
        yield at
        at += _rounded(width * WAYS * most)


def _pages(most: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Return the pages of each column for the places from `start` to `stop`, without those that the
    places before them have.
    """
    for width, offset in zip(WIDTHS, _offsets(most), strict=True):
        begin = offset + _rounded(width * WAYS * start)
        end = offset + _rounded(width * WAYS * stop)
        if begin < end:
            yield begin, end


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
