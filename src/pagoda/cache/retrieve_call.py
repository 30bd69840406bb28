"""The way up: a run of chunks from wherever it lies to the engine, or into the host tier.

Host slots are copied out and then validated; what lies lower comes through a `Pipeline`. A chunk that somebody else is
bringing is waited for, not loaded twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.cache.below import Copy, Use, copies_of, names_of
from pagoda.cache.deadline import Deadline
from pagoda.cache.load_cost import Worth
from pagoda.cache.lookup_call import LEASE_SECONDS, UNASKED
from pagoda.cache.pipeline import Pipeline
from pagoda.cache.request import Ask
from pagoda.cache.rooms import HostRooms, Rooms, StagedRooms
from pagoda.cache.staging import Staging
from pagoda.cache.tier_stack import Storeys, stamp_of
from pagoda.cache.writeback import Descents
from pagoda.clock import Clock
from pagoda.ledger import Busy, Refused, Reserved
from pagoda.metrics import Reason
from pagoda.tiers.base import Tier
from pagoda.transfer import Transfer

__all__ = ["Run", "Tools"]

_COPY_BYTES = 256 << 20  # copied between two looks at the deadline
_PAUSE_SECONDS = (0.0002, 0.005)  # between two looks at a chunk that somebody else is bringing
_TRY_EVERY = 16  # looks; between them nobody is kept from the ledger by a write
_MOST_ROUNDS = 3  # times in a row that a chunk may vanish between two steps


class Tools(NamedTuple):
    """What all runs of one cache share."""

    staging: Staging
    worth: Worth
    descents: Descents
    clock: Clock
    counts_in: str  # the tier whose counters are the cache's


class Run:
    """One run on its way up, into `kv`, or without one only as far as the host tier. Used by one thread, once.

    Afterwards `done` chunks were served, `by_tier` says from where; `reason` (and `index` = done) why no more, with
    ABSENT for a chunk that no tier has.
    """

    def __init__(
        self, storeys: Storeys, ask: Ask, kv: Transfer | None, deadline: Deadline, tools: Tools
    ) -> None:
        self._storeys = storeys
        self._ask = ask
        self._kv = kv
        self._deadline = deadline
        self._tools = tools
        self._stamp = storeys.host.ledger.stamp() if storeys.host is not None else 0
        self._end = len(ask.keys)
        self._stamps: dict[str, int | None] = {}  # of each lower tier
        self._seen: dict[str, int] = {}  # up to which chunk each lower tier has the run
        self._around: int | None = None  # since when (ns) somebody else has been bringing the next chunk
        self._pause = _PAUSE_SECONDS[0]
        self._full = storeys.host is None  # no more host slots for this run
        self._rounds = 0
        self._unsaid = ""  # a lower tier that may not have answered in time
        self.done = 0
        self._room = storeys.host.ledger.slots // 2 if storeys.host is not None else 0  # for a prefetch
        self._polls = 0  # looks at a chunk that somebody else is bringing
        self.by_tier = dict.fromkeys(storeys.names, 0)
        self.reason: Reason | None = None
        self.detail = ""
        self.told = False  # a lower tier has counted `reason` where this cache counts
        self.hint: Reason | None = None  # what the host tier said of the first chunk it lacks

    def go(self) -> Run:
        """Serve as many leading chunks as can be had before the deadline; returns itself."""
        while self.done < self._end and self.reason is None:
            if self._storeys.host is not None:
                self._from_host()
                if self.done == self._end or self.reason is not None:
                    break
            before, busy = self.done, self.hint is Reason.BUSY
            tier: Tier | None = None
            if not busy or self._polls % _TRY_EVERY == 0 or self._goes_around():
                tier, found = self._below()
                if tier is not None and self.reason is None:
                    busy = self._load(tier, self.done + found)
                elif busy and self._polls:
                    self._probe()
            if self.reason is None and self.done == before:
                self._wait_or_end(busy, tier)
        if self._kv is None:
            self._lease_all()
        return self

    def _lease_all(self) -> None:
        """Let all leases of a prefetch end together: a head whose lease ended first would go before its tail."""
        host, keys = self._storeys.host, self._ask.keys[: self.done]
        if host is not None and keys:
            host.ledger.match(
                keys,
                start=self._ask.first,
                namespace=self._ask.namespace.root,
                touch=False,
                lease_seconds=LEASE_SECONDS,
                deadline_seconds=self._deadline.patience_seconds,
            )

    # -- from host slots ------------------------------------------------------------------------------------------

    def _from_host(self) -> None:
        """Serve what the host tier has from here on."""
        assert self._storeys.host is not None
        ledger = self._storeys.host.ledger
        match = ledger.match(
            self._ask.keys[self.done :],
            start=self._ask.first + self.done,
            namespace=self._ask.namespace.root,
            stamp=self._stamp,
            lease_seconds=LEASE_SECONDS,
            deadline_seconds=self._deadline.remaining(),
        )
        self.hint, first = match.reason, self.done
        # in windows, the first layer of a load that is waited for layer by layer would be whole with the last of them
        at_once = getattr(self._kv, "at_once", False)
        step = max(1, len(match.slots) if at_once else _COPY_BYTES // self._storeys.host.slot_bytes)
        for i in range(0, len(match.slots), step):
            if self.reason is None:
                self._copy_host(match.slots[i : i + step], match.generations[i : i + step])
        if len(match.slots) and self._storeys.lower:
            ask, where = self._ask, (match.slots, match.generations)
            self._tools.descents.used(
                Use(ask.namespace.root, lambda: list(copies_of(ask, first, *where)), len(match.slots), where)
            )

    def _copy_host(self, slots: npt.NDArray[np.int64], generations: npt.NDArray[np.uint64]) -> None:
        host = self._storeys.host
        assert host is not None
        count = len(slots)
        if self._kv is None:
            return self._served(count, host.name)
        if self._deadline.cancelled:
            return self._stop(Reason.DEADLINE, "cancelled")
        began = time.perf_counter()
        views = host.slab.views(slots.tolist())
        self._kv.from_slots(self._ask.starts(self.done, self.done + count), views)
        valid = host.ledger.still_valid(slots, generations)
        good = count if valid.all() else int(valid.argmin())
        self._served(good, host.name)
        self._tools.worth.measured(host.name, good * host.chunk_bytes, time.perf_counter() - began)
        if good < count:
            self._stop(Reason.ABSENT, "evicted while it was being copied")
        return None

    # -- from lower tiers -----------------------------------------------------------------------------------------

    def _below(self) -> tuple[Tier | None, int]:
        """The first lower tier that has the next chunk and is worth asking, and how many it has in a row."""
        for tier in self._storeys.lower:
            found = self._found(tier)
            if found and self._kv is None:
                return self._below_for_prefetch(tier, found)
            if found and self._tools.worth.beats(tier.name):
                return tier, found
            if found:
                self._stop(Reason.NOT_WORTH_IT, f"computing is faster than reading from {tier.name}")
                return None, 0
        return None, 0

    def _found(self, tier: Tier) -> int:
        """How many chunks from here on `tier` has in a row; one stamp for the run, so that its tail stays older."""
        if self.done >= self._seen.get(tier.name, 0):
            if tier.name not in self._stamps:
                self._stamps[tier.name] = stamp_of(tier)
            found = tier.find(
                self._ask.keys[self.done : self._end],
                start=self._ask.first + self.done,
                stamp=self._stamps[tier.name],
                namespace=self._ask.namespace.root,
                deadline_seconds=self._deadline.remaining(),
            )
            self._seen[tier.name] = self.done + found
            if not found and self._deadline.passed:
                self._unsaid = tier.name
        return self._seen[tier.name] - self.done

    def _below_for_prefetch(self, tier: Tier, found: int) -> tuple[Tier | None, int]:
        """A prefetch brings up no more than leases can keep: beyond that it would evict what it has just brought."""
        found = min(found, self._room - sum(self.by_tier[lower.name] for lower in self._storeys.lower))
        if found > 0:
            return tier, found
        self._stop(Reason.FULL, "half of the host tier is the most that is prefetched")
        return None, 0

    def _load(self, tier: Tier, stop: int) -> bool:
        """Bring chunks [done, stop) up from `tier`; returns whether somebody else is bringing the next one."""
        rooms, before, began = self._rooms(), self.done, time.perf_counter()
        pipeline = Pipeline(tier, rooms, self._ask, self._kv, self._deadline, self._served)
        end = pipeline.carry(self.done, stop)
        if end is not None:
            self._stop(end.reason, end.detail)
            self.told = end.counted and tier.name == self._tools.counts_in
        nbytes, seconds = (self.done - before) * tier.chunk_bytes, time.perf_counter() - began
        self._tools.worth.measured(tier.name, nbytes, seconds)
        self._tools.descents.is_below(tier, pipeline.kept)
        if self.done > before:
            self._tools.descents.used(self._brought(tier, before, pipeline.kept))
        return self._stopped(rooms)

    def _brought(self, tier: Tier, begin: int, kept: Sequence[Reserved]) -> Use:
        """What `tier` has just served, for the others to be told: from `begin` on, some of it in host slots now."""
        ask, end = self._ask, self.done
        slots = {room.key: room for room in kept}

        def copies() -> list[Copy]:
            names = names_of(ask, begin, end)
            return [
                name._replace(slot=room.slot, generation=room.generation) if (room := slots.get(name.key)) else name
                for name in names
            ]  # fmt: skip

        return Use(ask.namespace.root, copies, end - begin, source=tier)

    def _rooms(self) -> Rooms:
        host = self._storeys.host
        if host is None or self._full or self._goes_around():
            return StagedRooms(self._tools.staging, self._deadline)
        lease = LEASE_SECONDS if self._kv is None else 0.0
        return HostRooms(host, self._ask, self._deadline, self._stamp, lease)

    def _stopped(self, rooms: Rooms) -> bool:
        """Note why there were no more rooms; returns whether somebody else is bringing the next chunk."""
        stopped = rooms.stopped if isinstance(rooms, HostRooms) else None
        if isinstance(stopped, Refused):
            self._full = True
            if self._kv is None and self.reason is None:
                self._stop(stopped.reason, "the host tier has no room for more")
        return isinstance(stopped, Busy)

    # -- ends and waits -------------------------------------------------------------------------------------------

    def _served(self, count: int, tier: str) -> None:
        self.done += count
        self.by_tier[tier] += count
        if count:
            self._deadline.progress()
            self._around, self._pause, self._rounds, self._polls = None, _PAUSE_SECONDS[0], 0, 0

    def _stop(self, reason: Reason, detail: str = "") -> None:
        self.reason, self.detail = reason, detail

    def _goes_around(self) -> bool:
        """Whether the next chunk has been somebody else's for so long that this call reads it for itself."""
        if self._around is None or self._kv is None:
            return False
        waited_ns = self._tools.clock.monotonic_ns() - self._around
        return waited_ns > self._deadline.patience_seconds * 0.5e9

    def _wait_or_end(self, busy: bool, tier: Tier | None) -> None:
        """Nothing came: end the run, or look again (in a moment, if somebody else is bringing the chunk)."""
        self._rounds = 0 if busy else self._rounds + 1
        if not busy and tier is None and self._unsaid and self.hint not in UNASKED:
            return self._stop(Reason.DEADLINE, f"{self._unsaid} did not say in time whether it has it")
        if not busy and (tier is None or self._rounds > _MOST_ROUNDS):
            return self._stop(Reason.ABSENT)
        if self._deadline.passed:
            return self._stop(Reason.BUSY if busy else Reason.DEADLINE)
        if busy:
            self._polls += 1
            self._around = self._around or self._tools.clock.monotonic_ns()
            self._tools.clock.sleep(min(self._pause, self._deadline.remaining()))
            self._pause = min(self._pause * 2, _PAUSE_SECONDS[1])
        return None

    def _probe(self) -> None:
        """Find out whether whoever began to store the next chunk still lives: a reserve takes back from the dead."""
        host, ask, at = self._storeys.host, self._ask, self.done
        assert host is not None
        outcomes = host.ledger.reserve(
            ask.keys[at : at + 1],
            namespace=ask.namespace.root,
            start=ask.first + at,
            parent=ask.before(at),
            tokens=ask.chunk_tokens,
            stamp=self._stamp,
            all_in=True,
            deadline_seconds=self._deadline.remaining(),
        )
        try:
            host.ledger.give_up(outcomes)
        except BaseException:  # of a signal handler, perhaps before it had begun
            host.ledger.give_up(outcomes)
            raise
