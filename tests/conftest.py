"""Fixtures and profiles that all suites share."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Each test has a deadline (pytest-timeout); hypothesis's own would only measure how busy the machine is.
_quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
# The quick one has the same examples in every run of the same code; `thorough` looks for new ones.
settings.register_profile(
    "quick", max_examples=50, deadline=None, suppress_health_check=_quiet, derandomize=True
)
settings.register_profile("thorough", max_examples=2000, deadline=None, suppress_health_check=_quiet)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# A shell that starts the tests in the background has them ignore Ctrl-C, and whatever they start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def shm_root() -> Iterator[Path]:
    """A new directory of this test's own in the machine's shared memory, removed afterwards."""
    root = Path(tempfile.mkdtemp(prefix="pagoda-test-", dir="/dev/shm"))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)
