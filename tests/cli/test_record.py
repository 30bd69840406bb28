"""`pagoda record`: a command with its requests recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda_tools.cli import main
from pagoda_tools.replay import read_trace
from testbed.patience import wait_until
from tests.children import in_child

ENGINE = """
import sys
import numpy as np
from pagoda import Cache, KVLayout, Namespace
from pagoda.transfer import BlockKV

layout = KVLayout.opaque(16, 8192, "an engine")
with Cache(namespace=Namespace("m"), layout=layout, host_size="2MiB", host_shared=False) as cache:
    for chunks in (2, 4, 6):
        tokens = np.arange(16 * chunks, dtype=np.int32)
        kv = BlockKV(np.zeros((chunks, 8192), np.uint8), layout)
        cache.retrieve(tokens, kv)
        cache.store(tokens, kv)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def engine(code: int = 0) -> list[str]:
    return [sys.executable, "-c", ENGINE, str(code)]


@pytest.mark.slow
def test_it_records_what_a_command_asks(
    trace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", str(trace), "--", *engine(3)]) == 3
    assert [len(request.hash_ids) for request in read_trace(trace)] == [2, 4, 6]
    out, said = capfd.readouterr()
    assert "recorded 3 requests for 12 chunks" in said
    assert f"pagoda replay {trace} --curve" in said
    assert not out


@pytest.mark.slow
def test_it_appends_only_with_the_option_for_it(
    trace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", str(trace), *engine()]) == 0
    assert main(["record", str(trace), "--", *engine()]) == 2
    assert "exists" in capfd.readouterr().err
    assert main(["record", "--append", str(trace), "--", *engine()]) == 0
    assert "recorded 3 requests" in capfd.readouterr().err
    assert len(list(read_trace(trace))) == 6


def test_it_says_when_nothing_was_recorded(
    trace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", str(trace), "--", "true"]) == 0
    assert "nothing was recorded" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["{trace}"], 2, "COMMAND"),
        (["{trace}", "--"], 2, "the command is missing"),
        (["/", "--", "true"], 2, "is a directory"),
        (["/nowhere/trace", "--", "true"], 2, "cannot be written"),
        (["{trace}", "--", "/no/such/command"], 1, "cannot be run"),
        (
            ["{trace}", "--append", "--", "true"],
            2,
            "--append: write options first",
        ),
        (["--apend", "{trace}", "--", "true"], 2, "--apend: write options first"),
    ],
)
def test_wrong_use_is_one_line(
    trace: Path,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    assert (
        main(
            ["record", *(argument.format(trace=trace) for argument in arguments)]
        )
        == code
    )
    error = capfd.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    # nothing is left of what did not run
    assert not trace.exists()


@pytest.mark.parametrize("options", [[], ["--append"]])
def test_a_pipe_is_refused_and_not_waited_for(
    trace: Path, capfd: pytest.CaptureFixture[str], options: list[str]
) -> None:
    os.mkfifo(trace)
    in_child(
        lambda: os._exit(main(["record", *options, str(trace), "--", "true"])), 2
    )
    assert "is no file" in capfd.readouterr().err


def test_a_command_that_cannot_be_run_leaves_a_trace_that_was_there(
    trace: Path,
) -> None:
    trace.touch()
    assert main(["record", str(trace), "--", "/no/such/command"]) == 1
    assert trace.exists()


@pytest.mark.slow
def test_a_signal_reaches_a_command_that_has_just_begun(tmp_path: Path) -> None:
    pagoda = [
        sys.executable,
        "-c",
        "from pagoda_tools.cli import main; raise SystemExit(main())",
    ]
    for attempt in range(4):
        trace = tmp_path / f"{attempt}.jsonl"
        line = "kill -TERM $PPID; exec sleep 100"  # as early as a signal can come
        process = subprocess.run(
            [*pagoda, "record", str(trace), "--", "sh", "-c", line], timeout=60
        )
        # the command's own end: it is not left behind
        assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_signal_ends_the_command_which_reports_what_it_did(
    trace: Path, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    line = f"touch {ready}; exec sleep 100"
    pagoda = [
        sys.executable,
        "-c",
        "from pagoda_tools.cli import main; raise SystemExit(main())",
    ]
    command = [*pagoda, "record", str(trace), "--", "sh", "-c", line]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until(ready.exists)
    os.kill(process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "nothing was recorded" in said
