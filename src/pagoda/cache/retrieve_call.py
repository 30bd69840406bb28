"""One retrieve or prefetch: a run of chunks is loaded from its tiers to the engine, or into the
host tier only.

`Cache.retrieve` makes a `RetrieveCall`. Host slots are copied out and then validated; chunks of a
lower tier are read into a `LoadDestination` by a `LoadPipeline`. If another call is storing a
chunk, the retrieve waits for it and does not load it twice.

    disk  | read 4 5 6 7 | read 8 9 ...        buffers in flight: a deque, refilled when half empty
    host    commit 0..3  | commit 4 5          one transaction for all chunks that have arrived
    KV        copy 0..3  |   copy 4 5          then validated
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pagoda.base.clock import Deadline
from pagoda.base.metrics import Reason
from pagoda.cache.call import CacheRequest, CheckedTransfer
from pagoda.cache.lookup_call import (
    LEASE_SECONDS,
    add_piece,
    expected_hit,
    find_pieces,
    served_by_tier,
)
from pagoda.cache.miss_explainer import UNANSWERED, unanswered
from pagoda.cache.resources import Resources
from pagoda.cache.results import Hit, Piece, runs_of
from pagoda.cache.staging_buffers import StagingPool
from pagoda.cache.tier_stack import TierStack
from pagoda.cache.writeback import (
    Access,
    ChunkRef,
    chunk_ref,
    columns_of,
    refs_in_slots,
)
from pagoda.ledger import Busy, Present, Refused, Reserved
from pagoda.ledger.request_meters import TokenLoad
from pagoda.tiers import HostTier
from pagoda.tiers.base import Bytes, Done, Tier

_COPY_BYTES = 256 << 20  # copied between two checks of the deadline
# between two checks of a chunk that another call is storing
_PAUSE_SECONDS = (0.0002, 0.005)
_TRY_EVERY = 16  # one check in 16 writes to the ledger; the others block no call
_MOST_ROUNDS = 3  # how often in a row a chunk may disappear between two steps
# the most bytes that are copied out at once while reads are in flight
_ARRIVED_BYTES = 64 << 20


def measure_again(resources: Resources, request: CacheRequest, hit: Hit) -> None:
    """Measure a tier again, in the background, if it was too slow for the lookup or retrieve whose
    answer is `hit`.

    No request waits for the measurement, which loads some of the chunks that the request did not
    get into the host tier.
    """
    lower = request.tiers.lower
    host = resources.tiers.host
    if host is not None:
        at = hit.num_tokens // request.chunk_tokens
        cost = resources.load_cost
        if chunks := next(
            filter(None, (cost.take_probe(tier.name) for tier in lower)), 0
        ):
            few = request._replace(
                tiers=TierStack(host, lower),
                deadline=Deadline(resources.config.deadline_seconds),
                keys=request.keys[at : at + chunks],
                first=request.first + at,
                parent=request.parent_of(at),
            )
            resources.executor.run_in_background(
                RetrieveCall(resources, few, None, False).run
            )


class RetrieveCall:
    """The retrieve of one run into `kv`, or without it (a prefetch) into the host tier only. Used
    by one thread, once.

    `_done` chunks were served, `_by_tier` says from where; `_reason` why not more: ABSENT for a
    chunk that no tier has.
    """

    def __init__(
        self,
        resources: Resources,
        request: CacheRequest,
        kv: CheckedTransfer | None,
        counted: bool,
        pieces: list[Piece] | None = None,
        behind: int = 0,
    ) -> None:
        """Prepare the call; nothing is loaded yet.

        Args:
            resources: of the cache.
            request: the run.
            kv: where to; None: a prefetch.
            counted: whether it counts as a request, and may leave to the engine what is computed
                sooner.
            pieces: gets what was served, in order.
            behind: if it is not 0, also load what is stored behind the first missing chunk, in runs
                of at least so many tokens; for that it needs `pieces`.
        """
        self._pieces = pieces
        self._behind = behind
        self._resources = resources
        self._request = request
        self._kv = kv
        self._counted = counted
        # otherwise the caller has chosen, by a lookup or a prefetch
        self._chooses = kv is not None and counted
        self._tiers = request.tiers
        self._deadline = request.deadline
        self._stamp = 0  # the stamp of the run in the host tier
        self._end = len(request.keys)
        self._stamps: dict[str, int | None] = {}  # and in each lower tier
        self._matched: dict[str, int] = {}  # how far each lower tier has the run
        # since when (ns) another call has been storing the next chunk
        self._busy_since: int | None = None
        self._pause = _PAUSE_SECONDS[0]
        self._full = self._tiers.host is None  # this run gets no more host slots
        self._rounds = 0
        # a lower tier that may not have answered in time
        self._silent: Tier | None = None
        self._done = 0
        self._polls = 0  # checks of a chunk that another call is storing
        self._by_tier = dict.fromkeys(self._tiers.names, 0)
        self._load_seconds: dict[str, float] = {}  # load time of each tier
        self._reason: Reason | None = None
        self._detail = ""
        # a lower tier counted it in this cache's counters
        self._miss_counted = False
        # the host tier's reason for the first chunk that it lacks
        self._hint: Reason | None = None

    def run(self) -> Hit:
        """Serve as many leading chunks as the deadline allows."""
        request = self._request
        resources = self._resources
        host = self._tiers.host
        kv = self._kv
        hit = self._refusal()
        loads = dict[str, int]()
        load: TokenLoad | None = None
        behind = self._pieces if self._behind else None
        if hit is None:
            if (
                host is not None
                and kv is not None
                and kv.device_index is not None
            ):
                host.use_device(kv.device_index)  # before the first copy
            with nullcontext() if host is None else host.copying():
                if host is not None:
                    self._stamp = host.ledger.stamp()
                self._serve()
            chunks = (
                self._by_tier[host.name]
                if host is not None and kv is not None
                else 0
            )
            nbytes = chunks * resources.layout.chunk_bytes
            loads = resources.counters.load_counts(
                chunks, nbytes, self._load_seconds
            )
            why = self._reason, self._detail
            if self._reason is Reason.ABSENT:
                why = resources.explainer.explain(request, self._done, self._hint)
            hit = request.hit(self._by_tier, *why)
            if kv is not None:
                seconds = sum(self._load_seconds.values())
                load = TokenLoad(hit.num_tokens, int(seconds * 1e6))
        elif hit.reason is not Reason.BELOW_MINIMUM:
            behind = None  # else a longer piece may follow
        if behind is not None:
            hit = self._with_pieces(hit, behind)
        if self._counted:
            resources.counters.count_request(
                len(hit.mask) - hit.start_tokens,
                served_by_tier(hit) if hit.behind_tokens else hit.by_tier,
                hit.reason,
                request.namespace,
                miss_counted=self._miss_counted,
                more=loads,
                load=load,
            )
        elif load is not None:
            resources.counters.count_load(request.namespace, load, loads)
        else:
            resources.counters.add(loads)
        if hit.reason is Reason.NOT_WORTH_IT:
            measure_again(resources, request, hit)
        return hit

    def _with_pieces(self, hit: Hit, pieces: list[Piece]) -> Hit:
        """Load what is stored behind the first missing chunk, and return the hit with all
        pieces.

        Each run is a load of its own, within the same deadline. What was promised and does not
        arrive is left out.
        """
        request = self._request
        if self._done < self._end and not self._is_over():
            found = find_pieces(
                self._resources,
                request,
                self._done,
                self._behind,
                hit.reason,
                self._chooses,
            )
            for start, stop in runs_of(found):
                if self._is_over():
                    break
                begin = start // request.chunk_tokens - request.first
                end = stop // request.chunk_tokens - request.first
                part = request._replace(
                    keys=request.keys[begin:end],
                    first=request.first + begin,
                    parent=request.parent_of(begin),
                )
                RetrieveCall(self._resources, part, self._kv, False, pieces).run()
        loaded = sum(piece.stop - piece.start for piece in pieces)
        return replace(
            hit, pieces=tuple(pieces), behind_tokens=loaded - hit.num_tokens
        )

    def _is_over(self) -> bool:
        return self._deadline.passed or self._deadline.cancelled

    def _refusal(self) -> Hit | None:
        """Return the answer of a retrieve that need not begin; None if it must begin."""
        request = self._request
        resources = self._resources
        host = self._tiers.host
        if not request.keys:
            return request.hit_without_chunks()
        if resources.closed:
            return request.miss(Reason.CLOSED, "the cache is closed")
        if self._kv is None and host is None:
            return request.miss(
                Reason.TIER_SKIPPED, "there is no host tier to prefetch into"
            )
        load_cost = resources.load_cost
        if (
            host is not None
            and self._chooses
            and not load_cost.is_worth_loading(host.name)
        ):
            return request.miss(Reason.NOT_WORTH_IT, load_cost.refusal(host.name))
        minimum = resources.config.min_hit_tokens
        if minimum > len(request.keys) * request.chunk_tokens:
            return request.miss(
                Reason.BELOW_MINIMUM, f"at least {minimum} tokens"
            )
        if minimum:
            expected = expected_hit(resources, request)
            if expected.reason is Reason.BELOW_MINIMUM:
                return expected
        return None

    def _serve(self) -> None:
        while self._done < self._end and self._reason is None:
            if self._tiers.host is not None:
                self._serve_from_host(self._tiers.host)
                if self._done == self._end or self._reason is not None:
                    break
            before = self._done
            busy = self._hint is Reason.BUSY
            tier: Tier | None = None
            if (
                not busy
                or self._polls % _TRY_EVERY == 0
                or self._bypasses_writer()
            ):
                tier, found = self._choose_lower_tier()
                if tier is not None and self._reason is None:
                    busy = self._load(tier, self._done + found)
                elif busy and self._polls:
                    self._probe_writer()
            if self._reason is None and self._done == before:
                self._wait_or_stop(busy, tier)
        if self._kv is None:
            self._lease_all()

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

    def _serve_from_host(self, host: HostTier) -> None:
        """Serve what the host tier has from the next chunk on."""
        match = host.ledger.match_prefix(
            self._request.keys[self._done :],
            start=self._request.position_of(self._done),
            namespace=self._request.namespace.root,
            stamp=self._stamp,
            lease_seconds=LEASE_SECONDS,
            deadline_seconds=self._deadline.remaining(),
        )
        self._hint = match.reason
        first = self._done
        # All at once: in windows, the first layer would be complete only after the last window.
        at_once = self._kv is not None and self._kv.at_once
        step = max(
            1, len(match.slots) if at_once else _COPY_BYTES // host.slot_bytes
        )
        for i in range(0, len(match.slots), step):
            if self._reason is None:
                self._copy_from_host(
                    host,
                    match.slots[i : i + step],
                    match.generations[i : i + step],
                )
        if len(match.slots) and self._tiers.written:
            request = self._request
            where = (match.slots, match.generations)
            refs = partial(refs_in_slots, request, first, *where)
            left_out = self._tiers.left_out
            access = Access(
                request.namespace.root,
                refs,
                len(match.slots),
                where,
                left_out=left_out,
            )
            for queue in self._resources.writeback:
                queue.note_access(access)

    def _copy_from_host(
        self,
        host: HostTier,
        slots: npt.NDArray[np.int64],
        generations: npt.NDArray[np.uint64],
    ) -> None:
        count = len(slots)
        if self._kv is None:
            return self._served(count, host.name)
        if self._deadline.cancelled:
            return self._stop(Reason.DEADLINE, "cancelled")
        began = time.perf_counter()
        views = host.slab.views(slots.tolist())
        self._kv.from_slots(
            self._request.starts(self._done, self._done + count), views
        )
        good = [
            *host.ledger.still_valid(slots, generations).tolist(),
            False,
        ].index(False)
        self._served(good, host.name)
        seconds = time.perf_counter() - began
        self._load_seconds[host.name] = (
            self._load_seconds.get(host.name, 0.0) + seconds
        )
        self._resources.load_cost.record_load(
            host.name, good * host.chunk_bytes, seconds
        )
        if good < count:
            self._stop(Reason.ABSENT, "evicted while it was being copied")
        return None

    # -- from lower tiers --------------------------------------------------------------------------

    def _choose_lower_tier(self) -> tuple[Tier | None, int]:
        """Return the first lower tier that has the next chunk and is fast enough, and how many
        chunks in a row it has.

        The run has one stamp in each tier, so that its tail stays older than its head.
        """
        for tier in self._tiers.lower:
            if self._done >= self._matched.get(tier.name, 0):
                if tier.name not in self._stamps:
                    self._stamps[tier.name] = tier.stamp()
                found = tier.find(
                    self._request.keys[self._done : self._end],
                    start=self._request.position_of(self._done),
                    stamp=self._stamps[tier.name],
                    namespace=self._request.namespace.root,
                    deadline_seconds=self._deadline.remaining(),
                )
                self._matched[tier.name] = self._done + found
                if not found and self._deadline.passed:
                    self._silent = tier
            found = self._matched[tier.name] - self._done
            if found and self._kv is None:
                return self._limit_prefetch(tier, found)
            if found and (
                not self._chooses
                or self._resources.load_cost.is_worth_loading(tier.name)
            ):
                return tier, found
            if found:
                self._stop(
                    Reason.NOT_WORTH_IT,
                    self._resources.load_cost.refusal(tier.name),
                )
                return None, 0
        return None, 0

    def _limit_prefetch(self, tier: Tier, found: int) -> tuple[Tier | None, int]:
        """Load no more than leases can protect: a longer prefetch would evict its own first
        chunks.
        """
        brought = sum(self._by_tier[lower.name] for lower in self._tiers.lower)
        host = self._tiers.host
        room = 0 if host is None else host.ledger.fitting // 2
        found = min(found, room - brought)
        if found > 0:
            return tier, found
        self._stop(Reason.FULL, "a prefetch fills at most half of the host tier")
        return None, 0

    def _load(self, tier: Tier, stop: int) -> bool:
        """Load chunks [done, stop) from `tier`; return whether another call is storing the next
        one.
        """
        host = self._tiers.host
        request = self._request
        before = self._done
        began = time.perf_counter()
        destination: LoadDestination
        if host is None or self._full or self._bypasses_writer():
            destination = StagingDestination(
                self._resources.load_staging, self._deadline
            )
        else:
            lease = LEASE_SECONDS if self._kv is None else 0.0
            destination = HostDestination(host, request, self._stamp, lease)
        pipeline = LoadPipeline(
            tier, destination, request, self._kv, self._served
        )
        with self._resources.load_cost.measured(tier.name) as load:
            end = pipeline.run(self._done, stop)
            load.nbytes = (self._done - before) * tier.chunk_bytes
        if end is not None:
            self._stop(end.reason, end.detail)
            self._miss_counted = (
                end.counted and tier.name == self._resources.counts_in
            )
        seconds = time.perf_counter() - began
        self._load_seconds[tier.name] = (
            self._load_seconds.get(tier.name, 0.0) + seconds
        )
        for queue in self._resources.writeback:
            if queue.tier is tier:
                queue.mark_known(pipeline.committed)
        if self._done > before:
            self._note_served(tier, before, pipeline.committed)
        stopped = (
            destination.stopped
            if isinstance(destination, HostDestination)
            else None
        )
        if isinstance(stopped, Refused):
            self._full = True
            if self._kv is None and self._reason is None:
                self._stop(stopped.reason, "the host tier has no slot for more")
        return isinstance(stopped, Busy)

    def _note_served(
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

        left_out = self._tiers.left_out
        access = Access(
            request.namespace.root,
            refs,
            end - begin,
            source=tier,
            left_out=left_out,
        )
        for queue in self._resources.writeback:
            queue.note_access(access)

    # -- ends and waits ----------------------------------------------------------------------------

    def _served(self, count: int, tier: str) -> None:
        if self._pieces is not None and count:
            starts = self._request.starts(self._done, self._done + count + 1)
            add_piece(self._pieces, starts[0], starts[-1], tier)
        self._done += count
        self._by_tier[tier] += count
        if count:
            self._deadline.progress()
            self._busy_since = None
            self._pause = _PAUSE_SECONDS[0]
            self._rounds = 0
            self._polls = 0

    def _stop(self, reason: Reason, detail: str = "") -> None:
        self._reason = reason
        self._detail = detail

    def _bypasses_writer(self) -> bool:
        """Whether another call has been storing the next chunk for so long that this call loads it
        itself.
        """
        if self._busy_since is None or self._kv is None:
            return False
        waited_ns = self._resources.clock.monotonic_ns() - self._busy_since
        return waited_ns > self._deadline.patience_seconds * 0.5e9

    def _wait_or_stop(self, busy: bool, tier: Tier | None) -> None:
        """Handle a step that served nothing: end the run, or try again (after a pause if the chunk
        is being stored).
        """
        self._rounds = 0 if busy else self._rounds + 1
        if (
            not busy
            and tier is None
            and self._silent
            and self._hint not in UNANSWERED
        ):
            return self._stop(*unanswered(self._silent))
        if not busy and (tier is None or self._rounds > _MOST_ROUNDS):
            return self._stop(Reason.ABSENT)
        if self._deadline.passed:
            return self._stop(Reason.BUSY if busy else Reason.DEADLINE)
        if busy:
            clock = self._resources.clock
            self._polls += 1
            self._busy_since = self._busy_since or clock.monotonic_ns()
            clock.sleep(min(self._pause, self._deadline.remaining()))
            self._pause = min(self._pause * 2, _PAUSE_SECONDS[1])
        return None

    def _probe_writer(self) -> None:
        """Reserve the next chunk, which reclaims it if the process that is storing it is dead."""
        host = self._tiers.host
        at = self._done
        assert host is not None
        probe = HostDestination(host, self._request, self._stamp, LEASE_SECONDS)
        buffers = probe.reserve(at, at + 1, False)
        try:
            for buffer in buffers:
                probe.settle(buffer, False)
        except BaseException:
            # raised by a signal handler, perhaps before the call above had begun
            for buffer in buffers:
                probe.settle(buffer, False)
            raise


# -- from one lower tier ---------------------------------------------------------------------------


class _LoadInFlight(NamedTuple):
    """A chunk that is being read from a lower tier into a buffer."""

    buffer: LoadBuffer
    future: Future[Done]


class _PipelineEnd(NamedTuple):
    """Why a pipeline ended before the end of its run."""

    reason: Reason
    detail: str
    counted: bool  # the tier has counted the miss


class LoadPipeline:
    """Loads one run from one tier: later chunks are read while earlier ones are copied out. Used by
    one thread, once.

    `served` is called with the chunks that have been validated, in order; `committed` are the host
    slots filled.
    """

    def __init__(
        self,
        tier: Tier,
        destination: LoadDestination,
        request: CacheRequest,
        kv: CheckedTransfer | None,
        served: Callable[[int, str], None],
    ) -> None:
        self._tier = tier
        self._destination = destination
        self._kv = kv
        self._served = served
        self._request = request
        self._deadline = request.deadline
        self._done = 0
        self._end: _PipelineEnd | None = None
        # kept until their buffers are settled or released
        self._flights: deque[_LoadInFlight] = deque()
        self.committed: list[Reserved] = []

    def run(self, begin: int, stop: int) -> _PipelineEnd | None:
        """Load chunks [begin, stop) of the request, in order, as far as there are buffers.

        Returns why a chunk that was being read did not arrive, None if all did. Keeps no buffer: a
        buffer into which the tier is still reading is settled when its I/O has ended.
        """
        self._done = asked = begin
        more = True
        most = self._destination.most
        flights = self._flights
        try:
            while self._end is None:
                if more and asked < stop and len(flights) <= most // 2:
                    under_way = len(flights)
                    self._start_loads(asked, min(stop, asked + most - under_way))
                    more = len(flights) > under_way
                    asked = asked + len(flights) - under_way
                if not flights or not self._wait_for_next():
                    break
        finally:
            for flight in flights:
                _settle_later(self._destination, flight)
        return self._end

    def _start_loads(self, begin: int, end: int) -> None:
        """Begin to read a leading part of [begin, end)."""
        may_wait = not self._flights
        buffers = self._destination.reserve(begin, end, may_wait)
        asked = False
        try:
            if (
                not buffers
                and may_wait
                and isinstance(self._destination, StagingDestination)
            ):
                self._stop(
                    Reason.DEADLINE, "no staging buffer was released in time"
                )
            if not buffers:
                return
            request = self._request
            payloads = [buffer.payload for buffer in buffers]
            keys = request.keys[begin : begin + len(buffers)]
            left = self._deadline.remaining()
            start = request.position_of(begin)
            root = request.namespace.root
            asked = True
            futures = self._tier.load(
                keys, payloads, start=start, namespace=root, deadline_seconds=left
            )
            self._flights.extend(
                [
                    _LoadInFlight(*pair)
                    for pair in zip(buffers, futures, strict=True)
                ]
            )
        except BaseException as error:
            if (
                self._flights
                and buffers
                and self._flights[-1].buffer is buffers[-1]
            ):
                raise  # `run` settles the buffers
            if asked and not isinstance(error, ValueError):
                # a load that a signal handler interrupted may still be reading into them
                self._destination.abandon(buffers)
            else:
                for buffer in buffers:
                    self._destination.settle(buffer, False)
            raise

    def _wait_for_next(self) -> bool:
        """Wait for the next chunk and deliver all that have arrived, in order; False: end the run
        here.
        """
        flights = self._flights
        first = self._deadline.wait(flights[0].future)
        if first is None:
            self._stop(
                Reason.DEADLINE, f"{self._tier.name} did not deliver in time"
            )
            return False
        if not first.ok:
            self._destination.settle(flights[0].buffer, False)
            flights.popleft()
            self._stop(
                first.reason or Reason.IO_ERROR,
                f"{self._tier.name} could not deliver",
                counted=True,
            )
            return False
        arrived: list[LoadBuffer] = []
        for flight in islice(
            flights, max(1, _ARRIVED_BYTES // self._tier.chunk_bytes)
        ):
            if not (flight.future.done() and flight.future.result().ok):
                break
            arrived.append(flight.buffer)
        return self._deliver(arrived)

    def _deliver(self, arrived: Sequence[LoadBuffer]) -> bool:
        """Commit, copy out, validate. After an exception `run` settles the buffers, which may not
        be committed.
        """
        good = self._destination.commit(arrived)
        self.committed += _reserved(arrived)
        if self._kv is not None and good:
            starts = self._request.starts(self._done, self._done + good)
            self._kv.from_slots(
                starts, [buffer.payload for buffer in arrived[:good]]
            )
            good = self._destination.count_valid(arrived[:good])
        self._done += good
        self._served(good, self._tier.name)
        self._destination.release(arrived)
        for _ in arrived:
            self._flights.popleft()
        return good == len(arrived)

    def _stop(self, reason: Reason, detail: str, counted: bool = False) -> None:
        self._end = _PipelineEnd(reason, detail, counted)


def _settle_later(destination: LoadDestination, flight: _LoadInFlight) -> None:
    """Settle the buffer when its I/O has really ended: now, or later on the tier's thread."""
    flight.future.add_done_callback(
        lambda future: destination.settle(flight.buffer, future.result().ok)
    )


