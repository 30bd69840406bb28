"""What the how-to page shows is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.llama_servers import llama_server
from testbed.tiny_gguf import write_model

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "llamacpp.md"


# between the two calls of the page
_ASK = """
import json, urllib.request
body = json.dumps({"prompt": tokens, "id_slot": 0, "n_predict": 0})
urllib.request.urlopen(states._server.url + "/completion", body.encode()).read()
"""


@pytest.mark.slow
def test_the_example_reuses_its_prompt_after_a_restart(
    models: Path, tmp_path: Path
) -> None:
    with llama_server(write_model(models, "lfm2")) as server:
        command = [
            *(sys.executable, "-m", "examples.llama_slots"),
            *(server.url, str(server.states), "a long question " * 40),
            *("--disk-path", str(tmp_path / "kv"), "--disk-size", "64MiB"),
        ]
        said = []
        for _ in range(2):
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=True
            )
            said.append(
                re.search(r"^(\d+) of (\d+) tokens reused", done.stdout, re.M)
            )
            server.server.restart()
    cold, warm = said
    assert cold is not None and warm is not None
    assert int(cold[1]) == 0
    assert int(warm[1]) == int(warm[2]) - 4


@pytest.mark.slow
def test_the_code_of_the_page_runs(models: Path, tmp_path: Path) -> None:
    usage, in_process = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    with llama_server(write_model(models)) as server:
        tokens = [1, *range(100, 126)] * 20
        code = (
            usage.replace("http://127.0.0.1:8080", server.url)
            .replace("/dev/shm/slots", str(server.states))
            .replace("/var/cache/pagoda", str(tmp_path / "kv"))
            .replace("8GiB", "32MiB")
            .replace("200GiB", "64MiB")
            .replace("stored =", f"{_ASK}\nstored =")
        )
        done = run(
            f"tokens = {tokens}\n{code}\nprint(stored)\nstates.close()\n",
            {"PAGODA_HOST_SHARED": "false"},
        )
        assert "new_tokens=512" in done, done
    pytest.importorskip("xllamacpp")
    code = in_process.replace("MODEL.gguf", str(write_model(models)))
    code = code.replace("/dev/shm/slots/", f"{tmp_path}/")
    # killed: at its end, the library may wait for a thread of its own for ever
    with subprocess.Popen(
        [sys.executable, "-uc", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.kill()
    assert first.startswith("http://127.0.0.1")


def run(code: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
