"""Servers that the driver asks, and the ways in which they end: a bare one, one behind a proxy that
started it, and one that a proxy is attached to.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from testbed.llama_client import LlamaClient
from testbed.llama_proxy import LlamaProxy
from testbed.llama_servers import LlamaServer
from testbed.patience import wait_until

MEMORY = Path("/dev/shm")
# of the end of a server whose proxy was killed
END_SECONDS = 60.0


class Bare:
    """Only a server: whatever is killed, it is this one."""

    def __init__(self, server: LlamaServer) -> None:
        self._server = server.server
        self.client = LlamaClient(server.url)

    def state_directories(self) -> list[Path]:
        """Return where files of states may lie."""
        return []

    def log(self) -> str:
        """Return what was printed."""
        return self._server.log()

    def left(self) -> list[Path]:
        """Return what lies there and should not."""
        return []

    def kill_server(self) -> None:
        """Kill it with SIGKILL."""
        self._server.kill()

    kill_proxy = kill_server
    stop = kill_server

    def start(self) -> None:
        """Start it if it does not run."""
        if not self._server.running:
            self._server.restart()


class Owned:
    """A proxy that started its server."""

    def __init__(self, proxy: LlamaProxy) -> None:
        self._proxy = proxy
        self._pids = {proxy.pid}  # of all that ever ran
        self.client = proxy.client

    def state_directories(self) -> list[Path]:
        """Return where files of states may lie."""
        return [
            path
            for path in MEMORY.glob("pagoda-llama-*")
            if int(path.name.split("-")[3]) in self._pids
        ]

    def log(self) -> str:
        """Return what was printed."""
        return self._proxy.log()

    def left(self) -> list[Path]:
        """Return what lies there now, of a proxy that runs, and of those before it."""
        own = f"-{self._proxy.pid}-"
        return [
            path
            for path in self.state_directories()
            if own not in path.name or not self._proxy.running
        ]

    def kill_server(self) -> None:
        """Kill the server with SIGKILL: the proxy ends with it, and says so."""
        for child in self._proxy.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._proxy.wait()

    def kill_proxy(self) -> None:
        """Kill the proxy with SIGKILL: the server ends with it."""
        servers = self._proxy.children
        self._proxy.kill()
        for server in servers:
            assert has_ended(server), "the server outlives its proxy"

    def stop(self) -> None:
        """End it as a user does."""
        servers = self._proxy.children
        self._proxy.stop()
        for server in servers:
            assert has_ended(server), "the server outlives its proxy"

    def start(self) -> None:
        """Start it if it does not run, or is about to end."""
        if not self._proxy.children and self._proxy.running:
            self._proxy.wait()
        self._proxy.start()
        self._pids.add(self._proxy.pid)


class Attached:
    """A proxy in front of a server that others started."""

    def __init__(self, proxy: LlamaProxy, server: LlamaServer) -> None:
        self._proxy = proxy
        self._server = server
        self.client = proxy.client

    def state_directories(self) -> list[Path]:
        """Return where files of states may lie."""
        return [self._server.states]

    def log(self) -> str:
        """Return what was printed."""
        return self._proxy.log()

    def left(self) -> list[Path]:
        """Return what lies there once nothing is asked any more."""
        kept = "pagoda-lock-" if self._proxy.running else ""
        return [
            path
            for path in self._server.states.iterdir()
            if not (kept and path.name.startswith(kept))
        ]

    def kill_server(self) -> None:
        """Kill the server with SIGKILL; the proxy waits for its return."""
        self._server.server.kill()

    def kill_proxy(self) -> None:
        """Kill the proxy with SIGKILL."""
        self._proxy.kill()

    def stop(self) -> None:
        """End the proxy as a user does."""
        self._proxy.stop()

    def start(self) -> None:
        """Start what does not run."""
        if not self._server.server.running:
            self._server.server.restart()
        self._proxy.start()


def has_ended(pid: int) -> bool:
    """Wait for the end of a process that is not ours; return whether it came."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not _runs(pid), END_SECONDS)
        return True
    return False


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return state.split()[0] != "Z"
