"""The connections of the server: accepts them, and decides which one ends if there are too many.

`server.serve` makes one `Connections`. Anybody can connect, and be silent, slow or endless. So the
number of connections is bounded, with those whose TLS handshake is not over. If it is reached, a
new one takes the place of another:

1. of a stranger, whose last request had no token; only then of a client that has shown it and has
  no request now;
2. among these, of the address that has the most connections;
3. among these, of the one that has been quiet for longest. A handshake is quiet from its beginning.

So a stranger who keeps all places loses them first, and keeps nobody out, not even at his own
address.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import ipaddress
import socket
import ssl
import time
import traceback
from collections import Counter
from collections.abc import Callable

from aiohttp import web
from aiohttp.http import HttpProcessingError

from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda_tools.serve.access import (
    CallerConnection,
    ServeLimits,
    break_connection,
)

_LINGERING_SECONDS = 2.0  # to drop the rest of a body that is not read
_READ_BYTES = 256 << 10
# how long the end of a TLS connection waits for the client
_GOODBYE_SECONDS = 2.0
# the pause after an accept for which this process has no file or no memory
_NO_FILES_SECONDS = 1.0
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ENDED = 16  # connections have ended: then their memory is given back
_REST = 50.0  # as long as that took, before it is done again
_NETWORK_BYTES = 8  # of an IPv6 address: one machine has all addresses of a /64

_logger = guarded_logger("pagoda.serve")
_log = RateLimitedLog()


class _Guest:
    """One accepted socket, from its accept to its end. `quiet_since`: when it did something
    last.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.client = _client_of(sock)
        self.quiet_since = time.monotonic()
        # None: its handshake is not over
        self.connection: Connection | None = None

    @property
    def is_trusted(self) -> bool:
        """Whether its last request had the token."""
        return self.connection is not None and self.connection.is_trusted

    @property
    def may_end(self) -> bool:
        """Whether it may make room for another: it has no request with the token, or its client has
        left.
        """
        return self.connection is None or self.connection.may_end

    def end(self) -> None:
        """End it at once."""
        if self.connection is not None:
            break_connection(self.connection.wire)
            return
        # asyncio has the socket: it sees the end, and the handshake fails
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class Connection(CallerConnection):
    """A connection with the time since which it waits for the rest of a request's header, or for
    its close.
    """

    __slots__ = ("guest", "late_since", "leave", "wire")

    def __init__(
        self,
        guest: _Guest,
        leave: Callable[[_Guest], None],
        server: web.Server,
        idle_seconds: float,
    ) -> None:
        """Make the connection of `guest`; when it ends, `leave` is called."""
        self.guest = guest
        self.leave = leave
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=idle_seconds,
            # aiohttp's own runner passes it too
            access_log=None,  # type: ignore[arg-type]
            logger=_logger,
            read_bufsize=_READ_BYTES,
            auto_decompress=False,
            max_headers=64,
            lingering_time=_LINGERING_SECONDS,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.late_since: float | None = time.monotonic()  # None: it does not wait
        self.forget_client()
        # aiohttp drops its reference at a close, which waits until all is sent
        self.wire = transport
        if transport.get_extra_info("sslcontext") is None:
            # So a drain waits until all is sent, and the buffer can be reused. TLS makes an
            # encrypted copy at once.
            transport.set_write_buffer_limits(0)
        self.guest.connection = self
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.leave(self.guest)
        # a cycle would keep the buffers of TLS for long
        self.guest.connection = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        now = self.guest.quiet_since = time.monotonic()
        if self.late_since is None and self._current_request is None:
            self.late_since = now
        super().data_received(data)

    def log_exception(
        self, *args: object, exc_info: BaseException | None = None, **_: object
    ) -> None:
        """Log why a request could not be handled, with a limited rate: anyone can send many bad
        requests.
        """
        expected = isinstance(exc_info, HttpProcessingError)
        text = (
            repr(exc_info)
            if expected
            else "".join(traceback.format_exception(exc_info))
        )
        _log.warn(
            _logger,
            Reason.IO_ERROR,
            f"a request could not be handled: {text.strip()}",
        )

    @property
    def may_end(self) -> bool:
        """Whether it has no request with the token, or its client has left."""
        return (
            self._current_request is None
            or not self.is_trusted
            or self.wire.is_closing()
        )


