"""Measures how fast an engine computes prompts, in its normal steps. Both connectors use it.

The scheduler's half counts the tokens of prompts in a step, a worker's half measures the time.
"""

from __future__ import annotations

from typing import Any

from pagoda.cache import Cache
from pagoda.connectors.prefill_stopwatch import PrefillTimes, Stopwatch, watch_for

_FEW = 8  # if one request has at least so many tokens in a step, they are of its prompt: a draft is shorter
# a step counts if it has at least so many times more tokens of prompts than of answers
_MOST_OTHERS = 8


def prompt_tokens_of(scheduler_output: Any) -> int:
    """Return how many tokens of prompts a step computes; 0 if it also computes many tokens of answers."""
    total: int = scheduler_output.total_num_scheduled_tokens
    prompts: int = sum(number for number in scheduler_output.num_scheduled_tokens.values() if number >= _FEW)
    return prompts if prompts >= _MOST_OTHERS * (total - prompts) else 0


def computes_answers(scheduler_output: Any) -> bool:
    """Return whether a step also computes tokens of answers."""
    return any(number < _FEW for number in scheduler_output.num_scheduled_tokens.values())


class PrefillSteps:
    """The steps of one worker. For its thread."""

    def __init__(self, cache: Cache, device: Any) -> None:
        """Report to `cache`, which all processes of the machine share. `device`: the one that computes."""
        self._fewest = cache.layout.chunk_tokens  # fewer tokens do not show the speed of computing chunks
        self._watch_for_step = watch_for([device])
        self._times = PrefillTimes(cache.observe_prefill)
        self._tokens = 0
        self._watch: Stopwatch | None = None  # for the present step, if it is measured

    def begin(self, prompt_tokens: int) -> None:
        """Note that a step begins that computes so many tokens of prompts."""
        self._tokens, self._watch = prompt_tokens, None
        if self._watch_for_step is not None and prompt_tokens >= self._fewest:
            self._watch = self._watch_for_step()

    def end(self) -> None:
        """Note that the step's work was launched; report the steps that the device has ended by now."""
        if self._watch is not None:
            self._times.add(self._tokens, self._watch)
            self._watch = None
        self._times.read()
