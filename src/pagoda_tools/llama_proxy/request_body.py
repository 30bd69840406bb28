"""The JSON body of a request: read, and changed in as few bytes as possible."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

import msgspec

Body = dict[str, object]

# the server takes a text with it as well
_MARK = b"\xef\xbb\xbf"
_NOTHING = b"{}"


def read_body(text: bytes) -> Body | None:
    """Return the object in a body; None if it has another form: the server says what is wrong.

    Raises RecursionError for one that is nested too deep.
    """
    try:
        found = msgspec.json.decode(text.removeprefix(_MARK))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None


def as_the_server_reads(text: bytes) -> bytes:
    """Return a body without what llama.cpp's server does not read of its JSON: it takes a NUL for
    the end. No JSON has one. Pure.
    """
    return text.partition(b"\0")[0]


def has_member(text: bytes, names: Sequence[str]) -> bool:
    """Return whether a body of any form has a member of one of these names at any depth; a text
    that is one of them counts too. Pure.

    Names may be written with escapes. What is no JSON is searched as it is.
    """
    plain = text
    if b"\\" in text:
        try:
            read = as_the_server_reads(text)
            found = msgspec.json.decode(read.removeprefix(_MARK))
            plain = msgspec.json.encode(found)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        except RecursionError:
            return True
    return any(f'"{name}"'.encode() in plain for name in names)


def without(
    text: bytes,
    names: Collection[str],
    within: Mapping[str, Collection[str]] | None = None,
) -> bytes:
    """Return an object without these members; the values of all others stay as they were written.
    Pure.

    `within`: names members that are objects, and what is left out of each; one of which nothing is
    left is left out itself.
    """
    members = msgspec.json.decode(
        text.removeprefix(_MARK), type=dict[str, msgspec.Raw]
    )
    kept = []
    for name, value in members.items():
        if name in names:
            continue
        written = bytes(value)
        if within is not None and name in within:
            written = without(written, within[name])
            if written == _NOTHING:
                continue
        kept.append(json.dumps(name).encode() + b": " + written)
    return b"{" + b", ".join(kept) + b"}"


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
