"""The note of a chunk: what routers of requests are told of it, as it is kept beside the tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

__all__ = ["BlockFacts", "ChunkNote", "joined", "note_of", "split_hashes"]

LOCAL = "LOCAL"  # an event's locality: stored on the machine of the engine that tells it
_LONGEST_RUN = 4096  # tokens of one event


class BlockFacts(msgspec.Struct, frozen=True):
    """What all blocks of an engine have in common. `kind`, `window`: of the engine's specification of its KV."""

    chunk_tokens: int
    block_tokens: int
    kind: str | None = None
    window: int | None = None

    @property
    def blocks(self) -> int:
        """How many blocks a chunk has."""
        return self.chunk_tokens // self.block_tokens


class ChunkNote(msgspec.Struct, array_like=True, omit_defaults=True):
    """One chunk. `hashes`: the engine's hash of each block, concatenated; `parent`: of the block before them."""

    root: bytes  # of the namespace
    parent: bytes
    hashes: bytes
    tokens: bytes = b""  # int32; none if the chunk has a tenant's salt
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    session_id: str | None = None


def note_of(request: Any, chunk: int, root: bytes, facts: BlockFacts) -> ChunkNote | None:
    """Return the note of one chunk of a request; None if its hashes are not known yet.

    A request with a salt leaves no tokens behind, and no salt: only the hashes, which are keyed by it.
    """
    blocks, size = facts.blocks, facts.block_tokens
    begin, end = chunk * blocks, (chunk + 1) * blocks
    hashes = request.block_hashes[begin:end]
    if len(hashes) < blocks:
        return None
    parent = bytes(request.block_hashes[begin - 1]) if begin else b""
    if request.cache_salt:
        return ChunkNote(root, parent, b"".join(hashes))
    extra, item = [], 0
    if request.lora_request is not None or request.mm_features or request.prompt_embeds is not None:
        for block in range(begin, end):
            keys, item = generate_block_hash_extra_keys(request, block * size, (block + 1) * size, item)
            extra.append(keys)
    lora = request.lora_request
    return ChunkNote(
        root,
        parent,
        b"".join(hashes),
        np.array(request.all_token_ids[begin * size : end * size], np.int32).tobytes(),
        lora.adapter_id if lora else None,
        lora.name if lora else None,
        to_event_extra_keys(extra),
        request.session_id,
    )


def joined(notes: Sequence[ChunkNote], medium: str, facts: BlockFacts) -> Iterator[BlockStored]:
    """Return the events of some chunks in order: one for each run in which each chunk is the next one's parent."""
    at, most = 0, max(1, _LONGEST_RUN // facts.chunk_tokens)
    while at < len(notes):
        end = at + 1
        while end < min(len(notes), at + most) and _continues(notes[end - 1], notes[end], facts):
            end += 1
        yield _event(notes[at:end], medium, facts)
        at = end


def split_hashes(hashes: bytes, facts: BlockFacts) -> list[Any]:
    """Return the hashes of a chunk's blocks as events name them."""
    size = len(hashes) // facts.blocks
    return [maybe_convert_block_hash(BlockHash(hashes[at : at + size])) for at in range(0, len(hashes), size)]


def _continues(before: ChunkNote, note: ChunkNote, facts: BlockFacts) -> bool:
    return (
        before.hashes[-(len(before.hashes) // facts.blocks) :] == note.parent
        and bool(before.tokens) == bool(note.tokens)
        and before.lora_name == note.lora_name
        and before.session_id == note.session_id
        and (before.extra_keys is None) == (note.extra_keys is None)
    )


def _event(run: Sequence[ChunkNote], medium: str, facts: BlockFacts) -> BlockStored:
    first = run[0]
    extra = [keys for note in run for keys in note.extra_keys or ()]
    return BlockStored(
        block_hashes=[name for note in run for name in split_hashes(note.hashes, facts)],
        parent_block_hash=maybe_convert_block_hash(BlockHash(first.parent)) if first.parent else None,
        token_ids=np.frombuffer(b"".join(note.tokens for note in run), np.int32).tolist(),
        block_size=facts.block_tokens,
        lora_id=first.lora_id,
        medium=medium,
        lora_name=first.lora_name,
        extra_keys=extra or None,
        group_idx=0,  # the only group of KV memory that this connector works with
        kv_cache_spec_kind=facts.kind,
        kv_cache_spec_sliding_window=facts.window,
        locality=LOCAL,
        session_id=first.session_id,
    )
