"""How an answer of the server ended, read from its last bytes: a hint that no client must give."""

from __future__ import annotations

import re

from pagoda.cache.caller_hints import EndingName
from pagoda_tools.llama_proxy.prompt_tokens import RESPONSES, ROUTES

# in OpenAI's, Anthropic's and the server's own words
_REASON = re.compile(
    rb'"(?:finish_reason|stop_reason|stop_type)"\s*:\s*"([a-z_]+)"'
)
_ENDINGS: dict[bytes, EndingName] = {
    b"tool_calls": "tool_call",
    b"tool_use": "tool_call",
    b"stop": "turn",
    b"end_turn": "turn",
    b"stop_sequence": "turn",
    b"eos": "turn",
    b"word": "turn",
}
# /v1/responses names no reason; it says of each part of the answer what it is
_CALL = re.compile(rb'"type"\s*:\s*"function_call"')
_COMPLETED = re.compile(rb'"status"\s*:\s*"completed"')


def ending_of(route: str, text: bytes) -> EndingName:
    """Return how an answer ended, of which `text` is the end or all; empty if it does not say so.

    What stands in a text of JSON is escaped, so no model can write it. Pure.
    """
    if ROUTES.get(route) == RESPONSES:
        if _CALL.search(text):
            return "tool_call"
        return "turn" if _COMPLETED.search(text) else ""
    reasons = _REASON.findall(text)
    return _ENDINGS.get(reasons[-1], "other") if reasons else ""
