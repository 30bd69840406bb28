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
    next_gap_octave,
)

_NANOSECONDS = 10**9
_NOBODY = 0
SHARED = (1 << 16) - 1
"""In place of a session: several sessions used the chunk."""

Rows = NDArray[np.int64]


class RequestHint(NamedTuple):
    """What is known of one request.

    Args:
        workload: who asks, see `reuse_context`.
        ending: how its answer ended.
        session: which session it belongs to, hashed into 1 to 65,534; 0: none.
        over: the sessions that ask for nothing more after this request.
    """

    workload: int = 0
    ending: Ending = Ending.UNKNOWN
    session: int = _NOBODY
    over: tuple[int, ...] = ()


class RequestHints:
    """Writes hints into the contexts of one tier. Not thread-safe."""

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts

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
        self._contexts.of_slots[rows] = context
        self._contexts.sessions[rows] = _NOBODY
        self._contexts.hinted_at[rows] = 0

    def answered(
        self, rows: Rows, hint: RequestHint, context: int, stamp: int
    ) -> None:
        """Note how a request ended, for all chunks of its prompt that are in slots. `context` is
        that of its new chunks.
        """
        contexts = self._contexts
        before = contexts.sessions[rows]
        # also by a request of no session: it is another one's
        is_shared = (before != _NOBODY) & (before != hint.session)
        contexts.sessions[rows] = np.where(is_shared, SHARED, hint.session)
        if hint.session != _NOBODY:
            self._leave(hint.session, rows)
        if hint.ending:
            octave = gap_octave(context)
            found = contexts.of_slots[rows]
            contexts.of_slots[rows] = ended(found, hint.ending, octave)
            contexts.hinted_at[rows] = stamp // _NANOSECONDS

    def _leave(self, session: int, rows: Rows) -> None:
        """Note for the other chunks of a session that it has gone on without them."""
        contexts = self._contexts
        own = np.flatnonzero(contexts.sessions == session)
        left = own[~np.isin(own, rows)]
        contexts.of_slots[left] = ended(contexts.of_slots[left], Ending.LEFT, 0)

    def end(self, session: int) -> None:
        """Note that a session is over, for the chunks that no other session used."""
        contexts = self._contexts
        rows = np.flatnonzero(contexts.sessions == session)
        contexts.of_slots[rows] = ended(
            contexts.of_slots[rows], Ending.SESSION, 0
        )

    def _gap_octave(self, slot: int, stamp: int) -> int:
        contexts = self._contexts
        hinted_at = int(contexts.hinted_at[slot])
        if not hinted_at:
            return 0
        before = gap_octave(int(contexts.of_slots[slot]))
        seconds = stamp / _NANOSECONDS - hinted_at
        return next_gap_octave(before, seconds)
