"""What the threads of a remote tier share: the engine, what is known of its health and of what it has, counters."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from pagoda.clock import Clock
from pagoda.layout import KVLayout, itemsize
from pagoda.metrics import COUNTERS, RateLimitedLog, Reason
from pagoda.threads import if_free
from pagoda.tiers.breaker import Breaker
from pagoda.tiers.remote.presence import Memo
from pagoda.tiers.remote.query_queue import Asks
from pagoda.tiers.remote.store_client import Link, Refused, Remote, Usage

_logger = logging.getLogger("pagoda.tiers.remote")

_T = TypeVar("_T")

_SLOWEST_BYTES_PER_SECOND = 10e6  # a link that moves less is as good as hung
_FAILURES, _REST_SECONDS = 2, 1.0  # then nothing is asked of the engine but, now and then, whether it is back
_REFUSALS, _REFUSED_SECONDS = 4, 5.0  # then nothing is written for a while: it is full, or may only be read
_TOUCH_REST_SECONDS = 600.0  # after an engine refused to be touched
_MOST_ROOTS = 4096


class RemoteStore:
    """One remote store, with what is known of it. Thread-safe."""

    def __init__(
        self, layout: KVLayout, remote: Remote, codec: str, connections: int, deadline_seconds: float,
        clock: Clock,
    ) -> None:  # fmt: skip
        self.remote, self.codec = remote, codec
        self.deadline_seconds = deadline_seconds
        self._slowest = _SLOWEST_BYTES_PER_SECOND / connections  # which share the link
        self.chunk_bytes, self.fingerprint = layout.chunk_bytes, layout.fingerprint
        # what is opaque is most likely of the 16-bit types that models are served in
        self.word_bytes = min(4, itemsize(layout.planes[0].dtype)) if layout.planes else 2
        self.breaker = Breaker(clock, _FAILURES, _REST_SECONDS)
        self.refusals = Breaker(clock, _REFUSALS, _REFUSED_SECONDS)
        self.refusal = Reason.IO_ERROR  # the latest
        self.untouchable = Breaker(clock, 1, _TOUCH_REST_SECONDS)
        self.memo = Memo(clock)
        self.usage = Usage(None, None)
        self._log = RateLimitedLog(clock)
        self._counts: Counter[str] = Counter()
        self._roots: dict[bytes, None] = {}
        self.renew()

    def renew(self) -> None:
        """Begin with new locks, in a forked child too; links of a parent process are left alone."""
        self.asks = Asks()
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._stopped = False
        self.links_since = 0.0  # links that are older are replaced before their next use
        self._touching, self._touches = threading.RLock(), Line(self)
        for part in (self.breaker, self.refusals, self.untouchable, self.memo, self._log):
            part.renew()

    # ---- what is known -------------------------------------------------------------------------------------------

    def register(self, root: bytes) -> None:
        """Note that there are keys of this namespace."""
        with self._lock:
            self._roots[root] = None
            while len(self._roots) > _MOST_ROOTS:
                del self._roots[next(iter(self._roots))]

    def roots(self, namespace: bytes | None) -> Sequence[bytes]:
        """The namespace asked for, or all that are registered."""
        return list(self._roots) if namespace is None else [namespace]

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter of this process."""
        with self._lock:
            self._counts[name] += number

    def counters(self) -> dict[str, int]:
        """All counters of this process."""
        with self._lock:
            return {name: self._counts[name] for name in COUNTERS}

    def until(self, nbytes: int = 0) -> float:
        """When a call that begins now and moves `nbytes` has to be over (time.monotonic())."""
        return time.monotonic() + self.deadline_seconds + nbytes / self._slowest

    def trouble(self, error: Exception, what: str, *, rests: bool = True) -> Reason:
        """Note that something failed; returns the reason to give. OSErrors count for the breaker."""
        if isinstance(error, OSError):
            self.breaker.failed(rests=rests)
            self.asks.wake()
        reason = Reason.DEADLINE if isinstance(error, TimeoutError) else Reason.IO_ERROR
        self.note(reason, f"{what} failed: {type(error).__name__}: {error}")
        return reason

    def refused(self, refusal: Refused, what: str, breaker: Breaker) -> Reason:
        """Note that the engine said no; returns the reason to give."""
        self.refusal = refusal.reason
        breaker.failed()
        self.asks.wake()
        self.note(refusal.reason, f"{what} was refused: {refusal}")
        return refusal.reason

    def note(self, reason: Reason, message: str) -> None:
        """Log what went wrong, one line a reason in a while."""
        self._log.warn(_logger, reason, f"{self.remote.address}: {message}")

    # ---- recency -------------------------------------------------------------------------------------------------

    def touch(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool] | None:
        """Touch these keys; which of them are there. None: that cannot be learnt now.

        Where the engine does not let us touch, the log says so and we ask how many leading keys are there.
        """

        def question(link: Link) -> list[bool]:
            return link.touch(namespace, keys, self.until())

        def leading(link: Link) -> list[bool]:
            found = link.find(namespace, keys, self.until())
            return [True] * found + [False] * (len(keys) - found)

        with self._touching:
            here: list[bool] | Reason = self.refusal
            if not self.untouchable.resting:
                here = self._touches.use(question, "touching chunks in use", self.untouchable)
            if self.untouchable.resting:
                here = self._touches.use(leading, "asking for chunks in use")
        if isinstance(here, Reason):
            return None
        for present in (True, False):
            told = [key for key, there in zip(keys, here, strict=True) if there is present]
            self.memo.note(namespace, told, present)
        return here

    def close(self) -> None:
        """Let go of the link that touches; while it is in use, whoever uses it does that."""
        if_free(self._touching, self._touches.close)

    # ---- links ---------------------------------------------------------------------------------------------------

    def link(self, until: float) -> Link:
        """A new link that `interrupt` reaches, also while it is being made. OSError, Refused."""
        begun: list[Link] = []
        try:
            return self.remote.link(until, lambda link: self._begun(link, begun))
        except BaseException:
            for link in begun:
                self.drop(link)
            raise

    def _begun(self, link: Link, begun: list[Link]) -> None:
        begun.append(link)
        with self._lock:
            self._links.add(link)
            stopped = self._stopped
        if stopped:
            link.abort()

    def drop(self, link: Link) -> None:
        """Let go of a link."""
        with self._lock:
            self._links.discard(link)
        link.close()

    def interrupt(self) -> None:
        """Let all that waits for the engine fail."""
        with self._lock:
            self._stopped = True
            links = list(self._links)
        self.asks.wake()
        for link in links:
            link.abort()


