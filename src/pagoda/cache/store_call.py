"""One store: an engine's chunks go into host slots; chunks that get no slot go through staging
buffers to lower tiers.

`Cache.store` makes a `StoreCall`; it reserves, fills and commits slots of the host tier's ledger,
and enqueues the chunks for the lower tiers in each `WriteBackQueue`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

from pagoda.base.clock import Deadline
from pagoda.base.metrics import Reason
from pagoda.cache.call import CacheRequest, CheckedTransfer
from pagoda.cache.resources import Resources
from pagoda.cache.results import Stored
from pagoda.cache.staging_buffers import StagedChunk
from pagoda.cache.writeback import (
    Access,
    ChunkRef,
    chunk_ref,
    refs_in_slots,
)
from pagoda.ledger import (
    Busy,
    CommitResult,
    Present,
    Refused,
    Reserved,
    SlotWriter,
)
from pagoda.tiers import HostTier
from pagoda.tiers.base import Bytes

# the longest total wait for buffers, for chunks that the host's policy refuses
_MOMENT_SECONDS = 0.05
# What is copied into staging buffers before the tiers get it: for small chunks, a note and a batch
# of each tier for all of them.
_GROUP_BYTES = 1 << 20
# the states of a chunk
_LEFT = 0
_NEW = 1
_PRESENT = 2
# outcomes of chunks that somebody has stored or is storing
_KNOWN = (Present, Busy)
# Reasons after which lower tiers are not tried: every tier refuses the key of another tenant's
# chunk.
_NOTHING_LEFT = (None, Reason.NOT_ADMITTED, Reason.OTHER_NAMESPACE)


class StoreCall:
    """The store of one run. Used by one thread, once. Leading chunks first, and one stamp per tier
    for the whole run.

    What the host tier refuses is copied into staging buffers and enqueued for each tier below,
    after the part of the run that is in host slots. If the host's policy refuses a chunk, the call
    hardly waits: if no buffer is free, or if the lower tiers refuse the chunk for another reason
    than their policy, the host stores it after all.
    """

    def __init__(
        self, resources: Resources, request: CacheRequest, kv: CheckedTransfer
    ) -> None:
        self._resources = resources
        self._host = request.tiers.host
        self._lower = request.tiers.written
        self._request = request
        self._kv = kv
        self._deadline = request.deadline
        self._queues = resources.writeback
        self._staging = resources.store_staging
        # Whether chunks without a host slot are written to lower tiers; if not, the host's policy
        # must refuse nothing.
        overflows = (
            self._host is None or resources.config.write_policy != "selective"
        )
        self._overflows = overflows and bool(self._lower)
        self._admit_all = not overflows and bool(self._lower)
        self._stamp = 0  # the stamp of the run in the host tier
        # that of the run's new chunks in the host tier; None: nobody keeps contexts
        self.context: int | None = None
        self._stamps: dict[str, int | None] = {}  # and in each lower tier
        self._fate = bytearray(len(request.keys))
        self._sent: list[tuple[int, StagedChunk]] = []
        # since the call began to stage chunks
        self._not_cleared: Callable[[], bool]

    def run(self) -> Stored:
        """Store as much as fits before the deadline."""
        if self._resources.closed:
            return self.miss(Reason.CLOSED)
        if not self._request.keys:
            return Stored(0, 0, 0, 0)
        host = self._host
        request = self._request
        if request.namespace.root not in self._resources.registered:
            self._resources.register(request.namespace)
        if host is not None and self._kv.device_index is not None:
            host.use_device(self._kv.device_index)  # before the first copy
        self._stamp = host.ledger.stamp() if host is not None else 0
        self._stamps = {tier.name: tier.stamp() for tier in self._lower}
        with nullcontext() if host is None else host.copying():
            if host is None:
                reason = self._store_below()
            else:
                reason = self._store_in_host(host)
                if reason is not None and self._overflows:
                    reason = self._overflow(host, reason)
            if self._sent:
                reason = self._collect_refused() or reason
        prompts = self._resources.prompt_log
        tokens = request.tokens
        text_alone = not request.items
        if (
            prompts is not None
            and tokens is not None
            and text_alone
            and len(request.head) == request.first
        ):
            keys = [*request.head, *request.keys]
            kept = self._fate.find(_LEFT)
            # not all chunks were stored: log the prompt up to the first one that was not
            if kept >= 0:
                keys = keys[: request.first + kept] if kept else []
                tokens = tokens[: len(keys) * request.chunk_tokens]
            prompts.append(
                request.namespace.root, request.chunk_tokens, keys, tokens
            )
        new, present, refused = (
            self._fate.count(fate) for fate in (_NEW, _PRESENT, _LEFT)
        )
        return Stored(
            new,
            new * self._request.chunk_tokens,
            present,
            refused,
            reason if refused else None,
        )

    def miss(self, reason: Reason, _: str = "") -> Stored:
        """Return the answer for a store that failed or was refused as a whole."""
        return Stored(0, 0, 0, len(self._request.keys), reason)

    def _store_below(self) -> Reason | None:
        """Store without a host tier; what was stored can be read when this returns."""
        reason = self._store_through_staging(self._deadline)
        for queue in self._queues:
            queue.wait_handed_over(self._deadline.remaining())
        return reason

    def _overflow(self, host: HostTier, refused: Reason) -> Reason | None:
        """Store below what the host has refused; return why chunks are left."""
        reason: Reason | None = refused
        if reason is Reason.NOT_ADMITTED:
            moment = Deadline(min(_MOMENT_SECONDS, self._deadline.remaining()))
            reason = self._store_through_staging(moment)
            if reason not in _NOTHING_LEFT:
                self._admit_all = True
                self._collect_refused()
                reason = self._store_in_host(host)
        if reason not in _NOTHING_LEFT and not self._deadline.passed:
            reason = self._store_through_staging(self._deadline)
        return reason

    # -- into host slots ---------------------------------------------------------------------------

    def _store_in_host(self, host: HostTier) -> Reason | None:
        """Copy what the host tier lacks into its slots, up to the first refusal; return its
        reason.
        """
        request = self._request
        ledger = host.ledger
        at = max(0, self._fate.find(_LEFT))
        have = ledger.match_prefix(
            request.keys[at:],
            start=request.position_of(at),
            namespace=request.namespace.root,
            stamp=self._stamp,
            asked=False,
            ahead=ledger.window,
            deadline_seconds=self._deadline.remaining(),
        )
        found = have.following
        where = have.slots, have.generations
        known = not (have.slots.size and self._lower) or all(
            q.needs_no_note(*where) for q in self._queues
        )
        refs = [] if known else refs_in_slots(request, at, *where)
        if have.reason in (Reason.LEDGER_BUSY, Reason.IO_ERROR):
            return have.reason
        self._fate[at : at + len(have.slots)] = bytes([_PRESENT]) * len(
            have.slots
        )
        if ledger.contexts.are_kept:
            asked = self._resources.hints.asked(request.hinted(), request.hints)
            parent = int(have.slots[-1]) if len(have.slots) else None
            self.context = ledger.contexts.arriving(asked, parent, self._stamp)
        at += len(have.slots)
        try:
            while at < len(request.keys):
                if self._deadline.passed:
                    return Reason.DEADLINE
                end = min(at + ledger.window, len(request.keys))
                refused = self._store_window(host, at, end, refs, found)
                found = None  # it was of the first window
                self._deadline.progress()
                if refused is Reason.NOT_ADMITTED:
                    ledger.refuse(
                        request.keys[end:],
                        start=request.first + end,
                        stamp=self._stamp,
                        context=self.context or 0,
                    )
                if refused is not None:
                    return refused
                at = end
            return None
        finally:
            if refs:
                for queue in self._queues:
                    queue.enqueue(request.namespace.root, refs, self._stamps)

    def _store_window(
        self,
        host: HostTier,
        begin: int,
        end: int,
        refs: list[ChunkRef],
        found: Sequence[Present | None] | None,
    ) -> Reason | None:
        """Store keys [begin, end); append to `refs` what is in host slots now. `found`: which of
        them have a chunk, if that is known. Returns the reason of a refusal.
        """
        request = self._request
        with SlotWriter(host.ledger, host.slab) as writer:
            outcomes = writer.reserve(
                request.keys[begin:end],
                namespace=request.namespace.root,
                start=request.first + begin,
                parent=request.parent_of(begin),
                tokens=request.chunk_tokens,
                stamp=self._stamp,
                admit_all=self._admit_all,
                context=self.context,
                found=found,
                deadline_seconds=self._deadline.remaining(),
            )
            reserved = [
                (i, item)
                for i, item in enumerate(outcomes, begin)
                if isinstance(item, Reserved)
            ]
            committed: list[CommitResult] = []
            if reserved:
                items = [item for _, item in reserved]
                starts = [
                    (request.first + i) * request.chunk_tokens
                    for i, _ in reserved
                ]
                self._kv.to_slots(starts, writer.views(items))
                committed = writer.commit(items, self._deadline.last())
        results = iter(committed)
        for i, item in enumerate(outcomes, begin):
            # Busy: another call is storing it
            if isinstance(item, _KNOWN):
                self._fate[i] = _PRESENT
            elif isinstance(item, Reserved) and next(results):
                self._fate[i] = _NEW
            else:
                continue
            if self._lower and not isinstance(item, Busy):
                refs.append(chunk_ref(request, i, item.slot, item.generation))
        reasons = [item.reason for item in outcomes if isinstance(item, Refused)]
        reasons += [Reason.SUPERSEDED for ok in committed if not ok]
        return reasons[0] if reasons else None

    # -- through staging buffers -------------------------------------------------------------------

    def _store_through_staging(self, patience: Deadline) -> Reason | None:
        """Enqueue the rest for the lower tiers; wait for buffers while `patience` lasts. Return why
        it ended early.
        """
        request = self._request
        begin = self._fate.find(_LEFT)
        if begin < 0 or not self._lower:
            return None if begin < 0 else Reason.TIER_SKIPPED
        tiers = request.tiers
        clears = request.tiers.last_clears()
        self._not_cleared = lambda: tiers.last_clears() == clears
        # up to where each tier takes the run: the chunks it has, and then those that its policy
        # admits
        ends = {
            tier.name: tier.match_prefix(
                request.keys,
                start=request.position_of(0),
                stamp=self._stamps[tier.name],
                namespace=request.namespace.root,
                touch=False,
                deadline_seconds=patience.remaining(),
            )
            for tier in self._lower
        }
        have = max(begin, min(ends.values()))
        refusing = set[str]()
        self._note_present_below(begin, have)
        at = have
        while at < len(request.keys):
            if self._fate[at] != _LEFT:
                at += 1
                continue
            self._admit_ahead(at, ends, refusing)
            if all(end <= at for end in ends.values()):
                return Reason.NOT_ADMITTED
            if self._deadline.passed:
                return Reason.DEADLINE
            group = self._group(at, ends)
            buffers = self._staging.acquire_some(len(group), patience.remaining())
            if not buffers:
                return Reason.QUEUE_FULL
            self._stage(
                group[: len(buffers)],
                buffers,
                {
                    tier: self._stamps[tier]
                    for tier, end in ends.items()
                    if end > at
                },
            )
            at += len(buffers)
            self._deadline.progress()
            latest = self._sent[-self._staging.count :]
            reasons = (staged.refused for _, staged in latest)
            if refused := [
                reason
                for reason in reasons
                if reason not in (None, Reason.NOT_ADMITTED)
            ]:
                return refused[0]
        return None

    def _admit_ahead(
        self, index: int, ends: dict[str, int], refusing: set[str]
    ) -> None:
        """Ask each tier, before anything is copied for it, how far it admits the run from its head
        on.
        """
        request = self._request
        root = self._request.namespace.root
        for tier in self._lower:
            while (end := ends[tier.name]) <= index and tier.name not in refusing:
                keys = request.keys[end:]
                start = request.first + end
                stamp = self._stamps[tier.name]
                count, refuses = tier.admit(
                    keys, namespace=root, start=start, stamp=stamp
                )
                ends[tier.name] += count
                if refuses:
                    refusing.add(tier.name)

    def _note_present_below(self, begin: int, end: int) -> None:
        """Note chunks that every lower tier has; the queues report to the tiers that they were
        stored again.
        """
        request = self._request
        self._fate[begin:end] = bytes([_PRESENT]) * (end - begin)
        if end > begin:

            def refs() -> list[ChunkRef]:
                return [chunk_ref(request, i) for i in range(begin, end)]

            root = request.namespace.root
            left_out = request.tiers.left_out
            access = Access(
                root, refs, end - begin, asked=False, left_out=left_out
            )
            for queue in self._queues:
                queue.note_access(access)

    def _group(self, at: int, ends: Mapping[str, int]) -> range:
        """Return the chunks from `at` on that are staged together: adjacent ones, for the same
        tiers, of not too many bytes.
        """
        stop = min(
            at + max(1, _GROUP_BYTES // self._staging.nbytes),
            len(self._request.keys),
            *(end for end in ends.values() if end > at),
        )
        here = next((i for i in range(at, stop) if self._fate[i] != _LEFT), stop)
        return range(at, here)

    def _stage(
        self,
        group: range,
        buffers: Sequence[Bytes],
        stamps: Mapping[str, int | None],
    ) -> None:
        """Copy adjacent chunks into buffers and enqueue them for the tiers in `stamps`."""
        request = self._request
        filled = False
        try:
            self._kv.to_slots(request.starts(group.start, group.stop), buffers)
            filled = True
        finally:
            if not filled:
                for buffer in buffers:
                    self._staging.release(buffer)
        refs: list[ChunkRef] = []
        for index, buffer in zip(group, buffers, strict=True):
            staged = StagedChunk(
                self._staging, buffer, len(stamps), self._not_cleared
            )
            self._fate[index] = _NEW
            self._sent.append((index, staged))
            refs.append(chunk_ref(request, index, staged=staged))
        for queue in self._queues:
            queue.enqueue(request.namespace.root, refs, stamps)

    def _collect_refused(self) -> Reason | None:
        """Note which chunks no tier below has stored; return the reason of the first."""
        lost = [
            (index, staged.refused)
            for index, staged in self._sent
            if staged.refused is not None
        ]
        for index, _ in lost:
            self._fate[index] = _LEFT
        self._sent = [
            (index, staged)
            for index, staged in self._sent
            if staged.refused is None
        ]
        return lost[0][1] if lost else None
