"""`pagoda.base.finalizers`: what is dropped without a close is closed on another thread, or at
exit.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pagoda
from pagoda.base.finalizers import close_dropped, close_when_dropped
from tests.thread_limits import no_threads

SECONDS = 60.0
SOURCE = Path(pagoda.__file__).parents[1]
RUN_BY_FINALIZERS = {  # which take no lock and wait for nothing
    "pagoda/slab/linux_mmap.py": "weakref.finalize(memory, _libc.munmap,",
    "pagoda/slab/memory.py": "weakref.finalize(self, self._pinned.stop)",
}


class Owner:
    """An object with something to close."""


def test_a_collection_closes_nothing_on_the_thread_that_it_interrupts() -> None:
    lock = threading.Lock()
    closed = threading.Event()
    main = threading.current_thread()
    by: list[threading.Thread] = []

    def close() -> None:
        by.append(threading.current_thread())
        if lock.acquire(timeout=1.0 if by == [main] else SECONDS):
            closed.set()
            lock.release()

    owner = Owner()
    owner.me = owner  # type: ignore[attr-defined]  # only a collection frees it
    close_when_dropped(owner, close)
    gc.disable()  # the collection comes when the lock is held, not before
    try:
        del owner
        with lock:  # as anybody may hold one when a collection begins
            gc.collect()
            assert threading.current_thread() not in by
            assert not closed.is_set()
    finally:
        gc.enable()
    assert closed.wait(SECONDS)


def test_what_is_closed_is_not_closed_again_when_it_is_dropped() -> None:
    closed: list[int] = []
    owner = Owner()
    close_when_dropped(owner, lambda: closed.append(1)).detach()
    del owner
    assert close_dropped(SECONDS)
    assert not closed


def test_one_that_fails_keeps_no_other_from_being_closed() -> None:
    closed = threading.Event()
    for close in (lambda: 1 / 0, closed.set):
        owner = Owner()
        close_when_dropped(owner, close)
        del owner
    assert closed.wait(SECONDS)


def test_what_was_dropped_while_no_thread_could_be_had_is_closed_later() -> None:
    code = """
import threading
from tests.base.test_finalizers import *
closed = threading.Event()
with no_threads():
    owner = Owner(); close_when_dropped(owner, closed.set); del owner
assert not closed.is_set() and close_dropped(60) and closed.is_set()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_at_exit_all_is_closed_the_last_first() -> None:
    code = """
import atexit
from tests.base.test_finalizers import *
atexit.register(print, "libraries end")
owners = [Owner() for _ in range(3)]
for number, owner in enumerate(owners):
    close_when_dropped(owner, lambda number=number: print(number, threading.current_thread().name))
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert (
        run.stdout == "2 MainThread\n1 MainThread\n0 MainThread\nlibraries end\n"
    )
    assert not run.stderr


def test_a_fork_takes_over_what_was_dropped_and_not_yet_closed() -> None:
    begun = threading.Event()
    leave = threading.Event()
    closed = threading.Event()
    first = Owner()
    second = Owner()
    close_when_dropped(first, lambda: (begun.set(), leave.wait(SECONDS)))
    close_when_dropped(second, closed.set)
    del first
    assert begun.wait(SECONDS)
    del second
    child = os.fork()
    if child == 0:
        signal.alarm(120)  # instead of a deadlock
        os._exit(0 if close_dropped(SECONDS) and closed.is_set() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not closed.is_set()
    leave.set()
    assert closed.wait(SECONDS)


def test_no_other_finalizer_does_anything() -> None:
    for path in SOURCE.rglob("*.py"):
        name = str(path.relative_to(SOURCE))
        text = path.read_text()
        assert "def __del__" not in text, f"{name}: take pagoda.base.finalizers"
        allowed = RUN_BY_FINALIZERS.get(name)
        found = re.findall(r"weakref\.finalize\(", text)
        assert len(found) == (allowed is not None) and (allowed or "") in text, (
            f"{name}: take pagoda.base.finalizers"
        )


__all__ = [
    "Owner",
    "close_dropped",
    "close_when_dropped",
    "no_threads",
    "threading",
]
