"""Cache: store, lookup, retrieve and prefetch over all the tiers of a machine, and the caches of a
process by name.

Each call of an engine is checked here and made a `Call`, which runs at once, on another thread, or
awaited. The work is in `StoreCall`, `RetrieveCall` and `lookup_call`; what all calls share is in
`Resources`.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, Unpack

from pagoda.base.clock import Clock, Deadline, seconds_of
from pagoda.base.errors import ClosedError, ConfigError, StoreError
from pagoda.base.finalizers import close_when_dropped
from pagoda.base.fork import per_process
from pagoda.base.log import guarded_logger, log_json
from pagoda.base.metrics import Reason, by_reason
from pagoda.base.quality_verdict import QualityState, require_quality
from pagoda.base.signal_safe_threads import Condition, require_real_threads
from pagoda.cache.call import (
    CacheRequest,
    Call,
    CallOptions,
    CheckedTransfer,
    KeyScheme,
    build_request,
    enable_profiler_ranges,
    enable_spans,
)
from pagoda.cache.call_log import log_opened
from pagoda.cache.caller_hints import (
    LATER,
    HintedRequest,
    HintResult,
    RequestHints,
    said,
)
from pagoda.cache.host_slots import HostSlots
from pagoda.cache.late_tier import LateTier
from pagoda.cache.lookup_call import run_explain, run_lookup
from pagoda.cache.open_tiers import open_tiers
from pagoda.cache.recording import CallKind, require_trace
from pagoda.cache.resources import build_resources
from pagoda.cache.results import CacheStats, Cleared, Hit, Stored
from pagoda.cache.retrieve_call import RetrieveCall, measure_again
from pagoda.cache.store_call import StoreCall
from pagoda.cache.tier_stack import TierStack, build_tiers, codecs_of
from pagoda.cache.weights_epoch import PresentWeights
from pagoda.codec import codec_setting, require_layout
from pagoda.config import Config, ConfigOptions
from pagoda.keys import Item, Namespace, TokenIds, chunk_keys
from pagoda.layout import KVLayout
from pagoda.ledger import admin
from pagoda.ledger.request_meters import usage_by_model, usage_by_tenant
from pagoda.policy import DEFAULT_OBJECTIVE
from pagoda.tiers.base import Tier
from pagoda.transfer import Transfer

log = guarded_logger("pagoda.cache")

_Setting: TypeAlias = Config | Namespace | KVLayout

_CLOSE_SECONDS = 5.0
# how long to wait for another thread that opens a cache; each tier has its own deadline
_OPEN_SECONDS = 120.0
# of one transaction
_MOST_KEYS = 64


class _CacheOpenings:
    """The names of caches that threads of this process are opening."""

    @per_process
    def changed(self) -> Condition:
        """Guards them and the two tables below; never held while a cache is opened or closed."""
        return Condition()

    @per_process
    def names(self) -> dict[object, str]:
        """The names, by the call that opens the cache."""
        return {}


_openings = _CacheOpenings()
_caches: weakref.WeakValueDictionary[str, Cache] = weakref.WeakValueDictionary()
# caches made by `Cache.open`, which stay until they are closed
_kept: dict[str, Cache] = {}


class NameTaken(ValueError):
    """Another cache of this process has the name."""


class Cache:
    """The KV cache of one model and layout. Thread-safe; a forked child may continue to use it.

    Calls never raise for errors at run time (a full disk, a failed tier, a corrupt chunk): such an
    error is a miss with a `Reason`, a counter and one rate-limited log line. ValueError means wrong
    use. After `close` each call is a miss.

    Store, lookup and retrieve also have a form that returns a future and one for asyncio;
    `prefetch` always returns a future. ValueErrors for wrong use are raised by the call itself. A
    call with a future begins when one of a few threads is free; its deadline starts with the call.
    A cancelled await first ends its call: when CancelledError is raised, nothing writes into the KV
    any more and nothing stays reserved.

    Calls take the token ids of a prompt (1-D; a list, an array or a tensor) and, to copy, `kv`: a
    view of the engine's memory from `pagoda.transfer`, such as `DenseKV` or `PagedKV`. Their
    `**options`, by keyword:
        start_tokens: skip the chunks before this token, a multiple of chunk_tokens.
        mask: the same as one bool per token: False...False True...True.
        keys: the keys of the whole chunks, 32 bytes each, instead of hashing the tokens, which may
            then be None.
        any_position: with `keys`: find them at any position of a prompt; only the keys identify the
            chunks.
        items: multimodal items (`pagoda.keys.Item`) at their token positions.
        lora: an adapter's content, instead of the namespace's.
        salt: a tenant, instead of the namespace's: different salts share nothing.
        weights_version: instead of the version that `weights_changed` named; "" is the namespace's
            weights.
        numerics: how the engine computes now ("autocast=bfloat16"), instead of the namespace's; ""
            is its defaults.
        after: the hit of the turn before of a conversation, None in the first one: if this prompt
            begins with the same tokens, their keys are not derived again. Whatever differs (a
            token, the tenant, the adapter, the weights), all are: the answer is the same with and
            without it. The hit has the keys for the next turn only if this option is given.
        tiers: the names of the only tiers to use.
        deadline_seconds: for the whole call; default: config.deadline_seconds without progress.
        limit_seconds: for the whole call, also while it makes progress; default: by the bytes of
            the chunks.
        hints: what is known of the request (`pagoda.RequestHints`), for store, lookup and retrieve.
            The last two use its session only; the rest is about the end of the request.

    Example:
        >>> import numpy as np
        >>> from pagoda.transfer import DenseKV
        >>> layout = KVLayout.dense(layers=1, kv_heads=1, head_dim=8, dtype="float32")
        >>> tokens = list(range(512))
        >>> planes = [[np.ones((1, 512, 8), np.float32) for _ in "KV"]]
        >>> kv = DenseKV(planes, layout)
        >>> options = {"host_size": "1MiB", "host_shared": False}
        >>> with Cache(namespace=Namespace("a-model"), layout=layout, **options) as cache:
        ...     stored = cache.store(tokens, kv)
        ...     # the same beginning, then other tokens
        ...     hit = cache.retrieve([*tokens, 7, 8, 9], kv)
        >>> stored.num_tokens, hit.num_tokens, hit.by_tier
        (512, 512, {'host': 512})
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        namespace: Namespace,
        layout: KVLayout,
        name: str | None = None,
        tiers: Sequence[Tier] | None = None,
        weights_of: Cache | None = None,
        key_scheme: KeyScheme = chunk_keys,
        clock: Clock | None = None,
        **overrides: Unpack[ConfigOptions],
    ) -> None:
        """Open the tiers that `config` describes, or take over `tiers`.

        Args:
            config: the options; without it they come from the environment and the configuration
                file.
            namespace: what the keys depend on besides the tokens; its `layout` is filled in.
            layout: the form of the KV of one chunk.
            name: `Cache.get` finds the cache by this name for as long as something refers to the
                cache.
            tiers: instead of those that `config` describes, from the top down; they are closed with
                the cache.
            weights_of: another cache of the same model and config: `weights_changed` on one of them
                is valid for both.
            key_scheme: how keys are made; the default is that of every PagodaKV process.
            clock: for tests.
            overrides: options of `Config`; they take precedence over `config`, environment and
                file.

        Raises ConfigError, StoreError with the remedy, and ValueError, also if another cache has
        that name.
        """
        require_real_threads()
        self.name = name
        self.config = _configured(config, layout, overrides)
        self.layout = layout
        stack = None if tiers is None else build_tiers(tiers, layout)
        codecs = (
            self.config.lossy_codecs() if stack is None else codecs_of(stack.all)
        )
        self.namespace = _completed(namespace, layout, self.config, codecs)
        quality = _require_quality(codecs, self.namespace, layout, self.config)
        if self.config.record:
            require_trace(Path(self.config.record))
        if self.config.profile:
            enable_profiler_ranges()
        if self.config.otel:
            enable_spans()
        if self.config.log_format == "json" and log_json():
            from pagoda.config.sources import log_files_again

            log_files_again()
        with _name_taken(name, self):
            self._open(stack, key_scheme, clock or Clock(), quality, weights_of)

    def _open(
        self,
        stack: TierStack | None,
        key_scheme: KeyScheme,
        clock: Clock,
        quality: list[QualityState],
        weights_of: Cache | None,
    ) -> None:
        config = self.config
        layout = self.layout
        late: LateTier | None = None
        if stack is None:
            stack, late = open_tiers(config, layout, clock)
        self._resources = build_resources(
            stack, config, layout, key_scheme, clock, self.namespace
        )
        self._resources.leave_out(late)
        self._key_scheme = key_scheme
        self._weights: PresentWeights = PresentWeights(
            self._resources,
            self.namespace,
            quality,
            partial(_quality_again, quality, config, layout),
            None if weights_of is None else weights_of._weights,
        )
        self._slots = (
            HostSlots(self._resources, self._weights, stack.host)
            if stack.host is not None
            else None
        )
        self._finalizer = close_when_dropped(
            self, partial(self._resources.close, _CLOSE_SECONDS)
        )
        with ExitStack() as undo:
            undo.callback(self.close)
            namespace = self._weights.scope()[0]
            self._resources.register(namespace, wait=True)
            log_opened(namespace, layout, stack, config.deadline_seconds)
            if late is not None:
                late.begin(self._resources.admit, self._weights.compare_root)
            undo.pop_all()

    # ---- by name

    @classmethod
    def open(
        cls,
        name: str,
        config: Config | None = None,
        *,
        namespace: Namespace,
        layout: KVLayout,
        **overrides: Unpack[ConfigOptions],
    ) -> Cache:
        """Return this process's cache of that name, opened now if there is none, and kept until it
        is closed.

        Raises ValueError if it is open with another config, namespace or layout; the message has
        each option that differs, with both values (none of secrets). StoreError if another thread
        does not finish opening it.
        """
        config = _configured(config, layout, overrides)
        completed = _completed(namespace, layout, config, config.lossy_codecs())
        wanted: dict[str, _Setting] = {
            "config": config,
            "namespace": completed,
            "layout": layout,
        }
        deadline = Deadline(_OPEN_SECONDS)
        while True:
            cache = _wait_for_opening(name, deadline)
            if cache is None:
                try:
                    cache = cls(
                        config, namespace=namespace, layout=layout, name=name
                    )
                except NameTaken:  # another thread was faster
                    continue
                _kept[name] = cache
                return cache
            differing = [
                f"{part} ({_differences(getattr(cache, part), value)})"
                for part, value in wanted.items()
                if getattr(cache, part) != value
            ]
            if differing:
                raise ValueError(
                    f"the cache {name!r} is open with another {' and '.join(differing)}: "
                    f"use Cache.get({name!r}), or Cache.destroy({name!r}) first"
                )
            return cache

    @staticmethod
    def get(name: str) -> Cache | None:
        """Return this process's cache of that name, None if there is none."""
        with _openings.changed:
            return _caches.get(name)

    @staticmethod
    def destroy(name: str) -> bool:
        """Close the cache of that name and forget it; False if there is none. Its chunks stay in
        the tiers.
        """
        with _openings.changed:
            cache = _caches.pop(name, None)
            _kept.pop(name, None)
        if cache is not None:
            cache.close()
        return cache is not None

    # ---- the calls of an engine

    def store(
        self,
        tokens: TokenIds | None,
        kv: Transfer,
        **options: Unpack[CallOptions],
    ) -> Stored:
        """Store the whole chunks of `kv`: in host memory when this returns, in the lower tiers some
        time later.

        `kv` holds what the *present* weights computed for `tokens`. Returns how much is new, and
        why not more.
        """
        return self._store_call(tokens, kv, options).run()

    def store_future(
        self,
        tokens: TokenIds | None,
        kv: Transfer,
        **options: Unpack[CallOptions],
    ) -> Future[Stored]:
        """Do the same as `store`, on another thread. The KV and the tokens must not change until
        the future is done.
        """
        return self._resources.executor.submit(
            self._store_call(tokens, kv, options)
        )

    async def astore(
        self,
        tokens: TokenIds | None,
        kv: Transfer,
        **options: Unpack[CallOptions],
    ) -> Stored:
        """Do the same as `store`, awaited."""
        return await self._resources.executor.run_async(
            self._store_call(tokens, kv, options)
        )

    def lookup(
        self,
        tokens: TokenIds | None,
        *,
        counted: bool = True,
        usable: Callable[[Hit], Hit] | None = None,
        pieces: bool | int = False,
        **options: Unpack[CallOptions],
    ) -> Hit:
        """Return how many leading tokens are cached and where; copy nothing, protect them from
        eviction for a moment.

        With `pieces` the hit also has the `pieces` behind the first missing chunk, about which each
        tier is asked once: all of them, or if `pieces` is a number, those in runs of at least so
        many tokens. `retrieve(tokens[:stop], kv, start_tokens=start, counted=False)` loads
        one; its KV is right only after an engine has computed everything before it, or loaded it.

        A caller that looks up and then retrieves the same prompt must pass `counted=False` to one
        of the two calls. An engine that cannot go on after every chunk says with `usable` what of a
        hit it can use (`Hit.shortened`): that is counted and returned.
        """
        return self._lookup_call(
            tokens, counted, options, usable, pieces, lazily=True
        ).run()

    def lookup_future(
        self,
        tokens: TokenIds | None,
        *,
        pieces: bool | int = False,
        **options: Unpack[CallOptions],
    ) -> Future[Hit]:
        """Do the same as `lookup`, on another thread."""
        return self._resources.executor.submit(
            self._lookup_call(tokens, True, options, pieces=pieces)
        )

    async def alookup(
        self,
        tokens: TokenIds | None,
        *,
        pieces: bool | int = False,
        **options: Unpack[CallOptions],
    ) -> Hit:
        """Do the same as `lookup`, awaited."""
        return await self._resources.executor.run_async(
            self._lookup_call(tokens, True, options, pieces=pieces)
        )

    def retrieve(
        self,
        tokens: TokenIds | None,
        kv: Transfer,
        *,
        counted: bool = True,
        pieces: bool | int = False,
        **options: Unpack[CallOptions],
    ) -> Hit:
        """Fill `kv` with the leading chunks that are cached; return which. Only validated chunks
        are in the hit.

        With `pieces` it also fills what is cached behind the first missing chunk, as a part of the
        same request, within the same deadline: all, or runs of at least so many tokens.
        `Hit.pieces` says what is in `kv` then, `Hit.loaded` how much that is. The engine has to
        compute the rest, in order.

        A hit may cover the whole prompt: pass `tokens[:-1]` if the engine has to compute the last
        one. With `counted=False` it loads what a lookup has promised, even if computing has turned
        out to be faster since then.
        """
        return self._retrieve_call(tokens, kv, counted, options, pieces).run()

    def retrieve_future(
        self,
        tokens: TokenIds | None,
        kv: Transfer,
        *,
        pieces: bool | int = False,
        **options: Unpack[CallOptions],
    ) -> Future[Hit]:
        """Do the same as `retrieve`, on another thread."""
        return self._resources.executor.submit(
            self._retrieve_call(tokens, kv, True, options, pieces)
        )

    async def aretrieve(
        self,
        tokens: TokenIds | None,
        kv: Transfer,
        *,
        pieces: bool | int = False,
        **options: Unpack[CallOptions],
    ) -> Hit:
        """Do the same as `retrieve`, awaited."""
        return await self._resources.executor.run_async(
            self._retrieve_call(tokens, kv, True, options, pieces)
        )

    def note_answer(
        self,
        tokens: TokenIds | None,
        **options: Unpack[CallOptions],
    ) -> tuple[HintResult, ...]:
        """Say by `hints` how a request ended, without storing anything; return what became of each.

        For engines that store piece by piece, and for requests whose end is known later. `tokens`
        and the options name its prompt, as in a look-up. Without `hints` it says that a request
        without any has ended: then its chunks are known to be used by others too.

        Example:
            >>> from pagoda import RequestHints
            >>> layout = KVLayout.opaque(16, 64, "an example")
            >>> options = {"host_size": "1MiB", "host_shared": False}
            >>> with Cache(namespace=Namespace("m"), layout=layout, **options) as cache:
            ...     over = RequestHints(session="a1", session_end=True)
            ...     for result in cache.note_answer(list(range(32)), hints=over):
            ...         print(result)
            session accepted
            session_end accepted
        """
        request = self._checked(tokens, options)
        hints = request.hints
        taker = self._resources.hints

        def work() -> tuple[HintResult, ...]:
            if self._resources.closed:
                return missed(Reason.CLOSED, "the cache is closed")
            if hints is None and not taker.are_heard:
                return ()
            return self._note_answer(request.tiers, request.hinted(), hints)

        def missed(reason: Reason, detail: str = "") -> tuple[HintResult, ...]:
            names = () if hints is None else hints.names
            closed = reason is Reason.CLOSED
            why = "the cache is closed" if closed else str(reason)
            return tuple(taker.refuse(name, why) for name in names)

        counters = self._resources.counters
        return Call("note_answer", work, missed, request.deadline, counters).run()

    @property
    def hears_hints(self) -> bool:
        """Whether a request without hints matters to those of others, so that `note_answer` is
        worth a call for it. Cheap.
        """
        return self._resources.hints.are_heard

    def refuse_hint(self, hint: str, why: str) -> None:
        """Count a hint that a caller refuses. Both texts must be of a fixed set."""
        self._resources.hints.refuse(hint, why)

    def prefetch(
        self, tokens: TokenIds | None, **options: Unpack[CallOptions]
    ) -> Future[Hit]:
        """Begin to load leading chunks into the host tier, at most half of it; return at once,
        count nothing.

        The result says what is there afterwards. An error becomes its `reason`; no error is raised.
        """
        return self._resources.executor.submit(
            self._prefetch_call(tokens, options)
        )

    async def aprefetch(
        self, tokens: TokenIds | None, **options: Unpack[CallOptions]
    ) -> Hit:
        """Do the same as `prefetch`, awaited."""
        return await self._resources.executor.run_async(
            self._prefetch_call(tokens, options)
        )

    def keys(
        self,
        tokens: TokenIds,
        start: int = 0,
        *,
        items: Sequence[Item] = (),
        lora: str | None = None,
        salt: str | None = None,
        numerics: str | None = None,
    ) -> list[tuple[int, int, bytes]]:
        """Return (start, end, key) of each whole chunk from token `start` on, a multiple of
        chunk_tokens. Pure.

        `items`, `lora`, `salt` and `numerics` as in the options of calls.
        """
        options: CallOptions = {
            "start_tokens": start,
            "items": items,
            "lora": lora,
            "salt": salt,
            "numerics": numerics,
        }
        request = self._checked(tokens, options)
        return [
            (at, at + request.chunk_tokens, key)
            for at, key in zip(
                request.starts(0, len(request.keys)), request.keys, strict=True
            )
        ]

    def _store_call(
        self, tokens: TokenIds | None, kv: Transfer, options: CallOptions
    ) -> Call[Stored]:
        transfer = CheckedTransfer(kv, self.layout)
        request = self._checked(tokens, options, CallKind.STORE)
        store = StoreCall(self._resources, request, transfer)
        counters = self._resources.counters
        work = store.run
        is_told = request.hints is not None or self.hears_hints
        if is_told and request.hints is not LATER:
            work = partial(self._answered_by, store, request)
        return Call("store", work, store.miss, request.deadline, counters)

    def _lookup_call(
        self,
        tokens: TokenIds | None,
        counted: bool,
        options: CallOptions,
        usable: Callable[[Hit], Hit] | None = None,
        pieces: bool | int = False,
        lazily: bool = False,
    ) -> Call[Hit]:
        least = 0 if pieces is False else _least_of(pieces)
        request = self._checked(
            tokens, options, CallKind.LOOKUP, counted, lazily and not least
        )
        work = partial(
            run_lookup,
            self._resources,
            request,
            counted,
            usable,
            measure_again,
            least,
        )
        if request.hints is not None:
            work = partial(self._used_by, work, request)
        return Call(
            "lookup",
            work,
            request.miss,
            request.deadline,
            self._resources.counters,
        )

    def _retrieve_call(
        self,
        tokens: TokenIds | None,
        kv: Transfer,
        counted: bool,
        options: CallOptions,
        pieces: bool | int = False,
    ) -> Call[Hit]:
        least = _least_of(pieces)
        transfer = CheckedTransfer(kv, self.layout)
        request = self._checked(tokens, options, CallKind.RETRIEVE, counted)
        work = RetrieveCall(
            self._resources,
            request,
            transfer,
            counted,
            [] if least else None,
            least,
        ).run
        if request.hints is not None:
            work = partial(self._used_by, work, request)
        return Call(
            "retrieve",
            work,
            request.miss,
            request.deadline,
            self._resources.counters,
        )

    def _prefetch_call(
        self, tokens: TokenIds | None, options: CallOptions
    ) -> Call[Hit]:
        request = self._checked(tokens, options)
        work = RetrieveCall(self._resources, request, None, False).run
        return Call(
            "prefetch",
            work,
            request.miss,
            request.deadline,
            self._resources.counters,
        )

    def _used_by(self, work: Callable[[], Hit], request: CacheRequest) -> Hit:
        """Do a look-up or a retrieve, and note whose it is."""
        hit = work()
        ledgers = dict(request.tiers.ledgers())
        hinted = request.hinted()
        self._resources.hints.note_use(ledgers, hinted, request.hints)
        return hit

    def _answered_by(self, store: StoreCall, request: CacheRequest) -> Stored:
        """Do a store, and note how its request ended."""
        stored = store.run()
        hinted = request.hinted()
        context = store.context
        self._note_answer(request.tiers, hinted, request.hints, context)
        return stored

    def _note_answer(
        self,
        tiers: TierStack,
        request: HintedRequest,
        hints: RequestHints | None,
        context: int | None = None,
    ) -> tuple[HintResult, ...]:
        resources = self._resources
        results = resources.hints.note_answer(
            dict(tiers.ledgers()), request, hints, context
        )
        if hints is not None and resources.recorder is not None:
            resources.recorder.note_answer(
                request.keys,
                request.first,
                said(request.root, hints, results),
            )
        return results

    def _checked(
        self,
        tokens: TokenIds | None,
        options: CallOptions,
        kind: CallKind | None = None,
        counted: bool = True,
        lazily: bool = False,
    ) -> CacheRequest:
        """Return the request that these options describe; record a call that has a `kind`.
        ValueError for wrong use.

        `lazily`: the call reads keys at once, before the tokens can change, and perhaps not all.
        """
        # read together: the remote tiers may only be used with the namespace of the same epoch
        namespace, tiers = (
            self._weights.scope(
                options.get("lora"),
                options.get("salt"),
                options.get("weights_version"),
                options.get("numerics"),
            )
            if options
            else self._weights.scope()
        )
        resources = self._resources
        recorder = resources.recorder if self.config.record else None
        request = build_request(
            tokens,
            options,
            namespace=namespace,
            tiers=tiers,
            layout=self.layout,
            scheme=self._key_scheme,
            deadline_seconds=self.config.deadline_seconds,
            bounded=kind is not CallKind.STORE,
            clock=resources.clock,
            lazily=lazily and recorder is None and resources.events is None,
        )
        if kind is not None and recorder is not None:
            keys = [*request.head, *request.keys]
            first = request.first - len(request.head)
            num_tokens = request.length_tokens - first * request.chunk_tokens
            recorder.note(
                kind,
                keys,
                first,
                num_tokens,
                counted=counted,
                said=None
                if request.hints in (None, LATER)
                else said(namespace.root, request.hints),
            )
        if kind is not None and resources.events is not None:
            resources.events.heard(request, options.get("weights_version"))
        return request

    # ---- the calls of people

    def explain(
        self, tokens: TokenIds | None, **options: Unpack[CallOptions]
    ) -> Hit:
        """Return what a lookup would return, with a thorough search for the reason; touch and count
        nothing.
        """
        request = self._checked(tokens, options)
        work = partial(run_explain, self._resources, request)
        return Call(
            "explain",
            work,
            request.miss,
            request.deadline,
            self._resources.counters,
        ).run()

    def holders(self, key: bytes) -> list[str]:
        """Return the names of the tiers that have a chunk, from the top down."""
        return [tier.name for tier in self._tiers.all if tier.contains(key)]

    def which(
        self,
        keys: Sequence[bytes],
        *,
        lora: str | None = None,
        salt: str | None = None,
        numerics: str | None = None,
    ) -> list[bool]:
        """Return for each key whether a tier of this machine has its chunk, also after holes.

        For engines that do not know how long a prefix was stored, and try many lengths at once.
        Remote tiers are not asked: each key would be a request. A tier that does not answer in time
        has none. Changes at most the recency of the chunks that are found. `lora`, `salt` and
        `numerics` as in the options of calls.
        """
        found = [False] * len(keys)
        if self._resources.closed:
            return found
        namespace, tiers = self._weights.scope(lora, salt, numerics=numerics)
        for tier in tiers.local().all:
            for first in range(0, len(keys), _MOST_KEYS):
                batch = keys[first : first + _MOST_KEYS]
                here = tier.touch(batch, namespace=namespace.root, asked=False)
                for index, is_here in enumerate(here or (), first):
                    found[index] = found[index] or is_here
        return found

    def pin(
        self,
        tokens: TokenIds | None,
        *,
        owner: str = "pagoda",
        **options: Unpack[CallOptions],
    ) -> dict[str, int]:
        """Protect the leading chunks that each local tier has from eviction there, in the name of
        `owner`.

        Returns how many tokens are pinned now, by tier; at most a quarter of a tier's slots can be
        pinned. Pins last until `unpin` or `clear`; in the host tier a reboot ends them. Raises
        StoreError if a tier's ledger cannot be changed, ValueError for wrong use.
        """
        request = self._checked(tokens, options)
        pinned = {}
        for tier, ledger in request.tiers.ledgers():
            run = ledger.match_prefix(
                request.keys,
                start=request.first,
                namespace=request.namespace.root,
                touch=False,
                deadline_seconds=self.config.deadline_seconds,
            )
            pinned[tier] = (
                admin.pin(ledger, request.keys[: len(run.slots)], owner)
                * request.chunk_tokens
            )
        return pinned

    def unpin(
        self,
        tokens: TokenIds | None = None,
        *,
        owner: str = "pagoda",
        **options: Unpack[CallOptions],
    ) -> dict[str, int]:
        """End the pins of `owner` on the chunks of `tokens`, or on all; return the number of
        chunks, by tier.

        Raises StoreError if a tier's ledger cannot be changed, ValueError for wrong use.
        """
        everything = tokens is None and options.get("keys") is None
        names = options.get("tiers")
        keys = None if everything else self._checked(tokens, options).keys
        tiers = self._tiers if names is None else self._tiers.only(names)
        return {
            tier: admin.unpin(ledger, keys, owner)
            for tier, ledger in tiers.ledgers()
        }

    def decline(self, why: str, *, loaded: bool = False) -> None:
        """Count a request that the engine computes without the cache, and log why; changes nothing
        else.

        Such a request is no look-up, so it does not lower the hit rate.

        Args:
            why: what the request has that no key contains, and what to do.
            loaded: the request may have used the cache, and only its KV is not stored: a drop
                instead of a miss.

        Thread-safe; never raises.
        """
        counters = self._resources.counters
        counters.add(
            {f"{'drop' if loaded else 'miss'}_{Reason.NOT_CACHEABLE}": 1}
        )
        counters.warn(log, Reason.NOT_CACHEABLE, why)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Report how long the engine took to compute `tokens`: chunks are only loaded where that is
        faster.

        The measurement is shared, for this namespace, by all processes of the lowest local tier,
        also later ones.
        """
        self._resources.load_cost.record_prefill(tokens, seconds)
        if tokens > 0 and seconds > 0:
            microseconds = round(seconds * 1e6)
            self._resources.counters.count_prefill(tokens, microseconds)

    def weights_changed(self, version: str = "") -> int:
        """Declare that the model's weights were updated in place: no chunk of the old weights will
        hit again.

        With a `version`, which must name the new weights for all machines ("run 7, step 100": the
        same step of another run is other weights), this cache shares its chunks, in all tiers, with
        every cache of the same namespace that was given the same version. It is valid for this
        cache only: each process names its own weights. Raises ValueError for a number.

        Without a version, no other machine gets or has their KV. Returns the epoch. It is valid on
        this machine, permanently; every process that has the model's cache open uses it from its
        next call on. A local tier whose directory cannot record the epoch, not even in its reserved
        space, loses all its chunks. Raises StoreError if no directory can record it (or no local
        tier has one: private host memory) and there are remote tiers, because other processes, and
        caches opened later, would continue to use them; this cache no longer does. Also raises it
        if a local tier can neither record the epoch nor be cleared, or was left out: this process
        does not use what it has, but after a restart of the machine it would be served.
        """
        try:
            return self._weights.change(version)
        finally:
            events = self._resources.events
            if events is not None:
                events.look()

    def present_namespace(
        self,
        lora: str | None = None,
        *,
        salt: str | None = None,
        numerics: str | None = None,
    ) -> Namespace:
        """Return the namespace of the present weights, with an adapter, a salt and numerics instead
        of the namespace's; changes nothing.

        It changes with `weights_changed`, here or in another process of this machine. Its
        `weights`, `weights_epoch` and `lora` are what a verdict of `pagoda quality` names. Costs
        one stat per local tier.
        """
        return self._weights.present(lora, salt, numerics)

    def publish_events(
        self, endpoint: str, *, topic: str = "", rank: int | None = None
    ) -> str:
        """Publish to routers, over ZMQ, which chunks this machine's host memory and disk hold for
        this cache.

        The messages are those of vLLM's KV events, so that routers made for vLLM understand them: a
        block is a chunk, host memory is the medium CPU, the disk STORAGE. When a router subscribes,
        every chunk with a note is published once; after that, each change within a moment,
        whichever process made it. A chunk has a note if a cache that publishes its events stored or
        found it, also before a restart. Chunks without one (stored by other caches, in the last
        moments before a kill, or with prompt_log off) are published when a request finds them.
        Chunks of a salt are published without tokens, chunks of multimodal prompts not at all. vLLM
        publishes its own events (--kv-events-config).

        Args:
            endpoint: the address of this machine where to listen, "tcp://10.0.0.7:5557"; with
                "tcp://127.0.0.1:*" a free port is taken. Any client that reaches it reads the token
                ids of prompts: "tcp://*:5557" listens in all networks.
            topic: the first frame of each message.
            rank: the data-parallel rank of this engine, for routers.

        Returns the endpoint with its port. Publishing ends with the cache; a forked child does not
        continue it. Raises ConfigError if the endpoint is taken, or there is no local tier;
        ValueError the second time, ClosedError after `close`.
        """
        from pagoda.cache.request_events import RequestEvents
        from pagoda.kv_events.publisher import EventPublisher
        from pagoda.kv_events.stored_events import MEDIA

        # not `self`: the publisher must not keep a dropped cache alive
        resources = self._resources
        weights = self._weights
        ledgers = {
            name: ledger
            for name, ledger in self._tiers.ledgers()
            if name in MEDIA
        }
        if resources.closed:
            raise ClosedError("the cache is closed")
        if resources.events is not None:
            raise ValueError(
                f"this cache already publishes its events, at {resources.events.endpoint}"
            )
        if not ledgers:
            raise ConfigError(
                "KV events report host memory and the disk: set host_size or disk_size"
            )
        chunk_tokens = self.layout.chunk_tokens
        publisher = EventPublisher(endpoint, topic, rank)
        resources.events = RequestEvents(
            publisher,
            ledgers,
            weights.scope,
            chunk_tokens,
            self.config.prompt_log,
        )
        resources.last_steps.append(resources.events.keep_notes)
        return resources.events.endpoint

    def before_closing(self, step: Callable[[], None]) -> None:
        """Call `step` when the cache closes: what was stored is written down, and the tiers are
        still open.

        For connectors, at their end: a step that refers to the cache keeps it alive until it is
        closed. `step` must be short and must not raise. Thread-safe.
        """
        self._resources.last_steps.append(step)

    def clear(
        self,
        *,
        lora: str | None = None,
        salt: str | None = None,
        numerics: str | None = None,
        everything: bool = False,
    ) -> Cleared:
        """Remove the chunks of this namespace, or with `everything` of all namespaces, from every
        tier.

        `lora`, `salt` and `numerics` name an adapter, a tenant and how it is computed, instead of
        the namespace's. Chunks that are being written at that moment do not return. A tier that
        fails, or that cannot be changed for five seconds, is named in the result: its chunks are
        still there.
        """
        root = (
            None
            if everything
            else self._weights.scope(lora, salt, None, numerics)[0].root
        )
        failed = dict[str, str]()
        late = self._resources.late
        if late is not None and late.note_clear(root):
            failed[late.name] = (
                f"left out at the start, and cleared before it takes part here: {late.reason}"
            )
        chunks = dict.fromkeys(self._tiers.names, 0)
        # top down, so that no cleared chunk is written down again; then bottom up, for chunks that
        # were loaded meanwhile
        for tier in (*self._tiers.all, *reversed(self._tiers.all[:-1])):
            if tier.name in failed:
                continue
            try:
                chunks[tier.name] += tier.clear(root)
            except Exception as error:  # noqa: BLE001
                # a boundary: the other tiers must be cleared
                failed[tier.name] = f"{type(error).__name__}: {error}"
        return Cleared(chunks, failed)

    def stats(self) -> CacheStats:
        """Return gauges and counters of every tier, hit rate, misses and drops by reason, measured
        rates, and what each model and each tenant hit and saved.

        "drops" are those of the cache and of all of its tiers. A tier that does not answer within
        `config.deadline_seconds` is empty, and named under "failed"; if it is the first local tier,
        "counters" are those of this process alone.
        """
        resources = self._resources
        if resources.closed:
            raise ClosedError("the cache is closed")
        tiers = dict[str, dict[str, int]]()
        failed = dict[str, str]()
        for tier in self._tiers.all:
            try:
                tiers[tier.name] = dict(tier.stats())
            except Exception as error:  # noqa: BLE001
                # a boundary: the other tiers must be shown
                tiers[tier.name], failed[tier.name] = (
                    {},
                    f"{type(error).__name__}: {error}",
                )
        counters = resources.counters.read(
            0.0 if failed else self.config.deadline_seconds
        )
        meters = resources.counters.meters()
        dropped = Counter(counters)
        for name, numbers in tiers.items():
            if name != resources.counts_in:  # `counters` have those of that tier
                dropped.update(numbers)
        recorder = resources.recorder
        host = self._tiers.host
        stats: CacheStats = {
            "name": self.name,
            "tiers": tiers,
            "failed": failed,
            "counters": counters,
            "hit_rate": counters["hit_tokens"] / max(1, counters["asked_tokens"]),
            "misses": by_reason(counters, "miss_"),
            "drops": by_reason(dropped, "drop_"),
            "waiting_chunks": sum(queue.waiting for queue in resources.writeback),
            "staging_buffers": resources.load_staging.in_use
            + resources.store_staging.in_use,
            "pinned_bytes": host.slab.pinned_bytes if host is not None else 0,
            "rates": resources.load_cost.rates(),
            "models": usage_by_model(meters),
            "tenants": usage_by_tenant(meters),
        }
        # that of another cache of this process, if it opened the store first
        found = {ledger.objective for _, ledger in self._tiers.ledgers()}
        if found - {DEFAULT_OBJECTIVE}:
            stats["objective"] = max(found)
        if hints := resources.hints.stats():
            stats["hints"] = hints
        if left_out := resources.left_out():
            stats["left_out"] = left_out
        if quality := self._weights.quality():
            stats["approximate"] = [state.as_stats() for state in quality]
        if recorder is not None:
            stats["recording"] = recorder.stats()
        return stats

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until the queued chunks are in the lower tiers; False if `timeout` seconds were not
        enough.

        Also writes the prompts that wait to be logged for `pagoda explain`. ValueError: `timeout`
        is no finite number.
        """
        deadline = Deadline(seconds_of("timeout", timeout))
        if (prompts := self._resources.prompt_log) is not None:
            prompts.flush()
        flushed = [
            queue.flush(deadline.remaining())
            for queue in self._resources.writeback
        ]
        flushed += [
            tier.flush(deadline.remaining()) for tier in self._tiers.lower
        ]
        return all(flushed)

    def close(self, timeout: float = _CLOSE_SECONDS) -> bool:
        """Write what is queued, as far as `timeout` seconds allow, and close; False if some was
        left. Idempotent.

        ValueError: `timeout` is no finite number; nothing is closed.
        """
        timeout = seconds_of("timeout", timeout)
        forget(self)
        self._finalizer.detach()
        return self._resources.close(timeout)

    def __repr__(self) -> str:
        if not hasattr(self, "_resources"):
            return "Cache(not opened)"
        named = f"{self.name!r}, " if self.name is not None else ""
        return f"Cache({named}model={self.namespace.model!r}, tiers={', '.join(self.tiers)})"

    def __enter__(self) -> Cache:
        """Return the cache itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the tiers, from the top down."""
        return self._tiers.names

    @property
    def slots(self) -> HostSlots | None:
        """The slots of the host tier, for engines that copy into and out of them; None without a
        host tier.
        """
        return self._slots

    @property
    def _tiers(self) -> TierStack:
        return self._resources.tiers


