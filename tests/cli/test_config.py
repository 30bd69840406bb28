"""`pagoda config`, and the messages of the command for wrong use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import pytest

import pagoda as package
from pagoda.base.store_place import is_in_memory
from pagoda.config import option_names
from tests.cli.shelf import answer, done_here, one_line, pagoda, refused


@pytest.mark.slow
def test_show_names_the_source_of_each_value(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("chunk_tokens = 128\n")
    found = answer("config", "show", "--config", file, PAGODA_HOST_SIZE="1GiB")
    options = cast("dict[str, dict[str, object]]", found["options"])
    assert list(options) == option_names()
    assert options["chunk_tokens"] == {"value": 128, "origin": f"file {file}"}
    assert options["host_size"] == {
        "value": 2**30,
        "origin": "environment PAGODA_HOST_SIZE",
    }
    assert options["policy"]["origin"] == "default"
    shown = pagoda("config", "show", PAGODA_CONFIG=str(file)).stdout
    assert f"file {file}" in shown
    assert "auto (" in shown


@pytest.mark.slow
def test_check_says_what_would_not_work(tmp_path: Path) -> None:
    assert answer("config", "check", PAGODA_HOST_SIZE="64MiB")["ok"] is True
    done = pagoda("config", "check", PAGODA_HOST_SIZE="4000TiB")
    assert done.returncode == 1
    assert "smaller size" in done.stderr
    assert done.stderr.count("\n") == 1
    if not is_in_memory(tmp_path):
        done = pagoda(
            "config",
            "check",
            PAGODA_HOST_SIZE="64MiB",
            PAGODA_HOST_PATH=str(tmp_path),
        )
        assert done.returncode == 1
        assert "host memory must be in memory" in done.stderr
    (tmp_path / "bad.toml").write_text("chunk_token = 1\n")
    assert "did you mean chunk_tokens?" in refused(
        "config", "check", tmp_path / "bad.toml"
    )
    assert "no such configuration file" in refused(
        "config", "check", tmp_path / "none.toml"
    )
    assert "is a directory, not a configuration file" in refused(
        "config", "check", tmp_path
    )


def test_schema_is_json() -> None:
    found = json.loads(pagoda("config", "schema").stdout)
    assert list(found["properties"]) == option_names()


@pytest.mark.slow
def test_version_help_and_no_command() -> None:
    assert pagoda("--version").stdout == f"pagoda {package.__version__}\n"
    for arguments in ([], ["--help"], ["-h"]):
        done = done_here(*arguments)
        assert done.returncode == 0
        for command in (
            "stats",
            "ls",
            "check",
            "clear",
            "explain",
            "bench",
            "demo",
            "config",
            "replay",
        ):
            assert command in done.stdout
    assert "--no-such" in refused("--no-such")
    assert "--no-such" in refused("stats", "--no-such")


def test_wrong_use_of_the_real_command_is_one_line_and_no_traceback() -> None:
    done = pagoda("stats", PAGODA_HOST_SIZE="many")
    assert "PAGODA_HOST_SIZE" in one_line(
        done.returncode, done.stdout, done.stderr
    )
    for arguments in (
        ["stats", "/no/such/place"],
        ["ls", "--limit", "few"],
        ["sats"],
    ):
        refused(*arguments)


def test_what_is_nested_too_deeply_to_be_read_is_one_line(tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    deep.write_text("[" * 100_000)
    tiers = ["--host", "1GiB", "--model", "llama-3-8b"]
    for arguments in (
        ["explain", "--tokens", deep],
        ["replay", *tiers, "--measured", deep],
    ):
        assert "nested too deeply" in refused(*arguments)
    deep.write_text("a = " + "[" * 100_000)
    assert f"{deep}: cannot be read as TOML" in refused("stats", "--config", deep)


@pytest.mark.parametrize("command", ["--help", "--version", "stats"])
def test_what_opens_no_store_imports_nothing_heavy(
    command: str, shm_root: Path
) -> None:
    code = (
        f"import sys\nfrom pagoda_tools.cli import main\nmain(['{command}'])\n"
        "heavy = {'numpy', 'torch', 'lmdb', 'pydantic_settings', 'asyncio', 'http.client'}\n"
        "sys.exit(str(heavy & set(sys.modules) or '') or 0)"
    )
    # nothing is stored there
    environment = {
        **os.environ,
        "PAGODA_HOST_PATH": str(shm_root / "x"),
        "XDG_STATE_HOME": str(shm_root / "state"),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_interrupted_is_130_without_a_traceback(shm_root: Path) -> None:
    environment = {
        **os.environ,
        "PAGODA_HOST_PATH": str(shm_root / "x"),
        "PAGODA_HOST_SIZE": "1GiB",
    }
    code = (
        "import sys; from pagoda_tools.cli import main; "
        "sys.exit(main(['bench', '--seconds', '60']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    while (
        not list(shm_root.glob("pagoda-bench-*/*/slab"))
        and process.poll() is None
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out
    assert out == ""
    assert "Traceback" not in err
    assert err.count("\n") <= 1
    assert list(shm_root.iterdir()) == []


def test_a_reader_that_goes_away_is_no_traceback(shm_root: Path) -> None:
    code = "import sys; from pagoda_tools.cli import main; sys.exit(main(['config', 'schema']))"
    script = f'{sys.executable} -c "{code}" | true'
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
