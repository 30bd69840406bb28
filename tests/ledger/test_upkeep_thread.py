"""A ledger that ends before its thread does."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import weakref
from pathlib import Path

import pytest

from pagoda.ledger.store_state import LOCKS
from pagoda.ledger.stores_under_root import root_locked
from testbed.patience import wait_until
from tests.ledger.support import PATIENT_SECONDS, keys, opened, put


def test_a_ledger_that_is_dropped_while_its_thread_waits_for_space_is_no_error(
    shm_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = opened(shm_root)
    put(ledger, keys(*range(ledger.slots)))
    # so it lacks pages
    ledger.space.exceeds = True
    gone = weakref.ref(ledger)
    growth = ledger.growth_thread
    with caplog.at_level(logging.WARNING), root_locked(shm_root, PATIENT_SECONDS):
        growth.wake()
        thread = growth._thread
        # this thread and the other one
        wait_until(lambda: times_open(shm_root / LOCKS) == 2)
        ledger.close()
        del ledger
        gc.collect()
        assert gone() is None
    thread.join(PATIENT_SECONDS)
    assert not thread.is_alive()
    assert not caplog.records


def times_open(path: Path) -> int:
    """How often this process has a file open."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}") == str(path)
    return found
