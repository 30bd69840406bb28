from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from pagoda.base.errors import ConfigError
from pagoda.base.quality_verdict import read_verdict
from pagoda.connectors.transformers import CachedModel
from pagoda.connectors.transformers.model_identity import weights_digest
from pagoda_tools.quality.prompt_lines import QualityPrompt
from testbed.patience import Patience, wait_until
from tests.cli.shelf import RUN, one_line, run_here
from tests.quality.tiny import CHUNK, prompts, tiny_llama


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model") / "tiny"
    tiny_llama().save_pretrained(place)
    return place


def written(path: Path, lines: list[QualityPrompt]) -> Path:
    file = path / "prompts.jsonl"
    texts = [
        json.dumps({"documents": one.documents, "question": one.question})
        for one in lines
    ]
    file.write_text("\n".join(texts) + "\n")
    return file


USUAL = (
    "--chunk-tokens",
    CHUNK,
    "--new-tokens",
    2,
    "--min-prompts",
    4,
    "--device",
    "cpu",
)


@pytest.mark.slow
def test_a_verdict_is_measured_printed_drawn_and_used(
    saved: Path, tmp_path: Path
) -> None:
    file = written(tmp_path, prompts(6))
    png = tmp_path / "q.png"
    asked = ("--blend", "deviation:1", "--blend", "first_k:0.1", "--codec", "q4")
    code, out, err = run_here(
        "quality",
        saved,
        file,
        *USUAL,
        *asked,
        "--out",
        tmp_path / "v",
        "--png",
        png,
    )
    assert code == 0, err
    assert all(
        len(line) <= 80 or str(tmp_path) in line for line in out.splitlines()
    ), out
    assert "  FAIL" not in out.splitlines()  # the last column has room in its row
    said = " ".join(out.split())
    for name in (
        "exact",
        "plain reuse",
        "deviation:1",
        "first_k:0.1",
        "q4",
        "zeroed KV",
        "swapped values",
    ):
        assert name in said
    assert (
        "deviation:1 PASS: it keeps loosened bounds (6 prompts instead of 50), and these prompts "
        "detect wrong KV"
    ) in said
    assert "plain reuse FAIL: the KL divergence is" in said
    assert "first_k:0.1 FAIL:" in said
    assert png.read_bytes().startswith(b"\x89PNG")

    model = LlamaForCausalLM.from_pretrained(saved)  # as users load it
    weights = weights_digest(model)
    verdict = read_verdict(tmp_path / "v" / f"{weights}.json")
    assert verdict.model == "tiny"
    assert verdict.weights == [weights]
    assert {str(result.setting): result.passed for result in verdict.results} == {
        "blend policy=deviation recompute=0": False,
        "blend policy=deviation recompute=1": True,
        "blend policy=first_k recompute=0.1": False,
        "codec chunk_tokens=8 codec=q4": False,
    }
    options = {
        "host_size": "16MiB",
        "host_shared": False,
        "chunk_tokens": CHUNK,
        "quality_verdicts": tmp_path / "v",
    }
    prompt = prompts(1)[0]
    with (
        CachedModel(model, **options) as cached,
        pytest.raises(ConfigError, match=r"measured and FAILED.*KL"),
    ):
        cached.blend(
            prompt.documents, prompt.question, recompute=0.1, policy="first_k"
        )
    with CachedModel(model, **options, unchecked=True) as cached:
        cached.blend(
            prompt.documents, prompt.question, recompute=0.1, policy="first_k"
        )
        (shown,) = cached.stats()["approximate"]
    assert shown["setting"] == "blend policy=first_k recompute=0.1"
    assert shown["checked"] == "unchecked"
    assert "FAILED" in shown["detail"]


@pytest.mark.slow
def test_a_passing_verdict_lets_blending_start(
    saved: Path, tmp_path: Path
) -> None:
    file = written(tmp_path, prompts(4))
    loose = ("--top1", 0.5, "--blend", "first_k:0.5", "--out", tmp_path)
    kl = (
        max(
            row["kl"]["high"]
            for row in _json(saved, file, tmp_path)
            if row["name"] == "first_k:0.5"
        )
        + 0.01
    )
    code, out, _ = run_here("quality", saved, file, *USUAL, "--kl", kl, *loose)
    assert code == 0, out
    assert "first_k:0.5 PASS: it keeps loosened bounds (KL at most " in " ".join(
        out.split()
    )
    prompt = prompts(1)[0]
    with CachedModel(
        LlamaForCausalLM.from_pretrained(saved),
        host_size="16MiB",
        host_shared=False,
        chunk_tokens=CHUNK,
        quality_verdicts=tmp_path,
    ) as cached:
        cached.blend(
            prompt.documents, prompt.question, recompute=0.5, policy="first_k"
        )
        (state,) = cached.stats()["approximate"]
        assert state["checked"] == "loosened"
        assert (
            "same tokens at least 50.0 % instead of 93.0 %, 4 prompts instead of 50"
            in str(state["detail"])
        )
        with pytest.raises(ConfigError, match="is about other settings"):
            cached.blend(
                prompt.documents, prompt.question, recompute=0.4, policy="first_k"
            )
    with (
        CachedModel(
            tiny_llama(1),
            host_size="16MiB",
            host_shared=False,
            chunk_tokens=CHUNK,
            quality_verdicts=tmp_path,
        ) as other,
        pytest.raises(ConfigError, match="no verdict for the weights"),
    ):
        other.blend(
            prompt.documents, prompt.question, recompute=0.5, policy="first_k"
        )


