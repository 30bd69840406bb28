"""Tiny hybrid models and their engines: a random Gemma 3 with sliding windows, a random Qwen3-Next
with states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tests.vllm.inside import Answer, ObservedEngine
from tests.vllm.models import BOS, EOS, UNKNOWN, VOCABULARY, write_tokenizer

WINDOW = 96  # tokens; three blocks of the tests' engines
KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2


def make_gemma(directory: Path, seed: int = 0, mlp: int = 256) -> Path:
    """Write a random Gemma 3 with a word-level tokenizer; its weights are so large that texts
    differ.

    `mlp`: as in `make_llama`.
    """
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=mlp,
        num_hidden_layers=len(KINDS),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.3,
        sliding_window=WINDOW,
        layer_types=KINDS,
        query_pre_attn_scalar=64,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=UNKNOWN,
        tie_word_embeddings=False,
    )
    Gemma3ForCausalLM(config).float().save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def make_qwen_next(directory: Path, seed: int = 0) -> Path:
    """Write a random Qwen3-Next with a word-level tokenizer: three layers of linear attention, one
    of full.
    """
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(seed)
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.2,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=2,
        num_experts_per_tok=1,
        mlp_only_layers=[0, 1, 2],
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=UNKNOWN,
        tie_word_embeddings=False,
    )
    Qwen3NextForCausalLM(config).bfloat16().save_pretrained(directory)
    write_tokenizer(directory)
    return directory


# ---- what is done inside the engine's process; takes an ObservedEngine


def restart(observed: ObservedEngine, options: dict[str, Any]) -> None:
    """End the engine, and start another one in the same process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    observed.close()
    cleanup_dist_env_and_memory()
    observed.__init__(options)  # type: ignore[misc]


def groups(observed: ObservedEngine) -> list[str]:
    """Return the kinds of the engine's KV cache groups."""
    return [
        type(group.kv_cache_spec).__name__
        for group in observed.scheduler.kv_cache_config.kv_cache_groups
    ]


def block_tokens(observed: ObservedEngine) -> int:
    """Return how many tokens a block has."""
    return int(observed.scheduler.block_size)


def held(observed: ObservedEngine) -> int:
    """Return how many slots the scheduler's half holds."""
    return int(
        observed.scheduler.connector.connector_scheduler.manager._questions._finder.holds.count
    )


def reset_all(observed: ObservedEngine) -> None:
    """Empty the device's cache and ours, as after an update of the weights."""
    assert observed.llm.reset_prefix_cache(reset_connector=True)


def clear_before_loads(observed: ObservedEngine) -> None:
    """From now on remove everything from all tiers between vLLM's decision to load and the load."""
    worker = observed.worker_half.connector_worker.worker
    submit = worker.submit_load

    def cleared(*args: Any, **kwargs: Any) -> Any:
        assert worker._cache.clear(everything=True).ok
        observed.kept["cleared"] = observed.kept.get("cleared", 0) + 1
        return submit(*args, **kwargs)

    worker.submit_load = cleared


def cleared(observed: ObservedEngine) -> int:
    """Return how many loads had their chunks removed."""
    return int(observed.kept.get("cleared", 0))


def stale_hits(
    observed: ObservedEngine, prompts: list[list[int]], tokens: int
) -> list[tuple[int, ...]]:
    """Generate for prompts that are stored, and clear all tiers once the first of them has been
    promised chunks.
    """
    manager = observed.scheduler.connector.scheduler.manager
    prepare = manager.prepare_load

    def cleared(*args: Any, **kwargs: Any) -> Any:
        spec = prepare(*args, **kwargs)
        if not observed.kept.get("stale"):
            observed.kept["stale"] = True
            assert manager._cache.clear(everything=True).ok
        return spec

    manager.prepare_load = cleared
    try:
        answers = observed.generate(prompts, max_tokens=tokens)
    finally:
        del manager.prepare_load
    assert observed.kept.pop("stale")
    return [answer.tokens[0] for answer in answers]


