"""What clients of the proxy say of their requests, and what its answers show, reaches the cache and
never the server.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import pytest

from pagoda_tools.llama_proxy import slot_saver
from pagoda_tools.llama_proxy.answer_ending import ending_of
from pagoda_tools.llama_proxy.request_body import without
from testbed.llama_servers import BUILDS, LlamaServer, llama_server
from testbed.patience import wait_until
from testbed.tiny_gguf import write_model
from tests.llama_proxy.kit import GREEDY, Answer, RunningProxy, running_proxy
from tests.llama_proxy.test_proxy import LyingRelay

TEXT = "the river goes past seven roofs and nobody counts them twice " * 8
OTHER = "a monk sweeps the stairs of the ninth floor before the sun is up " * 8
CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 8}
HINTS = {"pagoda.session": "a1", "session_id": "not this one"}


@pytest.fixture(scope="module", params=BUILDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaServer]:
    model = write_model(tmp_path_factory.mktemp("model"), "llama", seed=5)
    with llama_server(model, request.param, slots=2, context=4096) as server:
        yield server


def hints(proxy: RunningProxy) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = proxy.status()["hints"]  # type: ignore[assignment]
    return found


def accepted(proxy: RunningProxy) -> dict[str, int]:
    return hints(proxy).get("accepted", {})


def chat(proxy: RunningProxy, **more: object) -> Answer:
    return proxy.post("/v1/chat/completions", {**CHAT, **GREEDY, **more})


def test_hints_of_a_body_are_noted_with_what_is_stored(
    server: LlamaServer,
) -> None:
    with running_proxy(server) as proxy:
        # the control: nobody says anything
        plain = proxy.complete(TEXT)
        wait_until(lambda: not _unsaved(proxy))
        assert hints(proxy) == {}
        hinted = proxy.complete(
            OTHER, **HINTS, **{"pagoda.retain": 60, "pagoda.colour": "green"}
        )
        wait_until(lambda: "session" in accepted(proxy))
        assert plain.status == hinted.status == 200
        answers = hints(proxy)
        assert answers["accepted"] == {
            "session": 1,
            "ending": 1,
            "retain_seconds": 1,
        }
        assert answers["refused"] == {"unknown: there is no such hint": 1}


def _unsaved(proxy: RunningProxy) -> list[bool]:
    slots = proxy.proxy._accounts.all
    return [
        True for slot in slots if slot.save_at is not None or slot.lock.locked()
    ]


def test_the_server_gets_no_hints(server: LlamaServer) -> None:
    relay = Relay(server)
    said = {**HINTS, "pagoda.ending": "turn", "seed": 7}
    with (
        contextlib.closing(relay),
        running_proxy(server, url=relay.url) as proxy,
    ):
        answer = proxy.complete(TEXT, **said)
        proxy.post("/completion", {"prompt": TEXT, "n": 2, **said})
    assert answer.status == 200
    assert b"pagoda." not in relay.asked
    # what is not ours stays
    assert relay.asked.count(b'"not this one"') == 2
    assert (
        answer.text
        == server.post("/completion", prompt=TEXT, n_predict=8, **GREEDY)[
            "content"
        ]
    )


def test_the_server_gets_no_hints_among_the_parameters_of_others(
    server: LlamaServer,
) -> None:
    """Those that are not ours may be for the server."""
    relay = Relay(server)
    ours = {"pagoda.session": "a1", "pagoda.retain": 60}
    with (
        contextlib.closing(relay),
        running_proxy(server, url=relay.url) as proxy,
    ):
        both = {**ours, "do_remote_decode": 1.50, "deep": {"pagoda.kept": 1}}
        answer = proxy.complete(TEXT, kv_transfer_params=both)
        wait_until(lambda: "session" in accepted(proxy))
        alone = proxy.complete(TEXT, kv_transfer_params=ours)
    assert answer.status == 200
    assert alone.status == 200
    assert b"pagoda.session" not in relay.asked
    assert b"pagoda.retain" not in relay.asked
    assert b'"do_remote_decode": 1.5' in relay.asked
    assert b'"pagoda.kept": 1' in relay.asked


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_that_ends_in_a_tool_call_is_a_hint(
    server: LlamaServer, stream: bool
) -> None:
    relay = Relay(server)
    with (
        contextlib.closing(relay),
        running_proxy(server, url=relay.url) as proxy,
    ):
        # the control: a user's turn is no hint by itself
        chat(proxy, stream=stream)
        wait_until(lambda: not _unsaved(proxy))
        assert hints(proxy) == {}
        relay.is_on = True
        chat(proxy, stream=stream)
        wait_until(lambda: accepted(proxy) == {"ending": 1})
        # from now on turns count as well
        relay.is_on = False
        chat(proxy, stream=stream)
        wait_until(lambda: accepted(proxy) == {"ending": 2})


def test_nothing_is_noted_if_the_options_say_so(server: LlamaServer) -> None:
    relay = Relay(server)
    relay.is_on = True
    with (
        contextlib.closing(relay),
        running_proxy(server, url=relay.url, hints="never") as proxy,
    ):
        chat(proxy)
        wait_until(lambda: not _unsaved(proxy))
        assert hints(proxy) == {}
        chat(proxy, **{"pagoda.session": "a1"})
        why = "session: hints = 'never'"
        wait_until(lambda: hints(proxy) == {"refused": {why: 1}})


def test_each_answer_of_a_quick_conversation_is_noted(
    server: LlamaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request comes before the slot is saved."""
    monkeypatch.setattr(slot_saver, "_IDLE_SECONDS", 600.0)
    with running_proxy(server) as proxy:
        proxy.complete(TEXT, **HINTS)
        wait_until(lambda: accepted(proxy) == {"session": 1, "ending": 1})
        longer = TEXT + OTHER[:100]
        assert int(proxy.complete(longer, **HINTS).told["held"]) > 256
        assert accepted(proxy) == {"session": 1, "ending": 1}
        proxy.complete(longer + OTHER[:100], **HINTS)
        assert accepted(proxy)["ending"] == 2


