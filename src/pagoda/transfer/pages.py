"""The KV of one sequence in planes of pages whose content only the engine knows, located by a block table.

Copies in CPU memory here and in `cpu_copy`; `gpu.device_pages` does the same on GPUs with this `PageTable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pagoda.layout import KVLayout
from pagoda.transfer.base import Array, Bytes, Ids, Words, as_words, check_starts, checked_chunks
from pagoda.transfer.cpu_copy import in_threads

__all__ = [
    "WORD_BYTES",
    "BlockSpan",
    "ChunkPart",
    "PagePlane",
    "PageTable",
    "PagesKV",
    "merged",
    "page_plane",
]

# An address, a stride and a length that are multiples of one of these can be copied in such words.
WORD_BYTES = (8, 4, 2, 1)


class PagePlane(NamedTuple):
    """The place of a plane: page b is the bytes [address + b * stride, address + b * stride + page_bytes)."""

    address: int
    stride: int
    page_bytes: int
    blocks: int
    storage: int  # distinguishes tensors of different memory; 0 for arrays


class BlockSpan(NamedTuple):
    """Blocks [begin, begin + len(ids)) of a chunk, without a skipped one. `first`: ids are first, first + 1, ...

    Their positions in the block table are [at, at + len(ids)).
    """

    begin: int
    at: int
    ids: Ids
    first: int | None


class ChunkPart(NamedTuple):
    """One part of one chunk: the places of its blocks, and its bytes [plane][block][page] of the slot."""

    spans: list[BlockSpan]
    slot_part: Bytes


class _PageCopy(NamedTuple):
    """One span of one plane: all rows of the plane, and the slot's words [*ids.shape, words of a page]."""

    rows: Words
    span: BlockSpan
    slot_part: Words


class _ChunkRow(NamedTuple):
    """Whole chunks whose slots are at equal distances, so that numpy can copy a plane of all of them in one call."""

    parts: Sequence[ChunkPart]
    step_bytes: int  # from one slot to the next, positive or negative


def page_plane(plane: Array, argument: str) -> PagePlane:
    """Return the place of a plane. Raises ValueError naming `argument` if it is not [num_blocks, page_bytes] bytes."""
    if isinstance(plane, np.ndarray):
        kind, strides = plane.dtype.name, plane.strides
        address, storage = plane.ctypes.data, 0
    else:
        kind, strides = str(plane.dtype).removeprefix("torch."), tuple(plane.stride())
        address, storage = plane.data_ptr(), plane.untyped_storage().data_ptr()
    shape = tuple(plane.shape)
    if len(shape) != 2 or 0 in shape or kind not in ("int8", "uint8"):
        raise ValueError(
            f"{argument} must be [num_blocks, page_bytes] int8 or uint8, got {list(shape)} {kind}"
        )
    blocks, page = shape
    if (page > 1 and strides[1] != 1) or (blocks > 1 and strides[0] < page):
        raise ValueError(
            f"{argument}: pages must be contiguous and may not overlap, got strides {list(strides)}"
        )
    return PagePlane(address, strides[0] if blocks > 1 else page, page, blocks, storage)


def merged(planes: Sequence[Array]) -> list[Array]:
    """Return fewer, wider planes over the same memory: planes that are adjacent in every block are merged.

    They are adjacent if an engine keeps its layers inside a block: copying one wide page is faster than many narrow
    ones. Copies nothing. In a slot, a merged plane has another order of bytes than its planes had, so a layout's
    description has to name the planes that are really used. Raises ValueError for a value that is not a plane.
    """
    found: list[tuple[Array, PagePlane]] = []
    for number, plane in enumerate(planes):
        seen = page_plane(plane, f"planes[{number}]")
        if found and _adjoins(found[-1][1], seen):
            base, before = found[-1]
            wider = before._replace(page_bytes=before.page_bytes + seen.page_bytes)
            found[-1] = (_widened(base, wider), wider)
        else:
            found.append((plane, seen))
    return [plane for plane, _ in found]


