"""Completion of moves: settle tickets, for the tree and for the requests that waited for them."""

from __future__ import annotations

import time

from pagoda.blocks.allocator import BlockAllocator
from pagoda.blocks.manager_results import Direction, Settled
from pagoda.blocks.moves import LoadMove, StoreMove
from pagoda.blocks.request_state import RequestState
from pagoda.blocks.tree import Node


class Completion:
    """Settles tickets. An error gives a shorter result, never a missing one; the length is the
    minimum over the ranks.

    Not thread-safe.
    """

    def __init__(
        self, allocator: BlockAllocator, ranks: int, block_tokens: int
    ) -> None:
        self._allocator = allocator
        self._block_tokens = block_tokens
        # of the copies that ended, by direction
        self.copy_seconds = dict.fromkeys(Direction, 0.0)
        self._tree = allocator.tree
        self._moves = allocator.moves
        self._ranks = ranks
        self._lost: set[int] = set()

    # ---- reports

    @property
    def ranks_lost(self) -> bool:
        """Whether a rank has died."""
        return bool(self._lost)

    def report(self, ticket: int, rank: int, blocks: int | None) -> Settled:
        """Note that `rank` has ended a ticket; its first `blocks` copies (None: all) are valid.
        Raises ValueError.
        """
        self._check_rank(rank)
        move = self._moves.in_flight.get(ticket)
        if move is None or rank in move.reports:
            return Settled(known=False, ended=False)
        if blocks is not None and not 0 <= blocks <= move.size:
            raise ValueError(f"{blocks} of {move.size} copies cannot be good")
        move.reports[rank] = move.size if blocks is None else blocks
        return self._settle_if_complete(move)

    def lost(self, rank: int) -> list[Settled]:
        """Note that a rank has died: every ticket that waits for its report has failed."""
        self._check_rank(rank)
        self._lost.add(rank)
        settled: list[Settled] = []
        for ticket in list(self._moves.in_flight):
            move = self._moves.in_flight.get(ticket)
            if move is not None and rank not in move.reports:
                move.reports[rank] = 0
                settled.append(self._settle_if_complete(move))
        return settled

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._ranks:
            raise ValueError(f"rank {rank} is not one of the {self._ranks} ranks")

    def _settle_if_complete(self, move: StoreMove | LoadMove) -> Settled:
        if any(
            rank not in move.reports
            for rank in range(self._ranks)
            if rank not in self._lost
        ):
            return Settled(ended=False)
        free = self._allocator.pool.free
        good = min(move.reports.values())
        move.seconds = time.perf_counter() - move.planned_at
        if good:
            self._count_copies(move, good)
        if isinstance(move, StoreMove):
            self._finish_store(move, good)
            settled = Settled()
        elif not move.cancelled and move.depends_on in self._moves.in_flight:
            move.copied = good
            return Settled(ended=False)
        else:
            settled = self._finish_load(move, good)
        return settled._replace(freed=self._allocator.pool.free - free)

    def _count_copies(self, move: StoreMove | LoadMove, good: int) -> None:
        """Count copies that have ended, of which the first `good` are valid."""
        way = Direction.DOWN if isinstance(move, StoreMove) else Direction.UP
        self._allocator.counts[f"{way}_moves"] += 1
        self._allocator.counts[f"{way}_blocks"] += good
        self.copy_seconds[way] += move.seconds

    # ---- to the host

    def _finish_store(self, move: StoreMove, good: int) -> None:
        evicting = move.evicting()
        stored = self._moves.finish_store(move, good)
        self._allocator.counts["demoted_blocks"] += stored
        self._allocator.counts["dropped_blocks"] += max(0, len(evicting) - stored)
        self._allocator.pool.release(self._tree.remove_evicted(evicting))
        self._allocator.unlock(move.lock)

    # ---- to the device

    def _finish_load(self, move: LoadMove, good: int) -> Settled:
        right = self._moves.finish_load(move, good)
        if move.cancelled:
            self._allocator.pool.release([node.block for node in move.nodes])
            return Settled()
        right = self._align_to_items(move, right)
        self._tree.finish_loading(move.nodes[:right])
        self._allocator.counts["promoted_blocks"] += right
        if right and self._moves.slots is not None:
            self._moves.slots.count_load(
                move.nodes[0].root, right * self._block_tokens, move.seconds
            )
        again: list[str] = []
        shortened: dict[str, int] = {}
        if right < len(move.nodes):
            again, shortened = self._truncate(move, right)
        else:
            self._allocator.unlock(move.nodes[-1])
        ready: list[str] = []
        for request in move.waiting():
            request.waits.discard(move.ticket)
            if not request.waits:
                ready.append(request.request_id)
        for dependent in self._moves.loads():
            if (
                dependent.depends_on == move.ticket
                and dependent.copied is not None
            ):
                later = self._finish_load(dependent, dependent.copied)
                ready += later.ready
                again += later.again
                shortened |= later.shortened
        return Settled(
            ready=tuple(ready), shortened=shortened, again=tuple(again)
        )

    def _sharers(self, move: LoadMove, node: Node) -> list[RequestState]:
        """Return the requests that wait for a move and have this node of the move in their
        paths.
        """
        at = node.position
        return [
            r
            for r in move.waiting()
            if r.num_in_tree > at and r.keys[at] == node.key
        ]

    def _align_to_items(self, move: LoadMove, right: int) -> int:
        """Return the longest run of at most `right` blocks that does not end inside a multimodal
        item of a request.
        """
        if right == len(move.nodes):
            return right
        first = move.nodes[right]
        at = move.nodes[right].position
        whole = min(
            (r.align_to_items(at) for r in self._sharers(move, first)), default=at
        )
        return max(0, right - (at - whole))

    def _truncate(
        self, move: LoadMove, right: int
    ) -> tuple[list[str], dict[str, int]]:
        """Remove the nodes from `right` on, which were not loaded: one request gets their blocks,
        others wait again.
        """
        missing = move.nodes[right:]
        first = missing[0]
        at = missing[0].position
        sharing = self._sharers(move, first)
        successor = _successor(sharing, move, missing)
        others = [request for request in sharing if request is not successor]
        for request in others:
            self._allocator.requeue(request)
        kept: set[int] = set()
        if successor is not None:
            kept = set(successor.table[at : successor.num_in_tree])
            self._shorten(successor, first)
        self._cancel_dependents(missing)
        self._allocator.unlock(move.nodes[-1])
        self._tree.remove_loading(missing)
        self._allocator.pool.release(
            [node.block for node in missing if node.block not in kept]
        )
        shortened = (
            {}
            if successor is None
            else {successor.request_id: successor.computed_tokens}
        )
        return [request.request_id for request in others], shortened

    def _shorten(self, request: RequestState, first: Node) -> None:
        """Make the request's own blocks begin at the position of `first`."""
        if first.parent is not None:
            self._tree.lock(first.parent)
        self._allocator.unlock(request.last_node)
        request.last_node = first.parent
        request.num_in_tree = first.position
        request.computed_tokens = first.position * request.block_tokens

    def _cancel_dependents(self, missing: list[Node]) -> None:
        """Cancel the loads that depend on missing nodes, which have no parent in the tree; requests
        wait again.
        """
        gone = set(map(id, missing))
        dependents: list[LoadMove] = []
        # in order of tickets: a move comes after the moves that it depends on
        for move in self._moves.loads():
            if not move.cancelled and id(move.nodes[0].parent) in gone:
                dependents.append(move)
                gone.update(map(id, move.nodes))
        for move in reversed(dependents):
            self.cancel_load(move)

    # ---- cancelling

    def cancel_load(self, move: LoadMove) -> None:
        """Cancel a load, for which no request may wait. Its blocks are freed when its copies have
        ended.
        """
        self._allocator.unlock(move.nodes[-1])
        self._tree.remove_loading(move.nodes)
        move.cancelled = True
        if move.copied is not None:
            self._finish_load(move, 0)

    def cancel_all(self) -> list[str]:
        """Cancel all moves. Returns the requests that waited for them, which wait to be admitted
        again.
        """
        rolled = [
            request
            for request in self._allocator.requests.values()
            if request.waits
        ]
        for request in rolled:
            self._allocator.requeue(request)
        for load in reversed(self._moves.loads()):
            if not load.cancelled:
                self.cancel_load(load)
        for store in self._moves.stores():
            self._allocator.pool.release(
                self._tree.remove_evicted(store.evicting())
            )
            self._allocator.unlock(store.lock)
            store.lock = None
            store.cancelled = True
        return [request.request_id for request in rolled]

    def abandon_all(self) -> None:
        """End all moves now. They were cancelled, and no copy is running any more."""
        for move in list(self._moves.in_flight.values()):
            if isinstance(move, StoreMove):
                self._finish_store(move, 0)
            else:
                self._finish_load(move, 0)


def _successor(
    sharing: list[RequestState], move: LoadMove, missing: list[Node]
) -> RequestState | None:
    """Return the request that keeps the blocks of a run that was not loaded: the owner, or one
    whose path ends in it.

    Not a request whose path continues in another move, whose copies are still being written. Also
    not a request with an item that was loaded in part: it would have to compute from the middle of
    the item.
    """
    at = missing[0].position
    fitting = [
        one
        for one in sharing
        if one.last_node in missing and one.align_to_items(at) == at
    ]
    return next(
        (one for one in fitting if one.request_id == move.owner),
        next(iter(fitting), None),
    )
