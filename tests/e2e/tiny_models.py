"""A tiny random model of every type of Transformers that can be built small from its configuration
class alone.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings

import torch
import transformers
from transformers.models.auto import modeling_auto

from pagoda.connectors.transformers import layout_of

_MOST_PARAMETERS = 4_000_000
_VOCABULARY = 500
_LEFT_OUT = object()
_CLASSES = {
    kind: name if isinstance(name, str) else name[0]
    for kind, name in {
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }.items()
}
# the names that configurations have for their sizes; each takes those that it knows
_SMALL = {
    "vocab_size": _VOCABULARY,
    "vocab_size_per_layer_input": _VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embedding_size": 32,
    "embed_dim": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "d_ff": 48,
    "n_inner": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layers": 2,
    "n_layer": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_attention_heads": 4,
    "n_heads": 4,
    "n_head": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "kv_channels": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "max_seq_len": 512,
    "image_size": 28,
    "patch_size": 14,
    "depth": 2,
    "image_token_id": 499,
    "image_token_index": 499,
    "video_token_id": 498,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


# for types whose defaults have no KV that can be cut, or whose sizes do not fit together: the first
# that works counts
_VARIANTS: tuple[dict[str, object], ...] = (
    {},
    {"head_dim": _LEFT_OUT, "num_key_value_heads": 4},
    {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    {"is_decoder": True},
    {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    {"pad_token_id": 0, "is_decoder": True},
    {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 2],
        }
    },
    {"head_dim": _LEFT_OUT, "rotary_dim": _LEFT_OUT, "kv_channels": _LEFT_OUT},
)
_TEXT = {"model_type": "llama", "head_dim": 8}
_VISION = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}


def model_types() -> list[str]:
    """Return the types of models that generate text, sorted."""
    return sorted(_CLASSES)


def tiny_model(kind: str, seed: int = 0):
    """Return a model of this type whose KV can be cached. Raises ValueError if none was found, with
    all that failed.
    """
    troubles = []
    for variant in _VARIANTS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = _built(kind, seed, variant)
                layout_of(model, 16)
                return model
        except Exception as trouble:  # noqa: BLE001
            # whatever a configuration or a model raises
            troubles.append(f"{type(trouble).__name__}: {trouble}"[:200])
    raise ValueError(f"{kind}: no tiny model that can be cached: {troubles}")


def any_tiny_model(kind: str):
    """Return a model of this type whose KV can be cached, else one that was built at all. Raises
    ValueError if there is none.
    """
    try:
        return tiny_model(kind)
    except ValueError as trouble:
        for variant in _VARIANTS:
            with warnings.catch_warnings(), contextlib.suppress(Exception):
                warnings.simplefilter("ignore")
                return _built(kind, 0, variant)
        raise trouble


def _built(kind: str, seed: int, variant: dict[str, object]):
    model_class = class_of(kind)
    settings = {**_SMALL, **variant}
    with torch.device("meta"):
        weights = sum(
            weight.numel()
            for weight in model_class(configured(kind, settings)).parameters()
        )
    if weights > _MOST_PARAMETERS:
        raise ValueError(f"{weights} parameters even when it is built small")
    torch.manual_seed(seed)
    return model_class(configured(kind, settings)).eval()


def class_of(kind: str):
    """Return the class of the models of a type."""
    return getattr(transformers, _CLASSES[kind])


def configured(kind: str, settings: dict[str, object]):
    """Return a configuration of a type, which takes the settings that it knows."""
    return _configured(transformers.CONFIG_MAPPING[kind], settings)


def _configured(config_class, settings: dict[str, object]):
    known = {
        *inspect.signature(config_class).parameters,
        *getattr(config_class, "attribute_map", {}),
    }
    chosen = {
        name: value
        for name, value in settings.items()
        if name in known and value is not _LEFT_OUT
    }
    parts = {}
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        if part is transformers.AutoConfig:
            given = _TEXT if "text" in name else _VISION
            part = transformers.CONFIG_MAPPING[given["model_type"]]
            parts[name] = {
                **_configured(part, {**settings, **given}).to_dict(),
                **given,
            }
        else:
            parts[name] = _configured(part, settings).to_dict()
    return config_class(**chosen, **parts)
