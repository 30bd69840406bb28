"""Which slots of a slab in memory are being read or written, so that no process takes their pages
away.

If a process accesses (even only reads) a mapped page that was taken away, the system allocates the
page again; if the file system is full by then, the access is a SIGBUS. So every view of a slot is
guarded, and the pages of a slot are taken in this order: the slot is bare in the tables and
published as bare; no process has a view of it; the hole is punched. A process that wants a view
first marks the slot and then reads what is published: so one of the two processes sees the other
(as with hazard pointers).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagoda.ledger.columns import BARE, Columns, map_file
from pagoda.ledger.locks import Gate, barrier
from pagoda.ledger.store_state import GUARD_BYTES, GUARD_WORDS

_BUCKETS = 64  # slots that are equal modulo this number share a bit of a word
# shared by all calls that find no other word free; cleared when the last of them has ended
_SHARED = GUARD_WORDS - 1
_POLL_SECONDS = 0.002

Bytes = NDArray[np.uint8]


class _Guard(weakref.ref[Bytes]):
    """A weak reference to the base of one call's views. `word`: where their slots are marked, -1 if
    nowhere.
    """

    __slots__ = ("word",)
    word: int


class OwnMarks:
    """The marks of one process: without a member at first."""

    def __init__(self) -> None:
        """Begin in a private row, without a mark."""
        self.joined = False
        self.row = memoryview(bytearray(GUARD_WORDS * 8)).cast("Q")
        self.free = list(range(_SHARED))
        self.sharing = 0  # number of guards in the shared word
        self.lock = threading.RLock()
        self.fence = threading.Lock()
        self.out: dict[int, _Guard] = {}  # by id
        self.ended: deque[weakref.ref[Bytes]] = deque()


class PageGuards:
    """Which slots each process has views of: one mapped row of words per member. Thread-safe.

    Each call marks the slots of its views in a separate word. A built-in function records the end
    of a view, since an exception that a signal handler raises in a finalizer written in Python is
    lost. The next call that lends a view or writes, in any thread, clears the mark.
    """

    def __init__(
        self, path: Path, columns: Columns, join: Callable[[], object]
    ) -> None:
        """Map the file. `join` makes this process a member, if it is not yet one, by calling
        `become`.
        """
        self._rows = memoryview(map_file(path, GUARD_BYTES)).cast("Q")
        self._generation = columns.generation.data
        # weak, or a closed store would keep its mapped files
        self._join = weakref.WeakMethod(join)
        # a fork replaces it in the child: the parent keeps its guards
        self.marks = OwnMarks()

    def become(self, row: int, gate: Gate) -> None:
        """Become the member of this row, inside that gate."""
        with self.marks.lock:
            own = self._rows[row * GUARD_WORDS : (row + 1) * GUARD_WORDS]
            # the row is the parent's; no signal handler runs between this line and the next
            if gate.forked:
                return
            own[:] = self.marks.row
            self.marks.row = own
            self.marks.joined = True

    def leave(self) -> None:
        """Use a private row from now on: another member may soon get the old one, and views may
        outlive the store.
        """
        with self.marks.lock:
            own = memoryview(bytearray(GUARD_WORDS * 8)).cast("Q")
            own[:] = self.marks.row
            self.marks.row = own

    def lend(self, slots: Sequence[int], base: Bytes) -> list[int]:
        """Guard the pages of slots for as long as `base` lives; return those that have no pages."""
        # a forked child that uses slots which its parent found
        if not self.marks.joined:
            join = self._join()
            if join is not None:
                join()
        if self.marks.ended:
            self.clear_ended()
        mask = 0
        for slot in slots:
            mask |= 1 << slot % _BUCKETS
        loan = _Guard(base, self.marks.ended.append)
        loan.word = -1
        with self.marks.lock:
            self.marks.out[id(loan)] = loan
            # No signal handler runs between two statements without calls.
            if self.marks.free:
                loan.word = self.marks.free[-1]
                self.marks.row[loan.word] = mask
                self.marks.free.pop()
            else:
                loan.word = _SHARED
                self.marks.row[_SHARED] |= mask
                self.marks.sharing += 1
        # taking and releasing a lock is a barrier, see `locks.barrier`
        with self.marks.fence:
            pass
        generation = self._generation
        return [slot for slot in slots if generation[slot] & BARE]

    def clear_ended(self) -> None:
        """Clear the marks of views that have ended. Whatever interrupts this, the next call
        continues it.
        """
        if not self.marks.ended:
            return
        with self.marks.lock:
            ended = self.marks.ended
            free = self.marks.free
            out = self.marks.out
            while ended:
                loan = ended[0]
                assert isinstance(loan, _Guard)
                word = loan.word
                loan.word = -1
                if word == _SHARED:
                    self.marks.sharing -= 1
                    if not self.marks.sharing:
                        self.marks.row[_SHARED] = 0
                elif word >= 0:
                    # in a child that was forked meanwhile, the row is not the parent's
                    self.marks.row[word] = 0
                    free.append(word)
                out.pop(id(loan), None)
                # otherwise a signal handler has run this method in between
                if ended and ended[0] is loan:
                    ended.popleft()

    def untouched(
        self, slots: Iterable[int], rows: Sequence[int], seconds: float
    ) -> list[int]:
        """Return which of these bare slots no member of these rows uses; waits up to `seconds` for
        the others.
        """
        barrier()
        until = time.monotonic() + seconds
        left = list(slots)
        free = list[int]()
        while left:
            self.clear_ended()
            out = 0
            for row in rows:
                for word in self._rows[
                    row * GUARD_WORDS : (row + 1) * GUARD_WORDS
                ]:
                    out |= word
            free += [slot for slot in left if not out >> slot % _BUCKETS & 1]
            left = [slot for slot in left if out >> slot % _BUCKETS & 1]
            if time.monotonic() > until:
                break
            if left:
                time.sleep(_POLL_SECONDS)
        return sorted(free)
