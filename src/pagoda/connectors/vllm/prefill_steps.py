"""Measures how fast an engine computes prompts, in its normal steps. Both connectors use it.

The scheduler's half counts the tokens of prompts in a step, a worker's half measures the time.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from pagoda.cache import Cache
from pagoda.connectors.prefill_stopwatch import PrefillTimes, Stopwatch, watch_for

# if one request has at least so many tokens in a step, they are of its prompt: a draft is shorter
_FEW = 8
# a step counts if it has at least so many times more tokens of prompts than of answers
_MOST_OTHERS = 8


class PromptStep(NamedTuple):
    """What a step shows of the speed of computing prompts."""

    tokens: int = 0  # of prompts; 0: the step's time does not show it
    # by time.monotonic, which all processes of a machine share
    scheduled_at: float = 0.0


def prompt_step_of(scheduler_output: Any) -> PromptStep:
    """Return how many tokens of prompts a step computes, and the present time; called when the step
    is scheduled.

    A step with many tokens of answers does not count, nor one in which another connector loads.
    """
    total: int = scheduler_output.total_num_scheduled_tokens
    prompts: int = sum(
        number
        for number in scheduler_output.num_scheduled_tokens.values()
        if number >= _FEW
    )
    counts = (
        prompts >= _MOST_OTHERS * (total - prompts)
        and not scheduler_output.has_sync_kv_loads
    )
    return PromptStep(prompts if counts else 0, time.monotonic())


def computes_answers(scheduler_output: Any) -> bool:
    """Return whether a step also computes tokens of answers."""
    return any(
        number < _FEW for number in scheduler_output.num_scheduled_tokens.values()
    )


class PrefillSteps:
    """The steps of one worker. For its thread."""

    def __init__(self, cache: Cache, device: Any) -> None:
        """Report to `cache`, which all processes of the machine share. `device`: the one that
        computes.
        """
        # fewer tokens do not show the speed of computing chunks
        self._fewest = cache.layout.chunk_tokens
        self._watch_for_step = watch_for([device])
        self._times = PrefillTimes(cache.observe_prefill)
        self._tokens = 0
        # for the present step, if it is measured
        self._watch: Stopwatch | None = None
        # the present step and the last one, by time.monotonic
        self._began = self._ended = 0.0

    def begin(self, step: PromptStep) -> None:
        """Begin to measure a step. Called before its forward pass, so from
        `bind_connector_metadata`.

        vLLM calls `start_load_kv` after the forward pass of most steps.
        """
        self._tokens = step.tokens
        self._watch = None
        # with asynchronous scheduling a step is scheduled while the last one runs
        self._began = max(step.scheduled_at, self._ended)
        if self._watch_for_step is not None and step.tokens >= self._fewest:
            self._watch = self._watch_for_step()

    def end(self) -> None:
        """Note that the step's work was launched; report the steps that the device has ended by
        now.
        """
        self._ended = time.monotonic()
        if self._watch is not None:
            self._times.add(self._tokens, self._watch, self._ended - self._began)
            self._watch = None
        self._times.read()
