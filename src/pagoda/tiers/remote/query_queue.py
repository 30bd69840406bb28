"""Short queries to a remote store, for which callers wait a moment: one bounded queue, served by
one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeAlias

from pagoda.base.metrics import Reason
from pagoda.base.signal_safe_threads import Answer, Condition
from pagoda.tiers.remote.store_client import StoreConnection

_MOST = 64

QueryFunction: TypeAlias = Callable[[StoreConnection], int]


class Query(NamedTuple):
    """A query and the future of its answer: a number, or why there is no answer."""

    name: object
    function: QueryFunction
    answer: Future[int | Reason]


class QueryQueue:
    """Holds queries from their submission to their answer. Thread-safe."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._waiting: deque[Query] = deque()
        self._unanswered: dict[object, Query] = {}
        self._closed = False

    def submit(
        self, name: object, function: QueryFunction
    ) -> Future[int | Reason]:
        """Queue a query; if one with the same name is unanswered, return its future instead."""
        with self._changed:
            twin = self._unanswered.get(name)
            if twin is not None:
                return twin.answer
            query = Query(name, function, Answer())
            if self._closed or len(self._unanswered) >= _MOST:
                query.answer.set_result(
                    Reason.CLOSED if self._closed else Reason.QUEUE_FULL
                )
                return query.answer
            self._unanswered[name] = query
            self._waiting.append(query)
            self._changed.notify_all()
            return query.answer

    def is_unanswered(self, name: object) -> bool:
        """Return whether a query of this name waits for its answer."""
        with self._changed:
            return name in self._unanswered

    def take(self, timeout: float | None) -> Query | None:
        """Wait for the next query and return it; None after `timeout` seconds, or when woken."""
        with self._changed:
            if not self._waiting and not self._closed:
                self._changed.wait(timeout)
            return self._waiting.popleft() if self._waiting else None

    def wake(self) -> None:
        """Make `take` return."""
        with self._changed:
            self._changed.notify_all()

    def finish(self, query: Query, answer: int | Reason) -> None:
        """Set the answer of a query."""
        with self._changed:
            self._unanswered.pop(query.name, None)
        query.answer.set_result(answer)

    def close(self) -> None:
        """Accept nothing more; answer waiting queries with CLOSED."""
        with self._changed:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for query in left:
            self.finish(query, Reason.CLOSED)