class Line:
    """The link of one thread: made when it is needed, thrown away when it broke."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        self._link: Link | None = None
        self._made = self._used = 0.0  # when (time.monotonic())

    def use(self, work: Callable[[Link], _T], what: str, refusals: Breaker | None = None) -> _T | Reason:
        """Do `work` with the link, or say why not; once more with a new link if an old one led nowhere good."""
        moved = False
        for _ in range(2):
            old = self._is_ready()
            try:
                done = work(self._link or self._connected())
            except Refused as refusal:
                if refusal.reconnect:
                    self.close()
                    if old:
                        moved = True
                        continue
                return self._store.refused(refusal, what, refusals or self._store.breaker)
            except OSError as error:
                self.close()
                if old and not isinstance(error, TimeoutError):
                    continue
                return self._late(error, what) if old else self._store.trouble(error, what)
            except BaseException:
                self.close()
                raise
            self._worked(refusals, moved)
            return done
        raise AssertionError("a new link is not old")

    def _is_ready(self) -> bool:
        """Whether there is a link from before; closes one that is not to be trusted any more."""
        if self._link is not None and self._made < self._store.links_since:
            self.close()
        return self._link is not None

    def _connected(self) -> Link:
        made = time.monotonic()
        self._link = self._store.link(self._store.until())
        self._made = made
        return self._link

    def _worked(self, refusals: Breaker | None, moved: bool) -> None:
        self._used = time.monotonic()
        self._store.breaker.worked()
        if refusals is not None:
            refusals.worked()
        if moved:  # the other links lead to the server that this one was taken from
            self._store.links_since = self._made

    def _late(self, error: OSError, what: str) -> Reason:
        """An old link did not answer: that may be the link's fault, and then all that are as old have it."""
        self._store.links_since = time.monotonic()
        return self._store.trouble(error, what, rests=False)

    def idle_for(self, seconds: float) -> bool:
        """Whether there is a link, and it was last used so long ago."""
        return self._link is not None and time.monotonic() - self._used >= seconds

    def close(self) -> None:
        """Let go of the link, if there is one."""
        if self._link is not None:
            self._store.drop(self._link)
            self._link = None
