"""One HTTP/1.1 connection that moves bodies straight from and into memory, and believes no length before its time.

For what a client library copies, or keeps however large it is: bodies of chunks, of errors, of listings. RFC 9112,
without redirections and compression.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from pagoda.threads import NO_THREAD, Pool, begin, wait
from pagoda.tiers.remote.sockets import IDLE_SECONDS, abort, keep_alive

__all__ = ["Answer", "Wire", "Wires", "paths_in"]

_HEAD_BYTES = 64 << 10  # of status line and headers
_STEP_BYTES = 1 << 20  # of one send or receive: the deadline is looked at in between
_INTERIMS = 16  # 1xx answers before the final one
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")


class Answer(NamedTuple):
    """The head of an answer. `length` is what the body is said to have, in bytes; None: not said."""

    status: int
    length: int | None
    is_chunked: bool
    closes: bool  # the connection is of no use after the body


class Wire:
    """A connection to one origin, made when it is needed and again when the server has ended it.

    For one thread at a time, but for `abort`. Every call ends at `until` (time.monotonic()) with a TimeoutError; all
    trouble is an OSError, after which the connection is closed.
    """

    def __init__(self, origin: SplitResult) -> None:
        self._origin = (origin.scheme, origin.netloc)
        self._host = origin.hostname or ""
        self._port = origin.port or (443 if origin.scheme == "https" else 80)
        self._authority = origin.netloc.rpartition("@")[2]
        self._tls = ssl.create_default_context() if origin.scheme == "https" else None
        self._socket: socket.socket | None = None
        self._used = 0.0  # when it was last sent to or received from (time.monotonic())
        self._buffer = memoryview(bytearray(_HEAD_BYTES))
        self._begin = self._end = 0  # what of the buffer has been received and not been taken
        self._closed = False

    def is_to(self, origin: SplitResult) -> bool:
        """Whether requests to `origin` may go over this connection."""
        return (origin.scheme, origin.netloc) == self._origin

    def ask(
        self,
        method: str,
        target: str,
        until: float,
        headers: Mapping[str, str] | None = None,
        body: Sequence[memoryview] = (),
    ) -> Answer:
        """Send a request, return the head of its answer. What is left of the body is for `read` and `end`."""
        fields = {"Host": self._authority, **(headers or {})}
        if body or method == "PUT":
            fields["Content-Length"] = str(sum(piece.nbytes for piece in body))
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        head = memoryview(f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))
        if time.monotonic() - self._used > IDLE_SECONDS:
            self.drop()
        with self._or_dropped():
            is_old = self._socket is not None
            try:
                answer = self._exchange(head, body, until)
            except (ConnectionError, EOFError):
                if not is_old or self._closed:
                    raise
                self.drop()  # the server had ended it while nobody used it
                answer = self._exchange(head, body, until)
        return answer._replace(length=0, is_chunked=False) if method == "HEAD" else answer

    def read(self, into: memoryview, until: float) -> None:
        """Fill `into` from the body."""
        at = min(into.nbytes, self._end - self._begin)
        into[:at] = self._buffer[self._begin : self._begin + at]
        self._begin += at
        with self._or_dropped():
            while at < into.nbytes:
                at += self._receive(into[at : at + _STEP_BYTES], until)

    def end(self, answer: Answer, taken: int, until: float) -> bytes:
        """Done with an answer of which all or nothing (`taken`) was read: its body then, if that is at most 64 KiB.

        If not, the connection goes: that is cheaper than to read on, and nothing that could be endless is read.
        """
        rest = b""
        if answer.length is None and not answer.is_chunked and answer.status not in (204, 304):
            self.drop()
        elif answer.length != taken and answer.status not in (204, 304):
            rest = self.text(answer, _HEAD_BYTES, until) or b""
        self._settle(answer)
        return rest

    def text(self, answer: Answer, most_bytes: int, until: float) -> bytes | None:
        """The whole body, however it is coded; None: it is longer than that, and the connection was dropped."""
        whole = bytearray()
        with self._or_dropped():
            for size in self._sizes(answer, until):
                if len(whole) + size > most_bytes:
                    self.drop()
                    return None
                piece = bytearray(size)
                self.read(memoryview(piece), until)
                whole += piece
        self._settle(answer)
        return bytes(whole)

    def _settle(self, answer: Answer) -> None:
        """An answer has been read: the connection goes if it is of no more use."""
        if answer.closes or self._end != self._begin:  # or it sent more than it said
            self.drop()

    @contextlib.contextmanager
    def _or_dropped(self) -> Iterator[None]:
        """Around what must succeed for the connection to be of more use."""
        try:
            yield
        except EOFError:
            self.drop()
            raise ConnectionError("the connection was ended within an answer") from None
        except BaseException:
            self.drop()
            raise

    def _sizes(self, answer: Answer, until: float) -> Iterator[int]:
        """Of the pieces that a body comes in; what is between them is taken out of the way."""
        if not answer.is_chunked:
            if answer.length is None:
                raise ConnectionError("an answer that does not say its length")
            yield answer.length
            return
        while True:
            size = re.match(rb"[0-9a-fA-F]{1,12}(?=[;\s]|$)", self._upto(b"\r\n", until))
            if size is None:
                raise ConnectionError("a malformed chunk")
            if not int(size[0], 16):
                break
            yield int(size[0], 16)
            self._upto(b"\r\n", until)
        while self._upto(b"\r\n", until):
            pass

    def abort(self) -> None:
        """Let whoever waits here fail now, and whoever asks later too. From any thread."""
        self._closed = True
        one = self._socket
        if one is not None:  # not close(): its number could be another's before the waiting ends
            abort(one)

    def drop(self) -> None:
        """End the connection; the next request makes another. Not for another thread."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._begin, self._end = None, 0, 0

    def _exchange(self, head: memoryview, body: Sequence[memoryview], until: float) -> Answer:
        one = self._socket or self._connect(until)
        self._used = time.monotonic()
        for piece in (head, *body):
            at = 0
            while at < piece.nbytes:
                one.settimeout(_left(until))
                at += one.send(piece[at : at + _STEP_BYTES])
        for _ in range(_INTERIMS):
            answer = self._head(until)
            if answer.status >= 200:
                return answer
        raise ConnectionError("interim answers without end")

    def _head(self, until: float) -> Answer:
        return _parsed(self._upto(b"\r\n\r\n", until) + b"\r\n")

    def _upto(self, mark: bytes, until: float) -> bytes:
        """What comes before the next `mark`, which is taken too."""
        held = self._end - self._begin
        self._buffer[:held] = bytes(self._buffer[self._begin : self._end])
        self._begin, self._end, seen = 0, held, 0
        while (stop := bytes(self._buffer[seen : self._end]).find(mark)) < 0:
            seen = max(0, self._end - len(mark) + 1)
            if self._end == _HEAD_BYTES:
                raise ConnectionError("a head without end")
            self._end += self._receive(self._buffer[self._end :], until)
        self._begin = seen + stop + len(mark)
        return bytes(self._buffer[: seen + stop])

    def _receive(self, into: memoryview, until: float) -> int:
        one = self._socket
        if one is None:
            raise ConnectionError("the connection was closed")
        left = _left(until)
        self._used = until - left
        one.settimeout(left)
        count = one.recv_into(into)
        if not count:
            raise EOFError
        return count

    def _connect(self, until: float) -> socket.socket:
        self._check()
        trouble: OSError = OSError("the host has no address")
        for family, kind, protocol, _, address in _addresses(self._host, self._port, until):
            self._socket, self._begin, self._end = socket.socket(family, kind, protocol), 0, 0
            try:
                self._socket.settimeout(_left(until))
                self._check()  # it is ours now: `abort` reaches what comes after this
                self._socket.connect(address)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                keep_alive(self._socket)
                if self._tls is not None:
                    self._shake_hands(self._tls, until)
            except OSError as error:
                self.drop()
                trouble = error
                continue
            except BaseException:
                self.drop()
                raise
            return self._socket
        raise trouble

    def _shake_hands(self, tls: ssl.SSLContext, until: float) -> None:
        assert self._socket is not None
        secured = tls.wrap_socket(self._socket, server_hostname=self._host, do_handshake_on_connect=False)
        self._socket = secured
        self._check()
        secured.settimeout(_left(until))
        secured.do_handshake()

    def _check(self) -> None:
        if self._closed:
            raise ConnectionError("the connection was closed")


