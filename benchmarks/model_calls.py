"""What `CachedModel` adds to a call: `python benchmarks/model_calls.py [--json] [--quick]`.

Processor time of the calling thread, with a model of 32 small layers: `prefix` of a prompt that no
tier has, which is almost only what is asked about the model before each call, and `generate` beyond
`model.generate`. Two trees: `python benchmarks/paired.py OLD NEW --scripts . --only model_calls
--rounds 7`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ground import Part, Plan, main
from harness import Figure, seconds_figure

if TYPE_CHECKING:
    from pagoda.connectors.transformers import CachedModel

_CALLS = 30  # a round, of which the quickest counts


def prefix_figure(plan: Plan) -> list[Figure]:
    """Time `prefix` of a prompt shorter than a chunk, so that nothing is looked up or copied."""
    import torch

    with _opened() as cached:
        ids = torch.arange(1, 17)[None]
        rounds = [
            _quickest(lambda: cached.prefix(ids)) for _ in range(plan.rounds)
        ]
    return [seconds_figure("model_prefix_processor_seconds", 0.01, rounds)]


def generate_figure(plan: Plan) -> list[Figure]:
    """Time `generate` of one token from a prompt shorter than a chunk, less the time of
    `model.generate`.
    """
    import torch

    with _opened() as cached:
        ids = torch.arange(1, 17)[None]
        mask = torch.ones_like(ids)
        more = {"max_new_tokens": 1, "do_sample": False}
        rounds = []
        for _ in range(plan.rounds):
            alone = _quickest(
                lambda: cached.model.generate(ids, attention_mask=mask, **more)
            )
            ours = _quickest(
                lambda: cached.generate(ids, attention_mask=mask, **more)
            )
            rounds.append(ours - alone)
    return [
        seconds_figure("model_generate_added_processor_seconds", 0.03, rounds)
    ]


def _opened() -> CachedModel:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from pagoda.connectors.transformers import CachedModel

    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=32,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=512,
    )
    return CachedModel(
        LlamaForCausalLM(config).eval(), host_size="16MiB", host_shared=False
    )


def _quickest(call: Callable[[], object]) -> float:
    """Return the processor time of the quickest call: others were interrupted."""
    call()
    seconds = []
    for _ in range(_CALLS):
        began = time.thread_time()
        call()
        seconds.append(time.thread_time() - began)
    return min(seconds)


PARTS: dict[str, Part] = {"prefix": prefix_figure, "generate": generate_figure}

if __name__ == "__main__":
    main(__doc__, PARTS, {}, with_fio=False)
