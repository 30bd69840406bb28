"""HTTP/1.1 connections that move bodies directly from and into memory, and allocate nothing for
announced lengths.

For bodies that a client library would copy, or would hold in memory at any size: chunks, errors,
listings. RFC 9112, without redirections and compression.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from pagoda.base.fork import call_in_child
from pagoda.base.metrics import Reason
from pagoda.base.signal_safe_threads import (
    NO_THREAD,
    Answer,
    Pool,
    complete,
    start_thread,
    wait,
)
from pagoda.codec import HEADER_BYTES
from pagoda.tiers.remote.socket_keepalive import (
    IDLE_SECONDS,
    LATE,
    abort,
    keep_alive,
    seconds_left,
)
from pagoda.tiers.remote.store_client import GetRequest, RefusedError

_HEAD_BYTES = 64 << 10  # limit of status line and headers
# limit of one send or receive; the deadline is checked in between
_STEP_BYTES = 1 << 20
_WAKE_BYTES = 512 << 10
_INTERIMS = 16  # 1xx responses before the final one
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")


class HttpRequest(NamedTuple):
    """A request: its first line, its headers, and the pieces of its body."""

    method: str
    target: str
    fields: Mapping[str, str]
    body: Sequence[memoryview] = ()


class Response(NamedTuple):
    """The head of a response. `length`: the announced bytes of the body; None: not announced."""

    status: int
    length: int | None
    is_chunked: bool
    closes: bool  # the connection cannot be used after the body
    # how the server wants to be asked: the headers WWW-Authenticate, in small letters
    challenges: Sequence[str] = ()
    proof: str = ""  # see pagoda.base.serve_proof


class HttpConnection:
    """A connection to one origin, opened when it is needed and again when the server has closed it.

    For one thread at a time, except `abort`. Every call ends at `until` (time.monotonic()) with a
    TimeoutError. All failures are OSErrors, after which the connection is closed.
    """

    def __init__(self, origin: SplitResult) -> None:
        self._origin = (origin.scheme, origin.netloc)
        self._host = origin.hostname or ""
        self._port = origin.port or (443 if origin.scheme == "https" else 80)
        self.authority = origin.netloc.rpartition("@")[2]
        """The host and port that are called: the Host header."""
        self._tls = (
            ssl.create_default_context() if origin.scheme == "https" else None
        )
        self._socket: socket.socket | None = None
        # the number of arrived bytes at which the thread is woken
        self._wakes_at = 1
        # when it was last sent to or received from (time.monotonic())
        self._used = 0.0
        self._buffer = memoryview(bytearray(_HEAD_BYTES))
        # the part of the buffer that was received but not consumed
        self._begin = self._end = 0
        self._closed = False

    def serves(self, origin: SplitResult) -> bool:
        """Return whether requests to `origin` may use this connection."""
        return (origin.scheme, origin.netloc) == self._origin

    def request(
        self,
        method: str,
        target: str,
        until: float,
        headers: Mapping[str, str] | None = None,
        body: Sequence[memoryview] = (),
    ) -> Response:
        """Send a request and return the head of its response. Read the body by `read_into` and
        `finish`.
        """
        fields = dict(headers or {})
        if body or method == "PUT":
            fields["Content-Length"] = str(sum(piece.nbytes for piece in body))
        if time.monotonic() - self._used > IDLE_SECONDS:
            self.drop()
        request = HttpRequest(method, target, fields, body)
        with self.dropped_on_error():
            is_old = self._socket is not None
            try:
                response = self._exchange(request, until, is_new=not is_old)
            except (ConnectionError, EOFError):
                if not is_old or self._closed:
                    raise
                self.drop()  # the server had closed it while it was idle
                response = self._exchange(request, until, is_new=True)
        return (
            response._replace(length=0, is_chunked=False)
            if method == "HEAD"
            else response
        )

    def read_into(self, into: memoryview, until: float) -> None:
        """Fill `into` from the body."""
        at = min(into.nbytes, self._end - self._begin)
        into[:at] = self._buffer[self._begin : self._begin + at]
        self._begin += at
        with self.dropped_on_error():
            # wake this thread less often, which delays no other thread
            while into.nbytes - at > 2 * _WAKE_BYTES and self._tls is None:
                self._wake_at(_WAKE_BYTES)
                at += self._receive(into[at : at + _STEP_BYTES], until)
            self._wake_at(1)
            while at < into.nbytes:
                at += self._receive(into[at : at + _STEP_BYTES], until)

    def _wake_at(self, nbytes: int) -> None:
        """Let the kernel wake this thread only when `nbytes` have arrived."""
        if self._socket is not None and nbytes != self._wakes_at:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._wakes_at = nbytes

    def finish(self, response: Response, taken: int, until: float) -> bytes:
        """End a response after `taken` bytes of it (all or none) were read; return an unread body
        of at most 64 KiB.

        A longer body closes the connection: that is cheaper than reading it, and no endless body is
        read.
        """
        rest = b""
        if (
            response.length is None
            and not response.is_chunked
            and response.status not in (204, 304)
        ):
            self.drop()
        elif response.length != taken and response.status not in (204, 304):
            rest = self.read_body(response, _HEAD_BYTES, until) or b""
        self._drop_if_unusable(response)
        return rest

    def read_body(
        self, response: Response, most_bytes: int, until: float
    ) -> bytes | None:
        """Return the whole body in any transfer coding; None: it is longer, and the connection was
        dropped.
        """
        whole = bytearray()
        with self.dropped_on_error():
            for size in self._piece_sizes(response, until):
                if len(whole) + size > most_bytes:
                    self.drop()
                    return None
                piece = bytearray(size)
                self.read_into(memoryview(piece), until)
                whole += piece
        self._drop_if_unusable(response)
        return bytes(whole)

    def _drop_if_unusable(self, response: Response) -> None:
        """Drop the connection after a response if it cannot be used again."""
        # or the server sent more than it announced
        if response.closes or self._end != self._begin:
            self.drop()

    @contextlib.contextmanager
    def dropped_on_error(self) -> Iterator[None]:
        """Drop the connection if the block fails, because it cannot be used again."""
        is_sound = False
        try:
            yield
            is_sound = True
        except EOFError:
            raise ConnectionError(
                "the server closed the connection within a response"
            ) from None
        finally:
            if not is_sound:
                self.drop()

    def _piece_sizes(self, response: Response, until: float) -> Iterator[int]:
        """Yield the sizes of the pieces of a body; consume what is between them."""
        if not response.is_chunked:
            if response.length is None:
                raise ConnectionError("the response does not announce its length")
            yield response.length
            return
        while True:
            size = re.match(
                rb"[0-9a-fA-F]{1,12}(?=[;\s]|$)", self._read_until(b"\r\n", until)
            )
            if size is None:
                raise ConnectionError("malformed chunked body")
            if not int(size[0], 16):
                break
            yield int(size[0], 16)
            self._read_until(b"\r\n", until)
        while self._read_until(b"\r\n", until):
            pass

    def abort(self) -> None:
        """Make the running call fail now, and all later calls. From any thread."""
        self._closed = True
        sock = self._socket
        # not close(): the descriptor could be another file's before the call ends
        if sock is not None:
            abort(sock)

    def drop(self) -> None:
        """Close the connection; the next request opens another one. Not from another thread."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._begin = 0
        self._end = 0
        self._wakes_at = 1

    def _exchange(
        self, request: HttpRequest, until: float, *, is_new: bool
    ) -> Response:
        """Send one request, connect before if need be, and read the head of its response.

        `is_new`: the connection was or is made for this request.
        """
        lines = "".join(
            f"{name}: {value}\r\n"
            for name, value in {"Host": self.authority, **request.fields}.items()
        )
        first = f"{request.method} {request.target} HTTP/1.1\r\n"
        head = memoryview(f"{first}{lines}\r\n".encode("latin-1"))
        sock = self._socket or self._connect(until)
        self._used = time.monotonic()
        try:
            for piece in (head, *request.body):
                at = 0
                while at < piece.nbytes:
                    sock.settimeout(seconds_left(until))
                    at += sock.send(piece[at : at + _STEP_BYTES])
        except (ConnectionError, ssl.SSLError) as broken:
            # a server may refuse a body, answer and close before it has read all of it
            if is_new:
                with contextlib.suppress(OSError, EOFError):
                    return self._read_head(until)._replace(closes=True)
            raise ConnectionError(broken.strerror or str(broken)) from None
        return self._read_head(until)

    def _read_head(self, until: float) -> Response:
        for _ in range(_INTERIMS):
            response = _parse_head(self._read_until(b"\r\n\r\n", until) + b"\r\n")
            if response.status >= 200:
                return response
        raise ConnectionError("too many interim responses")

    def _read_until(self, mark: bytes, until: float) -> bytes:
        """Return what comes before the next `mark`; consume the mark too."""
        held = self._end - self._begin
        self._buffer[:held] = bytes(self._buffer[self._begin : self._end])
        self._begin = 0
        self._end = held
        seen = 0
        while (stop := bytes(self._buffer[seen : self._end]).find(mark)) < 0:
            seen = max(0, self._end - len(mark) + 1)
            if self._end == _HEAD_BYTES:
                raise ConnectionError(
                    f"the head of the response is longer than {_HEAD_BYTES} bytes"
                )
            self._end += self._receive(self._buffer[self._end :], until)
        self._begin = seen + stop + len(mark)
        return bytes(self._buffer[: seen + stop])

    def _receive(self, into: memoryview, until: float) -> int:
        sock = self._socket
        if sock is None:
            raise ConnectionError("the connection was closed")
        left = seconds_left(until)
        self._used = until - left
        sock.settimeout(left)
        count = sock.recv_into(into)
        if not count:
            raise EOFError
        return count

    def _connect(self, until: float) -> socket.socket:
        self._check_open()
        failure: OSError = OSError("the host has no address")
        addresses = resolve(self._host, self._port, until)
        for number, (family, kind, protocol, _, address) in enumerate(addresses):
            now = time.monotonic()
            # the first address may not answer
            share = now + (until - now) / (len(addresses) - number)
            self._socket = socket.socket(family, kind, protocol)
            self._begin = 0
            self._end = 0
            is_sound = False
            try:
                self._socket.settimeout(seconds_left(share))
                self._check_open()  # from here on `abort` ends this socket
                self._socket.connect(address)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                keep_alive(self._socket)
                if self._tls is not None:
                    self._start_tls(self._tls, share)
                is_sound = True
            except OSError as error:
                failure = error
                continue
            finally:
                if not is_sound:
                    self.drop()
            return self._socket
        raise failure

    def _start_tls(self, tls: ssl.SSLContext, until: float) -> None:
        assert self._socket is not None
        secured = tls.wrap_socket(
            self._socket,
            server_hostname=self._host,
            do_handshake_on_connect=False,
        )
        self._socket = secured
        self._check_open()
        secured.settimeout(seconds_left(until))
        secured.do_handshake()

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionError("the connection was closed")


