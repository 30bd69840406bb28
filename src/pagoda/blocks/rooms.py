"""Room on the device: how much could be had, and how it is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from pagoda.blocks.moves import Moves, Source
from pagoda.blocks.outcome import Place, Plan, Waiting
from pagoda.blocks.pool import BlockPool
from pagoda.blocks.tree import Node, Tree

__all__ = ["Rooms"]


class Rooms:
    """The blocks of one device with all that is in them: pool, tree and moves. Not thread-safe."""

    def __init__(self, pool: BlockPool, tree: Tree, moves: Moves) -> None:
        self.pool = pool
        self.tree = tree
        self.moves = moves
        self.paused = False
        self.counts: Counter[str] = Counter()

    def available(self, path: Sequence[Node] = (), evict: bool = True) -> int:
        """How many blocks could be had, now or when the moves under way have ended, with `path` left as it is."""
        if not evict:
            return self.pool.free
        unlocked = sum(
            node.place is Place.DEVICE for node in takewhile(lambda node: not node.locks, reversed(path))
        )
        leaving = sum(node.place is Place.TO_HOST for node in path) if self.tree.leaving else 0
        return self.pool.free + self.tree.evictable - unlocked + self.tree.leaving - leaving

    def make(self, blocks: int) -> Waiting | None:
        """See to it that `blocks` are free, which must be `available`; Waiting if copies have to end before."""
        short = blocks - self.pool.free
        if short <= 0:
            return None
        plan = self.lower(short - self.tree.leaving)
        if self.pool.free >= blocks:
            return None
        tickets = (move.ticket for move in self.moves.downs() if move.leaving())
        return Waiting(plan, frozenset(tickets))

    def lower(self, blocks: int) -> Plan | None:
        """Evict up to `blocks` blocks: to the host as far as it has room, what needs no copy at once."""
        nodes = self.tree.evict(blocks)
        self.counts["evicted_blocks"] += len(nodes)
        if self.paused or self.moves.slots is None:
            self.counts["dropped_blocks"] += len(nodes)
            self.pool.give_back(self.tree.depart(nodes))
            return None
        planned = self.moves.down([_source(node) for node in reversed(nodes)])  # parents before children
        self.counts["dropped_blocks"] += planned.refused
        self.pool.give_back(self.tree.depart([one.node for one in planned.uncopied if one.node is not None]))
        return planned.plan

    def call_back(self, path: Sequence[Node]) -> None:
        """Keep what is leaving on a path that was hit."""
        if self.tree.leaving:
            for node in path:
                if node.place is Place.TO_HOST:
                    self.tree.cancel(node)
                    self.counts["cancelled_moves"] += 1

    def unlock(self, node: Node | None, now: int = 0) -> None:
        """End one lock, and free what only that lock kept."""
        if node is not None:
            self.pool.give_back(self.tree.unlock(node, now))


def _source(node: Node) -> Source:
    parent = None if node.parent is None else node.parent.key
    return Source(node.key, node.root, node.position, parent, node.block, node)
