"""The speed of the vLLM connector: `.venv-vllm/bin/python benchmarks/vllm.py [--json] [--quick]`.

Real engines on the CPU with a small random Llama, each in a separate process, take turns. The JSON
quotes every run under "runs". What each figure means, and the last results:
docs/design/benchmarks.md.
"""

from __future__ import annotations

import sys

# search this folder last, or this file would be imported as vLLM
sys.path.append(sys.path.pop(0))

from ground import main
from vllm_figures import PARTS
from vllm_slow_disk import slow_disk_figures

if __name__ == "__main__":
    main(__doc__, PARTS | {"slow_disk": slow_disk_figures}, {})
