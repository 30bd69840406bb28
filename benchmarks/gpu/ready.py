"""Check whether this Python can measure or test on a GPU; if not, say why and what to do.

`python benchmarks/gpu/ready.py pytest` prints what the tests lack: one line, exit code 2.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import NamedTuple

SKIPPED = "skipped: {why} ; on a machine with an NVIDIA GPU: make bench-gpu"
# by pagoda.transfer and pagoda.slab.memory
BENCHMARK = ("triton", "numpy", "blake3", "msgspec")
TESTS = (*BENCHMARK, "lmdb", "xxhash")  # by the ledger and the codec too


class Trouble(NamedTuple):
    """The reason why it cannot run. `code` 0: there is no GPU, which is no error; 2: something must
    be installed.
    """

    code: int
    why: str


def trouble() -> Trouble | None:
    """Return why a GPU cannot be measured on this machine; None if it can. Imports torch."""
    try:
        import torch
    except ImportError as error:
        return Trouble(0, f"torch cannot be imported ({error})")
    if not torch.cuda.is_available():
        return Trouble(0, _no_gpu(torch.__version__, torch.version.cuda))
    if torch.version.cuda is None:
        return Trouble(
            0, f"torch {torch.__version__} is not built for NVIDIA GPUs"
        )
    missing = absent(BENCHMARK)
    return (
        Trouble(2, f"there is a GPU, but {remedy(missing)}") if missing else None
    )


def absent(names: tuple[str, ...]) -> list[str]:
    """Return the modules of `names` that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def remedy(missing: list[str]) -> str:
    """Return one line that says what to install."""
    names = " ".join(missing)
    return f"{', '.join(missing)} cannot be imported: {sys.executable} -m pip install {names}"


def _no_gpu(version: str, cuda: str | None) -> str:
    if cuda is None:
        return f"torch {version} is built without CUDA"
    return f"torch {version} sees no GPU"


def main(names: list[str]) -> int:
    """Print which of `names` and of our tests' imports are missing. Return the exit code."""
    missing = absent((*names, *TESTS))
    if missing:
        print(remedy(missing), file=sys.stderr)
    return 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
