"""Where every device block is: the numbers, and the proof that they agree."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.blocks.outcome import Place
from pagoda.blocks.record import Record
from pagoda.blocks.rooms import Rooms
from pagoda.blocks.tree import Node, upward

__all__ = ["Census"]


class Census:
    """Counts blocks and locks; changes nothing. Not thread-safe."""

    def __init__(self, rooms: Rooms, records: dict[str, Record]) -> None:
        self._pool = rooms.pool
        self._tree = rooms.tree
        self._moves = rooms.moves
        self._records = records

    def gauges(self) -> dict[str, int]:
        """Blocks by what they are: nothing, in the tree, a request's alone, moving; and how many could be evicted."""
        orphans = sum(move.size for move in self._moves.ups() if move.void)
        own = sum(len(record.own) for record in self._records.values())
        return {
            "total": self._pool.total,
            "free": self._pool.free,
            "cached": self._tree.devices,
            "in_use": own + self._tree.detached,
            "in_flight": self._tree.leaving + self._tree.coming + orphans,
            "evictable": self._tree.evictable,
        }

    def check(self, pinned: Sequence[Node]) -> None:
        """Raise AssertionError unless each block is in one place, each lock has its owner and all counts agree."""
        self._pool.check()
        self._tree.check()
        gauges = self.gauges()
        parts = {name: gauges[name] for name in ("free", "cached", "in_use", "in_flight")}
        assert sum(parts.values()) == self._pool.total, f"{parts} do not add up to {self._pool.total}"
        blocks = self._blocks()
        assert len(set(blocks)) == len(blocks), f"a block is in two places: {sorted(blocks)}"
        assert not any(map(self._pool.is_free, blocks)), f"a block is in use and free: {sorted(blocks)}"
        leaving = sum(len(move.leaving()) for move in self._moves.downs())
        assert leaving == self._tree.leaving, f"{self._tree.leaving} leaving counted, {leaving} found"
        self._check_locks(pinned)
        for record in self._records.values():
            shared = [node.block for node in upward(record.tip)][::-1]
            assert len(shared) == record.entered, f"{record.entered} blocks entered, a path of {len(shared)}"

    def _check_locks(self, pinned: Sequence[Node]) -> None:
        """A node is locked by the requests, moves and pins whose paths end there, and once by each locked child."""
        ends = [record.tip for record in self._records.values()]
        ends += self._moves.ends()
        owners: dict[int, int] = {}
        for end in (*ends, *pinned):
            for node in upward(end):
                owners[id(node)] = owners.get(id(node), 0) + 1
                if owners[id(node)] > 1:
                    break
        for node in self._tree.nodes.values():
            wanted = owners.get(id(node), 0)
            assert node.locks == wanted, f"block {node.block} has {node.locks} locks, {wanted} owners"

    def _blocks(self) -> list[int]:
        """Every block that is not free."""
        blocks = [block for record in self._records.values() for block in record.own]
        blocks += [node.block for node in self._tree.nodes.values() if node.place is not Place.TO_HOST]
        blocks += [node.block for move in self._moves.downs() for node in move.leaving()]
        blocks += [node.block for move in self._moves.ups() if move.void for node in move.nodes]
        paths = (upward(record.tip) for record in self._records.values())
        detached = {id(node): node.block for path in paths for node in path if node.detached}
        return blocks + list(detached.values())
