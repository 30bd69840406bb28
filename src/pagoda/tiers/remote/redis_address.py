"""The address of a Redis and how to connect to it: to one Redis, or to the master that Sentinels
name.
"""

from __future__ import annotations

import importlib
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit

from pagoda.base.errors import ConfigError, MissingLibraryError
from pagoda.base.signal_safe_threads import NO_THREAD, start_thread, wait
from pagoda.base.urls import RemoteUrl
from pagoda.tiers.remote.resp import (
    ErrorReply,
    ReplyShape,
    RespConnection,
    command,
)
from pagoda.tiers.remote.store_urls import (
    REDIS_OPTIONS,
    REDIS_SHAPE,
    check_redis_url,
    password_in,
)

_KNOWN = ("host", "port", "path", *REDIS_OPTIONS)
_SENTINEL_PORT = 26379
# replies of a Sentinel: host and port, or OK
_MASTER = ReplyShape(b"+$*", 255, items=2, depth=1)
# the form in which a server may name another one
HOST = re.compile(rb"[A-Za-z0-9_.:-]{1,253}")
# connections that may still be in the making after their calls have ended
_MOST_LATE = 8


class CredentialProvider(Protocol):
    """The part of redis-py's class of this name that is called."""

    def get_credentials(self) -> Sequence[str]:
        """Return the user and the password, or the password only."""


class RedisAddress:
    """The address of a Redis: `redis://[user:password@]host:port/db`, `rediss://` (TLS),
    `unix:///path?db=0`.

    Options after `?`: db, username, password, credential_provider, and six of redis-py's that begin
    with ssl_. ConfigError for other options and for other URLs; no message contains a part that may
    be secret. Thread-safe. redis-py connects and encrypts.
    """

    text: str  # for people: contains no secret
    db: int

    def __init__(self, url: str, password_file: str = "") -> None:
        """ConfigError: the URL or the password file cannot be used."""
        try:
            from redis import ConnectionPool
        except ImportError:
            raise MissingLibraryError(
                "Redis needs redis-py: pip install 'pagodakv[redis]'"
            ) from None
        scheme = check_redis_url(url)
        try:
            pool = ConnectionPool.from_url(url)
        except ValueError:  # its text may quote the password
            raise ConfigError(REDIS_SHAPE) from None
        options = {
            name: pool.connection_kwargs[name]
            for name in _KNOWN
            if name in pool.connection_kwargs
        }
        self._connection = pool.connection_class
        self.text = f"{scheme}://{_text(options)}"
        username = options.pop("username", None)
        password = options.pop("password", None)
        self._user: tuple[str | None, str | None] = (username, password)
        self.db = options.pop("db", 0)
        provider = options.pop("credential_provider", None)
        self._provider = provider and _credential_provider(provider)
        self._options = options
        self._password_file = password_file
        if password_file:
            self._user = self._user[0], password_in(password_file)
        self._late: list[threading.Thread] = []

    def at(self, place: str) -> RedisAddress:
        """Return the address of another server (host:port; by default the same host). OSError: not
        an address.
        """
        host, _, port = place.rpartition(":")
        host = host or str(self._options["host"])
        if not HOST.fullmatch(host.encode()) or not re.fullmatch(
            r"\d{1,5}", port
        ):
            raise ConnectionError(
                f"{self.text}: a server names an invalid address: {place}"
            )
        other = copy(self)
        other._options = self._options | {"host": host, "port": int(port)}
        other.text = f"{self.text.partition('://')[0]}://{_text(other._options | {'db': self.db})}"
        return other

    def masked(self, text: str) -> str:
        """Return a server's text without the password of the latest connection, since a server may
        send anything.
        """
        return text.replace(self._user[1], "***") if self._user[1] else text

    def login(self) -> list[bytes]:
        """Return the command that authenticates the latest connection; no command if no login is
        needed.
        """
        words = [word.encode() for word in self._user if word is not None]
        return [command(b"AUTH", *words)] if any(words) else []

    def _ask_for_user(self) -> None:
        """Read user and password again from the password file or the provider. OSError: they
        fail.
        """
        if self._password_file:
            try:
                self._user = self._user[0], password_in(self._password_file)
            except ConfigError as error:
                raise ConnectionError(str(error)) from None
        if self._provider is not None:
            try:
                given = self._provider.get_credentials()
            except Exception as error:  # of any library  # noqa: BLE001
                raise ConnectionError(
                    f"credential_provider: {type(error).__name__}: {error}"
                ) from None
            match given:
                case [str(password)]:
                    self._user = None, password
                case [str(username), str(password)]:
                    self._user = username, password
                case _:
                    raise ConnectionError(
                        "credential_provider: neither (password,) nor (user, password)"
                    )

    def connect(self, made: Future[socket.socket], until: float) -> socket.socket:
        """Return a new connection, encrypted if the URL says so, not yet authenticated. OSError by
        `until`.

        The connection is also the result of `made`, an Answer: an exception that is set there
        meanwhile ends this call. A step that cannot be stopped (the lookup of a host name) may
        continue on another thread.
        """
        self._late = [thread for thread in self._late if thread.is_alive()]
        if len(self._late) >= _MOST_LATE:
            raise TimeoutError(
                f"{self.text}: {_MOST_LATE} earlier connections are still being made"
            )
        thread = start_thread(self._make, "pagoda-redis-connect", made, until)
        if thread is None:
            raise OSError(f"{self.text}: {NO_THREAD}")
        wait([made], max(0.0, until - time.monotonic()))
        if made.cancel():
            self._late.append(thread)
            raise TimeoutError(f"{self.text}: no connection before the deadline")
        return made.result()

    def _make(self, made: Future[socket.socket], until: float) -> None:
        try:
            connected = self._connect(until)
        except Exception as error:  # noqa: BLE001
            with suppress(InvalidStateError):
                made.set_exception(error)
            return
        try:
            made.set_result(connected)
        except InvalidStateError:
            connected.close()

    def _connect(self, until: float) -> socket.socket:
        from redis import exceptions

        self._ask_for_user()
        options = self._options | self._place(until)
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{self.text}: no connection before the deadline")
        connection = self._connection(
            **options,
            protocol=2,
            socket_timeout=left,
            # a host may have two addresses, and the first may not answer
            socket_connect_timeout=left / 2,
            # RedisConnection reads the replies to AUTH and SELECT, within limits
            redis_connect_func=lambda _: None,
        )
        try:
            connection.connect()
        except exceptions.TimeoutError:
            raise TimeoutError(
                f"{self.text}: no connection before the deadline"
            ) from None
        except (exceptions.RedisError, ValueError, OverflowError) as error:
            # from a bad host name or port
            raise ConnectionError(f"{self.text}: {error}") from None
        connected: socket.socket = connection._sock
        connection._sock = None  # it belongs to the caller now
        return connected

    def _place(self, until: float) -> dict[str, object]:
        """Return the host and port to connect to, if the URL does not say them."""
        return {}


