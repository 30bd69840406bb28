"""What a policy learns, and the thread on which it learns and ranks slots, off the request path.

`Ledger` starts the thread on use. For a store on disk the thread also keeps the tables in memory
and writes the hints down (see `hint_pages`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagoda.base.errors import ClosedError
from pagoda.base.file_space import allocate
from pagoda.base.log import guarded_logger
from pagoda.base.signal_safe_threads import Event, begin, if_free
from pagoda.ledger.columns import map_file
from pagoda.ledger.eviction_policy import Evictor
from pagoda.ledger.hint_pages import HintPages
from pagoda.ledger.session import Session, UnavailableError

log = guarded_logger("pagoda")

_SHARE_SECONDS = 1.0
# the rest between two rounds: seconds, and at least this multiple of the last round's time
_PAUSE_SECONDS = 0.1
_PAUSE_SHARE = 10
# the same while a policy of many slots has few ranked ones left: the thread takes at most a third
# of a processor
_LOW_PAUSE_SHARE = 2
_IDLE_SECONDS = 10.0  # the thread ends after this time without use
_LAST_SECONDS = 1.0
_TEND_SECONDS = 2.0  # between two looks at the pages of tables on a disk
_SAVE_SECONDS = 60.0  # between two writes of the hints of a store on disk,
# and longer, so that they write no more than this
_SAVE_BYTES_PER_SECOND = 1 << 20


def map_learned(hints: HintPages, evictor: Evictor) -> NDArray[np.float64] | None:
    """Map what the policy has learned in this store, zeros at first; None if it learns nothing.
    NoRoomError.
    """
    if not evictor.shared_values:
        return None
    nbytes = evictor.shared_values * 8
    source = hints.page(
        f"learnt-{evictor.policy}-{evictor.shared_values}", nbytes
    )
    if not isinstance(source, Path):
        return np.frombuffer(source, np.float64)
    allocate(source, nbytes)
    return np.frombuffer(map_file(source, nbytes), np.float64)


class UpkeepThread:
    """Lets the policy of one ledger learn and prepare, on a daemon thread that runs while it is
    needed.
    """

    def __init__(
        self,
        session: Session,
        evictor: Evictor,
        learned: NDArray[np.float64] | None,
    ) -> None:
        self._session = session
        self._evictor = evictor
        self.learned = learned
        self._closed = self._low = False
        self._on_disk = session.published is not None
        self._tended = 0.0
        self._reported = 0.0
        self._saved = time.monotonic()
        self._unsaved = False
        self._woken = Event()
        self._hurried = Event()  # set with `_low`: it ends a rest
        # no thread waits for it: the thread that holds it starts the upkeep thread
        self._starting = threading.RLock()
        self._thread = threading.Thread()  # not started, so not alive

    def wake(self, low: bool = False) -> None:
        """Report a use; `low`: the policy has few ranked slots left. Cheap."""
        if low and not self._low:
            self._low = True
            self._hurried.set()
        idle = self.learned is None and not self._low and not self._on_disk
        if idle or (self._woken.is_set() and self._thread.is_alive()):
            return
        if_free(self._starting, self._start)

    def read(self) -> None:
        """Report that chunks of a store on disk were looked for, so that its tables stay in memory.
        Cheap.
        """
        now = time.monotonic()
        if now - self._reported > _TEND_SECONDS:
            self._reported = now
            self.wake()

    def _start(self) -> None:
        self._woken.set()
        # checked again: the thread may have been about to end when it was woken
        if not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._run, name="pagoda-upkeep", daemon=True
            )
            begin(self._thread)

    def run_once(self) -> None:
        """Share what was learned and prepare, now. The thread does the same; both at once do no
        harm.
        """
        self._session.drop_orphans()
        self._share(1.0)
        self._prepare()

    def close(self) -> None:
        """Share what was learned a last time, and end the thread."""
        self._share(_LAST_SECONDS)
        self._closed = True
        self._woken.set()
        self._hurried.set()

    def _share(self, deadline_seconds: float) -> None:
        learned = self.learned
        if learned is not None:
            with contextlib.suppress(UnavailableError, ClosedError):
                self._session.write(
                    lambda _: self._evictor.share(learned), deadline_seconds
                )

    def _prepare(self) -> None:
        now = self._session.clock.monotonic_ns()
        self._evictor.prepare(self._session.stamp(now), now)
        # afterwards: meanwhile calls have found few ranked slots
        self._low = False
        self._hurried.clear()

    def _rest_after(self, spent_seconds: float) -> None:
        """Rest after a round; not so long if few ranked slots are left meanwhile."""
        whole = max(_PAUSE_SECONDS, _PAUSE_SHARE * spent_seconds)
        # if few are left at once, there are no more, and a round soon would find none
        if self._evictor.is_low:
            time.sleep(whole)
            return
        least = max(_PAUSE_SECONDS, _LOW_PAUSE_SHARE * spent_seconds)
        time.sleep(least)
        self._hurried.wait(whole - least)

    def _tend(self) -> None:
        """Look after the pages of a store on disk, and write its hints, if it is time."""
        now = time.monotonic()
        if now - self._tended > _TEND_SECONDS:
            self._session.tend()
            self._tended = time.monotonic()
        pause = max(
            _SAVE_SECONDS, self._session.hints.nbytes / _SAVE_BYTES_PER_SECOND
        )
        if self._unsaved and now - self._saved > pause:
            self._unsaved = False
            self._session.save_hints(not_within_seconds=pause / 2)
            self._saved = time.monotonic()

    def _run(self) -> None:
        shared = 0.0
        try:
            while not (self._closed or self._session.closed):
                used = self._woken.wait(_IDLE_SECONDS)
                if (
                    self._closed
                    or self._session.closed
                    or not (used or self._unsaved)
                ):
                    return
                self._woken.clear()
                begun = time.monotonic()
                self._session.drop_orphans()
                if self._on_disk:
                    self._unsaved |= used
                    self._tend()
                if self.learned is None and not self._low:
                    time.sleep(_PAUSE_SECONDS if self._on_disk else 0.0)
                    continue
                if begun - shared > _SHARE_SECONDS:
                    shared = begun
                    self._share(1.0)
                self._prepare()
                self._rest_after(time.monotonic() - begun)
        except Exception:
            log.exception(
                "learning which chunks to keep has stopped in %s",
                self._session.store.directory,
            )