def fail_loads(
    observed: ObservedEngine, prompts: list[list[int]], tokens: int
) -> list[tuple[int, ...]]:
    """Generate for these prompts while no load succeeds, although the chunks remain stored."""
    from pagoda.connectors.vllm.offloading.offloading_worker import (
        PagodaOffloadingWorker,
    )

    def failing(self: PagodaOffloadingWorker, job: Any) -> int:
        observed.kept["failed"] = observed.kept.get("failed", 0) + 1
        raise OSError("no")

    load, PagodaOffloadingWorker._load = PagodaOffloadingWorker._load, failing  # type: ignore[method-assign]
    try:
        answers = observed.generate(prompts, max_tokens=tokens)
    finally:
        PagodaOffloadingWorker._load = load  # type: ignore[method-assign]
    assert (
        0 < observed.kept.pop("failed") <= len(prompts)
    )  # each request tries once
    return [answer.tokens[0] for answer in answers]


def reset_under_load(
    observed: ObservedEngine, one: list[int], count: int, tokens: int
) -> list[tuple[int, ...]]:
    """Generate for a prompt many times, and preempt all running requests each time, as before an
    update of the weights.

    This happens while others wait for blocks and hold the chunks, so a preempted request is
    promised them at once. vLLM refuses it while a request is loading.
    """
    from vllm import SamplingParams
    from vllm.v1.request import RequestStatus

    engine = observed.llm.llm_engine
    scheduler = observed.scheduler
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for number in range(count):
        engine.add_request(f"reset-{number}", {"prompt_token_ids": one}, params)
    said: list[tuple[int, ...]] = []
    resets = 0
    while engine.has_unfinished_requests():
        said += [
            tuple(output.outputs[0].token_ids)
            for output in engine.step()
            if output.finished
        ]
        loading = any(
            request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            for request in scheduler.requests.values()
        )
        decoding = [
            request.num_output_tokens > 0 for request in scheduler.running
        ]
        if resets < 3 and not loading and any(decoding) and held(observed):
            engine.reset_prefix_cache(reset_running_requests=True)
            resets += 1
    assert resets == 3
    return said


def logprobs(
    observed: ObservedEngine, prompts: list[list[int]], tokens: int, how: str = ""
) -> list[tuple[Answer, Any]]:
    """Generate for each prompt alone, with nothing on the device; return the log probability of
    every word, too.

    `how`: loads "fail", they load "zeros", everything is cleared ("clear") before each; or the
    prompt is "warm" on the device, so that a hit of the engine's own cache is what a load is
    compared with.
    """
    import numpy as np
    from vllm import SamplingParams

    found = []
    params = SamplingParams(
        max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=-1
    )
    with _HOW[how](observed):
        for one in prompts:
            assert observed.llm.reset_prefix_cache()
            for _ in range(2 if how == "warm" else 1):
                (output,) = observed.llm.generate(
                    [{"prompt_token_ids": one}], params, use_tqdm=False
                )
                answer = observed._answer(output)
            rows = [
                [row[token].logprob for token in sorted(row)]
                for row in output.outputs[0].logprobs or ()
            ]
            assert len(rows) == tokens
            assert {len(row) for row in rows} == {VOCABULARY}
            found.append((answer, np.array(rows)))
    return found


@contextmanager
def _loads(change: Callable[[Any, Any], Any]) -> Iterator[None]:
    from pagoda.connectors.vllm.offloading.offloading_worker import (
        PagodaOffloadingWorker as Worker,
    )

    load = Worker._load
    done = 0

    def changed(self: Any, job: Any) -> Any:
        nonlocal done
        done += 1
        change(self, job)
        return load(self, job)

    Worker._load = changed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Worker._load = load  # type: ignore[method-assign]
    assert done


def _fail(worker: Any, job: Any) -> None:
    raise OSError("no")


def _clear(worker: Any, job: Any) -> None:
    assert worker._cache.clear(everything=True).ok


@contextmanager
def _zeros(observed: ObservedEngine) -> Iterator[None]:
    import numpy as np

    from pagoda.transfer.pages_kv import PagesKV

    from_slots = PagesKV.from_slots

    def wrong(self: PagesKV, starts: Any, slots: Any) -> None:
        from_slots(
            self, starts, [np.zeros_like(np.asarray(slot)) for slot in slots]
        )

    PagesKV.from_slots = wrong  # type: ignore[method-assign]
    try:
        yield
    finally:
        PagesKV.from_slots = from_slots  # type: ignore[method-assign]


_HOW: dict[str, Callable[[ObservedEngine], Any]] = {
    "": nullcontext,
    "warm": nullcontext,
    "fail": lambda observed: _loads(_fail),
    "clear": lambda observed: _loads(_clear),
    "zeros": _zeros,
}
