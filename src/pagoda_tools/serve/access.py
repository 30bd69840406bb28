"""Checks who may call the server, and how often: by the token, the page's cookie and the Host
header.

`server` makes one `AccessRules` and puts its `middleware` before all routes. The token is in no log
and in no URL. Engines do not send it either: they prove that they know it, and the server proves it
to them (`pagoda.base.serve_proof`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import stat
import struct
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from pagoda.base import serve_proof
from pagoda.base.errors import ConfigError
from pagoda.base.file_space import make_directory, open_file
from pagoda.base.serve_token_file import (
    TOKEN_VARIABLE,
    default_token_file,
    is_own,
)
from pagoda.base.synced_files import written_beside

COOKIE = "pagoda"
"""The name of the page's cookie."""
SESSION_SECONDS = 12 * 3600
"""How long a login of the page lasts."""
_MOST_SESSIONS = 64
_SHORTEST_TOKEN = 16
_LONGEST_TOKEN = 1024
_WRONG_TOKENS_A_SECOND = 1.0
_WRONG_BURST = 20.0
_MOST_CLIENTS = 1024

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class ServeLimits:
    """The limits for clients.

    `header_seconds`: the time for a request's header; `start_seconds`: the time for the rest,
    without its bytes. A client that is slower than `slowest_bytes_per_second` is disconnected.
    `buffer_bytes`: memory for chunks from the disk and from clients. `requests_per_second`: the
    limit of each client.
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


def refusal(
    status: int, reason: str, remedy: str = "", *, close: bool = False
) -> web.Response:
    """Return an answer that refuses a request: JSON with the reason and the remedy.

    `close`: the connection ends with it, because the rest of the body is not read.
    """
    body = {"reason": reason, **({"remedy": remedy} if remedy else {})}
    answer = web.json_response(
        body, status=status, headers={"Cache-Control": "no-store"}
    )
    if close:
        answer.force_close()
    return answer


def break_connection(transport: asyncio.BaseTransport | None) -> None:
    """End a connection at once, however slowly the client reads: the kernel drops the unsent
    bytes.
    """
    if transport is None:
        return
    assert isinstance(transport, asyncio.Transport)
    if (
        sock := transport.get_extra_info("socket")
    ) is not None and not transport.is_closing():
        with contextlib.suppress(OSError):
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
    transport.abort()


class CallerConnection(RequestHandler):
    """A connection, and what its client has shown of the token.

    `is_trusted`: whether its last request showed the token, or came over the Unix socket. `nonce`:
    the number that its proofs must contain; empty before its client has asked for one.
    `last_number`: the number of the last proof.
    `right_mac`: the MAC of the request that is being answered, if it had a right proof.
    """

    __slots__ = ("is_trusted", "last_number", "nonce", "right_mac")
    is_trusted: bool
    nonce: str
    last_number: int
    right_mac: str

    def forget_client(self) -> None:
        """Begin as the connection of a stranger."""
        self.is_trusted = False
        self.nonce = ""
        self.last_number = 0
        self.right_mac = ""


class _Shown(Enum):
    """What the header Authorization of a request shows."""

    TOKEN = auto()  # the token itself, or a right proof
    NOTHING = auto()  # no header, a wrong token, or another scheme
    WRONG_PROOF = auto()  # of another token
    # a proof for another connection, or one that was used
    OTHER_CONNECTION = auto()
    # a right proof that holds only at a server with another address
    OTHER_SERVER = auto()


class AccessRules:
    """The rules of one server. For its event loop.

    Requests over TCP need the token. Those over the Unix socket do not: only the user can enter its
    directory. Requests for `open_paths` are answered without the token; other modules add paths.
    """

    def __init__(
        self,
        token: str | None,
        hosts: Iterable[str],
        port: int | None,
        limits: ServeLimits | None = None,
        *,
        advertised: str = "",
    ) -> None:
        """Prepare.

        Args:
            token: None: the server listens on a Unix socket only.
            hosts: the names that the Host header may have.
            port: the port that it may have.
            limits: default: those of ServeLimits.
            advertised: host and port by which the directory of neighbours names this server, beside
                its address.
        """
        self._token = token
        self._key = (
            serve_proof.unknown_key()
            if token is None
            else serve_proof.key_of(token)
        )
        self._advertised = advertised.lower()
        self._hosts = {host.lower() for host in hosts}
        self._port = port
        self.open_paths = {"/healthz"}
        self.limits = limits or ServeLimits()
        self._requests = RateLimit(
            self.limits.requests_per_second, 2 * self.limits.requests_per_second
        )
        self._wrong_tokens = RateLimit(_WRONG_TOKENS_A_SECOND, _WRONG_BURST)
        self._sessions = Sessions()

    @property
    def needs_token(self) -> bool:
        """Whether requests need the token: those over TCP do."""
        return self._token is not None

    @web.middleware
    async def middleware(
        self, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        """Refuse requests that are not allowed; pass on the others."""
        if isinstance(request.protocol, CallerConnection):
            request.protocol.right_mac = ""
        if self._token is not None and _asks_for_nonce(request):
            _note(request, False)
            # it has no data and is no guess: neither limited nor counted
            return _unauthorized(request)
        refused = self._refused(request)
        return refused or await handler(request)

    async def prove(
        self, request: web.Request, response: web.StreamResponse
    ) -> None:
        """Add the proof of an answer to its header, if its request had a right one. For
        `on_response_prepare`.
        """
        connection = request.protocol
        if isinstance(connection, CallerConnection) and connection.right_mac:
            proof = serve_proof.proof_of_answer(
                self._key, connection.right_mac, response.status
            )
            response.headers[serve_proof.ANSWER_HEADER] = proof

    def _refused(self, request: web.Request) -> web.Response | None:
        # the Unix socket; a browser reaches it by a forwarded port
        if self._token is None:
            _note(request, True)
            if request.path == "/healthz" or self.is_host(
                request.headers.get("Host", "")
            ):
                return None
            return refusal(421, "other_host", "write Host: localhost")
        client = request.remote or ""
        shown = self._shown(request)
        has_token = shown is _Shown.TOKEN
        let_in = has_token or self.has_cookie(request)
        _note(request, let_in)
        # On loopback, other users of the machine have the same address; they must not use up the
        # limit of allowed ones.
        if not self._requests.allows(f"{client} {let_in}"):
            return refusal(429, "too_many_requests")
        # it has no data, and probes call it by any name
        if request.path == "/healthz":
            return None
        if has_token and request.path not in self.open_paths:
            # any Host header is allowed: no page of another name knows the token
            return None
        if shown is _Shown.OTHER_CONNECTION:
            return _unauthorized(request, serve_proof.ELSEWHERE)
        if shown is _Shown.OTHER_SERVER:
            return refusal(
                421,
                "other_server",
                "start this server with --advertise and the URL that is used",
            )
        is_proof = shown is _Shown.WRONG_PROOF  # by any name, as a right one
        if not is_proof and not self.is_host(request.headers.get("Host", "")):
            return refusal(
                421, "other_host", "start the server with --allow-host NAME"
            )
        if request.path in self.open_paths or let_in:
            return None
        if not self._wrong_tokens.allows(client):
            return refusal(429, "too_many_wrong_tokens")
        return _unauthorized(request)

    def _shown(self, request: web.Request) -> _Shown:
        """Return what the header Authorization shows; a right proof is used up."""
        kind, _, sent = request.headers.get("Authorization", "").partition(" ")
        sent = sent.strip()
        if kind.lower() == "bearer" and self.is_token(sent):
            return _Shown.TOKEN
        if kind.lower() != serve_proof.SCHEME.lower():
            return _Shown.NOTHING
        proof = serve_proof.proof_in(sent)
        connection = request.protocol
        if proof is None or not isinstance(connection, CallerConnection):
            return _Shown.WRONG_PROOF
        is_of_this_connection = serve_proof.equal(proof.nonce, connection.nonce)
        if not is_of_this_connection or proof.number <= connection.last_number:
            return _Shown.OTHER_CONNECTION
        host = request.headers.get("Host", "")
        right = proof.signed(self._key, request.method, request.raw_path, host)
        if not serve_proof.equal(proof.mac, right.mac):
            return _Shown.WRONG_PROOF
        connection.last_number = proof.number
        if (
            proof.where != serve_proof.ANYWHERE
            and host.lower() not in self._own_addresses(request)
        ):
            return _Shown.OTHER_SERVER
        connection.right_mac = right.mac
        return _Shown.TOKEN

    def _own_addresses(self, request: web.Request) -> tuple[str, ...]:
        """Return the host and port of this end of the connection, and those that the directory may
        name.
        """
        name = (
            request.transport.get_extra_info("sockname")
            if request.transport
            else None
        )
        if not isinstance(name, tuple):
            return (self._advertised,)
        address = ipaddress.ip_address(str(name[0]).partition("%")[0])
        if address.version == 6 and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        host = f"[{address}]" if address.version == 6 else str(address)
        return (f"{host}:{name[1]}", self._advertised)

    def is_host(self, host: str) -> bool:
        """Return whether a Host header names this server: pages of other names (DNS rebinding) may
        not call it.
        """
        name = host
        port = ""
        if not host.endswith("]") and ":" in host:
            name, _, port = host.rpartition(":")
        right_port = not port or self._port is None or port == str(self._port)
        return right_port and name.strip("[]").lower() in self._hosts

    def has_cookie(self, request: web.Request) -> bool:
        """Return whether a request has the cookie and comes from this server's own page."""
        cookie = request.cookies.get(COOKIE)
        if cookie is None or not self._sessions.knows(cookie):
            return False
        is_look = request.method in ("GET", "HEAD")
        return names_this_server(request) and (
            is_look or "Origin" in request.headers
        )

    def lets_in(self, request: web.Request) -> bool:
        """Return whether a request may see data that needs the token."""
        connection = request.protocol
        is_shown = (
            isinstance(connection, CallerConnection) and connection.is_trusted
        )
        return self._token is None or is_shown

    def log_in(self, request: web.Request, text: str) -> str | None:
        """Begin a session and return its cookie if `text` is the token, else None.

        Raises TooManyWrongTokens instead of None if the client has sent too many. The right token
        is always taken: on loopback, and behind a proxy, those who guess have the same address as
        those who know it.
        """
        if self.is_token(text):
            return self._sessions.begin()
        if not self._wrong_tokens.allows(request.remote or ""):
            raise TooManyWrongTokens
        return None

    def log_out(self, request: web.Request) -> None:
        """End the session of a request's cookie."""
        self._sessions.end(request.cookies.get(COOKIE, ""))

    def is_token(self, text: str) -> bool:
        """Return whether `text` is the token, in the same time for any text."""
        return self._token is not None and _equal(text, self._token)


