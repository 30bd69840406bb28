"""Moves in flight: copies that were returned as plans, and what must be done when their tickets
end.

A move is reported by its ticket, never by node or request, and a ticket is never used twice: a late
report finds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagoda.base.metrics import Reason
from pagoda.blocks.manager_results import Copy, Direction, Place, Plan
from pagoda.blocks.request_state import RequestState
from pagoda.blocks.tree import Node
from pagoda.cache import writeback
from pagoda.cache.host_slots import HostSlots
from pagoda.ledger import Outcome, Refused, Reserved


class PlannedStore(NamedTuple):
    """The result of planning to store blocks on the host."""

    plan: Plan | None
    # the host already has them, gets them from another process, or has no room
    uncopied: list[Source]
    refused: int  # how many of those the host has no room for
    # the node to lock for the move: the last one that is copied and stays
    lock: Node | None = None


class Source(NamedTuple):
    """A block to store on the host."""

    key: bytes
    root: bytes
    position: int
    parent: bytes | None
    block: int
    # the node that is evicted with this move; None: the block stays
    node: Node | None

    @classmethod
    def of(cls, node: Node, *, evicted: bool) -> Source:
        """Return the block of a node."""
        return cls(
            node.key,
            node.root,
            node.position,
            node.parent_key,
            node.block,
            node if evicted else None,
        )


@dataclass
class Move:
    """One plan in flight. `cancelled`: it is no longer needed, and only its end is waited for."""

    ticket: int
    # rank -> how many copies were valid
    reports: dict[int, int] = field(default_factory=dict, kw_only=True)
    cancelled: bool = field(default=False, kw_only=True)
    planned_at: float = field(default_factory=time.perf_counter, kw_only=True)
    # from the plan to the report of the last rank; 0: not all have reported
    seconds: float = field(default=0.0, kw_only=True)


@dataclass
class StoreMove(Move):
    """Blocks that are copied to host slots reserved for them."""

    copies: list[tuple[Source, Reserved]]
    lock: Node | None  # the last node of the path that is written back

    @property
    def size(self) -> int:
        """How many copies there are."""
        return len(self.copies)

    def evicting(self) -> list[Node]:
        """Return its nodes whose eviction no hit has cancelled."""
        return [
            source.node
            for source, _ in self.copies
            if source.node is not None and self.keeps(source)
        ]

    def keeps(self, source: Source) -> bool:
        """Whether the bytes copied from `source` are those of its key, that is, the block was not
        reused meanwhile.
        """
        if self.cancelled:
            return False
        node = source.node
        return node is None or (
            node.place is Place.TO_HOST and node.ticket == self.ticket
        )


@dataclass
class LoadMove(Move):
    """Held host slots that are copied to blocks whose nodes are already in the tree."""

    nodes: list[Node]
    slots: writeback.Slots
    generations: writeback.Generations
    owner: str  # the request that it was planned for
    # the ticket of the move that loads the parent of its first node; 0: none
    depends_on: int
    # how many of its copies are valid, if they have ended but the move that it depends on has not
    copied: int | None = None
    # The requests that waited for it, by id; some may no longer wait.
    waiters: dict[str, RequestState] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many copies there are."""
        return len(self.nodes)

    def waiting(self) -> list[RequestState]:
        """The requests that wait for it."""
        return [
            request
            for request in self.waiters.values()
            if self.ticket in request.waits
        ]


