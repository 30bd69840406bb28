"""The llama-server of the demo: this process becomes a binary, or runs the server inside
`xllamacpp`. It is killed when the demo ends, however that ends.

Run as `python -m pagoda_tools.cli.demo.llama_child` with a `ServerStart` (JSON) as its argument.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from importlib import import_module

import msgspec

_PR_SET_PDEATHSIG = 1
KEY_VARIABLE = "LLAMA_API_KEY"  # the binary reads it too; an argument would be seen by others


@dataclass(frozen=True)
class ServerStart:
    """How the server of the demo is started."""

    parent: int  # the demo's process
    program: str  # a binary; "": the server inside `xllamacpp`
    model: str
    states: str  # its --slot-save-path
    port: int
    context_tokens: int
    threads: int | None  # None: as the server chooses


def main() -> None:
    """Start the server of the argument, which runs until it is killed."""
    start = msgspec.json.decode(sys.argv[1], type=ServerStart)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != start.parent:
        # the demo ended before this line
        return
    if start.program:
        os.execv(start.program, [start.program, *_arguments(start)])
    _run_in_process(start)


def _arguments(start: ServerStart) -> list[str]:
    """Return the arguments of a binary: only such that every build knows."""
    options: dict[str, object] = {
        "--model": start.model,
        "--slot-save-path": start.states,
        "--host": "127.0.0.1",
        "--port": start.port,
        "--ctx-size": start.context_tokens,
        "--parallel": 1,
    }
    if start.threads is not None:
        options["--threads"] = start.threads
    return [str(word) for pair in options.items() for word in pair]


def _run_in_process(start: ServerStart) -> None:
    xllamacpp = import_module("xllamacpp")
    parameters = xllamacpp.CommonParams()
    parameters.model.path = start.model
    parameters.slot_save_path = f"{start.states}/"
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = start.port
    parameters.n_ctx = start.context_tokens
    parameters.n_parallel = 1
    parameters.endpoint_slots = True
    parameters.api_keys = [os.environ[KEY_VARIABLE]]
    if start.threads is not None:
        parameters.cpuparams.n_threads = start.threads
        parameters.cpuparams_batch.n_threads = start.threads
    server = xllamacpp.Server(parameters)
    assert server
    signal.pause()


if __name__ == "__main__":
    main()
