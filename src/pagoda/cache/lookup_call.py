"""Lookups: which tiers have the leading chunks of a prompt. No KV bytes move.

`Cache` calls `run_lookup` and `run_explain`; a retrieve calls `expected_hit` to check its minimum.
`MissExplainer` finds the reason why a hit is not longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from pagoda.base.metrics import Reason
from pagoda.cache.call import CacheRequest
from pagoda.cache.miss_explainer import UNANSWERED
from pagoda.cache.resources import Resources
from pagoda.cache.results import Hit
from pagoda.tiers import HostTier
from pagoda.tiers.base import Tier

LEASE_SECONDS = 5.0  # how long a hit is kept from eviction until it is loaded


class TiersMatch(NamedTuple):
    """The leading run and where it is: `by_tier` in chunks, and the reason for the first key that
    is missing.
    """

    chunks: int
    by_tier: dict[str, int]
    reason: Reason | None


def run_lookup(
    resources: Resources, request: CacheRequest, counted: bool,
    usable: Callable[[Hit], Hit] | None,
    measure_again: Callable[[Resources, CacheRequest, Hit], None],
) -> Hit:  # fmt: skip
    """Return what a retrieve is expected to serve, and of it what is `usable` by the engine; lease
    the part of it that the host tier has.

    `measure_again` (the function of `retrieve_call`, which imports this module) is called if a tier
    was too slow.
    """
    found = expected_hit(resources, request)
    hit = found if usable is None else usable(found)
    if counted:
        tokens = len(hit.mask) - hit.start_tokens
        resources.counters.count_request(
            tokens, hit.by_tier, hit.reason, request.namespace
        )
    if found.reason is Reason.NOT_WORTH_IT:
        measure_again(resources, request, found)
    return hit


def run_explain(resources: Resources, request: CacheRequest) -> Hit:
    """Return what a lookup would return, with a thorough search for the reason; change nothing."""
    if not request.keys:
        return request.hit_without_chunks()
    match = match_prefix(request, stamp=None, touch=False)
    if match.chunks == len(request.keys):
        return request.hit(match.by_tier)
    why = resources.explainer.explain(
        request, match.chunks, match.reason, thorough=True
    )
    return request.hit(match.by_tier, *why)


def expected_hit(resources: Resources, request: CacheRequest) -> Hit:
    """Return what a retrieve is expected to serve, without counting it."""
    if resources.closed:
        return request.miss(Reason.CLOSED, "the cache is closed")
    if not request.keys:
        return request.hit_without_chunks()
    tiers = request.tiers
    match = match_prefix(
        request,
        stamp=tiers.host.ledger.stamp() if tiers.host is not None else None,
    )
    by_tier = match.by_tier
    load_cost = resources.load_cost
    slow = [
        tier
        for tier, chunks in by_tier.items()
        if chunks and not load_cost.is_worth_loading(tier)
    ]
    # in practice tiers do not alternate in one prompt: only chunks above the first slow tier are
    # served
    if slow:
        above = tiers.names[: tiers.names.index(slow[0])]
        by_tier = {tier: by_tier[tier] for tier in above}
    total = sum(by_tier.values()) * request.chunk_tokens
    minimum = resources.config.min_hit_tokens
    if total and total < minimum:
        return request.miss(Reason.BELOW_MINIMUM, f"{total} of {minimum} tokens")
    if slow:
        return request.hit(
            by_tier, Reason.NOT_WORTH_IT, load_cost.refusal(slow[0])
        )
    if match.chunks == len(request.keys):
        return request.hit(by_tier)
    return request.hit(
        by_tier, *resources.explainer.explain(request, match.chunks, match.reason)
    )


def match_prefix(
    request: CacheRequest, *, stamp: int | None, touch: bool = True
) -> TiersMatch:
    """Find the leading run through all tiers; lease what the host tier has of it, unless `touch` is
    False.
    """
    root = request.namespace.root
    tiers = request.tiers
    deadline = request.deadline

    def find_in_host(host: HostTier, at: int) -> tuple[int, Reason | None]:
        match = host.ledger.match_prefix(
            request.keys[at:],
            start=request.position_of(at),
            namespace=root,
            stamp=stamp,
            touch=touch,
            lease_seconds=LEASE_SECONDS if touch else 0.0,
            deadline_seconds=deadline.remaining(),
        )
        return len(match.slots), match.reason

    def find_below(tier: Tier, at: int) -> tuple[int, Reason | None]:
        count = tier.find(
            request.keys[at:],
            start=request.position_of(at),
            namespace=root,
            touch=touch,
            deadline_seconds=deadline.remaining(),
        )
        # In this case the tier may not have been asked, or may not have answered.
        return count, Reason.DEADLINE if not count and deadline.passed else None

    finders = {tier.name: partial(find_below, tier) for tier in tiers.lower}
    if tiers.host is not None:
        finders = {tiers.host.name: partial(find_in_host, tiers.host), **finders}
    return match_tiers(finders, len(request.keys))


def match_tiers(
    finders: Mapping[str, Callable[[int], tuple[int, Reason | None]]], chunks: int
) -> TiersMatch:
    """Find the leading run of `chunks` chunks through all tiers, from the top down, until no tier
    continues it. Pure.

    A finder returns how many chunks its tier has from an index on, and the reason why not more, if
    the tier knows it.
    """
    at = 0
    by_tier = dict.fromkeys(finders, 0)
    reason: Reason | None = None
    lacking: set[str] = set()  # tiers known not to have the next chunk
    while at < chunks and len(lacking) < len(finders):
        for tier, find in finders.items():
            if tier in lacking or at == chunks:
                continue
            count, why = find(at)
            if count:
                at = at + count
                reason = None
                lacking = set()
                by_tier[tier] += count
            if why is not None and reason not in UNANSWERED:
                reason = why
            lacking.add(tier)
    return TiersMatch(at, by_tier, reason)
