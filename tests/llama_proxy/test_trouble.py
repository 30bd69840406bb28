"""What goes wrong around the proxy: clients that leave, odd requests, servers that stop or change,
full disks. No text is wrong, no slot is lost, and what was stored stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from pagoda.connectors.llamacpp import SlotStates
from pagoda.connectors.llamacpp.server_requests import ServerTrouble
from pagoda_tools.llama_proxy import slot_preparation, slot_saver
from pagoda_tools.llama_proxy.event_stream import EventStream
from pagoda_tools.llama_proxy.finished_work import finished
from testbed.llama_servers import (
    BUILDS,
    LlamaOptions,
    LlamaServer,
    llama_server,
)
from testbed.patience import wait_until
from testbed.tiny_gguf import write_adapter, write_model
from tests.llama_proxy.kit import (
    GREEDY,
    Answer,
    RunningProxy,
    forget,
    running_proxy,
)
from tests.llama_proxy.test_proxy import TEXT, bare, emptied

T = TypeVar("T")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    model = write_model(tmp_path_factory.mktemp("model"), "llama", seed=5)
    with llama_server(model, "A", slots=2, context=4096) as server:
        yield server


def raw(port: int, text: bytes) -> bytes:
    """Send bytes, and return all that comes back until the connection ends."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(text)
        found = b""
        while piece := connection.recv(1 << 16):
            found += piece
        return found


def asked(
    target: str,
    method: str = "POST",
    body: bytes = b"",
    host: str = "localhost",
    more: str = "",
) -> bytes:
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n{more}\r\n"
    )
    return head.encode() + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def on_loop(proxy: RunningProxy, work: Coroutine[object, None, T]) -> T:
    """Run work on the event loop of the proxy."""
    assert proxy.loop is not None
    return asyncio.run_coroutine_threadsafe(work, proxy.loop).result(60)


# ---- odd requests


@pytest.mark.parametrize(
    "target", ["/x/../slots/0?action=erase", "/%2e/slots/0?action=erase"]
)
def test_another_spelling_of_a_path_is_the_servers_to_refuse(
    server: LlamaServer, target: str
) -> None:
    """Otherwise slots and adapters could be changed without the proxy."""
    with running_proxy(server) as proxy:
        assert status_of(raw(server.server.port, asked(target))) == 404
        assert status_of(raw(proxy.port, asked(target))) == 404


def test_a_whole_url_is_a_request_for_this_server(server: LlamaServer) -> None:
    with running_proxy(server) as proxy:
        answer = raw(proxy.port, asked("http://localhost/health", "GET"))
        assert status_of(answer) == 200
        away = raw(proxy.port, asked("http://192.0.2.1:9/health", "GET"))
        assert status_of(away) == 200


@pytest.mark.parametrize(
    "body", [gzip.compress, lambda text: b"\xef\xbb\xbf" + text]
)
def test_a_body_in_another_encoding_is_read(
    server: LlamaServer, body: Callable[[bytes], bytes]
) -> None:
    text = json.dumps({"prompt": "abc", "n_predict": 1, **GREEDY}).encode()
    is_gzip = body is gzip.compress
    more = "Content-Encoding: gzip\r\n" if is_gzip else ""
    with running_proxy(server) as proxy:
        answer = raw(proxy.port, asked("/completion", body=body(text), more=more))
    assert status_of(answer) == 200
    assert b"X-Pagoda: prompt=" in answer


def test_a_body_that_is_nested_too_deep_is_refused(server: LlamaServer) -> None:
    body = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with running_proxy(server) as proxy:
        answer = raw(proxy.port, asked("/completion", body=body))
    assert status_of(answer) == 400
    assert b"nested too deep" in answer


@pytest.mark.parametrize("rest", [b"\0", b'\0{"prompt": "b"}'])
def test_a_body_ends_where_the_server_ends_it(
    server: LlamaServer, rest: bytes
) -> None:
    """Otherwise what it asks for behind the back of the proxy is not seen."""
    body = {"prompt": TEXT, "n_predict": 8, **GREEDY}
    text = json.dumps(body).encode()[:-1] + b', "n_cache_reus\\u0065": 8}' + rest
    with running_proxy(server) as proxy:
        answer = proxy.send(
            "POST", "/completion", text, Content_Type="application/json"
        )
        # a slot was chosen for it
        assert int(answer.told["prompt"]) > 600
        settings = answer.json["generation_settings"]
        assert settings.get("n_cache_reuse", 0) == 0  # type: ignore[attr-defined]
        assert answer.text == bare(
            server, "/completion", {"prompt": TEXT, "n_predict": 8}
        )


