"""The tests of the GPU themselves, on CPU memory: only what CUDA does should run for the first time
on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOME = (
    "(moves and every_dtype and staged and float8) or snapshot or (layer and staged) or twice or "
    "evicted"
)


@pytest.mark.slow
def test_some_gpu_tests_pass_on_the_cpu() -> None:
    """`PAGODA_TEST_GPU_ON_CPU=1 pytest tests/gpu` runs all of them, for minutes."""
    environment = {**os.environ, "PAGODA_TEST_GPU_ON_CPU": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/gpu",
        "-k",
        SOME,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        check=False,
        timeout=200,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(done.stdout.split(" passed")[0].split()[-1].strip(",")) > 30
