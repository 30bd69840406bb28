"""The answers of a cache, as values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from pagoda.base.metrics import Reason
from pagoda.keys import KeyPrefix


class Piece(NamedTuple):
    """Tokens [start, stop) of a prompt, in whole chunks, that one tier has. Immutable."""

    start: int
    stop: int
    tier: str


def runs_of(pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    """Return ascending pieces as [start, stop), those that follow each other as one. Pure."""
    found: list[tuple[int, int]] = []
    for start, stop, _ in pieces:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found


@dataclass(frozen=True, eq=False, init=False)
class Hit:
    """How many leading tokens, from which tiers, and why not more. Immutable. True if there are
    any; an int of them.

    The tokens served are [start_tokens, stop_tokens); a destination beyond them has undefined
    content.

    Attributes:
        num_tokens: tokens served, in whole chunks, validated after the copy; counted from
            `start_tokens`.
        by_tier: tokens served by each tier; the values add up to num_tokens.
        mask: (length of the prompt,), True for the tokens served.
        reason: why the first missing chunk was not served; None: every whole chunk was served.
        detail: for people: "evicted 12 s ago", "another salt".
        start_tokens: the first token that was requested.
        approximate: the lossy codec that may have changed the KV of every token served ("q4");
            empty: all are exact.
        pieces: of a call with `pieces`: all stored tokens, ascending, also those behind the first
            missing chunk; of a retrieve, those that were loaded. Empty without `pieces`.
        behind_tokens: how many tokens of the pieces are behind the first missing chunk.
        keys: of a call with `after`, the keys that were derived, for the next one; it has no
            tokens.
    """

    num_tokens: int
    by_tier: dict[str, int]
    mask: npt.NDArray[np.bool_] = field(repr=False)
    reason: Reason | None
    detail: str = ""
    start_tokens: int = 0
    approximate: str = ""
    pieces: tuple[Piece, ...] = ()
    behind_tokens: int = 0
    keys: KeyPrefix | None = field(default=None, repr=False)

    def __init__(
        self,
        num_tokens: int,
        by_tier: dict[str, int],
        mask: npt.NDArray[np.bool_],
        reason: Reason | None,
        detail: str = "",
        start_tokens: int = 0,
        approximate: str = "",
        pieces: tuple[Piece, ...] = (),
        behind_tokens: int = 0,
        keys: KeyPrefix | None = None,
    ) -> None:
        """Make a hit. Written by hand, since a frozen dataclass takes three times as long."""
        self.__dict__.update(
            num_tokens=num_tokens,
            by_tier=by_tier,
            mask=mask,
            reason=reason,
            detail=detail,
            start_tokens=start_tokens,
            approximate=approximate,
            pieces=pieces,
            behind_tokens=behind_tokens,
            keys=keys,
        )

    def __bool__(self) -> bool:
        return self.num_tokens > 0

    def __int__(self) -> int:
        return self.num_tokens

    @property
    def exact_tokens(self) -> int:
        """The number of served tokens whose KV is certainly without any loss: all of them, or 0.

        Under a lossy codec it is 0, even for tokens that host memory served: their bytes may have
        been loaded from a lossy tier, also by another process, or may have been computed after a
        prefix that was loaded from one.
        """
        return 0 if self.approximate else self.num_tokens

    @property
    def exact(self) -> npt.NDArray[np.bool_]:
        """`mask`, with True only for served tokens that are certainly exact."""
        return self.mask & (not self.approximate)

    @property
    def stop_tokens(self) -> int:
        """The first position of the prompt that must be computed."""
        return self.start_tokens + self.num_tokens

    @property
    def loaded(self) -> int:
        """The number of tokens served in all: `num_tokens`, and those behind the first missing
        chunk.

        After a retrieve they were loaded; a look-up says what a retrieve would load.
        """
        return self.num_tokens + self.behind_tokens

    def runs(self) -> list[tuple[int, int]]:
        """Return the pieces as [start, stop), those that follow each other as one. Pure."""
        return runs_of(self.pieces)

    def shortened(
        self, num_tokens: int, reason: Reason | None, detail: str = ""
    ) -> Hit:
        """Return a hit of at most the first `num_tokens` of these tokens, and why not more; without
        what is behind a missing chunk.
        """
        left = num_tokens
        by_tier = dict[str, int]()
        for tier, tokens in self.by_tier.items():
            taken = min(tokens, left)
            left -= taken
            if taken:
                by_tier[tier] = taken
        served = sum(by_tier.values())
        mask = self.mask.copy()
        stop = self.start_tokens + served
        mask[stop:] = False
        pieces = [
            piece._replace(stop=min(piece.stop, stop))
            for piece in self.pieces
            if piece.start < stop
        ]
        return replace(
            self,
            num_tokens=served,
            by_tier=by_tier,
            mask=mask,
            reason=reason,
            detail=detail,
            pieces=tuple(pieces),
            behind_tokens=0,
        )


class Stored(NamedTuple):
    """The result of one `store`; num_chunks + present + refused = the number of whole chunks
    offered.

    Immutable. A store raises nothing for what it could not store: `refused` counts it, and
    `reason` says why.
    """

    # newly stored: readable now, or when a lower tier has received what the host refused
    num_chunks: int
    num_tokens: int  # tokens of the newly stored chunks
    present: int  # already in the cache, or being stored by another call
    refused: int  # not stored
    reason: Reason | None = None  # why the first refused chunk was refused


class Cleared(NamedTuple):
    """The result of a `clear`. A tier that failed is always named."""

    chunks: dict[str, int]  # tier -> removed chunks
    failed: dict[str, str]  # tier -> error

    @property
    def ok(self) -> bool:
        """Whether every tier is clear."""
        return not self.failed


class CacheStats(TypedDict):
    """What `Cache.stats` returns."""

    name: str | None
    # gauges and counters of each tier, from the top down
    tiers: dict[str, dict[str, int]]
    failed: dict[str, str]  # the tiers that did not answer, and why
    counters: dict[str, int]
    hit_rate: float  # hit tokens / requested tokens
    misses: dict[str, int]  # reason -> misses
    drops: dict[str, int]  # reason -> drops, of the cache and of all tiers
    waiting_chunks: int  # chunks in the queues of the lower tiers
    staging_buffers: int  # in use
    pinned_bytes: int  # host memory that is registered with a GPU
    # "<tier>_bytes_per_second", "prefill_tokens_per_second"
    rates: dict[str, float]
    # hit rate, tokens and saved seconds: see `usage_by_model`, `usage_by_tenant`
    models: list[dict[str, object]]
    tenants: list[dict[str, object]]
    # what the policy of a local tier serves most of, if not chunks
    objective: NotRequired[str]
    # what became of request hints in this process: answer -> hint and why -> how many
    hints: NotRequired[dict[str, dict[str, int]]]
    # the tiers that could not be opened at the start, and why
    left_out: NotRequired[dict[str, str]]
    # the settings that make KV approximate, and whether each was measured
    approximate: NotRequired[list[dict[str, object]]]
    recording: NotRequired[dict[str, object]]  # where live traffic is recorded
