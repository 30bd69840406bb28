"""What requests say of themselves, for the chunks of one store: finds the slots of a prompt, and
passes hints on to the policy.

The contexts are in the private memory of this process (`Columns.note_contexts`): nothing of them is
in the store. `Ledger` calls `put` when it has reserved slots; `Cache` calls the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagoda.base.errors import ClosedError
from pagoda.ledger import queries
from pagoda.ledger.allocation import ReserveRequest
from pagoda.ledger.eviction_policy import Evictor
from pagoda.ledger.ghost_table import marks_of
from pagoda.ledger.locks import DeadlineMissedError
from pagoda.ledger.outcomes import Reserved
from pagoda.ledger.session import Session, UnavailableError
from pagoda.ledger.session_numbers import SessionNumbers
from pagoda.policy.request_hints import RequestHint
from pagoda.policy.reuse_context import Ending, context_of, workload_of

# chunks of answered requests that a store on disk has not received yet
_MOST_AWAITED = 4096

Rows = NDArray[np.int64]


class Asked(NamedTuple):
    """One request, as its caller describes it.

    Args:
        root: of its namespace, which names the tenant too.
        first_key: of the first chunk of its prompt; empty: not known.
        session: which conversation it belongs to; empty: none was named.
        agent: which agent of the session asks.
        ending: how its answer ended.
        session_end: the session asks for nothing more.
        drop: its prompt will not be asked for again.
    """

    root: bytes
    first_key: bytes = b""
    session: str = ""
    agent: str = ""
    ending: Ending = Ending.UNKNOWN
    session_end: bool = False
    drop: bool = False

    @property
    def workload(self) -> int:
        """Which of the workloads asks."""
        return workload_of(marks_of([self.first_key] if self.first_key else []))


class HintedChunks(NamedTuple):
    """What hints reached in one store: whether they were noted in time, chunks of the prompt that
    are there, those of them that are retained, and how many could be.
    """

    noted: bool
    present: int
    retained: int = 0
    budget: int = 0


class RequestContexts:
    """The hints of one store in this process. Thread-safe; never raises for a failure at run
    time.
    """

    def __init__(self, session: Session, evictor: Evictor) -> None:
        self._session = session
        self._evictor = evictor
        self._on_disk = session.published is not None
        # by mark, for a store on disk: the workload, the ending and the session of chunks that are
        # written later than their request is answered
        self._awaited: dict[int, tuple[int, Ending, int]] = {}
        self._numbers = SessionNumbers()
        # for the numbers; a signal handler may call in the middle of a call
        self._lock = threading.RLock()

    @property
    def are_kept(self) -> bool:
        """Whether the policy sees what requests say of themselves. Cheap."""
        return self._evictor.keeps_contexts

    def keep(self) -> bool:
        """Keep contexts from now on: eight bytes a slot. False if the policy has no use for them,
        or another thread keeps it busy.
        """
        try:
            return self._evictor.keep_contexts()
        except DeadlineMissedError:
            return False

    def context_of(self, request: ReserveRequest) -> int:
        """Return the context that the new chunks of a request will have."""
        if request.context is not None:
            return request.context
        if request.start or not self.are_kept:
            return 0
        return workload_of(marks_of(request.keys[:1]))

    def put(self, request: ReserveRequest) -> None:
        """Note the chunks for which slots were reserved."""
        if not self.are_kept:
            return
        made = [one for one in request.outcomes if isinstance(one, Reserved)]
        slots = np.array([one.slot for one in made], np.int64)
        evictor = self._evictor
        evictor.put(slots, self.context_of(request))
        for one, slot in zip(made, slots, strict=True):
            if not self._awaited:
                break
            mark = int(marks_of([one.key])[0])
            known = self._awaited.pop(mark, None)
            if known is not None:
                workload, ending, session = known
                evictor.put(slot[None], context_of(workload, ending))
                evictor.used(slot[None], session, workload)

    def arriving(self, asked: Asked, parent: int | None, stamp: int) -> int:
        """Return the context that the new chunks of a request will have. `parent`: the slot of the
        chunk before them.
        """
        return self._evictor.arriving(self._hint(asked), parent, stamp)

    def note_use(
        self, keys: Sequence[bytes], asked: Asked, deadline_seconds: float = 1.0
    ) -> None:
        """Note which session asked for these chunks."""
        if self.are_kept and keys:
            until = time.monotonic() + deadline_seconds
            rows, _ = self._find(keys, deadline_seconds)
            session = self._hint(asked).session
            evictor = self._evictor
            evictor.used(rows, session, asked.workload, until)

    def note_answer(
        self,
        keys: Sequence[bytes],
        asked: Asked,
        retain_seconds: float = 0.0,
        context: int | None = None,
        deadline_seconds: float = 1.0,
    ) -> HintedChunks:
        """Note how a request ended, for all chunks of its prompt; keep them for that long, as far
        as the budget allows. `context`: what `arriving` returned for it; None: it was not asked.
        """
        until = time.monotonic() + deadline_seconds
        evictor = self._evictor
        rows, absent = self._find(keys, deadline_seconds)
        hint = self._hint(asked)
        now = self._session.clock.monotonic_ns()
        stamp = self._session.stamp(now)
        done = evictor.answered(rows, hint, context, stamp, until)
        if done and self._on_disk:
            self._await(absent, hint)
        if not retain_seconds:
            return HintedChunks(done, len(rows))
        retained = evictor.retain(rows, now, retain_seconds, until)
        return HintedChunks(done, len(rows), retained, evictor.retained_budget)

    def _hint(self, asked: Asked) -> RequestHint:
        """Return what a request says, with numbers for names."""
        with self._lock:
            number = self._numbers.number(
                asked.root,
                asked.session,
                asked.agent,
                self._evictor.forget_session,
            )
            over: tuple[int, ...] = ()
            if asked.session_end:
                over = self._numbers.of(asked.root, asked.session)
        return RequestHint(asked.workload, asked.ending, number, over, asked.drop)

    def _find(
        self, keys: Sequence[bytes], deadline_seconds: float
    ) -> tuple[Rows, list[bytes]]:
        """Return in order the slots of those of these chunks that are there or are being stored,
        and the keys of the others. Nothing is there if the tables do not answer.
        """
        try:
            found = self._session.read(
                partial(queries.find_slots, keys=keys), deadline_seconds
            )
        except (UnavailableError, ClosedError):
            return np.empty(0, np.int64), []
        here = [place for place in found if place is not None]
        slots = np.array([slot for slot, _ in here], np.int64)
        generations = np.array([number for _, number in here], np.uint64)
        rows: Rows = slots[self._session.columns.generation[slots] == generations]
        absent = [
            key for key, place in zip(keys, found, strict=True) if place is None
        ]
        return rows, absent

    def _await(self, keys: Sequence[bytes], hint: RequestHint) -> None:
        """Remember a hint for chunks that are still to be written."""
        ending = Ending.SESSION if hint.drop else hint.ending
        for key in keys:
            mark = int(marks_of([key])[0])
            self._awaited[mark] = (hint.workload, ending, hint.session)
        for mark, (workload, _, session) in list(self._awaited.items()):
            if session in hint.over:
                known = (workload, Ending.SESSION, session)
                self._awaited[mark] = known
        while len(self._awaited) > _MOST_AWAITED:
            oldest = next(iter(self._awaited), None)
            if oldest is not None:
                self._awaited.pop(oldest, None)