class Connections:
    """The connections of a server on one listening socket. For its event loop."""

    def __init__(
        self,
        server: web.Server,
        listening: socket.socket,
        tls: ssl.SSLContext | None,
        limits: ServeLimits,
    ) -> None:
        """Take over `listening`. `tls` None: without encryption."""
        self._server = server
        self._listening = listening
        self._tls = tls
        self._limits = limits
        self._guests: set[_Guest] = set()
        self._ended = 0  # how many have ended since memory was given back
        # those between their accept and their first request
        self._arrivals: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._work = [
            self._loop.create_task(work)
            for work in (self._accept(), self._end_late_ones())
        ]

    def close(self) -> None:
        """Accept no more, and end what is not a connection yet; `web.Server.shutdown` ends the
        others.
        """
        self._listening.close()
        for task in (*self._work, *self._arrivals):
            task.cancel()

    async def _accept(self) -> None:
        self._listening.setblocking(False)
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._listening)
            except OSError as error:
                _log.warn(
                    _logger,
                    Reason.IO_ERROR,
                    f"a connection cannot be accepted: {error}",
                )
                await asyncio.sleep(
                    _NO_FILES_SECONDS if error.errno in _NO_FILES else 0
                )
                continue
            guest = _Guest(sock)
            if self._has_room():
                self._guests.add(guest)
                task = self._loop.create_task(self._let_in(guest))
                self._arrivals.add(task)
                task.add_done_callback(self._arrivals.discard)
            else:
                sock.close()
            # an accept that does not wait gives nobody else a turn
            await asyncio.sleep(0)

    def _has_room(self) -> bool:
        """Return whether one more may come; end another for it if need be. See the head of this
        module.
        """
        if len(self._guests) < self._limits.connections:
            return True
        idle = [guest for guest in self._guests if guest.may_end]
        if not idle:
            return False
        places = Counter(guest.client for guest in self._guests)
        last = min(
            idle,
            key=lambda one: (
                one.is_trusted,
                -places[one.client],
                one.quiet_since,
            ),
        )
        self._left(last)
        last.end()
        return True

    async def _let_in(self, guest: _Guest) -> None:
        """Make a connection of a socket; with TLS, after its handshake."""
        secure = self._tls is not None
        is_known = False  # what became of the socket
        try:
            await self._loop.connect_accepted_socket(
                lambda: Connection(
                    guest, self._left, self._server, self._limits.idle_seconds
                ),
                guest.sock,
                ssl=self._tls,
                ssl_handshake_timeout=self._limits.header_seconds
                if secure
                else None,
                ssl_shutdown_timeout=_GOODBYE_SECONDS if secure else None,
            )
            is_known = True
        except OSError as error:
            is_known = True
            # also of TLS: it left, was late, was ended, or speaks something else
            # else a cycle keeps its buffer of 256 KiB for long
            traceback.clear_frames(error.__traceback__)
            self._left(guest)
        finally:
            if not is_known:
                guest.sock.close()

    def _left(self, guest: _Guest) -> None:
        if guest in self._guests:
            self._guests.discard(guest)
            self._ended += 1

    async def _end_late_ones(self) -> None:
        """End, in a loop, connections whose request header is late, or whose close waits for the
        client.

        When many connections have ended, give their memory back, and rest for many times as long as
        that took.
        """
        rests_until = 0.0
        while True:
            await asyncio.sleep(self._limits.header_seconds / 10)
            begun = time.monotonic()
            if self._ended >= _ENDED and begun > rests_until:
                self._ended = 0
                await asyncio.to_thread(_give_memory_back)
                ended = time.monotonic()
                rests_until = ended + _REST * (ended - begun)
            now = time.monotonic()
            for guest in list(self._guests):
                connection = guest.connection
                if connection is None:  # a handshake has its own deadline
                    continue
                if connection.late_since is None and connection.wire.is_closing():
                    connection.late_since = now
                since = connection.late_since
                if (
                    since is not None
                    and since < now - self._limits.header_seconds
                ):
                    guest.end()


def _give_memory_back() -> None:
    """Free what connections have left in cycles, and let the C library give it back to the system,
    if it can.

    A connection that ended with an error is in a cycle with its traceback, and keeps its buffers.
    glibc keeps the buffers that it has split.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _client_of(sock: socket.socket) -> str:
    """Return who is connected: an address, of IPv6 its network; an empty string on a Unix
    socket.
    """
    try:
        peer = sock.getpeername()
    except OSError:  # it has left already
        return ""
    if sock.family != socket.AF_INET6:
        return str(peer[0]) if peer else ""
    address = ipaddress.IPv6Address(peer[0].partition("%")[0])
    return str(address.ipv4_mapped or address.packed[:_NETWORK_BYTES].hex())
