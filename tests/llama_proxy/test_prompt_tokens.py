"""The tokens of requests, compared with the slot of real llama.cpp servers after each request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.connectors.llamacpp.server_requests import (
    ServerRequests,
    ServerTrouble,
)
from pagoda.connectors.llamacpp.state_file import (
    UnknownState,
    read_unknown_state,
)
from pagoda_tools.llama_proxy.prompt_tokens import (
    ROUTES,
    Ask,
    RequestPrompt,
    marks_of,
    prompt_of,
)
from testbed.llama_servers import BUILDS, LlamaServer, llama_server
from testbed.tiny_gguf import write_model

Body = Mapping[str, object]

# says all that a conversation may have; cuts the thoughts of all answers but the last
TEMPLATE = """
{%- macro say(content) -%}
  {%- if content is string -%}{{ content | trim }}
  {%- else -%}{%- for part in content or [] -%}{{ part.text }}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if tools %}<|tools|>{{ tools | tojson }}{% endif -%}
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == "user" %}{% set last.user = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.tool_call_id }}
  {%- if message.reasoning_content and loop.index0 > last.user -%}
<think>{{ message.reasoning_content }}</think>
  {%- endif -%}
  {{ say(message.content) }}
  {%- for call in message.tool_calls or [] -%}
<call {{ call.id }}>{{ call.function | tojson }}</call>
  {%- endfor -%}
  <|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>
  {%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif -%}
  {%- if style %}{{ style }}{% endif -%}
  {%- if reasoning_effort %}<effort>{{ reasoning_effort }}</effort>{% endif -%}
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


def told(server: LlamaServer, route: str, body: Body) -> RequestPrompt:
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


def marked(server: LlamaServer, route: str, body: Body) -> list[str]:
    """Return the text before each mark."""
    prompt = told(server, route, body)
    assert prompt.tokens is not None, prompt.why
    marks = asyncio.run(marks_of(route, body, prompt.tokens, asking(server)))
    texts = []
    for mark in marks:
        tokens = prompt.tokens[:mark].tolist()
        text = server.post("/detokenize", tokens=tokens)["content"]
        texts.append(str(text).replace("▁", " "))
    return texts


def test_marks_are_where_other_conversations_part(server: LlamaServer) -> None:
    body = {"messages": CONVERSATION, "tools": [TOOL]}
    system, end = marked(server, "/v1/chat/completions", body)
    assert "<|tools|>" in system
    assert system.endswith("<|system|> You are brief.<|end|><|user|> ")
    assert end.endswith("Hello.<|end|><|user|> ")


def test_the_only_message_has_one_mark(server: LlamaServer) -> None:
    body = {"messages": [says("user", "  another")]}
    (only,) = marked(server, "/v1/chat/completions", body)
    assert only.endswith("<|user|> ")


def test_a_conversation_without_users_has_the_mark_of_its_system(
    server: LlamaServer,
) -> None:
    messages = [says("system", "Be brief."), says("assistant", "Hello.")]
    (system,) = marked(server, "/v1/chat/completions", {"messages": messages})
    assert system.endswith("Be brief.<|end|>")
    assert (
        marked(server, "/v1/chat/completions", {"messages": messages[:1]}) == []
    )


def test_marks_of_an_answer_that_goes_on(server: LlamaServer) -> None:
    body = CHATS["an answer to go on with"]
    system, end = marked(server, "/v1/chat/completions", body)
    assert system.endswith("brief.<|end|><|user|> ")
    assert end.endswith("Hello.<|end|><|user|> ")


def test_marks_of_the_other_chats(server: LlamaServer) -> None:
    anthropic = {"system": "Be brief.", **MESSAGES["a conversation"]}
    responses = {"instructions": "Be brief.", **RESPONSES["called tools"]}
    for route, body in (
        ("/v1/messages", anthropic),
        ("/v1/responses", responses),
    ):
        system, end = marked(server, route, body)
        assert system.endswith("Be brief.<|end|><|user|> ")
        assert end.endswith("Hello.<|end|><|user|> ")


