"""The KV of one sequence in planes of pages whose content only the engine knows, located by a block
table.

Copies by `cpu_copy`; `gpu.device_pages_kv` does the same on GPUs with this `PageTable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np

from pagoda.layout import KVLayout
from pagoda.transfer.base import (
    Array,
    Ids,
    RunTransfer,
    Words,
    as_words,
    check_starts,
    require_storage,
)
from pagoda.transfer.cpu_copy import CpuCopy, KvRows

# An address, a stride and a length that are multiples of one of these can be copied in such words.
WORD_BYTES = (8, 4, 2, 1)


class PagePlane(NamedTuple):
    """The place of a plane: page b is the bytes [address + b * stride, address + b * stride +
    page_bytes).
    """

    address: int
    stride: int
    page_bytes: int
    blocks: int
    storage: int  # distinguishes tensors of different memory; 0 for arrays


def page_plane(plane: Array, argument: str) -> PagePlane:
    """Return the place of a plane. Raises ValueError naming `argument` if it is not [num_blocks,
    page_bytes] bytes.
    """
    if isinstance(plane, np.ndarray):
        kind = plane.dtype.name
        strides = plane.strides
        address = plane.ctypes.data
        storage = 0
    else:
        kind = str(plane.dtype).removeprefix("torch.")
        strides = tuple(plane.stride())
        require_storage(plane, argument)
        address = plane.data_ptr()
        storage = plane.untyped_storage().data_ptr()
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
    return PagePlane(
        address, strides[0] if blocks > 1 else page, page, blocks, storage
    )


def merged(planes: Sequence[Array]) -> list[Array]:
    """Return fewer, wider planes over the same memory: planes that are adjacent in every block are
    merged.

    They are adjacent if an engine keeps its layers inside a block: copying one wide page is faster
    than many narrow ones. Copies nothing. In a slot, a merged plane has its bytes in another order
    than the separate planes, so a layout's description has to name the planes that are really used.
    Raises ValueError for a value that is not a plane.
    """
    found: list[tuple[Array, PagePlane]] = []
    for number, plane in enumerate(planes):
        seen = page_plane(plane, f"planes[{number}]")
        if found and _adjoins(found[-1][1], seen):
            base, before = found[-1]
            wider = before._replace(
                page_bytes=before.page_bytes + seen.page_bytes
            )
            found[-1] = (_widened(base, wider), wider)
        else:
            found.append((plane, seen))
    return [plane for plane, _ in found]


def _adjoins(before: PagePlane, after: PagePlane) -> bool:
    return (
        1 < before.blocks == after.blocks
        and (before.stride, before.storage) == (after.stride, after.storage)
        and before.address + before.page_bytes == after.address
        # so the pages of one block are contiguous
        and before.page_bytes + after.page_bytes <= before.stride
    )


def _widened(plane: Array, to: PagePlane) -> Array:
    shape = (to.blocks, to.page_bytes)
    strides = (to.stride, 1)
    if isinstance(plane, np.ndarray):
        return np.lib.stride_tricks.as_strided(plane, shape, strides)
    return plane.as_strided(shape, strides)


class PageTable:
    """The places of the pages of one sequence, in blocks and in slots. Pure and immutable.

    A slot is [part][plane][block of the chunk][page]; only the bytes of `part` of a slot are ever
    used. Raises ValueError that names what does not fit together.
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
                f"chunk_tokens ({layout.chunk_tokens}) must be a multiple of block_tokens "
                f"({block_tokens})"
            )
        if not 0 <= part < parts:
            raise ValueError(f"part must be one of the {parts} parts, got {part}")
        counts = sorted({plane.blocks for plane in planes})
        if len(counts) != 1:
            raise ValueError(
                f"planes must all have the same number of blocks, got {counts or 'no plane'}"
            )
        self.layout = layout
        self.blocks = layout.chunk_tokens // block_tokens
        self.part_bytes = self.blocks * sum(plane.page_bytes for plane in planes)
        if layout.planes or layout.chunk_bytes != parts * self.part_bytes:
            raise ValueError(
                f"layout must be opaque with chunk_bytes {parts * self.part_bytes} ({parts} "
                f"parts of {self.blocks} "
                "blocks of all planes), got "
                f"{layout.chunk_bytes}{' with planes' if layout.planes else ''}"
            )
        self.block_tokens = block_tokens
        self._part = part
        self._num_blocks = counts[0]
        self._set(block_table)

    def _set(self, block_table: Sequence[int]) -> None:
        self.ids = _checked_table(block_table, self._num_blocks)
        self.num_tokens = len(self.ids) * self.block_tokens

    def with_table(self, block_table: Sequence[int]) -> PageTable:
        """Return the same planes with the blocks of another sequence; changes nothing. ValueError
        for bad ids.
        """
        other = copy(self)
        other._set(block_table)
        return other

    def blocks_of(self, starts: Sequence[int], *, into_slots: bool) -> Ids:
        """Return the ids of each chunk's blocks, [chunks, blocks]. Raises ValueError for starts
        that do not fit.
        """
        check_starts(self.layout, self.num_tokens, starts)
        odd = [start for start in starts if start % self.block_tokens]
        if odd:
            raise ValueError(
                f"starts must be multiples of block_tokens ({self.block_tokens}), got {odd[0]}"
            )
        firsts = np.array(
            [start // self.block_tokens for start in starts], dtype=np.int64
        )
        found: Ids = self.ids[firsts[:, None] + np.arange(self.blocks)]
        if into_slots and (found < 0).any():
            raise ValueError("block_table: a block that is -1 has no KV to store")
        written = found[found >= 0]
        if not into_slots and len(np.unique(written)) != len(written):
            raise ValueError(
                "block_table names a block twice: it would get the bytes of either chunk"
            )
        return found


class PagesKV(RunTransfer):
    """The KV of one sequence in planes of pages, each [num_blocks, page_bytes] bytes of CPU memory.

    `planes` are int8 or uint8 arrays or tensors, each page contiguous, at any distance from the
    next: one per layer, or, after `merged`, one for several layers. `block_table` has the id of
    each block of `block_tokens` tokens, from token 0 on; -1 is a block that the caller must not
    touch: `from_slots` skips it, and storing it is a ValueError. The layout is opaque; its bytes
    are [part][plane][block of the chunk][page], and this object reads and writes only those of
    `part`, so that each rank of a tensor-parallel engine copies its part of a chunk.

    Thread-safe as `Transfer` says. Raises ValueError that names what does not match, before
    anything is copied.
    """

    device_index: None = None  # the index of a CUDA device; see DevicePagesKV

    def __init__(
        self,
        planes: Sequence[Array],
        layout: KVLayout,
        *,
        block_tokens: int,
        block_table: Sequence[int],
        part: int = 0,
        parts: int = 1,
        threads: int | None = None,
    ) -> None:
        arrays = [
            as_words(plane, f"planes[{number}]", None)
            for number, plane in enumerate(planes)
        ]
        seen = [
            page_plane(array, f"planes[{number}]")
            for number, array in enumerate(arrays)
        ]
        self._page_table = PageTable(
            seen, layout, block_tokens, block_table, part, parts
        )
        rows = list[KvRows]()
        offset = part * self._page_table.part_bytes
        for array, plane in zip(arrays, seen, strict=True):
            rows.append(KvRows(_widest_words(array, plane, offset)[None], offset))
            offset += self._page_table.blocks * plane.page_bytes
        self._copier = CpuCopy(rows, self._page_table.blocks, threads=threads)
        # the shortest contiguous run of a copy, which decides its speed; for benchmarks
        self.run_bytes = min(plane.page_bytes for plane in seen)
        self.layout = layout
        self.num_tokens = self._page_table.num_tokens

    def with_table(self, block_table: Sequence[int]) -> PagesKV:
        """Return a transfer for another sequence in the same planes, which are not checked again;
        changes nothing.

        Raises ValueError if the table names a block that does not exist.
        """
        other = copy(self)
        other._page_table = self._page_table.with_table(block_table)
        other.num_tokens = other._page_table.num_tokens
        return other

    def _run_ids(self, starts: Sequence[int], *, into_slots: bool) -> Ids:
        return self._page_table.blocks_of(starts, into_slots=into_slots)


def _widest_words(array: Words, plane: PagePlane, offset: int) -> Words:
    """Return the plane's rows as the widest words that fit; wide words are copied twice as fast as
    bytes.
    """
    numbers = (plane.address, plane.stride, plane.page_bytes, offset)
    width = next(
        width
        for width in WORD_BYTES
        if not any(number % width for number in numbers)
    )
    return array.view(f"u{width}")


def _checked_table(block_table: Sequence[int], blocks: int) -> Ids:
    ids = np.asarray(block_table)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise ValueError(
            f"block_table must be 1-D integers, got {ids.ndim}-D {ids.dtype}"
        )
    bad = ids[(ids < -1) | (ids >= blocks)]
    if bad.size:
        raise ValueError(f"block_table: {bad[0]} is not in [0, {blocks}), nor -1")
    return ids.astype(np.int64)
