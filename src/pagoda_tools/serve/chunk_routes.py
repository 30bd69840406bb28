"""Chunks over HTTP: GET, HEAD, PUT and DELETE /v1/NAMESPACE/KEY, POST /v1/NAMESPACE/find, PUT
/v1/NAMESPACE.

NAMESPACE and KEY are 64 hexadecimal digits. The value of a chunk is a header page and the payload,
as in every remote store; the reader verifies both. A GET takes a lease on the chunk, which expires
even if the client or this process dies. Bytes in memory are copied from the slot to the socket
inside the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import numpy as np
from aiohttp import web

from pagoda import codec
from pagoda.base.errors import ClosedError, NoRoomError
from pagoda.base.metrics import Reason
from pagoda.codec import HEADER_BYTES
from pagoda.slab import aligned
from pagoda.tiers.base import Bytes
from pagoda_tools.serve.access import ServeLimits, break_connection, refusal
from pagoda_tools.serve.blocking_calls import CALLS, OverloadedError
from pagoda_tools.serve.served_stores import (
    LocatedChunk,
    ServedStore,
    ServedStores,
    is_value_of,
)

STORES: web.AppKey[ServedStores] = web.AppKey("stores", ServedStores)
COUNTS: web.AppKey[Counter[str]] = web.AppKey("counts", Counter)
LIMITS: web.AppKey[ServeLimits] = web.AppKey("limits", ServeLimits)
READ_ONLY: web.AppKey[bool] = web.AppKey("read_only", bool)

MOST_KEYS = 4096  # of one find
_KEY_BYTES = 32
_MOST_LABEL_BYTES = 4096
# after each piece the lease is renewed and the generation compared
_PIECE_BYTES = 8 << 20
# the size of a write to a socket that cannot send from a file
_WRITE_BYTES = 1 << 20
_BUFFER_SECONDS = 5.0  # how long a request waits for a buffer
_SendPiece = Callable[[web.StreamResponse, int, int], Awaitable[None]]

_HEX = re.compile(r"[0-9a-f]{64}")
_LABELS = re.compile(r"[a-z_]{1,32}")


def add_routes(app: web.Application) -> None:
    """Add the routes of this module. The application must have STORES, CALLS, COUNTS, LIMITS and
    READ_ONLY.
    """
    app[_BUFFERS] = BufferPool(app[LIMITS].buffer_bytes)
    app.router.add_route("HEAD", "/v1/{namespace}/{key}", _head)
    app.router.add_route("GET", "/v1/{namespace}/{key}", _get)
    app.router.add_put("/v1/{namespace}/{key}", _put)
    app.router.add_delete("/v1/{namespace}/{key}", _delete)
    app.router.add_post("/v1/{namespace}/find", _find)
    app.router.add_put("/v1/{namespace}", _label)


class BufferPool:
    """Page-aligned buffers for chunks, with a limit of their total size. For the event loop."""

    def __init__(self, nbytes: int) -> None:
        self._most = self._left = nbytes
        self._changed = asyncio.Condition()
        self._kept: list[Bytes] = []

    @contextlib.asynccontextmanager
    async def buffer(self, nbytes: int) -> AsyncIterator[Bytes]:
        """Yield a buffer of `nbytes`. Raises OverloadedError if there is no space for it for some
        seconds.
        """
        if nbytes > self._most:
            raise OverloadedError
        await self._take(nbytes)
        try:
            same = [
                n for n, kept in enumerate(self._kept) if kept.nbytes == nbytes
            ]
            buffer = self._kept.pop(same[0]) if same else aligned(nbytes)
            yield buffer
            # not after an exception: a thread may still write into it
            self._kept = [buffer, *self._kept][:2]
        finally:
            self._left += nbytes
            async with self._changed:
                self._changed.notify_all()

    async def _take(self, nbytes: int) -> None:
        try:
            async with asyncio.timeout(_BUFFER_SECONDS), self._changed:
                await self._changed.wait_for(lambda: self._left >= nbytes)
                self._left -= nbytes
        except TimeoutError:
            raise OverloadedError from None


_BUFFERS: web.AppKey[BufferPool] = web.AppKey("buffers", BufferPool)


def _named(request: web.Request, part: str) -> bytes:
    """Return the namespace or the key in a URL. Raises HTTPBadRequest if it is invalid."""
    text = request.match_info[part]
    if not _HEX.fullmatch(text):
        raise web.HTTPBadRequest(reason="Bad Name")
    return bytes.fromhex(text)


def _names(request: web.Request) -> tuple[bytes, bytes]:
    """Return the namespace and the key in a URL. Raises HTTPBadRequest if one is invalid."""
    return _named(request, "namespace"), _named(request, "key")


def _miss(reason: Reason) -> web.Response:
    status = (
        503
        if reason in (Reason.LEDGER_BUSY, Reason.IO_ERROR, Reason.DEADLINE)
        else 404
    )
    return refusal(status, reason.value)


# ---- reading -------------------------------------------------------------------------------------


async def _head(request: web.Request) -> web.StreamResponse:
    namespace, key = _names(request)
    found = await request.app[CALLS].run(
        request.app[STORES].locate, namespace, key
    )
    if isinstance(found, Reason):
        return web.Response(status=_miss(found).status)
    return web.Response(headers=_value_headers(found.store))


def _value_headers(store: ServedStore) -> dict[str, str]:
    length = str(HEADER_BYTES + store.chunk_bytes)
    return {
        "Content-Type": "application/octet-stream",
        "Content-Length": length,
        "Cache-Control": "no-store",
        "Pagoda-Tier": store.tier,
    }


async def _get(request: web.Request) -> web.StreamResponse:
    namespace, key = _names(request)
    stores = request.app[STORES]
    calls = request.app[CALLS]
    located = await calls.run(stores.locate_with_header, namespace, key)
    if isinstance(located, Reason):
        return _miss(located)
    found, page = located
    try:
        with found.store.using():
            if found.store.in_memory:
                return await _send_slot(request, found, page)
            payload_bytes = found.store.ledger.slot_bytes - HEADER_BYTES
            async with request.app[_BUFFERS].buffer(payload_bytes) as buffer:
                read = await calls.run(stores.read, namespace, key, found, buffer)
                if isinstance(read, Reason):
                    return _miss(read)
                return await _send_buffer(request, found, read, buffer)
    except ClosedError:
        return _miss(Reason.EVICTED)


async def _send_slot(
    request: web.Request, found: LocatedChunk, page: bytes
) -> web.StreamResponse:
    """Send a chunk directly from its slot, inside the kernel; with TLS, from a view of the slot."""
    store = found.store
    transport = request.transport
    if transport is None:
        raise ConnectionResetError
    if transport.get_extra_info("sslcontext") is not None:
        view = store.slab.view(found.slot)  # type: ignore[union-attr]
        return await _send_buffer(request, found, page, view)
    loop = asyncio.get_running_loop()
    begin = store.offset(found.slot)

    async def send(_: web.StreamResponse, at: int, count: int) -> None:
        if transport.is_closing():
            raise ConnectionResetError
        await loop.sendfile(
            transport, store.file, begin + at, count, fallback=False
        )

    return await _send_pieces(request, found, page, _PIECE_BYTES, send)


async def _send_buffer(
    request: web.Request, found: LocatedChunk, page: bytes, payload: Bytes
) -> web.StreamResponse:
    """Send a chunk from this process's memory; all of it is sent when this returns."""
    view = payload[: found.store.chunk_bytes].data

    async def send(response: web.StreamResponse, at: int, count: int) -> None:
        await response.write(view[at : at + count])
        await response.drain()

    return await _send_pieces(request, found, page, _WRITE_BYTES, send)


