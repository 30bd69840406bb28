"""One registry of what a forked child resets: the parent's threads do not exist there, and may have held any lock."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

import pagoda.finalizers  # noqa: F401  # its hooks and those of `threads` come first: a reset may use both

__all__ = ["Resettable", "reset_in_child"]


class Resettable(Protocol):
    """Something with locks or threads."""

    def reset(self) -> None:
        """Create the locks, with no threads and nothing under way. In a child: called once, by its only thread.

        The ledger and the slabs are reset later: a reset uses neither. The order of the resets is arbitrary.
        """


_all: weakref.WeakSet[Resettable] = weakref.WeakSet()


def reset_in_child(thing: Resettable) -> None:
    """Call `thing.reset()` in every child that this process forks from now on."""
    _all.add(thing)


def _reset_all() -> None:
    errors = []
    for thing in list(_all):
        try:
            thing.reset()
        except BaseException as error:  # noqa: BLE001  # of a signal handler too: the others are still to be reset
            errors.append(error)
    if errors:
        raise errors[0]


os.register_at_fork(after_in_child=_reset_all)
