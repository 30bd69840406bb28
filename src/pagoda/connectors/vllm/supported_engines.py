"""Refuses engines that cannot be cached; each refusal says what to do. Unknown kinds of KV are
refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pagoda.base.log import guarded_logger
from pagoda.connectors.extra_options import unused_options

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from pagoda.connectors.vllm.options import ConnectorOptions

log = guarded_logger("pagoda.vllm")

# tested minor releases; pyproject.toml and .ci/run have them too
TESTED = ((0, 32), (0, 33))
_ONE_KIND = (
    "or, if the model has no Mamba layers, pass --disable-hybrid-kv-cache-manager"
)
_HASHES = ("sha256", "sha256_cbor")
# spec classes by exact name: a subclass is an unknown kind until it has been checked
FULL = ("FullAttentionSpec", "MLAAttentionSpec")
HYBRID = (
    *FULL,
    "ChunkedLocalAttentionSpec",
    "MambaSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
)


def check_vllm(options: ConnectorOptions) -> None:
    """Raise ValueError, which says what to do, if this vLLM or these options cannot work. Changes
    nothing.
    """
    import vllm

    check_version(vllm.__version__, options.allow_untested_vllm)
    if options.config.host_size == 0:
        raise ValueError(
            "host_size = 0: chunks travel through the host tier, which all processes of the "
            "engine share; set"
            " host_size, such as '8GiB', and host_shared = true"
        )
    if not options.config.host_shared:
        raise ValueError(
            "host_shared = false: vLLM's scheduler and workers are processes that share the host "
            "tier; leave"
            " host_shared at true"
        )


def check_version(version: str, allow_untested: bool) -> None:
    """Raise ValueError if `version` of vLLM is older than those tested, or newer without
    `allow_untested_vllm`.
    """
    oldest, *_, newest = (".".join(map(str, release)) for release in TESTED)
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else None
    if release in TESTED:
        return
    if release is not None and release < TESTED[0]:
        raise ValueError(
            f"vLLM {version} is older than {oldest}, which this connector needs: install vLLM "
            f"{newest}"
        )
    if not allow_untested:
        raise ValueError(
            f"vLLM {version} was not tested with this connector, {newest} was: install vLLM "
            f"{newest}, or allow it"
            ' (pagoda vllm --allow-untested-vllm; "allow_untested_vllm": true in '
            "kv_connector_extra_config)"
        )


def is_hybrid(kv_cache_config: KVCacheConfig) -> bool:
    """Whether an engine has several groups of KV, or KV that forgets tokens: then vLLM's offloading
    selects chunks.
    """
    windows = {*HYBRID} - {*FULL}
    return len(kv_cache_config.kv_cache_groups) > 1 or not windows.isdisjoint(
        _kinds(kv_cache_config)
    )


def has_states(kv_cache_config: KVCacheConfig) -> bool:
    """Whether some layers of a model have a state instead of keys and values, like Mamba and linear
    attention.
    """
    return "MambaSpec" in _kinds(kv_cache_config)


def may_be_hybrid(vllm_config: VllmConfig) -> bool:
    """Whether an engine is probably hybrid, by its model's config; used before its KV groups are
    known.
    """
    model = vllm_config.model_config
    off = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    return not off and bool(
        model.is_hybrid
        or model.get_sliding_window()
        or model.attention_chunk_size
    )


def _kinds(kv_cache_config: KVCacheConfig) -> list[str]:
    groups = kv_cache_config.kv_cache_groups
    return sorted(
        {
            type(spec).__name__
            for group in groups
            for spec in layer_specs(group).values()
        }
    )


def log_choices(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Log how this model's KV is cached and why, the settings of vLLM's block hashes, and options
    without effect.
    """
    kinds = " and ".join(_kinds(kv_cache_config))
    groups = len(kv_cache_config.kv_cache_groups)
    hybrid = "a hybrid model, vLLM's offloading selects the chunks of each kind"
    way = hybrid if is_hybrid(kv_cache_config) else "the KV of all tokens is kept"
    log.info("the model's KV is %s in %d group(s): %s", kinds, groups, way)
    seed = os.environ.get("PYTHONHASHSEED")
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if seed is not None or algorithm != _HASHES[0]:
        log.info(
            (
                "block hashes use %s and PYTHONHASHSEED %s: engines share chunks only if both are "
                "the same"
            ),
            algorithm,
            "not set" if seed is None else f"= {seed}",
        )
    if unused := unused_options(
        "vLLM", vllm_config.kv_transfer_config.kv_connector_extra_config
    ):
        log.warning(unused)


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ValueError, which says what to do, if KV of this engine cannot be cut into chunks.
    Changes nothing.
    """
    for setting, why in _refusals(vllm_config, is_hybrid(kv_cache_config)):
        raise ValueError(f"{setting}: {why}")
    groups = list(kv_cache_config.kv_cache_groups)
    if not groups:
        raise ValueError(
            "this model keeps no KV cache: there is nothing to store; leave the connector out"
        )
    for group in groups:
        _check_group(group)
    if kv_cache_config.hisparse_host_num_blocks is not None:
        raise ValueError(
            "HiSparse keeps KV in a separate host pool: leave hisparse_config out"
        )


def _check_group(group: Any) -> None:
    if (
        group.host_resident
        or group.role.name != "DEFAULT"
        or not group.enable_kv_transfer
    ):
        raise ValueError(
            "HiSparse groups keep KV in a separate host pool: leave hisparse_config out"
        )
    for spec in layer_specs(group).values():
        kind = type(spec).__name__
        if kind not in HYBRID:
            why = WHY.get(kind, "are not known here")
            raise ValueError(
                f"KV cache layers of kind {kind} {why}: leave the connector out for this model"
            )
        if getattr(spec, "non_causal", False):
            raise ValueError(
                "layers that attend to later tokens (prefix LM): the KV of a chunk depends on "
                "what follows it; leave"
                " the connector out for this model"
            )
        if kind in FULL and getattr(spec, "tokens_per_state", 1) != 1:
            raise ValueError(
                "layers that keep one state for several tokens are not supported: leave the "
                "connector out for"
                " this model"
            )


WHY = {
    "CircularBufferSpec": "keep a ring of raw keys beside the KV",
    "CrossAttentionSpec": "keep the KV of an encoder",
    "EncoderOnlyAttentionSpec": "belong to an encoder",
    "HiddenStateCacheSpec": "keep hidden states",
    "RSWASpec": "give up blocks in the middle of a sequence",
    "SinkFullAttentionSpec": "begin with attention sinks that are not tokens",
}


def layer_specs(group: Any) -> dict[str, Any]:
    """Return the spec of each layer of a group, in the group's order; layers that use another's KV
    may lack one.
    """
    inner = getattr(
        group.kv_cache_spec, "kv_cache_specs", None
    )  # UniformTypeKVCacheSpecs: one for each layer
    if inner is None:
        return dict.fromkeys(group.layer_names, group.kv_cache_spec)
    return {name: inner[name] for name in group.layer_names if name in inner}


_ONE = {  # settings that must be 1
    "pipeline_parallel_size": "each stage has its own layers, which is not supported yet",
    "decode_context_parallel_size": "ranks share the tokens of a block, which is not supported",
    "prefill_context_parallel_size": "ranks share the tokens of a prompt, which is not supported",
}


def _refusals(vllm_config: Any, hybrid: bool) -> Iterator[tuple[str, str]]:
    """Yield each setting that is refused, and the reason with what to do."""
    from vllm.config import get_current_vllm_config_or_none

    parallel = vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    for setting, reason in _ONE.items():
        if (size := getattr(parallel, setting)) > 1:
            yield setting, f"{size}: {reason}; set it to 1"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        why = "the scales are found at run time and differ from engine to engine; set it to false"
        yield "calculate_kv_scales", why
    if (
        algorithm := str(vllm_config.cache_config.prefix_caching_hash_algo)
    ) not in _HASHES:
        why = (
            f"{algorithm!r} can be made to collide by a sender of prompts, and chunks outlive "
            "the engine; pass"
            " --prefix-caching-hash-algo sha256"
        )
        yield "prefix_caching_hash_algo", why
    if hybrid and (role := transfer.kv_role) != "kv_both":
        yield (
            "kv_role",
            f'{role!r}: a hybrid model stores and loads; write "kv_role": "kv_both", {_ONE_KIND}',
        )
    if of_model := _model_refusal(vllm_config):
        yield "model", of_model
    if vllm_config.attention_config.hisparse_config is not None:
        yield (
            "hisparse_config",
            "it keeps KV in a separate host pool; leave it out",
        )
    if parallel.enable_elastic_ep:
        yield "enable_elastic_ep", "the ranks change; leave it out"
    # all ranks write the parts of a chunk into slots of one host tier
    if parallel.nnodes_within_dp > 1:
        why = "the ranks of one engine must share a machine's memory; set --nnodes to 1"
        yield "distributed_executor_backend", why
    if (backend := parallel.distributed_executor_backend) not in (
        None,
        "mp",
        "uni",
    ):
        why = (
            f"{backend!r} may start ranks on several machines, or a scheduler per rank;"
            " pass --distributed-executor-backend mp"
        )
        yield "distributed_executor_backend", why
    speculative = vllm_config.speculative_config
    method = None if speculative is None else str(speculative.method)
    if method in ("extract_hidden_states", "custom_class"):
        why = f"method {method!r} may keep other data than KV in the KV cache; choose another"
        yield "speculative_config", why
    if hybrid and vllm_config.lora_config is not None:
        why = (
            "for a hybrid model vLLM tells adapters apart by name and path only, and chunks "
            "outlive an adapter's files;"
            f" leave enable_lora out, or the connector, {_ONE_KIND}"
        )
        yield "enable_lora", why
    # below a MultiConnector the policy is that of its own configuration, which a worker sees
    engine = (
        getattr(get_current_vllm_config_or_none(), "kv_transfer_config", None)
        or transfer
    )
    if not hybrid and {
        transfer.kv_load_failure_policy,
        engine.kv_load_failure_policy,
    } != {"recompute"}:
        why = (
            'a lost chunk would fail the request; write "kv_load_failure_policy": "recompute" in '
            "--kv-transfer-config"
            " (for MultiConnector and for this connector below it)"
        )
        yield "kv_load_failure_policy", why


def _model_refusal(vllm_config: Any) -> str | None:
    model = vllm_config.model_config
    if model.is_encoder_decoder:
        return (
            "an encoder and a decoder: the KV depends on more than the tokens; leave the "
            "connector out"
        )
    if (
        getattr(model, "is_diffusion", False)
        or vllm_config.diffusion_config is not None
    ):
        return "a diffusion model rewrites its tokens, and their KV; leave the connector out"
    if vllm_config.attention_config.use_non_causal:
        return (
            "use_non_causal: the KV of a chunk depends on what follows it; leave the "
            "connector out"
        )
    return None
