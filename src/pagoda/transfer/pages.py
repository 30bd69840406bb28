"""KV memory as planes of pages: what an engine keeps whose inside is its own business, found by a block table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pagoda.layout import KVLayout
from pagoda.transfer.base import Array, Bytes, Ids, Words, check_starts, pieces, words
from pagoda.transfer.cpu_copy import in_threads

__all__ = ["WORD_BYTES", "PagesKV", "Places", "Plane", "Share", "Span", "merged", "see_plane"]

WORD_BYTES = (
    8,
    4,
    2,
    1,
)  # an address, a stride and a length that are multiples of it can be copied in such words


class Plane(NamedTuple):
    """Where a plane lies: page b is the bytes [address + b * stride, address + b * stride + page_bytes)."""

    address: int
    stride: int
    page_bytes: int
    blocks: int
    storage: int  # tells tensors of different memory apart; 0 for arrays


class Span(NamedTuple):
    """Blocks [begin, begin + len(ids)) of a chunk, none to be skipped. `first`: ids are first, first + 1, ...

    In the table they stand at [at, at + len(ids)).
    """

    begin: int
    at: int
    ids: Ids
    first: int | None


class Share(NamedTuple):
    """What a part has of one chunk: where its blocks are, and its bytes [plane][block][page] of the slot."""

    spans: list[Span]
    room: Bytes


class _Piece(NamedTuple):
    """One span of one plane: all rows of the plane, and the slot's words [*ids.shape, words of a page]."""

    rows: Words
    span: Span
    room: Words


class _Row(NamedTuple):
    """Whole chunks whose slots lie at even distances, so that numpy can copy a plane of all of them in one call."""

    shares: Sequence[Share]
    step_bytes: int  # from one slot to the next, either way


def see_plane(plane: Array, argument: str) -> Plane:
    """Return where a plane lies. Raises ValueError naming `argument` if it is not [num_blocks, page_bytes] bytes."""
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
    return Plane(address, strides[0] if blocks > 1 else page, page, blocks, storage)


def merged(planes: Sequence[Array]) -> list[Array]:
    """Return fewer, wider planes over the same memory: those that lie next to each other in every block are one.

    That is so where an engine keeps its layers inside a block: moving one wide page is faster than many narrow ones.
    Copies nothing. In a slot a merged plane lies otherwise than its planes did, so a layout's description has to name
    the planes that are really used. Raises ValueError for what is no plane.
    """
    found: list[tuple[Array, Plane]] = []
    for number, plane in enumerate(planes):
        seen = see_plane(plane, f"planes[{number}]")
        if found and _adjoins(found[-1][1], seen):
            base, before = found[-1]
            wider = before._replace(page_bytes=before.page_bytes + seen.page_bytes)
            found[-1] = (_widened(base, wider), wider)
        else:
            found.append((plane, seen))
    return [plane for plane, _ in found]


def _adjoins(before: Plane, after: Plane) -> bool:
    return (
        1 < before.blocks == after.blocks
        and (before.stride, before.storage) == (after.stride, after.storage)
        and before.address + before.page_bytes == after.address
        and before.page_bytes + after.page_bytes <= before.stride  # so the pages of one block are one run
    )


def _widened(plane: Array, to: Plane) -> Array:
    shape, strides = (to.blocks, to.page_bytes), (to.stride, 1)
    if isinstance(plane, np.ndarray):
        return np.lib.stride_tricks.as_strided(plane, shape, strides)
    return plane.as_strided(shape, strides)


