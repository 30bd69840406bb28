"""The benchmark of GPU transfers on CPU memory, with Triton's interpreter: a program with the
benchmark's arguments.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
sys.path[0] = str(Path(__file__).parents[2])

import pagoda.transfer.gpu.autotune  # noqa: E402
from benchmarks.gpu.transfer import main  # noqa: E402

# the interpreter moves a megabyte a second
pagoda.transfer.gpu.autotune._SCRATCH_BYTES = 1 << 12
sys.exit(main(["--device", "cpu", "--tiny", *sys.argv[1:]]))
