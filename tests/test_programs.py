"""How tests, benchmarks and examples find the programs that they start."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path

import pytest

from testbed import programs
from testbed.patience import wait_until
from testbed.programs import lacking, need, path_of
from testbed.servers import redis_server

ROOT = Path(__file__).parents[1]


def program(directory: Path, name: str) -> str:
    """Create a program that does nothing; return its path."""
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_what_only_root_has_on_its_path_is_found_behind_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(programs, "SYSTEM_DIRECTORIES", (str(tmp_path / "sbin"),))
    of_root = program(tmp_path / "sbin", "nginx")
    assert path_of("nginx") == of_root
    of_all = program(tmp_path / "bin", "nginx")
    assert path_of("nginx") == of_all


def test_without_a_path_programs_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PATH")
    assert path_of("sh") is not None


def test_what_is_missing_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(programs, "SYSTEM_DIRECTORIES", ())
    assert (
        lacking("mkfs.xfs") == "mkfs.xfs is missing: install the package xfsprogs"
    )
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(unittest.SkipTest, match="nginx is missing"):
        need("nginx")
    monkeypatch.setenv("CI", "1")
    with pytest.raises(RuntimeError, match="nginx is missing"):
        need("nginx")


def test_nothing_looks_for_programs_in_another_way() -> None:
    """Whoever asks the PATH alone skips tests of a user for a false reason."""
    another_way = re.compile(
        r'\bshutil\.which\(|\["(nginx|mkfs|ip|tc|losetup|xfs_io)\b'
    )
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for part in ("tests", "testbed", "examples")
        for file in (ROOT / part).rglob("*.py")
        if file.name not in ("programs.py", "test_programs.py")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if another_way.search(line)
    ]
    assert found == []


_STARTS_A_SERVER = """
import sys, time
from testbed.servers import redis_server
with redis_server() as server:
    print(server.pid, flush=True)
    sys.stdin.read()
"""


def _lives(pid: int) -> bool:
    """Whether a process exists that has not ended: nobody may wait for it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


@pytest.mark.skipif(path_of("setpriv") is None, reason=lacking("setpriv"))
def test_a_server_ends_with_a_process_that_is_killed() -> None:
    need("redis-server")
    process = subprocess.Popen(
        [sys.executable, "-c", _STARTS_A_SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    with process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert _lives(pid)
        process.kill()
    wait_until(lambda: not _lives(pid))


def test_a_server_outlives_the_thread_that_started_it() -> None:
    with redis_server() as server:
        thread = threading.Thread(target=server.restart)
        thread.start()
        thread.join()
        for _ in range(3):
            assert server.call("PING").strip() == "+PONG"
            time.sleep(0.05)
