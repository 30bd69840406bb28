"""A local tier that could not be opened when its cache was, and how it takes part later.

`open_tiers` leaves it out with `start_without = "lower"`; `Cache` begins the attempts. A tier has
promises to keep that were made while it was away: chunks of weights that were changed in place, and
cleared chunks, must not be served. So it takes part only after

    1. it was opened, as at the start of a cache
    2. the chunks that this cache cleared meanwhile were removed from it
    3. its root was compared with the others, and has recorded the present epoch of the weights
    4. no clear came in between: one that comes later finds the tier among the others

What other processes cleared while they had left it out too is not known here: their `clear` named
the tier as failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from pagoda.base.errors import PagodaError
from pagoda.base.fork import per_process
from pagoda.base.log import guarded_logger
from pagoda.base.signal_safe_threads import Event, start_thread
from pagoda.tiers import Tier

log = guarded_logger("pagoda.cache")

R = TypeVar("R", covariant=True)
_FIRST_PAUSE_SECONDS = 5.0
_LAST_PAUSE_SECONDS = 60.0


class BoundedCall(Generic[R]):
    """A call on a thread of its own, for whose end a caller waits as long as it likes: a dead disk
    never answers.
    """

    def __init__(self, call: Callable[[], R], name: str) -> None:
        """Begin the call; without a thread, it is made here and now."""
        self._call = call
        self._ended = Event()
        self._result: R | None = None
        self._error: BaseException | None = None
        if start_thread(self._run, name) is None:
            self._run()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # for `result`  # noqa: BLE001
            self._error = error
        finally:
            self._ended.set()

    def result(self, seconds: float | None) -> R:
        """Return what the call returned, and raise what it raised; TimeoutError if it has not ended
        in time.
        """
        if not self._ended.wait(seconds):
            raise TimeoutError(f"no answer within {seconds:g} s")
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class LateTier:
    """A tier that was left out at the start. Thread-safe. In a forked child it stays left out.

    `name`: of the tier. `reason`: why it was left out, or why the last attempt failed. `joined`: it
    takes part now.
    """

    def __init__(
        self,
        name: str,
        reason: str,
        reopen: Callable[[], Tier],
        opening: BoundedCall[Tier] | None = None,
    ) -> None:
        """`reopen` opens the tier; `opening`: the first attempt, if it has not ended yet."""
        self.name = name
        self.reason = reason
        self.joined = False
        self._reopen = reopen
        self._opening = opening
        self._missed: list[bytes | None] = []

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    @per_process
    def _ending(self) -> Event:
        return Event()

    def begin(
        self,
        admit: Callable[[Tier], None],
        compare_root: Callable[[str], str | None],
    ) -> None:
        """Try, on a thread of its own, until the tier takes part or the cache is closed.

        `admit` lets it take part; `compare_root` compares its root with the others, and returns why
        not if it fails.
        """
        if (
            start_thread(self._run, "pagoda-late-tier", admit, compare_root)
            is None
        ):
            log.warning(
                "%s stays left out until this process starts again: no thread can be started",
                self.name,
            )

    def note_clear(self, namespace: bytes | None) -> bool:
        """Note that chunks are being cleared (None: all); return False if the tier takes part, and
        is cleared itself.

        Called before the tiers are cleared.
        """
        with self._lock:
            if not self.joined:
                self._missed.append(namespace)
            return not self.joined

    def close(self) -> None:
        """End the attempts; never waits for one."""
        with self._lock:
            self._ending.set()

    def _run(
        self,
        admit: Callable[[Tier], None],
        compare_root: Callable[[str], str | None],
    ) -> None:
        # the root may be readable, though the tier cannot be opened
        compare_root(self.name)
        pause = _FIRST_PAUSE_SECONDS
        opening = self._opening
        self._opening = None
        while True:
            if opening is None:
                self._ending.wait(pause)
                pause = min(2 * pause, _LAST_PAUSE_SECONDS)
            if self._ending.is_set():
                return
            try:
                tier = self._reopen() if opening is None else opening.result(None)
            except Exception as error:  # noqa: BLE001
                # a boundary: the tier stays left out
                self.reason = str(error)
                continue
            finally:
                opening = None
            self._try_to_join(tier, admit, compare_root)
            if self.joined:
                log.warning(
                    "%s takes part again: it was left out at the start", self.name
                )
                return

    def _try_to_join(
        self,
        tier: Tier,
        admit: Callable[[Tier], None],
        compare_root: Callable[[str], str | None],
    ) -> None:
        """Let the tier take part; close it again, and keep the reason, if its promises cannot be
        raised.
        """
        try:
            reason = self._join(tier, admit, compare_root)
        except Exception as error:  # a boundary  # noqa: BLE001
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            self.reason = reason
            try:
                tier.close()
            except (PagodaError, OSError) as error:
                log.debug("closing %s: %s", self.name, error)

    def _join(
        self,
        tier: Tier,
        admit: Callable[[Tier], None],
        compare_root: Callable[[str], str | None],
    ) -> str | None:
        """Raise the promises of the tier and let it take part; return why that is impossible. See
        the module.
        """
        done = 0
        while True:
            with self._lock:
                missed = self._missed[done:]
            for namespace in missed:
                tier.clear(namespace)
            done += len(missed)
            unrecorded = compare_root(self.name)
            if unrecorded is not None:
                return unrecorded
            with self._lock:
                if self._ending.is_set():
                    return "the cache is closed"
                if done == len(self._missed):
                    admit(tier)
                    self.joined = True
                    return None
