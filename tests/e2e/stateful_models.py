"""Tiny random models with sliding windows, recurrent states and convolutions, by type."""

from __future__ import annotations

import torch

from tests.e2e.tiny_models import class_of, configured

WINDOW = 24
_SIZE = {
    "vocab_size": 500,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "sliding_window": WINDOW,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Random weights of these types keep so little of a state after one token that a wrong one would
# not be seen: a zeroed one moves the logits by 1e-5 to 1e-3.
_FORGETFUL = {"qwen3_next"}
_SLOW_DECAY = -3.0
_MIXED = ["sliding_attention", "full_attention"]
_SMALL_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16}
_SMALL_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
# type -> what it needs beside the sizes
TYPES: dict[str, dict[str, object]] = {
    # windows
    "gemma2": {"layer_types": _MIXED},
    "gemma3_text": {"layer_types": _MIXED},
    "gpt_oss": {"layer_types": _MIXED},
    "mistral": {},
    "cohere2": {"layer_types": _MIXED},
    "exaone4": {"layer_types": _MIXED},
    "olmo3": {"layer_types": _MIXED},
    "phi3": {},
    "starcoder2": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": WINDOW,
        "intermediate_size_mlp": 48,
    },
    # states
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16},
    # both states and rows
    "qwen3_next": _SMALL_DELTA,
    "qwen3_5_text": _SMALL_DELTA,
    "olmo_hybrid": _SMALL_DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], **_SMALL_MAMBA},
    # these compute something else behind a state
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 8,
    },
    "bamba": {"attn_layer_indices": [1], **_SMALL_MAMBA},
    "falcon_h1": {**_SMALL_MAMBA, "mamba_d_ssm": 64},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
}
WINDOWS = (
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "mistral",
    "cohere2",
    "exaone4",
    "olmo3",
    "phi3",
    "starcoder2",
    "qwen2",
    "llama4_text",
)
STATES = (
    "mamba2",
    "qwen3_next",
    "qwen3_5_text",
    "olmo_hybrid",
    "lfm2",
    "granitemoehybrid",
)
SERVED = (*WINDOWS, *STATES)
# one of each kind, for what is tested at each run
FEW = ("gemma2", "mistral", "mamba2", "olmo_hybrid", "lfm2")
UNCACHED = tuple(kind for kind in TYPES if kind not in SERVED)


def stateful(kind: str, seed: int = 0, dtype: str = "float32", **changes: object):
    """Return a model of this type; `changes` of its configuration."""
    settings = {**_SIZE, **TYPES[kind], **changes}
    torch.manual_seed(seed)
    model_class = class_of(kind)
    model = model_class(configured(model_class, kind, settings)).eval()
    if kind in _FORGETFUL:
        with torch.no_grad():
            for name, value in model.named_parameters():
                if name.endswith("A_log"):
                    value.fill_(_SLOW_DECAY)
    return model.to(getattr(torch, dtype))


def window_of(kind: str) -> int:
    """Return the window of the models of this type; 0: they have none."""
    return WINDOW if kind in WINDOWS else 0
