"""Network namespaces as machines: joined by virtual cables that are shaped, cut and mended. Linux,
root, iproute2.

    with network() as net:
        engine, store = net.place("engine"), net.place("store")
        cable = net.cable(engine, store)
        server = store.start("redis-server", "--bind", cable.far, ...)
        cable.shape(1e9)
        cable.cut()

A namespace lives as long as the processes in it. Processes that are started here end with this
process, however it ends, so even a `kill -9` leaves nothing. Nothing outside the new namespaces is
changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any  # what Popen takes  # noqa: TID251

from testbed.programs import ends_with_this, path_of, skip

_COMMAND_SECONDS = 60.0
_PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
_PROGRAMS |= {"setpriv": "util-linux", "cat": "coreutils"}
# several of the largest packets (64 KiB): with less the link does not reach its rate
_LEAST_BURST_BYTES = 256 << 10


class NotPermittedError(OSError):
    """Namespaces, cables or shaping are not available on this machine; the message says why and
    what to do.
    """


def why_not() -> str | None:
    """Try to join and shape namespaces; return why it is impossible, or None if it works."""
    try:
        with network() as net:
            net.cable(net.place("one"), net.place("two")).shape(1e9)
    except NotPermittedError as trouble:
        return str(trouble)
    return None


def need_network() -> None:
    """Skip the calling test where there is no permission; fail it if the environment has CI set."""
    reason = why_not()
    if reason is not None:
        raise skip(reason)


class Place:
    """A network namespace, with a process that holds it. Not thread-safe; close it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._started: list[subprocess.Popen[Any]] = []
        # cat ends with its stdin, and so with this process
        command = ["unshare", "--net", "cat"]
        self._holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._wait_for_holder()
            self.run("ip", "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Return the id of the process that holds the namespace."""
        return self._holder.pid

    def run(self, *command: str) -> str:
        """Run a short command inside and return its output. Raise NotPermittedError with its last
        line of output.
        """
        done = subprocess.run(
            self._inside(command),
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
        if done.returncode:
            raise NotPermittedError(
                f"{' '.join(command)}: {_last(done.stderr) or done.returncode} ({_REMEDY})"
            )
        return done.stdout

    def start(self, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a process inside, in a new session; it is killed at `close`, or when this process
        ends.
        """
        process = subprocess.Popen(
            ends_with_this(self._inside(command)),
            **{"start_new_session": True, **options},
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        """End all processes that were started here, and with them the namespace. Idempotent, takes
        seconds at most.
        """
        for process in (*self._started, self._holder):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in (*self._started, self._holder):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_COMMAND_SECONDS)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _inside(self, command: tuple[str, ...]) -> list[str]:
        program = path_of(command[0]) or command[0]
        inside = ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--"]
        return [*inside, program, *command[1:]]

    def _wait_for_holder(self) -> None:
        """Wait for an echo, which proves that cat runs, and so that the namespace exists."""
        holder = self._holder
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            holder.stdin.write(b"\n")
            holder.stdin.flush()
        waiting = select.poll()
        waiting.register(holder.stdout, select.POLLIN)
        if not waiting.poll(1000 * _COMMAND_SECONDS) or not os.read(
            holder.stdout.fileno(), 1
        ):
            holder.kill()
            said = _last(holder.stderr.read().decode(errors="replace"))
            raise NotPermittedError(
                f"no network namespace can be made: {said or 'it took too long'} ({_REMEDY})"
            )


class Cable:
    """Two places joined by a veth pair: `near` and `far` are the addresses of its ends. Not
    thread-safe.
    """

    def __init__(self, near: Place, far: Place, number: int) -> None:
        self.near = f"10.77.{number}.1"
        self.far = f"10.77.{number}.2"
        self._ends = [
            (near, f"to-{far.name}"[:15], self.near),
            (far, f"to-{near.name}"[:15], self.far),
        ]
        names = [name for _, name, _ in self._ends]
        near.run(
            "ip",
            "link",
            "add",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            names[1],
            "netns",
            str(far.pid),
        )
        for place, name, address in self._ends:
            place.run("ip", "address", "add", f"{address}/24", "dev", name)
            place.run("ip", "link", "set", name, "up")

    def shape(
        self, bits_per_second: float | None, queue_seconds: float = 0.05
    ) -> None:
        """Limit the rate in each direction; None: as fast as the machine can.

        `queue_seconds`: how long a packet may wait for its turn. A long queue delays, a short one
        loses packets.
        """
        for place, name, _ in self._ends:
            if bits_per_second is None:
                if "qdisc tbf" in place.run("tc", "qdisc", "show", "dev", name):
                    place.run("tc", "qdisc", "del", "dev", name, "root")
                continue
            burst = max(_LEAST_BURST_BYTES, round(bits_per_second / 8 / 1000))
            rate = ["rate", f"{round(bits_per_second)}bit", "burst", f"{burst}b"]
            rate += ["latency", f"{round(queue_seconds * 1e6)}us"]
            place.run("tc", "qdisc", "replace", "dev", name, "root", "tbf", *rate)

    def traffic(self) -> tuple[int, int]:
        """Return how many bytes have arrived at the near end, and how many packets were lost on the
        way to it.
        """
        (near, at, _), (far, to, _) = self._ends
        link = json.loads(near.run("ip", "-s", "-j", "link", "show", "dev", at))
        queue = json.loads(far.run("tc", "-s", "-j", "qdisc", "show", "dev", to))
        return int(link[0]["stats64"]["rx"]["bytes"]), sum(
            each.get("drops", 0) for each in queue
        )

    def cut(self) -> None:
        """Cut the cable at the far end: everything that either side sends is lost without an
        error.
        """
        self._far_end("down")

    def mend(self) -> None:
        """Restore the cable: existing connections continue."""
        self._far_end("up")

    def _far_end(self, state: str) -> None:
        place, name, _ = self._ends[1]
        place.run("ip", "link", "set", name, state)


class Network:
    """Places and cables that end together. Not thread-safe."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened
        self._cables = 0

    def place(self, name: str) -> Place:
        """Create a namespace. Raise NotPermittedError."""
        return self._opened.enter_context(contextlib.closing(Place(name)))

    def cable(self, near: Place, far: Place) -> Cable:
        """Join two places by a new cable in a separate network. Raise NotPermittedError."""
        self._cables += 1
        return Cable(near, far, self._cables)


@contextmanager
def network() -> Iterator[Network]:
    """Open a network for places; remove all of it afterwards. Raise NotPermittedError."""
    missing = sorted(
        {package for name, package in _PROGRAMS.items() if path_of(name) is None}
    )
    if missing:
        raise NotPermittedError(
            f"network namespaces need {' and '.join(missing)}: install them"
        )
    with ExitStack() as opened:
        yield Network(opened)


_REMEDY = "it needs root; `unshare --user --map-root-user COMMAND` may do instead"


def _last(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
