"""The ghosts of a store: what is remembered of chunks that were evicted, removed or not admitted.

A ghost says when its chunk was last asked for, how often, and why it is not here. The table is
mapped and shared like the columns; a ghost may be lost or torn at any time. A key has eight places;
when all are taken, the ghost that was asked for longest ago is replaced.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pagoda.policy import Ghosts

LAST_STAMP = 1 << 62  # no clock reaches this: a larger stamp is damaged
# columns of a ghost: mark, last use, when it went, hits, reason
GHOST_TYPES = (np.uint64, np.int64, np.int64, np.uint16, np.uint8)
WIDTHS = (8, 8, 8, 2, 1)  # their bytes
WAYS = 8
# rows that are copied at once when a table has grown: other threads run in between
_SPREAD = 1 << 15
# batches of replaced ghosts that wait for the policy to learn from them
_MOST_FORGOTTEN = 1024
_MOST_HITS = np.iinfo(np.uint16).max
# up to this number of rows, a loop is cheaper than array operations, above all with cold CPU caches
_FEW = 4
_NONE = np.empty(0, np.int64)

Rows = NDArray[np.int64]
Marks = NDArray[np.uint64]


class GhostTable:
    """The ghosts of one ledger: views of its mapped file. A key is identified by its mark, its
    first eight bytes.
    """

    def __init__(
        self,
        mark: Marks,
        last_use: Rows,
        went: Rows,
        hits: NDArray[np.uint16],
        reason: NDArray[np.uint8],
    ) -> None:
        self._mark = mark
        self.last_use = last_use
        self._went = went
        self.hits = hits
        self._reason = reason
        self.read_by_policies = Ghosts(last_use, hits)
        # None: nobody keeps them
        self.contexts: NDArray[np.uint16] | None = None
        # one row per place
        self._marks = mark.reshape(-1, WAYS)
        self._uses = last_use.reshape(-1, WAYS)
        self.places = len(mark) // WAYS
        self._places = np.uint64(self.places)
        self._forgotten: deque[
            tuple[NDArray[np.uint32], Rows, NDArray[np.uint16]]
        ] = deque(maxlen=_MOST_FORGOTTEN)

    def remember(
        self,
        marks: Marks,
        last_use: Rows,
        hits: NDArray[np.uint32],
        went: int,
        reason: int,
        contexts: NDArray[np.uint16] | None = None,
    ) -> None:
        """Leave a ghost for each mark. `last_use` and `went` are recency stamps. `contexts`: of
        each; None: unknown.
        """
        if not len(marks):
            return
        rows, found = self._rows(marks)
        # several keys may be given the same place: write the first key of each place, then the rest
        if len(set(rows.tolist())) < len(rows):
            firsts = np.unique(rows, return_index=True)[1]
            rest = np.delete(np.arange(len(rows)), firsts)
            for part in (np.sort(firsts), rest):
                self.remember(
                    marks[part],
                    last_use[part],
                    hits[part],
                    went,
                    reason,
                    None if contexts is None else contexts[part],
                )
            return
        loses = rows[~found & (self.last_use[rows] > 0)]
        if len(loses):
            self._forgotten.append(
                (
                    self.hits[loses].astype(np.uint32),
                    went - self.last_use[loses],
                    self._contexts_of(loses),
                )
            )
        self._mark[rows] = marks
        self.last_use[rows] = np.maximum(np.minimum(last_use, went), 1)
        self._went[rows] = went
        self.hits[rows] = np.minimum(hits, _MOST_HITS)
        self._reason[rows] = reason
        if self.contexts is not None:
            self.contexts[rows] = 0 if contexts is None else contexts

    def recall(self, marks: Marks) -> tuple[NDArray[np.uint32], Rows]:
        """Return hits and last use of each mark; 0 and 0 without a ghost."""
        hits = np.zeros(len(marks), np.uint32)
        last_use = np.zeros(len(marks), np.int64)
        known, rows = self._found(marks)
        if len(known):
            hits[known] = self.hits[rows]
            last_use[known] = self.last_use[rows]
        return hits, last_use

    def recall_contexts(self, marks: Marks) -> NDArray[np.uint16] | None:
        """Return the context of each mark's ghost, 0 without one; None if nobody keeps them."""
        if self.contexts is None:
            return None
        contexts = np.zeros(len(marks), np.uint16)
        known, rows = self._found(marks)
        contexts[known] = self.contexts[rows]
        return contexts

    def _contexts_of(self, rows: Rows) -> NDArray[np.uint16]:
        if self.contexts is None:
            return np.zeros(len(rows), np.uint16)
        found: NDArray[np.uint16] = self.contexts[rows]
        return found

    def forget(self, marks: Marks) -> None:
        """Remove the ghosts of chunks that are back."""
        _, rows = self._found(marks)
        if len(rows):
            self.last_use[rows] = 0

    def find(self, key: bytes) -> tuple[int, int] | None:
        """Return when a chunk was removed (recency stamp) and why (index into the ghost reasons),
        if it has a ghost.
        """
        # the mark as in `marks_of`, without its array operations, which are several times slower
        # for one key
        mark = int.from_bytes(key[:8], sys.byteorder)
        first = mark % len(self._marks) * WAYS
        marks = self._mark[first : first + WAYS].tolist()
        if mark not in marks:
            return None
        for row, other in enumerate(marks, first):
            if other == mark and self.last_use[row] > 0:
                return int(self._went[row]), int(self._reason[row])
        return None

    def forgotten(
        self,
    ) -> Iterator[tuple[NDArray[np.uint32], Rows, NDArray[np.uint16]]]:
        """Take the ghosts that this process replaced since the last call: hits, age (ns) and
        context of each.
        """
        while self._forgotten:
            yield self._forgotten.popleft()

    def sane(self) -> None:
        """Forget ghosts of values that no process writes."""
        self.last_use[(self.last_use < 0) | (self.last_use > LAST_STAMP)] = 0

    def follow(self, smaller: GhostTable) -> None:
        """Keep for this process what the table before this one kept for it: each has the first
        places of the next.
        """
        self._forgotten = smaller._forgotten
        self.contexts = contexts = smaller.contexts
        if contexts is not None:
            rows = len(smaller.last_use)
            while 0 < rows < len(self.last_use):
                contexts[rows : 2 * rows] = contexts[:rows]
                rows *= 2

    def spread(self) -> None:
        """Copy the first half of the places to the second one, with the ghosts that belong
        there.
        """
        half = len(self.last_use) // 2
        for at in range(0, half, _SPREAD):
            part = slice(at, min(at + _SPREAD, half))
            later = slice(part.start + half, part.stop + half)
            for column in (self._mark, self._went, self.hits, self._reason):
                column[later] = column[part]
            self.last_use[later] = np.where(
                self._belong(later), self.last_use[part], 0
            )

    def drop_misplaced(self) -> None:
        """Forget the ghosts that are at other places since the table was spread: policies would
        count them twice.
        """
        for at in range(0, len(self.last_use), _SPREAD):
            part = slice(at, min(at + _SPREAD, len(self.last_use)))
            self.last_use[part][~self._belong(part)] = 0

    def _belong(self, part: slice) -> NDArray[np.bool_]:
        """Return which ghosts of these rows are at the place of their key."""
        places = np.arange(part.start, part.stop, dtype=np.uint64) // np.uint64(
            WAYS
        )
        belong: NDArray[np.bool_] = self._mark[part] % self._places == places
        return belong

    def copy_from(self, other: GhostTable) -> None:
        """Copy the ghosts of another table; where a place has too many, keep those that were asked
        for last.
        """
        there = np.flatnonzero(other.last_use > 0)
        places = (other._mark[there] % self._places).astype(np.int64)
        order = np.lexsort((-other.last_use[there], places))
        there = there[order]
        places = places[order]
        ways = np.arange(len(there)) - np.searchsorted(places, places)
        rows = (places * WAYS + ways)[ways < WAYS]
        there = there[ways < WAYS]
        for own, old in zip(self._all(), other._all(), strict=True):
            own[rows] = old[there]

    def _all(self) -> tuple[NDArray[np.generic], ...]:
        return self._mark, self.last_use, self._went, self.hits, self._reason

    def _found(self, marks: Marks) -> tuple[Rows, Rows]:
        """Return which of the marks have a ghost, and its row."""
        # the most common case is a chunk that was never here; array operations would cost five
        # times as much
        if len(marks) <= _FEW and not any(
            mark in self._marks[mark % len(self._marks)].tolist()
            for mark in marks.tolist()
        ):
            return _NONE, _NONE
        places = (marks % self._places).astype(np.int64)
        same = self._marks[places] == marks[:, None]
        if not same.any():
            return _NONE, _NONE
        same &= self._uses[places] > 0
        known = np.flatnonzero(same.any(axis=1))
        return known, places[known] * WAYS + same[known].argmax(axis=1)

    def _rows(self, marks: Marks) -> tuple[Rows, NDArray[np.bool_]]:
        """Return the row of each mark's ghost, or the row that it would take, and whether it
        exists.
        """
        places = (marks % self._places).astype(np.int64)
        uses = self._uses[places]
        same = (self._marks[places] == marks[:, None]) & (uses > 0)
        found = same.any(axis=1)
        return places * WAYS + np.where(
            found, same.argmax(axis=1), uses.argmin(axis=1)
        ), found


def marks_of(keys: Sequence[bytes]) -> Marks:
    """Return the marks of some keys."""
    return np.frombuffer(b"".join(keys), np.uint64)[::4]
