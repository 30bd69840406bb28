"""Request hints: what a caller says of a request, written into the contexts of its chunks.

Only the chunks of the request's own prompt change, or those that its session used. `hindsight`
learns from them what they are worth, so a hint that is wrong is worth little after a while.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagoda.policy import Contexts
from pagoda.policy.reuse_context import (
    Ending,
    context_of,
    ended,
    gap_octave,
    hint_second,
    mark_of,
    next_gap_octave,
    seconds_since,
)

_NOBODY = 0
SHARED = (1 << 16) - 1
"""In place of a session: several sessions used the chunk."""

Rows = NDArray[np.int64]
Generations = NDArray[np.uint64]


class RequestHint(NamedTuple):
    """What is known of one request.

    Args:
        workload: who asks, see `reuse_context`.
        ending: how its answer ended.
        session: which session it belongs to, by a number of 1 to 65,534; 0: none.
        over: the sessions that ask for nothing more after this request.
        drop: nobody asks for its prompt again; what another session used stays as it is.
    """

    workload: int = 0
    ending: Ending = Ending.UNKNOWN
    session: int = _NOBODY
    over: tuple[int, ...] = ()
    drop: bool = False


class ContextWriter:
    """Writes hints into the contexts of one tier. Not thread-safe.

    `generation`: the column of the tier, which says whose chunk a slot has by now.
    """

    def __init__(self, contexts: Contexts, generation: Generations) -> None:
        self._contexts = contexts
        self._generation = generation

    def arriving(self, hint: RequestHint, parent: int | None, stamp: int) -> int:
        """Return the context of the new chunks of a request. Changes nothing.

        `parent`: the slot of the chunk before them, from which the gaps of the session are known;
        None: there is none. `stamp`: the recency of the request (ns).
        """
        octave = 0
        if parent is not None and hint.ending:
            octave = self._gap_octave(parent, stamp)
        return context_of(hint.workload, hint.ending, octave)

    def put(self, rows: Rows, context: int) -> None:
        """Note new chunks in these slots, with this context."""
        contexts = self._contexts
        contexts.of_slots[rows] = context
        contexts.sessions[rows] = _NOBODY
        contexts.hinted_at[rows] = 0
        contexts.marks[rows] = mark_of(self._generation[rows])

    def used(self, rows: Rows, session: int, workload: int = 0) -> None:
        """Note that a request of this session asked for these chunks; 0: of none."""
        contexts = self._contexts
        same = contexts.marks[rows] == mark_of(self._generation[rows])
        if not same.all():
            # chunks of other processes, and of earlier ones
            self.put(rows[~same], context_of(workload))
        before = contexts.sessions[rows]
        # also by a request of no session: it is another one's
        is_shared = (before != _NOBODY) & (before != session)
        contexts.sessions[rows] = np.where(is_shared, SHARED, session)

    def answered(
        self, rows: Rows, hint: RequestHint, context: int, stamp: int
    ) -> Rows:
        """Note how a request ended, for all chunks of its prompt that are in slots; return the
        slots that it drops. `context` is that of its new chunks.
        """
        contexts = self._contexts
        self.used(rows, hint.session, hint.workload)
        if hint.session != _NOBODY:
            self._leave(hint.session, rows)
        if hint.ending:
            octave = gap_octave(context)
            found = contexts.of_slots[rows]
            contexts.of_slots[rows] = ended(found, hint.ending, octave)
            contexts.hinted_at[rows] = hint_second(stamp)
        if not hint.drop:
            return np.empty(0, np.int64)
        dropped: Rows = rows[contexts.sessions[rows] == hint.session]
        self._end(dropped, Ending.SESSION)
        return dropped

    def end(self, session: int) -> None:
        """Note that a session is over, for the chunks that no other session used."""
        self._end(self._of(session), Ending.SESSION)

    def forget(self, session: int) -> None:
        """Forget which chunks a session used: another one gets its number."""
        sessions = self._contexts.sessions
        sessions[sessions == session] = SHARED

    def last_hinted(self, rows: Rows) -> int | None:
        """Return the last of these slots that had a hint before, None if none had."""
        contexts = self._contexts
        same = contexts.marks[rows] == mark_of(self._generation[rows])
        hinted = rows[same & (contexts.hinted_at[rows] > 0)]
        return int(hinted[-1]) if len(hinted) else None

    def _leave(self, session: int, rows: Rows) -> None:
        """Note for the other chunks of a session that it has gone on without them."""
        own = self._of(session)
        self._end(own[~np.isin(own, rows)], Ending.LEFT)

    def _end(self, rows: Rows, ending: Ending) -> None:
        contexts = self._contexts
        contexts.of_slots[rows] = ended(contexts.of_slots[rows], ending, 0)

    def _of(self, session: int) -> Rows:
        """Return the slots with chunks that only this session used."""
        contexts = self._contexts
        rows = np.flatnonzero(contexts.sessions == session)
        same = contexts.marks[rows] == mark_of(self._generation[rows])
        own: Rows = rows[same]
        return own

    def _gap_octave(self, slot: int, stamp: int) -> int:
        contexts = self._contexts
        row = np.array([slot])
        generations = self._generation[row]
        hinted_at = int(contexts.hinted_at[slot])
        is_known = contexts.marks[row] == mark_of(generations)
        if not hinted_at or not is_known.all():
            return 0
        before = gap_octave(int(contexts.of_slots[slot]))
        return next_gap_octave(before, seconds_since(hinted_at, stamp))
