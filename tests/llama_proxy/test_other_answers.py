"""Answers in other forms than today's: fields that are missing, of other types or in another order,
other status codes, streams that are written in another way. The text stays the server's, no request
hangs, and nothing is a traceback.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testbed.llama_servers import LlamaServer, llama_server
from testbed.patience import wait_until, within
from testbed.tiny_gguf import write_model
from tests.llama_proxy.changing_relay import Change, Reply, changing_relay
from tests.llama_proxy.kit import Answer, RunningProxy, running_proxy
from tests.llama_proxy.test_proxy import bare, emptied

TEXT = "the river goes past seven roofs and nobody counts them twice " * 8
ASKED = {"prompt": TEXT, "n_predict": 8}
# of one request; none of them takes a second of a quiet machine
SECONDS = 60.0

Json = dict[str, object]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    model = write_model(tmp_path_factory.mktemp("model"), "llama", seed=5)
    with llama_server(model, "A", slots=2, context=4096) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: LlamaServer) -> str:
    return bare(server, "/completion", ASKED)


@pytest.fixture(scope="module")
def stored(server: LlamaServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a disk that has the prompt."""
    disk = tmp_path_factory.mktemp("disk")
    emptied(server)
    with running_proxy(server, disk) as proxy:
        proxy.complete(TEXT)
    return disk


# ---- changes of JSON


def is_at(path: str, asked: str) -> bool:
    """Whether a request is for a path, or below it if that ends with a slash."""
    asked = asked.partition("?")[0]
    return asked.startswith(path) if path.endswith("/") else asked == path


def at(path: str, change: Callable[[object], object]) -> Change:
    """Change the JSON of the answers of one path."""

    def changed(asked: str, reply: Reply) -> Reply:
        is_json = reply.kind.startswith("application/json")
        if not is_json or not is_at(path, asked):
            return reply
        found = change(json.loads(reply.body))
        return reply.with_body(json.dumps(found).encode())

    return changed


def status(path: str, number: int, body: bytes = b"{}") -> Change:
    """Answer one path with a status."""

    def changed(asked: str, reply: Reply) -> Reply:
        if not is_at(path, asked):
            return reply
        return Reply(number, "application/json; charset=utf-8", body)

    return changed


def each(change: Callable[[Json], object]) -> Callable[[object], object]:
    """Change each object of a list."""

    def changed(found: object) -> object:
        assert isinstance(found, list)
        return [change(entry) for entry in found]

    return changed


def lacks(name: str) -> Callable[[Json], object]:
    return lambda entry: {key: entry[key] for key in entry if key != name}


def has(name: str, value: object) -> Callable[[Json], object]:
    return lambda entry: {**entry, name: value}


def timed(name: str, value: object) -> Change:
    """Change one of the timings of an answer."""

    def change(found: object) -> object:
        assert isinstance(found, dict)
        return {**found, "timings": {**found["timings"], name: value}}

    return at("/completion", change)


def completion(change: Callable[[Json], object]) -> Change:
    return at("/completion", change)  # type: ignore[arg-type]


def written(old: bytes, new: bytes) -> Change:
    """Change how an answer is written."""

    def changed(asked: str, reply: Reply) -> Reply:
        if not is_at("/completion", asked):
            return reply
        return reply.with_body(reply.body.replace(old, new))

    return changed


def no_json(path: str) -> Change:
    def changed(asked: str, reply: Reply) -> Reply:
        if not is_at(path, asked):
            return reply
        return Reply(200, "text/html", b"<html>one moment</html>")

    return changed


