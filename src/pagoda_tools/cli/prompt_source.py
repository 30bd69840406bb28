"""Reads the prompt of a command: token ids, or text or chat messages with a tokenizer or a server
of vLLM or llama.cpp.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast
from urllib.parse import urlsplit

from pagoda_tools.cli import FailedError, UsageError

if TYPE_CHECKING:
    import http.client

    from transformers import PreTrainedTokenizerBase

    from pagoda.keys import TokenIds

Json: TypeAlias = "Mapping[str, object]"

_ASK_SECONDS = 30.0  # the time of one question to a server
_MOST_BYTES = 64 << 20  # the largest answer
_CHECK = "check that it is a server of vLLM or llama.cpp"
# of a chat request, what vLLM's /tokenize takes and templates use
_CHAT = (
    "messages",
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)


class ServedModel(NamedTuple):
    """The model of a server that was asked."""

    name: str | None
    """As the connector of the engine has it; None: not known."""
    may_need_endings: bool = False
    """Its KV can be continued only at some numbers of tokens."""


def read_prompt(
    tokens: str | None,
    text: str | None,
    messages: str | None,
    tokenizer: str | None,
    url: str | None,
    api_key_file: Path | None,
) -> tuple[TokenIds, ServedModel | None]:
    """Return the token ids of the prompt that the options name, and the model of the server, if
    there is one.

    Raises UsageError for wrong use, FailedError if a server does not answer.
    """
    given = [("--tokens", tokens), ("--text", text), ("--messages", messages)]
    named = [name for name, value in given if value is not None]
    if not named:
        raise UsageError(
            "the prompt is missing: --tokens FILE, --text TEXT or --messages FILE"
        )
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)}: give only one of them")
    if tokens is not None:
        if tokenizer or url:
            raise UsageError(
                "--tokens are token ids already: leave --tokenizer and --url out"
            )
        return read_tokens(tokens), None
    if bool(tokenizer) == bool(url):
        raise UsageError(
            f"{named[0]} needs either --tokenizer PATH, or --url URL of a server"
        )
    chat = None if messages is None else _read_messages(messages)
    words = _read("--text", "-") if text == "-" else text
    ids: TokenIds
    model = None
    if url:
        ids, model = _ask_server(url, words, chat, api_key_file)
    else:
        ids = (
            text_tokenizer(str(tokenizer)).ids(str(words))
            if chat is None
            else _chat_ids(str(tokenizer), chat)
        )
    if not len(ids):
        raise UsageError(f"{named[0]}: has no tokens")
    return ids, model


def read_tokens(source: str | None) -> TokenIds:
    """Return the given token ids, those in a file or, for "-", in stdin. UsageError: None, or not
    token ids.
    """
    from pagoda.keys import as_token_ids

    if source is None:
        raise UsageError(
            "--tokens FILE is missing: the prompt's token ids (- = stdin)"
        )
    listed = not source.strip("[]0123456789, ") and not os.path.exists(source)
    option, text = (
        ("--tokens", source)
        if listed
        else (f"--tokens {source}", _read("--tokens", source))
    )
    try:
        if text.lstrip().startswith("["):
            ids = json.loads(text)
        else:
            ids = [int(word) for word in text.replace(",", " ").split()]
        found = as_token_ids(ids)
    except ValueError as trouble:
        raise UsageError(
            f"{option}: not a list of token ids: {trouble}"
        ) from None
    if not len(found):
        raise UsageError(f"{option}: has no token ids")
    return found


def _read_messages(source: str) -> Json:
    """Return a chat request, or a list of messages as one."""
    text = _read("--messages", source)
    try:
        found = json.loads(text)
    except ValueError as trouble:
        raise UsageError(f"--messages {source}: not JSON: {trouble}") from None
    asked = found if isinstance(found, dict) else {"messages": found}
    listed = asked.get("messages")
    right = isinstance(listed, list) and all(
        isinstance(one, dict) and "role" in one for one in listed
    )
    if not right or not listed:
        raise UsageError(
            f'--messages {source}: not chat messages, a list of {{"role": ..., "content": ...}}'
        )
    return asked


def _read(option: str, source: str) -> str:
    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text()
    except (OSError, UnicodeDecodeError) as trouble:
        reason = getattr(trouble, "strerror", None) or "not text"
        raise UsageError(f"{option} {source}: cannot be read: {reason}") from None


# ---- a tokenizer


class TextTokenizer(NamedTuple):
    """A tokenizer, as two functions. Both raise UsageError."""

    ids: Callable[[str], Sequence[int]]
    """Returns the ids of a text, with the special tokens that engines add."""
    text: Callable[[Sequence[int]], str]
    """Returns the text of some ids, with the special tokens."""


def text_tokenizer(tokenizer: str) -> TextTokenizer:
    """Load a model's tokenizer. Raises UsageError."""
    cut: Callable[[str], Sequence[int]]
    join: Callable[[Sequence[int]], str]
    with _explained(tokenizer):
        if Path(tokenizer).is_file():
            from tokenizers import Tokenizer

            single = Tokenizer.from_file(tokenizer)
            cut = lambda text: single.encode(text).ids  # noqa: E731
            join = lambda ids: single.decode(  # noqa: E731
                list(ids), skip_special_tokens=False
            )
        else:
            whole = _of_model(tokenizer)
            cut = lambda text: list(whole(text)["input_ids"])  # noqa: E731
            join = lambda ids: str(whole.decode(list(ids)))  # noqa: E731
    explained = _explained(tokenizer)
    return TextTokenizer(explained(cut), explained(join))


