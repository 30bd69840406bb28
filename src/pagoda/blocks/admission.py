"""How a waiting request gets its blocks: what its prefix hits, what is brought up from the host, what is its own."""

from __future__ import annotations

import time
from concurrent.futures import Future

from pagoda.blocks.allocator import Rooms
from pagoda.blocks.lower_tiers import Storeys
from pagoda.blocks.plans import Admitted, Match, Place, Plan, Refused, Waiting
from pagoda.blocks.request_state import Record, blocks_for
from pagoda.blocks.tree import Node
from pagoda.cache.hit import Hit
from pagoda.metrics import Reason

__all__ = ["Admission"]


class Admission:
    """Matches and admits records that wait. Not thread-safe."""

    def __init__(self, rooms: Rooms, storeys: Storeys, prefix_caching: bool) -> None:
        self._rooms = rooms
        self._tree = rooms.tree
        self._storeys = storeys
        self._prefix_caching = prefix_caching
        self.match_seconds = 0.0

    # ---- finding

    def match(self, record: Record) -> Match:
        """What an admission would find."""
        self._renew(record)
        keys = record.most_hits()
        device = len(self._path(record))
        host = storage = 0
        if device < len(keys) and not self._rooms.paused:
            host = len(self._storeys.find(keys[device:], device).slots)
            storage = self._storeys.below(keys[device + host :], device + host, record)
        whole = record.before_items(device + host + storage)
        if (whole - device) * record.block_tokens < self._storeys.min_hit_tokens:
            whole = record.before_items(device)
        device = min(device, whole)
        host = min(host, whole - device)
        storage = whole - device - host
        return Match(*(blocks * record.block_tokens for blocks in (device, host, storage)))

    def prefetch(self, record: Record) -> Future[Hit] | None:
        """Begin to bring up to the host what the device lacks."""
        self._renew(record)
        keys, device = record.most_hits(), len(self._path(record))
        if self._rooms.paused:
            return None
        host = len(self._storeys.find(keys[device:], device).slots)
        if device + host < len(keys):
            record.fetch = self._storeys.fetch(keys, device, record)
        return record.fetch

    def _renew(self, record: Record) -> None:
        """Hash anew if the weights were changed, here or by another process."""
        if self._prefix_caching:
            root = self._storeys.root(record.lora, record.salt)
            if root != record.root:
                record.rehash(root)

    def _path(self, record: Record, alone: bool = False) -> list[Node]:
        """The nodes that the request would share.

        They may end inside an item if the host has the rest of it, unless they are to stand `alone`. Changes nothing.
        """
        keys = record.most_hits()
        path = self._tree.path(keys)
        whole = record.before_items(len(path))
        if whole < len(path) < len(keys) and not alone and not self._rooms.paused:
            found = self._storeys.find(keys[len(path) :], len(path), touch=False)
            if record.before_items(len(path) + len(found.slots)) >= len(path):
                return path
        return path[:whole]

    # ---- admission

    def admit(
        self, record: Record, reserve_tokens: int, evict: bool, chunk_tokens: int | None
    ) -> Admitted | Waiting | Refused:
        """Give a request its blocks."""
        self._renew(record)
        most = record.num_tokens + reserve_tokens
        answer = self._try(record, self._path(record), most, evict, chunk_tokens)
        if answer is None:  # the host has not the rest of an item, or there is no room for it
            answer = self._try(record, self._path(record, alone=True), most, evict, chunk_tokens)
            assert answer is not None, "a path that stands alone needs nothing of the host"
        return answer

    def _wanted(
        self, record: Record, device: int, most_tokens: int, chunk_tokens: int | None
    ) -> tuple[int, int]:
        """How many new blocks it must get behind `device` hits, and how many it could use now."""
        most = least = blocks_for(most_tokens, record.block_tokens) - device
        if chunk_tokens is not None:
            chunk, keys = blocks_for(chunk_tokens, record.block_tokens), record.most_hits()[device:]
            found = 0 if self._rooms.paused else len(self._storeys.find(keys, device, touch=False).slots)
            least, most = min(least, chunk), min(most, found + chunk)
        return least, most

    def _try(
        self,
        record: Record,
        path: list[Node],
        most_tokens: int,
        evict: bool,
        chunk_tokens: int | None,
    ) -> Admitted | Waiting | Refused | None:
        """Give a request its blocks behind a path. Up to the refusal nothing is changed.

        None: the path ends inside an item, and the rest did not come up; the request waits again.
        """
        began = time.perf_counter()
        least, most = self._wanted(record, len(path), most_tokens, chunk_tokens)
        shortage = self._rooms.shortage(least, path, evict)
        if shortage is not None:
            return shortage
        new = max(least, min(most, self._rooms.available(path, evict)))
        self._rooms.call_back(path)
        tip = path[-1] if path else None
        if tip is not None:
            self._tree.lock(tip)
        waiting = self._rooms.make(new)
        if waiting is not None:
            self._rooms.unlock(tip, self._tree.now())
            return waiting
        self._take(record, path, new)
        self.match_seconds += time.perf_counter() - began
        plan = self._bring_up(record)
        if record.before_items(record.entered) < record.entered:
            self._rooms.roll_back(record)
            return None
        return self._admitted(record, len(path), plan)

    def _take(self, record: Record, path: list[Node], new: int) -> None:
        blocks = self._rooms.pool.take(new)
        assert blocks is not None, "make() has seen to it that they are free"
        record.admitted = True
        record.tip = path[-1] if path else None
        record.table = [node.block for node in path] + blocks
        record.entered = len(path)
        if self._tree.coming:
            coming = {node.ticket for node in path if node.place is Place.TO_DEVICE}
            self._rooms.moves.wait(record, coming)

    def _bring_up(self, record: Record) -> Plan | None:
        """Plan to fill blocks behind the path from the host, as far as it has them and keeps them."""
        keys, device = record.most_hits(), record.entered
        if device == len(keys) or self._rooms.paused:
            return None
        match = self._storeys.find(keys[device:], device)
        stop = min(device + len(match.slots), len(record.table))
        count = max(0, record.before_items(stop) - device)
        reason, held = match.reason, 0
        if 0 < count * record.block_tokens < self._storeys.min_hit_tokens:
            reason = Reason.BELOW_MINIMUM
        elif count:
            held = self._storeys.hold(
                match.slots[:count],
                match.generations[:count],
                lambda n: record.before_items(device + n) - device,
            )
        self._storeys.asked(record, len(keys) - device, held, reason)
        if not held:
            return None
        move = self._rooms.moves.begin_up(record.request_id, match.slots[:held], match.generations[:held])
        parent, stop = record.tip, device + held
        if parent is not None and parent.place is Place.TO_DEVICE:
            move.behind = parent.ticket
        blocks = record.table[device:stop]
        move.nodes = self._tree.expect(keys[device:stop], record.root, parent, blocks, move.ticket)
        self._tree.lock(move.nodes[-1])
        self._rooms.unlock(parent)
        record.tip, record.entered = move.nodes[-1], stop
        plan = self._rooms.moves.up(move)
        self._rooms.moves.wait(record, [move.ticket])
        return plan

    def _admitted(self, record: Record, device: int, plan: Plan | None) -> Admitted:
        record.computed_tokens = record.entered * record.block_tokens
        below = self._storeys.by_tier(record, record.entered - device)
        record.fetch = None  # whatever it brought, it brought for this admission
        by_tier = {"device": device * record.block_tokens, **below} if device else below
        counts = self._rooms.counts
        counts["requests"] += 1
        counts["hit_requests"] += record.entered > 0
        counts["asked_tokens"] += record.num_tokens
        for tier, tokens in by_tier.items():
            counts[f"hit_tokens_{tier if tier in ('device', 'host') else 'storage'}"] += tokens
        waits = frozenset(record.waits)
        return Admitted(list(record.table), record.entered, record.computed_tokens, by_tier, plan, waits)
