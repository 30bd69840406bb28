"""What all connections to remote stores share: deadlines, keepalive, abort, and how long an idle
one is trusted.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401
import socket
import time

IDLE_SECONDS = 30
"""A connection that was idle for longer is replaced before its next use: a NAT or load balancer may
have forgotten it, and then a request over it gets no answer until a deadline passes."""

LATE = "the deadline passed during a wait for the server"
# after three unanswered probes the kernel gives up a silent peer
_INTERVAL_SECONDS = 10
_PROBES = 3


def keep_alive(connected: socket.socket) -> None:
    """Let the kernel probe this connection when it has been idle for IDLE_SECONDS; does nothing on
    a unix socket.
    """
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
    connected.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_SECONDS
    )
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def abort(connected: socket.socket) -> None:
    """Make a call that waits in this connection fail soon. From any thread; never raises."""
    with contextlib.suppress(OSError):
        # not SSLSocket.shutdown: that drops the encryption first, and a running send would continue
        # in plain text
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


def seconds_left(until: float) -> float:
    """Return the seconds left until `until` (time.monotonic()); TimeoutError if there are none."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError(LATE)
    return left
