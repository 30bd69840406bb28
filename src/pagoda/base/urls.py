"""The URLs of remote stores: which schemes there are, and their parts."""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

REDIS = "redis"
OBJECTS = "objects"
MOONCAKE = "mooncake"
WEBDAV = "webdav"


class Scheme(NamedTuple):
    """What a scheme says of a store."""

    kind: str
    """REDIS, OBJECTS or MOONCAKE."""
    store: str
    """What the store is; also the default name of its tier."""
    example: str
    """A URL of it."""


SCHEMES = {
    example.partition("://")[0]: Scheme(kind, store, example)
    for kind, store, *examples in (
        (
            REDIS,
            "redis",
            "redis://host:6379/0",
            "rediss://host:6379/0",
            "unix:///run/redis.sock",
            "redis+pool://host1:6379,host2:6379,host3:6379",
            "rediss+pool://host1:6379,host2:6379,host3:6379",
            "redis+cluster://host1:6379,host2:6379",
            "rediss+cluster://host1:6379,host2:6379",
            "redis+sentinel://host1:26379,host2:26379/service",
            "rediss+sentinel://host1:26379,host2:26379/service",
        ),
        (MOONCAKE, "mooncake", "mooncake://host:50051"),
        (OBJECTS, "s3", "s3://bucket/prefix"),
        (OBJECTS, "gs", "gs://bucket/prefix"),
        (OBJECTS, "az", "az://container/prefix"),
        (OBJECTS, WEBDAV, "http://host/path/", "https://host/path/"),
    )
    for example in examples
}
"""All schemes that are known."""
REDIS_SCHEMES = tuple(
    name
    for name, scheme in SCHEMES.items()
    if scheme.kind == REDIS and "+" not in name
)
"""Those of a single Redis."""
OBJECT_SCHEMES = tuple(
    name for name, scheme in SCHEMES.items() if scheme.kind == OBJECTS
)
TLS_OPTIONS = (
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_keyfile",
)
"""Parameters of an encrypted connection to a Redis, as redis-py names them."""

_PREFIX = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_PLACE = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+)(?::(\d*))?")


def split_url(url: str) -> SplitResult:
    """Return a URL in parts; it may have several hosts.

    Python's own function, in releases since 2025, refuses an IPv6 address in brackets if it is not
    the first host.
    """
    scheme, mark, rest = url.partition("://")
    place = re.split("[/?#]", rest, maxsplit=1)[0] if mark and "," in rest else ""
    return (
        urlsplit(url)
        if not place
        else urlsplit(f"{scheme}://{rest[len(place) :]}")._replace(netloc=place)
    )


@dataclass(frozen=True)
class RemoteUrl:
    """A URL whose hosts may form one store. Its repr shows no secret."""

    parts: SplitResult = field(repr=False)
    scheme: str
    """Of one host: "rediss" of rediss+pool://."""
    layout: str
    """How the hosts form a store: "pool", "cluster" or "sentinel"; "": there is one host."""
    login: str = field(repr=False)
    """User and password as they are written, with the @; "": there is none."""
    hosts: tuple[str, ...]
    """Each with its port, as they are written."""

    @classmethod
    def of(cls, url: str) -> RemoteUrl:
        """Return a URL in parts. ValueError: it is none."""
        parts = split_url(url)
        scheme, _, layout = parts.scheme.partition("+")
        user, at, hosts = parts.netloc.rpartition("@")
        return cls(parts, scheme, layout, user + at, tuple(hosts.split(",")))

    @property
    def address(self) -> str:
        """Scheme, hosts and ports: what may be shown of any URL."""
        return f"{self.parts.scheme}://{','.join(self.hosts)}"

    @property
    def password(self) -> str:
        """The password, decoded; "": there is none."""
        return unquote(self.parts.password or "")

    def without_login(self) -> SplitResult:
        """Return the URL in parts, without user and password."""
        return self.parts._replace(netloc=",".join(self.hosts))

    def at(self, host: str) -> str:
        """Return the same URL for one host, with or without a port."""
        return urlunsplit(
            self.parts._replace(scheme=self.scheme, netloc=self.login + host)
        )

    def node_urls(self) -> list[str]:
        """Return the URL of each host."""
        return [self.at(host) for host in self.hosts]

    def with_password(self, password: str) -> str:
        """Return the whole URL, with this password after its user."""
        login = f"{self.login.removesuffix('@')}:{quote(password, safe='')}@"
        return urlunsplit(
            self.parts._replace(netloc=login + ",".join(self.hosts))
        )


def check_prefix(prefix: str) -> None:
    """Raise ValueError if names in a store cannot begin with `prefix`."""
    if not _PREFIX.fullmatch(prefix):
        raise ValueError(
            f"prefix={prefix}: letters, digits, _ . and -, at most 64, no . or - first"
        )


def place_of(host: str, default_port: int) -> str:
    """Return the `host`, `host:port` or `[address]:port` of a URL in a standard spelling.
    ValueError: it is invalid.

    Case, the dot at the end of a name, `localhost`, zeros of an IPv6 address and a default port
    make no difference.
    """
    found = _PLACE.fullmatch(host.lower())
    if found is None:
        raise ValueError(f"{host}: no host; write an IPv6 address as [::1]:6379")
    name = found[1].rstrip(".")
    if name == "localhost":
        name = "127.0.0.1"
    elif name.startswith("["):
        with suppress(ValueError):  # fe80::1%25eth0
            name = f"[{ipaddress.ip_address(name[1:-1])}]"
    return f"{name}:{int(found[2]) if found[2] else default_port}"
