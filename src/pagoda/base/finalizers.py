"""Close objects that were garbage-collected without a close, on a separate thread.

A garbage collection runs finalizers on the thread that allocates next, at any line, also inside a
lock. So a finalizer must not take a lock, do I/O or wait. It must not be a Python function either:
if a signal handler raises an exception inside it, the exception and the work are lost. Our
finalizers only put themselves into a queue. Used by the cache, the tiers and the ledger; calls
`signal_safe_threads`.
"""

from __future__ import annotations

import atexit
import gc
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Self

from pagoda.base.log import guarded_logger
from pagoda.base.signal_safe_threads import Event, start_thread

_LAST_SECONDS = 10.0  # how long to wait at exit for a close that has begun

_log = guarded_logger("pagoda")

# Its `put` is a reentrant built-in. None: the thread must end.
_dropped: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
_watched: dict[int, Finalizer] = {}  # by id, in the order of creation
_starting = threading.RLock()  # a signal handler may drop an object at any line
_thread: threading.Thread | None = None


class Finalizer(weakref.ref[object]):
    """Call `close` on another thread after `owner` was collected, if this object still exists then.

    `close` must not refer to `owner`.
    """

    __slots__ = ("_close",)
    _close: Callable[[], object]

    def __new__(cls, owner: object, close: Callable[[], object]) -> Self:
        """Make a finalizer that watches `owner`."""
        self = super().__new__(cls, owner, _dropped.put)
        self._close = close
        if _thread is None or not _thread.is_alive():
            _start()
        return self

    def __call__(self) -> None:
        """Call `close`. Only the thread calls this."""
        close = self._close
        self.detach()
        close()

    def detach(self) -> None:
        """Cancel the call of `close`."""
        self._close = _nothing
        _watched.pop(id(self), None)


def close_when_dropped(owner: object, close: Callable[[], object]) -> Finalizer:
    """Call `close` on another thread after `owner` was collected, or at exit. `detach()` cancels
    it.

    `close` must not refer to `owner`. Thread-safe.
    """
    watched = Finalizer(owner, close)
    _watched[id(watched)] = watched
    atexit.unregister(_at_exit)
    # runs before older hooks, which may belong to the libraries of a tier
    atexit.register(_at_exit)
    return watched


def close_dropped(timeout: float) -> bool:
    """Wait until all collected objects are closed; return False if `timeout` seconds were not
    enough.

    For a caller that needs what such an object may still hold. Do not call it in a finalizer or
    with a lock held.
    """
    gc.collect()  # collects objects that only a cycle keeps
    _start()
    settled = Event()
    _dropped.put(settled.set)
    return settled.wait(timeout)


def _nothing() -> None:
    """Replace the close of an object that was closed or detached."""


def _start() -> None:
    global _thread
    with _starting:
        if _thread is None or not _thread.is_alive():
            # if no thread can be started, the next call tries again
            _thread = start_thread(_close_all, "pagoda-dropped")


def _close_all() -> None:
    while (close := _dropped.get()) is not None:
        _close(close)
        del close


def _close(close: Callable[[], object]) -> None:
    try:
        close()
    except Exception:  # the next object must be closed too  # noqa: BLE001
        _log.exception(
            "an object that was dropped without a close could not be closed"
        )


def _at_exit() -> None:
    """Close all collected objects, then the open ones, the last opened first."""
    _dropped.put(None)
    if _thread is not None:
        _thread.join(_LAST_SECONDS)
    while not _dropped.empty():
        if (close := _dropped.get()) is not None:
            _close(close)
    for watched in reversed(list(_watched.values())):
        _close(watched)


def _renew_in_child() -> None:
    """Copy the queue in a forked child: the parent's thread may hold the lock of the old one."""
    global _dropped, _starting, _thread
    left = _dropped
    _dropped = queue.SimpleQueue()
    while not left.empty():
        _dropped.put(left.get_nowait())
    _starting = threading.RLock()
    _thread = None


os.register_at_fork(after_in_child=_renew_in_child)
