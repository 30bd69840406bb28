"""Connections to the server behind the proxy, for requests whose body is known and for our own.

    ServerConnections    makes them, and keeps one for some milliseconds
    ServerConnection     one request at a time, and its answer as it comes

Called by `upstream`. aiohttp's client takes three times as much processor time for a short request.
llhttp reads the answers, through `httptools`.

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
from collections.abc import AsyncIterator

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from multidict import CIMultiDict

_CONNECT_SECONDS = 10.0
# far less than any server waits: its thread is free again when others need it
_KEPT_SECONDS = 0.05
# of a head, or of what is neither head nor body
_MOST_OTHER_BYTES = 256 << 10
_MOST_UNREAD_BYTES = 1 << 20
# a larger body is not copied to be sent in one piece with the head
_MOST_JOINED_BYTES = 64 << 10
_WAITS = re.compile(r"timeout\s*=\s*[1-9]", re.IGNORECASE)
_Address = tuple[object, ...]


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
        # of the answer
        self.headers = CIMultiDict[str]()
        # None: there is no answer to read
        self._parser: HttpResponseParser | None = None
        # since the last part of the body
        self._other_bytes = 0
        # after the end of the answer
        self._has_more = False
        self._pieces: list[bytes] = []
        self._unread_bytes = 0
        self._is_paused = False
        self._ends_with_connection = False
        self._waits = False
        self._is_complete = False

    # ---- for its owner

    async def ask(self, head: bytes, body: bytes) -> None:
        """Send a request, and wait for the head of its answer. Raises BrokenAnswer."""
        self._begin()
        self._parser = HttpResponseParser(self)
        # which RFC 9112 allows
        self._parser.set_dangerous_leniencies(
            lenient_spaces_after_chunk_size=True
        )
        transport = self._transport
        assert transport is not None
        if len(body) <= _MOST_JOINED_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)
        while not self.status:
            await self._next()

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
            and not self._has_more
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
        if self._parser is None:
            # nobody has asked for that
            self._has_more = True
            return
        self._other_bytes += len(data)
        try:
            self._parser.feed_data(data)
            if self._other_bytes > _MOST_OTHER_BYTES:
                raise HttpParserError("its head or its trailers have no end")
        except (HttpParserError, HttpParserUpgrade) as error:
            if self._is_complete:
                self._has_more = True
            else:
                why = str(error.__context__ or error)
                self._lost = BrokenAnswer(f"its answer is no HTTP: {why}")
                self.close()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Take the end of the connection."""
        if self._lost is None:
            if self._ends_with_connection and error is None:
                self._is_complete = True
            why = "" if error is None else f": {error}"
            self._lost = BrokenAnswer(f"it closed the connection{why}")
        self._parser = None
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    # ---- for the parser

    def on_message_begin(self) -> None:
        """Begin an answer."""
        if self._is_complete:
            raise ValueError("there is another answer")
        # those of a head that announced this one
        self.headers.clear()
        self.reason = ""

    def on_status(self, reason: bytes) -> None:
        """Take what follows the status, or a part of it."""
        self.reason += reason.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, if it is none after the body."""
        if not self.status:
            self.headers.add(
                name.decode("latin-1"),
                value.strip().decode(errors="surrogateescape"),
            )

    def on_headers_complete(self) -> None:
        """Take the end of a head."""
        parser = self._parser
        assert parser is not None
        status = parser.get_status_code()
        if status < 200:
            # another head follows
            return
        coding = self.headers.get("Transfer-Encoding")
        if coding is not None and coding.lower() != "chunked":
            raise ValueError(f"Transfer-Encoding: {coding}")
        self.status = status
        self._other_bytes = 0
        if "Content-Length" in self.headers:
            waits = _WAITS.search(self.headers.get("Keep-Alive", ""))
            self._waits = waits is not None and parser.should_keep_alive()
        else:
            self._ends_with_connection = coding is None

    def on_body(self, piece: bytes) -> None:
        """Take a part of the body."""
        self._other_bytes = 0
        self._pieces.append(piece)
        self._unread_bytes += len(piece)
        if self._unread_bytes > _MOST_UNREAD_BYTES and not self._is_paused:
            transport = self._transport
            if transport is not None and not transport.is_closing():
                self._is_paused = True
                transport.pause_reading()

    def on_message_complete(self) -> None:
        """Take the end of an answer."""
        if self.status:
            self._is_complete = True
            self._parser = None


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
