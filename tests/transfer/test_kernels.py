"""The Triton kernels through the interpreter, against plain torch: bits, on both sides, of all
memory there is.

The reference knows no addresses: it indexes the tensors and counts bytes in a slot. Memory that is
written to was POISON before and what is written is never POISON: a byte that stayed and should not
have is seen like one that changed.
"""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise, permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.transfer.run_table import RunTable
from tests.transfer.kernels_kit import compiled, interpreted

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

POISON = 0xA5
BLOCKS = 7
SIZE = 3
HEADS = 2
DIM = 5
WIDTHS = (16, 8, 4, 2, 1)
DTYPES = {"bfloat16": torch.bfloat16, "uint8": torch.uint8}


class Case(NamedTuple):
    """Rows by layer: views whose first axis ids count, with `group` > 1 the first two. `memory`:
    all of it.
    """

    layers: list[list[torch.Tensor]]
    memory: list[torch.Tensor]
    group: int = 1

    @property
    def rows(self) -> list[torch.Tensor]:
        return [row for layer in self.layers for row in layer]

    def run(self, row: torch.Tensor, number: int) -> torch.Tensor:
        """The run with this id: a view."""
        if self.group > 1:
            return row[number // self.group, number % self.group]
        return row[number]


class Chunks(NamedTuple):
    """Slots in one memory, with gaps between them. A slot of None is a chunk that is skipped."""

    memory: torch.Tensor
    slots: list[torch.Tensor | None]
    ids: torch.Tensor

    @property
    def places(self) -> torch.Tensor:
        found = []
        for slot in self.slots:
            found.append(0 if slot is None else slot.data_ptr())
        return torch.tensor(found, dtype=torch.int64)


@cache
def _noise(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 255, (nbytes,), generator=generator)
    made = numbers.to(torch.uint8)
    made[made == POISON] = 255
    return made


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Random bytes, none of them POISON, whose first is at a multiple of 64."""
    made = _noise(nbytes, seed).clone()
    assert made.data_ptr() % 64 == 0
    return made


class Room:
    """Where the pools of a case are: each inside a separate memory, which is larger."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.memory: list[torch.Tensor] = []

    def pool(self, *shape: int, around: int = 16) -> torch.Tensor:
        """A contiguous tensor."""
        nbytes = int(np.prod(shape)) * self.dtype.itemsize
        whole = noise(nbytes + 2 * around, seed=len(self.memory))
        self.memory.append(whole)
        return whole[around : around + nbytes].view(self.dtype).view(shape)


def planes_first(room: Room) -> Case:
    pools = [room.pool(2, BLOCKS, SIZE, HEADS, DIM) for _ in range(2)]
    layers = [[pool[0], pool[1]] for pool in pools]
    return Case(layers, room.memory)


def planes_first_aligned(room: Room) -> Case:
    pools = [room.pool(2, BLOCKS, 4, 1, 16) for _ in range(3)]
    layers = [[pool[0], pool[1]] for pool in pools]
    return Case(layers, room.memory)


def blocks_first(room: Room) -> Case:
    pools = [room.pool(BLOCKS, 2, SIZE, HEADS, DIM, around=4) for _ in range(2)]
    layers = [[pool[:, 0], pool[:, 1]] for pool in pools]
    return Case(layers, room.memory)


def outermost(room: Room) -> Case:
    pool = room.pool(BLOCKS, 3, 2, SIZE, HEADS, DIM)
    layers = []
    for layer in range(3):
        planes = [pool[:, layer, plane] for plane in range(2)]
        layers.append(planes)
    return Case(layers, room.memory)


def outermost_opaque(room: Room) -> Case:
    pool = room.pool(BLOCKS, 3, 2, SIZE, HEADS, DIM)
    return Case([[pool]], room.memory)


def mla(room: Room) -> Case:
    layers = [[room.pool(BLOCKS, SIZE, 9)] for _ in range(3)]
    return Case(layers, room.memory)


def unequal_planes(room: Room) -> Case:
    """K and V of different widths: rows of different lengths in one launch."""
    layers = []
    for _ in range(2):
        k = room.pool(BLOCKS, SIZE, 40)
        v = room.pool(BLOCKS, SIZE, 3)
        layers.append([k, v])
    return Case(layers, room.memory)


def inside_larger(room: Room) -> Case:
    """A view of some blocks, tokens and channels of a pool: what is contiguous is one token."""
    whole = room.pool(BLOCKS + 2, SIZE + 1, HEADS, DIM + 3)
    pool = whole[1:-1, :SIZE, :, 2:-1]
    layer = list(runs_of(pool))
    return Case([layer], room.memory)


def tokens(room: Room) -> Case:
    """A run is one token, and blocks are not adjacent: ids are slots of tokens."""
    pools = [room.pool(BLOCKS, 2, SIZE, HEADS * DIM) for _ in range(2)]
    layers = [[pool[:, 0], pool[:, 1]] for pool in pools]
    return Case(layers, room.memory, group=SIZE)


def packed(order: tuple[int, ...]) -> Callable[[Room], Case]:
    """[blocks, heads, tokens, channels] over memory in another order of the axes."""

    def make(room: Room) -> Case:
        shape = (4, HEADS, SIZE, 4)
        in_memory = [shape[axis] for axis in order]
        back = np.argsort(order).tolist()
        pool = room.pool(*in_memory).permute(*back)
        assert tuple(pool.shape) == shape
        layer = list(runs_of(pool))
        return Case([layer], room.memory)

    return make


def runs_of(pool: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut a pool [ids, ...] into rows whose runs are contiguous, in the order of its axes."""
    if pool.ndim == 1 or pool[0].is_contiguous():
        yield pool
    else:
        for number in range(pool.shape[1]):
            yield from runs_of(pool[:, number])


PACKED = {
    "packed " + "bhtc"[a] + "bhtc"[b] + "bhtc"[c] + "bhtc"[d]: packed(
        (a, b, c, d)
    )
    for a, b, c, d in permutations(range(4))
}
SOME_PACKED = [
    "packed bhtc",
    "packed bthc",
    "packed htbc",
    "packed hbtc",
    "packed cthb",
]
LAYOUTS: dict[str, Callable[[Room], Case]] = {
    make.__name__: make
    for make in (
        planes_first,
        planes_first_aligned,
        blocks_first,
        outermost,
        outermost_opaque,
        mla,
        unequal_planes,
    )
} | {"inside_larger": inside_larger, "tokens": tokens}
LAYOUTS |= {name: PACKED[name] for name in SOME_PACKED}


def bytes_of_a_run(case: Case, row: torch.Tensor) -> int:
    """Return the length of each run of a row."""
    return case.run(row, 0).numel() * row.itemsize


def table_of(case: Case, count: int, begin: int = 0) -> RunTable:
    """The table that describes a case to the kernels."""
    rows = case.rows
    lengths = [bytes_of_a_run(case, row) for row in rows]
    strides = [row.stride(0) * row.itemsize for row in rows]
    places = [row.data_ptr() for row in rows]
    nbytes = np.array(lengths, dtype=np.int64)
    ends = begin + np.cumsum(nbytes * count)
    return RunTable(
        address=np.array(places, dtype=np.int64),
        stride=np.array(strides, dtype=np.int64),
        nbytes=nbytes,
        offset=ends - nbytes * count,
        count=count,
        group=case.group,
        layers=np.cumsum([0] + [len(layer) for layer in case.layers]),
    )


def chunks_of(
    case: Case,
    ids: Sequence[Sequence[int]],
    passed_over: Sequence[int] = (),
    gap: int = 16,
) -> Chunks:
    """Slots for these chunks, in memory from the last to the first."""
    of_one_id = sum(bytes_of_a_run(case, row) for row in case.rows)
    each = of_one_id * len(ids[0])
    apart = -(-(each + gap) // gap) * gap
    memory = noise(apart * len(ids) + gap, seed=99)
    begins = [gap + apart * (len(ids) - 1 - chunk) for chunk in range(len(ids))]
    slots: list[torch.Tensor | None] = []
    for chunk, begin in enumerate(begins):
        slot = memory[begin : begin + each]
        slots.append(None if chunk in passed_over else slot)
    return Chunks(memory, slots, torch.tensor(ids, dtype=torch.int64))


def by_torch(
    case: Case, chunks: Chunks, gather: bool, begin: int, end: int
) -> None:
    """Do what the kernel should do: run by run, in the order of a slot."""
    for slot, ids in zip(chunks.slots, chunks.ids.tolist(), strict=True):
        at = 0
        for number, row in enumerate(case.rows):
            for run_id in ids:
                nbytes = bytes_of_a_run(case, row)
                if slot is not None and run_id >= 0 and begin <= number < end:
                    run = case.run(row, run_id).view(-1).view(torch.uint8)
                    if gather:
                        slot[at : at + nbytes] = run
                    else:
                        run[:] = slot[at : at + nbytes]
                at += nbytes


def check(
    case: Case,
    chunks: Chunks,
    *,
    gather: bool,
    rows: tuple[int, int] | None = None,
    programs: int = 3,
    most: int = 16,
) -> int:
    """Compare all memory after the kernel and after the reference, for all widths that fit; returns
    how many.
    """
    table = table_of(case, chunks.ids.shape[1])
    begin, end = rows or (0, table.rows)
    everything = [*case.memory, chunks.memory]
    for memory in [chunks.memory] if gather else case.memory:
        memory.fill_(POISON)
    before = [memory.clone() for memory in everything]
    by_torch(case, chunks, gather, begin, end)
    expected = [memory.clone() for memory in everything]
    kernels = interpreted(programs)
    sent = kernels.upload(table)
    fits = int(np.gcd.reduce(chunks.places.numpy(), initial=sent.word_bytes))
    tried = [width for width in WIDTHS if fits % width == 0 and width <= most]
    for width in tried:
        for memory, was in zip(everything, before, strict=True):
            memory.copy_(was)
        kernels.move(
            sent, chunks.ids, chunks.places, begin, end, width, gather=gather
        )
        for memory, wanted in zip(everything, expected, strict=True):
            np.testing.assert_array_equal(memory.numpy(), wanted.numpy())
    return len(tried)


BOTH = pytest.mark.parametrize("gather", [True, False], ids=["gather", "scatter"])


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_copied_right(
    layout: str, dtype: str, gather: bool
) -> None:
    case = LAYOUTS[layout](Room(DTYPES[dtype]))
    ids = [[2, -1], [1, 2], [3, 0]]
    if gather:
        # a block that two chunks have, and one that a chunk has twice
        ids[1] = [3, 3]
    chunks = chunks_of(case, ids, passed_over=[1])
    assert check(case, chunks, gather=gather)


@BOTH
@pytest.mark.parametrize(
    "layout", [name for name in PACKED if name not in SOME_PACKED]
)
def test_packed_in_every_other_order(layout: str, gather: bool) -> None:
    case = PACKED[layout](Room(torch.float32))
    chunks = chunks_of(case, [[3, 1]])
    assert check(case, chunks, gather=gather, most=4)


@BOTH
@pytest.mark.parametrize("width", WIDTHS)
def test_copies_use_the_widest_words_that_fit(width: int, gather: bool) -> None:
    """Slots, pools and what surrounds them are multiples of the width, not of twice the width."""
    room = Room(torch.uint8)
    pools = [room.pool(BLOCKS, width * 3, around=width) for _ in range(3)]
    case = Case([[pool] for pool in pools], room.memory)
    chunks = chunks_of(case, [[4, 1, -1, 6], [0, 2, 3, 5]], gap=width)
    assert check(case, chunks, gather=gather) == len(WIDTHS) - WIDTHS.index(width)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(
    "run_bytes", [16384, 16384 + 16368, 2 * 16384 + 16, 12288 + 16]
)
def test_runs_longer_than_a_tile_are_copied_right(
    run_bytes: int, gather: bool
) -> None:
    """Runs longer than a tile, cut into long pieces or into short ones, the last one not full."""
    room = Room(torch.uint8)
    long = room.pool(3, run_bytes)
    other = room.pool(3, 4096)
    case = Case([[long, other]], room.memory)
    chunks = chunks_of(case, [[2, 0]])
    assert check(case, chunks, gather=gather)


@BOTH
@pytest.mark.parametrize(
    "layout", ["planes_first_aligned", "unequal_planes", "tokens"]
)
def test_one_layer_at_a_time(layout: str, gather: bool) -> None:
    case = LAYOUTS[layout](Room(torch.bfloat16))
    layers = table_of(case, 3).layers.tolist()
    for begin, end in pairwise(layers):
        chunks = chunks_of(case, [[2, 4, 1], [-1, 0, 3]])
        assert check(case, chunks, gather=gather, rows=(begin, end))


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("programs", [1, 2, 1000])
def test_any_number_of_programs_copies_right(programs: int, gather: bool) -> None:
    """80 rows of 4 runs are five tiles of the widest words."""
    room = Room(torch.uint8)
    pool = room.pool(BLOCKS, 80, 16)
    rows = [pool[:, row] for row in range(80)]
    case = Case([rows], room.memory)
    chunks = chunks_of(case, [[6, 2, 0, 3], [5, -1, 1, 4]])
    assert check(case, chunks, gather=gather, programs=programs)


@BOTH
def test_a_part_of_a_slot_is_left_alone(gather: bool) -> None:
    """A table that does not begin at 0, as those of a second rank."""
    room = Room(torch.uint8)
    pool = room.pool(BLOCKS, 24)
    case = Case([[pool]], room.memory)
    slot = noise(128, seed=5)
    kernels = interpreted()
    table = table_of(case, 2, begin=56)
    sent = kernels.upload(table)
    places = torch.tensor([slot.data_ptr()])
    ids = torch.tensor([[5, 1]])
    if gather:
        wanted = slot.clone()
        wanted[56:104] = torch.cat([pool[5], pool[1]])
        kernels.move(sent, ids, places, 0, 1, 8, gather=True)
        assert torch.equal(slot, wanted)
    else:
        wanted = pool.clone()
        wanted[5] = slot[56:80]
        wanted[1] = slot[80:104]
        kernels.move(sent, ids, places, 0, 1, 8, gather=False)
        assert torch.equal(pool, wanted)


@BOTH
def test_nothing_is_copied_where_there_is_nothing_to_copy(gather: bool) -> None:
    case = planes_first_aligned(Room(torch.bfloat16))
    chunks = chunks_of(case, [[-1, -1], [-1, -1]])
    assert check(case, chunks, gather=gather)
    chunks = chunks_of(case, [[0, 1], [2, 3]], passed_over=[0, 1])
    assert check(case, chunks, gather=gather)
    chunks = chunks_of(case, [[0, 1]])
    assert check(case, chunks, gather=gather, rows=(2, 2))
    kernels = interpreted()
    none = torch.zeros((0, 2), dtype=torch.int64)
    nowhere = none[:, 0].contiguous()
    table = table_of(case, 2)
    sent = kernels.upload(table)
    kernels.move(sent, none, nowhere, 0, 1, 8, gather=gather)


@BOTH
def test_one_token_of_a_byte_is_copied(gather: bool) -> None:
    room = Room(torch.uint8)
    pool = room.pool(1, 1)
    case = Case([[pool]], room.memory)
    chunks = chunks_of(case, [[0]])
    assert check(case, chunks, gather=gather)


@BOTH
def test_a_pool_of_more_than_four_gigabytes(gather: bool) -> None:
    """Only the pages that are touched are ever there."""
    apart = 3 << 30
    nbytes = 48
    flags = (
        mmap.MAP_PRIVATE
        | mmap.MAP_ANONYMOUS
        | getattr(mmap, "MAP_NORESERVE", 0x4000)
    )
    pages = mmap.mmap(-1, 2 * apart + mmap.PAGESIZE, flags=flags)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    pool = memory.as_strided((3, nbytes), (apart, 1))
    for number in range(3):
        pool[number] = noise(nbytes, seed=number)
    slot = noise(nbytes, seed=8)
    kernels = interpreted()
    table = table_of(Case([[pool]], []), 1)
    sent = kernels.upload(table)
    places = torch.tensor([slot.data_ptr()])
    ids = torch.tensor([[2]])
    if gather:
        kernels.move(sent, ids, places, 0, 1, 16, gather=True)
        want = noise(nbytes, seed=2)
        assert torch.equal(slot, want)
    else:
        kernels.move(sent, ids, places, 0, 1, 16, gather=False)
        assert torch.equal(pool[2], slot)
        untouched = noise(nbytes, seed=0)
        assert torch.equal(pool[0], untouched)


def test_warming_touches_nothing_and_bad_arguments_are_named() -> None:
    case = planes_first_aligned(Room(torch.bfloat16))
    before = [memory.clone() for memory in case.memory]
    kernels = interpreted()
    kernels.warm()
    table = table_of(case, 2)
    sent = kernels.upload(table)
    ids = torch.zeros((1, 2), dtype=torch.int64)
    places = torch.zeros(1, dtype=torch.int64)
    for bad_ids, bad_places, begin, end, width, named in [
        (ids[:, :1], places, 0, 1, 8, "ids"),
        (ids.to(torch.int32), places, 0, 1, 8, "ids"),
        (ids.T, torch.zeros(2, dtype=torch.int64), 0, 1, 8, "ids"),
        (ids, places.to(torch.int32), 0, 1, 8, "places"),
        (ids, places, 0, 99, 8, "rows"),
        (ids, places, -1, 1, 8, "rows"),
        (ids, places, 0, 1, 3, "word_bytes"),
        (ids, places, 0, 1, 32, "word_bytes"),
    ]:
        with pytest.raises(ValueError, match=named):
            kernels.move(
                sent, bad_ids, bad_places, begin, end, width, gather=True
            )
    with pytest.raises(ValueError, match="programs"):
        interpreted(programs=0)
    odd = tokens(Room(torch.bfloat16))
    table = table_of(odd, 2)
    sent = kernels.upload(table)
    with pytest.raises(ValueError, match="word_bytes"):
        kernels.move(sent, ids, places, 0, 1, 16, gather=True)
    for memory, was in zip(case.memory, before, strict=True):
        assert torch.equal(memory, was)


def test_what_was_sent_does_not_keep_the_table() -> None:
    """A weak cache of sent data, keyed by the table, would never drop it."""
    case = planes_first_aligned(Room(torch.bfloat16))
    table = table_of(case, 2)
    alive = weakref.ref(table)
    sent = interpreted().upload(table)
    del table
    gc.collect()
    assert alive() is None
    assert sent.count == 2


class Numbers(NamedTuple):
    """A table of any numbers, in bytes."""

    # bytes of a run, and of the gap between two groups of ids
    rows: list[tuple[int, int]]
    group: int
    ids: list[list[int]]
    there: list[bool]
    begin: int
    end: int


@st.composite
def numbers(draw: st.DrawFn) -> Numbers:
    width = draw(st.sampled_from([1, 2, 4, 8, 16]))
    lengths = st.integers(0, 40 // width).map(lambda words: words * width)
    rows = draw(
        st.lists(
            st.tuples(
                lengths, st.integers(0, 2).map(lambda words: words * width)
            ),
            min_size=1,
            max_size=5,
        )
    )
    count = draw(st.integers(1, 3))
    chunks = draw(st.integers(1, 3))
    # no id twice: a scatter would have no answer
    every = draw(st.permutations(range(9)))
    ids = [
        [
            number if number < 7 else -1
            for number in every[c * count : (c + 1) * count]
        ]
        for c in range(chunks)
    ]
    there = draw(st.lists(st.booleans(), min_size=chunks, max_size=chunks))
    begin = draw(st.integers(0, len(rows)))
    return Numbers(
        rows,
        draw(st.integers(1, 3)),
        ids,
        there,
        begin,
        draw(st.integers(begin, len(rows))),
    )


@pytest.mark.slow
@BOTH
@given(table=numbers())
def test_any_table_is_copied_right(table: Numbers, gather: bool) -> None:
    room = Room(torch.uint8)
    rows = []
    for length, between in table.rows:
        pool = room.pool(-(-7 // table.group), length * table.group + between)
        runs = pool[:, : length * table.group].unflatten(1, (table.group, length))
        rows.append(runs if table.group > 1 else runs[:, 0])
    case = Case([rows], room.memory, table.group)
    absent = [chunk for chunk, there in enumerate(table.there) if not there]
    assert check(
        case,
        chunks_of(case, table.ids, absent),
        gather=gather,
        rows=(table.begin, table.end),
    )


@pytest.mark.slow
def test_what_a_gpu_would_run(tmp_path: Path) -> None:
    """All variants compile for sm_90, once for all sizes, and a tile's loads are wide and come
    before its stores.

    A thread has four loads of 16 bytes where a multiple of 16 is promised, else eight of a word
    each.
    """
    variants = compiled(tmp_path)
    assert len(variants) == 12
    for variant in variants:
        times, kind = (
            (4, "v2.b64")
            if variant["WIDE"]
            else (8, f"b{int(str(variant['BYTES'])) * 8}")
        )
        assert (
            variant["moves"] == [f"ld.{kind}"] * times + [f"st.{kind}"] * times
        ), variant
        assert variant["kinds"] == 1, "a size or an alignment is compiled for"
        assert variant["cubin_bytes"]


def test_the_interpreter_is_for_these_tests_only() -> None:
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("TRITON_INTERPRET is set for everybody")
    from triton.runtime.jit import JITFunction

    from pagoda.transfer.gpu import kernels

    interpreted()
    assert isinstance(kernels._move, JITFunction)
    assert "TRITON_INTERPRET" not in os.environ
