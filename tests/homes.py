"""The home of a run of tests: removed at its end, and by a later run if it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

_PREFIX = "pagoda-test-home-"
_LOCK = ".in-use"
_held = list[int]()  # the descriptors of locks, which end with this process


def made_home(parent: Path) -> str:
    """Make a home for this process; remove those whose processes were killed."""
    for home in parent.glob(f"{_PREFIX}*"):
        _remove_if_left(home)
    made = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    new = Path(made, ".new")
    _held.append(os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    fcntl.flock(_held[-1], fcntl.LOCK_EX)
    new.rename(Path(made, _LOCK))  # locked before another run can find it
    # at the end of a process of multiprocessing too, of which nothing of atexit runs; not of forks
    Finalize(None, shutil.rmtree, (made, True), exitpriority=0)
    return made


def _remove_if_left(home: Path) -> None:
    """Remove a home without a process that locks it."""
    with contextlib.suppress(OSError):
        lock = os.open(home / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(home)
        finally:
            os.close(lock)
