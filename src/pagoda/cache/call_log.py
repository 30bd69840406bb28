"""The log lines of a cache: five when it is opened, at INFO, and one per call, at DEBUG.

`Cache` calls `log_opened`, `Call` calls `log_call`. No line has a token of a prompt, a salt or a
password.
"""

from __future__ import annotations

import logging

from pagoda.base.errors import PagodaError
from pagoda.base.log import FIELDS, guarded_logger
from pagoda.cache.results import Hit, Stored
from pagoda.cache.tier_stack import TierStack
from pagoda.config.sizes import format_size
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger, admin

log = guarded_logger("pagoda.cache")

_LOOK = "`pagoda stats` shows what is stored and what hits, `pagoda explain` why a prompt misses"


def log_opened(
    namespace: Namespace,
    layout: KVLayout,
    tiers: TierStack,
    deadline_seconds: float,
) -> None:
    """Log which tiers a cache has, their sizes, what they contain already, and where to look. Five
    lines, once.
    """
    if not log.isEnabledFor(logging.INFO):
        return
    tokens = layout.chunk_tokens
    ledgers = dict(tiers.ledgers())
    sizes = []
    found = []
    places = []
    fields: list[dict[str, object]] = []
    for tier in tiers.all:
        ledger = ledgers.get(tier.name)
        if ledger is None:
            place = tier.address
            sizes.append(f"{tier.name} shared")
            fields.append({"tier": tier.name, "place": place})
        else:
            place = str(ledger.directory)
            slots = ledger.space.most_slots()
            # private memory has no slab file
            size_bytes = slots * (ledger.slot_bytes or layout.slot_bytes)
            chunks = _found(ledger, deadline_seconds)
            sizes.append(
                f"{tier.name} {format_size(size_bytes)} = {slots * tokens:,} tokens"
            )
            if chunks is None:
                found.append(f"{tier.name} not known yet")
            else:
                found.append(
                    f"{tier.name} {chunks:,} chunks = {chunks * tokens:,} tokens"
                )
            size = {
                "bytes": size_bytes,
                "tokens": slots * tokens,
                "chunks": chunks,
            }
            fields.append({"tier": tier.name, "place": place, **size})
        if place:
            places.append(f"{tier.name} {place}")
    short = namespace.root.hex()[:12]
    chunk = f"chunks of {tokens:,} tokens, {format_size(layout.chunk_bytes)}"
    lines = (
        f"PagodaKV opened: {namespace.model}, namespace {short}, {chunk}",
        f"  tiers: {', '.join(sizes) or 'none, so nothing is kept'}",
        f"  found: {', '.join(found) or 'nothing'} of all models",
        f"  where: {', '.join(places) or 'nowhere'}",
        f"  look:  {_LOOK}",
    )
    known = {
        "model": namespace.model,
        "namespace": short,
        "chunk_tokens": tokens,
        "tiers": fields,
    }
    log.info("\n".join(lines), extra={FIELDS: known})


def _found(ledger: Ledger, deadline_seconds: float) -> int | None:
    try:
        return admin.numbers(ledger, deadline_seconds)["ready"]
    except PagodaError:
        return None


def log_call(name: str, answer: object, seconds: float) -> None:
    """Log a call and its answer in one line; called at DEBUG only. Calls with other kinds of
    answers are not logged.
    """
    known: dict[str, object]
    if isinstance(answer, Hit):
        tiers = ", ".join(
            f"{tier} {tokens}" for tier, tokens in answer.by_tier.items()
        )
        why = f", then {answer.reason}" if answer.reason is not None else ""
        asked = len(answer.mask) - answer.start_tokens
        text = f"{asked} tokens asked, {answer.num_tokens} hit{f' ({tiers})' if tiers else ''}{why}"
        known = {
            "tokens": asked,
            "hit_tokens": answer.by_tier,
            "reason": answer.reason,
        }
        if answer.behind_tokens:
            text = f"{text}, {answer.behind_tokens} hit behind"
            known["behind_tokens"] = answer.behind_tokens
    elif isinstance(answer, Stored):
        why = f" ({answer.reason})" if answer.reason is not None else ""
        chunks = f"{answer.num_chunks} new, {answer.present} present, {answer.refused} refused{why}"
        text = f"{answer.num_tokens} tokens stored, chunks: {chunks}"
        known = {**answer._asdict()}
    else:
        return
    milliseconds = round(seconds * 1e3, 3)
    log.debug(
        "%s: %s, %.3f ms",
        name,
        text,
        milliseconds,
        extra={FIELDS: {"call": name, **known, "ms": milliseconds}},
    )
