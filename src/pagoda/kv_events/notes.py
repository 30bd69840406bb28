"""The note of a chunk: what is reported of it to routers of requests, as it is kept beside the
tier.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import msgspec
import numpy as np

from pagoda.keys import KEY_BYTES

# the last bytes of a hash, which name a block in events that use numbers
NAME_BYTES = 8
# an event's locality: stored on the machine of the engine that reports it
LOCAL = "LOCAL"
_LONGEST_RUN = 4096  # the largest number of tokens in one event
# the first byte of zlib's output; no note in msgpack begins with it
_DEFLATED = b"\x78"
_MOST_UNPACKED_BYTES = 1 << 20
_UINT32 = np.dtype([("marker", np.uint8), ("value", ">u4")])  # as in msgpack


class BlockFacts(msgspec.Struct, frozen=True):
    """What all blocks of one group of an engine's KV have in common.

    `kind`, `window`: from the engine's specification of its KV. `needs_all`: a hit needs all chunks
    from the first one on (full attention); False: only the last ones (a sliding window, a state).
    """

    chunk_tokens: int
    block_tokens: int
    kind: str | None = None
    window: int | None = None
    needs_all: bool = True

    @property
    def blocks(self) -> int:
        """How many blocks a chunk has."""
        return self.chunk_tokens // self.block_tokens

    def fits(self, note: ChunkNote) -> bool:
        """Whether a note fits one chunk of this engine: it has the hashes of all blocks, and all
        tokens or none.
        """
        whole = (
            len(note.hashes) >= NAME_BYTES * self.blocks
            and not len(note.hashes) % self.blocks
        )
        return (
            whole
            and len(note.root) == KEY_BYTES
            and len(note.tokens) in (0, 4 * self.chunk_tokens)
        )


class ChunkNote(msgspec.Struct, array_like=True, omit_defaults=True):
    """One chunk. `hashes`: the engine's hash of each block, concatenated; `parent`: that of the
    block before.
    """

    root: bytes  # the root of the namespace
    parent: bytes
    hashes: bytes
    tokens: bytes = b""  # int32; empty if the chunk has a tenant's salt
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[object, ...] | None] | None = None
    session_id: str | None = None
    group: int = 0  # the group of the engine's KV


Groups: TypeAlias = Mapping[int, BlockFacts]
"""The groups of an engine's KV by their numbers; most engines have only group 0."""

NoteMaker: TypeAlias = Callable[[int], ChunkNote | None]
"""Returns the note of a request's chunk by its number; None if its hashes are not known yet."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ChunkNote).decode


class EventForm(Protocol):
    """The classes of an engine's events. Pure."""

    def stored(self, run: Sequence[ChunkNote], medium: str) -> object:
        """Return the event that a medium has the chunks of one run, in order."""

    def removed(self, hashes: Sequence[bytes], medium: str, group: int) -> object:
        """Return the event that a medium no longer has chunks of a group, named by the `hashes` of
        their notes.
        """


def packed(note: ChunkNote, most_bytes: int) -> bytes:
    """Return a note as bytes; they are compressed if they are more than `most_bytes`. Pure."""
    plain = _encode(note)
    return plain if len(plain) <= most_bytes else zlib.compress(plain, 1)


def unpacked(kept: bytes) -> ChunkNote:
    """Return the note in these bytes. Raises ValueError if they are not a note. Pure."""
    if kept.startswith(_DEFLATED):
        try:
            kept = zlib.decompressobj().decompress(kept, _MOST_UNPACKED_BYTES)
        except zlib.error as error:
            raise ValueError(str(error)) from None
    return _decode(kept)


def runs(
    notes: Iterable[ChunkNote], groups: Groups
) -> Iterator[Sequence[ChunkNote]]:
    """Return chunks in order as runs, in which each chunk is the parent of the next. One event
    reports one run.
    """
    notes = sorted(notes, key=lambda note: note.group)
    at = 0
    while at < len(notes):
        facts = groups[notes[at].group]
        end = at + 1
        most = max(1, _LONGEST_RUN // facts.chunk_tokens)
        while end < min(len(notes), at + most) and _continues(
            notes[end - 1], notes[end], facts
        ):
            end += 1
        yield notes[at:end]
        at = end


def packed_token_ids(run: Iterable[ChunkNote]) -> msgspec.Raw:
    """Return the token ids of chunks in order, as a list in msgpack: no Python object is made for
    each. Pure.
    """
    ids = np.frombuffer(b"".join(note.tokens for note in run), np.uint32)
    told = np.empty(len(ids), _UINT32)
    told["marker"] = 0xCE
    told["value"] = ids
    return msgspec.Raw(b"\xdd" + len(ids).to_bytes(4, "big") + told.tobytes())


def _continues(before: ChunkNote, note: ChunkNote, facts: BlockFacts) -> bool:
    return (
        before.group == note.group
        and before.hashes[-(len(before.hashes) // facts.blocks) :] == note.parent
        and bool(before.tokens) == bool(note.tokens)
        and before.lora_name == note.lora_name
        and before.session_id == note.session_id
        and (before.extra_keys is None) == (note.extra_keys is None)
    )
