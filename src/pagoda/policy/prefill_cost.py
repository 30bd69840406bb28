"""What it costs to compute a chunk, by its position in the prompt: what `objective = "compute"`
counts in place of chunks.

The linear layers of a model with N parameters take 2 N operations for each token, and attention
takes 4 x layers x width for each token before it (Kaplan et al., Scaling Laws for Neural Language
Models, 2020, table 1; Chowdhery et al., PaLM, 2022, appendix B). With Kaplan's N = 12 x layers x
width^2, both take the same for the token at 6 x width. That is 24,576 tokens for a width of 4,096.
Counted by their own numbers of heads, dense models of 8 to 70 billion parameters have it at 30 to
54 thousand tokens, mixtures of experts at 8 to 15 thousand. Neither the layout nor a trace tells
the model, and no order depends on it much, so one number is for all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagoda.policy import DEFAULT_OBJECTIVE, OBJECTIVES

EVEN_TOKENS = 24_576
"""At this position attention takes as much as all the rest."""

# columns are hints, and a wrong position must not keep a chunk for ever
_MOST_POSITION = 1 << 16

Costs = NDArray[np.float64]


class PrefillCost(NamedTuple):
    """The cost of computing chunks; 1 is that of a chunk without attention. `even`: at which
    position attention doubles it, in chunks.
    """

    even: float

    @classmethod
    def of_chunks(cls, chunk_tokens: int) -> PrefillCost:
        """Return the cost of chunks of that many tokens."""
        return cls(EVEN_TOKENS / chunk_tokens)

    def of(self, positions: NDArray[np.integer]) -> Costs:
        """Return the cost of the chunks at these positions."""
        return 1 + (_bounded(positions) + 0.5) / self.even

    def mean(self, positions: NDArray[np.integer]) -> Costs:
        """Return the mean cost of a chunk and all before it.

        A chunk saves nothing without those before it, which stay as long as it does. So this is
        what each of their slots brings; its own cost would be twice that.
        """
        return 1 + (_bounded(positions) + 1) / (2 * self.even)

    def of_prompt(self, chunks: int) -> float:
        """Return the cost of that many leading chunks together."""
        return chunks + chunks * chunks / (2 * self.even)


def cost_of(objective: str, chunk_tokens: int) -> PrefillCost | None:
    """Return what a policy with that objective counts; None: chunks. ValueError for an unknown
    one.
    """
    if objective not in OBJECTIVES:
        raise ValueError(
            f"unknown objective {objective!r}; choose one of {', '.join(OBJECTIVES)}"
        )
    if objective == DEFAULT_OBJECTIVE:
        return None
    return PrefillCost.of_chunks(chunk_tokens)


def objective_of(cost: PrefillCost | None) -> str:
    """Return the objective of a policy that counts this."""
    return OBJECTIVES[cost is not None]


def _bounded(positions: NDArray[np.integer]) -> Costs:
    bounded: Costs = np.minimum(positions, _MOST_POSITION).astype(np.float64)
    return bounded
