"""Request hints as engines carry them: a mapping of names and values, which a client has written.

A client is not trusted: what is wrong is refused for that hint alone, and the request goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pagoda.cache import RequestHints

_PREFIX = "pagoda."
_FIELDS = {
    "pagoda.session": "session",
    "pagoda.agent": "agent",
    "pagoda.ending": "ending",
    "pagoda.session_end": "session_end",
    "pagoda.drop": "drop",
    "pagoda.retain": "retain_seconds",
}
_OF_SESSIONS = ("agent", "session_end")
UNKNOWN = "unknown"
"""In place of the name of a hint that there is not."""


class ParsedHints(NamedTuple):
    """The hints of one request; None: it has none. `refused`: why others were refused, by name."""

    hints: RequestHints | None = None
    refused: Mapping[str, str] = {}


def parsed_hints(
    parameters: Mapping[str, Any] | None, session: object = None
) -> ParsedHints:
    """Return the hints among these parameters; parameters of others are left alone. Never raises.

    `session`: what the engine itself knows of the session; "pagoda.session" comes first.
    """
    if not parameters and session is None:
        return ParsedHints()
    given: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name, value in (parameters or {}).items():
        if name in _FIELDS:
            given[_FIELDS[name]] = value
        elif isinstance(name, str) and name.startswith(_PREFIX):
            refused[UNKNOWN] = "there is no such hint"
    if session is not None:
        given.setdefault("session", session)
    for name in tuple(given):
        whose = {"session": "s"} if name in _OF_SESSIONS else {}
        try:
            RequestHints(**{**whose, name: given[name]})
        except (ValueError, TypeError):
            del given[name]
            refused[name] = "the value is wrong"
    for name in _OF_SESSIONS:
        if given.get(name) and not given.get("session"):
            del given[name]
            refused[name] = "no session is named"
    if given.get("drop") and given.get("retain_seconds"):
        del given["retain_seconds"]
        refused["retain_seconds"] = "the prompt is dropped"
    hints = RequestHints(**given)
    return ParsedHints(hints if hints.names else None, refused)
