"""Request hints as clients of the proxy write them: as members of the body, or in its headers.

The server gets none of them. What a hint is, and what becomes of it: `pagoda.RequestHints`.
"""

from __future__ import annotations

from typing import NamedTuple

from aiohttp import web

from pagoda.cache import RequestHints
from pagoda.connectors.hint_parameters import ParsedHints, parsed_hints
from pagoda.connectors.llamacpp import SlotStates
from pagoda_tools.llama_proxy.request_body import Body, without

_PREFIX = "pagoda."
# where clients of vLLM write the same hints
_PARAMETERS = "kv_transfer_params"
_SESSION = "session_id"
# of vLLM's clients, and of coding agents
_SESSION_HEADERS = ("X-Session-ID", "session_id")


class HintedBody(NamedTuple):
    """The body that the server gets, and what its client said of the request beside it."""

    text: bytes
    parsed: ParsedHints


def hinted_body(request: web.Request, text: bytes, body: Body) -> HintedBody:
    """Take the hints out of a body, which is `body` when read, and out of the headers.

    A member of the body comes before the same one of `kv_transfer_params`; `pagoda.session` comes
    before `session_id`, and that before a header.
    """
    own = [name for name in body if name.startswith(_PREFIX)]
    given: dict[str, object] = {}
    parameters = body.get(_PARAMETERS)
    within: dict[str, list[str]] = {}
    if isinstance(parameters, dict):
        ours = [name for name in parameters if name.startswith(_PREFIX)]
        given |= {name: parameters.pop(name) for name in ours}
        if ours:
            within[_PARAMETERS] = ours
            if not parameters:
                del body[_PARAMETERS]
    given |= {name: body.pop(name) for name in own}
    if own or within:
        text = without(text, own, within)
    return HintedBody(text, parsed_hints(given, _session(request, body)))


def refuse_all(states: SlotStates, hints: RequestHints | None, why: str) -> None:
    """Count the hints of a request as refused. `why`: of a fixed set."""
    for name in () if hints is None else hints.names:
        states.refuse_hint(name, why)


def _session(request: web.Request, body: Body) -> object:
    """Return what the client calls the session, None if it says nothing."""
    if body.get(_SESSION):
        return body[_SESSION]
    for name in _SESSION_HEADERS:
        if said := request.headers.get(name):
            return said
    return None
