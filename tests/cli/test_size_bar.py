"""The one progress bar of `pagoda size`: it moves, to the end, and never back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from pagoda_tools.cli.replay_inputs import Cell
from pagoda_tools.cli.size import _OneBar, _smallest


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("high", [1, 2, 77, 40_000, 10**9])
@pytest.mark.parametrize("where", [0.0, 0.4, 1.0])
def test_the_bar_moves_with_every_probe_and_ends_near_its_end(
    width: int, high: int, where: float
) -> None:
    answer = max(1, round(high**where))
    shown: list[float] = []
    bar = _OneBar(shown.append)
    probes = 0

    def probe(sizes: Sequence[int]) -> list[Cell]:
        nonlocal probes
        probes += 1
        for number in range(len(sizes)):
            bar.show_probe((number + 1) / len(sizes))
        return [Cell("lru", size, float(size >= answer)) for size in sizes]

    for weight in (1.0, 3.0):
        bar.begin_search(weight)
        found = _smallest(probe, 1.0, 0, high, width, bar)
        assert found.chunks >= answer
        assert found.chunks <= max(answer * 1.02, answer + 1)
    bar.begin_search(0.0)
    assert shown == sorted(shown)
    assert shown[-1] == 4.0
    assert len(set(shown)) >= probes, "it moves with every probe"
    if high > 2:  # few probes are needed for a small range
        assert max(b - a for a, b in pairwise(shown)) < 2.0, "no leap"
