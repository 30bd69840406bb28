"""Translates LMCache's remote_url, and what its extra_config says of the store, into the URL of a remote tier. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote

from pagoda.config.remote_urls import parse
from pagoda.url_hosts import split_url

_REDIS = 'remote = "redis://HOST:6379/0"'
_REASONS = {
    "redis-sentinel": 'name the service in the URL: remote = "redis+sentinel://HOST:26379,HOST:26379/SERVICE"',
    "mooncakestore": 'write remote = "mooncake://HOST:50051?segment=SIZE" (its global_segment_size)',
    "fs": 'a shared file system is not supported; serve it with WebDAV: remote = "http://HOST/PATH/"',
}
START_SERVER = "run pagoda serve --listen HOST:PORT --host-size SIZE there instead of LMCache's server"
_AMAZON = re.compile(r"(?P<bucket>[a-z0-9-]+)\.s3[.-](?P<region>[a-z0-9-]+)\.amazonaws\.com")
_IN_S3 = ("s3_region", "s3_file_prefix", "s3_enable_s3express")
_IN_VALKEY = ("valkey_mode", "valkey_username", "valkey_password", "valkey_database")
IN_URLS = (*_IN_S3, *_IN_VALKEY)
"""Fields of extra_config that a URL here carries."""
_OURS = ("redis", "rediss", "unix", "gs", "az", "http", "https")


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
    if scheme in ("valkey", "resp"):
        return _valkey(url, fields)
    if scheme == "lm":
        return f"http://{split_url(url).netloc}?server=pagoda", []
    if scheme in _OURS:
        return url, []
    unknown = f"this engine is not known; use Redis, Valkey or an object store: {_REDIS}"
    reason = _REASONS.get(scheme, unknown)
    raise Untranslated(f"{scheme}://: {reason}" if scheme != url.lower() else reason)


def is_own_server(url: str) -> bool:
    """Whether a URL names LMCache's own server, as in its default configuration."""
    return url.lower().startswith("lm://")


def _s3(url: str, fields: Mapping[str, object]) -> tuple[str, list[str]]:
    host = split_url(url).netloc
    region = str(fields.get("s3_region", ""))
    bucket, dot, server = host.partition(".")
    amazon = _AMAZON.fullmatch(host)
    express = "s3express" in host or str(fields.get("s3_enable_s3express", False)).lower() == "true"
    if express:
        line = f'remote = "s3://{bucket}?region={region or "REGION"}&s3_express=true"'
        raise Untranslated(f"S3 Express was not tested; to try it: {line}")
    if amazon:
        bucket, region = amazon["bucket"], region or amazon["region"]
    elif dot:
        raise Untranslated(f'write the server: remote = "s3://{bucket}?endpoint=https://{server}"')
    prefix = quote(str(fields.get("s3_file_prefix", "")).strip("/"))
    found = f"s3://{bucket}" + (f"/{prefix}" if prefix else "") + (f"?region={region}" if region else "")
    return found, [name for name in _IN_S3 if name in fields]


def _valkey(url: str, fields: Mapping[str, object]) -> tuple[str, list[str]]:
    is_cluster = str(fields.get("valkey_mode", "standalone")).lower() == "cluster"
    place = split_url(url).netloc
    user = quote(str(fields.get("valkey_username", "")), safe="")
    password = quote(str(fields.get("valkey_password", "")), safe="")
    database = str(fields.get("valkey_database", ""))
    credentials = f"{user}{':' if password else ''}{password}@" if user or password else ""
    scheme = "redis+cluster" if is_cluster else "redis"
    found = f"{scheme}://{credentials}{place}" + (f"/{database}" if database else "")
    return found, [name for name in _IN_VALKEY if name in fields]
