"""Tiny random models that see images, and prompts with images for them."""

from __future__ import annotations

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


def with_image(ids: torch.Tensor, at: int, count: int) -> torch.Tensor:
    """Return a prompt [1, tokens] with `count` image tokens from token `at` on."""
    image = torch.full((1, count), IMAGE_TOKEN)
    return torch.cat([ids[:, :at], image, ids[:, at:]], dim=1)


def patches(seed: int, grid: tuple[int, int, int] = (1, 8, 8)) -> torch.Tensor:
    """Return the pixels of an image of so many patches, as the processor of Qwen2-VL does."""
    generator = torch.Generator().manual_seed(seed)
    count = grid[0] * grid[1] * grid[2]
    return torch.randn(count, 3 * 2 * 14 * 14, generator=generator)
