"""Fixtures and profiles that all suites share."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

# Each test has a deadline (pytest-timeout); hypothesis's own would only measure how busy the machine is.
_quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
# The quick one has the same examples in every run of the same code; `thorough` looks for new ones.
settings.register_profile(
    "quick", max_examples=50, deadline=None, suppress_health_check=_quiet, derandomize=True
)
settings.register_profile("thorough", max_examples=2000, deadline=None, suppress_health_check=_quiet)
# For mutants: that a test fails is all that is asked.
settings.register_profile(
    "mutants",
    settings.get_profile("quick"),
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# What a test starts uses the sources that the test itself uses, not a package that happens to be installed.
_package = importlib.util.find_spec("pagoda")
assert _package is not None and _package.submodule_search_locations is not None
SOURCES = str(Path(_package.submodule_search_locations[0]).parent)
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys(filter(None, [SOURCES, os.environ.get("PYTHONPATH")]))
)

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


@pytest.fixture(autouse=True)
def register_of_tiers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A register of tiers of this test's own: what it opens is not the user's, nor another test's."""
    directory = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(directory))
    return directory
