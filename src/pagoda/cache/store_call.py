"""The way down: an engine's chunks into host slots, and what gets none through staging buffers to the tiers below."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pagoda.cache.below import Copy, Use, copies_of, names_of
from pagoda.cache.deadline import Deadline
from pagoda.cache.hit import Stored
from pagoda.cache.request import Ask
from pagoda.cache.staging import Staged, Staging
from pagoda.cache.tier_stack import Storeys, let_in
from pagoda.cache.writeback import Descents
from pagoda.ledger import Busy, Present, Refused, Reserved
from pagoda.metrics import Reason
from pagoda.tiers import HostTier
from pagoda.tiers.base import Bytes
from pagoda.transfer import Transfer

__all__ = ["Store"]

_MOMENT_SECONDS = 0.05  # waited in all for buffers that what the host's policy keeps out may pass through
_LEFT, _NEW, _PRESENT = 0, 1, 2  # what became of a chunk
# Nothing is to be tried further down: a chunk under the key of another tenant's is refused in every tier.
_NOTHING_LEFT = (None, Reason.NOT_ADMITTED, Reason.OTHER_NAMESPACE)


class Store:
    """One run on its way down. Used by one thread, once. Leading chunks first, and one stamp a tier for the whole run.

    What the host tier refuses goes through staging buffers into the queue of each tier below, behind what of the run
    is in host slots. Where it is the host's policy that refuses, no call waits for that: if no buffer is free, or the
    tiers below do not take the chunk either, for another reason than their policy, the host takes it after all.
    """

    def __init__(
        self,
        storeys: Storeys,
        ask: Ask,
        kv: Transfer,
        deadline: Deadline,
        descents: Descents,
        staging: Staging,
        *,
        overflows: bool = True,
    ) -> None:
        """`overflows`: what gets no host slot is written below; else the host's policy keeps nothing out."""
        self._host, self._lower = storeys.host, storeys.lower
        self._ask, self._kv, self._deadline = ask, kv, deadline
        self._descents, self._staging = descents, staging
        self._overflows = overflows and bool(self._lower)
        self._all_in = not overflows and bool(self._lower)
        self._stamp = self._host.ledger.stamp() if self._host is not None else 0
        self._stamps = storeys.stamps()
        self._fate = bytearray(len(ask.keys))
        self._sent: list[tuple[int, Staged]] = []
        self.on_host = 0  # chunks that were put into host slots

    def go(self) -> Stored:
        """Store as much as there is room for before the deadline."""
        host = self._host
        if host is None:
            reason = self._through_buffers(self._deadline.remaining)
            self._descents.handed(self._deadline.remaining())
            return self._stored(reason)
        reason = self._into_slots(host)
        if self._overflows and reason is Reason.NOT_ADMITTED:
            reason = self._through_buffers(_a_moment(self._deadline))
            if reason not in _NOTHING_LEFT:
                self._all_in = True
                reason = self._into_slots(host)
        if self._overflows and reason not in _NOTHING_LEFT and not self._deadline.passed:
            reason = self._through_buffers(self._deadline.remaining)
        return self._stored(reason)

    def _stored(self, reason: Reason | None) -> Stored:
        reason = self._take_back() or reason
        new, present, refused = (self._fate.count(fate) for fate in (_NEW, _PRESENT, _LEFT))
        return Stored(new, new * self._ask.chunk_tokens, present, refused, reason if refused else None)

    # -- into host slots ------------------------------------------------------------------------------------------

    def _into_slots(self, host: HostTier) -> Reason | None:
        """Copy what the host tier lacks into its slots, up to the first refusal; says why there was one."""
        ask, ledger = self._ask, host.ledger
        self._take_back()
        at = max(0, self._fate.find(_LEFT))
        have = ledger.match(
            ask.keys[at:], start=ask.first + at, namespace=ask.namespace.root, stamp=self._stamp, asked=False,
            deadline_seconds=self._deadline.remaining(),
        )  # fmt: skip
        unknown = self._lower and not self._descents.know(have.slots, have.generations)
        copies = list(copies_of(ask, at, have.slots, have.generations)) if unknown else []
        if have.reason in (Reason.LEDGER_BUSY, Reason.IO_ERROR):
            return have.reason
        self._fate[at : at + len(have.slots)] = bytes([_PRESENT]) * len(have.slots)
        at += len(have.slots)
        try:
            while at < len(ask.keys):
                if self._deadline.passed:
                    return Reason.DEADLINE
                end = min(at + ledger.window, len(ask.keys))
                refused = self._window(host, at, end, copies)
                self._deadline.progress()
                if refused is Reason.NOT_ADMITTED:
                    ledger.refuse(ask.keys[end:], start=ask.first + end, stamp=self._stamp)
                if refused is not None:
                    return refused
                at = end
            return None
        finally:
            if copies:
                self._descents.stored(ask.namespace.root, copies, self._lower, self._stamps)

    def _window(self, host: HostTier, begin: int, end: int, copies: list[Copy]) -> Reason | None:
        """Store keys [begin, end); appends to `copies` what is in host slots now. Says why the first was refused."""
        ask = self._ask
        outcomes = host.ledger.reserve(
            ask.keys[begin:end],
            namespace=ask.namespace.root,
            start=ask.first + begin,
            parent=ask.before(begin),
            tokens=ask.chunk_tokens,
            stamp=self._stamp,
            all_in=self._all_in,
            deadline_seconds=self._deadline.remaining(),
        )
        try:
            rooms = [(i, item) for i, item in enumerate(outcomes, begin) if isinstance(item, Reserved)]
            kept = _fill(host, ask, self._kv, rooms, self._deadline) if rooms else []
        except BaseException:  # no reservation is left behind, also if a signal handler raised it
            host.ledger.give_up(outcomes, self._deadline.last())
            raise
        new = [room for room, ok in zip(rooms, kept, strict=True) if ok]
        present = [(i, item) for i, item in enumerate(outcomes, begin) if isinstance(item, Present)]
        for i, _ in new:
            self._fate[i] = _NEW
        for i, item in enumerate(outcomes, begin):
            if isinstance(item, Present | Busy):  # busy: being brought by another
                self._fate[i] = _PRESENT
        self.on_host += len(new)
        if self._lower:
            copies += [_copy(ask, i, item) for i, item in present]
            copies += [_copy(ask, i, item) for i, item in new]
        reasons = [item.reason for item in outcomes if isinstance(item, Refused)]
        reasons += [Reason.SUPERSEDED for ok in kept if not ok]
        return reasons[0] if reasons else None

    # -- through staging buffers ----------------------------------------------------------------------------------

    def _through_buffers(self, patience: Callable[[], float]) -> Reason | None:
        """Hand what is left to the tiers below; waits for buffers as `patience` says. Says why it ended early."""
        ask, begin = self._ask, self._fate.find(_LEFT)
        if begin < 0 or not self._lower:
            return None if begin < 0 else Reason.TIER_SKIPPED
        ends = [  # up to where each tier takes the run: what it has, and then what its policy lets in
            tier.find(
                ask.keys, start=ask.first, stamp=stamp, namespace=ask.namespace.root, touch=False,
                deadline_seconds=patience(),
            )
            for tier, stamp in zip(self._lower, self._stamps, strict=True)
        ]  # fmt: skip
        have, shut = max(begin, min(ends)), [False for _ in self._lower]
        self._found_below(begin, have)
        for i in range(have, len(ask.keys)):
            if self._fate[i] != _LEFT:
                continue
            self._look_ahead(i, ends, shut)
            if all(end <= i for end in ends):
                return Reason.NOT_ADMITTED
            if self._deadline.passed:
                return Reason.DEADLINE
            buffer = self._staging.take(patience())
            if buffer is None:
                return Reason.QUEUE_FULL
            self._send(i, buffer, [at for at, end in enumerate(ends) if end > i])
            self._deadline.progress()
            latest = self._sent[-self._staging.count :]
            if refused := next(filter(None, (staged.refused for _, staged in latest)), None):
                return refused
        return None

    def _look_ahead(self, index: int, ends: list[int], shut: list[bool]) -> None:
        """Ask each tier how far it takes the run, from its head on: before anything is copied for it."""
        ask = self._ask
        for at, (tier, stamp) in enumerate(zip(self._lower, self._stamps, strict=True)):
            while ends[at] <= index and not shut[at]:
                keys, start = ask.keys[ends[at] :], ask.first + ends[at]
                count, shut[at] = let_in(tier, keys, ask.namespace.root, start, stamp)
                ends[at] += count

    def _found_below(self, begin: int, end: int) -> None:
        """Chunks that every tier below has: they are told that it was stored again."""
        ask = self._ask
        self._fate[begin:end] = bytes([_PRESENT]) * (end - begin)
        if end > begin:
            self._descents.used(
                Use(ask.namespace.root, lambda: list(names_of(ask, begin, end)), end - begin, asked=False)
            )

    def _send(self, index: int, buffer: Bytes, to: Sequence[int]) -> None:
        """Copy one chunk into a buffer and queue it for those of the tiers below."""
        ask, filled = self._ask, False
        try:
            self._kv.to_slots(ask.starts(index, index + 1), [buffer])
            filled = True
        finally:
            if not filled:
                self._staging.give(buffer)
        staged = Staged(self._staging, buffer, len(to))
        self._fate[index] = _NEW
        self._sent.append((index, staged))
        copy = Copy(ask.keys[index], ask.first + index, ask.before(index), -1, 0, staged)
        tiers, stamps = [self._lower[at] for at in to], [self._stamps[at] for at in to]
        self._descents.stored(ask.namespace.root, [copy], tiers, stamps)

    def _take_back(self) -> Reason | None:
        """Note which chunks no tier below has taken; the reason of the first."""
        if not self._sent:
            return None
        lost = [(index, staged.refused) for index, staged in self._sent if staged.refused is not None]
        for index, _ in lost:
            self._fate[index] = _LEFT
        self._sent = [(index, staged) for index, staged in self._sent if staged.refused is None]
        return lost[0][1] if lost else None


def _a_moment(deadline: Deadline) -> Callable[[], float]:
    """A patience that ends soon."""
    until = time.monotonic() + _MOMENT_SECONDS
    return lambda: max(0.0, min(deadline.remaining(), until - time.monotonic()))


def _fill(
    host: HostTier, ask: Ask, kv: Transfer, rooms: Sequence[tuple[int, Reserved]], deadline: Deadline
) -> list[bool]:
    """Copy chunks into their reserved slots and commit them."""
    reserved = [item for _, item in rooms]
    starts = [(ask.first + i) * ask.chunk_tokens for i, _ in rooms]
    kv.to_slots(starts, host.slab.views([item.slot for item in reserved]))
    return host.ledger.commit(reserved, deadline_seconds=deadline.last())


def _copy(ask: Ask, index: int, item: Reserved | Present) -> Copy:
    return Copy(ask.keys[index], ask.first + index, ask.before(index), item.slot, item.generation)
