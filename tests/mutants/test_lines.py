"""Each mutant's line is in the code, once, and the mutant is code: a change of the line changes the
mutant too.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mutants", "vllm", "sglang"])
def test_each_line_is_found_once(name: str) -> None:
    mutants = tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))[
        "mutant"
    ]
    assert mutants
    lost = []
    changed = dict[str, str]()
    for one in mutants:
        source = (SOURCE / one["file"]).read_text()
        if source.count(one["old"]) != 1:
            lost.append(one["name"])
        elif one["file"].endswith(".py"):
            # a file is parsed once, with all its mutants, as far as no two of them change the same
            # line
            before = changed.get(one["file"], source)
            alone = before.count(one["old"]) != 1
            changed[one["name"] if alone else one["file"]] = (
                source if alone else before
            ).replace(one["old"], one["new"])
    assert not lost
    # a change of the line may have left a part of it behind
    for name, source in changed.items():
        ast.parse(source, name)
