"""What a decode step costs: the same for a short request and for a long one. Work is counted in
bytes allocated, since a copy of a table or of keys allocates.
"""

from __future__ import annotations

import tracemalloc

import pytest

from pagoda.blocks import Admitted, BlockManager, Extended

BLOCK_TOKENS = 16
STEPS = 4 * BLOCK_TOKENS


def _decoding(blocks: int, prefix_caching: bool = True) -> BlockManager:
    """Return a manager whose request "a" has computed `blocks` whole blocks."""
    manager = BlockManager(
        blocks + STEPS, BLOCK_TOKENS, prefix_caching=prefix_caching
    )
    manager.add("a", range(blocks * BLOCK_TOKENS))
    assert isinstance(manager.admit("a"), Admitted)
    manager.computed("a", blocks * BLOCK_TOKENS)
    return manager


def _step(manager: BlockManager, tokens: int) -> Extended:
    """Do what an engine does for one new token of request "a"."""
    manager.append("a", [7])
    answer = manager.extend("a", tokens)
    assert isinstance(answer, Extended)
    manager.computed("a", tokens)
    return answer


def _bytes_of_steps(blocks: int, prefix_caching: bool) -> list[int]:
    """Return how much memory each of some steps took at its highest."""
    manager = _decoding(blocks, prefix_caching)
    took = []
    first = blocks * BLOCK_TOKENS + 1
    tracemalloc.start()
    try:
        for tokens in range(first, first + STEPS):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            _step(manager, tokens)
            took.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    return took


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_decode_step_copies_neither_table_nor_keys(
    prefix_caching: bool,
) -> None:
    short = _bytes_of_steps(64, prefix_caching)
    long = _bytes_of_steps(4096, prefix_caching)
    # In the first block each list of the request gets room for an eighth more, which takes its
    # length once. Every later step counts, those that add a block included.
    assert max(long[BLOCK_TOKENS:]) <= max(short[BLOCK_TOKENS:]) + 512


def test_an_answer_of_extend_is_not_changed_by_later_steps() -> None:
    manager = _decoding(3)
    tokens = 3 * BLOCK_TOKENS
    nothing = manager.extend("a", tokens)
    assert isinstance(nothing, Extended)
    assert nothing.added == []
    assert nothing.new == 0
    table = manager.table("a")
    grown = _step(manager, tokens + 1)
    assert len(grown.added) == 1
    assert grown.new == 1
    assert grown.table == table + grown.added
    # what the caller does with its copy is not seen by the manager
    grown.table.clear()
    manager.check()
    manager.extend("a", tokens + 2 * BLOCK_TOKENS)
    assert nothing.table == table
    assert grown.table == table + grown.added
    kept = grown.table
    manager.preempt("a")
    manager.admit("a")
    assert nothing.table == table
    assert grown.table == kept
    manager.check()