HUGE = 10**40
OF_SLOTS: dict[str, Change] = {
    "hidden": status("/slots", 501),
    "not found": status("/slots", 404),
    "no list": at("/slots", lambda found: {"slots": found}),
    "texts": at("/slots", lambda _: ["0", "1"]),
    "nothing": at("/slots", lambda _: None),
    "out of order": at("/slots", lambda found: found[::-1]),  # type: ignore[index]
    "no ids": at("/slots", each(lacks("id"))),
    "ids are texts": at("/slots", each(lambda e: {**e, "id": str(e["id"])})),
    "no tasks": at("/slots", each(lacks("id_task"))),
    "tasks are lists": at("/slots", each(has("id_task", [1]))),
    "never computing": at("/slots", each(lacks("is_processing"))),
    "tokens are text": at("/slots", each(has("n_prompt_tokens", "12"))),
    "params are a list": at("/slots", each(has("params", ["lora"]))),
    "no json": no_json("/slots"),
}
OF_TOKENS: dict[str, Change] = {
    "with pieces": at(
        "/tokenize",
        lambda found: {
            "tokens": [{"id": n, "piece": "a"} for n in found["tokens"]]  # type: ignore[index]
        },
    ),
    "no tokens": at("/tokenize", lambda _: {"ids": [1]}),
    "a number": at("/tokenize", lambda _: {"tokens": 7}),
    "fractions": at("/tokenize", lambda _: {"tokens": [1.5, 2.5]}),
    "too large": at("/tokenize", lambda _: {"tokens": [HUGE]}),
    "a list": at("/tokenize", lambda _: [1, 2]),
    "no json": no_json("/tokenize"),
    "500": status("/tokenize", 500),
    "404": status("/tokenize", 404, b""),
}
OF_ADAPTERS: dict[str, Change] = {
    "not found": status("/lora-adapters", 404),
    "no list": at("/lora-adapters", lambda _: {}),
    "texts": at("/lora-adapters", lambda _: ["a"]),
    "nothing": at("/lora-adapters", lambda _: None),
}
OF_STATES: dict[str, Change] = {
    "no count": at("/slots/", lambda _: {}),
    "counts are texts": at(
        "/slots/",
        lambda found: {key: str(found[key]) for key in found},  # type: ignore[attr-defined,index]
    ),
    "a count without end": status(
        "/slots/", 200, b'{"n_saved": 1e999, "n_restored": 1e999}'
    ),
    "a list": at("/slots/", lambda _: []),
    "not found": status("/slots/", 404),
    "500": status("/slots/", 500),
    "no json": no_json("/slots/"),
}
OF_PROPERTIES: dict[str, Change] = {
    "nothing": at("/props", lambda _: None),
    "a list": at("/props", lambda _: []),
    "no slots": at("/props", lacks("total_slots")),  # type: ignore[arg-type]
    "500": status("/props", 500),
}
OF_ANSWERS: dict[str, Change] = {
    "no timings": completion(lacks("timings")),
    "timings are null": completion(has("timings", None)),
    "timings are a list": completion(has("timings", [1])),
    "nothing reused": timed("cache_n", None),
    "reused is text": timed("cache_n", "600"),
    "reused is negative": timed("cache_n", -1),
    "reused is huge": timed("cache_n", HUGE),
    "answer is huge": timed("predicted_n", HUGE),
    "time is huge": timed("prompt_ms", 1e300),
    "time has no end": written(
        b'"timings"',
        b'"timings": {"prompt_ms": 1e999, "prompt_n": 600}, "others"',
    ),
    "time is text": timed("prompt_ms", "fast"),
    "no slot": completion(lacks("id_slot")),
    "no count of tokens": completion(lacks("tokens_cached")),
    "other order": completion(lambda found: dict(reversed(list(found.items())))),
}
CHANGES = {
    f"{of}: {name}": change
    for of, changes in (
        ("slots", OF_SLOTS),
        ("tokens", OF_TOKENS),
        ("adapters", OF_ADAPTERS),
        ("states", OF_STATES),
        ("properties", OF_PROPERTIES),
        ("answers", OF_ANSWERS),
    )
    for name, change in changes.items()
}


# of these, a proxy whose server is asked by others wants to know more
_MORE = {*OF_SLOTS.values(), *OF_ADAPTERS.values(), *OF_PROPERTIES.values()}
CASES = [
    pytest.param(name, owns, id=f"{name}, {'owned' if owns else 'attached'}")
    for name, change in CHANGES.items()
    for owns in (True, False)
    if owns or change in _MORE
]


def asked(proxy: RunningProxy, **more: object) -> Answer:
    with within(SECONDS):
        return proxy.complete(TEXT, **more)


def check_nothing_went_wrong(caplog: pytest.LogCaptureFixture) -> None:
    for record in caplog.records:
        assert record.exc_info is None, record.exc_text
        said = record.getMessage()
        assert record.levelno <= logging.WARNING, said
        # none of these is for people
        assert not re.search("(Attribute|Type|Key|Index|Overflow)Error", said)


def check_free(proxy: RunningProxy) -> None:
    slots = proxy.proxy._accounts
    wait_until(lambda: len(slots.free) == len(slots.all))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "owns"), CASES)
