"""A directory that is removed while a cache is being opened over it, before any of its system
calls.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from types import FrameType

import pytest

from pagoda.base.errors import StoreError
from pagoda.base.finalizers import close_dropped
from testbed.patience import Patience
from tests.cache.kit import cache_at, kv_of, prompt, served

POINTS = 12
_SYSTEM = ("posix", "mmap", "fcntl", "io")


class Removal:
    """Removes a directory before one of the system calls that Python's built-in functions make."""

    def __init__(self, directory: Path, at: int) -> None:
        self.directory = directory
        self.at = at
        self.calls = 0

    def __call__(self, _: FrameType, event: str, function: object) -> None:
        module = getattr(function, "__module__", None) or ""
        if event != "c_call" or module not in _SYSTEM:
            return
        self.calls += 1
        if self.calls == self.at:
            sys.setprofile(None)
            shutil.rmtree(self.directory, ignore_errors=True)


def opened(host: Path, disk: Path, removal: Removal) -> bool:
    """Open a cache, use it if that was possible, and close it; only a StoreError may be raised."""
    sys.setprofile(removal)
    try:
        with cache_at(host, disk) as cache:
            sys.setprofile(None)
            tokens = prompt(3, 1)
            cache.store(tokens, kv_of(tokens).transfer)
            served(cache, tokens)
            return True
    except StoreError:
        return False
    finally:
        sys.setprofile(None)


def descriptors(*roots: Path) -> list[str]:
    """Those of this process that are of files below `roots`."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [
        path
        for path in found
        if path.startswith(tuple(f"{root}/" for root in roots))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("exists", [False, True], ids=["made", "opened"])
def test_an_opening_whose_directory_is_removed_is_a_store_error_or_works(
    shm_root: Path, tmp_path: Path, exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what pytest keeps of a log line keeps the frames of its exception, and what is open in them
    monkeypatch.setattr(logging.getLogger("pagoda"), "propagate", False)
    counting = Removal(shm_root, 0)
    if exists:
        assert opened(shm_root, tmp_path, Removal(shm_root, 0))
    assert opened(shm_root, tmp_path, counting)
    failed = 0
    for at in range(1, counting.calls + 1, max(1, counting.calls // POINTS)):
        for directory in (shm_root / "host", tmp_path / "disk"):
            if exists:
                assert opened(shm_root, tmp_path, Removal(shm_root, 0))
            else:
                shutil.rmtree(shm_root / "host", ignore_errors=True)
                shutil.rmtree(tmp_path / "disk", ignore_errors=True)
            failed += not opened(shm_root, tmp_path, Removal(directory, at))
    assert failed, "some of them cannot go on"
    assert opened(shm_root, tmp_path, Removal(shm_root, 0)), (
        "the next process works"
    )
    patience = Patience(60)
    while left := descriptors(shm_root, tmp_path):
        assert not patience.ended, left
        gc.collect()
        assert close_dropped(60)
        time.sleep(0.05)  # a thread of a closed ledger may be in its last pause
