"""The first lines of `stats` and `top`: what the cache was worth, how full it is, what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from pagoda.base.metrics import TIER_KINDS
from pagoda_tools.cli import printing

if TYPE_CHECKING:
    from pagoda.ledger.store_stats import StoreStats
    from pagoda_tools.serve.overview import RemoteUsage


def trouble_line(troubles: int) -> str:
    """Return the sentence about tiers that cannot be used."""
    return f"TROUBLE with {troubles} tier{'s' * (troubles > 1)}, named below"


def headline(
    stores: Mapping[str, StoreStats], remotes: Sequence[RemoteUsage]
) -> list[str]:
    """Return the sentences, the most important first: hits and time saved, room, pools in part.

    Args:
        stores: by their names.
        remotes: what the remote tiers answered.
    """
    lines = []
    if stores:
        rest = [_saved(stores.values()), _room(stores)]
        lines = [_hits(stores.values()), "; ".join(filter(None, rest))]
    partly = [
        f"{remote.tier}: {remote.state} answer"
        for remote in remotes
        if not remote.error and not remote.is_whole
    ]
    return [*lines, *partly]


def _hits(stores: Collection[StoreStats]) -> str:
    total: Counter[str] = Counter()
    for store in stores:
        total.update(store.counters)
    asked = total["asked_tokens"]
    if not asked:
        return "no prompt was looked up yet"
    by_tier = ", ".join(
        f"{kind} {printing.share(total[f'hit_tokens_{kind}'], asked)}"
        for kind in TIER_KINDS
        if total[f"hit_tokens_{kind}"]
    )
    return (
        f"hit rate {printing.share(total['hit_tokens'], asked)} of "
        f"{printing.count(asked)} tokens{f' ({by_tier})' * bool(by_tier)}"
    )


def _saved(stores: Collection[StoreStats]) -> str:
    """Return what the loads saved: an estimate, the sum of that of all models."""
    from pagoda.ledger.request_meters import saved_time

    saved = saved_time([meter for store in stores for meter in store.meters])
    if saved.seconds <= 0:
        return ""
    return f"saved about {printing.age(saved.seconds)}"


def _room(stores: Mapping[str, StoreStats]) -> str:
    used = sum(store.used_bytes for store in stores.values())
    name, fullest = max(stores.items(), key=lambda one: _fullness(one[1]))
    share = printing.share(fullest.used_bytes, fullest.grown_bytes)
    stored = f"stored {printing.size(used)}"
    if len(stores) == 1:
        return f"{stored}, {name} {share} full"
    return f"{stored}, the fullest store {name} {share}"


def _fullness(store: StoreStats) -> float:
    return store.used_bytes / store.grown_bytes if store.grown_bytes else 0.0