def _chat_ids(tokenizer: str, chat: Json) -> Sequence[int]:
    """Return the ids of chat messages, by the template of a model's tokenizer. Raises
    UsageError.
    """
    kwargs = chat.get("chat_template_kwargs")
    options = dict(kwargs) if isinstance(kwargs, dict) else {}
    for name, usual in (
        ("tools", None),
        ("add_generation_prompt", True),
        ("continue_final_message", False),
    ):
        options[name] = chat.get(name, usual)
    with _explained(tokenizer):
        turns = cast("list[dict[str, str]]", chat["messages"])
        ids = _of_model(tokenizer).apply_chat_template(
            turns, tokenize=True, return_dict=False, **options
        )
    return cast("list[int]", ids)


def _of_model(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's directory, or of the directory of a file."""
    from transformers import AutoTokenizer

    directory = Path(path).parent if Path(path).is_file() else path
    return cast(
        "PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(str(directory))
    )


@contextmanager
def _explained(tokenizer: str) -> Iterator[None]:
    """Turn every error of a tokenizer into a UsageError."""
    try:
        yield
    except ImportError as missing:
        raise UsageError(
            f"--tokenizer: {missing}: pip install 'pagodakv[transformers]', or give --url"
        ) from None
    except Exception as trouble:  # noqa: BLE001
        # libraries and templates raise any class
        first = str(trouble).strip().partition("\n")[0]
        raise UsageError(
            f"--tokenizer {tokenizer}: {first or type(trouble).__name__}; "
            "name a model's directory, or its tokenizer.json"
        ) from None


# ---- a server of vLLM or llama.cpp


def _ask_server(
    url: str, text: str | None, chat: Json | None, key_file: Path | None
) -> tuple[TokenIds, ServedModel]:
    """Return a server's ids for the prompt, and its model."""
    key = _api_key(key_file)
    listed = _ask(url, key, "GET", "/v1/models").get("data")
    rows = listed if isinstance(listed, list) else []
    models = [one for one in rows if isinstance(one, dict)]
    # the others are adapters
    models = [one for one in models if not one.get("parent")]
    if not models or not isinstance(models[0].get("id"), str):
        raise FailedError(f"{url}: /v1/models names no model; {_CHECK}")
    from pagoda.keys import as_token_ids

    if models[0].get("owned_by") == "llamacpp":
        model = _llama_model(url, key)
        return as_token_ids(_llama_ids(url, key, text, chat)), model
    from pagoda.connectors.vllm.identity.engine_namespace import model_name

    question: dict[str, object] = {"model": models[0]["id"], "prompt": text}
    if chat is not None:
        del question["prompt"]
        for name in _CHAT:
            if chat.get(name) is not None:
                question[name] = chat[name]
    root = str(models[0].get("root") or models[0]["id"])
    ids = as_token_ids(_tokenized(url, key, question))
    return ids, ServedModel(model_name(root))


def _llama_model(url: str, key: str) -> ServedModel:
    """Return the model of a llama-server; its name is None if its file cannot be read here."""
    from pagoda.connectors.identity.gguf_header import (
        may_need_endings,
        namespace_model,
        read_gguf_header,
    )

    said = _ask(url, key, "GET", "/props")
    path = said.get("model_path")
    if said.get("role") == "router" or not isinstance(path, str) or not path:
        raise FailedError(
            f"{url}: is a router of several models: give the URL of the server of one"
        )
    try:
        values = read_gguf_header(Path(path)).values
    except OSError:
        return ServedModel(None)
    name = namespace_model(Path(path), values)
    return ServedModel(name, may_need_endings(values))


def _llama_ids(
    url: str, key: str, text: str | None, chat: Json | None
) -> list[int]:
    """Return the ids that a llama-server makes of a prompt or a chat request."""
    if chat is not None:
        found = _ask(url, key, "POST", "/apply-template", chat).get("prompt")
        if not isinstance(found, str):
            raise FailedError(
                f"{url}: /apply-template returned no text; {_CHECK}"
            )
        text = found
    return _tokenized(url, key, {"content": text, "add_special": True})


def _tokenized(url: str, key: str, question: Json) -> list[int]:
    ids = _ask(url, key, "POST", "/tokenize", question).get("tokens")
    if not isinstance(ids, list):
        raise FailedError(f"{url}: /tokenize returned no tokens; {_CHECK}")
    return ids


def _api_key(file: Path | None) -> str:
    """Return the key in the file, or without a file in the variable OPENAI_API_KEY; empty: no
    key.
    """
    key = (
        os.environ.get("OPENAI_API_KEY", "")
        if file is None
        else _read("--api-key-file", str(file))
    )
    key = key.strip()
    if not key.isprintable() or not key.isascii():
        raise UsageError(
            "the API key must be one ASCII line: see --api-key-file, OPENAI_API_KEY"
        )
    return key


def _ask(
    url: str, key: str, method: str, path: str, question: Json | None = None
) -> Json:
    """Return the JSON answer of a server. Does not follow redirects: they would send the key
    elsewhere.
    """
    import http.client

    link, base = _connection(url)
    until = time.monotonic() + _ASK_SECONDS
    headers = {"Accept": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )
    body = None if question is None else json.dumps(question).encode()
    try:
        link.request(
            method,
            base + path,
            body,
            headers | ({"Content-Type": "application/json"} if body else {}),
        )
        answer = link.getresponse()
        content = b""
        # only arrived bytes: a slow server meets the deadline
        while piece := answer.read1(1 << 16):
            content += piece
            if len(content) > _MOST_BYTES or time.monotonic() > until:
                raise FailedError(
                    f"{url}{path}: the answer is too long or too slow"
                )
    except (OSError, UnicodeError, http.client.HTTPException) as trouble:
        why = (
            getattr(trouble, "strerror", None)
            or str(trouble)
            or type(trouble).__name__
        )
        raise FailedError(
            f"{url}: no answer ({why}); check that a server runs there"
        ) from None
    finally:
        link.close()
    if answer.status in (401, 403):
        raise FailedError(
            f"{url}: refused ({answer.status}): give its key in OPENAI_API_KEY or with "
            "--api-key-file"
        )
    if answer.status != 200:
        said = " ".join(content[:200].decode(errors="replace").split())
        raise FailedError(f"{url}{path}: answered {answer.status}: {said}")
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise FailedError(f"{url}{path}: the answer is not JSON; {_CHECK}")
    return found


def _connection(url: str) -> tuple[http.client.HTTPConnection, str]:
    """Return a connection to the server, and the path before its own paths."""
    import http.client
    import ssl

    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as trouble:
        raise UsageError(
            f"--url: {trouble}: give it as http://HOST:PORT"
        ) from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError(
            "--url: write only http://HOST:PORT, and give a key with --api-key-file"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--url {url}: give it as http://HOST:PORT")
    base = parts.path.rstrip("/").removesuffix("/v1")
    if parts.scheme == "http":
        return http.client.HTTPConnection(
            parts.hostname, port, timeout=_ASK_SECONDS
        ), base
    context = ssl.create_default_context()
    return http.client.HTTPSConnection(
        parts.hostname, port, timeout=_ASK_SECONDS, context=context
    ), base
