"""A socket that publishes to routers by ZMTP 3, the protocol of ZeroMQ, with a bound on all that a
stranger costs.

`publisher` and vLLM's publisher make one `EventSocket`. A PUB socket of libzmq runs in the engine's
process too, and there anybody who can connect decides what it costs: libzmq keeps 50 bytes for each
byte of a subscription, accepts until the process has no more files, and gives the memory back to
nobody. Here,

- at most 32 connections are open. For one more, another ends: first of those that have not
  subscribed, then of the address with the most connections, then the one that has been quiet for
  longest;
- a frame of a client has at most 1 KiB, and 256 frames may come at once, 10 in a second after that.
  A subscription that matches the topic is kept as a number, another one not at all;
- all messages that wait for slow routers are at most 128 MiB. A router that is further behind than
  its share misses messages; it gets everything when it connects again;
- the thread takes at most a fifth of a processor, whatever arrives.

The protocol, as far as it is used (https://rfc.zeromq.org/spec/23): both sides send a greeting of
64 bytes, then the command READY with their type of socket. Then the client sends subscriptions, as
messages (3.0) or as commands (3.1), and this side sends messages. A frame is: flags, length (1
byte, or 8 with the flag LONG), body.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import selectors
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from pagoda.base.clock import Deadline
from pagoda.base.errors import ConfigError
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.base.signal_safe_threads import NO_THREAD, begin

MOST_CONNECTIONS = 32
MOST_BEHIND_BYTES = 128 << 20  # all messages that wait for routers
_MOST_FRAME_BYTES = 1 << 10  # of a client
_MOST_FRAMES = 256  # of a client, at once; after that
_FRAMES_A_SECOND = 10.0
_READ_BYTES = 4096
_HANDSHAKE_SECONDS = 10.0
# how long to wait for the address of a socket that was just closed
_IN_USE_SECONDS = 0.5
_TICK_SECONDS = 1.0  # how often to look for handshakes that are late
_ACCEPTS = 16  # in one turn of the thread
_BURST_SECONDS = 0.001  # processor time after which the thread rests
_REST = 4  # a rest is 4 times as long as a burst
_LONGEST_REST_SECONDS = 0.1
# the pause after an accept for which this process has no file or no memory
_NO_FILES_SECONDS = 1.0
_NETWORK_BYTES = 8  # of an IPv6 address: one machine has all addresses of a /64
_SIOCGIFADDR = 0x8915  # Linux: the address of a network interface

_MORE = 1
_LONG = 2
_COMMAND = 4
_GREETING = (
    b"\xff" + bytes(8) + b"\x7f" + b"\3\0" + b"NULL".ljust(20, b"\0")
).ljust(64, b"\0")
_SUBSCRIBERS = (b"SUB", b"XSUB")

_log = guarded_logger("pagoda.events")
_lines = RateLimitedLog()


class _Rude(Exception):
    """A client does not speak the protocol, or asks too much."""


class _Client:
    """One connection. `prefixes`: the lengths of its subscriptions; each is a beginning of the
    topic.
    """

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock = sock
        self.address = address
        self.since = self.quiet_since = time.monotonic()
        self.received = bytearray()
        self.frames_left = float(_MOST_FRAMES)
        self.is_greeted = False
        self.is_ready = False
        self.prefixes: set[int] = set()
        self.waiting: deque[memoryview] = deque()
        self.waiting_bytes = 0

    def frames(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Take in what has arrived; yield flags and body of each whole frame. Raises _Rude."""
        now = time.monotonic()
        more = _FRAMES_A_SECOND * (now - self.quiet_since)
        self.frames_left = min(self.frames_left + more, float(_MOST_FRAMES))
        self.quiet_since = now
        self.received += data
        buffer = self.received
        if not self.is_greeted:
            if buffer[:1] != b"\xff" or (len(buffer) > 10 and buffer[10] < 3):
                raise _Rude("it does not speak ZMTP 3")
            if len(buffer) < len(_GREETING):
                return
            if bytes(buffer[12:32]).rstrip(b"\0") != b"NULL":
                raise _Rude("it wants a security mechanism")
            del buffer[: len(_GREETING)]
            self.is_greeted = True
        while len(buffer) >= 2:
            flags = buffer[0]
            begin = 9 if flags & _LONG else 2
            if len(buffer) < begin:
                return
            length = (
                struct.unpack(">Q", buffer[1:9])[0]
                if flags & _LONG
                else buffer[1]
            )
            if length > _MOST_FRAME_BYTES:
                raise _Rude(f"it sends a frame of {length:,} bytes")
            if len(buffer) < begin + length:
                return
            self.frames_left -= 1.0
            if self.frames_left < 0.0:
                raise _Rude("it subscribes too often")
            body = bytes(buffer[begin : begin + length])
            del buffer[: begin + length]
            yield flags, body


