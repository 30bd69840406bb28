"""What S3 asks for besides objects, over connections of our own: pages of names, and deleting many at once.

obstore signs no URL that has parameters, and its own client follows redirections.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
from collections.abc import Mapping, Sequence
from urllib.parse import SplitResult, parse_qsl, quote

__all__ = ["deletion_of", "page_of", "page_parameters", "secret_of", "target_of"]

_NAMES = 1000  # of one page, the most that S3 gives


def secret_of(options: Mapping[str, str]) -> str | None:
    """The secret key that requests are signed with, if it was given as an option or by the environment."""
    for name, value in options.items():
        if name.lower() in ("secret_access_key", "aws_secret_access_key"):
            return value
    return os.environ.get("AWS_SECRET_ACCESS_KEY")


def target_of(method: str, signed: SplitResult, secret: str, parameters: Mapping[str, str]) -> str | None:
    """The target of a request to the bucket with these parameters.

    `signed` is the bucket's URL as obstore signed it for GET: it knows region, date and session. None: it was signed
    with another secret than this.
    """
    given = dict(parse_qsl(signed.query, keep_blank_values=True))
    if not hmac.compare_digest(given.pop("X-Amz-Signature", ""), _signature("GET", signed, given, secret)):
        return None
    given |= parameters
    return f"{signed.path}?{_query(given)}&X-Amz-Signature={_signature(method, signed, given, secret)}"


def page_parameters(prefix: str, token: str | None) -> dict[str, str]:
    """Those of a request for one page of names; `token` is that of the page before."""
    given = {"list-type": "2", "prefix": prefix, "max-keys": str(_NAMES)}
    return given if token is None else given | {"continuation-token": token}


def page_of(listing: bytes) -> tuple[list[str], str | None]:
    """The names on one page, and the token that leads to the next. No XML is understood: no name of ours needs it."""
    names = [name.decode("latin-1") for name in re.findall(rb"<Key>([^<&]{1,1024})</Key>", listing)]
    token = re.search(rb"<NextContinuationToken>([^<&]{1,4096})</NextContinuationToken>", listing)
    return names, token[1].decode("latin-1") if token else None


def deletion_of(names: Sequence[str]) -> tuple[dict[str, str], bytes]:
    """The headers and the body of a request that deletes objects; the answer names only those that stayed."""
    objects = "".join(
        f"<Object><Key>{name}</Key></Object>" for name in names
    )  # no name of ours needs escaping
    body = f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    return {"Content-MD5": base64.b64encode(digest).decode()}, body


def _signature(method: str, url: SplitResult, parameters: Mapping[str, str], secret: str) -> str:
    """Signature Version 4 of a request whose only signed header is the host."""
    request = f"{method}\n{url.path}\n{_query(parameters)}\nhost:{url.netloc}\n\nhost\nUNSIGNED-PAYLOAD"
    scope = parameters.get("X-Amz-Credential", "").partition("/")[2]
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{parameters.get('X-Amz-Date', '')}\n{scope}\n{digest}"
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


def _query(parameters: Mapping[str, str]) -> str:
    return "&".join(
        f"{quote(name, safe='~')}={quote(value, safe='~')}" for name, value in sorted(parameters.items())
    )