def names_this_server(request: web.Request) -> bool:
    """Return whether a request names no other site's page as its origin."""
    origin = request.headers.get("Origin")
    host = request.headers.get("Host", "")
    return origin is None or origin.partition("://")[2] == host


def _note(request: web.Request, is_trusted: bool) -> None:
    if isinstance(request.protocol, CallerConnection):
        request.protocol.is_trusted = is_trusted


def _asks_for_nonce(request: web.Request) -> bool:
    return (
        request.headers.get("Authorization", "").strip().lower()
        == serve_proof.SCHEME.lower()
    )


def _unauthorized(request: web.Request, note: str = "") -> web.Response:
    """Return the answer to a request without the token: it says how to send it, or how to prove
    that it is known.

    The number for proofs is a new one, so those with the last one are worth nothing any more.
    """
    answer = refusal(401, "token", "send the header Authorization: Bearer TOKEN")
    answer.headers.add("WWW-Authenticate", "Bearer")
    connection = request.protocol
    if isinstance(connection, CallerConnection):
        connection.nonce = serve_proof.random_number()
        connection.last_number = 0
        answer.headers.add(
            "WWW-Authenticate", serve_proof.challenge(connection.nonce, note)
        )
    return answer


class TooManyWrongTokens(Exception):
    """A client has sent too many wrong tokens; it may try again after a second."""


