"""Becomes the llama-server of the demo, which is killed when the demo ends, however that ends.

Run as `python -m pagoda_tools.cli.demo.llama_child PARENT COMMAND...`, with the demo's process id.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the command of the arguments."""
    parent = int(sys.argv[1])
    command = sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # the demo may have ended before this line
    if os.getppid() == parent:
        os.execv(command[0], command)


if __name__ == "__main__":
    main()
