"""One request as the block manager knows it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import numpy as np

from pagoda.blocks.tree import Node
from pagoda.cache.hit import Hit
from pagoda.keys import Item, KeyChain, TokenIds, as_token_ids

__all__ = ["Record", "blocks_for"]


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """How many blocks hold that many tokens."""
    return -(-num_tokens // block_tokens)


class Record:
    """A request's tokens and keys, and, while it is admitted, its blocks.

        table    | shared with the tree ........ | own ............................. |
                 0                        `entered`                        len(table)

    Blocks of `table[:entered]` are the tree's, but for `twins`, whose keys somebody else entered first.
    """

    def __init__(self, request_id: str, lora: str | None, salt: str | None, block_tokens: int) -> None:
        self.request_id = request_id
        self.lora = lora
        self.salt = salt
        self.block_tokens = block_tokens
        self.items: list[Item] = []
        self.num_tokens = 0
        self.prompt_tokens = 0
        self.root = b""
        self.keys: list[bytes] = []
        self._ids = array("i")
        self._chain: KeyChain | None = None  # None: nothing is hashed, nothing can hit
        self.fetch: Future[Hit] | None = None
        self.let_go()

    def let_go(self) -> None:
        """Be waiting: no blocks, nothing of the tree."""
        self.admitted = False
        self.stale = False  # the weights were changed since: what it computes must not enter the tree
        self.table: list[int] = []
        self.tip: Node | None = None  # the last node of its path, locked once for it
        self.entered = 0
        self.computed_tokens = 0
        self.twins: list[int] = []
        self.made: list[Node] = []  # nodes that it entered
        self.waits: set[int] = set()

    @property
    def own(self) -> list[int]:
        """The blocks that are nobody else's and not the tree's."""
        return self.twins + self.table[self.entered :]

    def append(self, tokens: TokenIds, items: Iterable[Item] = ()) -> None:
        """Add tokens; only what is new is hashed. Raises ValueError, and changes nothing, for bad ids or items."""
        ids = as_token_ids(tokens)
        items = [Item(*item) for item in items]
        if self._chain is not None:
            self.keys += self._chain.extend(ids, items)
        self._ids.frombytes(ids.tobytes())
        self.items += items
        self.num_tokens += len(ids)

    def rehash(self, root: bytes) -> None:
        """Name all blocks anew, under another root."""
        self.root, self._chain = root, KeyChain(root, self.block_tokens)
        self.keys = self._chain.extend(np.array(self._ids, np.int32), self.items)

    def before_items(self, blocks: int) -> int:
        """The longest run of at most `blocks` blocks that does not end inside a multimodal item."""
        for start, stop, _ in sorted(self.items, reverse=True):
            if start < blocks * self.block_tokens < stop:
                blocks = start // self.block_tokens
        return blocks

    def most_hits(self) -> Sequence[bytes]:
        """The keys that may hit: whole blocks, and at least one token is left to compute."""
        return self.keys[: max(0, self.num_tokens - 1) // self.block_tokens]
