"""Which tiers have the leading chunks of a prompt: no bytes move."""

from __future__ import annotations

from typing import NamedTuple

from pagoda.cache.deadline import Deadline
from pagoda.cache.request import Ask
from pagoda.cache.tier_stack import Storeys
from pagoda.metrics import Reason

__all__ = ["LEASE_SECONDS", "UNASKED", "Look", "look"]

LEASE_SECONDS = 5.0  # how long a hit that nobody has begun to load is kept from eviction


# of a tier that could not be asked: nobody else knows better
UNASKED = frozenset({Reason.LEDGER_BUSY, Reason.DEADLINE, Reason.IO_ERROR, Reason.CLOSED})


class Look(NamedTuple):
    """The leading run and where it lies: `by_tier` in chunks, and what was said of the first key missing."""

    chunks: int
    by_tier: dict[str, int]
    reason: Reason | None


def look(storeys: Storeys, ask: Ask, deadline: Deadline, *, stamp: int | None, touch: bool = True) -> Look:
    """Find the leading run through all the tiers; leases what the host has of it, unless `touch` is False."""
    at, by_tier, reason = 0, dict.fromkeys(storeys.names, 0), None
    lacking: set[str] = set()  # tiers known not to have keys[at]
    while at < len(ask.keys) and len(lacking) < len(storeys.all):
        for tier in storeys.all:
            if tier.name in lacking:
                continue
            start = ask.first + at
            if tier is storeys.host:
                count, reason = _on_host(storeys, ask, at, deadline, stamp, touch)
            else:
                count = tier.find(
                    ask.keys[at:], start=start, namespace=ask.namespace.root, touch=touch,
                    deadline_seconds=deadline.remaining(),
                )  # fmt: skip
                if not count and deadline.passed:  # it need not have been asked, nor have answered
                    reason = reason if reason in UNASKED else Reason.DEADLINE
            lacking = {*(() if count else lacking), tier.name}
            by_tier[tier.name] += count
            at += count
            if at == len(ask.keys):
                return Look(at, by_tier, None)
    return Look(at, by_tier, reason)


def _on_host(
    storeys: Storeys, ask: Ask, at: int, deadline: Deadline, stamp: int | None, touch: bool
) -> tuple[int, Reason | None]:
    assert storeys.host is not None
    match = storeys.host.ledger.match(
        ask.keys[at:],
        start=ask.first + at,
        namespace=ask.namespace.root,
        stamp=stamp,
        lease_seconds=LEASE_SECONDS if touch else 0.0,
        touch=touch,
        deadline_seconds=deadline.remaining(),
    )
    return len(match.slots), match.reason
