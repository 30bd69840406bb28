"""The machines, the store and the cables between them: start, requests, cuts, end. Everything is
removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from testbed.netns import Cable, Place, network
from testbed.programs import path_of

ROOT = Path(__file__).parents[2]
CHUNK_TOKENS = 64
DEADLINE_SECONDS = 1.0  # of one call of the cache
_START_SECONDS = 120.0  # importing torch on a busy machine
_PORT = 6379


class MachineError(RuntimeError):
    """A machine or the store did not start, ended, or did not answer in time; the message has its
    last words.
    """


class Machine:
    """A process of `machine.py` in a separate namespace. Not thread-safe."""

    def __init__(
        self,
        name: str,
        place: Place,
        cable: Cable,
        options: dict[str, object],
        log: Path,
    ) -> None:
        self.name = name
        self.cable = cable
        self._log = log
        command = [
            sys.executable,
            "-m",
            "examples.two_machines.machine",
            json.dumps(options),
        ]
        # a store that only these machines can reach must not be entered in the user's register of
        # tiers
        env = {**os.environ, "XDG_STATE_HOME": str(log.parent)}
        with log.open("wb") as errors:
            self._process = place.start(
                *command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._rest = b""

    def started(self) -> None:
        """Wait until it is ready for the first request."""
        self._answer(_START_SECONDS)

    def say(self, seconds: float = 60.0, **request: object) -> dict[str, object]:
        """Send a request and return the answer. Raises MachineError after `seconds`."""
        into: IO[bytes] = self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            into.write(json.dumps(request).encode() + b"\n")
            into.flush()
        return self._answer(seconds)

    def _answer(self, seconds: float) -> dict[str, object]:
        out = self._process.stdout.fileno()
        until = time.monotonic() + seconds
        waiting = select.poll()
        waiting.register(out, select.POLLIN)
        while b"\n" not in self._rest:
            ready = waiting.poll(1000 * max(0.0, until - time.monotonic()))
            part = os.read(out, 1 << 16) if ready else b""
            if not part:
                what = (
                    "ended" if ready else f"did not answer within {seconds:.0f} s"
                )
                raise MachineError(
                    f"machine {self.name} {what}: {last_line(self._log)}"
                )
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)


class House(NamedTuple):
    """Two machines, each joined to the store by a separate cable."""

    a: Machine
    b: Machine


@contextmanager
def house() -> Iterator[House]:
    """Start everything; all of it is removed afterwards. Raises NotPermittedError, MachineError."""
    program = path_of("redis-server")
    if program is None:
        raise MachineError(
            "redis-server is not installed (Debian, Ubuntu: apt install redis-server)"
        )
    with ExitStack() as opened:
        shm, disk = (
            directory(opened, at)
            for at in (Path("/dev/shm"), Path(tempfile.gettempdir()))
        )
        net = opened.enter_context(network())
        store = net.place("store")
        places = {name: net.place(name) for name in ("A", "B")}
        cables = {name: net.cable(place, store) for name, place in places.items()}
        # no password and no TLS: no other machine can reach these addresses. Elsewhere both are
        # needed.
        server = store.start(
            program,
            "--bind",
            *(cable.far for cable in cables.values()),
            "--port",
            str(_PORT),
            "--protected-mode",
            "no",
            "--save",
            "",
            "--appendonly",
            "no",
            "--maxmemory",
            "256mb",
            "--dir",
            str(disk),
            "--logfile",
            str(disk / "redis.log"),
        )
        wait_for_server(server, disk / "redis.log")
        machines = {
            name: Machine(
                name,
                place,
                cables[name],
                options(name, cables[name], shm, disk),
                disk / f"{name}.log",
            )
            for name, place in places.items()
        }
        for machine in machines.values():
            machine.started()
        yield House(machines["A"], machines["B"])


def options(name: str, cable: Cable, shm: Path, disk: Path) -> dict[str, object]:
    """Return the options of one machine's cache: separate memory and disk, and the common store
    below them.
    """
    return {
        "chunk_tokens": CHUNK_TOKENS,
        "host_size": "32MiB",
        # namespaces share /dev/shm, machines do not
        "host_path": str(shm / f"host-{name}"),
        "disk_size": "64MiB",
        "disk_path": str(disk / f"disk-{name}"),
        "remote": [f"redis://{cable.far}:{_PORT}/0?look=0.5"],
        "deadline_seconds": DEADLINE_SECONDS,
        # show every hit, even where so small a model computes faster than a network reads
        "worth_it": False,
    }


def directory(opened: ExitStack, parent: Path) -> Path:
    """A new directory that is removed at the end."""
    made = Path(tempfile.mkdtemp(prefix="two-machines-", dir=parent))
    opened.callback(shutil.rmtree, made, ignore_errors=True)
    return made


def wait_for_server(
    server: subprocess.Popen[bytes], log: Path, seconds: float = 20.0
) -> None:
    """Wait until the server takes connections. Raises MachineError with its last words."""
    until = time.monotonic() + seconds
    while not (
        log.exists() and b"Ready to accept connections" in log.read_bytes()
    ):
        if server.poll() is not None or time.monotonic() > until:
            raise MachineError(f"redis-server did not start: {last_line(log)}")
        time.sleep(0.02)


def last_line(log: Path) -> str:
    """The last words in a log."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next(
        (line.strip() for line in reversed(lines) if line.strip()), "no word"
    )
