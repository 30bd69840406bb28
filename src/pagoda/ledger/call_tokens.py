"""What a call owns in a store, and how it is given up if the call is interrupted.

A signal handler may raise an exception at any line of a call. Nothing is undone there. What the
call owns hangs on its `CallToken`; if the call does not hand that on, the token becomes an
*orphan* of the session (`Session.orphans`), by one call of a built-in set, which no signal handler
interrupts. The next write transaction of this process gives up what orphans own, as it frees the
slots of dead members: but not before the last view that the call lent of its slots has ended,
since other threads, or I/O, may still write there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pagoda.ledger import allocation, hold_pin_remove
from pagoda.ledger.outcomes import Outcome, Reserved
from pagoda.ledger.transaction import Transaction

Bytes = NDArray[np.uint8]


class CallToken:
    """What one call owns in a store. Used by the thread of the call; as an orphan, by any."""

    __slots__ = ("ended", "held", "made", "views", "waits")

    def __init__(self) -> None:
        # reserved by each transaction, committed or not; None: by an earlier call
        self.made: list[tuple[Transaction | None, Sequence[Outcome]]] = []
        # chunks (slot, generation) that each transaction holds
        self.held: list[tuple[Transaction, list[tuple[int, int]]]] = []
        # the arrays on which all views of these slots are based
        self.views: list[weakref.ref[Bytes]] = []
        # called once all this is given up
        self.ended: Callable[[], object] | None = None
        # what waits for the end of the views, once this is an orphan
        self.waits: Sequence[object] = ()

    def take(self, own: CallToken) -> None:
        """Own what another call reserved, which has ended well."""
        own.forget_transactions()
        self.made += own.made

    def forget_transactions(self) -> None:
        """Keep only what was committed, without the transactions, which are large."""
        self.made[:] = [
            (None, outcomes)
            for begun, outcomes in self.made
            if begun is None or begun.committed
        ]

    def lent(self) -> list[Bytes]:
        """Return the arrays under the views that have not ended."""
        return [view for each in self.views if (view := each()) is not None]

    def owns(self) -> bool:
        """Whether there is anything to give up, or there was."""
        return any(
            begun is None or begun.committed
            for begun, _ in (*self.made, *self.held)
        )

    def count(self) -> int:
        """Return how many slots it owns, or owned."""
        return sum(
            isinstance(one, Reserved)
            for _, outcomes in self.made
            for one in outcomes
        )

    def give_up(self, transaction: Transaction) -> int:
        """Free what the call reserved and end its holds; return how many chunks it looked at.

        What was committed, or has been given up already, is left alone.
        """
        count = 0
        for begun, outcomes in self.made:
            if begun is None or begun.committed:
                own = [one for one in outcomes if isinstance(one, Reserved)]
                allocation.abort(transaction, own)
                count += len(own)
        for begun, held in self.held:
            if begun.committed:
                hold_pin_remove.release(transaction, held)
                count += len(held)
        return count
