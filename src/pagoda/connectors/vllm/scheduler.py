"""The scheduler's half: decides which chunks of a prompt are loaded, into which blocks, and which
are saved.

Its waits are short: look-ups run on threads, and a reservation that fails is tried again in a later
step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.cache import Cache
from pagoda.cache.writeback import ChunkRef
from pagoda.connectors.vllm.connector_stats import TIERS, PagodaStats
from pagoda.connectors.vllm.engine_weights import EngineWeights
from pagoda.connectors.vllm.event_publisher import EventOutlet
from pagoda.connectors.vllm.lookups import (
    LONGEST_SECONDS,
    LookupThreads,
    TrackedRequest,
)
from pagoda.connectors.vllm.metadata import (
    Handshake,
    Load,
    PagodaMetadata,
    PagodaWorkerMetadata,
    Save,
)
from pagoda.connectors.vllm.options import ConnectorOptions
from pagoda.connectors.vllm.prefill_steps import computes_answers, prompt_step_of
from pagoda.connectors.vllm.request_hints import HintReader
from pagoda.connectors.vllm.request_limits import (
    is_of_embeddings,
    named_tokens,
    reads_nothing,
)
from pagoda.connectors.vllm.scheduled_chunks import (
    end_events,
    events_of,
    reserved_run,
    source_of,
)
from pagoda.connectors.vllm.shared_caches import agreed, let_go, opened
from pagoda.kv_events.notes import BlockFacts, NoteMaker
from pagoda.kv_events.stored_events import StoredEvents
from pagoda.ledger import Outcome, Reserved, RunToReserve

log = guarded_logger("pagoda.vllm")

# the wait for all reserves of one step together; the second while the engine computes answers,
# whose readers notice
_RESERVE_SECONDS, _BRIEF_RESERVE_SECONDS = 0.02, 0.0015
# pause of reserves after a timeout: the process that has the lock may be stopped
_STUCK_SECONDS = 0.1


class _DueSave(NamedTuple):
    """Chunks [first, done) of a request, which a step completes, and the blocks that have them."""

    tracked: TrackedRequest
    first: int
    done: int
    blocks: list[int]


class PagodaScheduler:
    """Answers vLLM's scheduler. For its thread only; `shutdown` ends the look-up threads."""

    def __init__(
        self,
        options: ConnectorOptions,
        hash_tokens: int,
        outlet: EventOutlet | None,
        *,
        kv_kind: tuple[str | None, int | None] = (None, None),
        shares_blocks: bool = True,
        drops_last_block: bool = False,
        in_lockstep: bool = False,
        schedules_early: bool = False,
        hashes_media: bool = True,
        role: str = "kv_both",
        hints: HintReader | None = None,
    ) -> None:
        """Prepare; it works after `opened`.

        `outlet`: the outlet of KV events; None: events are off. `kv_kind`: the kind of attention
        and its window, for events. `shares_blocks`: other requests find the blocks that one request
        has loaded in the engine's own cache.
        `drops_last_block`: the last block of a hit is always computed. `in_lockstep`: other engines
        wait for each step of this one. `schedules_early`: a step is scheduled before the last one
        has ended. `hashes_media`: vLLM names media by their content. `role`: a `kv_producer` only
        stores, a `kv_consumer` only loads. `hints`: reads what is said of requests; None: what
        clients say.
        """
        self._options = options
        self._shares_blocks = shares_blocks
        self._drops_last_block = drops_last_block
        self._in_lockstep = in_lockstep
        self._schedules_early = schedules_early
        self._hashes_media = hashes_media
        self._loads_any = role != "kv_producer"
        self._saves_any = role != "kv_consumer"
        self._hints = hints or HintReader(options.config.hints, None)
        self._hash_tokens = hash_tokens  # tokens of one of vLLM's block hashes
        self.outlet = outlet
        self._kv_kind = kv_kind
        self._events: StoredEvents | None = None
        self._cache: Cache | None = None
        # True: the workers' description has come, or the wait for it has ended
        self._described = False
        self._tracked: dict[str, TrackedRequest] = {}
        # which request loads a chunk, and the chunks that each loads
        self._loaders: dict[bytes, str] = {}
        self._loading: dict[str, list[bytes]] = {}
        self._loads: list[Load] = []
        self._steps = 0
        self._admitted: list[TrackedRequest] = []  # since the last step
        # the last step in which another connector loads, and the last such step that is known to
        # have ended
        self._others_loaded = self._others_ended = 0
        self._stuck_until = 0.0
        self.stats = PagodaStats()  # since the last step
        self._lines = RateLimitedLog()
        self.weights = EngineWeights(options.weights_run, self._take_version)

    def opened(self, handshakes: Iterable[Handshake]) -> None:
        """Open the cache that the workers have described. Raises ValueError if their descriptions
        differ.

        vLLM describes the same memory again after a sleep: then nothing changes.
        """
        if self._cache is not None:
            return
        self._described = True
        first = agreed(handshakes)
        cache = opened(self._options.config, first.namespace, first.layout)
        # an engine without a host tier was refused
        assert cache.slots is not None
        self._cache = cache
        self._slots = cache.slots
        self._parts = first.parts
        self._block_tokens = first.block_tokens
        self._chunk_tokens = first.layout.chunk_tokens
        self._lookups = LookupThreads(
            cache,
            self._hash_tokens,
            first.namespace.salt,
            not self._in_lockstep,
            self._hashes_media,
        )
        self._lookups.version = self.weights.version
        if self.outlet is not None:
            facts = BlockFacts(
                self._chunk_tokens, self._block_tokens, *self._kv_kind
            )
            present = self._lookups.root
            self._events, self._form = events_of(
                cache, self.outlet, {0: facts}, self._hash_tokens, present
            )
            # otherwise it cannot load, and only leaves notes for other engines
            if self._loads_any:
                self._events.start()
                self._lookups.events = self._events

    # ---- look-ups

    def new_request(self, request: Any) -> None:
        """Begin to look up a new request, unless too many look-ups are running."""
        if self._cache is None and self._described:
            return
        if len(request.block_hashes) != request.num_tokens // self._hash_tokens:
            text = (
                f"request {request.request_id} is not cached: the number of its block hashes "
                "is wrong"
            )
            self._lines.warn(log, Reason.IO_ERROR, text)
            return
        slots = None if self._cache is None else self._slots
        tracked = self._tracked[request.request_id] = TrackedRequest(
            request,
            loads=self._loads_any,
            saves=self._saves_any,
            asks=self._loads_any and not reads_nothing(request),
            most_named=named_tokens(request),
            is_of_embeddings=is_of_embeddings(request),
            most_loaded=self._limit(request, "max_load_tokens"),
            most_saved=self._limit(request, "max_offload_tokens"),
            asked_at=time.monotonic(),
            hints=self._hints.arrived(request, slots),
        )
        if self._cache is not None:
            self._lookups.begin(tracked)

    def _limit(self, request: Any, name: str) -> int | None:
        """Return a limit in a request's `kv_transfer_params`, by the names of vLLM's
        OffloadingConnector.
        """
        limit = (request.kv_transfer_params or {}).get(name)
        if limit is None or (type(limit) is int and limit >= 0):
            return limit
        text = (
            f"{name} = {limit!r} of a request is ignored: write a whole number that is not "
            "negative"
        )
        self._lines.warn(log, Reason.IO_ERROR, text)
        return None

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond `local_tokens` can be loaded; (None, False): ask again.

        Changes only the state of the look-up.
        """
        self.weights.restore_after_sleep()
        tracked = self._tracked.get(request.request_id)
        if tracked is None or (
            self._cache is None and self._no_longer_awaited(tracked)
        ):
            return 0, False
        if self._cache is None:
            return None, False
        tracked.local_tokens = local_tokens
        if local_tokens and tracked.is_of_embeddings:
            tracked.saves = False
        whole = request.num_tokens // self._chunk_tokens * self._chunk_tokens
        if not tracked.loads or request.skip_reading_prefix_cache:
            return self._without_load(tracked, whole)
        # at least one token must be computed, because the model needs it for its answer
        most = (request.num_tokens - 1) // self._block_tokens * self._block_tokens
        # as in vLLM's own prefix cache
        dropped = self._block_tokens if self._drops_last_block else 0
        if tracked.most_loaded is not None:
            most = min(
                most,
                (local_tokens + tracked.most_loaded)
                // self._block_tokens
                * self._block_tokens,
            )
        if tracked.most_named is not None:
            most = min(
                most,
                tracked.most_named // self._block_tokens * self._block_tokens,
            )
        least = max(1, self._options.config.min_hit_tokens)
        # too short, even if all of it is in the tiers
        if min(most, whole) - dropped - local_tokens < least:
            tracked.reason = None if whole else Reason.SHORT_PROMPT
            return self._without_load(tracked, whole)
        if tracked.waits_for in self._loading:
            return None, False
        found = self._lookups.found_tokens(tracked, most)
        if found is None:
            return None, False
        stop = found - dropped
        if stop - local_tokens < least:
            return 0, False
        chunks = -(-stop // self._chunk_tokens)
        wanted = tracked.keys[local_tokens // self._chunk_tokens : chunks]
        tracked.waits_for = self._loader(wanted) if self._shares_blocks else None
        if tracked.waits_for is not None:
            return None, False
        return stop - local_tokens, True

    def _without_load(
        self, tracked: TrackedRequest, whole: int
    ) -> tuple[int | None, bool]:
        """Answer for a request without a load. It may end with its first step, so its namespace
        must be known now.
        """
        unknown = (
            tracked.saves
            and whole > tracked.local_tokens
            and tracked.found is None
        )
        return (
            None if unknown and not self._lookups.answered(tracked) else 0
        ), False

    def _no_longer_awaited(self, tracked: TrackedRequest) -> bool:
        """Whether requests continue without a cache: no description has come within the longest
        look-up.
        """
        if (
            not self._described
            and time.monotonic() - tracked.asked_at > LONGEST_SECONDS
        ):
            log.error("nothing is cached: no worker has described its KV memory")
            self._described = True
        return self._described

    def _loader(self, wanted: list[bytes]) -> str | None:
        """Return a request that is loading any of these chunks: soon they will be in the engine's
        own cache.
        """
        loaders = (self._loaders.get(key) for key in wanted)
        return next((name for name in loaders if name is not None), None)

    def sources(self, request: Any, tokens: int) -> dict[CacheHitSource, int]:
        """Split the tokens that are being loaded by tier."""
        tracked = self._tracked.get(request.request_id)
        split = dict[CacheHitSource, int]()
        for tier, share in (
            _by_tier(tracked, tokens).items() if tracked is not None else ()
        ):
            source = source_of(tier)
            split[source] = split.get(source, 0) + share
        return split

    # ---- loads

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """Note that a request was admitted, and that `tokens` of it must be loaded into
        `blocks`.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or self._cache is None:
            return
        self._admitted.append(tracked)
        self._count(tracked, tokens)
        if not tokens:
            return
        assert tracked.found is not None
        local = tracked.local_tokens
        stop = local + tokens
        chunks = -(-stop // self._chunk_tokens)
        first = local // self._chunk_tokens
        ids = list(blocks.get_block_ids()[0])
        begin = local // self._block_tokens
        end = stop // self._block_tokens
        rest = chunks * self._chunk_tokens // self._block_tokens - end
        table = [-1] * begin + ids[begin:end] + [-1] * rest
        keys = tracked.keys[:chunks]
        self._loading[request.request_id] = keys[first:]
        for key in keys[first:]:
            self._loaders.setdefault(key, request.request_id)
        found = tracked.found
        if self._events is not None:
            make = self._notes(request, found.root)
            self._events.found(
                make, found.root, found.present, first, keys[first:]
            )
        load = Load(
            request.request_id,
            keys,
            first,
            table,
            found.lora,
            found.salt,
            found.version,
        )
        self._loads.append(load)

    def _notes(self, request: Any, root: bytes) -> NoteMaker:
        """Return the function that makes the notes of those of a request's chunks that other
        engines can name.
        """
        make = self._form.notes(request, root)
        shared = self._lookups.shared_tokens(request)
        size = self._chunk_tokens
        if shared is None:
            return make
        return lambda chunk: make(chunk) if (chunk + 1) * size <= shared else None

    def _count(self, tracked: TrackedRequest, tokens: int) -> None:
        """Count a request once: the tokens that it may read and asks for, and the tokens from each
        tier.
        """
        if tracked.counted:
            return
        tracked.counted = True
        found = tracked.found
        asked = _asked_tokens(tracked)
        reason, root = (
            (tracked.reason, b"")
            if found is None
            else (found.hit.reason, found.root)
        )
        if not asked:
            self._slots.count_request(
                tracked.request.num_tokens, {}, Reason.NOT_ASKED, root
            )
            return
        by_tier = _by_tier(tracked, tokens)
        self._slots.count_request(asked, by_tier, reason, root)
        self.stats.count("lookups", 1)
        self.stats.count("asked_tokens", asked)
        for tier, number in by_tier.items():
            self.stats.count(
                f"hit_tokens_{tier if tier in TIERS else 'remote'}", number
            )

    def take_output(self, output: Any) -> None:
        """Take the workers' messages: which loads ended, which of them failed, which slots will not
        be filled.
        """
        meta = output.kv_connector_worker_meta
        if isinstance(meta, PagodaWorkerMetadata):
            if meta.described:
                self._open_late(meta.described)
            self._others_ended = max(self._others_ended, meta.ended)
            if (
                meta.ended
                and self._schedules_early
                and not output.invalid_block_ids <= meta.bad_blocks
            ):
                self._others_failed()
            for request in meta.failed:
                if (tracked := self._tracked.get(request)) is not None:
                    tracked.loads = False
                    tracked.saved = 0
                    tracked.seen = 0
            for tracked in self._tracked.values() if meta.failed else ():
                if tracked.waits_for in meta.failed:
                    # its hit may include the failed chunks: look up again
                    tracked.look = None
            for request, rest in meta.later.items():
                if (tracked := self._tracked.get(request)) is None:
                    self._count_unsaved(rest.chunks)
                else:
                    tracked.saved = min(tracked.saved, rest.first)
                    tracked.seen = min(tracked.seen, rest.first)
            if meta.unsaved:
                self._slots.abort(list(meta.unsaved))
        for request in output.finished_recving or ():
            for key in self._loading.pop(request, ()):
                if self._loaders.get(key) == request:
                    del self._loaders[key]

    def _others_failed(self) -> None:
        """Store nothing from now on: vLLM computes the request again, but for a token that it does
        not keep.

        The step after the failed one has its place already. That KV also remains in vLLM's own
        prefix cache.
        """
        if self._saves_any:
            log.error(
                "another connector failed to load within a step: with asynchronous scheduling, "
                "vLLM then has KV of "
                "other tokens than a request's, so this engine stores nothing until it is "
                "restarted; start vLLM with "
                "--no-async-scheduling"
            )
        self._saves_any = False
        for tracked in self._tracked.values():
            tracked.saves = False

    def _open_late(self, described: Iterable[Handshake]) -> None:
        try:
            self.opened(described)
        except Exception as trouble:  # noqa: BLE001
            # a boundary: the running engine continues without a cache
            log.error("nothing is cached: %s", trouble)

    # ---- one step

    def step(self, output: Any) -> PagodaMetadata:
        """Return this step's loads and saves; reserves the slots of the latter."""
        self._steps += 1
        # then a worker may wait a moment
        idle = not output.num_scheduled_tokens and not self._in_lockstep
        meta = PagodaMetadata(os.getpid(), self._steps, self._loads, idle=idle)
        self._loads = []
        if self._cache is None:
            return meta
        # those of another connector: ours are asynchronous
        if output.has_sync_kv_loads:
            self._others_loaded = self._steps
            meta.loads_of_others = True
        for admitted in self._admitted:
            admitted.sure_after = self._others_loaded
        self._admitted.clear()
        answers = computes_answers(output)
        self._lookups.next_pass(brief=answers)
        seconds = _BRIEF_RESERVE_SECONDS if answers else _RESERVE_SECONDS
        due: list[_DueSave] = []
        for name, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(name)
            if tracked is None:
                continue
            try:
                due += self._due(tracked, scheduled, output)
            except Exception as trouble:  # noqa: BLE001
                # a boundary: the engine continues without this save
                self._stop_saving([tracked], trouble)
        if due:
            try:
                meta.saves += self._reserved(due, seconds)
            except Exception as trouble:  # noqa: BLE001
                # as above
                self._stop_saving([one.tracked for one in due], trouble)
        meta.prompts = prompt_step_of(output)
        return meta

    def _stop_saving(
        self, requests: Iterable[TrackedRequest], trouble: Exception
    ) -> None:
        """Save nothing more of these requests, after an error that nobody foresaw."""
        for tracked in requests:
            tracked.saves = False
        why = f"{type(trouble).__name__}: {trouble}"
        self._lines.warn(
            log, Reason.IO_ERROR, f"a request is no longer saved: {why}"
        )

    def _due(
        self, tracked: TrackedRequest, scheduled: int, output: Any
    ) -> list[_DueSave]:
        """Return which chunks of a request this step completes; they are not looked at again."""
        request = tracked.request
        if not tracked.saves or tracked.sure_after > self._others_ended:
            return []
        # only tokens known by now; later ones may be a draft that is rejected
        tokens = min(request.num_computed_tokens + scheduled, request.num_tokens)
        done = self._saved_of(tracked, tokens) // self._chunk_tokens
        if done <= max(tracked.saved, tracked.seen):
            return []
        if time.monotonic() < self._stuck_until:
            return []
        if not self._lookups.knows_namespace(tracked):
            return []
        table = output.kv_connector_block_state.get_block_ids(request.request_id)
        self._lookups.extend_keys(tracked, done)
        done = min(done, len(tracked.keys))
        tracked.seen = done
        first = tracked.saved
        if table is None or first >= done:
            return []
        step = self._chunk_tokens // self._block_tokens
        blocks = list(table[0][first * step : done * step])
        return [_DueSave(tracked, first, done, blocks)]

    def _saved_of(self, tracked: TrackedRequest, tokens: int) -> int:
        """Return how many of the first `tokens` tokens of a request are to be saved."""
        if not self._options.store_output:
            tokens = min(tokens, tracked.request.num_prompt_tokens)
        for most in (tracked.most_saved, tracked.most_named):
            if most is not None:
                tokens = min(tokens, most)
        return tokens

    def _reserved(self, due: Sequence[_DueSave], seconds: float) -> list[Save]:
        """Reserve slots for the chunks of all requests of a step, and return their copies."""
        runs = [self._run_of(one) for one in due]
        reserved = self._slots.reserve_runs(
            runs, parts=self._parts, deadline_seconds=seconds
        )
        saves: list[Save] = []
        for one, outcomes in zip(due, reserved, strict=True):
            try:
                copies = self._noted(one, outcomes)
            except Exception as trouble:  # noqa: BLE001
                # as in `step`; nobody will fill these slots
                made = [each for each in outcomes if isinstance(each, Reserved)]
                self._slots.abort(made)
                self._stop_saving([one.tracked], trouble)
                continue
            if copies:
                found = one.tracked.found
                assert found is not None
                name = one.tracked.request.request_id
                saves.append(
                    Save(name, found.root, copies, one.first, one.blocks)
                )
        return saves

    def _run_of(self, due: _DueSave) -> RunToReserve:
        """Return what the ledger is asked to reserve."""
        tracked = due.tracked
        assert tracked.found is not None
        if tracked.stamp is None:
            tracked.stamp = self._slots.stamp()
        first = due.first
        parent = tracked.keys[first - 1] if first else None
        keys = tracked.keys[first : due.done]
        context = self._slots.context_of(tracked.keys[0])
        return RunToReserve(
            keys, tracked.found.root, first, parent, tracked.stamp, context
        )

    def _noted(
        self, due: _DueSave, outcomes: Sequence[Outcome]
    ) -> list[ChunkRef]:
        """Note what became of a request's chunks, and return those that have a slot."""
        tracked = due.tracked
        first = due.first
        keys = tracked.keys
        if self._events is not None:
            found = tracked.found
            assert found is not None
            make = self._notes(tracked.request, found.root)
            self._events.note(make, found.root, found.present, first, outcomes)
        parent = keys[first - 1] if first else None
        copies, refused = reserved_run(
            keys[first : due.done], first, parent, outcomes
        )
        tracked.saved = min(refused, default=due.done)
        if refused.get(tracked.saved) is Reason.LEDGER_BUSY:
            tracked.seen = tracked.saved  # try again
            if tracked.saved == first:
                self._stuck_until = time.monotonic() + _STUCK_SECONDS
        self.stats.count("refused_chunks", len(refused))
        return [copy for copy in copies if copy is not None]

    # ---- ends

    def finished(self, request: Any) -> None:
        """Forget a request; its running loads continue until the workers have ended them."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None and self._cache is not None:
            self._note_answer(tracked)
        if tracked is not None and tracked.saves and tracked.found is not None:
            # the last token was not computed; vLLM may already count it in a step that it began
            # early
            tokens = self._saved_of(
                tracked, min(request.num_computed_tokens, request.num_tokens - 1)
            )
            self._count_unsaved(
                tokens // self._chunk_tokens - max(tracked.saved, tracked.seen)
            )
            self._lookups.log_prompt(
                tracked, self._saved_of(tracked, request.num_tokens)
            )

    def _note_answer(self, tracked: TrackedRequest) -> None:
        """Tell the cache how a request has ended, if anybody says such things."""
        request = tracked.request
        are_heard = self._slots.hears_hints
        hints = self._hints.ended(request, tracked.hints, are_heard)
        if hints is None and not are_heard:
            return
        if tracked.found is None:
            for name in () if hints is None else hints.names:
                self._slots.refuse_hint(name, "the request was not looked up")
            return
        tokens = self._saved_of(tracked, request.num_tokens)
        self._lookups.note_answer(tracked, tokens, hints)

    def _count_unsaved(self, chunks: int) -> None:
        """Count chunks that will not be saved, because their request has ended."""
        if chunks > 0:
            self.stats.count("unsaved_chunks", chunks)
            self._slots.count_dropped(Reason.QUEUE_FULL, chunks)
            why = f"{chunks} chunks were not saved: their request ended first"
            self._lines.warn(log, Reason.QUEUE_FULL, why)

    def _take_version(self, version: str, fresh: bool) -> None:
        """Use the chunks of other weights from now on; see EngineWeights."""
        if self._cache is not None:
            # the thread of the events withdraws reports of the old version
            self._lookups.version = version
            if self._events is not None:
                self._events.look()
        present = list(self._tracked.values())
        if fresh:
            self._tracked.clear()
        for tracked in present:
            if fresh:
                self.new_request(tracked.request)
            else:
                # the weights that computed its parts are unknown
                tracked.loads = tracked.saves = False

    def shutdown(self) -> None:
        """End the threads and release the cache; ends in bounded time. Idempotent."""
        cache = self._cache
        self._cache = None
        if cache is not None:
            events = self._events
            self._events = None
            end_events(cache, events)
            self._lookups.close()
            let_go(cache)


def _asked_tokens(tracked: TrackedRequest) -> int:
    """Return how many tokens beyond those in the engine's own cache a request may read; 0: it is no
    lookup.
    """
    if not tracked.asks:
        return 0
    local = tracked.local_tokens
    asked: int = tracked.request.num_tokens - local
    if tracked.most_loaded is not None:
        asked = min(asked, tracked.most_loaded)
    if tracked.most_named is not None:
        asked = min(asked, tracked.most_named - local)
    return max(0, asked)


def _by_tier(tracked: TrackedRequest, tokens: int) -> dict[str, int]:
    """Split the `tokens` of a request that are being loaded by tier."""
    begin = tracked.local_tokens
    split = dict[str, int]()
    at = 0
    found = tracked.found.hit.by_tier if tracked.found is not None else {}
    for tier, count in found.items():  # in the order of the prompt
        share = min(at + count, begin + tokens) - max(at, begin)
        if share > 0:
            split[tier] = share
        at += count
    return split
