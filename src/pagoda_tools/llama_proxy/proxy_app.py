"""The proxy: an aiohttp application in front of one llama-server, its start and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import aiohttp
from aiohttp import web

from pagoda.base.errors import ConfigError
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.base.signal_safe_threads import Pool
from pagoda.config import Config
from pagoda.connectors.llamacpp import SlotStates
from pagoda.connectors.llamacpp.server_requests import ServerTrouble
from pagoda_tools.llama_proxy.client_access import Client, ClientAccess
from pagoda_tools.llama_proxy.finished_work import finished
from pagoda_tools.llama_proxy.load_worth import LoadWorth
from pagoda_tools.llama_proxy.prompt_tokens import ROUTES, prompt_of
from pagoda_tools.llama_proxy.request_body import Body, changed, read_body
from pagoda_tools.llama_proxy.request_flow import (
    FlowOptions,
    RequestFlow,
    passed,
)
from pagoda_tools.llama_proxy.slot_accounts import SlotAccounts, Tokens
from pagoda_tools.llama_proxy.slot_saver import SlotSaver
from pagoda_tools.llama_proxy.upstream import Upstream

T = TypeVar("T")

# of a body: a prompt of millions of tokens, or pictures
_MOST_BODY_BYTES = 256 << 20
_PROMPT_SECONDS = 30.0
# requests that still run at the end
_SHUTDOWN_SECONDS = 5.0
# one state goes through the directory at a time; others look up what is stored meanwhile
_THREADS = 4
_EXIT_SECONDS = 5.0
_WAITING_CONNECTIONS = 1024
_INTERRUPTED = 130  # exit code
_MOVES_KV = b"n_cache_reuse"
STATUS_PATH = "/pagoda"
_HARMLESS = frozenset(
    {"/tokenize", "/detokenize", "/apply-template", "/props", "/health"}
)

_logger = guarded_logger("pagoda.llamacpp")
_log = RateLimitedLog()


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """How the proxy runs.

    Args:
        server_url: of the server behind it.
        server_key: the server's; empty: it has none.
        slot_save_path: the server's.
        listen: host and port for clients.
        api_keys: that clients must send; none: nobody needs one.
        share_all: all keys share what is stored.
        allow_hosts: more names for the headers Host and Origin.
        owns_server: nobody else asks the server, and its slots are the proxy's.
        has_ram_cache: the server keeps copies of slots itself.
        empties_idle_slots: every request that starts may empty the idle slots.
        adapters_are_fixed: nobody changes the server's adapters without the proxy.
        state_bytes: the most bytes of a state file; None: an eighth of the free memory.
        loading_is_off: why nothing is loaded; empty: it is.
        config: the options of the cache.
    """

    server_url: str
    server_key: str = field(default="", repr=False)
    slot_save_path: Path
    listen: tuple[str, int]
    api_keys: Sequence[str] = field(default=(), repr=False)
    share_all: bool = False
    allow_hosts: Sequence[str] = ()
    owns_server: bool = True
    has_ram_cache: bool = False
    empties_idle_slots: bool = False
    adapters_are_fixed: bool = True
    state_bytes: int | None = None
    loading_is_off: str = ""
    config: Config


async def run_proxy(
    options: ProxyOptions,
    ready: Callable[[str], None],
    server_ended: asyncio.Event | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM, or until the server has ended; then save what is new.

    Calls `ready` with one line for people when it answers requests. Raises ConfigError or
    StoreError if the server or the address cannot be used.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        if stop.is_set():
            # who asks twice does not want to wait for what is saved
            os._exit(_INTERRUPTED)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    listening = listening_socket(options.listen)
    try:
        states = await asyncio.to_thread(_open_states, options)
        proxy = LlamaProxy(options, states)
        runner = web.AppRunner(
            proxy.app(),
            access_log=None,
            # a client that has gone lets the server stop computing
            handler_cancellation=True,
            shutdown_timeout=_SHUTDOWN_SECONDS,
        )
        try:
            await runner.setup()
            site = web.SockSite(runner, listening, backlog=_WAITING_CONNECTIONS)
            await site.start()
            port = listening.getsockname()[1]
            ready(_first_line(options.listen[0], port, options, states))
            waits = [asyncio.create_task(stop.wait())]
            if server_ended is not None:
                waits.append(asyncio.create_task(server_ended.wait()))
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        finally:
            await runner.cleanup()
    finally:
        listening.close()


def listening_socket(listen: tuple[str, int]) -> socket.socket:
    """Return a socket that is bound to an address. Raises ConfigError."""
    host, port = listen
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--listen {host}:{port}: {error}; choose another address"
        ) from None
    return listening


def _open_states(options: ProxyOptions) -> SlotStates:
    return SlotStates(
        options.server_url,
        options.slot_save_path,
        api_key=options.server_key,
        state_bytes=options.state_bytes,
        adapters_are_fixed=options.adapters_are_fixed,
        config=options.config,
    )


def _first_line(
    host: str, port: int, options: ProxyOptions, states: SlotStates
) -> str:
    name = f"[{host}]" if ":" in host else host
    off = states.trouble or options.loading_is_off
    kept = f"nothing is stored or loaded: {off}" if off else "prompts are kept"
    return f"http://{name}:{port} answers for llama-server; {kept}"


class LlamaProxy:
    """The application and what it is made of. For one event loop."""

    def __init__(self, options: ProxyOptions, states: SlotStates) -> None:
        """`states`: closed at the end of the application."""
        self._options = options
        self._states = states
        self._access = ClientAccess(
            options.api_keys,
            (options.listen[0], *options.allow_hosts),
            share_all=options.share_all,
        )
        self._pool = Pool(_THREADS, "pagoda-llama", _EXIT_SECONDS)

    def app(self) -> web.Application:
        """Return the application; its parts are made when it starts."""
        app = web.Application(client_max_size=_MOST_BODY_BYTES)
        app.cleanup_ctx.append(self._parts)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _parts(self, _: web.Application) -> AsyncIterator[None]:
        options = self._options
        config = options.config
        self._upstream = Upstream(options.server_url, options.server_key)
        self._accounts = SlotAccounts(self._states.slots)
        self._saver = SlotSaver(
            self._accounts, self._states, self._run, config.chunk_tokens
        )
        self._flow = RequestFlow(
            self._upstream,
            self._states,
            self._accounts,
            self._saver,
            LoadWorth(is_asked=config.worth_it),
            self._run,
            FlowOptions(
                min_gain_tokens=max(config.min_hit_tokens, config.chunk_tokens),
                context_tokens=self._states.context_tokens,
                pins_empty_slots=not options.has_ram_cache,
                empties_idle_slots=options.empties_idle_slots,
                others_ask=not options.owns_server,
                loading_is_off=self._states.trouble or options.loading_is_off,
            ),
        )
        yield
        await self._saver.end()
        await self._run(self._states.close)
        await self._upstream.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, call: Callable[[], T]) -> T:
        """Return what a call returns on another thread."""
        return await asyncio.wrap_future(self._pool.submit(call))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        client = self._access.client_of(request)
        if client.why_refused:
            return _error(
                403,
                "this name or origin is not this server's: start it with "
                f"{client.why_refused}",
            )
        try:
            return await self._answer(request, client)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if request.transport is None or request.transport.is_closing():
                # the client has gone, or got a part of an answer
                return web.Response()
            _log.warn(
                _logger,
                Reason.IO_ERROR,
                f"llama-server did not answer: {error!r}",
            )
            return _error(502, f"llama-server did not answer: {error}")

    async def _answer(
        self, request: web.Request, client: Client
    ) -> web.StreamResponse:
        route = request.path
        if route == STATUS_PATH and client.may_ask:
            return web.json_response(self._status())
        is_question = request.method not in ("GET", "HEAD", "OPTIONS")
        if not client.may_ask or not is_question or route in _HARMLESS:
            body = request.content if request.can_read_body else None
            return await self._pass(request, body, client)
        if route == "/lora-adapters":
            return await self._change_adapters(request, client)
        if route.startswith("/slots/") and self._options.owns_server:
            return _error(
                501,
                "the slots are saved and restored by pagoda: their actions are not for clients",
            )
        text = await request.read()
        tokens: Tokens | None = None
        question = read_body(text) if route in ROUTES else None
        if question is not None and not self._states.trouble:
            tokens = await self._tokens(route, question)
            if tokens is not None:
                if _MOVES_KV in text:
                    text = changed(text, question, {_MOVES_KV.decode(): 0})
                answer = await self._flow.answer(
                    request, route, text, question, tokens, client.salt
                )
                if answer is not None:
                    return answer
        if _MOVES_KV in text:
            # it may leave KV that is not that of its tokens
            self._accounts.taint()
        send = partial(self._pass, request, text, client)
        return await self._flow.passed_on(send, tokens, client.salt)

    def _status(self) -> dict[str, object]:
        """Return what `GET /pagoda` says."""
        states = self._states
        return {
            "trouble": states.trouble,
            "kind": states.kind,
            "context_tokens": states.context_tokens,
            **self._flow.status(),
        }

    async def _tokens(self, route: str, body: Body) -> Tokens | None:
        """Return the tokens of a request; None: it is to be passed on as it is."""
        try:
            async with asyncio.timeout(_PROMPT_SECONDS):
                prompt = await prompt_of(route, body, self._upstream.ask)
        except (ServerTrouble, TimeoutError):
            return None
        return prompt.tokens

    async def _pass(
        self,
        request: web.Request,
        body: bytes | aiohttp.StreamReader | None,
        client: Client,
    ) -> web.StreamResponse:
        """Pass a request and its answer on, byte for byte."""
        async with self._upstream.send(
            request, body, with_key=client.may_ask
        ) as answer:
            return await passed(request, answer)

    async def _change_adapters(
        self, request: web.Request, client: Client
    ) -> web.StreamResponse:
        """Pass a change of the adapters on, and empty the slots: the server would go on to use KV
        of the adapters before.
        """
        text = await request.read()
        async with contextlib.AsyncExitStack() as locks:
            for slot in self._accounts.all:
                await locks.enter_async_context(slot.lock)
            answer = await self._pass(request, text, client)
            await finished(self._empty_all())
            return answer

    async def _empty_all(self) -> None:
        for slot in self._accounts.all:
            try:
                await self._upstream.erase(slot.number)
                slot.clear()
            except ServerTrouble:
                slot.forget()
                slot.is_tainted = True


def _error(status: int, message: str) -> web.Response:
    """Return an error in the form of llama.cpp's server."""
    kinds = {403: "permission_error", 501: "not_supported_error"}
    error = {
        "code": status,
        "message": message,
        "type": kinds.get(status, "unavailable_error"),
    }
    return web.json_response({"error": error}, status=status)
