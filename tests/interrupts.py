"""Exceptions that a signal handler raises at random moments, for tests. Only on the main thread."""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

__all__ = ["Interrupted", "interrupted_before", "interrupts", "release_logging"]


class Interrupted(BaseException):
    """Raised by the signal handler, as KeyboardInterrupt is."""


@contextlib.contextmanager
def interrupts(
    seed: int,
    seconds: tuple[float, float] = (-4.5, -2.3),
    again_seconds: float = 0.02,
) -> Iterator[Callable[[Callable[[], object]], bool]]:
    """Yield a function that repeats a call until an exception is raised at a random moment, and
    then returns True.

    `seconds`: the range of that moment, as powers of ten. If the exception is lost in a finalizer
    of an object that is collected at that moment, another one is raised `again_seconds` later.
    Tests that use it need `pytest.mark.timeout(method="thread")`: the other method uses the same
    timer as this function.
    """
    chance = random.Random(seed)
    before = signal.getsignal(signal.SIGALRM)
    report = sys.unraisablehook
    armed = False

    def handler(*_: object) -> None:
        if armed:
            raise Interrupted

    def until_interrupted(work: Callable[[], object]) -> bool:
        nonlocal armed
        try:
            armed = True
            signal.setitimer(
                signal.ITIMER_REAL, 10 ** chance.uniform(*seconds), again_seconds
            )
            while True:
                work()
        except Interrupted:
            armed = False
            release_logging()
            return True

    def report_others(lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is not Interrupted:
            report(lost)

    signal.signal(signal.SIGALRM, handler)
    sys.unraisablehook = report_others
    try:
        yield until_interrupted
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = report


def interrupted_before(
    line: int, function: CodeType, work: Callable[[], object]
) -> bool:
    """Do some work, with an exception before the line of that number that runs in a function, from
    1 on; whether there was one.
    """
    left = line

    def trace(
        frame: FrameType, event: str, _: object
    ) -> Callable[..., object] | None:
        nonlocal left
        if event == "call":
            return trace if frame.f_code is function else None
        if event == "line":
            left -= 1
            if not left:
                sys.settrace(None)
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


def release_logging() -> None:
    """Release the locks of Python's logging that an exception in `acquire` left taken.

    Every other thread would wait at its next log line, in this test and in all that follow in this
    process.
    """
    handlers = [
        *logging.getLogger().handlers,
        *logging.getLogger("pagoda").handlers,
    ]
    locks = [logging._lock, *(handler.lock for handler in handlers)]  # type: ignore[attr-defined]
    for lock in locks:
        while lock is not None and lock._is_owned():
            lock.release()
