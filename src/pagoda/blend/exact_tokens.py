"""Which tokens of a blended prompt are exact: an engine returns this beside the text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pagoda.blend.blend_policies import Positions
from pagoda.keys import Int32s

TokenMask: TypeAlias = npt.NDArray[np.bool_]  # one value per token of the prompt


class TokenMasks(NamedTuple):
    """Each token of a prompt is in one of three masks."""

    exact: TokenMask
    recomputed: TokenMask
    reused: TokenMask

    @classmethod
    def of(
        cls,
        starts: Sequence[int],
        total: int,
        chosen: Positions,
        first_is_exact: bool = True,
    ) -> TokenMasks:
        """Return the masks of a prompt of `total` tokens. Pure.

        Args:
            starts: the first position of each document, then of the question.
            total: tokens of the whole prompt.
            chosen: the positions of later documents that are computed again.
            first_is_exact: whether the first document has the KV that the model computes, not KV
                from a lossy tier.
        """
        reused = np.zeros(total, np.bool_)
        reused[starts[1] : starts[-1]] = True
        reused[chosen] = False
        reused[: starts[1]] = not first_is_exact
        exact = np.zeros(total, np.bool_)
        exact[: int(reused.argmax()) if reused.any() else total] = True
        return cls(exact, ~exact & ~reused, reused)


@dataclass(frozen=True, eq=False)
class BlendedPrompt:
    """Which tokens of one prompt of documents are exact. Each position is in one of three masks.
    Immutable.

    Exact tokens have the KV of a full prefill: all tokens before the first that is reused or comes
    from a lossy tier. Recomputed tokens were computed in this prompt, over a context that is
    approximate. Reused ones were computed with their document alone.
    """

    tokens: Int32s  # the whole prompt
    starts: list[int]  # the first position of each document, then of the question
    exact: TokenMask
    recomputed: TokenMask
    reused: TokenMask

    @property
    def exact_tokens(self) -> int:
        """How many leading tokens are exact."""
        return int(self.exact.sum())

    @property
    def recomputed_tokens(self) -> int:
        """How many tokens were computed over an approximate context."""
        return int(self.recomputed.sum())

    @property
    def reused_tokens(self) -> int:
        """How many tokens have the KV of their document alone."""
        return int(self.reused.sum())
