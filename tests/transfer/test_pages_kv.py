"""PagesKV against plain slicing: planes near and far, parts, skipped blocks, merged planes; no
other byte changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagoda.layout import KVLayout
from pagoda.transfer import PagesKV, merged
from tests.transfer.pages_kit import (
    BLOCK_TOKENS,
    BLOCKS,
    POISON,
    Case,
    Memory,
    bytes_of,
    case_of,
    expected_blocks,
    expected_slot,
    layout_of,
    make_planes,
    poisoned,
    poisoned_slots,
    views,
)


def memory_of(planes: Sequence[Memory]) -> list[bytes]:
    """Return all bytes of the planes, also those that no page has."""
    return [bytes_of(plane.whole) for plane in planes]


def check(case: Case, threads: int = 1) -> None:
    """Both ways: every byte that must change did, and no other, in slots and in memory."""
    source = case.planes(seed=1)
    kv = case.kv(PagesKV, source, threads=threads)
    stored = [start for start in case.starts if -1 not in case.ids(start)]
    slots = poisoned_slots(case.layout, len(stored), case.slot_offset)
    before = memory_of(source)
    kv.to_slots(stored, slots)
    for start, slot in zip(stored, slots, strict=True):
        want_slot = expected_slot(case, views(source), start)
        assert slot.tobytes() == want_slot
    assert memory_of(source) == before

    target = case.planes(seed=2)
    filled = case.filled_slots()
    want = expected_blocks(case, target, filled)
    kv = case.kv(PagesKV, target, threads=threads)
    kv.from_slots(case.starts, filled)
    assert memory_of(target) == want


@pytest.mark.parametrize("apart", [0, 8, 5])
@pytest.mark.parametrize("pages", [[64], [64, 64], [24, 7, 16], [1], [4096, 512]])
@pytest.mark.parametrize(
    "table", [[7, 3, 15, 0, 9, 2], [4, 5, 6, 7, 8, 9], [4, 5, 9, 8, 2, 3]]
)
def test_pages_are_copied_right_both_ways(
    pages: list[int], table: list[int], apart: int
) -> None:
    case = case_of(pages, table, apart=apart)
    check(case)
    # ends as a run would
    case = case_of(pages, [4, 6, 5, 7], apart=apart, blocks_a_chunk=4)
    check(case)


def test_another_table_of_the_same_planes() -> None:
    case = case_of([24, 64], [7, 3, 4, 5])
    source = case.planes(seed=1)
    slots = poisoned_slots(case.layout, len(case.starts))
    other = case_of([24, 64], [1, 2])
    first = other.kv(PagesKV, source)
    kv = first.with_table(case.table)
    kv.to_slots(case.starts, slots)
    for start, slot in zip(case.starts, slots, strict=True):
        want = expected_slot(case, views(source), start)
        assert slot.tobytes() == want
    assert first.num_tokens == 8
    assert kv.num_tokens == 16
    one = poisoned(case.layout)
    first.to_slots([0], [one])
    want = expected_slot(other, views(source), 0)
    assert one.tobytes() == want
    with pytest.raises(ValueError, match="is not in"):
        first.with_table([BLOCKS])


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_copy_right(threads: int) -> None:
    case = case_of([64, 32], [7, 3, 15, 0, 9, 2])
    check(case, threads)


@pytest.mark.parametrize(
    "table",
    [
        [-1, -1, 3, 4, 5, 6],
        [-1, 3, 4, 5, 6, 7],
        [3, 4, 5, -1],
        [3, -1, 5, -1, -1, 2],
        [-1, -1, -1, -1],
    ],
)
def test_what_is_minus_one_is_never_written_nor_stored(table: list[int]) -> None:
    case = case_of([64, 32], table)
    check(case)
    with pytest.raises(ValueError, match="block_table: a block that is -1"):
        slots = poisoned_slots(case.layout, len(case.starts))
        case.kv(PagesKV, case.planes(1)).to_slots(case.starts, slots)
    for slot in slots:
        assert (slot == 0xA5).all()


@pytest.mark.parametrize("apart", [0, 3])
@pytest.mark.parametrize("parts", [2, 3])
def test_each_part_touches_its_own_bytes_only(parts: int, apart: int) -> None:
    pages = [24, 8]
    for part in range(parts):
        case = case_of(
            pages, [7, 3, -1, 0, 2, 1], part=part, parts=parts, apart=apart
        )
        check(case)
    layout = layout_of(pages, 2, parts)
    slot = poisoned(layout)
    table = [7, 3]
    ranks = []
    for part in range(parts):
        rank = case_of(pages, table, part=part, parts=parts)
        ranks.append(rank)
    for seed, rank in enumerate(ranks):
        source = rank.planes(seed)
        kv = rank.kv(PagesKV, source)
        kv.to_slots([0], [slot])
    for seed, rank in enumerate(ranks):
        target = rank.planes(99)
        kv = rank.kv(PagesKV, target)
        kv.from_slots([0], [slot])
        for got, put in zip(target, rank.planes(seed), strict=True):
            assert (got.view[table] == put.view[table]).all()


@given(data=st.data())
def test_any_table_and_any_planes(data: st.DataObject) -> None:
    pages = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
    blocks = data.draw(st.permutations(range(BLOCKS)))
    count = data.draw(st.integers(0, BLOCKS))
    table = list(blocks[:count])
    skipped = data.draw(st.sets(st.integers(0, BLOCKS)))
    for place in skipped:
        if place < count:
            table[place] = -1
    parts = data.draw(st.integers(1, 3))
    case = case_of(
        pages,
        table,
        blocks_a_chunk=data.draw(st.integers(1, 4)),
        parts=parts,
        part=data.draw(st.integers(0, parts - 1)),
        apart=data.draw(st.sampled_from([0, 0, 1, 8])),
        slot_offset=data.draw(st.sampled_from([0, 1, 4])),
    )
    threads = data.draw(st.integers(1, 3))
    check(case, threads)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_torch_tensors_are_copied_right(dtype: torch.dtype) -> None:
    case = case_of([48, 16], [5, 1, 2, 11])
    planes = case.planes(1)
    tensors = [torch.from_numpy(plane.view).view(dtype) for plane in planes]
    slots = poisoned_slots(case.layout, len(case.starts))
    kv = PagesKV(
        tensors, case.layout, block_tokens=BLOCK_TOKENS, block_table=[5, 1, 2, 11]
    )
    kv.to_slots(case.starts, slots)
    for start, slot in zip(case.starts, slots, strict=True):
        want = expected_slot(case, views(planes), start)
        assert slot.tobytes() == want


# ---- merged


def _layers_in_a_block(
    layers: int, page: int, gap: int = 0
) -> tuple[np.ndarray, list[np.ndarray]]:
    draw = np.random.default_rng(0)
    shape = (BLOCKS, layers * page + gap)
    whole = draw.integers(0, 256, shape, dtype=np.uint8)
    planes = []
    for layer in range(layers):
        begin = layer * page
        planes.append(whole[:, begin : begin + page])
    return whole, planes


@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_layers_that_lie_in_one_block_become_one_plane(
    kind: str, gap: int
) -> None:
    whole, planes = _layers_in_a_block(4, 16, gap)
    given_: list[object] = list(planes)
    if kind == "tensor":
        tensor = torch.from_numpy(whole)
        given_ = [tensor[:, at : at + 16] for at in range(0, 64, 16)]
    wide = merged(given_)
    assert len(wide) == 1
    assert tuple(wide[0].shape) == (BLOCKS, 64)
    assert (np.asarray(wide[0]) == whole[:, :64]).all()
    table = [3, 4, 9, 2]
    layout = layout_of([64], 2)
    slots = [np.zeros(layout.slot_bytes, np.uint8) for _ in range(2)]
    kv = PagesKV(wide, layout, block_tokens=BLOCK_TOKENS, block_table=table)
    kv.to_slots([0, 8], slots)
    for slot, ids in zip(slots, (table[:2], table[2:]), strict=True):
        got = slot[: layout.chunk_bytes]
        want = whole[ids, :64]
        assert got.tobytes() == want.tobytes()
    before = whole.copy()
    kv = PagesKV(wide, layout, block_tokens=BLOCK_TOKENS, block_table=[0, 1])
    kv.from_slots([0], slots[:1])
    before[[0, 1], :64] = before[[3, 4], :64]
    assert (whole == before).all()


def widths(planes: Sequence[np.ndarray]) -> list[int]:
    return [plane.shape[1] for plane in planes]


def test_only_neighbours_are_merged() -> None:
    whole, planes = _layers_in_a_block(4, 16)
    with_a_gap = merged([planes[0], planes[1], planes[3]])
    assert widths(with_a_gap) == [32, 16]
    turned = merged([planes[1], planes[0]])
    assert widths(turned) == [16, 16]
    alone = np.zeros((2 * BLOCKS, 16), np.uint8)
    # one after the other is not side by side
    assert len(merged([alone[:BLOCKS], alone[BLOCKS:]])) == 2
    assert len(merged([whole[:1, :16], whole[:1, 16:32]])) == 2
    assert len(merged([planes[0][:4], planes[1][:5]])) == 2
    rows = np.zeros((4, 2 * 16), np.uint8)
    elsewhere = np.zeros((4, 16), np.uint8)
    assert len(merged([rows[:, :16], rows[:, 16:], elsewhere])) == 2


# ---- wrong use


def test_a_block_that_comes_twice_cannot_be_written() -> None:
    case = case_of([16], [3, 4, 3, 5])
    target = case.planes(0)
    kv = case.kv(PagesKV, target)
    before = bytes_of(target[0].whole)
    with pytest.raises(ValueError, match="names a block twice"):
        kv.from_slots([0, 8], case.filled_slots())
    assert bytes_of(target[0].whole) == before
    kv.from_slots([8], case.filled_slots()[:1])  # of these chunks no other has it
    with pytest.raises(ValueError, match="names a block twice"):
        kv.from_slots([0, 0], case.filled_slots())
    slots = poisoned_slots(case.layout, 2)
    kv.to_slots([0, 8], slots)  # reading a block twice is right
    assert slots[0][:16].tobytes() == slots[1][:16].tobytes()


def _pages(**changes: object) -> PagesKV:
    given_: dict[str, object] = {
        "planes": [np.zeros((BLOCKS, 16), np.uint8)],
        "layout": layout_of([16], 2),
        "block_tokens": BLOCK_TOKENS,
        "block_table": [1, 2, 3],
    }
    given_ |= changes
    return PagesKV(given_.pop("planes"), given_.pop("layout"), **given_)  # type: ignore[arg-type]


DENSE = KVLayout.dense(1, 1, 2, "int8", 8, token_order="tokens_first")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"block_tokens": 3},
            "chunk_tokens .8. must be a multiple of block_tokens .3.",
        ),
        ({"block_tokens": 0}, "multiple of block_tokens"),
        ({"part": 1}, "part must be one of the 1 parts, got 1"),
        ({"part": -1}, "part must be one of"),
        ({"parts": 2}, "opaque with chunk_bytes 64 "),
        ({"layout": layout_of([17], 2)}, "opaque with chunk_bytes 32 "),
        ({"layout": DENSE}, "got 32 with planes"),
        ({"planes": []}, "got no plane"),
        (
            {"planes": [np.zeros((4, 8), np.uint8), np.zeros((5, 8), np.uint8)]},
            r"same number of blocks, got \[4, 5\]",
        ),
        (
            {"planes": [np.zeros((4, 8), np.uint16)]},
            r"planes\[0\] must be \[num_blocks, page_bytes\]",
        ),
        ({"planes": [np.zeros((4, 2, 8), np.uint8)]}, r"planes\[0\] must be"),
        ({"planes": [np.zeros((0, 8), np.uint8)]}, r"planes\[0\] must be"),
        (
            {"planes": [np.zeros((16, 4), np.uint8).T]},
            r"planes\[0\]: pages must be contiguous",
        ),
        (
            {"planes": [np.broadcast_to(np.zeros(16, np.uint8), (4, 16))]},
            r"planes\[0\]: pages",
        ),
        ({"planes": [[1]]}, r"planes\[0\] must be a tensor or a numpy array"),
        ({"block_table": [1, BLOCKS]}, rf"block_table: {BLOCKS} is not in"),
        ({"block_table": [-2, 1]}, "block_table: -2 is not in"),
        ({"block_table": [[1]]}, "block_table must be 1-D integers"),
        ({"block_table": [0.5]}, "block_table must be 1-D integers"),
    ],
)
def test_what_does_not_fit_is_named(
    changes: dict[str, object], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        _pages(**changes)


@pytest.mark.parametrize(
    ("starts", "slots", "says"),
    [
        ([2], 1, "starts must be multiples of block_tokens"),
        ([8], 1, r"starts: the chunk \[8, 16\) is not in the 12 tokens"),
        ([-4], 1, "starts: the chunk"),
        ([0, 4], 1, "of one length"),
    ],
)
def test_starts_and_slots_that_do_not_fit(
    starts: Sequence[int], slots: int, says: str
) -> None:
    buffers = [np.zeros(4096, np.uint8) for _ in range(slots)]
    for way in ("to_slots", "from_slots"):
        call = getattr(_pages(), way)
        with pytest.raises(ValueError, match=says):
            call(starts, buffers)


def test_a_slot_that_is_too_short_is_refused() -> None:
    kv = _pages()
    short = np.zeros(31, np.uint8)
    with pytest.raises(
        ValueError, match="slots: one has 31 bytes, a chunk needs 32"
    ):
        kv.to_slots([0], [short])


def test_what_it_says_of_itself() -> None:
    kv = _pages()
    assert kv.num_tokens == 12
    assert kv.run_bytes == 16
    assert kv.layout == layout_of([16], 2)
    (plane,) = make_planes([16], 0)
    assert plane.view.shape == (BLOCKS, 16)


@pytest.mark.parametrize(
    "order",
    [
        [0, 1, 2, 3],
        [5, 4, 3, 2],
        [0, 2, 4, 6],
        [4, 0, 2, 6],
        [0, 1, 4, 5],
        [3, 2, 5, 6],
    ],
)
@pytest.mark.parametrize("blocks_a_chunk", [1, 2])
@pytest.mark.parametrize(
    "table",
    [
        [4, 5, 6, 7, 8, 9, 10, 11],
        [11, 2, 9, 4, 3, 8, 0, 7],
        [4, 5, -1, 7, 8, 9, 10, 11],
        [8, 9, 4, 5, 6, 7, 0, 1],
    ],
)
@pytest.mark.parametrize("pages", [[64, 24], [7, 16]])
def test_slots_of_one_slab(
    pages: list[int], table: list[int], blocks_a_chunk: int, order: list[int]
) -> None:
    """Slots at even distances, up or down, are copied together; not one byte between them
    changes.
    """
    case = case_of(pages, table, blocks_a_chunk=blocks_a_chunk)
    whole = [start for start in case.starts[::-1] if -1 not in case.ids(start)]
    starts = whole[: len(order)]
    order = order[: len(starts)]
    source = case.planes(seed=1)
    slab = np.full((8, case.layout.slot_bytes), POISON, np.uint8)
    slots = [slab[number] for number in order]
    kv = case.kv(PagesKV, source)
    kv.to_slots(starts, slots)
    want = np.full_like(slab, POISON)
    for start, number in zip(starts, order, strict=True):
        slot = expected_slot(case, views(source), start)
        want[number] = np.frombuffer(slot, np.uint8)
    assert slab.tobytes() == want.tobytes()

    draw = np.random.default_rng(7)
    filled = draw.integers(0, 256, slab.shape, dtype=np.uint8)
    together = case.planes(seed=2)
    apart = case.planes(seed=2)
    slots = [filled[number] for number in order]
    kv = case.kv(PagesKV, together)
    kv.from_slots(starts, slots)
    kv = case.kv(PagesKV, apart)
    for start, number in zip(starts, order, strict=True):
        slot = filled[number].copy()
        kv.from_slots([start], [slot])
    assert memory_of(together) == memory_of(apart)


def test_a_plane_whose_memory_was_given_back_is_refused() -> None:
    plane = torch.zeros((BLOCKS, 16), dtype=torch.uint8)
    plane.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"planes\[0\] has no memory any more"):
        _pages(planes=[plane])
    with pytest.raises(ValueError, match=r"planes\[0\] has no memory any more"):
        merged([plane])
