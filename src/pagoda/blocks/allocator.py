"""The device blocks of one engine: the free ones, and eviction to free more. Ids only; the memory
is the engine's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

from pagoda.blocks.lower_tiers import LowerTiers
from pagoda.blocks.manager_results import NoRoom, Place, Plan, Waiting
from pagoda.blocks.moves import Moves, Source
from pagoda.blocks.request_state import RequestState
from pagoda.blocks.tree import Node, Tree, upward


class BlockPool:
    """Blocks 0 .. total - 1, each free or in use. Not thread-safe. O(1) per block."""

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
        """How many blocks are free."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many blocks are in use."""
        return len(self._used) - len(self._free)

    def resize(self, num_blocks: int) -> None:
        """Set the number of blocks. Raises ValueError if a removed one is in use."""
        self.check_size(num_blocks)
        if used := [
            block for block in range(num_blocks, self.total) if self._used[block]
        ]:
            raise ValueError(
                f"blocks {used} are in use: free them before the pool gets {num_blocks} blocks"
            )
        new = range(num_blocks - 1, self.total - 1, -1)
        # the lowest block is at the end and is allocated first
        self._free = [
            *new,
            *(block for block in self._free if block < num_blocks),
        ]
        self._used = self._used[:num_blocks] + bytearray(
            max(0, num_blocks - self.total)
        )

    @staticmethod
    def check_size(num_blocks: int) -> None:
        """Raise ValueError for a number of blocks below 1."""
        if num_blocks < 1:
            raise ValueError(f"a pool has at least one block, not {num_blocks}")

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` free blocks; None if fewer are free. Raises ValueError for a negative
        count.
        """
        if count < 0:
            raise ValueError(
                f"cannot allocate {count} blocks: the count must not be negative"
            )
        if count > len(self._free):
            return None
        at = len(self._free) - count
        taken = self._free[at:][::-1]
        del self._free[at:]
        for block in taken:
            self._used[block] = 1
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Free blocks. Raises ValueError, and frees none, if one is already free, given twice or
        not of this pool.
        """
        if foreign := [
            block for block in blocks if not 0 <= block < len(self._used)
        ]:
            raise ValueError(
                f"blocks {foreign} are not of this pool of {len(self._used)}"
            )
        if len({block for block in blocks if self._used[block]}) < len(blocks):
            twice = sorted(
                {
                    block
                    for block in blocks
                    if not self._used[block] or blocks.count(block) > 1
                }
            )
            raise ValueError(f"blocks {twice} are freed twice")
        for block in blocks:
            self._used[block] = 0
        self._free.extend(reversed(blocks))

    def is_free(self, block: int) -> bool:
        """Whether the block is free."""
        return not self._used[block]

    def check(self) -> None:
        """Raise AssertionError unless the list of free blocks is the set of unused ones."""
        free = sorted(self._free)
        unused = [block for block, used in enumerate(self._used) if not used]
        assert free == unused, (
            f"free blocks {free} are not the unused ones {unused}"
        )


class BlockAllocator:
    """The state of one manager: pool, prefix tree, moves, requests and lower tiers. Not
    thread-safe.

    Its methods are shared by admission, finished moves and the manager: allocate, evict to make
    room, and unlock.
    """

    def __init__(self, num_blocks: int, lower_tiers: LowerTiers) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = Tree()
        self.lower_tiers = lower_tiers
        self.moves = Moves(lower_tiers.slots)
        self.requests: dict[str, RequestState] = {}
        self.counts: Counter[str] = Counter()

    def shortage(
        self, blocks: int, path: Sequence[Node] = (), evict: bool = True
    ) -> Waiting | NoRoom | None:
        """Return why `blocks` blocks cannot be freed now: after moves have ended, or never; None if
        they can.

        Changes nothing. Nodes of `path` are not evicted.
        """
        available = self.available(path, evict)
        if blocks <= available:
            return None
        available += self._held_by_moves(path) if evict else 0
        if blocks <= available:
            return Waiting(None, frozenset(self.moves.in_flight))
        return NoRoom(blocks, available)

    def _held_by_moves(self, path: Sequence[Node]) -> int:
        """Return how many blocks are held only by moves in flight, without those being evicted."""
        locks: dict[Node, int] = {}
        for end in self.moves.locked_nodes():
            for node in upward(end):
                locks[node] = locks.get(node, node.locks) - 1
                if locks[node]:
                    break
        kept = {node for node, left in locks.items() if not left}.difference(path)
        return len(kept) + sum(
            move.size for move in self.moves.loads() if move.cancelled
        )

    def available(self, path: Sequence[Node], evict: bool) -> int:
        """Return how many blocks are free or can be freed, also after evictions in flight, without
        evicting `path`.
        """
        if not evict:
            return self.pool.free
        tail = takewhile(lambda node: not node.locks, reversed(path))
        unlocked = sum(node.place is Place.DEVICE for node in tail)
        evicting = 0
        if self.tree.evicting:
            evicting = sum(node.place is Place.TO_HOST for node in path)
        return (
            self.pool.free
            + self.tree.evictable
            - unlocked
            + self.tree.evicting
            - evicting
        )

    def make_room(self, blocks: int) -> Waiting | None:
        """Make `blocks` blocks free, after `shortage` was None; return Waiting if copies must end
        first.
        """
        short = blocks - self.pool.free
        if short <= 0:
            return None
        plan = self.evict(short - self.tree.evicting)
        if self.pool.free >= blocks:
            return None
        tickets = (move.ticket for move in self.moves.stores() if move.evicting())
        return Waiting(plan, frozenset(tickets))

    def evict(self, blocks: int) -> Plan | None:
        """Evict up to `blocks` blocks: to the host as far as it has room; those that need no copy
        are freed at once.
        """
        nodes = self.tree.evict(blocks)
        self.counts["evicted_blocks"] += len(nodes)
        if self.lower_tiers.paused or self.moves.slots is None:
            self.counts["dropped_blocks"] += len(nodes)
            self.pool.release(self.tree.remove_evicted(nodes))
            return None
        # A node whose eviction was cancelled while its copy runs is evicted with that copy; parents
        # before children.
        fresh = [
            node
            for node in reversed(nodes)
            if node.ticket not in self.moves.in_flight
        ]
        planned = self.moves.plan_store(
            [Source.of(node, evicted=True) for node in fresh]
        )
        self.counts["dropped_blocks"] += planned.refused
        uncopied = [
            source.node for source in planned.uncopied if source.node is not None
        ]
        self.pool.release(self.tree.remove_evicted(uncopied))
        return planned.plan

    def cancel_evictions(self, path: Sequence[Node]) -> None:
        """Cancel the evictions on a path that was hit."""
        if self.tree.evicting:
            for node in path:
                if node.place is Place.TO_HOST:
                    self.tree.cancel_eviction(node)
                    self.counts["cancelled_moves"] += 1

    def requeue(self, request: RequestState) -> None:
        """Undo a request's admission, if it has one; it waits again. Its path still counts as
        used.
        """
        self.pool.release(request.own_blocks)
        self.unlock(request.last_node, self.tree.now())
        request.reset()

    def discard(self, nodes: Iterable[Node]) -> None:
        """Remove those of these nodes that are not in use, children before parents, and free their
        blocks.
        """
        removed = map(self.tree.remove, nodes)
        self.pool.release([block for block in removed if block is not None])

    def unlock(self, node: Node | None, now: int = 0) -> None:
        """End one lock, and free the blocks that only this lock kept."""
        if node is not None:
            self.pool.release(self.tree.unlock(node, now))
