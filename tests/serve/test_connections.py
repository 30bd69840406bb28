"""Which connection makes room for a new one, if there are too many."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from aiohttp import web

from pagoda_tools.serve.access import AccessRules, ServeLimits
from pagoda_tools.serve.connections import Connections, _client_of
from pagoda_tools.serve.server import ServeOptions, make_app

TOKEN = "a-token-of-the-tests"
MOST = 4


async def _connect(
    port: int, own: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(own, 0))


async def _ask(
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter], token: str = ""
) -> None:
    reader, writer = client
    sent = f"Authorization: Bearer {token}\r\n" if token else ""
    writer.write(
        f"GET /healthz HTTP/1.1\r\nHost: localhost\r\n{sent}\r\n".encode()
    )
    assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(12)


async def _has_ended(
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> bool:
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(client[0].read(1), 20.0) == b""
    return True


def test_the_quietest_stranger_of_the_busiest_address_makes_room() -> None:
    async def run() -> None:
        limits = ServeLimits(connections=MOST, header_seconds=600.0)
        access = AccessRules(TOKEN, ["localhost"], None, limits)
        runner = web.AppRunner(
            make_app(ServeOptions(find_stores=list, limits=limits), access)
        )
        await runner.setup()
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert runner.server is not None
        connections = Connections(runner.server, listening, None, limits)
        try:
            neighbour = await _connect(port, "127.0.0.1")
            await _ask(neighbour, TOKEN)
            lonely = await _connect(port, "127.0.0.2")
            await _ask(lonely)
            first, second = [await _connect(port, "127.0.0.3") for _ in range(2)]
            await _ask(second)
            await _ask(first)  # so the second is quiet for longer
            fifth = await _connect(port, "127.0.0.4")
            await _ask(fifth)
            assert await _has_ended(second)
            for client in (first, lonely):
                await _ask(client)
            await _ask(neighbour, TOKEN)
            # now four addresses have one connection each, and the strangers are first, lonely and
            # fifth
            await _ask(lonely)
            await _ask(first)
            sixth = await _connect(port, "127.0.0.5")
            await _ask(sixth)
            assert await _has_ended(fifth)
            seventh = [await _connect(port, "127.0.0.6") for _ in range(3)]
            assert await _has_ended(seventh[0])  # by then this address had most
            for client in (sixth, *seventh[1:]):
                await _ask(client)
            await _ask(neighbour, TOKEN)  # the only one that has shown the token
            for _, writer in (
                neighbour,
                lonely,
                first,
                second,
                fifth,
                sixth,
                *seventh,
            ):
                writer.close()
        finally:
            connections.close()
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(run(), 60.0))


@pytest.mark.parametrize(
    ("family", "bound", "client"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET6, "::1", "0000000000000000"),
    ],
)
def test_the_client_of_a_connection_is_its_address(
    family: socket.AddressFamily, bound: str, client: str
) -> None:
    with (
        socket.create_server((bound, 0), family=family) as listening,
        socket.create_connection(listening.getsockname()[:2]),
        listening.accept()[0] as accepted,
    ):
        assert _client_of(accepted) == client
    one, other = socket.socketpair()
    with one, other:
        assert _client_of(one) == ""
