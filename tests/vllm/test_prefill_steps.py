"""Which steps of an engine show how fast it computes prompts."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from pagoda.connectors.vllm.offloading.hybrid_connector import (
    PagodaHybridConnector,
)
from pagoda.connectors.vllm.prefill_steps import (
    PrefillSteps,
    PromptStep,
    prompt_step_of,
)
from tests.vllm.halves import CHUNK, cache_of, config_of

TOKENS = "prefill_tokens"


@pytest.mark.parametrize(
    ("scheduled", "tokens"),
    [
        ({"a": 512}, 512),
        # the end of one prompt, the begin of the next
        ({"a": 300, "b": 212}, 512),
        # answers beside a part of a prompt
        ({"a": 480, **{f"{n}": 1 for n in range(32)}}, 480),
        # their time is not that of the prompt
        ({"a": 480, **{f"{n}": 1 for n in range(64)}}, 0),
        ({"a": 4, "b": 1}, 0),  # answers, one with a draft
        ({}, 0),
    ],
)
def test_the_tokens_of_prompts(scheduled: dict[str, int], tokens: int) -> None:
    total = sum(scheduled.values())
    step = SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=total,
        has_sync_kv_loads=False,
    )
    assert prompt_step_of(step).tokens == tokens
    step.has_sync_kv_loads = True  # another connector loads within the step
    assert prompt_step_of(step).tokens == 0


def test_steps_that_say_nothing_are_not_measured(shm_root: Path) -> None:
    cache = cache_of(config_of(shm_root))
    try:
        steps = PrefillSteps(cache, torch.device("cpu"))
        for tokens in (0, CHUNK - 1):
            steps.begin(PromptStep(tokens, time.monotonic()))
            steps.end()
        # and interrupted: it has no end
        steps.begin(PromptStep(CHUNK, time.monotonic()))
        steps.begin(PromptStep())
        steps.end()
        assert cache.stats()["counters"][TOKENS] == 0
        steps.begin(PromptStep(3 * CHUNK, time.monotonic()))
        time.sleep(0.05)  # the forward pass
        steps.end()
        steps.end()
        counters = cache.stats()["counters"]
        assert counters[TOKENS] == 3 * CHUNK
        assert cache.stats()["rates"]["prefill_tokens_per_second"] > 0
    finally:
        cache.close()


def test_a_watch_that_began_after_the_forward_pass_is_not_believed(
    shm_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its speed would be that of no engine, and nothing would be loaded any more."""
    caplog.set_level(logging.WARNING, logger="pagoda")
    cache = cache_of(config_of(shm_root))
    try:
        steps = PrefillSteps(cache, torch.device("cpu"))
        for _ in range(2):
            # so that the step may have begun when it was scheduled
            steps._ended = 0.0
            steps.begin(PromptStep(3 * CHUNK, time.monotonic() - 100.0))
            steps.end()
        assert cache.stats()["counters"][TOKENS] == 0
        assert cache.stats()["rates"]["prefill_tokens_per_second"] == 0
        assert caplog.text.count("is not believed") == 1
    finally:
        cache.close()


def test_a_step_that_was_scheduled_while_the_last_one_ran_is_measured(
    shm_root: Path,
) -> None:
    """With asynchronous scheduling it is: its time begins when the last one ends."""
    cache = cache_of(config_of(shm_root))
    try:
        steps = PrefillSteps(cache, torch.device("cpu"))
        scheduled = PromptStep(2 * CHUNK, time.monotonic() - 100.0)
        steps.begin(PromptStep())
        steps.end()
        steps.begin(scheduled)
        # the forward pass, much longer than what is between the steps
        time.sleep(0.2)
        steps.end()
        assert cache.stats()["counters"][TOKENS] == 2 * CHUNK
    finally:
        cache.close()


def test_a_step_of_a_hybrid_model_is_measured_in_the_order_of_vllm(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM begins loads after the forward pass, so the watch must begin before."""
    cache = cache_of(config_of(shm_root))
    try:
        steps = PrefillSteps(cache, torch.device("cpu"))
        connector: Any = object.__new__(PagodaHybridConnector)
        connector.connector_scheduler = connector._connector_metadata = None
        connector.connector_worker = SimpleNamespace(
            worker=SimpleNamespace(
                prefills=steps, take_failed=lambda among: set()
            ),
            start_kv_transfers=lambda meta: None,
            prepare_store_kv=lambda meta: None,
            get_finished=lambda names: (set(), set()),
            build_connector_worker_meta=lambda: None,
        )
        monkeypatch.setattr(mixin, "get_kv_transfer_group", lambda: connector)
        monkeypatch.setattr(mixin, "get_forward_context", lambda: None)
        meta: Any = object.__new__(OffloadingConnectorMetadata)
        meta.prompts = PromptStep(3 * CHUNK, time.monotonic())
        output: Any = SimpleNamespace(
            kv_connector_metadata=meta,
            has_sync_kv_loads=False,
            finished_req_ids=set(),
        )
        with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(output):
            time.sleep(0.2)  # the forward pass
        stats = cache.stats()
        assert stats["counters"][TOKENS] == 3 * CHUNK
        assert 0 < stats["rates"]["prefill_tokens_per_second"] <= 3 * CHUNK / 0.2
    finally:
        cache.close()
