"""The price of a write: a newcomer that brings hardly more than its slot brings anyway is not
worth storing.

What a chunk brings is the most, over all horizons, of the hits expected within the horizon less
those that its slot brings in the meantime: Gittins' problem again (`reuse_worth.index`), with the
rate given. The rate is the mean worth of the latest victims. Their worth of one moment says too
little: it is low whenever a session has just ended, and a newcomer stays for longer than that.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pagoda.policy.prefill_cost import Costs
from pagoda.policy.reuse_context import KINDS, Ending, kinds_of_ending
from pagoda.policy.reuse_worth import Table, expected

HITS_A_WRITE = 0.06
"""What a newcomer must bring: without more, its write costs more than it saves."""

_AFTER_TOOL_CALL = range(KINDS)[kinds_of_ending(Ending.TOOL_CALL)]

Curves = tuple[NDArray[np.float64], NDArray[np.float64]]


class WritePrice:
    """Says which newcomers bring too little. `memory`: how many victims the rate is a mean of.
    Not thread-safe, but `learn` may run during the other calls.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._noted = 0
        self._rate = 0.0
        self._hazard: Table = np.zeros((0, 0))
        # hits and seconds of a slot up to each age, for the rows that were asked for
        self._curves: dict[int, Curves] = {}

    def learn(self, hazard: Table) -> None:
        """Take over the share of chunks that is asked for, of each row at each age."""
        self._hazard, self._curves = hazard, {}

    def note(self, ranks: NDArray[np.float64]) -> None:
        """Note what the victims for some newcomers are worth."""
        if len(ranks):
            self._noted = min(self._noted + len(ranks), self._memory)
            share = min(1.0, len(ranks) / self._noted)
            mean = float(np.maximum(ranks, 0).mean())
            self._rate += share * (mean - self._rate)

    def too_dear(
        self, rows: NDArray[np.int64], costs: Costs | None = None
    ) -> NDArray[np.bool_]:
        """Return which newcomers of these rows, in chain order, bring less than their write costs.
        A head brings at least as much as its tail. `costs`: what a hit of each saves; None: 1.
        """
        if costs is None:
            brings = {row: self._brings(row) for row in set(rows.tolist())}
            each = np.array([brings[row] for row in rows.tolist()], np.float64)
        else:
            each = np.array(
                [
                    self._brings(row, cost)
                    for row, cost in zip(
                        rows.tolist(), costs.tolist(), strict=True
                    )
                ],
                np.float64,
            )
        lifted = np.maximum.accumulate(each[::-1])[::-1]
        dear: NDArray[np.bool_] = lifted < HITS_A_WRITE
        return dear

    def _brings(self, row: int, cost: float = 1.0) -> float:
        if row % KINDS in _AFTER_TOOL_CALL:
            return math.inf
        curves = self._curves
        if row not in curves:
            curves[row] = expected(self._hazard[row])
        hits, seconds = curves[row]
        return float((cost * hits - self._rate * seconds).max())