# -- what chunks are read into ---------------------------------------------------------------------


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
        self.most = max(
            1, min(host.ledger.window, (512 << 20) // host.slot_bytes, 64)
        )
        # why no more slots were reserved
        self.stopped: Present | Busy | Refused | None = None

    def reserve(self, begin: int, end: int, may_wait: bool) -> list[LoadBuffer]:
        """Reserve slots for the leading chunks that need one; `stopped` is the first other
        outcome.
        """
        ledger = self._host.ledger
        request = self._request
        self.stopped = None
        outcomes = ledger.reserve(
            request.keys[begin:end],
            namespace=request.namespace.root,
            start=request.first + begin,
            parent=request.parent_of(begin),
            tokens=request.chunk_tokens,
            stamp=self._stamp,
            admit_all=self._lease_seconds > 0,
            deadline_seconds=self._deadline.remaining(),
        )
        try:
            leading: list[Reserved] = []
            spare: list[Reserved] = []
            for outcome in outcomes:
                if isinstance(outcome, Reserved):
                    (leading if self.stopped is None else spare).append(outcome)
                elif self.stopped is None:
                    self.stopped = outcome
            # a call must not wait for another call while it holds buffers that others wait for
            if spare:
                ledger.abort(spare, self._deadline.last())
            views = self._host.slab.views([item.slot for item in leading])
            buffers = [
                LoadBuffer(view, item, [])
                for view, item in zip(views, leading, strict=True)
            ]
            # they end when the buffers are settled or released: I/O may outlive this call
            self._host.begin_copies(leading)
            return buffers
        except BaseException:
            ledger.abort(outcomes, self._deadline.last())
            self._host.end_copies(
                [item for item in outcomes if isinstance(item, Reserved)]
            )
            raise

    def commit(self, buffers: Sequence[LoadBuffer]) -> int:
        """Commit the slots; a lease keeps other calls from evicting a chunk that is about to be
        copied.
        """
        reserved = _reserved(buffers)
        committed = self._host.ledger.commit(
            reserved, deadline_seconds=self._deadline.last()
        )
        good = [*map(bool, committed), False].index(False)
        if self._lease_seconds and good:
            self._host.ledger.lease(
                *columns_of(reserved[:good]), self._lease_seconds
            )
        return good

    def count_valid(self, buffers: Sequence[LoadBuffer]) -> int:
        """Compare generations, after the copy."""
        valid = self._host.ledger.still_valid(*columns_of(_reserved(buffers)))
        return [*valid.tolist(), False].index(False)

    def settle(self, buffer: LoadBuffer, ok: bool) -> None:
        """Commit a chunk that arrived late but whole; free the slot of one that did not."""
        try:
            if buffer.reserved is not None:
                if ok:
                    self._host.ledger.commit([buffer.reserved])
                else:
                    self._host.ledger.abort([buffer.reserved])
        finally:
            self._host.end_copies(_reserved([buffer]))

    def release(self, buffers: Sequence[LoadBuffer]) -> None:
        """End the copies. Committed slots belong to the ledger."""
        self._host.end_copies(_reserved(buffers))

    def abandon(self, buffers: Sequence[LoadBuffer]) -> None:
        """Free the slots once nothing refers to the buffers."""
        # shared by all views of one `reserve`, and by everything made from them
        base = buffers[0].payload.base
        assert isinstance(base, np.ndarray)
        self._host.abort_when_dropped(_reserved(buffers), base)


class StagingDestination:
    """Staging buffers, which chunks only pass through. The pool replaces a buffer that is no longer
    referenced.

    No other call sees them and they are never evicted, so a chunk that has arrived is valid.
    """

    def __init__(self, staging: StagingPool, deadline: Deadline) -> None:
        self._staging = staging
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

    def abandon(self, buffers: Sequence[LoadBuffer]) -> None:
        """Leave the buffers alone, because I/O may still read into them."""


# used by one thread; any thread may call `settle`
LoadDestination: TypeAlias = HostDestination | StagingDestination


def _reserved(buffers: Sequence[LoadBuffer]) -> list[Reserved]:
    return [buffer.reserved for buffer in buffers if buffer.reserved is not None]
