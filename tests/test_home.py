"""The tests and their processes have an empty home: nothing of the user's is read or written."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda.base import recorded_tiers
from pagoda.config.sources import load


@pytest.fixture(scope="module")
def of_a_module() -> dict[str, str]:
    """What a fixture sees that begins before any test: no test's own register is set by then."""
    return dict(os.environ)


def test_a_home_is_the_sessions_own_in_fixtures_and_in_processes(
    of_a_module: dict[str, str],
) -> None:
    users = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    made = Path(os.environ["HOME_OF_TESTS"])
    assert not made.is_relative_to(users / ".local")
    assert of_a_module["HOME"] == str(made)
    assert Path(of_a_module["XDG_STATE_HOME"]).is_relative_to(made)
    child = "from pathlib import Path; print(Path.home())"
    done = subprocess.run(
        [sys.executable, "-c", child], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(made)


def test_nothing_that_the_user_configured_is_read() -> None:
    assert not [
        name
        for name in os.environ
        if name.startswith("PAGODA_") and not name.startswith("PAGODA_TEST_")
    ]
    assert set(load().origins.values()) == {"default"}
    assert recorded_tiers.entries() == []