class HttpConnectionPool:
    """Up to `most` connections to one origin, each with one request at a time. For one thread, as
    HttpConnection is.
    """

    def __init__(self, origin: SplitResult, most: int) -> None:
        self._origin = origin
        self._most = most
        self._connections: list[HttpConnection] = []
        self._pool = Pool(most, "pagoda-http")
        self._closed = False

    def serves(self, origin: SplitResult) -> bool:
        """Return whether requests to `origin` may use these connections."""
        return (origin.scheme, origin.netloc) == (
            self._origin.scheme,
            self._origin.netloc,
        )

    def head_all(
        self, targets: Sequence[str], until: float, headers: Mapping[str, str]
    ) -> list[int]:
        """Send a HEAD request for each target (at most `most`) at once; return the statuses.
        OSError if one fails.
        """
        while len(self._connections) < len(targets):
            self._connections.append(HttpConnection(self._origin))
        if self._closed:
            self.abort()
        pending: list[Future[int]] = []
        try:
            for connection, target in zip(
                self._connections, targets, strict=False
            ):
                pending.append(
                    self._pool.submit(
                        _head_status, connection, target, until, headers
                    )
                )
        except RuntimeError as error:  # no thread can be started
            raise OSError(str(error)) from None
        finally:
            # the calls use their connections until they have ended
            complete(partial(wait, pending))
        return [each.result() for each in pending]

    def abort(self) -> None:
        """Make the running calls fail now, and all later calls. From any thread."""
        self._closed = True
        for connection in list(self._connections):
            connection.abort()

    def close(self) -> None:
        """Close the connections and end the threads. Not from another thread."""
        self.abort()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for connection in self._connections:
            connection.drop()


