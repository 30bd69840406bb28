"""A real Transformers model with random weights that takes no time, and prompts for it."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagoda_tools.quality.prompt_lines import ExpectedAnswer, QualityPrompt

__all__ = ["CHUNK", "prompts", "tiny_llama"]

CHUNK = 8
VOCABULARY = 96


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """Return a Llama of two layers; its weights are so large that the answer depends on all of the
    context.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def prompts(
    count: int, seed: int = 0, expected: ExpectedAnswer | None = None
) -> list[QualityPrompt]:
    """Return prompts of three documents and a question."""
    draw = np.random.default_rng(seed)
    return [
        QualityPrompt(
            line + 1,
            [
                draw.integers(VOCABULARY, size=size).tolist()
                for size in (12, 9, 14)
            ],
            draw.integers(VOCABULARY, size=4).tolist(),
            expected,
        )
        for line in range(count)
    ]
