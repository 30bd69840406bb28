"""Strangers at every listener: many who are silent, send much, or leave at once keep nobody out and
cost no memory.

A listener is one process: `pagoda serve` on TCP, with TLS, on a Unix socket, or the publisher of KV
events.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import zmq

from testbed.patience import wait_until
from tests.serve import kit
from tests.serve.kit import TOKEN, server

SILENT = 300
HUGE = 60
HUGE_BYTES = 256 << 10  # from each of them
CLOSED = 300
HONEST = 45
MOST_TIMES = 5.0  # as long as without strangers, the median
MOST_BYTES = 5 << 20  # more memory than before, once they are gone

_PUBLISHER = """
import sys, time
from pagoda.kv_events.event_types import BlocksCleared
from pagoda.kv_events.publisher import EventPublisher
publisher = EventPublisher("tcp://127.0.0.1:*", "kv")
print(publisher.endpoint, flush=True)
while True:
    if publisher.newcomers():
        publisher.send([BlocksCleared()])
    time.sleep(0.001)
"""


class Listener(NamedTuple):
    """A process that listens. `ask` is one honest request, on a new connection. `huge`: how
    strangers' bytes begin.
    """

    pid: int
    connect: Callable[[], socket.socket]
    ask: Callable[[], bool]
    huge: tuple[bytes, ...]


@contextlib.contextmanager
def serving(
    kind: str, root: Path, certificate: tuple[Path, Path]
) -> Iterator[Listener]:
    """Run `pagoda serve`: "plain", "TLS" or "Unix"."""
    options = {
        "plain": (),
        "TLS": ("--tls-cert", certificate[0], "--tls-key", certificate[1]),
        "Unix": ("--listen", f"unix:{root}/mine/socket"),
    }[kind]
    with server(
        root, *options, token=None if kind == "Unix" else TOKEN
    ) as served:
        context = ssl.create_default_context(cafile=str(certificate[0]))

        def connection() -> http.client.HTTPConnection:
            if kind == "TLS":
                port = served.address[1]
                return http.client.HTTPSConnection(
                    "localhost", port, context=context, timeout=kit.SECONDS
                )
            return served.connection()

        def ask() -> bool:
            asked = connection()
            try:
                asked.request(
                    "GET",
                    "/stats.json",
                    headers={"Authorization": f"Bearer {TOKEN}"},
                )
                answer = asked.getresponse()
                answer.read()
                return answer.status == 200
            except OSError:
                return False
            finally:
                asked.close()

        login = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        huge = (
            b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ",
            b"GET /?",
            login + b"Content-Length: 4096\r\n\r\n",
            login + b"Transfer-Encoding: chunked\r\n\r\n40000\r\n",
            b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03",
            b"",
        )
        yield Listener(served.process.pid, served.socket, ask, huge)


@contextlib.contextmanager
def publishing() -> Iterator[Listener]:
    """Run the publisher of KV events; an honest router subscribes and receives an event."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PUBLISHER], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    endpoint = process.stdout.readline().strip()
    port = int(endpoint.rpartition(":")[2])

    def ask() -> bool:
        with zmq.Context.instance().socket(zmq.SUB) as router:
            router.setsockopt(zmq.LINGER, 0)
            router.subscribe("")
            router.connect(endpoint)
            return (
                bool(router.poll(1000 * kit.SECONDS))
                and router.recv_multipart()[0] == b"kv"
            )

    greeting = (b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL").ljust(64, b"\0")
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
    huge = (
        # one subscription
        greeting + ready + b"\x02" + HUGE_BYTES.to_bytes(8, "big") + b"\x01",
        greeting + ready + b"\x00\xff\x01",
        # many
        greeting
        + ready
        + b"".join(b"\x00\x09\x01" + b"%08d" % n for n in range(20_000)),
        # the same one
        greeting + ready + b"".join(b"\x00\x01\x01" for _ in range(20_000)),
        greeting + b"\x04\xff\x05READY",
        b"",
    )
    try:
        yield Listener(
            process.pid,
            lambda: socket.create_connection(("127.0.0.1", port), kit.SECONDS),
            ask,
            huge,
        )
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def resident(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(
        int(line.split()[1]) << 10
        for line in text.splitlines()
        if line.startswith("VmRSS")
    )


def silent(listener: Listener, stack: contextlib.ExitStack) -> str:
    made = [stack.enter_context(listener.connect()) for _ in range(SILENT)]
    return f"{len(made)} silent"


def huge(listener: Listener, stack: contextlib.ExitStack) -> str:
    sent = 0
    for number in range(HUGE):
        sock = stack.enter_context(listener.connect())
        sock.settimeout(0.2)
        data = listener.huge[number % len(listener.huge)]
        data += os.urandom(max(0, HUGE_BYTES - len(data)))
        with contextlib.suppress(OSError):
            while data:
                done = sock.send(data)
                sent += done
                data = data[done:]
    while sent < 8 << 20:  # the others were ended at their first bytes
        with listener.connect() as sock:
            sent += sock.send(os.urandom(64 << 10))
    return f"{HUGE} huge, {sent >> 20} MiB sent"


def closed(listener: Listener, stack: contextlib.ExitStack) -> str:
    for _ in range(CLOSED):
        listener.connect().close()
    return f"{CLOSED} closed"


def honest(listener: Listener) -> list[float]:
    """Return how long each of the honest requests took, one after the other; all must be
    answered.
    """
    seconds = []
    for number in range(HONEST):
        begun = time.perf_counter()
        assert listener.ask(), f"request {number} was not answered"
        seconds.append(time.perf_counter() - begun)
    return seconds


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("certificate")
    files = root / "cert.pem", root / "key.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "1",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost",
            "-keyout",
            files[1],
            "-out",
            files[0],
        ],
        check=True,
        capture_output=True,
    )
    return files


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "TLS", "Unix", "events"])
def test_strangers_keep_nobody_out_and_leave_nothing(
    kind: str, tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    running = (
        publishing() if kind == "events" else serving(kind, tmp_path, certificate)
    )
    with running as listener:
        honest(listener)
        before = resident(listener.pid)
        quiet = statistics.median(honest(listener))
        for strangers in (silent, huge, closed):
            with contextlib.ExitStack() as stack:
                what = strangers(listener, stack)
                median = statistics.median(honest(listener))
            # the machine may be busy with other work
            earlier = quiet
            quiet = statistics.median(honest(listener))
            print(
                f"{kind}, {what}: {HONEST} answered, median {1000 * median:.1f} ms"
            )
            print(
                f"    quiet: {1000 * earlier:.1f} ms before, {1000 * quiet:.1f} ms after"
            )
            assert median <= MOST_TIMES * max(earlier, quiet)
        wait_until(lambda: resident(listener.pid) <= before + MOST_BYTES)
        print(
            f"    then {(resident(listener.pid) - before) / (1 << 20):.1f} MiB more"
        )
