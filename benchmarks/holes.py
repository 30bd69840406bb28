"""Prompts with holes: `python benchmarks/holes.py [--json] [--quick]`.

A prompt of 32 chunks of 256 tokens, of which chunks are removed from all tiers: half of them, at
random, or one. Printed is the processor time of `CachedModel.generate` of one token (all threads,
storing included) over that of the cold call in the same round; `passes` is what one forward pass
costs beside its tokens, in tokens: it decides which pieces are worth a pass of their own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from ground import Part, Plan, main
from harness import Figure

if TYPE_CHECKING:
    import torch

    from pagoda.connectors.transformers import CachedModel

_CHUNKS = 32
_CHUNK_TOKENS = 256
_TAIL = 8
_WANTED = {_CHUNKS // 2: 0.80, 1: 0.20}  # share of cold, by missing chunks
_MORE = {"max_new_tokens": 1, "do_sample": False}


def holes_figures(plan: Plan) -> list[Figure]:
    """Time the prompt cold, with half of its chunks, and with all but one."""
    with _opened() as cached:
        ids = _prompt()
        keys = [key for _, _, key in cached.cache.keys(ids[0])]
        dice = random.Random(0)
        cold: list[float] = []
        times: dict[int, list[float]] = {count: [] for count in _WANTED}
        cached.generate(ids, **_MORE)  # warm
        for _ in range(plan.rounds):
            cached.clear()
            seconds, answer = _timed(cached, ids)
            cold.append(seconds)
            for count, rounds in times.items():
                gone = dice.sample(range(_CHUNKS), count)
                _remove(cached, [keys[at] for at in gone])
                seconds, again = _timed(cached, ids)
                rounds.append(seconds)
                loaded = cached.last.hit.loaded
                if again != answer or loaded != (_CHUNKS - count) * 256:
                    raise SystemExit(
                        f"without chunks {gone}: {loaded} tokens loaded, answer {again} instead of "
                        f"{answer}"
                    )
    return [
        _times(f"holes_{count}_of_{_CHUNKS}", _WANTED[count], rounds, cold)
        for count, rounds in times.items()
    ]


def passes_figure(plan: Plan) -> list[Figure]:
    """Time a pass over few tokens and over a chunk, behind 1,024 others."""
    import torch
    from transformers import DynamicCache

    from pagoda.connectors.transformers.model_checks import kv_argument

    with _opened() as cached:
        model = cached.model
        ids = _prompt()
        few: list[float] = []
        many: list[float] = []
        for _ in range(plan.rounds):
            for count, rounds in ((1, few), (_CHUNK_TOKENS, many)):
                kv = kv_argument(model, DynamicCache(config=model.config))
                with torch.no_grad():
                    model(ids[:, :1024], logits_to_keep=1, **kv)
                    began = time.process_time()
                    model(ids[:, 1024 : 1024 + count], logits_to_keep=1, **kv)
                    rounds.append(time.process_time() - began)
    each = (median(many) - median(few)) / (_CHUNK_TOKENS - 1)
    cost = median(few) / each - 1
    return [
        Figure(
            "holes_pass_costs_tokens",
            cost,
            None,
            "tokens",
            {"one_token": few, "chunk": many},
        )
    ]


def _times(
    key: str, target: float, rounds: Sequence[float], cold: Sequence[float]
) -> Figure:
    shares = [one / other for one, other in zip(rounds, cold, strict=True)]
    runs = {"share": shares, "seconds": list(rounds), "cold": list(cold)}
    return Figure(key, median(shares), target, "times", runs)


def _timed(cached: CachedModel, ids: torch.Tensor) -> tuple[float, list[int]]:
    began = time.process_time()
    out = cached.generate(ids, **_MORE)
    return time.process_time() - began, out[0, ids.shape[1] :].tolist()


def _remove(cached: CachedModel, keys: Sequence[bytes]) -> None:
    for tier in cached.cache._tiers.all:
        for key in keys:
            tier.remove(key)


def _prompt() -> torch.Tensor:
    import torch

    torch.manual_seed(0)
    return torch.randint(1, 512, (1, _CHUNKS * _CHUNK_TOKENS + _TAIL))


def _opened() -> CachedModel:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from pagoda.connectors.transformers import CachedModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=1024,
        vocab_size=512,
        max_position_embeddings=1 << 14,
        eos_token_id=None,
    )
    return CachedModel(
        LlamaForCausalLM(config).eval(),
        host_size="256MiB",
        host_shared=False,
        worth_it=False,
    )


PARTS: dict[str, Part] = {"holes": holes_figures, "passes": passes_figure}

if __name__ == "__main__":
    main(__doc__, PARTS, {}, with_fio=False)
