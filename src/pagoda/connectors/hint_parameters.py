"""Request hints as engines carry them: a mapping of names and values, which a client has written.

A client is not trusted: what is wrong is refused for that hint alone, and the request goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pagoda.cache import RequestHints
from pagoda.cache.caller_hints import EndingName
from pagoda.config.option_values import HintMode

_PREFIX = "pagoda."
_FIELDS = {
    "pagoda.session": "session",
    "pagoda.agent": "agent",
    "pagoda.ending": "ending",
    "pagoda.session_end": "session_end",
    "pagoda.drop": "drop",
    "pagoda.retain": "retain_seconds",
}
# the actions of vLLM's `kv_hints` that are ours, and the member of the payload that is the value;
# None: the action says it all
_ACTIONS: dict[str, str | None] = {
    "pagoda.retain": "seconds",
    "pagoda.drop": None,
    "pagoda.session_end": None,
}
_ACTION_VERSION = "1.0"
# members of a payload that say whose the request is
_WHOSE = ("session", "agent")
_OF_SESSIONS = ("agent", "session_end")
UNKNOWN = "unknown"
"""In place of the name of a hint that there is not."""


class ParsedHints(NamedTuple):
    """The hints of one request; None: it has none. `refused`: why others were refused, by name."""

    hints: RequestHints | None = None
    refused: Mapping[str, str] = {}


def parameters_of(envelope: Any) -> dict[str, Any]:
    """Return the hints in an envelope of vLLM (`kv_hints`), as parameters for `parsed_hints`.

    Actions of others are left alone; one that begins like ours and is none is a parameter that
    there is not, and refused as such. Never raises.
    """
    found: dict[str, Any] = {}
    actions = getattr(envelope, "actions", None)
    for action in actions if isinstance(actions, (list, tuple)) else ():
        kind = getattr(action, "action_type", None)
        version = getattr(action, "action_version", None)
        payload = getattr(action, "payload", None)
        if not isinstance(kind, str) or not kind.startswith(_PREFIX):
            continue
        if kind not in _ACTIONS or version != _ACTION_VERSION:
            found[f"{kind}@{version}"] = payload
            continue
        members = payload if isinstance(payload, Mapping) else {}
        member = _ACTIONS[kind]
        found[kind] = True if member is None else members.get(member)
        for name in _WHOSE:
            if name in members:
                found[f"{_PREFIX}{name}"] = members[name]
    return found


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


def with_ending(
    hints: RequestHints | None,
    ending: EndingName,
    mode: HintMode,
    are_heard: bool,
) -> RequestHints | None:
    """Return the hints of a request whose answer ended in this way; empty: nobody knows. Pure.

    Without hints of its client, the ending is told from the first answer on that ends in a tool
    call: an agent asks, whose next request is another matter than a user's.

    `are_heard`: whether the cache hears hints already.
    """
    if mode == "never" or not ending:
        return hints
    if hints is not None:
        return hints if hints.ending else replace(hints, ending=ending)
    if ending == "tool_call" or are_heard:
        return RequestHints(ending=ending)
    return None
