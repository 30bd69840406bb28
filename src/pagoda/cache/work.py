"""What the calls of an engine do, inside the border."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from pagoda.cache.call import Watched
from pagoda.cache.deadline import Deadline
from pagoda.cache.explain_miss import Answer
from pagoda.cache.hit import Hit, Stored, hit_of
from pagoda.cache.lookup_call import look
from pagoda.cache.request import Ask
from pagoda.cache.resources import Parts
from pagoda.cache.retrieve_call import Run
from pagoda.cache.store_call import Store
from pagoda.cache.tier_stack import Storeys
from pagoda.config import Config
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.metrics import Reason

__all__ = ["Work", "hit_without"]

_MOST_LABELLED = 4096


class Work:
    """Does what is asked, with the parts of one cache. Thread-safe."""

    def __init__(self, parts: Parts, config: Config, layout: KVLayout) -> None:
        self._parts = parts
        self._config = config
        self._layout = layout
        self._labelled: set[bytes] = set()

    def lookup(self, storeys: Storeys, ask: Ask, deadline: Deadline, counted: bool) -> Hit:
        """What a retrieve would be expected to serve; leases what the host tier has of it."""
        hit = self._gate(storeys, ask, deadline)
        return self._counted(ask, _hit(ask, {}, _short(ask)) if hit is None else hit, counted)

    def _gate(self, storeys: Storeys, ask: Ask, deadline: Deadline) -> Hit | None:
        """What a retrieve would be expected to serve."""
        if self._parts.closed:
            return _hit(ask, {}, Answer(Reason.CLOSED, "the cache is closed"))
        if not ask.keys:
            return None
        stamp = storeys.host.ledger.stamp() if storeys.host is not None else None
        seen = look(storeys, ask, deadline, stamp=stamp)
        tokens = {tier: chunks * ask.chunk_tokens for tier, chunks in seen.by_tier.items()}
        worthless = [
            tier
            for tier, chunks in seen.by_tier.items()
            if chunks and not self._parts.tools.worth.beats(tier)
        ]
        if (
            worthless
        ):  # runs of tiers alternate at most in theory: what lies above the first such tier is served
            names = list(tokens)
            tokens = {tier: n for tier, n in tokens.items() if names.index(tier) < names.index(worthless[0])}
        total = sum(tokens.values())
        if total and total < self._config.min_hit_tokens:
            return _hit(
                ask, {}, Answer(Reason.BELOW_MINIMUM, f"{total} of {self._config.min_hit_tokens} tokens")
            )
        if worthless:
            return _hit(ask, tokens, _not_worth_it(worthless[0]))
        if seen.chunks == len(ask.keys):
            return _hit(ask, tokens, None)
        return _hit(ask, tokens, self._parts.why.missing(ask, seen.chunks, seen.reason, storeys, deadline))

    def retrieve(
        self, storeys: Storeys, ask: Ask, kv: Watched | None, deadline: Deadline, counted: bool
    ) -> Hit:
        """Bring chunks up into `kv`, or without it into the host tier."""
        refused = self._refused(storeys, ask, kv, deadline)
        if refused is not None:
            return self._counted(ask, refused, counted)
        if kv is not None:
            _use_device(storeys, kv)
        with _copying(storeys):
            run = Run(storeys, ask, kv, deadline, self._parts.tools).go()
        tokens = {tier: chunks * ask.chunk_tokens for tier, chunks in run.by_tier.items()}
        answer: Answer | None = None
        if run.reason is Reason.ABSENT:
            answer = self._parts.why.missing(ask, run.done, run.hint, storeys, deadline)
        elif run.reason is not None:
            answer = Answer(run.reason, run.detail)
        host = storeys.host
        if host is not None and kv is not None:
            chunks = run.by_tier[host.name]
            self._parts.tally.add(
                {"loaded_chunks": chunks, "loaded_bytes": chunks * self._layout.chunk_bytes}
            )
        return self._counted(ask, _hit(ask, tokens, answer), counted, run.told)

    def _refused(self, storeys: Storeys, ask: Ask, kv: Watched | None, deadline: Deadline) -> Hit | None:
        """The answer of a retrieve that need not begin, None if it is to go on."""
        if not ask.keys:
            return _hit(ask, {}, _short(ask))
        if self._parts.closed:
            return _hit(ask, {}, Answer(Reason.CLOSED, "the cache is closed"))
        if kv is None and storeys.host is None:
            return _hit(ask, {}, Answer(Reason.TIER_SKIPPED, "there is no host tier to prefetch into"))
        host = storeys.host
        if host is not None and kv is not None and not self._parts.tools.worth.beats(host.name):
            return _hit(ask, {}, _not_worth_it(host.name))
        if self._config.min_hit_tokens > len(ask.keys) * ask.chunk_tokens:
            return _hit(
                ask, {}, Answer(Reason.BELOW_MINIMUM, f"at least {self._config.min_hit_tokens} tokens")
            )
        if self._config.min_hit_tokens:
            expected = self._gate(storeys, ask, deadline)
            if expected is not None and expected.reason is Reason.BELOW_MINIMUM:
                return expected
        return None

    def store(self, storeys: Storeys, ask: Ask, kv: Watched, deadline: Deadline) -> Stored:
        """Bring chunks down from `kv`."""
        if self._parts.closed:
            return Stored(0, 0, 0, len(ask.keys), Reason.CLOSED)
        if not ask.keys:
            return Stored(0, 0, 0, 0)
        self.register(ask.namespace)
        _use_device(storeys, kv)
        overflows = storeys.host is None or self._config.write_policy != "selective"
        store = Store(
            storeys, ask, kv, deadline, self._parts.descents, self._parts.storing, overflows=overflows
        )
        with _copying(storeys):
            stored = store.go()
        self._parts.tally.count("stored_bytes", store.on_host * self._layout.chunk_bytes)
        return stored

    def explain(self, storeys: Storeys, ask: Ask, deadline: Deadline) -> Hit:
        """What a lookup would say, found out thoroughly and without touching anything."""
        if not ask.keys:
            return _hit(ask, {}, _short(ask))
        seen = look(storeys, ask, deadline, stamp=None, touch=False)
        tokens = {tier: chunks * ask.chunk_tokens for tier, chunks in seen.by_tier.items()}
        if seen.chunks == len(ask.keys):
            return _hit(ask, tokens, None)
        return _hit(
            ask,
            tokens,
            self._parts.why.missing(ask, seen.chunks, seen.reason, storeys, deadline, thorough=True),
        )

    def register(self, namespace: Namespace, wait: bool = False) -> None:
        """Make a namespace known with its labels, with the next transaction; if told to `wait`, with one of its own."""
        if namespace.root in self._labelled:
            return
        if len(self._labelled) >= _MOST_LABELLED:
            self._labelled.clear()
        self._labelled.add(namespace.root)
        self._parts.storeys.register(namespace)
        if wait:
            for _, ledger in self._parts.storeys.ledgers():
                ledger.write_labels()

    def _counted(self, ask: Ask, hit: Hit, counted: bool, told: bool = False) -> Hit:
        if counted:
            reason = None if told else hit.reason
            self._parts.tally.asked(ask.length_tokens - ask.start_tokens, hit.by_tier, reason)
        return hit


def _copying(storeys: Storeys) -> AbstractContextManager[None]:
    """Within it a close of the cache leaves the host slots that are copied into to this process."""
    return nullcontext() if storeys.host is None else storeys.host.copying()


def _use_device(storeys: Storeys, kv: Watched) -> None:
    """Have the host tier registered with the GPU that `kv` lies on, if it does, before the first copy."""
    if kv.device_index is not None and storeys.host is not None:
        storeys.host.use_device(kv.device_index)


def _hit(ask: Ask, by_tier: dict[str, int], answer: Answer | None) -> Hit:
    reason, detail = answer or (None, "")
    return hit_of(ask.start_tokens, ask.length_tokens, by_tier, reason, detail)


def hit_without(ask: Ask, reason: Reason, detail: str) -> Hit:
    """Return the hit of nothing at all."""
    return _hit(ask, {}, Answer(reason, detail))


def _short(ask: Ask) -> Answer | None:
    """The reason of a miss where there is no whole chunk to ask for."""
    if ask.length_tokens >= ask.chunk_tokens:
        return None
    return Answer(Reason.SHORT_PROMPT, f"{ask.length_tokens} tokens, a chunk has {ask.chunk_tokens}")


def _not_worth_it(tier: str) -> Answer:
    return Answer(Reason.NOT_WORTH_IT, f"computing is faster than reading from {tier}")