def read_chunk(
    connection: HttpConnection,
    response: Response,
    request: GetRequest,
    until: float,
) -> int:
    """Fill the page and the destination of a request from the body; return how many bytes follow
    the header.

    RefusedError, OSError: the rest is not read, and the connection is dropped.
    """
    with connection.dropped_on_error():
        if response.length is None or response.length < HEADER_BYTES:
            raise RefusedError(
                Reason.FAILED_CHECK,
                "the value is shorter than a header, or of unknown length",
            )
        connection.read_into(request.page.data, until)
        rest_bytes = response.length - HEADER_BYTES
        connection.read_into(
            request.space_for(rest_bytes).data[:rest_bytes], until
        )
        connection.finish(response, response.length, until)
    return rest_bytes


def _head_status(
    connection: HttpConnection,
    target: str,
    until: float,
    headers: Mapping[str, str],
) -> int:
    response = connection.request("HEAD", target, until, headers)
    connection.finish(response, 0, until)
    return response.status


def _parse_head(head: bytes) -> Response:
    status = _STATUS.match(head)
    fields: dict[bytes, set[bytes]] = {}
    for line in head.split(b"\r\n")[1:-1]:
        name, colon, value = line.partition(b":")
        if not colon or name != name.strip():
            raise ConnectionError("malformed head of the response")
        fields.setdefault(name.lower(), set()).add(value.strip().lower())
    lengths = fields.get(b"content-length", set())
    if (
        status is None
        or len(lengths) > 1
        or not all(re.fullmatch(rb"\d{1,18}", each) for each in lengths)
    ):
        raise ConnectionError("malformed head of the response")
    codings = fields.get(b"transfer-encoding")
    length = int(lengths.pop()) if lengths and codings is None else None
    closes = b"close" in fields.get(b"connection", set()) or head.startswith(
        b"HTTP/1.0"
    )
    challenges = [
        each.decode("latin-1") for each in fields.get(b"www-authenticate", ())
    ]
    proof = b"".join(fields.get(b"pagoda-proof", ())).decode("latin-1")
    return Response(
        int(status[1]), length, codings == {b"chunked"}, closes, challenges, proof
    )


