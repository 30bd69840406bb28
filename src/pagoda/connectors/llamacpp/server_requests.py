"""The requests to llama.cpp's server that the connector makes, each with a deadline."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from pagoda.base.errors import ConfigError

_MOST_ANSWER_BYTES = 64 << 20


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
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"server_url = {server_url!r}: use a URL such as http://127.0.0.1:8080"
            )
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self.host = parts.hostname
        self.port = port or (443 if parts.scheme == "https" else 80)
        self._is_tls = parts.scheme == "https"
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
        return int(self._slot(slot, "save", filename, seconds)["n_saved"])

    def restore(self, slot: int, filename: str, seconds: float) -> int:
        """Let the server restore a slot; return how many tokens. Raises ServerTrouble, and then the
        slot is empty.
        """
        return int(self._slot(slot, "restore", filename, seconds)["n_restored"])

    def erase(self, slot: int, seconds: float) -> None:
        """Let the server empty a slot. Raises ServerTrouble."""
        self._slot(slot, "erase", "", seconds)

    def _slot(self, slot: int, action: str, filename: str, seconds: float) -> Any:
        path = f"/slots/{slot}?action={quote(action)}"
        body = {"filename": filename} if filename else {}
        answer = self.post(path, body, seconds)
        if not isinstance(answer, dict):
            raise ServerTrouble(f"{path}: an unknown answer")
        return answer

    def _ask(
        self, method: str, path: str, body: bytes | None, seconds: float
    ) -> Any:
        kind = (
            http.client.HTTPSConnection
            if self._is_tls
            else http.client.HTTPConnection
        )
        connection = kind(self.host, self.port, timeout=max(seconds, 0.001))
        cut = _Cut(connection)
        # a timeout of the socket would start again with every byte
        timer = threading.Timer(seconds, cut)
        timer.daemon = True
        try:
            timer.start()
            with contextlib.closing(connection):
                connection.request(method, self._path + path, body, self._headers)
                response = connection.getresponse()
                text = _body(response)
            if cut.done:
                raise TimeoutError(f"no answer in {seconds:.1f} s")
            found = json.loads(text) if text else None
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = f"no answer in {seconds:.1f} s" if cut.done else str(error)
            raise ServerTrouble(
                f"{self.url}{path}: {type(error).__name__}: {why}"
            ) from error
        finally:
            timer.cancel()
        if response.status != 200:
            raise ServerTrouble(
                f"{self.url}{path}: {response.status}: {_message(found)}",
                response.status,
            )
        return found


class _Cut:
    """Ends a connection, from another thread."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self.done = False

    def __call__(self) -> None:
        self.done = True
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _body(response: http.client.HTTPResponse) -> bytes:
    """Return the body. Raises ValueError if it is too long."""
    text = response.read(_MOST_ANSWER_BYTES + 1)
    if len(text) > _MOST_ANSWER_BYTES:
        raise ValueError(f"an answer of more than {_MOST_ANSWER_BYTES} bytes")
    return text


def _message(answer: object) -> str:
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        if isinstance(error, dict):
            return str(error.get("message", error))
        return str(error)
    return str(answer)[:200]
