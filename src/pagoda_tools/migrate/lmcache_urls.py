"""Translates LMCache's remote_url, and what its extra_config says of the store, into the URL of a
remote tier. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote

from pagoda.base.urls import REDIS_SCHEMES, split_url
from pagoda.config.remote_urls import parse

_REDIS = 'remote = "redis://HOST:6379/0"'
_REASONS = {
    "redis-sentinel": (
        "name the service in the URL: remote = "
        '"redis+sentinel://HOST:26379,HOST:26379/SERVICE"'
    ),
    "mooncakestore": 'write remote = "mooncake://HOST:50051?segment=SIZE" (its global_segment_size)',  # noqa: E501
    "fs": (
        "a shared file system is not supported; serve it with WebDAV: remote = "
        '"http://HOST/PATH/"'
    ),
}
START_SERVER = "run pagoda serve --listen HOST:PORT --host-size SIZE there instead of LMCache's server"  # noqa: E501
_AMAZON = re.compile(
    r"(?P<bucket>[a-z0-9-]+)\.s3[.-](?P<region>[a-z0-9-]+)\.amazonaws\.com"
)
_IN_S3 = ("s3_region", "s3_file_prefix", "s3_enable_s3express")
_IN_VALKEY = (
    "valkey_mode",
    "valkey_username",
    "valkey_password",
    "valkey_database",
)
_IN_RESP = (
    "username",
    "password",
    "resp_username",
    "resp_password",
    "resp_host",
    "resp_port",
)
IN_URLS = (*_IN_S3, *_IN_VALKEY, *_IN_RESP, "tls_enable")
"""Fields of extra_config, and variables, that a URL here carries."""

_NOT_LMCACHES = ("gs", "az", "http", "https")


class Untranslated(Exception):
    """There is no equivalent URL; the message says why, and what to write instead."""


def translated(url: str, fields: Mapping[str, object]) -> tuple[str, list[str]]:
    """Return the URL of the remote tier, and which of `fields` are in it.

    Raises:
        Untranslated: there is no equivalent URL.
    """
    try:
        found, used = _translated(url, fields)
        parse(found)
    except ValueError as trouble:
        raise Untranslated(str(trouble)) from None
    return found, used


def _translated(url: str, fields: Mapping[str, object]) -> tuple[str, list[str]]:
    scheme = url.partition("://")[0].lower()
    if scheme == "s3":
        return _s3(url, fields)
    if scheme == "valkey":
        return _valkey(url, fields)
    if scheme == "resp":
        return _resp(url, fields)
    if scheme == "redis-cluster":
        return f"redis+cluster{url[len(scheme) :]}", []
    if scheme == "azure":
        return _azure(url)
    if scheme in _NOT_LMCACHES:
        raise Untranslated(
            f'LMCache has no {scheme}://; if you want it here: remote = "URL" in the new file'
        )
    if scheme == "lm":
        return f"http://{split_url(url).netloc}?server=pagoda", []
    if scheme in REDIS_SCHEMES:
        return url, []
    unknown = f"this engine is not known; use Redis, Valkey or an object store: {_REDIS}"
    reason = _REASONS.get(scheme, unknown)
    raise Untranslated(
        f"{scheme}://: {reason}" if scheme != url.lower() else reason
    )


def is_own_server(url: str) -> bool:
    """Whether a URL names LMCache's own server, as in its default configuration."""
    return url.lower().startswith("lm://")


def _s3(url: str, fields: Mapping[str, object]) -> tuple[str, list[str]]:
    host = split_url(url).netloc
    region = str(fields.get("s3_region", ""))
    bucket, dot, server = host.partition(".")
    amazon = _AMAZON.fullmatch(host)
    express = (
        "s3express" in host
        or str(fields.get("s3_enable_s3express", False)).lower() == "true"
    )
    if express:
        line = f'remote = "s3://{bucket}?region={region or "REGION"}&s3_express=true"'
        raise Untranslated(f"S3 Express was not tested; to try it: {line}")
    if amazon:
        bucket = amazon["bucket"]
        region = region or amazon["region"]
    elif dot:
        raise Untranslated(
            f'write the server: remote = "s3://{bucket}?endpoint=https://{server}"'
        )
    prefix = quote(str(fields.get("s3_file_prefix", "")).strip("/"))
    found = (
        f"s3://{bucket}"
        + (f"/{prefix}" if prefix else "")
        + (f"?region={region}" if region else "")
    )
    return found, [name for name in _IN_S3 if name in fields]


def _azure(url: str) -> tuple[str, list[str]]:
    """Translate azure://ACCOUNT.blob.core.windows.net/CONTAINER."""
    host, _, container = url.partition("://")[2].partition("/")
    account = host.partition(".")[0]
    if not container.strip("/") or not account:
        raise Untranslated(
            'name account and container: remote = "az://CONTAINER?account_name=ACCOUNT"'
        )
    return f"az://{container.strip('/')}?account_name={account}", []


def _resp(url: str, fields: Mapping[str, object]) -> tuple[str, list[str]]:
    """Translate resp://HOST:PORT; extra_config or variables have host, port and credentials, as in
    LMCache.
    """
    place = split_url(url).netloc
    host, port = place.rpartition(":")[::2] if ":" in place else (place, "")
    host = host or str(fields.get("resp_host", ""))
    port = port or str(fields.get("resp_port", ""))
    user = str(fields.get("username", "") or fields.get("resp_username", ""))
    password = str(fields.get("password", "") or fields.get("resp_password", ""))
    found = f"redis://{_credentials(user, password)}{host}{f':{port}' if port else ''}"
    return found, [name for name in _IN_RESP if name in fields]


def _valkey(url: str, fields: Mapping[str, object]) -> tuple[str, list[str]]:
    is_cluster = str(fields.get("valkey_mode", "standalone")).lower() == "cluster"
    encrypted = str(fields.get("tls_enable", False)).strip().lower() in (
        "true",
        "1",
    )
    place = split_url(url).netloc
    user = str(fields.get("valkey_username", ""))
    password = str(fields.get("valkey_password", ""))
    database = "" if is_cluster else str(fields.get("valkey_database", ""))
    scheme = "rediss" if encrypted else "redis"
    if is_cluster:
        scheme += "+cluster"
    found = f"{scheme}://{_credentials(user, password)}{place}" + (
        f"/{database}" if database else ""
    )
    return found, [name for name in (*_IN_VALKEY, "tls_enable") if name in fields]


def _credentials(user: str, password: str) -> str:
    if not user and not password:
        return ""
    name = quote(user, safe="")
    return f"{name}:{quote(password, safe='')}@" if password else f"{name}@"
