"""Everything except the tokens that the KV of an SGLang engine depends on: the namespace."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from blake3 import blake3

from pagoda.base.errors import ConfigError
from pagoda.connectors.identity.checkpoint_files import checkpoint_files, snapshot
from pagoda.connectors.identity.lora_adapters import Adapters
from pagoda.connectors.identity.plain_values import plain
from pagoda.connectors.identity.weight_digests import file_digest, files_digest
from pagoda.connectors.sglang.storage_options import StorageOptions
from pagoda.keys import Namespace

_REMEDY = "give the checkpoint's hash as `weights` in --hicache-storage-backend-extra-config"
_CONFIGS = ("config.json", "hf_quant_config.json")
# settings of SGLang's ServerArgs that change, or may change, the KV of the same tokens
_SETTINGS = (
    "attention_backend",
    "context_length",
    "cp_strategy",
    "custom_weight_loader",
    "decode_attention_backend",
    "deepep_dispatcher_output_dtype",
    "device",
    "disable_hybrid_swa_memory",
    "dllm_algorithm",
    "dtype",
    "enable_cp_decode_attn_tp",
    "enable_decoder_swa_bounded_replay",
    "enable_deepseek_v4_fp4_indexer",
    "enable_deterministic_inference",
    "enable_dsa_cache_layer_split",
    "enable_encoder_swa_bounded_replay",
    "enable_hisparse",
    "enable_int8_mamba_checkpoint",
    "enable_linear_replayssm",
    "enable_mamba_cache_stochastic_rounding",
    "enable_mis",
    "enable_multi_layer_eagle",
    "enable_multimodal",
    "enable_precise_embedding_interpolation",
    "enable_quant_communications",
    "enable_tf32_matmul",
    "enable_w4a4_mxfp4_megamoe",
    "experts_shared_outer_loras",
    "flashinfer_a2a_dispatch_type",
    "flashinfer_mxfp4_moe_precision",
    "forward_hooks",
    "hisparse_config",
    "image_processor_backend",
    "is_embedding",
    "json_model_override_args",
    "kt_max_deferred_experts_per_token",
    "kt_method",
    "kt_num_gpu_experts",
    "kv_cache_dtype",
    "language_model_only",
    "language_only",
    "linear_attn_backend",
    "linear_attn_decode_backend",
    "linear_attn_prefill_backend",
    "load_format",
    "mamba_backend",
    "mamba_cache_philox_rounds",
    "mamba_ssm_dtype",
    "mm_attention_backend",
    "mm_process_config",
    "model_config_parser",
    "model_impl",
    "model_loader_extra_config",
    "modelopt_quant",
    "prefill_attention_backend",
    "prefill_kv_cache_dequant_dtype",
    "qsa_indexer_dtype",
    "quantization",
    "quantize_and_serve",
    "rl_on_policy_target",
    "rl_quant_profile",
    "speculative_algorithm",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_model_quantization",
    "speculative_draft_sink_size",
    "speculative_draft_window_size",
    "speculative_enable_w4a4_mxfp4_megamoe",
    "trust_remote_code",
    "weight_version",
)
# settings that are the path of a file or a directory, which is named by its content
_FILES = (
    "decrypted_config_file",
    "decrypted_draft_config_file",
    "dllm_algorithm_config",
    "kt_weight_path",
    "modelopt_checkpoint_restore_path",
    "quantization_param_path",
    "uno_lora_path",
)

# SGLang has more than 700 environment variables. Those with one of these words in their name
# change, or may change, values or bytes of KV: precisions, layouts of pools, approximate attention,
# other code for a model.
_ENVIRONMENT = re.compile(
    "^(SGL|FLASHINFER|USE|DEEP_).*(ATTENTION|ATTN|BF16|DSA|DSV4|DTYPE|FP16|FP32|FP4|FP8|HND|IGNORED_LAYERS|INDEX|INT8|"
    "LAYOUT|MLA|MODEL_ARCH|MODEL_PACKAGE|MXFP|QUANT|ROPE|SOFTMAX|SPARSE|TOPK)"
)


class EngineFacts(NamedTuple):
    """The facts of all pools of an engine. `values`: everything that changes the values of KV,
    except ranks.
    """

    model: str
    values: str
    adapters: str


def engine_facts(options: StorageOptions) -> EngineFacts:
    """Return the facts of this process's engine. Reads the weight files.

    Raises ConfigError, which says what to do, if the weights or an adapter cannot be named.
    """
    args = _server_args()
    settings = {name: getattr(args, name, None) for name in _SETTINGS}
    settings |= {
        name: _content(name, value)
        for name in _FILES
        if (value := getattr(args, name, None))
    }
    settings["environment"] = {
        name: value
        for name, value in os.environ.items()
        if _ENVIRONMENT.match(name)
    }
    try:
        values = json.dumps(
            plain([_release(), _weights(args, options), settings]), sort_keys=True
        )
    except ConfigError:
        raise
    except ValueError as unstable:
        raise ConfigError(str(unstable)) from None
    model = (
        str(getattr(args, "model_path", None) or "")
        .rstrip("/")
        .rsplit("/", 1)[-1]
    )
    return EngineFacts(
        model, values, _adapters(getattr(args, "lora_paths", None) or ())
    )


def namespace_of(
    engine: EngineFacts, storage: Any, kv_dtype: str, salt: str, *, sharded: bool
) -> Namespace:
    """Return the namespace of one pool of an engine, without the layout. Pure.

    `storage`: SGLang's HiCacheStorageConfig. `sharded`: each tensor-parallel rank has its own part
    of the pool, so the rank is part of what names the weights. A request's salt and adapter are in
    SGLang's keys.
    """
    shard = [
        storage.tp_size,
        storage.tp_rank if sharded else None,
        storage.pp_size,
        storage.pp_rank,
        storage.attn_cp_size,
        storage.attn_cp_rank,
    ]
    found = blake3(derive_key_context="PagodaKV weights of an SGLang engine")
    found.update(json.dumps([engine.values, shard]).encode())
    return Namespace(
        model=engine.model or str(storage.model_name or "sglang"),
        weights=found.hexdigest(16),
        kv_dtype=kv_dtype,
        world_size=storage.tp_size * storage.pp_size,
        lora=engine.adapters,
        salt=salt,
    )


def _release() -> str:
    import sglang

    return str(sglang.__version__)


def _server_args() -> Any:
    """Return the resolved arguments of this process's SGLang; None outside a server."""
    from sglang.srt.runtime_context import get_context

    try:
        return SimpleNamespace(**get_context().resolved_server_args_dict())
    except ValueError:  # not published
        return None


