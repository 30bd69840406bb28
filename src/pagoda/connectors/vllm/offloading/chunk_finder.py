"""Find the chunks that vLLM's scheduler asks for, on threads; load them into host slots and hold them there.

A load that was promised cannot be cancelled, so a chunk is a hit only while this process holds its slot. For groups
with full attention a hit is a run from the first chunk on; for sliding windows only the end of that run is needed.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from pagoda.cache import Cache
from pagoda.cache.host_slots import HostSlots
from pagoda.cache.writeback import Generations, Slots
from pagoda.connectors.vllm.identity.engine_namespace import salt_of
from pagoda.metrics import Reason

__all__ = ["AskedChunk", "ChunkFinder", "ChunkState", "FoundChunk", "Group", "HeldSlots"]

_HELD_SHARE = 2  # at most half of the slots are held at a time
_WINDOW_SHARE = 4  # a quarter of those, or one window of each group, is for windows: without them no run hits
_PIECE, _PIECE_BYTES = 16, 64 << 20  # loaded together: all of a piece are reported when the last has arrived
_BATCH = 64  # chunks of one transaction
_MOST_FINDS = 128  # how many gaps in a run one question looks into


class ChunkState(Enum):
    """What is known of a chunk that was asked for."""

    ASKED = auto()  # no answer yet
    FOUND = auto()  # some tier has it; it is loaded when it is asked for again
    COMING = auto()
    HELD = auto()  # in a host slot that this process holds
    MISSED = auto()
    GONE = auto()  # no request waits for the answer


class Group(NamedTuple):
    """One KV cache group. `window`: tokens before the end of a hit that are needed; None: all of them."""

    chunk_tokens: int
    window: int | None


@dataclass(slots=True, eq=False)
class AskedChunk:
    """One chunk of one group. Only the scheduler's thread changes it; others read constant fields, and `state`."""

    name: bytes  # vLLM's key
    key: bytes
    group: int
    position: int
    lower: bool  # whether lower tiers may be asked
    since: float
    seen: float
    state: ChunkState = ChunkState.ASKED
    until: float = 0.0  # when a miss is forgotten
    slot: int = -1
    generation: int = 0
    tier: str = "host"  # where it was found
    users: set[str] = field(default_factory=set)
    loads: int = 0


class FoundChunk(NamedTuple):
    """The news of one chunk."""

    asked: AskedChunk
    state: ChunkState
    slot: int = -1
    generation: int = 0
    tier: str = "host"


