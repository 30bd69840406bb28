"""Which chunk goes first when a slab is full.

A policy orders slots by the ledger's columns and knows nothing else: no keys, no locks, no bytes. What it answers is
advice: the ledger checks each victim again inside its transaction (pins, holds, what the same call wants).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Hints(Protocol):
    """The columns a policy may read; `last_use` is the one it may write. Each of length `slots`."""

    slots: int
    generation: NDArray[np.uint64]
    last_use: NDArray[np.int64]
    lease_until: NDArray[np.int64]
    parent_slot: NDArray[np.int64]
    parent_generation: NDArray[np.uint64]
    hits: NDArray[np.uint32]
    position: NDArray[np.uint32]


class Policy(Protocol):
    """Orders the slots of one ledger. Called by one thread at a time; may keep what it likes between calls."""

    def touch(self, rows: NDArray[np.int64], stamps: NDArray[np.int64]) -> None:
        """Note that these slots were asked for; of one run the tail carries the older stamp."""

    def admit(self, keys: Sequence[bytes]) -> list[bool]:
        """Say of each newcomer whether it may come in at all."""

    def victims(self, count: int, stamp: int, now: int) -> NDArray[np.int64]:
        """Return up to `count` slots that may go for newcomers of recency `stamp`, the first to go first.

        Only slots that hold a chunk, none twice. Slots leased at `now` (monotonic ns) come last, the soonest-ending
        lease first. The same slots are answered again until they have gone or been touched.
        """

    def evicted(self, rows: NDArray[np.int64]) -> None:
        """Note that these slots were evicted."""


def make(name: str, hints: Hints) -> Policy:
    """Return the policy of that name over these columns; ValueError for an unknown name."""
    from pagoda.policy.lru import Lru

    policies: dict[str, type[Lru]] = {"lru": Lru}
    if name not in policies:
        raise ValueError(f"unknown policy {name!r}; choose one of {', '.join(sorted(policies))}")
    return policies[name](hints)