def test_a_text_without_messages_has_no_marks() -> None:
    tokens = np.arange(9, dtype=np.int32)
    for route in ("/completion", "/infill", "/unknown"):
        body = {"prompt": "a", "messages": [says("user", "a")]}
        assert asyncio.run(marks_of(route, body, tokens, ask_nobody)) == []


@pytest.mark.parametrize("route", ["/infill", "/v1/embeddings"])
def test_routes_whose_prompts_are_not_told(route: str) -> None:
    body = {"prompt": "a", "input_prefix": "a", "input_suffix": "b", "input": "a"}
    prompt = asyncio.run(prompt_of(route, body, ask_nobody))
    assert prompt.tokens is None
    assert route in prompt.why


def test_a_server_that_does_not_answer_is_trouble() -> None:
    async def ask(path: str, body: Body) -> object:
        raise ServerTrouble("nobody there")

    body = {"prompt": "a", "messages": [says("user", "a")]}
    for route in ("/completion", "/v1/chat/completions"):
        with pytest.raises(ServerTrouble):
            asyncio.run(prompt_of(route, body, ask))
    tokens = np.arange(9, dtype=np.int32)
    with pytest.raises(ServerTrouble):
        asyncio.run(marks_of("/v1/chat/completions", body, tokens, ask))


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"prompt": 1, "tokens": "no"},
        {"prompt": "a", "tokens": []},
        {"prompt": "a", "tokens": [1, None]},
        {"prompt": "a", "tokens": [1, 1 << 40]},
        {"prompt": "a", "tokens": [-1]},
    ],
)
def test_answers_of_something_else_are_not_believed(answer: object) -> None:
    async def ask(path: str, body: Body) -> object:
        return answer

    body = {"prompt": "a", "messages": [says("user", "a")]}
    for route in ("/completion", "/v1/chat/completions"):
        prompt = asyncio.run(prompt_of(route, body, ask))
        assert prompt.tokens is None
        assert prompt.why


def block(text: str, **more: object) -> dict[str, object]:
    return {"type": "text", "text": text, **more}