class Places:
    """Where the pages of one sequence lie, in blocks and in slots. Pure and immutable.

    A slot is [part][plane][block of the chunk][page]; of a slot only the bytes of `part` are ever named. Raises
    ValueError that names what does not fit together.
    """

    def __init__(
        self,
        planes: Sequence[Plane],
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
            raise ValueError(f"planes must all have as many blocks, got {counts or 'no plane'}")
        self.layout = layout
        self.blocks = layout.chunk_tokens // block_tokens
        self.part_bytes = self.blocks * sum(plane.page_bytes for plane in planes)
        if layout.planes or layout.chunk_bytes != parts * self.part_bytes:
            raise ValueError(
                f"layout must be opaque with chunk_bytes {parts * self.part_bytes} ({parts} parts of {self.blocks} "
                f"blocks of all planes), got {layout.chunk_bytes}{' with planes' if layout.planes else ''}"
            )
        self.block_tokens, self._part, self._there = block_tokens, part, counts[0]
        self._set(block_table)

    def _set(self, block_table: Sequence[int]) -> None:
        self.ids = _checked_table(block_table, self._there)
        self.num_tokens = len(self.ids) * self.block_tokens

    def with_table(self, block_table: Sequence[int]) -> Places:
        """Return the same planes with the blocks of another sequence; changes nothing. ValueError for bad ids."""
        other = copy(self)
        other._set(block_table)
        return other

    def shares(self, starts: Sequence[int], slots: Sequence[Bytes], *, into_slots: bool) -> list[Share]:
        """Return what is to be copied of each chunk, all checked. ValueError for what does not fit."""
        checked = pieces(self.layout, self.num_tokens, starts, slots, into_slots=into_slots)
        begin = self._part * self.part_bytes
        rooms = [slot[begin : begin + self.part_bytes] for _, slot in checked]
        spans = self.spans(starts, into_slots=into_slots)
        return [Share(*share) for share in zip(spans, rooms, strict=True)]

    def spans(self, starts: Sequence[int], *, into_slots: bool) -> list[list[Span]]:
        """Return where the blocks of each chunk are, all checked. ValueError for what does not fit."""
        found = self.blocks_of(starts, into_slots=into_slots)
        firsts = [start // self.block_tokens for start in starts]
        return [list(_spans(ids, first)) for ids, first in zip(found, firsts, strict=True)]

    def blocks_of(self, starts: Sequence[int], *, into_slots: bool) -> Ids:
        """Return the ids of each chunk's blocks, [chunks, blocks], all checked. ValueError for what does not fit."""
        check_starts(self.layout, self.num_tokens, starts)
        odd = [start for start in starts if start % self.block_tokens]
        if odd:
            raise ValueError(f"starts must be multiples of block_tokens ({self.block_tokens}), got {odd[0]}")
        firsts = np.array([start // self.block_tokens for start in starts], dtype=np.int64)
        found: Ids = self.ids[firsts[:, None] + np.arange(self.blocks)]
        if into_slots and (found < 0).any():
            raise ValueError("block_table: a block that is -1 has no KV here to be stored")
        written = found[found >= 0]
        if not into_slots and len(np.unique(written)) != len(written):
            raise ValueError("block_table names a block twice: its bytes would be those of either chunk")
        return found


class PagesKV:
    """The KV of one sequence in planes of pages, each [num_blocks, page_bytes] bytes of CPU memory.

    `planes` are int8 or uint8 arrays or tensors, each page contiguous, pages as far apart as they are: one a layer,
    or, after `merged`, one for several. `block_table` has the id of each block of `block_tokens` tokens, from token 0
    on; -1 is a block that is not the caller's: `from_slots` passes it over, and asking to store it is a ValueError.
    The layout is opaque; its bytes are [part][plane][block of the chunk][page], and this object reads and writes those
    of `part` only, so that each rank of a tensor-parallel engine copies its own share of a chunk.

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
        arrays = [words(plane, f"planes[{number}]", None) for number, plane in enumerate(planes)]
        seen = [see_plane(array, f"planes[{number}]") for number, array in enumerate(arrays)]
        self._places = Places(seen, layout, block_tokens, block_table, part, parts)
        self._rows = [_as_words(array, plane) for array, plane in zip(arrays, seen, strict=True)]
        self._page_bytes = [plane.page_bytes for plane in seen]
        self._threads = threads
        self.layout = layout
        self.num_tokens = self._places.num_tokens

    def with_table(self, block_table: Sequence[int]) -> PagesKV:
        """Return one for another sequence in the same planes, which are not looked at again; changes nothing.

        Raises ValueError if the table names a block that is not there.
        """
        other = copy(self)
        other._places = self._places.with_table(block_table)
        other.num_tokens = other._places.num_tokens
        return other

    @property
    def run_bytes(self) -> int:
        """The shortest contiguous run of a copy, in bytes: what its speed depends on. For benchmarks."""
        return min(self._page_bytes)

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy the chunks that begin at `starts` into this part of `slots`; changes nothing else."""
        self._copy(_gather, self._places.shares(starts, slots, into_slots=True))

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy this part of `slots` into the blocks of `starts`; changes those blocks only, none that is -1."""
        self._copy(_scatter, self._places.shares(starts, slots, into_slots=False))

    def _copy(self, copy: Callable[[Sequence[_Piece]], None], shares: Sequence[Share]) -> None:
        rows = _rows(shares, self._places.blocks)
        work = [piece for row in rows for piece in self._pieces(row)]
        threads = max(1, min(self._threads, len(work)))
        cuts = [len(work) * number // threads for number in range(threads + 1)]
        in_threads([partial(copy, work[a:b]) for a, b in pairwise(cuts)], threads)

    def _pieces(self, row: _Row) -> Iterator[_Piece]:
        share, count = row.shares[0], len(row.shares)
        spans = share.spans if count == 1 else [_one_span(row.shares)]
        offset = 0
        for rows, page_bytes in zip(self._rows, self._page_bytes, strict=True):
            shape = (self._places.blocks, rows.shape[1])
            room: Words = np.ndarray(shape, rows.dtype, share.room, offset)
            if not room.flags.aligned:  # numpy would copy it through a buffer
                rows = rows.view(np.uint8)
                room = share.room[offset : offset + shape[0] * page_bytes].reshape(shape[0], page_bytes)
            if count > 1:
                strides = (row.step_bytes, *room.strides)
                room = np.lib.stride_tricks.as_strided(room, (count, *room.shape), strides)
                yield _Piece(rows, spans[0], room)
            else:
                for span in spans:
                    yield _Piece(rows, span, room[span.begin : span.begin + len(span.ids)])
            offset += shape[0] * page_bytes


def _rows(shares: Sequence[Share], blocks: int) -> Iterator[_Row]:
    """Put neighbours together as far as they are whole and their slots lie at even distances."""
    begin, step = 0, 0
    places = [share.room.ctypes.data for share in shares]
    whole = [len(share.spans) == 1 and len(share.spans[0].ids) == blocks for share in shares]
    for at in range(1, len(shares) + 1):
        if at < len(shares) and whole[at - 1] and whole[at]:
            found = places[at] - places[at - 1]
            # slots that are not as far apart as they are long, or not by whole words, are copied one by one
            if abs(found) >= shares[at].room.nbytes and not found % WORD_BYTES[0] and step in (0, found):
                step = found
                continue
        yield _Row(shares[begin:at], step)
        begin, step = at, 0


def _one_span(shares: Sequence[Share]) -> Span:
    """The spans of whole chunks as one, with ids [chunks, blocks]."""
    ids = np.stack([share.spans[0].ids for share in shares])
    flat = ids.reshape(-1)
    run = int(flat[0]) if bool((flat[1:] - flat[:-1] == 1).all()) else None
    return Span(0, shares[0].spans[0].at, ids, run)


def _gather(work: Sequence[_Piece]) -> None:
    for rows, span, room in work:
        if span.first is not None:
            np.copyto(room, rows[span.first : span.first + span.ids.size].reshape(room.shape))
        elif span.ids.ndim > 1:
            _gather(
                [_Piece(rows, span._replace(ids=ids), one) for ids, one in zip(span.ids, room, strict=True)]
            )
        elif rows.flags.c_contiguous:  # of any other array np.take would first copy all of it
            np.take(rows, span.ids, axis=0, out=room, mode="clip")  # "raise" would go through a buffer
        else:
            for page, number in zip(room, span.ids.tolist(), strict=True):
                np.copyto(page, rows[number])


def _scatter(work: Sequence[_Piece]) -> None:
    for rows, span, room in work:
        if span.first is not None:
            np.copyto(rows[span.first : span.first + span.ids.size].reshape(room.shape), room)
        else:
            rows[span.ids] = room  # no block comes twice


def _spans(ids: Ids, first: int) -> Iterator[Span]:
    """Cut the blocks of a chunk, which stand in the table from `first` on, at those that are -1."""
    if ids[0] >= 0 and (len(ids) == 1 or bool((ids[1:] - ids[:-1] == 1).all())):  # as it is most of the time
        yield Span(0, first, ids, int(ids[0]))
        return
    there = np.flatnonzero(ids >= 0)
    for group in np.split(there, np.flatnonzero(np.diff(there) > 1) + 1):
        if len(group):
            begin, found = int(group[0]), ids[group]
            run = int(found[0]) if bool((np.diff(found) == 1).all()) else None
            yield Span(begin, first + begin, found, run)


def _as_words(array: Words, plane: Plane) -> Words:
    """Return the plane's rows as the widest words that fit; wide words are copied twice as fast as bytes."""
    lies = (plane.address, plane.stride, plane.page_bytes)
    width = next(width for width in WORD_BYTES if not any(number % width for number in lies))
    return array.view(f"u{width}")


def _checked_table(block_table: Sequence[int], blocks: int) -> Ids:
    ids = np.asarray(block_table)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise ValueError(f"block_table must be 1-D integers, got {ids.ndim}-D {ids.dtype}")
    bad = ids[(ids < -1) | (ids >= blocks)]
    if bad.size:
        raise ValueError(f"block_table: {bad[0]} is not in [0, {blocks}), nor -1")
    return ids.astype(np.int64)
