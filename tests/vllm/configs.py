"""Real configs of vLLM, and KV caches as its workers allocate them, without an engine."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1"
)

BLOCK = 32
TRANSFER = {
    "kv_connector": "PagodaConnector",
    "kv_connector_module_path": "pagoda.connectors.vllm",
}
TRANSFER |= {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def engine_config(model: Path, layout: str = "LBHNC", **options: Any) -> Any:
    """The VllmConfig of an engine of `model`, with the connector named and the layout chosen."""
    from vllm import EngineArgs

    given = {
        "model": str(model),
        "dtype": "bfloat16",
        "block_size": BLOCK,
        "max_model_len": 4096,
    }
    given |= {"enforce_eager": True, "kv_transfer_config": TRANSFER}
    config = EngineArgs(**(given | options)).create_engine_config()
    config.cache_config.kv_cache_layout = layout
    return config


def make_layers(
    config: Any, layers: int = 4, kv_heads: int = 2
) -> dict[str, Any]:
    """Make attention layers, which vLLM notes in the config; return the spec of each."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    specs = {}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config):
            for number in range(layers):
                name = f"model.layers.{number}.self_attn.attn"
                layer = Attention(
                    4,
                    64,
                    0.125,
                    num_kv_heads=kv_heads,
                    cache_config=config.cache_config,
                    prefix=name,
                )
                specs[name] = layer.get_kv_cache_spec(config)
    finally:
        torch.set_default_dtype(before)
    return specs


def allocate(
    config: Any,
    specs: dict[str, Any],
    num_blocks: int = 6,
    kernel_block_size: int | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Return the KVCacheConfig and the KV caches that vLLM makes of these specs."""
    import torch
    from vllm.v1.worker.utils import allocate_kv_cache

    try:
        planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ModuleNotFoundError:  # vLLM 0.32
        planning = importlib.import_module("vllm.v1.core.kv_cache_utils")
    groups = planning.get_kv_cache_groups(config, specs)
    memory = num_blocks * sum(spec.page_size_bytes for spec in specs.values())
    cache_config = replace(
        planning.get_kv_cache_config_from_groups(config, groups, memory),
        kv_cache_layout=config.cache_config.kv_cache_layout,
    )
    layout = config.cache_config.get_resolved_kv_cache_layout()
    sizes = (
        None if kernel_block_size is None else [kernel_block_size] * len(groups)
    )
    return cache_config, allocate_kv_cache(
        cache_config, torch.device("cpu"), layout, sizes
    )


def flip(path: Path, at: int, count: int = 1) -> None:
    """Turn bits of that many bytes; the size stays."""
    with open(path, "r+b") as file:
        file.seek(at)
        there = file.read(count)
        file.seek(at)
        file.write(there.translate(bytes(byte ^ 0x55 for byte in range(256))))
