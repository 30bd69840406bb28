"""URLs in parts."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

__all__ = ["split_url"]


def split_url(url: str) -> SplitResult:
    """Return a URL in parts, also one of several hosts.

    Since its releases of 2025 Python's own function refuses an IPv6 address in brackets that is not the first of them.
    """
    scheme, mark, rest = url.partition("://")
    place = re.split("[/?#]", rest, maxsplit=1)[0] if mark and "," in rest else ""
    return urlsplit(url) if not place else urlsplit(f"{scheme}://{rest[len(place) :]}")._replace(netloc=place)