class SentinelAddress(RedisAddress):
    """The address of a master that Sentinels know:
    `redis+sentinel://[user:password@]host:port,host:port/service[/db]`.

    User and password are for the master; `sentinel_username` and `sentinel_password_file` for the
    Sentinels. With `rediss+sentinel://` both are encrypted. Each new connection asks the Sentinels,
    so that a failover is followed.
    """

    def __init__(self, url: str, password_file: str = "") -> None:
        """ConfigError: the URL or the password file cannot be used."""
        remote = RemoteUrl.of(url)
        parts = remote.parts
        _, self._service, *db = parts.path.split("/")
        options = dict(parse_qsl(parts.query))
        username, file = (
            options.pop(f"sentinel_{name}", "")
            for name in ("username", "password_file")
        )
        master = parts._replace(path="/" + "/".join(db), query=urlencode(options))
        super().__init__(
            replace(remote, parts=master).at(remote.hosts[0]), password_file
        )
        hosts = ",".join(remote.hosts)
        self.text = f"{parts.scheme}://{hosts}/{self._service}/{self.db}"
        places = [
            host if urlsplit(f"//{host}").port else f"{host}:{_SENTINEL_PORT}"
            for host in remote.hosts
        ]
        own = {
            name: value
            for name, value in options.items()
            if name.startswith("ssl_")
        }
        own["username"] = username
        asked = replace(
            remote, parts=parts._replace(path="", query=urlencode(own)), login=""
        )
        self._sentinels = [
            RedisAddress(asked.at(place), file) for place in places
        ]

    def _place(self, until: float) -> dict[str, object]:
        question = command(
            b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service.encode()
        )
        trouble: object = None
        for number, sentinel in enumerate(self._sentinels):
            now = time.monotonic()
            # the last share is for the connection to the master
            share = now + (until - now) / (len(self._sentinels) - number + 1)
            try:
                with sentinel._connect(share) as connected:
                    resp = RespConnection(connected)
                    commands = [*sentinel.login(), question]
                    resp.send_commands(commands, share)
                    replies: list[object] = [
                        resp.read_reply(share, _MASTER) for _ in commands
                    ]
            except OSError as error:
                trouble = error
                continue
            reply = next(
                (each for each in replies if isinstance(each, ErrorReply)),
                replies[-1],
            )
            match reply:
                case [bytes(host), bytes(port)] if HOST.fullmatch(
                    host
                ) and re.fullmatch(rb"\d{1,5}", port):
                    return {"host": host.decode(), "port": int(port)}
            said = (
                sentinel.masked(reply.text)
                if isinstance(reply, ErrorReply)
                else "knows no such service"
            )
            trouble = f"{sentinel.text}: {said}"
        raise ConnectionError(
            f"{self.text}: no Sentinel names a master: {trouble}"
        )


def _credential_provider(name: str) -> CredentialProvider:
    """Return an instance of `package.module:Class`. ConfigError: it cannot be used."""
    module, _, made = name.partition(":")
    try:
        provider: CredentialProvider = getattr(
            importlib.import_module(module), made
        )()
        provider.get_credentials  # the method is there  # noqa: B018
    except Exception as error:  # of any library  # noqa: BLE001
        raise ConfigError(
            f"credential_provider={name}: cannot be used: {type(error).__name__}: {error}; write "
            "package.module:Class "
            "for what is made without arguments and has get_credentials()"
        ) from None
    return provider


def _text(options: Mapping[str, object]) -> str:
    db = options.get("db", 0)
    if "path" in options:
        return f"{options['path']}?db={db}"
    host = (
        f"[{options['host']}]" if ":" in str(options["host"]) else options["host"]
    )
    return f"{host}:{options.get('port', 6379)}/{db}"
