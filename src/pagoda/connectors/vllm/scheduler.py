"""The scheduler's half: what of a prompt is cached, where it is to be loaded, what is to be saved.

It never waits: look-ups run on threads, and a slot that cannot be reserved at once is a chunk that is not saved.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pagoda.cache import Cache, Hit
from pagoda.cache.below import Copy
from pagoda.cache.look import LEASE_SECONDS
from pagoda.connectors.vllm.events import StoredEvents
from pagoda.connectors.vllm.identity import lora_name
from pagoda.connectors.vllm.meta import Handshake, Load, PagodaMetadata, PagodaWorkerMetadata, Save
from pagoda.connectors.vllm.options import Options
from pagoda.connectors.vllm.shared import let_go, opened
from pagoda.connectors.vllm.stats import PagodaStats
from pagoda.keys import derive_keys
from pagoda.ledger import Refused, Reserved
from pagoda.metrics import Reason

__all__ = ["PagodaScheduler"]

log = logging.getLogger("pagoda.vllm")

_LOOK_THREADS = 2
_MOST_LOOKS = 64  # begun ahead of their turn
_FIRST_POLL_SECONDS = 0.003  # so that most look-ups are answered in the pass that asks
_LOOK_SECONDS = 5.0  # a look-up that takes longer is a miss
_RESERVE_SECONDS = 0.02
_SOURCES = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}


class _Found(NamedTuple):
    """What a look-up answered."""

    root: bytes
    lora: str | None
    salt: str | None
    hashes: int  # block hashes the request had then
    hit: Hit
    at: float


@dataclass
class _Tracked:
    """One request, from its arrival until it ends."""

    request: Any
    look: Future[_Found | None] | None = None  # None as its answer: nothing of this request is cached
    asked_at: float = 0.0
    polled: bool = False
    found: _Found | None = None
    loads: bool = True  # False: a load of it came to nothing, it computes for itself
    saves: bool = True
    reason: Reason | None = None  # why there was no look-up
    counted: bool = False
    keys: list[bytes] = field(default_factory=list)
    saved: int = 0  # leading chunks that need no saving
    seen: int = 0  # chunks that were computed when saving was last tried
    stamp: int | None = None
    offered: tuple[int, int] = (0, 0)  # local tokens, and where the hit ends


class PagodaScheduler:
    """Answers vLLM's scheduler. Used by its thread only; `shutdown` ends the look-up threads."""

    def __init__(self, options: Options, hash_tokens: int, events: bool) -> None:
        self._options = options
        self._hash_tokens = hash_tokens  # tokens of one of vLLM's block hashes
        self._wants_events = events
        self._events: StoredEvents | None = None
        self._cache: Cache | None = None
        self._tracked: dict[str, _Tracked] = {}
        self._loading: dict[str, set[bytes]] = {}
        self._loads: list[Load] = []
        self._looks = threading.Semaphore(_MOST_LOOKS)
        self._threads = ThreadPoolExecutor(_LOOK_THREADS, thread_name_prefix="pagoda-look")
        self._stats = PagodaStats()

    def opened(self, handshakes: Iterable[Handshake]) -> None:
        """Open the cache that the workers have described. Raises ValueError if they do not agree."""
        first, *others = handshakes
        if any(other != first for other in others):
            raise ValueError(
                "the tensor-parallel ranks lay out their KV differently: start all with the same version, "
                "environment and hardware"
            )
        self._cache = opened(self._options.config, first.namespace, first.layout)
        self._parts = first.parts
        self._block_tokens = first.block_tokens
        self._chunk_tokens = first.layout.chunk_tokens
        self._base_salt = first.namespace.salt
        if self._wants_events and self._cache.slots is not None:
            self._events = StoredEvents(self._cache.slots, self._chunk_tokens, self._block_tokens)

    # ---- what is cached

    def new_request(self, request: Any) -> None:
        """Begin to look up a request that has just arrived, unless very many are being looked up."""
        if self._cache is None:
            return
        if len(request.block_hashes) != request.num_tokens // self._hash_tokens:
            log.error("block hashes that do not fit the tokens: request %s is not cached", request.request_id)
            return
        tracked = self._tracked[request.request_id] = _Tracked(request)
        self._look(tracked)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond `local_tokens` can be loaded; (None, False): ask again.

        Changes nothing but what is remembered of the look-up; O(1) while there is nothing new to tell.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or self._cache is None:
            return 0, False
        tracked.offered = local_tokens, local_tokens
        if not tracked.loads or request.skip_reading_prefix_cache:
            return 0, False
        if not self._answered(tracked):
            return None, False
        found = tracked.found
        # at least one token is left to compute, for the model has to say something
        stop = 0 if found is None else found.hit.stop_tokens
        stop = min(stop, (request.num_tokens - 1) // self._block_tokens * self._block_tokens)
        tokens = stop - local_tokens
        if tokens <= 0 or tokens < self._options.config.min_hit_tokens:
            return 0, False
        self._keys_of(tracked, -(-stop // self._chunk_tokens))
        wanted = tracked.keys[local_tokens // self._chunk_tokens :]
        if any(not keys.isdisjoint(wanted) for keys in self._loading.values()):
            return None, False  # somebody is loading it: soon it is in the engine's own cache
        tracked.offered = local_tokens, stop
        return tokens, True

    def sources(self, request: Any, tokens: int) -> dict[CacheHitSource, int]:
        """Split the tokens that are being loaded by the tier they were found in."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.found is None or not tokens:
            return {}
        begin, split, at = tracked.offered[0], dict[CacheHitSource, int](), 0
        for tier, count in tracked.found.hit.by_tier.items():  # in the order of the prompt
            share = max(0, min(at + count, begin + tokens) - max(at, begin))
            source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            if share:
                split[source] = split.get(source, 0) + share
            at += count
        return split

    def _answered(self, tracked: _Tracked) -> bool:
        """Whether it is known what is cached of a request; begins to look (again) where it is not, or no more."""
        now = time.monotonic()
        if tracked.look is None and not self._look(tracked):
            return False
        assert tracked.look is not None
        if not tracked.polled:
            tracked.polled = True
            _wait(tracked.look, _FIRST_POLL_SECONDS)
        if not tracked.look.done():
            if now - tracked.asked_at < _LOOK_SECONDS:
                return False
            tracked.loads, tracked.reason = False, Reason.DEADLINE
            return True
        if (trouble := tracked.look.exception()) is not None:
            log.warning("a look-up failed: %s: %s", type(trouble).__name__, trouble)
            tracked.loads, tracked.reason = False, Reason.IO_ERROR
            return True
        tracked.found = found = tracked.look.result()
        hashes = len(tracked.request.block_hashes)
        if found is not None and (found.hashes != hashes or now - found.at > LEASE_SECONDS):
            self._look(tracked)
            return False
        if found is not None:
            tracked.saved = max(tracked.saved, found.hit.stop_tokens // self._chunk_tokens)
        return True

    def _look(self, tracked: _Tracked) -> bool:
        """Begin to look up; False where too many are being looked up."""
        assert self._cache is not None
        if not self._looks.acquire(blocking=False):
            return False
        request, hashes = tracked.request, len(tracked.request.block_hashes)
        digests = self._digests(request, 0, hashes)
        tracked.asked_at, tracked.polled = time.monotonic(), False
        tracked.look = self._threads.submit(self._lookup, self._cache, request, digests, hashes)
        tracked.look.add_done_callback(lambda _: self._looks.release())
        return True

    def _lookup(self, cache: Cache, request: Any, digests: list[bytes], hashes: int) -> _Found | None:
        """What a thread does: name the request's namespace, derive its keys, ask the tiers."""
        lora = None
        if request.lora_request is not None:
            lora = lora_name(request.lora_request)
            if lora is None:
                return None
        salt = self._salt(request)
        assert cache.slots is not None
        root = cache.slots.namespace(lora, salt)
        keys = derive_keys(digests, root)
        hit = cache.lookup(None, keys=keys, lora=lora, salt=salt, counted=False)
        return _Found(root, lora, salt, hashes, hit, time.monotonic())

    def _salt(self, request: Any) -> str | None:
        if not request.cache_salt:
            return None
        return f"{self._base_salt}\n{request.cache_salt}" if self._base_salt else str(request.cache_salt)

    def _digests(self, request: Any, begin: int, hashes: int) -> list[bytes]:
        """The engine's hash at the end of each chunk from number `begin` on: it names the whole prefix."""
        step = self._chunk_tokens // self._hash_tokens
        return [bytes(digest) for digest in request.block_hashes[begin * step + step - 1 : hashes : step]]

    def _keys_of(self, tracked: _Tracked, chunks: int) -> None:
        """Extend the request's keys to `chunks`, or as far as it has block hashes."""
        assert tracked.found is not None
        have = len(tracked.keys)
        if have < chunks:
            hashes = chunks * (self._chunk_tokens // self._hash_tokens)
            digests = self._digests(tracked.request, have, hashes)
            tracked.keys += derive_keys(digests, tracked.found.root)

    # ---- loads

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """Note that a request was admitted: `tokens` of it are to be loaded into `blocks`."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        self._count(tracked, tokens)
        if not tokens:
            return
        assert tracked.found is not None
        local = tracked.offered[0]
        stop = local + tokens
        chunks, first = -(-stop // self._chunk_tokens), local // self._chunk_tokens
        ids = list(blocks.get_block_ids()[0])
        begin, end = local // self._block_tokens, stop // self._block_tokens
        rest = chunks * self._chunk_tokens // self._block_tokens - end
        table = [-1] * begin + ids[begin:end] + [-1] * rest
        keys = tracked.keys[:chunks]
        self._loading[request.request_id] = set(keys[first:])
        self._loads.append(
            Load(request.request_id, keys, first, table, tracked.found.lora, tracked.found.salt)
        )

    def _count(self, tracked: _Tracked, tokens: int) -> None:
        """Count a request once: what it asked for, and what it got from which tier."""
        found = tracked.found
        if tracked.counted or self._cache is None or self._cache.slots is None:
            return
        tracked.counted = True
        asked = tracked.request.num_tokens - tracked.offered[0]
        split = self.sources(tracked.request, tokens)
        by_tier = {tier: split.get(source, 0) for tier, source in _SOURCES.items()}
        by_tier["remote"] = tokens - sum(by_tier.values())
        reason = found.hit.reason if found is not None else tracked.reason
        self._cache.slots.asked(asked, {tier: n for tier, n in by_tier.items() if n}, reason)
        self._stats.count("lookups", 1)
        self._stats.count("asked_tokens", asked)
        for tier, number in by_tier.items():
            self._stats.count(f"hit_tokens_{tier}", number)

    def told(self, output: Any) -> None:
        """Note what the workers tell: which loads ended, and which of them failed."""
        meta = output.kv_connector_worker_meta
        if isinstance(meta, PagodaWorkerMetadata):
            for request in meta.failed:
                if (tracked := self._tracked.get(request)) is not None:
                    tracked.loads, tracked.saved, tracked.seen = False, 0, 0
        for request in output.finished_recving or ():
            self._loading.pop(request, None)

    # ---- one step

    def step(self, output: Any) -> PagodaMetadata:
        """Return this step's loads and saves; reserves the slots of the latter."""
        meta = PagodaMetadata(os.getpid(), self._loads, idle=not output.num_scheduled_tokens)
        self._loads = []
        if self._cache is None:
            return meta
        for name, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(name)
            if tracked is not None:
                self._save(tracked, scheduled, output, meta)
        if len(output.num_scheduled_tokens) == 1:
            meta.computed_tokens = output.total_num_scheduled_tokens
        return meta

    def _save(self, tracked: _Tracked, scheduled: int, output: Any, meta: PagodaMetadata) -> None:
        """Reserve slots for the chunks that are complete after this step, and have them filled."""
        request = tracked.request
        if not tracked.saves:
            return
        # the tokens known by now; what is behind them may be a draft that is yet rejected
        tokens = min(request.num_computed_tokens + scheduled, request.num_tokens)
        if not self._options.store_output:
            tokens = min(tokens, request.num_prompt_tokens)
        done = tokens // self._chunk_tokens
        if done <= max(tracked.saved, tracked.seen) or not self._nameable(tracked):
            return
        table = output.kv_connector_block_state.get_block_ids(request.request_id)
        self._keys_of(tracked, done)
        done = min(done, len(tracked.keys))
        tracked.seen, first = done, tracked.saved
        if table is None or first >= done:
            return
        copies = self._reserved(tracked, first, done)
        step = self._chunk_tokens // self._block_tokens
        if copies:
            assert tracked.found is not None
            meta.saves.append(
                Save(tracked.found.root, copies, first, list(table[0][first * step : done * step]))
            )

    def _nameable(self, tracked: _Tracked) -> bool:
        """Whether the namespace of a request is known; one that was not looked up yet is looked up now."""
        if tracked.look is None:
            self._look(tracked)
        look = tracked.look
        if tracked.found is None and look is not None and look.done() and look.exception() is None:
            tracked.found = look.result()
        return tracked.found is not None

    def _reserved(self, tracked: _Tracked, first: int, done: int) -> list[Copy]:
        assert self._cache is not None and self._cache.slots is not None and tracked.found is not None
        slots, keys = self._cache.slots, tracked.keys
        if tracked.stamp is None:
            tracked.stamp = slots.stamp()
        outcomes = slots.reserve(
            keys[first:done],
            namespace=tracked.found.root,
            start=first,
            parent=keys[first - 1] if first else None,
            stamp=tracked.stamp,
            parts=self._parts,
            deadline_seconds=_RESERVE_SECONDS,
        )
        if self._events is not None:
            self._events.note(tracked.request, first, outcomes)
        refused = [n for n, outcome in enumerate(outcomes, first) if isinstance(outcome, Refused)]
        tracked.saved = refused[0] if refused else done
        self._stats.count("refused_chunks", len(refused))
        copies = [
            Copy(keys[n], n, keys[n - 1] if n else None, outcome.slot, outcome.generation)
            for n, outcome in enumerate(outcomes, first)
            if isinstance(outcome, Reserved)
        ]
        self._stats.count("saved_chunks", len(copies))
        return copies

    # ---- ends

    def finished(self, request: Any) -> None:
        """Forget a request; what is being loaded for it goes on until the workers have ended it."""
        self._tracked.pop(request.request_id, None)

    def reset(self) -> bool:
        """Let nothing that was stored before hit again: the weights may have changed. False if that failed."""
        if self._cache is None:
            return True
        try:
            self._cache.weights_changed()
        except Exception as trouble:  # noqa: BLE001  # a border: vLLM tells its user by the answer
            log.warning("the cache could not be reset: %s", trouble)
            return False
        for tracked in self._tracked.values():
            tracked.loads = tracked.saves = False  # who can say which weights computed what of it
        if self._events is not None:
            self._events.clear()
        return True

    def take_stats(self) -> PagodaStats | None:
        """What was counted since the last call."""
        return self._stats.take()

    def take_events(self) -> Iterable[Any]:
        """KV events since the last call, if the engine wants them."""
        return self._events.take() if self._events is not None else ()

    def shutdown(self) -> None:
        """End the threads and let go of the cache; ends in bounded time. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        cache, self._cache = self._cache, None
        if cache is not None:
            let_go(cache)


def _wait(future: Future[Any], seconds: float) -> None:
    try:
        future.exception(seconds)
    except TimeoutError:
        return
