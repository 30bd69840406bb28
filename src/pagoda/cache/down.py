"""The way down: an engine's chunks into host slots, or, where there is no host tier, straight to the lower ones."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from pagoda.cache.ask import Ask
from pagoda.cache.below import Copy, copies_of
from pagoda.cache.deadline import Deadline
from pagoda.cache.hit import Stored
from pagoda.cache.staging import Staging
from pagoda.ledger import Present, Refused, Reserved
from pagoda.metrics import Reason
from pagoda.tiers import HostTier
from pagoda.tiers.base import Bytes, Chunk, Done, Tier
from pagoda.transfer import Transfer

__all__ = ["store_below", "store_on_host"]


class _Window(NamedTuple):
    """What became of one window of keys."""

    new: list[Copy]  # in host slots now
    present: list[Copy]  # in host slots already
    busy: int  # being brought by somebody else
    reasons: list[Reason]  # one for each chunk not kept


def store_on_host(host: HostTier, ask: Ask, kv: Transfer, deadline: Deadline) -> tuple[Stored, list[Copy]]:
    """Copy what the host tier lacks into its slots; returns also which host slots hold the run now.

    One stamp for the whole run, so that its tail is older than its head. Leading chunks first: the first window with
    a refusal is the last.
    """
    ledger, stamp, total = host.ledger, host.ledger.stamp(), len(ask.keys)
    have = ledger.match(
        ask.keys, start=ask.first, stamp=stamp, asked=False, deadline_seconds=deadline.remaining()
    )
    copies = list(copies_of(ask, 0, have.slots, have.generations))
    at = present = len(copies)
    new, reasons = 0, list[Reason]()
    if have.reason in (Reason.LEDGER_BUSY, Reason.IO_ERROR):
        reasons.append(have.reason)
    while at < total and not reasons:
        if deadline.passed:
            reasons = [Reason.DEADLINE]
            break
        end = min(at + ledger.window, total)
        window = _store_window(host, ask, kv, at, end, stamp, deadline)
        copies += window.present + window.new
        new, present = new + len(window.new), present + len(window.present) + window.busy
        at, reasons = end, window.reasons
        deadline.progress()
    if Reason.NOT_ADMITTED in reasons:
        ledger.refuse(ask.keys[at:], start=ask.first + at, stamp=stamp)
    refused = total - new - present
    return Stored(new, new * ask.chunk_tokens, present, refused, reasons[0] if reasons else None), copies


def _store_window(
    host: HostTier, ask: Ask, kv: Transfer, begin: int, end: int, stamp: int, deadline: Deadline
) -> _Window:
    outcomes = host.ledger.reserve(
        ask.keys[begin:end],
        namespace=ask.namespace.root,
        start=ask.first + begin,
        parent=ask.before(begin),
        tokens=ask.chunk_tokens,
        stamp=stamp,
        deadline_seconds=deadline.remaining(),
    )
    rooms = [(i, item) for i, item in enumerate(outcomes, begin) if isinstance(item, Reserved)]
    kept = _fill(host, ask, kv, rooms) if rooms else []
    found = [(i, item) for i, item in enumerate(outcomes, begin) if isinstance(item, Present)]
    reasons = [item.reason for item in outcomes if isinstance(item, Refused)]
    reasons += [Reason.SUPERSEDED for ok in kept if not ok]
    new = [_copy(ask, i, item) for (i, item), ok in zip(rooms, kept, strict=True) if ok]
    busy = len(outcomes) - len(rooms) - len(found) - sum(isinstance(item, Refused) for item in outcomes)
    return _Window(new, [_copy(ask, i, item) for i, item in found], busy, reasons)


def _fill(host: HostTier, ask: Ask, kv: Transfer, rooms: Sequence[tuple[int, Reserved]]) -> list[bool]:
    """Copy chunks into their reserved slots and commit them; whatever happens, no reservation is left behind."""
    reserved = [item for _, item in rooms]
    filled = False
    try:
        starts = [(ask.first + i) * ask.chunk_tokens for i, _ in rooms]
        kv.to_slots(starts, [host.slab.view(item.slot) for item in reserved])
        filled = True
    finally:
        if not filled:
            host.ledger.abort(reserved)
    return host.ledger.commit(reserved)


def _copy(ask: Ask, index: int, item: Reserved | Present) -> Copy:
    return Copy(ask.keys[index], ask.first + index, ask.before(index), item.slot, item.generation)


def store_below(
    lower: Sequence[Tier],
    ask: Ask,
    kv: Transfer,
    deadline: Deadline,
    staging: Staging,
    stamps: Sequence[int | None],
) -> Stored:
    """Hand chunks to the lower tiers through private buffers, for there is no host tier to hold them.

    Waits, within the deadline, for a buffer to come back: how many chunks may be on their way is bounded by that.
    """
    have = min(
        tier.find(ask.keys, start=ask.first, stamp=stamp, namespace=ask.namespace.root)
        for tier, stamp in zip(lower, stamps, strict=True)
    )
    at, reason, futures = have, None, list[list[Future[Done]]]()
    while at < len(ask.keys) and reason is None:
        buffer = staging.take(deadline.remaining())
        if buffer is None:
            reason = Reason.QUEUE_FULL
            break
        futures.append(_send(lower, ask, kv, at, buffer, staging, stamps))
        deadline.progress()
        at += 1
        reason = next((why for done in futures if (why := _refusal(done))), None)
    refused = [why for done in futures if (why := _refusal(done))]
    new = len(futures) - len(refused)
    reason = reason or (refused[0] if refused else None)
    return Stored(new, new * ask.chunk_tokens, have, len(ask.keys) - have - new, reason)


def _send(
    lower: Sequence[Tier],
    ask: Ask,
    kv: Transfer,
    index: int,
    buffer: Bytes,
    staging: Staging,
    stamps: Sequence[int | None],
) -> list[Future[Done]]:
    """Copy one chunk into `buffer` and queue it with every tier; the buffer goes back when the last has ended."""
    futures: list[Future[Done]] = []
    try:
        kv.to_slots(ask.starts(index, index + 1), [buffer])
        chunk = Chunk(
            ask.keys[index],
            ask.first + index,
            ask.chunk_tokens,
            buffer,
            ask.before(index),
            still_valid=_always,
        )
        for tier, stamp in zip(lower, stamps, strict=True):
            futures += tier.save([chunk], ask.namespace.root, stamp=stamp)
    finally:
        _give_back(staging, buffer, futures)
    return futures


def _give_back(staging: Staging, buffer: Bytes, futures: list[Future[Done]]) -> None:
    """Give the buffer back when no I/O reads it any more."""
    pending = iter(futures)

    def next_one(_: Future[Done] | None = None) -> None:
        following = next(pending, None)
        if following is None:
            staging.give(buffer)
        else:
            following.add_done_callback(next_one)

    next_one()


def _refusal(futures: Sequence[Future[Done]]) -> Reason | None:
    """Why a chunk certainly went nowhere: every tier has already said no."""
    if not all(future.done() for future in futures):
        return None
    ends = [future.result() for future in futures]
    return None if any(end.ok for end in ends) else ends[0].reason or Reason.IO_ERROR


def _always() -> bool:
    return True
