"""The demo in small: three processes, the same text, controls that differ; and how it ends when it
cannot go on.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagoda.base import recorded_tiers
from pagoda_tools.cli import UsageError
from pagoda_tools.cli.demo import demo_child, demo_command
from pagoda_tools.cli.demo.demo_child import Size, Task
from pagoda_tools.cli.demo.demo_prompts import ByteTokenizer, documents
from pagoda_tools.cli.demo.demo_run import PROCESSES, Shown, run_demo
from testbed.patience import Patience
from tests.e2e.tiny import llama

SMALL = Size(
    hidden=128,
    layers=3,
    intermediate=256,
    heads=4,
    kv_heads=2,
    initializer_range=0.18,
    document_tokens=192,
    new_tokens=32,
    chunk_tokens=64,
    rounds=2,
)
KEYS = {
    "identical",
    "distinct_tokens",
    "controls_differ",
    "ttft_cold_seconds",
    "ttft_host_seconds",
    "ttft_disk_seconds",
    "host_vs_handover",
}
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from pagoda_tools.cli import main; sys.exit(main())",
    "demo",
]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.slow
# three imports of torch, on a machine that tests other things too
@pytest.mark.timeout(600)
def test_three_processes_one_text(
    shm_root: Path,
    tmp_path: Path,
    register_of_tiers: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps: list[tuple[str, str]] = []
    shown = run_demo(
        SMALL, None, shm_root, tmp_path, lambda *step: steps.append(step)
    )
    assert recorded_tiers.entries() == []
    assert not list(register_of_tiers.rglob("*.json"))
    report = shown.as_json()
    assert report.keys() >= KEYS
    assert report["identical"] is True
    assert report["controls_differ"] is True
    assert report["distinct_tokens"] >= 12
    assert report["reused_tokens"] == {
        "cold": [{}, {}],
        "host": [{"host": 192}] * 2,
        "disk": [{"disk": 192}, {"host": 192}],
    }
    for key in KEYS:
        if "seconds" in key or "_vs_" in key:
            assert report[key] > 0
    assert {process for process, _ in steps} == {"cold", "host", "disk"}
    assert not list(shm_root.iterdir())
    assert not list(tmp_path.iterdir())
    demo_command._print(shown, None)
    printed = capsys.readouterr().out
    assert "identical" in printed
    assert "DIFFERS" not in printed
    assert "random weights write noise" in printed
    assert "█" in printed


@pytest.mark.slow
def test_a_real_model_from_a_path(shm_root: Path, tmp_path: Path) -> None:
    """Saved weights and a tokenizer from disk; nothing is downloaded. All in this process: the
    others are above.
    """
    import tokenizers
    import transformers

    alphabet = {
        letter: i
        for i, letter in enumerate(
            sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        )
    }
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=alphabet, merges=[]))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    plain.decoder = tokenizers.decoders.ByteLevel()
    saved = tmp_path / "model"
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(
        saved
    )
    llama(vocab_size=len(alphabet)).save_pretrained(saved)
    work = {
        "cold": demo_child._cold,
        "host": demo_child._host,
        "disk": demo_child._disk,
    }
    outcomes = {}
    for process in PROCESSES:
        if process == "disk":
            shutil.rmtree(shm_root / "host")
        task = Task(
            process,
            str(shm_root / "host"),
            str(tmp_path / "disk"),
            SMALL,
            str(saved),
        )
        outcomes[process] = work[process](demo_child._Asker(task, lambda _: None))
    shown = Shown(outcomes)
    assert shown.identical
    assert shown.controls_differ
    for answer in shown.outcomes["host"].answers:
        assert "host" in answer.by_tier
    assert any(
        "disk" in answer.by_tier for answer in shown.outcomes["disk"].answers
    )


@pytest.mark.slow
def test_a_model_that_cannot_be_had_or_cached(
    shm_root: Path, tmp_path: Path
) -> None:
    import transformers

    with pytest.raises(UsageError, match="--model /nowhere"):
        run_demo(SMALL, "/nowhere", shm_root, tmp_path, lambda *_: None)
    with pytest.raises(UsageError, match="the demo needs a directory"):
        run_demo(SMALL, None, tmp_path / "absent", tmp_path, lambda *_: None)
    assert not list(shm_root.iterdir())
    assert transformers


@pytest.mark.slow
def test_torch_missing_is_one_line_with_the_remedy() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from pagoda_tools.cli import main; "
        "sys.exit(main(['demo']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install" in done.stderr
    assert "needs torch" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_an_interrupted_demo_leaves_nothing_behind(
    how: str, shm_root: Path, tmp_path: Path
) -> None:
    command = [
        *COMMAND,
        "--json",
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
    while not list(tmp_path.iterdir()):  # the first process is about to start
        assert not patience.ended
        time.sleep(0.05)
    time.sleep(1.0)
    if how == "Ctrl-C":
        os.killpg(running.pid, signal.SIGINT)  # what a terminal does
    else:
        running.terminate()
    out, errors = running.communicate(timeout=120)
    assert running.returncode == 130
    assert out == ""
    assert (
        errors == "pagoda: interrupted; the demo has removed what it had stored\n"
    )
    assert not list(shm_root.iterdir())
    assert not list(tmp_path.iterdir())
    with pytest.raises(ProcessLookupError):
        os.killpg(running.pid, 0)


def test_the_text_is_long_enough_and_bytes_come_back() -> None:
    asked, other = documents()
    assert len(asked.encode()) > 100_000
    assert asked[:4096] != other[:4096]
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(asked[:5000])) == asked[:5000]
    assert json.dumps(tokenizer.encode("é")) == "[195, 169]"
