"""Where the cache counts: in the counters that all processes of its first local tier share."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from pagoda.base.clock import Clock
from pagoda.base.errors import StoreError
from pagoda.base.fork import per_process
from pagoda.base.metrics import (
    COUNTERS,
    LOAD_BUCKETS,
    LOAD_SECONDS,
    TIER_KINDS,
    RateLimitedLog,
    Reason,
)
from pagoda.keys import Namespace
from pagoda.ledger import Ledger, admin
from pagoda.ledger.request_meters import (
    NO_TENANT,
    OTHER,
    Meter,
    Pair,
    RequestMeters,
    TokenLoad,
    model_label,
)

_KNOWN = frozenset(COUNTERS)
# the counter of each bucket, by its number
_BUCKETS = {kind: tuple(LOAD_BUCKETS[kind].values()) for kind in TIER_KINDS}
_HIT_TOKENS = {kind: f"hit_tokens_{kind}" for kind in TIER_KINDS}
# the number of namespaces whose model and tenant are remembered
_MOST_NAMED = 8192
_TENANT_DIGITS = 12
_MICROSECONDS = {kind: f"load_microseconds_{kind}" for kind in TIER_KINDS}


class CacheCounters:
    """Count by name, and write rate-limited log lines. Thread-safe; never raises, never waits for
    another process.
    """

    def __init__(
        self, ledger: Ledger | None, clock: Clock, engine: Namespace
    ) -> None:
        """Count in that ledger, or in this process alone.

        Args:
            ledger: of the cache's first local tier; None: there is none.
            clock: for the log lines.
            engine: the namespace of the cache, whose model and tenant are those of its prefills.
        """
        self._approximate = bool(engine.approximate)
        self._ledger = ledger
        self._engine = engine
        # by root of a namespace
        self._pairs: dict[bytes, Pair] = {}
        self._unknown = (model_label(engine.model), OTHER)
        # whether this process reports loads: with several ranks, one does
        self.meters_loads = True
        self._own_meters = RequestMeters()
        # used if there is no local tier to share
        self._own: Counter[str] = Counter()
        self._log_lines = RateLimitedLog(clock)
        self._me = object()  # other caches of this process share the ledger
        self._waited_for = set[str]()  # tiers for which chunks waited

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    def name(self, namespace: Namespace) -> Pair:
        """Return the model and the tenant that a namespace is counted for; remember them for
        requests that come with its root alone.

        The tenant is the start of the digest of the salt that is shown with namespaces; the salt
        itself is a secret.
        """
        pair = self._pairs.get(namespace.root)
        if pair is None:
            tenant = namespace.fields()["salt"][:_TENANT_DIGITS] or NO_TENANT
            pair = (model_label(namespace.model), tenant)
            if len(self._pairs) >= _MOST_NAMED:
                self._pairs.clear()
            self._pairs[namespace.root] = pair
        return pair

    def add(
        self,
        counts: Mapping[str, int],
        pair: Pair | None = None,
        load: TokenLoad | None = None,
    ) -> None:
        """Add to some counters; ignore unknown names. `pair`: the model and the tenant whose meter
        counts them, and what was loaded, too.
        """
        known = {
            name: number
            for name, number in counts.items()
            if number and name in _KNOWN
        }
        ledger = self._ledger
        if ledger is None:
            with self._lock:
                self._own.update(known)
                if pair is not None:
                    self._own_meters.add(pair, known, load)
        elif known or load is not None:
            ledger.count(known, pair, load)

    def count_prefill(self, tokens: int, microseconds: int) -> None:
        """Count what the engine computed, and how long that took."""
        counts = {
            "prefill_tokens": tokens,
            "prefill_microseconds": microseconds,
        }
        self.add(counts, self.name(self._engine))

    def count_load(
        self,
        namespace: Namespace | bytes,
        load: TokenLoad,
        more: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Count what a call that is no counted request loaded into the engine's memory.

        Args:
            namespace: whose chunks they were; its root if it is known by name.
            load: counted for the namespace's model and tenant, unless another rank does that.
            more: counters to add in any case.
        """
        if self.meters_loads:
            self.add(more, self._pair(namespace), load)
        else:
            self.add(more)

    def _pair(self, namespace: Namespace | bytes) -> Pair:
        if isinstance(namespace, Namespace):
            return self.name(namespace)
        return self._pairs.get(namespace, self._unknown)

    def set_waiting(self, tier: str, chunks: int) -> None:
        """Say how many chunks of this process wait to be written to a tier."""
        ledger = self._ledger
        if ledger is not None:
            self._waited_for.add(tier)
            part = (self._me, tier)
            ledger.session.set_gauge("waiting_chunks", chunks, part)

    def count_request(
        self,
        num_tokens: int,
        by_tier: Mapping[str, int],
        reason: Reason | None,
        namespace: Namespace | bytes,
        *,
        miss_counted: bool = False,
        more: Mapping[str, int] = MappingProxyType({}),
        load: TokenLoad | None = None,
    ) -> None:
        """Count one request for that many tokens and its answer, also for its model and its tenant,
        and remember it among the last requests.

        `reason`: why it got no more. `miss_counted`: a tier has already counted the miss.
        `namespace`: its root will do if it is known by name; empty if it is not known. Of a request
        that may not read (`NOT_ASKED`) only the reason is counted, so that it is in no rate.
        `more`: further counters to add, such as those of the request's loads. `load`: what the
        request loaded into the engine's memory.
        """
        root = namespace if isinstance(namespace, bytes) else namespace.root
        pair = self._pairs.get(root) or self._pair(namespace)
        hit_tokens = sum(by_tier.values())
        counts = {"lookups": 1, "asked_tokens": num_tokens}
        if more:
            counts.update(more)
        if reason is Reason.NOT_ASKED:
            return self._count_unasked(num_tokens, root)
        if hit_tokens:
            counts["hits"] = 1
            counts["hit_tokens"] = hit_tokens
            if self._approximate:
                counts["approximate_hit_tokens"] = hit_tokens
            for tier, tokens in by_tier.items():
                name = _HIT_TOKENS.get(tier, "hit_tokens_remote")
                counts[name] = counts.get(name, 0) + tokens
        if (
            reason is not None
            and reason is not Reason.LEDGER_BUSY
            and not miss_counted
        ):
            counts[f"miss_{reason}"] = 1
        if not self.meters_loads:
            load = None
        if (ledger := self._ledger) is None:
            self.add(counts, pair, load)
        else:
            ledger.count(counts, pair, load)
            pid = ledger.session.pid
            ledger.requests.append(counts, root, reason or "", pid)
        return None

    def _count_unasked(self, num_tokens: int, namespace: bytes) -> None:
        self.add({f"miss_{Reason.NOT_ASKED}": 1})
        if (ledger := self._ledger) is not None:
            ledger.requests.append(
                {"asked_tokens": num_tokens}, namespace, Reason.NOT_ASKED
            )

    @staticmethod
    def load_counts(
        chunks: int, nbytes: int, seconds: Mapping[str, float]
    ) -> dict[str, int]:
        """Return the counters of one call: the bytes copied out of host slots, and the load time of
        each tier.
        """
        counts = {"loaded_chunks": chunks, "loaded_bytes": nbytes}
        for tier, spent in seconds.items():
            kind = tier if tier in TIER_KINDS else "remote"
            bucket = _BUCKETS[kind][bisect_left(LOAD_SECONDS, spent)]
            total = _MICROSECONDS[kind]
            counts[bucket] = counts.get(bucket, 0) + 1
            counts[total] = counts.get(total, 0) + int(spent * 1e6)
        return counts

    def close(self) -> None:
        """Count in this process only from now on: another member may soon own the row in the shared
        counters.
        """
        ledger = self._ledger
        if ledger is not None:
            for tier in list(self._waited_for):
                ledger.session.set_gauge("waiting_chunks", 0, (self._me, tier))
        self._ledger = None

    def read(self, deadline_seconds: float) -> dict[str, int]:
        """Return all counters of all processes that share the tier; only this process's if that
        takes too long.
        """
        if (ledger := self._ledger) is not None:
            try:
                return admin.counters(ledger, deadline_seconds)
            except StoreError:
                return ledger.session.own_counters()
        with self._lock:
            return {name: self._own[name] for name in COUNTERS}

    def meters(self) -> list[Meter]:
        """Return what all processes that share the tier counted by model and tenant."""
        if (ledger := self._ledger) is not None:
            return ledger.session.meters()
        with self._lock:
            return self._own_meters.own()

    def warn(
        self,
        logger: logging.Logger,
        reason: Reason,
        message: str,
        error: Exception | None = None,
    ) -> None:
        """Log an error, one line per reason in a while; its traceback at debug level."""
        self._log_lines.warn(logger, reason, message)
        if error is not None:
            logger.debug("%s", reason.value, exc_info=error)
