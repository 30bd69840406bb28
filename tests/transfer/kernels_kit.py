"""The Triton kernels through Triton's interpreter, on CPU tensors: `interpreted()`.

The interpreter is slow (about 5 ms a tile) and not thread-safe: it patches `triton.language` while a kernel runs. So
one kernel at a time, and tiny shapes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pagoda.transfer.kernels import Kernels


@cache
def _module() -> object:
    """Load `pagoda.transfer.kernels` a second time, under another name and for the interpreter.

    Triton decides when a kernel is defined. So the variable is set for as long as that takes, and triton itself and
    the module that everybody else imports are as without it.
    """
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    spec = importlib.util.find_spec("pagoda.transfer.kernels")
    assert spec is not None and spec.origin is not None
    again = importlib.util.spec_from_file_location("pagoda_kernels_interpreted", spec.origin)
    assert again is not None and again.loader is not None
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
    """Return kernels that work on CPU tensors; skips the test where there is no torch or no triton."""
    module = _module()
    import torch

    kernels: Kernels = module.Kernels(torch.device("cpu"), programs)  # type: ignore[attr-defined]
    return kernels
