"""The calls of an engine: each is checked here and made a `Call`, which runs at once, on another thread, or awaited.

`Cache` and `HostSlots` call this module. The work itself is in `StoreCall`, `RetrieveCall` and `lookup_call`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from pagoda.cache.call import Call, CheckedTransfer
from pagoda.cache.hit import Hit, Stored
from pagoda.cache.lookup_call import run_explain, run_lookup
from pagoda.cache.recording import CallKind
from pagoda.cache.request import CacheRequest, CallOptions, KeyScheme, build_request
from pagoda.cache.resources import Resources
from pagoda.cache.retrieve_call import RetrieveCall
from pagoda.cache.store_call import StoreCall
from pagoda.cache.tier_stack import TierStack
from pagoda.cache.weights_epoch import WeightsEpoch
from pagoda.clock import Deadline
from pagoda.errors import StoreError
from pagoda.fork import reset_in_child
from pagoda.keys import Namespace, TokenIds
from pagoda.metrics import Reason
from pagoda.transfer import Transfer

__all__ = ["Operations"]

log = logging.getLogger("pagoda.cache")

_MOST_NAMESPACES = 1024  # kept ready; more tenants are hashed again
_EPOCHS = 2**32  # epochs of this machine within one epoch of the configured namespace
_OPTIONS = CallOptions.__optional_keys__


class Operations:
    """Checks the calls of an engine. Thread-safe. Every wrong use is a ValueError here, before anything is done."""

    def __init__(self, resources: Resources, namespace: Namespace, scheme: KeyScheme) -> None:
        self.resources = resources
        self._scheme = scheme
        self._weights = WeightsEpoch(resources.config.roots(), namespace.model, namespace.weights_epoch)
        self._base = namespace
        self._namespaces: dict[tuple[str, str, int], Namespace] = {}
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Create the lock."""
        self._lock = threading.Lock()

    # ---- calls

    def lookup(self, tokens: TokenIds | None, counted: bool, options: CallOptions) -> Call[Hit]:
        """See Cache.lookup."""
        tiers, request, deadline = self.checked(tokens, options, CallKind.LOOKUP, counted)
        work = partial(run_lookup, self.resources, tiers, request, deadline, counted)
        return self._hit_call("lookup", work, request, deadline)

    def retrieve(
        self, tokens: TokenIds | None, kv: Transfer, counted: bool, options: CallOptions
    ) -> Call[Hit]:
        """See Cache.retrieve."""
        transfer = CheckedTransfer(kv, self.resources.layout)
        tiers, request, deadline = self.checked(tokens, options, CallKind.RETRIEVE, counted)
        work = RetrieveCall(self.resources, tiers, request, transfer, deadline, counted).run
        return self._hit_call("retrieve", work, request, deadline)

    def prefetch(self, tokens: TokenIds | None, options: CallOptions) -> Call[Hit]:
        """See Cache.prefetch."""
        tiers, request, deadline = self.checked(tokens, options)
        work = RetrieveCall(self.resources, tiers, request, None, deadline, False).run
        return self._hit_call("prefetch", work, request, deadline)

    def store(self, tokens: TokenIds | None, kv: Transfer, options: CallOptions) -> Call[Stored]:
        """See Cache.store."""
        transfer = CheckedTransfer(kv, self.resources.layout)
        tiers, request, deadline = self.checked(tokens, options, CallKind.STORE)
        store = StoreCall(self.resources, tiers, request, transfer, deadline)
        return Call("store", store.run, store.miss, deadline, self.resources.counters)

    def explain(self, tokens: TokenIds | None, options: CallOptions) -> Call[Hit]:
        """See Cache.explain."""
        tiers, request, deadline = self.checked(tokens, options)
        work = partial(run_explain, self.resources, tiers, request, deadline)
        return self._hit_call("explain", work, request, deadline)

    def _hit_call(
        self, name: str, work: Callable[[], Hit], request: CacheRequest, deadline: Deadline
    ) -> Call[Hit]:
        return Call(name, work, partial(request.hit, {}), deadline, self.resources.counters)

    # ---- checks

    def checked(
        self,
        tokens: TokenIds | None,
        options: CallOptions,
        kind: CallKind | None = None,
        counted: bool = True,
    ) -> tuple[TierStack, CacheRequest, Deadline]:
        """Return the tiers, the request and the deadline that these options describe; record a call of a `kind`.

        Raises ValueError for wrong use.
        """
        if not options.keys() <= _OPTIONS:  # a misspelt salt would share a tenant's chunks
            raise ValueError(
                f"{', '.join(options.keys() - _OPTIONS)}: no such option; there are {', '.join(sorted(_OPTIONS))}"
            )
        epoch = self._weights.epoch()  # one for both: tiers of other machines know no other weights
        tiers, names = self._tiers_of(epoch), options.get("tiers")
        if names is not None:
            tiers = tiers.only(names)
        resources = self.resources
        request = build_request(
            tokens,
            options.get("keys"),
            namespace=self._namespace_of(epoch, options.get("lora"), options.get("salt")),
            chunk_tokens=resources.layout.chunk_tokens,
            scheme=self._scheme,
            start_tokens=options.get("start_tokens", 0),
            mask=options.get("mask"),
            items=options.get("items", ()),
        )
        if kind is not None and resources.recorder is not None:
            keys, first = [*request.head, *request.keys], request.first - len(request.head)
            num_tokens = request.length_tokens - first * request.chunk_tokens
            resources.recorder.note(kind, keys, first, num_tokens, counted=counted)
        given = options.get("deadline_seconds")
        patience = resources.config.deadline_seconds if given is None else given
        nbytes = None if kind is CallKind.STORE else len(request.keys) * resources.layout.chunk_bytes
        return tiers, request, Deadline(patience, nbytes, given is not None, resources.clock)

    def tiers(self) -> TierStack:
        """Return the tiers that may be used now: after weights changed in place, no other machine has their KV."""
        return self._tiers_of(self._weights.epoch())

    def namespace(self, lora: str | None = None, salt: str | None = None) -> Namespace:
        """Return the namespace of an adapter and a tenant now: a stat notices weights that another process changed."""
        return self._namespace_of(self._weights.epoch(), lora, salt)

    def register(self, lora: str | None, salt: str | None) -> bytes:
        """Register the namespace of an adapter and a tenant with the tiers; return its root."""
        namespace = self.namespace(lora, salt)
        if namespace.root not in self.resources.registered:
            self.resources.register(namespace)
        return namespace.root

    def _tiers_of(self, epoch: int) -> TierStack:
        return self.resources.tiers.local() if epoch else self.resources.tiers

    def _namespace_of(self, epoch: int, lora: str | None, salt: str | None) -> Namespace:
        lora = self._base.lora if lora is None else lora
        salt = self._base.salt if salt is None else salt
        with self._lock:
            known = self._namespaces.get((lora, salt, epoch))
        if known is not None:
            return known
        made = self._base.with_(
            lora=lora, salt=salt, weights_epoch=self._base.weights_epoch * _EPOCHS + epoch
        )
        with self._lock:
            while len(self._namespaces) >= _MOST_NAMESPACES:
                self._namespaces.pop(next(iter(self._namespaces)))
            self._namespaces[lora, salt, epoch] = made
        return made

    def weights_changed(self) -> int:
        """Raise the weights epoch and return it. See Cache.weights_changed."""
        epoch, errors = self._weights.raise_epoch()
        tiers = self.resources.tiers
        for tier in tiers.all:
            if tier.name in errors:  # its root will not remember the epoch; clearing the tier needs no space
                self.resources.counters.warn(
                    log, Reason.IO_ERROR, f"{tier.name} is cleared: {errors[tier.name]}"
                )
                tier.clear()
        none_recorded = len(errors) == len(self.resources.config.roots())
        if errors and none_recorded and tiers.local() is not tiers:
            raise StoreError(
                "other processes could not be told that the weights have changed, and continue to use the KV of the "
                "old weights in remote tiers: remove the cause and call weights_changed again, or stop them "
                f"({next(iter(errors.values()))})"
            )
        return epoch
