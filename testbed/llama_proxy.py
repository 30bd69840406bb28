"""`pagoda llama-server` in its own process: it starts a server, or is attached to one that runs.

with owning_proxy(model, {"disk-path": disk}, slots=2) as proxy:
    print(proxy.client.complete([1, 100, 101]).text)

with llama_server(model, slots=2) as server, attached_proxy(server, {}) as proxy:
    print(proxy.client.complete([1, 100, 101]).text)
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Unpack

from testbed.llama_client import LlamaClient
from testbed.llama_servers import (
    LlamaOptions,
    LlamaServer,
    arguments_of,
    environment_of,
    is_healthy,
    program_of,
)
from testbed.patience import Patience
from testbed.servers import Server, running_server

# It saves what is in the slots.
STOP_SECONDS = 60.0

Options = Mapping[str, str]


class LlamaProxy:
    """A proxy that runs, and requests to it."""

    def __init__(self, server: Server, key: str = "") -> None:
        self._server = server
        self.url = server.url
        self.client = LlamaClient(server.url, key)

    @property
    def pid(self) -> int:
        """Return the process id of the proxy itself."""
        return self._server.pid

    @property
    def running(self) -> bool:
        """Return whether the proxy has not ended."""
        return self._server.running

    @property
    def children(self) -> list[int]:
        """Return the process ids of its children: of the server that it started."""
        with contextlib.suppress(OSError):
            listed = Path(f"/proc/{self.pid}/task/{self.pid}/children")
            return [int(word) for word in listed.read_text().split()]
        return []  # it has ended

    def log(self) -> str:
        """Return what it printed."""
        return self._server.log()

    def kill(self) -> None:
        """Kill only the proxy with SIGKILL, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        """End it as a user does, with SIGTERM, and wait for that."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        self.wait()

    def start(self) -> None:
        """Start it again on the same port, if it has ended; wait until it answers."""
        if not self.running:
            self._server.restart()

    def wait(self) -> None:
        """Wait until the proxy has ended. RuntimeError: it does not."""
        patience = Patience(STOP_SECONDS)
        while self.running:
            if patience.ended:
                raise RuntimeError(
                    f"the proxy does not end: {patience.said()}: "
                    f"{self.log()[-2000:]}"
                )
            time.sleep(0.02)


@contextlib.contextmanager
def owning_proxy(
    model: Path,
    pagoda: Options,
    build: str = "B",
    **options: Unpack[LlamaOptions],
) -> Iterator[LlamaProxy]:
    """Start a proxy that starts a server with one thread. SkipTest if the build is missing.

    Arguments:
        model: the path of its GGUF
        pagoda: options of `pagoda llama-server`, without "--"
        build: "B" is the binary, "A" the server inside Python, which is taken where no binary is
        options: how the server computes
    """
    program = "llama-server" if build == "A" else program_of(build)
    given = arguments_of(model, options)

    def command(port: int) -> list[str]:
        listen = ["--host", "127.0.0.1", "--port", str(port)]
        return [*_command(pagoda), "--", program, *given, *listen]

    with _started(command, environment_of(build), options) as proxy:
        yield proxy


@contextlib.contextmanager
def attached_proxy(server: LlamaServer, pagoda: Options) -> Iterator[LlamaProxy]:
    """Start a proxy in front of a server that runs.

    Arguments:
        server: it goes on when the proxy ends
        pagoda: options of `pagoda llama-server`, without "--"
    """

    def command(port: int) -> list[str]:
        return [
            *_command(pagoda),
            *("--attach", server.url),
            *("--slot-save-path", str(server.states)),
            *("--listen", f"127.0.0.1:{port}"),
        ]

    with _started(command, dict(os.environ), {}) as proxy:
        yield proxy


def _command(pagoda: Options) -> list[str]:
    given = [
        word
        for name, value in pagoda.items()
        for word in (f"--{name}", value)
        if word
    ]
    return [sys.executable, "-m", "pagoda", "llama-server", *given]


@contextlib.contextmanager
def _started(command, environment, options):  # type: ignore[no-untyped-def]
    def make(root: Path) -> Server:
        return Server(root, command, is_healthy, "http", environment)

    with running_server(make) as server:
        yield LlamaProxy(server, options.get("key", ""))
