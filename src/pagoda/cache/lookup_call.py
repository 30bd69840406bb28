"""Look-ups: which tiers have the leading chunks of a prompt. No KV bytes move.

`Operations` calls `run_lookup` and `run_explain`; a retrieve calls `expected_hit` for its minimum. Why not more is
found by the `MissExplainer`.
"""

from __future__ import annotations

from typing import NamedTuple

from pagoda.cache.deadline import Deadline
from pagoda.cache.explain_miss import UNANSWERED, Explanation
from pagoda.cache.hit import Hit, hit_of
from pagoda.cache.request import CacheRequest
from pagoda.cache.resources import Resources
from pagoda.cache.tier_stack import TierStack
from pagoda.metrics import Reason

__all__ = [
    "LEASE_SECONDS",
    "TiersMatch",
    "count_hit",
    "expected_hit",
    "hit_for",
    "match_prefix",
    "not_worth_loading",
    "run_explain",
    "run_lookup",
    "too_short",
]

LEASE_SECONDS = 5.0  # how long a hit that is not being loaded yet is kept from eviction


class TiersMatch(NamedTuple):
    """The leading run and where it is: `by_tier` in chunks, and the reason for the first key that is missing."""

    chunks: int
    by_tier: dict[str, int]
    reason: Reason | None


def run_lookup(
    resources: Resources, tiers: TierStack, request: CacheRequest, deadline: Deadline, counted: bool
) -> Hit:
    """Return what a retrieve is expected to serve; lease the part of it that the host tier has."""
    return count_hit(resources, request, expected_hit(resources, tiers, request, deadline), counted)


def run_explain(resources: Resources, tiers: TierStack, request: CacheRequest, deadline: Deadline) -> Hit:
    """Return what a look-up would, with the reason found thoroughly; change nothing."""
    if not request.keys:
        return hit_for(request, {}, too_short(request))
    match = match_prefix(tiers, request, deadline, stamp=None, touch=False)
    tokens = {tier: chunks * request.chunk_tokens for tier, chunks in match.by_tier.items()}
    if match.chunks == len(request.keys):
        return hit_for(request, tokens, None)
    explain = resources.explainer.explain
    return hit_for(
        request, tokens, explain(request, match.chunks, match.reason, tiers, deadline, thorough=True)
    )


def expected_hit(resources: Resources, tiers: TierStack, request: CacheRequest, deadline: Deadline) -> Hit:
    """Return what a retrieve is expected to serve, without counting it."""
    if resources.closed:
        return hit_for(request, {}, Explanation(Reason.CLOSED, "the cache is closed"))
    if not request.keys:
        return hit_for(request, {}, too_short(request))
    stamp = tiers.host.ledger.stamp() if tiers.host is not None else None
    match = match_prefix(tiers, request, deadline, stamp=stamp)
    tokens = {tier: chunks * request.chunk_tokens for tier, chunks in match.by_tier.items()}
    is_worth_loading = resources.load_cost.is_worth_loading
    slow = [tier for tier, chunks in match.by_tier.items() if chunks and not is_worth_loading(tier)]
    if slow:  # runs of tiers alternate at most in theory: what is above the first slow tier is served
        names = list(tokens)
        tokens = {tier: n for tier, n in tokens.items() if names.index(tier) < names.index(slow[0])}
    total, minimum = sum(tokens.values()), resources.config.min_hit_tokens
    if total and total < minimum:
        return hit_for(request, {}, Explanation(Reason.BELOW_MINIMUM, f"{total} of {minimum} tokens"))
    if slow:
        return hit_for(request, tokens, not_worth_loading(slow[0]))
    if match.chunks == len(request.keys):
        return hit_for(request, tokens, None)
    explain = resources.explainer.explain
    return hit_for(request, tokens, explain(request, match.chunks, match.reason, tiers, deadline))


def match_prefix(
    tiers: TierStack, request: CacheRequest, deadline: Deadline, *, stamp: int | None, touch: bool = True
) -> TiersMatch:
    """Find the leading run through all tiers; lease what the host tier has of it, unless `touch` is False."""
    at, by_tier, reason = 0, dict.fromkeys(tiers.names, 0), None
    lacking: set[str] = set()  # tiers known not to have keys[at]
    while at < len(request.keys) and len(lacking) < len(tiers.all):
        for tier in tiers.all:
            if tier.name in lacking:
                continue
            start = request.first + at
            if tier is tiers.host:
                count, reason = _match_host(tiers, request, at, deadline, stamp, touch)
            else:
                count = tier.find(
                    request.keys[at:], start=start, namespace=request.namespace.root, touch=touch,
                    deadline_seconds=deadline.remaining(),
                )  # fmt: skip
                if not count and deadline.passed:  # it may not have been asked, or may not have answered
                    reason = reason if reason in UNANSWERED else Reason.DEADLINE
            lacking = {*(() if count else lacking), tier.name}
            by_tier[tier.name] += count
            at += count
            if at == len(request.keys):
                return TiersMatch(at, by_tier, None)
    return TiersMatch(at, by_tier, reason)


def _match_host(
    tiers: TierStack, request: CacheRequest, at: int, deadline: Deadline, stamp: int | None, touch: bool
) -> tuple[int, Reason | None]:
    assert tiers.host is not None
    match = tiers.host.ledger.match_prefix(
        request.keys[at:],
        start=request.first + at,
        namespace=request.namespace.root,
        stamp=stamp,
        lease_seconds=LEASE_SECONDS if touch else 0.0,
        touch=touch,
        deadline_seconds=deadline.remaining(),
    )
    return len(match.slots), match.reason


# -- answers, for retrieves too -----------------------------------------------------------------------------------


def count_hit(
    resources: Resources, request: CacheRequest, hit: Hit, counted: bool, miss_counted: bool = False
) -> Hit:
    """Count a request and its hit if it is `counted`; not the miss if a tier has counted it. Returns the hit."""
    if counted:
        reason = None if miss_counted else hit.reason
        tokens = request.length_tokens - request.start_tokens
        resources.counters.count_request(tokens, hit.by_tier, reason)
    return hit


def hit_for(request: CacheRequest, by_tier: dict[str, int], explanation: Explanation | None) -> Hit:
    """Return the hit of a request: tokens by tier, and why not more. Pure."""
    reason, detail = explanation or (None, "")
    return hit_of(request.start_tokens, request.length_tokens, by_tier, reason, detail)


def too_short(request: CacheRequest) -> Explanation | None:
    """Return the reason of a miss without a whole chunk in the request. Pure."""
    if request.length_tokens >= request.chunk_tokens:
        return None
    return Explanation(
        Reason.SHORT_PROMPT, f"{request.length_tokens} tokens, a chunk has {request.chunk_tokens}"
    )


def not_worth_loading(tier: str) -> Explanation:
    """Return the reason of a miss for a tier that is slower than computing. Pure."""
    return Explanation(Reason.NOT_WORTH_IT, f"computing is faster than reading from {tier}")
