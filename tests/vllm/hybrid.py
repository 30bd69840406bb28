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
    """The option of an engine of a hybrid model that uses these tiers."""
    given = connector(host, disk, **extra)["kv_transfer_config"]
    return {"kv_transfer_config": given | {"kv_connector": "PagodaHybridConnector"}}


def anew(room: Room, options: dict[str, Any]) -> None:
    """End the engine, and start another one in the same process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    room.close()
    cleanup_dist_env_and_memory()
    room.__init__(options)  # type: ignore[misc]


def groups(room: Room) -> list[str]:
    """Return the kinds of the engine's KV cache groups."""
    return [type(group.kv_cache_spec).__name__ for group in room.scheduler.kv_cache_config.kv_cache_groups]


def held(room: Room) -> int:
    """Return how many slots the scheduler's half holds."""
    return int(room.scheduler.connector.connector_scheduler.manager._questions._finder.holds.count)


def reset_all(room: Room) -> None:
    """Empty the device's cache and ours, as after an update of the weights."""
    assert room.llm.reset_prefix_cache(reset_connector=True)


def clear_before_loads(room: Room) -> None:
    """From now on remove everything from all tiers between vLLM's decision to load and the load."""
    worker = room.worker_half.connector_worker.worker
    submit = worker.submit_load

    def cleared(*args: Any, **kwargs: Any) -> Any:
        assert worker._cache.clear(everything=True).ok
        room.kept["cleared"] = room.kept.get("cleared", 0) + 1
        return submit(*args, **kwargs)

    worker.submit_load = cleared


def cleared(room: Room) -> int:
    """Return how many loads had their chunks removed."""
    return int(room.kept.get("cleared", 0))


def stale_hits(room: Room, prompts: list[list[int]], tokens: int) -> list[tuple[int, ...]]:
    """Generate for prompts that are stored, and clear all tiers once the first of them has been promised chunks."""
    manager = room.scheduler.connector.scheduler.manager
    prepare = manager.prepare_load

    def cleared(*args: Any, **kwargs: Any) -> Any:
        spec = prepare(*args, **kwargs)
        if not room.kept.get("stale"):
            room.kept["stale"] = True
            assert manager._cache.clear(everything=True).ok
        return spec

    manager.prepare_load = cleared
    try:
        answers = room.say(prompts, max_tokens=tokens)
    finally:
        del manager.prepare_load
    assert room.kept.pop("stale")
    return [answer.tokens[0] for answer in answers]


def fail_loads(room: Room, prompts: list[list[int]], tokens: int) -> list[tuple[int, ...]]:
    """Generate for these prompts while no load succeeds, although the chunks remain stored."""
    from pagoda.connectors.vllm.offloading.offloading_worker import PagodaOffloadingWorker

    def failing(self: PagodaOffloadingWorker, job: Any) -> int:
        room.kept["failed"] = room.kept.get("failed", 0) + 1
        raise OSError("no")

    load, PagodaOffloadingWorker._load = PagodaOffloadingWorker._load, failing  # type: ignore[method-assign]
    try:
        answers = room.say(prompts, max_tokens=tokens)
    finally:
        PagodaOffloadingWorker._load = load  # type: ignore[method-assign]
    assert 0 < room.kept.pop("failed") <= len(prompts)  # each request tries once
    return [answer.tokens[0] for answer in answers]


def reset_under_load(room: Room, one: list[int], count: int, tokens: int) -> list[tuple[int, ...]]:
    """Generate for a prompt many times, and preempt all running requests each time, as before an update of the weights.

    This happens while others wait for blocks and hold the chunks, so a preempted request is promised them at once. vLLM
    refuses it while a request is loading.
    """
    from vllm import SamplingParams
    from vllm.v1.request import RequestStatus

    engine, scheduler = room.llm.llm_engine, room.scheduler
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for number in range(count):
        engine.add_request(f"reset-{number}", {"prompt_token_ids": one}, params)
    said: list[tuple[int, ...]] = []
    resets = 0
    while engine.has_unfinished_requests():
        said += [tuple(output.outputs[0].token_ids) for output in engine.step() if output.finished]
        loading = any(
            request.status is RequestStatus.WAITING_FOR_REMOTE_KVS for request in scheduler.requests.values()
        )
        decoding = [request.num_output_tokens > 0 for request in scheduler.running]
        if resets < 3 and not loading and any(decoding) and held(room):
            engine.reset_prefix_cache(reset_running_requests=True)
            resets += 1
    assert resets == 3
    return said
