"""Each mutant's line is in the code, once, and the mutant is code: a change of the line changes the mutant too."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "src" / "pagoda"


@pytest.mark.parametrize("name", ["mutants", "vllm", "sglang"])
def test_each_line_is_found_once(name: str) -> None:
    mutants = tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))["mutant"]
    assert mutants
    lost, broken = [], []
    for one in mutants:
        source = (PACKAGE / one["file"]).read_text()
        if source.count(one["old"]) != 1:
            lost.append(one["name"])
        elif one["file"].endswith(".py"):
            try:
                ast.parse(source.replace(one["old"], one["new"]))
            except SyntaxError:  # a change of the line has left a part of it behind
                broken.append(one["name"])
    assert not lost and not broken
