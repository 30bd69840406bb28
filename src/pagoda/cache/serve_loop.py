"""The chunks of one run, served in order from whatever tier has the next one.

Host slots are copied out and then validated; chunks of a lower tier are loaded by a
`LoadPipeline`. If another call is storing the next chunk, the loop waits for it and does not load
it twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.base.clock import Clock, Deadline
from pagoda.base.metrics import Reason
from pagoda.cache.call import CacheRequest, CheckedTransfer
from pagoda.cache.load_destinations import (
    HostDestination,
    LoadDestination,
    StagingDestination,
)
from pagoda.cache.load_pipeline import LoadPipeline
from pagoda.cache.lookup_call import LEASE_SECONDS, add_piece
from pagoda.cache.miss_explainer import UNANSWERED, unanswered
from pagoda.cache.resources import Resources
from pagoda.cache.results import Piece
from pagoda.cache.writeback import (
    Access,
    ChunkRef,
    chunk_ref,
    refs_in_slots,
)
from pagoda.ledger import Busy, Match, Refused, Reserved
from pagoda.tiers import HostTier
from pagoda.tiers.base import Tier

_COPY_BYTES = 256 << 20  # copied between two checks of the deadline
# between two checks of a chunk that another call is storing
_PAUSE_SECONDS = (0.0002, 0.005)
_TRY_EVERY = 16  # one check in 16 writes to the ledger; the others block no call
_MOST_ROUNDS = 3  # how often in a row a chunk may disappear between two steps


@dataclass(frozen=True, slots=True)
class ServeEnd:
    """Why a run was served no further.

    Attributes:
        reason: ABSENT for a chunk that no tier has; None: the run was served to its end.
        detail: more about it, or empty.
        miss_counted: whether a lower tier counted the miss in this cache's counters.
    """

    reason: Reason | None
    detail: str = ""
    miss_counted: bool = False


class Served(NamedTuple):
    """What a serve loop has done."""

    chunks: int  # the leading ones
    by_tier: dict[str, int]  # the same, by the tier that had them
    load_seconds: dict[str, float]  # load time of each tier
    end: ServeEnd
    host_reason: Reason | None  # why the host tier lacks the next chunk


class ServeLoop:
    """Serves one run into `kv`, or without it (a prefetch) into the host tier only. Used by one
    thread, once.
    """

    def __init__(
        self,
        resources: Resources,
        request: CacheRequest,
        kv: CheckedTransfer | None,
        chooses: bool,
        pieces: list[Piece] | None,
    ) -> None:
        """Prepare the loop; nothing is loaded yet.

        Args:
            resources: of the cache.
            request: the run.
            kv: where to; None: a prefetch.
            chooses: whether what is computed sooner may be left to the engine.
            pieces: gets what was served, in order.
        """
        self._resources = resources
        self._request = request
        self._kv = kv
        self._pieces = pieces
        self._tiers = request.tiers
        self._deadline = request.deadline
        self._length = len(request.keys)
        self._done = 0
        self._by_tier = dict.fromkeys(self._tiers.names, 0)
        self._load_seconds: dict[str, float] = {}
        self._stamp = 0  # the stamp of the run in the host tier
        self._host_reason: Reason | None = None
        self._is_full = self._tiers.host is None  # the run gets no more slots
        self._lower = _LowerSearch(resources, request, kv is not None, chooses)
        self._writer = _WriterWait(resources.clock, request.deadline)
        # how often in a row the next chunk has disappeared between two steps
        self._rounds = 0

    def run(self) -> Served:
        """Serve as many leading chunks as the deadline allows."""
        host = self._tiers.host
        if host is not None:
            self._stamp = host.ledger.stamp()
        end: ServeEnd | None = None
        while end is None and self._done < self._length:
            end = self._serve_some()
        if self._kv is None:
            self._lease_all()
        return Served(
            self._done,
            self._by_tier,
            self._load_seconds,
            end or ServeEnd(None),
            self._host_reason,
        )

    def _serve_some(self) -> ServeEnd | None:
        """Serve some chunks, or wait for the next one; return why the run is over, if it is."""
        host = self._tiers.host
        if host is not None:
            match = self._match_in_host(host)
            if len(match.slots):
                end = self._serve_from_host(host, match)
                if end is not None or self._done == self._length:
                    return end
        before = self._done
        is_busy = self._host_reason is Reason.BUSY
        source: _Source | None = None
        if not is_busy or self._writer.may_write or self._bypasses_writer():
            found = self._lower.find_next(self._done, self._by_tier)
            if isinstance(found, ServeEnd):
                return found
            source = found
            if source is not None:
                end, is_busy = self._load(source.tier, self._done + source.chunks)
                if end is not None:
                    return end
            elif is_busy and self._writer.polls and not self._probe_writer():
                return ServeEnd(Reason.IO_ERROR)
        if self._done > before:
            return None
        return self._wait_or_end(is_busy, source)

    def _lease_all(self) -> None:
        """Let all leases of a prefetch end together: if the head's lease ended first, it would be
        evicted first.
        """
        host = self._tiers.host
        keys = self._request.keys[: self._done]
        if host is not None and keys:
            host.ledger.match_prefix(
                keys,
                start=self._request.position_of(0),
                namespace=self._request.namespace.root,
                touch=False,
                lease_seconds=LEASE_SECONDS,
                deadline_seconds=self._deadline.patience_seconds,
            )

    # -- from host slots ---------------------------------------------------------------------------

    def _match_in_host(self, host: HostTier) -> Match:
        """Return what the host tier has from the next chunk on."""
        match = host.ledger.match_prefix(
            self._request.keys[self._done :],
            start=self._request.position_of(self._done),
            namespace=self._request.namespace.root,
            stamp=self._stamp,
            lease_seconds=LEASE_SECONDS,
            deadline_seconds=self._deadline.remaining(),
        )
        self._host_reason = match.reason
        return match

    def _serve_from_host(self, host: HostTier, match: Match) -> ServeEnd | None:
        """Serve what was found in the host tier, in windows between which the deadline is
        checked.
        """
        first = self._done
        end: ServeEnd | None = None
        kv = self._kv
        if kv is None:
            self._note_served(len(match.slots), host.name)
        else:
            # All at once: in windows, the first layer would be complete only after the last one.
            step = max(1, _COPY_BYTES // host.slot_bytes)
            step = len(match.slots) if kv.at_once else step
            for at in range(0, len(match.slots), step):
                window = slice(at, at + step)
                end = self._copy_from_host(
                    host, kv, match.slots[window], match.generations[window]
                )
                if end is not None:
                    break
        if self._tiers.written:
            request = self._request
            where = (match.slots, match.generations)
            refs = partial(refs_in_slots, request, first, *where)
            self._note_access(
                Access(
                    request.namespace.root,
                    refs,
                    len(match.slots),
                    where,
                    left_out=self._tiers.left_out,
                )
            )
        return end

    def _copy_from_host(
        self,
        host: HostTier,
        kv: CheckedTransfer,
        slots: npt.NDArray[np.int64],
        generations: npt.NDArray[np.uint64],
    ) -> ServeEnd | None:
        """Copy these slots out, then validate them."""
        if self._deadline.cancelled:
            return ServeEnd(Reason.DEADLINE, "cancelled")
        count = len(slots)
        began = time.perf_counter()
        views = host.slab.views(slots.tolist())
        kv.from_slots(self._request.starts(self._done, self._done + count), views)
        valid = host.ledger.still_valid(slots, generations)
        good = [*valid.tolist(), False].index(False)
        self._note_served(good, host.name)
        seconds = self._note_seconds(host.name, began)
        self._resources.load_cost.record_load(
            host.name, good * host.chunk_bytes, seconds
        )
        if good < count:
            return ServeEnd(Reason.ABSENT, "evicted while it was being copied")
        return None

    # -- from a lower tier -------------------------------------------------------------------------

    def _load(self, tier: Tier, stop: int) -> tuple[ServeEnd | None, bool]:
        """Load chunks [done, stop) from `tier`; return why the run is over, if it is, and whether
        another call is storing the next chunk.
        """
        before = self._done
        began = time.perf_counter()
        destination = self._destination()
        pipeline = LoadPipeline(
            tier, destination, self._request, self._kv, self._note_served
        )
        with self._resources.load_cost.measured(tier.name) as load:
            stopped = pipeline.run(self._done, stop)
            load.nbytes = (self._done - before) * tier.chunk_bytes
        end: ServeEnd | None = None
        if stopped is not None:
            is_ours = tier.name == self._resources.counts_in
            end = ServeEnd(
                stopped.reason, stopped.detail, stopped.counted and is_ours
            )
        self._note_seconds(tier.name, began)
        for queue in self._resources.writeback:
            if queue.tier is tier:
                queue.mark_known(pipeline.committed)
        if self._done > before:
            self._note_loaded(tier, before, pipeline.committed)
        outcome = (
            destination.stopped
            if isinstance(destination, HostDestination)
            else None
        )
        if isinstance(outcome, Refused):
            self._is_full = True
            if self._kv is None and end is None:
                end = ServeEnd(
                    outcome.reason, "the host tier has no slot for more"
                )
        return end, isinstance(outcome, Busy)

    def _destination(self) -> LoadDestination:
        host = self._tiers.host
        if host is None or self._is_full or self._bypasses_writer():
            return StagingDestination(
                self._resources.load_staging, self._deadline
            )
        lease_seconds = LEASE_SECONDS if self._kv is None else 0.0
        return HostDestination(host, self._request, self._stamp, lease_seconds)

    def _note_loaded(
        self, tier: Tier, begin: int, committed: Sequence[Reserved]
    ) -> None:
        """Note for the other tiers what `tier` served from `begin` on; the `committed` chunks are
        in host slots.
        """
        request = self._request
        end = self._done
        where = {item.key: (item.slot, item.generation) for item in committed}

        def refs() -> list[ChunkRef]:
            return [
                chunk_ref(request, i, *where.get(request.keys[i], ()))
                for i in range(begin, end)
            ]

        self._note_access(
            Access(
                request.namespace.root,
                refs,
                end - begin,
                source=tier,
                left_out=self._tiers.left_out,
            )
        )

    def _note_access(self, access: Access) -> None:
        for queue in self._resources.writeback:
            queue.note_access(access)

    # -- progress and waits ------------------------------------------------------------------------

    def _note_served(self, count: int, tier: str) -> None:
        if not count:
            return
        if self._pieces is not None:
            starts = self._request.starts(self._done, self._done + count + 1)
            add_piece(self._pieces, starts[0], starts[-1], tier)
        self._done += count
        self._by_tier[tier] += count
        self._deadline.progress()
        self._writer.reset()
        self._rounds = 0

    def _note_seconds(self, tier: str, began: float) -> float:
        """Add the time since `began` (`time.perf_counter`) to the load time of a tier; return
        it.
        """
        seconds = time.perf_counter() - began
        self._load_seconds[tier] = self._load_seconds.get(tier, 0.0) + seconds
        return seconds

    def _bypasses_writer(self) -> bool:
        """Whether another call has been storing the next chunk for so long that this call loads it
        itself.
        """
        return self._kv is not None and self._writer.is_slow

    def _wait_or_end(
        self, is_busy: bool, source: _Source | None
    ) -> ServeEnd | None:
        """Handle a step that served nothing: end the run, or try again (after a pause if the chunk
        is being stored).
        """
        self._rounds = 0 if is_busy else self._rounds + 1
        if not is_busy and source is None:
            silent = self._lower.silent
            if silent is not None and self._host_reason not in UNANSWERED:
                return ServeEnd(*unanswered(silent))
            return ServeEnd(Reason.ABSENT)
        if self._rounds > _MOST_ROUNDS:
            return ServeEnd(Reason.ABSENT)
        if self._deadline.passed:
            return ServeEnd(Reason.BUSY if is_busy else Reason.DEADLINE)
        if is_busy:
            self._writer.pause()
        return None

    def _probe_writer(self) -> bool:
        """Reserve the next chunk, which reclaims it if the process that is storing it is dead.

        Return False if the ledger cannot be changed: then it may never be stored.
        """
        host = self._tiers.host
        at = self._done
        assert host is not None
        probe = HostDestination(host, self._request, self._stamp, LEASE_SECONDS)
        with probe.writer:
            for buffer in probe.reserve(at, at + 1, False):
                probe.settle(buffer, False)
        stopped = probe.stopped
        return not (
            isinstance(stopped, Refused) and stopped.reason is Reason.IO_ERROR
        )


class _Source(NamedTuple):
    """A lower tier that has the next chunks."""

    tier: Tier
    chunks: int  # so many in a row


class _LowerSearch:
    """Finds the lower tier that serves the next chunks of one run. Used by one thread.

    The run has one stamp in each tier, so that its tail stays older than its head.
    """

    def __init__(
        self,
        resources: Resources,
        request: CacheRequest,
        has_kv: bool,
        chooses: bool,
    ) -> None:
        self._resources = resources
        self._request = request
        self._has_kv = has_kv
        self._chooses = chooses
        self._stamps: dict[str, int | None] = {}
        self._matched: dict[str, int] = {}  # how far each tier has the run
        self.silent: Tier | None = None  # may not have answered in time

    def find_next(
        self, done: int, by_tier: dict[str, int]
    ) -> _Source | ServeEnd | None:
        """Return the first lower tier that has chunk `done` and is fast enough; why none may be
        asked for it; or None if no tier has it.
        """
        load_cost = self._resources.load_cost
        for tier in self._request.tiers.lower:
            if done >= self._matched.get(tier.name, 0):
                self._ask(tier, done)
            found = self._matched[tier.name] - done
            if not found:
                continue
            if not self._has_kv:
                return self._limit_prefetch(tier, found, by_tier)
            if not self._chooses or load_cost.is_worth_loading(tier.name):
                return _Source(tier, found)
            return ServeEnd(Reason.NOT_WORTH_IT, load_cost.refusal(tier.name))
        return None

    def _ask(self, tier: Tier, done: int) -> None:
        deadline = self._request.deadline
        if tier.name not in self._stamps:
            self._stamps[tier.name] = tier.stamp()
        found = tier.match_prefix(
            self._request.keys[done:],
            start=self._request.position_of(done),
            stamp=self._stamps[tier.name],
            namespace=self._request.namespace.root,
            deadline_seconds=deadline.remaining(),
        )
        self._matched[tier.name] = done + found
        if not found and deadline.passed:
            self.silent = tier

    def _limit_prefetch(
        self, tier: Tier, found: int, by_tier: dict[str, int]
    ) -> _Source | ServeEnd:
        """Load no more than leases can protect: a longer prefetch would evict its own first
        chunks.
        """
        tiers = self._request.tiers
        brought = sum(by_tier[lower.name] for lower in tiers.lower)
        room = 0 if tiers.host is None else tiers.host.ledger.fitting // 2
        most = min(found, room - brought)
        if most > 0:
            return _Source(tier, most)
        return ServeEnd(
            Reason.FULL, "a prefetch fills at most half of the host tier"
        )


class _WriterWait:
    """The wait for another call that is storing the next chunk. Used by one thread."""

    def __init__(self, clock: Clock, deadline: Deadline) -> None:
        self._clock = clock
        self._deadline = deadline
        self._since_ns: int | None = None  # when the wait began
        self._next_seconds = _PAUSE_SECONDS[0]
        self.polls = 0  # pauses until now

    def reset(self) -> None:
        """Note that the chunk has been served."""
        self._since_ns = None
        self._next_seconds = _PAUSE_SECONDS[0]
        self.polls = 0

    @property
    def may_write(self) -> bool:
        """Whether the next check may write to the ledger."""
        return self.polls % _TRY_EVERY == 0

    @property
    def is_slow(self) -> bool:
        """Whether the wait has taken half of the call's patience."""
        if self._since_ns is None:
            return False
        waited_ns = self._clock.monotonic_ns() - self._since_ns
        return waited_ns > self._deadline.patience_seconds * 0.5e9

    def pause(self) -> None:
        """Wait a little, twice as long as the last time."""
        self.polls += 1
        if self._since_ns is None:
            self._since_ns = self._clock.monotonic_ns()
        self._clock.sleep(min(self._next_seconds, self._deadline.remaining()))
        self._next_seconds = min(self._next_seconds * 2, _PAUSE_SECONDS[1])
