"""The rules for URLs of remote stores: which are valid, where their requests go, and which parts
are secret.

`pagoda.config.remote_urls` checks URLs that users write, with more advice; it cannot use this
module, because reading the configuration must not import what tiers need.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from pagoda.base.errors import ConfigError
from pagoda.base.urls import (
    OBJECT_SCHEMES,
    REDIS_SCHEMES,
    SCHEMES,
    TLS_OPTIONS,
    WEBDAV,
)

# with these options, obstore's requests contain more than a URL or are sent elsewhere
_REQUEST_OPTIONS = re.compile(
    "skip_signature|s3_express|request_payer|server_side_encryption|sse_.*|checksum_algorithm|default_headers|proxy_.*"
    "|root_certificate|allow_invalid_certificates|unsigned_payload"
)
_PATH = re.compile(r"([A-Za-z0-9_~=+-][A-Za-z0-9_.~=+-]*(/|$))*")
_LONGEST_PASSWORD_BYTES = 4096
REDIS_OPTIONS = (
    "db",
    "username",
    "password",
    "credential_provider",
    *TLS_OPTIONS,
)
REDIS_SHAPE = (
    "not the URL of a Redis: write redis://user:password@host:port/db, with special characters "
    "of a password"
    " percent-encoded"
)


def check_redis_url(url: str) -> str:
    """Return the scheme; refuse what redis-py would misread: a password that contains a `/`."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        raise ConfigError(REDIS_SHAPE) from None
    if parts.scheme not in REDIS_SCHEMES:
        raise ConfigError(
            f"the URL of a Redis begins with one of {_named(REDIS_SCHEMES)}"
        )
    place = (
        parts.path
        if parts.scheme == "unix"
        else host and re.fullmatch(r"/?\d*", parts.path)
    )
    if parts.fragment or not place:
        raise ConfigError(REDIS_SHAPE)
    if unknown := {name for name, _ in parse_qsl(parts.query)}.difference(
        REDIS_OPTIONS
    ):
        raise ConfigError(
            f"unknown options of a Redis URL: {', '.join(sorted(unknown))}"
        )
    return parts.scheme


def _named(schemes: Iterable[str]) -> str:
    return ", ".join(f"{scheme}://" for scheme in schemes)


def password_in(file: str) -> str:
    """Return the content of a file, without its line end."""
    try:
        with Path(file).expanduser().open("rb") as stream:
            text = stream.read(_LONGEST_PASSWORD_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = (
            error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        )
        raise ConfigError(
            f"password_file = {file}: cannot be read: {why}"
        ) from None
    password = text.rstrip("\r\n")
    if not password or len(text) > _LONGEST_PASSWORD_BYTES:
        raise ConfigError(
            f"password_file = {file}: {'is too long' if password else 'is empty'}"
        )
    return password


def parse_store_url(url: str) -> tuple[SplitResult, str]:
    """Return a URL in parts, and its path without slashes at the ends. ValueError if it is not
    supported.
    """
    parts = urlsplit(url)
    path = unquote(parts.path).strip("/")
    if (
        parts.scheme not in OBJECT_SCHEMES
        or not parts.hostname
        or parts.query
        or not _PATH.fullmatch(path)
    ):
        raise ValueError(
            f"an object store's URL is needed: {_named(OBJECT_SCHEMES)} with a bucket or host and "
            "a plain path"
        )
    return parts, path


def authorization_header(parts: SplitResult) -> dict[str, str]:
    """Return the header for the user and password of a URL. They are not left in the URL, which
    errors may quote.
    """
    if parts.username is None:
        return {}
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}


def supports_direct(parts: SplitResult, options: Mapping[str, str]) -> bool:
    """Return whether chunks can use our own connections: a request needs nothing but the URL,
    signed if necessary.

    GCS and Azure are left to obstore: signing a URL for them can itself take a request.
    """
    if parts.scheme not in ("s3", "http", "https"):
        return False
    given = {
        without_vendor(name)
        for name, value in options.items()
        if name != "unsigned_payload" or value != "true"
    }
    host = parts.hostname or ""
    if parts.scheme == "s3":
        given |= {
            without_vendor(name) for name in os.environ if name.startswith("AWS_")
        }
        endpoint = endpoint_of(parts, options)
        host = (
            endpoint.hostname or ""
            if endpoint is not None
            else "s3.amazonaws.com"
        )
    is_proxied = not getproxies().keys().isdisjoint(
        ("http", "https", "all")
    ) and not proxy_bypass(host)
    return not is_proxied and not any(
        _REQUEST_OPTIONS.fullmatch(name) for name in given
    )


def endpoint_of(
    parts: SplitResult, options: Mapping[str, str]
) -> SplitResult | None:
    """Return where requests go, if the URL itself, an option or an environment variable names
    it.
    """
    if SCHEMES[parts.scheme].store == WEBDAV:
        return parts
    given = {without_vendor(name): value for name, value in options.items()}
    names = ("endpoint_url_s3", "endpoint_url", "endpoint", "base_url")
    if parts.scheme == "s3":
        given = {
            name: os.environ[f"AWS_{name.upper()}"]
            for name in names
            if f"AWS_{name.upper()}" in os.environ
        } | given
    return next((urlsplit(given[name]) for name in names if name in given), None)


def without_vendor(option: str) -> str:
    """Return an option without the vendor prefix that obstore allows."""
    return re.sub(r"^(aws|azure_storage|azure|google)_", "", option.lower())


def host_of(parts: SplitResult) -> str:
    """Return host and port, without user and password."""
    return parts.netloc.rpartition("@")[2]


def is_loopback(host: str | None) -> bool:
    """Return whether a host, an address or a name, is this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
