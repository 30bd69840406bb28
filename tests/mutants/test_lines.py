"""Each mutant's line is in the code, once: a change that moves it moves the mutant too."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "src" / "pagoda"


@pytest.mark.parametrize("name", ["mutants", "vllm", "sglang"])
def test_each_line_is_found_once(name: str) -> None:
    mutants = tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))["mutant"]
    assert mutants
    lost = [one["name"] for one in mutants if (PACKAGE / one["file"]).read_text().count(one["old"]) != 1]
    assert not lost
