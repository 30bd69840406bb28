"""Close what was dropped without a close, on a thread of its own.

A garbage collection runs finalizers on whatever thread allocates next, at any line, also inside of a lock. So a
finalizer may take no lock, do no I/O and wait for nothing. Nor may it be a function of Python: an exception that a
signal handler raises in one is lost, and with it what was to be done. All that ours do is to put themselves into a
queue.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Self

from pagoda.threads import Event, begin

__all__ = ["Finalizer", "close_when_dropped", "settle"]

_LAST_SECONDS = 10.0  # at exit, for a close that is under way

_log = logging.getLogger("pagoda")

# Its `put` is built in, and may interrupt itself. None: the end.
_dropped: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
_watched: dict[int, Finalizer] = {}  # by id, in the order of their making
_starting = threading.RLock()  # a signal handler may drop something at any line
_thread: threading.Thread | None = None


class Finalizer(weakref.ref[object]):
    """Has `close` called, on another thread, once nobody holds `owner`; for as long as somebody holds this.

    `close` must not refer to `owner`.
    """

    __slots__ = ("_close",)

    def __new__(cls, owner: object, _: Callable[[], object]) -> Self:
        """Watch `owner`."""
        return super().__new__(cls, owner, _dropped.put)

    def __init__(self, owner: object, close: Callable[[], object]) -> None:
        self._close = close
        if _thread is None or not _thread.is_alive():
            _start()

    def __call__(self) -> None:
        """Call `close`; by the thread."""
        close = self._close
        self.detach()
        close()

    def detach(self) -> None:
        """Call it off."""
        self._close = _nothing
        _watched.pop(id(self), None)


def close_when_dropped(owner: object, close: Callable[[], object]) -> Finalizer:
    """Have `close` called, on another thread, once nobody holds `owner`, or at exit. `detach()` calls it off.

    `close` must not refer to `owner`. Thread-safe.
    """
    watched = Finalizer(owner, close)
    _watched[id(watched)] = watched
    atexit.unregister(_at_exit)
    atexit.register(
        _at_exit
    )  # before all that was registered until now, for those may be the libraries of a tier
    return watched


def settle(timeout: float) -> bool:
    """Wait until what nobody holds any more is closed; False if `timeout` seconds were not enough.

    For those who lack what it may still keep from them. Not from within a finalizer, nor with a lock held.
    """
    gc.collect()  # what is held by a cycle only
    _start()
    settled = Event()
    _dropped.put(settled.set)
    return settled.wait(timeout)


def _nothing() -> None:
    """What is left to do of what was closed or called off."""


def _start() -> None:
    global _thread
    with _starting:
        if _thread is None or not _thread.is_alive():
            thread = threading.Thread(target=_close_all, name="pagoda-dropped", daemon=True)
            _thread = (
                thread if begin(thread) else None
            )  # what is dropped waits for the next who opens something


def _close_all() -> None:
    while (close := _dropped.get()) is not None:
        _close(close)
        del close


def _close(close: Callable[[], object]) -> None:
    try:
        close()
    except Exception:  # noqa: BLE001  # a border: the next is to be closed all the same
        _log.exception("what was dropped without a close could not be closed")


def _at_exit() -> None:
    """Close what is still open, the last that was opened first, and all that was dropped."""
    _dropped.put(None)
    if _thread is not None:
        _thread.join(_LAST_SECONDS)
    while not _dropped.empty():
        if (close := _dropped.get()) is not None:
            _close(close)
    for watched in reversed(list(_watched.values())):
        _close(watched)


def _renew_in_child() -> None:
    """What a parent has dropped, a child has dropped too; a lock of the queue may be held by the parent's thread."""
    global _dropped, _starting, _thread
    left, _dropped = _dropped, queue.SimpleQueue()
    while not left.empty():
        _dropped.put(left.get_nowait())
    _starting, _thread = threading.RLock(), None


os.register_at_fork(after_in_child=_renew_in_child)
