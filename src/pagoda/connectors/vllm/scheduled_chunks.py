"""What the scheduler's halves of both connectors do alike: make copies of reserved chunks, name the
source of a hit, report to routers, say which prompts are logged.

`scheduler` and `offloading.offloading_manager` call it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from pagoda.cache.writeback import ChunkRef
from pagoda.connectors.vllm.event_form import VLLMEventForm
from pagoda.connectors.vllm.event_publisher import EventOutlet
from pagoda.kv_events.notes import Groups
from pagoda.kv_events.stored_events import StoredEvents
from pagoda.ledger import Outcome, Refused, Reserved

_SOURCES = {
    "host": CacheHitSource.HOST,
    "disk": CacheHitSource.DISK,
    "peers": CacheHitSource.P2P,
}


def source_of(tier: str) -> CacheHitSource:
    """Return what vLLM calls a tier."""
    return _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)


def reserved_run(
    keys: Sequence[bytes],
    first: int,
    parent: bytes | None,
    outcomes: Sequence[Outcome],
) -> tuple[list[ChunkRef | None], dict[int, Reason]]:
    """Return each chunk of a run in its slot, None if it got none; and why chunks were refused, by
    position. The first chunk has position `first`.
    """
    copies = list[ChunkRef | None]()
    refused = dict[int, Reason]()
    for n, (key, outcome) in enumerate(zip(keys, outcomes, strict=True), first):
        copy = None
        if isinstance(outcome, Reserved):
            copy = ChunkRef(key, n, parent, outcome.slot, outcome.generation)
        elif isinstance(outcome, Refused):
            refused[n] = outcome.reason
        copies.append(copy)
        parent = key
    return copies, refused


def events_of(
    cache: Cache,
    outlet: EventOutlet,
    groups: Groups,
    hash_tokens: int,
    present: Callable[[], bytes],
) -> tuple[StoredEvents, VLLMEventForm]:
    """Return the events about a cache's chunks, which are still to be started, and their form.

    `hash_tokens`: the tokens of one of vLLM's block hashes. `present`: returns the root of the
    namespace that is told.
    """
    assert cache.slots is not None
    form = VLLMEventForm(groups, hash_tokens)
    keeps = cache.config.prompt_log
    ledgers = cache.slots.ledgers
    return StoredEvents(ledgers, present, groups, form, outlet, keeps), form


def end_events(cache: Cache, events: StoredEvents | None) -> None:
    """End the events; their notes are kept when the cache is closed."""
    if events is not None:
        events.close()
        cache.before_closing(events.keep_notes)


def is_text(request: Any) -> bool:
    """Whether the tokens of a request say all of its prompt, so that it may be logged."""
    return not request.mm_features and request.prompt_embeds is None
