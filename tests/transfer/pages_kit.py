"""Shared by the tests of pages: planes inside larger memory, and a simple definition of each byte's
place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pagoda.layout import KVLayout

BLOCKS = 16
BLOCK_TOKENS = 4
POISON = 0xA5

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")


class Memory(NamedTuple):
    """A plane `view` [BLOCKS, page] and the memory around it; only bytes of the plane may
    change.
    """

    whole: Bytes
    view: Bytes


class Case(NamedTuple):
    """One transfer and its memory; `starts`: all whole chunks of the table, the last first."""

    pages: list[int]
    table: list[int]
    layout: KVLayout
    part: int
    parts: int
    apart: int
    slot_offset: int

    @property
    def starts(self) -> list[int]:
        tokens = len(self.table) * BLOCK_TOKENS
        chunk = self.layout.chunk_tokens
        starts = list(range(0, tokens - chunk + 1, chunk))
        return starts[::-1]

    def ids(self, start: int) -> list[int]:
        first = start // BLOCK_TOKENS
        return self.table[
            first : first + self.layout.chunk_tokens // BLOCK_TOKENS
        ]

    def planes(self, seed: int) -> list[Memory]:
        return make_planes(self.pages, seed, self.apart)

    def filled_slots(self) -> list[Bytes]:
        slots = poisoned_slots(self.layout, len(self.starts), self.slot_offset)
        random = np.random.default_rng(7)
        for slot in slots:
            slot[:] = random.integers(0, 256, slot.nbytes, dtype=np.uint8)
        return slots

    def kv(
        self, transfer: Callable[..., T], planes: list[Memory], **options: object
    ) -> T:
        return transfer(
            views(planes),
            self.layout,
            block_tokens=BLOCK_TOKENS,
            block_table=self.table,
            part=self.part,
            parts=self.parts,
            **options,
        )


def case_of(
    pages: list[int],
    table: list[int],
    *,
    blocks_a_chunk: int = 2,
    part: int = 0,
    parts: int = 1,
    apart: int = 0,
    slot_offset: int = 0,
) -> Case:
    layout = layout_of(pages, blocks_a_chunk, parts)
    return Case(pages, table, layout, part, parts, apart, slot_offset)


def layout_of(pages: list[int], blocks_a_chunk: int, parts: int = 1) -> KVLayout:
    return KVLayout.opaque(
        blocks_a_chunk * BLOCK_TOKENS,
        parts * blocks_a_chunk * sum(pages),
        "tests of pages",
    )


def make_planes(pages: list[int], seed: int, apart: int = 0) -> list[Memory]:
    """Return planes with `apart` bytes between two pages."""
    random = np.random.default_rng(seed)
    wholes = [
        random.integers(0, 256, (BLOCKS, page + apart), dtype=np.uint8)
        for page in pages
    ]
    return [
        Memory(whole, whole[:, :page])
        for whole, page in zip(wholes, pages, strict=True)
    ]


def views(planes: list[Memory]) -> list[Bytes]:
    """Return the planes without the memory around them."""
    return [plane.view for plane in planes]


def bytes_of(array: Bytes) -> bytes:
    return array.tobytes()


def poisoned(layout: KVLayout, offset: int = 0) -> Bytes:
    """Return a slot that begins `offset` bytes after an aligned address."""
    return np.full(offset + layout.slot_bytes, POISON, np.uint8)[offset:]


def poisoned_slots(layout: KVLayout, count: int, offset: int = 0) -> list[Bytes]:
    """Return slots of one memory, at equal distances, as those of a tier: chunks of these are
    copied together.
    """
    words = -(-(offset + layout.slot_bytes) // 8)
    whole = np.full((count, words * 8), POISON, np.uint8)
    return [row[offset : offset + layout.slot_bytes] for row in whole]


def place(case: Case, plane: int, block: int) -> slice:
    """Return the place in a slot of the page of a plane and of a block of the chunk."""
    count = case.layout.chunk_tokens // BLOCK_TOKENS
    before = case.part * count * sum(case.pages) + count * sum(case.pages[:plane])
    return slice(
        before + block * case.pages[plane],
        before + (block + 1) * case.pages[plane],
    )


def expected_slot(case: Case, planes: list[Bytes], start: int) -> bytes:
    """Return the expected contents of a poisoned slot after the chunk at `start` was copied into
    it.
    """
    slot = poisoned(case.layout)
    for number, plane in enumerate(planes):
        for at, block in enumerate(case.ids(start)):
            slot[place(case, number, at)] = plane[block]
    return slot.tobytes()


def expected_blocks(
    case: Case, planes: list[Memory], slots: list[Bytes]
) -> list[bytes]:
    """Return the expected memory of the planes after `slots` were copied into the chunks of
    `case.starts`.
    """
    after = [plane.whole.copy() for plane in planes]
    for start, slot in zip(case.starts, slots, strict=True):
        for number, page in enumerate(case.pages):
            for at, block in enumerate(case.ids(start)):
                if block >= 0:
                    after[number][block, :page] = slot[place(case, number, at)]
    return [array.tobytes() for array in after]