ANTHROPIC_TOOL = {
    "name": "weather",
    "description": "Tells the weather",
    "input_schema": TOOL["function"]["parameters"],  # type: ignore[index]
}
USE = {
    "type": "tool_use",
    "id": "toolu_1",
    "name": "weather",
    "input": {
        "place": 'Tromsø\n\x1f"/',
        "days": [1, 2.5, 1e-7, None, True],
        "x": {},
    },
}
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=a51{};You are Claude"
MESSAGES: dict[str, dict[str, object]] = {
    "a user": {"messages": [says("user", "hello")]},
    "a system": {"system": "Be brief.", "messages": [says("user", "hello")]},
    "no text of the system": {"system": "", "messages": [says("user", "hello")]},
    "no system": {"system": None, "messages": [says("user", "hello")]},
    "blocks": {
        "system": [
            block("Be brief.", cache_control={"type": "ephemeral"}),
            block(" And kind."),
        ],
        "messages": [
            says(
                "user",
                [block("a", cache_control={"type": "ephemeral"}), block("b")],
            )
        ],
    },
    "a conversation": {
        "messages": [
            says("user", "hello"),
            says("assistant", [block("Hello.")]),
            says("user", "again"),
        ]
    },
    "thoughts": {
        "messages": [
            says("user", "hello"),
            says(
                "assistant",
                [
                    {"type": "thinking", "thinking": "Greet. ", "signature": "s"},
                    {"type": "redacted_thinking", "data": "d"},
                    USE,
                ],
            ),
            says("user", [{"type": "tool_result", "tool_use_id": "toolu_1"}]),
        ]
    },
    "tools": {
        "system": "Be brief.",
        "messages": [says("user", "hello")],
        "tools": [ANTHROPIC_TOOL, {"name": "other"}],
        "tool_choice": {"type": "auto"},
    },
    "a tool that must be called": {
        "messages": [says("user", "hello")],
        "tools": [ANTHROPIC_TOOL],
        "tool_choice": {"type": "any"},
    },
    "no tools": {"messages": [says("user", "hello")], "tools": []},
    "called tools": {
        "messages": [
            says("user", "hello"),
            says("assistant", [block("I ask."), USE, {**USE, "id": "toolu_2"}]),
            says(
                "user",
                [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": "rain",
                    },
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_2",
                        "content": [block("r"), block("s")],
                        "is_error": True,
                    },
                    block("What now?"),
                ],
            ),
        ],
        "tools": [ANTHROPIC_TOOL],
    },
    "thinking": {
        "messages": [says("user", "hello")],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "temperature": 0.5,
        "metadata": {"user_id": "me"},
        "stop_sequences": ["x"],
    },
    "no thinking": {
        "messages": [says("user", "hello")],
        "thinking": {"type": "disabled"},
    },
    "adaptive thinking": {
        "messages": [says("user", "hello")],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": []},
    },
    "arguments of the template": {
        "messages": [says("user", "hello")],
        "chat_template_kwargs": {"style": "short", "enable_thinking": False},
    },
    "a number that changes": {
        "system": [block(BILLING.format("45")), block("cch=12345;")],
        "messages": [says("user", "hello")],
    },
    "a number of another form": {
        "system": BILLING.format("4567") + "cch=12345;",
        "messages": [says("user", "hello")],
    },
    "an answer to go on with": {
        "messages": [says("user", "hello"), says("assistant", "The")],
    },
}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_tokens_of_anthropic_messages(server: LlamaServer, name: str) -> None:
    tokens = check(server, "/v1/messages", MESSAGES[name])
    count = server.post("/v1/messages/count_tokens", **MESSAGES[name])
    assert count == {"input_tokens": len(tokens)}


