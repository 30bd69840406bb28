"""Runs the demo with llama.cpp: a llama-server answers two questions about one document, it is
started again, and answers them once more with what `SlotStates` stored.

`demo_command` calls it; it calls `demo_server` for the servers.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pagoda_tools.cli import FailedError, UsageError
from pagoda_tools.cli.demo.demo_prompts import QUESTIONS, documents
from pagoda_tools.cli.demo.demo_run import interrupted_by_signals
from pagoda_tools.cli.demo.demo_server import (
    ANSWER_SECONDS,
    SLOT,
    DemoServer,
    LlamaAnswer,
    ServerProgram,
    running_server,
    server_program,
)
from pagoda_tools.cli.demo.own_directories import own_directory
from pagoda_tools.cli.demo.random_gguf import (
    RandomModel,
    write_random_model,
)

if TYPE_CHECKING:
    from pagoda.connectors.llamacpp import SlotStates

SERVERS = ("first", "restarted")
_CHUNK_TOKENS = 256
_QUESTION_TOKENS = 256  # the most of a question, with its answer
_LETTERS_A_TOKEN = 16  # so many characters of text are enough for a token
_FLUSH_SECONDS = 120.0
_LEAST_ROOM = 64 << 20
# endings of models with windows and recurrent layers, of which the header does not say the size
_ROOM_OF_A_MODEL = 512 << 20


@dataclass(frozen=True)
class LlamaSize:
    """The sizes of the demo with llama.cpp."""

    # a multiple of the tokens that a server computes at once (512): then both servers compute the
    # question in the same pieces, and its text is the same to the bit
    document_tokens: int = 2048
    new_tokens: int = 48
    random: RandomModel = field(default_factory=RandomModel)


@dataclass(frozen=True)
class LlamaShown:
    """The answers of both servers."""

    program: str  # the server
    model: str
    parameters: int  # of the random model; 0: of a real one
    kind: str  # as `SlotStates.kind`
    answers: dict[str, list[LlamaAnswer]]  # by server
    control_differs: bool  # without the document the text is another

    @property
    def identical(self) -> bool:
        """Whether the restarted server gave the same texts."""
        first, restarted = (
            [answer.text for answer in self.answers[server]] for server in SERVERS
        )
        return first == restarted

    @property
    def was_reused(self) -> bool:
        """Whether the restarted server reused the first question's prompt."""
        return self.answers["restarted"][0].reused_tokens > 0

    @property
    def is_proof(self) -> bool:
        """Whether all was as promised."""
        return self.identical and self.was_reused and self.control_differs

    def ttft(self, server: str) -> float:
        """Seconds to the first token: the mean over the questions, of the restarted server over
        those with reused tokens. NaN if there is none.
        """
        seconds = [
            answer.seconds
            for answer in self.answers[server]
            if server == "first" or answer.reused_tokens
        ]
        return statistics.mean(seconds) if seconds else float("nan")

    def as_json(self) -> dict[str, object]:
        """Return all results as plain values."""
        seconds = {server: self.ttft(server) for server in SERVERS}
        restarted = seconds["restarted"] if self.was_reused else None
        return {
            "engine": "llama.cpp",
            "server": self.program,
            "model": self.model,
            "parameters": self.parameters or None,
            "kind": self.kind,
            "identical": self.identical,
            "controls_differ": self.control_differs,
            "ttft_cold_seconds": seconds["first"],
            "ttft_disk_seconds": restarted,
            "answers": {
                server: [asdict(answer) for answer in answers]
                for server, answers in self.answers.items()
            },
        }


def run_llama_demo(
    size: LlamaSize,
    model: str | None,
    memory_in: Path,
    disk_in: Path,
    step: Callable[[str], None],
) -> LlamaShown:
    """Run both servers with new directories under `memory_in` and `disk_in`, which are always
    removed afterwards.

    `step(what)` is called at each step. Raises UsageError for a model that cannot be read,
    FailedError if a server does not start or its slots cannot be stored, with what it said.
    """
    program = server_program()
    given = None if model is None else _readable(Path(model))
    with (
        interrupted_by_signals(),
        own_directory(memory_in, "states") as states,
        own_directory(disk_in, "disk") as disk,
    ):
        if given is not None:
            path = given.path
            parameters = 0
        else:
            step("writing a random model")
            path = disk.parent / "random.gguf"
            parameters = write_random_model(path, size.random)
        demo = _LlamaDemo(size, program, path, given, states, disk, step)
        return demo.shown(model or "", parameters)


class _Given(NamedTuple):
    """What the header of the user's model says."""

    path: Path
    context_tokens: int
    token_bytes: int  # the most bytes of KV of a token


def _readable(path: Path) -> _Given:
    from pagoda.connectors.identity.gguf_header import read_gguf_header

    try:
        values = read_gguf_header(path).values
    except OSError as trouble:
        why = f"{path}: {trouble.strerror}" if trouble.strerror else str(trouble)
        raise UsageError(
            f"--model {why}: name a GGUF file, the first one of several"
        ) from None
    architecture = values.get("general.architecture")

    def value(name: str) -> int:
        found = values.get(f"{architecture}.{name}")
        return found if isinstance(found, int) else 0

    context = value("context_length")
    if not context:
        raise UsageError(
            f"--model {path}: is not a model of text: it names no context length"
        )
    # no model has more than K and V of 16 bits as wide as what goes through its layers
    token_bytes = 4 * value("block_count") * value("embedding_length")
    return _Given(path.absolute(), context, token_bytes)


