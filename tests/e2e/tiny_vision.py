"""Tiny random models that see images, and prompts with images for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers

torch.set_num_threads(1)

IMAGE_TOKEN = 499
_TEXT = {
    "vocab_size": 500,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [1, 1, 2],
}


def _built(kind: str, config: transformers.PreTrainedConfig):
    torch.manual_seed(3)
    model = getattr(transformers, kind)(config).eval()
    model.generation_config.eos_token_id = None
    return model


def llava():
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
        "initializer_range": 0.3,
    }
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **_TEXT},
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
    )
    return _built("LlavaForConditionalGeneration", config)


def qwen2_vl():
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    config = transformers.Qwen2VLConfig(
        text_config={**_TEXT, "rope_parameters": _MROPE},
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        video_token_id=498,
        vision_start_token_id=497,
        vision_end_token_id=496,
    )
    return _built("Qwen2VLForConditionalGeneration", config)


def gemma3(window: int = 0):
    """Without sliding windows, unless one is given; tokens of one image see each other in both
    directions.
    """
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
    }
    text = {
        **_TEXT,
        "layer_types": _layers(window),
        "sliding_window": window or 512,
        "query_pre_attn_scalar": 8,
    }
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=497,
        eoi_token_index=496,
        mm_tokens_per_image=16,
        tie_word_embeddings=False,
    )
    model = _built("Gemma3ForConditionalGeneration", config)
    # of zeros: it would see nothing
    projection = model.model.multi_modal_projector.mm_input_projection_weight
    torch.nn.init.normal_(projection, std=1.0)
    return model


def paligemma2(window: int):
    """Tokens that are marked with 0 see each other in both directions."""
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
        "vision_use_head": False,
    }
    text = {
        **_TEXT,
        "model_type": "gemma2",
        "layer_types": _layers(window),
        "sliding_window": window,
        "query_pre_attn_scalar": 8,
    }
    config = transformers.PaliGemmaConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        image_token_index=IMAGE_TOKEN,
        projection_dim=32,
        tie_word_embeddings=False,
    )
    return _built("PaliGemmaForConditionalGeneration", config)


def _layers(window: int) -> list[str]:
    first = "sliding_attention" if window else "full_attention"
    return [first, first, "full_attention"]


def idefics3():
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
    }
    config = transformers.Idefics3Config(
        text_config={"model_type": "llama", **_TEXT},
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
        pad_token_id=0,
    )
    return _built("Idefics3ForConditionalGeneration", config)


KINDS = {
    "llava": llava,
    "qwen2_vl": qwen2_vl,
    "gemma3": gemma3,
    "idefics3": idefics3,
}
_IMAGE_TOKENS = {"idefics3": 4}  # of one image; the others: 16
_TYPES = {"qwen2_vl": "mm_token_type_ids", "gemma3": "token_type_ids"}


def image_tokens(kind: str) -> int:
    """Return how many placeholders one image has."""
    return _IMAGE_TOKENS.get(kind, 16)


def with_images(
    ids: torch.Tensor, places: Sequence[int], count: int
) -> torch.Tensor:
    """Return a prompt [1, tokens] with `count` image tokens before each of these tokens."""
    image = torch.full((1, count), IMAGE_TOKEN)
    parts = []
    done = 0
    for place in places:
        parts += [ids[:, done:place], image]
        done = place
    return torch.cat([*parts, ids[:, done:]], dim=1)


def shown(
    kind: str, ids: torch.Tensor, seeds: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return what a processor returns beside a prompt with one image for each seed."""
    found = {}
    marks = (ids == IMAGE_TOKEN).long()
    if kind in _TYPES:
        found[_TYPES[kind]] = marks
    if not seeds:
        return found
    if kind == "qwen2_vl":
        found["pixel_values"] = torch.cat(
            [_random(seed, 64, 1176) for seed in seeds]
        )
        found["image_grid_thw"] = torch.tensor([[1, 8, 8]] * len(seeds))
        return found
    pixels = torch.stack([_random(seed, 3, 56, 56) for seed in seeds])
    found["pixel_values"] = pixels[None] if kind == "idefics3" else pixels
    return found


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vision_tower(model) -> torch.nn.Module:
    """Return the module that computes images."""
    inner = model.model
    for name in ("vision_tower", "visual", "vision_model"):
        if hasattr(inner, name):
            return getattr(inner, name)
    raise ValueError(f"{type(model).__name__} has no vision tower")
