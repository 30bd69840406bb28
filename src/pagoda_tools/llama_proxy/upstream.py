"""Requests to the server behind the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import cast

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from pagoda.connectors.llamacpp.server_requests import ServerTrouble

# of one connection, and not of the answer: that may take hours
_CONNECT_SECONDS = 10.0
_ASK_SECONDS = 30.0
_MOST_ANSWER_BYTES = 256 << 20
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
_KEYS = frozenset({"authorization", "x-api-key"})
# by aiohttp's server, when it reads a request
_DECODED = frozenset({"gzip", "deflate", "br", "zstd"})


class Upstream:
    """One server, and the key that only this process knows. For the event loop."""

    def __init__(self, url: str, key: str) -> None:
        """Connects to nothing yet. `key`: empty if the server has none."""
        self.url = url.rstrip("/")
        self._key = key
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
        await self._session.close()

    @contextlib.asynccontextmanager
    async def send(
        self,
        request: web.Request,
        body: bytes | aiohttp.StreamReader | None,
        *,
        with_key: bool = True,
        is_read: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a client's request with this body; the answer's body is not read yet.

        `with_key`: the client may ask the server; otherwise the server itself refuses. `is_read`:
        the proxy reads the answer, which must not be compressed. If this is left before the answer
        has ended, the server stops computing. Raises aiohttp.ClientError.
        """
        headers = headers_for(request.headers)
        if request.headers.get("Content-Encoding", "").lower() in _DECODED:
            # the body that we read is the decoded one
            headers.popall("Content-Encoding")
        if is_read:
            headers.popall("Accept-Encoding", None)
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

    async def ask(self, path: str, body: Mapping[str, object]) -> object:
        """Return the JSON of a POST of our own. Raises ServerTrouble."""
        return await self._own("POST", path, json.dumps(body).encode())

    async def get(self, path: str) -> object:
        """Return the JSON of a GET of our own. Raises ServerTrouble."""
        return await self._own("GET", path, None)

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

    async def _own(self, method: str, path: str, body: bytes | None) -> object:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                async with self._session.request(
                    method, self.url + path, headers=headers, data=body
                ) as response:
                    text = await response.content.read(_MOST_ANSWER_BYTES)
                    while not response.content.at_eof():
                        text += await response.content.read(_MOST_ANSWER_BYTES)
                    status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
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
        if name.lower() not in _OF_ONE_CONNECTION | _KEYS:
            kept.add(name, value)
    return kept


def answer_headers(response: aiohttp.ClientResponse) -> CIMultiDict[str]:
    """Return the headers of the server's answer that go to the client."""
    kept = CIMultiDict[str]()
    for name, value in response.headers.items():
        if name.lower() not in _OF_ONE_CONNECTION:
            kept.add(name, value)
    return kept
