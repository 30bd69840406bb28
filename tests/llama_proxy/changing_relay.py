"""A server between the proxy and llama.cpp's server, which changes what that answers: as a later
build might.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import aiohttp
from aiohttp import web

from testbed.llama_servers import LlamaServer


@dataclass(frozen=True)
class Reply:
    """An answer of the server. `piece_bytes`: it is sent in pieces of so many; 0: in one."""

    status: int
    kind: str
    body: bytes
    piece_bytes: int = 0

    def with_body(self, body: bytes) -> Reply:
        return replace(self, body=body)


# the path with its query, and what the server has answered
Change = Callable[[str, Reply], Reply]


class ChangingRelay:
    """Passes requests on, and changes the answers while it is on."""

    def __init__(self, server: LlamaServer, change: Change) -> None:
        self._server = server.url
        self._change = change
        self.is_on = False
        self.changed = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                request.method,
                self._server + request.raw_path,
                data=body,
                headers={"Content-Type": "application/json"},
            ) as said,
        ):
            kind = said.headers.get("Content-Type", "")
            reply = Reply(said.status, kind, await said.read())
        if self.is_on:
            changed = self._change(request.raw_path, reply)
            self.changed += changed != reply
            reply = changed
        response = web.StreamResponse(
            status=reply.status, headers={"Content-Type": reply.kind}
        )
        await response.prepare(request)
        step = reply.piece_bytes or max(len(reply.body), 1)
        for begin in range(0, len(reply.body), step):
            await response.write(reply.body[begin : begin + step])
            await asyncio.sleep(0)
        await response.write_eof()
        return response


@contextlib.contextmanager
def changing_relay(
    server: LlamaServer, change: Change
) -> Iterator[ChangingRelay]:
    """Run one on a thread; it is off."""
    relay = ChangingRelay(server, change)
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", relay.answer)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        relay.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    try:
        assert started.wait(60)
        yield relay
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
