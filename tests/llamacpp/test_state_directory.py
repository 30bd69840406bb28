"""The directory of states: who owns what, and what is removed when."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda.base.errors import ClosedError, StoreError
from pagoda.connectors.llamacpp import state_directory
from pagoda.connectors.llamacpp.state_directory import (
    StateDirectory,
    make_state_directory,
)

_OPEN = """
import sys
from pagoda.connectors.llamacpp.state_directory import StateDirectory
directory = StateDirectory(sys.argv[1], 1000)
with directory.state() as path:
    path.write_bytes(b"state")
    print(path.name, flush=True)
    sys.stdin.read()
"""


def started(directory: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a process that has a state in the directory; return it and the name of the state."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OPEN, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.slow
def test_states_of_the_dead_are_removed_and_those_of_the_living_stay(
    tmp_path: Path,
) -> None:
    dead, dead_state = started(tmp_path)
    living, living_state = started(tmp_path)
    try:
        dead.kill()
        dead.wait()
        foreign = tmp_path / "slot-of-a-user.bin"
        foreign.write_bytes(b"not ours")
        directory = StateDirectory(tmp_path, 1000)
        names = os.listdir(tmp_path)
        assert dead_state not in names
        assert living_state in names
        assert foreign.name in names
        directory.close()
        assert (
            len(os.listdir(tmp_path)) == 3
        )  # the other's state and lock, and the user's file
    finally:
        living.kill()
        living.wait()


def test_a_state_that_the_server_writes_late_is_removed(tmp_path: Path) -> None:
    """After a deadline the server may still save under the name that it was given."""
    directory = StateDirectory(tmp_path, 1000)
    with directory.state() as late:
        pass
    late.write_bytes(b"late")
    with directory.state():
        pass
    assert not late.exists()
    directory.close()
    directory.close()
    assert os.listdir(tmp_path) == []


_FORK = """
import os, sys
from pagoda.connectors.llamacpp.state_directory import StateDirectory
directory = StateDirectory(sys.argv[1], 1000)
with directory.state() as path:
    path.write_bytes(b"state")
    before = sorted(os.listdir(sys.argv[1]))
    child = os.fork()
    if not child:
        directory.remove_own()
        with directory.state() as own:
            own.write_bytes(b"own")
            assert own.name.split("-")[2] != path.name.split("-")[2]
            # its lock is held, so it is not taken for that of a dead process
            StateDirectory(sys.argv[1], 1000).close()
            assert own.exists() and path.exists()
        directory.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(os.listdir(sys.argv[1])) == before
    if not os.fork():
        print(path.name, flush=True)
        # lives longer than its parent, and must not hold its lock
        sys.stdin.read()
        os._exit(0)
    os._exit(0)
"""


def test_a_forked_child_leaves_its_parents_files_and_lock(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _FORK, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        state = process.stdout.readline().strip()
        assert process.wait() == 0
        assert state in os.listdir(tmp_path)
        directory = StateDirectory(tmp_path, 1000)
        assert state not in os.listdir(tmp_path)
        directory.close()
    with pytest.raises(ClosedError), directory.state():
        pass


@pytest.mark.slow
def test_a_process_that_starts_during_a_sweep_keeps_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, _ = started(tmp_path)
    dead.kill()
    dead.wait()
    take_over = state_directory._take_over
    processes = []

    def started_meanwhile(file: Path) -> bool:
        if not processes:
            processes.append(started(tmp_path))
        return take_over(file)

    monkeypatch.setattr(state_directory, "_take_over", started_meanwhile)
    directory = StateDirectory(tmp_path, 1000)
    ((process, state),) = processes
    try:
        assert state in os.listdir(tmp_path)
    finally:
        process.kill()
        process.wait()
        directory.close()


def test_a_directory_is_only_for_its_user(tmp_path: Path) -> None:
    made = make_state_directory(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o750)
    with pytest.raises(StoreError, match="chmod 700"):
        make_state_directory(made)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StoreError):
        make_state_directory(file)
