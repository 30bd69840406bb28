"""A tiny hybrid model, a random Gemma 3 whose layers attend to a sliding window or to everything, and its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vllm.engines import connector
from tests.vllm.inside import Room
from tests.vllm.models import BOS, EOS, UNKNOWN, VOCABULARY, write_tokenizer

WINDOW = 96  # tokens; three blocks of the tests' engines
KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2


def make_gemma(directory: Path, seed: int = 0) -> Path:
    """Write a random Gemma 3 with a word-level tokenizer; its weights are so large that texts differ."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=len(KINDS),
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=8192,
        initializer_range=0.3, sliding_window=WINDOW, layer_types=KINDS, query_pre_attn_scalar=64,
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=UNKNOWN, tie_word_embeddings=False,
    )  # fmt: skip
    Gemma3ForCausalLM(config).float().save_pretrained(directory)
    write_tokenizer(directory)
    return directory


# ---- what is done inside the engine's process; takes a Room


def offloading(host: Path, disk: Path, **extra: Any) -> dict[str, Any]:
    """The option of an engine whose OffloadingConnector stores in these tiers."""
    given = connector(host, disk, **extra)["kv_transfer_config"]
    spec = {"spec_name": "PagodaOffloadingSpec", "spec_module_path": "pagoda.connectors.vllm"}
    return {
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": given["kv_connector_extra_config"] | spec,
        }
    }


def anew(room: Room, options: dict[str, Any]) -> None:
    """End the engine, and start another one in the same process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    room.close()
    cleanup_dist_env_and_memory()
    room.__init__(options)  # type: ignore[misc]


def groups(room: Room) -> list[str]:
    """What kinds of KV cache groups the engine has."""
    return [type(group.kv_cache_spec).__name__ for group in room.scheduler.kv_cache_config.kv_cache_groups]


def held(room: Room) -> int:
    """How many slots the scheduler's half holds."""
    return int(room.scheduler.connector.connector_scheduler.manager._questions._finder.holds.count)


def reset_all(room: Room) -> None:
    """Empty the device's cache and ours, as after an update of the weights."""
    assert room.llm.reset_prefix_cache(reset_connector=True)


def clear_before_loads(room: Room) -> None:
    """From now on everything is removed from all tiers between vLLM's decision to load and the load."""
    worker = room.worker_half.connector_worker.worker
    submit = worker.submit_load

    def cleared(*args: Any, **kwargs: Any) -> Any:
        assert worker._cache.clear(everything=True).ok
        room.kept["cleared"] = room.kept.get("cleared", 0) + 1
        return submit(*args, **kwargs)

    worker.submit_load = cleared


def cleared(room: Room) -> int:
    """How many loads had their chunks removed."""
    return int(room.kept.get("cleared", 0))