_Address = tuple[
    socket.AddressFamily,
    socket.SocketKind,
    int,
    str,
    tuple[str, int] | tuple[str, int, int, int],
]


# resolutions that have no answer yet, by host and port
_asked: dict[tuple[str, int], Future[list[_Address]]] = {}


def resolve(host: str, port: int, until: float) -> list[_Address]:
    """Return the addresses of a host. OSError: it is not known, or not by `until`.

    The system's resolver has no deadline: a late lookup continues on its thread, which all callers
    for that host share.
    """
    own = Answer[list[_Address]]()
    answer = _asked.setdefault((host, port), own)
    if answer is own:
        own.add_done_callback(lambda _: _asked.pop((host, port), None))
        if start_thread(_resolve, "pagoda-resolve", own, host, port) is None:
            own.set_exception(OSError(NO_THREAD))
    try:
        return answer.result(seconds_left(until))
    except TimeoutError:
        raise TimeoutError(LATE) from None


def _resolve(answer: Future[list[_Address]], host: str, port: int) -> None:
    try:
        answer.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))  # type: ignore[arg-type, unused-ignore]
    except (OSError, ValueError):  # ValueError: no host can have such a name
        answer.set_exception(OSError("the host is not known (DNS)"))
    except Exception as error:  # noqa: BLE001
        # a boundary: without an answer, nobody would ask for this host again
        answer.set_exception(
            OSError(f"the host cannot be looked up: {type(error).__name__}")
        )


call_in_child(_asked.clear)  # a child has none of the threads


def listed_paths(listing: bytes) -> list[str]:
    """Return the paths in a WebDAV listing. The XML is not parsed, and so its entities are not
    expanded.
    """
    named = re.findall(
        rb"<(?:\w{1,20}:)?href\s*>\s*([^<\s]{1,4096})\s*<", listing
    )
    return [
        unquote(urlsplit(each.decode("latin-1")).path).strip("/")
        for each in named
    ]
