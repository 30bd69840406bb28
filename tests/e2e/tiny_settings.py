"""The settings with which `tiny_models` builds a tiny model of every type of Transformers: the
sizes that most types know by the same names, variants of them, and what a family needs beside them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MOST_PARAMETERS = 4_000_000
VOCABULARY = 500
LEFT_OUT = object()
# the names that configurations have for their sizes; each takes those that it knows
SMALL: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
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
    "out_hidden_size": 32,
    "text_hidden_size": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "image_size": 28,
    "patch_size": 14,
    "depth": 2,
    "image_token_id": 499,
    "image_token_index": 499,
    "video_token_id": 498,
    "vision_start_token_id": 497,
    "vision_end_token_id": 496,
    "audio_token_id": 495,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


# for types whose defaults have no KV that can be cut, or whose sizes do not fit together: the first
# that works counts
VARIANTS: tuple[dict[str, object], ...] = (
    {},
    {"head_dim": LEFT_OUT, "num_key_value_heads": 4},
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
    {"head_dim": LEFT_OUT, "rotary_dim": LEFT_OUT, "kv_channels": LEFT_OUT},
)


# parts of configurations -> what they take instead
PARTS: dict[str, dict[str, object]] = {
    "vision_config": {"rope_parameters": LEFT_OUT},
    "vlm_config": {"rope_parameters": LEFT_OUT},
}
# parts that need a package that is not required -> what is built instead
INSTEAD = {"timm_wrapper": "clip_vision_model"}
# type -> what it needs beside the general settings; a dict for each part of its configuration
_FULL = ["full_attention"] * 2
_LINEAR = ["linear_attention", "full_attention"]
_INDEXED = ["indexed_attention"] * 2
_MIXED = ["sliding_attention", "full_attention"]
_SPARSE = ["dense", "sparse"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {**_ROPE, "mrope_section": [1, 1, 2]}
_HALF_MROPE = {**_MROPE, "mrope_section": [2, 1, 1]}
_LATENT = {"num_key_value_heads": 4, "head_dim": LEFT_OUT}
_DELTA = {
    "layer_types": _LINEAR,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
_KDA = {
    **_LATENT,
    "layer_types": _LINEAR,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mlp_layer_types": _SPARSE,
}
_SAM = {
    "output_channels": 16,
    "global_attn_indexes": [1],
    "mlp_dim": 48,
    "num_pos_feats": 16,
}
_VQ = {
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
    "embed_dim": 8,
    "latent_channels": 8,
    "attn_resolutions": [],
    "num_embeddings": 16,
    "codebook_size": 16,
}
_INKLING = {
    "unpadded_vocab_size": VOCABULARY,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 24,
    "d_rel": 4,
    "rel_extent": 32,
    "n_layers_per_attn_res_block": 1,
    "layer_types": ["hybrid_sliding", "hybrid"],
}
_LOOP = {
    **_INKLING,
    "num_hidden_layers": 4,
    "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 2,
    "loop_gate_rank": 4,
}
_QSA = {
    **_DELTA,
    "rope_parameters": _MROPE,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
}
FAMILIES: dict[str, dict[str, object]] = {
    "apertus1p5": {
        "image_token_offset": 400,
        "audio_token_offset": 416,
        "vision_config": _VQ,
        "audio_config": {
            "codebook_dim": 32,
            "hidden_size": 32,
            "codebook_size": 16,
            "decoder_hidden_size": 32,
            "decoder_intermediate_size": 48,
            "decoder_num_layers": 1,
            "decoder_attention_num_groups": 4,
            "num_filters": 4,
        },
    },
    "bailing_hybrid": _KDA,
    "kimi_linear": _KDA,
    "blt": {
        "num_hidden_layers": 2,
        "encoder_hash_byte_group_vocab": 500,
        "encoder_config": {"hidden_size_global": 32, "num_key_value_heads": 4},
        "decoder_config": {"hidden_size_global": 32, "num_key_value_heads": 4},
        "global_config": {"num_key_value_heads": 4},
        "patcher_config": {"num_key_value_heads": 4},
    },
    "chameleon": {"vocabulary_map": {"<image>": 499}, "vq_config": _VQ},
    "cohere2_vision": {"alignment_intermediate_size": 48},
    "cohere_compass": {
        "text_config": {
            "rope_parameters": {
                "full_attention": _ROPE,
                "sliding_attention": _ROPE,
            }
        }
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}
    },
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": _SPARSE},
        "vision_config": {
            "sam_config": {**_SAM, "downsample_channels": [16, 32]}
        },
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": _SAM},
    "diffusion_gemma": {"canvas_length": 8, "text_config": {"top_k_experts": 2}},
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {
        "text_config": {
            **_LATENT,
            "head_dim": 16,
            "per_layer_config": {},
            "layer_types": ["indexed_attention", "sliding_attention"],
        },
        "vision_config": {
            "per_layer_config": {},
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
        },
        "audio_config": {
            "adapter_input_size": 32,
            "adapter_out_dim": 32,
            "downsample_hidden_size": 16,
        },
    },
    "emu3": {
        "vocabulary_map": {"<image>": 499},
        "vq_config": _VQ,
        "text_config": {"pad_token_id": 0},
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [16, 16],
            "mlp_layer_types": _SPARSE,
        }
    },
    "florence2": {
        "vision_config": {
            "depths": [1],
            "patch_size": [7],
            "patch_stride": [4],
            "patch_padding": [3],
            "patch_prenorm": [False],
            "embed_dim": [32],
            "num_heads": [4],
            "num_groups": [4],
            "projection_dim": 32,
        }
    },
    "gemma3n_text": {
        "layer_types": _MIXED,
        "num_kv_shared_layers": 0,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.0, 0.0],
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "gemma4_unified": {
        "text_config": {"layer_types": _MIXED, "per_layer_config": {}}
    },
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 2,
        },
        "backbone_hidden_size": 32,
    },
    "gemma4_unified_assistant": {
        "text_config": {"per_layer_config": {}, "num_kv_shared_layers": 2},
        "backbone_hidden_size": 32,
    },
    "glm5_next": {
        "text_config": {
            **_LATENT,
            "qk_rope_head_dim": 0,
            "layer_types": ["linear_attention", "indexed_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        }
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 24},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 1]],
        "spatial_target_layers": [1],
        "downsample_rate": "1/2",
        "vision_config": {"hidden_size": 64},
        "qformer_config": {"encoder_hidden_size": 64},
    },
    "granite_docling": {
        "vision_config": {"out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    },
    "hunyuan_vl": {"text_config": {"head_dim": 8, "rope_parameters": _MROPE}},
    "hy_v4_vl": {"text_config": {**_LATENT, "rope_parameters": _HALF_MROPE}},
    "inkling2": {"text_config": _INKLING},
    "inkling2_text": _INKLING,
    "inkling2_loop": {"text_config": _LOOP},
    "inkling2_loop_text": _LOOP,
    "janus": {
        "vq_config": {
            **_VQ,
            "projection_dim": 32,
            "num_patches": 2,
            "image_token_embed_dim": 32,
        },
        "vision_config": {"projection_dim": 32},
    },
    "llama4": {
        "text_config": {
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 24,
            "intermediate_size_mlp": 48,
        },
        "vision_config": {
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    },
    "longcat_flash": {"num_key_value_heads": 4},
    "molmo2": {
        "vision_config": {"image_size": [28, 28], "num_position_embeddings": 4},
        "adapter_config": {
            "vision_feature_layer": [1, 0],
            "text_hidden_size": 32,
        },
    },
    "muse_glimmer": {"out_hidden_size": 128, "projector_hidden_size": 32},
    "muse_spark": {
        "out_hidden_size": 128,
        "projector_hidden_size": 32,
        "audio_config": {
            "patch_sizes": [16, 6],
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "out_hidden_size": 32,
        },
    },
    "musicgen": {
        "decoder": {
            "pad_token_id": 0,
            "bos_token_id": 0,
            "decoder_start_token_id": 0,
        }
    },
    "musicgen_melody": {
        "decoder": {
            "pad_token_id": 0,
            "bos_token_id": 0,
            "decoder_start_token_id": 0,
        }
    },
    "nemotron_h_omni": {
        "text_config": {
            "layers_block_type": ["linear_attention", "full_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
        "projector_hidden_size": 32,
        "vision_hidden_size": 32,
        "vision_config": {"video_temporal_patch_size": 2},
    },
    "phi4_multimodal": {
        "audio_config": {
            "num_blocks": 1,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
            "input_size": 80,
        }
    },
    "pp_formulanet": {
        "vision_config": {
            **_SAM,
            "post_conv_in_channels": 16,
            "post_conv_mid_channels": 16,
            "post_conv_out_channels": 32,
            "decoder_hidden_size": 32,
        }
    },
    "qwen2_5_omni_thinker": {
        "vision_start_token_id": 497,
        "text_config": {"rope_parameters": _MROPE},
    },
    "qwen2_5_vl": {"text_config": {"rope_parameters": _MROPE}},
    "qwen2_vl": {"text_config": {"rope_parameters": _MROPE}},
    "qwen3_5": {"text_config": {**_DELTA, "rope_parameters": _MROPE}},
    "qwen3_5_moe": {"text_config": {**_DELTA, "rope_parameters": _MROPE}},
    "qwen3_5_moe_text": {**_DELTA, "rope_parameters": _MROPE},
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"],
        "lru_width": 32,
        "attention_window_size": 24,
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [16, 32],
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hidden_dropout_prob": 0.0,
        "hash_seed": 0,
    },
    "roc_bert": {
        "pronunciation_vocab_size": VOCABULARY,
        "shape_vocab_size": VOCABULARY,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "step3p7": {
        "text_config": {
            "sliding_window": 24,
            "num_sliding_attention_heads": 4,
            "layer_types": _FULL,
        }
    },
    "udop": {"decoder_start_token_id": 0, "bos_token_id": 0},
    "unlimited_ocr": {
        "vision_config": {
            "sam_config": {**_SAM, "downsample_channels": [16, 32]}
        },
        "text_config": {"sliding_window": 24},
    },
    "vision-encoder-decoder": {
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "decoder": {"is_decoder": True, "add_cross_attention": True},
    },
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_dt_rank": 4,
        "mamba_d_state": 8,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_d_state": 16,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "hybrid_layer_ids": [1, 3],
        "kv_channels": 8,
    },
    "glm4v_moe": {
        "text_config": {
            "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}
        }
    },
    "xmod": {"default_language": "en_XX"},
    "qwen3_omni_moe_thinker": {
        "vision_start_token_id": 497,
        "audio_config": {
            "output_dim": 32,
            "downsample_hidden_size": 16,
            "num_mel_bins": 16,
            "max_source_positions": 16,
        },
        "text_config": {"rope_parameters": _MROPE},
    },
    "kosmos-2": {"latent_query_num": 4},
    "pix2struct": {"text_config": {"d_kv": 8}, "vision_config": {"d_kv": 8}},
    "perception_lm": {"vision_config": {"model_args": {"embed_dim": 32}}},
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "minicpm_ocr": {"text_config": {**_DELTA, "rope_parameters": _MROPE}},
    "minicpmv4_6": {"text_config": {**_DELTA, "rope_parameters": _MROPE}},
    "minicpmv4_7": {"text_config": {**_DELTA, "rope_parameters": _MROPE}},
    "zaya": {"num_experts_per_tok": 1},
}


def _pixels() -> torch.Tensor:
    """One image."""
    generator = torch.Generator().manual_seed(3)
    return torch.rand(1, 3, 28, 28, generator=generator)


def _patches() -> torch.Tensor:
    """The row, the column and the pixels of each patch of an image."""
    generator = torch.Generator().manual_seed(3)
    places = torch.tensor([[[1.0, 1.0], [1.0, 2.0], [2.0, 1.0], [2.0, 2.0]]])
    return torch.cat([places, torch.rand(1, 4, 768, generator=generator)], 2)


def _codebooks(ids: torch.Tensor) -> dict[str, object]:
    """One prompt, whose tokens are in as many rows as there are codebooks."""
    return {"inputs": ids.repeat(4, 1), "num_return_sequences": 1}


# what a call of a type is made of, if it is more than the tokens
_CALLS: dict[str, Callable[[torch.Tensor], dict[str, object]]] = {
    "blip": lambda ids: {"pixel_values": _pixels(), "input_ids": ids},
    "blip-2": lambda ids: {"pixel_values": _pixels(), "input_ids": ids},
    "idefics": lambda ids: {
        "input_ids": ids,
        "pixel_values": _pixels()[:, None],
        "image_attention_mask": torch.ones(*ids.shape, 1, dtype=torch.long),
    },
    "instructblip": lambda ids: {
        "pixel_values": _pixels(),
        "qformer_input_ids": ids[:, :8],
        "input_ids": ids,
    },
    "instructblipvideo": lambda ids: {
        "pixel_values": _pixels()[:, None].repeat(1, 4, 1, 1, 1),
        "qformer_input_ids": ids[:, :8],
        "input_ids": ids,
    },
    "kosmos-2": lambda ids: {
        "pixel_values": _pixels(),
        "image_embeds_position_mask": torch.arange(ids.shape[1])[None] < 4,
        "input_ids": ids,
    },
    "musicgen": _codebooks,
    "musicgen_melody": _codebooks,
    "pix2struct": lambda ids: {"flattened_patches": _patches()},
    "pp_formulanet": lambda ids: {"pixel_values": _pixels()},
    "udop": lambda ids: {
        "input_ids": ids,
        "bbox": torch.zeros(*ids.shape, 4),
    },
    "vision-encoder-decoder": lambda ids: {"pixel_values": _pixels()},
}


def call_of(kind: str, ids: torch.Tensor) -> dict[str, object]:
    """Return what `generate` of a type is called with for a prompt of these tokens."""
    return _CALLS[kind](ids) if kind in _CALLS else {"input_ids": ids}
