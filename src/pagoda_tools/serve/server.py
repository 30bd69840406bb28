"""The server: an aiohttp application on one socket, its start and its end.

`pagoda serve` calls `serve`. A new group of routes gets a module with an `add_routes(app)`, which
`make_app` calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import stat
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from pagoda.base.errors import ClosedError, ConfigError, PagodaError
from pagoda.base.file_lock import lock_file
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.tiers.remote.peer_directory import PeerDirectory
from pagoda_tools.serve import chunk_routes, metrics_routes
from pagoda_tools.serve.access import (
    AccessRules,
    Handler,
    ServeLimits,
    break_connection,
    default_socket,
    private_directory,
    refusal,
)
from pagoda_tools.serve.announcer import Announcer
from pagoda_tools.serve.blocking_calls import (
    CALLS,
    BlockingCallPool,
    OverloadedError,
)
from pagoda_tools.serve.chunk_routes import COUNTS, LIMITS, READ_ONLY, STORES
from pagoda_tools.serve.connections import Connection, Connections
from pagoda_tools.serve.operator_routes import OperatorRoutes, PageOptions
from pagoda_tools.serve.served_stores import HostRoom, ServedStores

P = ParamSpec("P")
T = TypeVar("T")

ACCESS: web.AppKey[AccessRules] = web.AppKey("access", AccessRules)

_SCAN_SECONDS = 2.0
# accepted in this order; when they are more, an honest client is refused (Unix) or tries again
# after a second (TCP)
_WAITING_CONNECTIONS = 4096
_LOCK_SECONDS = 5.0  # to wait for another server that starts
# for requests that still run at the end, and again after their cancellation
_SHUTDOWN_SECONDS = 0.7
# to close the stores then; a store that another process holds for longer is closed by the end of
# this process
_CLOSING_SECONDS = 0.7

_logger = guarded_logger("pagoda.serve")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of the server. `listen`: (host, port), or None for the Unix socket at
    `socket_path`.
    """

    find_stores: Callable[[], Sequence[Path]]
    listen: tuple[str, int] | None = None
    socket_path: Path = field(default_factory=default_socket)
    token: str | None = field(default=None, repr=False)
    allow_hosts: Sequence[str] = ()
    read_only: bool = False
    host_room: HostRoom | None = None
    certificate: Path | None = None
    certificate_key: Path | None = None
    directory: PeerDirectory | None = None
    """The directory for announcements: which chunks are at `advertise`, or at the address of the
    server.
    """
    advertise: str | None = None
    page: PageOptions | None = None
    """None: the server has no page for operators."""
    limits: ServeLimits = field(default_factory=ServeLimits)


def make_app(options: ServeOptions, access: AccessRules) -> web.Application:
    """Return the application with all its routes. It opens its stores when it starts."""
    app = web.Application(middlewares=[_in_time, _failures, access.middleware])
    app[ACCESS] = access
    app[LIMITS] = options.limits
    app[READ_ONLY] = options.read_only
    app[COUNTS] = Counter()
    app[STORES] = ServedStores(options.find_stores, options.host_room)
    app[CALLS] = BlockingCallPool()
    app.cleanup_ctx.append(_open_stores)
    app.on_response_prepare.append(access.prove)
    app.router.add_get("/healthz", _healthz)
    chunk_routes.add_routes(app)
    metrics_routes.add_routes(app, options.find_stores)
    if options.page is not None:
        OperatorRoutes(options.page, access, app).add_to(app)
    return app


async def serve(options: ServeOptions, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Calls `ready` with the URL when it answers requests. Raises
    ConfigError.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    listening = _listen(options)
    token, port = (
        (options.token, int(listening.getsockname()[1]))
        if options.listen
        else (None, None)
    )
    advertised = urlsplit(options.advertise or "").netloc
    access = AccessRules(
        token, _hosts(options), port, options.limits, advertised=advertised
    )
    app = make_app(options, access)
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS
    )
    try:
        await runner.setup()
        assert runner.server is not None
        connections = Connections(
            runner.server, listening, _tls(options), options.limits
        )
        announcer = None
        if options.directory is not None:
            url = partial(_advertised, options, listening)
            announcer = Announcer(
                options.directory, url, app[STORES], app[COUNTS]
            )
        try:
            ready(url_of(options, listening))
            await stop.wait()
        finally:
            # while it still listens: later the path may belong to the next server
            if options.listen is None:
                options.socket_path.unlink(missing_ok=True)
            connections.close()
            if announcer is not None:
                await asyncio.to_thread(announcer.close)
    finally:
        await runner.cleanup()
        listening.close()


def url_of(options: ServeOptions, listening: socket.socket) -> str:
    """Return the URL of the server."""
    if options.listen is None:
        return f"unix:{options.socket_path}"
    host, port = listening.getsockname()[:2]
    return f"{'https' if options.certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"  # noqa: E501


