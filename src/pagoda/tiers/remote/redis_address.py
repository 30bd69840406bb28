"""Where a Redis is and how to get a connection to it, from a URL: redis-py connects and encrypts, in bounded time."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from urllib.parse import parse_qsl, urlsplit

from pagoda.errors import ConfigError, StoreError
from pagoda.threads import NO_THREAD, begin, wait

__all__ = ["RedisAddress"]

_SCHEMES = ("redis", "rediss", "unix")
_TLS = ("ssl_ca_certs", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile")
_OPTIONS = ("db", "username", "password", *_TLS)
_KNOWN = ("host", "port", "path", *_OPTIONS)
_SHAPE = (
    "not the URL of a Redis: write redis://user:password@host:port/db, with special characters of a password"
    " percent-encoded"
)
_MOST_LATE = 8  # connections that nobody waits for any more, and that are still being made


class RedisAddress:
    """A Redis by its URL: `redis://[user:password@]host:port/db`, `rediss://` (TLS), `unix:///path?db=0`.

    Options behind `?`: db, username, password, and six of redis-py's that begin with ssl_. ConfigError for others, and
    for what is no such URL; no message has a part of it that may be a secret. Thread-safe.
    """

    text: str  # for people: no secret in it
    username: str | None
    password: str | None
    db: int

    def __init__(self, url: str) -> None:
        try:
            from redis import ConnectionPool
        except ImportError:
            raise StoreError("Redis needs redis-py: pip install 'pagodakv[redis]'") from None
        scheme = _check(url)
        try:
            pool = ConnectionPool.from_url(url)
        except ValueError:  # its text may quote the password
            raise ConfigError(_SHAPE) from None
        options = {name: pool.connection_kwargs[name] for name in _KNOWN if name in pool.connection_kwargs}
        self._connection = pool.connection_class
        self.text = f"{scheme}://{_text(options)}"
        self.username = options.pop("username", None)
        self.password = options.pop("password", None)
        self.db = options.pop("db", 0)
        self._options = options
        self._late: list[threading.Thread] = []

    def connect(self, made: Future[socket.socket], until: float) -> socket.socket:
        """A new connection, encrypted if the URL says so, not yet authenticated. OSError, at the latest at `until`.

        It is also the result of `made`, an Answer: who gives that an exception meanwhile ends this call with it. What
        cannot be stopped (a look-up of a name) may go on for longer, on a thread of its own.
        """
        self._late = [thread for thread in self._late if thread.is_alive()]
        if len(self._late) >= _MOST_LATE:
            raise TimeoutError(f"{self.text}: {_MOST_LATE} earlier connections are still being made")
        thread = threading.Thread(
            target=self._make, args=(made, until), name="pagoda-redis-connect", daemon=True
        )
        if not begin(thread):
            raise OSError(f"{self.text}: {NO_THREAD}")
        wait([made], max(0.0, until - time.monotonic()))
        if made.cancel():
            self._late.append(thread)
            raise TimeoutError(f"{self.text}: no connection before the deadline")
        return made.result()

    def _make(self, made: Future[socket.socket], until: float) -> None:
        try:
            connected = self._connect(until)
        except Exception as error:  # noqa: BLE001 - a thread in the background: told to whoever waits for it
            with suppress(InvalidStateError):
                made.set_exception(error)
            return
        try:
            made.set_result(connected)
        except InvalidStateError:
            connected.close()

    def _connect(self, until: float) -> socket.socket:
        from redis import exceptions

        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{self.text}: no connection before the deadline")
        connection = self._connection(
            **self._options,
            protocol=2,
            socket_timeout=left,
            socket_connect_timeout=left,
            redis_connect_func=lambda _: (
                None
            ),  # the answers to AUTH and SELECT are read with bounds, by RedisLink
        )
        try:
            connection.connect()
        except exceptions.TimeoutError:
            raise TimeoutError(f"{self.text}: no connection before the deadline") from None
        except (exceptions.RedisError, ValueError) as error:  # ValueError: a host name that no resolver takes
            raise ConnectionError(f"{self.text}: {error}") from None
        connected: socket.socket = connection._sock
        connection._sock = None  # ours now
        return connected


def _check(url: str) -> str:
    """The scheme; refuses what redis-py would read as something else than was meant: a password with a `/` in it."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        raise ConfigError(_SHAPE) from None
    if parts.scheme not in _SCHEMES:
        raise ConfigError(
            f"the URL of a Redis begins with one of {', '.join(f'{name}://' for name in _SCHEMES)}"
        )
    place = parts.path if parts.scheme == "unix" else host and re.fullmatch(r"/?\d*", parts.path)
    if parts.fragment or not place:
        raise ConfigError(_SHAPE)
    if unknown := {name for name, _ in parse_qsl(parts.query)}.difference(_OPTIONS):
        raise ConfigError(f"unknown options of a Redis URL: {', '.join(sorted(unknown))}")
    return parts.scheme


def _text(options: Mapping[str, object]) -> str:
    db = options.get("db", 0)
    if "path" in options:
        return f"{options['path']}?db={db}"
    return f"{options['host']}:{options.get('port', 6379)}/{db}"
