"""Requests to an S3 bucket over our own connections: pages of names, and deletion of many objects
at once.

obstore does not sign URLs that have parameters, and its own client follows redirections.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
from collections.abc import Mapping, Sequence
from urllib.parse import SplitResult, parse_qsl, quote

_NAMES = 1000  # on one page, the most that S3 allows


def find_secret(options: Mapping[str, str]) -> str | None:
    """Return the secret key that requests are signed with, from the options or the environment;
    None: not given.
    """
    for name, value in options.items():
        if name.lower() in ("secret_access_key", "aws_secret_access_key"):
            return value
    return os.environ.get("AWS_SECRET_ACCESS_KEY")


def signed_target(
    method: str, signed: SplitResult, secret: str, parameters: Mapping[str, str]
) -> str | None:
    """Return the target of a request to the bucket with these parameters.

    `signed` is the bucket's URL as obstore signed it for GET, with region, date and session. None:
    obstore signed it with another secret than `secret`.
    """
    given = dict(parse_qsl(signed.query, keep_blank_values=True))
    if not hmac.compare_digest(
        given.pop("X-Amz-Signature", ""), _signature("GET", signed, given, secret)
    ):
        return None
    given |= parameters
    return f"{signed.path}?{_query(given)}&X-Amz-Signature={_signature(method, signed, given, secret)}"  # noqa: E501


def page_parameters(prefix: str, token: str | None) -> dict[str, str]:
    """Return the parameters of a request for one page of names; `token` is from the page before."""
    given = {"list-type": "2", "prefix": prefix, "max-keys": str(_NAMES)}
    return given if token is None else given | {"continuation-token": token}


def parse_page(listing: bytes) -> tuple[list[str], str | None]:
    """Return the names on one page and the token of the next page. The XML is not parsed: our names
    need no escapes.
    """
    names = [
        name.decode("latin-1")
        for name in re.findall(rb"<Key>([^<&]{1,1024})</Key>", listing)
    ]
    token = re.search(
        rb"<NextContinuationToken>([^<&]{1,4096})</NextContinuationToken>",
        listing,
    )
    return names, token[1].decode("latin-1") if token else None


def bulk_delete(names: Sequence[str]) -> tuple[dict[str, str], bytes]:
    """Return headers and body of a request that deletes objects; the response names only those not
    deleted.
    """
    # our names need no escapes
    objects = "".join(f"<Object><Key>{name}</Key></Object>" for name in names)
    body = f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    return {"Content-MD5": base64.b64encode(digest).decode()}, body


def _signature(
    method: str, url: SplitResult, parameters: Mapping[str, str], secret: str
) -> str:
    """Return Signature Version 4 of a request whose only signed header is the host."""
    request = f"{method}\n{url.path}\n{_query(parameters)}\nhost:{url.netloc}\n\nhost\nUNSIGNED-PAYLOAD"  # noqa: E501
    scope = parameters.get("X-Amz-Credential", "").partition("/")[2]
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = (
        f"AWS4-HMAC-SHA256\n{parameters.get('X-Amz-Date', '')}\n{scope}\n{digest}"
    )
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


def _query(parameters: Mapping[str, str]) -> str:
    return "&".join(
        f"{quote(name, safe='~')}={quote(value, safe='~')}"
        for name, value in sorted(parameters.items())
    )
