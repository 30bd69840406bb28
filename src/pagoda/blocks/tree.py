"""The prefix tree over chained keys: which device block holds which block of which prompt, and which may go first.

A key names a whole prefix, so a dict of keys is the tree and namespaces cannot mix. A node's parent is in the tree;
HOST and STORAGE are not in it: the ledger and the tiers are asked for those.

               insert                          evict                     settled
    (nothing) ────────▶ DEVICE ─────────────────────▶ TO_HOST ──────────────▶ (freed)
                          ▲  ▲         hit: cancel        │                       ▲
              expect      │  └────────────────────────────┘                       │
    (nothing) ────────▶ TO_DEVICE ── settled: arrived ──▶ DEVICE ── drop ─────────┤
                          └──────── did not come ─────────────────────────────────┘

Locks climb: a locked node has locked ancestors, so a request locks the last node of its path and no more. Recency
climbs too, when a child goes: using a path is using all of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from pagoda.blocks.plans import Place

__all__ = ["Node", "Tree", "upward"]

_SPARE = 1024  # stale entries that the heap may hold besides as many as there are candidates


class Node:
    """One block of one prefix. Changed by its tree only."""

    __slots__ = (
        "block",
        "children",
        "detached",
        "entry",
        "key",
        "last_use",
        "locks",
        "parent",
        "place",
        "position",
        "root",
        "ticket",
    )

    def __init__(self, key: bytes, root: bytes, parent: Node | None, block: int, place: Place) -> None:
        self.key = key
        self.root = root  # of its namespace
        self.parent = parent
        self.position: int = 0 if parent is None else parent.position + 1
        self.block = block
        self.place = place
        self.children = 0  # on the device or coming to it; those that leave are not counted
        self.locks = 0  # requests, moves and pins that end here, and locked children
        self.last_use = 0
        self.entry = 0  # the number of its valid entry in the heap; 0: it is no candidate
        self.ticket = 0  # of the move that it is in, or was called back from
        self.detached = False  # no longer found; its block is freed with the last lock


class Tree:
    """The nodes of one device pool. Not thread-safe. Every step is O(1), or O(log n) where a candidate goes."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {}
        self.devices = 0  # nodes with Place.DEVICE, detached ones apart
        self.leaving = 0  # TO_HOST
        self.coming = 0  # TO_DEVICE
        self.locked = 0  # nodes with locks, detached ones apart
        self.detached = 0
        self._heap: list[tuple[int, int, Node]] = []
        self._candidates = 0
        self._entries = 0
        self._now = 0

    @property
    def evictable(self) -> int:
        """Blocks that could be had by evicting: what is on the device and has no lock below it."""
        return self.devices - (self.locked - self.coming)

    def now(self) -> int:
        """A moment later than all before."""
        self._now += 1
        return self._now

    # ---- finding

    def path(self, keys: Sequence[bytes]) -> list[Node]:
        """The leading run of nodes, whatever they are doing. Changes nothing."""
        found = takewhile(_is_node, map(self.nodes.get, keys))
        path: list[Node] = [node for node in found if node is not None]
        if self.leaving:  # one whose parent went before it is out of reach
            for i, node in enumerate(path):
                if node.place is Place.TO_HOST and node.parent is not (path[i - 1] if i else None):
                    return path[:i]
        return path

    # ---- growing

    def insert(self, key: bytes, root: bytes, parent: Node | None, block: int) -> Node:
        """Enter a block whose KV is there, behind `parent`; it is locked once, by whoever had `parent` locked."""
        node = self._grow(key, root, parent, block, Place.DEVICE)
        self.devices += 1
        self.locked += 1
        node.locks = 1
        return node

    def expect(
        self, keys: Sequence[bytes], root: bytes, parent: Node | None, blocks: Sequence[int], ticket: int
    ) -> list[Node]:
        """Enter a run of blocks whose KV is coming, behind `parent`; their move has a lock on the last."""
        nodes: list[Node] = []
        for key, block in zip(keys, blocks, strict=True):
            parent = self._grow(key, root, parent, block, Place.TO_DEVICE)
            parent.ticket = ticket
            nodes.append(parent)
        self.coming += len(nodes)
        self.lock(nodes[-1])
        return nodes

    def _grow(self, key: bytes, root: bytes, parent: Node | None, block: int, place: Place) -> Node:
        node = Node(key, root, parent, block, place)
        node.last_use = self._now
        if parent is not None:
            parent.children += 1
            self._no_candidate(parent)
        self.nodes[key] = node
        return node

    def arrive(self, nodes: Iterable[Node]) -> None:
        """The KV of coming nodes is there."""
        for node in nodes:
            node.place, node.ticket = Place.DEVICE, 0
            self.coming -= 1
            self.devices += 1
            self._maybe_candidate(node)

    def forsake(self, nodes: Sequence[Node]) -> None:
        """Take coming nodes out of the tree, from one of a run to its end; their blocks are the caller's."""
        for node in reversed(nodes):
            assert not node.locks, f"a node that did not come has {node.locks} locks"
            self.coming -= 1
            self._cut(node)

    # ---- locks

    def lock(self, node: Node) -> None:
        """Keep a node, and so its ancestors, from eviction."""
        up: Node | None = node
        while up is not None:
            up.locks += 1
            if up.locks > 1:
                return
            if not up.detached:
                self.locked += 1
            self._no_candidate(up)
            up = up.parent

    def unlock(self, node: Node, now: int) -> list[int]:
        """End one lock, used until `now`. Returns the blocks of detached nodes that nobody needs any more."""
        node.last_use = max(node.last_use, now)
        freed: list[int] = []
        up: Node | None = node
        while up is not None:
            up.locks -= 1
            if up.locks:
                return freed
            parent = up.parent
            if up.detached:
                self.detached -= 1
                freed.append(up.block)
            else:
                self.locked -= 1
                self._maybe_candidate(up)
            up = parent
        return freed

    # ---- going

    def evict(self, count: int) -> list[Node]:
        """Choose up to `count` blocks to leave, least recently used leaves first; they are TO_HOST then.

        Leaf-first LRU; the heap has stale entries that are passed by (as in vLLM's and SGLang's radix caches).
        """
        chosen: list[Node] = []
        heap, pop = self._heap, heapq.heappop
        while len(chosen) < count and heap:
            _, entry, node = pop(heap)
            if node.entry != entry:
                continue
            node.entry = 0
            self._candidates -= 1
            node.place = Place.TO_HOST
            self._childless(node)
            chosen.append(node)
        self.devices -= len(chosen)
        self.leaving += len(chosen)
        return chosen

    def cancel(self, node: Node) -> None:
        """Keep a leaving node after all; its copy goes on. Its parent must be on the device."""
        node.place = Place.DEVICE
        self.leaving -= 1
        self.devices += 1
        if node.parent is not None:
            node.parent.children += 1
            self._no_candidate(node.parent)
        self._maybe_candidate(node)

    def depart(self, nodes: Iterable[Node]) -> list[int]:
        """Leaving nodes are gone; returns their blocks."""
        blocks: list[int] = []
        for node in nodes:
            node.place, node.ticket = Place.FREED, 0
            self.leaving -= 1
            if self.nodes.get(node.key) is node:
                del self.nodes[node.key]
            blocks.append(node.block)
        return blocks

    def drop(self, node: Node) -> int | None:
        """Take one leaf out at once and return its block; None if somebody needs it."""
        if node.place is not Place.DEVICE or node.locks or node.children or node.detached:
            return None
        self.devices -= 1
        self._cut(node)
        return node.block

    def below(self, nodes: Iterable[Node]) -> list[Node]:
        """These nodes and all below them that do not leave, children before their parents. Changes nothing."""
        tops = set(map(id, nodes))
        found: dict[int, bool] = {}

        def is_below(node: Node) -> bool:
            trail = []
            up: Node | None = node
            while up is not None and id(up) not in found and id(up) not in tops:
                trail.append(up)
                up = up.parent
            answer = up is not None and found.get(id(up), True)
            found.update((id(one), answer) for one in trail)
            return answer

        chosen = [node for node in self.nodes.values() if node.place is not Place.TO_HOST and is_below(node)]
        return sorted(chosen, key=lambda node: -node.position)

    def clear(self) -> list[int]:
        """Nothing is found any more. Returns the blocks that nobody needs; locked nodes are detached.

        Moves must be called off before: no node may be coming or leaving.
        """
        assert not self.coming and not self.leaving, "moves are under way"
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
        self.devices = self.locked = self._candidates = 0
        self._heap = []
        return freed

    def _cut(self, node: Node) -> None:
        self._no_candidate(node)
        node.place, node.ticket = Place.FREED, 0
        del self.nodes[node.key]
        self._childless(node)

    def _childless(self, node: Node) -> None:
        """A child goes: its parent has been used as lately as it, and may be the next."""
        parent = node.parent
        if parent is not None:
            parent.children -= 1
            if node.last_use > parent.last_use:
                parent.last_use = node.last_use
            self._maybe_candidate(parent)

    # ---- candidates

    def _maybe_candidate(self, node: Node) -> None:
        if node.locks or node.children or node.entry or node.place is not Place.DEVICE or node.detached:
            return
        self._entries += 1
        self._candidates += 1
        node.entry = self._entries
        heapq.heappush(self._heap, (node.last_use, self._entries, node))
        if len(self._heap) > 2 * self._candidates + _SPARE:
            self._heap = [entry for entry in self._heap if entry[2].entry == entry[1]]
            heapq.heapify(self._heap)

    def _no_candidate(self, node: Node) -> None:
        if node.entry:
            node.entry = 0
            self._candidates -= 1

    # ---- the whole

    def check(self) -> None:
        """Raise AssertionError, with the numbers, unless all that is counted and kept agrees with the nodes."""
        nodes = list(self.nodes.values())
        here = [node for node in nodes if node.place is Place.DEVICE]
        children: dict[int, int] = {}
        locked_children: dict[int, int] = {}
        for node in nodes:
            if node.parent is not None and node.place is not Place.TO_HOST:
                assert self.nodes.get(node.parent.key) is node.parent, (
                    "a node whose parent is not in the tree"
                )
                children[id(node.parent)] = children.get(id(node.parent), 0) + 1
                locked_children[id(node.parent)] = locked_children.get(id(node.parent), 0) + bool(node.locks)
        for node in nodes:
            kept, locks = children.get(id(node), 0), locked_children.get(id(node), 0)
            assert node.children == kept, f"{node.children} children counted, {kept} found"
            assert node.locks >= locks, f"{node.locks} locks, {locks} locked children"
            assert node.place is not Place.TO_HOST or not node.locks, "a leaving node is locked"
            leaf = node.place is Place.DEVICE and not node.children and not node.locks
            assert leaf == bool(node.entry), f"a node is a leaf: {leaf}, a candidate: {bool(node.entry)}"
        coming = sum(node.place is Place.TO_DEVICE for node in nodes)
        locked = sum(node.locks > 0 for node in nodes)
        counted = (self.devices, self.coming, self.locked)
        assert counted == (len(here), coming, locked), (
            f"{counted} counted, {(len(here), coming, locked)} found"
        )
        live = {entry for _, entry, node in self._heap if node.entry == entry}
        assert len(live) == self._candidates == sum(node.entry > 0 for node in nodes), (
            "the heap lost a candidate"
        )


def upward(node: Node | None) -> Iterator[Node]:
    """A node, its parent, and so on to the root."""
    while node is not None:
        yield node
        node = node.parent


def _is_node(node: Node | None) -> bool:
    return node is not None
