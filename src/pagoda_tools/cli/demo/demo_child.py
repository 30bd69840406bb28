"""One process of the demo: build the model, ask the questions, report the result as JSON lines on
stdout.

Run as `python -m pagoda_tools.cli.demo.demo_child` with a task (JSON) on stdin. Each process builds
the same model again, so everything that it reuses comes from the memory and the files of the cache.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol

import msgspec

from pagoda_tools.cli.demo.demo_prompts import QUESTIONS, ByteTokenizer, documents

if TYPE_CHECKING:
    import torch

    from pagoda.connectors.transformers import CachedModel
    from pagoda_tools.quality.approaches import KVCache


@dataclass(frozen=True)
class Size:
    """The sizes of the demo. The default model is a Llama of about 60 million parameters."""

    hidden: int = 768
    layers: int = 9
    intermediate: int = 2048
    heads: int = 12
    kv_heads: int = 4
    # large enough that the text depends on the context
    initializer_range: float = 0.08
    document_tokens: int = 4096
    new_tokens: int = 48
    chunk_tokens: int = 256
    # of the comparison of a host hit with handing over the same KV
    rounds: int = 7


@dataclass(frozen=True)
class Task:
    """The task of one process."""

    # "cold": compute, store, run the controls · "host": compare the times too · "disk"
    process: str
    host_path: str
    disk_path: str
    size: Size
    model: str | None = None  # a path or id of a real model


@dataclass
class DemoAnswer:
    """The answer to one question."""

    prompt_tokens: int
    tokens: list[int]
    seconds: float  # to the first token, with the look-up
    by_tier: dict[str, int] = field(default_factory=dict)
    text: str = ""
    reason: str = ""  # why no more was reused


@dataclass
class DemoOutcome:
    """The results of one process."""

    answers: list[DemoAnswer]
    parameters: int = 0
    # whether the text changed
    controls: dict[str, bool] = field(default_factory=dict)
    handover_seconds: float = 0.0
    host_vs_handover: float = 0.0


@dataclass
class Said:
    """One line that a process prints: its present step, why it refuses the model, or its
    results.
    """

    step: str = ""
    refused: str = ""
    outcome: DemoOutcome | None = None


# The used parts of Transformers. Its own types say less, and it may not be installed.


class _Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


class _Model(Protocol):
    config: object

    def generate(self, ids: torch.Tensor, **kwargs: object) -> torch.Tensor: ...
    def parameters(self) -> Iterator[torch.Tensor]: ...


class _Asker:
    """A model and its prompts. Not thread-safe."""

    def __init__(self, task: Task, step: Callable[[str], None]) -> None:
        import torch

        from pagoda.connectors.transformers.model_checks import (
            check_model,
            probe_model,
        )

        self.task = task
        self.step = step
        step("building the model")
        self.model, self.tokenizer = (
            _real(task.model) if task.model else _random(task.size)
        )
        check_model(self.model)
        self.probed = probe_model(self.model, task.size.chunk_tokens)
        limit = (
            getattr(self.model.config, "max_position_embeddings", None) or 1 << 20
        )
        self.room = min(
            task.size.document_tokens, limit - task.size.new_tokens - 128
        )
        asked, other = documents()
        self.prompts = [self.prompt(asked, question) for question in QUESTIONS]
        self.other = self.prompt(other, QUESTIONS[0])
        # torch makes threads and buffers at the first use, which must not be measured
        step("warming up")
        self.ask(torch.full((1, 64), 32), self.empty(), new_tokens=2)

    def prompt(self, text: str, question: str) -> torch.Tensor:
        """Return [1, tokens]: as many tokens of the document as the model takes, and the
        question.
        """
        import torch

        ids = self.tokenizer.encode(text[: self.room * 16])[: self.room]
        return torch.tensor([ids + self.tokenizer.encode(question)])

    def empty(self) -> KVCache:
        """Return an empty KV cache."""
        kv: KVCache = import_module("transformers").DynamicCache(
            config=self.model.config
        )
        return kv

    def ask(
        self, ids: torch.Tensor, kv: KVCache, new_tokens: int | None = None
    ) -> DemoAnswer:
        """Generate without PagodaKV, starting from the KV in `kv`; fills `kv`."""
        from pagoda.connectors.transformers.model_checks import kv_argument

        return self._timed(
            ids, self.model.generate, new_tokens, **kv_argument(self.model, kv)
        )

    def ask_cached(
        self,
        cached: CachedModel,
        ids: torch.Tensor,
        new_tokens: int | None = None,
    ) -> DemoAnswer:
        """Generate with PagodaKV."""
        answer = self._timed(
            ids, cached.generate, new_tokens, store=new_tokens is None
        )
        assert cached.last is not None
        hit = cached.last.hit
        answer.by_tier = hit.by_tier
        answer.reason = f"{hit.reason or ''} {hit.detail}".strip()
        return answer

    def _timed(
        self,
        ids: torch.Tensor,
        generate: Callable[..., torch.Tensor],
        new_tokens: int | None,
        **kwargs: object,
    ) -> DemoAnswer:
        import torch

        times: list[float] = []  # of the prompt, then of each token
        streamer = SimpleNamespace(
            put=lambda _: times.append(time.perf_counter()), end=lambda: None
        )
        began = time.perf_counter()
        out = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens or self.task.size.new_tokens,
            do_sample=False,
            streamer=streamer,
            **kwargs,
        )
        tokens: list[int] = out[0, ids.shape[1] :].tolist()
        return DemoAnswer(
            ids.shape[1],
            tokens,
            times[1] - began,
            text=self.tokenizer.decode(tokens),
        )


def _random(size: Size) -> tuple[_Model, _Tokenizer]:
    """Return a Llama with random weights, the same in every process, and its tokenizer."""
    import torch

    transformers = import_module("transformers")
    tokenizer = ByteTokenizer()
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        intermediate_size=size.intermediate,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=max(8192, 2 * size.document_tokens),
        initializer_range=size.initializer_range,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval(), tokenizer


def _real(name: str) -> tuple[_Model, _Tokenizer]:
    import torch

    transformers = import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32
    ).eval()
    return model, transformers.AutoTokenizer.from_pretrained(name)


def _open(asker: _Asker) -> CachedModel:
    """Open the cache; its tiers have space for a few prompts of this size."""
    from pagoda.config import Config
    from pagoda.connectors.transformers import CachedModel

    task = asker.task
    chunks = (
        max(prompt.shape[1] for prompt in asker.prompts) // task.size.chunk_tokens
        + 1
    )
    room = max(64, 4 * chunks) * (asker.probed.layout.slot_bytes + 4096) + (
        16 << 20
    )
    config = Config(
        chunk_tokens=task.size.chunk_tokens,
        host_size=room,
        host_path=task.host_path,
        disk_size=room,
        disk_path=task.disk_path,
        deadline_seconds=60.0,
        worth_it=False,  # always reuse, even after the machine was slow once
    )
    return CachedModel(asker.model, config)


def _cold(asker: _Asker) -> DemoOutcome:
    """Compute everything without PagodaKV; then store it. The controls show that the text depends
    on the KV.
    """
    answers = []
    caches = []
    for number, ids in enumerate(asker.prompts):
        asker.step(f"question {number + 1}: computing {ids.shape[1]:,} tokens")
        caches.append(asker.empty())
        answers.append(asker.ask(ids, caches[-1]))
    outcome = DemoOutcome(answers)
    with _open(asker) as cached:
        asker.step("storing the KV")
        for ids, kv in zip(asker.prompts, caches, strict=True):
            cached.store(ids, kv)
        if not cached.cache.flush(120.0):
            raise SystemExit(
                "the disk tier did not take the KV within two minutes"
            )
    asker.step("control: the same question with zeroed KV")
    documents_end = asker.room
    zeroed = [
        [plane.zero_() for plane in layer]
        for layer in _planes(caches[0], documents_end)
    ]
    outcome.controls["zeroed"] = _text_over(asker, zeroed) != answers[0].tokens
    asker.step("control: the same question with another prompt's KV")
    other = asker.empty()
    asker.ask(asker.other, other, new_tokens=1)
    outcome.controls["other"] = (
        _text_over(asker, _planes(other, documents_end)) != answers[0].tokens
    )
    return outcome


def _host(asker: _Asker) -> DemoOutcome:
    """Ask again; then compare a host hit with handing over a clone of the same KV."""
    with _open(asker) as cached:
        outcome = _asked(asker, cached)
        asker.step("comparing a host hit with a clone of the same KV")
        ids = asker.prompts[0]
        with cached.prefix(ids) as prefix:
            if not prefix.columns:
                return outcome
            kept = _planes(prefix.past_key_values, prefix.columns)
        hits: list[float] = []
        clones: list[float] = []
        for turn in range(asker.task.size.rounds):
            if turn % 2:
                hits.append(_hit_seconds(asker, cached))
            clones.append(_clone_seconds(asker, kept))
            if not turn % 2:
                hits.append(_hit_seconds(asker, cached))
        outcome.handover_seconds = statistics.median(clones)
        outcome.host_vs_handover = statistics.median(
            a / b for a, b in zip(hits, clones, strict=True)
        )
        return outcome


def _asked(asker: _Asker, cached: CachedModel) -> DemoOutcome:
    outcome = DemoOutcome([])
    for number, ids in enumerate(asker.prompts):
        asker.step(f"question {number + 1}: looking for its KV")
        outcome.answers.append(asker.ask_cached(cached, ids))
    return outcome


def _disk(asker: _Asker) -> DemoOutcome:
    with _open(asker) as cached:
        return _asked(asker, cached)


def _planes(kv: KVCache, tokens: int) -> list[list[torch.Tensor]]:
    """Return clones of K and V of the leading tokens."""
    return [
        [plane[:, :, :tokens].clone() for plane in (layer.keys, layer.values)]
        for layer in kv.layers
    ]


def _cache_of(asker: _Asker, planes: list[list[torch.Tensor]]) -> KVCache:
    """Return a KV cache that uses these tensors without a copy: the fastest way to hand them
    over.
    """
    from pagoda.connectors.transformers.dynamic_cache import dynamic_cache

    kv: KVCache = dynamic_cache(
        asker.model, asker.probed, planes, [], planes[0][0].shape[2]
    )
    return kv


def _text_over(asker: _Asker, planes: list[list[torch.Tensor]]) -> list[int]:
    return asker.ask(asker.prompts[0], _cache_of(asker, planes)).tokens


def _hit_seconds(asker: _Asker, cached: CachedModel) -> float:
    return asker.ask_cached(cached, asker.prompts[0], new_tokens=1).seconds


def _clone_seconds(asker: _Asker, kept: list[list[torch.Tensor]]) -> float:
    began = time.perf_counter()
    kv = _cache_of(asker, [[plane.clone() for plane in layer] for layer in kept])
    cloned = time.perf_counter() - began
    return cloned + asker.ask(asker.prompts[0], kv, new_tokens=1).seconds


def _end_with_the_parent() -> None:
    """End this process at the end of stdin: its parent has the results, or has ended."""
    while os.read(0, 1):  # not by sys.stdin: its lock would block a normal exit
        pass
    os._exit(130)


def main() -> int:
    """Do the task on stdin; return the exit code."""
    task = msgspec.json.decode(sys.stdin.readline(), type=Task)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()

    def tell(said: Said) -> None:
        print(msgspec.json.encode(said).decode(), flush=True)

    try:
        asker = _Asker(task, lambda step: tell(Said(step)))
        outcome = {"cold": _cold, "host": _host, "disk": _disk}[task.process](
            asker
        )
    except (OSError, ValueError) as trouble:
        if task.model is None:
            raise
        # not loadable, or its KV cannot be cut
        tell(Said(refused=str(trouble).strip().splitlines()[0]))
        return 1
    outcome.parameters = sum(
        parameter.numel() for parameter in asker.model.parameters()
    )
    tell(Said(outcome=outcome))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