async def _send_pieces(
    request: web.Request,
    found: LocatedChunk,
    page: bytes,
    most: int,
    send: _SendPiece,
) -> web.StreamResponse:
    """Send the page and then the chunk, at most `most` bytes at a time, with the lease renewed
    after each piece.
    """
    response = web.StreamResponse(headers=_value_headers(found.store))
    limits = request.app[LIMITS]
    total = found.store.chunk_bytes
    try:
        async with asyncio.timeout(limits.start_seconds):
            await response.prepare(request)
            await response.write(page)
        for at in range(0, total, most):
            count = min(most, total - at)
            async with asyncio.timeout(limits.seconds(count)):
                await send(response, at, count)
            # the reader would find the wrong checksum; this saves it the rest
            if found.store.in_memory and not found.renew():
                return _aborted(request, response, "evicted_while_sent")
        await response.write_eof()
    except TimeoutError:
        return _aborted(request, response, "slow_readers")
    request.app[COUNTS].update(sent_chunks=1, sent_bytes=total)
    found.store.ledger.count({"loaded_chunks": 1, "loaded_bytes": total})
    return response


def _aborted(
    request: web.Request, response: web.StreamResponse, why: str
) -> web.StreamResponse:
    """Break the connection: the announced bytes cannot be sent."""
    request.app[COUNTS][why] += 1
    break_connection(request.transport)
    return response


