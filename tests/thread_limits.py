"""Starts of threads that the system refuses, because the stack size is too large, or that a signal
interrupts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.interrupts import Interrupted

_NO_STACK_BYTES = 1 << 46


@contextmanager
def no_threads(after: int = 0) -> Iterator[None]:
    """Let all thread starts of this process fail, except the first `after`."""
    real = threading.Thread.start
    left = [after]

    def start(thread: threading.Thread) -> None:
        if left[0] > 0:
            left[0] -= 1
            return real(thread)
        before = threading.stack_size(_NO_STACK_BYTES)
        try:
            return real(thread)
        finally:
            threading.stack_size(before)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        yield


def interrupted_once(start: Callable[..., object]) -> Callable[..., object]:
    """Return a `start` after whose first call a signal handler raises: the thread runs, unknown to
    its caller.
    """
    calls = iter([True])

    def started(*arguments: object) -> object:
        thread = start(*arguments)
        if next(calls, False):
            raise Interrupted
        return thread

    return started
