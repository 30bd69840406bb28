"""Triton kernels that gather runs of KV from a device's memory into slots, and scatter them back:
bits only.

Needs torch and triton, so it is imported only after a CUDA device was found. If TRITON_INTERPRET=1
is set before the import, the same code runs on CPU tensors. Called by `copy_engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import numpy as np
import torch
import triton
import triton.language as tl

from pagoda.transfer.base import Ids
from pagoda.transfer.run_table import RunTable

# A program moves 2048 words at a time, 16 KiB of the widest: all its loads are issued before it
# stores anything. A read across the link takes 1 to 2 us, so 16 programs could ask for 130 to 260
# GB/s, two to four times what a PCIe 5 x16 link carries; the rest is for the arithmetic of places
# between the tiles. 8 warps are 256 threads of 4 loads of 16 bytes each: more threads would repeat
# that arithmetic, fewer would keep more registers each. Not tuned on a GPU.
TILE_WORDS = 2048
WARPS = 8
# A run is cut into pieces. A tile has many short pieces, also of other runs and rows, so that it is
# full even if runs are short. One long piece needs a third of the arithmetic; only the widest words
# use long pieces, since other widths are rare.
LONG_WORDS = 2048
SHORT_WORDS = 32
# bytes; 16 are two words of 8, moved by one instruction
WIDTHS = (16, 8, 4, 2, 1)
# limit for tiles of a launch and pieces of a chunk, whose numbers are 32 bits wide
MOST = 2**31 - 2**16

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_RUNTIME = (
    "table",
    "ids",
    "places",
    "begin",
    "units",
    "pieces",
    "count",
    "group",
    "tiles",
    "items",
)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_RUNTIME)
def _move(  # type: ignore[no-untyped-def]
    table,
    ids,
    places,
    begin,
    units,
    pieces,
    count,
    group,
    tiles,
    items,
    GATHER: tl.constexpr,
    WIDE: tl.constexpr,
    WORD: tl.constexpr,
    BYTES: tl.constexpr,
    UNITS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Move runs as words. A unit is a piece (PIECE words of BYTES bytes) of one run of one row; a
    tile is UNITS units.

    `table` is int64 [rows, 4]: address, stride, nbytes, offset. Places and lengths are 64 bits
    wide, counts and indices are 32 bits wide.
    """
    item = tl.program_id(0)
    while item < items:
        chunk = item // tiles
        place = tl.load(places + chunk)
        if place != 0:
            unit = (item - chunk * tiles) * UNITS + tl.arange(0, UNITS)
            inside = unit < units
            run = unit // pieces  # of all the runs of the chunk, row by row
            row = run // count
            number = run - row * count  # number of the run in its row
            line = table + (begin + row).to(tl.int64) * 4
            address = tl.load(line, mask=inside, other=0)
            stride = tl.load(line + 1, mask=inside, other=0)
            nbytes = tl.load(line + 2, mask=inside, other=0)
            offset = tl.load(line + 3, mask=inside, other=0)
            block = tl.load(
                ids + chunk.to(tl.int64) * count + number, mask=inside, other=-1
            )
            there = block >= 0
            token = tl.full([UNITS], 0, tl.int64)
            # 64-bit division is expensive, and most tables need none
            if group > 1:
                token = block % group
                block = block // group
            # bytes of the run in earlier pieces
            done = (unit - run * pieces).to(tl.int64) * (PIECE * BYTES)
            paged = address + block * stride + token * nbytes + done
            slot = place + offset + number.to(tl.int64) * nbytes + done
            # from this piece on; 0 or less: a shorter row has ended
            words = (nbytes - done) // BYTES
            paged = paged.to(tl.pointer_type(WORD))
            slot = slot.to(tl.pointer_type(WORD))
            # the caller's promise: two words at a time in one instruction
            if WIDE:
                paged = tl.multiple_of(paged, 16)
                slot = tl.multiple_of(slot, 16)
                words = tl.multiple_of(words, 2)
            word = tl.arange(0, PIECE)
            moves = there[:, None] & (word[None, :] < words[:, None])
            inner = paged[:, None] + word[None, :]
            outer = slot[:, None] + word[None, :]
            # .cg: data that is read once must not evict the table from the L1
            if GATHER:
                tl.store(
                    outer,
                    tl.load(inner, mask=moves, cache_modifier=".cg"),
                    mask=moves,
                )
            else:
                tl.store(
                    inner,
                    tl.load(outer, mask=moves, cache_modifier=".cg"),
                    mask=moves,
                )
        item += tl.num_programs(0)


@dataclass(frozen=True, eq=False)
class DeviceTable:
    """A RunTable on a device. Immutable; thread-safe. Holds no reference to the RunTable.

    `lines` is int64 [rows, 4]: address, stride, nbytes, offset of each row. It was uploaded in the
    stream that was current then: another stream waits for that one before a kernel is launched on
    it. May be dropped while kernels run. `nbytes`, `count` and `group` are the RunTable's.
    `word_bytes` is the widest word of 16, 8, 4, 2, 1 bytes that the table allows; `places` may be
    worse aligned.
    """

    lines: torch.Tensor
    nbytes: Ids
    count: int
    group: int
    word_bytes: int