def test_a_header_names_the_session(server: LlamaServer) -> None:
    body = json.dumps({"prompt": TEXT, "n_predict": 2, **GREEDY}).encode()
    with running_proxy(server) as proxy:
        proxy.send("POST", "/completion", body, X_Session_ID="a1")
        wait_until(lambda: accepted(proxy) == {"session": 1, "ending": 1})


def test_what_a_request_without_a_slot_says_is_refused(
    server: LlamaServer,
) -> None:
    with running_proxy(server) as proxy:
        proxy.post("/completion", {"prompt": TEXT, "n": 2, **HINTS})
        too_long = proxy.complete(TEXT * 20, **HINTS)
        assert too_long.status == 400
        assert hints(proxy)["refused"] == {
            "session: the server chose a slot": 1,
            "session: the server refused it": 1,
        }


ENDINGS = {
    b'{"choices":[{"finish_reason":"tool_calls","index":0}]}': "tool_call",
    b'{"choices":[{"finish_reason":"stop","index":0}]}': "turn",
    b'{"choices":[{"finish_reason":"length","index":0}]}': "other",
    b'{"text": "\\"finish_reason\\":\\"stop\\""}': "",
    b'data: {"finish_reason":null}\n\ndata: {"finish_reason" : "stop"}': "turn",
    b'{"content": "", "stop_type":"eos", "stopping_word":""}': "turn",
    b'{"error": {"code": 500}}': "",
}
RESPONSES = {
    b'{"output":[{"type":"function_call","name":"t"}]}': "tool_call",
    b'{"output":[{"type":"message"}],"status":"completed"}': "turn",
    b'{"type":"error"}': "",
}


@pytest.mark.parametrize("text", ENDINGS)
def test_how_an_answer_ended_is_read(text: bytes) -> None:
    assert ending_of("/v1/chat/completions", text) == ENDINGS[text]


@pytest.mark.parametrize("text", RESPONSES)
def test_how_an_answer_of_responses_ended_is_read(text: bytes) -> None:
    assert ending_of("/v1/responses", text) == RESPONSES[text]


def test_the_other_members_of_a_body_stay_as_they_were_written() -> None:
    text = b'\xef\xbb\xbf{"a": 1.50, "pagoda.x": {}, "\\u00e9": 12345678901234567890123}'
    found = without(text, ["pagoda.x"])
    assert b"1.50" in found
    assert b"12345678901234567890123" in found
    assert json.loads(found).keys() == {"a", "\u00e9"}
    assert without(b'{"pagoda.x": 1}', ["pagoda.x"]) == b"{}"


class Relay(LyingRelay):
    """Says of answers that they end in tool calls, which a tiny model cannot write; remembers what
    the server is asked.
    """

    def __init__(self, server: LlamaServer) -> None:
        super().__init__(server, 0, 0)
        self.asked = b""

    def _changed(self, data: bytes) -> bytes:
        if not self.is_on:
            return data
        # as many bytes as before
        return data.replace(
            b'"finish_reason":"length","index":0',
            b'"finish_reason":"tool_calls","i":0',
        )

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                self.asked += data
                target.sendall(data)
            target.close()
