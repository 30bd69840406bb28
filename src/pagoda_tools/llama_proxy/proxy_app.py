"""The proxy: an aiohttp application in front of one llama-server, its start and its end."""

from __future__ import annotations

import asyncio
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
from pagoda_tools.llama_proxy.client_hints import hinted_body, refuse_all
from pagoda_tools.llama_proxy.finished_work import finished
from pagoda_tools.llama_proxy.load_worth import LoadWorth
from pagoda_tools.llama_proxy.prompt_tokens import (
    ROUTES,
    RequestPrompt,
    is_several,
    prompt_of,
)
from pagoda_tools.llama_proxy.request_body import (
    Body,
    as_the_server_reads,
    changed,
    has_member,
    read_body,
)
from pagoda_tools.llama_proxy.request_flow import AtEnd, RequestFlow
from pagoda_tools.llama_proxy.request_turn import Question, printable
from pagoda_tools.llama_proxy.slot_accounts import (
    SlotAccount,
    SlotAccounts,
)
from pagoda_tools.llama_proxy.slot_preparation import FlowOptions
from pagoda_tools.llama_proxy.slot_questions import passed
from pagoda_tools.llama_proxy.slot_saver import SlotSaver
from pagoda_tools.llama_proxy.upstream import Upstream, answer_headers

T = TypeVar("T")

# of a body: a prompt of millions of tokens, or pictures
_MOST_BODY_BYTES = 256 << 20
_PROMPT_SECONDS = 30.0
_ADAPTER_SECONDS = 60.0
# requests that still run at the end
_SHUTDOWN_SECONDS = 5.0
# threads beside one for each slot: one state goes through the directory at a time, and others look
# up what is stored meanwhile
_LOOKING_UP = 4
_EXIT_SECONDS = 5.0
_WAITING_CONNECTIONS = 1024
_INTERRUPTED = 130  # exit code
_MOVES_KV = "n_cache_reuse"
_CHOOSES_ADAPTERS = "lora"
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
        empties_idle_slots: every request that starts may empty the idle slots.
        may_have_ram_cache: the server may keep copies of what its slots held (`--cache-ram`).
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
    empties_idle_slots: bool = False
    may_have_ram_cache: bool = True
    adapters_are_fixed: bool = True
    state_bytes: int | None = None
    loading_is_off: str = ""
    config: Config


