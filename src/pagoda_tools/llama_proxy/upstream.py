"""Requests to the server behind the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import cast
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from pagoda.connectors.llamacpp.server_requests import ServerTrouble
from pagoda_tools.llama_proxy.server_connection import (
    BrokenAnswer,
    ServerConnection,
    ServerConnections,
)

# of one connection, and not of the answer: that may take hours
_CONNECT_SECONDS = 10.0
_ASK_SECONDS = 30.0
_OF_ONE_CONNECTION = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "expect",
    }
)
_NOT_PASSED_ON = _OF_ONE_CONNECTION | {"authorization", "x-api-key"}
# by aiohttp's server, when it reads a request
_DECODED = frozenset({"gzip", "deflate", "br", "zstd"})


class Upstream:
    """One server, and the key that only this process knows. For the event loop."""

    def __init__(self, url: str, key: str) -> None:
        """Connects to nothing yet. `key`: empty if the server has none."""
        self.url = url.rstrip("/")
        self._key = key
        parts = urlsplit(self.url)
        self._host = parts.netloc.rpartition("@")[2]
        self._path = parts.path
        self._own_headers = {"Content-Type": "application/json"}
        if key:
            self._own_headers["Authorization"] = f"Bearer {key}"
        self._connections = ServerConnections(
            parts.hostname or "", parts.port or 80
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        self._session = aiohttp.ClientSession(
            timeout=timeout,
            auto_decompress=False,
            # Each waiting request holds a connection, and clients are bounded already. None is
            # kept: the server closes kept ones after streams, 100 requests, or 5 s, and a request
            # that meets that is lost; and one of its few threads waits for each.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            # what the server gives to one client is not for the others
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """End all requests."""
        self._connections.close()
        await self._session.close()

    @contextlib.asynccontextmanager
    async def send(
        self,
        request: web.Request,
        body: bytes | aiohttp.StreamReader | None,
        *,
        with_key: bool = True,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Pass a client's request on with this body; the answer's body is not read yet.

        `with_key`: the client may ask the server; otherwise the server itself refuses. If this is
        left before the answer has ended, the server stops computing. Raises aiohttp.ClientError.
        """
        headers = headers_for(request.headers)
        _leave_out_decoded(headers)
        if with_key and self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        response = await self._session.request(
            request.method,
            # as it was sent: another spelling may be another route
            URL(self.url + _target(request), encoded=True),
            headers=headers,
            data=body,
            allow_redirects=False,
        )
        try:
            yield response
        finally:
            response.close()

    @contextlib.asynccontextmanager
    async def question(
        self, request: web.Request, body: bytes, *, with_key: bool = True
    ) -> AsyncIterator[ServerConnection]:
        """Send a client's request, whose answer the proxy itself reads: it is not compressed.

        Otherwise as `send`. Raises OSError.
        """
        headers = headers_for(request.headers)
        _leave_out_decoded(headers)
        headers.popall("Accept-Encoding", None)
        if with_key and self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        target = self._path + _target(request)
        head = self._head(request.method, target, headers, len(body))
        connection = await self._connections.take()
        try:
            await connection.ask(head, body)
            yield connection
        finally:
            self._connections.give_back(connection)

    async def ask(self, path: str, body: Mapping[str, object] | bytes) -> object:
        """Return the JSON of a POST of our own, which may be sent twice. Raises ServerTrouble."""
        if not isinstance(body, bytes):
            body = _written(body)
        return await self._own("POST", path, body)

    async def get(self, path: str) -> object:
        """Return the JSON of a GET of our own. Raises ServerTrouble."""
        return await self._own("GET", path, b"")

    async def slots(self) -> dict[int, Mapping[str, object]]:
        """Return what the server says of each slot, by its number. Raises ServerTrouble."""
        listed = await self.get("/slots")
        return {
            entry["id"]: entry
            for entry in (listed if isinstance(listed, list) else ())
            if isinstance(entry, dict) and isinstance(entry.get("id"), int)
        }

    async def erase(self, slot: int) -> None:
        """Empty a slot; waits for what it computes. Raises ServerTrouble."""
        await self.ask(f"/slots/{slot}?action=erase", {})

    async def _own(self, method: str, path: str, body: bytes) -> object:
        head = self._head(method, self._path + path, self._own_headers, len(body))
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                status, text = await self._answer(head, body)
        except (OSError, TimeoutError) as error:
            raise ServerTrouble(
                f"{path}: {type(error).__name__}: {error}"
            ) from error
        if status != 200:
            raise ServerTrouble(f"{path}: {status}: {text[:200]!r}", status)
        try:
            # a prompt's list of tokens takes `json` half a millisecond
            return cast(object, msgspec.json.decode(text))
        except ValueError:
            raise ServerTrouble(f"{path}: no JSON") from None

    async def _answer(self, head: bytes, body: bytes) -> tuple[int, bytes]:
        """Return the status and the body of an answer to a request that may be sent twice."""
        while True:
            connection = await self._connections.take()
            try:
                await connection.ask(head, body)
                return connection.status, await connection.read()
            except BrokenAnswer:
                if not connection.was_closed_unasked:
                    raise
            finally:
                self._connections.give_back(connection)

    def _head(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str] | CIMultiDict[str],
        body_bytes: int,
    ) -> bytes:
        lines = [
            f"{method} {target} HTTP/1.1",
            f"Host: {self._host}",
            *(f"{name}: {value}" for name, value in headers.items()),
            f"Content-Length: {body_bytes}",
        ]
        # aiohttp refuses requests with other line ends within
        return "\r\n".join([*lines, "", ""]).encode(errors="surrogateescape")


def _written(body: Mapping[str, object]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        # half a pair of surrogates, which only an escape can write
        return json.dumps(body).encode()


def _leave_out_decoded(headers: CIMultiDict[str]) -> None:
    """Leave out the coding of a body that is decoded already."""
    if headers.get("Content-Encoding", "").lower() in _DECODED:
        headers.popall("Content-Encoding")


def _target(request: web.Request) -> str:
    """Return the path and the query, as the client wrote them."""
    sent = request.raw_path
    if sent.startswith("/"):
        return sent
    # a whole URL, as for a proxy: what it names is here
    return request.rel_url.raw_path_qs


def headers_for(
    headers: CIMultiDictProxy[str] | CIMultiDict[str],
) -> CIMultiDict[str]:
    """Return the headers of a client's request that go to the server."""
    kept = CIMultiDict[str]()
    for name, value in headers.items():
        if name.lower() not in _NOT_PASSED_ON:
            kept.add(name, value)
    return kept


def answer_headers(
    response: aiohttp.ClientResponse | ServerConnection,
) -> CIMultiDict[str]:
    """Return the headers of the server's answer that go to the client."""
    kept = CIMultiDict[str]()
    for name, value in response.headers.items():
        if name.lower() not in _OF_ONE_CONNECTION:
            kept.add(name, value)
    return kept