class EventSocket:
    """A listening socket and its thread. `send`, `newcomers` and `close` are thread-safe and never
    wait for a client.

    Example:
        >>> events = EventSocket("tcp://127.0.0.1:*", topic=b"kv")
        >>> events.send([b"kv", b"a message of two frames"])  # nobody has subscribed: it is dropped
        >>> events.close()
    """

    def __init__(
        self, endpoint: str, *, topic: bytes, most_messages: int | None = None
    ) -> None:
        """Listen on `endpoint` and start the thread.

        Args:
            endpoint: "tcp://ADDRESS:PORT"; the address is one of this machine, the name of a
                network interface, or * for all; the port is a number, or * for a free one. Or
                "ipc://PATH", a Unix socket.
            topic: the first frame of all messages; subscriptions are compared with it.
            most_messages: how many messages may wait for one router; None: as many as the bytes
                allow.

        Raises OSError or ValueError if it cannot listen there, ConfigError if no thread can be
        started.
        """
        self._topic = topic
        self._most_messages = most_messages
        self._path = ""  # of a Unix socket
        self._listening = self._listen(endpoint)
        self.endpoint = self._endpoint(endpoint)
        self._lock = threading.Lock()
        # with the lock, as are the next two
        self._clients: dict[socket.socket, _Client] = {}
        self._waiting_bytes = 0
        self._subscribed = False
        # called on the thread after somebody has subscribed; it must be cheap
        self.on_subscribed: Callable[[], None] = lambda: None
        self._closed = False
        self._selector = selectors.DefaultSelector()  # only the thread uses it
        self._wake_out, self._wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._woken = False
        self._accepts_again = 0.0
        self._thread = threading.Thread(
            target=self._run, name="pagoda-events-io", daemon=True
        )
        if not begin(self._thread):
            self._end()
            raise ConfigError(NO_THREAD)

    def send(self, frames: Sequence[bytes]) -> None:
        """Send one message, of these frames, to all who have subscribed to it; those too far behind
        miss it.
        """
        message = memoryview(_message(frames))
        with self._lock:
            for client in list(self._clients.values()):
                if client.prefixes:
                    self._send_to(client, message)

    def newcomers(self) -> bool:
        """Whether somebody has subscribed since the last call, who receives what is sent from now
        on.
        """
        with self._lock:
            subscribed = self._subscribed
            self._subscribed = False
        return subscribed

    def close(self) -> None:
        """End all connections and the thread; what waits is dropped. Idempotent."""
        with self._lock:
            self._closed = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    # ---- the address -----------------------------------------------------------------------------

    def _listen(self, endpoint: str) -> socket.socket:
        kind, _, rest = endpoint.partition("://")
        if kind == "ipc" and rest:
            return self._listen_on_path(rest)
        host, _, port = rest.rpartition(":")
        if (
            kind != "tcp"
            or not host
            or not (port == "*" or (port.isdecimal() and int(port) < 65536))
        ):
            raise ValueError("write tcp://ADDRESS:PORT")
        family, address = _own_address(host)
        deadline = Deadline(_IN_USE_SECONDS)
        while True:
            listening = socket.socket(family, socket.SOCK_STREAM)
            try:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind((address, 0 if port == "*" else int(port)))
                listening.listen()
                listening.setblocking(False)
                return listening
            except OSError:
                listening.close()
                if port == "*" or deadline.passed:
                    raise
            time.sleep(0.01)

    def _listen_on_path(self, path: str) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as undo:
            undo.callback(listening.close)
            name = (
                b"\0" + os.fsencode(path[1:])
                if path.startswith("@")
                else os.fsencode(path)
            )
            if not path.startswith("@"):
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                    if probe.connect_ex(name) == 0:
                        raise OSError(f"{path} is in use")
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)  # the socket of a process that was killed
                self._path = path
            listening.bind(name)
            listening.listen()
            listening.setblocking(False)
            undo.pop_all()
        return listening

    def _endpoint(self, asked: str) -> str:
        if self._listening.family == socket.AF_UNIX:
            return asked
        host, port = self._listening.getsockname()[:2]
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        rested = time.thread_time()
        ticked = time.monotonic()
        try:
            while not self._closed:
                for key, events in self._selector.select(self._tick_seconds()):
                    try:
                        self._serve(key.fileobj, events)
                    except OSError as trouble:  # not of one client: those end
                        _lines.warn(
                            _log,
                            Reason.IO_ERROR,
                            f"routers may miss events: {trouble}",
                        )
                        time.sleep(0.01)
                now = time.monotonic()
                if now - ticked > _TICK_SECONDS:
                    ticked = now
                    self._end_late_ones(now)
                used = time.thread_time() - rested
                if used > _BURST_SECONDS:
                    time.sleep(min(_REST * used, _LONGEST_REST_SECONDS))
                    rested = time.thread_time()
        finally:
            self._end()

    def _tick_seconds(self) -> float | None:
        """Return after which time to look for what is late; None: nothing can be."""
        waits = self._accepts_again or any(
            not client.is_ready for client in list(self._clients.values())
        )
        return _TICK_SECONDS if waits else None

    def _serve(self, file: object, events: int) -> None:
        if file is self._listening:
            self._accept()
        elif file == self._wake_out:
            self._woken = False
            os.read(self._wake_out, 4096)
            self._watch()
        elif (
            isinstance(file, socket.socket)
            and (client := self._clients.get(file)) is not None
        ):
            if events & selectors.EVENT_READ:
                self._read(client)
            if events & selectors.EVENT_WRITE and file in self._clients:
                with self._lock:
                    self._flush(client)
                self._watch_one(client)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, address = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as trouble:
                self._accepts_again = time.monotonic() + _NO_FILES_SECONDS
                self._selector.unregister(self._listening)
                _lines.warn(
                    _log, Reason.IO_ERROR, f"a router cannot connect: {trouble}"
                )
                return
            with self._lock:
                if len(self._clients) >= MOST_CONNECTIONS:
                    self._forget(self._least())
            try:
                sock.setblocking(False)
                if sock.family != socket.AF_UNIX:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    sock.setsockopt(
                        socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
                    )  # a machine that is gone leaves no gap
                sock.send(_GREETING)
                self._selector.register(sock, selectors.EVENT_READ)
            except OSError:
                sock.close()
                continue
            with self._lock:
                self._clients[sock] = _Client(sock, _client_address(address))

    def _least(self) -> _Client:
        """Return the client that ends for another one. See the head of this module."""
        places = Counter(client.address for client in self._clients.values())
        return min(
            self._clients.values(),
            key=lambda one: (
                bool(one.prefixes),
                -places[one.address],
                one.quiet_since,
            ),
        )

    def _read(self, client: _Client) -> None:
        try:
            data = client.sock.recv(_READ_BYTES)
            if not data:
                raise ConnectionError
            for flags, body in client.frames(data):
                self._take(client, flags, body)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, _Rude) as trouble:
            if isinstance(trouble, _Rude):
                _lines.warn(
                    _log,
                    Reason.IO_ERROR,
                    f"{client.address or 'a client'} is disconnected: {trouble}",
                )
            with self._lock:
                self._forget(client)

    def _take(self, client: _Client, flags: int, body: bytes) -> None:
        """Act on one frame of a client."""
        if flags & _COMMAND:
            name = body[1 : 1 + body[0]] if body else b""
            rest = body[1 + len(name) :]
            if name == b"READY":
                if _property(rest, b"socket-type") not in _SUBSCRIBERS:
                    raise _Rude("it is not a subscriber")
                client.is_ready = True
                client.sock.send(
                    _frame(
                        _COMMAND,
                        b"\5READY"
                        + b"\x0bSocket-Type"
                        + struct.pack(">I", 3)
                        + b"PUB",
                    )
                )
            elif name == b"PING" and client.is_ready:
                with self._lock:  # not into the middle of a message
                    self._send_to(
                        client,
                        memoryview(_frame(_COMMAND, b"\4PONG" + rest[2:18])),
                    )
            elif name in (b"SUBSCRIBE", b"CANCEL"):
                self._subscribe(client, rest, name == b"SUBSCRIBE")
        elif body[:1] in (b"\0", b"\1"):
            self._subscribe(client, body[1:], body[:1] == b"\1")

    def _subscribe(self, client: _Client, prefix: bytes, is_new: bool) -> None:
        if not client.is_ready:
            raise _Rude("it subscribes before its handshake")
        if not self._topic.startswith(prefix):
            # it can match nothing: routers of several engines subscribe to the topics of all
            return
        with self._lock:
            if is_new:
                client.prefixes.add(len(prefix))
                self._subscribed = True
            else:
                client.prefixes.discard(len(prefix))
        if is_new:
            self.on_subscribed()

    def _end_late_ones(self, now: float) -> None:
        with self._lock:
            for client in list(self._clients.values()):
                if (
                    not client.is_ready
                    and now - client.since > _HANDSHAKE_SECONDS
                ):
                    self._forget(client)
        if self._accepts_again and now > self._accepts_again:
            self._accepts_again = 0.0
            self._selector.register(self._listening, selectors.EVENT_READ)

    # ---- sending: with the lock, on any thread ---------------------------------------------------

    def _send_to(self, client: _Client, message: memoryview) -> None:
        if client.waiting and not self._may_wait(client, len(message)):
            return
        client.waiting.append(message)
        client.waiting_bytes += len(message)
        self._waiting_bytes += len(message)
        if len(client.waiting) == 1:
            self._flush(client)
            if client.waiting and not self._has_room(client, 0):
                # a part of a message cannot be left out
                self._shut(client)
            if client.waiting:
                self._wake()

    def _may_wait(self, client: _Client, nbytes: int) -> bool:
        """Return whether one more message may wait for a client."""
        if (
            self._most_messages is not None
            and len(client.waiting) >= self._most_messages
        ):
            return False
        return self._has_room(client, nbytes)

    def _has_room(self, client: _Client, nbytes: int) -> bool:
        """Return whether so much more may wait for a client; end others that are further behind for
        it.
        """
        while self._waiting_bytes + nbytes > MOST_BEHIND_BYTES:
            last = max(self._clients.values(), key=lambda one: one.waiting_bytes)
            if last is client:
                return False
            self._shut(last)
        return True

    def _flush(self, client: _Client) -> None:
        """Send what the kernel takes now. A client that is gone is shut: the thread sees its
        end.
        """
        waiting = client.waiting
        try:
            while waiting:
                sent = client.sock.send(waiting[0])
                client.waiting_bytes -= sent
                self._waiting_bytes -= sent
                if sent < len(waiting[0]):
                    waiting[0] = waiting[0][sent:]
                else:
                    waiting.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._shut(client)

    def _shut(self, client: _Client) -> None:
        """Drop what waits for a client and shut its connection, on any thread; this thread of ours
        then forgets it.
        """
        self._waiting_bytes -= client.waiting_bytes
        client.waiting_bytes = 0
        client.waiting.clear()
        client.prefixes.clear()
        with contextlib.suppress(OSError):
            client.sock.shutdown(socket.SHUT_RDWR)

    def _forget(self, client: _Client) -> None:
        """Close a connection. Only on the thread."""
        self._shut(client)
        self._clients.pop(client.sock, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.sock)
        client.sock.close()

    # ---- waking the thread -----------------------------------------------------------------------

    def _wake(self) -> None:
        """Let the thread watch for clients to which something waits, or end."""
        if not self._woken:
            self._woken = True
            # full: it wakes anyway; or it has ended
            with contextlib.suppress(OSError):
                os.write(self._wake_in, b"\0")

    def _watch(self) -> None:
        for client in list(self._clients.values()):
            self._watch_one(client)

    def _watch_one(self, client: _Client) -> None:
        events = selectors.EVENT_READ | (
            selectors.EVENT_WRITE if client.waiting else 0
        )
        with contextlib.suppress(KeyError, ValueError):
            self._selector.modify(client.sock, events)

    def _end(self) -> None:
        """Close everything. On the thread, or if there is none."""
        with self._lock:
            self._closed = True
            for client in list(self._clients.values()):
                self._forget(client)
        self._listening.close()
        self._selector.close()
        os.close(self._wake_out)
        # `_wake` of another thread may still write
        wake_in = self._wake_in
        self._wake_in = -1
        os.close(wake_in)
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def _message(frames: Sequence[bytes]) -> bytes:
    last = len(frames) - 1
    return b"".join(
        _frame(_MORE if n < last else 0, body) for n, body in enumerate(frames)
    )


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | _LONG,)) + struct.pack(">Q", len(body)) + body


