"""The prefix tree over chained keys: which device block holds which block of a prompt, and which is
evicted first.

A key names a whole prefix, so a dict of keys is the tree and namespaces cannot mix. A node's parent
is in the tree; HOST and STORAGE are not in it: the manager asks the ledger and the tiers for those.

               insert                          evict                     settled
    (nothing) ────────▶ DEVICE ─────────────────────▶ TO_HOST ──────────────▶ (freed)
                          ▲  ▲         hit: cancel        │                       ▲
      insert_loading      │  └────────────────────────────┘                       │
    (nothing) ────────▶ TO_DEVICE ── settled: loaded ───▶ DEVICE ── remove ───────┤
                          └──────── not loaded ───────────────────────────────────┘

Locks propagate upwards: a locked node has locked ancestors, so a request only locks the last node
of its path. Recency propagates too when a child is removed: a use of a path is a use of all its
nodes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pagoda.blocks.manager_results import Place

# the stale entries that the heap may hold, besides one per candidate
_SPARE = 1024


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One block of one prefix. Changed by its tree only."""

    key: bytes
    root: bytes  # the root of its namespace
    parent: Node | None
    position: int
    block: int
    place: Place
    last_use: int
    # on the device or loading; not counting those that are being evicted
    children: int = 0
    # number of requests, moves and pins that end here, and of locked children
    locks: int = 0
    # the number of its valid entry in the heap; 0: not a candidate
    entry: int = 0
    # the ticket of its move, or of its last move if the eviction was cancelled
    ticket: int = 0
    # no longer found; its block is freed with the last lock
    detached: bool = False

    @property
    def parent_key(self) -> bytes | None:
        """The key of its parent; None for the first block of a prompt."""
        return None if self.parent is None else self.parent.key


