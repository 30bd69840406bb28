"""What the commands say of a store of llama.cpp, with a real server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from pagoda.config import Config
from pagoda.connectors.llamacpp import SlotStates
from testbed.llama_servers import LlamaServer, llama_server
from testbed.patience import wait_until
from testbed.tiny_gguf import write_model
from tests.cli.shelf import run_here

KEY = "a-key"
# without spaces, each of which is three tokens; other characters are one
SYSTEM = "You-are-the-guide-of-a-pagoda-with-seven-roofs.-" * 12
BEFORE = 1 + 3  # a token for the beginning, and a space
TEXT = "Each-roof-is-a-little-smaller-than-the-one-below-it.-" * 12


def chat(system: str, question: str) -> dict[str, object]:
    return {
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
        ]
    }


def opened(server: LlamaServer, shm_root: Path) -> SlotStates:
    config = Config(
        chunk_tokens=64,
        host_size=16 << 20,
        host_path=str(shm_root),
        worth_it=False,
    )
    return SlotStates(server.url, server.states, api_key=KEY, config=config)


@contextlib.contextmanager
def stored(
    model: Path, shm_root: Path, prompts: list[dict[str, object]]
) -> Iterator[LlamaServer]:
    """A server, of whose slot the KV of these texts and chats was stored."""
    config = Config(
        chunk_tokens=64,
        host_size=16 << 20,
        host_path=str(shm_root),
        worth_it=False,
    )
    with (
        llama_server(model, key=KEY) as server,
        SlotStates(
            server.url, server.states, api_key=KEY, config=config
        ) as states,
    ):
        for prompt in prompts:
            text = prompt.get("content")
            if text is None:
                text = server.post("/apply-template", **prompt)["prompt"]
            body = {"content": text, "add_special": True}
            tokens = cast("list[int]", server.post("/tokenize", **body)["tokens"])
            states.load(tokens, 0)
            server.complete(tokens)
            assert states.store(tokens, 0)
        yield server


def explained(
    shm_root: Path, server: LlamaServer, *prompt: object
) -> dict[str, object]:
    code, out, err = run_here(
        *("explain", shm_root, "--json", "--url", server.url),
        *prompt,
        OPENAI_API_KEY=KEY,
    )
    assert code == 0, err
    return cast("dict[str, object]", json.loads(out))


def only(found: dict[str, object], name: str) -> dict[str, object]:
    (one,) = cast("list[dict[str, object]]", found[name])
    return one


def test_a_prompt_is_explained_with_the_tokens_of_the_server(
    models: Path, shm_root: Path, tmp_path: Path
) -> None:
    path = write_model(models)
    question = chat(SYSTEM, "Why is it so?")
    with stored(path, shm_root, [{"content": TEXT}, question]) as server:
        changed = f"{TEXT[:299]}X{TEXT[300:]}"
        # prompts are noted by another thread
        wait_until(
            lambda: explained(shm_root, server, "--text", changed)["nearest"]
        )
        found = explained(shm_root, server, "--text", changed)
        answer = only(found, "answers")
        assert answer["num_tokens"] == (BEFORE + 299) // 64 * 64
        assert answer["model"] == "gguf tiny kv_dtype=f16"
        near = only(found, "nearest")
        assert near["token"] == BEFORE + 299
        assert near["token_id"] == 3 + ord("X")
        assert near["stored_id"] == 3 + ord(TEXT[299])

        # a date in the system's text, and a field that only the template knows
        request = chat(f"{SYSTEM[:200]}Monday{SYSTEM[206:]}", "Why is it so?")
        request["chat_template_kwargs"] = {"nobody_knows": True}
        file = tmp_path / "request.json"
        file.write_text(json.dumps(request))
        wait_until(
            lambda: explained(shm_root, server, "--messages", file)["nearest"]
        )
        near = only(explained(shm_root, server, "--messages", file), "nearest")
        assert near["token_id"] == 3 + ord("M")
        file.write_text(json.dumps(question["messages"]))
        answer = only(explained(shm_root, server, "--messages", file), "answers")
        assert answer["reason"] is None


def test_the_answer_is_about_the_model_of_the_server(
    models: Path, shm_root: Path, tmp_path: Path
) -> None:
    with stored(write_model(models), shm_root, [{"content": TEXT}]) as server:
        url = server.url
        ask = ("explain", shm_root, "--url", url, "--text", TEXT)
        code, _, err = run_here(*ask)
        assert code == 1
        assert "give its key in OPENAI_API_KEY" in err
    # without a name of its own it has that of its file
    whole = write_model(tmp_path)
    other = tmp_path / "other.gguf"
    other.write_bytes(
        whole.read_bytes().replace(b"general.name", b"general.mane", 1)
    )
    with stored(other, shm_root, [{"content": TEXT}]) as server:
        answer = only(explained(shm_root, server, "--text", TEXT), "answers")
        assert str(answer["model"]).startswith("gguf other ")
        # where its file cannot be read, nobody knows its name
        other.rename(tmp_path / "moved")
        found = explained(shm_root, server, "--text", TEXT)
        models_ = {
            str(row["model"]).partition(" kv")[0]
            for row in cast("list[dict[str, object]]", found["answers"])
        }
        assert models_ == {"gguf tiny", "gguf other"}


@pytest.mark.slow
def test_where_a_model_with_windows_goes_on(models: Path, shm_root: Path) -> None:
    key = {"OPENAI_API_KEY": KEY}
    model = write_model(models, "gemma3")
    with stored(model, shm_root, [{"content": TEXT}]) as server:
        ask = ("explain", shm_root, "--url", server.url, "--text")
        prompts = [f"{TEXT}Why?", TEXT[:-1], f"{TEXT[:200]}X{TEXT[200:]}"]
        with opened(server, shm_root) as states:
            for text in prompts:
                body = {"content": text, "add_special": True}
                tokens = server.post("/tokenize", **body)["tokens"]
                found = states.find(cast("list[int]", tokens)).num_tokens
                answer = explained(shm_root, server, "--text", text)
                endings = cast("dict[str, int]", answer["endings"])
                assert list(endings.values()) == [found]
        code, out, err = run_here(*ask, prompts[0], **key)
        assert code == 0, err
        assert "an ending of " in out
        # three chunks are there, but not what the windows need after them
        code, out, err = run_here(*ask, prompts[-1], **key)
        assert code == 0, err
        assert " 192 " in out
        assert "no ending is stored near the end" in out
    # attention goes on after every chunk
    with stored(write_model(models), shm_root, [{"content": TEXT}]) as server:
        _, out, _ = run_here(
            *("explain", shm_root, "--url", server.url),
            *("--text", TEXT, "--model", "gguf tiny"),
            **key,
        )
        assert out.count("gguf tiny") == 2


@pytest.mark.parametrize("command", ["stats", "top"])
def test_hits_are_shown_by_model(
    command: str, models: Path, shm_root: Path
) -> None:
    texts = [{"content": text} for text in (TEXT, f"{TEXT}Why?")]
    with stored(write_model(models), shm_root, texts):
        once = ["--once"] if command == "top" else []
        code, out, err = run_here(command, shm_root, *once, "--json")
        assert code == 0, err
        assert "gguf tiny" in out
        code, out, err = run_here(command, shm_root, *once)
    assert code == 0, err
    row = next(line for line in out.splitlines() if line.startswith("gguf tiny "))
    whole = (BEFORE + len(TEXT)) // 64 * 64
    assert f"{whole:,}" in row
