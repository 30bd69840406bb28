"""The process of llama-server behind the proxy: its start, its end, and that it never outlives us.

    ServerProcess     one server on a loopback port, with a key that only this process knows
    free_port         a port for it

Called by `pagoda llama-server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import aiohttp

from pagoda.base.errors import PagodaError
from pagoda_tools.llama_proxy.server_arguments import KEY_VARIABLE

FIRST_WORD_SECONDS = 10.0  # of waiting, until the user is told
NEXT_WORD_SECONDS = 30.0
STOP_SECONDS = 10.0  # for the end of the server, before it is killed

# what stands for an image in a prompt: the server makes one at each start, of this form
_MARKER_VARIABLE = "LLAMA_MEDIA_MARKER"
_LOOK_SECONDS = 0.1
_ANSWER_SECONDS = 10.0
_TRIES = 3  # if another process takes the port first
# below the ports that the system gives to connections
_FIRST_PORT = 10000
_PORTS = 20000

# Becomes the server, once the kernel knows that it has to kill it when the thread that started it
# ends. A function of ours between fork and exec could not arrange that: other threads may hold
# locks. If the parent ended before, nobody would kill it.
_LAUNCHER = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(1, signal.SIGKILL, 0, 0, 0):
    sys.exit("pagoda: prctl: " + os.strerror(ctypes.get_errno()))
if os.getppid() != parent:
    sys.exit(1)
# Python ignores them, and its successor would do so too
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
try:
    os.execv(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"pagoda: {sys.argv[2]}: {error.strerror}")
"""


class ServerFailed(PagodaError):
    """The server ended, or cannot be used. The message is for people."""


class ServerProcess:
    """One llama-server. For the event loop of the main thread: the server ends with that thread.

    Its output is this process's; a signal of the terminal does not reach it.

    Example:
        server = ServerProcess(lambda port: ["/usr/bin/llama-server", "--port", str(port)], {})
        try:
            await server.start()
            await server.ready(print)
            ...
        finally:
            await server.stop()
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        name: str = "llama-server",
    ) -> None:
        """Prepare; starts nothing.

        Args:
            command: Returns the command for a port; its first word is a path.
            environment: Of the server; its key is added.
            name: For messages.
        """
        self.key = secrets.token_hex(32)
        # newer servers tell it, so it is certain which one answers
        self._marker = f"<__media_{secrets.token_hex(16)}__>"
        self.port = 0
        self.ended = asyncio.Event()
        self._command = command
        self._environment = dict(environment)
        self._name = name
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process id. The process must have been started."""
        assert self._process is not None
        return self._process.pid

    @property
    def how_it_ended(self) -> str:
        """How the server ended, as a sentence; empty: it runs, or was not started."""
        code = None if self._process is None else self._process.returncode
        if code is None:
            return ""
        if code >= 0:
            return f"{self._name} ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"{self._name} was ended by {signal.Signals(-code).name}"
        return f"{self._name} was ended by signal {-code}"

    async def start(self) -> None:
        """Start the server, which then loads its model. Raises ServerFailed."""
        self.port = free_port()
        self.ended.clear()
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *launcher,
                *self._command(self.port),
                stdin=asyncio.subprocess.DEVNULL,
                env={
                    _MARKER_VARIABLE: self._marker,
                    **self._environment,
                    KEY_VARIABLE: self.key,
                },
                start_new_session=True,
            )
        except OSError as error:
            raise ServerFailed(
                f"{self._name} cannot be started: {error.strerror}"
            ) from None
        self._watch = asyncio.create_task(self._wait_for_end(self._process))

    async def ready(self, say: Callable[[str], None]) -> None:
        """Wait until the server answers: as long as it lives, because a model may take minutes.

        `say`: gets a line of progress now and then. Raises ServerFailed if it ends, or is a router.
        """
        tries = 1
        started = time.monotonic()
        next_word = FIRST_WORD_SECONDS
        timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                why = await self._look_while_it_runs(session)
                if self.ended.is_set():
                    if tries < _TRIES and _is_taken(self.port):
                        tries += 1
                        await self.start()
                        continue
                    raise ServerFailed(
                        f"{self.how_it_ended} before it answered: its output above says why"
                    )
                if not why:
                    return
                waited = time.monotonic() - started
                if waited >= next_word:
                    say(
                        f"{self._name} has been loading for {waited:.0f} s "
                        f"({why})"
                    )
                    next_word += NEXT_WORD_SECONDS
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await self.ended.wait()

    async def stop(self) -> None:
        """End the server: SIGTERM, and SIGKILL after `STOP_SECONDS`.

        Idempotent; does nothing before the start.
        """
        if self._process is None or self._watch is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self.ended.wait()
                break
        # a driver may hold a killed process: it ends with us, or with the driver
        self._watch.cancel()

    def _is_marked(self, properties: object) -> bool:
        """Whether a server with these properties was started here."""
        if not isinstance(properties, dict):
            return False
        return properties.get("media_marker") == self._marker

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and what it started; not after its end, when another may have
        its number.
        """
        assert self._process is not None
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def _wait_for_end(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        self.ended.set()

    async def _look_while_it_runs(self, session: aiohttp.ClientSession) -> str:
        """Return what `_look` does, or at once if the server ends. Raises ServerFailed."""
        looking = asyncio.create_task(self._look(session))
        ending = asyncio.create_task(self.ended.wait())
        try:
            await asyncio.wait(
                {looking, ending}, return_when=asyncio.FIRST_COMPLETED
            )
            return await looking if looking.done() else "it has ended"
        finally:
            looking.cancel()
            ending.cancel()

    async def _look(self, session: aiohttp.ClientSession) -> str:
        """Return why the server is not ready; empty: it is. Raises ServerFailed."""
        try:
            async with session.get(f"{self.url}/health") as answer:
                status = answer.status
            if status == 503:
                return "loading the model"
            if status != 200:
                return f"/health answers {status}"
            headers = {"Authorization": f"Bearer {self.key}"}
            async with session.get(
                f"{self.url}/props", headers=headers
            ) as answer:
                status = answer.status
                properties = await answer.json() if status == 200 else {}
            is_open = False
            if status == 200 and not self._is_marked(properties):
                # our own server asks for the key; its log has a line about who comes without
                async with session.get(f"{self.url}/props") as answer:
                    is_open = answer.status == 200
        except aiohttp.ClientConnectorError:
            return "it does not listen yet"
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            return f"no HTTP answer: {type(error).__name__}"
        if status == 401 or is_open:
            raise ServerFailed(
                f"what answers on port {self.port} is not the {self._name} of this command: start "
                "again"
            )
        if status != 200:
            return f"/props: status {status}"
        if not isinstance(properties, dict) or properties.get("role") == "router":
            raise ServerFailed(
                f"{self._name} became a router of several models, whose servers the proxy does not "
                "see: give it one model (-m)"
            )
        return ""


def free_port() -> int:
    """Return a loopback port on which nobody listens. Raises ServerFailed."""
    for _ in range(100):
        port = _FIRST_PORT + secrets.randbelow(_PORTS)
        if not _is_taken(port):
            return port
    raise ServerFailed("no free port was found on 127.0.0.1")


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        # a port on which connections have just ended is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
