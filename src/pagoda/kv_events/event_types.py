"""The events of caches. They are vLLM's (0.32), so that routers made for vLLM understand them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pagoda.kv_events.notes import (
    LOCAL,
    NAME_BYTES,
    BlockFacts,
    ChunkNote,
    packed_token_ids,
)


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """A medium has blocks, which follow each other in one prompt."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: msgspec.Raw  # a list of integers; empty for the blocks of a tenant
    block_size: int  # tokens per block
    lora_id: int | None
    medium: str
    lora_name: str | None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """A medium no longer has blocks."""

    block_hashes: list[int]
    medium: str
    locality: str | None = None


class BlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    """All earlier reports are void."""


class ChunkEventForm:
    """An `EventForm` for caches: a block is a chunk, and its hash is the end of the chunk's key.
    Pure.
    """

    def __init__(self, facts: BlockFacts) -> None:
        self._facts = facts

    def stored(self, run: Sequence[ChunkNote], medium: str) -> BlockStored:
        """Return the event that a medium has the chunks of one run, in order."""
        first = run[0]
        return BlockStored(
            block_hashes=[_name(note.hashes) for note in run],
            parent_block_hash=_name(first.parent) if first.parent else None,
            token_ids=packed_token_ids(run),
            block_size=self._facts.block_tokens,
            lora_id=None,
            medium=medium,
            lora_name=first.lora_name,
            locality=LOCAL,
        )

    def removed(
        self, hashes: Sequence[bytes], medium: str, group: int
    ) -> BlockRemoved:
        """Return the event that a medium no longer has chunks."""
        return BlockRemoved([_name(one) for one in hashes], medium, LOCAL)


def _name(key: bytes) -> int:
    """Return the hash by which events name a chunk."""
    return int.from_bytes(key[-NAME_BYTES:], "big")
