"""The JSON body of a request: read, and changed in as few bytes as possible."""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

Body = dict[str, object]


def read_body(text: bytes) -> Body | None:
    """Return the object in a body; None if it has another form: the server says what is wrong."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None


def changed(
    text: bytes, body: Mapping[str, object], added: Mapping[str, object]
) -> bytes:
    """Return a body with other members.

    New ones are written at its end, and all else stays as the client wrote it; it is written anew
    only where one of them is there already.
    """
    if not added:
        return text
    if added.keys() & body.keys():
        return json.dumps({**body, **added}).encode()
    end = text.rindex(b"}")
    members = json.dumps(added).encode()[1:-1]
    comma = b", " if body else b""
    return text[:end] + comma + members + text[end:]
