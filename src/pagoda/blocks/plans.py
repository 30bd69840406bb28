"""What the block manager answers, as values. Blocks are counted in blocks, tokens in tokens."""

from __future__ import annotations

from enum import StrEnum, auto
from typing import NamedTuple

__all__ = [
    "Admitted",
    "Copy",
    "Direction",
    "Extended",
    "Match",
    "Place",
    "Plan",
    "Refused",
    "Settled",
    "Waiting",
]


class Place(StrEnum):
    """Where the KV of a key is. The first two count as a hit on the device; the value is the lower-case name."""

    DEVICE = auto()
    TO_HOST = auto()  # its device block still holds it; a hit calls the move off
    TO_DEVICE = auto()  # its device block is being filled from a host slot; a hit waits for the same move
    HOST = auto()
    LOADING = auto()  # on its way from a lower tier to the host
    STORAGE = auto()
    FREED = auto()  # nowhere: it has neither a block nor a slot


class Direction(StrEnum):
    """Which way the copies of a plan go."""

    DOWN = auto()  # device block -> host slot
    UP = auto()  # host slot -> device block


class Copy(NamedTuple):
    """One copy to be done: between a device block and a slot of the host tier."""

    block: int
    slot: int
    generation: int  # of the slot's reservation: the bytes are the chunk's for as long as it stands


class Plan(NamedTuple):
    """Copies to be done, in any order, and the number by which their end is told. A ticket is never used twice."""

    ticket: int
    direction: Direction
    copies: tuple[Copy, ...]


class Match(NamedTuple):
    """How many leading tokens of a request could be had, and from where. Whole blocks; never all of the tokens."""

    device_tokens: int
    host_tokens: int
    storage_tokens: int

    @property
    def num_tokens(self) -> int:
        """All of them."""
        return self.device_tokens + self.host_tokens + self.storage_tokens


class Admitted(NamedTuple):
    """A request has its blocks.

    `table[:shared]` belongs to the prefix tree: others may read it too, so it must not be written; the rest is the
    request's own. The KV of tokens [0, computed_tokens) is there when all tickets in `waits` have ended.
    """

    table: list[int]
    shared: int
    computed_tokens: int
    by_tier: dict[str, int]  # tokens; the values add up to computed_tokens
    plan: Plan | None  # the copies UP of this admission
    waits: frozenset[int]


class Extended(NamedTuple):
    """A request has the room it asked for."""

    table: list[int]
    new: int  # blocks added at the end


class Waiting(NamedTuple):
    """Room is being made: do `plan`, if there is one, and call again when one of `tickets` has ended."""

    plan: Plan | None
    tickets: frozenset[int]


class Refused(NamedTuple):
    """There is not enough room, whatever is evicted. Nothing was changed."""

    needed: int
    available: int


class Settled(NamedTuple):
    """What the end of a ticket came to."""

    known: bool = True  # False: late or never given out; nothing was changed
    ended: bool = True  # False: other ranks have yet to report, or a move that this one builds upon
    ready: tuple[str, ...] = ()  # requests that wait for nothing any more
    shortened: dict[str, int] = {}  # noqa: RUF012  # request -> its computed_tokens now, less than it was told
    again: tuple[str, ...] = ()  # requests that wait again: they shared a block that did not come
    freed: int = 0
