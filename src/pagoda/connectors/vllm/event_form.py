"""Makes the notes of chunks from vLLM's requests, and events of vLLM's classes from notes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from struct import Struct
from typing import Any

import numpy as np
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from pagoda.kv_events.notes import (
    LOCAL,
    NAME_BYTES,
    ChunkNote,
    Groups,
    NoteMaker,
    packed_token_ids,
)


class VLLMEventForm:
    """An `EventForm` of vLLM's classes. Pure."""

    def __init__(self, groups: Groups, hash_tokens: int) -> None:
        """`groups`: by vLLM's numbers; `hash_tokens`: the tokens of one hash of a request; a block
        may have several.
        """
        self._groups = groups
        self._hash_tokens = hash_tokens

    def notes(self, request: Any, root: bytes, group: int = 0) -> NoteMaker:
        """Return the function that makes the notes of a request's chunks of a group. `root`: of its
        namespace.
        """
        return partial(self._note_of, request, root, group)

    def stored(self, run: Sequence[ChunkNote], medium: str) -> BlockStored:
        """Return the event that a medium has the chunks of one run, in order."""
        first = run[0]
        facts = self._groups[run[0].group]
        extra = [keys for note in run for keys in note.extra_keys or ()]
        return BlockStored(
            block_hashes=self._names([note.hashes for note in run], first.group),
            parent_block_hash=maybe_convert_block_hash(BlockHash(first.parent))
            if first.parent
            else None,
            token_ids=packed_token_ids(run),
            block_size=facts.block_tokens,
            lora_id=first.lora_id,
            medium=medium,
            lora_name=first.lora_name,
            extra_keys=extra or None,
            group_idx=first.group,
            kv_cache_spec_kind=facts.kind,
            kv_cache_spec_sliding_window=facts.window,
            locality=LOCAL,
            session_id=first.session_id,
        )

    def removed(
        self, hashes: Sequence[bytes], medium: str, group: int
    ) -> BlockRemoved:
        """Return the event that a medium no longer has chunks of a group."""
        names = self._names(hashes, group)
        return BlockRemoved(
            block_hashes=names, medium=medium, group_idx=group, locality=LOCAL
        )

    def _names(self, chunks: Sequence[bytes], group: int) -> list[Any]:
        """Return the hashes of the blocks of chunks, as events name them."""
        # that function reads an option; to call it for each block would take 13 us per chunk
        # instead of 1
        numbers = isinstance(
            maybe_convert_block_hash(BlockHash(bytes(NAME_BYTES))), int
        )
        return [
            name
            for hashes in chunks
            for name in _named(
                len(hashes), self._groups[group].blocks, numbers
            ).unpack(hashes)
        ]

    def _note_of(
        self, request: Any, root: bytes, group: int, chunk: int
    ) -> ChunkNote | None:
        """Return the note of one chunk of a request; None if its hashes are not known yet.

        The note of a request with a salt has neither tokens nor salt, only the hashes, which depend
        on the salt.
        """
        facts = self._groups[group]
        blocks = facts.blocks
        size = facts.block_tokens
        begin = chunk * blocks
        end = (chunk + 1) * blocks
        # hashes per block; the last one names the whole block
        each = size // self._hash_tokens
        known = request.block_hashes
        hashes = known[(begin + 1) * each - 1 : end * each : each]
        if len(hashes) < blocks:
            return None
        parent = bytes(known[begin * each - 1]) if begin else b""
        if request.cache_salt:
            return ChunkNote(root, parent, b"".join(hashes), group=group)
        extra = []
        item = 0
        if (
            request.lora_request is not None
            or request.mm_features
            or request.prompt_embeds is not None
        ):
            for block in range(begin, end):
                keys, item = generate_block_hash_extra_keys(
                    request, block * size, (block + 1) * size, item
                )
                extra.append(keys)
        lora = request.lora_request
        return ChunkNote(
            root,
            parent,
            b"".join(hashes),
            np.array(
                request.all_token_ids[begin * size : end * size], np.int32
            ).tobytes(),
            lora.adapter_id if lora else None,
            lora.name if lora else None,
            to_event_extra_keys(extra),
            request.session_id,
            group,
        )


@lru_cache(maxsize=64)
def _named(nbytes: int, blocks: int, numbers: bool) -> Struct:
    """Return the Struct that reads the names of a chunk's blocks from their hashes, which have
    `nbytes`.
    """
    size = nbytes // blocks
    return Struct(
        ">" + blocks * (f"{size - NAME_BYTES}xQ" if numbers else f"{size}s")
    )
