"""The device blocks of one engine: which are free. Ids only; the memory is the engine's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from pagoda.blocks.moves import Moves, Source
from pagoda.blocks.plans import Place, Plan, Refused, Waiting
from pagoda.blocks.request_state import Record
from pagoda.blocks.tree import Node, Tree, upward

__all__ = ["BlockPool", "Rooms"]


class BlockPool:
    """Blocks 0 .. total - 1, each free or somebody's. Not thread-safe. O(1) a block."""

    def __init__(self, num_blocks: int) -> None:
        self._used = bytearray()
        self._free: list[int] = []
        self.resize(num_blocks)

    @property
    def total(self) -> int:
        """How many blocks there are."""
        return len(self._used)

    @property
    def free(self) -> int:
        """How many are nobody's."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many are somebody's."""
        return len(self._used) - len(self._free)

    def resize(self, num_blocks: int) -> None:
        """Set the number of blocks. ValueError if one that goes is in use."""
        self.check_size(num_blocks)
        used = [block for block in range(num_blocks, self.total) if self._used[block]]
        if used:
            raise ValueError(f"blocks {used} are in use: free them before the pool gets {num_blocks} blocks")
        new = range(num_blocks - 1, self.total - 1, -1)
        self._free = [
            *new,
            *(block for block in self._free if block < num_blocks),
        ]  # the lowest first, from the end
        self._used = self._used[:num_blocks] + bytearray(max(0, num_blocks - self.total))

    @staticmethod
    def check_size(num_blocks: int) -> None:
        """Raise ValueError for a number of blocks that no pool has."""
        if num_blocks < 1:
            raise ValueError(f"a pool has at least one block, not {num_blocks}")

    def take(self, count: int) -> list[int] | None:
        """Take `count` free blocks, or none at all if there are fewer. ValueError for a negative count."""
        if count < 0:
            raise ValueError(f"cannot take {count} blocks")
        if count > len(self._free):
            return None
        at = len(self._free) - count
        taken = self._free[at:][::-1]
        del self._free[at:]
        for block in taken:
            self._used[block] = 1
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free blocks. ValueError, and nothing is freed, if one is free already, named twice or not of this pool."""
        foreign = [block for block in blocks if not 0 <= block < len(self._used)]
        if foreign:
            raise ValueError(f"blocks {foreign} are not of this pool of {len(self._used)}")
        twice = sorted({block for block in blocks if not self._used[block]} | _repeated(blocks))
        if twice:
            raise ValueError(f"blocks {twice} are freed twice")
        for block in blocks:
            self._used[block] = 0
        self._free.extend(reversed(blocks))

    def is_free(self, block: int) -> bool:
        """Whether the block is nobody's."""
        return not self._used[block]

    def check(self) -> None:
        """Raise AssertionError unless the list of free blocks is the set of unused ones."""
        free = sorted(self._free)
        unused = [block for block, used in enumerate(self._used) if not used]
        assert free == unused, f"free blocks {free} are not the unused ones {unused}"


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


def _repeated(blocks: Sequence[int]) -> set[int]:
    seen: set[int] = set()
    return {block for block in blocks if block in seen or seen.add(block)}  # type: ignore[func-returns-value]
