"""`python -m examples.two_machines`: what one machine computed the other serves, whatever happens
to its link.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.two_machines import __main__ as cli
from examples.two_machines.story import DOCUMENT_TOKENS, Turn, wrong_with
from testbed.netns import need_network
from testbed.patience import Patience, wait_until
from testbed.programs import need

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "examples.two_machines"]
MARK = "TWO_MACHINES_TEST"  # in the environment of everything that a run starts


@pytest.fixture(autouse=True)
def allowed() -> None:
    need("redis-server")
    need_network()


@pytest.fixture
def mark(tmp_path: Path) -> dict[str, str]:
    """An environment whose processes and temporary files can be found again."""
    return {**os.environ, MARK: str(tmp_path), "TMPDIR": str(tmp_path)}


def processes(mark: dict[str, str]) -> list[int]:
    """Those that live and were started with this environment. Redis writes over it, but is in its
    directory.
    """
    sought = f"{MARK}={mark[MARK]}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            marked = sought in (place / "environ").read_bytes().split(b"\0")
            if marked or os.readlink(place / "cwd").startswith(mark["TMPDIR"]):
                found.append(int(place.name))
        except OSError:  # ended meanwhile, or a kernel thread
            continue
    return found


def in_memory() -> set[Path]:
    return set(Path("/dev/shm").glob("two-machines-*"))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_one_computed_the_other_serves(
    mark: dict[str, str], tmp_path: Path, register_of_tiers: Path
) -> None:
    before = in_memory()
    done = subprocess.run(
        [*COMMAND, "--json", "--verify"],
        cwd=ROOT,
        env=mark,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert not processes(mark)
    assert not list(tmp_path.iterdir())
    assert in_memory() <= before
    assert not list(register_of_tiers.rglob("*.json"))
    printed = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert printed["wrong"] == []
    assert done.stderr == ""
    turns = printed["turns"]
    for turn in turns:
        assert turn["same"]
        assert turn["load_seconds"] < 2.0
    served = [
        (turn["machine"], tier) for turn in turns for tier in turn["by_tier"]
    ]
    assert served == [
        ("B", "redis"),
        ("B", "host"),
        ("B", "host"),
        ("B", "redis"),
        ("A", "redis"),
    ]
    for turn in turns:
        for tokens in turn["by_tier"].values():
            assert tokens == DOCUMENT_TOKENS
    assert "tier_skipped" in [turn["reason"] for turn in turns]
    # the text depends on the document
    assert len({tuple(turn["output"]) for turn in turns}) >= 5
    assert len(set(turns[0]["output"])) >= 12


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM", "kill -9"])
def test_an_interrupted_run_leaves_nothing_behind(
    how: str, mark: dict[str, str], tmp_path: Path
) -> None:
    before = in_memory()
    running = subprocess.Popen(
        COMMAND,
        cwd=ROOT,
        env=mark,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    patience = Patience(60)
    # itself, three that hold namespaces, the server, two engines
    while len(processes(mark)) < 7:
        assert not patience.ended, patience.said()
        assert running.poll() is None
        time.sleep(0.05)
    if how == "Ctrl-C":
        assert any("is cut" in line for line in running.stdout)
        os.killpg(running.pid, signal.SIGINT)  # what a terminal does
    elif how == "SIGTERM":
        running.terminate()
    else:
        running.kill()
    _, said = running.communicate(timeout=200)
    # nobody waits for those of a process that was killed
    wait_until(lambda: not processes(mark))
    if how != "kill -9":  # which leaves files
        assert running.returncode == 130, said
        assert said == "two_machines: interrupted\n"
        assert in_memory() <= before
        assert not list(tmp_path.iterdir())
    for path in in_memory() - before:
        subprocess.run(["rm", "-r", str(path)], check=True)


def test_what_is_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(sys, "argv", ["two_machines"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main() == 2
    said = capsys.readouterr()
    assert said.err == (
        "two_machines: redis-server is not installed (Debian, Ubuntu: apt install "
        "redis-server)\n"
    )


def test_a_wrong_turn_is_found() -> None:
    """If it were not, the first test would prove nothing."""

    def turn(**changes: object) -> Turn:
        good = {
            "by_tier": {"redis": DOCUMENT_TOKENS},
            "reason": "",
            "detail": "",
            "same": True,
            "output": [],
        }
        return Turn(
            "is asked",
            "B",
            **{**good, "seconds": 0.2, "load_seconds": 0.1, **changes},
        )

    assert wrong_with(turn(), "redis") == []
    assert (
        wrong_with(
            turn(by_tier={}, reason="deadline"), ("tier_skipped", "deadline")
        )
        == []
    )
    assert "another text" in wrong_with(turn(same=False), "redis")[0]
    assert (
        "were to come from redis"
        in wrong_with(turn(by_tier={"host": DOCUMENT_TOKENS}), "redis")[0]
    )
    assert (
        "were to come from redis"
        in wrong_with(turn(by_tier={"redis": 64}), "redis")[0]
    )
    assert "nothing was to come" in wrong_with(turn(), ("tier_skipped",))[0]
    assert (
        "nothing was to come"
        in wrong_with(turn(by_tier={}, reason="absent"), ("tier_skipped",))[0]
    )
    assert (
        "with a deadline of 1 s" in wrong_with(turn(load_seconds=2.5), "redis")[0]
    )
