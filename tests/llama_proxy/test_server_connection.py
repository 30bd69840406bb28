"""Connections to the server: answers in any form and any pieces, and which connection a request
goes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.connectors.llamacpp.server_requests import ServerTrouble
from pagoda_tools.llama_proxy import server_connection
from pagoda_tools.llama_proxy.server_connection import (
    BrokenAnswer,
    ServerConnection,
    ServerConnections,
)
from pagoda_tools.llama_proxy.upstream import Upstream

REQUEST = b"POST /a HTTP/1.1\r\nContent-Length: 2\r\n\r\n"
BODY = b"{}"
KEPT = b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5, max=9\r\nContent-Length: 2\r\n\r\n{}"
ENDING = KEPT.replace(b"Content", b"Connection: close\r\nContent")
SILENT = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
STREAM = (
    b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\n{}\r\n0\r\n\r\n"
)
LEFT_OVER = KEPT + b"more"
# may be the beginning of another answer
BEGUN = KEPT + b"HTTP/1.1"
TWICE = KEPT + KEPT

# takes what came, and says what to send; None: close the connection without a word
Script = Callable[[int, int], bytes | None]


class Peer:
    """A listener that answers each request as a script says."""

    def __init__(self, script: Script) -> None:
        """`script`: of the number of the connection, and of the request in it."""
        self._script = script
        self.requests: list[tuple[int, int]] = []
        self.ended: list[int] = []
        self.connections = 0
        self.port = 0

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        number = self.connections
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            request = 0
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(len(BODY))
                self.requests.append((number, request))
                answer = self._script(number, request)
                request += 1
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
        self.ended.append(number)
        writer.close()


@contextlib.asynccontextmanager
async def peer(script: Script) -> AsyncIterator[Peer]:
    found = Peer(script)
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()


def run(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())


def read_in_pieces(
    answer: bytes, sizes: Sequence[int], *, ends: bool
) -> tuple[ServerConnection, bytes]:
    """Return what a connection makes of an answer that comes in pieces of these sizes."""

    async def read() -> tuple[ServerConnection, bytes]:
        async def serve(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            await reader.readuntil(BODY)
            rest = answer
            for size in [*sizes, len(answer)]:
                writer.write(rest[:size])
                rest = rest[size:]
                await asyncio.sleep(0)
            if ends:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connection = await ServerConnections("127.0.0.1", port).take()
        try:
            async with asyncio.timeout(60):
                await connection.ask(REQUEST, BODY)
                return connection, await connection.read()
        finally:
            connection.close()
            server.close()

    return asyncio.run(read())


def chunked(pieces: Sequence[bytes], more: bytes = b"") -> bytes:
    parts = [b"%x%s\r\n%s\r\n" % (len(p), more, p) for p in pieces if p]
    return b"".join([*parts, b"0", more, b"\r\n"])


@given(
    sizes=st.lists(st.integers(1, 60), max_size=12),
    pieces=st.lists(st.binary(max_size=40), max_size=5),
    form=st.sampled_from(["length", "chunks", "extended", "trailers", "end"]),
    has_first=st.booleans(),
)
def test_an_answer_is_the_same_however_it_comes(
    sizes: list[int], pieces: list[bytes], form: str, has_first: bool
) -> None:
    whole = b"".join(pieces)
    first = b"HTTP/1.1 100 Continue\r\nA: b\r\n\r\n" if has_first else b""
    head = b"HTTP/1.1 201 Made it\r\nX-Name: a: b \r\nX-NAME: c\r\n"
    coding = b"Transfer-Encoding: chunked\r\n\r\n"
    answer = first + head
    if form == "length":
        answer += b"Content-Length: %d\r\n\r\n" % len(whole) + whole
    elif form == "chunks":
        answer += coding + chunked(pieces) + b"\r\n"
    elif form == "extended":
        answer += coding + chunked(pieces, b" ;a=b") + b"\r\n"
    elif form == "trailers":
        answer += coding + chunked(pieces) + b"A: b\r\nC: d\r\n\r\n"
    else:
        answer += b"\r\n" + whole
    found, body = read_in_pieces(answer, sizes, ends=form == "end")
    assert found.status == 201
    assert found.reason == "Made it"
    assert found.headers.getall("x-name") == ["a: b", "c"]
    assert "a" not in found.headers
    assert body == whole


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-2\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcd\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nab",
        b"HTTP/1.1 101 So\r\nConnection: upgrade\r\nUpgrade: a\r\n\r\nab",
        b"HTTP/1.1 000 OK\r\n\r\nab",
        b"HTTP/1.1 100 Continue\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nno name\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"\r\n\r\n",
    ],
)
def test_a_part_of_an_answer_is_not_taken_for_one(answer: bytes) -> None:
    with pytest.raises(BrokenAnswer):
        read_in_pieces(answer, [], ends=True)


@pytest.mark.parametrize(
    "begin",
    [
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nA: ",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nA: ",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;a=",
    ],
)
def test_a_head_or_trailers_without_an_end_are_given_up(begin: bytes) -> None:
    with pytest.raises(BrokenAnswer, match="no HTTP"):
        read_in_pieces(begin + b"a" * (1 << 20), [], ends=False)


def test_why_an_answer_is_no_http_is_said() -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n"
    with pytest.raises(BrokenAnswer, match="Transfer-Encoding: gzip"):
        read_in_pieces(answer, [], ends=False)
    with pytest.raises(BrokenAnswer, match="Expected HTTP/"):
        read_in_pieces(b"SSH-2.0-OpenSSH\r\n\r\n", [], ends=False)


def test_a_large_answer_waits_for_its_reader() -> None:
    """Otherwise one that nobody reads takes all memory."""
    piece = b"x" * (1 << 16)
    sent = 0

    async def serve(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        nonlocal sent
        await reader.readuntil(BODY)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(1024):
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
        writer.close()

    async def read() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connection = await ServerConnections("127.0.0.1", port).take()
        await connection.ask(REQUEST, BODY)
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.05)
        assert sent < 1024 * len(piece)
        assert connection._unread_bytes < 8 << 20
        assert len(await connection.read()) == 1024 * len(piece)
        server.close()

    run(read())


@pytest.mark.parametrize(
    ("answer", "connections"),
    [
        (KEPT, 1),
        (ENDING, 2),
        (SILENT, 2),
        (STREAM, 2),
        (LEFT_OVER, 2),
        (BEGUN, 2),
        (TWICE, 2),
    ],
)
def test_a_connection_is_used_again_if_the_server_says_that_it_waits(
    answer: bytes, connections: int
) -> None:
    async def ask() -> None:
        async with peer(lambda *_: answer) as server:
            upstream = Upstream(f"http://127.0.0.1:{server.port}", "")
            assert await upstream.ask("/a", {}) == {}
            assert await upstream.ask("/a", {}) == {}
            assert server.connections == connections
            await upstream.close()

    run(ask())


def test_a_connection_is_kept_for_a_moment_only() -> None:
    """A thread of the server waits for each."""

    async def ask() -> None:
        async with peer(lambda *_: KEPT) as server:
            upstream = Upstream(f"http://127.0.0.1:{server.port}", "")
            await upstream.ask("/a", {})
            while not server.ended:
                await asyncio.sleep(0.01)
            await upstream.ask("/a", {})
            assert server.connections == 2
            await upstream.close()

    run(ask())


def test_one_connection_is_kept_at_most() -> None:
    async def ask() -> None:
        async with peer(lambda *_: KEPT) as server:
            upstream = Upstream(f"http://127.0.0.1:{server.port}", "")
            await asyncio.gather(*(upstream.ask("/a", {}) for _ in range(20)))
            while len(server.ended) < server.connections - 1:
                await asyncio.sleep(0.01)
            await upstream.close()

    run(ask())


def test_a_connection_that_is_old_by_the_clock_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proxy may have been stopped for longer than the server waits."""

    async def ask() -> None:
        async with peer(lambda *_: KEPT) as server:
            upstream = Upstream(f"http://127.0.0.1:{server.port}", "")
            await upstream.ask("/a", {})
            monkeypatch.setattr(server_connection, "_KEPT_SECONDS", 0.0)
            await upstream.ask("/a", {})
            assert server.requests == [(0, 0), (1, 0)]
            await upstream.close()

    run(ask())


