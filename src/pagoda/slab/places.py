"""Which memory of this process is registered, and where a device sees it."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Places"]


class _Spans(NamedTuple):
    """Ranges [begin, end) of memory, in order and apart; a device sees each `shift` bytes further on."""

    begins: tuple[int, ...]
    ends: tuple[int, ...]
    shifts: tuple[int, ...]


_NONE = _Spans((), (), ())


class Places:
    """Registered pieces, joined where both their addresses and the device's go on.

    Thread-safe. `find` takes no lock: it reads one immutable table, which every change replaces.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin anew, with none: as in a forked child, where nothing is registered."""
        self._lock = threading.Lock()
        self._pieces: dict[int, tuple[int, int]] = {}  # address -> (nbytes, place)
        self._spans = _NONE

    def find(self, address: int, nbytes: int) -> int | None:
        """Where a device sees [address, address + nbytes); None if any of it is not registered, or lies apart there.

        For every slot of every copy. `nbytes` is at least 1.
        """
        spans = self._spans
        at = bisect_right(spans.begins, address) - 1
        if at < 0 or address + nbytes > spans.ends[at]:
            return None
        return address + spans.shifts[at]

    def add(self, address: int, nbytes: int, place: int) -> None:
        """Note that a piece is registered and seen at `place`. ValueError if it overlaps one that is."""
        end, shift = address + nbytes, place - address
        with self._lock:
            begins, ends, shifts = self._spans
            at = bisect_left(begins, address)
            if (at and ends[at - 1] > address) or (at < len(begins) and begins[at] < end):
                raise ValueError(f"some of [{address:#x}, {end:#x}) is registered already")
            first = last = at  # the spans [first, last) go on into the new one, or from it
            if at and (ends[at - 1], shifts[at - 1]) == (address, shift):
                first, address = at - 1, begins[at - 1]
            if at < len(begins) and (begins[at], shifts[at]) == (end, shift):
                last, end = at + 1, ends[at]
            self._pieces[place - shift] = (nbytes, place)
            self._spans = _Spans(
                (*begins[:first], address, *begins[last:]),
                (*ends[:first], end, *ends[last:]),
                (*shifts[:first], shift, *shifts[last:]),
            )

    def remove(self, addresses: Iterable[int]) -> None:
        """Forget the pieces that begin at these addresses; unknown ones are passed over."""
        with self._lock:
            for address in addresses:
                self._pieces.pop(address, None)
            self._spans = _joined(self._pieces)

    @property
    def nbytes(self) -> int:
        """How much is registered."""
        with self._lock:
            return sum(nbytes for nbytes, _ in self._pieces.values())

    def check(self) -> None:
        """Raise AssertionError with the numbers if the table that is read is not what the pieces make."""
        with self._lock:
            pieces, spans = dict(self._pieces), self._spans
        if spans != _joined(pieces):
            raise AssertionError(f"{spans} are not the spans of {pieces}")
        if any(begin >= end for begin, end in zip(spans.begins, spans.ends, strict=True)):
            raise AssertionError(f"an empty span in {spans}")
        if any(end > begin for end, begin in zip(spans.ends, spans.begins[1:], strict=False)):
            raise AssertionError(f"spans overlap in {spans}")


def _joined(pieces: dict[int, tuple[int, int]]) -> _Spans:
    begins, ends, shifts = list[int](), list[int](), list[int]()
    for address in sorted(pieces):
        nbytes, place = pieces[address]
        if ends and (ends[-1], shifts[-1]) == (address, place - address):
            ends[-1] += nbytes
            continue
        begins.append(address)
        ends.append(address + nbytes)
        shifts.append(place - address)
    return _Spans(tuple(begins), tuple(ends), tuple(shifts))
