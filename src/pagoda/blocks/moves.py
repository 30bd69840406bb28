"""Moves under way: copies that were handed out as plans, and what has to be done when their tickets end.

A move is told of by ticket, never by node or request, and a ticket is never used twice: a late one finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.blocks.plans import Copy, Direction, Place, Plan
from pagoda.blocks.request_state import Record
from pagoda.blocks.tree import Node
from pagoda.cache import below
from pagoda.cache.slots import HostSlots
from pagoda.ledger import Outcome, Refused, Reserved
from pagoda.metrics import Reason

__all__ = ["Down", "Move", "Moves", "Planned", "Source", "Up"]


class Planned(NamedTuple):
    """What became of blocks that should go to the host."""

    plan: Plan | None
    uncopied: list[Source]  # the host has them already, or gets them from somebody else, or has no room
    refused: int  # of those: how many there was no room for
    lock: Node | None = None  # to be locked for the move: the last node that is copied and stays


class Source(NamedTuple):
    """A block that the host should have."""

    key: bytes
    root: bytes
    position: int
    parent: bytes | None
    block: int
    node: Node | None  # leaves the tree with this move; None: it stays where it is


@dataclass
class Move:
    """One plan under way. `void`: what it was for is gone; only its end is waited for."""

    ticket: int
    reports: dict[int, int] = field(default_factory=dict)  # rank -> how many copies were good
    void: bool = False


@dataclass
class Down(Move):
    """Blocks on their way to host slots that are reserved for them."""

    sources: list[Source] = field(default_factory=list)
    reserved: list[Reserved] = field(default_factory=list)
    lock: Node | None = None  # the end of what is written back of a path
    goes: list[Node] = field(default_factory=list)  # the nodes that leave, in the order of `sources`

    @property
    def size(self) -> int:
        """How many copies there are."""
        return len(self.sources)

    def leaving(self) -> list[Node]:
        """Its nodes that no hit has called back."""
        return [node for node in self.goes if node.place is Place.TO_HOST and node.ticket == self.ticket]

    def keeps(self, source: Source) -> bool:
        """Whether what was copied from `source` is what its key names: the block was its own all the time."""
        if self.void:
            return False
        node = source.node
        return node is None or (node.place is Place.TO_HOST and node.ticket == self.ticket)


@dataclass
class Up(Move):
    """Host slots, held, on their way to blocks whose nodes are in the tree already."""

    nodes: list[Node] = field(default_factory=list)
    slots: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    generations: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    leader: str | None = None  # the request that it was planned for
    behind: int = 0  # the ticket of the move that brings the parent of its first node
    landed: int | None = None  # its copies have ended, so many good; it waits for the one that it is behind
    asked: dict[str, Record] = field(default_factory=dict)  # by id: who waited for it; some may have gone

    @property
    def size(self) -> int:
        """How many copies there are."""
        return len(self.nodes)

    def waiting(self) -> list[Record]:
        """The requests that wait for it."""
        return [record for record in self.asked.values() if self.ticket in record.waits]


class Moves:
    """The tickets of one manager, and the dealings with host slots that go with them. Not thread-safe."""

    def __init__(self, slots: HostSlots | None) -> None:
        self.slots = slots
        self.under_way: dict[int, Down | Up] = {}
        self._next = 1

    def downs(self) -> list[Down]:
        """The moves to the host."""
        return [move for move in self.under_way.values() if isinstance(move, Down)]

    def ups(self) -> list[Up]:
        """The moves to the device."""
        return [move for move in self.under_way.values() if isinstance(move, Up)]

    def ends(self) -> list[Node]:
        """The nodes that moves have locked."""
        locked = [move.lock for move in self.downs() if move.lock is not None]
        return locked + [move.nodes[-1] for move in self.ups() if not move.void]

    # ---- down

    def down(self, sources: Sequence[Source], path: Sequence[Node] = ()) -> Planned:
        """Plan to copy down what the host lacks and has room for; nothing is planned without a host.

        `sources` come in the order of their chains, a parent before its child; `path` are their nodes if they stay.
        """
        if self.slots is None or not sources:
            return Planned(None, list(sources), len(sources))
        chosen: list[Source] = []
        reserved: list[Reserved] = []
        others: list[Source] = []
        refused = 0
        waited = False  # for the ledger, in vain: that is done once, whatever the number of runs
        for run in _runs(sources):
            keys = [one.key for one in run]
            outcomes: list[Outcome] = (
                [Refused(key, Reason.LEDGER_BUSY) for key in keys]
                if waited
                else self.slots.reserve(
                    keys, namespace=run[0].root, start=run[0].position, parent=run[0].parent
                )
            )
            waited = Refused(keys[-1], Reason.LEDGER_BUSY) in outcomes
            for source, outcome in zip(run, outcomes, strict=True):
                if isinstance(outcome, Reserved):
                    chosen.append(source)
                    reserved.append(outcome)
                else:
                    others.append(source)
                    refused += isinstance(outcome, Refused)
        if not chosen:
            return Planned(None, others, refused)
        lock = path[sources.index(chosen[-1])] if path else None
        goes = [source.node for source in chosen if source.node is not None]
        move = Down(self._ticket(), sources=chosen, reserved=reserved, lock=lock, goes=goes)
        for node in goes:
            node.ticket = move.ticket
        self.under_way[move.ticket] = move
        pairs = zip(chosen, reserved, strict=True)
        copies = (Copy(source.block, item.slot, item.generation) for source, item in pairs)
        return Planned(Plan(move.ticket, Direction.DOWN, tuple(copies)), others, refused, lock)

    def end_down(self, move: Down, good: int) -> int:
        """Commit what was copied well and is still what it was, give up the other slots; returns how many stand."""
        del self.under_way[move.ticket]
        assert self.slots is not None
        pairs = list(zip(move.sources, move.reserved, strict=True))
        kept = [i < good and move.keeps(source) for i, (source, _) in enumerate(pairs)]
        self.slots.abort([item for (_, item), keep in zip(pairs, kept, strict=True) if not keep])
        written: dict[bytes, list[below.Copy]] = {}
        for (source, item), keep in zip(pairs, kept, strict=True):
            if keep:
                copy = below.Copy(source.key, source.position, source.parent, item.slot, item.generation)
                written.setdefault(source.root, []).append(copy)
        return sum(self.slots.commit(written)) if written else 0

    # ---- up

    def up(self, move: Up) -> Plan:
        """Plan to fill the blocks of a move's nodes from the slots that are held for it."""
        self.under_way[move.ticket] = move
        rows = zip(move.nodes, move.slots.tolist(), move.generations.tolist(), strict=True)
        return Plan(move.ticket, Direction.UP, tuple(Copy(node.block, *row) for node, *row in rows))

    def wait(self, record: Record, tickets: Iterable[int]) -> None:
        """Let a request wait for moves to the device."""
        for ticket in tickets:
            move = self.under_way[ticket]
            assert isinstance(move, Up), "only what is coming is waited for"
            move.asked[record.request_id] = record
            record.waits.add(ticket)

    def begin_up(self, leader: str, slots: npt.NDArray[np.int64], generations: npt.NDArray[np.uint64]) -> Up:
        """A move with a new ticket, of slots that are held; not under way yet."""
        return Up(self._ticket(), slots=slots, generations=generations, leader=leader)

    def end_up(self, move: Up, good: int) -> int:
        """Validate the copies of a move and end its holds; returns how many leading ones are right."""
        del self.under_way[move.ticket]
        assert self.slots is not None
        valid = self.slots.still_valid(move.slots[:good], move.generations[:good])
        right = good if valid.all() else int(valid.argmin())
        self.slots.release(move.slots, move.generations)
        if not move.void:
            copies = [
                below.Copy(node.key, node.position, node.parent.key if node.parent else None, *row)
                for node, *row in zip(
                    move.nodes[:right], move.slots.tolist(), move.generations.tolist(), strict=False
                )
            ]
            if copies:
                self.slots.used(move.nodes[0].root, copies)
        return right

    def _ticket(self) -> int:
        self._next += 1
        return self._next - 1


def _runs(sources: Iterable[Source]) -> list[list[Source]]:
    """Sources as runs of one chain each, so that one reserve can take a run."""
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
