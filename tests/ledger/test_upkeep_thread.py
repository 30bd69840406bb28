"""The upkeep thread of a ledger that ends before its thread does."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from pathlib import Path

import pytest

from pagoda.ledger.stores_under_root import root_locked
from testbed.patience import Patience
from tests.ledger.support import PATIENT_SECONDS, opened


def test_a_ledger_that_is_dropped_while_its_thread_waits_for_space_is_no_error(
    shm_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = opened(shm_root)
    gone = weakref.ref(ledger)
    growth = ledger.growth_thread
    with caplog.at_level(logging.ERROR), root_locked(shm_root, PATIENT_SECONDS):
        growth.wake()
        thread = growth._thread
        patience = Patience(PATIENT_SECONDS)
        # until the thread asks for space
        while growth._woken.is_set() and not patience.ended:
            time.sleep(0.001)
        ledger.close()
        del ledger
        gc.collect()
        assert gone() is None
    thread.join(PATIENT_SECONDS)
    assert not thread.is_alive()
    assert not caplog.records
