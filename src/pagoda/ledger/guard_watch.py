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

from pagoda.base.fork import per_process
from pagoda.base.signal_safe_threads import Event, begin, if_free

LOOK_SECONDS = 1.0


class Watched(Protocol):
    """An open store."""

    def look(self) -> None:
        """Leave the store if its files are no longer those that were opened. Reads no file; never
        raises.
        """


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()


class _Watcher:
    """The thread of a process."""

    def __init__(self) -> None:
        """It is started by `watch`."""
        # nobody waits for it: who holds it starts the thread
        self.starting = threading.RLock()
        self.changed = Event()
        self.thread = threading.Thread()  # not started, so not alive

    def start(self) -> None:
        """Start the thread, if it does not run."""
        if not self.thread.is_alive():
            self.changed.clear()
            self.thread = threading.Thread(
                target=self._run, name="pagoda-guards", daemon=True
            )
            begin(self.thread)

    def _run(self) -> None:
        while True:
            self.changed.wait(LOOK_SECONDS)
            self.changed.clear()
            stores = list(_watched)
            if not stores:
                return
            for store in stores:
                store.look()
            del stores


class _Watching:
    @per_process
    def watcher(self) -> _Watcher:
        """The watcher: that of a parent does not run in its child."""
        return _Watcher()


_watching = _Watching()


def watch(store: Watched) -> None:
    """Look at a store once a second from now on. If no thread can be started, the next call of this
    tries again.
    """
    _watched.add(store)
    watcher = _watching.watcher
    if not watcher.thread.is_alive():
        if_free(watcher.starting, watcher.start)


def unwatch(store: Watched) -> None:
    """Stop looking at a store; the thread ends with the last one."""
    _watched.discard(store)
    if not _watched:
        _watching.watcher.changed.set()
