"""Finds the chunks that vLLM's scheduler asks for, on threads; loads them into host slots and holds
them there.

A load that was promised cannot be cancelled, so a chunk is a hit only while this process holds its
slot. For groups with full attention a hit is a run from the first chunk on; for sliding windows
only the end of that run is needed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import groupby
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

import numpy as np

from pagoda.base.log import guarded_logger
from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from pagoda.cache.host_slots import HostSlots
from pagoda.cache.writeback import Generations, Slots

log = guarded_logger("pagoda.vllm")

_HELD_SHARE = 2  # at most half of the slots are held at a time
# a quarter of those, or one window of each group, is for windows: without them no run hits
_WINDOW_SHARE = 4
# loaded together, and reported when all of them have arrived
_PIECE = 16
_PIECE_BYTES = 64 << 20
_BATCH = 64  # chunks of one transaction
_MOST_FINDS = 128  # how many gaps in a run one question looks into


HostPlace: TypeAlias = tuple[int, int]  # a host slot, and its generation


class ChunkState(Enum):
    """What is known of a chunk that was asked for."""

    ASKED = auto()  # no answer yet
    FOUND = auto()  # some tier has it; it is loaded when it is asked for again
    COMING = auto()
    HELD = auto()  # in a host slot that this process holds
    MISSED = auto()
    GONE = auto()  # no request waits for the answer


class Group(NamedTuple):
    """One KV cache group. `window`: tokens before the end of a hit that are needed; None: all of
    them.
    """

    chunk_tokens: int
    window: int | None


@dataclass(slots=True, eq=False)
class AskedChunk:
    """One chunk of one group. Only the scheduler's thread changes it, but for `tier`.

    Others read constant fields, and `state`.
    """

    name: bytes  # vLLM's key
    key: bytes
    group: int
    position: int
    version: str  # of the weights
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

    @property
    def place(self) -> HostPlace:
        """The slot of a HELD chunk."""
        return self.slot, self.generation


class FoundChunk(NamedTuple):
    """The news of one chunk."""

    asked: AskedChunk
    state: ChunkState
    place: HostPlace = (-1, 0)


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
        self, asked: Sequence[AskedChunk], places: Sequence[HostPlace], most: int
    ) -> list[FoundChunk]:
        """Hold as many leading chunks as are allowed; those that could not be held are MISSED."""
        with self._lock:
            room = max(0, min(len(asked), most - self.count))
            self.count += room
        held: list[bool] = []
        for at in range(0, room, _BATCH):
            held += self._slots.hold(
                *_arrays(places[at : min(at + _BATCH, room)])
            )
        with self._lock:
            self.count -= held.count(False)
        held += [False] * (len(asked) - room)
        return [
            FoundChunk(one, ChunkState.HELD, place)
            if ok
            else FoundChunk(one, ChunkState.MISSED)
            for one, place, ok in zip(asked, places, held, strict=True)
        ]

    def valid(self, places: Sequence[HostPlace]) -> list[bool]:
        """Return for each place whether the chunk can still be loaded."""
        return (
            self._slots.still_valid(*_arrays(places)).tolist() if places else []
        )

    def release(self, places: Sequence[HostPlace]) -> None:
        """End one hold on each of these places."""
        if places:
            self._slots.release(*_arrays(places))
            with self._lock:
                self.count -= len(places)


class ChunkFinder:
    """Answers questions about chunks by adding to `news`. Thread-safe."""

    def __init__(self, cache: Cache, groups: Sequence[Group]) -> None:
        assert cache.slots is not None
        self._cache = cache
        self._slots = cache.slots
        self._groups = groups
        self._lower = tuple(tier for tier in cache.tiers if tier != "host")
        self.holds = HeldSlots(cache.slots)
        windows = sum(
            -(-group.window // group.chunk_tokens) + 1
            for group in groups
            if group.window is not None
        )
        self._run_most = max(
            1, self.holds.most - max(self.holds.most // _WINDOW_SHARE, windows)
        )
        if runs := [
            group.chunk_tokens for group in groups if group.window is None
        ]:
            log.info(
                "a request hits at most %d tokens: each of %d group(s) has a slot for each "
                "chunk, and at most half of "
                "the host tier's %d slots are held; raise host_size if this is too few",
                int(self._run_most / sum(1 / size for size in runs)),
                len(groups),
                cache.slots.count,
            )
        self.news: SimpleQueue[list[FoundChunk]] = SimpleQueue()
        self._piece = max(1, min(_PIECE, _PIECE_BYTES // cache.layout.slot_bytes))
        # when something was last found: requests wait longer while there is progress
        self.moved = 0.0

    def root(self, version: str) -> bytes:
        """Return the root of the namespace that the chunks of a version of the weights belong
        to.
        """
        return self._slots.namespace(weights_version=version)

    def report(self, news: list[FoundChunk]) -> None:
        """Pass news to the scheduler's thread."""
        self.moved = time.monotonic()
        self.news.put(news)

    # ---- a question: chunks of one request about which nothing is known

    def answer(self, question: Sequence[AskedChunk]) -> list[AskedChunk]:
        """Find these chunks and hold those that are in host slots; returns those to be loaded from
        lower tiers.
        """
        groups = by_group(question)
        runs = [
            asked
            for group, asked in groups.items()
            if self._groups[group].window is None
        ]
        windows = [
            asked
            for group, asked in groups.items()
            if self._groups[group].window is not None
        ]
        news, coming, end = self._answer_runs(runs) if runs else ([], [], None)
        for asked in windows:
            more_news, more = self._answer_window(asked, end)
            news = news + more_news
            coming = coming + more
        self.report(news + all_found(coming, ChunkState.COMING))
        return coming

    def _answer_runs(
        self, runs: Sequence[list[AskedChunk]]
    ) -> tuple[list[FoundChunk], list[AskedChunk], int]:
        """Full attention: a hit is the run that all such groups have from the first chunk on;
        returns also its end.
        """
        places: dict[AskedChunk, HostPlace] = {}
        below: set[AskedChunk] = set()
        end = min(self._stop(asked[-1]) for asked in runs)
        reason = None
        for asked in runs:
            for run in _consecutive(asked):
                found, why = self._match(run)
                places |= zip(run, found, strict=False)
                lower, slow = self._below(run[len(found) :])
                have = len(found) + lower
                why = Reason.NOT_WORTH_IT if slow else why
                below.update(run[len(found) : have])
                if have < len(run):
                    if self._start(run[have]) < end:
                        end = self._start(run[have])
                        reason = why or Reason.ABSENT
                    break
        begin = min(self._start(asked[0]) for asked in runs)
        all_asked = sorted(
            (one for asked in runs for one in asked), key=self._stop
        )
        hits = [
            one
            for one in all_asked
            if self._stop(one) <= end and (one in places or one in below)
        ]
        if len(hits) > (room := self.holds.room(self._run_most)):
            end = self._start(hits[room])
            reason = Reason.FULL
        if end - begin < self._cache.config.min_hit_tokens:
            end = begin
            reason = Reason.BELOW_MINIMUM
        hits = [one for one in hits if self._stop(one) <= end]
        here = [one for one in hits if one in places]
        coming = [one for one in hits if one not in places]
        news = self.holds.hold(
            here, [places[one] for one in here], self._run_most
        )
        news += all_found(set(all_asked).difference(hits), ChunkState.MISSED)
        self._count(runs[0], hits, reason)
        return news, coming, end

    def _answer_window(
        self, asked: list[AskedChunk], end: int | None
    ) -> tuple[list[FoundChunk], list[AskedChunk]]:
        """Sliding windows and states: hold the window before the end of the run, if all of it is
        found.
        """
        if end is None:
            return self._presence(asked), []
        beyond = all_found(
            [one for one in asked if self._start(one) >= end], ChunkState.MISSED
        )
        within = [one for one in asked if self._start(one) < end]
        group = self._groups[asked[0].group]
        needed = [
            one
            for one in within
            if self._stop(one) > end - (group.window or 0) - group.chunk_tokens
        ]
        here = list[AskedChunk]()
        places = list[HostPlace]()
        coming = list[AskedChunk]()
        for run in _consecutive(needed):
            found, _ = self._match(run)
            if len(found) + self._below(run[len(found) :])[0] < len(run):
                return beyond + self._presence(within), []
            here = here + run[: len(found)]
            places = places + found
            coming += run[len(found) :]
        lower = all_found(within[: len(within) - len(needed)], ChunkState.GONE)
        return beyond + lower + self.holds.hold(
            here, places, self.holds.most
        ), coming

    def _presence(self, asked: Sequence[AskedChunk]) -> list[FoundChunk]:
        """Return which chunks some tier has, also after gaps; from the last one back, as far as
        there is time.
        """
        news: list[FoundChunk] = []
        finds = 0
        for run in reversed(list(_consecutive(asked))):
            for piece in (
                run[max(0, at - _PIECE) : at]
                for at in range(len(run), 0, -_PIECE)
            ):
                at = 0
                while at < len(piece):
                    rest = piece[at:]
                    have = 0
                    if finds < _MOST_FINDS:
                        found, _ = self._match(rest, touch=False)
                        have = len(found) + self._below(rest[len(found) :])[0]
                    finds += 1
                    news += all_found(rest[:have], ChunkState.FOUND)
                    news += all_found(rest[have : have + 1], ChunkState.MISSED)
                    at += have + 1
        return news

    # ---- chunks to be loaded from lower tiers

    def bring(self, asked: Sequence[AskedChunk]) -> None:
        """Load chunks of one group that are not in the host tier into it, and hold them; reports
        them in pieces.
        """
        chained = self._groups[asked[0].group].window is None
        most = self._run_most if chained else self.holds.most
        broken = False
        for run in _consecutive(asked):
            for piece in (
                run[at : at + self._piece]
                for at in range(0, len(run), self._piece)
            ):
                wanted = [
                    one for one in piece if one.state is not ChunkState.GONE
                ]
                news = (
                    all_found(wanted, ChunkState.MISSED)
                    if broken
                    else self._bring(wanted, chained, most)
                )
                broken = chained and any(
                    found.state is ChunkState.MISSED for found in news
                )
                self.report(news)

    def _bring(
        self, piece: Sequence[AskedChunk], chained: bool, most: int
    ) -> list[FoundChunk]:
        news: list[FoundChunk] = []
        for run in _consecutive(piece):
            at = 0
            fetched = -1
            while at < len(run):
                found, _ = self._match(run[at:])
                news += self.holds.hold(run[at : at + len(found)], found, most)
                at += len(found)
                if at == len(run):
                    break
                if fetched < at and run[at].lower and self._lower:
                    fetched = at
                    keys = self._placed(run[at:])
                    self._cache.prefetch(
                        None, keys=keys, weights_version=run[at].version
                    ).result()
                    continue
                missed = run[at:] if chained else run[at : at + 1]
                news += all_found(missed, ChunkState.MISSED)
                at += len(missed)
        return news

    # ---- helpers

    def _match(
        self, run: Sequence[AskedChunk], touch: bool = True
    ) -> tuple[list[HostPlace], Reason | None]:
        """Return where the leading chunks of a run are in the host tier, and why not more."""
        match = self._slots.match_prefix(
            [one.key for one in run], run[0].position, touch=touch
        )
        return list(
            zip(match.slots.tolist(), match.generations.tolist(), strict=True)
        ), match.reason

    def _below(self, run: Sequence[AskedChunk]) -> tuple[int, bool]:
        """Return how many leading chunks of a run are to be loaded from lower tiers, and whether
        more would be slow.

        Sets the tier of each.
        """
        if not run or not self._lower or not run[0].lower:
            return 0, False
        hit = self._cache.lookup(
            None,
            counted=False,
            keys=self._placed(run),
            tiers=self._lower,
            weights_version=run[0].version,
        )
        size = self._cache.layout.chunk_tokens
        tiers = [
            tier
            for tier, tokens in hit.by_tier.items()
            for _ in range(tokens // size)
        ]
        for one, tier in zip(run, tiers, strict=False):
            one.tier = tier
        return len(tiers), hit.reason is Reason.NOT_WORTH_IT

    def _placed(self, run: Sequence[AskedChunk]) -> list[tuple[int, int, bytes]]:
        """Return keys with token positions as the cache counts them: its chunks all have one
        length.
        """
        size = self._cache.layout.chunk_tokens
        return [
            (one.position * size, (one.position + 1) * size, one.key)
            for one in run
        ]

    def _start(self, one: AskedChunk) -> int:
        return one.position * self._groups[one.group].chunk_tokens

    def _stop(self, one: AskedChunk) -> int:
        return (one.position + 1) * self._groups[one.group].chunk_tokens

    def _count(
        self,
        asked: Sequence[AskedChunk],
        hits: Sequence[AskedChunk],
        reason: Reason | None,
    ) -> None:
        """Count the question in tokens: how many of them the first group with full attention
        has.
        """
        size = self._groups[asked[0].group].chunk_tokens
        group = asked[0].group
        by_tier = Counter(one.tier for one in hits if one.group == group)
        tokens = {tier: n * size for tier, n in by_tier.items()}
        self._slots.count_request(
            len(asked) * size, tokens, reason, self.root(asked[0].version)
        )
        if self._slots.is_recording:
            start = asked[0].position
            self._slots.record_request(
                [one.key for one in asked],
                (asked[-1].position + 1 - start) * size,
                start=start,
            )


def by_group(asked: Iterable[AskedChunk]) -> dict[int, list[AskedChunk]]:
    """Return the chunks of each group, in ascending order."""
    groups: dict[int, list[AskedChunk]] = {}
    for one in sorted(asked, key=lambda one: (one.group, one.position)):
        groups.setdefault(one.group, []).append(one)
    return groups


def all_found(asked: Iterable[AskedChunk], state: ChunkState) -> list[FoundChunk]:
    """Return the same news of each of these chunks."""
    return [FoundChunk(one, state) for one in asked]


def _arrays(places: Sequence[HostPlace]) -> tuple[Slots, Generations]:
    slots, generations = zip(*places, strict=True)
    return np.array(slots, np.int64), np.array(generations, np.uint64)


def _consecutive(asked: Sequence[AskedChunk]) -> Iterator[list[AskedChunk]]:
    """Split chunks of one group, in ascending order, at the gaps between them."""
    # the positions of a run grow as the indexes do
    for _, run in groupby(enumerate(asked), lambda row: row[1].position - row[0]):
        yield [one for _, one in run]