async def _find(request: web.Request) -> web.Response:
    namespace = _named(request, "namespace")
    body = await small_body(request, MOST_KEYS * _KEY_BYTES)
    if len(body) % _KEY_BYTES:
        return refusal(
            400,
            "bad_body",
            f"send at most {MOST_KEYS} keys of {_KEY_BYTES} bytes each",
        )
    # six times as fast as slices
    keys = struct.unpack(f"{_KEY_BYTES}s" * (len(body) // _KEY_BYTES), body)
    request.app[COUNTS]["finds"] += 1
    stores = request.app[STORES]
    calls = request.app[CALLS]
    if "each" not in request.query:
        found = await calls.run(stores.find, namespace, keys)
        return web.json_response({"found": found})
    here = await calls.run(stores.find_each, namespace, keys)
    leading = [*here, False].index(False)
    each = "".join("1" if is_here else "0" for is_here in here)
    return web.json_response({"found": leading, "each": each})


# ---- storing and removing ------------------------------------------------------------------------


async def _put(request: web.Request) -> web.Response:
    namespace, key = _names(request)
    stores = request.app[STORES]
    calls = request.app[CALLS]
    length = request.content_length
    if request.app[READ_ONLY]:
        return refusal(403, "read_only", close=True)
    if length is None or length <= HEADER_BYTES:
        return refusal(
            411 if length is None else 422,
            "failed_check",
            "send a whole value",
            close=True,
        )
    page = np.empty(HEADER_BYTES, np.uint8)
    if not await _read_body(request, page):
        return refusal(408, "late", close=True)
    header = codec.parse(page)
    if header is None or not is_value_of(header, namespace, key, length):
        return refusal(
            422,
            "failed_check",
            "the header is not of this key, or is damaged",
            close=True,
        )
    try:
        store = await calls.run(stores.room_for, header)
    except NoRoomError as error:
        return refusal(507, "full", str(error), close=True)
    if store is None:
        remedy = (
            "start an engine here, or the server with --host-size, to make a store for this "
            "layout"
        )
        return refusal(507, "no_store", remedy, close=True)
    if header.length != store.chunk_bytes:
        return refusal(
            413,
            "too_large",
            f"a chunk has {store.chunk_bytes} bytes here",
            close=True,
        )
    with store.using():
        async with request.app[_BUFFERS].buffer(
            store.ledger.slot_bytes
        ) as buffer:
            if not await _read_body(request, buffer[: length - HEADER_BYTES]):
                return refusal(408, "late", close=True)
            status, reason = await calls.run(
                _store, stores, store, header, page, buffer, length - HEADER_BYTES
            )
    request.app[COUNTS][f"puts_{reason}"] += 1
    return web.json_response({"reason": reason}, status=status)


def _store(
    stores: ServedStores,
    store: ServedStore,
    header: codec.Header,
    page: Bytes,
    stored: Bytes,
    nbytes: int,
) -> tuple[int, str]:
    """Verify the bytes in `stored` and store them; return the status and the reason. Runs on a
    thread.
    """
    is_new, reason = stores.put_value(store, header, page, stored[:nbytes])
    if reason is None:
        return (201, "stored") if is_new else (200, "present")
    return {
        Reason.BUSY: 409,
        Reason.TOO_LARGE: 413,
        Reason.FAILED_CHECK: 422,
    }.get(reason, 507), reason.value


async def _delete(request: web.Request) -> web.Response:
    namespace, key = _names(request)
    if request.app[READ_ONLY]:
        return refusal(403, "read_only")
    removed = await request.app[CALLS].run(
        request.app[STORES].remove, namespace, key
    )
    return web.Response(status=204) if removed else _miss(Reason.ABSENT)


async def _label(request: web.Request) -> web.Response:
    """Take the readable fields of a namespace, as `Namespace.fields()` returns them: a JSON object
    of texts.
    """
    namespace = _named(request, "namespace")
    if request.app[READ_ONLY]:
        return refusal(403, "read_only", close=True)
    try:
        fields = msgspec.json.decode(
            await small_body(request, _MOST_LABEL_BYTES), type=dict[str, str]
        )
    except (msgspec.DecodeError, UnicodeDecodeError):
        return refusal(400, "bad_body", "send a JSON object of names and texts")
    kept = {
        name: text
        for name, text in fields.items()
        if _LABELS.fullmatch(name) and name != "salt"
    }
    request.app[STORES].label(namespace, kept)
    return web.Response(status=204)


# ---- bodies --------------------------------------------------------------------------------------


async def _read_body(request: web.Request, buffer: Bytes) -> bool:
    """Fill `buffer` from the body. Return False if the client is too slow, or ends the body
    early.
    """
    at = 0
    try:
        async with asyncio.timeout(request.app[LIMITS].seconds(buffer.nbytes)):
            while at < buffer.nbytes:
                piece = await request.content.read(buffer.nbytes - at)
                if not piece:
                    return False
                buffer[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)
    except TimeoutError:
        return False
    return True


async def small_body(request: web.Request, most: int) -> bytes:
    """Return a body of at most `most` bytes. Raises HTTPRequestEntityTooLarge,
    HTTPRequestTimeout.
    """
    body = bytearray()
    announced = request.content_length or 0
    try:
        async with asyncio.timeout(request.app[LIMITS].seconds(most)):
            while max(announced, len(body)) <= most and (
                piece := await request.content.readany()
            ):
                body += piece
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    if max(announced, len(body)) > most:
        text = f"send at most {most} bytes"
        raise web.HTTPRequestEntityTooLarge(
            most, len(body), reason="Too Large", text=text
        )
    return bytes(body)