class HeldSlots:
    """The slots that this process protects from eviction, at most half of all. Thread-safe."""

    def __init__(self, slots: HostSlots) -> None:
        self._slots = slots
        self.most = max(1, slots.count // _HELD_SHARE)
        self._lock = threading.Lock()
        self.count = 0

    def room(self, most: int) -> int:
        """Return how many more chunks may be held if at most `most` may be."""
        with self._lock:
            return max(0, most - self.count)

    def hold(
        self, asked: Sequence[AskedChunk], slots: Slots, generations: Generations, most: int
    ) -> list[FoundChunk]:
        """Hold as many leading chunks as are allowed; those that could not be held are MISSED."""
        with self._lock:
            room = max(0, min(len(asked), most - self.count))
            self.count += room
        held: list[bool] = []
        for at in range(0, room, _BATCH):
            end = min(at + _BATCH, room)
            held += self._slots.hold(slots[at:end], generations[at:end])
        with self._lock:
            self.count -= held.count(False)
        rows = zip(asked, held, slots[:room].tolist(), generations[:room].tolist(), strict=False)
        found = [
            FoundChunk(one, ChunkState.HELD, slot, generation, one.tier)
            if ok
            else FoundChunk(one, ChunkState.MISSED)
            for one, ok, slot, generation in rows
        ]
        return found + [FoundChunk(one, ChunkState.MISSED) for one in asked[room:]]

    def valid(self, pairs: Sequence[tuple[int, int]]) -> list[bool]:
        """Return for each (slot, generation) whether the chunk can still be loaded."""
        return self._slots.still_valid(*_arrays(pairs)).tolist() if pairs else []

    def release(self, pairs: Sequence[tuple[int, int]]) -> None:
        """End one hold on each of these (slot, generation)."""
        if pairs:
            self._slots.release(*_arrays(pairs))
            with self._lock:
                self.count -= len(pairs)


class ChunkFinder:
    """Answers questions about chunks by adding to `news`. Thread-safe."""

    def __init__(self, cache: Cache, groups: Sequence[Group]) -> None:
        assert cache.slots is not None
        self._cache, self._slots = cache, cache.slots
        self._groups = groups
        self._lower = tuple(tier for tier in cache.tiers if tier != "host")
        self.holds = HeldSlots(cache.slots)
        windows = sum(
            -(-group.window // group.chunk_tokens) + 1 for group in groups if group.window is not None
        )
        self._run_most = max(1, self.holds.most - max(self.holds.most // _WINDOW_SHARE, windows))
        self.news: SimpleQueue[list[FoundChunk]] = SimpleQueue()
        self._piece = max(1, min(_PIECE, _PIECE_BYTES // cache.layout.slot_bytes))
        self._salt: str | None = None  # None: the namespace's
        self.moved = 0.0  # when something was last found: requests wait longer while there is progress

    def root(self) -> bytes:
        """Return the root of the namespace that the chunks belong to."""
        return self._slots.namespace(salt=self._salt)

    def renew(self) -> None:
        """Change to a new namespace that no other engine ever uses, because the weights no longer have a name."""
        self._salt = salt_of(self._cache.namespace.salt, None, secrets.token_hex(16))

    def tell(self, news: list[FoundChunk]) -> None:
        """Pass news to the scheduler's thread."""
        self.moved = time.monotonic()
        self.news.put(news)

    # ---- a question: chunks of one request about which nothing is known

    def answer(self, question: Sequence[AskedChunk]) -> list[AskedChunk]:
        """Find these chunks and hold those that are in host slots; returns those to be loaded from lower tiers."""
        by_group: dict[int, list[AskedChunk]] = {}
        for one in sorted(question, key=lambda one: (one.group, one.position)):
            by_group.setdefault(one.group, []).append(one)
        runs = {group: asked for group, asked in by_group.items() if self._groups[group].window is None}
        windows = {group: asked for group, asked in by_group.items() if group not in runs}
        news, coming, end = self._answer_runs(runs) if runs else ([], [], None)
        for group, asked in windows.items():
            told, more = self._answer_windows(group, asked, end)
            news, coming = news + told, coming + more
        self.tell(news + [FoundChunk(one, ChunkState.COMING) for one in coming])
        return coming

    def _answer_runs(
        self, runs: dict[int, list[AskedChunk]]
    ) -> tuple[list[FoundChunk], list[AskedChunk], int]:
        """Full attention: a hit is the run that all such groups have from the first chunk on; returns also its end."""
        places: dict[AskedChunk, tuple[int, int]] = {}
        below: set[AskedChunk] = set()
        end, reason = min(self._stop(asked[-1]) for asked in runs.values()), None
        for asked in runs.values():
            for run in _consecutive(asked):
                match = self._slots.match_prefix([one.key for one in run], run[0].position)
                have = len(match.slots)
                places |= zip(
                    run, zip(match.slots.tolist(), match.generations.tolist(), strict=True), strict=False
                )
                lower = self._below(run[have:])
                below.update(run[have : have + lower])
                if have + lower < len(run):
                    first = run[have + lower]
                    if self._start(first) < end:
                        end, reason = self._start(first), match.reason or Reason.ABSENT
                    break
        begin = min(self._start(asked[0]) for asked in runs.values())
        everyone = sorted((one for asked in runs.values() for one in asked), key=self._stop)
        hits = [one for one in everyone if self._stop(one) <= end and (one in places or one in below)]
        if len(hits) > (room := self.holds.room(self._run_most)):
            end, reason = self._start(hits[room]), Reason.FULL
        if end - begin < self._cache.config.min_hit_tokens:
            end, reason = begin, Reason.BELOW_MINIMUM
        hits = [one for one in hits if self._stop(one) <= end]
        here, coming = [one for one in hits if one in places], [one for one in hits if one not in places]
        told = self._hold(here, [places[one] for one in here], self._run_most)
        told += [FoundChunk(one, ChunkState.MISSED) for one in everyone if one not in hits]
        self._count(next(iter(runs.values())), here, coming, reason)
        return told, coming, end

    def _answer_windows(
        self, group: int, asked: list[AskedChunk], end: int | None
    ) -> tuple[list[FoundChunk], list[AskedChunk]]:
        """Sliding windows and states: hold the window before the end of the run, if all of it is found."""
        if end is None:
            return self._presence(asked), []
        beyond = [FoundChunk(one, ChunkState.MISSED) for one in asked if self._start(one) >= end]
        within = [one for one in asked if self._start(one) < end]
        window, size = self._groups[group].window or 0, self._groups[group].chunk_tokens
        needed = [one for one in within if self._stop(one) > end - window - size]
        present, coming = list[tuple[list[AskedChunk], list[tuple[int, int]]]](), list[AskedChunk]()
        for run in _consecutive(needed):
            match = self._slots.match_prefix([one.key for one in run], run[0].position)
            here = len(match.slots)
            if here + self._below(run[here:]) < len(run):
                return beyond + self._presence(within), []
            present.append(
                (run[:here], list(zip(match.slots.tolist(), match.generations.tolist(), strict=True)))
            )
            coming += run[here:]
        lower = [FoundChunk(one, ChunkState.GONE) for one in within[: len(within) - len(needed)]]
        held = [found for chunks, places in present for found in self._hold(chunks, places, self.holds.most)]
        return beyond + lower + held, coming

    def _presence(self, asked: Sequence[AskedChunk]) -> list[FoundChunk]:
        """Return which chunks some tier has, also after gaps; from the last one back, as far as there is time."""
        told: list[FoundChunk] = []
        finds = 0
        for run in reversed(list(_consecutive(asked))):
            for piece in (run[max(0, at - _PIECE) : at] for at in range(len(run), 0, -_PIECE)):
                at = 0
                while at < len(piece):
                    rest, have = piece[at:], 0
                    if finds < _MOST_FINDS:
                        match = self._slots.match_prefix(
                            [one.key for one in rest], rest[0].position, touch=False
                        )
                        have = len(match.slots) + self._below(rest[len(match.slots) :])
                    finds += 1
                    told += [FoundChunk(one, ChunkState.FOUND) for one in rest[:have]]
                    told += [FoundChunk(one, ChunkState.MISSED) for one in rest[have : have + 1]]
                    at += have + 1
        return told

    # ---- chunks to be loaded from lower tiers

    def bring(self, asked: Sequence[AskedChunk]) -> None:
        """Load chunks that are not in the host tier into it, and hold all of them; reports them piece by piece."""
        by_group: dict[int, list[AskedChunk]] = {}
        for one in sorted(asked, key=lambda one: (one.group, one.position)):
            by_group.setdefault(one.group, []).append(one)
        for group, chunks in by_group.items():
            chained = self._groups[group].window is None
            most = self._run_most if chained else self.holds.most
            broken = False
            for run in _consecutive(chunks):
                for piece in (run[at : at + self._piece] for at in range(0, len(run), self._piece)):
                    wanted = [one for one in piece if one.state is not ChunkState.GONE]
                    if broken:
                        told = [FoundChunk(one, ChunkState.MISSED) for one in wanted]
                    else:
                        told = self._bring(wanted, chained, most)
                    broken = chained and any(found.state is ChunkState.MISSED for found in told)
                    self.tell(told)

    def _bring(self, piece: Sequence[AskedChunk], chained: bool, most: int) -> list[FoundChunk]:
        told: list[FoundChunk] = []
        for run in _consecutive(piece):
            at, fetched = 0, -1
            while at < len(run):
                rest = run[at:]
                match = self._slots.match_prefix([one.key for one in rest], rest[0].position)
                here = rest[: len(match.slots)]
                places = list(zip(match.slots.tolist(), match.generations.tolist(), strict=True))
                told += self._hold(here, places, most)
                at += len(here)
                if at == len(run):
                    break
                if fetched < at and run[at].lower and self._lower:
                    fetched = at
                    self._fetch(run[at:])
                    continue
                if chained:
                    told += [FoundChunk(one, ChunkState.MISSED) for one in run[at:]]
                    break
                told.append(FoundChunk(run[at], ChunkState.MISSED))
                at += 1
        return told

    def _fetch(self, run: Sequence[AskedChunk]) -> None:
        hit = self._cache.prefetch(None, keys=self._placed(run), salt=self._salt).result()
        chunks = hit.num_tokens // self._cache.layout.chunk_tokens
        tier = max(hit.by_tier, key=lambda name: name in self._lower, default="host")
        for one in run[:chunks]:
            one.tier = tier

    # ---- parts of it

    def _hold(
        self, asked: Sequence[AskedChunk], places: Sequence[tuple[int, int]], most: int
    ) -> list[FoundChunk]:
        if not asked:
            return []
        return self.holds.hold(asked, *_arrays(places), most)

    def _below(self, run: Sequence[AskedChunk]) -> int:
        """Return how many leading chunks of a run lower tiers have."""
        if not run or not self._lower or not run[0].lower:
            return 0
        hit = self._cache.lookup(
            None, counted=False, keys=self._placed(run), tiers=self._lower, salt=self._salt
        )
        return hit.num_tokens // self._cache.layout.chunk_tokens

    def _placed(self, run: Sequence[AskedChunk]) -> list[tuple[int, int, bytes]]:
        """Return keys with token positions as the cache counts them: its chunks all have one length."""
        size = self._cache.layout.chunk_tokens
        return [(one.position * size, (one.position + 1) * size, one.key) for one in run]

    def _start(self, one: AskedChunk) -> int:
        return one.position * self._groups[one.group].chunk_tokens

    def _stop(self, one: AskedChunk) -> int:
        return (one.position + 1) * self._groups[one.group].chunk_tokens

    def _count(
        self,
        asked: Sequence[AskedChunk],
        here: Sequence[AskedChunk],
        coming: Sequence[AskedChunk],
        reason: Reason | None,
    ) -> None:
        """Count the question in tokens: how many of them the first group with full attention has."""
        size, group = self._groups[asked[0].group].chunk_tokens, asked[0].group
        host, below = (sum(one.group == group for one in ones) * size for ones in (here, coming))
        by_tier = {"host": host} | ({self._lower[0]: below} if self._lower else {})
        self._slots.count_request(len(asked) * size, {tier: n for tier, n in by_tier.items() if n}, reason)
        if self._slots.is_recording:
            start = asked[0].position
            self._slots.record_request(
                [one.key for one in asked], (asked[-1].position + 1 - start) * size, start=start
            )


def _arrays(pairs: Sequence[tuple[int, int]]) -> tuple[Slots, Generations]:
    slots, generations = zip(*pairs, strict=True)
    return np.array(slots, np.int64), np.array(generations, np.uint64)


def _consecutive(asked: Sequence[AskedChunk]) -> Iterator[list[AskedChunk]]:
    """Split chunks of one group, in ascending order, at the gaps between them."""
    run: list[AskedChunk] = []
    for one in asked:
        if run and one.position != run[-1].position + 1:
            yield run
            run = []
        run.append(one)
    if run:
        yield run
