"""A lower tier as its background writer sees it: what is noted for it, and what it is known to have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.cache.request import Ask
from pagoda.cache.staging import Staged
from pagoda.clock import Clock
from pagoda.ledger import Reserved
from pagoda.metrics import Reason
from pagoda.threads import Event
from pagoda.tiers import HostTier
from pagoda.tiers.base import Chunk, Done, Tier, runs

__all__ = [
    "Batch",
    "Below",
    "Copy",
    "Generations",
    "Leased",
    "Slots",
    "Use",
    "copies_of",
    "follows",
    "names_of",
]

_LEASE_SECONDS = 30.0  # how long a slot is kept for a write
_REFUSED_SECONDS = 1.0  # before a policy below is asked again for what it kept out

Slots = npt.NDArray[np.int64]
Generations = npt.NDArray[np.uint64]


class Copy(NamedTuple):
    """A chunk in a host slot, or in a staging buffer, to be copied down."""

    key: bytes
    position: int
    parent: bytes | None
    slot: int  # -1: in none
    generation: int
    staged: Staged | None = None


def copies_of(ask: Ask, first: int, slots: Slots, generations: Generations) -> Iterator[Copy]:
    """The chunks of `ask` from keys[first] on, which lie in these slots."""
    for i, row in enumerate(zip(slots.tolist(), generations.tolist(), strict=True), first):
        yield Copy(ask.keys[i], ask.first + i, ask.before(i), *row)


def names_of(ask: Ask, first: int, end: int) -> Iterator[Copy]:
    """Chunks [first, end) of `ask`, of which there is nothing to be copied."""
    for i in range(first, end):
        yield Copy(ask.keys[i], ask.first + i, ask.before(i), -1, 0)


class Batch(NamedTuple):
    """A run of chunks for a lower tier, in order. One stamp for the whole run: its tail goes first below too."""

    namespace: bytes
    copies: list[Copy]
    stamp: int | None
    asked: bool = False  # they were served from above; else they were stored there


class Use(NamedTuple):
    """Chunks of one run that were served or found. Cheap to note; `copies` makes what a writer needs."""

    namespace: bytes
    copies: Callable[[], list[Copy]]
    chunks: int
    where: tuple[Slots, Generations] | None = None  # the host slots, if all of them came from there
    source: Tier | None = None  # the lower tier that served them
    asked: bool = True


class Leased(NamedTuple):
    """The ends of a slot's lease before it was kept for a write, and with that."""

    before: int
    after: int


