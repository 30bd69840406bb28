"""This process's part in a store: its open tables and columns, its member, and running
transactions.

A transaction is a function passed to `write` or `read`: a `with` statement would lose the gate to
signal handlers (see `Gate`). It begins and ends on one thread inside the gate, with no I/O, log or
yield in it. A failure to run it becomes an `UnavailableError` with a reason; the ledger turns that
into a miss.

A signal handler may fork in the middle of a transaction, and the child returns into a transaction
that is its parent's. In the child the tables are closed, the views that write to the columns are
released, and the gate is `forked`: the child keeps nothing of what the parent did, and its errors
say nothing about the store. Its later calls run in new tables.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import lmdb
import numpy as np

from pagoda.base.clock import Clock
from pagoda.base.errors import (
    ClosedError,
    LedgerCorrupt,
    StoreError,
    remedy_of_limit,
)
from pagoda.base.fork import take_all
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import COUNTERS, MEMBER_GAUGES, Reason
from pagoda.base.signal_safe_threads import complete, if_free
from pagoda.ledger.call_tokens import CallToken
from pagoda.ledger.clears_and_labels import load_saved
from pagoda.ledger.columns import Columns
from pagoda.ledger.compare_hints import compare_page
from pagoda.ledger.gate_bell import BELL_BYTES, GateBell
from pagoda.ledger.guard_watch import unwatch, watch
from pagoda.ledger.hint_pages import HintPages, Published
from pagoda.ledger.lmdb_tables import (
    MEMBER,
    MEMBER_KEY,
    Tables,
    Txn,
    without_gate,
)
from pagoda.ledger.locks import (
    MEMBERS,
    OPEN,
    DeadlineMissedError,
    Gate,
    in_child,
    note_fork,
    timed_out,
)
from pagoda.ledger.member_counters import (
    MEMBER_ROWS,
    WIDTH,
    CounterRow,
    columns_of,
    counter_rows,
)
from pagoda.ledger.members import (
    add_member,
    leave,
    publish_committed,
    reap,
    remove_dead,
)
from pagoda.ledger.namespace_slots import NamespaceSlots
from pagoda.ledger.request_meters import (
    Meter,
    Pair,
    RequestMeters,
    TokenLoad,
    merged,
    read_meters,
)
from pagoda.ledger.slots_in_use import OwnMarks, PageGuards
from pagoda.ledger.store_directory import OpenStore, reopen_store
from pagoda.ledger.store_state import PAGE_GUARDS, TABLES, WAITING
from pagoda.ledger.table_integrity import is_damage
from pagoda.ledger.table_pages import TablePages
from pagoda.ledger.transaction import BATCH, Transaction

log = guarded_logger("pagoda")

T = TypeVar("T")
# for one step of a call that a person waits for: listings, clear, pins
PATIENT_SECONDS = 5.0
_PAGE = 1024
# a fork waits no longer than this for threads that wait at a gate
_FORK_SECONDS = 2.0
_LEAVE_SECONDS = 2.0
_JOIN_SECONDS = 1.0
_BEGIN_SECONDS = 2.0  # the time for comparing hints when a store is opened
_COMPARE_SECONDS = 120.0  # the same, off the request path
_SILENT_SECONDS = 30.0  # after a line in the log about a transaction that failed
# after the files of a store could not be read, until they are tried again
_REST_SECONDS = 5.0

_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


class UnavailableError(StoreError):
    """The ledger could not run a transaction; `reason` says why.

    A call of an engine turns it into a miss or a drop; a call of an operator raises it, as a
    StoreError.
    """

    # a class attribute, so that it survives when the error is sent to another process
    reason = Reason.IO_ERROR


class Session:
    """Opened tables, columns, counters and member of one store in this process. Thread-safe;
    survives a fork.
    """

    def __init__(
        self, store: OpenStore, clock: Clock, deadline_seconds: float
    ) -> None:
        self.store = store
        self.clock = clock
        self.hints = HintPages(store.directory, store.state)
        self.columns: Columns = self.hints.columns()
        self.namespace_slots = NamespaceSlots(self.hints, store.state.slots)
        on_disk = store.state.kind == "file"
        self.published: Published | None = (
            self.hints.published() if on_disk else None
        )
        if self.published is not None and store.sole:
            self.published.forget()
        # of a store on disk, once its tables were opened
        self._pages: TablePages | None = None
        # a file of the store could not be read or written: test all pages of the tables
        self._suspect = False
        self._rests_until = 0.0
        # until then no further line about failed transactions is logged
        self._silent_until = 0.0
        self._bell = GateBell(self.hints.page(WAITING, BELL_BYTES))
        self.gate = Gate(store.locks, self._bell)
        self.member = 0
        self.pid = os.getpid()
        self.closed = False
        # the directory belongs to another store now: no file in it is opened by path again
        self.lost = self._loss_logged = False
        self._damaged = False  # its tables are damaged, and this was logged
        self._counters = counter_rows(self.hints.counters())
        # once there is a member: its row of the mapped counters
        self._row = np.zeros(WIDTH, np.uint64).data
        self._column: dict[str, int] = {}
        self._counting = threading.Lock()
        # gauge -> what each of its users in this process has set
        self._gauge_parts: dict[str, dict[object, int]] = {}
        self._meters = RequestMeters()
        self._counter_row = 0  # of this member
        self.page_guards = (
            PageGuards(store.directory / PAGE_GUARDS, self.columns, self._join)
            if store.state.kind == "memory" and store.state.slot_bytes
            else None
        )
        # each in a tuple of its own, which tells two deferrals of one function apart
        self._deferred = deque[tuple[Callable[[Transaction], object]]]()
        # what calls owned that ended without handing it on. Changed by single calls of built-in
        # functions, which no signal handler interrupts
        self.orphans = set[CallToken]()
        # what gives up what running `SlotWriter`s own, should one of them be lost
        self.writers: dict[CallToken, object] = {}
        self._tables: Tables | None = None
        # from which slot on chunks are to be published that dead members committed; see `published`
        # for a store on disk
        self._publish_from: int | None = 0 if store.sole and not on_disk else None
        # not while another thread forks: the fork could overlook the tables that this opens
        if_free(Tables.opening, partial(_sessions.add, self), _FORK_SECONDS)
        # in any case, so that a fork during the opening closes it too
        _sessions.add(self)
        self._begin(deadline_seconds)

    # ---- transactions

    def write(
        self,
        work: Callable[[Transaction], T],
        deadline_seconds: float = PATIENT_SECONDS,
        frees: bool = False,
    ) -> T:
        """Run `work` as one write transaction and publish what it decided. UnavailableError if it
        cannot be run.

        Work that `frees` may use a spare part of the map: a full map must never prevent a removal.
        """
        gate = self.gate
        step = self._free if frees else self._transact
        try:
            if self.lost or self._suspect or self._rests_until:
                self._require_usable()
            result = gate.run(
                partial(step, work), deadline_seconds, exclusive=True
            )
        except Exception as error:
            self._raise_unavailable("changed", error, gate)
            raise
        if self.page_guards is not None:
            self.page_guards.clear_ended()
        return result

    def _transact(
        self, work: Callable[[Transaction], T], opening: Tables | None = None
    ) -> T:
        """Run deferred work, give up what orphans own, then run `work`; commit, publish and count.
        Called inside the gate, held exclusively. `opening`: the tables, if they are being opened.

        An exception at any line either changes nothing, or comes after the commit: then all is
        published before the gate is released.
        """
        if self._pages is not None and opening is None:
            self._require_readable()
        tables = self._open() if opening is None else opening
        member = self.member  # 0 in a process that is about to become one
        transaction: Transaction | None = None
        late: deque[tuple[Callable[[Transaction], object]]] = deque()
        dropped: list[CallToken] = []
        try:
            with tables.begin(write=True) as txn:
                now = self.clock.monotonic_ns()
                chunk_bytes = self.store.state.chunk_bytes
                transaction = Transaction(
                    txn, tables, member, self.is_alive, now, chunk_bytes
                )
                if member and self._deferred:
                    late.extend(self._deferred)
                    for (step,) in late:
                        _do_late(step, transaction)
                if member and self.orphans:
                    self._give_up_orphans(transaction, dropped)
                result = work(transaction)
                transaction.save()
            transaction.committed = True
            self._publish_and_count(transaction, late, dropped)
        except BaseException as error:
            if isinstance(error, lmdb.Error | OSError) and not isinstance(
                error, lmdb.MapFullError
            ):
                self._suspect = self._pages is not None
            publish = partial(
                self._publish_committed, tables, transaction, late, dropped
            )
            try:
                complete(publish)
            finally:  # again: a signal may come before the first line of the other
                complete(publish)
            if is_damage(error) or (
                isinstance(error, lmdb.Error)
                and not isinstance(error, lmdb.MapFullError)
            ):
                # LMDB refuses to continue after a failed write: the next call opens it again
                self._shut()
            raise
        return result

    def _give_up_orphans(
        self, transaction: Transaction, dropped: list[CallToken]
    ) -> None:
        """Give up what interrupted calls own, unless views of it are left; add them to
        `dropped`.
        """
        count = 0
        for token in tuple(self.orphans):
            if count >= BATCH:
                return
            if not token.lent():
                dropped.append(token)
                count += _do_late(token.give_up, transaction) or 0

    def drop_orphans(self, deadline_seconds: float = 1.0) -> None:
        """Give up now what interrupted calls own, as far as no view of it is left. If that is not
        done in time, a later write does it.
        """
        self.orphans.difference_update(
            [token for token in tuple(self.orphans) if not token.owns()]
        )
        with contextlib.suppress(UnavailableError, ClosedError):
            while any(not token.lent() for token in tuple(self.orphans)):
                self.write(lambda _: None, deadline_seconds, frees=True)

    def _publish_and_count(
        self,
        transaction: Transaction,
        late: deque[tuple[Callable[[Transaction], object]]],
        dropped: Sequence[CallToken],
    ) -> None:
        """Publish and count what was committed, and forget the deferred work that it did. It may be
        repeated after an exception.
        """
        transaction.publish(self.columns, self.stamp(transaction.now))
        self.namespace_slots.note(transaction.namespace_of)
        self.count(transaction.take_counts())
        if transaction.then is not None:
            transaction.then()
        while late:  # each item once
            if self._deferred and self._deferred[0] is late[0]:
                self._deferred.popleft()
            late.popleft()
        if dropped:
            self.orphans.difference_update(dropped)
        # last: a process that is killed before has not published it
        if self.published is not None:
            self.published.add(transaction.id)

    def _publish_committed(
        self,
        tables: Tables,
        transaction: Transaction | None,
        late: deque[tuple[Callable[[Transaction], object]]],
        dropped: Sequence[CallToken],
    ) -> None:
        """Publish a transaction that ended in an exception, if it was committed."""
        # not in a child that a signal handler has forked: the parent publishes
        if (
            transaction is not None
            and transaction.pid == os.getpid()
            and self._committed(tables, transaction)
        ):
            transaction.committed = True
            self._publish_and_count(transaction, late, dropped)

    def _committed(self, tables: Tables, transaction: Transaction) -> bool:
        """Whether a transaction that ended in an exception was committed. Called before the gate is
        released.
        """
        if transaction.committed:
            return True
        try:
            self._require_readable()
        except OSError:  # it cannot be told, and the tables are not read again
            return False
        return bool(tables.env.info()["last_txnid"] == transaction.id)

    def _free(self, work: Callable[[Transaction], T]) -> T:
        """Run one transaction that frees slots; if the map is full, it may use the spare part."""
        with contextlib.suppress(lmdb.MapFullError):
            return self._transact(work)
        tables = self._open()
        tables.widen()
        try:
            return self._transact(work)
        finally:
            # else they were closed, and the next call opens new ones
            if self._tables is tables:
                tables.narrow()

    def read(
        self,
        work: Callable[[Txn, Tables], T],
        deadline_seconds: float = PATIENT_SECONDS,
    ) -> T:
        """Run `work` as one read transaction. UnavailableError if it cannot be run."""
        until = time.monotonic() + deadline_seconds
        gate = self.gate
        try:
            if self.lost or self._suspect or self._rests_until:
                self._require_usable()
            found = gate.run(partial(self._run_read, work), deadline_seconds)
            if not found:  # the first call after a fork: become a new member
                read = partial(self._run_read, work, opens=True)
                found = gate.run(read, until - time.monotonic(), exclusive=True)
        except Exception as error:
            self._raise_unavailable("read", error, gate)
            raise
        return found[0]

    def read_rows(
        self,
        table: Callable[[Tables], lmdb._Database],
        made: Callable[[Txn, Tables, bytes, bytes], T],
        until: float | None = None,
        most: int = _PAGE,
    ) -> Iterator[T]:
        """Walk a table, `most` rows per transaction; yield what `made` returns for each row. Raises
        StoreError.
        """

        def page(txn: Txn, tables: Tables) -> tuple[list[T], bytes | None]:
            rows = list(
                islice(tables.rows(txn, table(tables), start or b""), most + 1)
            )
            found = [made(txn, tables, *row) for row in rows[:most]]
            return found, rows[most][0] if len(rows) > most else None

        start: bytes | None = b""
        while start is not None:
            found, start = self.read(
                page,
                PATIENT_SECONDS if until is None else until - time.monotonic(),
            )
            yield from found

    def _run_read(
        self, work: Callable[[Txn, Tables], T], opens: bool = False
    ) -> list[T]:
        """Run `work` as one read transaction, if the tables are open or this `opens` them. Called
        inside the gate.
        """
        if self._pages is not None:
            self._require_readable()
        tables = self._open() if opens else self._tables
        if tables is None:
            return []
        try:
            with tables.begin() as txn:
                return [work(txn, tables)]
        except Exception as error:
            if is_damage(error):
                self._shut()
            raise

    # ---- the files of a store on disk

    @property
    def resting(self) -> bool:
        """Whether the files of the store could not be read a short while ago; its tables are not
        read meanwhile.
        """
        return bool(self._rests_until) and self._rests_until > time.monotonic()

    @property
    def locked_bytes(self) -> int:
        """The bytes of the tables of a store on disk that this process keeps in memory, whatever
        the system needs.
        """
        return self._pages.locked_bytes if self._pages is not None else 0

    def suspect(self) -> None:
        """Test now whether the tables can be read, without reading them: another file of the store
        had an error.
        """
        self._suspect = self._pages is not None
        # ValueError: closed meanwhile
        with contextlib.suppress(OSError, StoreError, ValueError):
            self._require_usable()

    def _require_usable(self) -> None:
        """Raise StoreError if the store is lost, OSError if its tables cannot be read. Called
        outside the gate.
        """
        if self.lost:
            self.require_store()
        pages = self._pages
        if pages is None or not (self._suspect or self._rests_until):
            return
        if self.resting:
            raise OSError(
                errno.EIO,
                "the files of the store could not be read: it is tried again in a few seconds",
            )
        try:
            pages.load()
        except OSError as error:
            self._rest("read", error)
            raise
        self._suspect = False
        if self._tables is not None:  # else it is seen whether they can be opened
            self._end_rest()

    def _require_readable(self) -> None:
        """Raise OSError if the file system of the tables does not answer: a read of them could kill
        this process.
        """
        if self._pages is not None:
            try:
                self._pages.require()
            except OSError as error:
                self._rest("read", error)
                raise

    def last_transaction(self) -> int:
        """Return the number of the last transaction of any process; -1: unknown. Takes no lock; for
        a store on disk.
        """
        if self._pages is None or self.lost or self.closed:
            return -1
        try:
            return self._pages.last_transaction()
        except (OSError, ValueError):  # ValueError: closed meanwhile
            return -1

    def _rest(self, done: str, error: lmdb.Error | OSError) -> None:
        if not self._rests_until:
            why = error.strerror if isinstance(error, OSError) else error
            log.warning(
                "the files of %s cannot be %s (%s): nothing is found or stored there, and it is "
                "tried again "
                "every %g s",
                self.store.directory,
                done,
                why,
                _REST_SECONDS,
            )
        self._rests_until = time.monotonic() + _REST_SECONDS

    def _end_rest(self) -> None:
        if self._rests_until:
            log.warning("the files of %s can be read again", self.store.directory)
        self._rests_until = 0.0

    def tend(self) -> None:
        """Keep the pages of the tables in memory, and the hints like the tables. For a store on
        disk; may take seconds.

        Never raises for a failure at run time.
        """
        pages = self._pages
        if pages is None or self.closed or self.resting:
            return
        try:
            pages.load()
        except (OSError, ValueError):  # ValueError: closed meanwhile
            self.suspect()
            return
        with contextlib.suppress(UnavailableError, ClosedError):
            self.compare_hints(_COMPARE_SECONDS)

    def compare_hints(self, seconds: float) -> bool:
        """Let the columns of a store on disk say what the tables say, if they lack transactions;
        return whether so.

        False if the time was too short for all slots. UnavailableError if the tables did not answer
        in time.
        """
        published = self.published
        until = time.monotonic() + seconds
        if published is None:
            return False
        missing = self.read(lambda txn, _: published.missing(txn.id()), seconds)
        if missing is None:
            return False
        start: int | None = 0
        while start is not None:
            left = until - time.monotonic()
            if left <= 0.0:
                return False
            start = self.read(partial(self._compare_page, start), left)
        published.compared(missing)
        return True

    def _compare_page(self, start: int, txn: Txn, tables: Tables) -> int | None:
        return compare_page(
            txn,
            tables,
            self.columns,
            start,
            self.stamp(self.clock.monotonic_ns()),
        )

    def save_hints(self, not_within_seconds: float = 0.0) -> bool:
        """Write the hints of a store on disk into its files; return whether it did. A failure is
        counted.

        `not_within_seconds`: not if a process has done so within this time.
        """
        try:
            if (
                self.resting
                or not self.store.is_current()
                or self.hints.age_seconds() < not_within_seconds
            ):
                return False
            if not self.hints.save():
                self.count({"hint_write_failures": 1})
        except OSError:
            self.count({"hint_write_failures": 1})
            self.suspect()
            return False
        return True

    def _is_trouble(self, error: Exception) -> bool:
        """Whether this error is a fault of the store, not wrong use; damaged tables are marked as
        such.

        A damaged store is used as long as a process has it open (what cannot be read is a miss),
        and rebuilt after that.
        """
        if is_damage(error) and not self._damaged:
            self._damaged = True
            self.store.mark_damaged()
            log.error(
                (
                    "the ledger at %s is damaged (%s): the next process that opens it alone "
                    "begins a "
                    "new one"
                ),
                self.store.directory,
                error,
            )
        return is_damage(error) or isinstance(
            error, lmdb.Error | OSError | StoreError
        )

    def _raise_unavailable(self, done: str, error: Exception, gate: Gate) -> None:
        """Turn the error of a transaction into UnavailableError or ClosedError.

        Returns if the error is wrong use, or is what `check` found.

        `gate`: where the transaction ran. An error that a forked child meets in its parent's
        transaction says nothing about the store.
        """
        if gate.forked:
            reason = Reason.IO_ERROR
        elif isinstance(error, lmdb.MapFullError):
            reason = Reason.FULL
        elif isinstance(error, DeadlineMissedError):
            reason = Reason.LEDGER_BUSY
        elif not self._is_trouble(error) or isinstance(error, LedgerCorrupt):
            return
        elif self.closed:
            raise self._was_closed() from error
        else:
            reason = Reason.IO_ERROR
            self._tell(done, error)
        unavailable = UnavailableError(
            f"the ledger at {self.store.directory} could not be {done}: {reason}"
        )
        unavailable.reason = reason
        raise unavailable from error

    def _tell(self, done: str, error: Exception) -> None:
        """Log why a transaction could not be run, unless a line about the store has said so; once
        in a while.
        """
        if (
            self.lost
            or self._rests_until
            or is_damage(error)
            or time.monotonic() < self._silent_until
        ):
            return
        self._silent_until = time.monotonic() + _SILENT_SECONDS
        log.warning(
            "the ledger at %s could not be %s (%s): what needs it is a miss or is not stored; "
            "said at most "
            "every %g s",
            self.store.directory,
            done,
            error,
            _SILENT_SECONDS,
        )

    def _was_closed(self) -> ClosedError:
        return ClosedError(
            f"the store at {self.store.directory} was closed; open it again"
        )

    def defer(self, work: Callable[[Transaction], object]) -> None:
        """Let the next transaction run `work`."""
        self._deferred.append((work,))

    def stamp(self, now: int) -> int:
        """Return the recency stamp of a moment (monotonic ns)."""
        return now + self.store.state.recency_offset

    # ---- members

    def recover(self, deadline_seconds: float) -> int:
        """Reclaim what dead members and interrupted calls reserved, and publish what dead members
        committed; return how many slots of those were freed.
        """
        freed = 0
        got = BATCH
        until = time.monotonic() + deadline_seconds
        self.drop_orphans(deadline_seconds)
        with contextlib.suppress(UnavailableError):
            while got == BATCH:
                got = self.write(self._reap, max(0.0, until - time.monotonic()))
                freed += got
            # of a very large store, the thread of the upkeep compares the rest
            self.compare_hints(
                min(_BEGIN_SECONDS, max(0.0, until - time.monotonic()))
            )
            while self._publish_from is not None:
                self._publish_from = self.write(
                    self._publish, max(0.0, until - time.monotonic())
                )
        return freed

    def _reap(self, transaction: Transaction) -> int:
        """Reclaim up to BATCH slots of dead members, and remove the members that have none left."""
        freed = reap(transaction, BATCH)
        if freed < BATCH:
            self._remove_dead(transaction)
        return freed

    def _remove_dead(self, transaction: Transaction) -> None:
        if remove_dead(transaction, self._counters) and self.published is None:
            self._publish_from = 0

    def _publish(self, transaction: Transaction) -> int | None:
        """Publish some chunks that dead members committed but did not publish; return where to
        continue.
        """
        stamp = self.stamp(transaction.now)
        return publish_committed(
            transaction, self.columns, self._publish_from or 0, stamp
        )

    def is_alive(self, member: int) -> bool:
        """Whether another process is this member, and lives."""
        return self.store.locks.held_by_other(MEMBERS + member)

    def untouched(self, slots: list[int], seconds: float) -> list[int]:
        """Return which of these bare slots no process reads or writes; waits up to `seconds` for
        the others.
        """
        # a slab file needs no guards: a reader of punched pages reads zeros
        if self.page_guards is None:
            return slots
        rows = [row for row, _ in self.read(self._living, seconds)]
        return self.page_guards.untouched(slots, rows, seconds)

    def _join(self) -> None:
        with contextlib.suppress(UnavailableError, ClosedError):
            self.read(lambda *_: None, _JOIN_SECONDS)

    def processes(self) -> list[int]:
        """Return the ids of the processes that have the store open, this one included.
        StoreError.
        """
        return [pid for _, pid in self.read(self._living)]

    def _living(self, txn: Txn, tables: Tables) -> list[tuple[int, int]]:
        """Return counter row and process id of each living member."""
        rows = (
            (MEMBER_KEY.unpack(key)[0], row)
            for key, row in tables.rows(txn, tables.members)
        )
        return [
            MEMBER.unpack(row)[:2]
            for one, row in rows
            if one == self.member or self.is_alive(one)
        ]

    # ---- counters

    def count(
        self,
        counts: Mapping[str, int],
        pair: Pair | None = None,
        load: TokenLoad | None = None,
    ) -> None:
        """Add to this member's counters, of pagoda.base.metrics.COUNTERS; KeyError for an unknown
        one.

        Args:
            counts: by counter.
            pair: the model and the tenant whose meter counts them too.
            load: what the engine loaded, for that meter.
        """
        with self._counting:
            if pair is not None:
                meters = self._meters
                if meters.row is None and meters.is_waiting():
                    self._share_meters()
                meters.add(pair, counts, load)
            column_of = self._column.get
            for counter, n in counts.items():
                column = column_of(counter)
                if column is not None:
                    # in a forked child the row is not the parent's
                    self._row[column] += n
                # otherwise other versions that used this store have taken all columns
                elif counter not in COUNTERS:
                    raise KeyError(counter)

    def _share_meters(self) -> None:
        """Let the meters count where other processes see it, if this is a member of the store.
        Touches no disk.
        """
        path: Path | None = None
        with contextlib.suppress(OSError):
            is_here = self.member and not self.lost
            # the file of a store on disk is in memory, and has its name
            on_disk = self.published is not None
            if is_here and (on_disk or self.store.is_current()):
                path = self.hints.meters()
        self._meters.share(path, self._counter_row)

    def meters(self) -> list[Meter]:
        """Return what was counted by model and tenant, by all members: those that ended, too. Never
        raises: without the file, only what this process counted.
        """
        with self._counting:
            found = self._meters.own()
            row = self._meters.row
        path = None if self.lost else self.hints.meters()
        with contextlib.suppress(OSError):
            if path is not None:
                found.extend(read_meters(path, without=row))
        return merged(found)

    def counted(self, rows: list[int], totals: CounterRow) -> dict[str, int]:
        """Return the counters of the members in these rows and of members that left."""
        summed = self._counters[rows].sum(axis=0, dtype=np.uint64) + totals
        columns = ((name, self._column.get(name)) for name in COUNTERS)
        return {
            name: int(summed[column]) if column is not None else 0
            for name, column in columns
        }

    def own_counters(self) -> dict[str, int]:
        """Return the counters of this member."""
        return self.counted([], np.asarray(self._row))

    def set_gauge(self, gauge: str, value: int, part: object = None) -> None:
        """Set one of this member's gauges, of pagoda.base.metrics.MEMBER_GAUGES.

        Several users of this process share the member: each sets its own `part`, and the gauge is
        their sum.
        """
        with self._counting:
            parts = self._gauge_parts.setdefault(gauge, {})
            parts[part] = value
            if not value:
                del parts[part]
            column = self._column.get(gauge)
            if column is not None:
                self._row[column] = sum(parts.values())

    def member_gauges(self, txn: Txn, tables: Tables) -> dict[str, int]:
        """Return the sum of each gauge over the living members."""
        rows = [row for row, _ in self._living(txn, tables)]
        summed = self._counters[rows].sum(axis=0, dtype=np.uint64)
        columns = ((name, self._column.get(name)) for name in MEMBER_GAUGES)
        return {
            name: int(summed[column]) if column is not None else 0
            for name, column in columns
        }

    # ---- opening, closing, forking

    def _begin(self, deadline_seconds: float) -> None:
        """Open the tables and become a member. StoreError with the remedy."""
        try:
            self.gate.run(self._open, deadline_seconds, exclusive=True)
        except DeadlineMissedError as error:
            raise timed_out(
                deadline_seconds, f"is changing {self.store.directory}"
            ) from error
        except Exception as error:
            if isinstance(error, StoreError) or not self._is_trouble(error):
                raise
            remedy = remedy_of_limit(
                error, "stop the processes that have it open, and open it again"
            )
            raise StoreError(
                f"the ledger at {self.store.directory} cannot be opened ({error}): {remedy}"
            ) from error

    def _open(self) -> Tables:
        """Open the tables if they are not open, and become a member. Called inside the gate, held
        exclusively.
        """
        if self.closed:
            raise self._was_closed()
        gate = self.gate
        tables = self._tables
        # a signal handler has forked since: the gate is the parent's
        if not gate.entered():
            raise DeadlineMissedError
        if tables is None:
            # If a signal handler forks in it, the child has closed tables here: becoming a member
            # fails, and its next call opens its own.
            self._tables = tables = self._own_tables(gate)
        if not self.member:
            self._add_member(tables, gate)
        return tables

    def _own_tables(self, gate: Gate) -> Tables:
        """Open the tables by path. The store is checked before and after: no other store is read or
        written.
        """
        self.require_store()
        if self.published is not None and self._pages is None:
            pages = TablePages(
                self.store.directory / TABLES, self.store.state.map_bytes
            )
            pages.load()
            self._pages = pages
        try:
            tables = Tables(
                self.store.directory / TABLES,
                self.store.state.map_bytes,
                gate=gate,
            )
        except lmdb.Error as error:
            # a file system that became read-only: its pages can be read, but a transaction has
            # failed
            if (
                self._pages is not None
                and not gate.forked
                and not is_damage(error)
            ):
                self._rest("opened", error)
            raise
        try:
            self.require_store()
        except (StoreError, OSError):
            tables.close()
            raise
        self._end_rest()
        return tables

    def is_at(self, directory: Path) -> bool:
        """Whether this is the session of the store in that directory, and is still usable.
        OSError.
        """
        return (
            not self.closed
            and not self.lost
            and self.store.locks.are_at(directory)
        )

    def look(self) -> None:
        """Leave the store if its files are no longer those that were opened. See `guard_watch`."""
        if self.closed or self.lost:
            return
        try:
            replaced = self.store.replaced()
        except OSError:  # the next look will tell
            return
        if replaced is not None and not self.closed:
            self._leave(replaced)

    def _leave(self, why: str) -> None:
        """Stop using a store whose files are not those that were opened, and let the next process
        open it alone.

        This member keeps its own byte until `close`: the slots that it still fills must not be
        given to others.
        """
        self.lost = True
        if not self._loss_logged:
            self._loss_logged = True
            log.warning(
                "the directory %s was removed or replaced while it was in use (%s): this process "
                "neither finds nor "
                "stores anything there until it opens the store again",
                self.store.directory,
                why,
            )
        with contextlib.suppress(OSError):
            self.store.locks.unlock(OPEN)

    def require_store(self) -> None:
        """Raise StoreError if the directory is no longer this store's, now or at an earlier call.
        It is logged once.

        OSError if that cannot be told now: too many open files, or a disk that does not answer.
        """
        if not self.lost and self.store.is_current():
            return
        self._leave("it is not the store that was opened")
        raise StoreError(
            f"the directory {self.store.directory} was removed or replaced while it was in use: "
            "open the store again"
        )

    def _shut(self) -> None:
        tables = self._tables
        self._tables = None
        if tables is not None:
            tables.close()

    def _add_member(self, tables: Tables, gate: Gate) -> None:
        def enter(transaction: Transaction) -> None:
            number = transaction.meta.next_member
            # taken: by a member of tables that were replaced, until it closes the store that it
            # has left; or by an attempt of this process that was interrupted
            while not self.store.locks.lock(MEMBERS + number, exclusive=True):
                number += 1
            transaction.meta.next_member = number + 1
            row = self._enter(transaction, number)
            self._column = columns_of(transaction.txn, tables)
            transaction.then = partial(self._become, number, row, gate)

        self._transact(enter, tables)

    def _become(self, number: int, row: int, gate: Gate) -> None:
        """Become the member of that number, with its counters in that row; inside that gate."""
        if self.member != number:
            with self._counting:
                if gate.forked:  # it is the parent's member
                    raise DeadlineMissedError
                self._counters[row] = self._row
                self._row = self._counters[row].data
                self._counter_row = row
                self.member = number
            if self.page_guards is not None:
                self.page_guards.become(row, gate)
        watch(self)

    def _enter(self, transaction: Transaction, number: int) -> int:
        """Write the row of member `number`; return its row of counters."""
        transaction.member = number
        self._remove_dead(transaction)
        try:
            row = add_member(transaction)
        except LookupError:
            raise StoreError(
                f"{MEMBER_ROWS} processes have {self.store.directory} open; close some"
            ) from None
        if self.store.sole and transaction.meta.scanning:
            load_saved(transaction, self.store.directory)
        return row

    def close(self) -> None:
        """Give up reservations and holds, leave the store, and mark it clean if no other process
        has it open.

        Ends in bounded time: if the gate cannot be taken, other processes reclaim this member's
        slots later.
        """
        # or a forked child that lost the store: it has nothing to give up
        if self.closed:
            _sessions.discard(self)
            return
        unwatch(self)
        # another thread may be inside the gate; then the last reference to the lock file closes it
        shared = False
        gate = self.gate
        try:
            gate.run(self._finish, _LEAVE_SECONDS, exclusive=True)
        except DeadlineMissedError:
            shared = True
        except Exception as error:
            if not gate.forked and not self._is_trouble(error):
                raise
        finally:
            self.closed = True
            with self._counting:
                # copied, since another member may soon get the row
                self._row = np.array(self._row).data
                self._meters.leave()
            if self.page_guards is not None:
                self.page_guards.leave()
            if self.member:
                self.store.locks.unlock(MEMBERS + self.member)
            self.store.release()
            if not shared:
                self.store.locks.close()
                pages = self._pages
                self._pages = None
                if pages is not None:
                    pages.close()
            _sessions.discard(self)

    def _finish(self) -> None:
        """Leave; the last process to leave a store on disk syncs it and marks it clean."""
        tables = self._tables
        state = self.store.state
        try:
            if self.lost:
                return
            if tables is not None and self.member:
                # if the map is full the tables stay sound, with a dead member in them
                with contextlib.suppress(lmdb.MapFullError):
                    self._transact(partial(leave, counters=self._counters))
            if (
                tables is not None
                and state.kind == "file"
                and not state.private
                and self.store.is_last()
            ):
                saved = self.save_hints()
                tables.env.sync(True)
                self.store.mark_clean(tables.used_bytes())
                if saved:
                    self.hints.remove()
        finally:
            self.closed = True
            self._shut()

    def before_fork(self, until: float) -> None:
        """Keep threads out and close the tables, so that no transaction and no environment is in
        use in two processes.

        The parent releases the gate after the fork; its next call opens the tables again.
        """
        if self.gate.hold(until - time.monotonic()):
            self._shut()

    def after_fork_in_child(self) -> None:
        """Start without reservations, without a member and with separate locks, until the first
        call.
        """
        gate = self.gate
        gate.forked = True
        for user in [*gate.users]:
            user.close_in_child()
        # closed, unless another thread of the parent was using them
        self._tables = None
        self._deferred.clear()
        # what calls of the parent own is freed by the parent
        self.orphans.clear()
        self.writers.clear()
        self._counting = threading.Lock()
        self._row = np.zeros(WIDTH, np.uint64).data
        self._gauge_parts = {}
        # a call of the parent that goes on in the child may still have the one before
        self._meters.release()
        self._meters = RequestMeters()
        self.gate = Gate(self.store.locks, self._bell)
        self.member = 0
        self.pid = os.getpid()
        # that call gets a ValueError if it has them
        for cells in self.columns.cells:
            cells.release()
        self.columns.cells = self.columns.new_cells()
        self.columns.forget_contexts()
        if self.page_guards is not None:
            self.page_guards.marks = OwnMarks()
        # the fork copied its memory, so the child's slots are not the parent's
        if self.store.state.private:
            self.closed = True
            self.store.locks.close()
        if not self.closed:
            try:
                self.store = reopen_store(self.store)
            except (StoreError, OSError):
                self.lost = True


def _do_late(
    work: Callable[[Transaction], T], transaction: Transaction
) -> T | None:
    """Run deferred work. Errors of wrong use are dropped, since no caller waits for the result."""
    try:
        return work(transaction)
    except (ValueError, struct.error) as error:
        if is_damage(error):
            raise
    return None


class _Forking(threading.local):
    """The sessions that a fork of this thread has closed; two threads may fork at once."""

    def __init__(self) -> None:
        self.sessions: tuple[Session, ...] = ()
        # an item for each hold of `Tables.opening`: a signal handler may fork within a fork
        self.holds: list[bool] = []

    def let_go(self) -> None:
        """Release `Tables.opening`, if this fork holds it."""
        if self.holds:
            try:
                self.holds.pop()
            finally:
                Tables.opening.release()


_forking = _Forking()


def _before_fork() -> None:
    until = time.monotonic() + _FORK_SECONDS
    # built-in functions: no signal handler runs between taking it and recording that
    _forking.holds.extend(
        filter(None, map(Tables.opening.acquire, [True], [_FORK_SECONDS]))
    )
    # a signal handler may fork in the middle of a transaction: that session keeps its gate
    _forking.sessions = tuple(
        session for session in _sessions if not session.gate.entered()
    )
    for session in _forking.sessions:
        session.before_fork(until)


def _after_in_parent() -> None:
    note_fork()
    for session in _forking.sessions:
        session.gate.let_go()
    _forking.let_go()


def _after_in_parent_again() -> None:
    """Repeat the first hook: it may have ended in an exception of a signal handler."""
    _after_in_parent()
    # references would keep the files of closed sessions open
    _forking.sessions = ()


def _let_go_in_child() -> None:
    _forking.sessions = ()
    _forking.let_go()
    # by a thread of the parent
    if not Tables.opening._is_owned():  # type: ignore[attr-defined]
        Tables.opening._at_fork_reinit()  # type: ignore[attr-defined]


def _after_in_child() -> None:
    """Close in a child what is its parent's. No lock is tried before the child has given up its
    parent's.
    """
    take_all(
        [
            *in_child(),
            *(tables.close_in_child for tables in without_gate),
            _let_go_in_child,
            *(session.after_fork_in_child for session in _sessions),
        ]
    )


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_in_parent,
    after_in_child=_after_in_child,
)
os.register_at_fork(after_in_parent=_after_in_parent_again)
