"""One request in the block manager. Changed by `manager`, `admission` and `finished_moves`."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import numpy as np

from pagoda.blocks.tree import Node
from pagoda.cache.results import Hit
from pagoda.keys import Item, KeyChain, TokenIds, as_items, as_token_ids


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Return how many blocks hold that many tokens."""
    return -(-num_tokens // block_tokens)


class RequestState:
    """A request's tokens and keys, and, while it is admitted, its blocks.

        table    | shared with the tree ........ | own ............................. |
                 0                      `num_in_tree`                      len(table)

    Blocks of `table[:num_in_tree]` are the tree's, except `duplicates`, whose keys another request
    inserted first. Blocks without a key, such as those past `exact_tokens`, are never in the tree.
    """

    def __init__(
        self,
        request_id: str,
        lora: str | None,
        salt: str | None,
        block_tokens: int,
        exact_tokens: int | None,
    ) -> None:
        self.request_id = request_id
        self.lora = lora
        self.salt = salt
        self.block_tokens = block_tokens
        self._most_keys = (
            sys.maxsize if exact_tokens is None else exact_tokens // block_tokens
        )
        self.items: list[Item] = []
        self.num_tokens = 0
        self.prompt_tokens = 0
        self.root = b""
        self.keys: list[bytes] = []
        self._ids = array("i")
        # None: no prefix caching, nothing can hit
        self._chain: KeyChain | None = None
        self.fetch: Future[Hit] | None = None
        self.reset()

    def reset(self) -> None:
        """Return to the waiting state: no blocks, no nodes of the tree."""
        self.admitted = False
        # the weights have changed since its admission: its KV must not enter the tree
        self.stale = False
        self.table: list[int] = []
        # the last node of its path, with one lock for this request
        self.last_node: Node | None = None
        self.num_in_tree = 0
        self.computed_tokens = 0
        self.duplicates: list[int] = []
        self.inserted: list[Node] = []  # nodes that this request inserted
        self.waits: set[int] = set()

    @property
    def own_blocks(self) -> list[int]:
        """The blocks that belong to this request and not to the tree."""
        return self.duplicates + self.table[self.num_in_tree :]

    @property
    def num_own_blocks(self) -> int:
        """How many blocks belong to this request and not to the tree."""
        return len(self.duplicates) + len(self.table) - self.num_in_tree

    def append(self, tokens: TokenIds, items: Iterable[Item] = ()) -> None:
        """Add tokens; hashes only the new ones. Raises ValueError, and changes nothing, for bad ids
        or items.
        """
        ids = as_token_ids(tokens)
        items = as_items(items)
        if self._chain is not None:
            self.keys += self._chain.extend(ids, items)
            del self.keys[self._most_keys :]
        self._ids.frombytes(ids.tobytes())
        self.items += items
        self.num_tokens += len(ids)

    def rehash(self, root: bytes) -> None:
        """Hash all blocks again, under another root."""
        self.root = root
        self._chain = KeyChain(root, self.block_tokens)
        self.keys = self._chain.extend(np.array(self._ids, np.int32), self.items)
        del self.keys[self._most_keys :]

    def align_to_items(self, blocks: int) -> int:
        """Return the longest run of at most `blocks` blocks that does not end inside a multimodal
        item.
        """
        for start, stop, _ in sorted(self.items, reverse=True):
            if start < blocks * self.block_tokens < stop:
                blocks = start // self.block_tokens
        return blocks

    def matchable_keys(self) -> Sequence[bytes]:
        """Return the keys that may hit: whole blocks, with at least one token left to compute."""
        return self.keys[: max(0, self.num_tokens - 1) // self.block_tokens]