class Sessions:
    """The logins of the page. A cookie is a random value of one login, and ends with it, or with
    the server.

    So it is worth nothing at another server, after `SESSION_SECONDS`, or once it was ended. At most
    64 are kept: the oldest ends for a new one. Only digests are kept. For one thread.
    """

    def __init__(self) -> None:
        # by digest, the oldest first
        self._ends: OrderedDict[bytes, float] = OrderedDict()

    def begin(self) -> str:
        """Begin a session; return its cookie."""
        cookie = secrets.token_urlsafe(32)
        self._ends[_digest(cookie)] = time.monotonic() + SESSION_SECONDS
        while len(self._ends) > _MOST_SESSIONS:
            self._ends.popitem(last=False)
        return cookie

    def knows(self, cookie: str) -> bool:
        """Return whether this is the cookie of a session that has not ended."""
        return self._ends.get(_digest(cookie), 0.0) > time.monotonic()

    def end(self, cookie: str) -> None:
        """End a session, if there is one with this cookie."""
        self._ends.pop(_digest(cookie), None)


def _equal(a: str, b: str) -> bool:
    return hmac.compare_digest(_digest(a), _digest(b))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


class RateLimit:
    """Allows `rate` events per second of each client, and `burst` at once. Remembers few clients;
    for one thread.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        # by client: events left, and when
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allows(self, client: str) -> bool:
        """Count one event; return whether it is within the limit."""
        now = time.monotonic()
        (left, at) = self._left.get(client, (self._burst, 0.0))
        left = min(self._burst, left + (now - at) * self._rate) - 1.0
        self._left[client] = max(left, 0.0), now
        self._left.move_to_end(client)
        while len(self._left) > _MOST_CLIENTS:
            self._left.popitem(last=False)
        return left >= 0.0


# ---- the token and the directories


def read_token(file: Path | None) -> str:
    """Return the token of `file`, of the variable, or of the user's file, which is created if it
    does not exist.

    Raises ConfigError if the file cannot be read, if others know or can read the token, and if it
    is too short.
    """
    if file is None and (given := os.environ.get(TOKEN_VARIABLE)) is not None:
        return _checked(given, TOKEN_VARIABLE)
    path = default_token_file() if file is None else file
    if file is None and not path.exists():
        _make_token(path)
    try:
        # a file that was named may be a pipe
        opener = open_file if file is None else None
        with open(path, "rb", opener=opener) as opened:
            status = os.fstat(opened.fileno())
            if not is_own(status):
                raise ConfigError(
                    f"{path}: belongs to another user or can be written by others, who then know "
                    "the token: "
                    "write one into a file of your own (--token-file), which only you can read"
                )
            if status.st_mode & 0o077 and (
                file is None or status.st_uid == os.geteuid()
            ):
                raise ConfigError(
                    f"{path}: other users can read the token: chmod 600 it"
                )
            text = opened.read(_LONGEST_TOKEN + 100).decode("utf-8", "replace")
        return _checked(text, str(path))
    except OSError as error:
        raise ConfigError(
            f"{path}: the token cannot be read: {error.strerror}; write one there that only this "
            "user can read"
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
        raise ConfigError(
            f"{path}: cannot be created: {error.strerror}; choose another path"
        ) from None
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.geteuid()
        or status.st_mode & 0o077
    ):
        raise ConfigError(
            f"{path}: must be a directory of this user with mode 0700: chmod it or choose another"
        )


def _checked(text: str, place: str) -> str:
    token = text.strip()
    if not _SHORTEST_TOKEN <= len(token) <= _LONGEST_TOKEN or not re.fullmatch(
        "[!-~]+", token
    ):
        raise ConfigError(
            f"{place}: a token has {_SHORTEST_TOKEN} to {_LONGEST_TOKEN} printable ASCII "
            "characters without spaces: "
            "remove the file for a new one, or write another"
        )
    return token


def _make_token(path: Path) -> None:
    """Write a new token, unless another server was first. A failure leaves nothing behind. Raises
    ConfigError.
    """
    token = secrets.token_urlsafe(32) + "\n"
    try:
        make_directory(path.parent)
        with (
            written_beside(path, token.encode()) as fresh,
            # if another server was first, its token is used
            contextlib.suppress(FileExistsError),
        ):
            os.link(fresh, path)
    except OSError as error:
        raise ConfigError(
            f"{path}: a token cannot be written: {error.strerror}; name a file with --token-file"
        ) from None
