"""A TCP proxy on loopback that behaves like a bad network on demand."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from pagoda.tiers.remote.redis import RedisClient

_PIECE_BYTES = 64 << 10
_SLICE_SECONDS = 0.02  # how soon a new fault is noticed


@dataclass(frozen=True)
class Fault:
    """The faults of one direction. Byte counts start again at zero, on each connection, when a
    fault is set.
    """

    delay_seconds: float = 0.0  # before each piece
    bytes_per_second: float = 0.0  # 0: as fast as possible
    piece_bytes: int = _PIECE_BYTES
    # both directions end when so many bytes have passed
    cut_at: int | None = None
    reset: bool = False  # the end is a reset, not a normal close
    corrupt: range = range(0)  # bytes at these counts are inverted
    lose: range = range(0)  # bytes at these counts are dropped
    stall: bool = False  # nothing passes any more, without an error


WELL = Fault()
STALLED = Fault(stall=True)


class Proxy:
    """Forwards bytes between the clients of `port` and `target`; `up` is towards the target.
    Thread-safe.

    `connections` counts accepted connections, `up_bytes` and `down_bytes` the bytes received from
    each side.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.up = self.down = WELL
        self.connections = self.up_bytes = self.down_bytes = 0
        self._lock = threading.Lock()
        self._pairs: set[_Pair] = set()
        self._closed = False
        self.port = 0
        self.accept()

    def accept(self) -> None:
        """Take connections (again)."""
        self._listener = socket.create_server(
            ("127.0.0.1", self.port), backlog=64
        )
        self.port = self._listener.getsockname()[1]
        threading.Thread(
            target=self._serve, args=(self._listener,), daemon=True
        ).start()

    def refuse(self) -> None:
        """Accept no more connections: the kernel refuses them. Open ones continue."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def both(self, fault: Fault) -> None:
        """Set one fault for both directions."""
        self.up = self.down = fault

    def heal(self) -> None:
        """Remove all faults. Stalled bytes continue."""
        self.both(WELL)

    def cut(self, reset: bool = True) -> None:
        """End all connections now."""
        with self._lock:
            pairs = self._pairs
            self._pairs = set()
        for pair in pairs:
            pair.end(reset)

    def forget(self) -> None:
        """Drop all bytes of the present connections, like a NAT that forgot them; new connections
        work.
        """
        with self._lock:
            for pair in self._pairs:
                pair.forgotten = True

    @property
    def open_connections(self) -> int:
        """Return the present number of connections."""
        with self._lock:
            return len(self._pairs)

    @property
    def traffic(self) -> tuple[int, int]:
        """Return connections and bytes from the client so far: if equal twice, no client called in
        between.
        """
        with self._lock:
            return self.connections, self.up_bytes

    def close(self) -> None:
        """End everything. Idempotent."""
        self._closed = True
        self.refuse()
        self.cut()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
            threading.Thread(
                target=self._connect, args=(client,), daemon=True
            ).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self.target, timeout=10.0)
        except OSError:
            _end(client, reset=True)
            return
        pair = _Pair(client, server)
        with self._lock:
            self._pairs.add(pair)
        if self._closed:
            self.cut()
        for upwards in (True, False):
            threading.Thread(
                target=self._pump, args=(pair, upwards), daemon=True
            ).start()

    def _pump(self, pair: _Pair, upwards: bool) -> None:
        source, sink = (
            (pair.client, pair.server) if upwards else (pair.server, pair.client)
        )
        fault = self._fault(upwards)
        passed = 0
        try:
            while not pair.ended.is_set():
                try:
                    piece = source.recv(min(_PIECE_BYTES, fault.piece_bytes))
                except TimeoutError:
                    continue
                if not piece:
                    break
                self._count(upwards, len(piece))
                if pair.forgotten:
                    continue
                if (now := self._unstalled(pair, upwards)) is not fault:
                    fault = now
                    passed = 0
                if not _pass(pair, sink, piece, fault, passed):
                    pair.end(fault.reset)
                passed += len(piece)
        except OSError:
            pass
        finally:
            with self._lock:
                self._pairs.discard(pair)
            pair.end(False)

    def _unstalled(self, pair: _Pair, upwards: bool) -> Fault:
        """Return the present fault of this direction; wait while nothing may pass."""
        while (fault := self._fault(upwards)).stall and not pair.ended.wait(
            _SLICE_SECONDS
        ):
            pass
        return fault

    def _fault(self, upwards: bool) -> Fault:
        return self.up if upwards else self.down

    def _count(self, upwards: bool, nbytes: int) -> None:
        with self._lock:
            if upwards:
                self.up_bytes += nbytes
            else:
                self.down_bytes += nbytes


class _Pair:
    """The two sockets of one connection."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.ended = threading.Event()
        self.forgotten = False
        for side in (client, server):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            side.settimeout(_SLICE_SECONDS)

    def end(self, reset: bool) -> None:
        """End both sides. Idempotent."""
        if not self.ended.is_set():
            self.ended.set()
            _end(self.client, reset)
            _end(self.server, reset)


def _end(side: socket.socket, reset: bool) -> None:
    with contextlib.suppress(OSError):
        if reset:
            side.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        else:
            side.shutdown(socket.SHUT_RDWR)
    side.close()


def _pass(
    pair: _Pair, sink: socket.socket, piece: bytes, fault: Fault, passed: int
) -> bool:
    """Forward a piece, damaged according to the fault; return False if the connection must end
    now.
    """
    wait = fault.delay_seconds + (
        len(piece) / fault.bytes_per_second if fault.bytes_per_second else 0.0
    )
    if wait and pair.ended.wait(wait):
        return False
    end = passed + len(piece)
    whole = fault.cut_at is None or end < fault.cut_at
    spoilt = bytearray(
        piece if whole else piece[: max(0, (fault.cut_at or 0) - passed)]
    )
    for at in _within(fault.corrupt, passed, passed + len(spoilt)):
        spoilt[at] ^= 0xFF
    lost = _within(fault.lose, passed, passed + len(spoilt))
    if lost:
        del spoilt[lost.start : lost.stop]
    _send(pair, sink, spoilt)
    return whole


def _within(counts: range, begin: int, end: int) -> range:
    """Return the part of `counts` in [begin, end), relative to `begin`."""
    return range(
        max(counts.start, begin) - begin,
        max(counts.start, begin, min(counts.stop, end)) - begin,
    )


def _send(pair: _Pair, sink: socket.socket, data: bytearray) -> None:
    view = memoryview(data)
    while view.nbytes and not pair.ended.is_set():
        with contextlib.suppress(TimeoutError):
            view = view[sink.send(view) :]


@contextlib.contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    """Open a proxy to a port of this machine, and close it afterwards."""
    proxy = Proxy(("127.0.0.1", port))
    try:
        yield proxy
    finally:
        proxy.close()


def through(proxy: Proxy, prefix: str) -> RedisClient:
    """Return the client of a Redis behind a proxy."""
    return RedisClient(f"redis://127.0.0.1:{proxy.port}", prefix=prefix)


@contextlib.contextmanager
def black_hole() -> Iterator[int]:
    """Return a port that never answers a connection: its queue is full, and the kernel drops new
    connections.
    """
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as listener,
        contextlib.ExitStack() as fillers,
    ):
        port = listener.getsockname()[1]
        for _ in range(4):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield port
