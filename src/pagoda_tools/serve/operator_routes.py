"""The operator's routes: the page and its files, its data as JSON and as a stream of events, login,
the changes.

`server.make_app` adds them. Answers come from `LiveFeed` and `Operations`; operations run on a
thread, one at a time. `AccessRules` has checked the token. This module refuses requests that a
browser sends for another site's page, also on a Unix socket, which browsers reach through a
forwarded port.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import msgspec
from aiohttp import web

from pagoda.base.errors import PagodaError
from pagoda.ledger import Ledger
from pagoda_tools.serve.access import (
    COOKIE,
    SESSION_SECONDS,
    AccessRules,
    Handler,
    TooManyWrongTokens,
    names_this_server,
    refusal,
)
from pagoda_tools.serve.blocking_calls import CALLS, BlockingCallPool
from pagoda_tools.serve.chunk_routes import READ_ONLY, STORES, small_body
from pagoda_tools.serve.live_feed import LiveFeed, TooManyReaders
from pagoda_tools.serve.operations import Operations, PromptTools
from pagoda_tools.serve.overview import Overview, RemoteUsage

MOST_BODY_BYTES = 8 << 20  # a million token ids
_MOST_LOGIN_BYTES = 4096
_SEND_SECONDS = 5.0  # for one event; a slower reader is dropped
# how long a request waits for its operation, which continues afterwards
_WORK_SECONDS = 60.0
_TYPES = {
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "html": "text/html",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_Operation = Callable[[Mapping[str, object]], Mapping[str, object]]


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """The options of the page from the command line; see `Overview` and `Operations`."""

    prompts: PromptTools
    remotes: Callable[[], Sequence[RemoteUsage]] = tuple
    shared: Sequence[str] = ()
    settings: Sequence[tuple[str, str]] = ()
    gpu_price: float | None = None


class OperatorRoutes:
    """The routes of one server. `add_to` adds them to an application, whose end closes the
    streams.
    """

    def __init__(
        self, options: PageOptions, access: AccessRules, app: web.Application
    ) -> None:
        """Prepare; `app` must have STORES, CALLS and READ_ONLY. If it is read-only, every change is
        refused.
        """
        stores = app[STORES]

        def ledgers() -> Sequence[Ledger]:
            """Return the ledgers of all stores, also of those that were just created."""
            # the server scans again, and logs the error
            with contextlib.suppress(PagodaError, OSError):
                stores.scan()
            return stores.ledgers()

        overview = Overview(
            ledgers,
            options.remotes,
            unopened=stores.unopened,
            settings=options.settings,
            gpu_price=options.gpu_price,
            tokenizer=options.prompts.tokenize is not None,
            login=access.needs_token,
        )
        self._feed = LiveFeed(overview, app[CALLS])
        self._operations = Operations(stores, options.prompts, options.shared)
        self._access = access
        # chunks do not wait for operations
        self._people = BlockingCallPool(threads=1, most_waiting=8)
        self._read_only = app[READ_ONLY]
        self._working = asyncio.Semaphore(1)
        folder = files("pagoda_tools.serve").joinpath("page")
        self._files = {
            file.name: file.read_bytes()
            for file in folder.iterdir()
            if file.name.rpartition(".")[2] in _TYPES
            and file.name != "login.html"
        }
        css = self._files["page.css"].decode()
        self._form, self._form_policy = _login_form(
            folder.joinpath("login.html").read_text(), css
        )

    def add_to(self, app: web.Application) -> None:
        """Add the routes; `/` and `/login` are open, and show nothing without the token."""
        self._access.open_paths |= {"/", "/login"}
        router = app.router
        work = self._operations
        router.add_get("/", self._own(self._index))
        router.add_get("/page/{name}", self._own(self._file))
        router.add_get("/stats.json", self._own(self._stats))
        router.add_get("/events", self._own(self._events))
        router.add_get("/history.json", self._own(self._history))
        router.add_post("/login", self._own(self._log_in))
        router.add_post("/logout", self._own(self._log_out))
        router.add_post("/explain", self._own(self._operating(work.explain)))
        for change in (work.clear, work.pin, work.unpin, work.warm):
            handler = (
                self._refuse_change
                if self._read_only
                else self._operating(change)
            )
            router.add_post(f"/{change.__name__}", self._own(handler))

        async def start(_: web.Application) -> None:
            self._feed.start()

        async def close(_: web.Application) -> None:
            self._feed.close()
            self._people.close()

        app.on_startup.append(start)
        app.on_shutdown.append(close)

    def _own(self, handler: Handler) -> Handler:
        """Return a handler that refuses a change that a browser sends for a page of another
        site.
        """

        async def handle(request: web.Request) -> web.StreamResponse:
            site = request.headers.get("Sec-Fetch-Site", "none")
            from_here = names_this_server(request) and site in (
                "same-origin",
                "none",
            )
            if request.method == "POST" and not from_here:
                return refusal(403, "other_site", "use the page of this server")
            return await handler(request)

        return handle

    # ---- reading

    async def _index(self, request: web.Request) -> web.Response:
        if self._access.lets_in(request):
            return self._sent("index.html")
        return self._login_page()

    def _login_page(self, said: str = "", status: int = 401) -> web.Response:
        body = self._form.replace(
            b"</h1>", f'</h1><p class="trouble" role="alert">{said}</p>'.encode()
        )
        headers = {**_HEADERS, "Content-Security-Policy": self._form_policy}
        return web.Response(
            status=status,
            body=body,
            content_type="text/html",
            charset="utf-8",
            headers=headers,
        )

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound
        return self._sent(name)

    def _sent(self, name: str) -> web.Response:
        kind = _TYPES[name.rpartition(".")[2]]
        return web.Response(
            body=self._files[name],
            content_type=kind,
            charset="utf-8",
            headers=_HEADERS,
        )

    async def _stats(self, _: web.Request) -> web.Response:
        try:
            return web.json_response(await self._feed.latest(), headers=_HEADERS)
        except TimeoutError:
            return _no_answer()

    async def _history(self, _: web.Request) -> web.Response:
        try:
            minutes = await self._feed.minutes()
        except TimeoutError:
            return _no_answer()
        return web.json_response({"minutes": minutes}, headers=_HEADERS)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                **_HEADERS,
                "Content-Type": "text/event-stream",
                "X-Accel-Buffering": "no",  # a proxy that gathers events makes them old
            }
        )
        try:
            async with self._feed.reader() as queue:
                await response.prepare(request)
                while (event := await queue.get()) is not None:
                    async with asyncio.timeout(_SEND_SECONDS):
                        await response.write(event)
        except TooManyReaders as full:
            return refusal(503, "too_many_streams", str(full))
        except TimeoutError:
            if not response.prepared:
                return _no_answer()
            # drop the events that the reader did not take
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:  # the page was closed
            pass
        return response

    # ---- changes

    async def _log_in(self, request: web.Request) -> web.StreamResponse:
        """Take the token, as JSON or from the form, and set the cookie of the page."""
        body = await small_body(request, _MOST_LOGIN_BYTES)
        is_form = request.content_type == "application/x-www-form-urlencoded"
        try:
            cookie = self._access.log_in(request, _token_in(body, is_form))
        except TooManyWrongTokens:
            many = (
                "there were too many wrong tokens: wait a moment, then try again"
            )
            return (
                self._login_page(many, 429)
                if is_form
                else refusal(429, "too_many_wrong_tokens", many)
            )
        if cookie is None:
            wrong = "this is not the token"
            return (
                self._login_page(wrong)
                if is_form
                else refusal(401, "token", wrong)
            )
        response = web.json_response({"ok": True})
        if is_form:
            response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(
            COOKIE,
            cookie,
            max_age=SESSION_SECONDS,
            httponly=True,
            samesite="Strict",
            secure=request.secure,
        )
        response.headers.update(_HEADERS)
        return response

    async def _log_out(self, request: web.Request) -> web.Response:
        """End the session of the cookie; another login is needed."""
        self._access.log_out(request)
        response = web.json_response({"ok": True}, headers=_HEADERS)
        response.del_cookie(COOKIE)
        return response

    async def _refuse_change(self, _: web.Request) -> web.StreamResponse:
        return refusal(403, "read_only", "start the server without --read-only")

    def _operating(self, operation: _Operation) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            if request.content_type != "application/json":
                return refusal(415, "content_type", "send application/json")
            try:
                asked = msgspec.json.decode(
                    await small_body(request, MOST_BODY_BYTES),
                    type=dict[str, object],
                )
            except (ValueError, RecursionError):
                return refusal(400, "not_json", "send one JSON object")
            try:
                async with asyncio.timeout(_WORK_SECONDS), self._working:
                    answer = await self._people.run(operation, asked)
            except ValueError as wrong:
                return refusal(400, "wrong_use", str(wrong))
            except TimeoutError:
                return refusal(
                    503,
                    "deadline",
                    f"it takes more than {_WORK_SECONDS:g} s: look at the page, then try again",
                )
            except PagodaError as trouble:
                return refusal(503, "store_unavailable", str(trouble))
            finally:
                self._feed.changed()
            return web.json_response(answer, headers=_HEADERS)

        return handle


def _no_answer() -> web.Response:
    return refusal(
        503, "deadline", "look for a stopped process: the stores do not answer"
    )


class _Login(msgspec.Struct):
    """The JSON of a login."""

    token: str


def _token_in(body: bytes, is_form: bool) -> str:
    from urllib.parse import parse_qs

    if is_form:
        return parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0]
    try:
        return msgspec.json.decode(body, type=_Login).token
    except (ValueError, RecursionError):
        return ""


def _login_form(form: str, css: str) -> tuple[bytes, str]:
    """Return a page with its style inside, because other files need the token, and the policy that
    allows the style.
    """
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = _POLICY.replace(
        "style-src 'self'", f"style-src 'sha256-{digest}'"
    ).replace("img-src 'self'", "img-src data:")
    return form.replace("/* page.css */", css).encode(), policy
