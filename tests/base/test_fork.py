"""Forks: what a child process resets."""

from __future__ import annotations

import os
import subprocess
import sys

from pagoda.base.fork import reset_in_child


class Thing:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.was_reset = False
        reset_in_child(self)

    def reset(self) -> None:
        self.was_reset = True
        if self.error is not None:
            raise self.error


def test_a_reset_that_fails_keeps_no_other_from_being_reset() -> None:
    things = [
        Thing(),
        Thing(KeyboardInterrupt()),
        Thing(),
        Thing(MemoryError()),
        Thing(),
    ]
    pid = os.fork()
    if pid == 0:
        os._exit(0 if all(thing.was_reset for thing in things) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not any(thing.was_reset for thing in things)


FUNCTIONS_LAST = """
import os
from pagoda.base.fork import call_in_child, reset_in_child

called = []

@call_in_child
def first():
    called.append("first")
    raise MemoryError

@call_in_child
def second():
    called.append("second")

class Thing:
    def reset(self):
        called.append("thing")

thing = Thing()
reset_in_child(thing)
pid = os.fork()
if pid == 0:
    os._exit(called != ["thing", "first", "second"])
assert called == []
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_functions_are_called_after_the_objects_in_the_order_of_their_registration() -> (
    None
):
    subprocess.run(
        [sys.executable, "-c", FUNCTIONS_LAST],
        check=True,
        timeout=60,
        capture_output=True,
    )
