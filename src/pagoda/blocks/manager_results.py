"""The values that the block manager returns. Blocks are counted in blocks, tokens in tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import NamedTuple


class Place(StrEnum):
    """Where the KV of a key is. The first two count as a hit on the device; the value is the
    lower-case name.
    """

    DEVICE = auto()
    # its device block still holds it; a hit cancels the eviction
    TO_HOST = auto()
    # its device block is being filled from a host slot; a hit waits for that move
    TO_DEVICE = auto()
    HOST = auto()
    LOADING = auto()  # loading from a lower tier to the host
    STORAGE = auto()
    FREED = auto()  # it has neither a block nor a slot


class Direction(StrEnum):
    """The direction of the copies of a plan."""

    DOWN = auto()  # device block -> host slot
    UP = auto()  # host slot -> device block


class Copy(NamedTuple):
    """One copy to do: between a device block and a slot of the host tier."""

    block: int
    slot: int
    # of the slot's reservation: the slot holds the chunk's bytes as long as its generation is this
    # one
    generation: int


class Plan(NamedTuple):
    """Copies to do, in any order, and the ticket for reporting their end. A ticket is never used
    twice.
    """

    ticket: int
    direction: Direction
    copies: tuple[Copy, ...]


class PrefixMatch(NamedTuple):
    """How many leading tokens of a request are cached, and in which tier. Whole blocks; never all
    of the tokens.
    """

    device_tokens: int
    host_tokens: int
    storage_tokens: int

    @property
    def num_tokens(self) -> int:
        """The cached tokens of all tiers."""
        return self.device_tokens + self.host_tokens + self.storage_tokens


class Admitted(NamedTuple):
    """A request has its blocks.

    `table[:shared]` belongs to the prefix tree: other requests may read it too, so it must not be
    written to; the rest is the request's own. The KV of tokens [0, computed_tokens) is complete
    when all tickets in `waits` have ended.
    """

    table: list[int]
    shared: int
    computed_tokens: int
    by_tier: dict[str, int]  # tokens; the values add up to computed_tokens
    plan: Plan | None  # the copies UP of this admission
    waits: frozenset[int]


@dataclass(frozen=True, slots=True)
class Extended:
    """A request has the blocks it asked for: `added` are those at the end of its table.

    One step of a long request adds at most a block, so append `added` to a table of your own.
    """

    added: list[int]
    # the request's own list, which only grows while the request is admitted
    _blocks: list[int] = field(repr=False)
    _length: int

    @property
    def new(self) -> int:
        """How many blocks were added."""
        return len(self.added)

    @property
    def table(self) -> list[int]:
        """All blocks in order: a copy, made each time this is read."""
        return self._blocks[: self._length]


class Waiting(NamedTuple):
    """Blocks are being freed: do `plan`, if there is one, and call again when one of `tickets` has
    ended.
    """

    plan: Plan | None
    tickets: frozenset[int]


class NoRoom(NamedTuple):
    """There are not enough blocks, even after all possible evictions. Nothing was changed."""

    needed: int
    available: int


class Settled(NamedTuple):
    """The result of the end of a ticket."""

    known: bool = True  # False: a late or unknown ticket; nothing was changed
    # False: other ranks, or a move that this one depends on, have not ended
    ended: bool = True
    ready: tuple[str, ...] = ()  # requests that no longer wait
    # request -> its computed_tokens now, fewer than admitted
    shortened: dict[str, int] = {}  # noqa: RUF012
    # requests that wait again: they shared a block that was not loaded
    again: tuple[str, ...] = ()
    freed: int = 0