@pytest.mark.parametrize(
    "route", ["/completion", "/lora-adapters", "/other", "/tokenize"]
)
def test_a_body_that_is_not_in_its_encoding_is_refused(
    server: LlamaServer, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running_proxy(server) as proxy:
        answer = proxy.send("POST", route, b"abc", Content_Encoding="gzip")
        assert answer.status == 400
        assert b"the body cannot be read" in answer.body
    # it is the client's mistake
    assert not caplog.records


def test_names_that_are_none_are_refused(server: LlamaServer) -> None:
    with running_proxy(server) as proxy:
        for host, more in (
            ("[::1", ""),
            ("localhost", "Origin: http://[x\r\n"),
            ("", ""),
        ):
            answer = raw(proxy.port, asked("/health", "GET", b"", host, more))
            assert status_of(answer) in (400, 403), host


def test_a_page_at_a_foreign_address_is_refused(server: LlamaServer) -> None:
    """A page may be anybody's that has an address instead of a name."""
    body = json.dumps({"prompt": "abc", **GREEDY, "n_predict": 1}).encode()
    with running_proxy(server) as proxy:

        def status(origin: str, host: str = "localhost") -> int:
            sent = {"Origin": origin, "Host": host}
            return proxy.send("POST", "/completion", body, **sent).status

        assert status("http://192.0.2.7") == 403
        assert status("http://192.0.2.7", "192.0.2.9:8080") == 403
        assert status("http://127.0.0.1:3000") == 200
        # the page of this server itself, or of another on the same machine
        assert status("http://192.0.2.9:3000", "192.0.2.9:8080") == 200


@pytest.mark.slow
def test_response_fields_do_not_end_loading(
    server: LlamaServer, tmp_path: Path
) -> None:
    """Such an answer does not say what was reused, so nothing is loaded for it alone."""
    with running_proxy(server, tmp_path) as proxy:
        proxy.complete(TEXT)
    with running_proxy(server, tmp_path) as proxy:
        for _ in range(4):
            emptied(server)
            forget(proxy)
            answer = proxy.complete(TEXT, response_fields=["content"])
            assert answer.json.keys() == {"content"}
            assert "response_fields" in answer.told["why"]
        emptied(server)
        forget(proxy)
        told = proxy.complete(TEXT).told
        assert int(told["loaded"]) > 0, told


def test_a_refused_request_leaves_the_account(server: LlamaServer) -> None:
    """Otherwise what a slot has is neither continued nor saved."""
    emptied(server)
    question = {"messages": [{"role": "user", "content": "abc"}], "id_slot": 0}
    with running_proxy(server) as proxy:
        held = proxy.complete(TEXT, id_slot=0).told
        # this build has no such route
        assert proxy.post("/api/chat", question).status == 404
        assert proxy.complete(TEXT).told["held"] == held["prompt"]


def test_no_idle_connection_keeps_a_thread_of_the_server(
    server: LlamaServer,
) -> None:
    """It has a few, and the next save would wait until one of them is tired of waiting."""
    with running_proxy(server) as proxy:
        threads = [
            threading.Thread(target=proxy.send, args=["GET", "/props"])
            for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        upstream = proxy.proxy._upstream
        assert upstream._session.connector is not None
        assert not upstream._session.connector._conns
        # that of our own requests goes after a moment
        proxy.complete(TEXT)
        wait_until(lambda: upstream._connections._kept is None)


class ForgetfulRelay:
    """Before a server: it ends each connection at its second request, without a word."""

    def __init__(self, server: LlamaServer) -> None:
        self._server = server
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.is_on = False
        self.came: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(
                    target=self._pass, args=[client], daemon=True
                ).start()

    def _pass(self, client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            client,
            socket.create_connection(
                ("127.0.0.1", self._server.server.port)
            ) as server,
        ):
            threading.Thread(
                target=self._copy, args=[server, client], daemon=True
            ).start()
            requests = 0
            while data := client.recv(1 << 20):
                if data.startswith((b"POST ", b"GET ")):
                    requests += 1
                    if self.is_on:
                        self.came.append(data.split(b" ")[1])
                    if self.is_on and requests > 1:
                        server.shutdown(socket.SHUT_RDWR)
                        break
                server.sendall(data)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                target.sendall(data)

    def close(self) -> None:
        self._listening.close()


def test_a_question_that_may_have_come_is_not_sent_twice(
    server: LlamaServer,
) -> None:
    """Its own requests are: they change nothing. Then no connection is kept any more."""
    emptied(server)
    relay = ForgetfulRelay(server)
    question = {"messages": [{"role": "user", "content": "abc"}], **GREEDY}
    asked_for = ("/completion", {"prompt": "abc", "n_predict": 2, **GREEDY})
    with (
        contextlib.closing(relay),
        running_proxy(server, url=relay.url) as proxy,
    ):
        relay.is_on = True
        assert proxy.post(*asked_for).status == 502
        assert relay.came == [b"/tokenize", b"/completion"]
        for _ in range(3):
            assert proxy.post(*asked_for).status == 200
    relay = ForgetfulRelay(server)
    with (
        contextlib.closing(relay),
        running_proxy(server, url=relay.url) as proxy,
    ):
        relay.is_on = True
        route = "/v1/chat/completions"
        assert proxy.post(route, {**question, "max_tokens": 2}).status == 200
        assert relay.came == [
            b"/apply-template",
            b"/tokenize",
            b"/tokenize",
            route.encode(),
        ]


def test_the_server_computes_no_more_for_a_client_that_left(
    tmp_path: Path,
) -> None:
    """The server itself goes on with an answer that is not streamed."""
    model = write_model(tmp_path, "llama", seed=5)
    body = {"prompt": "abc", **GREEDY, "n_predict": 30000, "stream": True}
    text = json.dumps(body).encode()
    with (
        llama_server(model, "A", slots=1, context=32768) as server,
        running_proxy(server) as proxy,
    ):
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            client.sendall(asked("/completion", body=text))
            client.recv(1 << 10)
        # waits until it computes no more
        saved = server.post("/slots/0?action=save", filename="left")
        assert int(str(saved["n_saved"])) < 20000


def test_a_server_that_is_stopped_for_a_while_loses_no_request(
    tmp_path: Path,
) -> None:
    """Kept connections are too old by then, and new ones wait in the kernel."""
    model = write_model(tmp_path, "llama", seed=5)
    prompts = [f"{number} roofs, " * 9 for number in range(5)]
    with llama_server(model, "B", slots=2, context=2048) as server:
        expected = [
            bare(server, "/completion", {"prompt": prompt, "n_predict": 8})
            for prompt in prompts
        ]
        with running_proxy(server) as proxy, ThreadPoolExecutor(50) as clients:
            answers = [
                clients.submit(proxy.complete, prompt, stream=bool(number % 2))
                for number, prompt in enumerate(prompts * 20)
            ]
            for _ in range(3):
                wait_until(lambda: any(answer.done() for answer in answers))
                server.server.stop()
                time.sleep(0.5)
                server.server.cont()
            for answer, text in zip(answers, expected * 20, strict=True):
                assert answer.result(120).text == text


def test_a_load_waits_as_long_as_computing_would_take(
    server: LlamaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that computes a batch for another slot restores nothing meanwhile."""
    emptied(server)
    monkeypatch.setattr(slot_preparation, "_LOAD_SECONDS", 0.2)
    with running_proxy(server, tmp_path) as proxy:
        proxy.complete(TEXT)
    with (
        running_proxy(server, tmp_path) as proxy,
        ThreadPoolExecutor(1) as client,
    ):
        preparation = proxy.proxy._flow._preparation
        # as slow a server as there are
        preparation._worth.computed(100, 100.0)
        with held_up(proxy.proxy._states, "load") as load:
            answer = client.submit(proxy.complete, TEXT)
            assert load.has_begun.wait(60)
            server.server.stop()
        try:
            # the load waits for the server
            time.sleep(1.0)
        finally:
            server.server.cont()
        assert int(answer.result(60).told["loaded"]) > 0


def test_a_save_waits_as_long_as_computing_again_would_take(
    server: LlamaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied(server)
    monkeypatch.setattr(slot_saver, "_SAVE_SECONDS", 0.2)
    with running_proxy(server) as proxy:
        proxy.proxy._saver._worth.computed(100, 100.0)
        with held_up(proxy.proxy._states, "store") as save:
            number = int(proxy.complete(TEXT).told["slot"])
            assert save.has_begun.wait(60)
            server.server.stop()
        try:
            time.sleep(1.0)
        finally:
            server.server.cont()
        slot = proxy.proxy._accounts.all[number]
        wait_until(lambda: slot.stored_tokens or slot.failed_saves)
        assert not slot.failed_saves


def test_a_request_that_waits_for_a_slot_finds_what_was_saved_meanwhile(
    server: LlamaServer,
) -> None:
    """With more clients than slots, a slot is saved while the next request for it waits.

    The prompt is too short to be saved at once.
    """
    emptied(server)
    with running_proxy(server) as proxy, ThreadPoolExecutor(1) as client:
        proxy.complete(TEXT[:120], id_slot=0)
        slot = proxy.proxy._accounts.all[0]
        assert slot.new_tokens
        with proxy.all_slots_taken():
            waiting = client.submit(proxy.complete, TEXT[:120])
            freed = proxy.proxy._accounts._freed
            wait_until(lambda: len(freed._waiters))
            on_loop(proxy, proxy.proxy._saver.save(slot))
            slot.clear()
        assert int(waiting.result(60).told["loaded"]) >= 64


def test_what_another_request_saves_of_a_slot_is_looked_for(
    server: LlamaServer,
) -> None:
    """Two requests at once; the slot of one is taken by the other."""
    emptied(server)
    with running_proxy(server) as proxy, ThreadPoolExecutor(2) as clients:
        proxy.complete(TEXT, id_slot=0)
        accounts = proxy.proxy._accounts
        wait_until(lambda: accounts.all[0].stored_tokens, why_not=proxy.status)
        for _ in range(4):
            asked_for = [
                clients.submit(proxy.complete, "other " * 40, id_slot=0),
                clients.submit(proxy.complete, TEXT),
            ]
            told = asked_for[1].result(60).told
            assert int(told["loaded"]) + int(told["held"]) >= 512, told
            asked_for[0].result(60)


# ---- users


def test_what_one_user_wrote_is_not_told_to_another(server: LlamaServer) -> None:
    """Also not by a request whose slot the server chooses."""
    emptied(server)
    keys = ("first-key", "second-key")
    body = {"prompt": TEXT, **GREEDY, "n_predict": 2}
    with running_proxy(server, api_keys=keys) as proxy:
        proxy.post("/completion", body, keys[0])
        both = proxy.post("/completion", {**body, "prompt": [TEXT, "b"]}, keys[1])
        for answer in both.json:
            assert answer["timings"]["cache_n"] == 0  # type: ignore[index]


def test_a_slot_of_one_user_is_emptied_for_another(server: LlamaServer) -> None:
    """Otherwise the time and the reused tokens tell what the first one wrote."""
    emptied(server)
    keys = ("first-key", "second-key")
    body = {"prompt": TEXT, **GREEDY, "n_predict": 2, "id_slot": 0}
    with running_proxy(server, api_keys=keys) as proxy:
        for key in keys:
            answer = proxy.post("/completion", body, key)
            assert answer.told["slot"] == "0"
            assert answer.json["timings"]["cache_n"] == 0  # type: ignore[index]
        # what the first one had was saved before
        again = proxy.post("/completion", body, keys[0])
        assert int(again.told["loaded"]) > 0


@pytest.mark.slow
def test_the_ram_cache_of_a_server_tells_no_user_of_another(
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path, "llama", seed=5)
    keys = ("first-key", "second-key")
    with (
        llama_server(model, "A", slots=2, context=4096, ram_mib=64) as server,
        running_proxy(server, api_keys=keys, owns_server=False) as proxy,
    ):

        def reused(prompt: str, key: str) -> int:
            body = {"prompt": prompt, **GREEDY, "n_predict": 2}
            answer = proxy.post("/completion", body, key)
            found: int = answer.json["timings"]["cache_n"]  # type: ignore[index]
            return found

        others = ["one " * 100, "two " * 100, "three " * 100]
        for prompt in (TEXT, *others):
            reused(prompt, keys[0])
        for prompt in ("mine " * 80, "my own " * 80, TEXT, *others):
            assert reused(prompt, keys[1]) < 8, prompt


# ---- clients that leave


def test_work_is_finished_however_often_its_request_is_cancelled() -> None:
    """Otherwise a slot would be given to others while a state is restored into it."""

    async def run() -> list[str]:
        done = []
        go_on = asyncio.Event()

        async def work() -> None:
            await go_on.wait()
            done.append("work")

        async def ask() -> None:
            try:
                await finished(work())
            finally:
                done.append("given back")

        task = asyncio.create_task(ask())
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0.01)
        go_on.set()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return done

    assert asyncio.run(run()) == ["work", "given back"]


def test_a_client_that_leaves_before_its_start_keeps_no_slot(
    server: LlamaServer,
) -> None:
    """Where other requests empty idle slots, a request waits until others have started."""
    emptied(server)
    with running_proxy(server, empties_idle_slots=True) as proxy:
        starting = proxy.proxy._flow._starts._starting
        on_loop(proxy, starting.acquire())
        body = json.dumps({"prompt": TEXT, **GREEDY, "n_predict": 1}).encode()
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            client.sendall(asked("/completion", body=body))
            accounts = proxy.proxy._accounts
            wait_until(lambda: len(accounts.free) == 1)
        wait_until(lambda: len(accounts.free) == 2)
        proxy.loop.call_soon_threadsafe(starting.release)  # type: ignore[union-attr]
        assert proxy.complete(TEXT).status == 200


def test_a_client_that_leaves_at_the_end_keeps_no_slot(
    server: LlamaServer,
) -> None:
    """With other clients, the server is asked for its slots before one is given back."""
    emptied(server)
    with running_proxy(server, owns_server=False) as proxy:
        slots = proxy.proxy._flow._server_slots
        listed = slots.task_numbers
        asked_for = asyncio.Event()

        async def slowly() -> object:
            asked_for.set()
            await asyncio.sleep(0.2)
            return await listed()

        slots.task_numbers = slowly  # type: ignore[assignment, method-assign]
        client = socket.create_connection(("127.0.0.1", proxy.port))
        body = {"prompt": TEXT, **GREEDY, "n_predict": 2, "stream": True}
        client.sendall(asked("/completion", body=json.dumps(body).encode()))
        client.recv(1)
        wait_until(asked_for.is_set)
        client.close()
        slots.task_numbers = listed  # type: ignore[method-assign]
        wait_until(lambda: len(proxy.proxy._accounts.free) == 2)


def test_a_client_that_leaves_changes_the_adapters_all_the_same(
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path, "llama", seed=5)
    adapter = write_adapter(tmp_path, seed=9)
    with (
        llama_server(model, "A", lora=[(str(adapter), 1.0)]) as server,
        running_proxy(server) as proxy,
    ):
        proxy.complete(TEXT)
        change = json.dumps([{"id": 0, "scale": 0.0}]).encode()
        accounts = proxy.proxy._accounts
        wait_until(lambda: accounts.all[0].stored_tokens and accounts.free)
        server.server.stop()
        try:
            with socket.create_connection(("127.0.0.1", proxy.port)) as client:
                client.sendall(asked("/lora-adapters", body=change))
                wait_until(lambda: not accounts.free)
                # it is sent at once then
                time.sleep(0.2)
        finally:
            server.server.cont()
        wait_until(lambda: len(accounts.free) == 1)
        without = proxy.complete(TEXT)
        assert without.told["held"] == "0"
        scale: list[dict[str, float]] = server.get("/lora-adapters")  # type: ignore[assignment]
        assert scale[0]["scale"] == 0.0
        expected = bare(server, "/completion", {"prompt": TEXT, "n_predict": 8})
        assert without.text == expected


@pytest.mark.slow
def test_the_slot_that_the_server_has_chosen_is_accounted_for(
    server: LlamaServer,
) -> None:
    """Where others ask the server too, a request waits for a slot for a short time only."""
    emptied(server)
    with running_proxy(server, owns_server=False) as proxy:
        slots = proxy.proxy._flow._server_slots
        listed = slots.task_numbers
        calls: list[int] = []
        given_back = threading.Event()

        async def after_the_slots() -> dict[int, object] | None:
            calls.append(1)
            # the second one is after the answer
            while len(calls) == 2 and not given_back.is_set():
                await asyncio.sleep(0.01)
            return await listed()

        with proxy.all_slots_taken():
            slots.task_numbers = after_the_slots  # type: ignore[method-assign]
            answers: list[Answer] = []
            asking = threading.Thread(
                target=lambda: answers.append(proxy.complete(TEXT))
            )
            asking.start()
            wait_until(lambda: len(calls) == 2)
        given_back.set()
        asking.join(120)
        assert answers[0].told.keys() == {"why"}
        # that comes after the answer
        accounts = proxy.proxy._accounts
        wait_until(lambda: max(len(slot.tokens) for slot in accounts.all))
        slots.task_numbers = listed  # type: ignore[method-assign]
        again = proxy.complete(TEXT).told
        assert again["held"] == again["prompt"]


# ---- slots that are saved and loaded


@contextlib.contextmanager
def held_up(states: SlotStates, name: str) -> Iterator[HeldUp]:
    """Let calls of a method wait at their begin until the end of this."""
    call = getattr(states, name)
    held = HeldUp(threading.Event(), threading.Event())

    def slow(*args: object, **kwargs: object) -> object:
        held.has_begun.set()
        assert held.may_go_on.wait(60)
        return call(*args, **kwargs)

    setattr(states, name, slow)
    try:
        yield held
    finally:
        held.may_go_on.set()
        setattr(states, name, call)


class HeldUp(NamedTuple):
    """A call that has begun and waits."""

    has_begun: threading.Event
    may_go_on: threading.Event


def test_a_slot_stays_taken_while_a_state_is_loaded_for_a_client_that_left(
    server: LlamaServer, tmp_path: Path
) -> None:
    emptied(server)
    with running_proxy(server, tmp_path) as proxy:
        proxy.complete(TEXT)
    emptied(server)
    body = json.dumps({"prompt": TEXT, **GREEDY, "n_predict": 1}).encode()
    with running_proxy(server, tmp_path) as proxy:
        accounts = proxy.proxy._accounts
        with held_up(proxy.proxy._states, "load") as load:
            with socket.create_connection(("127.0.0.1", proxy.port)) as client:
                client.sendall(asked("/completion", body=body))
                assert load.has_begun.wait(60)
            # it has left; the requests of others still take the other slot
            for _ in range(3):
                proxy.complete("a short prompt")
                assert len(accounts.free) == 1
        wait_until(lambda: len(accounts.free) == 2)
        # what was loaded for nobody is there
        assert int(proxy.complete(TEXT).told["held"]) > 0


def test_a_request_waits_for_its_slot_that_is_being_saved(
    server: LlamaServer,
) -> None:
    """Another slot would compute all of it."""
    emptied(server)
    with running_proxy(server) as proxy, ThreadPoolExecutor(1) as client:
        with held_up(proxy.proxy._states, "store") as save:
            first = proxy.complete(TEXT).told
            assert save.has_begun.wait(60)
            second = client.submit(proxy.complete, TEXT)
            time.sleep(0.2)
            assert not second.done()
        told = second.result(60).told
        assert told["slot"] == first["slot"]
        assert told["held"] == told["prompt"]


def test_a_slot_is_saved_before_another_conversation_takes_it(
    server: LlamaServer,
) -> None:
    """Also if it was not idle for long."""
    emptied(server)
    prompts = [f"{name} roofs of the pagoda, " * 6 for name in ("blue", "red")]
    with running_proxy(server) as proxy:
        for prompt in prompts:
            proxy.complete(prompt, id_slot=0)
        again = proxy.complete(prompts[0], id_slot=0)
        assert int(again.told["loaded"]) >= 64, again.told


def test_a_slot_of_doubtful_kv_is_not_saved(server: LlamaServer) -> None:
    emptied(server)
    with running_proxy(server) as proxy:
        # not so long that it is saved at once
        proxy.complete(TEXT[:120])
        slot = max(proxy.proxy._accounts.all, key=lambda slot: len(slot.tokens))
        assert slot.save_at is not None
        proxy.proxy._accounts.taint()
        on_loop(proxy, proxy.proxy._saver.save(slot))
        assert slot.stored_tokens == 0
        # and nobody looks at it again and again
        assert slot.save_at is None
        assert not proxy.proxy._states.find(slot.tokens)


def test_a_slot_that_could_not_be_emptied_is_not_used_as_it_is(
    server: LlamaServer,
) -> None:
    emptied(server)
    with running_proxy(server) as proxy:
        proxy.complete(TEXT, id_slot=0)
        proxy.proxy._accounts.taint()

        async def fails(_: int) -> None:
            raise ServerTrouble("/slots/0: no answer in time")

        proxy.proxy._upstream.erase = fails  # type: ignore[method-assign]
        answer = proxy.complete(TEXT, id_slot=0)
        assert answer.json["timings"]["cache_n"] == 0  # type: ignore[index]
        messages = [{"role": "user", "content": TEXT}]
        # that route has no switch for it
        refused = proxy.post("/v1/messages", {"messages": messages, "id_slot": 0})
        assert refused.status == 502


def test_a_request_that_is_passed_on_may_use_a_slot_that_is_being_saved(
    server: LlamaServer,
) -> None:
    emptied(server)
    with running_proxy(server) as proxy:
        with held_up(proxy.proxy._states, "store") as save:
            proxy.complete(TEXT)
            assert save.has_begun.wait(60)
            # two prompts, which the proxy does not follow: they use both slots
            assert proxy.complete([TEXT + "a", TEXT + "b"]).status == 200
            accounts = proxy.proxy._accounts
            (other,) = accounts.free
            wait_until(lambda: not other.is_known)
            for slot in accounts.all:
                assert not slot.is_known
        wait_until(lambda: len(accounts.free) == 2)
        for slot in accounts.all:
            assert not slot.is_known


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True])
def test_who_has_an_answer_finds_the_accounts_right(
    server: LlamaServer, is_streamed: bool
) -> None:
    """The next request of a client comes at once."""
    emptied(server)
    with running_proxy(server) as proxy:
        slots = proxy.proxy._accounts.all

        def in_use() -> list[int]:
            return [
                slot.number
                for slot in slots
                if slot.lock.locked() and not slot.is_saving
            ]

        for number in range(20):
            proxy.complete(TEXT)
            # two prompts, which the proxy does not follow
            asked = [TEXT + "a", f"{number} {TEXT}"]
            proxy.complete(asked, stream=is_streamed)
            for slot in slots:
                assert not slot.is_known
            assert not in_use()
            refused = proxy.complete(TEXT, n_predict="x", stream=is_streamed)
            assert refused.status == 400
            assert not in_use()


@pytest.mark.slow
def test_a_save_that_fails_for_a_while_is_tried_again(tmp_path: Path) -> None:
    model = write_model(tmp_path, "llama", seed=5)
    with llama_server(model, "A") as server, running_proxy(server) as proxy:
        aside = server.states.with_name("aside")
        server.states.rename(aside)
        proxy.complete(TEXT)
        slot = proxy.proxy._accounts.all[0]
        wait_until(lambda: slot.failed_saves)
        aside.rename(server.states)
        wait_until(lambda: slot.stored_tokens, why_not=proxy.status)
        assert proxy.proxy._states.find(slot.tokens)


# ---- servers that change


@pytest.mark.slow
def test_a_server_that_was_restarted_is_used_again_for_new_prompts(
    tmp_path: Path,
) -> None:
    """Nothing that was stored before must be asked for."""
    model = write_model(tmp_path, "llama", seed=5)
    prompts = [f"{n} roofs over {n} rivers, " * 16 for n in range(4)]
    with (
        llama_server(model, "A", slots=1, context=2048) as server,
        running_proxy(server, owns_server=False) as proxy,
    ):
        proxy.complete(prompts[0])
        server.server.restart()
        # the first save is refused, the load after it probes the server, and then all is stored
        for prompt in (*prompts[1:], *prompts[1:]):
            again = proxy.complete(prompt)
        assert int(again.told["loaded"]) >= 256, again.told


# ---- streams


def test_comments_of_a_stream_say_nothing_of_the_prompt() -> None:
    """A server that lets a request wait sends them to keep the connection open."""
    comment = b": ping\n\n"
    progress = b'data: {"prompt_progress":{"total":9,"cache":5}}\n\n'
    token = b'data: {"content":"a"}\n\n'

    async def pieces() -> AsyncIterator[bytes]:
        for piece in (*[comment] * 9, progress, comment, progress, token):
            yield piece

    async def read() -> tuple[int | None, bytes]:
        stream = EventStream(pieces(), cuts_progress=True)
        found = await stream.beginning()
        async for piece in stream.rest():
            found += piece
        return stream.reused_tokens, found

    reused, found = asyncio.run(read())
    assert reused == 5
    assert found == comment * 10 + token


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("build", BUILDS)
def test_the_adapters_of_a_request_are_not_those_of_the_next_one(
    build: str, several: bool, tmp_path: Path
) -> None:
    """The server goes on from what such a request has left in its slot."""
    model = write_model(tmp_path, "llama", seed=5)
    adapter = write_adapter(tmp_path, seed=9)
    options: LlamaOptions = {
        "slots": 1,
        "context": 2048,
        "lora": [(str(adapter), 0.0)],
    }
    chosen = [{"id": 0, "scale": 1.0}]
    with (
        llama_server(model, build, **options) as server,
        running_proxy(server, may_have_ram_cache=False) as proxy,
    ):
        asked: object = ["a", TEXT] if several else TEXT
        assert proxy.complete(asked, lora=chosen).status == 200
        slot = proxy.proxy._accounts.all[0]
        answers = [proxy.complete(TEXT)]
        wait_until(lambda: slot.stored_tokens, why_not=proxy.status)
        server.post("/slots/0?action=erase")
        slot.clear()
        # what was stored
        answers.append(proxy.complete(TEXT))
        expected = bare(server, "/completion", {"prompt": TEXT, "n_predict": 8})
    assert {answer.text for answer in answers} == {expected}
    assert int(answers[-1].told["loaded"]) > 0


def test_a_conversation_with_adapters_of_its_own_goes_on(tmp_path: Path) -> None:
    """Its slot is kept for it, until another one needs a slot."""
    model = write_model(tmp_path, "llama", seed=5)
    adapter = write_adapter(tmp_path, seed=9)
    with (
        llama_server(
            model, "B", slots=2, context=4096, lora=[(str(adapter), 0.0)]
        ) as server,
        running_proxy(server, may_have_ram_cache=False) as proxy,
    ):

        def reused(scale: float) -> int:
            chosen = [{"id": 0, "scale": scale}]
            timings = proxy.complete(TEXT, lora=chosen).json["timings"]
            found: int = timings["cache_n"]  # type: ignore[index]
            return found

        assert reused(1.0) == 0
        assert reused(1.0) > 600
        assert proxy.complete(TEXT).json["timings"]["cache_n"] == 0  # type: ignore[index]
        assert proxy.complete(TEXT).told["held"] != "0"
        assert reused(0.5) == 0


@pytest.mark.parametrize("build", BUILDS)
def test_the_ram_cache_of_a_server_gives_no_kv_of_a_requests_own_adapters(
    build: str, tmp_path: Path
) -> None:
    """The server keeps copies without the adapters that a request has chosen."""
    model = write_model(tmp_path, "llama", seed=5)
    adapter = write_adapter(tmp_path, seed=9)
    options: LlamaOptions = {
        "slots": 1,
        "context": 2048,
        "ram_mib": 64,
        "lora": [(str(adapter), 0.0)],
    }
    chosen = [{"id": 0, "scale": 1.0}]
    with (
        llama_server(model, build, **options) as server,
        running_proxy(server) as proxy,
    ):
        other = "quite another prompt, " * 20
        for prompt in (TEXT, other):
            proxy.complete(prompt, lora=chosen)
        # an empty slot would not be compared with what is in RAM
        proxy.complete(other)
        answer = proxy.complete(TEXT)
        expected = bare(server, "/completion", {"prompt": TEXT, "n_predict": 8})
    assert answer.text == expected


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_the_ram_cache_of_a_server_gives_no_kv_of_another_scale(
    build: str, tmp_path: Path
) -> None:
    """The server keeps copies of what its slots held before the change."""
    model = write_model(tmp_path, "llama", seed=5)
    adapter = write_adapter(tmp_path, seed=9)
    options: LlamaOptions = {
        "slots": 1,
        "context": 2048,
        "ram_mib": 64,
        "lora": [(str(adapter), 1.0)],
    }
    other = "quite another prompt, " * 20
    # the slot has its beginning, and an answer that it does not go on from
    longer = "the river goes past"
    with (
        llama_server(model, build, **options) as server,
        running_proxy(server) as proxy,
    ):
        for prompt in (TEXT, other):
            proxy.complete(prompt)
        change = [{"id": 0, "scale": 0.0}]
        text = json.dumps(change).encode()
        assert proxy.send("POST", "/lora-adapters", text).status == 200
        proxy.complete(other)
        answers = [proxy.complete(TEXT)]
        proxy.complete(longer, n_predict=60)
        answers.append(proxy.complete(TEXT))
        # with several prompts, the server itself chooses the slot
        proxy.complete(other)
        passed = proxy.complete([TEXT, "b"]).json
        expected = bare(server, "/completion", {"prompt": TEXT, "n_predict": 8})
    assert [answer.text for answer in answers] == [expected, expected]
    assert passed[0]["content"] == expected  # type: ignore[index,call-overload]