def test_a_kept_connection_that_the_server_has_closed_is_not_used() -> None:
    """Also if the event loop has not been told: no request is lost, and none is sent twice."""

    async def ask() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            connections = ServerConnections("127.0.0.1", port)
            first = await connections.take()
            asking = asyncio.create_task(first.ask(REQUEST, BODY))
            accepted, _ = listener.accept()
            accepted.sendall(KEPT)
            await asking
            await first.read()
            connections.give_back(first)
            assert first.is_open
            accepted.close()
            assert not first.is_open
            assert await connections.take() is not first

    run(ask())


def closes_kept_ones(connection: int, request: int) -> bytes | None:
    """Say that the connection is kept, and close it when the next request has come."""
    return None if request else KEPT


def test_our_own_requests_are_sent_again_if_a_kept_connection_ends() -> None:
    """They change nothing. A server that breaks its word is not believed any more."""

    async def ask() -> None:
        async with peer(closes_kept_ones) as server:
            upstream = Upstream(f"http://127.0.0.1:{server.port}", "")
            for _ in range(4):
                assert await upstream.ask("/a", {}) == {}
            assert server.requests == [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]
            await upstream.close()

    run(ask())


def test_no_request_is_sent_twice_over_new_connections() -> None:
    async def ask() -> None:
        async with peer(lambda *_: None) as server:
            upstream = Upstream(f"http://127.0.0.1:{server.port}", "")
            with pytest.raises(ServerTrouble):
                await upstream.ask("/a", {})
            assert server.requests == [(0, 0)]
            await upstream.close()

    run(ask())
