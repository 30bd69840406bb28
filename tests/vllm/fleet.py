"""Engines whose weights change in memory, as one fleet: they share by the names of versions, or not
at all.
"""

from __future__ import annotations

from itertools import count
from typing import Any, NamedTuple

from tests.vllm import stores, weights
from tests.vllm.engines import CHUNK, Engine, loadable
from tests.vllm.inside import Answer
from tests.vllm.models import prompt

LENGTH = 5 * CHUNK + 7
_seeds = count(9000)


def of_run(given: dict[str, Any], run: str) -> dict[str, Any]:
    """Return the options of an engine of a run."""
    transfer = given["kv_transfer_config"]
    extra = transfer["kv_connector_extra_config"] | {"weights_run": run}
    return given | {
        "kv_transfer_config": transfer | {"kv_connector_extra_config": extra}
    }


def computed(engine: Engine, one: list[int]) -> tuple[int, ...]:
    """Assert that an engine hits nothing of this prompt; return its answer once its chunks are
    stored.
    """
    answer = said(engine, one)
    assert answer.external == 0

    def stored() -> bool:
        again = said(engine, one)
        assert again.tokens == answer.tokens
        return again.external == loadable(len(one))

    stores.wait_until(stored, "its chunks are stored")
    return answer.tokens[0]


def hit(engine: Engine, one: list[int]) -> tuple[int, ...]:
    """Assert that an engine hits all of this prompt; return its answer."""
    answer = said(engine, one)
    assert answer.local == 0
    assert answer.external == loadable(len(one))
    return answer.tokens[0]


def said(engine: Engine, one: list[int]) -> Answer:
    """Return the answer to a prompt of which nothing is on the device."""
    engine.reset()
    (answer,) = engine.generate(one)
    return answer


def new_prompt(tokens: int = LENGTH) -> list[int]:
    """Return a prompt of which nothing is stored."""
    return prompt(next(_seeds), tokens)


class Fleet(NamedTuple):
    """Two engines of one run on the same tiers; they may be the same engine, at different times."""

    one: Engine
    two: Engine


# ---- what happens while weights change


def what_waits_is_looked_up_again(fleet: Fleet) -> None:
    one, two, ours = *fleet, new_prompt()
    two.call(weights.become, 4, "after")
    after = computed(two, ours)
    one.call(weights.become, 3, "before")
    computed(one, ours)
    assert one.call(weights.queued, ours, 4, "after") == (
        after,
        loadable(len(ours)),
    )


def a_version_needs_an_engine_without_kv_of_others(fleet: Fleet) -> None:
    """Otherwise another engine would hit what the weights before it computed, in part or in
    whole.
    """
    one, two = fleet
    for step, begun in enumerate(
        (weights.named_while_one_runs, weights.named_while_one_loads), 11
    ):
        ours = new_prompt()
        one.call(weights.become, 5, f"before {step}")
        computed(one, ours)
        answer = one.call(begun, ours, step, f"version {step}")
        longer = ours + new_prompt(3 * CHUNK)
        one.generate(longer)  # after what is left of it on the device
        two.call(weights.become, step, f"version {step}")
        right = computed(two, ours)
        longer_right = said(two, longer)
        assert longer_right.external == loadable(len(ours))
        one.reset()
        one.call(weights.named, f"version {step}")
        assert hit(one, ours) == right
        assert said(one, longer).tokens == longer_right.tokens
        # whose name has nothing that the new weights computed
        two.call(weights.become, 5, f"before {step}")
        assert said(two, [*ours, *answer, 1]).external <= loadable(len(ours) + 16)


def what_is_being_stored_keeps_the_name_of_its_weights(fleet: Fleet) -> None:
    one, two, ours = *fleet, new_prompt()
    one.call(weights.become, 6, "old")
    one.call(weights.named_while_one_is_stored, ours, 0, "new")
    new = computed(one, ours)
    two.call(weights.become, 6, "old")
    stores.wait_until(
        lambda: said(two, ours).external == loadable(len(ours)), "what was stored"
    )
    assert hit(two, ours) != new


def a_reset_that_fails_is_noticed(fleet: Fleet) -> None:
    one = fleet.one
    ours = new_prompt()
    one.call(weights.become, 0, "kept")
    computed(one, ours)
    assert "Failed to reset KV cache" in one.call(
        weights.reset_while_one_loads, ours
    )
    computed(one, ours)


def an_update_by_the_calls_of_vllm_is_a_change(fleet: Fleet) -> None:
    one = fleet.one
    ours = new_prompt()
    one.call(weights.become, 0, "kept")
    computed(one, ours)
    one.call(weights.begin_update)
    computed(one, ours)


def sleep(fleet: Fleet) -> None:
    """After level 1 everything hits that hit before, unless the weights are others by the time of
    the next request.
    """
    one = fleet.one
    ours = new_prompt()
    one.call(weights.become, 0, "awake")
    before = computed(one, ours)
    one.call(weights.sleep, 1)
    assert hit(one, ours) == before
    one.call(weights.sleep, 1, reset=True)
    assert computed(one, ours) == before
    one.call(weights.become, 0, "awake")
    one.call(weights.sleep, 1, 1)
    assert computed(one, ours) != before
    one.call(weights.become, 0, "awake")
    assert hit(one, ours) == before
    one.call(weights.sleep, 2)
    assert computed(one, ours) == before  # vLLM discards no weights on a CPU


SCENARIOS = (
    what_waits_is_looked_up_again,
    a_version_needs_an_engine_without_kv_of_others,
    what_is_being_stored_keeps_the_name_of_its_weights,
    a_reset_that_fails_is_noticed,
    an_update_by_the_calls_of_vllm_is_a_change,
    sleep,
)
