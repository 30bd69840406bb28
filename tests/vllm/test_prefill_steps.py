"""Which steps of an engine show how fast it computes prompts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pagoda.connectors.vllm.prefill_steps import PrefillSteps, prompt_tokens_of
from tests.vllm.halves import CHUNK, cache_of, config_of

TOKENS = "prefill_tokens"


@pytest.mark.parametrize(
    ("scheduled", "tokens"),
    [
        ({"a": 512}, 512),
        ({"a": 300, "b": 212}, 512),  # the end of one prompt, the begin of the next
        ({"a": 480, **{f"{n}": 1 for n in range(32)}}, 480),  # answers beside a part of a prompt
        ({"a": 480, **{f"{n}": 1 for n in range(64)}}, 0),  # their time is not that of the prompt
        ({"a": 4, "b": 1}, 0),  # answers, one with a draft
        ({}, 0),
    ],
)
def test_the_tokens_of_prompts(scheduled: dict[str, int], tokens: int) -> None:
    step = SimpleNamespace(num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()))
    assert prompt_tokens_of(step) == tokens


def test_steps_that_say_nothing_are_not_measured(shm_root: Path) -> None:
    cache = cache_of(config_of(shm_root))
    try:
        steps = PrefillSteps(cache, torch.device("cpu"))
        for tokens in (0, CHUNK - 1):
            steps.begin(tokens)
            steps.end()
        steps.begin(CHUNK)  # and interrupted: it has no end
        steps.begin(0)
        steps.end()
        assert cache.stats()["counters"][TOKENS] == 0
        steps.begin(3 * CHUNK)
        steps.end()
        steps.end()
        counters = cache.stats()["counters"]
        assert counters[TOKENS] == 3 * CHUNK and cache.stats()["rates"]["prefill_tokens_per_second"] > 0
    finally:
        cache.close()
