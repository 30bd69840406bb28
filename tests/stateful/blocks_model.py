"""The reference of the block manager's model test: prompts, the KV of their tokens, an engine's
memory.

The KV of a token is one number: a hash of the KV of the token before it, of the token (and of its
place in an image), and of the weights. So KV that was computed after wrong KV is wrong too, and the
right KV of every key is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from pagoda.blocks import Admitted, Plan
from pagoda.keys import Item

BLOCK = 4  # tokens
SALTS = (None, "bob")

# Three prompts of 36 tokens; the first two share 10 tokens, the third differs from the first token
# on.
_BASES = [
    [1 + n % 7 for n in range(36)],
    [1 + n % 7 if n < 10 else 10 + n % 5 for n in range(36)],
    [20 + n % 3 for n in range(36)],
]
_TAILS = [[], [30], [31, 31], [30, 31, 32, 33, 34], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
_IMAGES = [
    (),
    (),
    (),
    (Item(3, 10, blake3(b"cat").digest()),),
    (Item(3, 10, blake3(b"dog").digest()),),
    (Item(1, 3, blake3(b"dot").digest()), Item(5, 18, blake3(b"cat").digest())),
]
PROMPTS = len(_BASES), 36, len(_TAILS), len(_IMAGES)

Tags = tuple[int, ...]


class Prompt:
    """Tokens with their images and tenant."""

    def __init__(
        self,
        tokens: Sequence[int],
        items: Sequence[Item] = (),
        salt: str | None = None,
    ) -> None:
        self.tokens = list(tokens)
        self.items = tuple(
            item for item in items if item.start < len(self.tokens)
        )
        self.salt = salt

    @classmethod
    def drawn(
        cls, base: int, cut: int, tail: int, images: int, bob: bool
    ) -> Prompt:
        """The head of a base prompt, continued."""
        return cls(
            [*_BASES[base][:cut], *_TAILS[tail]] or [1],
            _IMAGES[images],
            SALTS[bob],
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def head(self, tokens: int) -> Prompt:
        """Return its first tokens."""
        return Prompt(self.tokens[:tokens], self.items, self.salt)

    def more(self, count: int) -> list[int]:
        """Return the tokens that a model generates next: those of a matching base, so that requests
        may share them.
        """
        base = next((b for b in _BASES if b[: len(self)] == self.tokens), None)
        if base is not None and len(self) < len(base):
            return base[len(self) : len(self) + count]
        return [40 + (len(self) + n) % 2 for n in range(count)]

    def symbols(self) -> tuple[tuple[int, ...], ...]:
        """Return what each position is: its token, and its place in images."""
        found = [[token] for token in self.tokens]
        for item in self.items:
            for at in range(item.start, min(item.stop, len(self))):
                found[at] += [
                    at - item.start,
                    item.stop - item.start,
                    int.from_bytes(item.digest[:7], "big"),
                ]
        return tuple(map(tuple, found))

    def right(self, epoch: int) -> Tags:
        """Return the KV of all tokens under the weights of `epoch`."""
        return _chain(self.symbols(), self.salt, epoch)

    def cut(self, blocks: int) -> int:
        """Return how many of `blocks` leading blocks may hit: one token remains to compute, no
        image is cut.
        """
        blocks = min(blocks, (len(self) - 1) // BLOCK)
        while any(
            item.start < blocks * BLOCK < min(item.stop, len(self))
            for item in self.items
        ):
            blocks = (
                min(
                    i.start
                    for i in self.items
                    if i.start < blocks * BLOCK < i.stop
                )
                // BLOCK
            )
        return blocks


def next_tag(before: int, symbol: tuple[int, ...], epoch: int) -> int:
    """Return the KV of a token after `before`. Deterministic: Python hashes ints and tuples of them
    by value.
    """
    return hash((before, symbol, epoch)) & (2**63 - 1)


def first_tag(salt: str | None) -> int:
    """Return the state before the first token."""
    return SALTS.index(salt)


@cache
def _chain(
    symbols: tuple[tuple[int, ...], ...], salt: str | None, epoch: int
) -> Tags:
    tags = []
    before = first_tag(salt)
    for symbol in symbols:
        before = next_tag(before, symbol, epoch)
        tags.append(before)
    return tuple(tags)


class Devices:
    """The KV memory of all ranks: (ranks, blocks, BLOCK) numbers."""

    def __init__(self, ranks: int, blocks: int) -> None:
        self.kv: npt.NDArray[np.uint64] = np.zeros(
            (ranks, blocks, BLOCK), np.uint64
        )
        self._rubbish = 2**63

    def scribble(self, blocks: Sequence[int]) -> None:
        """Write values that are the KV of no token, on all ranks."""
        for block in blocks:
            self.kv[:, block] = self.rubbish()

    def rubbish(self) -> int:
        """Return a value that is unique and is no KV."""
        self._rubbish += 1
        return self._rubbish

    def holds(self, table: Sequence[int], expected: Sequence[int]) -> bool:
        """Return whether the leading tokens of a table have this KV on every rank."""
        run = self.kv[:, table].reshape(self.kv.shape[0], -1)[:, : len(expected)]
        return bool((run == np.array(expected, np.uint64)).all())

    def blocks_with(self, tags: Sequence[int]) -> list[int]:
        """Return the blocks that hold this KV on every rank."""
        same = (self.kv == np.array(tags, np.uint64)).all(axis=(0, 2))
        return np.flatnonzero(same).tolist()


@dataclass
class Ticket:
    """Planned copies whose end is not known yet."""

    plan: Plan
    leader: str | None = None  # the request whose admission it serves
    first: int = 0  # UP: where in its table the copies begin
    # DOWN: what the blocks held at first
    source: list[bytes] = field(default_factory=list)
    robbed: bool = False  # chunks were removed meanwhile
    lock: str | None = None  # a request whose blocks must stay as they are
    reports: dict[int, int] = field(default_factory=dict)  # rank -> good copies
    # tickets that bring the blocks before its own
    deps: set[int] = field(default_factory=set)


@dataclass
class Request:
    """A request as the engine knows it."""

    name: str
    prompt: Prompt
    first_tokens: int  # when it was added: "the prompt"
    epoch: int  # of the weights when it was added
    running: bool = False
    table: list[int] = field(default_factory=list)
    shared: int = 0
    waits: set[int] = field(default_factory=set)
    # of the tokens whose KV is present, or will be
    kv: list[int] = field(default_factory=list)
    stale: bool = False  # the weights have changed since it was admitted,
    # when these were the keys of its computed blocks
    cached: list[bytes] = field(default_factory=list)

    @property
    def computed(self) -> int:
        """Return the leading tokens whose KV is present, or will be after its load."""
        return len(self.kv)

    def admitted(self, answer: Admitted, epoch: int) -> None:
        """Note that it has its blocks."""
        self.running = True
        self.stale = False
        self.table = answer.table
        self.shared = answer.shared
        self.waits = set(answer.waits)
        self.kv = list(self.prompt.right(epoch)[: answer.computed_tokens])

    def back(self) -> None:
        """Note that it waits again."""
        self.running = False
        self.stale = False
        self.table = []
        self.shared = 0
        self.kv = []
        self.waits = set()
