"""Whole SGLang engines with a model, on the CPU: after a restart the text is the same, and the KV was not computed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testbed.sglang_parts import _copy_layers  # noqa: F401  # skips this module without SGLang
from tests.sglang.whole_engine import prompt
from tests.vllm.models import make_llama

ROOT = Path(__file__).resolve().parents[2]
PAGE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random Llama."""
    return str(make_llama(tmp_path_factory.mktemp("models") / "llama"))


def answers(model: str, extra: dict[str, Any] | None = None, **plan: Any) -> list[dict[str, Any]]:
    """Start an engine, and return its answers to four prompts."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.sglang.whole_engine"]
    command.append(json.dumps({"model": model, "extra": extra, **plan}))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found and found[-1] == {"ended": True}, done.stderr[-3000:]
    return found[:-1]


def texts(found: list[dict[str, Any]]) -> list[tuple[list[int], list[float]]]:
    """What must be the same."""
    return [(one["tokens"], one["logprobs"]) for one in found]


@pytest.mark.timeout(3000)
def test_a_restarted_engine_answers_the_same_without_computing(
    shm_root: Path, tmp_path: Path, model: str
) -> None:
    """From the host tier, then from the disk; the controls see nothing, or something else."""
    extra = {
        "backend_name": "pagoda", "module_path": "pagoda.connectors.sglang", "class_name": "PagodaHiCache",
        "host_path": str(shm_root / "host"), "host_size": "32MiB", "disk_path": str(tmp_path / "disk"),
        "disk_size": "64MiB", "prefetch_threshold": PAGE, "hicache_storage_pass_prefix_keys": True,
    }  # fmt: skip
    plain = answers(model)
    cold = answers(model, extra)
    warm = answers(model, extra)
    shutil.rmtree(shm_root / "host")
    disk = answers(model, extra)
    assert texts(plain) == texts(cold) == texts(warm) == texts(disk)
    whole = [(len(prompt(number)) - 1) // PAGE * PAGE for number in range(4)]
    assert [one["stored"] for one in cold] == [0] * 4
    assert [one["stored"] for one in warm] == [one["stored"] for one in disk] == whole
    assert [one["cached"] for one in answers(model, {**extra, "salt": "another"})] == [0] * 4
    zeroed = answers(model, extra, zeroed=True)
    assert [one["stored"] for one in zeroed] == whole
    assert all(one["tokens"] != right["tokens"] for one, right in zip(zeroed, plain, strict=True))
