"""The parts of the proxy that need no server."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_tools.llama_proxy.event_stream import EventStream, timings_of
from pagoda_tools.llama_proxy.load_worth import LoadWorth
from pagoda_tools.llama_proxy.request_body import (
    changed,
    has_member,
    read_body,
)
from pagoda_tools.llama_proxy.slot_accounts import (
    SlotAccount,
    SlotAccounts,
    common_prefix,
    fullest,
    least_useful,
)

PROGRESS = {"total": 9, "cache": 7, "processed": 7, "time_ms": 0}


def event(**members: object) -> bytes:
    return b"data: " + json.dumps(members).encode() + b"\n\n"


async def in_pieces(text: bytes, sizes: Sequence[int]) -> AsyncIterator[bytes]:
    rest = text
    for size in sizes:
        if piece := rest[:size]:
            yield piece
        rest = rest[size:]
    if rest:
        yield rest


async def read(
    text: bytes, sizes: Sequence[int], *, shows: bool
) -> tuple[EventStream, bytes]:
    stream = EventStream(in_pieces(text, sizes), cuts_progress=not shows)
    first = await stream.beginning()
    rest = [piece async for piece in stream.rest()]
    return stream, b"".join([first, *rest])


@given(
    sizes=st.lists(st.integers(1, 40), max_size=30),
    shows=st.booleans(),
    ends=st.booleans(),
)
def test_only_progress_is_cut_out_however_the_bytes_come(
    sizes: list[int], shows: bool, ends: bool
) -> None:
    progress = [
        event(content="", prompt_progress=PROGRESS),
        event(content="", prompt_progress={**PROGRESS, "processed": 9}),
    ]
    answer = [
        event(content="prompt_progress"),
        event(content='a "prompt_progress" b'),
        event(
            content="", timings={"cache_n": 7, "prompt_n": 2, "predicted_n": 5}
        ),
    ]
    if ends:
        answer.append(b"data: [DONE]\n\n")
    text = b"".join([*progress, *answer])
    stream, got = asyncio.run(read(text, sizes, shows=shows))
    assert stream.reused_tokens == 7
    assert got == b"".join([*(progress if shows else ()), *answer])
    assert timings_of(stream.tail).answer_tokens == 5


def in_lines(found: dict[str, object], end: str = "\n") -> bytes:
    lines = json.dumps(found, indent=1).splitlines()
    return "".join([*(f"data: {line}{end}" for line in lines), end]).encode()


FORMS: dict[str, Callable[[dict[str, object]], bytes]] = {
    "CR LF": lambda e: b"data: " + json.dumps(e).encode() + b"\r\n\r\n",
    "CR": lambda e: b"data: " + json.dumps(e).encode() + b"\r\r",
    "no space": lambda e: b"data:" + json.dumps(e).encode() + b"\n\n",
    "more fields": lambda e: b"id: 1\nevent: a\n" + event(**e),
    "comments": lambda e: b":\n\n: a\ndata: " + json.dumps(e).encode() + b"\n\n",
    "lines": in_lines,
    "lines with CR LF": lambda e: in_lines(e, "\r\n"),
    "a mark": lambda e: b"\xef\xbb\xbf" + event(**e),
}


@pytest.mark.parametrize("name", FORMS)
@given(sizes=st.lists(st.integers(1, 40), max_size=30))
def test_a_stream_is_read_however_it_is_written(
    name: str, sizes: list[int]
) -> None:
    write = FORMS[name]
    progress: dict[str, object] = {"content": "", "prompt_progress": PROGRESS}
    token: dict[str, object] = {"content": "a"}
    text = b"".join(map(write, [progress, progress, token, token]))
    stream, got = asyncio.run(read(text, sizes, shows=False))
    assert stream.reused_tokens == 7
    assert b"prompt_progress" not in got
    assert got.endswith(write(token) * 2)


PARTS: dict[str, dict[str, object]] = {
    "content": {"content": "a"},
    "a token of no text yet": {"content": "", "tokens": [321]},
    "the end": {"content": "", "stop": True},
    "text": {"choices": [{"text": "a"}]},
    "delta": {"choices": [{"delta": {"role": "assistant", "content": "a"}}]},
    "thought": {"choices": [{"delta": {"reasoning_content": "a"}}]},
    "call": {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]},
    "reason": {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    "usage": {"choices": [], "usage": {"prompt_tokens": 9}},
    "another kind": {"type": "response.output_text.delta", "delta": "a"},
    "error": {"error": {"code": 500}},
}


@pytest.mark.parametrize("part", PARTS)
def test_no_part_of_an_answer_is_cut_out_with_the_progress(part: str) -> None:
    """A later server may say both in one event."""
    both = event(**PARTS[part], prompt_progress=PROGRESS)
    text = both + event(content="b") + both
    stream, got = asyncio.run(read(text, [9, 50], shows=False))
    assert stream.reused_tokens == 7
    # what comes after the first token is not looked at
    assert got == event(**PARTS[part]) + event(content="b") + both


def test_events_that_say_nothing_may_come_before_the_progress() -> None:
    role = event(choices=[{"delta": {"role": "assistant", "content": None}}])
    progress = event(choices=[{"delta": {}}], prompt_progress=PROGRESS)
    text = role * 5 + progress + role + progress + event(content="a")
    stream, got = asyncio.run(read(text, [30] * 9, shows=False))
    assert stream.reused_tokens == 7
    assert got == role * 6 + event(content="a")


@pytest.mark.parametrize(
    "said",
    [
        {"cache_n": 10**5000, "predicted_n": 10**5000},
        {"cache_n": None, "prompt_ms": None},
        {"cache_n": "6", "prompt_n": [6], "prompt_ms": "6"},
    ],
)
def test_timings_that_are_none_are_not_known(said: dict[str, object]) -> None:
    # the digits of such a number are not a number for `int` either
    sys.set_int_max_str_digits(0)
    try:
        text = json.dumps({"timings": said}).encode()
    finally:
        sys.set_int_max_str_digits(sys.int_info.default_max_str_digits)
    assert timings_of(text) == (None, None, 0.0, None)


def test_a_time_without_end_is_not_known() -> None:
    text = b'{"timings": {"cache_n": 3, "prompt_ms": 1e999, "prompt_n": 9}}'
    assert timings_of(text) == (3, 9, 0.0, None)


def test_a_stream_without_progress_passes_whole() -> None:
    text = event(content="a") + event(content="b") + b"data: [DONE]"
    stream, got = asyncio.run(read(text, [3, 60], shows=False))
    assert stream.reused_tokens is None
    assert got == text


def test_a_stream_that_ends_at_once_is_empty() -> None:
    stream, got = asyncio.run(read(b"", [], shows=False))
    assert stream.reused_tokens is None
    assert got == b""


def test_a_stream_of_responses_keeps_the_event_that_it_has_anyway() -> None:
    def named(kind: str, **members: object) -> bytes:
        text = json.dumps({"type": kind, "response": {"id": "r"}, **members})
        return f"event: {kind}\ndata: {text}\n\n".encode()

    created = named("response.created")
    plain = named("response.in_progress")
    progress = named("response.in_progress", prompt_progress=PROGRESS)
    done = named("response.completed", timings={"cache_n": 7, "predicted_n": 3})
    stream, got = asyncio.run(
        read(created + progress + progress + done, [50] * 9, shows=False)
    )
    assert stream.reused_tokens == 7
    assert got == created + plain + done
    _, got = asyncio.run(
        read(created + progress + progress + done, [50] * 9, shows=True)
    )
    assert got == created + progress + progress + done


def test_a_stream_of_messages_says_what_it_reuses() -> None:
    usage = {"cache_read_input_tokens": 40, "input_tokens": 2}
    start = json.dumps({"type": "message_start", "message": {"usage": usage}})
    end = json.dumps({"type": "message_delta", "usage": {"output_tokens": 9}})
    text = f"event: message_start\ndata: {start}\n\ndata: {end}\n\n".encode()
    stream, got = asyncio.run(read(text, [11] * 5, shows=False))
    assert got == text
    assert stream.reused_tokens == 40
    assert timings_of(stream.tail).answer_tokens == 9


def test_timings_are_those_of_the_server_not_of_the_text() -> None:
    said = 'he said "timings": {"cache_n": 1, "predicted_n": 2}'
    answer = {
        "content": said,
        "timings": {
            "cache_n": 30,
            "prompt_n": 4,
            "prompt_ms": 2.5,
            "predicted_n": 8,
        },
    }
    timings = timings_of(json.dumps(answer).encode())
    assert timings == (30, 4, 0.0025, 8)
    assert timings_of(b'{"content": "no timings"}').reused_tokens is None


@given(
    body=st.dictionaries(
        st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=4
    ),
    indent=st.sampled_from([None, 2]),
)
def test_a_body_is_changed_as_its_json_would_be(
    body: dict[str, object], indent: int | None
) -> None:
    text = json.dumps(body, indent=indent).encode()
    added = {"id_slot": 3, "return_progress": True}
    got = changed(text, body, added)
    assert json.loads(got) == {**body, **added}
    if not added.keys() & body.keys():
        # what the client wrote stays as he wrote it
        assert got.startswith(text.rstrip()[:-1])


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"3", b"{", b'{"a": "\xff"}', b"null"]
)
def test_what_is_no_object_is_no_body(text: bytes) -> None:
    assert read_body(text) is None


@pytest.mark.parametrize(
    ("text", "has"),
    [
        (b'{"lora": []}', True),
        (b'{"l\\u006fra": []}', True),
        (b'[{"more": {"lo\\u0072a": 1}}]', True),
        (b'{"prompt": "\\u00e4 lora"}', False),
        (b"{}", False),
        # the server takes a NUL for the end
        (b'{"l\\u006fra": []}\0', True),
        (b'{"l\\u006fra": []}\0}', True),
        (b'no JSON "lora"', True),
        (b"\xff\\u006f", False),
    ],
)
def test_members_are_found_however_they_are_written(
    text: bytes, has: bool
) -> None:
    assert has_member(text, ("lora", "other")) is has


def test_a_body_may_begin_with_a_mark_of_its_encoding() -> None:
    text = b"\xef\xbb\xbf" + b'{"a": 1}'
    body = read_body(text)
    assert body == {"a": 1}
    assert changed(text, body, {"b": 2}) == text[:-1] + b', "b": 2}'


def slot(number: int, tokens: list[int], used_at: float) -> SlotAccount:
    made = SlotAccount(number)
    if tokens:
        made.set(np.array(tokens, np.int32), "", 0)
    made.used_at = used_at
    return made


def test_the_slot_that_has_most_of_a_prompt_is_found() -> None:
    async def find() -> None:
        slots = [slot(0, [1, 2, 3], 5), slot(1, [1, 2, 9], 9), slot(2, [], 0)]
        prompt = np.array([1, 2, 3, 4], np.int32)
        assert fullest(slots, prompt, "").number == 0
        assert fullest(slots, prompt[:2], "").number == 1
        assert least_useful(slots).number == 2
        assert least_useful(slots[:2]).number == 0
        # another user's
        assert slots[0].held(prompt, "someone") == 0
        slots[0].forget()
        assert slots[0].held(prompt, "") == 0

    asyncio.run(find())


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_a_common_prefix_is_the_longest(
    left: list[int], right: list[int]
) -> None:
    got = common_prefix(np.array(left, np.int32), np.array(right, np.int32))
    longest = 0
    while left[: longest + 1] == right[: longest + 1] and longest < min(
        len(left), len(right)
    ):
        longest += 1
    assert got == longest


def test_slots_are_taken_by_one_and_waiting_ends() -> None:
    async def run() -> None:
        accounts = SlotAccounts(2, may_have_ram_cache=False)
        users = 0
        most = 0

        async def use(number: int) -> None:
            nonlocal users, most
            rng = random.Random(number)
            for _ in range(5):
                taken = await accounts.take(
                    lambda free: rng.choice(list(free)) if free else None
                )
                users += 1
                most = max(most, users)
                await asyncio.sleep(0)
                users -= 1
                accounts.give_back(taken)

        async with asyncio.timeout(60):
            await asyncio.gather(*map(use, range(8)))
        assert most == 2

    asyncio.run(run())


def test_a_load_that_is_slower_than_computing_is_not_worth_it_for_ever() -> None:
    worth = LoadWorth(is_asked=True)
    assert worth.is_worth(100, 100)
    worth.computed(1000, 1.0)
    worth.loaded(1000, 0.1)
    assert worth.is_worth(1000, 1000)
    # what the slot has already is no gain
    assert not worth.is_worth(1000, 50)
    for _ in range(20):
        worth.loaded(1000, 20.0)
    # however often it is asked for one request
    for _ in range(40):
        assert not worth.is_worth(1000, 1000)
    tries = 0
    for _ in range(40):
        if worth.is_worth(1000, 1000):
            tries += 1
            worth.loaded(1000, 20.0)
        else:
            worth.refused()
    assert 1 <= tries <= 4
    # nor a load that fails each time
    tries = 0
    for _ in range(40):
        if worth.is_worth(1000, 1000):
            tries += 1
            worth.failed()
        else:
            worth.refused()
    assert 1 <= tries <= 4
    assert LoadWorth(is_asked=False).is_worth(1, 1)
