"""Which chunk is evicted first when a slab is full, and which newcomers are worth a slot.

A policy orders slots by the ledger's columns and knows nothing else: no keys, no locks, no bytes. Its answers are
advice: the ledger checks each victim again inside its transaction (pins, holds, what the same call wants).

The chunks of one request carry stamps that fall by one with each position in the chain, so a tail is always older
than its head.

Modules, in the order in which data meets them:

    shadow_lru      counts what least recently used would have served of the same requests
    reuse_worth     learns when chunks are asked for again, and what a slot is worth that holds one of them
    eviction_queue  keeps slots in the order in which they are evicted, tail before head, for all policies
    lru             least recently used, and first in, first out
    arc             ARC
    hindsight       the default: evicts what is worth its slot least
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


NAMES = ("hindsight", "lru", "arc", "fifo")
DEFAULT = "hindsight"


class Ghosts(NamedTuple):
    """What is remembered of chunks that were evicted or not admitted, one row a ghost; `last_use` 0: an empty row."""

    last_use: NDArray[np.int64]
    hits: NDArray[np.uint16]


class Hints(Protocol):
    """The columns a policy may read; `last_use` is the one it may write. Each of length `slots`, ghosts of more.

    `capacity`: how many chunks fit now, since slots may have no pages.
    """

    slots: int
    capacity: int
    generation: NDArray[np.uint64]
    last_use: NDArray[np.int64]
    lease_until: NDArray[np.int64]
    parent_slot: NDArray[np.int64]
    parent_generation: NDArray[np.uint64]
    hits: NDArray[np.uint32]
    position: NDArray[np.uint32]

    @property
    def ghosts(self) -> Ghosts:
        """Return the ghosts."""

    def forgotten(self) -> Iterable[tuple[NDArray[np.uint32], NDArray[np.int64]]]:
        """Take the ghosts that others replaced since the last call, in this process: hits and age (ns) of each."""


class Newcomers(NamedTuple):
    """Chunks of one request that are absent, in chain order.

    A policy that ignores a ghost sets its hits and last use to 0: that chunk then begins as a new one does.
    """

    stamps: NDArray[np.int64]  # the recency that each will carry
    hits: NDArray[np.uint32]  # of its ghost: how often it was asked for after the first time
    last_use: NDArray[np.int64]  # of its ghost; 0: it has none


class Policy(Protocol):
    """Orders the slots of one ledger. Called by one thread at a time; may keep any state between calls."""

    shared_values: ClassVar[int]
    """How many float64 it shares with the other processes of the ledger, and keeps across a restart."""

    def touch(self, rows: NDArray[np.int64], stamps: NDArray[np.int64], asked: bool = True) -> None:
        """Raise the recency of these slots; `asked`: because a request asked for them, and not only for a neighbour.

        Called before `hits` is raised.
        """

    def admit(self, newcomers: Newcomers, room: int, now: int) -> int:
        """Return how many leading newcomers are admitted, `room` of them without a victim. Called once a newcomer."""

    def victims(self, count: int, stamp: int, now: int) -> NDArray[np.int64]:
        """Return up to `count` slots to evict for newcomers of recency `stamp`, the first to evict first.

        Only slots that hold a chunk, none twice, no parent before its child. Slots leased at `now` (monotonic ns) come
        last, the soonest-ending lease first. The same slots are returned again until they are evicted or touched.
        """

    def prepare(self, stamp: int, now: int) -> None:
        """Do ahead, off the request path, what the next calls would have to do. The recency of now is `stamp`."""

    def share(self, values: NDArray[np.float64]) -> None:
        """Merge what this process and the others have learned, in `values` (shared_values,).

        Called inside the gate, so by one process at a time; a process may be killed during the call.
        """


def make(name: str, hints: Hints) -> Policy:
    """Return the policy of that name over these columns; ValueError for an unknown name."""
    from pagoda.policy.arc import Arc
    from pagoda.policy.hindsight import Hindsight
    from pagoda.policy.lru import Fifo, Lru

    policies: tuple[type[Lru | Arc | Hindsight], ...] = (Hindsight, Lru, Arc, Fifo)
    if name not in NAMES:
        raise ValueError(f"unknown policy {name!r}; choose one of {', '.join(NAMES)}")
    return policies[NAMES.index(name)](hints)
