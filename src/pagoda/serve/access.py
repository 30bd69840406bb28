"""Checks who may call the server, and how often: by the token, the page's cookie and the Host header.

`server` makes one `AccessRules` and puts its `middleware` before all routes. The token is in no log and in no URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import re
import secrets
import socket
import stat
import struct
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from pagoda.errors import ConfigError
from pagoda.file_space import make_directory
from pagoda.ledger.store_state import remove_abandoned
from pagoda.serve_token_file import TOKEN_VARIABLE, default_token_file

COOKIE = "pagoda"
"""The name of the page's cookie."""
_SHORTEST_TOKEN, _LONGEST_TOKEN = 16, 1024
_WRONG_TOKENS_A_SECOND, _WRONG_BURST = 1.0, 20.0
_MOST_CLIENTS = 1024

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class ServeLimits:
    """The limits for clients.

    `header_seconds`: the time for a request's header; `start_seconds`: the time for the rest, without its bytes. A
    client that is slower than `slowest_bytes_per_second` is disconnected. `buffer_bytes`: memory for chunks from the
    disk and from clients. `requests_per_second`: the limit of each client.
    """

    connections: int = 256
    header_seconds: float = 10.0
    idle_seconds: float = 120.0
    start_seconds: float = 5.0
    slowest_bytes_per_second: int = 2 << 20
    buffer_bytes: int = 256 << 20
    requests_per_second: float = 5000.0

    def seconds(self, nbytes: int) -> float:
        """Return the time that a client has for so many bytes."""
        return self.start_seconds + nbytes / self.slowest_bytes_per_second


def refusal(status: int, reason: str, remedy: str = "", *, close: bool = False) -> web.Response:
    """Return an answer that refuses a request: JSON with the reason and the remedy.

    `close`: the connection ends with it, because the rest of the body is not read.
    """
    body = {"reason": reason, **({"remedy": remedy} if remedy else {})}
    answer = web.json_response(body, status=status, headers={"Cache-Control": "no-store"})
    if close:
        answer.force_close()
    return answer


def break_connection(transport: asyncio.BaseTransport | None) -> None:
    """End a connection at once, however slowly the client reads: the kernel drops the unsent bytes."""
    if transport is None:
        return
    assert isinstance(transport, asyncio.Transport)
    if (sock := transport.get_extra_info("socket")) is not None and not transport.is_closing():
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class AccessRules:
    """The rules of one server. For its event loop.

    Requests over TCP need the token. Those over the Unix socket do not: only the user can enter its directory. Requests
    for `open_paths` are answered without the token; other modules add paths. `counts`: refused requests by status.
    """

    def __init__(
        self, token: str | None, hosts: Iterable[str], port: int | None, limits: ServeLimits | None = None
    ) -> None:
        """`token` None: the server listens on a Unix socket only. `hosts`: the names that the Host header may have."""
        self._token = token
        self._hosts = {host.lower() for host in hosts}
        self._port = port
        self.open_paths = {"/healthz"}
        self.counts: Counter[str] = Counter()
        self.limits = limits or ServeLimits()
        self._requests = RateLimit(self.limits.requests_per_second, 2 * self.limits.requests_per_second)
        self._wrong_tokens = RateLimit(_WRONG_TOKENS_A_SECOND, _WRONG_BURST)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests that are not allowed; pass on the others."""
        refused = self._refused(request)
        if refused is None:
            return await handler(request)
        self.counts[f"refused_{refused.status}"] += 1
        return refused

    def _refused(self, request: web.Request) -> web.Response | None:
        if self._token is None:  # the Unix socket; a browser reaches it by a forwarded port
            if request.path == "/healthz" or self.is_host(request.headers.get("Host", "")):
                return None
            return refusal(421, "other_host", "write Host: localhost")
        client, has_token = request.remote or "", self.has_token(request)
        # On loopback, other users of the machine have the same address; they must not use up the limit of allowed ones.
        if not self._requests.allows(f"{client} {has_token or self.has_cookie(request)}"):
            return refusal(429, "too_many_requests")
        if request.path == "/healthz":  # it has no data, and probes call it by any name
            return None
        if has_token and request.path not in self.open_paths:
            return None  # any Host header is allowed: no page of another name knows the token
        if not self.is_host(request.headers.get("Host", "")):
            return refusal(421, "other_host", "start the server with --allow-host NAME")
        if request.path in self.open_paths or self.has_cookie(request):
            return None
        if not self._wrong_tokens.allows(client):
            return refusal(429, "too_many_wrong_tokens")
        answer = refusal(401, "token", "send the header Authorization: Bearer TOKEN")
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    def is_host(self, host: str) -> bool:
        """Return whether a Host header names this server: pages of other names (DNS rebinding) may not call it."""
        name, port = host, ""
        if not host.endswith("]") and ":" in host:
            name, _, port = host.rpartition(":")
        right_port = not port or self._port is None or port == str(self._port)
        return right_port and name.strip("[]").lower() in self._hosts

    def has_token(self, request: web.Request) -> bool:
        """Return whether a request has the token in its header."""
        kind, _, sent = request.headers.get("Authorization", "").partition(" ")
        return kind.lower() == "bearer" and self.is_token(sent.strip())

    def has_cookie(self, request: web.Request) -> bool:
        """Return whether a request has the cookie and comes from this server's own page."""
        cookie = request.cookies.get(COOKIE)
        if cookie is None or self._token is None or not _equal(cookie, self.cookie()):
            return False
        origin = request.headers.get("Origin")
        own = origin is None or origin.partition("://")[2] == request.headers.get("Host", "")
        return own if request.method in ("GET", "HEAD") else own and origin is not None

    def lets_in(self, request: web.Request) -> bool:
        """Return whether a request may see data that needs the token."""
        return self._token is None or self.has_token(request) or self.has_cookie(request)

    def cookie_for(self, request: web.Request, text: str) -> str | None:
        """Return the page's cookie if `text` is the token, else None. Wrong tokens do not block other users."""
        if self.is_token(text):
            return self.cookie()
        self._wrong_tokens.allows(request.remote or "")
        return None

    def is_token(self, text: str) -> bool:
        """Return whether `text` is the token, in the same time for any text."""
        return self._token is not None and _equal(text, self._token)

    def cookie(self) -> str:
        """Return the value of the page's cookie: it changes with the token and does not reveal it."""
        assert self._token is not None
        return hmac.new(self._token.encode(), b"PagodaKV page cookie 1", hashlib.sha256).hexdigest()


