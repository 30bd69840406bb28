"""What the connector refuses: each refusal is a sentence that says what to do. Unknown kinds are refused."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pagoda.metrics import guarded_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from pagoda.connectors.vllm.options import ConnectorOptions

__all__ = ["TESTED", "check_engine", "check_vllm", "log_hashes"]

log = guarded_logger("pagoda.vllm")

TESTED = (
    (0, 32),
    (0, 33),
)  # minor releases of vLLM that this connector is tested with; pyproject.toml has them too
_ROUTE_B = 'write "kv_connector": "PagodaHybridConnector" (pagoda vllm --hybrid) instead'
_HASHES = ("sha256", "sha256_cbor")
# spec classes by exact name: a subclass is an unknown kind until it has been checked
_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_HYBRID = (*_FULL, "ChunkedLocalAttentionSpec", "MambaSpec", "SlidingWindowMLASpec", "SlidingWindowSpec")


def check_vllm(options: ConnectorOptions) -> None:
    """Raise ValueError, which says what to do, if this vLLM or these options cannot work. Changes nothing."""
    import vllm

    check_version(vllm.__version__, options.allow_untested_vllm)
    if options.config.host_size == 0:
        raise ValueError(
            "host_size = 0: chunks travel through the host tier, which all processes of the engine share; set"
            " host_size, such as '8GiB', and host_shared = true"
        )
    if not options.config.host_shared:
        raise ValueError(
            "host_shared = false: vLLM's scheduler and workers are processes that share the host tier; leave"
            " host_shared at true"
        )


def check_version(version: str, allow_untested: bool) -> None:
    """Raise ValueError if `version` of vLLM is older than those tested, or newer without `allow_untested_vllm`."""
    oldest, *_, newest = (".".join(map(str, release)) for release in TESTED)
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else None
    if release in TESTED:
        return
    if release is not None and release < TESTED[0]:
        raise ValueError(
            f"vLLM {version} is older than {oldest}, which this connector needs: install vLLM {newest}"
        )
    if not allow_untested:
        raise ValueError(
            f"vLLM {version} was not tested with this connector, {newest} was: install vLLM {newest}, or allow it"
            ' (pagoda vllm --allow-untested-vllm; "allow_untested_vllm": true in kv_connector_extra_config)'
        )


def log_hashes(vllm_config: VllmConfig) -> None:
    """Log what decides vLLM's block hashes, if it is not the default: keys are made of them."""
    seed, algorithm = os.environ.get("PYTHONHASHSEED"), str(vllm_config.cache_config.prefix_caching_hash_algo)
    if seed is not None or algorithm != _HASHES[0]:
        log.info(
            "block hashes are made by %s with PYTHONHASHSEED %s: engines share chunks only where both are the same",
            algorithm,
            "not set" if seed is None else f"= {seed}",
        )


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, hybrid: bool) -> None:
    """Raise ValueError, which says what to do, if KV of this engine cannot be cut into chunks. Changes nothing.

    `hybrid`: the engine uses the OffloadingSpec, where vLLM manages several KV cache groups.
    """
    for setting, why in _refusals(vllm_config, hybrid):
        raise ValueError(f"{setting}: {why}")
    groups = list(kv_cache_config.kv_cache_groups)
    if not groups:
        raise ValueError("this model keeps no KV cache: there is nothing to store; leave the connector out")
    if len(groups) > 1 and not hybrid:
        raise ValueError(f"{len(groups)} KV cache groups (a hybrid model): {_ROUTE_B}")
    for group in groups:
        _check_group(group, hybrid)
    if kv_cache_config.hisparse_host_num_blocks is not None:
        raise ValueError("HiSparse keeps KV in a separate host pool: leave hisparse_config out")


def _check_group(group: Any, hybrid: bool) -> None:
    if group.host_resident or group.role.name != "DEFAULT" or not group.enable_kv_transfer:
        raise ValueError("HiSparse groups keep KV in a separate host pool: leave hisparse_config out")
    for spec in _layer_specs(group.kv_cache_spec):
        kind = type(spec).__name__
        if kind not in (_HYBRID if hybrid else _FULL):
            remedy = _ROUTE_B if kind in _HYBRID else "leave the connector out for this model"
            raise ValueError(
                f"KV cache layers of kind {kind} {_WHY.get(kind, 'are not known here')}: {remedy}"
            )
        if getattr(spec, "non_causal", False):
            raise ValueError(
                "layers that attend to later tokens (prefix LM): the KV of a chunk depends on what follows it; leave"
                " the connector out for this model"
            )
        if kind in _FULL and getattr(spec, "tokens_per_state", 1) != 1:
            raise ValueError(
                "layers that keep one state for several tokens are not supported: leave the connector out for"
                " this model"
            )