def _adjoins(before: PagePlane, after: PagePlane) -> bool:
    return (
        1 < before.blocks == after.blocks
        and (before.stride, before.storage) == (after.stride, after.storage)
        and before.address + before.page_bytes == after.address
        and before.page_bytes + after.page_bytes <= before.stride  # so the pages of one block are contiguous
    )


def _widened(plane: Array, to: PagePlane) -> Array:
    shape, strides = (to.blocks, to.page_bytes), (to.stride, 1)
    if isinstance(plane, np.ndarray):
        return np.lib.stride_tricks.as_strided(plane, shape, strides)
    return plane.as_strided(shape, strides)


class PageTable:
    """The places of the pages of one sequence, in blocks and in slots. Pure and immutable.

    A slot is [part][plane][block of the chunk][page]; only the bytes of `part` of a slot are ever used. Raises
    ValueError that names what does not fit together.
    """

    def __init__(
        self,
        planes: Sequence[PagePlane],
        layout: KVLayout,
        block_tokens: int,
        block_table: Sequence[int],
        part: int,
        parts: int,
    ) -> None:
        if block_tokens < 1 or layout.chunk_tokens % block_tokens:
            raise ValueError(
                f"chunk_tokens ({layout.chunk_tokens}) must be a multiple of block_tokens ({block_tokens})"
            )
        if not 0 <= part < parts:
            raise ValueError(f"part must be one of the {parts} parts, got {part}")
        counts = sorted({plane.blocks for plane in planes})
        if len(counts) != 1:
            raise ValueError(f"planes must all have the same number of blocks, got {counts or 'no plane'}")
        self.layout = layout
        self.blocks = layout.chunk_tokens // block_tokens
        self.part_bytes = self.blocks * sum(plane.page_bytes for plane in planes)
        if layout.planes or layout.chunk_bytes != parts * self.part_bytes:
            raise ValueError(
                f"layout must be opaque with chunk_bytes {parts * self.part_bytes} ({parts} parts of {self.blocks} "
                f"blocks of all planes), got {layout.chunk_bytes}{' with planes' if layout.planes else ''}"
            )
        self.block_tokens, self._part, self._num_blocks = block_tokens, part, counts[0]
        self._set(block_table)

    def _set(self, block_table: Sequence[int]) -> None:
        self.ids = _checked_table(block_table, self._num_blocks)
        self.num_tokens = len(self.ids) * self.block_tokens

    def with_table(self, block_table: Sequence[int]) -> PageTable:
        """Return the same planes with the blocks of another sequence; changes nothing. ValueError for bad ids."""
        other = copy(self)
        other._set(block_table)
        return other

    def chunk_parts(
        self, starts: Sequence[int], slots: Sequence[Bytes], *, into_slots: bool
    ) -> list[ChunkPart]:
        """Return the part of each chunk to copy, all checked. Raises ValueError for starts or slots that do not fit."""
        checked = checked_chunks(self.layout, self.num_tokens, starts, slots, into_slots=into_slots)
        begin = self._part * self.part_bytes
        slot_parts = [slot[begin : begin + self.part_bytes] for _, slot in checked]
        spans = self.spans(starts, into_slots=into_slots)
        return [ChunkPart(*part) for part in zip(spans, slot_parts, strict=True)]

    def spans(self, starts: Sequence[int], *, into_slots: bool) -> list[list[BlockSpan]]:
        """Return the places of each chunk's blocks, all checked. Raises ValueError for starts that do not fit."""
        found = self.blocks_of(starts, into_slots=into_slots)
        firsts = [start // self.block_tokens for start in starts]
        return [list(_spans(ids, first)) for ids, first in zip(found, firsts, strict=True)]

    def blocks_of(self, starts: Sequence[int], *, into_slots: bool) -> Ids:
        """Return the ids of each chunk's blocks, [chunks, blocks]. Raises ValueError for starts that do not fit."""
        check_starts(self.layout, self.num_tokens, starts)
        odd = [start for start in starts if start % self.block_tokens]
        if odd:
            raise ValueError(f"starts must be multiples of block_tokens ({self.block_tokens}), got {odd[0]}")
        firsts = np.array([start // self.block_tokens for start in starts], dtype=np.int64)
        found: Ids = self.ids[firsts[:, None] + np.arange(self.blocks)]
        if into_slots and (found < 0).any():
            raise ValueError("block_table: a block that is -1 has no KV to store")
        written = found[found >= 0]
        if not into_slots and len(np.unique(written)) != len(written):
            raise ValueError("block_table names a block twice: it would get the bytes of either chunk")
        return found


class PagesKV:
    """The KV of one sequence in planes of pages, each [num_blocks, page_bytes] bytes of CPU memory.

    `planes` are int8 or uint8 arrays or tensors, each page contiguous, at any distance: one per layer, or, after
    `merged`, one for several layers. `block_table` has the id of each block of `block_tokens` tokens, from token 0 on;
    -1 is a block that the caller must not touch: `from_slots` skips it, and storing it is a ValueError. The layout is
    opaque; its bytes are [part][plane][block of the chunk][page], and this object reads and writes only those of
    `part`, so that each rank of a tensor-parallel engine copies its part of a chunk.

    Thread-safe as `Transfer` says. Raises ValueError that names what does not match, before anything is copied.
    """

    device_index: None = None  # of a CUDA device; see DevicePagesKV

    def __init__(
        self,
        planes: Sequence[Array],
        layout: KVLayout,
        *,
        block_tokens: int,
        block_table: Sequence[int],
        part: int = 0,
        parts: int = 1,
        threads: int = 1,
    ) -> None:
        arrays = [as_words(plane, f"planes[{number}]", None) for number, plane in enumerate(planes)]
        seen = [page_plane(array, f"planes[{number}]") for number, array in enumerate(arrays)]
        self._page_table = PageTable(seen, layout, block_tokens, block_table, part, parts)
        self._rows = [_widest_words(array, plane) for array, plane in zip(arrays, seen, strict=True)]
        self._page_bytes = [plane.page_bytes for plane in seen]
        self._threads = threads
        self.layout = layout
        self.num_tokens = self._page_table.num_tokens

    def with_table(self, block_table: Sequence[int]) -> PagesKV:
        """Return a transfer for another sequence in the same planes, which are not checked again; changes nothing.

        Raises ValueError if the table names a block that does not exist.
        """
        other = copy(self)
        other._page_table = self._page_table.with_table(block_table)
        other.num_tokens = other._page_table.num_tokens
        return other

    @property
    def run_bytes(self) -> int:
        """The shortest contiguous run of a copy, in bytes, which decides its speed. For benchmarks."""
        return min(self._page_bytes)

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy the chunks that begin at `starts` into this part of `slots`; changes nothing else."""
        self._copy(_gather, self._page_table.chunk_parts(starts, slots, into_slots=True))

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy this part of `slots` into the blocks of `starts`; changes only those blocks, and none that is -1."""
        self._copy(_scatter, self._page_table.chunk_parts(starts, slots, into_slots=False))

    def _copy(self, copy: Callable[[Sequence[_PageCopy]], None], parts: Sequence[ChunkPart]) -> None:
        rows = _rows(parts, self._page_table.blocks)
        work = [piece for row in rows for piece in self._pieces(row)]
        threads = max(1, min(self._threads, len(work)))
        cuts = [len(work) * number // threads for number in range(threads + 1)]
        in_threads([partial(copy, work[a:b]) for a, b in pairwise(cuts)], threads)

    def _pieces(self, row: _ChunkRow) -> Iterator[_PageCopy]:
        part, count = row.parts[0], len(row.parts)
        spans = part.spans if count == 1 else [_joined_span(row.parts)]
        offset = 0
        for rows, page_bytes in zip(self._rows, self._page_bytes, strict=True):
            shape = (self._page_table.blocks, rows.shape[1])
            slot_part: Words = np.ndarray(shape, rows.dtype, part.slot_part, offset)
            if not slot_part.flags.aligned:  # numpy would copy it through a buffer
                rows = rows.view(np.uint8)
                slot_part = part.slot_part[offset : offset + shape[0] * page_bytes].reshape(
                    shape[0], page_bytes
                )
            if count > 1:
                strides = (row.step_bytes, *slot_part.strides)
                slot_part = np.lib.stride_tricks.as_strided(slot_part, (count, *slot_part.shape), strides)
                yield _PageCopy(rows, spans[0], slot_part)
            else:
                for span in spans:
                    yield _PageCopy(rows, span, slot_part[span.begin : span.begin + len(span.ids)])
            offset += shape[0] * page_bytes


def _rows(parts: Sequence[ChunkPart], blocks: int) -> Iterator[_ChunkRow]:
    """Group adjacent chunks that are whole and whose slots are at equal distances."""
    begin, step = 0, 0
    places = [part.slot_part.ctypes.data for part in parts]
    whole = [len(part.spans) == 1 and len(part.spans[0].ids) == blocks for part in parts]
    for at in range(1, len(parts) + 1):
        if at < len(parts) and whole[at - 1] and whole[at]:
            found = places[at] - places[at - 1]
            # slots that overlap, or are not a whole number of words apart, are copied one by one
            if abs(found) >= parts[at].slot_part.nbytes and not found % WORD_BYTES[0] and step in (0, found):
                step = found
                continue
        yield _ChunkRow(parts[begin:at], step)
        begin, step = at, 0


def _joined_span(parts: Sequence[ChunkPart]) -> BlockSpan:
    """Return the spans of whole chunks as one, with ids [chunks, blocks]."""
    ids = np.stack([part.spans[0].ids for part in parts])
    flat = ids.reshape(-1)
    run = int(flat[0]) if bool((flat[1:] - flat[:-1] == 1).all()) else None
    return BlockSpan(0, parts[0].spans[0].at, ids, run)


def _gather(work: Sequence[_PageCopy]) -> None:
    for rows, span, slot_part in work:
        if span.first is not None:
            np.copyto(slot_part, rows[span.first : span.first + span.ids.size].reshape(slot_part.shape))
        elif span.ids.ndim > 1:
            _gather(
                [
                    _PageCopy(rows, span._replace(ids=ids), one)
                    for ids, one in zip(span.ids, slot_part, strict=True)
                ]
            )
        elif rows.flags.c_contiguous:  # otherwise np.take would first copy all of the array
            np.take(rows, span.ids, axis=0, out=slot_part, mode="clip")  # "raise" would copy through a buffer
        else:
            for page, number in zip(slot_part, span.ids.tolist(), strict=True):
                np.copyto(page, rows[number])


def _scatter(work: Sequence[_PageCopy]) -> None:
    for rows, span, slot_part in work:
        if span.first is not None:
            np.copyto(rows[span.first : span.first + span.ids.size].reshape(slot_part.shape), slot_part)
        else:
            rows[span.ids] = slot_part  # no block occurs twice


def _spans(ids: Ids, first: int) -> Iterator[BlockSpan]:
    """Cut the blocks of a chunk, which are in the table from `first` on, at those that are -1."""
    if ids[0] >= 0 and (len(ids) == 1 or bool((ids[1:] - ids[:-1] == 1).all())):  # the common case
        yield BlockSpan(0, first, ids, int(ids[0]))
        return
    there = np.flatnonzero(ids >= 0)
    for group in np.split(there, np.flatnonzero(np.diff(there) > 1) + 1):
        if len(group):
            begin, found = int(group[0]), ids[group]
            run = int(found[0]) if bool((np.diff(found) == 1).all()) else None
            yield BlockSpan(begin, first + begin, found, run)


def _widest_words(array: Words, plane: PagePlane) -> Words:
    """Return the plane's rows as the widest words that fit; wide words are copied twice as fast as bytes."""
    numbers = (plane.address, plane.stride, plane.page_bytes)
    width = next(width for width in WORD_BYTES if not any(number % width for number in numbers))
    return array.view(f"u{width}")


def _checked_table(block_table: Sequence[int], blocks: int) -> Ids:
    ids = np.asarray(block_table)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise ValueError(f"block_table must be 1-D integers, got {ids.ndim}-D {ids.dtype}")
    bad = ids[(ids < -1) | (ids >= blocks)]
    if bad.size:
        raise ValueError(f"block_table: {bad[0]} is not in [0, {blocks}), nor -1")
    return ids.astype(np.int64)