def _configured(
    config: Config | None, layout: KVLayout, overrides: Mapping[str, object]
) -> Config:
    """Return the options of a cache over `layout`. Raises ConfigError, ValueError."""
    if not isinstance(layout, KVLayout):
        raise ValueError(
            f"layout is {layout!r}: build a KVLayout, such as KVLayout.dense(...)"
        )
    if config is None:
        from pagoda.config.sources import DEFAULT, load

        config, origins = load(None, None, None, **overrides)
        origin = origins["chunk_tokens"]
        if origin == DEFAULT:
            return replace(config, chunk_tokens=layout.chunk_tokens)
        told = f" ({origin})"
    else:
        config, told = replace(config, **overrides), ""  # type: ignore[arg-type]
    if config.chunk_tokens != layout.chunk_tokens:
        raise ConfigError(
            f"chunk_tokens = {config.chunk_tokens}{told}, but the layout has chunks of "
            f"{layout.chunk_tokens} tokens: "
            "build the layout with that number, or leave it out"
        )
    return config


def _differences(present: _Setting, asked: _Setting) -> str:
    """Return the fields that differ, each with the value that is present and the one asked for, if
    it is no secret.
    """
    return "; ".join(
        f"{one.name} is {getattr(present, one.name)!r}, not {getattr(asked, one.name)!r}"
        if one.repr
        else f"{one.name} differs"
        for one in fields(present)
        if getattr(present, one.name) != getattr(asked, one.name)
    )


