"""`SlotWriter`: how a call fills slots. It reserves, lends views, commits, and gives up the rest.

    with SlotWriter(ledger, slab) as writer:
        outcomes = writer.reserve(keys, namespace=root)
        ...  # copy into writer.views(reserved)
        writer.commit(reserved)

Whatever ends the block, what it reserved and did not commit is given up. After an exception of a
signal handler, or if the block is a generator or a task that was cancelled, copies into the views
may go on in other threads: then not before the last view has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol, Self, Unpack
from weakref import ref

from pagoda.base.finalizers import Finalizer
from pagoda.ledger.allocation import ReserveOptions
from pagoda.ledger.call_tokens import Bytes, CallToken
from pagoda.ledger.ledger import Ledger
from pagoda.ledger.outcomes import CommitResult, Outcome, Reserved

# the wait for a transaction that gives up; a later one does the same
_GIVE_UP_SECONDS = 0.1


class ViewedSlab(Protocol):
    """A slab whose slots can be viewed."""

    def views_on(self, slots: Sequence[int]) -> tuple[list[Bytes], Bytes]:
        """Return the bytes of some slots, and the array that lives as long as they are used."""


class SlotWriter:
    """Fills slots of one ledger. Used by one thread, once; `commit` and `abort` by any.

    An exception can come before the first line of `__exit__`, or in it. Then the writer is
    collected, and a thread gives up what it owns.
    """

    def __init__(
        self,
        ledger: Ledger,
        slab: ViewedSlab | None = None,
        *,
        outlived: bool = False,
        ended: Callable[[], object] | None = None,
    ) -> None:
        """
        Args:
            ledger: of the store.
            slab: that of the store, for `views`.
            outlived: I/O into the views may go on after the block. Without an exception, whoever
                waits for that I/O then commits or aborts what is left.
            ended: called after the slots were given up and their views have ended. It must not
                refer to the writer.
        """
        self._ledger = ledger
        self._slab = slab
        self._outlived = outlived
        self._token = CallToken()
        self._token.ended = ended
        # outcomes, and how many of them were committed or aborted
        self._outcomes = 0
        self._settled = 0

    def __enter__(self) -> Self:
        lost = partial(_lost, self._ledger, self._token)
        self._ledger.session.writers[self._token] = Finalizer(self, lost)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        is_all = self._settled == self._outcomes or self._outlived
        if kind is not None or not (is_all or self._is_settled()):
            if not self._outlived and (
                kind is None or issubclass(kind, Exception)
            ):
                # the function that copied has returned, also by raising: its copies have ended
                self._token.views.clear()
            _give_up(self._ledger, self._token)
        # last: if this is interrupted before, the finalizer does the rest
        self._ledger.session.writers.pop(self._token, None)

    def reserve(
        self,
        keys: Sequence[bytes],
        *,
        stamp: int | None = None,
        deadline_seconds: float = 1.0,
        **options: Unpack[ReserveOptions],
    ) -> list[Outcome]:
        """Do what `Ledger.reserve` does; the writer owns what is reserved."""
        outcomes = self._ledger.reserve(
            keys,
            stamp=stamp,
            deadline_seconds=deadline_seconds,
            token=self._token,
            **options,
        )
        self._outcomes += len(outcomes)
        if self._outlived:  # a long prompt has many
            self._token.forget_transactions()
        return outcomes

    def views(self, reserved: Sequence[Reserved]) -> list[Bytes]:
        """Return the bytes of reserved slots."""
        assert self._slab is not None
        views, base = self._slab.views_on([one.slot for one in reserved])
        self._token.views.append(ref(base))
        return views

    def commit(
        self, reserved: Sequence[Reserved], deadline_seconds: float = 1.0
    ) -> list[CommitResult]:
        """Do what `Ledger.commit` does."""
        done = self._ledger.commit(reserved, 0, deadline_seconds, self._token)
        self._settled += len(reserved)
        return done

    def abort(
        self, reserved: Sequence[Reserved], deadline_seconds: float = 1.0
    ) -> None:
        """Do what `Ledger.abort` does."""
        self._ledger.abort(reserved, deadline_seconds)
        self._settled += len(reserved)

    def _is_settled(self) -> bool:
        """Whether all that was reserved has been committed or aborted."""
        return self._settled >= self._token.count()


def _lost(ledger: Ledger, token: CallToken) -> None:
    """Do what `__exit__` did not do, on another thread."""
    _give_up(ledger, token)
    ledger.session.writers.pop(token, None)


def _give_up(ledger: Ledger, token: CallToken) -> None:
    """Let the ledger give up what a token owns: now, or once no view of it is left. May be
    repeated.
    """
    ledger.session.orphans.add(token)
    lent = token.lent()
    token.waits = [
        Finalizer(one, partial(_give_up, ledger, token)) for one in lent
    ]
    if not lent:
        ledger.session.drop_orphans(_GIVE_UP_SECONDS)
        if token.ended is not None:
            token.ended()
