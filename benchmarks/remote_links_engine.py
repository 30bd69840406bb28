"""The two ends of a link that `remote_links.py` shapes, each a process in a separate network
namespace.

`serve ADDRESS` is a bare socket that sends as many bytes as requested. `engine JSON` is a
Transformers model with an empty host tier above a Redis at the other end; it stores one prompt and
then computes its first token in turns. Requests and answers are one JSON object per line; it ends
with its stdin.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harness import MIB, Runs, race
from limits import touched
from limits_wire import receive, send_all

from pagoda import Cache, Config, KVLayout, Namespace
from pagoda.connectors.transformers import CachedModel, layout_of, namespace_of
from pagoda.connectors.transformers.model_checks import kv_argument
from pagoda.tiers import HostTier
from pagoda.tiers.remote.redis import RedisClient
from pagoda.tiers.remote.remote_tier import RemoteTier

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

RAW_PORT = 7000
REDIS_PORT = 6379
CODECS = ("raw", "zstd")
LOSSY_CODECS = ("q8", "q4", "qzstd")
QUESTION_TOKENS = 90  # what is left to compute on a hit
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Model:
    """A Llama with random weights, and its prompt."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    document_tokens: int
    chunk_tokens: int
    dtype: str = "float32"
    codecs: tuple[str, ...] = CODECS


@dataclass(frozen=True)
class Stored:
    """The contents of the store."""

    parameters: int
    reused_tokens: int
    kv_bytes: int
    chunk_bytes: int
    redis_bytes: dict[str, int]  # by codec


class _Model(Protocol):
    config: object

    def generate(self, ids: torch.Tensor, **options: object) -> torch.Tensor: ...
    def parameters(self) -> Iterator[torch.Tensor]: ...


class Wire:
    """The limit of the link: one connection without any protocol. One turn at a time."""

    def __init__(self, address: str, nbytes: int) -> None:
        self._into = touched(nbytes).data
        self._link = socket.create_connection(
            (address, RAW_PORT), timeout=PATIENCE_SECONDS
        )

    def step(self, _: int) -> None:
        """Receive as many bytes as the KV of the prompt has."""
        self._link.sendall(len(self._into).to_bytes(8, "big"))
        receive(self._link, self._into)

    def close(self) -> None:
        """Close the connection."""
        self._link.close()


class Reader:
    """The model with a host tier, which is emptied before each round, and the store. One turn at a
    time.
    """

    def __init__(
        self, engine: Engine, codec: str, root: Path, worth_it: bool
    ) -> None:
        self._engine = engine
        room = 2 * engine.kv_bytes + 64 * MIB
        self._host = HostTier.open(
            engine.layout, root / f"{codec}-{worth_it}", room
        )
        config = Config(
            chunk_tokens=engine.layout.chunk_tokens,
            worth_it=worth_it,
            deadline_seconds=PATIENCE_SECONDS,
            unchecked=True,
        )
        self._may_differ = codec in LOSSY_CODECS
        tiers = [self._host, engine.remote(codec)]
        self.cache = Cache(
            config, namespace=engine.namespace, layout=engine.layout, tiers=tiers
        )
        self.cached = CachedModel(engine.model, cache=self.cache)
        self.loaded: list[bool] = []
        # of those turns, without the remaining computation
        self.load_seconds: list[float] = []

    def empty(self) -> None:
        """Clear the host tier."""
        self._host.clear(self.cache.namespace.root)

    def step(self, _: int) -> None:
        """Compute the first token; note whether the KV came from the store."""
        out = self.cached.generate(
            self._engine.ids, store=False, max_new_tokens=1, do_sample=False
        )
        assert self.cached.last is not None
        hit = self.cached.last.hit
        if hit.by_tier not in ({}, {"redis": self._engine.reused_tokens}):
            raise RuntimeError(f"only a part came from the store: {hit}")
        if not hit.by_tier and hit.reason != "not_worth_it":
            raise RuntimeError(f"no hit: {hit}")
        if out[0, -1].item() != self._engine.first_token and not self._may_differ:
            raise RuntimeError(
                "the first token differs from that without a cache"
            )
        self.loaded.append(bool(hit.by_tier))
        self.load_seconds.append(self.cached.last.seconds)

    def close(self) -> None:
        """Close the cache and its tiers."""
        self.cache.close()


