"""`pagoda models`: which types of Transformers are served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.shelf import one_line, run_here

ROOT = Path(__file__).resolve().parents[2]


def test_types_that_are_served_and_why_others_are_not() -> None:
    code, out, _ = run_here("models", "llama", "qwen2_vl", "mamba2", "bert")
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "Transformers" in lines[0]
    (llama,) = [line for line in lines if line.startswith("llama")]
    assert llama.split() == ["llama", "exactly", "0.1.0"]
    (qwen,) = [line for line in lines if line.startswith("qwen2_vl")]
    assert qwen.split() == ["qwen2_vl", "exactly", "0.1.0", "yes"]
    (mamba,) = [line for line in lines if line.startswith("mamba2")]
    assert mamba.split() == ["mamba2", "to", "an", "ending", "0.1.0"]
    assert "is_decoder=True" in out
    # by name nothing is summed up
    assert "types are served" not in out


def test_json_has_the_same() -> None:
    code, out, err = run_here("models", "--json", "bart", "openai-gpt")
    assert code == 0, err
    assert err == ""
    shown = json.loads(out)
    assert sorted(shown) == ["pagoda", "transformers", "types"]
    first, second = shown["types"]
    assert first["type"] == "bart"
    assert first["how"] == "uncached"
    assert first["why"]
    assert second["why"] == "its forward pass takes no KV"


def test_a_type_that_does_not_exist() -> None:
    assert "did you mean llama?" in one_line(*run_here("models", "lama"))


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    import pagoda_tools.cli

    real = pagoda_tools.cli.find_spec
    monkeypatch.setattr(
        pagoda_tools.cli,
        "find_spec",
        lambda name: None if name == "transformers" else real(name),
    )
    said = one_line(*run_here("models"))
    assert "pip install torch 'pagodakv[transformers]'" in said


@pytest.mark.slow
def test_the_help_of_all_commands_imports_no_torch() -> None:
    program = (
        "import sys\nfrom pagoda_tools.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "models" in done.stdout


@pytest.mark.slow
def test_all_types_are_judged() -> None:
    """Also those whose code does not accept its own default configuration."""
    code, out, _ = run_here("models", "--json")
    assert code == 0
    types = json.loads(out)["types"]
    assert len(types) > 200
    served = [one for one in types if one["since"]]
    assert len(served) > 100
    for one in types:
        assert one["why"] or one["since"]


@pytest.mark.soak
def test_the_page_of_the_types_is_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/reference.py", "--models", "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
