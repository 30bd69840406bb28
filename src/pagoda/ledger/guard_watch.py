"""The thread that sees when files of an open store are removed, replaced or cut, and makes its
process leave the store.

`Session` puts itself under watch. A process works in the files that it has open; the next one opens
those that have the names. As long as both are the same files, their locks meet. So a process that
finds another file under a name, or none, stops using the store: it finds and stores nothing there,
and says so once.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from pagoda.base.fork import call_in_child
from pagoda.base.signal_safe_threads import Event, begin, if_free

LOOK_SECONDS = 1.0


class Watched(Protocol):
    """An open store."""

    def look(self) -> None:
        """Leave the store if its files are no longer those that were opened. Reads no file; never
        raises.
        """


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
# nobody waits for it: who holds it starts the thread
_starting = threading.RLock()
_changed = Event()
_thread = threading.Thread()  # not started, so not alive


def watch(store: Watched) -> None:
    """Look at a store once a second from now on. If no thread can be started, the next call of this
    tries again.
    """
    _watched.add(store)
    if not _thread.is_alive():
        if_free(_starting, _start)


def unwatch(store: Watched) -> None:
    """Stop looking at a store; the thread ends with the last one."""
    _watched.discard(store)
    if not _watched:
        _changed.set()


def _start() -> None:
    global _thread
    if not _thread.is_alive():
        _changed.clear()
        _thread = threading.Thread(target=_run, name="pagoda-guards", daemon=True)
        begin(_thread)


def _run() -> None:
    while True:
        _changed.wait(LOOK_SECONDS)
        _changed.clear()
        stores = list(_watched)
        if not stores:
            return
        for store in stores:
            store.look()
        del stores


@call_in_child
def _reset_in_child() -> None:
    """The thread is the parent's: a session of the child starts one when it becomes a member."""
    global _starting, _changed, _thread
    _starting = threading.RLock()
    _changed = Event()
    _thread = threading.Thread()
