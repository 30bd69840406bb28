"""Writing chunks from host slots to one lower tier, and remembering which ones that has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.cache.ask import Ask
from pagoda.cache.deadline import Deadline
from pagoda.clock import Clock
from pagoda.ledger import Ledger, Reserved
from pagoda.tiers import HostTier
from pagoda.tiers.base import Chunk, Done, Tier

__all__ = ["Batch", "Below", "Copy", "Generations", "Slots", "copies_of"]

_MOST_PIECE = 16  # chunks handed to a tier at once; two pieces are in its hands at most
_LEASE_SECONDS = 30.0  # how long a slot is kept for a write
_WRITE_SECONDS = 60.0  # a write that takes longer is not waited for

Slots = npt.NDArray[np.int64]
Generations = npt.NDArray[np.uint64]


class Copy(NamedTuple):
    """A chunk in a host slot, to be copied down."""

    key: bytes
    position: int
    parent: bytes | None
    slot: int
    generation: int


def copies_of(ask: Ask, first: int, slots: Slots, generations: Generations) -> Iterator[Copy]:
    """The chunks of `ask` from keys[first] on, which lie in these slots."""
    for i, row in enumerate(zip(slots.tolist(), generations.tolist(), strict=True), first):
        yield Copy(ask.keys[i], ask.first + i, ask.before(i), *row)


class Batch(NamedTuple):
    """Copies of one run, in order. One stamp for the whole run: its tail goes first below too."""

    namespace: bytes
    copies: list[Copy]
    stamp: int | None


class Below:
    """A lower tier of one cache, as its background writer sees it. `write` is for one thread, the rest for any."""

    def __init__(
        self, host: HostTier, tier: Tier, chunk_tokens: int, queue_chunks: int, clock: Clock
    ) -> None:
        self.tier = tier
        self.stopped = threading.Event()  # nothing more is waited for
        self._host = host
        self._tokens = chunk_tokens
        self._clock = clock
        self._piece = max(1, min(_MOST_PIECE, queue_chunks // 2))
        # generation of the chunk in each host slot that the tier is known to have
        self._clean: Generations = np.zeros(host.ledger.slots, np.uint64)

    def unclean(self, copies: Sequence[Copy]) -> list[Copy]:
        """Those of these chunks that the tier is not known to have."""
        clean = self._clean[[copy.slot for copy in copies]].tolist() if copies else []
        return [copy for copy, known in zip(copies, clean, strict=True) if known != copy.generation]

    def note_clean(self, copies: Sequence[Copy | Reserved]) -> None:
        """Note that the tier has what is in these slots."""
        for copy in copies:
            self._clean[copy.slot] = copy.generation

    def write(self, batch: Batch) -> None:
        """Copy one batch down; waits for it, but not for ever."""
        keys = [copy.key for copy in batch.copies]
        first = batch.copies[0].position
        have = self.tier.find(keys, start=first, stamp=batch.stamp, namespace=batch.namespace)
        if not self._send(batch, batch.copies[have:] if is_run(batch.copies) else batch.copies):
            self.note_clean(batch.copies)

    def _send(self, batch: Batch, todo: Sequence[Copy]) -> int:
        """Write in pieces; a piece is waited for when the next is on its way. Returns how many were not written."""
        missing, before = 0, list[Future[Done]]()
        lease = _Lease(self._host.ledger)
        try:
            for i in range(0, len(todo), self._piece):
                piece = todo[i : i + self._piece]
                lease.extend(piece)
                chunks = [self._chunk(copy) for copy in piece]
                futures = self.tier.save(chunks, batch.namespace, stamp=batch.stamp)
                missing += self._failed(before)
                before = futures
            return missing + self._failed(before)
        finally:
            lease.end()

    def _chunk(self, copy: Copy) -> Chunk:
        payload, valid = self._host.slab.view(copy.slot), self._validity(copy)
        return Chunk(copy.key, copy.position, self._tokens, payload, copy.parent, valid)

    def _validity(self, copy: Copy) -> Callable[[], bool]:
        ledger = self._host.ledger
        slot, generation = np.array([copy.slot]), np.array([copy.generation], np.uint64)
        return lambda: bool(ledger.still_valid(slot, generation)[0])

    def _failed(self, futures: Sequence[Future[Done]]) -> int:
        """How many of these writes came to nothing; the tier has counted why."""
        deadline = Deadline(self._clock, _WRITE_SECONDS)
        failed = 0
        for future in futures:
            while not future.done() and not deadline.passed and not self.stopped.is_set():
                deadline.wait_a_moment(future)
            failed += not (future.done() and future.result().ok)
        return failed


class _Lease:
    """Keeps slots from eviction while they are written down; afterwards they may go as before."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._ends: dict[int, tuple[int, int]] = {}  # slot -> end of its lease before this one, and with it

    def extend(self, copies: Sequence[Copy]) -> None:
        """Lease the slots of these chunks too."""
        slots = np.fromiter((copy.slot for copy in copies), np.int64, len(copies))
        generations = np.fromiter((copy.generation for copy in copies), np.uint64, len(copies))
        before = self._ledger.columns.lease_until[slots].tolist()
        self._ledger.lease(slots, generations, _LEASE_SECONDS)
        after = self._ledger.columns.lease_until[slots].tolist()
        self._ends.update(zip(slots.tolist(), zip(before, after, strict=True), strict=True))

    def end(self) -> None:
        """Let go, unless somebody else has leased a slot meanwhile: clean slots must be the first to be evicted."""
        ends = self._ledger.columns.lease_until
        for slot, (before, after) in self._ends.items():
            if ends[slot] == after:
                ends[slot] = before


def is_run(copies: Sequence[Copy]) -> bool:
    """Whether the copies follow each other without a hole, so that a leading run can be skipped."""
    return copies[-1].position - copies[0].position == len(copies) - 1