def _completed(
    namespace: Namespace, layout: KVLayout, config: Config, codecs: Sequence[str]
) -> Namespace:
    """Return the namespace with the layout and the configured epoch. So two layouts never share a
    key.

    It also names lossy codecs: KV that they changed is never found under a key of exact KV.
    """
    if not isinstance(namespace, Namespace):
        raise ValueError(
            f"namespace is {namespace!r}: build one, such as Namespace(model='my-model')"
        )
    if namespace.layout not in ("", layout.fingerprint):
        raise ValueError(
            f"the namespace is of layout {namespace.layout!r}, not {layout.fingerprint!r}: leave "
            "it out"
        )
    epochs = {namespace.weights_epoch, config.weights_epoch} - {0}
    if len(epochs) > 1:
        raise ValueError(
            f"weights_epoch is {namespace.weights_epoch} in the namespace, "
            f"{config.weights_epoch} in the "
            "configuration: leave one of them out"
        )
    approximate = ",".join(
        sorted({*filter(None, namespace.approximate.split(",")), *codecs})
    )
    return namespace.with_(
        layout=layout.fingerprint,
        weights_epoch=max(epochs, default=0),
        approximate=approximate,
    )


def _least_of(pieces: object) -> int:
    """Return the fewest tokens of a run behind a missing chunk that a call asks for, 0 if for
    none. ValueError if `pieces` is neither a bool nor a number of tokens. Pure.
    """
    try:
        least = operator.index(pieces)  # type: ignore[arg-type]
    except TypeError:
        least = -1
    if least < 0:
        raise ValueError(
            f"pieces = {pieces!r}: pass True for all, or the fewest tokens of a piece"
        )
    return least


