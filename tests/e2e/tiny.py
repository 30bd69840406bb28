"""Small random models whose text depends on their context, and prompts for them."""

from __future__ import annotations

import numpy as np
import torch
import transformers

# tiny models: on a busy machine a second thread only waits
torch.set_num_threads(1)

VOCABULARY = 500
_SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def llama(seed: int = 0, dtype: str = "float32", **changes: object):
    return _built(
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**{**_SIZE, **changes}),
        seed,
        dtype,
    )


def qwen(seed: int = 0, dtype: str = "float32", **changes: object):
    config = transformers.Qwen3Config(**{**_SIZE, "head_dim": 24, **changes})
    return _built(transformers.Qwen3ForCausalLM, config, seed, dtype)


def deepseek(seed: int = 0, dtype: str = "float32", **changes: object):
    """Multi-head latent attention: the cache holds latents and rotary keys, of one head and
    different dims.
    """
    special = {
        "num_key_value_heads": 6,
        "kv_lora_rank": 40,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 2,
    }
    config = transformers.DeepseekV3Config(**{**_SIZE, **special, **changes})
    return _built(transformers.DeepseekV3ForCausalLM, config, seed, dtype)


def _built(kind, config, seed: int, dtype: str):
    torch.manual_seed(seed)
    return kind(config).eval().to(getattr(torch, dtype))


def prompt(length: int, seed: int = 1) -> torch.Tensor:
    """[1, length] token ids."""
    ids = np.random.default_rng(seed).integers(1, VOCABULARY, length)
    return torch.from_numpy(ids)[None]


def generated(
    model, ids: torch.Tensor, new: int = 48, **kwargs
) -> list[list[int]]:
    """Return the greedy continuation without our cache, one list per row."""
    out = model.generate(ids, max_new_tokens=new, do_sample=False, **kwargs)
    return out[:, ids.shape[1] :].tolist()
