"""The operator's routes of a real `pagoda serve`: what they show, who may call them, what they
change.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from pagoda import Cache, Namespace
from pagoda_tools.serve import operator_routes
from pagoda_tools.serve.access import AccessRules
from pagoda_tools.serve.operations import MOST_TOKENS, PromptTools
from pagoda_tools.serve.operator_routes import MOST_BODY_BYTES, PageOptions
from pagoda_tools.serve.server import ServeOptions, make_app
from testbed.patience import wait_until
from tests.serve.kit import (
    CHUNK,
    LAYOUT,
    TOKEN,
    Answer,
    Engine,
    Server,
    dense_kv,
    engine,
    server,
    tokens_of,
)

SALT = "tenant-of-the-tests"
EVENTS = f"GET /events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()  # noqa: E501


@pytest.fixture(scope="module")
def host() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        prefix="pagoda-test-", dir="/dev/shm"
    ) as root:
        yield Path(root, "host")


@pytest.fixture(scope="module")
def running(host: Path) -> Iterator[Engine]:
    with engine(host_path=str(host), host_size="8MiB") as made:
        made.store(1, 4)
        yield made


@pytest.fixture(scope="module")
def shared(running: Engine, host: Path) -> Iterator[Server]:
    with server(host) as made:
        yield made


@pytest.fixture
def page(shared: Server) -> Iterator[Server]:
    """Return the server; the next test finds its client with the token."""
    yield shared
    shared.token = TOKEN


def post(page: Server, path: str, value: object, **headers: str) -> Answer:
    body = json.dumps(value).encode()
    names = {name.replace("_", "-"): text for name, text in headers.items()}
    return page.ask(
        "POST", path, body, {"Content-Type": "application/json", **names}
    )


def test_the_page_and_its_files_are_whole_and_may_load_nothing_else(
    page: Server,
) -> None:
    index = page.ask("GET", "/")
    assert index.status == 200
    assert b"Why did this prompt miss?" in index.body
    for name, kind in (
        ("page.js", "text/javascript"),
        ("page.css", "text/css"),
        ("icon.svg", "image/svg+xml"),
    ):
        assert f'"page/{name}"'.encode() in index.body
        found = page.ask("GET", f"/page/{name}")
        assert found.status == 200
        assert found.headers["Content-Type"].startswith(kind)
        assert b"innerHTML" not in found.body
        assert b"http://" not in found.body.replace(b"http://www.w3.org/", b"")
    rules = index.headers["Content-Security-Policy"]
    assert "default-src 'none'" in rules
    assert "unsafe" not in rules
    for wrong in (
        "/page/index.py",
        "/page/..%2foverview.py",
        "/page/%2e%2e/overview.py",
        "/page/",
    ):
        assert page.ask("GET", wrong).status == 404


def test_without_the_token_there_is_only_a_form(page: Server) -> None:
    page.token = None
    form = page.ask("GET", "/")
    assert form.status == 401
    assert b'type="password"' in form.body
    assert b"prompt" not in form.body
    for path in ("/stats.json", "/events", "/history.json", "/page/page.js"):
        assert page.ask("GET", path).status == 401
    for path in ("/clear", "/pin", "/unpin", "/warm", "/explain"):
        assert post(page, path, {"everything": True}).status == 401


def test_the_login_gives_a_cookie_that_serves_the_own_page_only(
    page: Server,
) -> None:
    page.token = None
    own = page.url
    assert post(page, "/login", {"token": "wrong"}).status == 401
    assert (
        post(
            page, "/login", {"token": TOKEN}, Origin="http://evil.example"
        ).status
        == 403
    )
    answer = post(page, "/login", {"token": TOKEN}, Origin=own)
    assert answer.status == 200
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    kept = {"Cookie": cookie.partition(";")[0]}
    assert page.ask("GET", "/stats.json", None, kept).status == 200
    asked = {"owner": "nobody"}
    assert post(page, "/unpin", asked, **kept, Origin=own).status == 200
    assert post(page, "/unpin", asked, **kept).status == 401
    assert post(
        page, "/unpin", asked, **kept, Origin="http://evil.example"
    ).status in (401, 403)
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    wrong = page.ask("POST", "/login", b"token=wrong", kind)
    assert wrong.status == 401
    assert b"<form" in wrong.body
    assert b"this is not the token" in wrong.body
    form = page.ask("POST", "/login", f"token={TOKEN}".encode(), kind)
    assert form.status == 303
    assert form.headers["Location"] == "/"
    assert "Set-Cookie" in form.headers


@pytest.mark.slow
def test_a_cookie_ends_with_its_login_and_is_worth_nothing_at_another_server(
    page: Server, host: Path
) -> None:
    def log_in(where: Server) -> dict[str, str]:
        answer = post(where, "/login", {"token": TOKEN}, Origin=where.url)
        return {"Cookie": answer.headers["Set-Cookie"].partition(";")[0]}

    page.token = None
    first = log_in(page)
    second = log_in(page)
    assert first != second
    assert post(page, "/logout", {}, **first, Origin=page.url).status == 200
    assert page.ask("GET", "/stats.json", None, first).status == 401
    assert page.ask("GET", "/stats.json", None, second).status == 200
    with server(host) as other:  # as after a restart: with the same token
        other.token = None
        assert other.ask("GET", "/stats.json", None, second).status == 401


def test_guesses_of_the_token_are_limited_and_keep_nobody_out(
    page: Server,
) -> None:
    page.token = None
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    guesses = [
        post(page, "/login", {"token": f"guess-{n}"}).status for n in range(60)
    ]
    assert guesses.count(429) >= 30
    assert set(guesses) == {401, 429}
    form = page.ask("POST", "/login", b"token=wrong", kind)
    assert form.status == 429
    assert b"wait a moment" in form.body
    assert post(page, "/login", {"token": TOKEN}).status == 200


@pytest.mark.slow
def test_a_page_of_another_site_changes_nothing(
    page: Server, tmp_path: Path, host: Path
) -> None:
    everything = {"everything": True}
    assert (
        post(page, "/clear", everything, Sec_Fetch_Site="cross-site").status
        == 403
    )
    assert (
        post(page, "/clear", everything, Origin="http://evil.example").status
        == 403
    )
    assert (
        page.ask(
            "POST",
            "/clear",
            b'{"everything": true}',
            {"Content-Type": "text/plain"},
        ).status
        == 415
    )
    with server(
        host, "--listen", f"unix:{tmp_path}/s/socket", token=None
    ) as local:  # through a forwarded port
        assert (
            post(local, "/clear", everything, Origin="http://evil.example").status
            == 403
        )
        assert (
            local.ask("GET", "/stats.json", None, {"Host": "evil.example"}).status
            == 421
        )
        assert local.ask("GET", "/stats.json").json["tiers"][0]["chunks"] == 4  # type: ignore[index]


@pytest.mark.slow
def test_a_read_only_server_refuses_changes_and_wrong_tokens_at_the_login_lock_nobody_out(
    tmp_path: Path,
) -> None:
    with server(tmp_path, "--read-only") as page:
        for path in ("/clear", "/pin", "/unpin", "/warm"):
            assert (
                post(page, path, {"everything": True}).json["reason"]
                == "read_only"
            )
        assert post(page, "/explain", {"tokens": tokens_of(1, 2)}).status == 200
        with page.socket() as stream:
            stream.sendall(EVENTS)
            assert b"200 OK" in stream.recv(4096)
            page.token = None
            for _ in range(25):
                post(page, "/login", {"token": "wrong"})
            # others cannot lock its user out
            assert post(page, "/login", {"token": TOKEN}).status == 200
            deep = page.ask(
                "POST",
                "/login",
                b"[" * 4000,
                {"Content-Type": "application/json"},
            )
            assert deep.status == 429
            code, said = page.stop()  # at once, in spite of the stream
        assert code == 0
        assert "Traceback" not in said


def test_clear_pin_unpin_and_explain(page: Server, running: Engine) -> None:
    prompt = {"tokens": tokens_of(1, 5)}
    answer = post(page, "/explain", prompt).json
    assert answer["asked_tokens"] == 5 * CHUNK
    (found,) = answer["namespaces"]  # type: ignore[misc]
    (row,) = found["answers"]
    assert row["tier"] == "host"
    assert row["num_tokens"] == 4 * CHUNK
    assert row["reason"] == "absent"
    assert any("nearest" in line for line in found["lines"])
    # what this read is no answer after the next change
    page.ask("GET", "/stats.json")
    assert post(page, "/pin", prompt).json["chunks"] == 4
    assert page.ask("GET", "/stats.json").json["pins"] == [
        {"tier": "host", "owner": "pagoda", "chunks": 4}
    ]
    assert post(page, "/unpin", {"owner": "somebody else"}).json["chunks"] == 0
    assert post(page, "/pin", {**prompt, "owner": "ann"}).json["chunks"] == 4
    assert post(page, "/unpin", {"tokens": tokens_of(1, 1)}).json["chunks"] == 1
    pins = {
        pin["owner"]: pin["chunks"]
        for pin in page.ask("GET", "/stats.json").json["pins"]
    }  # type: ignore[attr-defined]
    assert pins == {"ann": 4, "pagoda": 3}
    assert post(page, "/unpin", prompt).json["chunks"] == 3
    assert post(page, "/unpin", {"owner": "ann"}).json["chunks"] == 4
    assert post(page, "/clear", {"namespace": "00" * 32}).json["chunks"] == 0
    assert (
        post(page, "/clear", {"namespace": running.root.hex()}).json["chunks"]
        == 4
    )
    assert (
        post(page, "/explain", prompt).json["namespaces"][0]["answers"][0][
            "num_tokens"
        ]
        == 0
    )  # type: ignore[index]
    running.store(1, 4)


@pytest.mark.slow
def test_a_prompt_is_about_the_model_that_was_chosen(shm_root: Path) -> None:
    prompt = {"tokens": tokens_of(1, 4)}
    kv = dense_kv(1, 4)
    with ExitStack() as stack:
        for model in ("one", "two"):
            cache = stack.enter_context(
                Cache(
                    namespace=Namespace(model),
                    layout=LAYOUT,
                    chunk_tokens=CHUNK,
                    host_path=str(shm_root),
                    host_size="4MiB",
                )
            )
            cache.store(tokens_of(1, 4), kv)
        page = stack.enter_context(server(shm_root))
        root = cache.namespace.root.hex()
        own = {**prompt, "namespace": root}
        (found,) = post(page, "/explain", own).json["namespaces"]  # type: ignore[misc]
        assert found["namespace"] == root
        assert len(post(page, "/explain", prompt).json["namespaces"]) == 2  # type: ignore[arg-type]
        assert post(page, "/pin", own).json["chunks"] == 4
        assert post(page, "/pin", prompt).json["chunks"] == 8
        assert post(page, "/warm", own).json["chunks"] == 0
        assert post(page, "/unpin", own).json["chunks"] == 4
        assert post(page, "/unpin", prompt).json["chunks"] == 4
        other = {**prompt, "namespace": "00" * 32}
        for path in ("/explain", "/pin", "/unpin", "/warm"):
            refused = post(page, path, other)
            assert refused.status == 400
            assert "no store knows this namespace" in str(refused.json["remedy"])
            assert post(page, path, {**prompt, "namespace": "x"}).status == 400


def test_minutes_of_the_last_day(page: Server, running: Engine) -> None:
    before = page.ask("GET", "/history.json").json["minutes"]
    assert isinstance(before, list)
    running.command("lookup", 1, 4)
    wait_until(
        lambda: (
            sum(
                minute["lookups"]
                for minute in page.ask("GET", "/history.json").json["minutes"]  # type: ignore[attr-defined]
            )
            > sum(minute["lookups"] for minute in before)
        )
    )


@pytest.mark.parametrize(
    ("path", "asked", "said"),
    [
        ("/clear", {}, "everything"),
        ("/clear", {"everything": "no"}, "everything"),
        ("/clear", {"namespace": "abc"}, "64 hex digits"),
        ("/clear", [], "JSON object"),
        ("/pin", {}, "a prompt is missing"),
        ("/pin", {"tokens": ["x"]}, "token"),
        ("/pin", {"tokens": [1], "owner": "a\nb"}, "one line"),
        ("/pin", {"tokens": [1], "owner": "a" * 101}, "at most 100"),
        ("/explain", {"text": "hello"}, "--tokenizer"),
        ("/explain", {"tokens": [1] * (MOST_TOKENS + 1)}, "too many"),
    ],
)
def test_wrong_use_is_refused_with_the_remedy(
    page: Server, path: str, asked: object, said: str
) -> None:
    answer = post(page, path, asked)
    assert answer.status == 400
    assert said in str(answer.json["remedy"])


def test_a_body_is_bounded(page: Server) -> None:
    body = b'{"tokens": [' + b" " * MOST_BODY_BYTES + b"1]}"
    assert (
        page.ask(
            "POST", "/explain", body, {"Content-Type": "application/json"}
        ).status
        == 413
    )


def by_tier(explained: Answer) -> dict[str, int]:
    (found,) = explained.json["namespaces"]  # type: ignore[misc]
    return {row["tier"]: row["num_tokens"] for row in found["answers"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "host_size"), [("LAYOUT", "1MiB"), ("ODD", "64KiB")]
)
def test_warm_brings_chunks_of_the_disk_up_to_the_host(
    layout: str, host_size: str, shm_root: Path, tmp_path: Path
) -> None:
    host = shm_root / "host"
    disk = tmp_path / "disk"
    options = {
        "host_path": str(host),
        "host_size": host_size,
        "disk_path": str(disk),
        "disk_size": "32MiB",
    }
    # 16 slots on the host
    with engine(layout, **options, policy="lru") as running:
        running.store(1, 4)
        for chain in range(2, 6):
            running.store(chain, 4)
        config = tmp_path / "pagoda.toml"
        config.write_text(
            "".join(f"{name} = '{value}'\n" for name, value in options.items())
        )
        with server("--config", config) as page:
            prompt = {"tokens": tokens_of(1, 4)}
            before = by_tier(post(page, "/explain", prompt))
            assert before["host"] == 0
            assert before["disk"] == 4 * CHUNK
            assert post(page, "/warm", prompt).json["chunks"] == 4
            after = by_tier(post(page, "/explain", prompt))
            assert after["host"] == 4 * CHUNK


def test_operations_that_hang_take_no_thread_from_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operator_routes, "_WORK_SECONDS", 0.02)
    free = threading.Event()

    def hang(*_: object) -> list[dict[str, object]]:
        free.wait(60)
        return []

    async def ask() -> None:
        page = PageOptions(prompts=PromptTools(keys=lambda *_: {}, explain=hang))
        app = make_app(
            ServeOptions(find_stores=list, page=page),
            AccessRules(None, ["127.0.0.1"], None),
        )
        async with TestClient(TestServer(app)) as client:
            for _ in range(20):
                assert (
                    await client.post("/explain", json={"tokens": [1]})
                ).status == 503
            chunk = await asyncio.wait_for(
                client.get(f"/v1/{'0' * 64}/{'0' * 64}"), 5
            )
            assert chunk.status == 404
            free.set()

    try:
        asyncio.run(ask())
    finally:
        free.set()


@pytest.mark.slow
def test_the_question_goes_to_the_neighbours_too(
    shm_root: Path, tmp_path: Path
) -> None:
    here = shm_root / "here"
    there = shm_root / "there"
    with (
        engine(host_path=str(here), host_size="1MiB") as ours,
        engine(host_path=str(there), host_size="1MiB") as theirs,
    ):
        ours.store(1, 2)
        theirs.store(1, 4)
        with server(there) as neighbour:
            config = tmp_path / "pagoda.toml"
            config.write_text(
                f"host_path = '{here}'\npeers = '{neighbour.url}'\n"
            )
            with server("--config", config, XDG_STATE_HOME=str(tmp_path)) as page:
                prompt = {"tokens": tokens_of(1, 5)}
                name = f"peers {neighbour.url.removeprefix('http://')}"
                known = {"host": 2 * CHUNK, name: 4 * CHUNK, "all": 4 * CHUNK}
                assert by_tier(post(page, "/explain", prompt)) == known
                neighbour.stop(signal.SIGKILL)
                assert by_tier(post(page, "/explain", prompt)) == {
                    "host": 2 * CHUNK
                }


def test_stats_has_no_salt_and_no_token(host: Path, page: Server) -> None:
    from pagoda import Cache, Namespace
    from tests.serve.kit import LAYOUT

    tenant = Namespace("served", salt=SALT)
    with Cache(
        namespace=tenant,
        layout=LAYOUT,
        chunk_tokens=CHUNK,
        host_path=str(host),
        host_size="8MiB",
    ) as cache:
        cache.store(tokens_of(7, 2), dense_kv(7, 2))
        wait_until(
            lambda: len(page.ask("GET", "/stats.json").json["namespaces"]) == 2
        )  # type: ignore[arg-type]
    found = page.ask("GET", "/stats.json").body.decode()
    assert SALT not in found
    assert TOKEN not in found


def test_a_stream_begins_with_the_history_and_goes_on(page: Server) -> None:
    connection = page.connection()
    connection.request(
        "GET", "/events", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    stream = connection.getresponse()
    assert stream.headers["Content-Type"] == "text/event-stream"

    def event() -> dict[str, object]:
        assert stream.readline() == b"event: snapshot\n"
        data = stream.readline()
        assert stream.readline() == b"\n"
        found = json.loads(data.removeprefix(b"data: "))
        assert isinstance(found, dict)
        return found

    assert "history" in event()
    second = event()
    assert "history" not in second
    # a look right after another one makes no span
    assert second["spans"] or event()["spans"]
    connection.close()


@pytest.mark.slow
def test_streams_are_a_bounded_number(page: Server) -> None:
    from pagoda_tools.serve.live_feed import MOST_READERS

    wait_until(lambda: b"200 OK" in _first_bytes(page))
    streams = [page.socket() for _ in range(MOST_READERS)]
    for stream in streams:
        stream.sendall(EVENTS)
        stream.recv(1)
    assert b"503" in (refused := _first_bytes(page))
    assert b"too_many_streams" in refused
    for stream in streams:
        stream.close()
    wait_until(lambda: b"200 OK" in _first_bytes(page))


def _first_bytes(page: Server) -> bytes:
    with page.socket() as stream:
        stream.sendall(EVENTS)
        return stream.recv(4096)
