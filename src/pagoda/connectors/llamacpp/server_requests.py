"""The requests to llama.cpp's server that the connector makes, each with a deadline."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from pagoda.base.errors import ConfigError

_MOST_ANSWER_BYTES = 64 << 20
_LEAST_SECONDS = 0.001  # 0 would not wait, but fail at once in another way


class ServerTrouble(Exception):
    """A request was not answered in time, or not with 200. `status` is 0 without an answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ServerRequests:
    """Requests to one server. Thread-safe: each has a connection of its own."""

    def __init__(self, server_url: str, api_key: str = "") -> None:
        """Remember where the server is; connects to nothing. Raises ConfigError for a bad URL."""
        try:
            parts = urlsplit(server_url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"server_url = {server_url!r}: {error}") from None
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(
                f"server_url = {server_url!r}: use a URL such as http://127.0.0.1:8080 (states go "
                "through a directory of this machine, so there is no TLS)"
            )
        self.url = f"http://{parts.netloc.rpartition('@')[2]}"
        self.host = parts.hostname
        self.port = port or 80
        self._path = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str, seconds: float) -> Any:
        """Return the JSON of a GET. Raises ServerTrouble."""
        return self._ask("GET", path, None, seconds)

    def post(self, path: str, body: Mapping[str, object], seconds: float) -> Any:
        """Return the JSON of a POST. Raises ServerTrouble."""
        return self._ask("POST", path, json.dumps(body).encode(), seconds)

    def save(self, slot: int, filename: str, seconds: float) -> int:
        """Let the server save a slot; return how many tokens. Raises ServerTrouble."""
        return number(self._slot(slot, "save", filename, seconds), "n_saved")

    def restore(self, slot: int, filename: str, seconds: float) -> int:
        """Let the server restore a slot; return how many tokens. Raises ServerTrouble, and then the
        slot is empty.
        """
        return number(
            self._slot(slot, "restore", filename, seconds), "n_restored"
        )

    def erase(self, slot: int, seconds: float) -> None:
        """Let the server empty a slot. Raises ServerTrouble."""
        self._slot(slot, "erase", "", seconds)

    def _slot(self, slot: int, action: str, filename: str, seconds: float) -> Any:
        path = f"/slots/{slot}?action={quote(action)}"
        body = {"filename": filename} if filename else {}
        return self.post(path, body, seconds)

    def _ask(
        self, method: str, path: str, body: bytes | None, seconds: float
    ) -> Any:
        until = time.monotonic() + seconds
        connection = _Connection(self.host, self.port, until)
        try:
            with contextlib.closing(connection):
                connection.request(method, self._path + path, body, self._headers)
                response = connection.getresponse()
                text = response.read(_MOST_ANSWER_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            late = time.monotonic() >= until
            why = f"no answer in {seconds:.1f} s" if late else str(error)
            raise ServerTrouble(
                f"{self.url}{path}: {type(error).__name__}: {why}"
            ) from error
        status = response.status
        try:
            found = json.loads(text)
        except ValueError:
            found = text[:200].decode(errors="replace")
            status = status if status != 200 else 0
        if status != 200:
            raise ServerTrouble(
                f"{self.url}{path}: {status or 'no JSON'}: {_message(found)}",
                status,
            )
        return found


class _Connection(http.client.HTTPConnection):
    """A connection whose waits all end at one time."""

    def __init__(self, host: str, port: int, until: float) -> None:
        super().__init__(host, port)
        self._until = until

    def connect(self) -> None:
        """Connect. Raises OSError."""
        left = max(self._until - time.monotonic(), _LEAST_SECONDS)
        plain = socket.create_connection((self.host, self.port), left)
        timed = _TimedSocket(fileno=plain.detach())
        timed.until = self._until
        self.sock = timed


class _TimedSocket(socket.socket):
    """A socket whose timeout does not start again with every byte that arrives."""

    until: float

    def sendall(self, *args: Any) -> None:
        """Send within the time that is left."""
        self._set_timeout()
        super().sendall(*args)

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        """Receive within the time that is left."""
        self._set_timeout()
        return super().recv_into(*args, **kwargs)

    def _set_timeout(self) -> None:
        self.settimeout(max(self.until - time.monotonic(), _LEAST_SECONDS))


def number(answer: Any, *names: str) -> int:
    """Return a number of an answer, by the names that lead to it. Raises ServerTrouble."""
    try:
        for name in names:
            answer = answer[name]
        return int(answer)
    except (LookupError, TypeError, ValueError, OverflowError):
        raise ServerTrouble(
            f"an answer has no number {'.'.join(names)}: is this a llama-server?"
        ) from None


def _message(answer: object) -> str:
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        if isinstance(error, dict):
            return str(error.get("message", error))
        return str(error)
    return str(answer)[:200]