class Engine:
    """A model, its prompt, and the address of the store. One turn at a time."""

    def __init__(self, model: Model, address: str) -> None:
        import torch

        self.model = _built(model)
        self.codecs = model.codecs
        self.ids = torch.randint(
            1, 500, (1, model.document_tokens + QUESTION_TOKENS)
        )
        self.layout: KVLayout = layout_of(self.model, model.chunk_tokens)
        self.namespace: Namespace = namespace_of(self.model, self.layout)
        self.reused_tokens = (
            self.ids.shape[1] // model.chunk_tokens * model.chunk_tokens
        )
        self.kv_bytes = (
            self.reused_tokens // model.chunk_tokens * self.layout.chunk_bytes
        )
        self.first_token = -1
        self._address = address
        self._rules: list[Reader] = []

    def remote(self, codec: str) -> RemoteTier:
        """Return a tier of the store, with a separate prefix for each codec."""
        remote = RedisClient(
            f"redis://{self._address}:{REDIS_PORT}/0", prefix=f"links-{codec}"
        )
        # a busy machine is not a slow link
        patience = {
            "deadline_seconds": PATIENCE_SECONDS,
            "look_seconds": 5.0,
        }
        return RemoteTier(self.layout, remote, codec=codec, **patience)

    def compute(self, _: int) -> None:
        """Compute the first token without a cache; report the time to the worth-it rules, as a
        connector does.
        """
        began = time.perf_counter()
        mask = self.ids.new_ones(self.ids.shape)
        out = self.model.generate(
            self.ids, attention_mask=mask, max_new_tokens=1, do_sample=False
        )
        for reader in self._rules:
            reader.cache.observe_prefill(
                self.ids.shape[1], time.perf_counter() - began
            )
        self.first_token = out[0, -1].item()

    def store(self, root: Path) -> Stored:
        """Compute the prompt once and store it with each codec."""
        kv = import_module("transformers").DynamicCache(config=self.model.config)
        self.model.generate(
            self.ids,
            max_new_tokens=1,
            do_sample=False,
            **kv_argument(self.model, kv),
        )
        used: dict[str, int] = {}
        for codec in self.codecs:
            reader = Reader(self, codec, root, worth_it=False)
            tier = self.remote(codec)
            before = tier.stats().get("used_bytes", 0)
            reader.cached.store(self.ids, kv)
            if not reader.cache.flush(PATIENCE_SECONDS):
                raise RuntimeError("the store did not take the prompt")
            used[codec] = tier.stats().get("used_bytes", 0) - before
            tier.close()
            reader.close()
        parameters = sum(
            parameter.numel() for parameter in self.model.parameters()
        )
        return Stored(
            parameters,
            self.reused_tokens,
            self.kv_bytes,
            self.layout.chunk_bytes,
            used,
        )

    def rounds(self, count: int, root: Path) -> dict[str, object]:
        """Race computing, loading and the rule over the present link, with new caches that have no
        measurements.
        """
        with ExitStack() as opened:
            wire = opened.enter_context(
                _closing(Wire(self._address, self.kv_bytes))
            )
            always = {
                codec: opened.enter_context(_reader(self, codec, root, False))
                for codec in self.codecs
            }
            rules = {
                codec: opened.enter_context(_reader(self, codec, root, True))
                for codec in self.codecs
            }
            self._rules = list(rules.values())
            steps = {"wire": wire.step, "computed": self.compute}
            steps |= {
                f"loaded {codec}": reader.step for codec, reader in always.items()
            }
            steps |= {
                f"rule {codec}": reader.step for codec, reader in rules.items()
            }
            readers = [*always.values(), *rules.values()]
            runs: Runs = race(
                steps,
                count,
                warm=2,
                before=lambda: [reader.empty() for reader in readers] and None,
            )
            self._rules = []
            if not all(all(reader.loaded) for reader in always.values()):
                raise RuntimeError("a prompt was not loaded")
            rates = {
                codec: reader.cache.stats()["rates"]
                for codec, reader in rules.items()
            }
            loaded = {
                codec: reader.loaded[-count:] for codec, reader in rules.items()
            }
            seconds = {
                codec: reader.load_seconds[-count:]
                for codec, reader in always.items()
            }
        return {
            "runs": runs,
            "rule_loaded": loaded,
            "load_seconds": seconds,
            "rates": rates,
        }


def serve(address: str) -> None:
    """Send as many bytes as each 8-byte number requests, on every connection."""
    memory = touched(256 * MIB, 9).data
    with socket.create_server((address, RAW_PORT)) as listener:
        print("ready", flush=True)
        while True:
            link, _ = listener.accept()
            threading.Thread(
                target=_sends, args=(link, memory), daemon=True
            ).start()


def _sends(link: socket.socket, memory: memoryview) -> None:
    request = memoryview(bytearray(8))
    with link:
        while True:
            try:
                receive(link, request)
            except (EOFError, ConnectionError):
                return
            left = int.from_bytes(request, "big")
            while left:
                send_all(link, [memory[:left]])
                left -= min(left, len(memory))


def engine(given: str, lines: Sequence[str]) -> None:
    """Store the prompt and report its size; then race for each line, which has the number of
    rounds.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print too
    task = json.loads(given)
    with tempfile.TemporaryDirectory(
        prefix="pagoda-bench-", dir=task["shm"]
    ) as root:
        asked = Engine(Model(**task["model"]), task["address"])
        asked.compute(0)
        print(json.dumps(asdict(asked.store(Path(root) / "store"))), file=out)
        for number, line in enumerate(lines):
            print(
                json.dumps(
                    asked.rounds(json.loads(line), Path(root) / str(number))
                ),
                file=out,
            )


@contextmanager
def _reader(
    engine: Engine, codec: str, root: Path, worth_it: bool
) -> Iterator[Reader]:
    reader = Reader(engine, codec, root, worth_it)
    try:
        yield reader
    finally:
        reader.close()


@contextmanager
def _closing(wire: Wire) -> Iterator[Wire]:
    try:
        yield wire
    finally:
        wire.close()


def _built(model: Model) -> _Model:
    import torch

    transformers = import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        intermediate_size=model.intermediate,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=16384,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    # on a busy machine two threads would wait for each other and for the server
    torch.set_num_threads(1)
    torch.manual_seed(0)
    built: _Model = (
        transformers.LlamaForCausalLM(config)
        .eval()
        .to(getattr(torch, model.dtype))
    )
    return built


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        engine(sys.argv[2], sys.stdin)
