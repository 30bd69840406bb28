"""URLs in parts."""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

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
