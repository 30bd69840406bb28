"""Real servers for the tests of their start: which program, in which environment."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import NamedTuple

from testbed.llama_servers import program_of
from testbed.patience import Patience

IN_PROCESS = ("-P", "-m", "pagoda_tools.llama_proxy.in_process_server")


class Build(NamedTuple):
    """A server of llama.cpp."""

    program: list[str]
    environment: dict[str, str]


def build_of(name: str) -> Build:
    """Return build A (in xllamacpp) or B (a binary). SkipTest if it is missing."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LLAMA_", "PAGODA_"))
    }
    if name == "A":
        return Build([program_of("A"), *IN_PROCESS], clean)
    program = program_of("B")
    return Build(
        [program], clean | {"LD_LIBRARY_PATH": str(Path(program).parent)}
    )


def arguments_for(model: Path, port: int) -> list[str]:
    """Return arguments that both builds understand."""
    words = ["-m", str(model), "-t", "1", "-c", "512", "-np", "1", "--no-warmup"]
    return [*words, "--host", "127.0.0.1", "--port", str(port)]


def ends(pid: int, seconds: float = 20.0) -> bool:
    """Wait for the end of a process that may be another's child; whether it has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        patience = Patience(seconds)
        while not select.select([fd], [], [], patience.left)[0]:
            if patience.ended:
                return False
        return True
    finally:
        os.close(fd)
