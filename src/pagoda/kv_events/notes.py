"""The note of a chunk: what routers of requests are told of it, as it is kept beside the tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

import msgspec

from pagoda.keys import KEY_BYTES

__all__ = ["LOCAL", "BlockFacts", "ChunkNote", "EventForm", "NoteMaker", "runs"]

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

    def fits(self, note: ChunkNote) -> bool:
        """Whether a note is of one chunk of this engine: hashes of all its blocks, and all its tokens or none."""
        whole = bool(note.hashes) and not len(note.hashes) % self.blocks
        return whole and len(note.root) == KEY_BYTES and len(note.tokens) in (0, 4 * self.chunk_tokens)


class ChunkNote(msgspec.Struct, array_like=True, omit_defaults=True):
    """One chunk. `hashes`: the engine's hash of each block, concatenated; `parent`: of the block before them."""

    root: bytes  # of the namespace
    parent: bytes
    hashes: bytes
    tokens: bytes = b""  # int32; none if the chunk has a tenant's salt
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[object, ...] | None] | None = None
    session_id: str | None = None


NoteMaker: TypeAlias = Callable[[int], ChunkNote | None]
"""Returns the note of a request's chunk by its number; None if its hashes are not known yet."""


class EventForm(Protocol):
    """The classes of an engine's events. Pure."""

    def stored(self, run: Sequence[ChunkNote], medium: str) -> object:
        """Return the event that a medium has the chunks of one run, in order."""

    def removed(self, hashes: Sequence[bytes], medium: str) -> object:
        """Return the event that a medium no longer has chunks, which are named by the `hashes` of their notes."""


def runs(notes: Sequence[ChunkNote], facts: BlockFacts) -> Iterator[Sequence[ChunkNote]]:
    """Return the runs of some chunks in order: in a run each chunk is the next one's parent. One event tells one."""
    at, most = 0, max(1, _LONGEST_RUN // facts.chunk_tokens)
    while at < len(notes):
        end = at + 1
        while end < min(len(notes), at + most) and _continues(notes[end - 1], notes[end], facts):
            end += 1
        yield notes[at:end]
        at = end


def _continues(before: ChunkNote, note: ChunkNote, facts: BlockFacts) -> bool:
    return (
        before.hashes[-(len(before.hashes) // facts.blocks) :] == note.parent
        and bool(before.tokens) == bool(note.tokens)
        and before.lora_name == note.lora_name
        and before.session_id == note.session_id
        and (before.extra_keys is None) == (note.extra_keys is None)
    )
