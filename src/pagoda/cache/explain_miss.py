"""Why a chunk was not served."""

from __future__ import annotations

import contextlib
from concurrent.futures import CancelledError
from typing import NamedTuple

from pagoda.cache.deadline import Deadline
from pagoda.cache.executor import Workers
from pagoda.cache.lookup_call import UNASKED
from pagoda.cache.request import Ask, KeyScheme
from pagoda.cache.tier_stack import Storeys
from pagoda.clock import Clock
from pagoda.errors import StoreError
from pagoda.keys import Namespace
from pagoda.ledger import Ledger
from pagoda.metrics import Reason
from pagoda.tiers.remote.remote_tier import RemoteTier

__all__ = ["Answer", "Why"]

# what a tier remembers of a key, the most telling first
_TELLING = (
    Reason.BUSY,
    Reason.FAILED_CHECK,
    Reason.CLEARED,
    Reason.REMOVED,
    Reason.EVICTED,
    Reason.REBUILDING,
)
_SEEN = {
    Reason.BUSY: "somebody else is storing it",
    Reason.FAILED_CHECK: "the tables of the host tier disagree",
    Reason.OTHER_NAMESPACE: "the key is that of a chunk of another namespace",
}
_BUDGET_NS = 1_000_000  # for comparing namespaces within an engine's call
_THOROUGH_NS = 1_000_000_000
_FRESH_NS = 10_000_000_000  # for how long a list of namespaces is good enough
_LIST_SECONDS = 0.05  # how long an engine's call waits for a new one


class Answer(NamedTuple):
    """A reason, and a few words for people."""

    reason: Reason
    detail: str = ""


class _Known(NamedTuple):
    """A namespace that has, or had, chunks in a tier."""

    tier: str
    ledger: Ledger
    root: bytes
    fields: dict[str, str]


class Why:
    """Finds the reason of a miss in the tiers. Thread-safe; reads only, and remembers which namespaces there are."""

    def __init__(
        self, storeys: Storeys, scheme: KeyScheme, chunk_tokens: int, clock: Clock, workers: Workers
    ) -> None:
        self._storeys = storeys
        self._scheme = scheme
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._workers = workers
        self._known: list[_Known] = []
        self._listed_ns = -_FRESH_NS

    def missing(
        self,
        ask: Ask,
        index: int,
        hint: Reason | None,
        chosen: Storeys,
        deadline: Deadline,
        thorough: bool = False,
    ) -> Answer:
        """Why ask.keys[index] is in none of the `chosen` tiers; `hint` is what the host tier said of it."""
        if hint is not None and hint in UNASKED:
            return Answer(hint)
        if hint is not None and hint in _SEEN:
            return Answer(hint, _SEEN[hint])
        key = ask.keys[index]
        resting = [tier.name for tier in chosen.lower if getattr(tier, "resting", False)]
        if resting:
            return Answer(Reason.TIER_SKIPPED, f"{resting[0]} kept failing and is left out for a while")
        silent = [
            t.name for t in chosen.lower if isinstance(t, RemoteTier) and not t.knows(key, ask.namespace.root)
        ]
        if silent:
            return Answer(Reason.DEADLINE, f"{silent[0]} did not say in time whether it has it")
        answer = _remembered(key, chosen)
        if answer.reason is not Reason.ABSENT:
            return answer
        unasked = [tier for tier in self._storeys.all if tier.name not in chosen.names]
        if not thorough:  # an engine's call asks over no network what it was told not to ask
            unasked = [tier for tier in unasked if not isinstance(tier, RemoteTier)]
        others = [tier.name for tier in unasked if tier.contains(key, deadline_seconds=deadline.remaining())]
        if others:
            return Answer(Reason.TIER_SKIPPED, f"{others[0]} has it and was not asked")
        if index == 0 and ask.first == 0 and ask.tokens is not None:
            return self._elsewhere(ask, deadline, thorough) or answer
        return answer

    def _elsewhere(self, ask: Ask, deadline: Deadline, thorough: bool) -> Answer | None:
        """The same first chunk under another namespace of this store, and the fields in which that one differs."""
        assert ask.tokens is not None
        mine = ask.namespace.fields()
        head = ask.tokens[: self._chunk_tokens]
        items = [item for item in ask.items if item.start < self._chunk_tokens]
        known = self._list(deadline.remaining()) if thorough else self._recent(deadline)
        until = self._clock.monotonic_ns() + (_THOROUGH_NS if thorough else _BUDGET_NS)
        for tier, ledger, root, labels in known:
            if deadline.passed or self._clock.monotonic_ns() > until:
                return None
            if root != ask.namespace.root:
                key = self._scheme(head, root, self._chunk_tokens, items)[0]
                seconds = deadline.remaining()
                if len(ledger.match([key], touch=False, deadline_seconds=seconds).slots):
                    fields = ", ".join(Namespace.differing(mine, labels)) or "format"
                    return Answer(Reason.OTHER_NAMESPACE, f"{tier} has it under another {fields}")
        return None

    def _recent(self, deadline: Deadline) -> list[_Known]:
        """The namespaces of the local tiers, not older than a while if they can be had in a moment."""
        if self._clock.monotonic_ns() - self._listed_ns > _FRESH_NS:
            self._listed_ns = self._clock.monotonic_ns()
            seconds = min(_LIST_SECONDS, deadline.remaining())
            with contextlib.suppress(TimeoutError, CancelledError, StoreError):
                return self._workers.call(lambda: self._list(seconds)).result(seconds)
        return self._known

    def _list(self, seconds: float) -> list[_Known]:
        self._known = [
            _Known(tier, ledger, root, row.fields)
            for tier, ledger in self._storeys.ledgers()
            for root, row in ledger.namespaces(deadline_seconds=seconds).items()
        ]
        return self._known


def _remembered(key: bytes, chosen: Storeys) -> Answer:
    """The most telling of what the local tiers remember of a key."""
    found: dict[Reason, str] = {}
    for tier, ledger in chosen.ledgers():
        miss = ledger.why(key)
        if miss.reason not in found:
            found[miss.reason] = _when(miss.reason, miss.age_seconds, tier)
    for reason in _TELLING:
        if reason in found:
            return Answer(reason, found[reason])
    return Answer(Reason.ABSENT, "never stored here, or so long ago that it is forgotten")


def _when(reason: Reason, age_seconds: float | None, tier: str) -> str:
    ago = "" if age_seconds is None else f" {age_seconds:.0f} s ago"
    return f"{reason.value.replace('_', ' ')}{ago} ({tier})"
