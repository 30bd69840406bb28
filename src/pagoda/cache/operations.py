"""The four calls of an engine, checked and made ready to run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict

from pagoda.cache.call import Job, Watched
from pagoda.cache.deadline import Deadline
from pagoda.cache.hit import Hit, Stored
from pagoda.cache.recording import Kind
from pagoda.cache.request import Ask, Keys, KeyScheme, Mask, ask_for
from pagoda.cache.resources import Parts
from pagoda.cache.tier_stack import Storeys
from pagoda.cache.weights import Weights
from pagoda.cache.work import Work, hit_without
from pagoda.clock import Clock
from pagoda.config import Config
from pagoda.errors import StoreError
from pagoda.fork import renewed_after_fork
from pagoda.keys import Item, Namespace, TokenIds
from pagoda.layout import KVLayout
from pagoda.metrics import Reason
from pagoda.transfer import Transfer

__all__ = ["Calls", "Options"]

log = logging.getLogger("pagoda.cache")

_MOST_NAMESPACES = 1024  # kept ready; tenants beyond that are hashed anew
_EPOCHS = 2**32  # epochs of this machine within one epoch of the configured namespace


class Options(TypedDict, total=False):
    """What every call takes by keyword."""

    start_tokens: int  # the chunks before this token are not asked for: a multiple of chunk_tokens
    mask: Mask | None  # the same as one bool a token: False...False True...True
    keys: Keys | None  # instead of hashing the tokens (which may then be None)
    items: Sequence[Item]  # multimodal items at their token positions
    lora: str | None  # instead of the namespace's
    salt: str | None  # instead of the namespace's: keeps tenants apart
    tiers: Iterable[str] | None  # only these
    deadline_seconds: (
        float | None
    )  # of the whole call; by default config.deadline_seconds without anything arriving


_OPTIONS = Options.__optional_keys__


class Calls:
    """Makes jobs out of calls. Thread-safe. Every wrong use is a ValueError here, before anything is done."""

    def __init__(
        self,
        parts: Parts,
        config: Config,
        namespace: Namespace,
        layout: KVLayout,
        scheme: KeyScheme,
        clock: Clock,
    ) -> None:
        self.parts = parts
        self._work = Work(parts, config, layout)
        self._config = config
        self._layout = layout
        self._scheme = scheme
        self._clock = clock
        self._weights = Weights(config.roots(), namespace.model, namespace.weights_epoch)
        self._base = namespace
        self._namespaces: dict[tuple[str, str, int], Namespace] = {}
        self.renew()
        renewed_after_fork(self)

    def renew(self) -> None:
        """Make the lock anew."""
        self._lock = threading.Lock()

    # ---- jobs

    def lookup(self, tokens: TokenIds | None, counted: bool, options: Options) -> Job[Hit]:
        """See Cache.lookup."""
        storeys, ask, deadline = self._prepared(tokens, options)
        self._record(Kind.LOOKED_UP, ask, counted)
        return self._job("lookup", lambda: self._work.lookup(storeys, ask, deadline, counted), ask, deadline)

    def retrieve(self, tokens: TokenIds | None, kv: Transfer, counted: bool, options: Options) -> Job[Hit]:
        """See Cache.retrieve."""
        storeys, ask, deadline = self._prepared(tokens, options)
        watched = Watched(kv, self._layout)
        self._record(Kind.RETRIEVED, ask, counted)
        return self._job(
            "retrieve", lambda: self._work.retrieve(storeys, ask, watched, deadline, counted), ask, deadline
        )

    def prefetch(self, tokens: TokenIds | None, options: Options) -> Job[Hit]:
        """See Cache.prefetch."""
        storeys, ask, deadline = self._prepared(tokens, options)
        return self._job(
            "prefetch", lambda: self._work.retrieve(storeys, ask, None, deadline, False), ask, deadline
        )

    def store(self, tokens: TokenIds | None, kv: Transfer, options: Options) -> Job[Stored]:
        """See Cache.store."""
        storeys, ask, deadline = self._prepared(tokens, options, loads=False)
        watched = Watched(kv, self._layout)
        self._record(Kind.STORED, ask)

        def missed(reason: Reason, _: str) -> Stored:
            return Stored(0, 0, 0, len(ask.keys), reason)

        def work() -> Stored:
            return self._work.store(storeys, ask, watched, deadline)

        return Job("store", work, missed, deadline, self.parts.tally)

    def explain(self, tokens: TokenIds | None, options: Options) -> Job[Hit]:
        """See Cache.explain."""
        storeys, ask, deadline = self._prepared(tokens, options)
        return self._job("explain", lambda: self._work.explain(storeys, ask, deadline), ask, deadline)

    def _job(self, name: str, work: Callable[[], Hit], ask: Ask, deadline: Deadline) -> Job[Hit]:
        def missed(reason: Reason, detail: str) -> Hit:
            return hit_without(ask, reason, detail)

        return Job(name, work, missed, deadline, self.parts.tally)

    # ---- what they ask about

    def storeys(self) -> Storeys:
        """The tiers that may be asked now: once weights were changed in place here, no other machine has their KV."""
        return self._storeys_of(self._weights.epoch())

    def namespace(self, lora: str | None = None, salt: str | None = None) -> Namespace:
        """The namespace of an adapter and a tenant as of now: a stat notices weights that somebody changed."""
        return self._namespace_of(self._weights.epoch(), lora, salt)

    def _storeys_of(self, epoch: int) -> Storeys:
        return self.parts.storeys.local() if epoch else self.parts.storeys

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

    def root(self, lora: str | None, salt: str | None) -> bytes:
        """The root of such a namespace, whose labels the tiers are told."""
        namespace = self.namespace(lora, salt)
        self._work.register(namespace)
        return namespace.root

    def ask(self, tokens: TokenIds | None, options: Options) -> Ask:
        """The question that these options put. Raises ValueError for wrong use."""
        return self._ask_of(self._weights.epoch(), tokens, options)

    def _ask_of(self, epoch: int, tokens: TokenIds | None, options: Options) -> Ask:
        if not options.keys() <= _OPTIONS:  # a misspelt salt would share what is a tenant's own
            raise ValueError(
                f"{', '.join(options.keys() - _OPTIONS)}: no such option; there are {', '.join(sorted(_OPTIONS))}"
            )
        return ask_for(
            tokens,
            options.get("keys"),
            namespace=self._namespace_of(epoch, options.get("lora"), options.get("salt")),
            chunk_tokens=self._layout.chunk_tokens,
            scheme=self._scheme,
            start_tokens=options.get("start_tokens", 0),
            mask=options.get("mask"),
            items=options.get("items", ()),
        )

    def register(self) -> None:
        """Make the cache's own namespace known to every tier, with its labels; waits for it. StoreError if it fails."""
        self._work.register(self.namespace(), wait=True)

    def weights_changed(self) -> int:
        """Raise the weights epoch; returns it. See Cache.weights_changed."""
        epoch, troubles = self._weights.raised()
        for tier in self.parts.storeys.all:
            if tier.name in troubles:  # its root will not remember the epoch: forgetting needs no room
                self.parts.tally.warn(log, Reason.IO_ERROR, f"{tier.name} is cleared: {troubles[tier.name]}")
                tier.clear()
        untold, storeys = len(troubles) == len(self._config.roots()), self.parts.storeys
        if troubles and untold and storeys.local() is not storeys:
            raise StoreError(
                "other processes cannot be told that the weights have changed, and go on with what remote tiers have "
                f"of the old ones: mend this and say it again, or stop them ({next(iter(troubles.values()))})"
            )
        return epoch

    def _record(self, kind: Kind, ask: Ask, counted: bool = True) -> None:
        if self.parts.recorder is not None:
            keys, first = [*ask.head, *ask.keys], ask.first - len(ask.head)
            num_tokens = ask.length_tokens - first * ask.chunk_tokens
            self.parts.recorder.note(kind, keys, first, num_tokens, counted=counted)

    def _prepared(
        self, tokens: TokenIds | None, options: Options, loads: bool = True
    ) -> tuple[Storeys, Ask, Deadline]:
        epoch = self._weights.epoch()  # one for both: tiers of other machines know no other weights
        storeys = self._storeys_of(epoch).only(options.get("tiers"))
        ask = self._ask_of(epoch, tokens, options)
        given = options.get("deadline_seconds")
        patience = self._config.deadline_seconds if given is None else given
        nbytes = len(ask.keys) * self._layout.chunk_bytes if loads else None
        return storeys, ask, Deadline(self._clock, patience, nbytes, strict=given is not None)
