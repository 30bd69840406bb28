"""The thread that asks for more slots with pages, off the request path, before they are needed.

A store in memory whose size is only an upper limit begins with few pages and grows as it fills; a
store that shares its root, or that found too little room when it was opened, takes more when it
can. `Ledger` wakes the thread when a reserve has left too few free slots, and waits for it, for a
limited time, when one needs more than there are: so nothing is evicted or refused for want of pages
as long as there is room for them. `SpaceShare` makes each step.
"""

from __future__ import annotations

import threading
import time

from pagoda.base.log import guarded_logger
from pagoda.base.signal_safe_threads import Condition, Event, begin, if_free
from pagoda.ledger.session import Session
from pagoda.ledger.space_sharing import SpaceShare

log = guarded_logger("pagoda")

_IDLE_SECONDS = 10.0  # the thread ends after this time without use
_NO_ROOM_SECONDS = 1.0  # the wait before more is asked for again
# the same after trouble, such as a root whose lock is kept by a stopped process: requests that wait
# for such a step are slow
_TROUBLE_SECONDS = 10.0


class GrowthThread:
    """Lets one store grow, on a daemon thread that runs while it is needed. Thread-safe."""

    def __init__(self, session: Session, space: SpaceShare) -> None:
        self._session = session
        self._space = space
        self._closed = False
        self._wanted = 0  # slots that requests wait for
        self._rests_until = 0.0
        self._steps = 0  # how often a step has ended, with more slots or without
        self._stepped = Condition()
        self._woken = Event()
        # no thread waits for it: the thread that holds it starts the growth thread
        self._starting = threading.RLock()
        self._thread = threading.Thread()  # not started, so not alive

    @property
    def rests(self) -> bool:
        """Whether a step got nothing a short while ago, so that none is made now."""
        return time.monotonic() < self._rests_until

    def wake(self) -> None:
        """Report that few free slots are left. Cheap; never waits."""
        if self._woken.is_set() and self._thread.is_alive():
            return
        if not self.rests:
            if_free(self._starting, self._start)

    def wait_for_step(self, wanted: int, until: float) -> bool:
        """Ask for that many free slots, and wait until the thread has made a step, at the latest
        until that time; False if it makes none now.
        """
        if self._closed or self.rests:
            return False
        seen = self._steps
        self._wanted = max(self._wanted, wanted)
        self.wake()
        if not self._thread.is_alive():
            return False
        with self._stepped:
            done = self._stepped.wait_for(
                lambda: self._steps != seen, until - time.monotonic()
            )
        return done and not self.rests

    def close(self) -> None:
        """End the thread; never waits."""
        self._closed = True
        self._woken.set()

    def _start(self) -> None:
        self._woken.set()
        # checked again: the thread may have been about to end when it was woken
        if not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._run, name="pagoda-growth", daemon=True
            )
            begin(self._thread)

    def _run(self) -> None:
        try:
            while not (self._closed or self._session.closed):
                if not self._woken.wait(_IDLE_SECONDS):
                    return
                self._woken.clear()
                self._grow()
                # requests that need more slots come first
                while not self._woken.is_set():
                    began = time.monotonic()
                    if not self._space.finish_pages():
                        break
                    # other processes get the lock of the root in between
                    self._woken.wait(time.monotonic() - began)
        except Exception:
            self._rests_until = time.monotonic() + _TROUBLE_SECONDS
            log.exception(
                "a piece of %s failed: it is asked for again in %g s",
                self._session.store.directory,
                _TROUBLE_SECONDS,
            )
        finally:
            self._tell()

    def _grow(self) -> None:
        """Make steps until there are enough free slots, or a step gets nothing from free memory."""
        while not (self._closed or self._session.closed):
            wanted = self._wanted
            lacks = self._space.lacks(wanted)
            if lacks and not self._space.more():
                pause = _NO_ROOM_SECONDS
                if self._space.in_trouble:
                    pause = max(pause, _TROUBLE_SECONDS)
                self._rests_until = time.monotonic() + pause
            # what other stores give are chunks of others: one piece for each time it is needed
            ends = not lacks or not self._space.has_grown
            if ends:
                self._wanted = 0
            # also if there were enough: a request may have looked before the last step
            self._tell()
            if ends:
                return

    def _tell(self) -> None:
        with self._stepped:
            self._steps += 1
            self._stepped.notify_all()
