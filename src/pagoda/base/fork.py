"""One registry of what a forked child resets: the parent's threads do not exist there, and may have
held any lock.

In a child, the order is:

1. the hooks of `metrics`, `signal_safe_threads` and `finalizers`, which are below this module: any
  reset may use them
2. the objects of `reset_in_child`, in any order
3. the functions of `call_in_child`, in the order in which their modules were imported. In the
   ledger this is `locks`,
   `session`, `ledger`: no lock is tried before the child has given up its parent's locks, and a
   store that a thread of the parent was closing is closed last

Steps before a fork or in the parent (`ledger.session` closes its tables, `ledger.locks` counts) are
not resets: these modules have separate hooks for them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Protocol

# these hooks, and those of `signal_safe_threads`, come first: a reset may use both
import pagoda.base.finalizers  # noqa: F401


class Resettable(Protocol):
    """Something with locks or threads."""

    def reset(self) -> None:
        """Create the locks, with no threads and no work in progress. In a child it is called once,
        by its only thread.

        The order is arbitrary, and the ledger is reset later: a reset uses neither a slab nor the
        ledger.
        """


_things: weakref.WeakSet[Resettable] = weakref.WeakSet()
_functions: list[Callable[[], None]] = []


def reset_in_child(thing: Resettable) -> None:
    """Call `thing.reset()` in every child that this process forks from now on."""
    _things.add(thing)


def reset_now_and_in_child(thing: Resettable) -> None:
    """Call `thing.reset()` now, as a part of its construction, and in every child from now on."""
    thing.reset()
    reset_in_child(thing)


def call_in_child(function: Callable[[], None]) -> Callable[[], None]:
    """Decorate a function that resets the state of a module: every child calls it after the resets
    of objects.
    """
    _functions.append(function)
    return function


def _reset_all() -> None:
    errors = []
    for reset in [*(thing.reset for thing in list(_things)), *_functions]:
        try:
            reset()
        except BaseException as error:  # noqa: BLE001
            # of a signal handler too: the others are still to be reset
            errors.append(error)
    if errors:
        raise errors[0]


os.register_at_fork(after_in_child=_reset_all)
