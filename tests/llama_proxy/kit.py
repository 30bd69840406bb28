"""A proxy inside the test's process, in front of a real server of llama.cpp."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from pagoda.config import Config
from pagoda.connectors.llamacpp import SlotStates
from pagoda_tools.llama_proxy.proxy_app import (
    LlamaProxy,
    ProxyOptions,
    listening_socket,
)
from testbed.llama_servers import LlamaServer
from testbed.patience import wait_until

CHUNK = 64
# byte b is token 3 + b: only the letters a to z, which every build writes
ONLY_LETTERS = [[token, False] for token in range(320) if not 100 <= token <= 125]
GREEDY = {"temperature": 0, "logit_bias": ONLY_LETTERS, "ignore_eos": True}


class Answer(NamedTuple):
    """What a client gets."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.body)
        return found

    @property
    def told(self) -> dict[str, str]:
        """The members of the header."""
        parts = self.headers.get("X-Pagoda", "").split("; ")
        return dict(part.split("=", 1) for part in parts if part)

    @property
    def text(self) -> str:
        """The text of the answer, streamed or not, of any of the routes."""
        if not self.headers["Content-Type"].startswith("text/event-stream"):
            return _text_of(self.json)
        return "".join(_text_of(event) for event in self.events)

    @property
    def events(self) -> list[dict[str, object]]:
        lines = self.body.decode().splitlines()
        data = [line[6:] for line in lines if line.startswith("data: ")]
        return [json.loads(one) for one in data if one != "[DONE]"]


def _text_of(event: dict[str, object]) -> str:
    kind = str(event.get("type", ""))
    if kind == "response.output_text.delta":
        return str(event["delta"])
    if kind == "content_block_delta":
        return str(event["delta"]["text"])  # type: ignore[index]
    if kind == "message":
        return str(event["content"][0]["text"])  # type: ignore[index]
    if event.get("object") == "response" and event.get("output"):
        return str(event["output"][0]["content"][0]["text"])  # type: ignore[index]
    if kind:
        return ""
    if "content" in event:
        return str(event["content"])
    choices: list[dict[str, dict[str, object]]] = event.get("choices", [])  # type: ignore[assignment]
    if not choices:
        return ""
    choice = choices[0]
    if "text" in choice:
        return str(choice["text"])
    message = choice.get("message") or choice.get("delta") or {}
    return str(message.get("content") or "")


class RunningProxy:
    """A proxy on a loopback port, and the requests of its clients."""

    def __init__(self, port: int, proxy: LlamaProxy) -> None:
        self.port = port
        self.proxy = proxy
        self.loop: asyncio.AbstractEventLoop | None = None

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        **headers: str,
    ) -> Answer:
        connection = self.connection()
        with contextlib.closing(connection):
            sent = {
                name.replace("_", "-"): text for name, text in headers.items()
            }
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            return Answer(
                response.status, dict(response.getheaders()), response.read()
            )

    def post(self, path: str, body: dict[str, object], key: str = "") -> Answer:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        text = json.dumps(body).encode()
        return self.send(
            "POST", path, text, Content_Type="application/json", **headers
        )

    def complete(self, prompt: object, **more: object) -> Answer:
        """Ask /completion for eight greedy letters."""
        body = {"prompt": prompt, "n_predict": 8, **GREEDY, **more}
        return self.post("/completion", body)

    @contextlib.contextmanager
    def all_slots_taken(self) -> Iterator[None]:
        """Take all slots, as requests do that compute for long."""
        accounts = self.proxy._accounts
        assert self.loop is not None

        async def take() -> None:
            for slot in accounts.all:
                await slot.lock.acquire()

        async def give_back() -> None:
            for slot in accounts.all:
                accounts.give_back(slot)

        asyncio.run_coroutine_threadsafe(take(), self.loop).result(60)
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(give_back(), self.loop).result(60)

    def status(self) -> dict[str, object]:
        return self.send("GET", "/pagoda").json

    def slot(self, number: int) -> dict[str, object]:
        """What it says of one slot."""
        found: list[dict[str, object]] = self.status()["slots"]  # type: ignore[assignment]
        return found[number]

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = self.status()["counts"]  # type: ignore[assignment]
        return counts


def forget(proxy: RunningProxy) -> None:
    """Account for slots that were emptied beside the proxy, when no request has one any more: what
    its answer says is noted after it was passed on.
    """
    slots = proxy.proxy._accounts
    wait_until(lambda: len(slots.free) == len(slots.all))
    for slot in slots.all:
        slot.clear()


@contextlib.contextmanager
def running_proxy(
    server: LlamaServer,
    disk: Path | None = None,
    *,
    url: str = "",
    worth_it: bool = False,
    hints: str = "auto",
    **options: object,
) -> Iterator[RunningProxy]:
    """Run a proxy. `disk`: where it keeps KV; None: in memory, for as long as it runs. `url`:
    instead of the server's.
    """
    settings: dict[str, object] = {
        "host_size": 0 if disk else "32MiB",
        "host_shared": False,
        "chunk_tokens": CHUNK,
        "worth_it": worth_it,
        "hints": hints,
    }
    if disk is not None:
        settings |= {"disk_path": str(disk), "disk_size": "64MiB"}
    config = Config(**settings)  # type: ignore[arg-type]
    listening = listening_socket(("127.0.0.1", 0))
    made = ProxyOptions(
        server_url=url or server.url,
        slot_save_path=server.states,
        listen=("127.0.0.1", listening.getsockname()[1]),
        config=config,
        **options,  # type: ignore[arg-type]
    )
    states = SlotStates(
        made.server_url,
        server.states,
        api_key=made.server_key,
        adapters_are_fixed=made.adapters_are_fixed,
        state_bytes=made.state_bytes,
        config=config,
    )
    running = RunningProxy(made.listen[1], LlamaProxy(made, states))
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        runner = web.AppRunner(
            running.proxy.app(), access_log=None, handler_cancellation=True
        )
        await runner.setup()
        await web.SockSite(runner, listening).start()
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    running.loop = loop
    thread.start()
    try:
        assert started.wait(120)
        yield running
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(120)
        listening.close()
        loop.close()
