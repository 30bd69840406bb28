"""What the threads of a remote tier work on: moves of chunks, and in the background small questions and probes."""

from __future__ import annotations

from pagoda.metrics import Reason
from pagoda.threads import Event
from pagoda.tiers.io_queue import IoQueue
from pagoda.tiers.remote.query_queue import Ask, Question
from pagoda.tiers.remote.remote_hand import RemoteHand
from pagoda.tiers.remote.remote_worker import Line, RemoteStore
from pagoda.tiers.remote.store_client import Link

_TICK_SECONDS = 0.1  # while the breaker is open: between two looks whether it is time to ask


class RemoteCrew:
    """Moves chunks to and from one remote store. Thread-safe; see `Crew`."""

    batch_chunks = 1

    def __init__(self, store: RemoteStore, connections: int) -> None:
        self._store = store
        self.name = store.remote.name
        self.readers = 1 if connections > 1 else 0

    def begin(self, queue: IoQueue) -> None:
        """Work for this queue, with new locks."""
        self._queue = queue
        self._store.renew()

    def hand(self) -> RemoteHand:
        """What a thread works with."""
        return RemoteHand(self._store, self._queue)

    def background(self, stop: Event) -> None:
        """Answer questions and keep the connection for them open; ask a store that rests whether it is back."""
        store, line = self._store, Line(self._store)
        pause = store.remote.keepalive_seconds
        try:
            while not stop.is_set():
                ask = store.asks.take(_TICK_SECONDS if store.breaker.open else pause)
                if ask is not None:
                    self._answer(ask, line)
                if stop.is_set():
                    break
                if store.breaker.open and not store.breaker.resting:
                    self._asked(line, self._probe, "asking whether it is back")
                elif pause is not None and not store.breaker.open and line.idle_for(pause):
                    self._asked(line, self._probe, "keeping a connection open")
        finally:
            store.asks.close()
            line.close()

    def _answer(self, ask: Ask, line: Line) -> None:
        skipped = self._store.breaker.open
        answer = Reason.TIER_SKIPPED if skipped else self._asked(line, ask.question, "a question")
        self._store.asks.answered(ask, answer)

    def _asked(self, line: Line, question: Question, what: str) -> int | Reason:
        try:
            return line.use(question, what)
        except Exception as error:  # noqa: BLE001  # the border of the background: others are still to be answered
            return self._store.trouble(error, what)

    def _probe(self, link: Link) -> int:
        link.ping(self._store.until())
        return 0

    def interrupt(self) -> None:
        """Wake the background, and let all that waits for the store fail."""
        self._store.interrupt()

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter of this process."""
        self._store.count(name, number)

    def trouble(self, error: Exception, what: str) -> Reason:
        """Note that something failed."""
        return self._store.trouble(error, what)

    def close(self) -> None:
        """Let go of what no thread of ours holds: each has let go of its own link."""
        self._store.close()
