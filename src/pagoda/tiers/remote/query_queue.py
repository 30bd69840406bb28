"""Small questions to a remote store that somebody waits a moment for: one bounded queue, answered on one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeAlias

from pagoda.metrics import Reason
from pagoda.threads import Answer, Condition
from pagoda.tiers.remote.store_client import Link

__all__ = ["Ask", "Asks", "Question"]

_MOST = 64

Question: TypeAlias = Callable[[Link], int]


class Ask(NamedTuple):
    """A question on its way, and where its answer goes: a number, or why there is none."""

    name: object
    question: Question
    answer: Future[int | Reason]


class Asks:
    """Questions from when they are put until they are answered. Thread-safe."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._waiting: deque[Ask] = deque()
        self._under_way: dict[object, Ask] = {}
        self._closed = False

    def put(self, name: object, question: Question) -> Future[int | Reason]:
        """Queue a question, unless one of the same name is under way: then its answer is this one's too."""
        with self._changed:
            twin = self._under_way.get(name)
            if twin is not None:
                return twin.answer
            ask = Ask(name, question, Answer())
            if self._closed or len(self._under_way) >= _MOST:
                ask.answer.set_result(Reason.CLOSED if self._closed else Reason.QUEUE_FULL)
                return ask.answer
            self._under_way[name] = ask
            self._waiting.append(ask)
            self._changed.notify_all()
            return ask.answer

    def take(self, timeout: float | None) -> Ask | None:
        """The next question; None after `timeout` seconds, or when woken."""
        with self._changed:
            if not self._waiting and not self._closed:
                self._changed.wait(timeout)
            return self._waiting.popleft() if self._waiting else None

    def wake(self) -> None:
        """Let `take` return."""
        with self._changed:
            self._changed.notify_all()

    def answered(self, ask: Ask, answer: int | Reason) -> None:
        """A question has its answer."""
        with self._changed:
            self._under_way.pop(ask.name, None)
        ask.answer.set_result(answer)

    def close(self) -> None:
        """Take nothing more; what waits is answered with CLOSED."""
        with self._changed:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for ask in left:
            self.answered(ask, Reason.CLOSED)
