"""Requests whose KV is approximate after a part that is exact: their blocks have no keys, in no
tier.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pagoda.blocks import BlockManager
from tests.blocks.kit import BLOCK, Engine, cache_at, prompt

EXACT = 10  # tokens: two whole blocks and a half
KEPT = EXACT // BLOCK * BLOCK


def blend(
    engine: Engine, name: str, tokens: list[int], exact_tokens: int = EXACT
) -> None:
    """Run a request up to its fourth generated token."""
    manager = engine.manager
    manager.add(name, tokens, exact_tokens=exact_tokens)
    assert engine.admit(name).plan is None
    manager.computed(name, len(tokens))
    manager.append(name, prompt(4, seed=9))
    manager.extend(name, len(tokens) + 4)
    manager.computed(name, len(tokens) + 4)
    manager.check()


def found(engine: Engine, tokens: list[int]) -> tuple[int, int, int]:
    """Tokens that a request for this prompt would find on the device, on the host, below."""
    engine.manager.add("looks", [*tokens, 1])
    match = engine.manager.match("looks")
    engine.manager.release("looks")
    return match


def test_blocks_after_the_exact_tokens_are_found_by_no_request(
    shm_root: Path,
) -> None:
    with cache_at(shm_root) as cache:
        engine = Engine(24, cache)
        tokens = prompt(24)
        blend(engine, "finishes", tokens)
        assert found(engine, tokens) == (KEPT, 0, 0)
        engine.end(engine.manager.finish("finishes"))
        assert found(engine, tokens) == (KEPT, 0, 0)
        assert cache.lookup(tokens).num_tokens == KEPT  # what was written back
        blend(engine, "is preempted", tokens)
        engine.manager.preempt("is preempted")
        assert engine.manager.match("is preempted") == (KEPT, 0, 0)
        engine.manager.release("is preempted")
        blend(engine, "is released", tokens)
        engine.manager.release("is released")
        engine.end(engine.manager.demote(24))
        assert found(engine, tokens) == (0, KEPT, 0)
        engine.manager.check()
        assert engine.manager.free == engine.manager.total


def test_exact_kv_after_the_exact_tokens_is_not_taken_either(
    shm_root: Path,
) -> None:
    """What follows is computed over approximate KV: the answer must not depend on what is
    cached.
    """
    with cache_at(shm_root) as cache:
        engine = Engine(24, cache)
        tokens = prompt(24)
        engine.leave("exact", tokens)
        assert found(engine, tokens) == (24, 0, 0)
        engine.manager.add("blended", tokens, exact_tokens=EXACT)
        assert engine.manager.match("blended") == (KEPT, 0, 0)
        admitted = engine.admit("blended")
        assert admitted.computed_tokens == admitted.shared * BLOCK == KEPT
        engine.manager.release("blended")


def test_they_have_no_keys_under_new_weights_either() -> None:
    engine = Engine(24)
    tokens = prompt(24)
    engine.manager.add("blended", tokens, exact_tokens=EXACT)
    engine.manager.weights_changed()  # all keys are made again
    engine.admit("blended")
    engine.manager.computed("blended", 24)
    assert found(engine, tokens) == (KEPT, 0, 0)


@pytest.mark.parametrize(
    ("exact_tokens", "kept"),
    [(0, 0), (BLOCK - 1, 0), (BLOCK, BLOCK), (100, 24), (None, 24)],
)
def test_how_many_tokens_are_exact(exact_tokens: int | None, kept: int) -> None:
    engine = Engine(24)
    tokens = prompt(24)
    engine.manager.add("blended", tokens, exact_tokens=exact_tokens)
    engine.admit("blended")
    engine.manager.computed("blended", 24)
    assert found(engine, tokens) == (kept, 0, 0)


def test_fewer_than_none_is_refused() -> None:
    manager = BlockManager(4, BLOCK)
    with pytest.raises(
        ValueError, match="exact_tokens must not be negative, got -1"
    ):
        manager.add("blended", prompt(8), exact_tokens=-1)
    manager.add("blended", prompt(8))
