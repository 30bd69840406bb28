"""The tests and their processes have an empty home: nothing of the user's is read or written."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda.base import recorded_tiers
from pagoda.config.sources import load
from tests.homes import made_home


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


_MAKES_A_HOME = """
import multiprocessing, os, sys
from pathlib import Path
from tests.homes import made_home

def make():
    print(made_home(Path(sys.argv[1])), flush=True)

if sys.argv[2] == "killed":
    make()
    os.kill(os.getpid(), 9)
child = multiprocessing.get_context("fork").Process(target=make)
child.start()
child.join()
"""


def _makes_a_home(parent: Path, how: str) -> tuple[int, Path]:
    command = [sys.executable, "-c", _MAKES_A_HOME, str(parent), how]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False
    )
    return done.returncode, Path(done.stdout.strip())


def test_a_process_leaves_no_home(tmp_path: Path) -> None:
    code, made = _makes_a_home(tmp_path, "ends")
    assert code == 0
    assert made.parent == tmp_path
    assert not made.exists()


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    code, left = _makes_a_home(tmp_path, "killed")
    assert code == -signal.SIGKILL
    assert left.is_dir()
    mine = made_home(tmp_path)
    assert not left.exists()
    _makes_a_home(tmp_path, "ends")
    assert Path(mine).is_dir(), "its process lives"
