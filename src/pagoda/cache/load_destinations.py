"""What the chunks of a lower tier are read into: reserved slots of the host tier, or staging
buffers.

A `LoadPipeline` reserves buffers, has the tier read into them, commits those that have arrived,
copies out of them and then validates them. Every buffer that was reserved is released or settled,
unless an exception keeps the pipeline from that: slots are then given up once nothing refers to
their buffers, and staging buffers are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, TypeAlias

from pagoda.base.clock import Deadline
from pagoda.cache.call import CacheRequest
from pagoda.cache.staging_buffers import StagingPool
from pagoda.cache.writeback import columns_of
from pagoda.ledger import Busy, Present, Refused, Reserved, SlotWriter
from pagoda.tiers import HostTier
from pagoda.tiers.base import Bytes


class LoadBuffer(NamedTuple):
    """A buffer for one chunk, owned by one call until it is settled or delivered."""

    payload: Bytes  # (slot_bytes,) uint8
    reserved: Reserved | None  # None for a staging buffer ...
    staging: list[Bytes]  # ... which is in this list until it is released


class HostDestination:
    """Reserved slots of the host tier: chunks read into them become visible to every call."""

    def __init__(
        self,
        host: HostTier,
        request: CacheRequest,
        stamp: int,
        lease_seconds: float,
    ) -> None:
        """`lease_seconds`: how long chunks are leased, and admitted against the host's policy; 0:
        no lease.
        """
        self._host = host
        self._request = request
        self._deadline = request.deadline
        self._stamp = stamp
        self._lease_seconds = lease_seconds
        # the slots of which copies were recorded
        self._copied: list[Reserved] = []
        # owns what was reserved and not settled
        self._writer = SlotWriter(
            host.ledger,
            host.slab,
            outlived=True,
            ended=partial(host.end_copies, self._copied),
        )
        self.writer: AbstractContextManager[object] = self._writer
        self.most = max(
            1, min(host.ledger.window, (512 << 20) // host.slot_bytes, 64)
        )
        # why no more slots were reserved
        self.stopped: Present | Busy | Refused | None = None

    def reserve(self, begin: int, end: int, may_wait: bool) -> list[LoadBuffer]:
        """Reserve slots for the leading chunks that need one; `stopped` is the first other
        outcome.
        """
        request = self._request
        self.stopped = None
        outcomes = self._writer.reserve(
            request.keys[begin:end],
            namespace=request.namespace.root,
            start=request.first + begin,
            parent=request.parent_of(begin),
            tokens=request.chunk_tokens,
            stamp=self._stamp,
            admit_all=self._lease_seconds > 0,
            deadline_seconds=self._deadline.remaining(),
        )
        leading: list[Reserved] = []
        spare: list[Reserved] = []
        for outcome in outcomes:
            if isinstance(outcome, Reserved):
                (leading if self.stopped is None else spare).append(outcome)
            elif self.stopped is None:
                self.stopped = outcome
        # a call must not wait for another call while it holds buffers that others wait for
        if spare:
            self._writer.abort(spare, self._deadline.last())
        views = self._writer.views(leading)
        # they end when the buffers are settled or released: I/O may outlive this call
        self._copied += leading
        self._host.begin_copies(leading)
        return [
            LoadBuffer(view, item, [])
            for view, item in zip(views, leading, strict=True)
        ]

    def commit(self, buffers: Sequence[LoadBuffer]) -> int:
        """Commit the slots; a lease keeps other calls from evicting a chunk that is about to be
        copied.
        """
        reserved = reserved_in(buffers)
        committed = self._writer.commit(reserved, self._deadline.last())
        good = [*map(bool, committed), False].index(False)
        if self._lease_seconds and good:
            self._host.ledger.lease(
                *columns_of(reserved[:good]), self._lease_seconds
            )
        return good

    def count_valid(self, buffers: Sequence[LoadBuffer]) -> int:
        """Compare generations, after the copy."""
        valid = self._host.ledger.still_valid(*columns_of(reserved_in(buffers)))
        return [*valid.tolist(), False].index(False)

    def settle(self, buffer: LoadBuffer, ok: bool) -> None:
        """Commit a chunk that arrived late but whole; free the slot of one that did not."""
        try:
            if buffer.reserved is not None:
                if ok:
                    self._writer.commit([buffer.reserved])
                else:
                    self._writer.abort([buffer.reserved])
        finally:
            self._host.end_copies(reserved_in([buffer]))

    def release(self, buffers: Sequence[LoadBuffer]) -> None:
        """End the copies. Committed slots belong to the ledger."""
        self._host.end_copies(reserved_in(buffers))


class StagingDestination:
    """Staging buffers, which chunks only pass through. The pool replaces a buffer that is no longer
    referenced.

    No other call sees them and they are never evicted, so a chunk that has arrived is valid.
    """

    def __init__(self, staging: StagingPool, deadline: Deadline) -> None:
        self._staging = staging
        self.writer: AbstractContextManager[object] = nullcontext()
        self._deadline = deadline
        self.most = staging.count  # buffers in use at once

    def reserve(self, begin: int, end: int, may_wait: bool) -> list[LoadBuffer]:
        """Acquire free buffers; wait only for the first one, and only if no read of this call is in
        flight.
        """
        wait = self._deadline.remaining() if may_wait else 0.0
        return [
            LoadBuffer(buffer, None, [buffer])
            for buffer in self._staging.acquire_some(end - begin, wait)
        ]

    def commit(self, buffers: Sequence[LoadBuffer]) -> int:
        """Return how many of the leading buffers are valid: all."""
        return len(buffers)

    count_valid = commit

    def settle(self, buffer: LoadBuffer, ok: bool) -> None:
        """Release a buffer that no I/O touches any more."""
        while buffer.staging:
            self._staging.release(buffer.staging.pop())

    def release(self, buffers: Sequence[LoadBuffer]) -> None:
        """Release buffers after the copy out of them."""
        for buffer in buffers:
            self.settle(buffer, True)


# used by one thread; any thread may call `settle`
LoadDestination: TypeAlias = HostDestination | StagingDestination


def reserved_in(buffers: Sequence[LoadBuffer]) -> list[Reserved]:
    """Return the reserved slots among these buffers."""
    return [buffer.reserved for buffer in buffers if buffer.reserved is not None]