def _property(metadata: bytes, wanted: bytes) -> bytes:
    """Return a property of READY. Raises _Rude."""
    at = 0
    try:
        while at < len(metadata):
            end = at + 1 + metadata[at]
            name = metadata[at + 1 : end]
            (length,) = struct.unpack_from(">I", metadata, end)
            if name.lower() == wanted:
                return metadata[end + 4 : end + 4 + length]
            at = end + 4 + length
    except (struct.error, IndexError):
        raise _Rude("its handshake is damaged") from None
    return b""


def _own_address(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the family and the address to bind, of an address, *, or the name of a network
    interface.
    """
    if host == "*":
        return socket.AF_INET, ""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                found = fcntl.ioctl(
                    probe,
                    _SIOCGIFADDR,
                    struct.pack("256s", os.fsencode(host)[:15]),
                )
            except OSError:
                raise ValueError(
                    f"{host} is no address and no network interface of this machine"
                ) from None
        return socket.AF_INET, socket.inet_ntoa(found[20:24])
    return (socket.AF_INET6 if address.version == 6 else socket.AF_INET), str(
        address
    )


def _client_address(peer: object) -> str:
    """Return who is connected: an address, of IPv6 its network; an empty string on a Unix
    socket.
    """
    if not isinstance(peer, tuple):
        return ""
    address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped or address.packed[:_NETWORK_BYTES].hex())
    return str(address)
