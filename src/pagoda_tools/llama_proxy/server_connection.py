"""Connections to the server behind the proxy, for requests whose body is known and for our own.

    ServerConnections    makes them, and keeps one for some milliseconds
    ServerConnection     one request at a time, and its answer as it comes

Called by `upstream`. aiohttp's client takes three times as much processor time for a short request.

A request is never sent twice unless repeating it changes nothing. So one goes over a kept
connection only if

1. the answer before it came whole, had a length, and said how long the server waits for the next
   request (`Keep-Alive: timeout=`): after streams llama.cpp's server closes without a word;
2. that was a moment ago: one of the server's few threads waits for each open connection;
3. nothing came since, and above all no end of the connection, which is looked for right before.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Mapping

from multidict import CIMultiDict

_CONNECT_SECONDS = 10.0
# far less than any server waits: its thread is free again when others need it
_KEPT_SECONDS = 0.05
_MOST_HEAD_BYTES = 256 << 10
_MOST_UNREAD_BYTES = 1 << 20
_MOST_CHUNK_BYTES = 256 << 20
# a larger body is not copied to be sent in one piece with the head
_MOST_JOINED_BYTES = 64 << 10
_WAITS = re.compile(rb"timeout\s*=\s*[1-9]")
_FRAMING = (
    b"transfer-encoding",
    b"content-length",
    b"keep-alive",
    b"connection",
)
_WITHOUT_BODY = (204, 304)
_LINE = b"\r\n"
_Address = tuple[object, ...]
_EMPTY_LINE = b"\r\n\r\n"


class BrokenAnswer(ConnectionError):
    """The server ended a connection before the end of its answer, or that is no HTTP."""


class ServerConnection(asyncio.Protocol):
    """One connection: a request, then its answer, which has a status, headers and pieces.

    For one task at a time. Its owner gives it back, or closes it.
    """

    def __init__(self, sock: socket.socket) -> None:
        """`sock`: is connected; the connection closes it."""
        self._socket = sock
        self._transport: asyncio.Transport | None = None
        self._changed: asyncio.Future[None] | None = None
        self._lost: Exception | None = None
        # no request went over it before this one
        self.is_new = True
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        self.reason = ""
        self._head_lines: list[bytes] = []
        # of what came and is not part of a piece yet
        self._buffer = bytearray()
        self._pieces: list[bytes] = []
        self._unread_bytes = 0
        self._is_paused = False
        # of the body; None: chunks, or all until the end of the connection
        self._left_bytes: int | None = None
        self._is_chunked = False
        self._waits = False
        self._is_complete = False

    # ---- for its owner

    async def ask(self, head: bytes, body: bytes) -> None:
        """Send a request, and wait for the head of its answer. Raises BrokenAnswer."""
        self._begin()
        transport = self._transport
        assert transport is not None
        if len(body) <= _MOST_JOINED_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)
        while not self.status:
            await self._next()

    @property
    def headers(self) -> CIMultiDict[str]:
        """The headers of the answer."""
        headers = CIMultiDict[str]()
        for line in self._head_lines:
            name, _, value = line.partition(b":")
            headers.add(
                name.decode("latin-1"),
                value.strip().decode(errors="surrogateescape"),
            )
        return headers

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the answer as they come. Raises BrokenAnswer."""
        while True:
            while not self._pieces:
                if self._is_complete:
                    return
                await self._next()
            yield self._taken()

    async def read(self) -> bytes:
        """Return what is left of the answer. Raises BrokenAnswer."""
        if self._is_complete:
            return self._taken()
        return b"".join([piece async for piece in self.pieces()])

    @property
    def may_be_kept(self) -> bool:
        """Whether another request can follow."""
        transport = self._transport
        return (
            self._is_complete
            and self._waits
            and not self._buffer
            and self._lost is None
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    @property
    def was_closed_unasked(self) -> bool:
        """Whether the server has closed it as a kept one, without a word to this request."""
        return not self.is_new and not self.status and self._lost is not None

    @property
    def is_open(self) -> bool:
        """Whether the server has not closed it, as far as this machine knows now."""
        if not self.may_be_kept:
            return False
        try:
            # also what the loop has not been told yet
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Close it; the server stops computing if its answer has not ended."""
        if self._transport is not None:
            # what was not sent is not waited for
            self._transport.abort()

    def _taken(self) -> bytes:
        pieces = self._pieces
        self._pieces = []
        self._unread_bytes = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _next(self) -> None:
        """Wait until something came."""
        if (lost := self._lost) is not None:
            raise lost
        self._changed = asyncio.get_running_loop().create_future()
        try:
            await self._changed
        finally:
            self._changed = None

    # ---- for the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember how to write."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        try:
            self._take(data)
        except ValueError as error:
            self._lost = BrokenAnswer(f"its answer is no HTTP: {error}")
            self.close()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Take the end of the connection."""
        if self._lost is None:
            is_body = self.status and self._left_bytes is None
            if is_body and not self._is_chunked and error is None:
                self._is_complete = True
            why = "" if error is None else f": {error}"
            self._lost = BrokenAnswer(f"it closed the connection{why}")
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _take(self, data: bytes) -> None:
        if not self.status:
            self._buffer += data
            if not self._has_head():
                return
            data = bytes(self._buffer)
            self._buffer.clear()
        if self._is_complete:
            # nobody has asked for that
            self._buffer += data
        elif self._left_bytes is not None:
            self._add(data[: self._left_bytes])
            self._buffer += data[self._left_bytes :]
            self._left_bytes = max(self._left_bytes - len(data), 0)
            self._is_complete = not self._left_bytes
        elif self._is_chunked:
            self._take_chunks(data)
        else:
            self._add(data)

    def _has_head(self) -> bool:
        """Take the heads that came; return whether that of the answer is one of them."""
        while (end := self._buffer.find(_EMPTY_LINE)) >= 0:
            head = bytes(self._buffer[:end])
            del self._buffer[: end + len(_EMPTY_LINE)]
            self._take_head(head)
            if self.status:
                return True
        if len(self._buffer) > _MOST_HEAD_BYTES:
            raise ValueError("its head has no end")
        return False

    def _take_head(self, head: bytes) -> None:
        first, *lines = head.split(_LINE)
        version, status, *reason = first.split(b" ", 2)
        if not version.startswith(b"HTTP/1."):
            raise ValueError(first[:20].decode("latin-1"))
        number = int(status)
        if 100 <= number < 200:
            # another head follows
            return
        framing = dict.fromkeys(_FRAMING, b"")
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon or name != name.strip():
                raise ValueError("a header has no name")
            name = name.lower()
            if name in framing:
                framing[name] = value.strip().lower()
        self.status = number
        self.reason = b"".join(reason).decode("latin-1")
        self._head_lines = lines
        self._take_framing(framing)

    def _take_framing(self, framing: Mapping[bytes, bytes]) -> None:
        """Remember how long the body is, and what follows it."""
        coding = framing[b"transfer-encoding"]
        length = framing[b"content-length"]
        if self.status in _WITHOUT_BODY:
            self._left_bytes = 0
        elif coding:
            if coding != b"chunked":
                raise ValueError(f"Transfer-Encoding: {coding.decode('latin-1')}")
            self._is_chunked = True
        elif length:
            if not length.isdigit():
                raise ValueError(f"Content-Length: {length.decode('latin-1')}")
            self._left_bytes = int(length)
            waits = _WAITS.search(framing[b"keep-alive"]) is not None
            self._waits = waits and b"close" not in framing[b"connection"]
        self._is_complete = self._left_bytes == 0

    def _take_chunks(self, data: bytes) -> None:
        came: bytes | bytearray = data
        if self._buffer:
            self._buffer += data
            came = self._buffer
        begin = 0
        while (line_end := came.find(_LINE, begin)) >= 0:
            size = _chunk_bytes(came[begin:line_end])
            if not size:
                # there may be trailers, which nobody needs
                end = came.find(_EMPTY_LINE, line_end)
                if end >= 0:
                    self._is_complete = True
                    begin = end + len(_EMPTY_LINE)
                break
            chunk = line_end + len(_LINE)
            end = chunk + size
            if len(came) < end + len(_LINE):
                break
            if not came.startswith(_LINE, end):
                raise ValueError("a chunk has another length")
            self._add(bytes(came[chunk:end]))
            begin = end + len(_LINE)
        if came is data:
            self._buffer += data[begin:]
        else:
            del self._buffer[:begin]
        if len(self._buffer) > _MOST_CHUNK_BYTES:
            raise ValueError("a chunk has no end")

    def _add(self, piece: bytes) -> None:
        if not piece:
            return
        self._pieces.append(piece)
        self._unread_bytes += len(piece)
        if self._unread_bytes > _MOST_UNREAD_BYTES and not self._is_paused:
            transport = self._transport
            if transport is not None and not transport.is_closing():
                self._is_paused = True
                transport.pause_reading()


class ServerConnections:
    """The connections to one server. For the event loop."""

    def __init__(self, host: str, port: int) -> None:
        """Connects to nothing yet."""
        self._host = host
        self._port = port
        # that has answered
        self._address: tuple[int, _Address] | None = None
        self._kept: ServerConnection | None = None
        self._kept_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        # False: the server has closed one which it said that it would keep
        self._may_keep = True

    async def take(self) -> ServerConnection:
        """Return the kept connection, or a new one. Raises OSError."""
        kept = self._kept
        if kept is not None:
            age = asyncio.get_running_loop().time() - self._kept_at
            if age < _KEPT_SECONDS and kept.is_open:
                self._forget()
                kept.is_new = False
                return kept
            self.close()
        async with asyncio.timeout(_CONNECT_SECONDS):
            return await self._connected()

    def give_back(self, connection: ServerConnection) -> None:
        """Keep a connection for a moment, or close it."""
        if connection.was_closed_unasked:
            self._may_keep = False
        if not (self._may_keep and connection.may_be_kept):
            connection.close()
            return
        self.close()
        loop = asyncio.get_running_loop()
        self._kept = connection
        self._kept_at = loop.time()
        self._timer = loop.call_later(_KEPT_SECONDS, self.close)

    def close(self) -> None:
        """Close the kept one."""
        if self._kept is not None:
            self._kept.close()
        self._forget()

    def _forget(self) -> None:
        self._kept = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _connected(self) -> ServerConnection:
        if self._address is not None:
            try:
                return await _connect(*self._address)
            except OSError:
                # the name may mean another one now
                self._address = None
        found = await asyncio.get_running_loop().getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM
        )
        for number, (family, _, _, _, address) in enumerate(found):
            try:
                connection = await _connect(family, address)
            except OSError:
                if number == len(found) - 1:
                    raise
            else:
                self._address = (family, address)
                return connection
        raise OSError(f"{self._host} has no address")


async def _connect(family: int, address: _Address) -> ServerConnection:
    loop = asyncio.get_running_loop()
    sock = socket.socket(family, socket.SOCK_STREAM)
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
        connection = ServerConnection(sock)
        await loop.create_connection(lambda: connection, sock=sock)
        undo.pop_all()
    return connection


def _chunk_bytes(line: bytes | bytearray) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits.isalnum():
        raise ValueError("a chunk has no length")
    size = int(digits, 16)
    if size > _MOST_CHUNK_BYTES:
        raise ValueError(f"a chunk of {size} bytes")
    return size
