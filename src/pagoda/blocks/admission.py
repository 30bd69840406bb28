"""Admission of a waiting request: it gets blocks that its prefix hits, blocks loaded from the host,
and new ones.
"""

from __future__ import annotations

import time
from concurrent.futures import Future

from pagoda.base.metrics import Reason
from pagoda.blocks.allocator import BlockAllocator
from pagoda.blocks.manager_results import (
    Admitted,
    NoRoom,
    Place,
    Plan,
    PrefixMatch,
    Waiting,
)
from pagoda.blocks.moves import LoadMove
from pagoda.blocks.request_state import RequestState, blocks_for
from pagoda.blocks.tree import Node
from pagoda.cache.results import Hit


class AdmissionControl:
    """Matches and admits waiting requests. Not thread-safe."""

    def __init__(self, allocator: BlockAllocator, prefix_caching: bool) -> None:
        self._allocator = allocator
        self._tree = allocator.tree
        self._moves = allocator.moves
        self._lower_tiers = allocator.lower_tiers
        self._prefix_caching = prefix_caching
        self.match_seconds = 0.0

    # ---- finding

    def match(self, request: RequestState) -> PrefixMatch:
        """Return what an admission would find."""
        self._rehash_if_changed(request)
        keys = request.matchable_keys()
        device = len(self._device_path(request))
        host = len(self._lower_tiers.match_host(keys[device:], device).slots)
        storage = self._lower_tiers.match_lower(
            keys[device + host :], device + host, request
        )
        whole = request.align_to_items(device + host + storage)
        if (
            whole - device
        ) * request.block_tokens < self._lower_tiers.min_hit_tokens:
            whole = request.align_to_items(device)
        device = min(device, whole)
        host = min(host, whole - device)
        storage = whole - device - host
        return PrefixMatch(
            *(blocks * request.block_tokens for blocks in (device, host, storage))
        )

    def prefetch(self, request: RequestState) -> Future[Hit] | None:
        """Begin to load into the host tier what the device lacks."""
        self._rehash_if_changed(request)
        keys = request.matchable_keys()
        device = len(self._device_path(request))
        if self._lower_tiers.paused:
            return None
        host = len(self._lower_tiers.match_host(keys[device:], device).slots)
        if device + host < len(keys):
            request.fetch = self._lower_tiers.prefetch(keys, device, request)
        return request.fetch

    def _rehash_if_changed(self, request: RequestState) -> None:
        """Hash the request again if the weights have changed, here or in another process."""
        if self._prefix_caching:
            root = self._lower_tiers.root(request.lora, request.salt)
            if root != request.root:
                request.rehash(root)

    def _device_path(
        self, request: RequestState, alone: bool = False
    ) -> list[Node]:
        """Return the nodes that the request would share. Changes nothing.

        Unless `alone`, they may end inside an item if the host has the rest of it.
        """
        keys = request.matchable_keys()
        path = self._tree.path(keys)
        whole = request.align_to_items(len(path))
        if whole < len(path) < len(keys) and not alone:
            found = self._lower_tiers.match_host(
                keys[len(path) :], len(path), touch=False
            )
            if request.align_to_items(len(path) + len(found.slots)) >= len(path):
                return path
        return path[:whole]

    # ---- admission

    def admit(
        self,
        request: RequestState,
        reserve_tokens: int,
        evict: bool,
        chunk_tokens: int | None,
    ) -> Admitted | Waiting | NoRoom:
        """Give a request its blocks."""
        self._rehash_if_changed(request)
        most = request.num_tokens + reserve_tokens
        answer = self._try_admit(
            request, self._device_path(request), most, evict, chunk_tokens
        )
        # the host lacks the rest of an item, or there is no room for it
        if answer is None:
            path = self._device_path(request, alone=True)
            answer = self._try_admit(request, path, most, evict, chunk_tokens)
            assert answer is not None, (
                "a path that ends at an item needs nothing of the host"
            )
        return answer

    def _wanted(
        self,
        request: RequestState,
        device: int,
        most_tokens: int,
        chunk_tokens: int | None,
    ) -> tuple[int, int]:
        """Return how many new blocks the request needs after `device` hits, and how many it could
        use now.
        """
        most = least = blocks_for(most_tokens, request.block_tokens) - device
        if chunk_tokens is not None:
            chunk = blocks_for(chunk_tokens, request.block_tokens)
            keys = request.matchable_keys()[device:]
            found = len(
                self._lower_tiers.match_host(keys, device, touch=False).slots
            )
            least = min(least, chunk)
            most = min(most, found + chunk)
        return least, most

    def _try_admit(
        self,
        request: RequestState,
        path: list[Node],
        most_tokens: int,
        evict: bool,
        chunk_tokens: int | None,
    ) -> Admitted | Waiting | NoRoom | None:
        """Give a request its path and the blocks after it. A refusal changes nothing.

        None: the path ends inside an item whose rest was not loaded; the request waits again.
        """
        began = time.perf_counter()
        least, most = self._wanted(request, len(path), most_tokens, chunk_tokens)
        shortage = self._allocator.shortage(least, path, evict)
        if shortage is not None:
            return shortage
        new = max(least, min(most, self._allocator.available(path, evict)))
        self._allocator.cancel_evictions(path)
        last_node = path[-1] if path else None
        if last_node is not None:
            self._tree.lock(last_node)
        waiting = self._allocator.make_room(new)
        if waiting is not None:
            self._allocator.unlock(last_node, self._tree.now())
            return waiting
        self._allocate(request, path, new)
        self.match_seconds += time.perf_counter() - began
        plan = self._plan_load(request)
        if request.align_to_items(request.num_in_tree) < request.num_in_tree:
            self._allocator.requeue(request)
            return None
        return self._admitted(request, len(path), plan)

    def _allocate(
        self, request: RequestState, path: list[Node], new: int
    ) -> None:
        blocks = self._allocator.pool.allocate(new)
        assert blocks is not None, "make_room() has freed them"
        request.admitted = True
        request.last_node = path[-1] if path else None
        request.table = [node.block for node in path] + blocks
        request.num_in_tree = len(path)
        if self._tree.loading:
            loading = {
                node.ticket for node in path if node.place is Place.TO_DEVICE
            }
            self._moves.wait_for(request, loading)

    def _plan_load(self, request: RequestState) -> Plan | None:
        """Plan to load the blocks after the path from the host, as far as the host has and holds
        them.
        """
        keys = request.matchable_keys()
        device = request.num_in_tree
        parent = request.last_node
        if device == len(keys) or self._lower_tiers.paused:
            return None
        match = self._lower_tiers.match_host(keys[device:], device)
        stop = min(device + len(match.slots), len(request.table))
        count = max(0, request.align_to_items(stop) - device)
        reason = match.reason
        held = 0
        if self._tree.child(parent, keys[device]) is not None:
            # the path was cut before an item: the tree has these keys, and must not get them twice
            count = 0
        if 0 < count * request.block_tokens < self._lower_tiers.min_hit_tokens:
            reason = Reason.BELOW_MINIMUM
        elif count:
            held = self._lower_tiers.hold(
                match,
                count,
                lambda n: request.align_to_items(device + n) - device,
            )
        # a path that still ends inside an item is cut, and this is done again
        if request.align_to_items(device + held) == device + held:
            self._lower_tiers.count_request(
                request, len(keys) - device, held, reason
            )
        if not held:
            return None
        stop = device + held
        ticket = self._moves.new_ticket()
        depends_on = (
            parent.ticket
            if parent is not None and parent.place is Place.TO_DEVICE
            else 0
        )
        blocks = request.table[device:stop]
        nodes = self._tree.insert_loading(
            keys[device:stop], request.root, parent, blocks, ticket
        )
        self._tree.lock(nodes[-1])
        self._allocator.unlock(parent)
        request.last_node = nodes[-1]
        request.num_in_tree = stop
        slots = match.slots[:held]
        generations = match.generations[:held]
        plan = self._moves.plan_load(
            LoadMove(
                ticket, nodes, slots, generations, request.request_id, depends_on
            )
        )
        self._moves.wait_for(request, [ticket])
        return plan

    def _admitted(
        self, request: RequestState, device: int, plan: Plan | None
    ) -> Admitted:
        request.computed_tokens = request.num_in_tree * request.block_tokens
        below = self._lower_tiers.by_tier(request, request.num_in_tree - device)
        request.fetch = None  # the prefetch was for this admission
        by_tier = (
            {"device": device * request.block_tokens, **below}
            if device
            else below
        )
        counts = self._allocator.counts
        counts["requests"] += 1
        counts["hit_requests"] += request.num_in_tree > 0
        counts["asked_tokens"] += request.num_tokens
        for tier, tokens in by_tier.items():
            counts[
                f"hit_tokens_{tier if tier in ('device', 'host') else 'storage'}"
            ] += tokens
        table = list(request.table)
        waits = frozenset(request.waits)
        return Admitted(
            table,
            request.num_in_tree,
            request.computed_tokens,
            by_tier,
            plan,
            waits,
        )