def _advertised(
    options: ServeOptions, listening: socket.socket, own_host: str
) -> str:
    """Return the URL of the server for other machines. `own_host`: this machine's address, if it
    listens on all.
    """
    if options.advertise is not None:
        return options.advertise
    url = urlsplit(url_of(options, listening))
    return (
        f"{url.scheme}://{own_host}:{url.port}"
        if url.hostname in ("0.0.0.0", "::")
        else url.geturl()
    )


# ---- sockets -------------------------------------------------------------------------------------


def _listen(options: ServeOptions) -> socket.socket:
    """Return a listening socket, of which no other server has the address. Raises ConfigError with
    the remedy.
    """
    where = (
        f"unix:{options.socket_path}"
        if options.listen is None
        else ":".join(map(str, options.listen))
    )
    try:
        if options.listen is None:
            return _unix_socket(options.socket_path)
        host, port = options.listen
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_WAITING_CONNECTIONS)
        return listening
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--listen {where}: {error}; choose another address"
        ) from None


def _unix_socket(path: Path) -> socket.socket:
    private_directory(path.parent)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # otherwise one of two starting servers could remove the socket of the other
    with _locked(path.parent):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError(
                    f"unix:{path}: is not a socket: choose another path"
                )
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1.0)
                if probe.connect_ex(str(path)) in (0, 11):
                    raise ConfigError(
                        f"unix:{path}: another pagoda serve listens there: stop it or choose "
                        "another path"
                    )
            path.unlink()  # the socket of a killed server
        listening.bind(str(path))
        listening.listen(_WAITING_CONNECTIONS)
    os.chmod(path, 0o600)
    return listening


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if (locked := lock_file(lock, _LOCK_SECONDS)) is None:
            raise ConfigError(
                f"{directory}: its file system has no locks: choose another path"
            )
        if not locked:
            raise ConfigError(
                f"{directory}: another process keeps it locked: look for a stopped one"
            )
        yield
    finally:
        os.close(lock)


def _hosts(options: ServeOptions) -> list[str]:
    """Return the names that a Host header may have."""
    own = [] if options.listen is None else [options.listen[0].strip("[]")]
    return [*own, "localhost", "127.0.0.1", "::1", *options.allow_hosts]


def _tls(options: ServeOptions) -> ssl.SSLContext | None:
    if options.certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(options.certificate, options.certificate_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--tls-cert {options.certificate}: cannot be used: {error}"
        ) from None
    return context


# ---- the application -----------------------------------------------------------------------------

_log = RateLimitedLog()


@web.middleware
async def _in_time(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Note that the header has arrived, and send the answer; disconnect a client that does not read
    it.

    A client that leaves during a request is counted; it is not an error.
    """
    if isinstance(request.protocol, Connection):
        request.protocol.late_since = None
    try:
        answer = await handler(request)
        if isinstance(answer, web.Response):  # other answers are sent already
            try:
                async with asyncio.timeout(
                    request.app[LIMITS].seconds(answer.content_length or 0)
                ):
                    await answer.prepare(request)
                    await answer.write_eof()
            except TimeoutError:
                request.app[COUNTS]["slow_readers"] += 1
                break_connection(request.transport)
        return answer
    except (ConnectionError, asyncio.SendfileNotAvailableError):
        # the latter only before the first byte
        request.app[COUNTS]["clients_gone"] += 1
        break_connection(request.transport)
        return web.Response()


@web.middleware
async def _failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn exceptions into answers with their reasons."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _refused(error)
    except OverloadedError:
        return refusal(503, "overloaded", "ask again later")
    except ClosedError:
        return refusal(503, "closed", "ask again later")
    except PagodaError as error:
        _log.warn(_logger, Reason.IO_ERROR, f"a request failed: {error}")
        return refusal(503, "store_unavailable", "ask again later")


def _refused(error: web.HTTPException) -> web.Response:
    remedy = error.text or "" if error.status == 413 else ""
    unread = error.status in (408, 413)  # the rest of the body
    answer = refusal(
        error.status, error.reason.lower().replace(" ", "_"), remedy, close=unread
    )
    if "Allow" in error.headers:
        answer.headers["Allow"] = error.headers["Allow"]
    return answer


async def _healthz(request: web.Request) -> web.Response:
    return web.json_response({"ok": True})


async def _open_stores(app: web.Application) -> AsyncIterator[None]:
    stores = app[STORES]
    calls = app[CALLS]
    await calls.run(stores.scan)

    async def rescan() -> None:
        while True:
            await asyncio.sleep(_SCAN_SECONDS)
            try:
                await calls.run(stores.scan)
            except Exception as error:  # noqa: BLE001
                # a boundary: the server scans again later
                _log.warn(
                    _logger,
                    Reason.IO_ERROR,
                    f"the search for stores failed: {error}",
                )

    task = asyncio.create_task(rescan())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    calls.close()
    # all threads of the first pool may be waiting for a locked store
    closing = BlockingCallPool()
    with contextlib.suppress(TimeoutError, OverloadedError):
        async with asyncio.timeout(_CLOSING_SECONDS):
            await asyncio.gather(
                *[
                    closing.run(store.close)
                    for store in await closing.run(stores.end)
                ]
            )
    closing.close()
