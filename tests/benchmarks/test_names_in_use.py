"""Benchmarks and examples use names that exist: most run by hand only, so a renaming could break
them unseen.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = "attr-defined|call-arg|name-defined"
# Of other packages only the stubs and numpy are read: all of torch and transformers take a minute
# and a half.
CONFIG = """[mypy]
explicit_package_bases = True
follow_imports = skip
ignore_missing_imports = True
[mypy-benchmarks.*,examples.*,numpy.*,pagoda.*,testbed.*,tests.*,zmq.*]
follow_imports = normal
"""
# without vLLM, its package is hidden by the benchmark of that name; a NamedTuple that is filled
# from a map
ALLOWED = (
    r'Module "vllm" has no attribute|Too many arguments for "Batch"|"object" has no '
    r'attribute "done"'
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what mypy keeps of the first folder for the second."""
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "paths"),
    [("benchmarks", ["*.py"]), (".", ["examples", "testbed"])],
)
def test_names_exist(
    folder: str, paths: list[str], tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "mypy.ini").write_text(CONFIG)
    options = [
        "--config-file",
        tmp_path / "mypy.ini",
        "--cache-dir",
        cache,
        "--no-color-output",
    ]
    paths = [
        str(path)
        for pattern in paths
        for path in sorted((ROOT / folder).glob(pattern))
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *paths],
        cwd=ROOT / folder,
        env={**os.environ, "MYPYPATH": f"{ROOT / folder}:{ROOT / 'src'}"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert "checked" in done.stdout or "Success" in done.stdout, done.stdout
    assert not [
        line
        for line in done.stdout.splitlines()
        if re.search(KINDS, line) and not re.search(ALLOWED, line)
    ]
