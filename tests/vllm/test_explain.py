"""`pagoda explain --url` beside vLLM's own server: it names the token in which a prompt differs
from a stored one.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shelf import run_here
from tests.vllm import stores
from tests.vllm.conftest import Tiers
from tests.vllm.engines import CHUNK, options
from tests.vllm.models import plain_prompt, words
from tests.vllm.test_server import Server

_CHUNKS = 9
_TOKENS = _CHUNKS * CHUNK + 3
_PLANTED = (
    0,
    1,
    CHUNK - 1,
    CHUNK,
    100,
    200,
    5 * CHUNK - 1,
    5 * CHUNK,
    7 * CHUNK + 1,
    _CHUNKS * CHUNK - 1,
)
_TEMPLATE = "{% for one in messages %}{{ one['content'] }} {% endfor %}t5"


@pytest.fixture
def own(session_shm: Path, tmp_path: Path) -> Tiers:
    """The tiers of this server alone."""
    return Tiers(session_shm / "explained", tmp_path / "disk")


@pytest.fixture
def server(llama: Path, logs: Path, own: Tiers) -> Iterator[Server]:
    """A server with a chat template, on tiers of its own."""
    one = Server(
        logs / "explained.log", options(llama, chat_template=_TEMPLATE), own
    )
    yield one
    one.kill()


@pytest.mark.slow
def test_the_token_that_differs_is_named(
    server: Server, own: Tiers, tmp_path: Path
) -> None:
    """Text, chat and a tenant's prompt that vLLM stored, each beside prompts that share its
    beginning.
    """
    stored = plain_prompt(7000, _TOKENS)
    chat_prompt = plain_prompt(7001, 4 * CHUNK + 1)
    server.wait_up()
    _ask(server, "/v1/completions", prompt=words(stored))
    # shares two chunks and a half with it: not the nearest of most
    _ask(
        server,
        "/v1/completions",
        prompt=words([*stored[: 2 * CHUNK + 30], *plain_prompt(7002, 3 * CHUNK)]),
    )
    stores.wait_ready(own.host, _CHUNKS + 3)
    _ask(
        server,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": words(chat_prompt)}],
    )
    stores.wait_ready(own.host, _CHUNKS + 3 + 4)
    stores.wait_until(lambda: _logged(own.host) == 3, "three logged prompts")

    named = [
        _explain(server, own, "--text", words(_changed(stored, at)))
        for at in _PLANTED
    ]
    right = [
        near["token"] == at
        for near, at in zip((_near(one) for one in named), _PLANTED, strict=True)
    ]
    print(f"the planted token was named {sum(right)} of {len(_PLANTED)} times")
    assert all(right), named
    for said, at in zip(named, _PLANTED, strict=True):
        assert said["asked_tokens"] == _TOKENS
        last = said["answers"][-1]
        assert last["num_tokens"] == at // CHUNK * CHUNK
        assert last["chunk"] == at // CHUNK
        assert last["reason"] == "absent"
        assert _near(said)["stored_id"] == stored[at]
        assert _near(said)["tiers"][0] == "host"

    chat = tmp_path / "messages.json"
    chat.write_text(
        json.dumps(
            [{"role": "user", "content": words(_changed(chat_prompt, 130))}]
        )
    )
    assert _near(_explain(server, own, "--messages", str(chat)))["token"] == 130

    code, shown, _ = run_here(
        "explain",
        str(own.host),
        "--text",
        words(_changed(stored, 200)),
        "--url",
        server.url,
    )
    assert code == 0
    assert "it differs at token 200:" in shown
    assert max(map(len, shown.splitlines())) <= 80, shown

    # what another tenant stored: the field is named, the salt is not shown
    theirs = plain_prompt(7003, 3 * CHUNK)
    _ask(
        server,
        "/v1/completions",
        prompt=words(theirs),
        cache_salt="salt-of-a-tenant",
    )
    stores.wait_until(lambda: _logged(own.host) == 4, "four logged prompts")
    said = _explain(server, own, "--text", words(theirs))
    ours = next(
        one for one in said["answers"] if one["reason"] == "other_namespace"
    )
    assert ours["other_fields"] == ["salt"]
    assert "salt-of-a-tenant" not in json.dumps(said)


def _changed(tokens: list[int], at: int) -> list[int]:
    return [*tokens[:at], 300 + (tokens[at] + 1) % 700, *tokens[at + 1 :]]


def _explain(server: Server, own: Tiers, *prompt: str) -> dict[str, Any]:
    code, out, err = run_here(
        "explain", str(own.host), *prompt, "--url", server.url, "--json"
    )
    assert code == 0, err
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def _near(said: dict[str, Any]) -> dict[str, Any]:
    (near,) = said["nearest"]
    assert isinstance(near, dict)
    return near


def _ask(server: Server, path: str, **asked: Any) -> None:
    body = json.dumps(
        {"model": "tiny", "max_tokens": 1, "temperature": 0, **asked}
    ).encode()
    request = urllib.request.Request(
        server.url + path, body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        answer.read()


def _logged(root: Path) -> int:
    from pagoda.cache.prompt_log import logged_prompts

    return sum(len(list(logged_prompts(store))) for store in stores.stores(root))
