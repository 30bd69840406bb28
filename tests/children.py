"""Forked children of the tests: they end without cleanup, and none hangs."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable

SPAWN = multiprocessing.get_context("spawn")
# then a child has hung; less than the deadline of a test, for its stack to be seen
SECONDS = 240


def child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child and return its process id. It exits with 0, or 1 and a trace."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            # ends it, after its stack was printed
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            faulthandler.register(signal.SIGALRM, file=2, chain=True)
            signal.alarm(SECONDS)
            work()
            status = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def kill_self() -> None:
    """End this process as a kill from outside does: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def wait(pid: int) -> int:
    """Return the exit code of a child; if a signal killed it, the negative number of that
    signal.
    """
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(work: Callable[[], object], code: int = 0) -> None:
    """Run `work` in a forked child, which must end with this exit code."""
    assert (ended := wait(child(work))) == code, f"the child ended with {ended}"


def in_light_process(work: Callable[..., object], *arguments: object) -> None:
    """Run a module's function in a new process, which must end with 0: for tests that fork hundreds
    of times.

    It has imported that module only. A process of the tests has imported torch, and takes three
    times as long for each fork and for what follows it.
    """
    process = SPAWN.Process(target=work, args=arguments)
    process.start()
    process.join(SECONDS)
    process.kill()
    process.join()
    assert process.exitcode == 0, f"it ended with {process.exitcode}"