class Wires:
    """Up to `most` connections to one origin, each with one request at a time. Like a Wire for one thread."""

    def __init__(self, origin: SplitResult, most: int) -> None:
        self._origin = origin
        self._most = most
        self._wires: list[Wire] = []
        self._threads = Pool(most, "pagoda-http")
        self._closed = False

    def is_to(self, origin: SplitResult) -> bool:
        """Whether requests to `origin` may go over these connections."""
        return (origin.scheme, origin.netloc) == (self._origin.scheme, self._origin.netloc)

    def heads(self, targets: Sequence[str], until: float, headers: Mapping[str, str]) -> list[int]:
        """The status of a HEAD request for each target, at most `most`, all at once. OSError if one has none."""
        while len(self._wires) < len(targets):
            self._wires.append(Wire(self._origin))
        if self._closed:
            self.abort()
        asked: list[Future[int]] = []
        try:
            for wire, target in zip(self._wires, targets, strict=False):
                asked.append(self._threads.submit(_status_of, wire, target, until, headers))
            wait(asked)
        except BaseException as trouble:
            wait(asked)  # they use their connections until they have ended
            if isinstance(trouble, RuntimeError):
                raise OSError(str(trouble)) from None
            raise
        return [each.result() for each in asked]

    def abort(self) -> None:
        """Let whoever waits here fail now, and whoever asks later too. From any thread."""
        self._closed = True
        for wire in list(self._wires):
            wire.abort()

    def close(self) -> None:
        """End the connections and threads. Not for another thread."""
        self.abort()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for wire in self._wires:
            wire.drop()


