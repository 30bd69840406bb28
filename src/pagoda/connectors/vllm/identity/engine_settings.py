"""The settings of a vLLM engine that change what KV it computes, as plain values with the same text
everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagoda.connectors.identity.plain_values import plain, rope_types, stable

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# rotary embeddings whose angles for a position do not depend on the engine's longest context
_LENGTH_BLIND_ROPES = frozenset(
    {None, "default", "linear", "llama3", "yarn", "mrope", "proportional"}
)
# fields of the multimodal config for memory, speed or checks; all other fields may change the KV
_MULTIMODAL_ROOM = (
    "interleave_mm_strings",
    "limit_per_prompt",
    "mm_encoder_tp_mode",
    "mm_hasher_algorithm",
    "mm_ipc_gpu_memory_gb",
    "mm_processor_cache_gb",
    "mm_processor_cache_type",
    "mm_shm_cache_max_object_size_mb",
    "mm_tensor_ipc",
    "skip_mm_profiling",
)
_CACHE = (
    "cache_dtype",
    "calculate_kv_scales",  # not in every version of vLLM
    "kv_cache_dtype_skip_layers",
    "kv_sharing_fast_prefill",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "swa_bounded_replay",
)
# variables that change how vLLM quantises weights or activations, or routes tokens
_ENVIRONMENT = (
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD",
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD",
)
# flags of the same kind, named only if they differ from vLLM's defaults
_FLAGS = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": False,
    "VLLM_CPU_INT4_W4A8": True,
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": False,
}
_ATTENTION_FLAGS = (  # false by default
    "disable_flashinfer_q_quantization",
    "indexer_sparse_logits",
    "use_prefill_query_quantization",
)
# for these vLLM uses the model itself as the draft
_NO_DRAFT = ("ngram", "ngram_gpu", "suffix")


def config_facts(vllm_config: VllmConfig) -> dict[str, object]:
    """Return all settings that change the values of KV, without the weights. Changes nothing.

    Raises ValueError for a setting that has no stable text.
    """
    from vllm import envs

    cache = vllm_config.cache_config
    attention = vllm_config.attention_config
    facts = {
        "model": _model_facts(vllm_config.model_config),
        "cache": {name: getattr(cache, name, None) for name in _CACHE},
        "attention": [
            attention.use_non_causal,
            attention.indexer_kv_dtype,
            *(
                name
                for name in _ATTENTION_FLAGS
                if getattr(attention, name, False)
            ),
        ],
        "environment": {name: getattr(envs, name, None) for name in _ENVIRONMENT}
        | {
            name: not usual
            for name, usual in _FLAGS.items()
            if bool(getattr(envs, name, usual)) != usual
        },
        "additional": vllm_config.additional_config or None,
        "lora": _lora_facts(vllm_config),
        "draft": _draft_facts(vllm_config),
    }
    return {name: plain(value, name) for name, value in facts.items()}


def _model_facts(model_config: Any) -> dict[str, object]:
    multimodal = model_config.multimodal_config
    return {
        # includes hf_overrides
        "config": stable(model_config.hf_config.to_dict()),
        "architecture": model_config.architecture,
        "class": model_config.model_class_overrides,
        "implementation": model_config.model_impl,
        "convert": model_config.convert_type,
        "dtype": model_config.dtype,
        "quantization": [
            model_config.quantization,
            model_config.quantization_config,
        ],
        "code_revision": model_config.code_revision
        if model_config.trust_remote_code
        else None,
        "disable_sliding_window": model_config.disable_sliding_window,
        "max_model_len": model_config.max_model_len
        if _length_matters(model_config)
        else None,
        "multimodal": None
        if multimodal is None
        else {
            name: value
            for name, value in vars(multimodal).items()
            if name not in _MULTIMODAL_ROOM
        },
    }


def _length_matters(model_config: Any) -> bool:
    """Whether the engine's longest context changes what is computed for a prompt, or may."""
    config = model_config.hf_config.to_dict()
    return (
        # processors size their inputs by it
        model_config.multimodal_config is not None
        # so is its attention's temperature
        or str(config.get("model_type", "")).startswith("llama4")
        or not rope_types(config) <= _LENGTH_BLIND_ROPES
    )


def _lora_facts(vllm_config: VllmConfig) -> object:
    """Return the LoRA settings that change the effect of adapters; None without such settings."""
    lora = vllm_config.lora_config
    if lora is None:
        return None
    dtype = (
        None
        if lora.lora_dtype == vllm_config.model_config.dtype
        else lora.lora_dtype
    )
    facts = [
        dtype,
        lora.target_modules or None,
        lora.enable_tower_connector_lora or None,
    ]
    return facts if any(facts) else None


def _draft_facts(vllm_config: VllmConfig) -> object:
    """Return the draft model's settings if speculation uses one: its layers may keep KV in the same
    blocks.
    """
    draft = draft_config(vllm_config)
    if draft is None:
        return None
    speculative = vllm_config.speculative_config
    return [speculative.method, speculative.kv_cache_dtype, _model_facts(draft)]


def draft_config(vllm_config: VllmConfig) -> Any:
    """Return the ModelConfig of the draft model; None if there is none. Changes nothing."""
    speculative = vllm_config.speculative_config
    if speculative is None or str(speculative.method) in _NO_DRAFT:
        return None
    return speculative.draft_model_config