class Tree:
    """The nodes of one device pool. Not thread-safe. Every step is O(1), or O(log n) if a candidate
    is evicted.
    """

    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {}
        self.on_device = 0  # nodes with Place.DEVICE, without detached ones
        self.evicting = 0  # TO_HOST
        self.loading = 0  # TO_DEVICE
        self.locked = 0  # nodes with locks, without detached ones
        self.detached = 0
        self._heap: list[tuple[int, int, Node]] = []
        self._candidates = 0
        self._entries = 0
        self._now = 0

    @property
    def evictable(self) -> int:
        """The number of blocks that eviction could free: nodes on the device with no lock on or
        below them.
        """
        return self.on_device - (self.locked - self.loading)

    def now(self) -> int:
        """Return a time that is later than all earlier ones."""
        self._now += 1
        return self._now

    # ---- finding

    def path(self, keys: Sequence[bytes]) -> list[Node]:
        """Return the leading run of nodes, whatever their place. Changes nothing."""
        path: list[Node] = []
        parent = None
        evicting = self.evicting
        for node in map(self.nodes.get, keys):
            # a node whose parent was evicted earlier cannot be reached
            if node is None or (
                evicting
                and node.place is Place.TO_HOST
                and node.parent is not parent
            ):
                break
            path.append(node)
            parent = node
        return path

    def child(self, parent: Node | None, key: bytes) -> Node | None:
        """Return the node of `key` below `parent`; None if there is none, or it cannot be reached.
        Changes nothing.
        """
        node = self.nodes.get(key)
        return node if node is not None and node.parent is parent else None

    # ---- growing

    def insert(
        self, key: bytes, root: bytes, parent: Node | None, block: int
    ) -> Node:
        """Insert a block whose KV is complete, below `parent`; it takes over one lock of
        `parent`.
        """
        node = self._new_node(key, root, parent, block, Place.DEVICE)
        self.on_device += 1
        self.locked += 1
        node.locks = 1
        return node

    def insert_loading(
        self,
        keys: Sequence[bytes],
        root: bytes,
        parent: Node | None,
        blocks: Sequence[int],
        ticket: int,
    ) -> list[Node]:
        """Insert a run of blocks whose KV is being loaded, below `parent`; their move has a lock on
        the last.
        """
        nodes: list[Node] = []
        for key, block in zip(keys, blocks, strict=True):
            parent = self._new_node(key, root, parent, block, Place.TO_DEVICE)
            parent.ticket = ticket
            nodes.append(parent)
        self.loading += len(nodes)
        self.lock(nodes[-1])
        return nodes

    def _new_node(
        self,
        key: bytes,
        root: bytes,
        parent: Node | None,
        block: int,
        place: Place,
    ) -> Node:
        assert self.child(parent, key) is None, (
            "a node that can be reached is inserted again"
        )
        position = 0 if parent is None else parent.position + 1
        node = Node(key, root, parent, position, block, place, self._now)
        if parent is not None:
            parent.children += 1
            self._drop_candidate(parent)
        self.nodes[key] = node
        return node

    def finish_loading(self, nodes: Iterable[Node]) -> None:
        """Note that the KV of loading nodes is complete."""
        for node in nodes:
            node.place = Place.DEVICE
            node.ticket = 0
            self.loading -= 1
            self.on_device += 1
            self._add_candidate(node)

    def remove_loading(self, nodes: Sequence[Node]) -> None:
        """Remove the loading nodes at the end of a run; the caller gets their blocks."""
        for node in reversed(nodes):
            assert not node.locks, (
                f"a node that was not loaded has {node.locks} locks"
            )
            self.loading -= 1
            self._unlink(node)

    # ---- locks

    def lock(self, node: Node) -> None:
        """Protect a node, and so its ancestors, from eviction."""
        for up in upward(node):
            up.locks += 1
            if up.locks > 1:
                return
            if not up.detached:
                self.locked += 1
            self._drop_candidate(up)

    def unlock(self, node: Node, now: int) -> list[int]:
        """End one lock, whose node was used until `now`. Returns the blocks of detached nodes
        without locks.
        """
        node.last_use = max(node.last_use, now)
        freed: list[int] = []
        up: Node | None = node
        while up is not None:
            up.locks -= 1
            if up.locks:
                break
            if up.detached:
                self.detached -= 1
                freed.append(up.block)
            else:
                self.locked -= 1
                self._add_candidate(up)
            up = up.parent
        return freed

    # ---- removing

    def evict(self, count: int) -> list[Node]:
        """Choose up to `count` blocks to evict, least recently used leaves first; their place is
        then TO_HOST.

        Leaf-first LRU; the heap has stale entries, which are skipped (as in vLLM's and SGLang's
        radix caches).
        """
        chosen: list[Node] = []
        heap = self._heap
        pop = heapq.heappop
        while len(chosen) < count and heap:
            _, entry, node = pop(heap)
            if node.entry != entry:
                continue
            node.entry = 0
            self._candidates -= 1
            node.place = Place.TO_HOST
            self._child_removed(node)
            chosen.append(node)
        self.on_device -= len(chosen)
        self.evicting += len(chosen)
        return chosen

    def cancel_eviction(self, node: Node) -> None:
        """Cancel the eviction of a node; its copy continues. Its parent must be on the device."""
        node.place = Place.DEVICE
        self.evicting -= 1
        self.on_device += 1
        if node.parent is not None:
            node.parent.children += 1
            self._drop_candidate(node.parent)
        self._add_candidate(node)

    def remove_evicted(self, nodes: Iterable[Node]) -> list[int]:
        """Remove nodes that were being evicted; returns their blocks."""
        blocks: list[int] = []
        for node in nodes:
            node.place = Place.FREED
            node.ticket = 0
            self.evicting -= 1
            if self.nodes.get(node.key) is node:
                del self.nodes[node.key]
            blocks.append(node.block)
        return blocks

    def remove(self, node: Node) -> int | None:
        """Remove one leaf at once and return its block; None if it is in use."""
        if (
            node.place is not Place.DEVICE
            or node.locks
            or node.children
            or node.detached
        ):
            return None
        self.on_device -= 1
        self._unlink(node)
        return node.block

    def subtree(self, nodes: Iterable[Node]) -> list[Node]:
        """Return these nodes and all below that are not being evicted, children before parents.
        Changes nothing.
        """
        below: set[Node | None] = set(nodes)
        chosen: list[Node] = []
        # parents before children
        for node in sorted(self.nodes.values(), key=lambda node: node.position):
            if node in below or node.parent in below:
                below.add(node)
                if node.place is not Place.TO_HOST:
                    chosen.append(node)
        return chosen[::-1]

    def clear(self) -> list[int]:
        """Remove all nodes. Returns the blocks without locks; locked nodes are detached.

        Moves must be cancelled before: no node may be loading or being evicted.
        """
        assert not self.loading and not self.evicting, "moves are in flight"
        freed: list[int] = []
        for node in self.nodes.values():
            node.entry = 0
            if node.locks:
                node.detached = True
                self.detached += 1
            else:
                node.place = Place.FREED
                freed.append(node.block)
        self.nodes = {}
        self.on_device = self.locked = self._candidates = 0
        self._heap = []
        return freed

    def _unlink(self, node: Node) -> None:
        self._drop_candidate(node)
        node.place = Place.FREED
        node.ticket = 0
        del self.nodes[node.key]
        self._child_removed(node)

    def _child_removed(self, node: Node) -> None:
        """Note that a child is removed: its parent counts as used at the same time, and may become
        a candidate.
        """
        parent = node.parent
        if parent is not None:
            parent.children -= 1
            if node.last_use > parent.last_use:
                parent.last_use = node.last_use
            self._add_candidate(parent)

    # ---- candidates

    def _add_candidate(self, node: Node) -> None:
        if (
            node.locks
            or node.children
            or node.entry
            or node.place is not Place.DEVICE
            or node.detached
        ):
            return
        self._entries += 1
        self._candidates += 1
        node.entry = self._entries
        heapq.heappush(self._heap, (node.last_use, self._entries, node))
        if len(self._heap) > 2 * self._candidates + _SPARE:
            self._heap = [
                entry for entry in self._heap if entry[2].entry == entry[1]
            ]
            heapq.heapify(self._heap)

    def _drop_candidate(self, node: Node) -> None:
        if node.entry:
            node.entry = 0
            self._candidates -= 1

    # ---- invariants

    def check(self) -> None:
        """Raise AssertionError, with the numbers, unless all counters and entries agree with the
        nodes.
        """
        nodes = list(self.nodes.values())
        children = Counter[Node]()
        locked_children = Counter[Node]()
        for node in nodes:
            if (
                parent := node.parent
            ) is not None and node.place is not Place.TO_HOST:
                assert self.nodes.get(parent.key) is parent, (
                    "a node whose parent is not in the tree"
                )
                children[parent] += 1
                locked_children[parent] += bool(node.locks)
        for node in nodes:
            kept = children[node]
            locks = locked_children[node]
            assert node.children == kept, (
                f"{node.children} children counted, {kept} found"
            )
            assert node.locks >= locks, (
                f"{node.locks} locks, {locks} locked children"
            )
            assert node.place is not Place.TO_HOST or not node.locks, (
                "a node that is being evicted is locked"
            )
            leaf = (
                node.place is Place.DEVICE
                and not node.children
                and not node.locks
            )
            assert leaf == bool(node.entry), (
                f"a node is a leaf: {leaf}, a candidate: {bool(node.entry)}"
            )
        places = Counter(node.place for node in nodes)
        found = (
            places[Place.DEVICE],
            places[Place.TO_DEVICE],
            sum(node.locks > 0 for node in nodes),
        )
        counted = (self.on_device, self.loading, self.locked)
        assert counted == found, f"{counted} counted, {found} found"
        live = {entry for _, entry, node in self._heap if node.entry == entry}
        candidates = sum(node.entry > 0 for node in nodes)
        assert len(live) == self._candidates == candidates, (
            "the heap lost a candidate"
        )


def upward(node: Node | None) -> Iterator[Node]:
    """Return a node, its parent, and so on to the root."""
    while node is not None:
        yield node
        node = node.parent