# writes the input of a tool as the server made a text of it
RAW_TEMPLATE = """
{%- for message in messages -%}
<|{{ message.role }}|>
  {%- if message.content is string %}{{ message.content }}{% endif -%}
  {%- for call in message.tool_calls or [] -%}
{{ call.function.name }}({{ call.function.arguments }})
  {%- endfor -%}
  <|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""
INPUTS = [
    *(0.1 + 0.2, 3.0, -0.0, 0.0001, 1e-5, 5e-324, 1e14, 123456789012345.6),
    *(1e16, 12345678901234567.0, 1e22, 1.7976931348623157e308),
    *(
        (1 << 64) - 1,
        -(1 << 63),
        True,
        None,
        "",
        '\x00\x1f\x7f\u2028é\U0001f600</\\"',
    ),
    *([], {}, {"b": [1, {"": 2}], "a": 3}),
]
ODD_NUMBERS = [1e15, -9.9e15, 1 << 64, -(1 << 63) - 1]


def with_input(value: object) -> dict[str, object]:
    call = {**USE, "input": {"value": [value]}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
    return {
        "messages": [
            says("user", "hello"),
            says("assistant", [call]),
            says("user", [result]),
        ]
    }


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_inputs_of_tools_are_written_as_the_server_writes_them(
    build: str, models: Path
) -> None:
    model = write_model(models, template=RAW_TEMPLATE, special=SPECIAL)
    with llama_server(model, build) as server:
        for value in INPUTS:
            check(server, "/v1/messages", with_input(value))


@pytest.mark.parametrize("value", ODD_NUMBERS)
def test_numbers_that_the_server_writes_otherwise_are_not_told(
    value: float,
) -> None:
    prompt = asyncio.run(prompt_of("/v1/messages", with_input(value), ask_nobody))
    assert "input of a tool" in prompt.why


def item(text: str, kind: str = "input_text") -> dict[str, object]:
    return {"type": kind, "text": text}


RESPONSES_TOOL = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
FUNCTION_CALL = {
    "type": "function_call",
    "call_id": "call_1",
    "name": "weather",
    "arguments": '{"place": "Oslo", "days": 1.0}',
}
FUNCTION_OUTPUT = {
    "type": "function_call_output",
    "call_id": "call_1",
    "output": "rain",
}
REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Think."}],
}
OUTPUT = {
    "type": "message",
    "role": "assistant",
    "id": "msg_1",
    "status": "completed",
    "content": [{**item("Hello.", "output_text"), "annotations": []}],
}
RESPONSES: dict[str, dict[str, object]] = {
    "a text": {"input": "hello"},
    "instructions": {"input": "hello", "instructions": "Be brief."},
    "no instructions": {"input": "hello", "instructions": None},
    "items": {
        "input": [
            {"type": "message", **says("developer", "Be brief.")},
            says(
                "user", [item("a"), item("b")], status="completed", type="message"
            ),
        ]
    },
    "a conversation": {
        "instructions": "Be brief.",
        "input": [says("user", "hello"), OUTPUT, says("user", "again")],
    },
    "tools": {
        "input": "hello",
        "tools": [RESPONSES_TOOL, {**RESPONSES_TOOL, "strict": False}],
        "tool_choice": "auto",
    },
    "other tools": {
        "input": "hello",
        "tools": [RESPONSES_TOOL, {"type": "web_search"}],
    },
    "only other tools": {"input": "hello", "tools": [{"type": "web_search"}]},
    "a tool that must be called": {
        "input": "hello",
        "tools": [RESPONSES_TOOL],
        "tool_choice": "required",
    },
    "called tools": {
        "input": [
            says("user", "hello"),
            REASONING,
            FUNCTION_CALL,
            {**FUNCTION_CALL, "call_id": "call_2"},
            FUNCTION_OUTPUT,
            {**FUNCTION_OUTPUT, "call_id": "call_2", "output": [item("snow")]},
            REASONING,
            OUTPUT,
            says("user", "again"),
        ],
        "tools": [RESPONSES_TOOL],
    },
    "an answer before a call": {
        "input": [says("user", "hello"), OUTPUT, FUNCTION_CALL, FUNCTION_OUTPUT],
        "tools": [RESPONSES_TOOL],
    },
    "two answers": {
        "input": [says("user", "hello"), OUTPUT, OUTPUT, says("user", "again")]
    },
    "reasoning": {"input": "hello", "reasoning": {"effort": "low"}},
    "a schema": {
        "input": "hello",
        "text": {
            "format": {"type": "json_schema", "name": "x", "schema": SCHEMA}
        },
    },
    "arguments of the template": {
        "input": "hello",
        "chat_template_kwargs": {"style": "short"},
        "store": False,
        "include": [],
        "parallel_tool_calls": True,
    },
}


@pytest.mark.parametrize("name", RESPONSES)
def test_the_tokens_of_responses(server: LlamaServer, name: str) -> None:
    tokens = check(server, "/v1/responses", RESPONSES[name])
    count = server.post("/v1/responses/input_tokens", **RESPONSES[name])
    assert count["input_tokens"] == len(tokens)


NOT_CONVERTED: list[tuple[str, dict[str, object]]] = [
    ("/v1/messages", {}),
    ("/v1/messages", {"messages": "hello"}),
    ("/v1/messages", {"messages": [7]}),
    (
        "/v1/messages",
        {"messages": [says("user", [{"type": "image", "source": {}}])]},
    ),
    ("/v1/messages", {"messages": [says("user", [{"type": "document"}])]}),
    ("/v1/messages", {"messages": [says("user", "a")], "system": 7}),
    (
        "/v1/messages",
        {"messages": [says("user", "a")], "system": [{"type": "image"}]},
    ),
    ("/v1/messages", {"messages": [says("user", "a")], "tools": ["weather"]}),
    (
        "/v1/messages",
        {
            "messages": [
                says(
                    "user",
                    [{"type": "tool_result", "content": [{"type": "image"}]}],
                )
            ]
        },
    ),
    ("/v1/responses", {}),
    ("/v1/responses", {"input": 7}),
    ("/v1/responses", {"input": ["a"]}),
    ("/v1/responses", {"input": [says("assistant", "a")]}),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("/v1/responses", {"input": [{"type": "reasoning", "summary": []}]}),
    ("/v1/responses", {"input": [says("user", [{"type": "input_image"}])]}),
    ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
    ("/v1/responses", {"input": "a", "tools": {}}),
]


@pytest.mark.parametrize(("route", "body"), NOT_CONVERTED)
def test_what_is_not_converted_is_not_asked_for(
    route: str, body: dict[str, object]
) -> None:
    prompt = asyncio.run(prompt_of(route, body, ask_nobody))
    assert prompt.tokens is None
    assert prompt.why


def test_an_input_of_a_tool_that_is_nested_deeply() -> None:
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    body = {"messages": [says("assistant", [{**USE, "input": deep}])]}
    prompt = asyncio.run(prompt_of("/v1/messages", body, ask_nobody))
    assert "nested" in prompt.why


# ---- bodies that nobody thought of

_SOMETHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
    | st.sampled_from(["text", "user", "assistant", "message", "tool_use"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "input", "id"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
_NAMES = (
    *("prompt", "messages", "input", "system", "instructions", "tools"),
    *("tool_choice", "n", "lora", "cache_prompt", "reasoning"),
)


@given(
    st.sampled_from(sorted(ROUTES)),
    st.dictionaries(st.sampled_from(_NAMES), _SOMETHING, max_size=4),
)
def test_no_body_raises(route: str, body: dict[str, object]) -> None:
    async def ask(path: str, body: Body) -> object:
        return {"prompt": "a", "tokens": [1, 2]}

    prompt = asyncio.run(prompt_of(route, body, ask))
    assert (prompt.tokens is None) == bool(prompt.why)
    tokens = np.array([1, 3], np.int32)
    assert asyncio.run(marks_of(route, body, tokens, ask)) in ([], [1])


def changed(rng: random.Random, value: object) -> object:
    """Return a value that differs here and there."""
    if rng.random() < 0.02:
        return rng.choice(
            [None, True, 7, 2.5, "", "text", [], {}, [{}], ["a", 1]]
        )
    if isinstance(value, dict):
        found = {name: changed(rng, part) for name, part in value.items()}
        if found and rng.random() < 0.02:
            del found[rng.choice(list(found))]
        return found
    if isinstance(value, list):
        parts = [changed(rng, part) for part in value]
        if parts and rng.random() < 0.05:
            parts.append(rng.choice(parts))
        if rng.random() < 0.05:
            rng.shuffle(parts)
        return parts
    return value


BODIES = {
    "/completion": [{"prompt": prompt} for prompt in PROMPTS.values()],
    "/v1/chat/completions": list(CHATS.values()),
    "/v1/messages": list(MESSAGES.values()),
    "/v1/responses": list(RESPONSES.values()),
}


@pytest.mark.slow
def test_changed_bodies_are_told_as_they_are_computed(
    server: LlamaServer,
) -> None:
    rng = random.Random(1)
    equal = 0
    for _ in range(120):
        route = rng.choice(list(BODIES))
        # the second one's fields beside those of the first
        mixed = {**rng.choice(BODIES[route]), **rng.choice(BODIES[route])}
        body = changed(rng, mixed)
        if not isinstance(body, dict):
            continue
        prompt = told(server, route, body)
        if prompt.tokens is None:
            continue
        try:
            computed = held(server, route, body)
        except UnknownState:
            continue  # the server refused it, and its slot is empty
        assert prompt.tokens.tolist() == computed, body
        equal += 1
    assert equal > 60
