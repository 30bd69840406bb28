"""The proxy in front of real servers: the text is the server's own, and prompts come back."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda_tools.llama_proxy import slot_preparation
from testbed.llama_servers import BUILDS, LlamaServer, llama_server
from testbed.patience import wait_until
from testbed.tiny_gguf import write_adapter, write_model
from tests.llama_proxy.kit import (
    GREEDY,
    Answer,
    RunningProxy,
    forget,
    running_proxy,
)
from tests.llamacpp.test_slot_states import restart_with

TEXT = "the river goes past seven roofs and nobody counts them twice " * 8
CHAT = [
    {"role": "system", "content": "You count the roofs of pagodas. " * 16},
    {"role": "user", "content": "how many?"},
]
ABSENT = '"never stored here, or forgotten since"'
QUESTIONS: dict[str, dict[str, object]] = {
    "/completion": {"prompt": TEXT, "n_predict": 12},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 12},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 12},
    "/v1/messages": {
        "system": CHAT[0]["content"],
        "messages": CHAT[1:],
        "max_tokens": 12,
    },
    "/v1/responses": {
        "instructions": CHAT[0]["content"],
        "input": "how many?",
        "max_output_tokens": 12,
    },
}


@pytest.fixture(scope="module", params=BUILDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaServer]:
    model = write_model(tmp_path_factory.mktemp("model"), "llama", seed=5)
    with llama_server(model, request.param, slots=2, context=4096) as server:
        yield server


def emptied(server: LlamaServer) -> None:
    for slot in range(2):
        server.post(f"/slots/{slot}?action=erase")


def bare(server: LlamaServer, path: str, body: dict[str, object]) -> str:
    """Return the text of the server alone, computed from nothing."""
    emptied(server)
    body = {**body, **GREEDY, "stream": False, "cache_prompt": False}
    answer = Answer(
        200,
        {"Content-Type": "application/json"},
        json.dumps(server.post(path, **body)).encode(),
    )
    return answer.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", QUESTIONS)
def test_a_prompt_comes_back_after_a_restart_of_the_proxy(
    server: LlamaServer, path: str, stream: bool, tmp_path: Path
) -> None:
    if server.build == "B" and path == "/v1/messages":
        pytest.skip("this build takes no logit_bias there, and letters only")
    body = {**QUESTIONS[path], **GREEDY, "stream": stream}
    expected = bare(server, path, QUESTIONS[path])
    with running_proxy(server, tmp_path) as proxy:
        first = proxy.post(path, body)
    emptied(server)
    with running_proxy(server, tmp_path) as proxy:
        again = proxy.post(path, body)
    assert [first.text, again.text] == [expected, expected]
    assert first.told["loaded"] == "0"
    loaded = int(again.told["loaded"])
    prompt = int(again.told["prompt"])
    assert prompt - 64 <= loaded <= prompt
    # what the proxy itself has asked for is not in the answer
    assert b"prompt_progress" not in again.body


def test_the_time_that_loads_have_saved_is_known(
    server: LlamaServer, tmp_path: Path
) -> None:
    emptied(server)
    with running_proxy(server, tmp_path) as proxy:
        proxy.complete(TEXT)
    emptied(server)
    with running_proxy(server, tmp_path) as proxy:
        assert int(proxy.complete(TEXT).told["loaded"]) > 0
        models = proxy.proxy._states.stats()["models"]
    assert [row["model"] for row in models if row["saved_seconds"] is not None]


def test_who_asks_for_the_progress_gets_it(
    server: LlamaServer, tmp_path: Path
) -> None:
    body = {**QUESTIONS["/completion"], **GREEDY, "stream": True}
    with running_proxy(server, tmp_path) as proxy:
        proxy.post("/completion", body)
    emptied(server)
    with running_proxy(server, tmp_path) as proxy:
        answer = proxy.post("/completion", {**body, "return_progress": True})
    loaded = int(answer.told["loaded"])
    assert loaded
    first = answer.events[0]["prompt_progress"]
    assert first["cache"] == loaded  # type: ignore[index]


def test_a_conversation_goes_on_in_its_slot(server: LlamaServer) -> None:
    emptied(server)
    with running_proxy(server) as proxy:
        first = proxy.complete(TEXT, return_tokens=True)
        other = proxy.complete("quite another prompt, " * 20)
        longer = TEXT + str(first.json["content"]) + " and then"
        second = proxy.complete(longer)
    assert first.told["slot"] != other.told["slot"]
    assert second.told["slot"] == first.told["slot"]
    assert int(second.told["held"]) >= int(first.told["prompt"]) - 1
    assert second.told["loaded"] == "0"
    reused = second.json["timings"]["cache_n"]  # type: ignore[index]
    assert reused >= int(second.told["held"]) - 1


def test_conversations_that_take_turns_in_too_few_slots_lose_nothing(
    server: LlamaServer,
) -> None:
    emptied(server)
    names = ["north", "south", "east", "west"]
    prompts = [
        f"{name} wind over the river; {name} roofs. " * 12 for name in names
    ]
    with running_proxy(server) as proxy:
        expected = [proxy.complete(prompt).text for prompt in prompts]
        for _ in range(2):
            answers = [proxy.complete(prompt) for prompt in prompts]
            assert [answer.text for answer in answers] == expected
            for answer in answers:
                assert int(answer.told["loaded"]) >= 256, answer.told


def test_no_request_meets_a_connection_that_the_server_closes(
    server: LlamaServer,
) -> None:
    emptied(server)
    with running_proxy(server) as proxy:
        for number in range(40):
            answer = proxy.complete(
                f"{number} lanterns", n_predict=1, stream=True
            )
            assert "prompt" in answer.told, answer.told
        assert "passed_on" not in proxy.counts()


@pytest.mark.parametrize("build", BUILDS)
def test_slots_that_share_their_room_lose_nothing(
    build: str, tmp_path: Path
) -> None:
    """The server empties an idle slot whose cells another request needs, and says nothing."""
    model = write_model(tmp_path, "llama", seed=5)
    prompts = [TEXT, "a lantern was hung upon the gate before it snowed " * 10]
    with (
        llama_server(model, build, slots=2, context=1024, unified=True) as server,
        running_proxy(server) as proxy,
    ):
        expected = [proxy.complete(prompt).text for prompt in prompts]
        for _ in range(2):
            for prompt, text in zip(prompts, expected, strict=True):
                answer = proxy.complete(prompt)
                assert answer.text == text
                assert int(answer.told["loaded"]) >= 448, answer.told
        assert proxy.counts() == {"loads": 4}


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_a_server_that_empties_idle_slots_loses_nothing(
    build: str, tmp_path: Path
) -> None:
    """As the binary does by default, which others have started and ask too."""
    model = write_model(tmp_path, "llama", seed=5)
    prompts = [
        f"{name} lanterns upon the gate, " * 20 for name in ("red", "blue")
    ]
    with (
        llama_server(
            model, build, slots=2, context=4096, unified=True, ram_mib=64
        ) as server,
        running_proxy(
            server, owns_server=False, empties_idle_slots=True
        ) as proxy,
    ):
        expected = [proxy.complete(prompt).text for prompt in prompts]
        for _ in range(3):
            wait_until(lambda: not any(_is_unsaved(proxy)))
            # past the proxy
            server.complete([1, 100, 101, 102])
            for prompt, text in zip(prompts, expected, strict=True):
                answer = proxy.complete(prompt)
                assert answer.text == text
                assert answer.json["timings"]["cache_n"] >= 448, answer.told  # type: ignore[index]


def test_an_emptied_slot_makes_the_others_doubtful(server: LlamaServer) -> None:
    emptied(server)
    other = "quite another prompt, which is long enough, " * 12
    with running_proxy(server) as proxy:
        for prompt in (TEXT, other):
            proxy.complete(prompt)
        wait_until(lambda: not any(_is_unsaved(proxy)))
        emptied(server)
        assert proxy.complete(TEXT).told["held"] != "0"
        assert proxy.counts()["held_less"] == 1
        # it is loaded again, not computed in a slot that has nothing
        assert int(proxy.complete(other).told["loaded"]) >= 448


def _is_unsaved(proxy: RunningProxy) -> list[bool]:
    return [slot.new_tokens >= 64 for slot in proxy.proxy._accounts.all]


def test_what_could_not_be_stored_is_not_called_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_model(tmp_path, "llama", seed=5)
    with (
        llama_server(model, "B", slots=2) as server,
        running_proxy(server, state_bytes=50_000) as proxy,
        caplog.at_level("WARNING", "pagoda"),
    ):
        proxy.complete(TEXT)
        wait_until(lambda: _why_not_stored(proxy))
        again = proxy.complete(TEXT)
        asked = proxy.slot(int(again.told["slot"]))
    assert again.told["stored"] == "0"
    assert "--state-bytes" in again.told["why"]
    assert asked["stored_tokens"] == 0
    # one trouble, one line
    assert len([one for one in caplog.messages if "--state-bytes" in one]) == 1


def test_windows_without_checkpoints_are_told_once_and_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of them could ever be loaded; what a slot has is used all the same."""
    model = write_model(tmp_path, "gemma3", seed=5)
    with (
        llama_server(model, "B", slots=2, context=4096) as server,
        caplog.at_level("WARNING", "pagoda"),
        running_proxy(server) as proxy,
    ):
        saved: list[object] = []
        proxy.proxy._states.store = saved.append  # type: ignore[assignment,method-assign]
        told = [proxy.complete(TEXT).told for _ in range(2)]
        trouble = proxy.status()["trouble"]
        assert "saves no checkpoints" in str(trouble)
        assert "take a newer llama-server" in str(trouble)
        wait_until(lambda: _why_not_stored(proxy))
        proxy.complete("quite another prompt, " * 20, id_slot=0)
    assert told[1]["held"] == told[1]["prompt"]
    assert "saves no checkpoints" in told[0]["why"]
    assert saved == []
    lines = [one for one in caplog.messages if "no checkpoints" in one]
    assert len(lines) == 1
    assert lines[0].startswith("nothing is stored or loaded")


