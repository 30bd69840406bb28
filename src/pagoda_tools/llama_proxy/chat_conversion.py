"""Turns requests of other chat interfaces into the body of /chat/completions, as llama.cpp's server
does before it applies the model's template. `prompt_tokens` calls it.

The server has no route that tells its conversion, so it is made again here for what agents send:
text, thoughts, tools, calls of tools and their results. For everything else (images, files, kinds
that are not known) `UnknownPrompt` is raised. Only what the template sees is converted: sampling,
limits and stop words are left out or as they are.

Nothing is copied but the objects whose form changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping

Json = Mapping[str, object]

# Claude Code's first line has a number that changes with each request; the server writes this over
_BILLING = re.compile(
    r"\A(x-anthropic-billing-header:(?:(?!cch=).)*cch=)[\x00-\x7f]{5}(?=;)", re.S
)
_NO_NUMBER = r"\1fffff"


class UnknownPrompt(Exception):
    """The tokens of a request cannot be told. The message says why, for people."""


def chat_of_anthropic(body: Json) -> Json:
    """Return the body of a chat for one of /v1/messages. Raises UnknownPrompt."""
    messages: list[Json] = []
    system = body.get("system")
    if system is not None:
        text = _joined_text(system, "system", _without_number)
        messages.append({"role": "system", "content": text})
    for message in _objects(body.get("messages"), "messages"):
        messages += _anthropic_messages(message)
    found: dict[str, object] = {"messages": messages}
    if isinstance(body.get("tools"), list):
        tools = _objects(body["tools"], "tools")
        found["tools"] = [_anthropic_tool(tool) for tool in tools]
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        if choice.get("type") == "auto":
            found["tool_choice"] = "auto"
        elif choice.get("type") in ("any", "tool"):
            found["tool_choice"] = "required"
    if "chat_template_kwargs" in body:
        found["chat_template_kwargs"] = body["chat_template_kwargs"]
    return found


def chat_of_responses(body: Json) -> Json:
    """Return the body of a chat for one of /v1/responses. Raises UnknownPrompt."""
    if body.get("previous_response_id"):
        raise UnknownPrompt("previous_response_id: earlier answers are not kept")
    found = dict(body)
    given = found.pop("input", None)
    messages: list[dict[str, object]] = []
    if "instructions" in found:
        text = found.pop("instructions")
        content = text if isinstance(text, str) else ""
        messages.append({"role": "system", "content": content})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        for item in _objects(given, "input"):
            _add_item(messages, item)
    found["messages"] = messages
    if "tools" in found:
        tools = _objects(found.pop("tools"), "tools")
        functions = [tool for tool in tools if tool.get("type") == "function"]
        if functions:
            found["tools"] = [_responses_tool(tool) for tool in functions]
    reasoning = found.pop("reasoning", None)
    if isinstance(reasoning, Mapping) and "effort" in reasoning:
        found["reasoning_effort"] = reasoning["effort"]
    return found


# ---- /v1/messages


def _anthropic_messages(message: Json) -> Iterator[Json]:
    """Return what one message becomes: itself, or a message and one for each result of a tool."""
    content = message.get("content")
    if isinstance(content, str):
        yield message
        return
    text: list[Json] = []
    thoughts = ""
    calls: list[Json] = []
    results: list[Json] = []
    for block in _objects(content, "the content of a message"):
        kind = block.get("type")
        if kind == "text":
            text.append(block)
        elif kind == "thinking":
            thoughts += _text(block, "thinking")
        elif kind == "tool_use":
            calls.append(_anthropic_call(block))
        elif kind == "tool_result":
            results.append(_anthropic_result(block))
        elif kind != "redacted_thinking":
            raise UnknownPrompt(f"a message has a block of type {_shown(kind)}")
    if text or calls or thoughts:
        found: dict[str, object] = {"role": _text(message, "role")}
        found["content"] = text or ""
        if calls:
            found["tool_calls"] = calls
        if thoughts:
            found["reasoning_content"] = thoughts
        yield found
    yield from results


def _anthropic_call(block: Json) -> Json:
    given = block.get("input")
    arguments = _compact({} if given is None else given)
    function = {"name": _text(block, "name"), "arguments": arguments}
    return {
        "id": _text(block, "id"),
        "type": "function",
        "function": function,
    }


def _anthropic_result(block: Json) -> Json:
    content = block.get("content")
    return {
        "role": "tool",
        "tool_call_id": _text(block, "tool_use_id"),
        "content": "" if content is None else _joined_text(content, "a result"),
    }


def _anthropic_tool(tool: Json) -> Json:
    function = {
        "name": _text(tool, "name"),
        "description": _text(tool, "description"),
        "parameters": tool.get("input_schema", {}),
    }
    return {"type": "function", "function": function}


def _without_number(text: str) -> str:
    return _BILLING.sub(_NO_NUMBER, text, count=1)


# ---- /v1/responses


def _add_item(messages: list[dict[str, object]], item: Json) -> None:
    """Add what one item becomes. What an assistant says in several items is one message."""
    kind = item.get("type")
    role = item.get("role")
    if role in ("user", "system", "developer") and "content" in item:
        message = dict(item)
        message.pop("type", None)
        message.pop("status", None)
        message["content"] = _parts(item, "input_text")
        messages.append(message)
    elif role == "assistant" and kind == "message":
        parts = _parts(item, "output_text")
        message = _assistant(messages)
        said = message.get("content")
        message["content"] = [*said, *parts] if isinstance(said, list) else parts
    elif kind == "function_call":
        function = {
            "arguments": _text(item, "arguments"),
            "name": _text(item, "name"),
        }
        call = {
            "function": function,
            "id": _text(item, "call_id"),
            "type": "function",
        }
        message = _assistant(messages)
        calls = message.get("tool_calls")
        message["tool_calls"] = (
            [*calls, call] if isinstance(calls, list) else [call]
        )
    elif kind == "function_call_output":
        output = item.get("output")
        if isinstance(output, list):
            output = _parts({"content": output}, "input_text")
        messages.append(
            {
                "content": output,
                "role": "tool",
                "tool_call_id": _text(item, "call_id"),
            }
        )
    elif kind == "reasoning":
        content = _objects(item.get("content"), "the content of reasoning")
        if not content:
            raise UnknownPrompt("reasoning has no content")
        message = _assistant(messages)
        message.setdefault("content", [])
        message["reasoning_content"] = _text(content[0], "text")
    else:
        raise UnknownPrompt(f"input has an item of type {_shown(kind)}")


def _assistant(messages: list[dict[str, object]]) -> dict[str, object]:
    """Return the assistant's message at the end, which is added if there is none."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _parts(item: Json, expected: str) -> list[Json]:
    content = item.get("content")
    if isinstance(content, str):
        return [{"text": content, "type": "text"}]
    parts: list[Json] = []
    for part in _objects(content, "the content of an item"):
        if part.get("type") != expected:
            kind = _shown(part.get("type"))
            raise UnknownPrompt(f"an item has a part of type {kind}")
        parts.append({"text": _text(part, "text"), "type": "text"})
    return parts


