"""What is remembered of chunks that went, or were not let in: when they were last asked for, how often, and why.

A table of hints beside the columns, mapped and shared as they are: a ghost may be lost or torn at any time. A key has
eight places; when all are taken, the ghost gives way that was asked for longest ago.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagoda.policy import Ghosts

PER_SLOT = 8
WIDTHS = (8, 8, 8, 2, 1)  # bytes of the columns of a ghost
_WAYS = 8
_MOST_FORGOTTEN = 1024  # batches, of those who gave way, that wait to be learnt from
_MOST_HITS = np.iinfo(np.uint16).max
_NONE = np.empty(0, np.int64)

Rows = NDArray[np.int64]
Marks = NDArray[np.uint64]


class Ghost(NamedTuple):
    """When a chunk went (recency stamp) and why (index into the ghost reasons)."""

    went: int
    reason: int


class GhostTable:
    """The ghosts of one ledger: views of its mapped file. A key is told by its mark, the first eight bytes."""

    def __init__(
        self, mark: Marks, last_use: Rows, went: Rows, hits: NDArray[np.uint16], reason: NDArray[np.uint8]
    ) -> None:
        self._mark, self._last_use, self._went, self._hits, self._reason = mark, last_use, went, hits, reason
        self._marks, self._uses = mark.reshape(-1, _WAYS), last_use.reshape(-1, _WAYS)  # a line a place
        self._places = np.uint64(len(mark) // _WAYS)
        self._forgotten: deque[tuple[NDArray[np.uint32], Rows]] = deque(maxlen=_MOST_FORGOTTEN)

    @property
    def columns(self) -> Ghosts:
        """What policies read of them."""
        return Ghosts(self._last_use, self._hits)

    def remember(
        self, marks: Marks, last_use: Rows, hits: NDArray[np.uint32], went: int, reason: int
    ) -> None:
        """Leave a ghost for each mark. `last_use` and `went` are recency stamps."""
        if not len(marks):
            return
        rows, found = self._rows(marks)
        if len(set(rows.tolist())) < len(rows):  # who would share a place: the first of each, then the rest
            firsts = np.unique(rows, return_index=True)[1]
            rest = np.delete(np.arange(len(rows)), firsts)
            for part in (np.sort(firsts), rest):
                self.remember(marks[part], last_use[part], hits[part], went, reason)
            return
        loses = rows[~found & (self._last_use[rows] > 0)]
        if len(loses):
            self._forgotten.append((self._hits[loses].astype(np.uint32), went - self._last_use[loses]))
        self._mark[rows] = marks
        self._last_use[rows] = np.clip(last_use, 1, max(1, went))
        self._went[rows] = went
        self._hits[rows] = np.minimum(hits, _MOST_HITS)
        self._reason[rows] = reason

    def recall(self, marks: Marks) -> tuple[NDArray[np.uint32], Rows]:
        """Hits and last use of each; 0 and 0 of what is not remembered."""
        hits, last_use = np.zeros(len(marks), np.uint32), np.zeros(len(marks), np.int64)
        who, rows = self._found(marks)
        if len(who):
            hits[who], last_use[who] = self._hits[rows], self._last_use[rows]
        return hits, last_use

    def forget(self, marks: Marks) -> None:
        """Remove ghosts whose chunks are back."""
        _, rows = self._found(marks)
        if len(rows):
            self._last_use[rows] = 0

    def find(self, key: bytes) -> Ghost | None:
        """What is remembered of a key, if anything."""
        _, rows = self._found(marks_of([key]))
        return Ghost(int(self._went[rows[0]]), int(self._reason[rows[0]])) if len(rows) else None

    def forgotten(self) -> Iterator[tuple[NDArray[np.uint32], Rows]]:
        """Take those that gave way to others since the last call, in this process: hits and age (ns) of each."""
        while self._forgotten:
            yield self._forgotten.popleft()

    def copy_from(self, other: GhostTable) -> None:
        """Take over the ghosts of another table; where they are too many for a place, those asked for last."""
        there = np.flatnonzero(other._last_use > 0)
        places = (other._mark[there] % self._places).astype(np.int64)
        order = np.lexsort((-other._last_use[there], places))
        there, places = there[order], places[order]
        ways = np.arange(len(there)) - np.searchsorted(places, places)
        rows, there = (places * _WAYS + ways)[ways < _WAYS], there[ways < _WAYS]
        for own, old in zip(self._all(), other._all(), strict=True):
            own[rows] = old[there]

    def _all(self) -> tuple[NDArray[np.generic], ...]:
        return self._mark, self._last_use, self._went, self._hits, self._reason

    def _found(self, marks: Marks) -> tuple[Rows, Rows]:
        """Which of the marks have a ghost, and its row."""
        places = (marks % self._places).astype(np.int64)
        same = self._marks[places] == marks[:, None]
        if not same.any():
            return _NONE, _NONE
        same &= self._uses[places] > 0
        who = np.flatnonzero(same.any(axis=1))
        return who, places[who] * _WAYS + same[who].argmax(axis=1)

    def _rows(self, marks: Marks) -> tuple[Rows, NDArray[np.bool_]]:
        """The row of each mark's ghost, or the one it would take, and whether it is there."""
        places = (marks % self._places).astype(np.int64)
        uses = self._uses[places]
        same = (self._marks[places] == marks[:, None]) & (uses > 0)
        found = same.any(axis=1)
        return places * _WAYS + np.where(found, same.argmax(axis=1), uses.argmin(axis=1)), found


def marks_of(keys: Sequence[bytes]) -> Marks:
    """The marks of some keys."""
    return np.frombuffer(b"".join(keys), np.uint64)[::4]
