"""Cache: store, lookup, retrieve and prefetch over all the tiers of a machine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Unpack

from pagoda.cache import ranges, registry
from pagoda.cache.forms import Forms
from pagoda.cache.hit import Cleared, Hit, Stored
from pagoda.cache.host_slots import HostSlots
from pagoda.cache.operations import Calls, Options
from pagoda.cache.request import KeyScheme
from pagoda.cache.resources import assemble
from pagoda.cache.tier_stack import Storeys, open_storeys, storeys_of
from pagoda.clock import Clock
from pagoda.config import Config
from pagoda.dropped import close_when_dropped
from pagoda.errors import ClosedError, ConfigError
from pagoda.keys import Item, Namespace, TokenIds, chunk_keys
from pagoda.layout import KVLayout
from pagoda.metrics import DROPS, MISSES
from pagoda.tiers.base import Tier
from pagoda.transfer import Transfer

__all__ = ["Cache"]

_CLOSE_SECONDS = 5.0


class Cache(Forms):
    """The KV cache of one model and layout. Thread-safe; a forked child may go on using it.

    Calls never raise for trouble at run time (a full disk, a dead tier, a corrupt chunk): that is a miss with a
    `Reason`, a counter and one rate-limited log line. ValueError is for wrong use. After `close` every call is a miss.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        namespace: Namespace,
        layout: KVLayout,
        name: str | None = None,
        tiers: Sequence[Tier] | None = None,
        key_scheme: KeyScheme = chunk_keys,
        clock: Clock | None = None,
        **overrides: object,
    ) -> None:
        """Open the tiers that `config` describes, or take over `tiers` (top down, closed with the cache).

        Without `config`, the options come from the environment and the configuration file; `overrides` go before
        either. The namespace's `layout` is filled in. `get` finds the cache by its `name` for as long as somebody has
        it. Raises ConfigError, StoreError with the remedy, ValueError: also if another has that name.
        """
        self.name = name
        self.config = _configured(config, layout, overrides)
        self.layout = layout
        self.namespace = _completed(namespace, layout, self.config)
        if self.config.profile:
            ranges.enable()
        with registry.taken(name, self):
            self._open(tiers, key_scheme, clock or Clock())

    def _open(self, tiers: Sequence[Tier] | None, key_scheme: KeyScheme, clock: Clock) -> None:
        config, layout = self.config, self.layout
        storeys = open_storeys(config, layout, clock) if tiers is None else storeys_of(tiers, layout)
        parts = assemble(storeys, config, layout, key_scheme, clock)
        self._calls = Calls(parts, config, self.namespace, layout, key_scheme, clock)
        self._slots = HostSlots(self._calls, storeys.host, layout) if storeys.host is not None else None
        self._finalizer = close_when_dropped(self, partial(parts.close, _CLOSE_SECONDS))
        try:
            self._calls.register()
        except BaseException:
            self.close()
            raise

    # ---- by name

    @classmethod
    def open(
        cls,
        name: str,
        config: Config | None = None,
        *,
        namespace: Namespace,
        layout: KVLayout,
        **overrides: object,
    ) -> Cache:
        """Return this process's cache of that name, opened now if there is none, and kept until it is closed.

        Raises ValueError if it is open with another config, namespace or layout.
        """
        config = _configured(config, layout, overrides)
        wanted = registry.Wanted(config, _completed(namespace, layout, config), layout)
        return registry.open_named(
            name, wanted, lambda: cls(config, namespace=namespace, layout=layout, name=name)
        )

    @staticmethod
    def get(name: str) -> Cache | None:
        """Return this process's cache of that name, None if there is none."""
        return registry.get(name)

    @staticmethod
    def destroy(name: str) -> bool:
        """Close the cache of that name and forget it; False if there is none. What is stored stays."""
        return registry.destroy(name)

    # ---- the calls of an engine

    def store(self, tokens: TokenIds | None, kv: Transfer, **options: Unpack[Options]) -> Stored:
        """Keep the whole chunks of `kv`: in host memory when this returns, in the lower tiers some time later.

        `kv` holds what the *present* weights computed for `tokens`. Options as in `Options`.
        """
        return self._calls.store(tokens, kv, options).run()

    def lookup(self, tokens: TokenIds | None, *, counted: bool = True, **options: Unpack[Options]) -> Hit:
        """Say how many leading tokens are cached and where; copies nothing, keeps them from eviction for a moment.

        Those who look up and then retrieve the same prompt leave one of the two uncounted, or hits count twice.
        """
        return self._calls.lookup(tokens, counted, options).run()

    def retrieve(
        self, tokens: TokenIds | None, kv: Transfer, *, counted: bool = True, **options: Unpack[Options]
    ) -> Hit:
        """Fill `kv` with the leading chunks that are cached; says which. Only validated chunks are in the hit.

        A hit may cover the whole prompt: ask for `tokens[:-1]` if the engine has to compute the last one.
        """
        return self._calls.retrieve(tokens, kv, counted, options).run()

    def prefetch(self, tokens: TokenIds | None, **options: Unpack[Options]) -> Future[Hit]:
        """Begin to bring leading chunks up to the host tier, at most half of it; returns at once, counts nothing.

        The result says what is there then. Trouble is a reason in it; it raises nothing.
        """
        return self._calls.parts.workers.submit(self._calls.prefetch(tokens, options))

    def keys(
        self,
        tokens: TokenIds,
        start: int = 0,
        *,
        items: Sequence[Item] = (),
        lora: str | None = None,
        salt: str | None = None,
    ) -> list[tuple[int, int, bytes]]:
        """Return (start, end, key) of each whole chunk from token `start` on; changes nothing."""
        ask = self._calls.ask(tokens, {"start_tokens": start, "items": items, "lora": lora, "salt": salt})
        return [
            (at, at + ask.chunk_tokens, key)
            for at, key in zip(ask.starts(0, len(ask.keys)), ask.keys, strict=True)
        ]

    # ---- the calls of people

    def explain(self, tokens: TokenIds | None, **options: Unpack[Options]) -> Hit:
        """Say what a lookup would, with the reason found out thoroughly; touches and counts nothing."""
        return self._calls.explain(tokens, options).run()

    def holders(self, key: bytes) -> list[str]:
        """Return the names of the tiers that have a chunk, from the top down."""
        return [tier.name for tier in self._storeys.all if tier.contains(key)]

    def pin(
        self, tokens: TokenIds | None, *, owner: str = "pagoda", **options: Unpack[Options]
    ) -> dict[str, int]:
        """Keep the leading chunks that a local tier has from eviction there, in the name of `owner`.

        Returns how many tokens are pinned now, by tier: at most a quarter of its slots are. Pins last until `unpin` or
        `clear`, in the host tier at the longest until a reboot. Raises StoreError if a tier's ledger cannot be changed,
        ValueError for wrong use.
        """
        ask, storeys = self._calls.ask(tokens, options), self._storeys.only(options.get("tiers"))
        pinned = {}
        for tier, ledger in storeys.ledgers():
            run = ledger.match(
                ask.keys, start=ask.first, namespace=ask.namespace.root, touch=False,
                deadline_seconds=self.config.deadline_seconds,
            )  # fmt: skip
            pinned[tier] = ledger.pin(ask.keys[: len(run.slots)], owner) * ask.chunk_tokens
        return pinned

    def unpin(
        self, tokens: TokenIds | None = None, *, owner: str = "pagoda", **options: Unpack[Options]
    ) -> dict[str, int]:
        """End the pins of `owner` on the chunks of `tokens`, or on all; returns of how many chunks, by tier.

        Raises StoreError if a tier's ledger cannot be changed, ValueError for wrong use.
        """
        everything = tokens is None and options.get("keys") is None
        keys = None if everything else self._calls.ask(tokens, options).keys
        storeys = self._storeys.only(options.get("tiers"))
        return {tier: ledger.unpin(keys, owner) for tier, ledger in storeys.ledgers()}

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Tell how long the engine took to compute `tokens`: what loading has to beat."""
        self._calls.parts.tools.worth.observe_prefill(tokens, seconds)

    def weights_changed(self) -> int:
        """Say that the model's weights were updated in place: nothing stored before will hit again. Returns the epoch.

        It holds on this machine, for good, and for every process that has the model's cache open from its next call on.
        A local tier whose directory cannot take that down, not even in the room kept for it, loses all that it has.
        Raises StoreError if that cannot be, either, or if there are remote tiers that nobody else can be kept from.
        """
        return self._calls.weights_changed()

    def clear(self, *, lora: str | None = None, salt: str | None = None, everything: bool = False) -> Cleared:
        """Remove the chunks of this namespace (of an adapter, of a tenant), or of all, from every tier.

        What is on its way at that moment does not come back. A tier that fails, or cannot be changed for five seconds,
        is named in the result: its chunks are still there.
        """
        root = None if everything else self._calls.namespace(lora, salt).root
        chunks, failed = dict.fromkeys(self._storeys.names, 0), dict[str, str]()
        # down, so that nothing cleared is written down again; then up, for what was on its way up meanwhile
        for tier in (*self._storeys.all, *reversed(self._storeys.all[:-1])):
            if tier.name in failed:
                continue
            try:
                chunks[tier.name] += tier.clear(root)
            except Exception as trouble:  # noqa: BLE001  # a border: the other tiers are cleared all the same
                failed[tier.name] = f"{type(trouble).__name__}: {trouble}"
        return Cleared(chunks, failed)

    def stats(self) -> dict[str, object]:
        """Return gauges and counters of every tier, hit rate, misses and drops by reason, and measured rates.

        A tier that does not answer within `config.deadline_seconds` is empty, and named under "failed"; with the first
        local tier, "counters" are then those of this process alone.
        """
        if self._calls.parts.closed:
            raise ClosedError("the cache is closed")
        tiers, failed = dict[str, dict[str, int]](), dict[str, str]()
        for tier in self._storeys.all:
            try:
                tiers[tier.name] = dict(tier.stats())
            except Exception as trouble:  # noqa: BLE001  # a border: the other tiers are shown all the same
                tiers[tier.name], failed[tier.name] = {}, f"{type(trouble).__name__}: {trouble}"
        counters = self._calls.parts.tally.counters(0.0 if failed else self.config.deadline_seconds)
        recorder = self._calls.parts.recorder
        return {
            "name": self.name,
            "tiers": tiers,
            "failed": failed,
            "counters": counters,
            "hit_rate": counters["hit_tokens"] / max(1, counters["asked_tokens"]),
            "misses": _by_reason(counters, "miss_", MISSES),
            "drops": _by_reason(counters, "drop_", DROPS),
            "waiting_chunks": self._calls.parts.descents.waiting,
            "staging_buffers": self._calls.parts.tools.staging.out + self._calls.parts.storing.out,
            "pinned_bytes": self._storeys.host.slab.pinned_bytes if self._storeys.host is not None else 0,
            "rates": self._calls.parts.tools.worth.rates(),
            **({"recording": recorder.stats()} if recorder is not None else {}),
        }

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until the lower tiers have what was queued for them; False if `timeout` seconds were not enough."""
        until = time.monotonic() + timeout
        flushed = self._calls.parts.descents.flush(timeout)
        for tier in self._storeys.lower:
            wait = getattr(tier, "flush", None)
            flushed = (wait is None or bool(wait(max(0.0, until - time.monotonic())))) and flushed
        return flushed

    def close(self, timeout: float = _CLOSE_SECONDS) -> bool:
        """Write down what is queued, as far as `timeout` seconds allow, and end; False if some was left. Idempotent."""
        registry.forget(self)
        self._finalizer.detach()
        return self._calls.parts.close(timeout)

    def __enter__(self) -> Cache:
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the tiers, from the top down."""
        return self._storeys.names

    @property
    def slots(self) -> HostSlots | None:
        """The slots of the host tier, for engines that copy into and out of them themselves; None without one."""
        return self._slots

    @property
    def _storeys(self) -> Storeys:
        return self._calls.parts.storeys


def _configured(config: Config | None, layout: KVLayout, overrides: Mapping[str, object]) -> Config:
    """The options of a cache over `layout`. Raises ConfigError, ValueError."""
    if not isinstance(layout, KVLayout):
        raise ValueError(f"layout is {layout!r}: build a KVLayout, such as KVLayout.dense(...)")
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
            f"chunk_tokens = {config.chunk_tokens}{told}, but the layout has chunks of {layout.chunk_tokens} tokens: "
            "build the layout with that number, or leave it out"
        )
    return config


def _completed(namespace: Namespace, layout: KVLayout, config: Config) -> Namespace:
    """The namespace with the layout in it, for two layouts never share a key, and with the machines' weights epoch."""
    if not isinstance(namespace, Namespace):
        raise ValueError(f"namespace is {namespace!r}: build one, such as Namespace(model='my-model')")
    if namespace.layout not in ("", layout.fingerprint):
        raise ValueError(
            f"the namespace is of layout {namespace.layout!r}, not {layout.fingerprint!r}: leave it out"
        )
    epochs = {namespace.weights_epoch, config.weights_epoch} - {0}
    if len(epochs) > 1:
        raise ValueError(
            f"weights_epoch is {namespace.weights_epoch} in the namespace, {config.weights_epoch} in the "
            "configuration: leave one of them out"
        )
    return namespace.with_(layout=layout.fingerprint, weights_epoch=max(epochs, default=0))


def _by_reason(counters: Mapping[str, int], prefix: str, reasons: Sequence[str]) -> dict[str, int]:
    return {reason: counters[prefix + reason] for reason in reasons if counters.get(prefix + reason)}