async def run_proxy(
    options: ProxyOptions,
    ready: Callable[[str], None],
    say: Callable[[str], None],
    server_ended: asyncio.Event | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM, or until the server has ended; then save what is new.

    Calls `ready` with one line for people when it answers requests, and `say` with one if the end
    takes a while. Raises ConfigError or
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
            if stop.is_set() and (awaited := proxy.awaited_at_the_end()):
                say(f"ending: {awaited}; the same signal again ends at once")
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
    kept = "prompts are kept"
    if options.loading_is_off:
        kept = f"nothing is loaded: {options.loading_is_off}"
    if states.trouble:
        kept = "nothing is stored or loaded, as the line above says"
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
        self._pool = Pool(
            states.slots + _LOOKING_UP, "pagoda-llama", _EXIT_SECONDS
        )

    def app(self) -> web.Application:
        """Return the application; its parts are made when it starts."""
        app = web.Application(client_max_size=_MOST_BODY_BYTES)
        app.cleanup_ctx.append(self._parts)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    def awaited_at_the_end(self) -> str:
        """Return what the end waits for, as text for people; empty: nothing."""
        parts = []
        slots = self._accounts.all
        if any(slot.lock.locked() and not slot.is_saving for slot in slots):
            parts.append(f"running answers have {_SHUTDOWN_SECONDS:.0f} s more")
        if any(slot.is_saving or slot.save_at is not None for slot in slots):
            parts.append("new slots are saved")
        return ", then ".join(parts)

    async def _parts(self, _: web.Application) -> AsyncIterator[None]:
        options = self._options
        config = options.config
        self._upstream = Upstream(options.server_url, options.server_key)
        self._accounts = SlotAccounts(
            self._states.slots, may_have_ram_cache=options.may_have_ram_cache
        )
        if not options.owns_server:
            # others may have used it before
            self._accounts.forget_used(None, 0.0)
        worth = LoadWorth(is_asked=config.worth_it)
        self._saver = SlotSaver(
            self._accounts,
            self._states,
            self._run,
            config.chunk_tokens,
            worth,
            saves_at_once=options.empties_idle_slots,
        )
        self._flow = RequestFlow(
            self._upstream,
            self._states,
            self._accounts,
            self._saver,
            worth,
            self._run,
            FlowOptions(
                min_gain_tokens=max(config.min_hit_tokens, config.chunk_tokens),
                context_tokens=self._states.context_tokens,
                empties_idle_slots=options.empties_idle_slots,
                others_ask=not options.owns_server,
                loading_is_off=options.loading_is_off,
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
        except web.RequestPayloadError as error:
            return _unreadable(request, error)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if request.transport is None or request.transport.is_closing():
                # the client has gone, or got a part of an answer
                return web.Response()
            if (of_body := request.content.exception()) is not None:
                # seen while it was passed on
                return _unreadable(request, of_body)
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
        if route.startswith("/slots/"):
            return _error(
                501,
                "the slots are saved and restored by pagoda: their actions are not for clients",
            )
        text = await request.read()
        question: Body | None = None
        try:
            if route in ROUTES:
                text = as_the_server_reads(text)
                question = read_body(text)
        except RecursionError:
            return _error(400, "the body is nested too deep")
        if question is None:
            return await self._pass_unknown(request, text, client)
        if question.get(_MOVES_KV):
            # the KV in the slot would not be that of its tokens
            text = changed(text, question, {_MOVES_KV: 0})
            question[_MOVES_KV] = 0
        text, parsed = hinted_body(request, text, question)
        for hint, refusal in parsed.refused.items():
            self._states.refuse_hint(hint, refusal)
        prompt = await self._prompt(route, question, text)
        why = prompt.why
        if prompt.tokens is not None:
            asked = Question(
                request=request,
                route=route,
                text=text,
                body=question,
                tokens=prompt.tokens,
                salt=client.salt,
                hints=parsed.hints,
            )
            answer = await self._flow.answer(asked)
            if answer is not None:
                return answer
            why = "the server chose a slot: none was free in time"
        self._flow.counts["passed_on"] += 1
        refuse_all(self._states, parsed.hints, "the server chose a slot")
        header = f'why="{printable(why)}"'
        if question.get(_CHOOSES_ADAPTERS):
            return await self._pass_with_adapters(
                request, text, question, client, header
            )
        if client.salt or self._accounts.is_any_tainted:
            # what the server takes may have KV that is not for this request
            text = changed(text, question, {"cache_prompt": False})
        send = partial(self._pass, request, text, client, header)
        return await self._flow.passed_on(send, prompt.tokens, client.salt)

    async def _pass_with_adapters(
        self,
        request: web.Request,
        text: bytes,
        question: Body,
        client: Client,
        header: str,
    ) -> web.StreamResponse:
        """Pass on a request that chooses adapters: what it leaves in the server is not for others,
        and the server does not know that.
        """
        added: Body = {"cache_prompt": False} if client.salt else {}
        self._accounts.taint_ram()

        async def send(slot: int, at_end: AtEnd) -> web.StreamResponse:
            sent = changed(text, question, {**added, "id_slot": slot})
            return await self._pass(request, sent, client, header, at_end)

        try:
            if not is_several(question):
                adapters = question[_CHOOSES_ADAPTERS]
                answer = await self._flow.with_adapters(
                    send, adapters, client.salt
                )
                if answer is not None:
                    return answer
            # the server chooses, perhaps several slots
            sent = changed(text, question, added)
            anywhere = partial(self._pass, request, sent, client, header)
            return await self._flow.passed_on(
                anywhere, None, client.salt, taints=True
            )
        except ServerTrouble as trouble:
            raise aiohttp.ClientError(str(trouble)) from trouble

    async def _pass_unknown(
        self, request: web.Request, text: bytes, client: Client
    ) -> web.StreamResponse:
        """Pass on what may or may not use a slot."""
        header = ""
        if request.path in ROUTES:
            self._flow.counts["passed_on"] += 1
            header = 'why="the body is no JSON object"'
        is_moving = has_member(text, (_MOVES_KV, _CHOOSES_ADAPTERS))
        send = partial(self._pass, request, text, client, header)
        return await self._flow.passed_on(
            send, None, client.salt, taints=is_moving
        )

    def _status(self) -> dict[str, object]:
        """Return what `GET /pagoda` says."""
        states = self._states
        return {
            "trouble": states.trouble,
            "kind": states.kind,
            "context_tokens": states.context_tokens,
            "hints": states.hint_counts(),
            **self._flow.status(),
        }

    async def _prompt(self, route: str, body: Body, text: bytes) -> RequestPrompt:
        """Return the tokens of a request, or why it is to be passed on as it is."""
        try:
            async with asyncio.timeout(_PROMPT_SECONDS):
                return await prompt_of(route, body, self._upstream.ask, text)
        except (ServerTrouble, TimeoutError) as error:
            why = f"the server did not tell the tokens: {error}"
            _log.warn(_logger, Reason.IO_ERROR, f"{route}: {why}")
            return RequestPrompt(None, why)

    async def _pass(
        self,
        request: web.Request,
        body: bytes | aiohttp.StreamReader | None,
        client: Client,
        header: str = "",
        at_end: AtEnd | None = None,
    ) -> web.StreamResponse:
        """Pass a request and its answer on, byte for byte."""
        async with self._upstream.send(
            request, body, with_key=client.may_ask
        ) as answer:
            return await passed(request, answer, header, at_end)

    async def _change_adapters(
        self, request: web.Request, client: Client
    ) -> web.StreamResponse:
        """Pass a change of the adapters on, and empty the slots: the server would go on to use KV
        of the adapters before.
        """
        text = await request.read()
        held: list[SlotAccount] = []
        try:
            for slot in self._accounts.all:
                await slot.lock.acquire()
                held.append(slot)
                await self._saver.save(slot)
            # also if the client goes meanwhile: the server may have changed them
            return await finished(self._changed_adapters(request, text, client))
        finally:
            for slot in held:
                self._accounts.give_back(slot)

    async def _changed_adapters(
        self, request: web.Request, text: bytes, client: Client
    ) -> web.StreamResponse:
        # until they are emptied
        self._accounts.taint()
        async with asyncio.timeout(_ADAPTER_SECONDS):
            async with self._upstream.question(
                request, text, with_key=client.may_ask
            ) as answer:
                content = await answer.read()
        await self._empty_all()
        return web.Response(
            status=answer.status,
            reason=answer.reason,
            headers=answer_headers(answer),
            body=content,
        )

    async def _empty_all(self) -> None:
        for slot in self._accounts.all:
            try:
                await self._upstream.erase(slot.number)
                slot.clear()
            except ServerTrouble:
                # it stays tainted
                slot.forget()


def _unreadable(request: web.Request, error: BaseException) -> web.Response:
    """Return an error for a body that is not what its headers say."""
    # aiohttp would wait for the rest of it, and log the same error with a traceback
    request.content.feed_eof()
    refusal = _error(400, f"the body cannot be read: {error}")
    refusal.force_close()
    return refusal


def _error(status: int, message: str) -> web.Response:
    """Return an error in the form of llama.cpp's server."""
    kinds = {
        400: "invalid_request_error",
        403: "permission_error",
        501: "not_supported_error",
    }
    error = {
        "code": status,
        "message": message,
        "type": kinds.get(status, "unavailable_error"),
    }
    return web.json_response({"error": error}, status=status)
