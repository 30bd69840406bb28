"""Why a chunk was not served: the reason of a miss, found in the tiers. Called by lookups and
retrieves.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import CancelledError
from typing import NamedTuple, TypeAlias

from pagoda.base.clock import Clock, Deadline
from pagoda.base.errors import StoreError
from pagoda.base.metrics import Reason
from pagoda.cache.call import CacheRequest, KeyScheme
from pagoda.cache.executor import CallExecutor
from pagoda.cache.late_tier import LateTier
from pagoda.cache.tier_stack import TierStack
from pagoda.keys import Namespace
from pagoda.ledger import Ledger, admin
from pagoda.tiers import Tier
from pagoda.tiers.remote.remote_tier import RemoteTier

# reasons of a tier that could not be asked: then no better reason can be found
UNANSWERED = frozenset(
    {Reason.LEDGER_BUSY, Reason.DEADLINE, Reason.IO_ERROR, Reason.CLOSED}
)

# reasons that a tier may remember for a key, the most specific first
_MOST_SPECIFIC = (
    Reason.BUSY,
    Reason.FAILED_CHECK,
    Reason.CLEARED,
    Reason.REMOVED,
    Reason.EVICTED,
    Reason.REBUILDING,
)
_SEEN_BY_HOST = {
    Reason.BUSY: "another call is storing it",
    Reason.FAILED_CHECK: "the tables of the host tier disagree",
    Reason.OTHER_NAMESPACE: "the key belongs to a chunk of another namespace",
}
# the longest time to compare namespaces within an engine's call
_BUDGET_NS = 1_000_000
_THOROUGH_NS = 1_000_000_000
_FRESH_NS = 10_000_000_000  # how long a list of namespaces is used
_LIST_SECONDS = 0.05  # how long an engine's call waits for a new one


class Explanation(NamedTuple):
    """A reason, and a few words for people."""

    reason: Reason
    detail: str = ""


# a namespace that has, or had, chunks in a tier: tier name, ledger, root, labels
_KnownNamespace: TypeAlias = tuple[str, Ledger, bytes, dict[str, str]]


def unanswered(tier: Tier) -> Explanation:
    """Explain why a tier did not say whether it has a chunk: it refused, or did not answer in
    time.
    """
    refusal = tier.refusal if isinstance(tier, RemoteTier) else None
    if refusal is not None:
        return Explanation(refusal[0], f"{tier.name} {refusal[1]}")
    return Explanation(
        Reason.DEADLINE,
        f"{tier.name} did not answer in time whether it has the chunk",
    )


class MissExplainer:
    """Finds the reason of a miss in the tiers. Thread-safe; reads only, and remembers the list of
    namespaces.
    """

    def __init__(
        self,
        tiers: TierStack,
        scheme: KeyScheme,
        chunk_tokens: int,
        clock: Clock,
        executor: CallExecutor,
    ) -> None:
        self.tiers = tiers
        self._scheme = scheme
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._executor = executor
        self._namespaces: list[_KnownNamespace] = []
        self._listed_ns = -_FRESH_NS
        self.late: LateTier | None = None  # a tier that was left out at the start

    def explain(
        self,
        request: CacheRequest,
        index: int,
        hint: Reason | None,
        thorough: bool = False,
    ) -> Explanation:
        """Explain why no tier of a request has request.keys[index]; `hint` is the reason that the
        host tier gave.
        """
        if hint is not None and hint in UNANSWERED:
            return Explanation(hint)
        if hint is not None and hint in _SEEN_BY_HOST:
            return Explanation(hint, _SEEN_BY_HOST[hint])
        key = request.keys[index]
        chosen = request.tiers
        deadline = request.deadline
        resting = [tier for tier in chosen.lower if tier.resting]
        if resting:
            refusal = (
                resting[0].refusal if isinstance(resting[0], RemoteTier) else None
            )
            why = "" if refusal is None else f" (it {refusal[1]})"
            detail = f"{resting[0].name} failed repeatedly and is skipped for a while{why}"
            return Explanation(Reason.TIER_SKIPPED, detail)
        root = request.namespace.root
        remotes = [tier for tier in chosen.lower if isinstance(tier, RemoteTier)]
        silent = [tier for tier in remotes if not tier.knows(key, root)]
        if silent:
            return unanswered(silent[0])
        remembered = _remembered(key, chosen)
        if remembered.reason is not Reason.ABSENT:
            return remembered
        skipped = [
            tier for tier in self.tiers.all if tier.name not in chosen.names
        ]
        # an engine's call must not send anything over a network to a tier that it skips
        if not thorough:
            skipped = [tier for tier in skipped if not tier.is_shared]
        others = [
            tier.name
            for tier in skipped
            if tier.contains(key, deadline_seconds=deadline.remaining())
        ]
        if others:
            detail = (
                f"{others[0]} has the chunk, but this call does not use that tier"
            )
            return Explanation(Reason.TIER_SKIPPED, detail)
        elsewhere = None
        if index == 0 and request.first == 0 and request.tokens is not None:
            elsewhere = self._in_other_namespace(request, thorough)
        if elsewhere is not None:
            return elsewhere
        if self.late is not None and not self.late.joined:
            detail = (
                f"{self.late.name} was left out at the start, and may have the chunk: "
                f"{self.late.reason}"
            )
            return Explanation(Reason.TIER_SKIPPED, detail)
        return remembered

    def _in_other_namespace(
        self, request: CacheRequest, thorough: bool
    ) -> Explanation | None:
        """Find the same first chunk under another namespace, and name the fields in which that one
        differs.
        """
        assert request.tokens is not None
        deadline = request.deadline
        head = request.tokens[: self._chunk_tokens]
        items = [
            item for item in request.items if item.start < self._chunk_tokens
        ]
        known = (
            self._list(deadline.remaining())
            if thorough
            else self._recent(deadline)
        )
        until = self._clock.monotonic_ns() + (
            _THOROUGH_NS if thorough else _BUDGET_NS
        )
        for tier, ledger, root, labels in known:
            if deadline.passed or self._clock.monotonic_ns() > until:
                return None
            if root != request.namespace.root:
                key = self._scheme(head, root, self._chunk_tokens, items)[0]
                seconds = deadline.remaining()
                if len(
                    ledger.match_prefix(
                        [key], touch=False, deadline_seconds=seconds
                    ).slots
                ):
                    differing = Namespace.differing(
                        request.namespace.fields(), labels
                    )
                    fields = ", ".join(differing) or "format"
                    return Explanation(
                        Reason.OTHER_NAMESPACE,
                        f"{tier} has it under another {fields}",
                    )
        return None

    def _recent(self, deadline: Deadline) -> list[_KnownNamespace]:
        """Return the namespaces of the local tiers; read them again if the list is old and that
        takes only a moment.
        """
        if self._clock.monotonic_ns() - self._listed_ns > _FRESH_NS:
            self._listed_ns = self._clock.monotonic_ns()
            seconds = min(_LIST_SECONDS, deadline.remaining())
            with contextlib.suppress(TimeoutError, CancelledError, StoreError):
                return self._executor.run_in_background(
                    lambda: self._list(seconds)
                ).result(seconds)
        return self._namespaces

    def _list(self, seconds: float) -> list[_KnownNamespace]:
        self._namespaces = [
            (tier, ledger, root, row.fields)
            for tier, ledger in self.tiers.ledgers()
            for root, row in admin.list_namespaces(
                ledger, deadline_seconds=seconds
            ).items()
        ]
        return self._namespaces


def _remembered(key: bytes, chosen: TierStack) -> Explanation:
    """Return the most specific of the reasons that the local tiers remember for a key."""
    found: dict[Reason, str] = {}
    for tier, ledger in chosen.ledgers():
        miss = ledger.explain_miss(key)
        if miss.reason not in found:
            found[miss.reason] = _when(miss.reason, miss.age_seconds, tier)
    for reason in _MOST_SPECIFIC:
        if reason in found:
            return Explanation(reason, found[reason])
    # NOT_ADMITTED is a drop, not a miss, and was counted where it happened.
    return Explanation(
        Reason.ABSENT,
        found.get(Reason.NOT_ADMITTED, "never stored here, or forgotten since"),
    )


def _when(reason: Reason, age_seconds: float | None, tier: str) -> str:
    ago = "" if age_seconds is None else f" {age_seconds:.0f} s ago"
    return f"{reason.value.replace('_', ' ')}{ago} ({tier})"