def _responses_tool(tool: Json) -> Json:
    function = {name: value for name, value in tool.items() if name != "type"}
    function.setdefault("strict", True)
    return {"type": "function", "function": function}


# ---- both


def _objects(found: object, name: str) -> list[Json]:
    if not isinstance(found, list):
        raise UnknownPrompt(f"{name} is no list")
    for item in found:
        if not isinstance(item, Mapping):
            raise UnknownPrompt(f"{name} is no list of objects")
    return found


def _text(item: Json, name: str) -> str:
    """Return a text of an object, "" if there is none."""
    found = item.get(name)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise UnknownPrompt(f"{name} is no text")
    return found


def _joined_text(
    found: object,
    name: str,
    change: Callable[[str], str] = str,
) -> str:
    """Return a text, or the texts of a list of blocks as one."""
    if isinstance(found, str):
        return change(found)
    texts = []
    for block in _objects(found, name):
        if block.get("type") != "text":
            kind = _shown(block.get("type"))
            raise UnknownPrompt(f"{name} has a block of type {kind}")
        texts.append(change(_text(block, "text")))
    return "".join(texts)


def _compact(value: object) -> str:
    """Return JSON as the server writes it."""
    try:
        _require_like_numbers(value)
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise UnknownPrompt("the input of a tool is nested too deep") from None


def _require_like_numbers(value: object) -> None:
    """Raise UnknownPrompt if there is a number that the server writes in another form."""
    if isinstance(value, Mapping):
        for part in value.values():
            _require_like_numbers(part)
    elif isinstance(value, list):
        for part in value:
            _require_like_numbers(part)
    elif isinstance(value, float):
        if 1e15 <= abs(value) < 1e16:
            raise UnknownPrompt("the input of a tool has a large fraction")
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise UnknownPrompt("the input of a tool has a number above 64 bits")


def _shown(kind: object) -> str:
    """Return what stands in place of a kind, for people."""
    return (
        repr(kind[:40]) if isinstance(kind, str) else f"a {type(kind).__name__}"
    )