def _require_quality(
    codecs: Sequence[str], namespace: Namespace, layout: KVLayout, config: Config
) -> list[QualityState]:
    """Return what is known of each lossy codec. ConfigError: it cannot encode the layout, or was
    not measured.
    """
    for codec in codecs:
        require_layout(codec, layout)
    return [
        require_quality(
            codec_setting(codec, layout.chunk_tokens),
            weights=namespace.weights,
            weights_epoch=namespace.weights_epoch,
            adapters=namespace.lora,
            verdicts=config.quality_verdicts,
            unchecked=config.unchecked,
        )
        for codec in codecs
    ]


def _quality_again(
    begun: Sequence[QualityState],
    config: Config,
    layout: KVLayout,
    namespace: Namespace,
) -> list[QualityState]:
    """Return what is known of the lossy codecs of a cache with these weights and adapter; log it if
    one is refused.
    """
    codecs = [str(state.setting.options["codec"]) for state in begun]
    try:
        return _require_quality(codecs, namespace, layout, config)
    except ConfigError as refusal:
        log.warning(
            "tiers with a lossy codec are left out for these weights and adapters: %s",
            refusal,
        )
        return [
            QualityState(state.setting, "left out", str(refusal))
            for state in begun
        ]


# ---- names


def forget(cache: Cache) -> None:
    """Release the name of a cache that is about to be closed: a call that opens that name now gets
    a new cache.
    """
    with _openings.changed:
        if cache.name is not None and _caches.get(cache.name) is cache:
            del _caches[cache.name]
            _kept.pop(cache.name, None)


