"""Which clients may ask, and whose KV they share.

The server behind the proxy has a key that nobody else knows. A client with one of the proxy's keys
gets it; the request of another goes to the server without a key, which refuses it in its own words,
but for what it answers everybody (/health).

A page of another name or origin must not reach a server without keys through a user's browser: so
Host and Origin must name this machine, unless the request has a key.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from aiohttp import web

_LOCAL = ("localhost", "127.0.0.1", "::1")


class Client(NamedTuple):
    """Who asks."""

    may_ask: bool
    salt: str  # KV is shared by those who have the same
    why_refused: str = ""


class ClientAccess:
    """The keys and names of one proxy. Thread-safe."""

    def __init__(
        self,
        keys: Sequence[str],
        hosts: Iterable[str],
        *,
        share_all: bool,
    ) -> None:
        """Prepare.

        Args:
            keys: that clients may send; none: nobody needs one.
            hosts: names that Host and Origin may have, beside this machine's and all addresses.
            share_all: all keys share what is stored; otherwise two keys share nothing.
        """
        self._keys = [key.encode() for key in keys]
        self._is_shared = share_all or len(keys) < 2
        self._hosts = {name.lower() for name in (*_LOCAL, *hosts)}
        self._hosts.add(socket.gethostname().lower())

    def client_of(self, request: web.Request) -> Client:
        """Return who sends this request."""
        sent = _sent_key(request).encode(errors="replace")
        right = [key for key in self._keys if hmac.compare_digest(key, sent)]
        if right:
            salt = "" if self._is_shared else hashlib.sha256(right[0]).hexdigest()
            return Client(True, salt)
        host = urlsplit(f"//{request.headers.get('Host', '')}").hostname
        if not self._is_here(host):
            return Client(False, "", f"--allow-host {host}")
        origin = request.headers.get("Origin")
        if origin is not None:
            name = urlsplit(origin).hostname
            if not self._is_here(name):
                return Client(False, "", f"--allow-host {name or origin}")
        return Client(not self._keys, "")

    def _is_here(self, name: str | None) -> bool:
        """Whether a name is this machine's; an address cannot be given another meaning."""
        if name is None:
            return False
        try:
            ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            return name.lower() in self._hosts
        return True


def _sent_key(request: web.Request) -> str:
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return key.strip()
    return request.headers.get("X-Api-Key", "").strip()
