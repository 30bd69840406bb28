"""This process's part in a store: the open tables and columns, its member, and the running of transactions.

A transaction begins and ends in one function on one thread inside the gate, with no I/O, log or yield in it. Whatever
hinders it becomes an `UnavailableError` with a reason; the ledger turns that into a miss.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import lmdb
import numpy as np
from numpy.typing import NDArray

from pagoda.clock import Clock
from pagoda.errors import ClosedError, LedgerCorrupt, StoreError
from pagoda.ledger.columns import Columns
from pagoda.ledger.locks import MEMBERS, DeadlineMissedError, Gate
from pagoda.ledger.members import dead, enrol, mend, owes, reap, retire
from pagoda.ledger.namespaces import Namespaces
from pagoda.ledger.state import COLUMNS, COUNTERS_FILE, MEMBER_ROWS, TABLES
from pagoda.ledger.store import Store, reopen_store
from pagoda.ledger.tables import NOBODY, SLOT_KEY, Reservation, Tables
from pagoda.ledger.writing import Writing
from pagoda.metrics import COUNTERS, Reason

T = TypeVar("T")
_FORK_SECONDS = 2.0  # a fork waits no longer than this for those who wait at a gate
_LEAVE_SECONDS = 2.0
_COUNTER = {name: column for column, name in enumerate(COUNTERS)}

_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


class UnavailableError(Exception):
    """The ledger could not be asked, and why. Never leaves the ledger."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class Session:
    """Opened tables, columns, counters and member of one store in this process. Thread-safe; survives a fork."""

    def __init__(self, store: Store, clock: Clock, deadline_seconds: float) -> None:
        self.store, self.clock = store, clock
        self.columns = Columns(store.directory / COLUMNS, store.state.slots)
        self.gate = Gate(store.locks)
        self.member = 0
        self.closed = False
        self._counters = _map_counters(store.directory / COUNTERS_FILE)
        self._row = np.zeros(len(COUNTERS), np.uint64)  # once a member: its row of the mapped counters
        self._counting = threading.Lock()
        self._deferred: deque[Callable[[Writing], None]] = deque()
        self._tables: Tables | None = None
        self._spaces: Namespaces | None = None
        self._mend_from: int | None = 0 if store.sole else None
        self._begin(deadline_seconds)
        _sessions.add(self)

    # ---- transactions

    def write(self, work: Callable[[Writing, Namespaces], T], deadline_seconds: float) -> T:
        """Run `work` as one write transaction and publish what it decided. UnavailableError if that cannot be."""
        try:
            with self.gate.writing(deadline_seconds):
                writing, result = self._transact(work)
        except lmdb.MapFullError as error:
            raise UnavailableError(Reason.FULL) from error
        except (lmdb.Error, OSError, StoreError) as error:
            raise UnavailableError(Reason.IO_ERROR) from error
        except DeadlineMissedError as error:
            raise UnavailableError(Reason.LEDGER_BUSY) from error
        for counter, n in writing.counts.items():
            self.count(counter, n)
        return result

    def _transact(self, work: Callable[[Writing, Namespaces], T]) -> tuple[Writing, T]:
        """Do what is waiting, then `work`; commit and publish. Called inside the gate, which is held alone."""
        tables, spaces = self._open()
        begun: list[Callable[[Writing], None]] = []
        try:
            with tables.env.begin(write=True) as txn:
                writing = Writing(txn, tables, self.member, self._alive, self.clock.monotonic_ns())
                while self._deferred:
                    begun.append(self._deferred.popleft())
                    with contextlib.suppress(ValueError, struct.error):  # wrong use, too late to be told
                        begun[-1](writing)
                result = work(writing, spaces)
                writing.save()
        except BaseException as error:  # the commit itself may fail: nothing that waited has been done
            self._deferred.extendleft(reversed(begun))
            if isinstance(error, lmdb.Error) and not isinstance(error, lmdb.MapFullError):
                self._shut()  # LMDB refuses to go on after a failed write: begin afresh
            raise
        writing.publish(self.columns, self.stamp(writing.now))
        return writing, result

    def read(self, work: Callable[[lmdb.Transaction, Tables], T], deadline_seconds: float) -> T:
        """Run `work` as one read transaction. UnavailableError if that cannot be."""
        until = time.monotonic() + deadline_seconds
        try:
            with self.gate.reading(deadline_seconds):
                if self._tables is not None:
                    with self._tables.env.begin() as txn:
                        return work(txn, self._tables)
            with self.gate.writing(until - time.monotonic()):  # the first call after a fork: a new member
                tables, _ = self._open()
                with tables.env.begin() as txn:
                    return work(txn, tables)
        except LedgerCorrupt:
            raise  # what `check` has found, not trouble in looking
        except (lmdb.Error, OSError, StoreError) as error:
            raise UnavailableError(Reason.IO_ERROR) from error
        except DeadlineMissedError as error:
            raise UnavailableError(Reason.LEDGER_BUSY) from error

    def defer(self, work: Callable[[Writing], None]) -> None:
        """Have the next transaction do what could not be done now."""
        self._deferred.append(work)

    def stamp(self, now: int) -> int:
        """The recency stamp of a moment (monotonic ns)."""
        return now + self.store.state.recency_offset

    # ---- members

    def reap(self, most: int, deadline_seconds: float) -> int:
        """Take back up to `most` slots of dead members and strike off those of whom nothing is left."""

        def work(writing: Writing, spaces: Namespaces) -> int:
            freed = reap(writing, most)
            if freed < most:
                for member in dead(writing):
                    if not owes(writing, member):
                        retire(writing, member, self._counters)
                        self._mend_from = 0
            return freed

        return self.write(work, deadline_seconds)

    def mend(self, deadline_seconds: float) -> bool:
        """Publish some of what members committed who died before they could; False when all has been looked at."""
        start = self._mend_from
        if start is not None:
            self._mend_from = self.write(lambda w, _: self._mended(w, start), deadline_seconds)
        return start is not None

    def _mended(self, writing: Writing, start: int) -> int | None:
        return mend(writing, self.columns, start, self.stamp(writing.now))

    def _alive(self, member: int) -> bool:
        return self.store.locks.held_by_other(MEMBERS + member)

    # ---- counters

    def count(self, counter: str, n: int) -> None:
        """Add to one of this member's counters."""
        with self._counting:
            self._row[_COUNTER[counter]] += np.uint64(n)

    def counted(self, rows: list[int], totals: NDArray[np.uint64]) -> dict[str, int]:
        """Counters of the members in these rows and of the dead."""
        summed = self._counters[rows].sum(axis=0, dtype=np.uint64) + totals
        return {name: int(summed[column]) for name, column in _COUNTER.items()}

    # ---- opening, closing, forking

    def _begin(self, deadline_seconds: float) -> None:
        """Open the tables and become a member. StoreError with the remedy."""
        try:
            with self.gate.writing(deadline_seconds):
                self._open()
        except DeadlineMissedError as error:
            raise StoreError(
                f"another process has been changing {self.store.directory} for {deadline_seconds:g} s: is it stopped?"
            ) from error
        except (lmdb.Error, OSError) as error:
            raise StoreError(
                f"the ledger at {self.store.directory} cannot be opened ({error}): "
                "stop those who have it open and open it again"
            ) from error

    def _open(self) -> tuple[Tables, Namespaces]:
        """Open the tables if they are not, and become a member. Called inside the gate, which is held alone."""
        if self.closed:
            raise ClosedError(f"the store at {self.store.directory} was closed; open it again")
        if self._tables is None or self._spaces is None:
            self._tables = Tables(self.store.directory / TABLES, self.store.state.map_bytes)
            self._spaces = Namespaces(
                self.store.directory, self._tables, in_memory=self.store.state.kind == "memory"
            )
        if not self.member:
            self._enrol(self._tables, self._spaces)
        return self._tables, self._spaces

    def _shut(self) -> None:
        tables, self._tables = self._tables, None
        if tables is not None:
            tables.close()

    def _enrol(self, tables: Tables, spaces: Namespaces) -> None:
        with tables.env.begin(write=True) as txn:
            writing = Writing(txn, tables, 0, self._alive, self.clock.monotonic_ns())
            number = writing.meta.next_member
            writing.meta.next_member += 1
            if not self.store.locks.try_lock(MEMBERS + number, exclusive=True):
                raise StoreError(f"member {number} of {self.store.directory} is taken: discard the store")
            try:
                row = self._enter(writing, number, spaces)
            except BaseException:
                self.store.locks.unlock(MEMBERS + number)  # or nobody could ever be that member
                raise
        self.member = number
        with self._counting:
            self._counters[row] = self._row
            self._row = self._counters[row]

    def _enter(self, writing: Writing, number: int, spaces: Namespaces) -> int:
        """Write the row of member `number`; returns its row of counters."""
        writing.member = number
        for gone in dead(writing):
            if not owes(writing, gone):
                retire(writing, gone, self._counters)
                self._mend_from = 0
        try:
            row = enrol(writing)
        except LookupError:
            raise StoreError(
                f"{MEMBER_ROWS} processes have {self.store.directory} open; close some"
            ) from None
        if self.store.sole:
            spaces.load(writing)
        writing.save()
        return row

    def close(self) -> None:
        """Give up reservations and holds, leave the store, and mark it clean if nobody else has it open.

        Ends in bounded time: if the gate is not to be had, the dead member is left to others to take back.
        """
        if self.closed:  # a forked child that lost the store has nothing here to give up
            _sessions.discard(self)
            return
        with contextlib.suppress(DeadlineMissedError, lmdb.Error, OSError), self.gate.writing(_LEAVE_SECONDS):
            self.closed = True
            try:
                if self._tables is not None:
                    self._finish(self._tables)
            finally:
                self._shut()
        self.closed = True
        with self._counting:
            self._row = self._row.copy()  # the row may soon be another member's
        if self.member:
            self.store.locks.unlock(MEMBERS + self.member)
        self.store.release()
        _sessions.discard(self)

    def _finish(self, tables: Tables) -> None:
        """Leave; the last to leave a store on disk syncs it and says that it may be trusted."""
        if self.member:
            with contextlib.suppress(lmdb.MapFullError):  # the tables stand, with a dead member in them
                self._leave(tables)
        state = self.store.state
        if state.kind == "file" and not state.private and self.store.is_last():
            tables.env.sync(True)
            self.columns.flush()
            self.store.mark_clean()

    def _leave(self, tables: Tables) -> None:
        with tables.env.begin(write=True) as txn:
            writing = Writing(txn, tables, self.member, self._alive, self.clock.monotonic_ns())
            for late in self._deferred:
                with contextlib.suppress(ValueError, struct.error):
                    late(writing)
            for row, value in list(tables.rows(txn, tables.reserved)):
                reservation = Reservation.unpack(value)
                if reservation.owner in (NOBODY, self.member) and set(reservation.writers) <= {
                    0,
                    self.member,
                }:
                    writing.unreserve(SLOT_KEY.unpack(row)[0], reservation)
                    writing.give_back(SLOT_KEY.unpack(row)[0])
            retire(writing, self.member, self._counters)
            writing.save()
        writing.publish(self.columns, self.stamp(writing.now))

    def before_fork(self, until: float) -> bool:
        """Close the tables, so that no transaction and no environment is alive in two processes."""
        if not self.gate.inside.acquire(timeout=max(0.0, until - time.monotonic())):
            return False
        self._shut()
        return True

    def after_fork_in_parent(self) -> None:
        """Go on; the tables are opened again by the next call."""
        self.gate.inside.release()

    def after_fork_in_child(self) -> None:
        """Become a stranger: no reservations, no member, locks of one's own, until the first call."""
        with contextlib.suppress(lmdb.Error):
            self._shut()  # open only if a thread of the parent waited at the gate; closing is this process's alone
        self._spaces = None
        self._deferred.clear()
        self._counting = threading.Lock()
        self._row = np.zeros(len(COUNTERS), np.uint64)
        self.gate = Gate(self.store.locks)
        self.member = 0
        if self.store.state.private:  # the fork copied its memory: the child's slots are not the parent's
            self.closed = True
        if not self.closed:
            try:
                self.store = reopen_store(self.store)
            except (StoreError, OSError):
                self.closed = True


def _map_counters(path: Path) -> NDArray[np.uint64]:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(fd, MEMBER_ROWS * len(COUNTERS) * 8)
    finally:
        os.close(fd)
    return np.frombuffer(mapped, np.uint64).reshape(MEMBER_ROWS, len(COUNTERS))


class _Forking(threading.local):
    """The sessions that a fork of this thread has shut; two threads may fork at once."""

    sessions: tuple[Session, ...] = ()


_forking = _Forking()


def _before_fork() -> None:
    until = time.monotonic() + _FORK_SECONDS
    _forking.sessions = tuple(session for session in list(_sessions) if session.before_fork(until))


def _after_in_parent() -> None:
    for session in _forking.sessions:
        session.after_fork_in_parent()
    _forking.sessions = ()


def _after_in_child() -> None:
    for session in list(_sessions):
        session.after_fork_in_child()
    _forking.sessions = ()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
