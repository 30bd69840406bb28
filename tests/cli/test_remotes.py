"""Commands over real servers: every tier is reached, one that fails is named and never passed
over.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda.codec import HEADER_BYTES
from pagoda.config.remote_urls import parse
from pagoda.keys import Namespace, chunk_keys
from pagoda.ledger import admin
from pagoda.tiers.remote.open_client import open_client
from pagoda.tiers.remote.store_client import PutRequest, PutResult
from testbed.patience import Patience
from testbed.servers import (
    Server,
    free_port,
    nginx_dav,
    pagoda_server,
    redis_server,
)
from tests.cli.shelf import (
    CHUNK,
    LLAMA,
    QWEN,
    answer,
    done_here,
    host,
    pagoda,
    put,
    refused,
)
from tests.serve.kit import Client, payload_of, value_of


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with redis_server(password="hunter2") as running:
        yield running


@pytest.fixture
def url(server: Server, request: pytest.FixtureRequest) -> str:
    """The server's URL with the password in it and with a prefix of this test's own."""
    prefix = f"p{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**9}"
    return f"{server.url.replace('://', '://:hunter2@')}/0?prefix={prefix}"


@pytest.fixture
def where(shm_root: Path, url: str) -> dict[str, str]:
    """The environment of a machine with a host tier and the server below it."""
    return {
        "PAGODA_HOST_PATH": str(shm_root),
        "PAGODA_HOST_SIZE": "1MiB",
        "PAGODA_REMOTE": url,
    }


def masked(url: str) -> str:
    return url.replace("hunter2", "***")


def share(url: str, namespace: Namespace, chunks: int) -> list[bytes]:
    """Store chunks in a remote tier as another machine would; return their keys."""
    spec = parse(url)
    remote = open_client(
        spec.kind,
        spec.url,
        name=spec.name,
        prefix=spec.prefix,
        ttl_seconds=60.0,
        options={},
        password_file="",
    )
    connection = remote.connection().open(time.monotonic() + 30)
    keys = chunk_keys(list(range(chunks * CHUNK)), namespace.root, CHUNK)
    page = np.zeros(HEADER_BYTES, np.uint8)
    stored = np.zeros(4096, np.uint8)
    for key in keys:
        put_ = connection.put(
            PutRequest(namespace.root, key, page, stored, lambda: True),
            time.monotonic() + 30,
        )
        assert put_ is PutResult.STORED
    connection.close()
    return keys


def count(url: str, namespace: Namespace) -> int:
    found = answer(
        "ls", "--by", "namespace", PAGODA_HOST_SIZE="0", PAGODA_REMOTE=url
    )
    rows = [
        row
        for row in found["namespaces"]
        if row["namespace"] == namespace.root.hex()
    ]  # type: ignore[attr-defined]
    return sum(row["chunks"] for row in rows)


def test_no_command_shows_the_password(where: dict[str, str], url: str) -> None:
    share(url, LLAMA, 1)
    for command in (
        ["config", "show"],
        ["config", "show", "--json"],
        ["config", "check"],
        ["stats"],
        ["stats", "--json"],
        ["stats", "--prometheus"],
        ["ls"],
        ["ls", "--json"],
        ["ls", "--by", "namespace"],
        ["check"],
        ["check", "--json"],
        ["clear", "--yes"],
    ):
        done = done_here(*command, **where)
        assert done.returncode == 0, done.stderr
        assert "hunter2" not in done.stdout + done.stderr
    assert masked(url) in pagoda("config", "show", **where).stdout
    assert answer("config", "show", **where)["options"]["remote"]["value"] == [
        masked(url)
    ]  # type: ignore[index]


def test_stats_ask_how_full_it_is(where: dict[str, str], url: str) -> None:
    (found,) = answer("stats", **where)["remotes"]  # type: ignore[misc]
    assert found["tier"] == "redis"
    assert found["address"] == masked(url)
    assert found["error"] == ""
    assert found["used_bytes"] > 0
    assert found["limit_bytes"] is None
    shown = done_here("stats", **where).stdout
    assert "remote tiers" in shown
    assert "answers" in shown
    text = done_here("stats", "--prometheus", **where).stdout
    assert (
        '# TYPE pagoda_remote_reachable gauge\npagoda_remote_reachable{tier="redis"} 1.0\n'
        in text
    )
    assert 'pagoda_remote_used_bytes{tier="redis"} ' in text
    assert "limit_bytes" not in text


def test_ls_counts_what_is_there_and_names_what_this_machine_knows(
    where: dict[str, str], shm_root: Path, url: str
) -> None:
    put(host(shm_root), LLAMA, range(32))
    share(url, LLAMA, 3)
    share(url, QWEN, 1)
    rows = answer("ls", "--by", "namespace", **where)["namespaces"]
    assert [
        (row["tier"], row["model"], row["chunks"], row["tokens"]) for row in rows
    ] == [  # type: ignore[attr-defined]
        ("host", "llama kv_dtype=bfloat16", 2, 32),
        ("redis", "llama kv_dtype=bfloat16", 3, None),
        ("redis", "(not named)", 1, None),
    ]
    (only,) = answer(
        "ls", "--by", "namespace", "--namespace", QWEN.root.hex()[:12], **where
    )["namespaces"]  # type: ignore[misc]
    assert only["chunks"] == 1
    found = answer("ls", "--model", "llama", **where)
    assert found["total"] == 2
    assert found["remotes"] == [
        {"tier": "redis", "namespace": LLAMA.root.hex(), "chunks": 3}
    ]
    assert "redis: 4 more chunks" in done_here("ls", **where).stderr
    assert "(not named)" in done_here("ls", "--by", "namespace", **where).stdout


def test_explain_goes_on_where_the_host_tier_ends(
    where: dict[str, str], shm_root: Path, url: str
) -> None:
    put(host(shm_root), LLAMA, range(32))
    share(url, LLAMA, 3)
    tokens = " ".join(map(str, range(80)))
    found = answer("explain", "--tokens", "-", stdin=tokens, **where)
    by_tier = [
        (one["tier"], one["num_tokens"], one["reason"])
        for one in found["answers"]
    ]  # type: ignore[attr-defined]
    assert by_tier == [
        ("host", 32, "absent"),
        ("redis", 48, "absent"),
        ("all", 48, "absent"),
    ]
    where["PAGODA_REMOTE"] = dead()
    found = answer("explain", "--tokens", "-", stdin=tokens, code=1, **where)
    assert [one["tier"] for one in found["answers"]] == ["host"]  # type: ignore[attr-defined]
    assert list(found["failed"]) == ["dead"]  # type: ignore[call-overload]


@pytest.mark.slow
def test_explain_asks_the_neighbours_too(
    where: dict[str, str], shm_root: Path
) -> None:
    put(host(shm_root / "here"), LLAMA, range(32))
    tokens = " ".join(map(str, range(80)))
    with pagoda_server(shm_root / "there", "--host-size", "4MiB") as neighbour:
        url = f"{neighbour.url}?password_file={neighbour.root / 'token'}"
        client = Client(neighbour.url, (neighbour.root / "token").read_text())
        for position, key in enumerate(
            chunk_keys(list(range(64)), LLAMA.root, CHUNK)
        ):
            value = value_of(LLAMA.root, key, position, payload_of(1, position))
            assert client.put(LLAMA.root, key, value).status == 201
        where |= {
            "PAGODA_HOST_PATH": str(shm_root / "here"),
            "PAGODA_REMOTE": "",
            "PAGODA_PEERS": url,
        }
        found = answer("explain", "--tokens", "-", stdin=tokens, **where)
        by_tier = [
            (one["tier"], one["num_tokens"], one["reason"])
            for one in found["answers"]
        ]  # type: ignore[attr-defined]
        name = f"peers 127.0.0.1:{neighbour.port}"
        assert by_tier == [
            ("host", 32, "absent"),
            (name, 64, "absent"),
            ("all", 64, "absent"),
        ]
        done = done_here("ls", PAGODA_REMOTE=url.replace("?", "?server=pagoda&"))
        assert done.stderr.endswith(
            "refuses: its chunks are that machine's: run pagoda ls there\n"
        )
        neighbour.kill()
        found = answer("explain", "--tokens", "-", stdin=tokens, code=1, **where)
    assert [one["tier"] for one in found["answers"]] == ["host"]  # type: ignore[attr-defined]
    assert list(found["failed"]) == [name]  # type: ignore[call-overload]
    found = answer(
        "explain", str(shm_root / "here"), "--tokens", "-", stdin=tokens, **where
    )
    assert [one["tier"] for one in found["answers"]] == ["host"]  # type: ignore[attr-defined]
    assert not found["failed"]


def test_clear_reaches_every_tier(
    where: dict[str, str], shm_root: Path, url: str
) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, range(32))
    share(url, LLAMA, 3)
    share(url, QWEN, 2)
    found = answer("clear", "--yes", **where)
    assert found["cleared"] == 7
    assert found["failed"] == {}
    assert [(store["tier"], store["chunks"]) for store in found["stores"]] == [
        ("host", 2),
        ("redis", 5),
    ]  # type: ignore[attr-defined]
    assert (
        admin.gauges(ledger)["ready"]
        == count(url, LLAMA)
        == count(url, QWEN)
        == 0
    )


def test_clear_takes_one_namespace_only(
    where: dict[str, str], shm_root: Path, url: str
) -> None:
    put(host(shm_root), LLAMA, range(32))
    mine = LLAMA.with_(salt="mine")
    theirs = LLAMA.with_(salt="theirs")
    for namespace in (LLAMA, mine, theirs):
        share(url, namespace, 2)
    other = url.replace("prefix=", "prefix=other-")
    share(other, mine, 1)
    assert (
        answer("clear", "-y", "--namespace", mine.root.hex()[:16], **where)[
            "cleared"
        ]
        == 2
    )
    done = done_here("clear", "-y", "--model", "llama", **where)
    assert done.returncode == 0
    assert "1 namespace(s) have no model name on this machine" in done.stderr
    assert [count(url, namespace) for namespace in (LLAMA, mine, theirs)] == [
        0,
        0,
        2,
    ]
    assert count(other, mine) == 1
    assert "no namespace begins so" in refused(
        "clear", "-y", "--namespace", "0" * 64, **where
    )


def test_a_directory_is_that_directory_alone(
    where: dict[str, str], shm_root: Path, url: str
) -> None:
    put(host(shm_root), LLAMA, range(32))
    share(url, LLAMA, 2)
    assert answer("clear", "-y", shm_root, **where)["cleared"] == 2
    assert answer("stats", shm_root, **where)["remotes"] == []
    assert count(url, LLAMA) == 2


def test_the_question_says_that_it_is_for_all_machines() -> None:
    from pagoda_tools.cli.clear import _question

    asked = _question("ALL chunks", [Path("/x")], [parse("redis://:hunter2@h")])
    assert (
        asked
        == "Clear ALL chunks in 1 store(s) and, for all machines, in redis://:***@h?"
    )


def dead() -> str:
    return f"redis://:hunter2@127.0.0.1:{free_port()}?name=dead"


@pytest.mark.parametrize(
    ("command", "place"),
    [
        (["clear", "--yes"], "not cleared: "),
        (["ls"], "not listed: "),
        (["ls", "--by", "namespace"], "not listed: "),
        (["stats"], "dead ("),
        (["stats", "--prometheus"], "dead ("),
        (["check"], "dead ("),
        (["config", "check"], "dead ("),
    ],
)
def test_a_tier_that_fails_is_named_and_the_others_are_served(
    where: dict[str, str], url: str, command: list[str], place: str
) -> None:
    share(url, LLAMA, 1)
    gone = dead()
    where["PAGODA_REMOTE"] = f"{gone},{url}"
    done = done_here(*command, **where)
    assert done.returncode == 1
    assert place in done.stderr
    assert masked(gone) in done.stderr
    assert "check that it runs there" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if command[0] != "config":
        assert "redis" in done.stdout + done.stderr
    if command[0] == "clear":
        assert count(url, LLAMA) == 0
    if "--prometheus" in command:
        assert done.stdout.count("# TYPE pagoda_remote_reachable gauge") == 1
        assert 'pagoda_remote_reachable{tier="dead"} 0' in done.stdout


def test_json_has_the_failures_too(where: dict[str, str]) -> None:
    where["PAGODA_REMOTE"] = gone = dead()
    for command, key in ((["clear", "-y"], "failed"), (["ls"], "failed")):
        assert list(answer(*command, code=1, **where)[key]) == [masked(gone)]  # type: ignore[call-overload]
    assert (
        "check that it runs there"
        in answer("stats", code=1, **where)["remotes"][0]["error"]
    )  # type: ignore[index]
    assert answer("check", code=1, **where)["ok"] is False
    done = done_here("config", "check", "--json", **where)
    assert done.returncode == 1
    assert "dead (" in json.loads(done.stdout)["troubles"][0]


def test_a_name_that_only_the_dead_tier_may_know_is_not_called_wrong(
    where: dict[str, str],
) -> None:
    where["PAGODA_REMOTE"] = dead()
    done = done_here("clear", "-y", "--namespace", "0" * 64, **where)
    assert done.returncode == 1
    assert "not cleared" in done.stderr


def test_wrong_passwords_and_missing_ones(
    where: dict[str, str], url: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")
    bare = url.replace(":hunter2@", "")
    for remote, code in (
        (f"{bare}&password_file={secret}", 0),
        (bare, 1),
        (url.replace("hunter2", "hunter3"), 1),
        (f"{bare}&password_file={tmp_path / 'none'}", 1),
    ):
        done = done_here("config", "check", **{**where, "PAGODA_REMOTE": remote})
        assert done.returncode == code, done.stderr
        assert "hunter" not in done.stdout + done.stderr
        assert code == 0 or done.stderr.count("\n") == 1
    assert "cannot be read" in done.stderr


def test_a_server_that_stands_still_is_waited_for_no_longer_than_said(
    where: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda_tools.cli.remote_stores.PATIENCE_SECONDS", 0.5)
    from pagoda_tools.cli.remote_stores import pinged

    with redis_server() as server:
        server.stop()
        patience = Patience(10)
        (asked,) = pinged([parse(f"{server.url}?deadline=100ms")])
        assert not patience.ended, patience.said()
        server.cont()
    assert "no answer within 0.5 s" in asked.trouble


def test_a_codec_that_is_not_installed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagoda_tools.cli.remote_stores import pinged

    specs = [parse(f"{url}&codec=raw"), parse(f"{url}&codec=zstd")]
    assert [asked.trouble for asked in pinged(specs)] == ["", ""]
    monkeypatch.setitem(sys.modules, "zstandard", None)
    raw, zstd = pinged(specs)
    assert raw.trouble == ""
    assert "pip install 'pagodakv[zstd]'" in zstd.trouble


@pytest.mark.parametrize(
    ("library", "url"), [("redis", "redis://h"), ("obstore", "s3://b")]
)
def test_an_engine_whose_library_is_not_installed(
    library: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagoda_tools.cli.remote_stores import pinged

    for module in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    extra = "objects" if library == "obstore" else library
    assert f"pip install 'pagodakv[{extra}]'" in pinged([parse(url)])[0].trouble


def test_an_object_store_is_checked_listed_and_cleared(shm_root: Path) -> None:
    with nginx_dav() as server:
        url = f"{server.url}/kv/"
        where = {
            "PAGODA_HOST_PATH": str(shm_root),
            "PAGODA_HOST_SIZE": "1MiB",
            "PAGODA_REMOTE": url,
        }
        share(url, LLAMA, 2)
        assert answer("config", "check", **where)["ok"] is True
        assert answer("check", **where)["remotes"] == [
            {
                "tier": "webdav",
                "address": url,
                "trouble": "",
                "nodes": "",
                "warnings": [],
                "in_part": False,
                "answering": "",
            }
        ]
        found = answer("clear", "-y", **where)
        assert found["cleared"] + len(found["failed"]) > 0  # type: ignore[operator,arg-type]


def test_vllm_is_given_no_secret() -> None:
    done = done_here(
        "vllm",
        "--print",
        "--remote",
        "redis://u@h?password_file=/x, s3://b",
        "serve",
        "m",
    )
    assert (
        '"remote": ["redis://u@h?password_file=/x", "s3://b"]' in done.stdout
    ), done.stderr
    for secret in ("redis://u:hunter2@h", "s3://b?secret_access_key=hunter2"):
        said = refused("vllm", "--remote", secret, "serve", "m")
        assert "password_file" in said
        assert "hunter2" not in said
    done = done_here(
        "vllm", "--print", "serve", "m", PAGODA_REMOTE="redis://u:hunter2@h"
    )
    assert done.returncode == 0
    assert "remote" not in done.stdout