def _status_of(wire: Wire, target: str, until: float, headers: Mapping[str, str]) -> int:
    answer = wire.ask("HEAD", target, until, headers)
    wire.end(answer, 0, until)
    return answer.status


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("out of time")
    return left


def _parsed(head: bytes) -> Answer:
    status = _STATUS.match(head)
    fields: dict[bytes, set[bytes]] = {}
    for line in head.split(b"\r\n")[1:-1]:
        name, colon, value = line.partition(b":")
        if not colon or name != name.strip():
            raise ConnectionError("a malformed head")
        fields.setdefault(name.lower(), set()).add(value.strip())
    lengths = fields.get(b"content-length", set())
    if status is None or len(lengths) > 1 or not all(re.fullmatch(rb"\d{1,18}", each) for each in lengths):
        raise ConnectionError("a malformed head")
    codings = fields.get(b"transfer-encoding")
    length = int(lengths.pop()) if lengths and codings is None else None
    closes = b"close" in fields.get(b"connection", set()) or head.startswith(b"HTTP/1.0")
    return Answer(int(status[1]), length, codings == {b"chunked"}, closes)


_Address = tuple[
    socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]
]


def _addresses(host: str, port: int, until: float) -> list[_Address]:
    """The addresses of a host. The system's resolver knows no deadline: what is late is left to its thread."""
    found: list[_Address] = []
    trouble: list[OSError] = []

    def resolve() -> None:
        try:
            found.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))  # type: ignore[arg-type, unused-ignore]
        except OSError as error:
            trouble.append(error)

    thread = threading.Thread(target=resolve, name="pagoda-resolve", daemon=True)
    if not begin(thread):
        raise OSError(NO_THREAD)
    thread.join(_left(until))
    if trouble:
        raise OSError("the host is not known (DNS)")
    _left(until)
    return found


def paths_in(listing: bytes) -> list[str]:
    """The paths that a WebDAV listing names. No XML is understood, so none of its entities either."""
    named = re.findall(rb"<(?:\w{1,20}:)?href\s*>\s*([^<\s]{1,4096})\s*<", listing)
    return [unquote(urlsplit(each.decode("latin-1")).path).strip("/") for each in named]
