"""The limits of a connection: a bare socket to a second process, and a bare loop of a server's own
commands.

This module does not import `pagoda`. As a program it is that second process.
"""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from harness import MIB
from limits import SPREAD_BYTES, Bytes, touched

# Redis stores values of this size without new memory from the system for each
PIECE_BYTES = MIB
# pieces requested ahead: 32 MiB at once cost Redis 2.5 times the processor time
IN_FLIGHT = 8
# bytes: "p" (put) or "g" (get), then the number of bytes in big-endian order
_REQUEST = 9
_LOOPBACK = "127.0.0.1"
_SET = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n"
_GET = b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n"


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process with all of its threads; 0 if it has ended."""
    try:
        # as clock_getcpuclockid(3) computes it
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def connected(port: int) -> socket.socket:
    """Open a connection to a loopback port that sends without delay (TCP_NODELAY)."""
    link = socket.create_connection((_LOOPBACK, port), timeout=None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def send_all(link: socket.socket, parts: Sequence[memoryview | bytes]) -> None:
    """Send all parts in as few calls as the kernel allows."""
    left = [memoryview(part) for part in parts]
    while left:
        sent = link.sendmsg(left)
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


def receive(link: socket.socket, into: memoryview) -> None:
    """Fill `into`. Raise EOFError if the other side has closed the connection."""
    got = 0
    while got < len(into):
        fresh = link.recv_into(into[got:], 0, socket.MSG_WAITALL)
        if not fresh:
            raise EOFError("the connection has ended")
        got += fresh


class SocketPair:
    """The limit of one connection: a second process on loopback, with separate memory, without any
    protocol.

    One turn at a time. Use as a context manager: the process ends with the connection.
    """

    threads = "2 processes, 1 connection"

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self._link = connected(int(self._process.stdout.readline()))

    def put(self, source: Bytes) -> None:
        """Send `source` to the other process and wait for its confirmation."""
        send_all(
            self._link, [b"p" + source.nbytes.to_bytes(8, "big"), source.data]
        )
        receive(self._link, memoryview(bytearray(1)))

    def get(self, into: Bytes) -> None:
        """Fill `into` from the other process's memory."""
        self._link.sendall(b"g" + into.nbytes.to_bytes(8, "big"))
        receive(self._link, into.data)

    def __enter__(self) -> SocketPair:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._link.close()
        self._process.wait(timeout=10)
        assert self._process.stdout is not None
        self._process.stdout.close()


class RespLoop:
    """The limit of a client of Redis: pipelined SET and GET of 1 MiB strings, and nothing else.

    It checks that each answer is the expected one, and does nothing else: no names, no claim, no
    header, no deadline. One turn at a time.
    """

    threads = "1 connection"

    def __init__(self, port: int) -> None:
        self._link = connected(port)
        self._head = memoryview(bytearray(32))

    def put(self, key: bytes, source: Bytes) -> None:
        """Send SET of all pieces at once, then read all answers."""
        parts: list[memoryview | bytes] = []
        tail = b""
        for place, piece in enumerate(_pieces(source)):
            name = b"%b:%d" % (key, place)
            parts.append(tail + _SET % (len(name), name, len(piece)))
            parts.append(piece)
            tail = b"\r\n"
        send_all(self._link, [*parts, tail])
        answers = memoryview(bytearray(5 * (len(parts) // 2)))
        receive(self._link, answers)
        if answers != b"+OK\r\n" * (len(parts) // 2):
            raise RuntimeError(f"SET was refused: {bytes(answers)!r}")

    def get(self, key: bytes, into: Bytes) -> None:
        """Send GET of each piece, IN_FLIGHT of them ahead, and read each answer directly into its
        place.
        """
        places = _pieces(into)
        asked = [
            _GET % (len(name), name)
            for name in (b"%b:%d" % (key, i) for i in range(len(places)))
        ]
        send_all(self._link, asked[:IN_FLIGHT])
        before = b""
        for piece, ask in itertools.zip_longest(places, asked[IN_FLIGHT:]):
            wanted = b"%b$%d\r\n" % (before, len(piece))
            head = self._head[: len(wanted)]
            receive(self._link, head)
            if head != wanted:
                raise RuntimeError(f"GET was answered with {bytes(head)!r}")
            if ask:
                self._link.sendall(ask)
            receive(self._link, piece)
            before = b"\r\n"
        receive(self._link, self._head[:2])

    def close(self) -> None:
        """Close the connection."""
        self._link.close()


def _pieces(array: Bytes) -> list[memoryview]:
    return [
        array.data[start : start + PIECE_BYTES]
        for start in range(0, array.nbytes, PIECE_BYTES)
    ]


def serve() -> None:
    """Run the second process of a SocketPair: print its port, serve one connection, end with it."""
    memory = touched(SPREAD_BYTES, 9).data
    with socket.create_server((_LOOPBACK, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        link, _ = listener.accept()
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    place = 0
    request = memoryview(bytearray(_REQUEST))
    with link:
        while _asked(link, request):
            nbytes = int.from_bytes(request[1:], "big")
            place = place if place + nbytes <= SPREAD_BYTES else 0
            if request[:1] == b"p":
                receive(link, memory[place : place + nbytes])
                link.sendall(b"k")
            else:
                send_all(link, [memory[place : place + nbytes]])
            place += nbytes


def _asked(link: socket.socket, request: memoryview) -> bool:
    try:
        receive(link, request)
    except (EOFError, ConnectionError):
        return False
    return True


if __name__ == "__main__":
    serve()
