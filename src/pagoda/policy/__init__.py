"""Policies decide which chunk is evicted first when a slab is full, and which newcomers are worth a
slot.

A policy orders slots by the ledger's columns only: it uses no keys, locks or bytes. Its answers are
advice: the ledger checks each victim again inside its transaction (pins, holds, chunks of the same
call).

The chunks of one request carry stamps that fall by one with each position in the chain, so a tail
is always older than its head.

Modules, in the order in which data reaches them:

    reuse_worth     learns when chunks are asked for again, and the worth of a slot that holds one
                    of them
    reuse_context   the same for chunks of which more is known: whose they are, and how the answer
                    ended
    request_hints   writes what a request says of itself into the contexts of its chunks
    prefill_cost    what computing a chunk costs, for `objective = "compute"`
    write_price     which newcomers bring too little to be written
    eviction_queue  keeps slots in the order of eviction, tail before head, for all policies
    lru             least recently used
    hindsight       the default: evicts the chunk that is worth least, unless LRU would serve more
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pagoda.policy.prefill_cost import PrefillCost


NAMES = ("hindsight", "lru")
DEFAULT = "hindsight"
Objective = Literal["chunks", "compute"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
DEFAULT_OBJECTIVE: Objective = "chunks"
REMOVED = {
    "arc": "was removed; write hindsight, which mostly serves more",
    "fifo": "was removed; write lru, which serves as much or more",
}
"""Policies of earlier versions, and what to write instead."""


LAST_USE_CELLS = 2
HITS_CELLS = 6


class Ghosts(NamedTuple):
    """Records of chunks that were evicted or not admitted, one row for each ghost; `last_use` 0: an
    empty row.
    """

    last_use: NDArray[np.int64]
    hits: NDArray[np.uint16]


class Contexts(NamedTuple):
    """What is known of the last use of each chunk: see `reuse_context`. Eight bytes for a slot, of
    this process alone.

    `sessions`: the number of the session that used it; 0: none was named. `hinted_at`: when a hint
    was given for it (see `reuse_context.hint_second`). `marks`: of the generation that all this is
    about (see `reuse_context.mark_of`): another process may have put another chunk into the slot.
    `of_ghosts`: the contexts of ghosts; it may be longer than `Ghosts`, which may grow.
    """

    of_slots: NDArray[np.uint16]
    sessions: NDArray[np.uint16]
    hinted_at: NDArray[np.uint16]
    marks: NDArray[np.uint16]
    of_ghosts: NDArray[np.uint16]


class Hints(Protocol):
    """The columns that a policy may read; it may write only `last_use`. Each has length `slots`;
    ghosts have more.

    `capacity`: how many chunks fit now; it may be less than `slots`, because slots may have no
    pages. `backed`: the slots from this one on have no chunk, as far as this process knows.
    `cells`: the same columns as memory views, for single values; `LAST_USE_CELLS` and `HITS_CELLS`
    say which. `contexts`: None if nobody says what requests are about; the policy writes those of
    slots that are asked for again.
    """

    slots: int
    capacity: int
    backed: int
    generation: NDArray[np.uint64]
    last_use: NDArray[np.int64]
    lease_until: NDArray[np.int64]
    parent_slot: NDArray[np.int64]
    parent_generation: NDArray[np.uint64]
    hits: NDArray[np.uint32]
    position: NDArray[np.uint32]
    contexts: Contexts | None
    cells: list[memoryview]

    @property
    def ghosts(self) -> Ghosts:
        """Return the ghosts."""

    def forgotten(
        self,
    ) -> Iterable[
        tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.uint16]]
    ]:
        """Take the ghosts that this process replaced since the last call: hits, age (ns) and
        context of each.
        """


class Newcomers(NamedTuple):
    """Chunks of one request that are absent, in chain order.

    A policy that ignores a ghost sets its hits and last use to 0: that chunk then starts like a new
    one.
    """

    stamps: NDArray[np.int64]  # the recency that each will carry
    # from its ghost: how often it was asked for after the first time
    hits: NDArray[np.uint32]
    last_use: NDArray[np.int64]  # from its ghost; 0: it has no ghost
    contexts: NDArray[np.uint16] | None = None  # from its ghost
    arriving: int = 0  # the context that all will have
    # of their request: less the stamp of each, this is its position
    stamp: int = 0


class Policy(Protocol):
    """Orders the slots of one ledger. Called by one thread at a time; may keep any state between
    calls.
    """

    @property
    def shared_values(self) -> int:
        """How many float64 values it shares with the other processes of the ledger and keeps across
        a restart.
        """

    def touch(
        self,
        rows: NDArray[np.int64],
        stamps: NDArray[np.int64],
        asked: bool = True,
    ) -> None:
        """Raise the recency of these slots; `asked`: a request asked for them, and not only for
        their neighbours.

        Called before `hits` is raised.
        """

    def touch_few(
        self, slots: Sequence[int], stamps: Sequence[int], asked: bool = True
    ) -> None:
        """Do the same for few slots, in less time than with arrays."""

    def admit(self, newcomers: Newcomers, room: int, now: int) -> int:
        """Return how many leading newcomers are admitted, `room` of them without a victim. Each
        occurs once.
        """

    def victims(self, count: int, stamp: int, now: int) -> NDArray[np.int64]:
        """Return up to `count` slots to evict for newcomers of recency `stamp`, the first to evict
        first.

        Each slot holds a chunk and is returned once, and no parent comes before its child. Slots
        leased at `now` (monotonic ns) come last, the lease that ends first before the others. The
        next call returns the same slots until they are evicted or touched. Takes a time that does
        not depend on the number of slots.
        """

    @property
    def is_low(self) -> bool:
        """Whether `prepare` should be called soon: few of the ranked slots are left. Cheap, for any
        thread.

        Without it, `victims` ranks a sample of fixed size in each call. Never for a store of so few
        slots that `victims` ranks all of them.
        """

    def prepare(self, stamp: int, now: int) -> None:
        """Prepare work of the next calls, off the request path: rank slots if few ranked ones are
        left, learn.

        `stamp` is the present recency. May run beside the other calls.
        """

    def rank(self, least: int, stamp: int, now: int) -> None:
        """Rank all slots, off the request path: at least the first `least` are then known to
        `victims`.

        Takes time in proportion to the number of slots. May run beside the other calls.
        """

    def share(self, values: NDArray[np.float64]) -> None:
        """Merge what this process and the others have learned, in `values` (shared_values,).

        Called inside the gate, so only one process at a time calls it; a process may be killed
        during the call.
        """


def make(name: str, hints: Hints, cost: PrefillCost | None = None) -> Policy:
    """Return the policy of that name over these columns. ValueError for an unknown name, or for one
    that weighs nothing by this `cost`.
    """
    from pagoda.policy.hindsight import Hindsight
    from pagoda.policy.lru import Lru

    if name in REMOVED:
        raise ValueError(f"policy {name!r} {REMOVED[name]}")
    if name not in NAMES:
        raise ValueError(
            f"unknown policy {name!r}; choose one of {', '.join(NAMES)}"
        )
    if name == "lru":
        require_weighing(name, cost is not None)
        return Lru(hints)
    return Hindsight(hints, cost)


def require_weighing(name: str, computes: bool) -> None:
    """Raise ValueError if `objective` is "compute" and the policy of that name does not learn what
    chunks are worth.
    """
    if computes and name != DEFAULT:
        raise ValueError(
            f"policy {name!r} has one order for all; set policy = {DEFAULT!r}, or "
            f"objective = {DEFAULT_OBJECTIVE!r}"
        )
