"""What all connections to remote stores have in common: keepalive, and how long an idle one is trusted."""

from __future__ import annotations

import contextlib
import socket

__all__ = ["IDLE_SECONDS", "abort", "keep_alive"]

IDLE_SECONDS = 30
"""A connection that was idle for longer is replaced before its next use: a NAT or load balancer may have forgotten it,
and what is sent over it then is answered by nothing until a deadline passes."""

_INTERVAL_SECONDS, _PROBES = 10, 3  # after which the kernel gives a silent peer up


def keep_alive(connected: socket.socket) -> None:
    """Let the kernel probe this connection once it has been idle for IDLE_SECONDS; nothing on a unix socket."""
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def abort(connected: socket.socket) -> None:
    """Let whoever waits in this connection fail soon. From any thread; never raises."""
    with contextlib.suppress(OSError):
        # not SSLSocket's own: that forgets the encryption first, and a send under way would go on in the clear
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
