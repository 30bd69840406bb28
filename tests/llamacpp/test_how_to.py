"""What the how-to page shows is run: each command as it is there, but for places and sizes."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from testbed.llama_servers import llama_server
from testbed.servers import free_port
from testbed.tiny_gguf import write_model

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "llamacpp.md"
CODE = re.findall(r"```(\w*)\n(.*?)```", PAGE.read_text(), re.S)
COMMANDS = [
    line
    for language, block in CODE
    if not language
    for line in block.splitlines()
]
_MAIN = "import sys; from pagoda_tools.cli import main; sys.exit(main())"
PAGODA = shlex.join([sys.executable, "-c", _MAIN])
# a letter: other tokens of a random model are no whole characters, and some builds fail there
_BIAS = '"logit_bias": [[100, 1000]]'

# between the two calls of the page
_ASK = """
import json, urllib.request
body = json.dumps({"prompt": tokens, "id_slot": 0, "n_predict": 0})
urllib.request.urlopen(states._server.url + "/completion", body.encode()).read()
"""


def command(start: str) -> str:
    """Return the one line of the page that begins so."""
    (found,) = [line for line in COMMANDS if line.startswith(start)]
    return found


def inline(start: str) -> str:
    """Return the one command inside a sentence of the page that begins so."""
    (found,) = re.findall(f"`({re.escape(start)}[^`]*)`", PAGE.read_text())
    return str(found)


def here(shown: str, own: Mapping[str, str]) -> str:
    """Return what the page shows with places and sizes of this test; all of those are on the
    page, or the test would use the machine's.
    """
    for text, other in own.items():
        assert text in shown, f"{text!r} is not in {shown!r}"
        shown = shown.replace(text, other)
    return shown


def test_every_command_of_the_page_is_run_here() -> None:
    run_here = (
        "pip install 'pagodakv[llamacpp]'",  # tests/test_packaging.py
        "pagoda demo --engine llama.cpp",  # tests/e2e/test_llama_demo.py
        "pagoda llama-server --host-size",
        "pagoda llama-server --attach",
        "pagoda: starting llama-server on port",
        "pagoda llama-server: http",
        "curl -si",
        "install -d",
        "llama-server -m MODEL.gguf --slot-save-path",
        "python -m examples.llama_slots",
    )
    assert [line for line in COMMANDS if not line.startswith(run_here)] == []
    for start in run_here:
        assert command(start)


@pytest.mark.slow
def test_the_first_command_keeps_a_prompt_over_a_restart(
    models: Path, tmp_path: Path, shm_root: Path, register_of_tiers: Path
) -> None:
    port = free_port()
    model = write_model(models)
    home = tmp_path / "home"
    home.mkdir()
    line = here(
        command("pagoda llama-server --host-size"),
        {
            "--host-size 4GiB": f"--host-size 32MiB --host-path {shm_root}",
            "100GiB": "64MiB",
            "MODEL.gguf": f"{model} -t 1 -c 2048",
            "8080": str(port),
        },
    )
    prompt = "Once upon a time " * 60
    ask = here(
        command("curl -si"),
        {
            "8080": str(port),
            "Once upon a time": prompt,
            "16}": f"16, {_BIAS}}}",
        },
    )
    environment = {"HOME": str(home)}
    slots = r"X-Pagoda: prompt=\d+; slot=(\d+); held=(\d+); loaded=(\d+)"
    said = []
    # llama-swap ends a server by the first, people by the second
    for end in (signal.SIGTERM, signal.SIGINT):
        with running(line, environment, end) as output:
            for start in ("pagoda: starting", "pagoda llama-server: http"):
                shown = re.sub(
                    r"\d+", r"\\d+", command(start).partition("...")[0]
                )
                assert re.search(shown, output), output
            answer = re.search(slots, run(ask, environment))
            assert answer is not None
            said.append(answer)
            for start, shown in (
                ("curl -s ", '"slots"'),
                ("pagoda explain", "gguf tiny kv_dtype=f16: of "),
                ("pagoda stats", "gguf tiny"),
                ("pagoda top", "gguf tiny"),
            ):
                words = inline(start).replace("8080", str(port))
                words += {"pagoda explain": f" --text '{prompt}'"}.get(start, "")
                words += {"pagoda top": " --once"}.get(start, "")
                assert shown in run(words, environment), start
    cold, warm = said
    assert int(cold[2]) == 0
    assert int(cold[3]) == 0
    assert int(warm[2]) == 0
    assert int(warm[3]) >= 256
    assert list((home / "kv").iterdir())


@pytest.mark.slow
def test_a_server_that_already_runs(
    models: Path, tmp_path: Path, shm_root: Path, register_of_tiers: Path
) -> None:
    port = free_port()
    with llama_server(write_model(models), key="a-key") as server:
        line = here(
            command("pagoda llama-server --attach"),
            {
                "http://127.0.0.1:8080": server.url,
                "8081": str(port),
                "/dev/shm/slots": str(server.states),
            },
        )
        environment = {
            "LLAMA_API_KEY": "a-key",
            "PAGODA_HOST_SIZE": "32MiB",
            "PAGODA_HOST_PATH": str(shm_root),
        }
        ask = here(command("curl -si"), {"8080": str(port)})
        with running(line, environment):
            assert "X-Pagoda" not in run(ask, environment, may_fail=True)
            with_key = {
                "curl": "curl -H 'Authorization: Bearer a-key'",
                "16}": f"16, {_BIAS}}}",
            }
            ask = here(ask, with_key)
            assert "X-Pagoda: prompt=" in run(ask, environment)


@pytest.mark.slow
def test_the_options_of_the_server_are_shown() -> None:
    assert "--ctx-size" in run(inline("pagoda llama-server -- --help"), {})


@pytest.mark.slow
def test_the_example_reuses_its_prompt_after_a_restart(
    models: Path, tmp_path: Path
) -> None:
    with llama_server(write_model(models, "lfm2")) as server:
        line = here(
            command("python -m examples.llama_slots"),
            {
                "python": shlex.quote(sys.executable),
                "http://127.0.0.1:8080": server.url,
                "/dev/shm/slots": str(server.states),
                "/tmp/kv": f"{tmp_path}/kv --disk-size 64MiB",
                "$(cat README.md)": "a long question " * 40,
            },
        )
        said = []
        for _ in range(2):
            said.append(
                re.search(r"^(\d+) of (\d+) tokens reused", run(line, {}), re.M)
            )
            server.server.restart()
    cold, warm = said
    assert cold is not None
    assert warm is not None
    assert int(cold[1]) == 0
    assert int(warm[1]) == int(warm[2]) - 4


@pytest.mark.slow
def test_the_code_of_the_page_runs(models: Path, tmp_path: Path) -> None:
    (usage,) = [block for language, block in CODE if language == "python"]
    slots = tmp_path / "slots"
    run(here(command("install -d"), {"/dev/shm/slots": str(slots)}), {})
    assert slots.stat().st_mode & 0o777 == 0o700
    with llama_server(write_model(models)) as server:
        tokens = [1, *range(100, 126)] * 20
        code = here(
            usage,
            {
                "http://127.0.0.1:8080": server.url,
                "/dev/shm/slots": str(server.states),
                "/var/cache/pagoda": str(tmp_path / "kv"),
                "8GiB": "32MiB",
                "200GiB": "64MiB",
                "stored =": f"{_ASK}\nstored =",
            },
        )
        whole = f"tokens = {tokens}\n{code}\nprint(stored)\nstates.close()\n"
        said = run(
            shlex.join([sys.executable, "-c", whole]),
            {"PAGODA_HOST_SHARED": "false"},
        )
        assert "new_tokens=512" in said, said


@contextlib.contextmanager
def running(
    line: str,
    environment: Mapping[str, str],
    end: signal.Signals = signal.SIGINT,
) -> Iterator[str]:
    """Run a line of the page until it serves; yield what it has printed. End it by a signal."""
    line = re.sub("^pagoda", f"exec {PAGODA}", line)
    with subprocess.Popen(
        ["bash", "-c", line],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        assert process.stdout is not None
        lines = []
        try:
            for said in process.stdout:
                lines.append(said)
                if said.startswith("pagoda llama-server: "):
                    break
            else:
                raise AssertionError("".join(lines))
            yield "".join(lines)
            process.send_signal(end)
            rest, _ = process.communicate(timeout=120)
            assert process.returncode == 0, rest
        finally:
            process.kill()


def run(
    line: str, environment: Mapping[str, str], *, may_fail: bool = False
) -> str:
    """Run a line of the page; return what it prints."""
    line = re.sub("^pagoda", PAGODA, line)
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )
    assert may_fail or done.returncode == 0, done.stderr
    return done.stdout
