"""The answers of a cache, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from pagoda.metrics import Reason


@dataclass(frozen=True, eq=False)
class Hit:
    """How many leading tokens, from which tiers, and why not more. Immutable. True if there are any; an int of them.

    The tokens served are [start_tokens, stop_tokens); a destination beyond them has undefined content.
    """

    num_tokens: int  # whole chunks, validated after the copy; counted from `start_tokens`
    by_tier: dict[str, int]  # tokens; the values add up to num_tokens
    mask: npt.NDArray[np.bool_] = field(repr=False)  # (length of the prompt,): True for the tokens served
    reason: Reason | None  # why the first chunk that was not served was not; None: every whole chunk was
    detail: str = ""  # for people: "evicted 12 s ago", "another salt"
    start_tokens: int = 0  # the first token that was requested
    # what may have changed the KV of every token served ("q4"); empty: all of them are exact
    approximate: str = ""

    def __bool__(self) -> bool:
        return self.num_tokens > 0

    def __int__(self) -> int:
        return self.num_tokens

    @property
    def exact_tokens(self) -> int:
        """How many of the tokens served certainly have the KV that was computed without any loss: all, or none.

        Under a lossy codec that is none, also where host memory served them: their bytes may have come up from a lossy
        tier, in another process too, or may have been computed after a prefix that had.
        """
        return 0 if self.approximate else self.num_tokens

    @property
    def exact(self) -> npt.NDArray[np.bool_]:
        """`mask`, with True only for the tokens served that are certainly exact."""
        return self.mask & (not self.approximate)

    @property
    def stop_tokens(self) -> int:
        """The first position of the prompt that is left to compute."""
        return self.start_tokens + self.num_tokens


class Stored(NamedTuple):
    """What became of the chunks of one `store`; num_chunks + present + refused = the whole chunks offered."""

    num_chunks: int  # newly stored: readable now, or once a lower tier has received what the host refused
    num_tokens: int  # of those
    present: int  # already in the cache, or being stored by another call
    refused: int  # not stored
    reason: Reason | None = None  # why the first of those was refused


class Cleared(NamedTuple):
    """What a `clear` removed. A tier that failed is always named."""

    chunks: dict[str, int]  # by tier
    failed: dict[str, str]  # tier -> error

    @property
    def ok(self) -> bool:
        """Whether every tier is clear."""
        return not self.failed


class CacheStats(TypedDict):
    """What `Cache.stats` returns."""

    name: str | None
    tiers: dict[str, dict[str, int]]  # gauges and counters of each tier, from the top down
    failed: dict[str, str]  # the tiers that did not answer, and why
    counters: dict[str, int]
    hit_rate: float  # the share of the requested tokens
    misses: dict[str, int]  # by reason
    drops: dict[str, int]  # by reason
    waiting_chunks: int  # for the lower tiers
    staging_buffers: int  # in use
    pinned_bytes: int  # of host memory, registered with a GPU
    rates: dict[str, float]  # "<tier>_bytes_per_second", "prefill_tokens_per_second"
    # the settings that make KV approximate, and whether measured
    approximate: NotRequired[list[dict[str, object]]]
    recording: NotRequired[dict[str, object]]  # where live traffic is recorded
