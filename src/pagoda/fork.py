"""Make locks and threads anew in a forked child, where the parent's threads are gone and may have held any lock."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["renewed_after_fork"]


class Renewable(Protocol):
    """Something with locks or threads."""

    def renew(self) -> None:
        """Begin anew in a forked child: own locks, no threads, nothing under way. Called once, by the only thread."""


_all: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renewed_after_fork(thing: Renewable) -> None:
    """Have `thing.renew()` called in every child that this process forks from now on."""
    _all.add(thing)


def _renew_all() -> None:
    for thing in list(_all):
        thing.renew()


os.register_at_fork(after_in_child=_renew_all)
