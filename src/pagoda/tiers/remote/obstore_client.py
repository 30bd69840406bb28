"""Clients of object stores, made from a URL and the options of obstore; asks nothing of anybody. Thread-safe."""

from __future__ import annotations

import base64
import ipaddress
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from pagoda.tiers.remote.sockets import IDLE_SECONDS

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

__all__ = ["NAMES", "authorization", "check_prefix", "connect", "endpoint_of", "host_of", "is_dav"]
__all__ += ["is_straight", "place_of"]

# options of which the requests that obstore makes have more in them than a URL, or go another way
_IN_REQUESTS = re.compile(
    "skip_signature|s3_express|request_payer|server_side_encryption|sse_.*|checksum_algorithm|default_headers|proxy_.*"
    "|root_certificate|allow_invalid_certificates|unsigned_payload"
)
NAMES = {"s3": "s3", "gs": "gs", "az": "az", "http": "webdav", "https": "webdav"}  # of tiers, by the scheme
_PREFIX = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_PATH = re.compile(r"([A-Za-z0-9_~=+-][A-Za-z0-9_.~=+-]*(/|$))*")
_LONGEST = "1h"  # obstore's own limit of a request, 30 s unless said: `until` is what ends ours


def place_of(url: str) -> tuple[SplitResult, str]:
    """A URL and the path in it, without slashes at its ends. ValueError if it is none of ours."""
    parts = urlsplit(url)
    path = unquote(parts.path).strip("/")
    if parts.scheme not in NAMES or not parts.hostname or parts.query or not _PATH.fullmatch(path):
        known = ", ".join(f"{scheme}://" for scheme in NAMES)
        raise ValueError(f"an object store's URL is needed: {known} with a bucket or host and a plain path")
    return parts, path


def check_prefix(prefix: str) -> None:
    """ValueError if names cannot begin with it."""
    if not _PREFIX.fullmatch(prefix):
        raise ValueError(f"prefix={prefix}: letters, digits, _ . and -, at most 64, no . or - at the start")


def connect(parts: SplitResult, options: Mapping[str, str]) -> ObjectStore:
    """A new client with a pool of its own; asks nothing of anybody. ValueError: a setting cannot stand."""
    try:
        from obstore import store
        from obstore.exceptions import BaseError, UnknownConfigurationKeyError
    except ModuleNotFoundError:
        raise ModuleNotFoundError("object stores need obstore: pip install 'pagodakv[objects]'") from None
    settings = _settings(parts, options)
    never: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(0)}
    try:
        if parts.scheme == "s3":
            return store.S3Store(parts.hostname, config=settings, retry_config=never)  # type: ignore[arg-type, unused-ignore]
        if parts.scheme == "gs":
            return store.GCSStore(parts.hostname, config=settings, retry_config=never)  # type: ignore[arg-type, unused-ignore]
        if parts.scheme == "az":
            return store.AzureStore(parts.hostname, config=settings, retry_config=never)  # type: ignore[arg-type, unused-ignore]
        client: ClientConfig = {**settings}  # type: ignore[typeddict-item, unused-ignore]
        if parts.username is not None:
            client["default_headers"] = authorization(parts)
        return store.HTTPStore(
            f"{parts.scheme}://{host_of(parts)}/", client_options=client, retry_config=never
        )
    except (BaseError, ValueError) as error:
        unknown = isinstance(error, UnknownConfigurationKeyError) or "Invalid key" in str(error)
        named = [name for name in options if unknown and name.lower() in str(error).lower()]
        if named:
            raise ValueError(
                f"{named[0]}: no such option of {parts.scheme}:// (see docs/objects.md)"
            ) from None
        given = f"; options given: {', '.join(options)}" if options else ""
        raise ValueError(f"{parts.scheme}://: {_complaint(str(error))}{given}") from None


def _settings(parts: SplitResult, options: Mapping[str, str]) -> dict[str, str]:
    """The options, and ours where they say nothing else."""
    endpoint = endpoint_of(parts, options)
    settings = {"timeout": _LONGEST, "pool_idle_timeout": f"{IDLE_SECONDS}s"}
    is_plain = endpoint is not None and endpoint.scheme == "http"
    if is_plain and _is_loopback(endpoint):
        settings["allow_http"] = "true"
    elif is_plain and options.get("allow_http", "").lower() != "true":
        raise ValueError("plain http can be read and changed on the way: write https, or say allow_http=true")
    if parts.scheme == "s3" and (not is_plain or _is_loopback(endpoint)):
        settings["unsigned_payload"] = "true"  # TLS guards the bytes; hashing them costs 6x the CPU
    given = {_bare(name) for name in options}
    return {name: value for name, value in settings.items() if name not in given} | dict(options)


def authorization(parts: SplitResult) -> dict[str, str]:
    """The header for the user and password of a URL: it is kept out of the URL, which shows up in errors."""
    if parts.username is None:
        return {}
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}


def is_straight(parts: SplitResult, options: Mapping[str, str]) -> bool:
    """Whether chunks can go over a connection of our own: nothing but the URL, signed if need be, makes the request.

    GCS and Azure are left to obstore: to sign a URL there can be a request of its own.
    """
    if parts.scheme not in ("s3", "http", "https"):
        return False
    given = {_bare(name) for name, value in options.items() if name != "unsigned_payload" or value != "true"}
    host = parts.hostname or ""
    if parts.scheme == "s3":
        given |= {_bare(name) for name in os.environ if name.startswith("AWS_")}
        endpoint = endpoint_of(parts, options)
        host = endpoint.hostname or "" if endpoint is not None else "s3.amazonaws.com"
    is_proxied = not getproxies().keys().isdisjoint(("http", "https", "all")) and not proxy_bypass(host)
    return not is_proxied and not any(_IN_REQUESTS.fullmatch(name) for name in given)


def endpoint_of(parts: SplitResult, options: Mapping[str, str]) -> SplitResult | None:
    """Where requests go, if that was said: the URL itself, or the engine's option or environment variable for it."""
    if is_dav(parts.scheme):
        return parts
    given = {_bare(name): value for name, value in options.items()}
    names = ("endpoint_url_s3", "endpoint_url", "endpoint", "base_url")
    if parts.scheme == "s3":
        given = {
            name: os.environ[f"AWS_{name.upper()}"] for name in names if f"AWS_{name.upper()}" in os.environ
        } | given
    return next((urlsplit(given[name]) for name in names if name in given), None)


def _bare(option: str) -> str:
    """An option without the vendor's prefix that obstore allows before it."""
    return re.sub(r"^(aws|azure_storage|azure|google)_", "", option.lower())


def _complaint(text: str) -> str:
    """Which of obstore's complaints about settings it is; only words, as the text may have their values in it."""
    for found in (r"Missing \w+", r"\w+ must be specified", r"failed to parse", r"Duplicate key \w+"):
        if match := re.search(found, text):
            return match[0]
    return "obstore cannot use these settings"


def host_of(parts: SplitResult) -> str:
    """Host and port, without user and password."""
    return parts.netloc.rpartition("@")[2]


def is_dav(scheme: str) -> bool:
    return scheme in ("http", "https")


def _is_loopback(parts: SplitResult | None) -> bool:
    host = parts.hostname or "" if parts else ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