class Kernels:
    """Gathers and scatters runs on one device by Triton kernels, in the current stream.

    At most `programs` SMs are used: a launch has at most that many programs, however much there is
    to move. Keeps no state; thread-safe as Triton's launches are (its interpreter is not).
    """

    def __init__(self, device: torch.device, programs: int = 16) -> None:
        if programs < 1:
            raise ValueError(f"programs must be at least 1, got {programs}")
        self._device = device
        self._programs = programs

    def upload(self, table: RunTable) -> DeviceTable:
        """Copy the table to the device, in the current stream; changes nothing else. The caller
        keeps the result.
        """
        columns = [table.address, table.stride, table.nbytes, table.offset]
        numbers = np.stack(columns, axis=1)
        lines = torch.from_numpy(numbers)
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # without pinned memory the copy blocks
                lines = lines.pin_memory()
            lines = lines.to(self._device, non_blocking=True)
        word_bytes = int(np.gcd.reduce(numbers, axis=None, initial=16))
        return DeviceTable(
            lines, table.nbytes, int(table.count), int(table.group), word_bytes
        )

    def move(
        self,
        table: DeviceTable,
        ids: torch.Tensor,
        places: torch.Tensor,
        begin: int,
        end: int,
        word_bytes: int,
        *,
        gather: bool,
    ) -> None:
        """Copy rows [begin, end) of chunks from the device's memory to their places, or back;
        changes only those.

        `ids` is int64 [chunks, count] and `places` int64 [chunks], contiguous, both on this device.
        Run j of a row p of chunk c goes to `places[c] + offset[p] + j * nbytes[p]`: device memory,
        or host memory that is registered. An id below 0 is skipped, and so is a chunk whose place
        is 0. On the way back an id that occurs twice gets the bytes of either run, or some of each.
        `word_bytes`, one of 16, 8, 4, 2, 1, has to divide all places, which is not checked, and the
        table, which is checked. Launches one kernel in the current stream, or none if there is
        nothing to do, and returns; the caller keeps ids, places and all memory until it has run.
        Raises ValueError for anything else.
        """
        rows = len(table.nbytes)
        _check(table, ids, places, word_bytes)
        if not 0 <= begin <= end <= rows:
            raise ValueError(
                f"rows [{begin}, {end}) are not in a table of {rows}"
            )
        longest = int(table.nbytes[begin:end].max(initial=0))
        if not len(places) or not longest:
            return
        constants = _variant(
            word_bytes, _piece_words(longest, word_bytes), gather
        )
        pieces = -(-longest // (constants["PIECE"] * constants["BYTES"]))
        units = (end - begin) * table.count * pieces
        tiles = -(-units // constants["UNITS"])
        items = len(places) * tiles
        if max(items, units) > MOST:
            raise ValueError(
                f"{len(places)} chunks of {units} pieces are too much for one launch"
            )
        numbers = (
            int(begin),
            units,
            pieces,
            table.count,
            table.group,
            tiles,
            items,
        )
        self._run(
            min(self._programs, items),
            (table.lines, ids, places),
            numbers,
            constants,
        )

    def warm(self) -> None:
        """Compile and load all variants, each by a launch that moves nothing.

        Without it the first launch of a kind waits for its compilation, and loading it may wait for
        the device.
        """
        nothing = torch.zeros(4, dtype=torch.int64, device=self._device)
        for constants in variants():
            self._run(
                1, (nothing, nothing, nothing), (0, 1, 1, 1, 1, 1, 0), constants
            )

    def _run(
        self,
        programs: int,
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[int],
        constants: Constants,
    ) -> None:
        launch = partial(
            _move[(programs,)],
            *tensors,
            *numbers,
            **constants,
            WORD=_WORDS[constants["BYTES"]],
            num_warps=WARPS,
        )
        if self._device.type != "cuda":
            launch()
            return
        # Triton launches on the current device, in its current stream
        with torch.cuda.device(self._device):
            # the table was uploaded in another stream, where its memory is free as soon as the
            # table is dropped
            tensors[0].record_stream(torch.cuda.current_stream())
            launch()


class Constants(TypedDict):
    """The constants that a variant of the kernel is compiled with, besides the type of a word."""

    GATHER: bool
    WIDE: bool
    BYTES: int
    UNITS: int
    PIECE: int


def variants() -> list[Constants]:
    """Return the constants of all variants of the kernel."""
    kinds = [(word_bytes, SHORT_WORDS) for word_bytes in WIDTHS] + [
        (WIDTHS[0], LONG_WORDS)
    ]
    return [
        _variant(word_bytes, piece, gather)
        for word_bytes, piece in kinds
        for gather in (True, False)
    ]


def _variant(word_bytes: int, piece_words: int, gather: bool) -> Constants:
    return Constants(
        GATHER=gather,
        WIDE=word_bytes == 16,
        BYTES=min(word_bytes, 8),
        UNITS=TILE_WORDS // piece_words,
        PIECE=piece_words,
    )


def _piece_words(run_bytes: int, word_bytes: int) -> int:
    """Return the length of the pieces of such runs: long if they would be at least three quarters
    full.
    """
    words = -(-run_bytes // min(word_bytes, 8))
    room = -(-words // LONG_WORDS) * LONG_WORDS
    return (
        LONG_WORDS if word_bytes == 16 and words * 4 >= room * 3 else SHORT_WORDS
    )


def _check(
    table: DeviceTable, ids: torch.Tensor, places: torch.Tensor, word_bytes: int
) -> None:
    if word_bytes not in WIDTHS or table.word_bytes % word_bytes:
        raise ValueError(
            f"word_bytes must be one of {WIDTHS} and divide {table.word_bytes}, got {word_bytes}"
        )
    for name, tensor, shape in (
        ("ids", ids, (len(places), table.count)),
        ("places", places, (len(places),)),
    ):
        fits = (
            tensor.dtype == torch.int64
            and tuple(tensor.shape) == shape
            and tensor.is_contiguous()
        )
        if not fits or tensor.device != table.lines.device:
            raise ValueError(
                f"{name} must be contiguous int64 {list(shape)} on {table.lines.device}, "
                f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )
