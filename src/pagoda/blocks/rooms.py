"""Room on the device: how much could be had, and how it is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from pagoda.blocks.moves import Moves, Source
from pagoda.blocks.outcome import Place, Plan, Refused, Waiting
from pagoda.blocks.pool import BlockPool
from pagoda.blocks.record import Record
from pagoda.blocks.tree import Node, Tree, upward

__all__ = ["Rooms"]


class Rooms:
    """The blocks of one device with all that is in them: pool, tree and moves. Not thread-safe."""

    def __init__(self, pool: BlockPool, tree: Tree, moves: Moves) -> None:
        self.pool = pool
        self.tree = tree
        self.moves = moves
        self.paused = False
        self.counts: Counter[str] = Counter()

    def shortage(
        self, blocks: int, path: Sequence[Node] = (), evict: bool = True
    ) -> Waiting | Refused | None:
        """Why `blocks` blocks cannot be made free now: only when moves have ended, or not at all; None: they can.

        Changes nothing. `path` is to be left as it is.
        """
        available = self.available(path, evict)
        if blocks <= available:
            return None
        available += self._kept_by_moves(path) if evict else 0
        if blocks <= available:
            return Waiting(None, frozenset(self.moves.under_way))
        return Refused(blocks, available)

    def _kept_by_moves(self, path: Sequence[Node]) -> int:
        """How many blocks nobody needs but the moves under way, leaving ones apart."""
        locks: dict[Node, int] = {}
        for end in self.moves.ends():
            for node in upward(end):
                locks[node] = locks.get(node, node.locks) - 1
                if locks[node]:
                    break
        kept = {node for node, left in locks.items() if not left}.difference(path)
        return len(kept) + sum(move.size for move in self.moves.ups() if move.void)

    def available(self, path: Sequence[Node], evict: bool) -> int:
        """How many blocks could be had, now or when those that are leaving have left, with `path` left as it is."""
        if not evict:
            return self.pool.free
        unlocked = sum(
            node.place is Place.DEVICE for node in takewhile(lambda node: not node.locks, reversed(path))
        )
        leaving = sum(node.place is Place.TO_HOST for node in path) if self.tree.leaving else 0
        return self.pool.free + self.tree.evictable - unlocked + self.tree.leaving - leaving

    def make(self, blocks: int) -> Waiting | None:
        """See to it that `blocks` are free, of which there is no `shortage`; Waiting if copies have to end before."""
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
        # One that was called back while its copy runs leaves with that copy; parents before children.
        fresh = [node for node in reversed(nodes) if node.ticket not in self.moves.under_way]
        planned = self.moves.down([_source(node) for node in fresh])
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

    def roll_back(self, record: Record) -> None:
        """Let an admitted request wait again: nothing of what its admission did is left but that it used its path."""
        self.pool.give_back(record.own)
        self.unlock(record.tip, self.tree.now())
        record.let_go()

    def unlock(self, node: Node | None, now: int = 0) -> None:
        """End one lock, and free what only that lock kept."""
        if node is not None:
            self.pool.give_back(self.tree.unlock(node, now))


def _source(node: Node) -> Source:
    parent = None if node.parent is None else node.parent.key
    return Source(node.key, node.root, node.position, parent, node.block, node)
