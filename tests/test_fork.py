"""pagoda.fork: what a forked child resets."""

from __future__ import annotations

import os

from pagoda.fork import reset_in_child


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
    things = [Thing(), Thing(KeyboardInterrupt()), Thing(), Thing(MemoryError()), Thing()]
    pid = os.fork()
    if pid == 0:
        os._exit(0 if all(thing.was_reset for thing in things) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not any(thing.was_reset for thing in things)