def test_answers_in_another_form(
    name: str,
    owns: bool,
    server: LlamaServer,
    stored: Path,
    expected: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    emptied(server)
    with (
        changing_relay(server, CHANGES[name]) as relay,
        running_proxy(
            server,
            stored,
            url=relay.url,
            owns_server=owns,
            empties_idle_slots=not owns,
        ) as proxy,
    ):
        relay.is_on = True
        answers = [
            asked(proxy),
            asked(proxy, stream=True),
            # the server chooses a slot
            asked(proxy, cache_prompt=False),
            asked(proxy, stream=True),
        ]
        relay.is_on = False
        answers.append(asked(proxy))
        assert [answer.status for answer in answers] == [200] * 5
        assert [answer.text for answer in answers] == [expected] * 5
        if CHANGES[name] in OF_ANSWERS.values():
            assert int(answers[0].told["loaded"]) > 0
        check_free(proxy)
        assert relay.changed
    check_nothing_went_wrong(caplog)


def test_a_slot_whose_requests_are_not_numbered_may_have_been_used(
    server: LlamaServer,
) -> None:
    """Otherwise what others have now is taken for what it had."""
    emptied(server)
    with (
        changing_relay(server, OF_SLOTS["no tasks"]) as relay,
        running_proxy(server, url=relay.url) as proxy,
    ):
        relay.is_on = True
        asked(proxy, id_slot=0)
        slots = proxy.proxy._accounts.all
        wait_until(lambda: slots[0].stored_tokens)
        # two prompts, in both slots
        assert proxy.complete(["ab" * 50, "cd" * 50]).status == 200
        for slot in slots:
            assert not slot.is_known


# ---- changes of streams


def events_of(body: bytes) -> list[Json]:
    """Return the events of a stream, as the standard of server-sent events reads them."""
    text = body.decode().removeprefix("\ufeff")
    found = []
    for event in re.split(r"(?:\r\n|\n|\r){2}", text):
        data = [
            line[5:].removeprefix(" ")
            for line in re.split(r"\r\n|\n|\r", event)
            if line.startswith("data:")
        ]
        joined = "\n".join(data)
        if data and joined != "[DONE]":
            found.append(json.loads(joined))
    return found


def streamed(
    change: Callable[[list[Json]], bytes], piece_bytes: int = 0
) -> Change:
    """Write the events of streams anew."""

    def changed(asked: str, reply: Reply) -> Reply:
        if not reply.kind.startswith("text/event-stream"):
            return reply
        body = change(events_of(reply.body))
        return Reply(reply.status, reply.kind, body, piece_bytes)

    return changed


def lines_of(
    events: list[Json], end: str = "\n", before: str = "data: "
) -> bytes:
    return "".join(
        f"{before}{json.dumps(event)}{end}{end}" for event in events
    ).encode()


def in_lines(events: list[Json]) -> bytes:
    """Write each event in several lines."""
    texts = [json.dumps(event, indent=1).splitlines() for event in events]
    return "".join(
        "".join(f"data: {line}\n" for line in text) + "\n" for text in texts
    ).encode()


def progress_with_text(events: list[Json]) -> bytes:
    """Tell the progress with the first token."""
    told = [event for event in events if "prompt_progress" in event]
    rest = [event for event in events if "prompt_progress" not in event]
    if told:
        rest[0] = {"prompt_progress": told[0]["prompt_progress"], **rest[0]}
    return lines_of(rest)


def late_progress(events: list[Json]) -> bytes:
    """Begin with events that say nothing."""
    return lines_of([{"content": "", "stop": False}] * 6 + events)


def other_progress(progress: object) -> Change:
    def change(events: list[Json]) -> bytes:
        return lines_of(
            [
                {**event, "prompt_progress": progress}
                if "prompt_progress" in event
                else event
                for event in events
            ]
        )

    return streamed(change)


def of_kind(kind: str) -> Change:
    def changed(asked: str, reply: Reply) -> Reply:
        if not reply.kind.startswith("text/event-stream"):
            return reply
        return Reply(reply.status, kind, reply.body, 7)

    return changed


STREAMS: dict[str, Change] = {
    "CR LF": streamed(lambda events: lines_of(events, "\r\n")),
    "CR": streamed(lambda events: lines_of(events, "\r")),
    "byte by byte": streamed(lines_of, 1),
    "CR LF byte by byte": streamed(lambda events: lines_of(events, "\r\n"), 1),
    "no space": streamed(lambda events: lines_of(events, before="data:")),
    "other fields": streamed(
        lambda events: lines_of(
            events, before="id: 7\nretry: 9\nevent: message\ndata: "
        )
    ),
    "comments": streamed(lambda events: lines_of(events, before=": a\ndata: ")),
    "empty comments": streamed(
        lambda events: lines_of(events, before=":\n\n: b\n\ndata: ")
    ),
    "several lines": streamed(in_lines),
    "a mark at its begin": streamed(
        lambda events: b"\xef\xbb\xbf" + lines_of(events)
    ),
    "no end of the last one": streamed(lambda events: lines_of(events)[:-2]),
    "progress with text": streamed(progress_with_text),
    "late progress": streamed(late_progress),
    "progress without numbers": other_progress({}),
    "progress is a number": other_progress(7),
    "progress is text": other_progress({"cache": "600"}),
    "progress has parts": other_progress({"cache": 600, "of": {"a": {}}}),
    "no timings": streamed(
        lambda events: lines_of(
            [
                {key: event[key] for key in event if key != "timings"}
                for event in events
            ]
        )
    ),
    "other kind": of_kind("Text/Event-Stream; charset=UTF-8"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_streams_in_another_form(
    name: str,
    server: LlamaServer,
    stored: Path,
    expected: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    emptied(server)
    with (
        changing_relay(server, STREAMS[name]) as relay,
        running_proxy(server, stored, url=relay.url) as proxy,
    ):
        relay.is_on = True
        answers = [asked(proxy, stream=True), asked(proxy, stream=True)]
        assert int(answers[0].told["loaded"]) > 0
        assert relay.changed
        for answer in answers:
            events = events_of(answer.body)
            text = "".join(str(event.get("content", "")) for event in events)
            assert text == expected
            # nobody has asked for it
            for event in events:
                assert not isinstance(event.get("prompt_progress"), dict)
        check_free(proxy)
    check_nothing_went_wrong(caplog)
