"""Weights that change in memory: engines share by the names of versions, and never hit the KV of
other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import hybrid, stores, weights
from tests.vllm.engines import Engine, connector, options
from tests.vllm.fleet import SCENARIOS, Fleet, computed, hit, new_prompt, of_run


@pytest.fixture(scope="module")
def given(
    llama: Path, session_shm: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The options of both engines, without a run."""
    return options(llama) | connector(
        session_shm / "weights", tmp_path_factory.mktemp("weights") / "disk"
    )


@pytest.fixture(scope="module")
def fleet(given: dict[str, Any], logs: Path) -> Iterator[Fleet]:
    """Two engines on the same tiers; the second belongs to another run until it is started
    again.
    """
    one, two = (
        Engine(run, logs / f"{run}.log", **of_run(given, run))
        for run in ("a-run", "another-run")
    )
    yield Fleet(one, two)
    one.stop()
    two.stop()


def test_engines_share_by_run_and_version(
    fleet: Fleet, given: dict[str, Any]
) -> None:
    one, two, ours = *fleet, new_prompt()
    base = computed(one, ours)
    assert hit(two, ours) == base
    one.call(weights.become, 1, "step-1")
    first = computed(one, ours)
    assert first != base
    assert hit(two, ours) == base  # it has the weights of the checkpoint

    # of another run: nothing says that they are the same
    two.call(weights.become, 1, "step-1")
    assert computed(two, ours) == first
    two.call(hybrid.restart, of_run(given, "a-run"), within=120.0)
    assert hit(two, ours) == base
    two.call(weights.become, 1, "step-1")
    assert hit(two, ours) == first
    extra = given["kv_transfer_config"]["kv_connector_extra_config"]
    host = Path(extra["host_path"])
    disk = Path(extra["disk_path"])
    stores.wait_until(
        lambda: stores.keys(host) <= stores.keys(disk), "all on the disk"
    )
    stores.clear(host)
    assert hit(two, ours) == first
    two.call(weights.become, 1, "step-9")  # the wrong version
    assert computed(two, ours) == first
    two.call(weights.become, 2, "step-2")
    second = computed(two, ours)
    assert second not in (base, first)
    assert hit(one, ours) == first
    one.call(weights.become, 2, "step-2")
    assert hit(one, ours) == second
    one.call(
        weights.become, 2, None
    )  # without a name: shares with none, not even with those of the same weights
    assert computed(one, ours) == second


@pytest.mark.parametrize(
    "scenario", SCENARIOS, ids=lambda scenario: scenario.__name__
)
def test_what_happens_while_weights_change(
    fleet: Fleet, scenario: Callable[[Fleet], None]
) -> None:
    scenario(fleet)
