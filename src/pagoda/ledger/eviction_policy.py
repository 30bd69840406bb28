"""The one way to a ledger's policy: the ledger and `replay` ask it for victims and admission, and
report uses.

The order itself is made by the policies: `pagoda.policy`. Blocks on a device have another order of
eviction: see `pagoda.blocks.tree`.

The work under the lock takes a time that does not depend on the number of slots; what does, `rank`
and `prepare`, runs without the lock, on the upkeep thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pagoda import policy as policies
from pagoda.base.metrics import Reason
from pagoda.ledger.columns import Columns
from pagoda.ledger.ghost_table import Marks
from pagoda.ledger.locks import DeadlineMissedError
from pagoda.ledger.retained_chunks import RetainedChunks
from pagoda.policy import HITS_CELLS, Newcomers
from pagoda.policy.hindsight import Hindsight, HintedHindsight
from pagoda.policy.prefill_cost import PrefillCost
from pagoda.policy.request_hints import ContextWriter, RequestHint

GHOST_REASONS = (
    Reason.EVICTED,
    Reason.CLEARED,
    Reason.REMOVED,
    Reason.FAILED_CHECK,
    Reason.NOT_ADMITTED,
)
_REFUSED = GHOST_REASONS.index(Reason.NOT_ADMITTED)

_MOST_HITS = 0xFFFFFFFF  # then they begin again, as in the array
# the wait for another thread of this process, if the caller has no deadline
_MOST_SECONDS = 1.0
# the same inside the gate
_INSIDE_SECONDS = 0.01

Rows = NDArray[np.int64]
T = TypeVar("T")


class Evictor:
    """One policy over the columns of one ledger. Thread-safe; callers pass it the time.

    `stamp` is recency, `now` monotonic time, both in ns. `until`: the end of the call's time, as
    `time.monotonic()` tells it; by default a call waits up to a second for other threads.
    """

    def __init__(
        self, policy: str, columns: Columns, cost: PrefillCost | None = None
    ) -> None:
        """`cost`: what the policy counts in place of chunks. ValueError as `policy.make`."""
        self.policy = policy
        self._columns = columns
        self._policy = policies.make(policy, columns, cost)
        # an RLock, because it knows its owner; it is never taken twice
        self._lock = threading.RLock()
        # whether this thread is
        self._is_inside: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        self.shared_values = self._policy.shared_values
        # None: nobody keeps contexts
        self._writer: ContextWriter | None = None
        self._retained = RetainedChunks(columns)

    def touch(
        self,
        rows: Rows,
        stamps: Rows,
        asked: bool,
        until: float | None = None,
    ) -> None:
        """Raise the recency of chunks and, if a request asked for them, their hits.

        Does nothing if other threads do not leave the policy in time: these are hints.
        """

        # as `_run`, whose calls would cost a look-up 1 us
        lock = self._lock
        if self._is_inside():
            return
        try:
            if lock.acquire(False) or lock.acquire(timeout=_left(until)):
                self._policy.touch(rows, stamps, asked)
                if asked:
                    self._columns.hits[rows] += np.uint32(1)
        finally:
            try:  # noqa: SIM105
                lock.release()
            except RuntimeError:
                pass

    def touch_few(
        self,
        slots: Sequence[int],
        stamps: Sequence[int],
        asked: bool,
        until: float | None = None,
    ) -> None:
        """Do the same for few chunks, one by one."""
        lock = self._lock
        if self._is_inside():
            return
        try:
            taken = lock.acquire(False) or lock.acquire(timeout=_left(until))
            if taken:
                self._policy.touch_few(slots, stamps, asked)
                if asked:
                    hits = self._columns.cells[HITS_CELLS]
                    for slot in slots:
                        hits[slot] = (hits[slot] + 1) & _MOST_HITS
        finally:
            try:  # noqa: SIM105
                lock.release()
            except RuntimeError:
                pass

    def admit(
        self,
        marks: Marks,
        stamps: Rows,
        room: int,
        now: int,
        *,
        admit_all: bool = False,
        refuse_all: bool = False,
        already_admitted: bool = False,
        arriving: int = 0,
        stamp: int = 0,
        until: float | None = None,
    ) -> tuple[int, NDArray[np.uint32]]:
        """Return how many newcomers, in chain order, are admitted, and the hits with which each
        begins.

        Leaves ghosts of the newcomers that are not admitted. DeadlineMissedError if other threads
        do not leave the policy in time.

        `admit_all`, `refuse_all`: overrule the policy, which is still informed. `already_admitted`:
        an earlier call admitted all of them; only their hits are returned. `arriving`: the context
        that they will have. `stamp`: of the request, so that the policy knows their positions.
        """
        ghosts = self._columns.table
        known_hits, last_use = ghosts.recall(marks)
        if already_admitted:
            return len(marks), known_hits + (last_use > 0)
        # the policy may correct the hits that were recalled
        contexts = ghosts.recall_contexts(marks)
        if self._retained.is_due(now):
            self._run(lambda: self._retained.renew(now), until)
        newcomers = Newcomers(
            stamps, known_hits, last_use, contexts, arriving, stamp
        )
        count = self._run(lambda: self._policy.admit(newcomers, room, now), until)
        count = len(marks) if admit_all else 0 if refuse_all else count
        hits = known_hits + (last_use > 0)
        if count < len(marks):
            ghosts.remember(
                marks[count:],
                stamps[count:],
                hits[count:],
                int(stamps[0]),
                _REFUSED,
                np.full(len(marks) - count, arriving, np.uint16),
            )
        return count, hits

    def refuse(
        self,
        marks: Marks,
        stamps: Rows,
        now: int,
        arriving: int = 0,
        stamp: int = 0,
    ) -> None:
        """Record requests for newcomers that follow one that was not admitted."""
        with contextlib.suppress(DeadlineMissedError):
            self.admit(
                marks,
                stamps,
                len(marks),
                now,
                refuse_all=True,
                arriving=arriving,
                stamp=stamp,
            )

    def victims(
        self, count: int, stamp: int, now: int, until: float | None = None
    ) -> Rows:
        """Return up to `count` slots to evict for newcomers of recency `stamp`, in the order of
        eviction.

        DeadlineMissedError if other threads do not leave the policy in time.
        """
        if self._retained.is_due(now):
            self._run(lambda: self._retained.renew(now), until)
        return self._run(lambda: self._policy.victims(count, stamp, now), until)

    @property
    def is_low(self) -> bool:
        """Whether few ranked slots are left, so that `prepare` or `rank` should be called soon.
        Cheap.
        """
        return self._policy.is_low

    def rank(self, least: int, stamp: int, now: int) -> None:
        """Rank all slots, so that `victims` knows at least the first `least`. Not for the path of a
        request: it takes time in proportion to the number of slots. In parallel to other calls.
        """
        self._policy.rank(least, stamp, now)

    def prepare(self, stamp: int, now: int) -> None:
        """Do work in advance that the next calls would have to do. Called by one thread, in
        parallel to other calls.
        """
        if self._retained.is_due(now):
            with contextlib.suppress(DeadlineMissedError):
                self._run(lambda: self._retained.renew(now), None)
        self._policy.prepare(stamp, now)

    def share(self, values: NDArray[np.float64]) -> None:
        """Merge what the processes have learned. Inside the gate, so a thread that keeps the policy
        is not waited for: the next call merges it.
        """
        with contextlib.suppress(DeadlineMissedError):
            self._run(
                lambda: self._policy.share(values),
                time.monotonic() + _INSIDE_SECONDS,
            )

    # ---- what requests say of themselves

    @property
    def keeps_contexts(self) -> bool:
        """Whether the policy sees what requests say of themselves."""
        return self._writer is not None

    def keep_contexts(self, until: float | None = None) -> bool:
        """Keep contexts from now on; False if the policy makes no use of them.
        DeadlineMissedError as in `victims`.
        """

        def begin() -> bool:
            before = self._policy
            if self._writer is None and isinstance(before, Hindsight):
                contexts = self._columns.note_contexts()
                generation = self._columns.generation
                self._policy = HintedHindsight(self._columns, before)
                self._writer = ContextWriter(contexts, generation)
            return self._writer is not None

        return self._run(begin, until)

    def arriving(self, hint: RequestHint, parent: int | None, stamp: int) -> int:
        """Return the context that new chunks of a request will have, 0 if nobody keeps any."""
        writer = self._writer
        return 0 if writer is None else writer.arriving(hint, parent, stamp)

    def put(
        self,
        rows: Rows,
        context: int,
        until: float | None = None,
    ) -> None:
        """Note new chunks in these slots, with their context. Does nothing if other threads do not
        leave the policy in time.
        """
        if (writer := self._writer) is not None and len(rows):
            with contextlib.suppress(DeadlineMissedError):
                self._run(lambda: writer.put(rows, context), until)

    def used(
        self,
        rows: Rows,
        session: int,
        workload: int,
        until: float | None = None,
    ) -> None:
        """Note that a request of this session asked for these chunks. As `put`."""
        if (writer := self._writer) is not None and len(rows):
            with contextlib.suppress(DeadlineMissedError):
                self._run(lambda: writer.used(rows, session, workload), until)

    def answered(
        self,
        rows: Rows,
        hint: RequestHint,
        context: int | None,
        stamp: int,
        until: float | None = None,
    ) -> bool:
        """Note how a request ended, for the chunks of its prompt that are in these slots. False:
        not done in time, or nobody keeps contexts. `context`: that of its new chunks, if `arriving`
        was asked; None: as far as these chunks tell it.
        """
        writer = self._writer
        if writer is None:
            return False

        def note() -> None:
            known = context
            if known is None:
                parent = writer.last_hinted(rows)
                known = writer.arriving(hint, parent, stamp)
            dropped = writer.answered(rows, hint, known, stamp)
            for session in hint.over:
                writer.end(session)
            self._retained.release(dropped)

        try:
            self._run(note, until)
        except DeadlineMissedError:
            return False
        return True

    def forget_session(self, session: int) -> None:
        """Forget which chunks a session used. As `put`."""
        if (writer := self._writer) is not None:
            with contextlib.suppress(DeadlineMissedError):
                self._run(lambda: writer.forget(session), None)

    @property
    def retained_budget(self) -> int:
        """How many chunks may be retained at once."""
        return self._retained.budget

    def retain(
        self, rows: Rows, now: int, seconds: float, until: float | None = None
    ) -> int:
        """Evict these chunks after all others for so long; return how many there are, from the
        first on, within the budget. 0 if other threads do not leave the policy in time.
        """
        nanoseconds = int(seconds * 1e9)
        try:
            return self._run(
                lambda: self._retained.retain(rows, now, nanoseconds), until
            )
        except DeadlineMissedError:
            return 0

    def release(self, rows: Rows) -> None:
        """Retain these chunks no longer. As `put`."""
        with contextlib.suppress(DeadlineMissedError):
            self._run(lambda: self._retained.release(rows), None)

    def _run(self, work: Callable[[], T], until: float | None) -> T:
        """Run `work` while no other thread does. DeadlineMissedError if one does until then.

        Also at once on a thread that is already inside: a signal handler in the middle of a call.
        """
        lock = self._lock
        if self._is_inside():
            raise DeadlineMissedError
        try:
            if not lock.acquire(False) and not lock.acquire(timeout=_left(until)):
                raise DeadlineMissedError
            return work()
        finally:
            # built-in functions: see `Gate`
            try:  # noqa: SIM105
                lock.release()
            except RuntimeError:  # another thread has it
                pass


def _left(until: float | None) -> float:
    """Return for how many seconds a call may wait."""
    return _MOST_SECONDS if until is None else max(0.0, until - time.monotonic())
