"""Engines that only store or only load, and requests that say how much of them is stored or
loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import stores
from tests.vllm.conftest import Same, Tiers
from tests.vllm.engines import CHUNK, Engine, connector, loadable
from tests.vllm.models import prompt

Stored = Callable[..., None]


def with_role(role: str, tiers: Tiers) -> dict[str, Any]:
    found = connector(*tiers)
    found["kv_transfer_config"]["kv_role"] = role
    return found


def external(engine: Engine, same: Same, one: list[int], **how: Any) -> int:
    """Return how many tokens of a prompt are loaded; nothing of it is in the engine's own cache."""
    engine.reset()
    (answer,) = same(engine, one, **how)
    return answer.external


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_producer_only_stores_and_a_consumer_only_loads(
    role: str,
    pagoda: Engine,
    tiers: Tiers,
    same: Same,
    stored: Stored,
    lora_options: dict[str, Any],
    logs: Path,
) -> None:
    known = prompt(8100, 700)
    fresh = prompt(8101, 700)
    stored(known)
    before = stores.ready(tiers.host)
    engine = Engine(
        role, logs / f"{role}.log", **lora_options, **with_role(role, tiers)
    )
    try:
        loaded = external(engine, same, known, max_tokens=1)
        assert external(engine, same, fresh, max_tokens=1) == 0
        if role == "kv_producer":
            assert loaded == 0
            stores.wait_ready(tiers.host, before + len(fresh) // CHUNK)
            assert external(pagoda, same, fresh, max_tokens=1) == loadable(
                len(fresh)
            )
        else:
            assert loaded == loadable(len(known))
    finally:
        engine.stop()  # what was to be saved is saved, or counted
    if role == "kv_consumer":
        assert stores.ready(tiers.host) == before
        assert external(pagoda, same, fresh, max_tokens=1) == 0


def test_a_request_says_how_much_is_loaded(
    pagoda: Engine, same: Same, stored: Stored
) -> None:
    one = prompt(8110, 700)
    stored(one)
    for most, loaded in (
        (0, 0),
        (3 * CHUNK, 3 * CHUNK),
        (10_000, loadable(len(one))),
    ):
        assert (
            external(pagoda, same, one, transfer={"max_load_tokens": most})
            == loaded
        )
    for wrong in (-1, True, "many", 1.5):
        assert external(
            pagoda, same, one, transfer={"max_load_tokens": wrong}
        ) == loadable(len(one))


def test_a_request_says_how_much_is_stored(
    pagoda: Engine, tiers: Tiers, same: Same, stored: Stored
) -> None:
    stored(prompt(8120, 100))
    none = prompt(8121, 700)
    some = prompt(8122, 700)
    before = stores.ready(tiers.host)
    external(pagoda, same, some, transfer={"max_offload_tokens": 3 * CHUNK + 1})
    stores.wait_ready(tiers.host, before + 3)
    external(pagoda, same, none, transfer={"max_offload_tokens": 0})
    external(pagoda, same, prompt(8123, CHUNK), max_tokens=1)
    # stored after the others would have been
    stores.wait_ready(tiers.host, before + 4)
    assert (
        external(pagoda, same, some, transfer={"max_offload_tokens": 0})
        == 3 * CHUNK
    )
    assert external(pagoda, same, none, transfer={"max_offload_tokens": 0}) == 0
    assert stores.ready(tiers.host) == before + 4
