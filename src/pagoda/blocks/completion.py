"""What the end of a move comes to, for the tree and for the requests that waited for it."""

from __future__ import annotations

from pagoda.blocks.allocator import Rooms
from pagoda.blocks.moves import Down, Up
from pagoda.blocks.plans import Settled
from pagoda.blocks.request_state import Record
from pagoda.blocks.tree import Node

__all__ = ["Ends"]


class Ends:
    """Settles tickets. An error is a shorter result, never a missing answer; lengths agree by minimum over ranks.

    Not thread-safe.
    """

    def __init__(self, rooms: Rooms, records: dict[str, Record], block_tokens: int, ranks: int) -> None:
        self._rooms = rooms
        self._tree = rooms.tree
        self._moves = rooms.moves
        self._records = records
        self._block_tokens = block_tokens
        self._ranks = ranks
        self._lost: set[int] = set()

    # ---- reports

    @property
    def short_of_ranks(self) -> bool:
        """Whether a rank has died."""
        return bool(self._lost)

    def report(self, ticket: int, rank: int, blocks: int | None) -> Settled:
        """Rank `rank` has done with a ticket: its first `blocks` copies (None: all) are good. Raises ValueError."""
        if not 0 <= rank < self._ranks:
            raise ValueError(f"rank {rank} is none of the {self._ranks} ranks")
        move = self._moves.under_way.get(ticket)
        if move is None or rank in move.reports:
            return Settled(known=False, ended=False)
        if blocks is not None and not 0 <= blocks <= move.size:
            raise ValueError(f"{blocks} of {move.size} copies cannot be good")
        move.reports[rank] = move.size if blocks is None else blocks
        return self._maybe_end(move)

    def lost(self, rank: int) -> list[Settled]:
        """A rank has died: what waits for its report has failed."""
        if not 0 <= rank < self._ranks:
            raise ValueError(f"rank {rank} is none of the {self._ranks} ranks")
        self._lost.add(rank)
        settled: list[Settled] = []
        for ticket in list(self._moves.under_way):
            move = self._moves.under_way.get(ticket)
            if move is not None and rank not in move.reports:
                move.reports[rank] = 0
                settled.append(self._maybe_end(move))
        return settled

    def _maybe_end(self, move: Down | Up) -> Settled:
        if any(rank not in move.reports for rank in range(self._ranks) if rank not in self._lost):
            return Settled(ended=False)
        free, good = self._rooms.pool.free, min(move.reports.values())
        if isinstance(move, Down):
            self._end_down(move, good)
            settled = Settled()
        elif not move.void and move.behind in self._moves.under_way:
            move.landed = good
            return Settled(ended=False)
        else:
            settled = self._end_up(move, good)
        return settled._replace(freed=self._rooms.pool.free - free)

    # ---- down

    def _end_down(self, move: Down, good: int) -> None:
        leaving, stored = move.leaving(), self._moves.end_down(move, good)
        self._rooms.counts["demoted_blocks"] += stored
        self._rooms.counts["dropped_blocks"] += max(0, len(leaving) - stored)
        self._rooms.pool.give_back(self._tree.depart(leaving))
        self._rooms.unlock(move.lock)

    # ---- up

    def _end_up(self, move: Up, good: int) -> Settled:
        right = self._moves.end_up(move, good)
        if move.void:
            self._rooms.pool.give_back([node.block for node in move.nodes])
            return Settled()
        right = self._before_items(move, right)
        self._tree.arrive(move.nodes[:right])
        self._rooms.counts["promoted_blocks"] += right
        again: list[str] = []
        shortened: dict[str, int] = {}
        if right < len(move.nodes):
            again, shortened = self._cut_short(move, right)
        else:
            self._rooms.unlock(move.nodes[-1])
        ready: list[str] = []
        for record in move.waiting():
            record.waits.discard(move.ticket)
            if not record.waits:
                ready.append(record.request_id)
        settled = Settled(ready=tuple(ready), shortened=shortened, again=tuple(again))
        for behind in self._moves.ups():
            if behind.behind == move.ticket and behind.landed is not None:
                settled = _joined(settled, self._end_up(behind, behind.landed))
        return settled

    def _sharing(self, move: Up, node: Node) -> list[Record]:
        """The requests that wait for a move and have this node of it in their paths."""
        at = node.position
        return [r for r in move.waiting() if r.entered > at and r.keys[at] == node.key]

    def _before_items(self, move: Up, right: int) -> int:
        """The longest run of at most `right` blocks that ends inside no multimodal item: all who share it have that."""
        if right == len(move.nodes):
            return right
        first, at = move.nodes[right], move.nodes[right].position
        whole = min((r.before_items(at) for r in self._sharing(move, first)), default=at)
        return max(0, right - (at - whole))

    def _cut_short(self, move: Up, right: int) -> tuple[list[str], dict[str, int]]:
        """The nodes from `right` on did not come: one request takes their blocks over, the others wait again."""
        missing = move.nodes[right:]
        first, at = missing[0], missing[0].position
        sharing = self._sharing(move, first)
        heir = _heir(sharing, move, missing)
        others = [record for record in sharing if record is not heir]
        for record in others:
            self._rooms.roll_back(record)
        kept: set[int] = set()
        if heir is not None:
            kept = set(heir.table[at : heir.entered])
            self._shorten(heir, first)
        self._call_off_behind(missing)
        self._rooms.unlock(move.nodes[-1])
        self._tree.forsake(missing)
        self._rooms.pool.give_back([node.block for node in missing if node.block not in kept])
        shortened = {} if heir is None else {heir.request_id: heir.computed_tokens}
        return [record.request_id for record in others], shortened

    def _shorten(self, record: Record, first: Node) -> None:
        """The request's own blocks begin where `first` was to be."""
        if first.parent is not None:
            self._tree.lock(first.parent)
        self._rooms.unlock(record.tip)
        record.tip, record.entered = first.parent, first.position
        record.computed_tokens = first.position * self._block_tokens

    def _call_off_behind(self, missing: list[Node]) -> None:
        """Moves that build upon nodes which did not come have no place in the tree; their requests wait again."""
        gone = set(map(id, missing))
        behind: list[Up] = []
        for move in self._moves.ups():  # in the order of their tickets: what one builds upon comes before it
            if not move.void and id(move.nodes[0].parent) in gone:
                behind.append(move)
                gone.update(map(id, move.nodes))
        for move in reversed(behind):
            self.call_off_up(move)

    # ---- calling off

    def call_off_up(self, move: Up) -> None:
        """Forget what a move is for; nobody may wait for it. Its blocks are free when its copies have ended."""
        self._rooms.unlock(move.nodes[-1])
        self._tree.forsake(move.nodes)
        move.void = True
        if move.landed is not None:
            self._end_up(move, 0)

    def call_off_all(self) -> list[str]:
        """Forget what all moves are for. Returns the requests that waited, which wait to be admitted again."""
        rolled = [record for record in self._records.values() if record.waits]
        for record in rolled:
            self._rooms.roll_back(record)
        for up in reversed(self._moves.ups()):
            if not up.void:
                self.call_off_up(up)
        for down in self._moves.downs():
            self._rooms.pool.give_back(self._tree.depart(down.leaving()))
            self._rooms.unlock(down.lock)
            down.lock, down.void = None, True
        return [record.request_id for record in rolled]

    def abandon_all(self) -> None:
        """End all moves, which were called off, at once: nobody copies any more."""
        for move in list(self._moves.under_way.values()):
            if isinstance(move, Down):
                self._end_down(move, 0)
            else:
                self._end_up(move, 0)


def _heir(sharing: list[Record], move: Up, missing: list[Node]) -> Record | None:
    """Who goes on with the blocks of a run that did not come: who led it, or anybody whose path ends in it.

    Not one whose path goes on in another move: its copies are still written. Nor one with an item of which a part has
    come: it would have to compute into the middle of the item.
    """
    at = missing[0].position
    fitting = [record for record in sharing if record.tip in missing and record.before_items(at) == at]
    return next((record for record in fitting if record.request_id == move.leader), next(iter(fitting), None))


def _joined(one: Settled, other: Settled) -> Settled:
    return one._replace(
        ready=one.ready + other.ready,
        shortened=one.shortened | other.shortened,
        again=one.again + other.again,
    )