class _LlamaDemo:
    """The two servers, one after the other. Not thread-safe."""

    def __init__(
        self,
        size: LlamaSize,
        program: ServerProgram,
        model: Path,
        given: _Given | None,
        states: Path,
        disk: Path,
        step: Callable[[str], None],
    ) -> None:
        self.size = size
        self.program = program
        self.model = model
        self.given = given
        self.states = states
        self.disk = disk
        self.step = step
        self.document_tokens = size.document_tokens
        if given is not None:
            room = given.context_tokens - _QUESTION_TOKENS
            whole = min(room, size.document_tokens) // _CHUNK_TOKENS
            self.document_tokens = whole * _CHUNK_TOKENS
        if self.document_tokens <= 0:
            raise UsageError(
                f"--model {model}: its context is too short for the demo"
            )

    def shown(self, model: str, parameters: int) -> LlamaShown:
        """Ask both servers."""
        answers = {}
        self.step("first: starting llama-server")
        with self._server() as server:
            prompts, alone = self._prompts(server)
            with self._opened(server, "first") as states:
                kind = states.kind
                answers["first"] = self._ask_cold(server, states, prompts)
            self.step("first: control: the question without the document")
            control = server.ask(alone, self.size.new_tokens, reuse=False)
        self.step("restarted: starting llama-server again")
        with (
            self._server() as server,
            self._opened(server, "restarted") as states,
        ):
            answers["restarted"] = self._ask_warm(server, states, prompts)
        return LlamaShown(
            self.program.name,
            model,
            parameters,
            kind,
            answers,
            control.text != answers["first"][0].text,
        )

    def _ask_cold(
        self,
        server: DemoServer,
        states: SlotStates,
        prompts: Sequence[Sequence[int]],
    ) -> list[LlamaAnswer]:
        """Let the server compute everything, and store it."""
        answers = []
        for number, tokens in enumerate(prompts, 1):
            self.step(
                f"first: question {number}: computing {len(tokens):,} tokens"
            )
            answers.append(server.ask(tokens, self.size.new_tokens, reuse=False))
            self.step(f"first: question {number}: storing the slot")
            stored = states.store(tokens, SLOT)
            if not stored:
                raise FailedError(f"nothing was stored: {stored.detail}")
        if not states.cache.flush(_FLUSH_SECONDS):
            raise FailedError("the disk tier did not take the KV in time")
        return answers

    def _ask_warm(
        self,
        server: DemoServer,
        states: SlotStates,
        prompts: Sequence[Sequence[int]],
    ) -> list[LlamaAnswer]:
        """Load what the first server computed, and ask again."""
        answers = []
        for number, tokens in enumerate(prompts, 1):
            self.step(f"restarted: question {number}: loading its KV")
            began = time.perf_counter()
            loaded = states.load(tokens, SLOT)
            loading = time.perf_counter() - began
            answer = server.ask(tokens, self.size.new_tokens, reuse=bool(loaded))
            reason = f"{loaded.reason or ''} {loaded.detail}".strip()
            answers.append(
                LlamaAnswer(
                    answer.prompt_tokens,
                    answer.reused_tokens,
                    loading + answer.seconds,
                    answer.text,
                    reason,
                )
            )
        return answers

    def _prompts(self, server: DemoServer) -> tuple[list[list[int]], list[int]]:
        """Return the tokens of both prompts, and of the first question without the document."""
        text, _ = documents()
        document = server.tokenize(
            text[: self.document_tokens * _LETTERS_A_TOKEN], is_start=True
        )[: self.document_tokens]
        if len(document) < self.document_tokens:
            raise FailedError("the demo's text is too short for this model")
        questions = [
            server.tokenize(question, is_start=False) for question in QUESTIONS
        ]
        alone = server.tokenize(QUESTIONS[0], is_start=True)
        return [[*document, *question] for question in questions], alone

    @contextlib.contextmanager
    def _opened(self, server: DemoServer, name: str) -> Iterator[SlotStates]:
        """Open the cache. Raises FailedError if it stores nothing for this server."""
        from pagoda.config import Config
        from pagoda.connectors.llamacpp import SlotStates

        self.step(
            f"{name}: computing 64 fixed tokens, which tell what the server computes"
        )
        room = _LEAST_ROOM
        if self.given is not None:
            tokens = self.document_tokens + 2 * _QUESTION_TOKENS
            room = _ROOM_OF_A_MODEL + 2 * tokens * self.given.token_bytes
        config = Config(
            chunk_tokens=_CHUNK_TOKENS,
            host_size=0,
            disk_size=room,
            disk_path=str(self.disk),
            deadline_seconds=60.0,
            worth_it=False,  # always reuse, even after the machine was slow once
        )
        with SlotStates(
            server.url,
            self.states,
            api_key=server.key,
            limit_seconds=ANSWER_SECONDS,
            config=config,
        ) as states:
            if states.trouble:
                raise FailedError(
                    f"this server's slots cannot be stored: {states.trouble}"
                )
            yield states

    @contextlib.contextmanager
    def _server(self) -> Iterator[DemoServer]:
        """Start a server; kill it at the end."""
        from pagoda.connectors.llamacpp import make_state_directory

        make_state_directory(self.states)
        # only such that every build knows
        arguments: dict[str, object] = {
            "--model": self.model,
            "--slot-save-path": self.states,
            "--ctx-size": self.document_tokens + 2 * _QUESTION_TOKENS,
            "--parallel": 1,
        }
        if self.given is None:
            # one is enough for the random model; two would disturb each other on a busy machine
            arguments["--threads"] = 1
        with running_server(
            self.program,
            arguments,
            self.states.parent / "log",
            is_random=self.given is None,
        ) as server:
            yield server