class Below:
    """A lower tier of one cache, and what it is known to have of the host's slots. `missing` is for one thread.

    What is known grows old: a chunk may be evicted, removed or expire below at any time. So the tier is asked again,
    and touched by the same question, when a chunk is used after `Tier.believed_seconds`.
    """

    def __init__(self, host: HostTier | None, tier: Tier, chunk_tokens: int, clock: Clock) -> None:
        self.tier = tier
        self.stopped = Event()  # the cache is closed: its slots may be another's
        self._host = host
        self._tokens = chunk_tokens
        self._clock = clock
        self._believed_ns = int(tier.believed_seconds * 1e9)
        slots = host.ledger.slots if host is not None else 0
        # the generation of the chunk in each host slot of which the tier has lately said something, and until when
        # that is believed: mostly that it has the chunk, else that its policy keeps it out
        self._settled: Generations = np.zeros(slots, np.uint64)
        self._until: npt.NDArray[np.int64] = np.zeros(slots, np.int64)

    def knows(self, slots: Slots, generations: Generations) -> bool:
        """Whether the tier need not be asked for what lies in these slots."""
        now = self._clock.monotonic_ns()
        return bool(((self._settled[slots] == generations) & (self._until[slots] > now)).all())

    def unsettled(self, copies: Sequence[Copy]) -> list[Copy]:
        """Those of these chunks that the tier has to be asked for."""
        slots = [copy.slot for copy in copies]
        settled, until = self._settled[slots].tolist(), self._until[slots].tolist()
        now = self._clock.monotonic_ns()
        return [
            copy
            for copy, generation, end in zip(copies, settled, until, strict=True)
            if generation != copy.generation or end <= now
        ]

    def settle(self, copies: Sequence[Copy | Reserved], least_seconds: float = 0.0) -> None:
        """Note that nothing has to be done for what is in these slots, for a while."""
        until = self._clock.monotonic_ns() + max(self._believed_ns, int(least_seconds * 1e9))
        for copy in copies:
            if copy.slot >= 0:
                self._settled[copy.slot] = copy.generation
                self._until[copy.slot] = until

    def settle_refused(self, copies: Sequence[Copy]) -> None:
        """Note that the tier's policy keeps these out for now."""
        self.settle(copies, _REFUSED_SECONDS)

    def missing(self, batch: Batch) -> list[Copy]:
        """Touch what the tier has of a batch; returns what it lacks. Waits for the tier."""
        if batch.copies[0].staged is not None:  # it was asked when they were put into their buffers
            return batch.copies
        lacking: list[Copy] = []
        for run in runs(batch.copies, len(batch.copies), follows):
            keys = [copy.key for copy in run]
            here = self.tier.touch(
                keys, namespace=batch.namespace, start=run[0].position, stamp=batch.stamp, asked=batch.asked
            )
            if here is None:  # what was stored is offered all the same: the tier says why it does not take it
                lacking += [] if batch.asked else run
                continue
            self.settle([copy for copy, there in zip(run, here, strict=True) if there])
            lacking += [copy for copy, there in zip(run, here, strict=True) if not there]
        return lacking

    def standing(self, copies: Sequence[Copy]) -> list[Copy]:
        """Those of these chunks that still lie in their slots."""
        if self._host is None:
            return []
        slots = np.fromiter((copy.slot for copy in copies), np.int64, len(copies))
        generations = np.fromiter((copy.generation for copy in copies), np.uint64, len(copies))
        valid = self._host.ledger.still_valid(slots, generations).tolist()
        return [copy for copy, stands in zip(copies, valid, strict=True) if stands]

    def chunk(self, copy: Copy) -> Chunk:
        """A chunk as a tier takes it."""
        if copy.staged is not None:
            payload, valid = copy.staged.buffer, _always
        else:
            assert self._host is not None
            payload, valid = self._host.slab.view(copy.slot), self._validity(copy)
        return Chunk(copy.key, copy.position, self._tokens, payload, copy.parent, valid)

    def _validity(self, copy: Copy) -> Callable[[], bool]:
        assert self._host is not None
        ledger = self._host.ledger
        slot, generation = np.array([copy.slot]), np.array([copy.generation], np.uint64)
        return lambda: bool(ledger.still_valid(slot, generation)[0])

    def lease(self, copies: Sequence[Copy]) -> list[Leased | None]:
        """Keep the slots of these chunks from eviction while they are written down."""
        if self._host is None or copies[0].staged is not None:
            return [None] * len(copies)
        ledger = self._host.ledger
        slots = np.fromiter((copy.slot for copy in copies), np.int64, len(copies))
        generations = np.fromiter((copy.generation for copy in copies), np.uint64, len(copies))
        before = ledger.columns.lease_until[slots].tolist()
        ledger.lease(slots, generations, _LEASE_SECONDS)
        after = ledger.columns.lease_until[slots].tolist()
        return [Leased(*ends) for ends in zip(before, after, strict=True)]

    def ended(self, copy: Copy, leased: Leased | None, done: Done) -> None:
        """A write has ended: note what is known now, and let go of the slot or the buffer."""
        if not self.stopped.is_set():
            self._settle_end(copy, done)
            if leased is not None and self._host is not None:
                ends = self._host.ledger.columns.lease_until
                if (
                    ends[copy.slot] == leased.after
                ):  # nobody else has leased it: clean slots are the first to go
                    ends[copy.slot] = leased.before
        if copy.staged is not None:
            copy.staged.ended(done)

    def _settle_end(self, copy: Copy, done: Done) -> None:
        if done.ok:
            self.settle([copy])
        elif done.reason is Reason.NOT_ADMITTED:
            self.settle_refused([copy])


def follows(copy: Copy, before: Copy) -> bool:
    """Whether `copy` comes right after `before` in one chain."""
    return copy.position == before.position + 1 and copy.parent == before.key


def _always() -> bool:
    return True
