"""A Transformers model's time to first token on a host hit against handing `generate` the same
KV.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from ground import Plan
from harness import Figure, race, say

from pagoda import Config
from pagoda.connectors.transformers.model_checks import kv_argument

if TYPE_CHECKING:
    import torch

QUESTION_TOKENS = 90  # what is left to compute on a hit


class _KV(Protocol):
    def crop(self, change: int) -> None: ...
    def get_seq_length(self) -> int: ...


class _Model(Protocol):
    config: object

    def generate(self, ids: torch.Tensor, **options: object) -> torch.Tensor: ...


def handover_figure(plan: Plan) -> list[Figure]:
    """Race the time to the first new token; the other side clones the KV that it keeps in a
    dict.
    """
    try:
        from pagoda.connectors.transformers import CachedModel
    except ImportError:
        say("transformers is not installed: host_vs_handover is skipped")
        return []
    model = _model()
    ids = _prompt(1024 if plan.quick else 4096)
    kept = {"prompt": _computed(model, ids)}
    with tempfile.TemporaryDirectory(
        prefix="pagoda-bench-", dir=plan.shm
    ) as root:
        config = Config(host_size="1GiB", host_path=root, deadline_seconds=30.0)
        with CachedModel(model, config) as cached:
            cached.store(ids, kept["prompt"])
            hit = ids.shape[1] // config.chunk_tokens * config.chunk_tokens
            kept["prompt"].crop(hit - kept["prompt"].get_seq_length())

            def ours(_: int) -> None:
                mask = ids.new_ones(ids.shape)
                cached.generate(
                    ids,
                    attention_mask=mask,
                    store=False,
                    max_new_tokens=1,
                    do_sample=False,
                )
                if cached.last is None or cached.last.hit.by_tier != {
                    "host": hit
                }:
                    raise RuntimeError(f"no hit: {cached.last}")

            def theirs(_: int) -> None:
                _generate(model, ids, copy.deepcopy(kept["prompt"]))

            runs = race({"candidate": ours, "handover": theirs}, plan.rounds)
    paired = [
        ours / theirs
        for ours, theirs in zip(runs["candidate"], runs["handover"], strict=True)
    ]
    medians = [
        statistics.median(runs[name]) * 1e3 for name in ("candidate", "handover")
    ]
    note = f"{medians[0]:.0f} ms against {medians[1]:.0f} ms, {hit} of {ids.shape[1]} tokens reused"
    quoted = {
        "candidate_seconds": runs["candidate"],
        "handover_seconds": runs["handover"],
        "times": paired,
    }
    return [
        Figure(
            "host_vs_handover",
            statistics.median(paired),
            1.5,
            "times",
            quoted,
            note,
        )
    ]


def _model() -> _Model:
    """Return a random Llama of about 60 million parameters."""
    import torch

    transformers = import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=768,
        num_hidden_layers=9,
        intermediate_size=2048,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model: _Model = transformers.LlamaForCausalLM(config).eval()
    return model


def _prompt(tokens: int) -> torch.Tensor:
    import torch

    return torch.randint(1, 500, (1, tokens + QUESTION_TOKENS))


def _computed(model: _Model, ids: torch.Tensor) -> _KV:
    kv: _KV = import_module("transformers").DynamicCache(config=model.config)
    _generate(model, ids, kv)
    return kv


def _generate(model: _Model, ids: torch.Tensor, kv: _KV) -> None:
    mask = ids.new_ones(ids.shape)
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=1,
        do_sample=False,
        **kv_argument(model, kv),
    )
