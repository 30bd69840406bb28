"""Which slots of a slab in memory are being read or written, so that nobody takes their pages away.

A mapped page that is taken away comes back at the next touch, also at a read, and where the file system is full by
then the touch is SIGBUS. So every view of a slot is lent, and the pages of a slot are taken in this order: the slot is
bare in the tables and published as such; nobody has a view of it; the hole is punched. Who asks for a view says so
first and looks at what is published afterwards: one of the two sees the other.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagoda.ledger.columns import BARE, Columns
from pagoda.ledger.locks import barrier
from pagoda.ledger.state import LENT_BYTES, LENT_WORDS

_BUCKETS = 64  # a slot is counted as one of those that are equal modulo this: a bit of a word
_SHARED = LENT_WORDS - 1  # the word of all calls for which there is no other: cleared when the last has ended
_POLL_SECONDS = 0.002

Bytes = NDArray[np.uint8]


class _Loan(weakref.ref[Bytes]):
    """The views of one call, as long as their base lives. `word`: where their slots are marked, -1 nowhere."""

    __slots__ = ("word",)
    word: int


class Lending:
    """Which slots this process has views of, and the others have: a row of words a member, mapped. Thread-safe.

    Each call marks the slots of its views in a word of its own. The end of a view is noted by a built-in function,
    since an exception that a signal handler raises in a finalizer written in Python is lost. The mark is taken away
    by the next call that lends or writes, in any thread.
    """

    def __init__(self, path: Path, columns: Columns, join: Callable[[], object]) -> None:
        """Map the file. `join` makes this process a member, if it is none, by way of `become`."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._rows = memoryview(mmap.mmap(fd, LENT_BYTES)).cast("Q")
        finally:
            os.close(fd)
        self._generation = columns.generation.data
        self._join = join
        self.forget()

    def forget(self) -> None:
        """Begin anew, as a stranger: in a forked child, whose parent keeps what it has lent."""
        self._joined = False
        self._own = memoryview(bytearray(LENT_WORDS * 8)).cast("Q")
        self._free = list(range(_SHARED))
        self._sharing = 0  # loans in the shared word
        self._lock, self._fence = threading.RLock(), threading.Lock()
        self._out: dict[int, _Loan] = {}  # by id
        self._ended: deque[weakref.ref[Bytes]] = deque()

    def become(self, row: int) -> None:
        """Be the member of this row."""
        with self._lock:
            own = self._rows[row * LENT_WORDS : (row + 1) * LENT_WORDS]
            own[:] = self._own
            self._own, self._joined = own, True

    def leave(self) -> None:
        """Keep count for itself: the row may soon be another member's, and views may outlive the store's close."""
        with self._lock:
            own = memoryview(bytearray(LENT_WORDS * 8)).cast("Q")
            own[:] = self._own
            self._own = own

    def lend(self, slots: Sequence[int], base: Bytes) -> list[int]:
        """Keep the pages of slots for as long as `base` lives; returns those that have none."""
        if not self._joined:  # a forked child that goes on with what its parent has found
            self._join()
        if self._ended:
            self.settle()
        mask = 0
        for slot in slots:
            mask |= 1 << slot % _BUCKETS
        loan = _Loan(base, self._ended.append)
        loan.word = -1
        with self._lock:
            self._out[id(loan)] = loan
            self._mark(loan, mask)
        with self._fence:  # after a lock has been given back: a barrier, see `locks.barrier`
            pass
        generation = self._generation
        return [slot for slot in slots if generation[slot] & BARE]

    def _mark(self, loan: _Loan, mask: int) -> None:
        # No handler of a signal runs between two statements that call nothing.
        if self._free:
            loan.word = self._free[-1]
            self._own[loan.word] = mask
            self._free.pop()
        else:
            loan.word = _SHARED
            self._own[_SHARED] |= mask
            self._sharing += 1

    def settle(self) -> None:
        """Take away the marks of views that have ended. Whatever interrupts this, the next call goes on with it."""
        if not self._ended:
            return
        with self._lock:
            ended, own = self._ended, self._own
            while ended:
                loan = ended[0]
                assert isinstance(loan, _Loan)
                word, loan.word = loan.word, -1
                if word == _SHARED:
                    self._sharing -= 1
                    if not self._sharing:
                        own[_SHARED] = 0
                elif word >= 0:
                    own[word] = 0
                    self._free.append(word)
                self._out.pop(id(loan), None)
                if ended and ended[0] is loan:  # else a signal handler has been here
                    ended.popleft()

    def untouched(self, slots: Iterable[int], rows: Sequence[int], seconds: float) -> list[int]:
        """Those of these slots, bare by now, that no member of these rows touches; waits for the others for a while."""
        barrier()
        until = time.monotonic() + seconds
        left, free = list(slots), list[int]()
        while left:
            self.settle()
            out = 0
            for row in rows:
                for word in self._rows[row * LENT_WORDS : (row + 1) * LENT_WORDS]:
                    out |= word
            free += [slot for slot in left if not out >> slot % _BUCKETS & 1]
            left = [slot for slot in left if out >> slot % _BUCKETS & 1]
            if time.monotonic() > until:
                break
            if left:
                time.sleep(_POLL_SECONDS)
        return sorted(free)
