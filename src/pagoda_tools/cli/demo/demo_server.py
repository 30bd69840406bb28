"""The llama-server of the demo, a process of its own (`llama_child`), and the questions to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pagoda_tools.cli import FailedError, UsageError
from pagoda_tools.cli.demo.random_gguf import token_of, vocabulary_tokens
from pagoda_tools.llama_proxy.server_arguments import KEY_VARIABLE

SLOT = 0
# a large model on a slow machine
ANSWER_SECONDS = 600.0
_START_SECONDS = 600.0
_IN_PROCESS = "pagoda_tools.llama_proxy.in_process_server"


@dataclass(frozen=True)
class LlamaAnswer:
    """The answer to one question."""

    prompt_tokens: int
    reused_tokens: int
    seconds: float  # to the first token, with loading
    text: str
    reason: str = ""  # why no more was reused


@dataclass(frozen=True)
class ServerProgram:
    """A llama-server. Immutable."""

    name: str  # for people
    command: tuple[str, ...]  # without its arguments


def server_program() -> ServerProgram:
    """Return the llama-server that the demo starts: a binary, or else that inside `xllamacpp`.

    Raises UsageError if there is none.
    """
    program = shutil.which("llama-server")
    if program is not None:
        return ServerProgram(program, (program,))
    if find_spec("xllamacpp") is None:
        raise UsageError(
            "put llama-server on the PATH, or: pip install 'pagodakv[llamacpp]'"
        )
    # like a script: no module is imported from the working directory
    return ServerProgram("xllamacpp", (sys.executable, "-P", "-m", _IN_PROCESS))


def _free_port() -> int:
    """Return a loopback port without a listener, of those that the system gives to no connection by
    itself.
    """
    while True:
        port = 10000 + secrets.randbelow(20000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def running_server(
    program: ServerProgram,
    arguments: Mapping[str, object],
    log: Path,
    *,
    is_random: bool,
) -> Iterator[DemoServer]:
    """Start a server, wait until it answers, and kill it at the end. What it says is in `log`.

    Raises FailedError with what it said if it does not start.
    """
    key = secrets.token_urlsafe(16)
    port = _free_port()
    listen = {"--host": "127.0.0.1", "--port": port}
    pairs = {**arguments, **listen}.items()
    command = [
        *(sys.executable, "-m", "pagoda_tools.cli.demo.llama_child"),
        *(str(os.getpid()), *program.command),
        *(str(word) for pair in pairs for word in pair),
    ]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ctrl-C reaches all processes of the terminal's group
            start_new_session=True,
            # an argument would be seen by others
            env={**os.environ, KEY_VARIABLE: key},
        )
    try:
        server = DemoServer(port, key, is_random=is_random)
        if not server.is_ready(process):
            lines = log.read_text(errors="replace").splitlines()
            said = [line for line in lines if "error" in line.lower()] or lines
            why = said[-1].strip() if said else "it said nothing"
            raise FailedError(f"llama-server does not start: {why}")
        yield server
    finally:
        process.kill()
        process.wait()


class DemoServer:
    """A running server, and the questions of the demo to it."""

    def __init__(self, port: int, key: str, *, is_random: bool) -> None:
        self.port = port
        self.key = key
        self.url = f"http://127.0.0.1:{port}"
        self._is_random = is_random

    def is_ready(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until it answers; return False if its process ended. Raises FailedError."""
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until:
            if process.poll() is not None:
                return False
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                # only the server that was started knows the key
                self._posted("/tokenize", {"content": "a"}) as answer,
            ):
                if answer.status == 200:
                    return True
            time.sleep(0.05)
        raise FailedError(f"llama-server did not start in {_START_SECONDS:.0f} s")

    def tokenize(self, text: str, *, is_start: bool) -> list[int]:
        """Return the tokens of a text. Raises FailedError."""
        body = {"content": text, "add_special": is_start}
        try:
            with self._posted("/tokenize", body) as answer:
                tokens: list[int] = json.loads(answer.read())["tokens"]
        except _TROUBLES as trouble:
            raise _no_answer(trouble) from None
        return tokens

    def ask(
        self, tokens: Sequence[int], new_tokens: int, *, reuse: bool
    ) -> LlamaAnswer:
        """Generate greedily after `tokens`; `reuse`: start from what the slot holds.

        Raises FailedError.
        """
        body: dict[str, object] = {
            "prompt": list(tokens),
            "id_slot": SLOT,
            "n_predict": new_tokens,
            "temperature": 0,
            "cache_prompt": reuse,
            "ignore_eos": True,
            "stream": True,
        }
        if self._is_random:
            body["logit_bias"] = _ONLY_LETTERS
        began = time.perf_counter()
        try:
            with self._posted("/completion", body) as answer:
                return _streamed(answer, len(tokens), began)
        except _TROUBLES as trouble:
            raise _no_answer(trouble) from None

    @contextlib.contextmanager
    def _posted(
        self, path: str, body: object
    ) -> Iterator[http.client.HTTPResponse]:
        link = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=ANSWER_SECONDS
        )
        headers = {"Authorization": f"Bearer {self.key}"}
        with contextlib.closing(link):
            link.request("POST", path, json.dumps(body), headers)
            yield link.getresponse()


_TROUBLES = (OSError, http.client.HTTPException, KeyError, ValueError)


def _no_answer(trouble: Exception) -> FailedError:
    return FailedError(
        f"llama-server gave no usable answer: {type(trouble).__name__}: {trouble}"
    )


def _streamed(
    answer: http.client.HTTPResponse, prompt_tokens: int, began: float
) -> LlamaAnswer:
    """Read the events of an answer to their end."""
    pieces = []
    seconds = 0.0
    for line in answer:
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise ValueError(event["error"]["message"])
        pieces.append(event["content"])
        if event["content"] and not seconds:
            seconds = time.perf_counter() - began
        if event.get("stop"):
            reused = event["timings"]["cache_n"]
            return LlamaAnswer(prompt_tokens, reused, seconds, "".join(pieces))
    raise ValueError(f"status {answer.status}, and its stream has no end")


_LETTERS = {token_of(letter) for letter in "abcdefghijklmnopqrstuvwxyz "}
# of the random model: other bytes are no whole characters
_ONLY_LETTERS = [
    [token, False]
    for token in range(vocabulary_tokens())
    if token not in _LETTERS
]
