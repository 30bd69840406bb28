"""Which tokens llama.cpp's server will have in the slot for a request, before it gets the request.

The proxy asks `prompt_of` for each request that it may help, and `marks_of` before it stores what
came of one. The server does the work: its `/apply-template` turns a conversation into text, its
`/tokenize` turns text into tokens, with the code that the request itself will run through. What the
server is not asked, because it would only refuse it or would begin to download images, is decided
here.

    prompt = await prompt_of("/v1/chat/completions", body, ask)
    prompt.tokens    # int32 array, or None, and then `prompt.why`

Nothing here makes a text wrong: the server compares the tokens of the slot with the request's own,
and the proxy compares these with the tokens of the saved state. What was told wrongly, such as a
template that writes the time of day, is a miss.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.connectors.llamacpp.server_requests import ServerTrouble
from pagoda_tools.llama_proxy.chat_conversion import (
    UnknownPrompt,
    chat_of_anthropic,
    chat_of_responses,
)

Tokens = npt.NDArray[np.int32]
# POSTs JSON, or its bytes, to a path of the server and returns the JSON of its answer. Raises
# ServerTrouble.
Ask = Callable[[str, Mapping[str, object] | bytes], Awaitable[object]]

COMPLETION = "completion"
CHAT = "chat"
MESSAGES = "messages"  # Anthropic's chat
RESPONSES = "responses"  # OpenAI's other chat
INFILL = "infill"

# the routes that compute a prompt in a slot, and how each says it
ROUTES: Mapping[str, str] = {
    "/completion": COMPLETION,
    "/completions": COMPLETION,
    "/v1/completions": COMPLETION,
    "/chat/completions": CHAT,
    "/v1/chat/completions": CHAT,
    "/api/chat": CHAT,
    "/v1/messages": MESSAGES,
    "/responses": RESPONSES,
    "/v1/responses": RESPONSES,
    "/infill": INFILL,
}
# the server does not say what it puts together for /infill, nor what that depends on
_INFILL_WHY = (
    "/infill: how much of its parts the server takes depends on its batch size and other "
    "arguments, which it does not tell"
)

_SYSTEM_ROLES = ("system", "developer")


class RequestPrompt(NamedTuple):
    """The tokens of a request's prompt, or why they are not known: the request is passed on as it
    is, and `why` is a sentence for people.
    """

    tokens: Tokens | None
    why: str = ""


async def prompt_of(
    route: str, body: Mapping[str, object], ask: Ask, text: bytes = b""
) -> RequestPrompt:
    """Return the tokens that the server will have in the slot for this request.

    Asks the server at most twice, changes nothing there, and keeps no slot busy. `body` may be
    anything that JSON can say.

    Args:
        route: the path of the request, without a prefix and a query.
        body: the JSON object of the request.
        ask: POSTs to the server.
        text: the same, as the client wrote it: then it is not written anew. Empty: it is.

    Raises ServerTrouble if the server does not answer. A request that it refuses is no trouble:
    it is passed on, and refused then.
    """
    try:
        _require_plain(body)
        kind = ROUTES.get(route)
        if kind == COMPLETION:
            return RequestPrompt(await _tokens_of_completion(body, ask))
        if kind == INFILL:
            raise UnknownPrompt(_INFILL_WHY)
        if kind is None:
            raise UnknownPrompt(f"{route} is not known")
        chat = _chat_of(kind, body)
        written = text if chat is body else b""
        return RequestPrompt(await _tokens_of_chat(chat, ask, written))
    except UnknownPrompt as error:
        return RequestPrompt(None, str(error))


async def marks_of(
    route: str, body: Mapping[str, object], tokens: Tokens, ask: Ask
) -> list[int]:
    """Return after how many of `tokens` other requests will probably go on in another way.

    These are the end of what does not change in a conversation (the system's text and the tools)
    and the start of its last user message. Each is where `tokens` and those of a conversation
    with another message at that place part. A route without messages has none.

    Asks the server at most four times. Raises ServerTrouble if it does not answer.
    """
    kind = ROUTES.get(route)
    if kind not in (CHAT, MESSAGES, RESPONSES):
        return []
    try:
        chat = dict(_chat_of(kind, body))
    except UnknownPrompt:
        return []
    messages = chat.get("messages")
    if not isinstance(messages, list):
        return []
    # the other conversations end with a user
    chat.pop("continue_final_message", None)
    found = set()
    for place in _turning_points(messages):
        chat["messages"] = [*messages[:place], _another_than(messages[place])]
        try:
            others = await _tokens_of_chat(chat, ask)
        except UnknownPrompt:
            continue
        found.add(_common_prefix(tokens, others))
    return sorted(mark for mark in found if 0 < mark < len(tokens))


# ---- what no route can have

_ANSWERS = ("n", "n_cmpl")  # how many are wanted


def _require_plain(body: Mapping[str, object]) -> None:
    """Raise UnknownPrompt if the request asks for something that a stored prompt does not fit."""
    if body.get("cache_prompt", True) not in (True, None):
        raise UnknownPrompt("cache_prompt is not true")
    if body.get("lora") not in (None, []):
        raise UnknownPrompt("lora: it asks for adapters of its own")
    if body.get("n_cache_reuse") not in (None, 0):
        raise UnknownPrompt("n_cache_reuse moves pieces of the cache")
    for name in _ANSWERS:
        if body.get(name) not in (None, 1):
            raise UnknownPrompt(f"{name} is not 1: several answers")


def is_several(body: Mapping[str, object]) -> bool:
    """Return whether a request may take several slots: it has several prompts or answers. Pure."""
    if any(body.get(name) not in (None, 1) for name in _ANSWERS):
        return True
    prompt = body.get("prompt")
    if not isinstance(prompt, list):
        return False
    return not all(type(token) is int for token in prompt)


# ---- completions


async def _tokens_of_completion(body: Mapping[str, object], ask: Ask) -> Tokens:
    prompt = _single(body.get("prompt"))
    if isinstance(prompt, Mapping):
        prompt = _text_of_object(prompt)
    if isinstance(prompt, str):
        return await _tokenized(prompt, ask)
    if not isinstance(prompt, list) or not prompt:
        raise UnknownPrompt("prompt is no text and no list of tokens")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return _checked(prompt)
    if kinds != {int, str}:
        raise UnknownPrompt("prompt is no list of tokens and texts")
    _checked([part for part in prompt if isinstance(part, int)])
    return await _tokenized(prompt, ask)


def _single(prompt: object) -> object:
    """Return the prompt, without the list around it if there is one."""
    if not isinstance(prompt, list) or int in set(map(type, prompt)):
        return prompt
    if len(prompt) != 1:
        raise UnknownPrompt(f"prompt is a list of {len(prompt)} prompts")
    return prompt[0]


def _text_of_object(prompt: Mapping[object, object]) -> object:
    if "multimodal_data" in prompt:
        raise UnknownPrompt("prompt has multimodal_data")
    return prompt.get("prompt_string")


# ---- conversations


def _chat_of(kind: str, body: Mapping[str, object]) -> Mapping[str, object]:
    """Return the body of /chat/completions for one of a route of this kind."""
    if kind == MESSAGES:
        return chat_of_anthropic(body)
    if kind == RESPONSES:
        return chat_of_responses(body)
    return body


async def _tokens_of_chat(
    body: Mapping[str, object], ask: Ask, written: bytes = b""
) -> Tokens:
    """Return the tokens of a conversation. `written`: the same body; empty: it is written anew."""
    _require_text(body.get("messages"))
    answer = await _answer("/apply-template", written or body, ask)
    prompt = answer.get("prompt")
    if not isinstance(prompt, str):
        raise UnknownPrompt("/apply-template gave no text")
    return await _tokenized(prompt, ask)


def _require_text(messages: object) -> None:
    """Raise UnknownPrompt unless all messages are text. Of others, the server would load what their
    URLs name.
    """
    if not isinstance(messages, list) or not messages:
        raise UnknownPrompt("messages is no list of messages")
    for message in messages:
        if not isinstance(message, Mapping):
            raise UnknownPrompt("a message is no object")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise UnknownPrompt("the content of a message is no text")
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text":
                raise UnknownPrompt(
                    f"a message has a part of type {str(kind)[:40]!r}"
                )


def _turning_points(messages: Sequence[object]) -> list[int]:
    """Return the numbers of the first message that is not the system's and of the last user
    message.
    """
    roles = [
        message.get("role") if isinstance(message, Mapping) else None
        for message in messages
    ]
    first = 0
    while first < len(roles) and roles[first] in _SYSTEM_ROLES:
        first += 1
    if first == len(roles):
        return []
    users = [place for place, role in enumerate(roles) if role == "user"]
    return sorted({first, users[-1]}) if users else [first]


def _another_than(message: object) -> Mapping[str, object]:
    """Return a user message that differs from this one in its first character."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list) and content and isinstance(content[0], Mapping):
        content = content[0].get("text")
    # many templates strip a message
    is_like = isinstance(content, str) and content.lstrip()[:1] in ("a", "A")
    return {"role": "user", "content": "b" if is_like else "a"}


def _common_prefix(tokens: Tokens, others: Tokens) -> int:
    length = min(len(tokens), len(others))
    differs = tokens[:length] != others[:length]
    return int(differs.argmax()) if differs.any() else length


# ---- asking


async def _tokenized(content: object, ask: Ask) -> Tokens:
    """Return the tokens of a prompt, as the server makes them of a request's prompt."""
    body = {"content": content, "add_special": True, "parse_special": True}
    answer = await _answer("/tokenize", body, ask)
    found = answer.get("tokens")
    if not isinstance(found, list):
        raise UnknownPrompt("/tokenize gave no list")
    return _checked(found)


async def _answer(
    path: str, body: Mapping[str, object] | bytes, ask: Ask
) -> Mapping[object, object]:
    try:
        answer = await ask(path, body)
    except ServerTrouble as error:
        if not error.status:
            raise
        raise UnknownPrompt(str(error)) from error
    if not isinstance(answer, Mapping):
        raise UnknownPrompt(f"{path} gave no object")
    return answer


def _checked(numbers: list[object]) -> Tokens:
    """Return a list of JSON as tokens. Raises UnknownPrompt if one cannot be a token."""
    if not numbers:
        raise UnknownPrompt("the prompt is empty")
    try:
        # a third of the time of numpy for a list, and it takes whole numbers only
        packed = struct.pack(f"{len(numbers)}i", *numbers)
    except struct.error:
        raise UnknownPrompt("a token is no number, or too large") from None
    found = np.frombuffer(packed, np.intc).astype(np.int32, copy=False)
    if found.min() < 0:
        raise UnknownPrompt("a token is negative")
    return found