def _weights(args: Any, options: StorageOptions) -> object:
    """Return a name of the checkpoints: the model's, and a draft's, whose KV is in pools with the
    same keys.
    """
    if options.weights is not None:
        return ["given", options.weights]
    if args is None:
        raise ConfigError(
            f"no server arguments of SGLang in this process: {_REMEDY}"
        )
    checkpoints = [(args.model_path, args.revision, args.load_format)]
    if draft := args.speculative_draft_model_path:
        checkpoints.append(
            (
                draft,
                args.speculative_draft_model_revision,
                args.speculative_draft_load_format,
            )
        )
    return [
        "files",
        *(
            _digest(args, path, revision, form or args.load_format)
            for path, revision, form in checkpoints
        ),
    ]


def _digest(args: Any, model: str, revision: str | None, load_format: str) -> str:
    directory = snapshot(model, revision, args.download_dir)
    if directory is None:
        raise ConfigError(
            f"{model}: no directory and no snapshot in the hub's cache here; {_REMEDY}"
        )
    # without enable_multimodal SGLang decides by the model
    model_config = SimpleNamespace(
        multimodal_config=args.enable_multimodal is not False or None,
        trust_remote_code=args.trust_remote_code,
    )
    try:
        names = checkpoint_files(
            directory, model_config, SimpleNamespace(load_format=load_format)
        )
        return files_digest(
            directory,
            [
                *(name for name in _CONFIGS if Path(directory, name).is_file()),
                *names,
            ],
        )
    except (OSError, ValueError) as trouble:
        raise ConfigError(
            f"{model}: its weights cannot be named ({trouble}); {_REMEDY}"
        ) from None


def _content(setting: str, path: str) -> str:
    """Return the digest of a file, or of all files of a directory, that a setting names."""
    place = Path(path).expanduser()
    try:
        if place.is_dir():
            names = sorted(
                str(each.relative_to(place))
                for each in place.rglob("*")
                if each.is_file()
            )
            return files_digest(place, names)
        return file_digest(place)
    except OSError as trouble:
        option = setting.replace("_", "-")
        raise ConfigError(
            f"--{option} {path}: cannot be read here, so the KV cannot be named "
            f"({trouble.strerror}); "
            "give the path of a local file or directory"
        ) from None


def _adapters(listed: Any) -> str:
    """Return a name of the content of the command line's adapters: SGLang's keys have only their
    paths.

    An adapter that is loaded later has a random name in SGLang's keys.
    """
    adapters = Adapters()
    found = []
    for number, one in enumerate(listed):
        path = (
            one["lora_path"]
            if isinstance(one, dict)
            else getattr(one, "lora_path", one)
        )
        found.append(
            adapters.name(SimpleNamespace(lora_path=path, lora_int_id=number))
        )
        if found[-1] is None:
            raise ConfigError(
                f"--lora-paths: {path}: its files cannot be read here, so its KV cannot be named"
            )
    named = blake3(
        json.dumps(found).encode(), derive_key_context="PagodaKV adapters"
    ).hexdigest(16)
    return named if found else ""