def _equal(a: str, b: str) -> bool:
    digests = (hashlib.sha256(text.encode("utf-8", "replace")).digest() for text in (a, b))
    return hmac.compare_digest(*digests)


class RateLimit:
    """Allows `rate` events per second of each client, and `burst` at once. Remembers few clients; for one thread."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by client: events left, and when

    def allows(self, client: str) -> bool:
        """Count one event; return whether it is within the limit."""
        now, (left, at) = time.monotonic(), self._left.get(client, (self._burst, 0.0))
        left = min(self._burst, left + (now - at) * self._rate) - 1.0
        self._left[client] = max(left, 0.0), now
        self._left.move_to_end(client)
        while len(self._left) > _MOST_CLIENTS:
            self._left.popitem(last=False)
        return left >= 0.0


# ---- the token and the directories


def read_token(file: Path | None) -> str:
    """Return the token of `file`, of the variable, or of the user's file, which is created if it does not exist.

    Raises ConfigError if the file cannot be read, if other users can read it, and for a token that is too short.
    """
    if file is None and (given := os.environ.get(TOKEN_VARIABLE)) is not None:
        return _checked(given, TOKEN_VARIABLE)
    path = default_token_file() if file is None else file
    if file is None and not path.exists():
        _make_token(path)
    try:
        status = path.stat()
        if status.st_mode & 0o077 and status.st_uid == os.geteuid():
            raise ConfigError(f"{path}: other users can read the token: chmod 600 it")
        return _checked(path.read_text(encoding="utf-8", errors="replace"), str(path))
    except OSError as error:
        raise ConfigError(
            f"{path}: the token cannot be read: {error.strerror}; write one there that only this user can read"
        ) from None


def default_socket() -> Path:
    """Return the Unix socket of this user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and os.path.isdir(runtime):
        return Path(runtime, "pagoda", "serve.sock")
    return Path(f"/dev/shm/pagoda-{os.getuid()}", ".serve", "serve.sock")


def private_directory(path: Path) -> None:
    """Create a directory that only this user can enter. Raises ConfigError if other users can."""
    try:
        make_directory(path)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be created: {error.strerror}; choose another path") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{path}: must be a directory of this user with mode 0700: chmod it or choose another"
        )


def _checked(text: str, place: str) -> str:
    token = text.strip()
    if not _SHORTEST_TOKEN <= len(token) <= _LONGEST_TOKEN or not re.fullmatch("[!-~]+", token):
        raise ConfigError(
            f"{place}: a token has {_SHORTEST_TOKEN} to {_LONGEST_TOKEN} printable ASCII characters without spaces: "
            "remove the file for a new one, or write another"
        )
    return token


def _make_token(path: Path) -> None:
    """Write a new token, unless another server was first. A failure leaves nothing behind. Raises ConfigError."""
    # not the process id: the server of a container has the same at each start
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        make_directory(path.parent)
        remove_abandoned(path.parent, f".{path.name}-*")
        try:
            with open(
                fresh, "x", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600)
            ) as file:
                file.write(secrets.token_urlsafe(32) + "\n")
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # if another server was first, its token is used
                os.link(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path}: a token cannot be written: {error.strerror}; name a file with --token-file"
        ) from None