def _wait_for_opening(name: str, deadline: Deadline) -> Cache | None:
    """Return the cache of that name, once no thread is opening it; None if there is none."""
    changed = _openings.changed
    with changed:
        while name in _openings.names.values():
            if not changed.wait(deadline.remaining()):
                raise StoreError(
                    f"another thread has been opening the cache {name!r} for {_OPEN_SECONDS:g} "
                    "s: see what it waits for"
                )
        return _caches.get(name)


@contextmanager
def _name_taken(name: str | None, cache: Cache) -> Iterator[None]:
    """Reserve the name for `cache`, which is opened inside; the name finds it as long as something
    refers to it.

    Raises NameTaken (a ValueError) if another cache has it. Does nothing without a name.
    """
    if name is None:
        yield
        return
    if name in _caches:
        gc.collect()  # perhaps only a cycle refers to the other cache
    me = object()
    opening = _openings.names
    changed = _openings.changed
    try:
        with changed:
            if name in _caches or name in opening.values():
                raise NameTaken(
                    f"a cache {name!r} is open already: use Cache.get({name!r}), or close it first"
                )
            opening[me] = name
        yield  # without the lock, which calls that close other caches need too
        with changed:
            _caches[name] = cache
    finally:
        # a built-in: no exception of a signal handler can come before it
        opening.pop(me, None)
        with changed:
            changed.notify_all()
