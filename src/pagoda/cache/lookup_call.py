"""Lookups: which tiers have the leading chunks of a prompt. No KV bytes move.

`Cache` calls `run_lookup` and `run_explain`; a retrieve calls `expected_hit` to check its minimum.
`MissExplainer` finds the reason why a hit is not longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from pagoda.base.metrics import Reason
from pagoda.cache.call import CacheRequest
from pagoda.cache.miss_explainer import UNANSWERED
from pagoda.cache.resources import Resources
from pagoda.cache.results import Hit, Piece
from pagoda.keys import PromptKeys
from pagoda.tiers import HostTier
from pagoda.tiers.base import Tier, confirm_each
from pagoda.tiers.remote.remote_tier import RemoteTier

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
    pieces: int = 0,
) -> Hit:  # fmt: skip
    """Return what a retrieve is expected to serve, and of it what is `usable` by the engine; lease
    the part of it that the host tier has.

    `measure_again` (the function of `retrieve_call`, which imports this module) is called if a tier
    was too slow. `pieces`: if it is not 0, the hit also has the pieces behind the first missing
    chunk, in runs of at least so many tokens.
    """
    order: list[Piece] | None = [] if pieces else None
    found = expected_hit(resources, request, order)
    if order is not None:
        found = _with_pieces(resources, request, found, order, pieces)
    hit = found if usable is None else usable(found)
    if counted:
        tokens = len(hit.mask) - hit.start_tokens
        by_tier = served_by_tier(hit) if hit.behind_tokens else hit.by_tier
        resources.counters.count_request(
            tokens, by_tier, hit.reason, request.namespace
        )
    if found.reason is Reason.NOT_WORTH_IT:
        measure_again(resources, request, found)
    return hit


def run_explain(resources: Resources, request: CacheRequest) -> Hit:
    """Return what a lookup would return, with a thorough search for the reason; change nothing."""
    if not request.keys:
        return request.hit_without_chunks()
    chunks, by_tier, reason = match_prefix(request, touch=False)
    if chunks == len(request.keys):
        return request.hit(by_tier)
    why = resources.explainer.explain(request, chunks, reason, thorough=True)
    return request.hit(by_tier, *why)


def served_by_tier(hit: Hit) -> dict[str, int]:
    """Return the tokens of all pieces of a hit by tier; pure."""
    by_tier = dict[str, int]()
    for piece in hit.pieces:
        tokens = piece.stop - piece.start
        by_tier[piece.tier] = by_tier.get(piece.tier, 0) + tokens
    return by_tier


def _with_pieces(
    resources: Resources,
    request: CacheRequest,
    hit: Hit,
    order: list[Piece],
    least: int,
) -> Hit:
    """Return the hit with its pieces: of the leading part, which are `order`, those that are worth
    loading, and those behind it.
    """
    if resources.closed:
        return hit
    pieces = list(takewhile(lambda piece: piece.tier in hit.by_tier, order))
    leading = sum(stop - start for start, stop, _ in pieces)
    if leading < hit.num_tokens:  # a tier that is too slow has the next chunk
        hit = hit.shortened(leading, hit.reason, hit.detail)
    first = leading // request.chunk_tokens
    if first < len(request.keys):
        pieces += find_pieces(resources, request, first, least, hit.reason)
    behind = sum(stop - start for start, stop, _ in pieces) - hit.num_tokens
    return replace(hit, pieces=tuple(pieces), behind_tokens=behind)


def find_pieces(
    resources: Resources,
    request: CacheRequest,
    first: int,
    least: int,
    reason: Reason | None,
    chooses: bool = True,
) -> list[Piece]:
    """Return the pieces of chunks [first, ...) that a tier has; lease those of the host tier.

    Each tier is asked once, from the top down, within the deadline of the request. A run of pieces
    below `least` tokens, or below `min_hit_tokens`, is left out. `reason`: why the leading part
    ended; a store that has not answered about the first chunk in time is not asked again.
    `chooses`: tiers that are slower than computing are left out.
    """
    size = request.chunk_tokens
    least = max(least, resources.config.min_hit_tokens)
    owners: list[str | None] = [None] * (len(request.keys) - first)
    if len(owners) * size < least:
        return []
    for tier in request.tiers.all:
        missing = [at for at, owner in enumerate(owners) if owner is None]
        if not missing or request.deadline.passed:
            break
        load_cost = resources.load_cost
        if chooses and not load_cost.is_worth_loading(tier.name):
            continue
        if reason in UNANSWERED and _is_silent(tier, request, first):
            continue
        begin = first + missing[0]
        stop = first + missing[-1] + 1
        for at, is_here in enumerate(
            _find_each(request, tier, begin, stop), missing[0]
        ):
            if is_here and owners[at] is None:
                owners[at] = tier.name
    found: list[Piece] = []
    run: list[Piece] = []
    for at, owner in enumerate([*owners, None], request.first + first):
        if owner is not None:
            add_piece(run, at * size, (at + 1) * size, owner)
        elif run:
            tokens = run[-1].stop - run[0].start
            if tokens >= least:
                found += run
            run = []
    return found


def _is_silent(tier: Tier, request: CacheRequest, first: int) -> bool:
    """Whether a store has not answered yet what it has from a chunk on."""
    root = request.namespace.root
    keys = request.keys[first:]
    return isinstance(tier, RemoteTier) and tier.is_silent(keys, root)


def add_piece(pieces: list[Piece], start: int, stop: int, tier: str) -> None:
    """Append a piece, or lengthen the last one if it is of the same tier and ends where this one
    begins.
    """
    if pieces and pieces[-1].stop == start and pieces[-1].tier == tier:
        start = pieces.pop().start
    pieces.append(Piece(start, stop, tier))


def _find_each(
    request: CacheRequest, tier: Tier, begin: int, stop: int
) -> list[bool]:
    """Return which of the chunks [begin, stop) a tier has; lease them in the host tier."""
    keys = request.keys[begin:stop]
    root = request.namespace.root
    start = request.position_of(begin)
    seconds = request.deadline.remaining()
    if not isinstance(tier, HostTier):
        return tier.match_each(
            keys, start=start, namespace=root, deadline_seconds=seconds
        )
    ledger = tier.ledger
    stamp = ledger.stamp()

    def find(first: int, last: int, left: float | None) -> int:
        match = ledger.match_prefix(
            keys[first:last],
            start=None if start is None else start + first,
            namespace=root,
            stamp=stamp,
            lease_seconds=LEASE_SECONDS,
            deadline_seconds=left or 0.0,
        )
        return len(match.slots)

    here = ledger.which(keys, seconds)
    return confirm_each(here, find, request.deadline.remaining())


def expected_hit(
    resources: Resources,
    request: CacheRequest,
    order: list[Piece] | None = None,
) -> Hit:
    """Return what a retrieve is expected to serve, without counting it.

    `order` gets which tier has which of the leading chunks, and is worth loading from.
    """
    if resources.closed:
        return request.miss(Reason.CLOSED, "the cache is closed")
    if not request.keys:
        return request.hit_without_chunks()
    tiers = request.tiers
    chunks, by_tier, reason = match_prefix(request, order=order)
    load_cost = resources.load_cost
    slow: str | None = None
    for tier, count in by_tier.items():
        if count and not load_cost.is_worth_loading(tier):
            slow = tier
            break
    # in practice tiers do not alternate in one prompt: only chunks above the first slow tier are
    # served
    if slow is not None:
        above = tiers.names[: tiers.names.index(slow)]
        by_tier = {tier: by_tier[tier] for tier in above}
    minimum = resources.config.min_hit_tokens
    if minimum:
        total = sum(by_tier.values()) * request.chunk_tokens
        if total and total < minimum:
            return request.miss(
                Reason.BELOW_MINIMUM, f"{total} of {minimum} tokens"
            )
    if slow is not None:
        return request.hit(by_tier, Reason.NOT_WORTH_IT, load_cost.refusal(slow))
    if chunks == len(request.keys):
        return request.hit(by_tier)
    return request.hit(
        by_tier, *resources.explainer.explain(request, chunks, reason)
    )


def match_prefix(
    request: CacheRequest,
    *,
    touch: bool = True,
    order: list[Piece] | None = None,
) -> TiersMatch:
    """Find the leading run through all tiers; lease what the host tier has of it, unless `touch` is
    False. `order` gets which tier has which part of it.
    """
    tiers = request.tiers
    host = tiers.host
    chunks = len(request.keys)
    finders: dict[str, Callable[[int], tuple[int, Reason | None]]] = {}
    if host is not None:
        stamp = host.ledger.stamp() if touch else None
        if order is None:
            found, reason = _find_in_host(request, stamp, touch, host, 0)
            if found == chunks or not tiers.lower:
                return TiersMatch(found, {host.name: found}, reason)
            answers = [(found, reason)]
        else:
            answers = []

        find = partial(_find_in_host, request, stamp, touch, host)

        def find_again(at: int) -> tuple[int, Reason | None]:
            return answers.pop() if answers else find(at)

        finders[host.name] = find_again
    for tier in tiers.lower:
        finders[tier.name] = partial(_find_below, request, touch, tier)
    if order is not None:
        finders = {
            name: partial(_noted, request, order, name, find)
            for name, find in finders.items()
        }
    return match_tiers(finders, chunks)


def _find_in_host(
    request: CacheRequest,
    stamp: int | None,
    touch: bool,
    host: HostTier,
    at: int,
) -> tuple[int, Reason | None]:
    """Return how many chunks the host tier has from an index on, and why not more; lease them, if
    they are touched.
    """
    end = at
    keys = request.keys
    while True:
        if end or type(keys) is PromptKeys:
            keys = request.window(end)
        slots, _, reason, _ = host.ledger.find_prefix(
            keys,
            start=request.position_of(end),
            namespace=request.namespace.root,
            stamp=stamp,
            lease_seconds=LEASE_SECONDS if touch else 0.0,
            touch=touch,
            deadline_seconds=request.deadline.remaining(),
        )
        found = len(slots)
        end += found
        if found < len(keys) or end == len(request.keys):
            return end - at, reason


def _find_below(
    request: CacheRequest, touch: bool, tier: Tier, at: int
) -> tuple[int, Reason | None]:
    """Return how many chunks a tier has from an index on, and why not more, if that is known."""
    deadline = request.deadline
    end = at
    while True:
        # a request to another machine costs more than to hash all
        keys = request.window(end, whole=tier.is_shared)
        count = tier.match_prefix(
            keys,
            start=request.position_of(end),
            namespace=request.namespace.root,
            touch=touch,
            deadline_seconds=deadline.remaining(),
        )
        end += count
        if count < len(keys) or end == len(request.keys):
            break
    # In this case the tier may not have been asked, or may not have answered.
    is_late = end == at and deadline.passed
    return end - at, Reason.DEADLINE if is_late else None


def _noted(
    request: CacheRequest,
    order: list[Piece],
    tier: str,
    find: Callable[[int], tuple[int, Reason | None]],
    at: int,
) -> tuple[int, Reason | None]:
    """Note in `order` what a finder finds."""
    count, why = find(at)
    if count:
        start, stop = (
            (request.first + chunk) * request.chunk_tokens
            for chunk in (at, at + count)
        )
        add_piece(order, start, stop, tier)
    return count, why


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
