"""Forked children of the tests: they end without cleanup, and none hangs."""

from __future__ import annotations

import faulthandler
import os
import signal
import traceback
from collections.abc import Callable

SECONDS = 240  # then a child has hung; less than the deadline of a test, for its stack to be seen


def child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child and return its process id. It exits with 0, or 1 and a trace."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends it, after its stack was printed
            faulthandler.register(signal.SIGALRM, file=2, chain=True)
            signal.alarm(SECONDS)
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - told by the exit status
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def wait(pid: int) -> int:
    """Return the exit code of a child; if a signal killed it, the negative number of that signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(work: Callable[[], object], code: int = 0) -> None:
    """Run `work` in a forked child, which must end with this exit code."""
    assert (ended := wait(child(work))) == code, f"the child ended with {ended}"