def _json(saved: Path, file: Path, out: Path) -> list[dict]:
    code, text, err = run_here(
        "quality",
        saved,
        file,
        *USUAL,
        "--blend",
        "first_k:0.5",
        "--out",
        out / "json",
        "--json",
        "--weights",
        "the engine's name",
        "--seed",
        3,
    )
    assert code == 1, err
    found = json.loads(text)
    assert found["model"] == "tiny"
    assert found["prompts"] == 4
    assert found["seed"] == 3
    assert read_verdict(found["verdict"]).weights == [
        found["weights"],
        "the engine's name",
    ]
    return found["rows"]


def test_bad_lines_are_named_and_nothing_is_measured(
    saved: Path, tmp_path: Path
) -> None:
    file = written(tmp_path, prompts(2))
    file.write_text(
        file.read_text() + '{"prompt": "text"}\n{"documents": []}\n[\n'
    )
    code, out, err = run_here(
        "quality", saved, file, *USUAL, "--out", tmp_path / "v"
    )
    assert code == 2, out
    assert out == ""
    assert f"{file}: line 3 prompt is text, and the model has no tokenizer" in err
    assert (
        f"{file}: line 4 documents must be a list with at least one document"
        in err
    )
    assert f"{file}: line 5 is not JSON" in err
    assert err.splitlines()[-1] == f"pagoda: {file}: 3 of 5 lines cannot be used"
    assert not (tmp_path / "v").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ("--blend", "first_k"),
            "--blend first_k: give a policy and the share to compute again",
        ),
        (("--blend", "first_k:2"), "from 0 to 1"),
        (("--blend", "best:0.1"), "the policies are first_k, deviation"),
        (("--blend", "first_k:0.1:min_tokens=-1"), "min_tokens is -1"),
        (
            ("--kl", "100"),
            "a KL divergence of 100 nats a token, at most 1 can be asked for",
        ),
        (("--kl", "inf"), "a KL divergence of inf nats a token, at most 1"),
        (
            ("--top1", "0", "--answers", "0"),
            "0.0 % right answers, at least 50.0 % can be asked for",
        ),
        (("--min-prompts", "1"), "1 prompts, at least 4 can be asked for"),
        (("--weights", ""), "is not a name of weights"),
        (("--codec", "zstd"), "--codec zstd: the lossy codecs are"),
        (
            ("--out", "PROMPTS"),
            "is not a verdict of pagoda quality; name another file",
        ),
        (
            ("--out", "/dev/null/x"),
            "cannot be written: /dev/null is not a directory",
        ),
        (("--png", "/nowhere/q.png"), "no such directory"),
        (("--dtype", "float7"), "--dtype float7: torch has no such type"),
        (
            ("--chunk-tokens", "64", "--codec", "q8"),
            "line 1 has 39 tokens, no whole chunk of 64",
        ),
    ],
)
def test_wrong_use_is_one_line(
    saved: Path, tmp_path: Path, args: tuple[str, ...], said: str
) -> None:
    file = written(tmp_path, prompts(1))
    arguments = [str(file) if arg == "PROMPTS" else arg for arg in args]
    code, out, err = run_here(
        "quality", saved, file, *("--out", tmp_path / "v"), *arguments
    )
    assert code == 2
    assert said in one_line(code, out, err)


def test_a_model_or_a_file_that_is_not_there(saved: Path, tmp_path: Path) -> None:
    file = written(tmp_path, prompts(1))
    (tmp_path / "empty").mkdir()
    out = ("--out", tmp_path / "v")
    assert "empty: cannot be used: " in one_line(
        *run_here("quality", tmp_path / "empty", file, *out)
    )
    assert "absent: no such file" in one_line(
        *run_here("quality", saved, tmp_path / "absent", *out)
    )
    (tmp_path / "nothing").write_text("\n\n")
    assert "has no prompts" in one_line(
        *run_here("quality", saved, tmp_path / "nothing", *out)
    )


def processor_seconds(pid: int) -> float:
    """How much processor time a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_verdict(
    saved: Path, tmp_path: Path
) -> None:
    file = written(tmp_path, prompts(500))
    command = [
        sys.executable,
        "-c",
        RUN,
        "quality",
        saved,
        file,
        *USUAL,
        "--out",
        tmp_path / "v",
    ]
    running = subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    patience = Patience(120)
    maps = Path(f"/proc/{running.pid}/maps")
    # it measures, or begins to
    while "libtorch_cpu" not in maps.read_text() and not patience.ended:
        time.sleep(0.05)
    # a busy machine takes longer for what is still imported
    began = processor_seconds(running.pid)
    wait_until(lambda: processor_seconds(running.pid) > began + 1.0)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 130, out
    assert out == ""
    assert err.splitlines()[-1:] == [
        "pagoda: interrupted; no verdict was written"
    ]
    assert not (tmp_path / "v").exists()
