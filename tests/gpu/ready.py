"""Check whether this machine can run the tests that need a GPU; if not, say why. Imports torch only
with a driver.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

# The logic of these tests on CPU memory, at tiny sizes: for authors of tests.
ON_CPU = os.environ.get("PAGODA_TEST_GPU_ON_CPU") == "1"
NEEDED = ["numpy", "lmdb", "blake3", "xxhash", "msgspec"]


@lru_cache(maxsize=1)
def why_not() -> str:
    """Return why there is no GPU to test with; empty if there is one."""
    if ON_CPU:
        return ""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        return (
            "no CUDA device: torch is not installed; on a machine with an NVIDIA GPU: make "
            "test-gpu"
        )
    # importing torch takes seconds, and `make test` collects this folder, too
    if _has_driver():
        import torch

        if torch.cuda.is_available():
            return ""
    return (
        f"no CUDA device: torch {torch_version} sees none; on a machine with an NVIDIA GPU: "
        "make test-gpu"
    )


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def missing() -> str:
    """Return the command that installs the missing dependencies of the package; empty if there are
    none.
    """
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"pip install {' '.join(lacking)}" if lacking else ""