@pytest.mark.slow
def test_a_server_that_was_started_again_without_its_trouble_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have started it, so the proxy is not started again with it."""
    monkeypatch.setattr(slot_preparation, "_PROBE_SECONDS", 0.0)
    model = write_model(tmp_path, "llama", seed=5)
    with (
        llama_server(model, "A", context=2048, reuse=256) as server,
        running_proxy(server, owns_server=False) as proxy,
    ):
        assert "--cache-reuse" in proxy.complete(TEXT).headers["X-Pagoda"]
        restart_with(server, '"n_cache_reuse": 256', '"n_cache_reuse": 0')
        proxy.complete(TEXT)
        assert proxy.status()["trouble"] == ""
        for prompt in ("quite another prompt, " * 20, TEXT):
            again = proxy.complete(prompt)
        assert int(again.told["loaded"]) > 0, again.told


def test_what_other_options_have_computed_is_told_and_what_others_wrote_is_not(
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path, "llama", seed=5)
    kv = tmp_path / "kv"
    secret = "nobody else has asked this, " * 20
    keys = ("first-key", "second-key")

    def why(proxy: RunningProxy, prompt: str) -> str:
        emptied(server)
        forget(proxy)
        return proxy.complete(prompt).headers["X-Pagoda"].partition("why=")[2]

    with (
        llama_server(model, "B", slots=2, rope_base=50_000) as server,
        running_proxy(server, kv) as proxy,
    ):
        proxy.complete(TEXT)
    with llama_server(model, "B", slots=2) as server:
        with running_proxy(server, kv, api_keys=keys) as proxy:
            body = {"prompt": secret, **GREEDY, "n_predict": 2}
            proxy.post("/completion", body, keys[0])
        with running_proxy(server, kv) as proxy:
            told = "another build of llama-server, or other options"
            # who has stored what is looked for in the time that a request has
            wait_until(lambda: told in why(proxy, TEXT))
            assert {why(proxy, secret) for _ in range(3)} <= {"", ABSENT}


def _why_not_stored(proxy: RunningProxy) -> bool:
    return any(proxy.slot(number)["why_not_stored"] for number in range(2))


def test_what_is_no_prompt_passes_byte_for_byte(server: LlamaServer) -> None:
    with running_proxy(server) as proxy:
        for method, path, body in (
            ("GET", "/props", None),
            ("GET", "/v1/models", None),
            ("POST", "/tokenize", b'{"content": "abc", "add_special": true}'),
            ("POST", "/detokenize", b'{"tokens": [100, 101]}'),
            ("POST", "/completion", b"no json"),
            ("POST", "/completion", b'{"prompt": {"a": 1}}'),
            ("POST", "/nothing/here", b"{}"),
            ("GET", "/health", None),
        ):
            connection = http.client.HTTPConnection(
                "127.0.0.1", server.server.port, timeout=60
            )
            connection.request(method, path, body)
            response = connection.getresponse()
            expected = (response.status, _at_any_time(response.read()))
            connection.close()
            got = proxy.send(method, path, body)
            assert (got.status, _at_any_time(got.body)) == expected, path


def _at_any_time(body: bytes) -> bytes:
    """Return a body without the second in which the server wrote it."""
    return re.sub(rb'"created":\s*\d+', b'"created":0', body)


def test_a_prompt_that_is_too_long_is_refused_by_the_server(
    server: LlamaServer,
) -> None:
    emptied(server)
    with running_proxy(server) as proxy:
        proxy.complete(TEXT)
        refused = proxy.complete("abcdefgh" * 600)
        assert refused.status == 400
        error = refused.json["error"]
        assert error["type"] == "exceed_context_size_error"  # type: ignore[index]
        again = proxy.complete(TEXT)
    assert int(again.told["held"]) == int(again.told["prompt"])


def test_a_client_that_goes_lets_the_server_stop(
    server: LlamaServer, tmp_path: Path
) -> None:
    emptied(server)
    body = {"prompt": TEXT, **GREEDY, "n_predict": 1300}
    with running_proxy(server, tmp_path) as proxy:
        for stream in (False, True):
            connection = proxy.connection()
            while True:
                connection.request(
                    "POST", "/completion", json.dumps({**body, "stream": stream})
                )
                if _is_seen_processing(server, connection):
                    break
                # the server had answered before we looked
                connection.close()
            connection.close()
            wait_until(lambda: not any(_is_processing(server)))
    # what was computed until then is kept
    emptied(server)
    with running_proxy(server, tmp_path) as proxy:
        assert int(proxy.complete(TEXT).told["loaded"]) >= 448


def _is_seen_processing(
    server: LlamaServer, connection: http.client.HTTPConnection
) -> bool:
    """Wait until a slot computes, or the answer has come."""
    while not select.select([connection.sock], [], [], 0)[0]:
        if any(_is_processing(server)):
            return True
    return any(_is_processing(server))


def _is_processing(server: LlamaServer) -> list[bool]:
    listed: list[dict[str, bool]] = server.get("/slots")  # type: ignore[assignment]
    return [entry["is_processing"] for entry in listed]


def test_a_client_that_does_not_read_keeps_no_slot(server: LlamaServer) -> None:
    emptied(server)
    # more than the buffers of the connection hold
    body = {"prompt": TEXT, **GREEDY, "n_predict": 900, "n_probs": 100}
    with running_proxy(server) as proxy:
        connection = proxy.connection()
        connection.connect()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.request(
            "POST", "/completion", json.dumps({**body, "stream": True})
        )
        wait_until(lambda: any(_is_busy(proxy)))
        wait_until(lambda: not any(_is_busy(proxy)))
        text = connection.getresponse().read()
        assert text.count(b"data: ") > 900
        connection.close()


def _is_busy(proxy: RunningProxy) -> list[bool]:
    slots: list[dict[str, bool]] = proxy.status()["slots"]  # type: ignore[assignment]
    return [slot["is_busy"] for slot in slots]


@pytest.mark.slow
def test_when_all_slots_are_busy_the_server_queues(server: LlamaServer) -> None:
    emptied(server)
    with (
        running_proxy(server, owns_server=False) as proxy,
        proxy.all_slots_taken(),
    ):
        answer = proxy.complete(TEXT)
        assert proxy.counts()["no_free_slot"] == 1
        assert answer.status == 200
        assert answer.told.keys() == {"why"}
        assert answer.text == bare(
            server, "/completion", {"prompt": TEXT, "n_predict": 8}
        )


def test_parallel_requests_have_the_text_of_each_alone(
    server: LlamaServer,
) -> None:
    emptied(server)
    prompts = [f"{number} roofs and {number} steps, " * 16 for number in range(6)]
    expected = [
        bare(server, "/completion", {"prompt": prompt, "n_predict": 8})
        for prompt in prompts
    ]
    with running_proxy(server) as proxy:
        for _ in range(3):
            answers: dict[int, str] = {}

            def ask(number: int, answers: dict[int, str] = answers) -> None:
                answers[number] = proxy.complete(prompts[number]).text

            threads = [
                threading.Thread(target=ask, args=[number])
                for number in range(len(prompts))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            assert [answers[n] for n in range(len(prompts))] == expected


def test_two_keys_share_nothing(server: LlamaServer, tmp_path: Path) -> None:
    emptied(server)
    body = {"prompt": TEXT, **GREEDY, "n_predict": 8}
    keys = ("first-key", "second-key")
    with running_proxy(server, tmp_path, api_keys=keys) as proxy:
        proxy.post("/completion", body, keys[0])
        other = proxy.post("/completion", body, keys[1])
        assert other.told["held"] == "0"
        assert other.told["loaded"] == "0"
        assert "salt" not in other.headers["X-Pagoda"]
        cached = other.json["timings"]["cache_n"]  # type: ignore[index]
        assert cached == 0
    emptied(server)
    with running_proxy(server, tmp_path, api_keys=keys) as proxy:
        for key in keys:
            assert int(proxy.post("/completion", body, key).told["loaded"]) > 0
    emptied(server)
    with running_proxy(server, tmp_path, api_keys=keys, share_all=True) as proxy:
        proxy.post("/completion", body, keys[0])
        shared = proxy.post("/completion", body, keys[1])
        assert int(shared.told["held"]) > 0


def test_pages_of_other_sites_are_refused(server: LlamaServer) -> None:
    body = json.dumps({"prompt": "abc", **GREEDY, "n_predict": 1}).encode()
    with running_proxy(server, allow_hosts=["kv.example"]) as proxy:

        def status(**headers: str) -> int:
            return proxy.send("POST", "/completion", body, **headers).status

        assert status() == 200
        assert status(Host="kv.example") == 200
        assert status(Host="elsewhere.example") == 403
        assert status(Host="192.0.2.7:8080") == 200
        assert status(Origin="http://localhost:3000") == 200
        assert status(Origin="https://elsewhere.example") == 403
        assert status(Origin="null") == 403
    with running_proxy(server, api_keys=["right"]) as proxy:
        right = "Bearer right"
        assert status() == 200  # that server has no key, and answers everybody
        assert status(Host="elsewhere.example", Authorization=right) == 200


def test_a_server_with_a_key_refuses_those_who_have_none(
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path, "llama", seed=5)
    with (
        llama_server(model, "A", key="private") as server,
        running_proxy(server, server_key="private", api_keys=["right"]) as proxy,
    ):
        body: dict[str, object] = {"prompt": TEXT, **GREEDY, "n_predict": 4}
        assert proxy.post("/completion", body).status == 401
        assert proxy.post("/completion", body, "private").status == 401
        assert proxy.send("GET", "/pagoda").status == 401
        assert proxy.send("GET", "/health").status == 200
        answer = proxy.post("/completion", body, "right")
        assert answer.status == 200
        assert answer.told["loaded"] == "0"


def test_moved_kv_is_never_stored(server: LlamaServer) -> None:
    """`n_cache_reuse` lets the server use KV of other positions."""
    emptied(server)
    with running_proxy(server) as proxy:
        answer = proxy.complete(TEXT, n_cache_reuse=8)
        settings = answer.json["generation_settings"]
        assert settings.get("n_cache_reuse", 0) == 0  # type: ignore[attr-defined]
        # of what the proxy does not understand, the server's slots are not used as they are
        path = "/v1/chat/completions/"
        proxy.post(path, {"prompt": TEXT, "n_cache_reuse": 8})
        after = proxy.complete(TEXT)
        assert after.told["held"] == "0"


def test_a_change_of_adapters_empties_the_slots(tmp_path: Path) -> None:
    model = write_model(tmp_path, "llama", seed=5)
    adapter = write_adapter(tmp_path, seed=9)
    with (
        llama_server(model, "A", lora=[(str(adapter), 1.0)]) as server,
        running_proxy(server) as proxy,
    ):
        with_it = proxy.complete(TEXT).text
        change = json.dumps([{"id": 0, "scale": 0.0}]).encode()
        assert proxy.send("POST", "/lora-adapters", change).status == 200
        without = proxy.complete(TEXT)
        expected = bare(server, "/completion", {"prompt": TEXT, "n_predict": 8})
        assert without.text == expected
        assert without.told["held"] == "0"
        assert without.told["loaded"] == "0"
        change = json.dumps([{"id": 0, "scale": 1.0}]).encode()
        proxy.send("POST", "/lora-adapters", change)
        assert proxy.complete(TEXT).text == with_it


class LyingRelay:
    """Passes requests on to a server, and changes what it says of the tokens that it reused."""

    def __init__(self, server: LlamaServer, added: int, times: int) -> None:
        self.added = added
        self.times = times
        self._server = server
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.is_on = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(
                target=self._relay, args=[client], daemon=True
            ).start()

    def _relay(self, client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(
                ("127.0.0.1", self._server.server.port)
            ) as server,
        ):
            threading.Thread(
                target=self._copy, args=[client, server], daemon=True
            ).start()
            while data := server.recv(1 << 20):
                client.sendall(self._changed(data))
            client.close()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                target.sendall(data)
            target.close()

    def _changed(self, data: bytes) -> bytes:
        # the progress first: the end of a short answer may come in the same bytes
        for name in (b'"cache":', b'"cache_n":'):
            at = data.find(name)
            if at < 0 or not self.is_on or not self.times:
                continue
            begin = at + len(name)
            end = begin
            while data[end : end + 1].isdigit():
                end += 1
            found = int(data[begin:end])
            said = str(found + self.added).rjust(end - begin).encode()
            if not found or len(said) != end - begin:
                continue
            self.times -= 1
            data = data[:begin] + said + data[end:]
        return data

    def close(self) -> None:
        self._listening.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_server_that_reuses_more_than_was_restored_is_asked_again(
    server: LlamaServer, stream: bool, tmp_path: Path
) -> None:
    body = {**QUESTIONS["/completion"], **GREEDY, "stream": stream}
    expected = bare(server, "/completion", QUESTIONS["/completion"])
    with running_proxy(server, tmp_path) as proxy:
        proxy.post("/completion", body)
    emptied(server)
    relay = LyingRelay(server, added=5, times=1)
    with (
        contextlib.closing(relay),
        running_proxy(server, tmp_path, url=relay.url) as proxy,
    ):
        relay.is_on = True
        answer = proxy.post("/completion", body)
        assert answer.text == expected
        assert answer.told["loaded"] == "0"
        assert proxy.counts()["asked_again"] == 1


def test_a_server_that_does_not_use_what_is_restored_is_not_loaded_any_more(
    server: LlamaServer, tmp_path: Path
) -> None:
    with running_proxy(server, tmp_path) as proxy:
        proxy.complete(TEXT)
    relay = LyingRelay(server, added=-5, times=99)
    with (
        contextlib.closing(relay),
        running_proxy(server, tmp_path, url=relay.url) as proxy,
    ):
        relay.is_on = True
        for _ in range(3):
            emptied(server)
            forget(proxy)
            assert int(proxy.complete(TEXT).told["loaded"]) > 0
        emptied(server)
        forget(proxy)
        answer = proxy.complete(TEXT)
        assert answer.told["loaded"] == "0"
        assert "reused" in answer.told["why"]
        assert "/completion" in proxy.status()["loading_is_off_for"]  # type: ignore[operator]
        # some minutes later it is tried again: others may have used those slots
        off = proxy.proxy._flow._checks._off
        off["/completion"] = (off["/completion"][0], time.monotonic())
        relay.is_on = False
        emptied(server)
        forget(proxy)
        assert int(proxy.complete(TEXT).told["loaded"]) > 0
        assert proxy.status()["loading_is_off_for"] == {}


def test_a_server_that_ends_is_an_error_of_one_request(tmp_path: Path) -> None:
    model = write_model(tmp_path, "llama", seed=5)
    with llama_server(model, "A") as server, running_proxy(server) as proxy:
        assert proxy.complete(TEXT).status == 200
        server.server.kill()
        answer = proxy.complete(TEXT)
        assert answer.status == 502
        assert "llama-server" in str(answer.json["error"])
        began = time.monotonic()
    # its slots cannot be saved any more, and nobody waits for that
    assert time.monotonic() - began < 60
