"""What a policy learns: the file in which it is kept, and the thread that learns off the request path."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagoda.errors import ClosedError
from pagoda.ledger.advice import Advice
from pagoda.ledger.room import allocate
from pagoda.ledger.session import Session, UnavailableError

log = logging.getLogger("pagoda")

_SHARE_SECONDS = 1.0
_PAUSE_SECONDS, _PAUSE_SHARE = 0.1, 10  # between two rounds, and so many times as long as the last one took
_IDLE_SECONDS = 10.0  # then the thread ends
_LAST_SECONDS = 1.0


def map_learnt(directory: Path, advice: Advice) -> NDArray[np.float64] | None:
    """Map what the policy has learnt in this store, zeros at first; None if it learns nothing. NoRoomError."""
    if not advice.shared_values:
        return None
    path = directory / f"learnt-{advice.policy}-{advice.shared_values}"
    allocate(path, advice.shared_values * 8)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(fd, advice.shared_values * 8), np.float64)
    finally:
        os.close(fd)


class Upkeep:
    """Lets the policy of one ledger learn and look ahead, on a daemon thread that runs while there is use for it."""

    def __init__(self, session: Session, advice: Advice, learnt: NDArray[np.float64] | None) -> None:
        self._session, self._advice, self.learnt = session, advice, learnt
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Say that something happened. Cheap."""
        if self.learnt is None or self._woken.is_set():
            return
        self._woken.set()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="pagoda-upkeep", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is ending
                self._thread.start()

    def once(self) -> None:
        """Share what was learnt and look ahead, now."""
        self._share(1.0)
        self._prepare()

    def close(self) -> None:
        """Share for the last time."""
        self._share(_LAST_SECONDS)

    def _share(self, deadline_seconds: float) -> None:
        learnt = self.learnt
        if learnt is not None:
            with contextlib.suppress(UnavailableError, ClosedError):
                self._session.write(lambda _, __: self._advice.share(learnt), deadline_seconds)

    def _prepare(self) -> None:
        now = self._session.clock.monotonic_ns()
        self._advice.prepare(self._session.stamp(now), now)

    def _run(self) -> None:
        shared = 0.0
        try:
            while self._woken.wait(_IDLE_SECONDS) and not self._session.closed:
                self._woken.clear()
                begun = time.monotonic()
                if begun - shared > _SHARE_SECONDS:
                    shared = begun
                    self._share(1.0)
                self._prepare()
                time.sleep(max(_PAUSE_SECONDS, _PAUSE_SHARE * (time.monotonic() - begun)))
        except Exception:
            log.exception("learning which chunks to keep has stopped in %s", self._session.store.directory)
