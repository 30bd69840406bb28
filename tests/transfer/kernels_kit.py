"""The Triton kernels through Triton's interpreter, on CPU tensors, and compiled without a GPU.

The interpreter is slow (about 5 ms a tile) and not thread-safe: it patches `triton.language` while
a kernel runs. So one kernel at a time, and tiny shapes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pagoda.transfer.gpu.kernels import Kernels


@cache
def _module() -> object:
    """Load `pagoda.transfer.gpu.kernels` a second time, under another name and for the interpreter.

    Triton decides when a kernel is defined. So the variable is set for as long as that takes, and
    triton itself and the module that all others import are not affected.
    """
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    spec = importlib.util.find_spec("pagoda.transfer.gpu.kernels")
    assert spec is not None
    assert spec.origin is not None
    again = importlib.util.spec_from_file_location(
        "pagoda_kernels_interpreted", spec.origin
    )
    assert again is not None
    assert again.loader is not None
    module = importlib.util.module_from_spec(again)
    sys.modules[again.name] = module
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        again.loader.exec_module(module)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    return module


def interpreted(programs: int = 16) -> Kernels:
    """Return kernels that work on CPU tensors; skip the test without torch or triton."""
    module = _module()
    import torch

    kernels: Kernels = module.Kernels(torch.device("cpu"), programs)  # type: ignore[attr-defined]
    return kernels


def compiled(cache_directory: Path) -> list[dict[str, object]]:
    """Return the output of compile_kernels.py for each variant. Takes about 5 s of a core."""
    around = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TRITON_")
    }
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join(
        path for path in [os.environ.get("PYTHONPATH"), str(root)] if path
    )
    around |= {"TRITON_CACHE_DIR": str(cache_directory), "PYTHONPATH": paths}
    command = [sys.executable, str(root / "tests/transfer/compile_kernels.py")]
    done = subprocess.run(
        command, env=around, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    if "unable" in said:
        pytest.skip(
            f"nothing can be compiled for a GPU without one here: {said['unable']}"
        )
    variants: list[dict[str, object]] = said["variants"]
    return variants
