"""The scheduler's half of the OffloadingSpec: which chunks are hits, and which slots new ones get.
It never waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from queue import SimpleQueue
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pagoda.base.clock import Deadline
from pagoda.base.metrics import Reason
from pagoda.base.signal_safe_threads import Pool
from pagoda.cache import Cache
from pagoda.cache.writeback import ChunkRef, columns_of
from pagoda.config.option_values import HintMode
from pagoda.connectors.vllm.engine_weights import EngineWeights
from pagoda.connectors.vllm.event_form import VLLMEventForm
from pagoda.connectors.vllm.event_publisher import EventOutlet
from pagoda.connectors.vllm.identity.media_names import MediaNames
from pagoda.connectors.vllm.offloading.chunk_finder import ChunkState, Group
from pagoda.connectors.vllm.offloading.hinted_requests import HintedRequests
from pagoda.connectors.vllm.offloading.lookup_table import LookupTable
from pagoda.connectors.vllm.offloading.messages import Placed, SlotsSpec
from pagoda.connectors.vllm.request_hints import HintReader
from pagoda.connectors.vllm.request_limits import (
    is_of_embeddings,
    named_tokens,
    reads_nothing,
)
from pagoda.connectors.vllm.scheduled_chunks import (
    end_events,
    events_of,
    is_text,
    reserved_run,
    source_of,
)
from pagoda.connectors.vllm.shared_caches import let_go
from pagoda.keys import derive_keys
from pagoda.kv_events.notes import ChunkNote, Groups
from pagoda.kv_events.stored_events import StoredEvents
from pagoda.ledger import Outcome, Reserved

# counters in addition to vLLM's own, with their help in vLLM's metrics
COUNTED = {
    "vllm:pagoda_refused_chunks": "Number of chunks that found no slot in the host tier.",
    "vllm:pagoda_late_lookups": "Number of chunk lookups that took too long and counted as misses.",
    "vllm:pagoda_failed_loads": "Number of requests whose load failed; they were computed.",
}
# for one request; a chunk that has no slot by then is not stored
_RESERVE_SECONDS = 0.02
_TURN_CHUNKS = 8  # chunks that are reserved of one group before those of the next
_MOST_LOGS = 16  # the most running calls with which a prompt is still logged
# if vLLM does not report the end of a reservation, it is aborted after this time
_LINGER_SECONDS = 30.0
_ANSWERS = {
    ChunkState.ASKED: LookupResult.RETRY,
    ChunkState.FOUND: LookupResult.HIT_PENDING,
    ChunkState.COMING: LookupResult.HIT_PENDING,
    ChunkState.HELD: LookupResult.HIT,
    ChunkState.MISSED: LookupResult.MISS,
    ChunkState.GONE: LookupResult.MISS,
}


@dataclass
class _Request:
    """One request, from its arrival to its end."""

    # vLLM's request, from which the notes for routers are made
    source: Any = None
    stamp: int | None = None
    loads: bool = True  # False: a load has failed, so vLLM computes it
    stores: bool = True  # False: the weights that computed its parts are unknown
    # True: part of it is in the engine's own cache under hashes that may name other KV, so nothing
    # of it is stored
    is_doubtful: bool = False
    # leading tokens that vLLM's block hashes name; None: all
    most_named: int | None = None
    ended: bool = False  # vLLM stores its last chunks with its next step
    # group -> the number of chunks up to the last found or reserved one
    kept: dict[int, int] = field(default_factory=dict)
    # group -> last chunk reserved, its key
    tails: dict[int, tuple[int, bytes]] = field(default_factory=dict)


class PagodaOffloadingManager(OffloadingManager):
    """vLLM's view of the stored chunks. For the scheduler's thread; `shutdown` ends its threads.

    A key is a block hash with the number of a KV cache group. The chunks of each group are a
    separate chain; vLLM's hashes include the name and path of an adapter, not its content.
    """

    def __init__(
        self,
        cache: Cache,
        groups: dict[int, Group],
        parts: int,
        run: str | None = None,
    ) -> None:
        """Take over `cache`. `groups`: by the number that they have in vLLM's keys, in vLLM's
        order.

        `run`: the run whose weight versions name chunks.
        """
        assert cache.slots is not None
        self._cache = cache
        self._slots = cache.slots
        self._parts = parts
        self._numbers = {number: index for index, number in enumerate(groups)}
        self._groups = tuple(groups.values())
        self._questions = LookupTable(cache, self._groups)
        self.weights = EngineWeights(run, self._take_version)
        self.media = MediaNames()
        self._requests: dict[str, _Request] = {}
        self._storing: dict[bytes, Reserved] = {}
        self._lingering: list[tuple[float, list[Reserved]]] = []
        self._thread = Pool(1, "pagoda-settle")
        self._stored: SimpleQueue[list[bytes]] = SimpleQueue()
        self._events: StoredEvents | None = None
        self._form: VLLMEventForm
        self._hinted: HintedRequests | None = None
        self._refused = 0
        self._failed = 0
        # in this step a request got no slots within its wait: the process that has the lock may be
        # stopped
        self._stuck = False
        self._closed = False

    # ---- look-ups and loads

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return whether a chunk can be loaded; RETRY while the look-up runs. Never waits."""
        request = self._requests.get(req_context.req_id)
        allowed = req_context.load_tier_filter
        if request is None or not (request.loads and request.stores):
            return LookupResult.MISS
        if not allowed.allows(Medium.CPU, Locality.LOCAL):
            return LookupResult.MISS
        if not self._is_named(request, key, req_context):
            return LookupResult.MISS
        group, position = self._place(key, req_context)
        lower = allowed.allows(Medium.STORAGE, Locality.LOCAL)
        (digest,) = self._digests(request, group, position, [bytes(key)])
        state = self._questions.look(
            bytes(key), digest, group, position, req_context.req_id, lower
        )
        return _ANSWERS[state]

    def get_load_source(self, key: bytes, req_context: Any) -> CacheHitSource:
        """Return the tier in which a hit was found."""
        asked = self._questions.get(bytes(key))
        return source_of(asked.tier if asked else "")

    def prepare_load(
        self, keys: Collection[bytes], req_context: Any
    ) -> SlotsSpec:
        """Return the slots of hits; they are held until `complete_load`."""
        spec = self._spec(req_context.req_id)
        self._note_used([bytes(key) for key in keys], req_context)
        for key in keys:
            asked = self._questions.load(bytes(key))
            # vLLM must load only hits; the worker reports that this load failed
            if asked is None:
                spec.lost = True
                continue
            before = spec.chunks[-1] if spec.chunks else None
            parent = None
            chained = self._groups[asked.group].window is None
            if chained and before is not None and before.group == asked.group:
                parent = before.copy.key
            copy = ChunkRef(
                asked.key, asked.position, parent, asked.slot, asked.generation
            )
            spec.chunks.append(Placed(asked.group, copy))
        if self._events is not None:
            request = self._requests.get(req_context.req_id, _Request())
            for group, first, run in self._runs(
                [bytes(key) for key in keys], req_context
            ):
                self._keep_notes(self._events, request, group, first, run)
        return spec

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Release the slots of a load that has ended."""
        self._questions.loaded([bytes(key) for key in keys], req_context.req_id)

    def load_failed(self, req_id: str) -> None:
        """Give this request no more hits: its load failed, and it would get the same chunks
        again.
        """
        request = self._requests.get(req_id)
        if request is not None and request.loads:
            request.loads = False
            self._failed += 1

    # ---- stores

    def prepare_store(
        self, keys: Collection[bytes], req_context: Any
    ) -> PrepareStoreOutput:
        """Reserve slots for chunks that are not stored yet, as far as slots are available at
        once.
        """
        root = self._questions.root
        spec = self._spec(req_context.req_id)
        taken: list[bytes] = []
        request = self._requests.setdefault(req_context.req_id, _Request())
        keeps = request.stores and not request.is_doubtful and not self._closed
        names = [
            bytes(key)
            for key in keys
            if keeps and self._is_named(request, key, req_context)
        ]
        self._note_used(names, req_context)
        if self._stuck:
            self._refused += len(names)
            names = []
        left = len(names)
        deadline = Deadline(_RESERVE_SECONDS)
        context = None
        if self._hinted is not None:
            context = self._hinted.context_of(req_context.req_id, root)
        for group, first, run in self._runs(names, req_context):
            outcomes = self._reserved(
                request, root, group, first, run, deadline, context
            )
            for name, copy in zip(run, outcomes, strict=False):
                if copy is not None:
                    spec.chunks.append(Placed(group, copy))
                    self._storing[name] = copy.reserved
                    taken.append(name)
            left -= len(outcomes)
            if outcomes:
                request.kept[group] = max(
                    request.kept.get(group, 0), first + len(outcomes)
                )
            # no more slots: leave out the tails of all groups
            if len(outcomes) < len(run):
                self._refused += left
                break
        return PrepareStoreOutput(
            keys_to_store=taken, store_spec=spec, evicted_keys=[]
        )

    def _runs(
        self, names: Sequence[bytes], context: Any
    ) -> Iterable[tuple[int, int, list[bytes]]]:
        """Split the offered chunks into (group, position of the first chunk, consecutive chunks).

        The groups take turns along the prompt, because chunks of only one group are not a hit.
        """
        size = _TURN_CHUNKS * max(group.chunk_tokens for group in self._groups)
        places = [
            (
                position * self._groups[group].chunk_tokens // size,
                group,
                position,
                name,
            )
            for name in names
            if name not in self._storing  # another request may be storing it
            for group, position in [self._place(name, context)]
        ]
        # the positions of a run grow as the indexes do
        runs = groupby(
            enumerate(sorted(places)),
            lambda row: (*row[1][:2], row[1][2] - row[0]),
        )
        for (_, group, _), rows in runs:
            run = [place for _, place in rows]
            yield group, run[0][2], [name for *_, name in run]

    def _reserved(
        self,
        request: _Request,
        root: bytes,
        group: int,
        first: int,
        run: list[bytes],
        deadline: Deadline,
        context: int | None,
    ) -> list[ChunkRef | None]:
        """Reserve a slot for each chunk of a run; None if it is stored already. Ends before the
        first refused.
        """
        keys = derive_keys(self._digests(request, group, first, run), root)
        if request.stamp is None:
            request.stamp = self._slots.stamp()
        chained = self._groups[group].window is None
        tail, before = request.tails.get(group, (-1, b""))
        parent = before if chained and tail == first - 1 and first else None
        outcomes = self._slots.reserve(
            keys,
            namespace=root,
            start=first,
            parent=parent,
            stamp=request.stamp,
            parts=self._parts,
            deadline_seconds=deadline.remaining(),
            context=context,
        )
        if self._events is not None:
            self._keep_notes(self._events, request, group, first, run, outcomes)
        request.tails[group] = first + len(keys) - 1, keys[-1]
        copies, refused = reserved_run(keys, first, parent, outcomes)
        self._stuck = refused.get(first) is Reason.LEDGER_BUSY
        return copies[: min(refused, default=first + len(keys)) - first]

    def complete_store(
        self, keys: Collection[bytes], req_context: Any, success: bool = True
    ) -> None:
        """Abort what the workers did not commit; committed chunks can be loaded."""
        ended = [
            (bytes(key), self._storing.pop(bytes(key)))
            for key in keys
            if bytes(key) in self._storing
        ]
        if ended and not self._closed:
            self._thread.later(self._end_stores, ended)

    def _end_stores(self, ended: list[tuple[bytes, Reserved]]) -> None:
        """Abort ended stores that are not committed, and note the committed ones. Runs on a
        thread.
        """
        ready = self._slots.ready(
            *columns_of([item for _, item in ended])
        ).tolist()
        self._slots.abort(
            [item for (_, item), ok in zip(ended, ready, strict=True) if not ok]
        )
        self._stored.put(
            [name for (name, _), ok in zip(ended, ready, strict=True) if ok]
        )

    # ---- requests and steps

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Remember the request."""
        self._requests.setdefault(req_context.req_id, _Request())
        return RequestOffloadingContext()

    def request_arrived(self, request: Any) -> None:
        """Take vLLM's request, after `on_new_request`."""
        known = self._requests.setdefault(request.request_id, _Request())
        known.source = request
        known.most_named = named_tokens(request)
        if self._hinted is not None:
            self._hinted.arrived(request)
        if reads_nothing(request):  # vLLM will not ask for any of it
            self._slots.count_request(
                request.num_tokens, {}, Reason.NOT_ASKED, self._questions.root
            )

    def found_in_engine(self, request: Any) -> None:
        """Note that the engine's own cache has the first tokens of a request."""
        if (
            is_of_embeddings(request)
            and (known := self._requests.get(request.request_id)) is not None
        ):
            known.is_doubtful = True

    def on_request_finished(self, req_context: Any) -> None:
        """Release chunks that only this request waited for."""
        request = self._requests.pop(req_context.req_id, None)
        self._questions.finished(req_context.req_id)
        if self._hinted is not None and not self._closed:
            request = request or _Request(stores=False)
            self._hinted.finished(
                req_context.req_id,
                request.most_named,
                self._questions.version,
                self._thread,
                request.stores and not request.is_doubtful,
            )

    def request_ended(self, request: Any, hash_tokens: int) -> None:
        """Note that a request has ended; log its stored chunks, with the keys of the first group
        that is a chain.

        The log is written on a thread. Requests with a salt are not logged: only vLLM's hashes have
        the salt.
        """
        known = self._requests.get(request.request_id)
        if known is not None:
            known.ended = True
        if self._hinted is not None:
            self._hinted.ended(request)
        chains = [
            number
            for number, index in self._numbers.items()
            if self._groups[index].window is None
        ]
        plain = is_text(request) and not request.cache_salt
        if (
            known is None
            or not known.stores
            or not chains
            or not plain
            or self._closed
        ):
            return
        kept = known.kept.get(self._numbers[chains[0]], 0)
        if kept and self._thread.under_way < _MOST_LOGS:
            self._thread.later(
                self._log_prompt,
                request,
                hash_tokens,
                chains[0],
                kept,
                self._questions.root,
            )

    def _log_prompt(
        self, request: Any, hash_tokens: int, number: int, kept: int, root: bytes
    ) -> None:
        size = self._groups[self._numbers[number]].chunk_tokens
        step = size // hash_tokens
        names = [
            bytes(name) + number.to_bytes(4, "big")
            for name in request.block_hashes[step - 1 :: step]
        ]
        tokens = list(
            request.all_token_ids[: kept * size if kept < len(names) else None]
        )
        self._slots.log_prompt(
            root, derive_keys(names[:kept], root), tokens, size
        )

    def on_schedule_end(self, context: Any) -> None:
        """Start the look-ups of the chunks that this step asked for."""
        self._stuck = False
        while not self._stored.empty():
            self._questions.stored(self._stored.get())
        self._questions.flush()
        now = time.monotonic()
        if self._lingering and self._lingering[0][0] < now:
            given_up = [
                item
                for until, items in self._lingering
                if until < now
                for item in items
            ]
            self._lingering = [row for row in self._lingering if row[0] >= now]
            self._thread.later(self._slots.abort, given_up)

    def reset_cache(self) -> None:
        """Make all earlier chunks misses for this engine: its weights may have changed."""
        self.weights.changed()

    def _take_version(self, version: str, fresh: bool) -> None:
        """Use the chunks of other weights from now on; see EngineWeights."""
        for name, request in self._requests.items():
            if fresh and not request.ended:  # it has no KV
                self._requests[name] = _Request(
                    request.source, most_named=request.most_named
                )
            else:
                request.stores = False
        self._questions.take_version(version)
        if self._events is not None:
            self._events.look()
        if self._storing:  # after a reset vLLM no longer reports the end of these
            self._lingering.append(
                (time.monotonic() + _LINGER_SECONDS, list(self._storing.values()))
            )
            self._storing.clear()

    @property
    def hint_mode(self) -> HintMode:
        """The option `hints`."""
        return self._cache.config.hints

    def hear_hints(self, reader: HintReader, hash_tokens: int) -> None:
        """Tell the cache what `reader` reads of requests; call it after `media` is set.

        `hash_tokens`: the tokens of one of vLLM's block hashes.
        """
        groups = dict(zip(self._numbers, self._groups, strict=True))
        self._hinted = HintedRequests(
            self._cache, groups, reader, self.media, hash_tokens
        )

    def _note_used(self, names: Sequence[bytes], context: Any) -> None:
        """Note the chunks that a request offers or loads, for its hints."""
        if self._hinted is None:
            return
        for name in names:
            group, _ = self._place(name, context)
            end = context.get_offload_key_position(name) or 0
            self._hinted.used(context.req_id, name, group, end)

    # ---- events and counters

    def publish_events(
        self, outlet: EventOutlet, groups: Groups, hash_tokens: int
    ) -> None:
        """Report the chunks in the tiers to routers; vLLM's own events of offloading are not used.

        `hash_tokens`: the tokens of one of vLLM's block hashes.
        """
        present = self._questions.present_root
        self._events, self._form = events_of(
            self._cache, outlet, groups, hash_tokens, present
        )
        self._events.start()

    def _keep_notes(
        self,
        events: StoredEvents,
        request: _Request,
        group: int,
        first: int,
        run: Sequence[bytes],
        outcomes: Sequence[Outcome] | None = None,
    ) -> None:
        """Keep the notes of a run of chunks that a request loads or, with `outcomes`, that were
        just reserved.

        Only whole chunks that other engines can name get notes. vLLM also stores parts of blocks,
        under the hash of the tokens before their end.
        """
        if request.source is None:
            return
        root = self._questions.root
        number = list(self._numbers)[group]
        make = self._form.notes(request.source, root, number)
        digests = self._digests(request, group, first, run)

        def whole(chunk: int) -> ChunkNote | None:
            note = make(chunk)
            return (
                note
                if note is not None
                and note.hashes.endswith(digests[chunk - first][:-4])
                else None
            )

        if outcomes is None:
            events.found(whole, root, root, first, derive_keys(digests, root))
        else:
            events.note(whole, root, root, first, outcomes)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the counts since the last call."""
        counts = self._refused, self._questions.take_late(), self._failed
        self._refused = self._failed = 0
        if not any(counts):
            return None
        stats = OffloadingConnectorStats()
        for name, count in zip(COUNTED, counts, strict=True):
            stats.increase_counter(name, count)
        return stats

    def shutdown(self) -> None:
        """End the threads, release all holds and the cache; ends in bounded time. Idempotent."""
        if self._closed:
            return
        self._closed = True
        end_events(self._cache, self._events)
        self._questions.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._slots.abort(list(self._storing.values()))
        let_go(self._cache)

    # ---- helpers

    def _place(self, key: bytes, context: Any) -> tuple[int, int]:
        """Return the group's index and the chain position of one of vLLM's keys."""
        group = self._numbers[int.from_bytes(key[-4:], "big")]
        end = context.get_offload_key_position(key) or 0
        return group, max(0, -(-end // self._groups[group].chunk_tokens) - 1)

    @staticmethod
    def _is_named(request: _Request, key: bytes, context: Any) -> bool:
        """Whether vLLM's key names the KV of a chunk."""
        end = context.get_offload_key_position(key) or 0
        return request.most_named is None or end <= request.most_named

    def _digests(
        self, request: _Request, group: int, first: int, names: Sequence[bytes]
    ) -> list[bytes]:
        """Return the digests for the keys of consecutive chunks: vLLM's names, if all engines know
        them.
        """
        shared = (
            self.media.shared_tokens(request.source)
            if request.source is not None
            else None
        )
        return self.media.key_digests(
            names, first, self._groups[group].chunk_tokens, shared
        )

    def _spec(self, request: str) -> SlotsSpec:
        questions = self._questions
        return SlotsSpec(
            self._cache.layout.fingerprint,
            os.getpid(),
            request,
            questions.root,
            questions.version,
        )