_WHY = {
    "ChunkedLocalAttentionSpec": "forget tokens",
    "CircularBufferSpec": "keep a ring of raw keys beside the KV",
    "CrossAttentionSpec": "keep the KV of an encoder",
    "EncoderOnlyAttentionSpec": "belong to an encoder",
    "HiddenStateCacheSpec": "keep hidden states",
    "MambaSpec": "keep a recurrent state",
    "RSWASpec": "give up blocks in the middle of a sequence",
    "SinkFullAttentionSpec": "begin with attention sinks that are not tokens",
    "SlidingWindowMLASpec": "forget tokens",
    "SlidingWindowSpec": "forget tokens",
}


def _layer_specs(spec: KVCacheSpec) -> Iterator[KVCacheSpec]:
    inner = getattr(spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs: one spec for each layer
    if inner is None:
        yield spec
    else:
        for each in inner.values():
            yield from _layer_specs(each)


_ONE = {  # settings that must be 1
    "pipeline_parallel_size": "each stage has its own layers, which is not supported yet",
    "decode_context_parallel_size": "ranks share the tokens of a block, which is not supported",
    "prefill_context_parallel_size": "ranks share the tokens of a prompt, which is not supported",
}


def _refusals(vllm_config: Any, hybrid: bool) -> Iterator[tuple[str, str]]:
    """Yield each setting that is refused, and the reason with what to do."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    for setting, reason in _ONE.items():
        if (size := getattr(parallel, setting)) > 1:
            yield setting, f"{size}: {reason}; set it to 1"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        why = "the scales are found at run time and differ from engine to engine; set it to false"
        yield "calculate_kv_scales", why
    if (algorithm := str(vllm_config.cache_config.prefix_caching_hash_algo)) not in _HASHES:
        why = (
            f"{algorithm!r} can be made to collide by a sender of prompts, and chunks outlive the engine; pass"
            " --prefix-caching-hash-algo sha256"
        )
        yield "prefix_caching_hash_algo", why
    if hybrid and (role := transfer.kv_role) != "kv_both":
        why = f'{role!r}: vLLM\'s OffloadingConnector stores and loads; write "kv_role": "kv_both"'
        yield "kv_role", why
    if of_model := _model_refusal(vllm_config):
        yield "model", of_model
    if vllm_config.attention_config.hisparse_config is not None:
        yield "hisparse_config", "KV is in a separate host pool; leave it out"
    if parallel.enable_elastic_ep:
        yield "enable_elastic_ep", "the ranks change; leave it out"
    # all ranks write the parts of a chunk into slots of one host tier
    if parallel.nnodes_within_dp > 1:
        why = "the ranks of one engine must share a machine's memory; set --nnodes to 1"
        yield "distributed_executor_backend", why
    if (backend := parallel.distributed_executor_backend) not in (None, "mp", "uni"):
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
            "vLLM's OffloadingConnector tells adapters apart by name and path only, and chunks outlive an adapter's"
            " files; leave enable_lora out, or the connector"
        )
        yield "enable_lora", why
    if not hybrid and transfer.kv_load_failure_policy != "recompute":
        why = 'a lost chunk would fail the request; write "kv_load_failure_policy": "recompute" in --kv-transfer-config'
        yield "kv_load_failure_policy", why


def _model_refusal(vllm_config: Any) -> str | None:
    model = vllm_config.model_config
    if model.is_encoder_decoder:
        return "an encoder and a decoder: the KV depends on more than the tokens; leave the connector out"
    if getattr(model, "is_diffusion", False) or vllm_config.diffusion_config is not None:
        return "a diffusion model rewrites its tokens, and their KV; leave the connector out"
    if vllm_config.attention_config.use_non_causal:
        return "use_non_causal: the KV of a chunk depends on what follows it; leave the connector out"
    return None
