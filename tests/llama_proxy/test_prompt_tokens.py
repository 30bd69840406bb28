"""The tokens of requests, compared with the slot of real llama.cpp servers after each request."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pagoda.connectors.llamacpp.server_requests import ServerRequests
from pagoda.connectors.llamacpp.state_file import read_unknown_state
from pagoda_tools.llama_proxy.prompt_tokens import (
    Ask,
    Prompt,
    marks_of,
    prompt_of,
)
from testbed.llama_servers import BUILDS, LlamaServer, llama_server
from testbed.tiny_gguf import write_model

Body = Mapping[str, object]

# says all that a conversation may have; cuts the thoughts of all answers but the last
TEMPLATE = """
{%- macro say(content) -%}
  {%- if content is string -%}{{ content }}
  {%- else -%}{%- for part in content or [] -%}{{ part.text }}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if tools %}<|tools|>{{ tools | tojson }}{% endif -%}
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == "user" %}{% set last.user = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for message in messages -%}
<|{{ message.role }}|>
  {%- if message.reasoning_content and loop.index0 > last.user -%}
<think>{{ message.reasoning_content }}</think>
  {%- endif -%}
  {{ say(message.content) }}
  {%- for call in message.tool_calls or [] -%}
<call>{{ call.function | tojson }}</call>
  {%- endfor -%}
  <|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>
  {%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif -%}
  {%- if style %}{{ style }}{% endif -%}
{%- endif -%}
"""
SPECIAL = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")


@pytest.fixture(scope="module", params=BUILDS)
def server(request: pytest.FixtureRequest, models: Path) -> Iterator[LlamaServer]:
    model = write_model(models, template=TEMPLATE, special=SPECIAL)
    with llama_server(model, request.param) as server:
        yield server


def asking(server: LlamaServer) -> Ask:
    requests = ServerRequests(server.url)

    async def ask(path: str, body: Body) -> object:
        return requests.post(path, body, 60)

    return ask


def told(server: LlamaServer, route: str, body: Body) -> Prompt:
    return asyncio.run(prompt_of(route, body, asking(server)))


def held(server: LlamaServer, route: str, body: Body) -> list[int]:
    """Return the tokens that the slot has after this request, without those of its answer."""
    limit = {"max_tokens": 1, "max_output_tokens": 1, "n_predict": 1}
    # the answer of a random model may have a form that the server does not like
    with contextlib.suppress(RuntimeError):
        server.post(route, **{**limit, **body})
    server.post("/slots/0?action=save", filename="state")
    fd = os.open(server.states / "state", os.O_RDONLY)
    try:
        tokens: list[int] = read_unknown_state(fd).tokens.tolist()
    finally:
        os.close(fd)
    server.post("/slots/0?action=erase")
    return tokens


def check(server: LlamaServer, route: str, body: Body) -> list[int]:
    prompt = told(server, route, body)
    assert prompt.tokens is not None, prompt.why
    assert prompt.tokens.dtype == "int32"
    assert prompt.tokens.tolist() == held(server, route, body)
    return prompt.tokens.tolist()


def says(role: str, content: object, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


PROMPTS = {
    "text": "Hello there",
    "special tokens in the text": "a<s>b</s>",
    "one letter": "x",
    "no text": "",
    "other letters": "größe 你好 \U0001f600 \x00 \t",
    "tokens": [1, 100, 101, 102],
    "tokens without a first one": [100, 101, 319],
    "text first": ["one ", 100, "two", 5],
    "token first": [1, "one", 100, "</s>"],
    "a list of one text": ["Hello"],
    "a list of one list": [[1, 100, 101]],
    "a list of one mixed list": [["a", 100]],
    "an object": {"prompt_string": "Hello"},
    "a list of one object": [{"prompt_string": ["a", 7]}],
}


@pytest.mark.parametrize(
    "route", ["/completion", "/completions", "/v1/completions"]
)
@pytest.mark.parametrize("name", PROMPTS)
def test_the_tokens_of_a_completion(
    server: LlamaServer, route: str, name: str
) -> None:
    check(server, route, {"prompt": PROMPTS[name]})


UNKNOWN_PROMPTS = {
    "none": None,
    "a number": 7,
    "a truth": True,
    "an empty list": [],
    "two texts": ["a", "b"],
    "two lists": [[1, 2], [3, 4]],
    "fractions": [1.0, 2.5],
    "a fraction among tokens": [1, 2.5],
    "a truth among tokens": [1, True],
    "nothing among tokens": [1, None],
    "a list among tokens": [1, [2]],
    "negative": [1, -1],
    "negative beside text": ["a", -1],
    "too large": [1, 1 << 31],
    "much too large": [1, 1 << 80],
    "images": {"prompt_string": "a", "multimodal_data": ["aaaa"]},
    "images of no model": {"prompt_string": "a", "multimodal_data": None},
    "an object of something else": {"text": "a"},
    "a list of a list of texts": [["a"]],
}


async def ask_nobody(path: str, body: Body) -> object:
    raise AssertionError(f"{path} was asked")


@pytest.mark.parametrize("name", UNKNOWN_PROMPTS)
def test_a_prompt_that_is_not_told_is_not_asked_for(name: str) -> None:
    body = {"prompt": UNKNOWN_PROMPTS[name]}
    prompt = asyncio.run(prompt_of("/completion", body, ask_nobody))
    assert prompt.tokens is None
    assert "prompt" in prompt.why or "token" in prompt.why


@pytest.mark.parametrize(
    "more",
    [
        {"cache_prompt": False},
        {"cache_prompt": "false"},
        {"lora": [{"id": 0, "scale": 1.0}]},
        {"lora": "0"},
        {"n_cache_reuse": 256},
        {"n_cache_reuse": "256"},
        {"n": 2},
        {"n_cmpl": 3},
        {"n": "2"},
    ],
)
@pytest.mark.parametrize("route", ["/completion", "/v1/chat/completions"])
def test_a_request_that_wants_another_cache(
    route: str, more: dict[str, object]
) -> None:
    body = {"prompt": "a", "messages": [says("user", "a")], **more}
    prompt = asyncio.run(prompt_of(route, body, ask_nobody))
    assert prompt.tokens is None
    assert next(iter(more)) in prompt.why


def test_defaults_said_aloud_change_nothing(server: LlamaServer) -> None:
    defaults = {"cache_prompt": True, "lora": [], "n_cache_reuse": 0, "n": 1}
    check(server, "/completion", {"prompt": "ab", **defaults})
    nothing = dict.fromkeys(defaults)
    assert (
        told(server, "/completion", {"prompt": "ab", **nothing}).tokens
        is not None
    )


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string"},
                "days": {"type": "number"},
            },
            "required": ["place"],
        },
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {
        "name": "weather",
        "arguments": '{"place": "Oslo", "days": 1.0}',
    },
}
CONVERSATION = [
    says("system", "You are brief."),
    says("user", "hello"),
    says("assistant", "Hello.", reasoning_content="Greet."),
    says("user", "And the weather?"),
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
CHATS: dict[str, dict[str, object]] = {
    "a user": {"messages": [says("user", "hello")]},
    "a conversation": {"messages": CONVERSATION},
    "a developer": {"messages": [says("developer", "x"), says("user", "y")]},
    "parts": {
        "messages": [
            says(
                "user",
                [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            )
        ]
    },
    "no text": {"messages": [says("user", "")]},
    "special tokens": {"messages": [says("user", "<s>a</s><|user|>")]},
    "tools": {"messages": CONVERSATION, "tools": [TOOL]},
    "a tool that must be called": {
        "messages": CONVERSATION,
        "tools": [TOOL],
        "tool_choice": "required",
    },
    "a tool that must not be called": {
        "messages": CONVERSATION,
        "tools": [TOOL],
        "tool_choice": "none",
    },
    "a called tool": {
        "messages": [
            *CONVERSATION,
            says("assistant", None, tool_calls=[CALL], reasoning_content="Ask."),
            says("tool", "rain", tool_call_id="call_1"),
        ],
        "tools": [TOOL],
        "parallel_tool_calls": True,
    },
    "a call without content": {
        "messages": [
            *CONVERSATION,
            {"role": "assistant", "tool_calls": [CALL]},
            says(
                "tool", [{"type": "text", "text": "rain"}], tool_call_id="call_1"
            ),
        ],
        "tools": [TOOL],
    },
    "a schema": {"messages": CONVERSATION, "json_schema": SCHEMA},
    "a response format": {
        "messages": CONVERSATION,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA},
        },
    },
    "arguments of the template": {
        "messages": CONVERSATION,
        "chat_template_kwargs": {"enable_thinking": False, "style": "short"},
    },
    "reasoning": {
        "messages": CONVERSATION,
        "reasoning_format": "none",
        "reasoning_effort": "low",
    },
    "no head of an answer": {
        "messages": CONVERSATION,
        "add_generation_prompt": False,
    },
    "the beginning of an answer": {
        "messages": [*CONVERSATION, says("assistant", "The weather is")],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "an answer to go on with": {
        "messages": [*CONVERSATION, says("assistant", "The weather is")],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "streamed": {
        "messages": CONVERSATION,
        "stream": False,
        "logprobs": True,
        "top_logprobs": 3,
    },
    "a prompt beside": {"messages": CONVERSATION, "prompt": "something else"},
}


@pytest.mark.parametrize("name", CHATS)
def test_the_tokens_of_a_chat(server: LlamaServer, name: str) -> None:
    check(server, "/v1/chat/completions", CHATS[name])


def test_the_other_route_of_a_chat(server: LlamaServer) -> None:
    check(server, "/chat/completions", {"messages": CONVERSATION})


UNKNOWN_MESSAGES = {
    "none": None,
    "empty": [],
    "a text": "hello",
    "no object": ["hello"],
    "a number": [says("user", 7)],
    "an image": [
        says(
            "user",
            [
                {
                    "type": "image_url",
                    "image_url": {"url": "http://127.0.0.1:1/a.png"},
                }
            ],
        )
    ],
    "a sound": [says("user", [{"type": "input_audio", "input_audio": {}}])],
    "a text in a list": [says("user", ["hello"])],
}


@pytest.mark.parametrize("name", UNKNOWN_MESSAGES)
def test_messages_that_are_not_text_are_not_asked_for(name: str) -> None:
    body = {"messages": UNKNOWN_MESSAGES[name]}
    prompt = asyncio.run(prompt_of("/v1/chat/completions", body, ask_nobody))
    assert prompt.tokens is None
    assert "message" in prompt.why


def test_a_chat_that_the_server_refuses(server: LlamaServer) -> None:
    body = {"messages": CONVERSATION, "tools": [TOOL], "grammar": "root ::= [a]"}
    prompt = told(server, "/v1/chat/completions", body)
    assert prompt.tokens is None
    assert "grammar" in prompt.why


def test_marks_are_where_other_conversations_part(server: LlamaServer) -> None:
    def marks(messages: list[dict[str, object]]) -> list[str]:
        body = {"messages": messages, "tools": [TOOL]}
        prompt = told(server, "/v1/chat/completions", body)
        assert prompt.tokens is not None
        found = asyncio.run(
            marks_of("/v1/chat/completions", body, prompt.tokens, asking(server))
        )
        texts = []
        for mark in found:
            tokens = prompt.tokens[:mark].tolist()
            text = server.post("/detokenize", tokens=tokens)["content"]
            texts.append(str(text))
        return texts

    system, end = marks(CONVERSATION)
    assert system.endswith("<|system|>▁You▁are▁brief.<|end|><|user|>▁")
    assert end.endswith("Hello.<|end|><|user|>▁")
    (only,) = marks([says("user", "another")])
    assert only.endswith("<|user|>▁")
