"""Malicious servers: one speaks Redis' protocol, one speaks HTTP, and one sends any bytes that a
test defines.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path

BLOCK = bytes(1 << 20)
SILENCE: tuple[bytes, ...] = ()
# the bytes to send, piece by piece; the connection remains open
Lie = Iterable[bytes]


class Evil:
    """Listens on `port`; each connection has a separate thread. Thread-safe."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def talk(self, client: socket.socket) -> None:
        """Serve one connection, from its first byte to its last."""
        raise NotImplementedError

    def close(self) -> None:
        """End everything. Idempotent."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End all connections now."""
        with self._lock:
            clients = self._open
            self._open = set()
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(client)
                self.connections += 1
            threading.Thread(
                target=self._talk, args=(client,), daemon=True
            ).start()

    def _talk(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with client, contextlib.suppress(OSError, EOFError):
            self.talk(client)
        with self._lock:
            self._open.discard(client)


class Babble(Evil):
    """Sends the same to every client, whatever it receives, and then nothing more."""

    def __init__(self, words: Callable[[], Lie]) -> None:
        self._words = words
        super().__init__()

    def talk(self, client: socket.socket) -> None:
        """Send it, then receive until the end."""
        for piece in self._words():
            client.sendall(piece)
        while client.recv(1 << 16):
            pass


# ---- Redis


class LyingRedis(Evil):
    """Forwards each command to a true Redis, one at a time, except those for which it has a false
    answer.

    `lies`: the command's name -> from its arguments to the answer (None: the truth). `requests` are
    all commands so far, without arguments of more than 256 bytes.
    """

    def __init__(self, true_port: int) -> None:
        self._true_port = true_port
        self.lies: dict[bytes, Callable[[list[bytes]], Lie | None]] = {}
        self.requests: list[list[bytes]] = []
        super().__init__()

    def talk(self, client: socket.socket) -> None:
        """Answer commands in their order, until the client disconnects."""
        with (
            socket.create_connection(
                ("127.0.0.1", self._true_port), timeout=30.0
            ) as truth,
            truth.makefile("rb") as answers,
            client.makefile("rb") as commands,
        ):
            while True:
                raw, arguments = _command(commands)
                self.requests.append(
                    [argument for argument in arguments if len(argument) <= 256]
                )
                lie = self.lies.get(arguments[0].upper())
                pieces = lie(arguments) if lie is not None else None
                if pieces is None:
                    truth.sendall(raw)
                    pieces = [_answer(answers)]
                for piece in pieces:
                    client.sendall(piece)


def _line(reader: BufferedReader) -> bytes:
    line: bytes = reader.readline(1 << 16)
    if not line.endswith(b"\r\n"):
        raise EOFError
    return line


def _command(reader: BufferedReader) -> tuple[bytes, list[bytes]]:
    """Return the next command in its raw form, and its arguments."""
    raw = _line(reader)
    arguments = list[bytes]()
    for _ in range(int(raw[1:])):
        size = _line(reader)
        body: bytes = reader.read(int(size[1:]) + 2)
        raw += size + body
        arguments.append(body[:-2])
    return raw, arguments


def _answer(reader: BufferedReader) -> bytes:
    """Return one complete raw answer of a true Redis."""
    raw = _line(reader)
    kind = raw[:1]
    rest = raw[1:-2]
    if kind in b"$=!" and int(rest) >= 0:
        raw += reader.read(int(rest) + 2)
    elif kind in b"*~>%":
        for _ in range(max(0, int(rest)) * (2 if kind == b"%" else 1)):
            raw += _answer(reader)
        if kind == b">":  # a push comes before the answer
            raw += _answer(reader)
    return raw


def bulk(data: bytes) -> bytes:
    """`data` as an answer."""
    return b"$%d\r\n%b\r\n" % (len(data), data)


def endless(
    head: bytes = b"", block: bytes = BLOCK, blocks: int = 512
) -> Iterator[bytes]:
    """`head`, then block after block, up to a bound: a client that keeps them would take all memory
    of the machine.
    """
    yield head
    for _ in range(blocks):
        yield block


def dripping(data: bytes, pause_seconds: float = 0.05) -> Iterator[bytes]:
    """One byte at a time."""
    for at in range(len(data)):
        time.sleep(pause_seconds)
        yield data[at : at + 1]


# ---- HTTP


class LyingHttp(Evil):
    """An object store that understands PUT, GET (with a range), HEAD and DELETE, with false answers
    for some of them.

    `lies`: the method -> from the path to the raw answer (None: the truth). `requests` are methods
    and paths so far.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.lies: dict[str, Callable[[str], Lie | None]] = {}
        self.requests: list[tuple[str, str]] = []
        super().__init__()

    def talk(self, client: socket.socket) -> None:
        """Answer requests in their order, until the client disconnects."""
        with client.makefile("rb") as requests:
            while True:
                method, path, _ = _line(requests).decode("latin-1").split(" ", 2)
                headers = _headers(requests)
                if headers.get("expect") == "100-continue":
                    client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = requests.read(int(headers.get("content-length", "0")))
                self.requests.append((method, path))
                lie = self.lies.get(method)
                pieces = lie(path) if lie is not None else None
                for piece in (
                    pieces
                    if pieces is not None
                    else self._truth(method, path, headers, body)
                ):
                    client.sendall(piece)

    def _truth(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> Lie:
        if method == "PUT":
            if headers.get("if-none-match") == "*" and path in self.objects:
                return [http(412)]
            self.objects[path] = body
            return [http(201)]
        found = self.objects.get(path)
        if found is None:
            return [http(404)]
        if method == "DELETE":
            del self.objects[path]
            return [http(204)]
        first, last = _range(headers.get("range"), len(found))
        part = found[first : last + 1]
        more = (
            {}
            if "range" not in headers
            else {"Content-Range": f"bytes {first}-{last}/{len(found)}"}
        )
        return [
            http(
                206 if more else 200,
                part if method == "GET" else b"",
                len(part),
                more,
            )
        ]


class FolderedHttp(LyingHttp):
    """A WebDAV server that makes no folder for a put, as Apache: 409, until MKCOL has made it in
    one that is there.
    """

    def __init__(self, makes: bool = True) -> None:
        self.folders = {"/"}
        self._makes = makes
        super().__init__()

    def _truth(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> Lie:
        above = path.rstrip("/").rpartition("/")[0] + "/"
        if method not in ("PUT", "MKCOL"):
            return super()._truth(method, path, headers, body)
        if method == "MKCOL" and (path in self.folders or not self._makes):
            return [http(405)]
        if above not in self.folders:
            return [http(409)]
        if method == "PUT":
            return super()._truth(method, path, headers, body)
        self.folders.add(path)
        return [http(201)]


class HastyHttp(Evil):
    """Answers each request as soon as it has its head, and disconnects: what follows is not
    read.
    """

    def __init__(self, answer: bytes, tls: ssl.SSLContext | None = None) -> None:
        self._answer = answer
        self._tls = tls
        super().__init__()

    def talk(self, client: socket.socket) -> None:
        """Answer one request."""
        if self._tls is not None:
            client = self._tls.wrap_socket(client, server_side=True)
        with client:
            self._answer_one(client)

    def _answer_one(self, client: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += client.recv(1) or b"\r\n\r\n"
        client.sendall(self._answer)


def _headers(reader: BufferedReader) -> dict[str, str]:
    headers: dict[str, str] = {}
    while (line := _line(reader)) != b"\r\n":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return headers


def _range(text: str | None, size: int) -> tuple[int, int]:
    """Return the first and last byte of a range header."""
    if text is None:
        return 0, size - 1
    first, _, last = text.removeprefix("bytes=").partition("-")
    return int(first), min(size - 1, int(last) if last else size - 1)


def http(
    status: int,
    body: bytes = b"",
    length: int | None = None,
    more: dict[str, str] | None = None,
) -> bytes:
    """Return one HTTP answer; `length` is the length that it announces."""
    fields = {
        "Content-Length": str(len(body) if length is None else length),
        "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        "ETag": '"0"',
        **(more or {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} Whatever\r\n{head}\r\n".encode() + body


# ---- memory


class Growth:
    """The largest growth of this process's resident memory since `growth` was entered."""

    def __init__(self, before_bytes: int) -> None:
        self._before_bytes = before_bytes

    @property
    def peak_bytes(self) -> int:
        """So far."""
        return _status_bytes("VmHWM") - self._before_bytes


@contextlib.contextmanager
def growth() -> Iterator[Growth]:
    """Watch the memory of this process (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    yield Growth(_status_bytes("VmRSS"))


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)
