"""Which chunk goes first when a slab is full, and which newcomers are worth a place.

A policy orders slots by the ledger's columns and knows nothing else: no keys, no locks, no bytes. What it answers is
advice: the ledger checks each victim again inside its transaction (pins, holds, what the same call wants).

What is asked for at one moment carries stamps that fall by one with each position in the chain, so a tail is always
older than its head.
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
    """What is remembered of chunks that went or were not admitted, one row a ghost; `last_use` 0: an empty row."""

    last_use: NDArray[np.int64]
    hits: NDArray[np.uint16]


class Hints(Protocol):
    """The columns a policy may read; `last_use` is the one it may write. Each of length `slots`, ghosts of more.

    `capacity`: how many chunks fit now, for slots may be without pages.
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
        """The ghosts."""

    def forgotten(self) -> Iterable[tuple[NDArray[np.uint32], NDArray[np.int64]]]:
        """Take the ghosts that gave way to others since the last call, in this process: hits and age (ns) of each."""


class Newcomers(NamedTuple):
    """Chunks of one request that are not there, in chain order.

    A policy to which a ghost counts for nothing sets its hits and last use to 0: that chunk begins as a new one does.
    """

    stamps: NDArray[np.int64]  # the recency each will carry
    hits: NDArray[np.uint32]  # those of its ghost: how often it was asked for after it was first
    last_use: NDArray[np.int64]  # that of its ghost; 0: it has none


class Policy(Protocol):
    """Orders the slots of one ledger. Called by one thread at a time; may keep what it likes between calls."""

    shared_values: ClassVar[int]
    """How many float64 it shares with the other processes of the ledger, and keeps over a restart."""

    def touch(self, rows: NDArray[np.int64], stamps: NDArray[np.int64], asked: bool = True) -> None:
        """Raise the recency of these slots; `asked`: because somebody asked for them, and not only as a neighbour.

        Called before `hits` is raised.
        """

    def admit(self, newcomers: Newcomers, room: int, now: int) -> int:
        """Return how many leading newcomers may come in, `room` of them without a victim. Called once a newcomer."""

    def victims(self, count: int, stamp: int, now: int) -> NDArray[np.int64]:
        """Return up to `count` slots that may go for newcomers of recency `stamp`, the first to go first.

        Only slots that hold a chunk, none twice, no parent before its child. Slots leased at `now` (monotonic ns) come
        last, the soonest-ending lease first. The same slots are answered again until they have gone or been touched.
        """

    def prepare(self, stamp: int, now: int) -> None:
        """Do ahead, off the request path, what the next calls would have to do. Recency by now is `stamp`."""

    def share(self, values: NDArray[np.float64]) -> None:
        """Bring together what this process and the others have learnt, in `values` (shared_values,).

        Called inside the gate, so by one process at a time; a process may be killed in the middle of it.
        """


def make(name: str, hints: Hints) -> Policy:
    """Return the policy of that name over these columns; ValueError for an unknown name."""
    from pagoda.policy.arc import Arc
    from pagoda.policy.fifo import Fifo
    from pagoda.policy.hindsight import Hindsight
    from pagoda.policy.lru import Lru

    policies: tuple[type[Lru | Arc | Hindsight], ...] = (Hindsight, Lru, Arc, Fifo)
    if name not in NAMES:
        raise ValueError(f"unknown policy {name!r}; choose one of {', '.join(NAMES)}")
    return policies[NAMES.index(name)](hints)