class Moves:
    """The tickets of one manager, and the reservations, holds and commits of their host slots. Not
    thread-safe.
    """

    def __init__(self, slots: HostSlots | None) -> None:
        self.slots = slots
        self.in_flight: dict[int, StoreMove | LoadMove] = {}
        self._next = 1

    def stores(self) -> list[StoreMove]:
        """The moves to the host."""
        return [
            move
            for move in self.in_flight.values()
            if isinstance(move, StoreMove)
        ]

    def loads(self) -> list[LoadMove]:
        """The moves to the device."""
        return [
            move for move in self.in_flight.values() if isinstance(move, LoadMove)
        ]

    def locked_nodes(self) -> list[Node]:
        """The nodes that moves have locked."""
        locked = [move.lock for move in self.stores() if move.lock is not None]
        return locked + [
            move.nodes[-1] for move in self.loads() if not move.cancelled
        ]

    # ---- to the host

    def plan_store(
        self, sources: Sequence[Source], path: Sequence[Node] = ()
    ) -> PlannedStore:
        """Plan to store the blocks that the host lacks and has room for; without a host nothing is
        planned.

        `sources` are in the order of their chains, a parent before its child; `path` are their
        nodes if they stay.
        """
        if self.slots is None or not sources:
            return PlannedStore(None, list(sources), len(sources))
        chosen: list[tuple[Source, Reserved]] = []
        others: list[Source] = []
        refused = 0
        # whether the ledger was busy and was waited for: that happens once, whatever the number of
        # runs
        waited = False
        for run in _runs(sources):
            keys = [one.key for one in run]
            outcomes: list[Outcome] = [
                Refused(key, Reason.LEDGER_BUSY) for key in keys
            ]
            if not waited:
                _, root, start, parent, *_ = run[0]
                outcomes = self.slots.reserve(
                    keys, namespace=root, start=start, parent=parent
                )
            waited = Refused(keys[-1], Reason.LEDGER_BUSY) in outcomes
            for source, outcome in zip(run, outcomes, strict=True):
                if isinstance(outcome, Reserved):
                    chosen.append((source, outcome))
                else:
                    others.append(source)
                    refused += isinstance(outcome, Refused)
        if not chosen:
            return PlannedStore(None, others, refused)
        lock = path[sources.index(chosen[-1][0])] if path else None
        move = StoreMove(self.new_ticket(), chosen, lock)
        for source, _ in chosen:
            if source.node is not None:
                source.node.ticket = move.ticket
        self.in_flight[move.ticket] = move
        copies = tuple(
            Copy(source.block, item.slot, item.generation)
            for source, item in chosen
        )
        return PlannedStore(
            Plan(move.ticket, Direction.DOWN, copies), others, refused, lock
        )

    def finish_store(self, move: StoreMove, good: int) -> int:
        """Commit good copies of blocks that were not reused, abort the other slots; returns how
        many are committed.
        """
        del self.in_flight[move.ticket]
        assert self.slots is not None
        dropped: list[Reserved] = []
        written: dict[bytes, list[writeback.ChunkRef]] = {}
        for i, (source, item) in enumerate(move.copies):
            if i < good and move.keeps(source):
                key, root, position, parent, *_ = source
                ref = writeback.ChunkRef(
                    key, position, parent, item.slot, item.generation
                )
                written.setdefault(root, []).append(ref)
            else:
                dropped.append(item)
        self.slots.abort(dropped)
        return sum(self.slots.commit(written)) if written else 0

    # ---- to the device

    def plan_load(self, move: LoadMove) -> Plan:
        """Plan to load the blocks of a new move's nodes from the slots that are held for it."""
        self.in_flight[move.ticket] = move
        rows = zip(
            move.nodes,
            move.slots.tolist(),
            move.generations.tolist(),
            strict=True,
        )
        return Plan(
            move.ticket,
            Direction.UP,
            tuple(Copy(node.block, *row) for node, *row in rows),
        )

    def wait_for(self, request: RequestState, tickets: Iterable[int]) -> None:
        """Let a request wait for moves to the device."""
        for ticket in tickets:
            move = self.in_flight[ticket]
            assert isinstance(move, LoadMove), "only loads are waited for"
            move.waiters[request.request_id] = request
            request.waits.add(ticket)

    def finish_load(self, move: LoadMove, good: int) -> int:
        """Validate the copies of a move and release its slots; returns how many leading copies are
        valid.
        """
        del self.in_flight[move.ticket]
        assert self.slots is not None
        valid = self.slots.still_valid(move.slots[:good], move.generations[:good])
        right = good if valid.all() else int(valid.argmin())
        self.slots.release(move.slots, move.generations)
        if right and not move.cancelled:
            rows = zip(
                move.nodes[:right],
                move.slots.tolist(),
                move.generations.tolist(),
                strict=False,
            )
            refs = [
                writeback.ChunkRef(node.key, node.position, node.parent_key, *row)
                for node, *row in rows
            ]
            self.slots.note_access(move.nodes[0].root, refs)
        return right

    def new_ticket(self) -> int:
        """Return a ticket that was not used before."""
        self._next += 1
        return self._next - 1


def _runs(sources: Iterable[Source]) -> list[list[Source]]:
    """Return sources as runs of one chain each, so that one call can reserve a run."""
    ends: dict[bytes, list[Source]] = {}  # the last key of a run -> the run
    found: list[list[Source]] = []
    for source in sources:
        run = ends.pop(source.parent, None) if source.parent is not None else None
        if run is None:
            run = []
            found.append(run)
        run.append(source)
        ends[source.key] = run
    return found
